"""Shuffling an epoch into batches."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vit.data.batches import epoch_batches, steps_per_epoch


@settings(max_examples=50)
@given(st.data())
def test_an_epoch_takes_distinct_images_in_full_batches(data):
    num_images = data.draw(st.integers(1, 300))
    batch_size = data.draw(st.integers(1, num_images))
    seed, epoch = data.draw(st.integers(0, 2**31)), data.draw(st.integers(0, 1000))
    batches = epoch_batches(num_images, batch_size, seed, epoch)
    assert batches.dtype == torch.int64
    assert batches.shape == (num_images // batch_size, batch_size)
    assert steps_per_epoch(num_images, batch_size) == num_images // batch_size
    assert len(batches.unique()) == batches.numel()
    assert batches.min() >= 0 and batches.max() < num_images


def test_an_epoch_without_remainder_is_a_permutation():
    batches = epoch_batches(60, 12, seed=0, epoch=0)
    assert torch.equal(batches.flatten().sort().values, torch.arange(60))


def test_epochs_and_seeds_differ_and_calls_repeat():
    torch.manual_seed(0)
    first = epoch_batches(1000, 100, seed=0, epoch=0)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    assert torch.equal(first, epoch_batches(1000, 100, seed=0, epoch=0))
    assert torch.equal(torch.get_rng_state(), state)
    for seed, epoch in ((0, 1), (1, 0), (1, 1)):
        same = (first == epoch_batches(1000, 100, seed, epoch)).sum()
        assert same < 10  # chance leaves 1 of 1000 in place


def test_every_image_has_its_turn_at_every_place():
    # 10 images in batches of 4: two are left over, others each epoch.
    epochs = torch.stack([epoch_batches(10, 4, seed=0, epoch=e).flatten() for e in range(2000)])
    for place in epochs.T:
        counts = torch.bincount(place, minlength=10)
        assert ((counts - 200) ** 2 / 200).sum() < 35  # chi-square, 9 degrees of freedom


@pytest.mark.parametrize("function", [steps_per_epoch, lambda n, b: epoch_batches(n, b, 0, 0)])
def test_a_batch_larger_than_the_data_is_refused(function):
    with pytest.raises(
        ValueError,
        match=r"^train\.batch_size: 128 .* 127 training images; use --train\.batch_size 16$",
    ):
        function(127, 128)
    assert function(128, 128) is not None
