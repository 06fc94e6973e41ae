"""Small complete runs: what they write and what they refuse."""

import io
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close

from benchmarks.scale.soak import checkpoint_steps
from small_runs import (
    STEPS,
    Clock,
    begin,
    changed,
    events,
    make_loop,
    make_state,
    make_step,
    metrics,
    pixels,
    small,
    stamps,
    watch_updates,
)
from vit.commands import train as trainer
from vit.commands.config import ReportConfig
from vit.commands.report import run as evaluate_run
from vit.commands.train import train
from vit.config import Config
from vit.data import datasets
from vit.data.config import DataConfig
from vit.data.images import ImageSet
from vit.data.preprocess import Preprocess
from vit.data.shapes import KINDS
from vit.distributed.world import Stopped
from vit.evaluation import Setup
from vit.model import embed
from vit.run.checkpoint import latest_checkpoint, read_checkpoint, save_checkpoint
from vit.run.folder import prepare_run
from vit.run.length import Length, Milestones
from vit.training import build
from vit.training.build import TIMED_STEPS, WARMUP_STEPS
from vit.training.start import explained

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_test_images")]

SHAPES = Preprocess.from_config(DataConfig(name="shapes"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A finished run, what it printed, and in which order it read images and made steps."""
    run, order = tmp_path_factory.mktemp("finished") / "run", list[str]()

    find = datasets._find_images

    def watched(data: DataConfig, train: bool) -> ImageSet:
        order.append("training images" if train else "test images")
        return find(data, train)

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
        patch.setattr(datasets, "_find_images", watched)
        watch_updates(patch, lambda *_: order.append("step"))
        train(small(run))
    return SimpleNamespace(run=run, printed=printed.getvalue(), order=order)


@pytest.fixture
def unended(finished: SimpleNamespace, tmp_path: Path) -> Path:
    """A copy of the finished run, as if it had been stopped before its end."""
    run = tmp_path / "unended"
    shutil.copytree(finished.run, run)
    (run / "model.safetensors").unlink()
    return run


def test_a_finished_run_contains_these_files(finished):
    run = finished.run
    assert Config(**yaml.safe_load((run / "config.yaml").read_text())) == small(run)
    assert [p.name for p in sorted((run / "checkpoints").iterdir())] == [
        f"step_{STEPS - 5:08d}.pt", f"step_{STEPS:08d}.pt"
    ]  # fmt: skip
    assert len(list(run.glob("events.out.tfevents.*"))) == 1
    assert {p.name for p in (run / "eval").glob("*.png")} == {
        "confusion_matrix.png", "mistakes.png", "reliability.png"
    }  # fmt: skip
    assert len((run / "eval/predictions.csv").read_text().splitlines()) == 1 + 200
    assert not (run / "split.csv").exists()  # its images are drawn, not the user's files
    logged = events(run)
    for tag in ("train/loss", "train/accuracy", "train/lr", "val/loss", "val/accuracy"):
        rows = [(row["step"], row[tag]) for row in metrics(run) if tag in row]
        assert rows == [(event.step, pytest.approx(event.value)) for event in logged.Scalars(tag)]
    assert [event.step for event in logged.Scalars("val/loss")] == list(range(5, STEPS + 1, 5))


def test_start_and_end_are_printed(finished):
    run, printed = finished.run, finished.printed
    parameters = sum(parameter.numel() for parameter in make_state(small(run)).model.parameters())
    for part in (
        "320 training images (32 in each of 10 classes), 60 held out", f"{parameters:,} parameters",
        f"CPU with {torch.get_num_threads()} thread", f"steps    {STEPS} with 64 images each",
        "6 epochs", "epoch   6/6", "validation ", "95% interval", "of training", f"vit-eval {run}",
        f"tensorboard --logdir {run.parent} --samples_per_plugin images=1000",
    ):  # fmt: skip
        assert part in printed
    assert "\r" not in printed  # no bar where there is no terminal


def test_attention_is_drawn_at_every_milestone_and_changes(finished):
    accumulator = events(finished.run)
    names = (*(f"rollout/probe_{number:02d}" for number in range(3)), "statistics")
    found = {*accumulator.Tags()["images"]}
    assert found == {f"vit/attention/{name}" for name in (*names, "importance")}
    (importance,) = accumulator.Images("vit/attention/importance")
    assert importance.step == STEPS
    for name in names:
        pictures = accumulator.Images(f"vit/attention/{name}")
        assert [picture.step for picture in pictures] == [*Milestones(Length(STEPS), 10)]
        first, last = pictures[0].encoded_image_string, pictures[-1].encoded_image_string
        assert first != last and min(pixels(first).std(), pixels(last).std()) > 20  # not blank


def test_eval_gives_the_same_numbers_as_the_end_of_training(finished, tmp_path, capsys):
    run, printed = finished.run, finished.printed
    report = json.loads((run / "eval" / "report.json").read_text())
    out = tmp_path / "report"
    for _ in range(2):  # the second report replaces the files of the first
        evaluate_run(str(run), ReportConfig(out=str(out), device="cpu", precision="float32"))
        shown = capsys.readouterr().out
    assert len(list(out.glob("events.out.tfevents.*"))) == 1
    again = json.loads((out / "report.json").read_text())
    for key in report.keys() - {"images_per_second", "training"}:
        assert again[key] == report[key], key
    assert f"{report['accuracy']:.2%}" in shown and f"{report['accuracy']:.2%}" in printed
    (point,), (logged,) = (events(at).Scalars("test/accuracy") for at in (out, run))
    assert point.value == pytest.approx(report["accuracy"])
    assert (logged.step, logged.value) == (point.step, point.value)
    with pytest.raises(ValueError, match="is not part of a report"):
        evaluate_run(str(run), ReportConfig(out=str(run)))


def test_test_images_are_read_once_and_last(finished):
    assert finished.order == ["training images", *["step"] * STEPS, "test images"]


def clock_of_steps(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[float], float]) -> Clock:
    """Let training read a clock on which a step takes `seconds` of the time at which it begins."""
    clock = Clock(0.0)
    for module in ("build", "loop"):
        monkeypatch.setattr(f"vit.training.{module}.time", clock)

    def wait(*_: object) -> None:
        clock.now += seconds(clock.now)

    watch_updates(monkeypatch, wait)
    return clock


def few_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time two steps of each phase after the first."""
    monkeypatch.setattr("vit.training.build.WARMUP_STEPS", 1)
    monkeypatch.setattr("vit.training.build.TIMED_STEPS", 2)


def test_budget_sets_the_schedule_and_a_resumed_run_is_what_it_would_have_been(
    tmp_path, monkeypatch, capsys
):
    """The clock says that each step takes 1,000 seconds, and that nothing else takes time."""
    clock = clock_of_steps(monkeypatch, lambda _: 1000.0)
    few_trials(monkeypatch)
    budget = {"budget_minutes": 600.0, "compile": False}
    config = small(tmp_path / "run", train=budget, track={"probes": 0}, model={"patch_size": 8})
    train(config)
    # 98% of 36,000 seconds less 6,000 for two phases of 3 trial steps: 29,280. After an epoch of
    # 320 images, 60 are classified, each in a third of the time of training on it: 27 steps. After
    # a tenth, 312 seconds are left for the last validation, so 28 fit. After an epoch, it turns out
    # that it takes no time.
    assert "steps    27 with" in capsys.readouterr().out
    assert clock.now == (2 * 3 + 29) * 1000.0
    assert checkpoint_steps(tmp_path / "run")[-2:] == [25, 29]
    rates = {row["step"]: row["train/lr"] for row in metrics(tmp_path / "run") if "train/lr" in row}
    assert rates[29] == pytest.approx(2e-3 * (24 / 26) * (22 / 25) / 23)
    report = json.loads((tmp_path / "run/eval/report.json").read_text())
    names = ("planned_steps", "steps", "epochs", "seconds")
    assert [report["training"][name] for name in names] == [27, 29, 29 / 5, 35_000]

    updates, (left, right) = [], (tmp_path / "run", tmp_path / "resumed")
    with monkeypatch.context() as patch, pytest.raises(OSError, match="no power"):

        def fail(*_: object) -> None:
            updates.append(clock.now)
            if len(updates) == 2 * 3 + 18:
                raise OSError("no power")

        watch_updates(patch, fail)
        train(replace(config, out=str(right)))
    train(replace(config, out=str(right)))
    assert checkpoint_steps(right)[-2:] == [25, 29]
    before, after = (load_file(run / "model.safetensors") for run in (left, right))
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_phases_share_the_time_in_which_steps_are_measured(tmp_path, monkeypatch):
    """A step takes 1,000 seconds; 3 of one phase fit into a quarter of 17,820, of two only 2."""
    clock_of_steps(monkeypatch, lambda _: 1000.0)
    few_trials(monkeypatch)
    budget = {"budget_minutes": 300.0, "compile": False}
    run = begin(small(tmp_path, train=budget, track={"probes": 0}, model={"patch_size": 8}))
    _, step = build.build_step(run, trainer.load_data(run)[0])
    assert step.state.length.total_steps == 17 - 2 * 2


LOADS: dict[str, Callable[[float], float]] = {  # by done fraction of the budget
    "busy, then idle": lambda done: 2 if done < 0.3 else 1,
    "idle, then busy": lambda done: 1 if done < 0.6 else 2,
    "by turns": lambda done: 1 + int(8 * done) % 2,
}


@pytest.mark.parametrize("load", LOADS)
def test_a_budget_is_kept_while_other_programs_come_and_go(load, tmp_path, monkeypatch):
    """The time of a step is measured at first, and then decides nine times how many more fit.

    An epoch has 100 steps, so the run ends in the first or second, and the end moves within it.
    """
    for name in ("WARMUP_STEPS", "TIMED_STEPS"):
        monkeypatch.setattr(build, name, 1)
    clock = clock_of_steps(monkeypatch, lambda now: 6 * LOADS[load](now / 600))
    train(small(
        tmp_path / "run", data={"train_size": 6400}, track={"probes": 0}, model={"patch_size": 8},
        train={"budget_minutes": 10.0, "compile": False},
    ))  # fmt: skip
    assert clock.now == pytest.approx(600, rel=0.08)
    last = latest_checkpoint(tmp_path / "run")
    assert last is not None and last.step == last.total_steps
    measured = [row["step"] for row in metrics(tmp_path / "run") if "val/accuracy" in row]
    assert measured[-1] == last.step


@pytest.mark.parametrize("times", [1, 3])
def test_a_budget_allows_for_what_follows_the_last_step(times, tmp_path, monkeypatch):
    """A step with 64 images takes 6 seconds of 600, and the validation of 1,920 takes 60."""
    clock = clock_of_steps(monkeypatch, lambda _: 6.0)
    few_trials(monkeypatch)

    class Logging:
        name = "validation"

        def __init__(self, setup: Setup) -> None:
            self.steps = Milestones(setup.length, times)

        def run(self, *_: object) -> list[tuple[str, float]]:
            clock.now += 60
            return []

    monkeypatch.setattr("vit.commands.train.EVALUATORS", (Logging,))
    budget = {"budget_minutes": 10.0, "compile": False}
    with torch.no_grad():  # as a notebook may leave it
        train(small(
            tmp_path / "run", data={"train_size": 7000, "val_size": 1920}, train=budget,
            track={"probes": 0}, model={"patch_size": 8},
        ))  # fmt: skip
    assert clock.now == pytest.approx(600, rel=0.03)


def test_the_epochs_that_a_budget_buys_choose_its_settings(tmp_path, monkeypatch, capsys):
    """A step takes 1,000 seconds. 55 fit beside a measurement of 6, and 49 beside two."""
    seconds = [1000.0]
    clock_of_steps(monkeypatch, lambda _: seconds[0])
    few_trials(monkeypatch)
    for images, crop, steps in ((128, 0, 55), (320, 3, 49)):  # first 22 epochs and 10, see above
        run, budget = tmp_path / str(images), {"budget_minutes": 1050.0, "compile": False}
        config = small(
            run, data={"train_size": images}, train=budget, track={"probes": 0},
            augment={"crop_padding": 0}, model={"patch_size": 8},
        )  # fmt: skip
        fewer = changed(config, augment={"crop_padding": 3})
        plans = {0.0: fewer, 20.0: config}
        bad = changed(config, model={"num_heads": 5})
        with pytest.raises(ValueError, match="num_heads: 5 does not divide"):
            train(config, plans={0.0: bad})
        assert not run.exists()
        train(config, plans=plans)
        stored = Config(**yaml.safe_load((run / "config.yaml").read_text()))
        assert (stored.augment.crop_padding, checkpoint_steps(run)[-1]) == (crop, steps)
        change = "budget   10 epochs fit without changes, so augment.crop_padding: 0 -> 3\n"
        assert (change in capsys.readouterr().out) == (crop == 3)
    before = load_file(run / "model.safetensors")
    (run / "model.safetensors").unlink()
    (run / "checkpoints" / "step_00000049.pt").unlink()
    seconds[0] = 1.0  # the resumed run would choose otherwise now
    train(config, plans=plans)
    after = load_file(run / "model.safetensors")
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize(("minutes", "steps"), [(60.0, WARMUP_STEPS + TIMED_STEPS), (1e-3, 2)])
def test_trials_of_a_budget_take_the_steps_of_the_run_and_leave_no_trace(
    minutes, steps, tmp_path, monkeypatch
):
    """Each phase, with its image size and its mixing, is timed for as many steps: two if short."""
    taken: list[tuple[int, bool]] = []

    def look(_: object, images: Tensor, targets: Tensor) -> None:
        taken.append((images.shape[-1], bool((targets.max(dim=1).values < 1).any())))

    watch_updates(monkeypatch, look)
    config = small(
        tmp_path,
        augment={"mixup": 1.0, "cutmix": 0.0, "mix_share": 0.8},
        train={
            "budget_minutes": minutes,
            "small_share": 0.5,
            "small_scale": 0.75,
            "whiten": False,
            "compile": False,
        },
    )
    fresh, planned = make_state(config).state_dict(), make_step(config).state.state_dict()
    assert taken == [(24, True)] * steps + [(32, True)] * steps + [(32, False)] * steps
    assert planned.pop("total_steps") > 0 and planned.pop("seconds") > 0
    for part in ("model", "optimizers", "ema", "step"):
        torch.testing.assert_close(planned[part], fresh[part], rtol=0, atol=0)


def test_overwrite_deletes_what_train_and_eval_wrote_and_no_more(finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished.run, run)
    written = """split.csv export/preprocess.py eval/predictions.csv eval/photos.csv
        eval/attention/index.json eval/attention/faithfulness.json eval/attention/image_00003.png
        eval/attention/relevance.npy eval/photos/cat_sheet.png eval/compare_other/comparison.json
        eval/compare_other/comparison.md eval/compare_other/comparison.png"""
    mine = """notes.txt checkpoints/step_00000007_best.pt export/timm/notes.txt eval/notes.txt
        eval/attention/image.png eval/photos/cat.png"""
    for name in (written + " " + mine).split():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("x")
    prepare_run(small(run), resume=False)
    left = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    assert left == {*mine.split(), "config.yaml"}


def test_a_moved_run_without_its_model_file_is_not_trained_again(finished, unended, tmp_path):
    run = unended
    before = metrics(run)
    train(small(run, data={"root": str(tmp_path)}))
    assert metrics(run) == before
    for name, tensor in load_file(finished.run / "model.safetensors").items():
        assert torch.equal(load_file(run / "model.safetensors")[name], tensor), name


def test_an_unfinished_run_with_other_images_is_refused(unended):
    (_, path) = sorted((unended / "checkpoints").iterdir())
    checkpoint = read_checkpoint(path)
    for changes in ({"num_images": 321}, {"classes": [*KINDS[:-1], "blob"]}):
        save_checkpoint(unended, replace(checkpoint, **changes))
        before = stamps(unended)
        with pytest.raises(ValueError, match=r"data\.root: .* does not contain .*unended was "):
            train(small(unended))
        assert stamps(unended) == before


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("saved", [False, True])
def test_a_stopped_run_says_how_to_resume(overwrite, saved, tmp_path, capsys):
    """Not how to resume the run that it was to replace."""
    checkpoint = tmp_path / "checkpoints" / "step_00000005.pt"
    checkpoint.parent.mkdir()
    checkpoint.touch()
    run = begin(small(tmp_path))
    run.stop.signal = signal.SIGINT
    with pytest.raises(SystemExit) as ended, explained(run, overwrite):
        if saved:
            os.utime(checkpoint, ns=(1, 1))
        raise Stopped
    assert ended.value.code == 130
    how = " without --overwrite" if overwrite else ""
    words = f"{how} to resume after step 5" if saved or not overwrite else " to start over"
    assert f"SIGINT: rerun the command{words}" in capsys.readouterr().err
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(SystemExit), explained(run, overwrite=False):
        raise Stopped
    assert "stopped by SIGINT: the run had finished" in capsys.readouterr().err


def test_determinism_is_requested_and_lack_of_memory_explained(tmp_path, monkeypatch):
    explained = r"^train\.batch_size: out of memory with 64 images .* train\.accumulate=2; lower"
    for deterministic, error, text in (
        (True, ValueError("as it is"), "^as it is$"),
        (False, RuntimeError("DefaultCPUAllocator: not enough memory"), explained),
    ):
        seen = []

        def stop_here(*_: Any, seen: list[bool] = seen, error: Exception = error) -> None:
            seen.append(torch.are_deterministic_algorithms_enabled())
            raise error

        monkeypatch.setattr(trainer, "load_data", stop_here)
        with pytest.raises(ValueError, match=text):
            train(replace(small(tmp_path / "run"), deterministic=deterministic))
        assert seen == [deterministic]


def test_stem_starts_from_the_training_images_and_batch_norm_soon_forgets(tmp_path):
    for epochs, momentum in ((4, 0.5), (30, 0.1)):
        config = small(tmp_path / "run", train={"epochs": epochs})
        loop, expected = make_loop(config), make_state(config).model.patch_embed.proj
        embed.whiten(expected[0], SHAPES.normalize(loop.training.pixels()))
        stem = loop.step.state.model.patch_embed.proj
        assert_close(stem[0].weight, expected[0].weight, rtol=0, atol=1e-6)
        norms = [module for module in stem if isinstance(module, torch.nn.BatchNorm2d)]
        assert norms and {norm.momentum for norm in norms} == {momentum}


def test_the_first_command_apologizes_for_nothing_and_ends_with_attention(demo):
    """As on a machine on which only this package has been installed."""
    printed = (demo.parent / "printed.txt").read_text()
    assert not re.search(r"warning|note:|not installed|cannot|unable|traceback", printed.lower())
    *_, page, tensorboard = printed.splitlines()
    assert page.split("  #")[0].endswith(f"eval.py {demo} export html")
    assert tensorboard.endswith("/#attention") and f"--logdir {demo.parent}" in tensorboard
