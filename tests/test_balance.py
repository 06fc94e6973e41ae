"""Classes of different sizes: balanced batches, and weights of the loss."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor

from small_runs import make_step, small
from vit.data.sampling import balanced_batches, class_weights, divide_epoch
from vit.distributed.world import World
from vit.training.step import TrainingStep

COUNTS = (60, 30, 8, 2)
LABELS = torch.arange(4).repeat_interleave(torch.tensor(COUNTS))[
    torch.randperm(100, generator=torch.Generator().manual_seed(0))
]


@settings(max_examples=50)
@given(st.data())
def test_classes_and_the_images_of_a_class_are_equally_frequent(data):
    labels = torch.tensor(data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=200)))
    batch_size = data.draw(st.integers(1, len(labels)))
    shape = divide_epoch(len(labels), batch_size)
    seed, epoch = data.draw(st.integers(0, 2**31)), data.draw(st.integers(0, 1000))
    batches = balanced_batches(labels, shape, seed, epoch)
    assert batches.dtype == torch.int64
    assert batches.shape == shape
    present = labels.unique()
    for part in (*batches, batches.flatten()):
        classes = torch.bincount(labels[part], minlength=7)[present]
        assert classes.max() - classes.min() <= (1 if part.numel() == batches.numel() else 2)
    for label in present:
        of_class = labels == label
        times = torch.bincount(batches.flatten(), minlength=len(labels))[of_class]
        assert times.max() - times.min() <= 1


def test_equal_classes_give_a_permutation():
    batches = balanced_batches(torch.arange(60) % 5, (5, 12), seed=0, epoch=0)
    assert torch.equal(batches.flatten().sort().values, torch.arange(60))


def test_epochs_and_seeds_differ_and_calls_repeat():
    first = balanced_batches(LABELS, (5, 20), seed=0, epoch=0)
    state = torch.get_rng_state()
    assert torch.equal(first, balanced_batches(LABELS, (5, 20), seed=0, epoch=0))
    assert torch.equal(torch.get_rng_state(), state)
    for seed, epoch in ((0, 1), (1, 0), (1, 1)):
        other = balanced_batches(LABELS, (5, 20), seed, epoch)
        assert (first == other).sum() < 25  # the class with two images is often the same


def test_every_image_of_a_large_class_has_its_turn():
    epochs = torch.stack([balanced_batches(LABELS, (5, 20), 0, e).flatten() for e in range(500)])
    times = torch.bincount(epochs.flatten(), minlength=100)[LABELS == 0].double()
    expected = 500 * 25 / 60
    assert ((times - expected) ** 2 / expected).sum() < 90  # chi-square, 59 degrees of freedom
    places = torch.bincount(LABELS[epochs[:, 0]], minlength=4)
    assert ((places - 125) ** 2 / 125).sum() < 16  # 3 degrees of freedom


def test_weights_are_scikit_learn_s():
    expected = compute_class_weight("balanced", classes=np.arange(4), y=LABELS.numpy())
    weights = class_weights(COUNTS)
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float32))
    assert weights[LABELS].mean().item() == pytest.approx(1)


# The loss in a step.


def make_weighted_step(accumulate: int = 1, label_smoothing: float = 0.1) -> TrainingStep:
    """Build a step with weights whose result does not depend on how a batch is divided."""
    dropout = dict.fromkeys(
        ("drop_rate", "attn_drop_rate", "proj_drop_rate", "drop_path_rate"), 0.0
    )
    config = small(
        Path("unused"),
        data={"balance": "loss", "train_size": 128},
        model={"stem": "linear", "zero_init": False, **dropout},
        optim={"ema_decay": None, "name": "adamw", "clip_grad": None},
        train={"accumulate": accumulate, "whiten": False},
    )
    step = make_step(config)
    assert step.class_weights is not None
    weights = class_weights(range(10, 110, 10))
    return replace(step, class_weights=weights, label_smoothing=label_smoothing)


def make_batch() -> tuple[Tensor, Tensor]:
    """Return random images and their classes; large classes are more frequent."""
    random = torch.Generator().manual_seed(0)
    images = torch.randn(16, 3, 32, 32, generator=random)
    return images, torch.multinomial(torch.arange(10.0), 16, True, generator=random)


def gradients(step: TrainingStep, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of a batch and all gradients of the weights."""
    step.state.model.zero_grad()
    loss = step.backward(images, targets)[0]
    return loss, torch.cat([p.grad.flatten() for p in step.state.model.parameters()])


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_loss_is_torch_s_weighted_cross_entropy_over_the_number_of_images(label_smoothing):
    step = make_weighted_step(label_smoothing=label_smoothing)
    images, labels = make_batch()
    loss, _ = gradients(step, images, F.one_hot(labels, 10).float())
    with torch.no_grad():
        logits = step.state.model(images)
    expected = F.cross_entropy(
        logits, labels, step.class_weights, reduction="sum", label_smoothing=label_smoothing
    )
    assert loss.item() == pytest.approx(expected.item() / 16, rel=1e-5)
    plain = F.cross_entropy(logits, labels, label_smoothing=label_smoothing)
    assert abs(loss.item() - plain.item()) > 0.05


@pytest.mark.parametrize("mixed", [False, True])
def test_loss_is_the_same_in_parts_and_processes(mixed):
    images, labels = make_batch()
    targets = F.one_hot(labels, 10).float()
    if mixed:
        targets = 0.3 * targets + 0.7 * targets.flip(0)
    loss, gradient = gradients(make_weighted_step(), images, targets)
    in_parts = gradients(make_weighted_step(accumulate=4), images, targets)
    torch.testing.assert_close(in_parts, (loss, gradient), rtol=1e-4, atol=1e-6)
    halves = []
    for rank in range(2):
        parts = (World(rank, 2).part(values) for values in (images, targets))
        halves.append(gradients(make_weighted_step(), *parts))
    mean = tuple(torch.stack(pair).mean(dim=0) for pair in zip(*halves, strict=True))
    torch.testing.assert_close(mean, (loss, gradient), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("balance", ["none", "sampler"])
def test_only_the_balanced_loss_has_weights(balance):
    config = small(Path("unused"), data={"balance": balance, "train_size": 64})
    assert make_step(config).class_weights is None
