"""FLOP of a step, against a count by hand."""

import pytest

from small_runs import make_step, small


def by_hand(side: int, products: int = 3) -> float:
    """Count those of 64 images, patch 4, width 48, depth 2, MLP ratio 2 and 10 classes."""
    patches, width = (side // 4) ** 2, 48
    tokens = patches + 1
    block = 2 * tokens * width * (3 * width + width + 2 * 2 * width) + 2 * 2 * tokens**2 * width
    embedding, head = 2 * patches * 4 * 4 * 3 * width, 2 * width * 10
    return products * 64 * (embedding + 2 * block + head)


@pytest.mark.parametrize(
    ("train", "products"), [({}, 3), ({"freeze": "backbone", "small_share": 0.5}, 1)]
)
def test_flop_of_a_step_by_image_size(train, products, tmp_path):
    """Those of the forward pass count three times, and once if only the head is trained."""
    config = small(
        tmp_path,
        model={
            "embed_dim": 48, "depth": 2, "num_heads": 3, "mlp_ratio": 2.0, "stem": "linear",
            "mlp_conv": False, "reg_tokens": 0,
        },
        train={"small_scale": 0.75, **train},
    )  # fmt: skip
    step = make_step(config)
    assert step.flop == {(s, s): by_hand(s, products) for s in (24, 32)}
