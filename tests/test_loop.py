"""The loop: stopping and resuming at any step, and skipping non-finite steps."""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from small_runs import Clock, StopAt, events, make_loop, make_step, metrics, small
from vit.classifier import Classifier
from vit.data.sampling import balanced_batches
from vit.distributed.stop import Diverged, Stopped
from vit.run.checkpoint import checkpoint_steps, latest_checkpoint
from vit.run.tracker import Tracker
from vit.training.config import Config
from vit.training.loop import Loop
from vit.training.state import TrainState
from vit.training.step import TrainingStep

BARE = {"track": {"probes": 0, "every": 3}, "train": {"epochs": 3}}  # 15 steps, quickly made


def run(config: Config, stop_at: int = 0) -> Loop:
    """Run a config in its folder, resumed if it has a checkpoint; return the loop at its end."""
    Path(config.out).mkdir(exist_ok=True)
    stop = StopAt(stop_at)
    loop = make_loop(config, stop=stop)
    stop.state = loop.step.state
    loop.tracker = Tracker(Path(config.out), loop.step.state.step)
    try:
        loop.run()
    finally:
        loop.tracker.close()
    return loop


def assert_same_state(one: TrainState, other: TrainState) -> None:
    left, right = one.state_dict(), other.state_dict()
    for part in ("model", "optimizers", "ema", "points", "step"):
        torch.testing.assert_close(left[part], right[part], rtol=0, atol=0)


@pytest.mark.slow
def test_run_stopped_after_any_step_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    """Within epochs of five steps, between them and at the end."""
    alone = run(small(tmp_path / "alone", **BARE))
    for step in (1, 5, 8, 14, 15):
        config = small(tmp_path / f"stopped_{step}", **BARE)
        with pytest.raises(Stopped):
            run(config, stop_at=step)
        assert checkpoint_steps(tmp_path / f"stopped_{step}")[-1] == step
        assert make_loop(config).step.state.step == step
        assert_same_state(run(config).step.state, alone.step.state)
        assert metrics(tmp_path / f"stopped_{step}") == metrics(tmp_path / "alone"), step


def test_run_with_balanced_classes_goes_on_in_mid_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []

    def watched(labels: Tensor, shape: tuple[int, int], seed: int, epoch: int) -> Tensor:
        drawn.append(epoch)
        return balanced_batches(labels, shape, seed, epoch)

    monkeypatch.setattr("vit.training.loop.balanced_batches", watched)
    changes = {**BARE, "data": {"balance": "sampler"}, "train": {"epochs": 2}}
    alone = run(small(tmp_path / "alone", **changes))
    config = small(tmp_path / "stopped", **changes)
    with pytest.raises(Stopped):
        run(config, stop_at=7)
    assert_same_state(run(config).step.state, alone.step.state)
    assert drawn == [0, 1, 0, 1, 1]


def test_speed_counts_training_alone_and_seconds_count_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr("vit.training.loop.time", clock)
    update = TrainingStep.update

    def one_second(step: TrainingStep, images: Tensor, targets: Tensor) -> Tensor:
        clock.now += 1
        return update(step, images, targets)

    class TenSeconds:
        name = "ten seconds"
        steps = range(100)

        def run(self, classifier: Classifier, step: int) -> Iterator[tuple[str, float]]:
            clock.now += 10
            yield "val/accuracy", 0.5

    monkeypatch.setattr(TrainingStep, "update", one_second)
    loop = make_loop(small(tmp_path, **{**BARE, "train": {"epochs": 2}}))
    loop.evaluators, loop.tracker = [TenSeconds()], Tracker(tmp_path)
    before = loop.step.state.seconds = 1000.0  # such as for compiling
    loop.run()
    loop.tracker.close()
    speeds = events(tmp_path).Scalars("train/images_per_second")
    assert [(event.step, event.value) for event in speeds] == [(3, 64), (5, 64), (8, 64), (10, 64)]
    *lines, price = capsys.readouterr().out.splitlines()
    assert price == "ten seconds took 110.0 s of 120.0 s"
    assert [line.count(" 64 images/s ") for line in lines] == [1, 1]
    shown = [line.split("   ")[-1] for line in lines]
    assert shown == [f"{1055 // 60}:{1055 % 60}, 0:55 left", f"{1110 // 60}:{1110 % 60}, 0:00 left"]
    assert loop.step.state.seconds - before == pytest.approx(10 * (1 + 10))


def image(state: TrainState) -> dict[str, Any]:
    """What a skipped step must leave alone."""
    values = state.state_dict()
    counts = ("step", "skipped", "skipped_in_a_row")
    parts = {key: value for key, value in values.items() if key not in counts}
    return copy.deepcopy(parts)


class SpoiltGradient(torch.autograd.Function):
    """Lets values pass, and spoils their gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * torch.inf


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("what", ["images", "loss", "gradient"])
def test_step_that_is_not_finite_changes_nothing(what: str, accumulate: int) -> None:
    config = small(Path("unused"), train={"accumulate": accumulate})
    step = replace(make_step(config), label_smoothing=0.0, clip_grad=None)
    state = step.state
    images, targets = torch.randn(8, 3, 32, 32), torch.eye(10)[torch.arange(8)]
    step.update(images, targets)  # so that optimizers have something to lose
    before = image(state)
    forwards: dict[str, Callable[[Tensor], Tensor]] = {
        "images": state.model,
        # A loss of infinity whose gradient is finite.
        "loss": lambda x: state.model(x) + 3e38 * (torch.arange(10) == 9) - 3e38 * targets[0],
        "gradient": lambda x: SpoiltGradient.apply(state.model(x)),  # type: ignore[no-untyped-call]
    }
    bad = images.clone()
    if what == "images":
        bad[3, 0, 0, 0] = math.nan
    result = replace(step, forward=forwards[what]).update(bad, targets)
    assert result.isnan().all()
    assert (state.step, state.skipped, state.skipped_in_a_row) == (2, 1, 1)
    torch.testing.assert_close(image(state), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in state.model.parameters())
    step.update(images, targets)
    assert (state.step, state.skipped, state.skipped_in_a_row) == (3, 1, 0)
    assert state.is_finite()


def spoil(monkeypatch: pytest.MonkeyPatch, steps: range) -> None:
    """Make the images of some steps NaN."""

    update = TrainingStep.update

    def spoilt(step: TrainingStep, images: Tensor, targets: Tensor) -> Tensor:
        if step.state.step in steps:
            images = images * math.nan
        return update(step, images, targets)

    monkeypatch.setattr(TrainingStep, "update", spoilt)


def test_skipped_steps_are_counted_and_do_not_spoil_the_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, range(4, 7))
    run(small(tmp_path / "run", **BARE))
    rows = metrics(tmp_path / "run")
    losses = {row["step"]: row.get("train/loss") for row in rows if "train/lr" in row}
    assert set(losses) == {3, 5, 8, 10, 13, 15}
    assert losses[8] is not None and losses[8] < 10  # of the one step that was not skipped
    assert all(math.isfinite(value) for row in rows for value in row.values())
    counts = [row["train/skipped_steps"] for row in rows if "train/skipped_steps" in row]
    assert counts == [1, 3, 3, 3, 3]


def test_too_many_in_a_row_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, range(7, 100))
    config = small(tmp_path / "run", **{**BARE, "train": {"epochs": 5, "max_skipped": 6}})
    with pytest.raises(Diverged, match=r"step 13, after 6 skipped .*( nan){3}\)") as error:
        run(config)
    assert "learning rate 0.00" in str(error.value)
    found = latest_checkpoint(tmp_path / "run")
    assert found is not None and found.step == 10
    assert all(tensor.isfinite().all() for tensor in found.model.values())


@pytest.mark.parametrize("where", ["model", "ema"])
def test_weights_that_are_not_finite_are_not_saved(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = TrainingStep.update

    def spoilt(step: TrainingStep, images: Tensor, targets: Tensor) -> Tensor:
        result = update(step, images, targets)
        with torch.no_grad():
            {"model": step.state.model, "ema": step.state.ema.module}[where].head.bias[0] = math.inf
        return result

    monkeypatch.setattr(TrainingStep, "update", spoilt)
    with pytest.raises(Diverged):
        run(small(tmp_path / "run", **BARE))
    assert checkpoint_steps(tmp_path / "run") == []


def test_checkpoint_that_cannot_be_written_is_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small(tmp_path / "run", **BARE)
    (tmp_path / "run").mkdir()
    loop = make_loop(config)
    tried, save = list[int](), loop.write_checkpoint

    def full() -> None:
        tried.append(loop.step.state.step)
        if tried[-1] < 15:
            raise OSError(28, "No space left on device")
        save()

    loop.write_checkpoint, loop.tracker = full, Tracker(tmp_path / "run")
    loop.run()
    loop.tracker.close()
    assert tried == [5, 10, 15] and checkpoint_steps(tmp_path / "run") == [15]
    errors = capsys.readouterr().err
    assert errors.count("No space left on device") == 2 and "checkpoint of step 10" in errors
