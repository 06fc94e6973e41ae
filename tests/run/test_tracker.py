"""TensorBoard events and metrics.jsonl, read back."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from tensorboard.plugins.hparams import metadata

from small_runs import events, metrics
from vit.reporting.attention_logging import ROLLOUT_TAG
from vit.run.tracker import Tracker


def read_scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    found = events(run)
    return {
        tag: [(event.step, event.value) for event in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }


def draw_picture(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (20, 30, 3), dtype=np.uint8)


def test_metrics_are_on_the_disk_before_a_flush_ends(tmp_path, monkeypatch):
    synced, tracker = [], Tracker(tmp_path)
    monkeypatch.setattr(
        os, "fsync", lambda number: synced.append(Path(f"/proc/self/fd/{number}").read_text())
    )
    tracker.scalars(3, {"train/loss": 1.5})
    tracker.flush()
    assert synced == ['{"step": 3, "train/loss": 1.5}\n']
    tracker.close()


def test_a_resumed_run_drops_damaged_lines_and_what_came_after_its_checkpoint(tmp_path):
    file = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": float(step)}).encode() for step in (1, 2, 5, 5, 6)]
    damage = [b"\0" * 20, b"[1]", b'{"a": 1}', b'{"step": "x"}', b"\xff\xfe"]
    whole = b"\n".join([lines[0], *damage, *lines[1:]]) + b"\n"
    for rest in (b"", b'{"step": 9, "lo', b'{"step": 3, "loss": 1', b'{"step": 9, "loss": 9.0}'):
        file.write_bytes(whole + rest)
        tracker = Tracker(tmp_path, step=5)
        tracker.scalars(7, {"loss": 70.0})
        tracker.close()
        expected = b"\n".join([*lines[:4], b'{"step": 7, "loss": 70.0}']) + b"\n"
        assert file.read_bytes() == expected


def test_tensorboard_shows_no_step_twice_after_resuming(tmp_path):
    tag = ROLLOUT_TAG.format(0)
    tracker = Tracker(tmp_path)
    for step in range(1, 9):
        tracker.scalars(step, {"train/loss": float(step)})
    for step in (0, 3, 5, 8):
        tracker.show(step, tag, draw_picture(step))
    tracker.close()
    tracker = Tracker(tmp_path, step=5)
    for step in (6, 7):
        tracker.scalars(step, {"train/loss": 10.0 * step})
    tracker.show(7, tag, draw_picture(70))
    tracker.close()
    kept = [(step, float(step)) for step in range(1, 6)]
    assert read_scalars(tmp_path) == {"train/loss": [*kept, (6, 60.0), (7, 70.0)]}
    assert [event.step for event in events(tmp_path).Images(f"vit/{tag}")] == [0, 3, 5, 7]
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3, 4, 5, 6, 7]


def test_a_full_disk_loses_no_metrics(tmp_path, capsys):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    tracker = Tracker(tmp_path)
    tracker.scalars(1, {"train/loss": 1.0})
    tracker.flush()
    file, tracker._metrics = tracker._metrics, open("/dev/full", "ab", buffering=0)  # noqa: SIM115, PTH123
    tracker._writer._get_file_writer().add_event = full
    for step in (2, 3):
        tracker.scalars(step, {"train/loss": float(step)})
        tracker.show(step, "picture", draw_picture(step))
        with pytest.raises(OSError, match="No space left"):
            tracker.flush()  # after which TensorBoard has a new file
    tracker._metrics.close()
    tracker._metrics = file
    tracker.scalars(4, {"train/loss": 4.0})
    tracker.close()
    assert capsys.readouterr().err.count("TensorBoard misses points") == 1
    assert [row["step"] for row in metrics(tmp_path)] == [1, 2, 3, 4]
    assert [step for step, _ in read_scalars(tmp_path)["train/loss"]] == [1, 3, 4]
    assert [event.step for event in events(tmp_path).Images("vit/picture")] == [3]


def test_attention_comes_after_the_curves_in_tensorboard_alone(tmp_path):
    tags = ("attention/distance/layer_00", "faithfulness/rollout", "train/lr", "val/loss")
    tracker = Tracker(tmp_path)
    tracker.scalars(1, dict.fromkeys(tags, 0.5))
    tracker.show(1, "test/mistakes", draw_picture(0))
    tracker.scalars(1, {"test/accuracy": 1.0}, tensorboard_only=True)
    tracker.close()
    assert metrics(tmp_path) == [{"step": 1, **dict.fromkeys(tags, 0.5)}]
    shown = [*read_scalars(tmp_path), *events(tmp_path).Tags()["images"]]
    assert sorted(shown) == [
        "test/accuracy", "train/lr", "val/loss", "vit/attention/distance/layer_00",
        "vit/faithfulness/rollout", "vit/test/mistakes",
    ]  # fmt: skip


def test_hyperparameters_are_logged_without_fixing_the_columns(tmp_path):
    tracker = Tracker(tmp_path)
    tracker.hyperparameters(
        {"optim.lr": 0.5, "train.compile": False, "data.name": "shapes", "x": None}
    )
    tracker.close()
    plugin = events(tmp_path).summary_metadata
    # A summary of the experiment would fix the columns to those of the first run.
    assert set(plugin) == {metadata.SESSION_START_INFO_TAG, metadata.SESSION_END_INFO_TAG}
    content = plugin[metadata.SESSION_START_INFO_TAG].plugin_data.content
    values = metadata.parse_session_start_info_plugin_data(content).hparams
    found = {key: getattr(value, value.WhichOneof("kind")) for key, value in values.items()}
    assert found == {
        "optim.lr": 0.5, "train.compile": False, "data.name": "shapes", "x": "None"
    }  # fmt: skip
