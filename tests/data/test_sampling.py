"""Subsets, splits and batches of images; the batches and the loss of classes of different sizes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor

from small_runs import NO_DROPOUT, make_step, small
from vit.data.sampling import (
    MANY_BATCHES,
    balanced_batches,
    balanced_subset,
    class_weights,
    describe_counts,
    divide_epoch,
    epoch_batches,
    held_out,
    stratified_subset,
)

COUNTS = (60, 30, 8, 2)


def labels_of(sizes: Sequence[int]) -> Tensor:
    """Return shuffled labels with so many images of each class."""
    labels = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    return labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))]


LABELS = labels_of(COUNTS)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=8).filter(any), st.data())
def test_a_subset_is_as_even_as_the_classes_allow(sizes, data):
    labels = labels_of(sizes)
    count = data.draw(st.integers(0, len(labels)))
    chosen = balanced_subset(labels, count, data.draw(st.integers(0, 99)), "test")
    assert chosen.shape == (count,) and chosen.dtype == torch.int64
    assert (chosen.diff() > 0).all()
    taken = torch.bincount(labels[chosen], minlength=len(sizes)).tolist()
    most = max(taken)
    for number, size in zip(taken, sizes, strict=True):
        assert number <= size
        assert number >= min(size, most - 1)  # less than the others only where there are no more


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.data())
def test_stratified_subset_is_rounded_by_webster_and_leaves_one_of_each(sizes, data):
    """No image has a better claim, (number in its class + 1/2) / size, than one that is taken."""
    labels = labels_of(sizes)
    count = data.draw(st.integers(0, len(labels) - len(sizes)))
    chosen = stratified_subset(labels, count, data.draw(st.integers(0, 99)), "test")
    assert chosen.shape == (count,) and (chosen.diff() > 0).all()
    taken = torch.bincount(labels[chosen], minlength=len(sizes)).tolist()
    pairs = list(zip(taken, sizes, strict=True))
    assert all(number < size for number, size in pairs)
    last = max([(number - 0.5) / size for number, size in pairs if number], default=0)
    following = min([(n + 0.5) / size for n, size in pairs if n < size - 1], default=1)
    assert last <= following + 1e-6


@pytest.mark.parametrize(
    ("sizes", "size", "expected"),
    [
        ([100, 40, 1], None, [10, 4, 0]),  # a tenth
        ([3, 2, 14], None, [1, 1, 1]),  # at least one, but not the last
        ([3333, 3333, 3333], None, [333, 333, 333]),
        ([4000, 4000, 2000], None, [400, 400, 200]),  # 1,000 of 10,000 or more
        ([20, 30, 40], 0.25, [5, 8, 10]),
        ([20, 2, 1], 0.99, [19, 1, 0]),
        ([20, 30, 40], 9, [2, 3, 4]),
        ([20, 30, 40], 0, [0, 0, 0]),
    ],
)
def test_held_out_images_are_a_count_a_fraction_or_what_suits(sizes, size, expected):
    labels = labels_of(sizes)
    held = held_out(labels, ["a", "b", "c"], size, seed=0)
    assert (held.diff() > 0).all()
    assert torch.bincount(labels[held], minlength=3).tolist() == expected
    assert torch.equal(held_out(labels, ["a", "b", "c"], size, seed=0), held)


def test_a_large_set_of_many_classes_holds_out_what_it_can():
    labels = labels_of([1] * 9600 + [2] * 250)
    held = held_out(labels, [*map(str, range(9850))], None, seed=0)
    assert len(held) == 250 and labels[held].min() == 9600


def test_counts_are_listed_or_summarized():
    assert describe_counts(["a", "b"], [3, 3]) == "3 in each of 2 classes"
    assert describe_counts(["a", "b"], [3000, 1]) == "a 3,000, b 1"
    assert describe_counts([str(n) for n in range(21)], [*range(5, 26)]) == (
        "5 to 25 in each of 21 classes"
    )


@settings(max_examples=200)
@given(st.data())
def test_an_epoch_takes_all_images_of_a_small_set_and_whole_batches_of_a_large_one(data):
    parts = data.draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    batch_size = parts * data.draw(st.integers(1, 40))
    num_images = data.draw(st.integers(1, (MANY_BATCHES + 2) * batch_size))
    seed, epoch = data.draw(st.integers(0, 2**31)), data.draw(st.integers(0, 1000))
    steps, size = shape = divide_epoch(num_images, batch_size, parts)
    batches = epoch_batches(num_images, shape, seed, epoch)
    times = torch.bincount(batches.flatten(), minlength=num_images)
    assert batches.dtype == torch.int64 and batches.shape == shape and len(times) == num_images
    if num_images >= MANY_BATCHES * batch_size:
        assert shape == (num_images // batch_size, batch_size)
        assert times.max() == 1
        return
    assert times.min() >= 1 and times.max() - times.min() <= 1
    assert size <= batch_size and (steps - 1) * batch_size < num_images
    assert size % parts == 0  # and pairs can be mixed within a part
    assert batch_size // parts % 2 or size // parts % 2 == 0
    # As few images as possible are repeated; powers of two of processes see the same batches.
    rounding = parts * 2 if parts in (3, 6) else max(8, parts * 2)
    assert steps * size - num_images < steps * max(rounding, 24)
    assert all(len(batch.unique()) == len(batch) for batch in batches if steps > 1)
    if batch_size % 16 == 0 and parts == 1:
        assert {divide_epoch(num_images, batch_size, processes) for processes in (2, 4)} == {shape}
    assert divide_epoch(num_images, batch_size, parts, steps) == shape  # a resumed run


def test_epochs_and_seeds_differ_and_calls_repeat():
    shape = (10, 100)
    torch.manual_seed(0)
    first = epoch_batches(1000, shape, seed=0, epoch=0)
    state = torch.manual_seed(1).get_state()
    assert torch.equal(first, epoch_batches(1000, shape, seed=0, epoch=0))
    assert torch.equal(torch.get_rng_state(), state)
    for seed, epoch in ((0, 1), (1, 0), (1, 1)):
        same = (first == epoch_batches(1000, shape, seed, epoch)).sum()
        assert same < 10  # chance leaves 1 of 1000 in place


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


def test_every_image_of_a_large_class_has_its_turn():
    epochs = torch.stack([balanced_batches(LABELS, (5, 21), 0, e) for e in range(500)])
    times = torch.bincount(epochs.flatten(), minlength=100)[LABELS == 0].double()
    firsts = torch.stack([LABELS[batch].bincount(minlength=4) for batch in epochs[:, 0]])
    extra = (firsts == 6).sum(dim=0)  # the class with one image more than the others
    assert extra.sum() == 500
    assert min(chisquare(times).pvalue, chisquare(extra).pvalue) > 1e-3


@pytest.mark.parametrize("classes", [2, 3, 4])
def test_neighbours_in_balanced_batches_are_any_two_images(classes):
    """Pairs for mixing are of one class as often as two images drawn from the batch are."""
    labels, size = torch.arange(classes).repeat(30), 12
    batches = [balanced_batches(labels, (60 * classes // size, size), 0, e) for e in range(200)]
    first, second = labels[torch.cat(batches)].view(-1, size // 2, 2).unbind(dim=2)
    pairs = (classes * first + second).flatten().bincount(minlength=classes**2).double()
    same = (size // classes - 1) / (size - 1) / classes  # of each class
    other = (1 - classes * same) / (classes * (classes - 1))
    likely = torch.full((classes, classes), other).fill_diagonal_(same).flatten().double()
    likely *= pairs.sum() / likely.sum()
    assert chisquare(pairs, likely).pvalue > 1e-3


def test_weights_of_classes_are_those_of_scikit_learn():
    expected = compute_class_weight("balanced", classes=np.arange(4), y=LABELS.numpy())
    weights = class_weights(COUNTS)
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float32))
    assert weights[LABELS].mean().item() == pytest.approx(1)


def test_loss_of_an_image_has_the_weight_of_its_class():
    config = small(
        Path("unused"),
        data={"balance": "loss", "train_size": 128},
        model=NO_DROPOUT,
        train={"accumulate": 1, "whiten": False},
    )
    step = make_step(config)
    assert step.class_weights is not None
    weights = class_weights(range(10, 110, 10))
    step = replace(step, class_weights=weights, label_smoothing=0.1)
    random = torch.Generator().manual_seed(0)
    images = torch.randn(16, 3, 32, 32, generator=random)
    labels = torch.multinomial(torch.arange(10.0), 16, True, generator=random)
    loss = step.backward(images, F.one_hot(labels, 10).float())[0]
    with torch.no_grad():
        logits = step.state.model(images)
    losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=0.1)
    expected = (weights[labels] * losses).mean().item()
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert abs(expected - losses.mean().item()) > 0.01
