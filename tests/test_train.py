"""Small complete runs: what they write and what they refuse; see also test_reliability.py."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from small_runs import (
    ROOT,
    STEPS,
    Clock,
    command,
    events,
    make_loop,
    make_state,
    make_step,
    metrics,
    pixels,
    small,
    stamps,
)
from vit.data import datasets
from vit.data.config import DataConfig
from vit.data.datasets import open_images
from vit.data.images import ImageSet
from vit.data.preprocess import Preprocess
from vit.data.shapes import KINDS
from vit.model import embed
from vit.model_file import load_model
from vit.reporting.config import ReportConfig
from vit.reporting.report import evaluate_run
from vit.run.checkpoint import read_checkpoint, save_checkpoint
from vit.run.folder import prepare_run
from vit.run.tracker import milestones
from vit.training import train as trainer
from vit.training.build import TIMED_STEPS, WARMUP_STEPS
from vit.training.config import Config, from_dict
from vit.training.schedule import lr_at
from vit.training.step import TrainingStep
from vit.training.train import train

pytestmark = pytest.mark.slow

SHAPES = Preprocess.from_config(DataConfig(name="shapes"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A finished run, made by the command, and what the command printed."""
    folder = tmp_path_factory.mktemp("finished")
    config = small(folder / "run")
    done = subprocess.run(
        command(config, folder / "config"), capture_output=True, text=True, check=True, timeout=200
    )
    return folder / "run", done.stdout


@pytest.fixture
def unended(finished: tuple[Path, str], tmp_path: Path) -> Path:
    """A copy of the finished run, as if it had been stopped before its end."""
    run = tmp_path / "unended"
    shutil.copytree(finished[0], run)
    (run / "model.safetensors").unlink()
    return run


def started(run: Path) -> Config:
    """The config of `small` as train.py writes it down: with its number of processes."""
    return small(run, train={"processes": 1})


def test_run_folder_holds_what_readme_promises(finished: tuple[Path, str]) -> None:
    run, _ = finished
    assert from_dict(yaml.safe_load((run / "config.yaml").read_text())) == started(run)
    assert [p.name for p in sorted((run / "checkpoints").iterdir())] == [
        f"step_{STEPS - 5:08d}.pt", f"step_{STEPS:08d}.pt"
    ]  # fmt: skip
    assert len(list(run.glob("events.out.tfevents.*"))) == 1
    assert {p.name for p in (run / "eval").glob("*.png")} == {
        "confusion_matrix.png", "mistakes.png", "reliability.png"
    }  # fmt: skip
    assert len((run / "eval/predictions.csv").read_text().splitlines()) == 1 + 2000
    assert not (run / "split.csv").exists()  # its images are drawn, not the user's files


def test_start_and_end_are_printed(finished: tuple[Path, str]) -> None:
    run, printed = finished
    state = make_state(small(run))
    parameters = sum(parameter.numel() for parameter in state.model.parameters())
    for part in (
        "320 training images (32 in each of 10 classes), 60 held out",
        f"{parameters:,} parameters", "GFLOPs per forward pass",
        f"CPU with {torch.get_num_threads()} thread", f"steps    {STEPS} with 64 images each",
        "6 epochs", "epoch   6/6", "validation ",
        "95% interval", "of training", f"python eval.py {run}",
        f"tensorboard --logdir {run.parent} --samples_per_plugin images=1000",
    ):  # fmt: skip
        assert part in printed
    assert "\r" not in printed  # no bar where there is no terminal


def test_curves_stand_at_the_same_steps_in_both_logs(finished: tuple[Path, str]) -> None:
    run, _ = finished
    accumulator = events(run)
    for tag in ("train/loss", "train/accuracy", "train/lr", "val/loss", "val/accuracy"):
        logged = [(row["step"], row[tag]) for row in metrics(run) if tag in row]
        shown = [(event.step, event.value) for event in accumulator.Scalars(tag)]
        assert [step for step, _ in logged] == [step for step, _ in shown]
        assert [v for _, v in shown] == pytest.approx([v for _, v in logged], rel=1e-6)
    assert [event.step for event in accumulator.Scalars("val/loss")] == list(range(5, STEPS + 1, 5))


def test_attention_is_drawn_at_every_milestone_and_changes(finished: tuple[Path, str]) -> None:
    accumulator = events(finished[0])
    tags = [f"vit/attention/rollout/probe_{number:02d}" for number in range(3)]
    signed = [f"vit/attention/lrp/probe_{number:02d}" for number in range(3)]
    others = [f"vit/attention/{name}" for name in ("filmstrip", "heads/probe_00", "statistics")]
    last = "vit/attention/importance"
    assert sorted(accumulator.Tags()["images"]) == sorted([*tags, *signed, *others, last])
    assert [picture.step for picture in accumulator.Images(last)] == [STEPS]
    for tag in tags + signed + others:
        pictures = accumulator.Images(tag)
        assert [picture.step for picture in pictures] == milestones(STEPS, 10)
        first, last = pictures[0].encoded_image_string, pictures[-1].encoded_image_string
        assert first != last
        for encoded in (first, last):
            assert pixels(encoded).std() > 20  # not blank
    for drawn, size in ((tags, (706, 256)), (signed, (706, 256))):
        for tag in drawn:
            assert {(p.width, p.height) for p in accumulator.Images(tag)} == {size}


def test_numbers_of_attention_stand_at_every_milestone(finished: tuple[Path, str]) -> None:
    accumulator = events(finished[0])
    ranges = {"entropy": (0, 1), "distance": (0, 40), "sink": (1 / 66, 1), "patch_norm": (0, 1e3)}
    for name, (low, high) in ranges.items():
        for layer in range(2):
            points = accumulator.Scalars(f"vit/attention/{name}/layer_{layer:02d}")
            assert [point.step for point in points] == milestones(STEPS, 10)
            assert all(low < point.value <= high for point in points)


def test_memory_that_runs_out_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: not enough memory"
        )

    monkeypatch.setattr(TrainingStep, "update", full)
    words = (
        r"^train\.batch_size: out of memory with 64 images .* train\.accumulate=2; lower --train"
    )
    with pytest.raises(ValueError, match=words):
        train(small(tmp_path / "run"))
    monkeypatch.setattr(TrainingStep, "update", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # any other error keeps its own words
        train(small(tmp_path / "run"))


def test_eval_gives_the_same_numbers_as_the_end_of_training(
    finished: tuple[Path, str], tmp_path: Path
) -> None:
    run, printed = finished
    report = json.loads((run / "eval" / "report.json").read_text())
    done = subprocess.run(
        [
            sys.executable, str(ROOT / "eval.py"), str(run), "--out", str(tmp_path / "again"),
            "--device", "cpu", "--precision", "float32",
        ],
        capture_output=True, text=True, check=True, timeout=100,
    )  # fmt: skip
    again = json.loads((tmp_path / "again" / "report.json").read_text())
    for key in report.keys() - {"images_per_second"}:
        assert again[key] == report[key], key
    assert f"{report['accuracy']:.2%}" in done.stdout
    assert f"{report['accuracy']:.2%}" in printed
    for name in report["per_class"]:
        assert name in done.stdout
    shown = events(tmp_path / "again")
    pictures = {"vit/test/confusion_matrix", "vit/test/reliability", "vit/test/mistakes"}
    assert {*shown.Tags()["images"]} == pictures
    (point,), (logged,) = (found.Scalars("test/accuracy") for found in (shown, events(run)))
    assert point.value == pytest.approx(report["accuracy"])
    assert (logged.step, logged.value) == (point.step, point.value)


def test_report_replaces_its_own_files_and_no_others(
    finished: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = finished
    out = tmp_path / "report"
    out.mkdir()
    (out / "holiday.png").write_bytes(b"mine")
    for _ in range(2):
        evaluate_run(str(run), ReportConfig(out=str(out)))
        assert "warning" not in capsys.readouterr().out
    assert (out / "holiday.png").read_bytes() == b"mine"
    assert len(list(out.glob("events.out.tfevents.*"))) == 1
    with pytest.raises(ValueError, match="contains files other than a report"):
        evaluate_run(str(run), ReportConfig(out=str(run)))


def test_test_images_are_read_once_and_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = []

    def watched_open(data: DataConfig, train: bool, *args: Any, **kwargs: Any) -> ImageSet:
        order.append("training images" if train else "test images")
        return open_images(data, train, *args, **kwargs)

    update = TrainingStep.update

    def watched_update(step: TrainingStep, images: Tensor, targets: Tensor) -> Tensor:
        order.append("step")
        return update(step, images, targets)

    monkeypatch.setattr(datasets, "open_images", watched_open)
    monkeypatch.setattr(TrainingStep, "update", watched_update)
    train(small(tmp_path / "run", train={"epochs": 1}))
    assert order == ["training images", *["step"] * 5, "test images"]


def test_model_file_and_last_checkpoint_are_the_same_model(finished: tuple[Path, str]) -> None:
    run, _ = finished
    whole = load_model(run)
    from_checkpoint = load_model(run / "checkpoints" / f"step_{STEPS:08d}.pt")
    assert whole.path == run / "model.safetensors"
    assert whole.config == from_checkpoint.config == started(run)
    assert whole.classifier.classes == from_checkpoint.classifier.classes
    assert whole.classifier.preprocess == from_checkpoint.classifier.preprocess == SHAPES
    assert whole.finished and not from_checkpoint.finished
    assert whole.step == from_checkpoint.step == STEPS
    for name, tensor in whole.classifier.model.state_dict().items():
        assert torch.equal(tensor, from_checkpoint.classifier.model.state_dict()[name]), name


def steps_of(run: Path) -> list[int]:
    return [int(path.stem[5:]) for path in sorted((run / "checkpoints").iterdir())]


def test_budget_sets_the_schedule_and_a_resumed_run_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The clock says that each step takes 1,000 seconds, and half as long in the resumed run."""
    clock, step_seconds = Clock(0.0), 1000.0
    monkeypatch.setattr("vit.training.build.time", clock)
    update = TrainingStep.update

    def slow_update(step: TrainingStep, images: Tensor, targets: Tensor) -> Tensor:
        clock.now += step_seconds
        return update(step, images, targets)

    monkeypatch.setattr(TrainingStep, "update", slow_update)
    budget = {"budget_minutes": 1000.0, "compile": False}
    config = small(tmp_path / "run", train=budget, track={"probes": 0})
    train(config)
    # 96% of 60,000 seconds less 30,000 for two phases of 15 trial steps: 27,600, or 27.6 steps. The
    # real time of building the step counts too, but even 600 seconds would not change the result.
    assert clock.now == (2 * 15 + 27) * step_seconds
    assert steps_of(tmp_path / "run")[-2:] == [25, 27]
    assert "to fit into 1000 minutes" in capsys.readouterr().out
    rates = {row["step"]: row["train/lr"] for row in metrics(tmp_path / "run") if "train/lr" in row}
    assert rates[27] == pytest.approx(2e-3 * lr_at(26, 27, 1, "linear"))
    before = load_file(tmp_path / "run" / "model.safetensors")

    (tmp_path / "run" / "model.safetensors").unlink()
    (tmp_path / "run" / "checkpoints" / "step_00000027.pt").unlink()
    step_seconds = 500.0
    train(config)  # on from the checkpoint before
    assert steps_of(tmp_path / "run")[-2:] == [25, 27]
    after = load_file(tmp_path / "run" / "model.safetensors")
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_trial_steps_leave_no_trace(tmp_path: Path) -> None:
    config = small(tmp_path, train={"budget_minutes": 1.0, "whiten": False})
    fresh = make_state(config).state_dict()
    planned = make_step(config).state.state_dict()
    assert planned.pop("total_steps") > 0 and planned.pop("seconds") > 0
    for part in ("model", "optimizers", "ema", "step"):
        torch.testing.assert_close(planned[part], fresh[part], rtol=0, atol=0)


def test_trials_of_a_budget_take_the_steps_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each phase, with its image size and its mixing, is timed for as many steps."""
    taken: list[tuple[int, bool]] = []
    update = TrainingStep.update

    def watched_update(step: TrainingStep, images: Tensor, targets: Tensor) -> Tensor:
        taken.append((images.shape[-1], bool((targets.max(dim=1).values < 1).any())))
        return update(step, images, targets)

    monkeypatch.setattr(TrainingStep, "update", watched_update)
    config = small(
        tmp_path,
        augment={"mixup": 1.0, "cutmix": 0.0, "mix_share": 0.8},
        train={"budget_minutes": 1.0, "small_share": 0.5, "small_scale": 0.75},
    )
    make_step(config)
    steps = WARMUP_STEPS + TIMED_STEPS
    assert taken == [(24, True)] * steps + [(32, True)] * steps + [(32, False)] * steps


@pytest.mark.parametrize("whiten", [True, False])
def test_stem_starts_from_the_training_images_if_asked(tmp_path: Path, whiten: bool) -> None:
    still = {"lr": 1e-12, "muon_lr": 1e-12, "weight_decay": 0.0, "muon_weight_decay": 0.0}
    config = small(tmp_path / "run", optim=still, train={"whiten": whiten, "epochs": 1})
    train(config)
    images = make_loop(config).training.pixels()
    expected = make_state(config).model.patch_embed.proj[0]
    if whiten:
        embed.whiten(expected, SHAPES.normalize(images))
    weights = load_file(tmp_path / "run" / "model.safetensors")
    torch.testing.assert_close(
        weights["patch_embed.proj.0.weight"], expected.weight.detach(), rtol=0, atol=1e-6
    )


def test_finished_run_is_refused_and_left_alone(finished: tuple[Path, str]) -> None:
    run, _ = finished
    before = stamps(run)
    with pytest.raises(ValueError, match=r"finished run.*vit-eval.*--out.*--overwrite"):
        train(small(run))
    assert stamps(run) == before


def test_overwrite_deletes_only_what_a_run_wrote(tmp_path: Path) -> None:
    run = tmp_path / "run"
    quick = {
        "data": {"val_size": 0, "train_size": 64},
        "train": {"epochs": 1},
        "track": {"probes": 0},
    }
    train(small(run, **quick))
    mine = [run / "notes.txt", run / "eval" / "notes.txt", run / "checkpoints" / "mine.pt"]
    for path in mine:
        path.write_text("mine")
    report = train(small(run, **quick, optim={"lr": 1e-3}), overwrite=True)
    assert all(path.read_text() == "mine" for path in mine)
    assert len(list(run.glob("events.out.tfevents.*"))) == 1
    assert load_model(run).config.optim.lr == 1e-3
    assert report["n"] == 2000


def test_overwrite_deletes_what_eval_wrote_and_no_more(
    finished: tuple[Path, str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished[0], run)
    written = [
        run / "eval" / name
        for name in (
            "attention/index.json", "attention/faithfulness.json", "attention/image_00003.png",
            "attention/relevance.npy", "photos/cat_sheet.png", "compare_other/comparison.json",
            "compare_other/comparison.md", "compare_other/comparison.png",
            "00030/features/tensors.tsv", "predictions.csv", "photos.csv", "../split.csv",
            "../export/preprocess.py",
        )
    ]  # fmt: skip
    mine = [
        run / "eval" / name
        for name in ("attention/image.png", "photos/cat.png", "resnet/features/mine.npy")
    ]
    for path in [*written, *mine]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    prepare_run(small(run), resume=False)
    assert not any(path.exists() for path in written)
    assert all(path.exists() for path in mine)


def test_moved_run_with_its_end_missing_is_only_ended(
    finished: tuple[Path, str], unended: Path, tmp_path: Path
) -> None:
    run = unended
    before = metrics(run)
    train(small(run, data={"root": str(tmp_path)}))
    assert metrics(run) == before
    for name, tensor in load_file(finished[0] / "model.safetensors").items():
        assert torch.equal(load_file(run / "model.safetensors")[name], tensor), name


@pytest.mark.parametrize("changes", [{"num_images": 321}, {"classes": [*KINDS[:-1], "blob"]}])
def test_unfinished_run_whose_images_are_others_now_is_refused(
    changes: dict[str, Any], unended: Path
) -> None:
    for path in (unended / "checkpoints").iterdir():
        save_checkpoint(unended, replace(read_checkpoint(path), **changes))
    before = stamps(unended)
    with pytest.raises(ValueError, match=r"data\.root: .* does not contain .*unended was started"):
        train(small(unended))
    assert stamps(unended) == before


def test_deterministic_run_asks_torch_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def stop_here(*_: Any) -> None:
        seen.append(torch.are_deterministic_algorithms_enabled())
        raise ValueError("far enough")

    monkeypatch.setattr(trainer, "load_data", stop_here)
    for deterministic in (True, False):
        with pytest.raises(ValueError, match="far enough"):
            train(replace(small(tmp_path / "run"), deterministic=deterministic))
    assert seen == [True, False]


def test_folder_that_is_no_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    (tmp_path / "config.yaml").write_text("lr: 1\n")  # somebody else's
    for overwrite in (False, True):
        with pytest.raises(ValueError, match="contains files other than a run"):
            train(small(tmp_path), overwrite=overwrite)
    with pytest.raises(ValueError, match="is a file"):
        train(small(tmp_path / "thesis.tex"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "thesis.tex"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"val_size": 10_000, "train_size": None}}, "data.val_size: 10000"),
        ({"train": {"device": "cuda"}}, "device: cuda"),
    ],
)
def test_impossible_run_leaves_no_folder(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    if "device" in changes.get("train", {}) and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ValueError, match=message):
        train(small(tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(
    not (ROOT / "data" / "cifar-10-batches-py").exists(),
    reason="CIFAR-10 is not in data/cifar-10-batches-py",
)
def test_cifar10_run_learns(tmp_path: Path) -> None:
    config = small(
        tmp_path / "run",
        data={"name": "cifar10", "root": str(ROOT / "data"), "train_size": 2000, "val_size": 100},
        model={"embed_dim": 48, "drop_rate": 0, "attn_drop_rate": 0, "proj_drop_rate": 0},
        augment={"erasing": 0, "mixup": 0, "cutmix": 0},
        train={"epochs": 4, "accumulate": 1},
    )  # fmt: skip
    report = train(config)
    assert report["n"] == 10_000
    assert report["accuracy_95"][0] > 0.25  # chance is 0.10
    again = evaluate_run(str(tmp_path / "run"), ReportConfig(batch_size=1000, precision="float32"))
    assert again["accuracy"] == pytest.approx(report["accuracy"], abs=2e-4)


@pytest.mark.parametrize("epochs", [4, 30])
def test_batch_norm_forgets_its_initial_statistics_also_in_a_short_run(
    tmp_path: Path, epochs: int
) -> None:
    loop = make_loop(small(tmp_path / "run", model={"stem": "conv"}, train={"epochs": epochs}))
    total = loop.step.schedule.total_steps
    assert total == 5 * epochs
    norm = next(m for m in loop.step.state.model.modules() if isinstance(m, torch.nn.BatchNorm2d))
    assert norm.momentum == (0.1 if epochs == 30 else 0.5)
    norm.running_mean.fill_(1e6)
    if epochs == 4:
        loop.run()
        assert norm.running_mean.abs().max() < 10
