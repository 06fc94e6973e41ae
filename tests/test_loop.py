"""The loop: it stops anywhere and goes on as if it had not, and skips what is not finite."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from small_runs import load_images, metrics, small
from vit.checkpoint import checkpoint_steps, latest_checkpoint
from vit.config import Config
from vit.tracking import Tracker
from vit.training import loop as loop_module
from vit.training.distributed import World
from vit.training.loop import Diverged, Loop
from vit.training.state import TrainState, build_state, train_step
from vit.training.stopping import Stopped, StopRequest

CPU = torch.device("cpu")
BARE = {"track": {"probes": 0, "every": 3}, "train": {"epochs": 3}}  # 15 steps, quickly made


class StopAt(StopRequest):
    """A request that comes after a step."""

    def __init__(self, state: TrainState, step: int) -> None:
        super().__init__()
        self.state, self.step = state, step

    def agreed(self, world: World) -> bool:
        return self.state.step == self.step


def make_loop(config: Config) -> Loop:
    """Make the loop of a run, resumed where it has a checkpoint."""
    training, held_out = load_images(config)
    state = build_state(config, 10, CPU)
    loop = Loop(config, state, training, held_out, CPU, torch.float32)
    found = latest_checkpoint(Path(config.out))
    if found is not None:
        state.load_state_dict(found[1])
    loop.count_steps()
    return loop


def run(loop: Loop, stop_at: int = 0) -> None:
    Path(loop.config.out).mkdir(exist_ok=True)
    tracker = Tracker(Path(loop.config.out), loop.state.step)
    try:
        loop.run(tracker, StopAt(loop.state, stop_at))
    finally:
        tracker.close()


def test_run_stopped_after_any_step_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    alone = make_loop(small(tmp_path / "alone", **BARE))
    run(alone)
    for step in range(1, 16):
        config = small(tmp_path / f"stopped_{step}", **BARE)
        with pytest.raises(Stopped):
            run(make_loop(config), stop_at=step)
        assert checkpoint_steps(tmp_path / f"stopped_{step}")[-1] == step
        resumed = make_loop(config)
        assert resumed.state.step == step
        run(resumed)
        one, other = resumed.state.state_dict(), alone.state.state_dict()
        for part in ("model", "optimizers", "ema", "points", "step"):
            torch.testing.assert_close(one[part], other[part], rtol=0, atol=0)
        assert metrics(tmp_path / f"stopped_{step}") == metrics(tmp_path / "alone"), step


def test_seconds_add_up_over_interruptions(tmp_path: Path) -> None:
    config = small(tmp_path / "run", **BARE)
    with pytest.raises(Stopped):
        run(make_loop(config), stop_at=7)
    resumed = make_loop(config)
    before = resumed.state.seconds
    assert before > 0
    run(resumed)
    assert resumed.state.seconds > before


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
    config = small(Path("unused"))
    state = build_state(config, 10, CPU)
    images, targets = torch.randn(8, 3, 32, 32), torch.eye(10)[torch.arange(8)]
    train_step(state, state.model, images, targets)  # so that optimizers have something to lose
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
    result = train_step(state, forwards[what], bad, targets, accumulate=accumulate)
    assert result.isnan().all()
    assert (state.step, state.skipped, state.skipped_in_a_row) == (2, 1, 1)
    torch.testing.assert_close(image(state), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in state.model.parameters())
    train_step(state, state.model, images, targets)
    assert (state.step, state.skipped, state.skipped_in_a_row) == (3, 1, 0)
    assert state.is_finite()


def spoil(monkeypatch: pytest.MonkeyPatch, steps: range) -> None:
    """Make the images of some steps NaN."""

    def spoilt(state: TrainState, forward: Any, images: Tensor, *rest: Any, **how: Any) -> Tensor:
        if state.step in steps:
            images = images * math.nan
        return train_step(state, forward, images, *rest, **how)

    monkeypatch.setattr(loop_module, "train_step", spoilt)


def test_skipped_steps_are_counted_and_do_not_spoil_the_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, range(4, 7))
    run(make_loop(small(tmp_path / "run", **BARE)))
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
    with pytest.raises(Diverged, match=r"step 13, after 6 skipped .*( nan){6}\)") as error:
        run(make_loop(config))
    assert "learning rate 0.00" in str(error.value)
    found = latest_checkpoint(tmp_path / "run")
    assert found is not None and found[1]["step"] == 10
    assert all(tensor.isfinite().all() for tensor in found[1]["model"].values())


@pytest.mark.parametrize("where", ["model", "ema"])
def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path, where: str) -> None:
    loop = make_loop(small(tmp_path / "run", **BARE))
    modules = {"model": loop.state.model, "ema": loop.state.ema.module}
    with torch.no_grad():
        modules[where].head.bias[0] = torch.inf
    with pytest.raises(Diverged):
        run(loop)
    assert checkpoint_steps(tmp_path / "run") == []


def test_checkpoint_that_cannot_be_written_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried = []

    def full(folder: Path, step: int, content: dict[str, Any]) -> None:
        tried.append(step)
        if step < 15:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(loop_module, "save_checkpoint", full)
    loop = make_loop(small(tmp_path / "run", **BARE))
    run(loop)
    assert tried == [5, 10, 15] and loop.save_error is None
    errors = capsys.readouterr().err
    assert errors.count("No space left on device") == 2 and "checkpoint of step 10" in errors


def test_images_are_whole_at_the_end_where_it_is_asked_for(tmp_path: Path) -> None:
    augment = {"erasing": 0, "mixup": 1.0, "cutmix": 0, "mix_share": 0.6}
    loop = make_loop(small(tmp_path, **{**BARE, "augment": augment}))
    mixed = []
    for step in range(15):
        loop.state.step = step
        targets = loop._augmented(torch.arange(64), 32)[1]
        assert torch.allclose(targets.sum(dim=1), torch.ones(64))
        mixed.append(bool((targets.max(dim=1).values < 1).any()))
    assert mixed == [True] * 9 + [False] * 6


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (64, r"batch_size: 64 .* 3 processes .* multiple of 12"),
        (12, r"batch_size: 12 in 12 parts .* one image at a time"),
    ],
)
def test_batch_that_cannot_be_shared_out_is_refused(tmp_path: Path, batch: int, words: str) -> None:
    config = small(tmp_path, train={"batch_size": batch, "accumulate": 4})
    training, held_out = load_images(config)
    state = build_state(config, 10, CPU)
    with pytest.raises(ValueError, match=words):
        Loop(config, state, training, held_out, CPU, torch.float32, World(0, 3))
