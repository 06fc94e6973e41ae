"""Steps and the loop: clipping, stopping and resuming at any step, skipping non-finite steps."""

import contextlib
import copy
import math
import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.optim.swa_utils import update_bn

from benchmarks.scale.soak import checkpoint_steps
from models import draw
from small_runs import (
    NO_DROPOUT,
    STILL,
    Clock,
    assert_same_state,
    changed,
    events,
    make_loop,
    make_step,
    metrics,
    run_loop,
    small,
    watch_updates,
)
from vit.classifier import Classifier
from vit.commands.train import train
from vit.config import Config
from vit.data.datasets import choose_images
from vit.data.images import ImageSet
from vit.distributed.world import Diverged, Stopped, World, stop_on_signals
from vit.evaluation import Validation, evaluate, with_statistics
from vit.run.checkpoint import latest_checkpoint
from vit.run.tracker import Tracker
from vit.training.state import TrainState
from vit.training.step import TrainingStep
from worlds import in_world

BARE = {"track": {"probes": 0, "every": 3}, "train": {"epochs": 3}}  # 15 steps, quickly made
PROBE = {"train": {"freeze": "backbone", "small_share": 0, "epochs": 2}, "augment": STILL}


@pytest.mark.parametrize(
    "changes",
    [{"data": {"balance": "sampler"}, "train": {"epochs": 2}}, PROBE],
    ids=["balanced classes", "features computed once"],
)
def test_a_run_stopped_within_an_epoch_resumes_bit_for_bit(tmp_path, changes):
    """After the second of five steps; after the fifth see the next test."""
    alone = run_loop(small(tmp_path / "alone", BARE, changes)).step.state.state_dict()
    config = small(tmp_path / "stopped", BARE, changes)
    with pytest.raises(Stopped):
        run_loop(config, stop_at=7)
    assert checkpoint_steps(tmp_path / "stopped")[-1] == 7
    assert_same_state(run_loop(config).step.state.state_dict(), alone)
    assert metrics(tmp_path / "stopped") == metrics(tmp_path / "alone")


def train_loop(world: World, config: Config, at: int) -> None:
    """Train, until SIGTERM arrives while the run is validated after `at` steps."""
    validate = Validation.run

    def interrupted(self: Validation, classifier: Classifier, step: int) -> Iterator[Any]:
        for value in validate(self, classifier, step):
            yield value
            if step == at:
                os.kill(os.getpid(), signal.SIGTERM)
                raise AssertionError("goes on")

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(Validation, "run", interrupted))
        stop = stack.enter_context(stop_on_signals())
        loop = make_loop(config, world=world, stop=stop)
        if world.main:
            tracker = Tracker(Path(config.out), loop.step.state.step)
            loop.tracker = stack.enter_context(contextlib.closing(tracker))
        if at:
            stack.enter_context(pytest.raises(Stopped))
        loop.run()


@pytest.mark.parametrize(
    ("size", "at"), [(1, 5), (1, 15), pytest.param(2, 5, marks=pytest.mark.slow)]
)
def test_an_interrupted_evaluation_is_repeated(size, at, tmp_path):
    """After an epoch and at the end; it is not finished, because SIGKILL may follow SIGTERM."""
    for name, stops in (("alone", [0]), ("stopped", [at, 0])):
        config = small(tmp_path / name, BARE)
        Path(config.out).mkdir()
        for stop in stops:
            if size == 1:
                train_loop(World(), config, stop)
            else:
                in_world(size, tmp_path, train_loop, config, stop)
            assert checkpoint_steps(tmp_path / name)[-1] == (stop or 15)
    stopped, alone = (latest_checkpoint(tmp_path / name) for name in ("stopped", "alone"))
    assert_same_state(vars(stopped), vars(alone))
    assert metrics(tmp_path / "stopped") == metrics(tmp_path / "alone")


def test_validation_has_statistics_of_full_size(tmp_path, monkeypatch):
    """Five steps in each of three epochs, nine of them on smaller images."""
    loop = make_loop(small(tmp_path, BARE, train={"small_share": 0.6}))
    fresh, measure, state = {}, evaluate, loop.step.state

    def watched(classifier: Classifier, images: ImageSet) -> Any:
        pairs = zip(classifier.model.buffers(), state.evaluated().buffers(), strict=True)
        fresh[state.step] = not all(torch.equal(own, other) for own, other in pairs)
        return measure(classifier, images)

    monkeypatch.setattr("vit.evaluation.evaluate", watched)
    loop.evaluators = [e for e in loop.evaluators if e.name == "validation"]
    loop.tracker = Tracker(tmp_path)
    loop.run()
    loop.tracker.close()
    assert fresh == {5: True, 10: False, 15: False}


def test_statistics_of_images_are_those_of_torch(tmp_path, monkeypatch):
    monkeypatch.setattr("vit.evaluation.MOST_PIXELS", 64 * 32**2)  # at once; else 128 images
    loop = make_loop(small(tmp_path, BARE, model=NO_DROPOUT))
    images = choose_images(loop.training, 256, 0)
    classifier = loop.classifier()
    expected = copy.deepcopy(classifier.model).train()
    update_bn([classifier.normalize(part) for part in images.images.split(64)], expected)
    own = with_statistics(classifier, images).model
    assert not own.training and any("running_mean" in name for name, _ in own.named_buffers())
    for (name, buffer), other in zip(own.named_buffers(), expected.buffers(), strict=True):
        torch.testing.assert_close(buffer, other, msg=name)
        assert "running" not in name or not torch.equal(buffer, classifier.model.get_buffer(name))


def test_a_resumed_run_has_the_learning_rate_that_it_is_given(tmp_path):
    with pytest.raises(Stopped):
        run_loop(small(tmp_path, BARE), stop_at=8)
    run_loop(small(tmp_path, BARE, optim={"lr": 1e-4}))
    rates = [row.get("train/lr", 0) for row in metrics(tmp_path) if row["step"] > 8]
    assert 0 < max(rates) <= 1e-4
    with pytest.raises(ValueError, match=r"train\.epochs: 1 are 5 steps"):
        run_loop(small(tmp_path, BARE, train={"epochs": 1}))


def test_speed_counts_training_alone_and_seconds_count_everything(tmp_path, monkeypatch, capsys):
    clock = Clock()
    monkeypatch.setattr("vit.training.loop.time", clock)

    def one_second(*_: object) -> None:
        clock.now += 1

    class TenSeconds:
        name = "ten seconds"
        steps = range(100)

        def run(self, classifier: Classifier, step: int) -> Iterator[tuple[str, float]]:
            clock.now += 10
            yield "val/accuracy", 0.5

    watch_updates(monkeypatch, one_second)
    loop = make_loop(small(tmp_path, BARE, train={"epochs": 2}))
    loop.evaluators, loop.tracker = [TenSeconds()], Tracker(tmp_path)
    before = loop.step.state.seconds = 1000.0  # such as for compiling
    loop.run()
    loop.tracker.close()
    speeds = events(tmp_path).Scalars("train/images_per_second")
    assert [(event.step, event.value) for event in speeds] == [(3, 64), (5, 64), (8, 64), (10, 64)]
    *lines, price = capsys.readouterr().out.splitlines()
    assert price == "ten seconds took 110.0 s"
    assert [line.count(" 64 images/s ") for line in lines] == [1, 1]
    shown = [line.split("   ")[-1] for line in lines]
    assert shown == [f"{1065 // 60}:{1065 % 60}, 0:55 left", f"{1120 // 60}:{1120 % 60}, 0:00 left"]
    assert loop.step.state.seconds - before == pytest.approx(10 + 10 * (1 + 10))


def snapshot(state: TrainState) -> dict[str, Any]:
    """What a skipped step must leave alone."""
    values = state.state_dict()
    counts = ("step", "skipped", "skipped_in_a_row")
    parts = {key: value for key, value in values.items() if key not in counts}
    return copy.deepcopy(parts)


@pytest.mark.parametrize("what", ["images", "loss", "gradient"])
def test_step_that_is_not_finite_changes_nothing(what):
    step = replace(make_step(small(Path("unused"))), label_smoothing=0.0, clip_grad=None)
    state = step.state
    images, targets = draw(8, 3, 32, 32, dtype=torch.float32), torch.eye(10)[torch.arange(8)]
    step.update(images, targets)  # so that optimizers have something to lose
    before = snapshot(state)

    def spoilt_gradient(images: Tensor) -> Tensor:
        logits = state.model(images)
        logits.register_hook(lambda gradient: gradient * torch.inf)
        return logits

    forwards: dict[str, Callable[[Tensor], Tensor]] = {
        "images": state.model,
        # A loss of infinity whose gradient is finite.
        "loss": lambda x: state.model(x) + 3e38 * (torch.arange(10) == 9) - 3e38 * targets[0],
        "gradient": spoilt_gradient,
    }
    bad = images.clone()
    if what == "images":
        bad[3, 0, 0, 0] = math.nan
    result = replace(step, forward=forwards[what]).update(bad, targets)
    assert result.isnan().all()
    assert (state.step, state.skipped, state.skipped_in_a_row) == (2, 1, 1)
    torch.testing.assert_close(snapshot(state), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in state.model.parameters())
    step.update(images, targets)
    assert (state.step, state.skipped, state.skipped_in_a_row) == (3, 1, 0)
    assert state.is_finite()


def spoil(monkeypatch: pytest.MonkeyPatch, steps: range) -> None:
    """Make the images of some steps NaN."""
    watch_updates(
        monkeypatch, lambda step, images, _: step.state.step in steps and images.fill_(math.nan)
    )


def test_skipped_steps_are_counted_and_do_not_spoil_the_curves(tmp_path, monkeypatch):
    spoil(monkeypatch, range(4, 7))
    run_loop(small(tmp_path / "run", BARE))
    rows = metrics(tmp_path / "run")
    losses = {row["step"]: row.get("train/loss") for row in rows if "train/lr" in row}
    assert set(losses) == {3, 5, 8, 10, 13, 15}
    assert losses[8] is not None and losses[8] < 10  # of the one step that was not skipped
    assert all(math.isfinite(value) for row in rows for value in row.values())
    counts = [row["train/skipped_steps"] for row in rows if "train/skipped_steps" in row]
    assert counts == [1, 3, 3, 3, 3]
    spoil(monkeypatch, range(100))
    message = "^the model is not finite before training: .* at step 5,.* Check .* attention"
    with pytest.raises(Diverged, match=message):  # as none of fewer than max_skipped steps counts
        run_loop(small(tmp_path / "short", BARE, train={"epochs": 1}))
    before = message.replace("5", "3")
    with pytest.raises(Diverged, match=before):
        run_loop(small(tmp_path / "few", BARE, train={"epochs": 1, "max_skipped": 3}))


def test_too_many_in_a_row_end_the_run_and_its_checkpoints_are_finite(
    tmp_path, monkeypatch, capsys
):
    spoil(monkeypatch, range(7, 100))
    config = small(tmp_path / "run", BARE, train={"epochs": 5, "max_skipped": 6})
    with pytest.raises(SystemExit) as end:
        train(config)
    assert end.value.code == 3
    line = capsys.readouterr().err.splitlines()[-1]
    assert re.match(r"error: training diverged: .* not finite at step 13, after 6 skipped ", line)
    for part in (" nan nan nan)", "learning rate 0.00", "--optim.lr", "--overwrite"):
        assert part in line
    assert not (tmp_path / "run/model.safetensors").exists()
    found = latest_checkpoint(tmp_path / "run")
    assert found is not None and found.step == 10
    assert all(tensor.isfinite().all() for tensor in found.model.values())


@pytest.mark.parametrize("where", ["model", "ema"])
def test_weights_that_are_not_finite_are_not_saved(tmp_path, where, monkeypatch):
    update = TrainingStep.update

    def spoilt(step: TrainingStep, images: Tensor, targets: Tensor) -> Tensor:
        result = update(step, images, targets)
        with torch.no_grad():
            {"model": step.state.model, "ema": step.state.ema.module}[where].head.bias[0] = math.inf
        return result

    monkeypatch.setattr(TrainingStep, "update", spoilt)
    with pytest.raises(Diverged):
        run_loop(small(tmp_path / "run", BARE))
    assert checkpoint_steps(tmp_path / "run") == []


def test_checkpoint_that_cannot_be_written_is_tried_again(tmp_path, capsys):
    config = small(tmp_path / "run", BARE)
    (tmp_path / "run").mkdir()
    loop = make_loop(config)
    loop.tracker = tracker = Tracker(tmp_path / "run")

    def full_until(step: int, write: Callable[[], None]) -> Callable[[], None]:
        def limited() -> None:
            if loop.step.state.step < step:
                raise OSError(28, "No space left on device")
            write()

        return limited

    tracker.flush = full_until(10, tracker.flush)
    loop.write_checkpoint = full_until(15, loop.write_checkpoint)
    loop.run()
    tracker.close()
    assert checkpoint_steps(tmp_path / "run") == [15]
    errors = [line for line in capsys.readouterr().err.splitlines() if "No space left" in line]
    assert len(errors) == 2
    assert "the curves of step 5" in errors[0] and "the checkpoint of step 10" in errors[1]


def bare_step(config: Config) -> TrainingStep:
    """Build a step on a few shapes whose learning rate is constant."""
    train = {"batch_size": 64, "accumulate": 1, "whiten": False}
    config = changed(config, data={"train_size": 64, "val_size": 0}, train=train)
    return replace(make_step(config), label_smoothing=0.0, clip_grad=None)


class HalfOfTheWorld(World):
    """Two processes, of which the other one has a gradient of zero."""

    def average(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            tensor /= 2


@pytest.mark.parametrize("limit", [0.01, 1e3])
def test_the_average_gradient_is_clipped_to_its_norm(limit):
    model = {"stem": "linear", **NO_DROPOUT}
    step = bare_step(small(Path("unused"), model=model, optim={"ema_decay": None}))
    step = replace(step, clip_grad=limit, accumulate=2, world=HalfOfTheWorld())
    weights = [*step.state.model.parameters()]
    # Unlike AdamW and Muon, plain SGD does not hide the scale of a gradient.
    step.state.optimizers[:] = [torch.optim.SGD(weights, lr=100.0)]
    images, targets = draw(8, 3, 32, 32, dtype=torch.float32), torch.eye(10)[torch.arange(8)]
    loss = torch.nn.functional.cross_entropy(step.state.model.train()(images), targets) / 2
    gradients = torch.autograd.grad(loss, weights)
    norm = sum(gradient.square().sum() for gradient in gradients) ** 0.5
    assert 0.02 < norm < 1e2
    factor = min(1.0, limit / norm)
    expected = [p.detach() - 100 * factor * g for p, g in zip(weights, gradients, strict=True)]
    step.update(images, targets)
    torch.testing.assert_close([p.detach() for p in weights], expected, rtol=1e-4, atol=1e-6)


def test_each_step_draws_its_own_augmentation():
    step = bare_step(small(Path("unused")))
    images, labels = torch.randint(256, (8, 3, 32, 32), dtype=torch.uint8), torch.arange(8)
    first, again = (step.prepare(images, labels)[0] for _ in range(2))
    step.state.step = 1
    later, _ = step.prepare(images, labels)
    assert torch.equal(first, again) and not torch.equal(first, later)
