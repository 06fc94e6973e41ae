"""Attention maps compared with the papers' formulas, literal numbers and symmetries."""

import copy
import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from models import PLAIN
from vit.explain.maps import MAP_KINDS, attention_maps, readout_of
from vit.explain.rollout import (
    attention_rollout,
    class_relevance,
    fuse_heads,
    gradient_rollout,
    head_maps,
    raw_attention,
)
from vit.model.vit import VisionTransformer
from vit.registry import ALL_KINDS

CASES = [("mean", 0), ("mean", 1), ("mean", 5), ("class_token", 1), ("class_token", 5)]
with_cases = pytest.mark.parametrize(("readout", "prefix"), CASES)


def draw_weights(layers: int, batch: int, heads: int, tokens: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(
        2 * torch.randn(layers, batch, heads, tokens, tokens, generator=generator), dim=-1
    )


def draw_gradients(weights: Tensor, seed: int = 1) -> Tensor:
    return torch.randn(weights.shape, generator=torch.Generator().manual_seed(seed))


ROLLOUTS = {
    "rollout": {},
    "largest": {"head_fusion": "max", "discard_ratio": 0.3},
    "least": {"head_fusion": "min", "discard_ratio": 0.9},
    "later layers": {"start_layer": 1},
}
OTHERS = ("gradient_rollout", "relevance", "raw")
BY_RULES = ("lrp", "lrp_rollout", "lrp_pixels")  # see test_lrp.py


def make_maps(variant: str, weights, gradients, readout: str, prefix: int) -> Tensor:
    how = {"readout": readout, "num_prefix_tokens": prefix}
    if variant == "gradient_rollout":
        return gradient_rollout(weights, gradients, **how)
    if variant == "relevance":
        return class_relevance(weights, gradients, **how)
    if variant == "raw":
        return raw_attention(weights, **how)
    return attention_rollout(weights, **how, **ROLLOUTS[variant])


# The papers' formulas for one image, in float64 and as products of whole matrices: weights and
# gradients are (L, H, N, N), what comes out is (N, N).


def paper_row_stochastic(matrix: np.ndarray) -> np.ndarray:
    rows = []
    for number, row in enumerate(matrix):
        alone = np.eye(len(matrix))[number]
        rows.append(row / row.sum() if row.sum() > 0 else alone)
    return np.stack(rows)


def paper_fused(layer: np.ndarray, prefix: int, fusion: str, ratio: float) -> np.ndarray:
    fused = {"mean": np.mean, "max": np.max, "min": np.min}[fusion](layer, axis=0)
    to_patches = sorted(fused[:, prefix:].flatten())
    lowest_kept = to_patches[round(10 * ratio) * len(to_patches) // 10]
    for query, key in np.ndindex(fused.shape):
        if key >= prefix and fused[query, key] < lowest_kept:
            fused[query, key] = 0
    return paper_row_stochastic(fused)


def paper_chain(matrices: list[np.ndarray]) -> np.ndarray:
    """Multiply 0.5 A + 0.5 I, later layers to the left (arXiv 2005.00928)."""
    result = np.eye(len(matrices[0]))
    for matrix in matrices:
        result = (0.5 * matrix + 0.5 * np.eye(len(matrix))) @ result
    return result


def paper_class_attention(weights: np.ndarray, gradients: np.ndarray) -> list[np.ndarray]:
    """Take E_h((∇A ⊙ A)⁺) of every layer (arXiv 2103.15679, eq. 5)."""
    return [
        sum(np.maximum(g * a, 0) for g, a in zip(slopes, layer, strict=True)) / len(layer)
        for slopes, layer in zip(gradients, weights, strict=True)
    ]


def paper_relevance(weights: np.ndarray, gradients: np.ndarray) -> np.ndarray:
    """Add up R ← R + Ā R from the identity (arXiv 2103.15679, eq. 6), and take the identity off."""
    identity = np.eye(weights.shape[-1])
    relevance = identity
    for layer in paper_class_attention(weights, gradients):
        relevance = relevance + layer @ relevance
    return relevance - identity


def read_out(matrix: np.ndarray, readout: str, prefix: int) -> np.ndarray:
    row = matrix[0] if readout == "class_token" else matrix[prefix:].mean(0)
    return row[prefix:]


def paper_map(variant: str, weights, gradients, readout: str, prefix: int) -> np.ndarray:
    weights, gradients = np.float64(weights), np.float64(gradients)
    if variant == "gradient_rollout":
        support = paper_class_attention(weights, gradients)
        matrix = paper_chain([paper_row_stochastic(layer) for layer in support])
    elif variant == "relevance":
        matrix = paper_relevance(weights, gradients)
    elif variant == "raw":
        matrix = weights[-1].mean(0)
    else:
        options = {"head_fusion": "mean", "discard_ratio": 0.0, "start_layer": 0}
        fusion, ratio, start = (options | ROLLOUTS[variant]).values()
        matrix = paper_chain(
            [paper_fused(layer, prefix, fusion, ratio) for layer in weights[start:]]
        )
    return read_out(matrix, readout, prefix)


@with_cases
def test_maps_are_the_papers_formulas(readout, prefix):
    weights = draw_weights(4, 3, 4, prefix + 9)
    gradients = draw_gradients(weights)
    for variant in (*ROLLOUTS, *OTHERS):
        maps = make_maps(variant, weights, gradients, readout, prefix)
        assert maps.shape == (3, 9) and maps.dtype == torch.float32
        expected = [
            paper_map(variant, weights[:, b], gradients[:, b], readout, prefix) for b in range(3)
        ]
        np.testing.assert_allclose(maps, np.stack(expected), rtol=0, atol=1e-5, err_msg=variant)
    assert torch.equal(weights, draw_weights(4, 3, 4, prefix + 9))  # they stay as they are
    assert torch.equal(gradients, draw_gradients(weights))


@with_cases
def test_head_maps_are_the_rows_that_are_read(readout, prefix):
    weights = draw_weights(3, 2, 4, prefix + 6)
    maps = head_maps(weights, readout=readout, num_prefix_tokens=prefix)
    assert maps.shape == (3, 2, 4, 6) and maps.dtype == torch.float32
    for place in np.ndindex(3, 2, 4):
        expected = read_out(np.float64(weights[place]), readout, prefix)
        np.testing.assert_allclose(maps[place].numpy(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"head_fusion": "sum"}, "head_fusion: 'sum' is not mean, max or min"),
        ({"discard_ratio": 1.0}, "discard_ratio: 1.0 is not at least 0 and less than 1"),
        ({"discard_ratio": float("nan")}, "discard_ratio: nan is not at least 0 and less than 1"),
        ({"start_layer": -1}, "start_layer: -1 is not a layer of this model; it must be 0 to 2"),
    ],
)
def test_options_out_of_range_are_refused(wrong, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        attention_rollout(draw_weights(3, 1, 1, 4), readout="mean", num_prefix_tokens=1, **wrong)
    with pytest.raises(ValueError, match=f"^{message}$"):
        attention_maps(draw_vit(MODELS["mean"]), draw_images(), ["rollout"], **wrong)


# Of the heads of a layer, one matrix.

# In sixteenths: what is paid to one prefix token and two patches.
SHARES = [[1, 12, 3], [8, 4, 4], [0, 12, 4]]


@pytest.mark.parametrize(
    ("ratio", "prefix", "expected"),
    [
        # Three of six, but the second to the fourth are equal and stay together.
        (0.5, 1, [[1 / 13, 12 / 13, 0], [1 / 2, 1 / 4, 1 / 4], [0, 3 / 4, 1 / 4]]),
        # Four of six: they go together. The prefix token keeps its weights, be they the least.
        (0.7, 1, [[1 / 13, 12 / 13, 0], [1, 0, 0], [0, 1, 0]]),
        # Without prefix tokens, the second row loses everything and stays with itself.
        (0.8, 0, [[0, 1, 0], [0, 1, 0], [0, 1, 0]]),
    ],
)
def test_discarding_by_hand(ratio, prefix, expected):
    fused = fuse_heads(torch.tensor(SHARES)[None, None] / 16, prefix, "mean", ratio)
    assert fused.shape == (1, 3, 3)
    torch.testing.assert_close(fused[0], torch.tensor(expected).float(), rtol=0, atol=1e-6)


# Of a model.

MODELS = {
    "class token and registers": {"reg_tokens": 4},
    "mean": {"class_token": False, "global_pool": "avg"},
    "mean beside class token": {"global_pool": "avg"},
}
MIXED = MODELS["mean beside class token"]


def draw_vit(variant: dict, std: float = 0.5) -> VisionTransformer:
    torch.manual_seed(0)
    sizes = {"img_size": 16, "embed_dim": 12, "depth": 3, "num_classes": 5}
    vit = VisionTransformer(**(PLAIN | sizes | variant))
    for parameter in vit.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return vit.eval()


def draw_images() -> Tensor:
    return torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def test_rollout_of_a_model_takes_options():
    vit, images = draw_vit(MODELS["class token and registers"]), draw_images()
    options = {"start_layer": 1, "head_fusion": "max", "discard_ratio": 0.3}
    _, found = attention_maps(vit, images, tuple(MAP_KINDS), **options)
    _, weights = vit(images, need_weights=True)
    layout = {"readout": readout_of(vit), "num_prefix_tokens": vit.num_prefix_tokens}
    fractions = attention_rollout(weights.detach(), **layout, **options)
    expected = fractions.reshape(3, 4, 4) * (16 + vit.num_prefix_tokens)
    torch.testing.assert_close(found["rollout"], expected, rtol=0, atol=1e-5)
    _, plain = attention_maps(vit, images, tuple(MAP_KINDS))
    for kind in MAP_KINDS:
        assert torch.equal(found[kind], plain[kind]) == (kind != "rollout")


@pytest.mark.parametrize("variant", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(
    ("size", "extra"), [((16, 16), {}), ((12, 20), {"stem": "conv", "mlp_conv": True})]
)
def test_maps_of_a_model_are_the_papers_formulas_on_the_grid_of_the_image(variant, size, extra):
    vit = draw_vit(variant | extra)
    rows, columns = size[0] // 4, size[1] // 4
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
    target = torch.tensor([1, 3])
    logits, found = attention_maps(vit, images, tuple(MAP_KINDS), target)
    torch.testing.assert_close(logits, vit(images).detach(), rtol=1e-5, atol=1e-5)
    prefix = vit.num_prefix_tokens
    for kind in BY_RULES:
        assert found.pop(kind).shape == (2, *(size if kind == "lrp_pixels" else (rows, columns)))
    assert {maps.shape for maps in found.values()} == {(2, rows, columns)}
    for kind, maps in found.items():
        for number in range(2):
            weights, gradients = differentiate_one(vit, images[number], target[number].item())
            fractions = paper_map(kind, weights, gradients, readout_of(vit), prefix)
            count = rows * columns
            whole = count / fractions.sum() if kind == "relevance" else count + prefix
            expected = fractions.reshape(rows, columns) * whole
            np.testing.assert_allclose(maps[number].numpy(), expected, rtol=1e-3, atol=1e-3)


# Of a model and a class.


def differentiate_one(vit: VisionTransformer, image: Tensor, target: int):
    """Weights of one image, and the gradients of a logit by them: (L, H, N, N) float64 each."""
    vit = copy.deepcopy(vit).double()
    logits, weights, _ = vit.forward_intermediates(image[None].double())
    gradients = [torch.autograd.grad(logits[0, target], w, retain_graph=True)[0] for w in weights]
    return [torch.stack([layer[0].detach() for layer in each]) for each in (weights, gradients)]


def test_all_kinds_of_map_of_a_batch_are_those_of_its_images():
    vit, images = draw_vit(MIXED), draw_images()
    for target in (None, torch.tensor([2, 0, 4])):
        logits, found = attention_maps(vit, images, tuple(MAP_KINDS), target)
        for number in range(3):
            chosen = target if target is None else target[number : number + 1]
            one, alone = attention_maps(vit, images[number : number + 1], tuple(MAP_KINDS), chosen)
            torch.testing.assert_close(one[0], logits[number], rtol=0, atol=1e-5)
            for kind, maps in found.items():
                torch.testing.assert_close(alone[kind][0], maps[number], rtol=0, atol=1e-4)


def test_the_predicted_class_is_explained_unless_another_is_chosen():
    vit, images = draw_vit(MIXED), draw_images()
    logits, predicted = attention_maps(vit, images, tuple(MAP_KINDS))
    best = logits.argmax(1)
    for target, same in ((best, True), ((best + 1) % 5, False)):
        chosen = attention_maps(vit, images, tuple(MAP_KINDS), target)[1]
        for kind, maps in chosen.items():
            difference = (maps - predicted[kind]).abs().amax((1, 2))
            unchanged = same or not MAP_KINDS[kind].class_specific
            assert (difference == 0).all() if unchanged else (difference > 0.05).all()


def test_a_kind_alone_is_the_same_and_leaves_the_model_as_it_was():
    vit, images = draw_vit(MIXED), draw_images()
    before = copy.deepcopy(vit.state_dict())
    expected = attention_maps(vit, images, tuple(MAP_KINDS))[1]
    for free, on, kind in itertools.product((True, False), (True, False), MAP_KINDS):
        vit.requires_grad_(free)
        with torch.set_grad_enabled(on):
            logits, found = attention_maps(vit, images, [kind])
            assert torch.is_grad_enabled() == on
        assert list(found) == [kind] and not (logits.requires_grad or found[kind].requires_grad)
        torch.testing.assert_close(found[kind], expected[kind], rtol=0, atol=1e-5)
        assert all(p.grad is None and p.requires_grad == free for p in vit.parameters())
    assert not images.requires_grad and torch.equal(images, draw_images())
    assert all(torch.equal(values, before[name]) for name, values in vit.state_dict().items())
    with pytest.raises(ValueError, match=f"^kinds: 'lime' is not one of {', '.join(ALL_KINDS)}$"):
        attention_maps(vit, images, ["rollout", "lime"])


def test_maps_in_bfloat16_are_close_to_those_in_float32():
    vit, images, target = draw_vit({}, std=0.2), draw_images(), torch.tensor([2, 0, 4])
    exact_logits, exact = attention_maps(vit, images, tuple(MAP_KINDS), target)
    logits, found = attention_maps(vit, images, tuple(MAP_KINDS), target, torch.bfloat16)
    assert logits.dtype == torch.float32 and not torch.equal(logits, exact_logits)
    torch.testing.assert_close(logits, exact_logits, rtol=0, atol=0.02)
    for kind, maps in found.items():
        assert maps.dtype == torch.float32 and not torch.equal(maps, exact[kind])
        assert (maps - exact[kind]).abs().max() < 0.3 * exact[kind].std()
