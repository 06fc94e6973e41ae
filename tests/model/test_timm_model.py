"""Models of timm: built, trained, resumed, evaluated; test_timm_attention.py reads attention."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file

from models import PLAIN, randomize
from small_runs import assert_same_state, changed, metrics, run_loop
from vit.classifier import build_model
from vit.cli import parse_train
from vit.commands.config import MapsConfig, PhotoConfig, ReportConfig
from vit.commands.maps import run as explain_run
from vit.commands.photo import run as classify_photos
from vit.commands.report import run as evaluate_run
from vit.commands.train import train
from vit.config import Config, OptimConfig, to_dict
from vit.data.config import DataConfig
from vit.data.preprocess import Preprocess
from vit.distributed.world import Stopped
from vit.explain.maps import MAP_KINDS, attention_maps
from vit.model.config import ModelConfig
from vit.model.vit import VisionTransformer
from vit.training.optim import build_optimizers
from vit.training.start import check_config

pytestmark = pytest.mark.usefixtures("few_test_images")
TINY = {"patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
SHAPES = Preprocess.from_config(DataConfig(name="shapes"))
RESNET = {"model": {"name": "timm:test_resnet"}, "optim": {"name": "adamw"}}
VIT = {"model": {"name": "timm:vit_tiny_patch16_224", "timm_args": TINY}}
NO_MAPS = "attention maps are not available for test_resnet: they need one sequence of tokens"


def config(out: Path, parts: dict[str, Any]) -> Config:
    """A run of four steps on drawn shapes, with everything that keeps state."""
    run: dict[str, Any] = {
        "data": {"name": "shapes", "val_size": 40, "train_size": 128},
        "train": {"epochs": 2, "batch_size": 64, "accumulate": 2, "device": "cpu",
                  "precision": "float32", "checkpoint_blocks": True},
        "track": {"every": 1, "probes": 2, "live_mb": 0},
        "optim": {"ema_decay": 0.9, **parts.get("optim", {})},
        "model": parts["model"],
    }  # fmt: skip
    return Config(**{"out": str(out), **run})


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_maps_equal_those_of_our_model_with_the_same_weights(pool):
    sizes: dict[str, Any] = TINY | {"img_size": 32, "num_classes": 5, "reg_tokens": 1}
    sizes["global_pool"] = pool
    theirs = randomize(timm.create_model("vit_tiny_patch16_224", **sizes), 0.4)
    ours = VisionTransformer(**(PLAIN | sizes)).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    images = torch.randn(4, 3, 32, 32)
    logits, maps = attention_maps(theirs, images, list(MAP_KINDS))
    expected, ours_maps = attention_maps(ours, images, list(MAP_KINDS))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    for kind in MAP_KINDS:
        torch.testing.assert_close(maps[kind], ours_maps[kind], rtol=1e-3, atol=1e-3, msg=kind)


def test_data_set_decides_sizes_and_the_model_keeps_timms_names():
    grey = Preprocess((32, 48), (0.5,), (0.5,))
    model = build_model(ModelConfig(**VIT["model"]), grey, 7)
    assert model(torch.zeros(2, 1, 32, 48)).shape == (2, 7)
    assert model(torch.zeros(2, 1, 16, 24)).shape == (2, 7)  # at the beginning of a run
    made = timm.create_model(
        "vit_tiny_patch16_224", **TINY, img_size=(32, 48), in_chans=1, num_classes=7
    )
    made.load_state_dict(model.state_dict(), strict=True)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"name": "resnet18"}, "model.name: resnet18 is not allowed; it must be vit, or timm: and"),
        ({"name": "timm:test_vit.r160_in1k"}, "not a model of timm .*did you mean timm:test_vit"),
        ({"name": "timm:hf-hub:a/b"}, "model.name: timm:hf-hub:a/b is not a model of timm"),
        ({"name": "timm:test_resnet", "drop_path_rate": 0.1}, "drop_path_rate: .* must be 0.0"),
        ({"timm_args": {"depth": 3}}, "model.timm_args: .* must be null with model.name=vit"),
        ({"timm_args": "text"}, "model.timm_args: text is not allowed; it must be a valid dict"),
        ({"timm_args": {3: 3}}, "model.timm_args: 3 is not allowed; it must be a valid string"),
        ({"timm_args": {"a": {1, 2}}}, "model.timm_args: {1, 2} is not allowed"),
        ({"name": "timm:test_resnet", "timm_args": {"depht": 3, "b": 1}}, ".* argument 'depht'"),
        ({"name": "timm:test_vit", "timm_args": {"checkpoint_path": "/x"}}, "_path is not allowed"),
        ({"name": "timm:vit_small_patch14_reg4_dinov2"}, r"32 x 32 pixels .*made for 518 x 518"),
        ({"name": "timm:test_vit_relpos"}, "train.small_share: 0.75 .* must be 0 .* of 24 x 24"),
    ],
)
def test_mistake_is_one_line(model, words):
    with pytest.raises(ValueError, match=words) as error:
        check_config(Config(model=model, optim={"name": "adamw"}))  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "key", "value", "allowed"),
    [
        ("test_resnet", "optim.name", "muon", "adamw"),
        ("naflexvit_base_patch16_gap", "train.whiten", True, "false"),
        ("pit_ti_224", "train.checkpoint_blocks", True, "false"),
    ],
)
def test_what_a_model_cannot_do_is_refused(name, key, value, allowed):
    settings = {"optim.name": "adamw", "train.whiten": False, "train.small_share": 0, key: value}
    words = [f"--{each}={setting}" for each, setting in settings.items()]
    data = ["--data.name=shapes", "--data.image_size=224"]
    config, _ = parse_train([f"--model.name=timm:{name}", *data, *words])
    with pytest.raises(ValueError, match=f"^{key}: {value} .* must be {allowed} with"):
        check_config(config)


def test_arguments_are_yaml_in_a_flag_and_in_a_file(tmp_path):
    expected = {"depth": 2, "drop_rate": 1e-3, "qkv_bias": False, "act_layer": "silu", "x": [1, 2]}
    text = "{depth: 2, drop_rate: 1e-3, qkv_bias: false, act_layer: silu, x: [1, 2]}"
    (tmp_path / "run.yaml").write_text(f"model:\n  timm_args: {text}\n  name: timm:test_vit\n")
    for arguments in (["--model.timm_args", text], ["--config", str(tmp_path / "run.yaml")]):
        config, _ = parse_train(["--model.name", "timm:test_vit", *arguments])
        assert config.model.timm_args == expected
        with pytest.raises(ValueError, match=r"timm cannot build .* argument 'x'"):
            check_config(config)
    model = ModelConfig(name="timm:test_vit", timm_args=expected)
    text = {"qkv_bias": "False", "a": ["true", "None", "1e-3", "x"]}  # as JSON or Python has it
    args = ModelConfig(name="timm:test_vit", timm_args=text).timm_args
    assert args == {"qkv_bias": False, "a": [True, None, 0.001, "x"]}
    assert Config(**json.loads(json.dumps(to_dict(Config(model=model))))).model == model
    with pytest.raises(ValueError, match=r"model.timm_args: \{depth: is not YAML"):
        parse_train(["--model.name", "timm:test_vit", "--model.timm_args", "{depth:"])


def test_weight_decay_spares_what_timm_spares():
    arguments = {"embed_dim": 12, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4}
    config = ModelConfig(name="timm:swin_tiny_patch4_window7_224", timm_args=arguments)
    model = build_model(config, Preprocess((32, 32), (0.5,) * 3, (0.5,) * 3), 5)
    (adamw,) = build_optimizers(model, OptimConfig(name="adamw"))
    spared = {
        name
        for name, parameter in model.named_parameters()
        for group in adamw.param_groups
        if group["weight_decay"] == 0 and any(parameter is each for each in group["params"])
    }
    assert "layers.0.blocks.0.attn.relative_position_bias_table" in spared
    assert "layers.0.blocks.0.attn.qkv.weight" not in spared
    assert {name for name, parameter in model.named_parameters() if parameter.ndim < 2} < spared


@pytest.mark.slow
def test_a_model_without_maps_is_evaluated_all_the_same(tmp_path, capsys):
    resnet = tmp_path / "resnet"
    train(config(resnet, RESNET))
    weights = load_file(resnet / "model.safetensors")
    timm.create_model("test_resnet", num_classes=10).load_state_dict(weights, strict=True)
    logged = {tag for row in metrics(resnet) for tag in row}
    assert not any("attention/" in tag or "faithfulness/" in tag for tag in logged)
    expected = json.loads((resnet / "eval/report.json").read_text())
    options = ReportConfig(out=str(tmp_path / "eval"), device="cpu", precision="float32")
    assert evaluate_run(str(resnet), options)["loss"] == pytest.approx(expected["loss"])
    assert NO_MAPS in capsys.readouterr().out
    with pytest.raises(ValueError, match=NO_MAPS):
        explain_run(str(resnet), MapsConfig(out=str(tmp_path / "maps"), device="cpu"))
    photo, out = tmp_path / "photo.png", tmp_path / "photos"
    Image.new("RGB", (40, 50), (200, 30, 30)).save(photo)
    classify_photos(str(resnet), PhotoConfig(photos=(str(photo),), out=str(out), device="cpu"))
    shown = capsys.readouterr().out
    assert shown.count("%") == 5 and f"no sheets: {NO_MAPS}" in shown
    assert not [*out.rglob("*.png")]


def test_a_run_with_torchs_dropout_resumes_bit_for_bit(tmp_path):
    arguments = {**TINY, "proj_drop_rate": 0.2, "drop_path_rate": 0.2}
    parts = {"model": {"name": VIT["model"]["name"], "timm_args": arguments}}
    alone = run_loop(config(tmp_path / "alone", parts)).step.state.state_dict()
    stopped = config(tmp_path / "stopped", parts)
    with pytest.raises(Stopped):
        run_loop(stopped, stop_at=1)
    torch.manual_seed(9)
    assert_same_state(run_loop(stopped).step.state.state_dict(), alone)


def test_a_model_whose_patches_are_not_square_is_trained_and_logged(tmp_path):
    """Without the distance of attention, which is in patches of one size."""
    parts = {"model": {"name": VIT["model"]["name"], "timm_args": {**TINY, "patch_size": [8, 4]}}}
    run = config(tmp_path / "run", parts)
    train(changed(run, train={"epochs": 1, "small_share": 0.0}))
    logged = {tag for row in metrics(tmp_path / "run") for tag in row}
    assert "attention/entropy/layer_00" in logged and "attention/distance/layer_00" not in logged
