"""Shuffling an epoch into batches, and the batches of small sets."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from small_runs import StopAt, make_loop, small
from vit.data.sampling import MANY_BATCHES, divide_epoch, epoch_batches
from vit.distributed.stop import Stopped


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


def test_an_epoch_without_remainder_is_a_permutation():
    batches = epoch_batches(60, divide_epoch(60, 12), seed=0, epoch=0)
    assert batches.shape == (5, 12)
    assert torch.equal(batches.flatten().sort().values, torch.arange(60))


def test_epochs_and_seeds_differ_and_calls_repeat():
    shape = (10, 100)
    torch.manual_seed(0)
    first = epoch_batches(1000, shape, seed=0, epoch=0)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    assert torch.equal(first, epoch_batches(1000, shape, seed=0, epoch=0))
    assert torch.equal(torch.get_rng_state(), state)
    for seed, epoch in ((0, 1), (1, 0), (1, 1)):
        same = (first == epoch_batches(1000, shape, seed, epoch)).sum()
        assert same < 10  # chance leaves 1 of 1000 in place


@pytest.mark.parametrize("shape", [(2, 4), (3, 4)])  # two images are left over, or repeated
def test_every_image_has_its_turn_at_every_place(shape):
    epochs = torch.stack([epoch_batches(10, shape, seed=0, epoch=e).flatten() for e in range(2000)])
    for place in epochs.T:
        counts = torch.bincount(place, minlength=10)
        assert ((counts - 200) ** 2 / 200).sum() < 35  # chi-square, 9 degrees of freedom


@pytest.mark.parametrize("early", [False, True])
def test_a_small_run_goes_on_with_the_batches_it_began_with(tmp_path: Path, early: bool) -> None:
    """Early versions left the end of each epoch out, and did not write down its length."""

    def run(name: str, stop_at: int = 0, begin: int = 0) -> dict[str, object]:
        train = {"batch_size": 48, "epochs": 2}
        config = small(tmp_path / name, data={"val_size": 0}, track={"probes": 0}, train=train)
        Path(config.out).mkdir(exist_ok=True)
        stop = StopAt(stop_at)
        loop = make_loop(config, stop=stop)
        stop.state = loop.step.state
        if early:
            loop.saver.about["environment"].pop("steps_per_epoch")  # type: ignore[attr-defined]
        assert loop.step.schedule.steps_per_epoch == (6 if early else 7)
        assert loop.step.state.step == begin
        loop.run()
        return loop.step.state.state_dict()

    with pytest.MonkeyPatch.context() as patch:
        if early:
            patch.setattr("vit.training.build.divide_epoch", lambda n, b, *_: (n // b, b))
        alone = run("alone")
        with pytest.raises(Stopped):
            run("stopped", stop_at=4)
    resumed = run("stopped", begin=4)
    for part in ("model", "optimizers", "points", "step"):
        torch.testing.assert_close(resumed[part], alone[part], rtol=0, atol=0)
