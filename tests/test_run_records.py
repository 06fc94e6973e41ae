"""What a run and eval.py RUN maps write for the Attention tab."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

from small_runs import StopAt, make_loop, small
from vit.data.datasets import load
from vit.distributed.stop import Stopped
from vit.explain.maps import MAP_KINDS, attention_maps
from vit.model.attention_model import require_attention
from vit.model_file import load_model, save_model
from vit.reporting.attention import explain_run
from vit.reporting.attention_logging import AttentionLogging
from vit.reporting.config import MapsConfig
from vit.run.checkpoint import checkpoint_steps
from vit.run.tracker import Tracker, milestones
from vit.tensorboard_plugin.encoding import (
    LIVE_TAG,
    LIVE_WEIGHTS_TAG,
    decode_details,
    decode_weights,
)
from vit.tensorboard_plugin.records import FRAMES_TAG
from vit.training.config import Config

VIT = {"name": "timm:vit_tiny_patch16_224"}
TIMM_ARGS = {"patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}
STEPS = 10


def records_in(folder: Path) -> dict[str, list[tuple[int, bytes]]]:
    """Return the records in a folder as TensorBoard reads them, by tag: step and content."""
    events = EventAccumulator(str(folder), tensor_size_guidance={"attention": 0}).Reload()
    return {
        tag: [(event.step, event.tensor_proto.string_val[0]) for event in events.Tensors(tag)]
        for tag in events.PluginTagToContent("attention")
    }


def decoded(stored: list[tuple[int, bytes]]) -> torch.Tensor:
    """Return features that are stored at a single step, step 7."""
    ((step, content),) = stored
    codes, scale = decode_weights(content)
    assert step == 7
    return torch.from_numpy(codes * scale[..., None])


def train(config: Config, stop_at: int = 0) -> None:
    """Train in a folder, resumed if it has a checkpoint, and log attention alone."""
    Path(config.out).mkdir(exist_ok=True)
    stop = StopAt(stop_at)
    loop = make_loop(config, stop=stop)
    stop.state = loop.step.state
    (logging,) = (found for found in loop.evaluators if isinstance(found, AttentionLogging))
    loop.evaluators = [logging]
    loop.tracker = Tracker(Path(config.out), loop.step.state.step)
    try:
        loop.run()
    finally:
        loop.tracker.close()


def test_resumed_run_has_the_records_of_each_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vit.reporting.live.graph_of", lambda classifier: b"graph")
    changes = {"train": {"epochs": 2}, "track": {"probes": 2, "live_mb": 1}}
    alone, stopped = (small(tmp_path / name, **changes) for name in ("alone", "stopped"))
    train(alone)
    with pytest.raises(Stopped):
        train(stopped, stop_at=7)
    newest = tmp_path / "stopped/checkpoints/step_00000007.pt"
    newest.unlink()  # as if it had been killed before it could write a checkpoint
    assert checkpoint_steps(tmp_path / "stopped") == [5]
    train(stopped)
    expected, found = (records_in(tmp_path / name) for name in ("alone", "stopped"))
    ((_, graph),), again = expected.pop(LIVE_TAG), found.pop(LIVE_TAG)
    assert again == [(step, graph) for step in (0, 6)]  # once in each process
    assert found == expected
    for step in milestones(STEPS, 10):
        assert [at for at, _ in expected.pop(LIVE_WEIGHTS_TAG.format(step))] == [step]
    names = [f"attention/probe_{number:02d}" for number in range(2)]
    parts = [f"{name}{part}" for name in names for part in ("", "/weights", "/features")]
    assert sorted(expected) == sorted([FRAMES_TAG, *parts])
    for found in expected.values():
        assert [step for step, _ in found] == milestones(STEPS, 10)
        assert len({content for _, content in found}) == len(found)  # attention changes


@pytest.mark.parametrize("model", [{}, {**VIT, "timm_args": TIMM_ARGS}], ids=["ours", "timm"])
def test_eval_writes_records_of_the_images_asked_for(
    tmp_path: Path, model: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    config = small(run)
    if model:
        config = Config(data=config.data, train=config.train, model=model, out=str(run))  # type: ignore[arg-type]
    save_model(run / "model.safetensors", make_loop(config).classifier(), config, 7)
    options = MapsConfig(
        indices=(1, 4), device="cpu", precision="float32", head_fusion="max" if model else "mean"
    )
    for _ in range(2):  # the second time replaces what the first wrote
        explain_run(str(run), options)
    folder = run / "eval/attention"
    assert f"tensorboard --logdir {folder}" in capsys.readouterr().out
    found, test = records_in(folder), load("shapes", "", train=False)
    saved = load_model(run, "cpu", "float32")
    classifier = saved.classifier
    reader = require_attention(classifier.model)
    live = {LIVE_TAG, LIVE_WEIGHTS_TAG.format(7)} if model else set()  # live_mb is 0 in ours
    assert len(found) == 7 + len(live) and {*live, FRAMES_TAG} < {*found}
    frames = decoded(found[FRAMES_TAG])  # (L, K, D)
    for index in options.indices:
        tag = f"attention/image_{index:05d}"
        ((step, content),), ((_, packed),) = found[tag], found[f"{tag}/weights"]
        details, (codes, scale) = decode_details(content), decode_weights(packed)
        assert step == 7 and details.label == test.labels[index]
        assert {shown.kind for shown in details.maps} == {*MAP_KINDS} - {"lrp_pixels"}
        inputs = classifier.normalize(test.pixels()[index : index + 1])
        with torch.no_grad():
            _, weights, _ = reader.forward_intermediates(inputs)
        assert decoded(found[f"{tag}/features"]).shape[:2] == frames.shape[:2]
        expected = torch.stack(weights)[:, 0].numpy()
        error = np.abs(codes * scale[..., None] - expected) / expected.max(axis=-1, keepdims=True)
        assert error.max() <= 1 / 510 + 1e-6
        assert (details.maps[0].title == "attention rollout (max over heads)") == bool(model)
        _, maps = attention_maps(classifier.model, inputs, head_fusion=options.head_fusion)
        np.testing.assert_allclose(
            details.maps[0].values, maps["rollout"][0].flatten(), rtol=1e-3, atol=1e-4
        )
    with Image.open(folder / "features.png") as sheet:  # two images, and a map of each layer
        assert sheet.height > 2 * 96 and sheet.width > (1 + len(frames)) * 96
