"""Patch and position embedding compared with torch's layers and timm."""

import pytest
import torch
import torch.nn.functional as F
from timm.layers import build_sincos2d_pos_embed
from torch import nn
from torch.testing import assert_close

from models import draw, randomize
from small_runs import load
from vit.data.config import DataConfig
from vit.data.preprocess import Preprocess
from vit.model.embed import PatchEmbed, conv_stem, sincos_pos_embed, whiten

# --- convolutional stem ---


@pytest.mark.parametrize(
    ("patch_size", "embed_dim", "stem_width", "widths"),
    [
        (1, 96, None, [96]),
        (4, 96, None, [32, 64, 64, 96]),
        (8, 10, None, [2, 5, 5, 7, 7, 10]),
        (8, 14, 5, [5, 10, 10, 14, 14, 14]),
    ],
)
def test_conv_stem_is_convolution_norm_and_relu_at_rising_widths(
    patch_size, embed_dim, stem_width, widths
):
    stem = randomize(conv_stem(patch_size, 3, embed_dim, stem_width), 0.2).train()
    convs = [module for module in stem.modules() if isinstance(module, nn.Conv2d)]
    norms = [module for module in stem.modules() if isinstance(module, nn.BatchNorm2d)]
    images = draw(2, 3, 16, 16, dtype=torch.float32)

    expected = images
    for step, (conv, norm) in enumerate(zip(convs, norms, strict=True)):
        assert conv.weight.shape[2:] == (3, 3) and conv.bias is None
        before = expected
        halves = step % 2 == 1 or step == len(convs) - 1 > 0
        expected = F.conv2d(expected, conv.weight, stride=2 if halves else 1, padding=1)
        expected = F.batch_norm(expected, None, None, norm.weight, norm.bias, training=True)
        expected = expected.clamp(min=0)
        if not halves and step > 0:
            expected = before + expected

    assert [conv.weight.shape[0] for conv in convs] == widths
    assert_close(stem(images), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("stem", "size", "kernels"), [("conv", 192, 27), ("linear", 96, 48)])
def test_whitened_stem_sees_uncorrelated_components_of_both_signs(stem, size, kernels, monkeypatch):
    images = load("shapes", ".", train=True, count=50).images
    images = Preprocess.from_config(DataConfig(name="shapes")).normalize(images)
    embed = PatchEmbed(32, 4, 3, size, stem)
    first = embed.proj if stem == "linear" else embed.proj[0]
    before = first.weight.detach().clone()
    unfold = F.unfold

    def unfold_few(part, *how, **options):
        assert len(part) < 10  # overlapping patches of many images would fill the memory
        return unfold(part, *how, **options)

    monkeypatch.setattr(F, "unfold", unfold_few)
    whiten(first, images)
    positive, negative, rest = first.weight.detach().tensor_split((kernels, 2 * kernels))
    assert torch.equal(positive, -negative)
    assert torch.equal(rest, before[2 * kernels :])
    seen = F.conv2d(images, positive, stride=first.stride).transpose(0, 1).flatten(1)
    moments = seen @ seen.T / seen.shape[1]
    assert_close(moments, torch.diag(moments.diag()), rtol=0, atol=2e-3)
    assert (moments.diag() <= 1.001).all() and moments[0, 0] > 0.99
    assert (moments.diag().diff() < 1e-3).all()  # the strongest first


# --- positions ---


@pytest.mark.parametrize(("grid_size", "dim"), [((4, 4), 192), ((3, 5), 20), ((1, 7), 4)])
def test_sincos_equals_timm(grid_size, dim):
    ours = sincos_pos_embed(grid_size, dim)
    theirs = build_sincos2d_pos_embed(list(grid_size), dim, interleave_sin_cos=True)
    down, across = theirs.chunk(2, dim=1)  # timm puts the row before the column
    assert_close(ours, torch.cat([across, down], dim=1), rtol=0, atol=1e-6)
