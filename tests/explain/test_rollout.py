"""Attention maps and statistics compared with the papers' formulas, loops and each other."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist
from scipy.stats import entropy
from torch import Tensor
from torch.testing import assert_close

from models import PLAIN, randomize
from vit.explain import statistics
from vit.explain.kinds import ALL_KINDS, RolloutOptions
from vit.explain.maps import MAP_KINDS, attention_maps, layout_of
from vit.explain.rollout import (
    attention_gradients,
    attention_rollout,
    class_relevance,
    gradient_rollout,
    head_maps,
    raw_attention,
)
from vit.model.vit import VisionTransformer
from vit.tensorboard_plugin.records import Statistics

ROLLOUTS = {
    "rollout": {},
    "largest": {"head_fusion": "max", "discard_ratio": 0.3, "start_layer": 1},
    "least": {"head_fusion": "min", "discard_ratio": 0.9},
}
OTHERS = {
    "gradient_rollout": gradient_rollout,
    "relevance": class_relevance,
    "raw": lambda weights, gradients, **how: raw_attention(weights, **how),
}
BY_RULES = ("lrp", "lrp_rollout", "lrp_pixels")  # see test_lrp.py


# The papers' formulas for one image, in float64 and as products of whole matrices: weights and
# gradients are (L, H, N, N), what comes out is (N, N).


def paper_row_stochastic(matrix: np.ndarray) -> np.ndarray:
    total = matrix.sum(axis=1, keepdims=True)
    return np.where(total > 0, matrix / np.where(total > 0, total, 1), np.eye(len(matrix)))


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
    relevance = np.eye(weights.shape[-1])
    for layer in paper_class_attention(weights, gradients):
        relevance = relevance + layer @ relevance
    return relevance - np.eye(weights.shape[-1])


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


@pytest.mark.parametrize(
    ("readout", "prefix"), [("mean", 0), ("mean", 5), ("class_token", 1), ("class_token", 5)]
)
def test_maps_are_the_papers_formulas(readout, prefix):
    weights = torch.randn(4, 3, 4, prefix + 9, prefix + 9).mul(2).softmax(dim=-1)
    weights = weights.mul(16).round() / 16  # equal weights, and rows of zeros
    gradients, how = torch.randn_like(weights), {"readout": readout, "num_prefix_tokens": prefix}
    before = weights.clone()
    for variant in (*ROLLOUTS, *OTHERS):
        if variant in ROLLOUTS:
            maps = attention_rollout(weights, **how, **ROLLOUTS[variant])
        else:
            maps = OTHERS[variant](weights, gradients, **how)
        assert maps.shape == (3, 9) and maps.dtype == torch.float32
        expected = [
            paper_map(variant, weights[:, b], gradients[:, b], readout, prefix) for b in range(3)
        ]
        np.testing.assert_allclose(maps, np.stack(expected), rtol=0, atol=1e-5, err_msg=variant)
    maps = head_maps(weights, **how)
    for place in np.ndindex(4, 3, 4):
        expected = read_out(np.float64(weights[place]), readout, prefix)
        np.testing.assert_allclose(maps[place].numpy(), expected, rtol=0, atol=1e-6)
    assert torch.equal(weights, before)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"head_fusion": "sum"}, "head_fusion: sum .* mean, max or min"),
        ({"discard_ratio": 1.0}, "discard_ratio: 1.0 .* at least 0 and less than 1"),
        ({"start_layer": -1}, "start_layer: -1 .* a layer of this model, 0 to 2"),
        ({"readout": "max"}, "readout: max .* class_token or mean"),
        ({"num_prefix_tokens": 0}, "num_prefix_tokens: 0 .* at least 1 with class_token"),
    ],
)
def test_options_out_of_range_are_refused(wrong, message):
    given = {"readout": "class_token", "num_prefix_tokens": 1} | wrong
    with pytest.raises(ValueError, match=f"^{message}$"):
        attention_rollout(torch.ones(3, 1, 1, 4, 4), **given)


MODELS = {
    "class token and registers": {"reg_tokens": 4},
    "mean": {"class_token": False, "global_pool": "avg"},
    "mean beside class token": {"global_pool": "avg"},
}
MIXED = MODELS["mean beside class token"]


def draw_vit(variant: dict, std: float = 0.5) -> VisionTransformer:
    sizes = {"img_size": 16, "embed_dim": 12, "depth": 3, "num_classes": 5}
    return randomize(VisionTransformer(**(PLAIN | sizes | variant)), std)


def draw_images(count: int = 3, size: tuple[int, int] = (16, 16)) -> Tensor:
    return torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(0))


def differentiate_one(vit: VisionTransformer, image: Tensor, target: int):
    """Weights of one image, and the gradients of a logit by them: (L, H, N, N) float64 each."""
    vit = copy.deepcopy(vit).double()
    logits, weights, _ = vit.forward_intermediates(image[None].double())
    gradients = torch.autograd.grad(logits[0, target], weights)
    return [torch.cat(list(each)).detach() for each in (weights, gradients)]


@pytest.mark.parametrize("variant", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(
    ("size", "extra"), [((16, 16), {}), ((12, 20), {"stem": "conv", "mlp_conv": True})]
)
def test_maps_of_a_model_are_the_papers_formulas_on_the_grid_of_the_image(variant, size, extra):
    vit, images, target = draw_vit(variant | extra), draw_images(2, size), torch.tensor([1, 3])
    rows, columns = size[0] // 4, size[1] // 4
    logits, found = attention_maps(
        vit, images, tuple(MAP_KINDS), target, rollout=RolloutOptions(**ROLLOUTS["largest"])
    )
    assert_close(logits, vit(images).detach(), rtol=1e-5, atol=1e-5)
    found["largest"] = found.pop("rollout")
    prefix = vit.num_prefix_tokens
    for kind in BY_RULES:
        assert found.pop(kind).shape == (2, *(size if kind == "lrp_pixels" else (rows, columns)))
    for (kind, maps), number in itertools.product(found.items(), range(2)):
        weights, gradients = differentiate_one(vit, images[number], target[number].item())
        fractions = paper_map(kind, weights, gradients, layout_of(vit, 8, 8).readout, prefix)
        count = rows * columns
        whole = count / fractions.sum() if kind == "relevance" else count + prefix
        expected = fractions.reshape(rows, columns) * whole
        np.testing.assert_allclose(maps[number].numpy(), expected, rtol=1e-3, atol=1e-3)


def test_maps_of_a_batch_are_those_of_its_images_for_the_predicted_class_or_another():
    vit, images = draw_vit(MIXED), draw_images()
    logits, predicted = attention_maps(vit, images, tuple(MAP_KINDS))
    best = logits.argmax(1)
    for target, same in ((best, True), ((best + 1) % 5, False)):
        chosen = attention_maps(vit, images, tuple(MAP_KINDS), target)[1]
        for kind, maps in chosen.items():
            difference = (maps - predicted[kind]).abs().amax((1, 2))
            unchanged = same or not MAP_KINDS[kind].class_specific
            assert (difference == 0).all() if unchanged else (difference > 0.05).all()
        for number in range(3):
            part = slice(number, number + 1)
            one, alone = attention_maps(vit, images[part], tuple(MAP_KINDS), target[part])
            assert_close(one, logits[part], rtol=0, atol=1e-5)
            for kind, maps in chosen.items():
                assert_close(alone[kind], maps[part], rtol=0, atol=1e-4)


def test_a_kind_alone_is_the_same_and_near_in_bfloat16_and_leaves_the_model_as_it_was():
    vit, images = draw_vit(MIXED, std=0.2), draw_images()
    before = copy.deepcopy(vit.state_dict())
    logits, expected = attention_maps(vit, images, tuple(MAP_KINDS))
    found = attention_maps(vit, images, tuple(MAP_KINDS), logits.argmax(1), torch.bfloat16)[1]
    for kind, maps in found.items():
        assert maps.dtype == torch.float32
        assert 0 < (maps - expected[kind]).abs().max() < 0.3 * expected[kind].std()
    for free, on, kind in itertools.product((True, False), (True, False), MAP_KINDS):
        vit.requires_grad_(free)
        with torch.set_grad_enabled(on):
            logits, found = attention_maps(vit, images, [kind])
            assert torch.is_grad_enabled() == on
        assert list(found) == [kind] and not (logits.requires_grad or found[kind].requires_grad)
        assert_close(found[kind], expected[kind], rtol=0, atol=1e-5)
        assert all(p.grad is None and p.requires_grad == free for p in vit.parameters())
    assert not images.requires_grad and torch.equal(images, draw_images())
    assert all(torch.equal(values, before[name]) for name, values in vit.state_dict().items())
    with pytest.raises(ValueError, match=f"^kinds: 'lime' is not one of {', '.join(ALL_KINDS)}$"):
        attention_maps(vit, images, ["rollout", "lime"])


def draw_weights(layers: int, batch: int, heads: int, tokens: int) -> list[Tensor]:
    return list((2 * torch.randn(layers, batch, heads, tokens, tokens)).softmax(dim=-1))


def by_loops(measure, weights: list[Tensor]) -> np.ndarray:
    """Apply a measure of one head's float64 (N, N) to each image; mean over images, (L, H)."""
    return np.array([
        [np.mean([measure(image[head]) for image in layer]) for head in range(layer.shape[1])]
        for layer in (layer.double().numpy() for layer in weights)
    ])  # fmt: skip


def check(found: Tensor, expected: np.ndarray) -> None:
    assert found.dtype == torch.float32 and found.shape == expected.shape
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_entropy_and_sink_mass_are_those_of_a_loop():
    weights = draw_weights(3, 4, 2, 7)
    expected = by_loops(lambda rows: entropy(rows, axis=1).mean() / math.log(7), weights)
    check(statistics.attention_entropy(weights), expected)
    check(statistics.sink_mass(weights), by_loops(lambda rows: max(rows.mean(axis=0)), weights))
    assert statistics.attention_entropy([torch.ones(1, 1, 1, 1)]).item() == 0


@pytest.mark.parametrize(("grid", "patch_size", "prefix"), [((1, 2), 4, 0), ((5, 2), 7, 5)])
def test_distance_is_that_of_a_loop(grid, patch_size, prefix):
    weights = draw_weights(2, 3, 2, prefix + grid[0] * grid[1])
    apart = cdist(*2 * [patch_size * np.argwhere(np.ones(grid))])
    expected = by_loops(
        lambda rows: np.average(apart, axis=1, weights=rows[prefix:, prefix:]).mean(), weights
    )
    check(statistics.attention_distance(weights, grid, patch_size, prefix), expected)


@pytest.mark.parametrize(("grid", "prefix"), [((1, 2), 0), ((3, 5), 2)])
def test_attention_by_offset_is_that_of_a_loop(grid, prefix):
    weights = draw_weights(2, 3, 2, prefix + grid[0] * grid[1])
    found = statistics.attention_by_offset(weights, grid, prefix)
    rows, columns = grid
    expected = np.empty((2, 2, 2 * rows - 1, 2 * columns - 1))
    for layer, head, down, across in np.ndindex(expected.shape):
        values = [
            weights[layer][:, head, prefix + row * columns + column, prefix + key].mean().item()
            for row, column in np.ndindex(grid)
            if 0 <= (to_row := row + down - rows + 1) < rows
            and 0 <= (to_column := column + across - columns + 1) < columns
            for key in [to_row * columns + to_column]
        ]
        expected[layer, head, down, across] = np.mean(values)
    check(found, expected)


@pytest.mark.parametrize("scale", [0, 1e-44, 1e-20, 1.005 / 64, 1, 70, 3e38])
def test_any_finite_weights_have_statistics_that_are_recorded(scale):
    """As fractions of their rows, whatever the rows of an edited attention sum to."""
    drawn = torch.stack([torch.ones(64, 64), torch.rand(64, 64), 2 * torch.rand(64, 64) - 1])
    layers = [scale * drawn[None], scale * drawn[None].mT]
    found = {
        "entropy": statistics.attention_entropy(layers),
        "distance": statistics.attention_distance(layers, (8, 8), 4, 0),
        "sink": statistics.sink_mass(layers),
    }
    Statistics(**{name: values.tolist() for name, values in found.items()})
    if scale > 1e-30:
        rows = [layer.double().clamp(min=0) for layer in layers]
        exact = [(row / row.sum(dim=-1, keepdim=True)).float() for row in rows]
        assert_close(found["entropy"], statistics.attention_entropy(exact), rtol=0, atol=1e-6)
        assert_close(found["sink"], statistics.sink_mass(exact), rtol=0, atol=1e-6)


def test_largest_norm_is_that_of_numpy():
    tokens = torch.randn(3, 4, 12, 8, generator=torch.Generator().manual_seed(0))
    norms = np.linalg.norm(tokens[:, :, 5:].double(), axis=-1)
    check(statistics.largest_patch_norm(list(tokens), 5), norms.max(axis=-1).mean(axis=-1))


def test_gradients_of_what_the_logits_do_not_depend_on_are_refused():
    sizes = {"img_size": 8, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_classes": 5}
    model = VisionTransformer(**PLAIN | sizes)
    images, target = torch.randn(2, 3, 8, 8), torch.tensor([1, 2])
    logits, stacked = model(images, need_weights=True)
    with pytest.raises(ValueError, match=r"^weights: the logits do not depend on these tensors"):
        attention_gradients(logits, stacked, target)
    logits, weights, _ = model.forward_intermediates(images)
    assert all(layer.abs().sum() > 0 for layer in attention_gradients(logits, weights, target))


def test_undefined_weights_have_an_undefined_rollout():
    weights = torch.full((2, 1, 1, 4, 4), torch.nan)
    assert attention_rollout(weights, readout="mean", num_prefix_tokens=0).isnan().all()
