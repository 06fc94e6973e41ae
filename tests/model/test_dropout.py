"""Dropout by keys: the same for parts of a batch, and as random as torch's."""

from itertools import combinations

import pytest
import torch
from torch.testing import assert_close

from models import draw, randomize
from vit.model.dropout import (
    Dropout,
    StochasticDepth,
    derive,
    image_keys,
    keep_mask,
    keyed_dropout,
    scramble,
)
from vit.model.vit import VisionTransformer

# The hash.


def test_scramble_is_the_documented_function_of_unsigned_numbers():
    numbers = [0, 1, 2, 2**31 - 1, 2**31, 2**32 - 1, 123456789, 0xDEADBEEF]
    expected = []
    for x in numbers:
        x ^= x >> 16
        x = x * 0x604BAA5D % 2**32
        x ^= x >> 15
        x = x * 0x43D6CE97 % 2**32
        expected.append(x ^ (x >> 15))
    found = scramble(torch.tensor(numbers).to(torch.int32))
    assert [number % 2**32 for number in found.tolist()] == expected


def test_images_of_a_batch_and_layers_of_an_image_have_different_keys():
    keys = image_keys(2**32 - 5, 0, 4096)
    assert keys.dtype == torch.int32 and len(keys.unique()) == 4096
    layers = derive(keys[:1], torch.arange(1000, dtype=torch.int32))
    assert len(layers.unique()) == 1000
    assert torch.equal(image_keys(2**32 - 5, 1000, 64), keys[1000:1064])


# Masks.


@pytest.mark.parametrize("rate", [0.001, 0.5])
def test_masks_keep_the_right_fraction_of_every_image_and_element(rate):
    kept = keep_mask(image_keys(0, 0, 400), (20, 50), rate).double()
    assert kept.shape == (400, 20, 50)
    deviation = (rate * (1 - rate)) ** 0.5
    assert abs(kept.mean() - (1 - rate)) < 5 * deviation / kept.numel() ** 0.5
    images = (kept.mean((1, 2)) - (1 - rate)) / (deviation / 1000**0.5)
    elements = (kept.mean(0) - (1 - rate)) / (deviation / 400**0.5)
    for normal in (images, elements):  # as far apart as binomial counts are, not more nor less
        assert normal.std().item() == pytest.approx(1, abs=5 / (2 * normal.numel()) ** 0.5)


def test_masks_of_neighbours_layers_steps_and_seeds_are_independent():
    """Also those of an image in a layer and of the next image in the next layer."""
    numbers = torch.arange(3, dtype=torch.int32)[:, None]
    masks = {
        (seed, layer, image): mask.flatten()
        for seed in (0, 1, 2**31)
        for layer, keys in enumerate(derive(image_keys(seed, 7, 5), numbers))
        for image, mask in enumerate(keep_mask(keys, (200, 500), 0.5))
    }
    assert len(masks) == 45
    for (one, mask), (other, other_mask) in combinations(masks.items(), 2):
        same = (mask == other_mask).float().mean().item()
        assert same == pytest.approx(0.5, abs=6 * 0.5 / 100_000**0.5), (one, other)
    for mask in masks.values():  # neighbours in an image, also in the next row
        for distance in (1, 2, 3, 499, 500, 501):
            same = (mask[distance:] == mask[:-distance]).float().mean().item()
            assert same == pytest.approx(0.5, abs=6 * 0.5 / 99_000**0.5), distance


# Modules.


@pytest.mark.parametrize("kind", [Dropout, StochasticDepth])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_numbers_or_whole_images_are_dropped_in_the_dtype_of_the_input(kind, dtype):
    module, x = kind(0.25), torch.randn(2000, 3, 4).to(dtype).requires_grad_()
    with keyed_dropout(module, image_keys(0, 0, 2000)):
        result = module(x)
        assert torch.equal(module(x), result)
    (gradient,) = torch.autograd.grad(result.sum(), x)
    kept = result != 0
    assert result.dtype == dtype
    assert kept.float().mean().item() == pytest.approx(0.75, abs=0.05)
    assert ((kept.flatten(1).any(1) == kept.flatten(1).all(1)).all()) == (kind is StochasticDepth)
    assert_close(result[kept], x[kept] / 0.75)
    assert_close(gradient, kept.to(dtype) / 0.75)


@pytest.mark.parametrize("kind", [Dropout, StochasticDepth])
def test_without_keys_it_is_torchs_dropout(kind):
    x, keys = torch.randn(50, 6), image_keys(0, 0, 50)
    module, none = kind(0.5), kind(0.0)
    torch.manual_seed(0)
    first = module(x)
    torch.manual_seed(0)
    assert torch.equal(module(x), first) and not torch.equal(module(x), first)
    with pytest.raises(KeyError), keyed_dropout(module, keys):
        keyed = module(x)
        assert torch.equal(module(x), keyed)
        assert torch.equal(module.eval()(x), x)
        raise KeyError  # after which there are no keys either
    module.train()
    torch.manual_seed(0)
    assert torch.equal(module(x), first)
    with keyed_dropout(none, keys):
        assert none.keys is None and torch.equal(none(x), x)


# The model.


def test_recomputed_activations_are_dropped_alike():
    rates = ("drop_rate", "attn_drop_rate", "proj_drop_rate", "drop_path_rate")
    model = VisionTransformer(
        img_size=16, in_chans=3, num_classes=4, patch_size=8, embed_dim=12, depth=2, num_heads=2,
        reg_tokens=1, **dict.fromkeys(rates, 0.3),
    )  # fmt: skip
    randomize(model.double(), 0.3).train()  # such large weights that all matters
    found = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        with keyed_dropout(model, image_keys(0, 0, 6)):
            logits = model(draw(6, 3, 16, 16, seed=1))
            loss, weight = logits.square().sum(), model.patch_embed.proj.weight
            found.append([logits, *torch.autograd.grad(loss, [weight])])
    assert all(map(torch.equal, *found))
