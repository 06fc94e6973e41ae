"""Features: principal components of patches, and what is logged of them."""

import numpy as np
import torch

from small_runs import make_loop, small
from vit.explain.features import colours, coordinates, fit_frames
from vit.explain.figures import features_picture
from vit.reporting.attention_logging import AttentionLogging
from vit.tensorboard_plugin.encoding import FRAMES_TAG, decode_weights


def tokens_of(layers: int = 2, batch: int = 6, patches: int = 20, width: int = 40) -> torch.Tensor:
    """Patch tokens whose directions differ in variance, (L, B, P, D)."""
    lengths = 0.9 ** torch.arange(width)
    mixed = torch.linalg.qr(torch.randn(layers, width, width)).Q
    return (torch.randn(layers, batch, patches, width) * lengths) @ mixed[:, None] + 0.5


def test_frames_are_the_principal_components_with_the_largest_entry_positive():
    tokens = tokens_of()
    frames = fit_frames([[*tokens[:, :4]], [*tokens[:, 4:]]])  # in two batches
    assert frames.shape == (2, 32, 40)
    for layer, frame in zip(tokens.flatten(1, 2).double().numpy(), frames.numpy(), strict=True):
        mean = layer.mean(axis=0)
        _, lengths, directions = np.linalg.svd(layer - mean, full_matrices=False)
        largest = directions[np.arange(40), np.abs(directions).argmax(axis=1)]
        axes = lengths[:, None] / np.sqrt(len(layer)) * directions * np.sign(largest)[:, None]
        np.testing.assert_allclose(frame, np.concatenate([mean[None], axes[:31]]), atol=1e-5)
    found = coordinates([*tokens], frames)
    kept = frames[:, 0] + torch.einsum("blpk,lkd->bpld", found[..., 1:], frames[:, 1:])
    rest = tokens.permute(1, 2, 0, 3) - kept
    torch.testing.assert_close(found[..., 0].transpose(1, 2), rest.norm(dim=-1), atol=1e-4, rtol=0)
    torch.testing.assert_close(found[..., 1:].square().mean(dim=(0, 2)), torch.ones(2, 31))


def test_colours_are_standard_deviations_of_three_components():
    numbers = torch.tensor([[9.0, 0, 1.25, -1.25, 7], [9, 2.5, 5, -5, 7]])
    assert colours(numbers).tolist() == [[128, 191, 64], [255, 255, 0]]
    assert colours(numbers[:, :2]).tolist() == [[128, 128, 128], [255, 128, 128]]
    images = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    features = numbers[:, None, None].expand(2, 3, 4, 5)
    picture = features_picture(images, features, (2, 2))
    for red, green, blue in colours(numbers).tolist():
        assert (picture == [red, green, blue]).all(axis=-1).sum() >= 3 * 90**2


def test_training_logs_features_unless_they_are_not_finite(tmp_path):
    config = small(tmp_path, track={"probes": 2})
    loop = make_loop(config)
    (logging,) = (e for e in loop.evaluators if isinstance(e, AttentionLogging))
    classifier = loop.classifier()
    yielded = dict(logging.run(classifier, 0))
    (frames,) = yielded[FRAMES_TAG].value  # type: ignore[union-attr]
    axes, _ = decode_weights(frames.tensor.string_val[0])
    last = yielded["attention/probe_01"].value[-1]  # type: ignore[union-attr]
    codes, _ = decode_weights(last.tensor.string_val[0])
    assert last.tag == "attention/probe_01/features" and codes.shape[:2] == axes.shape[:2]
    for parameter in classifier.model.parameters():
        torch.nn.init.constant_(parameter, torch.inf)
    assert FRAMES_TAG not in dict(logging.run(classifier, 0))  # and training goes on
