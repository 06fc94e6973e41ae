"""Pretrained weights of our and of timm's models, compared with timm; and what is refused.

timm's models have random weights here.
"""

import dataclasses
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.testing import assert_close

from models import names, randomize, save_untrained
from small_runs import Payload, assert_same, begin, small
from vit.classifier import build_model
from vit.commands.train import load_data, train
from vit.config import Config, to_dict
from vit.data.config import AugmentConfig, DataConfig
from vit.data.preprocess import Preprocess
from vit.data.shapes import KINDS
from vit.model.config import ModelConfig
from vit.model.vit import VisionTransformer
from vit.model_file import save_model
from vit.pretrained.adapt import Pretrained, fit, with_statistics
from vit.pretrained.architecture import ARCHITECTURE, adopt
from vit.pretrained.load import load as load_model
from vit.pretrained.sources import (
    UNKNOWN,
    complete,
    find_source,
    resolve_pretrained,
    settings_of_timm,
    weights_of_timm,
)
from vit.run.checkpoint import Checkpoint, checkpoint_paths, save_checkpoint
from vit.run.folder import prepare_run, unfinished_config
from vit.training.build import build_step
from vit.training.start import check_config
from vit.training.state import _load_pretrained, build_state

pytestmark = pytest.mark.usefixtures("few_test_images")
TINY = "vit_tiny_patch16_224"
ARCHITECTURES = (
    TINY,
    "vit_base_patch32_clip_224",
    "deit3_small_patch16_224",
    "vit_small_patch14_reg4_dinov2",
    "vit_medium_patch16_gap_256",
    "vit_base_patch16_siglip_gap_256",
    "vit_base_patch16_clip_quickgelu_224",
    "vit_small_patch16_rope_224",
    "vit_relpos_small_patch16_224",
    "vit_relpos_base_patch16_cls_224",
)
VIT = {"embed_dim": 24, "depth": 2, "num_heads": 3, "patch_size": 8}
SMALL_TIMM = {**VIT, "img_size": 32}


def draw_timm(name: str, **arguments: Any) -> nn.Module:
    return randomize(timm.create_model(name, **arguments), 0.04)


def save_timm(model: nn.Module, folder: Path, **arguments: Any) -> None:
    timm.models.save_for_hf(model, folder, model_args=arguments, safe_serialization=True)


def source_of(model: nn.Module, **values: Any) -> Pretrained:
    settings, side = settings_of_timm(model, "timm's"), model.patch_embed.img_size[0]
    return Pretrained("timm's", settings, model.state_dict(), (3, side, side), **values)


SHARED_BIAS = {"use_rel_pos_bias": False, "use_shared_rel_pos_bias": True}
SAME: list[tuple[str, dict[str, Any], str]] = [  # arguments of timm, and positions in attention
    (TINY, {"act_layer": "gelu_tanh"}, "none"),
    (TINY, {"qk_norm": True, "norm_layer": "layernorm"}, "none"),
    (TINY, {"mlp_ratio": 2.7, "pos_embed": "none", "init_values": None}, "none"),
    (TINY, {"reg_tokens": 2, "no_embed_class": True, "global_pool": "avg"}, "none"),
    (TINY, {"qkv_bias": False, "fc_norm": True}, "none"),
    ("vit_base_patch32_clip_224", {"init_values": None}, "none"),
    ("deit3_small_patch16_224", {}, "none"),
    ("vit_base_patch16_clip_quickgelu_224", {}, "none"),
    ("vit_relpos_small_patch16_224", {"rel_pos_type": "bias", "class_token": True}, "bias"),
    ("vit_relpos_small_patch16_224", {"rel_pos_type": "mlp", "fc_norm": False}, "bias"),
    ("vit_relpos_base_patch16_cls_224", {"rel_pos_type": "mlp-swin"}, "bias"),
    ("vit_srelpos_small_patch16_224", {"rel_pos_type": "bias", "qk_norm": True}, "bias"),
    ("vit_srelpos_small_patch16_224", {"class_token": True, "global_pool": "token"}, "bias"),
    ("beit_base_patch16_224", {"use_abs_pos_emb": True}, "bias"),
    ("beitv2_base_patch16_224", SHARED_BIAS, "bias"),
    ("vit_small_patch16_rope_224", {}, "rope"),
    ("vit_base_patch16_rope_ape_224", {"num_reg_tokens": 2, "global_pool": "avg"}, "rope"),
]


@pytest.mark.parametrize(("name", "arguments", "kind"), SAME)
def test_our_model_gives_the_logits_of_timms(name, arguments, kind, tmp_path):
    """From a folder as timm saves it, with a grid that is not square."""
    arguments = VIT | {"img_size": (24, 40), "init_values": 0.1} | arguments
    theirs = randomize(timm.create_model(name, num_classes=7, **arguments), 0.2)
    save_timm(theirs, tmp_path / "saved", **arguments, num_classes=7)
    found = find_source(str(tmp_path / "saved"), ModelConfig(pretrained="x"))
    assert found.settings["rel_pos"] == kind and found.input_size == (3, 24, 40)
    ours = VisionTransformer(img_size=(24, 40), in_chans=3, num_classes=7, **found.settings).eval()
    ours.load_state_dict(found.weights, strict=True)
    images = torch.randn(2, 3, 24, 40, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, logits = theirs(images), ours(images)
        mirrored = ours(images.flip(-1))
    assert (expected[0] - expected[1]).abs().max() > 1e-2  # the image matters, and its places
    assert (logits - mirrored).abs().max() > 1e-2
    assert_close(logits, expected, rtol=0, atol=1e-5)
    if kind == "none":
        theirs.load_state_dict(ours.state_dict(), strict=True)  # and back


@pytest.mark.parametrize("size", [(16, 56), (40, 24)])
def test_biases_of_another_grid_are_cut_or_repeat_the_border(size):
    """As `BiasPositions` treats larger grids, whose patches are never farther in smaller ones."""
    model = draw_timm(
        "vit_relpos_base_patch16_cls_224", **VIT, img_size=(24, 40), rel_pos_type="bias"
    )
    source = Pretrained("x", settings_of_timm(model, "x"), weights_of_timm(model), (3, 24, 40))
    weights, account = adapted(source, size, 8, 3, 1000)
    (rows, columns), key = (side // 8 for side in size), "attn.rel_pos.relative_position_bias_table"
    assert f"adapted: position biases 3 x 5 -> {rows} x {columns} patches" in account
    for layer in range(2):
        old, new = (state[f"blocks.{layer}.{key}"] for state in (source.weights, weights))
        assert torch.equal(new[-3:], old[-3:])  # of the class token
        old, new = old[:-3].view(5, 9, 3), new[:-3].view(2 * rows - 1, 2 * columns - 1, 3)
        for down in range(1 - rows, rows):
            for across in range(1 - columns, columns):
                nearest = old[min(max(down, -2), 2) + 2, min(max(across, -4), 4) + 4]
                assert torch.equal(new[down + rows - 1, across + columns - 1], nearest)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("eva02_tiny_patch14_224", {}, "EvaAttention, GluMlp, SiLU"),
    ("vit_small_patch16_rope_mixed_224", {}, "RotaryEmbeddingMixed"),
    ("vit_pe_spatial_base_patch16_512", {}, r"rope\.temperature=.*grid_offset=1\.0, "),
    ("vit_base_patch16_siglip_224", {}, "AttentionPoolLatent"),
    ("test_vit", {"act_layer": "relu"}, "ReLU"),
    ("test_vit", {"global_pool": "max"}, "global_pool=max"),
    ("test_vit", {"pool_include_prefix": True, "global_pool": "avg"}, "pool_include_prefix"),
]


@pytest.mark.parametrize(("name", "options", "part"), REFUSED)
def test_a_part_that_ours_lacks_is_refused_by_name(name, options, part):
    with torch.device("meta"):
        model = timm.create_model(name, **options)
    words = rf"model\.pretrained: {name} has .*{part}.*: add --model\.name timm:{name}$"
    with pytest.raises(ValueError, match=words):
        settings_of_timm(model, name)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture_is_inferred_from_a_state_dict(name):
    """Rotary positions have no weights: the config names them, and images may have any size."""
    with torch.device("meta"):
        arguments = {"rel_pos_type": "bias"} if "relpos" in name else {}
        model = timm.create_model(name, depth=2, **arguments)
    expected, is_rope = settings_of_timm(model, name), "rope" in name
    told = (*UNKNOWN, "rel_pos") if is_rope else UNKNOWN
    config = ModelConfig(pretrained="x", **{key: expected[key] for key in told})
    source = complete(name, model.state_dict(), config)
    assert source.settings == expected
    assert source.weights.keys() == weights_of_timm(model).keys()
    assert is_rope or source.input_size == (3, *model.patch_embed.img_size)
    assert all(f"{key}={expected[key]}" in source.notes[0] for key in told)
    assert ("rel_pos=" in source.notes[0]) == is_rope


def test_the_number_of_heads_follows_from_the_width_of_their_norms():
    model = draw_timm(TINY, **SMALL_TIMM, qk_norm=True)
    source = complete("x", model.state_dict(), ModelConfig(num_heads=2))
    assert source.settings["num_heads"] == 3
    assert source.notes == (
        "not in the file, from the config: norm_eps=1e-06, act_layer=gelu, global_pool=token",
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pos_embed": None}, "no position embeddings.*--model.rel_pos rope.*--model.pos_embed"),
        ({"blocks.0.attn.q_bias": torch.zeros(24)}, 'Unexpected key.* "blocks.0.attn.q_bias"'),
        ({"patch_embed.proj.weight": None}, "not a Vision Transformer .* no patch_embed.proj"),
        ({"blocks.1.norm1.weight": None}, 'Missing key.* "blocks.1.norm1.weight"'),
        ({"blocks.0.attn.qkv.weight": torch.ones(60, 24)}, "3 is not allowed; .* width 20"),
        ({"dist_token": torch.zeros(1, 1, 24)}, "a distillation token; .* --model.name timm:NAME"),
        ({"model.norm.weight": torch.zeros(24)}, "contains several models, whose names differ"),
        ({"pos_embed": torch.zeros(17)}, "is incomplete or damaged: IndexError"),
        ({"blocks.x.norm.weight": torch.zeros(1)}, "is incomplete or damaged: ValueError"),
    ],
)
def test_a_foreign_state_dict_is_refused(change, message, tmp_path):
    weights = {**draw_timm(TINY, **SMALL_TIMM).state_dict(), **change}
    file = tmp_path / "weights.safetensors"
    save_file({key: value for key, value in weights.items() if value is not None}, file)
    with pytest.raises(ValueError, match=rf"^model\.(pretrained|num_heads): .*{message}") as error:
        resolve_pretrained(Config(model=ModelConfig(pretrained=str(file))), None)
    assert "\n" not in str(error.value)


# --- adapting


def adapted(
    source: Pretrained, size: tuple[int, int], patch: int, chans: int, classes: int
) -> tuple[dict[str, Tensor], str]:
    model = adopt(ModelConfig(pretrained="x", patch_size=patch), source.settings, "x")
    images = DataConfig(name="folder", image_size=size, channels=chans).spec
    return fit(source, model, images).adapted(names(classes))


@pytest.mark.parametrize(
    ("name", "size", "patch", "chans"),
    [
        (TINY, (32, 96), 4, 3),
        ("deit3_small_patch16_224", (16, 16), 16, 1),
        ("deit3_small_patch16_224", (64, 64), 8, 4),
    ],
)
def test_weights_are_adapted_as_timm_does(name, size, patch, chans, tmp_path):
    sizes = {**SMALL_TIMM, "img_size": 64}
    model = draw_timm(name, **sizes, num_classes=5)
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    expected = timm.create_model(
        name,
        pretrained=True,
        pretrained_cfg_overlay={
            "file": tmp_path / "weights.pth", "num_classes": 5, "input_size": (3, 64, 64)
        },
        **{**sizes, "img_size": size, "patch_size": patch},
        in_chans=chans,
        num_classes=9,
    ).state_dict()  # fmt: skip
    weights, account = adapted(source_of(model), size, patch, chans, 9)
    assert expected.keys() - weights.keys() == {"head.weight", "head.bias"}
    for key, value in weights.items():
        assert_close(value, expected[key], rtol=0, atol=1e-6, msg=key)
    assert (f"-> {chans} channels" in account) == (chans != 3)
    assert "9 classes instead of 5" in account


def test_a_head_is_kept_for_classes_of_the_same_names_in_their_order():
    source = source_of(draw_timm("test_vit", num_classes=5), classes=names(5))
    weights, account = source.adapted(names(5)[::-1])
    for key in ("head.weight", "head.bias"):
        assert torch.equal(weights[key], source.weights[key].flip(0))
    assert "has the same classes" in account
    weights, account = source.adapted((*names(4), "other"))
    assert "head.weight" not in weights and "other names" in account


# --- the config


with torch.device("meta"):
    PLAIN = settings_of_timm(timm.create_model(TINY), "x")


def test_architecture_replaces_defaults_and_nothing_else():
    with torch.device("meta"):
        settings = settings_of_timm(timm.create_model("vit_small_patch14_reg4_dinov2"), "x")
    config = ModelConfig(pretrained="x", drop_path_rate=0.2, num_heads=6)
    found = adopt(config, settings, "x")
    assert {key: getattr(found, key) for key in settings} == settings
    assert (found.pretrained, found.drop_path_rate) == ("x", 0.2)
    assert adopt(found, settings, "x") == found  # as from the config of the run
    assert set(settings) == set(ARCHITECTURE)


@pytest.mark.parametrize(
    ("source", "values", "message"),
    [
        (PLAIN, {"depth": 6}, r"model\.depth: 6 .*; x has 12; leave the key out"),
        (PLAIN, {"init_values": 0.1}, r"model\.init_values: 0\.1 .*; x has null"),
        (PLAIN, {"act_layer": "gelu_tanh"}, r'act_layer: "gelu_tanh" .*; x has "gelu"'),
        ({**PLAIN, "stem": "conv"}, {"patch_size": 8}, r"model\.patch_size: 8 .*; x has 16"),
    ],
)
def test_a_contradiction_is_refused(source, values, message):
    with pytest.raises(ValueError, match=message):
        adopt(ModelConfig(pretrained="x", **values), source, "x")


def test_images_are_normalized_as_the_source_was_trained():
    preprocess = Preprocess.from_config(DataConfig(name="shapes"))
    source = Pretrained("x", {}, {}, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    found = with_statistics(preprocess, source)
    assert found == dataclasses.replace(preprocess, mean=source.mean, std=source.std)
    grey = with_statistics(dataclasses.replace(preprocess, mean=(0.5,), std=(0.5,)), source)
    assert grey.mean == pytest.approx((0.2,)) and grey.std == pytest.approx((0.5,))
    assert with_statistics(preprocess, Pretrained("x", {}, {})) == preprocess


# --- files


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same small model in every form that timm and others save it in."""
    folder = tmp_path_factory.mktemp("weights")
    model = draw_timm(TINY, **SMALL_TIMM, num_classes=5)
    state = model.state_dict()
    noise = {key: torch.zeros_like(value) for key, value in state.items()}
    save_file(state, folder / "bare.safetensors")
    torch.save({"module." + key: value for key, value in state.items()}, folder / "parallel.pt")
    named = {"net.model." + key: value for key, value in state.items()}
    torch.save({"model_state_dict": named, "epoch": 3}, folder / "nested.pth")
    named = {"model." + key: value for key, value in state.items()}
    torch.save({"state_dict": named, "epoch": 3}, folder / "lightning.ckpt")
    torch.save({"model": noise, "model_ema": state, "epoch": 3}, folder / "ema.pth")
    model.pretrained_cfg |= {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)}
    save_timm(model, folder / "saved", **SMALL_TIMM, num_classes=5)
    return folder


@pytest.mark.parametrize(
    "form", ["bare.safetensors", "parallel.pt", "nested.pth", "lightning.ckpt", "ema.pth", "saved"]
)
def test_every_form_of_file_gives_the_same_model(files, form):
    name = str(files / form)
    source = find_source(name, ModelConfig(pretrained=name))
    expected = draw_timm(TINY, **SMALL_TIMM, num_classes=5)
    assert source.settings == settings_of_timm(expected, "x")
    assert source.input_size == (3, 32, 32)
    assert source.weights.keys() == expected.state_dict().keys()
    for key, value in expected.state_dict().items():
        assert torch.equal(source.weights[key], value), key
    statistics = ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6)) if form == "saved" else (None, None)
    assert (source.mean, source.std) == statistics
    assert len(source.notes) == (form != "saved")


@pytest.mark.parametrize("value", [math.nan, 1e300])  # the latter is infinite in float32
def test_weights_that_are_not_finite_are_refused(files, tmp_path, value):
    path, state = tmp_path / "bad.safetensors", load_file(files / "bare.safetensors")
    state["blocks.1.mlp.fc1.bias"] = state["blocks.1.mlp.fc1.bias"].double()
    state["blocks.1.mlp.fc1.bias"][3] = value
    save_file(state, path)
    words = rf"^model\.pretrained: {path} has NaN or infinite values in blocks\.1\.mlp\.fc1\.bias;"
    with pytest.raises(ValueError, match=words):
        resolve_pretrained(tuned(tmp_path / "run", str(path)), None)


def test_nothing_in_a_file_is_executed(tmp_path):
    trace, file = tmp_path / "trace", tmp_path / "evil.pth"
    torch.save({"state_dict": {"a": Payload(trace)}}, file)
    with pytest.raises(ValueError, match=r"evil\.pth is damaged, or not .* execute code"):
        find_source(str(file), ModelConfig(pretrained="x"))
    assert not trace.exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.pth", "does not exist; it must be timm:NAME"),
        ("cifar10_quik", "did you mean cifar10_quick?"),
        ("README.md", "is damaged, or not a .safetensors or .pth file"),
        ("timm:vit_tny_patch16_224", r"Unknown model \(vit_tny_patch16_224"),
        ("timm:resnet18.a1_in1k", r"ResNet.* builds it: add --model\.name timm:resnet18$"),
        ("timm:vit_tiny_patch16_224.augreg_in21k", r"without a network, download config\.json"),
    ],
)
def test_a_bad_name_or_an_unreachable_hub_is_one_line(name, message, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(Path(__file__).parents[2])
    with pytest.raises(ValueError, match=rf"^model\.pretrained: .*{message}") as error:
        find_source(name, ModelConfig(pretrained=name))
    assert "\n" not in str(error.value)


# --- runs


def tuned(out: Path, pretrained: str, **changes: dict[str, Any]) -> Config:
    """Return the config of a small run from pretrained weights, in which everything draws."""
    values = to_dict(small(out, **changes))
    regularised = {key: value for key, value in values["model"].items() if key.endswith("_rate")}
    values["model"] = {"pretrained": pretrained, **regularised, **changes.get("model", {})}
    values["train"]["epochs"] = 3
    return Config(**values)


def a_run(run: Path) -> Path:
    """Write a finished run of nine steps that has a checkpoint, too, without training."""
    saved = load_model("cifar10_quick", "cpu", "float32")
    prepare_run(dataclasses.replace(saved.config, out=str(run)), resume=False)
    save_model(run / "model.safetensors", saved, saved.config, step=9)
    about = to_dict(saved.config), list(saved.classes), saved.model.state_dict()
    save_checkpoint(run, Checkpoint(3, *about, total_steps=9))
    return run


def test_loaded_weights_survive_zero_init_whitening_and_the_moving_average(files, tmp_path):
    name = str(files / "saved")
    config = tuned(tmp_path / "run", name, model={"zero_init": True})
    config, source = resolve_pretrained(config, None)
    assert config.model.zero_init and config.train.whiten and source is not None
    training, _ = load_data(begin(config))
    state = build_step(begin(config, source=source), training, source)[1].state
    averaged = state.ema.module.state_dict()
    for key, value in state.model.state_dict().items():
        if not key.startswith("head."):
            assert torch.equal(value, source.weights[key]), key
        assert torch.equal(averaged[key], value), key
    head = state.model.head  # a new one, as timm's
    assert head.weight.shape == (10, 24)
    assert head.weight.detach().std().item() == pytest.approx(0.02, rel=0.2)
    assert not head.bias.any()


def test_weights_that_fit_another_size_of_images_are_one_line(tmp_path, capsys):
    """As the table of a user's attention, which no rule resamples."""
    wrong = {"blocks.0.attn.attention.table": torch.zeros(2), "pos_embed": torch.zeros(1, 2, 24)}
    with pytest.raises(ValueError, match=r"^model\.pretrained: .* do not fit a model .*pos_embed"):
        build_state(begin(small(tmp_path)), 10, weights=wrong)
    model = nn.Linear(2, 2)
    model.register_buffer("future", torch.zeros(2))  # as a causal mask, which is built
    _load_pretrained(model, {"future": torch.ones(3), "bias": torch.ones(2)})
    assert model.bias.tolist() == [1, 1] and model.future.tolist() == [0, 0]
    assert "new for images of this size: future" in capsys.readouterr().err


@pytest.mark.parametrize("place", [".", "checkpoints/step_00000003.pt"])
def test_a_run_does_not_replace_the_weights_that_it_starts_from(tmp_path, place):
    run = a_run(tmp_path / "run")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    config = Config(out=str(run), model=ModelConfig(pretrained=str(run / place)))
    with pytest.raises(ValueError, match=r"^model\.pretrained: the new run in .* would replace "):
        train(config, overwrite=True)
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    other = dataclasses.replace(config, out=str(tmp_path / "other"))
    assert resolve_pretrained(other, None)[1] is not None


def test_weights_inside_the_folder_of_a_run_that_resumes_are_fine(tmp_path):
    run = a_run(tmp_path / "run")
    (run / "model.safetensors").unlink()
    config = Config(**yaml.safe_load((run / "config.yaml").read_text()))
    named = Config(out=str(run), model=dataclasses.replace(config.model, pretrained=str(run)))
    (run / "config.yaml").write_text(yaml.safe_dump(to_dict(named)))
    assert resolve_pretrained(named, unfinished_config(named)) == (named, None)


def test_a_run_starts_from_another_run_with_its_head_and_architecture(tmp_path):
    run = a_run(tmp_path / "run")
    config = Config(out=str(tmp_path / "second"), model=ModelConfig(pretrained=str(run)))
    found, source = resolve_pretrained(config, None)
    first = load_model("cifar10_quick", "cpu", "float32")
    expected = dataclasses.replace(first.config.model, pretrained=str(run), zero_init=False)
    assert found.model == expected
    weights, account = source.adapted(first.classes)
    assert "nothing is new: its classifier has the same classes" in account
    for key, value in first.model.state_dict().items():
        assert torch.equal(weights[key], value), key
    assert account.startswith(f"weights  {run}: ")
    (run / "model.safetensors").unlink()
    for path in (run, checkpoint_paths(run)[0]):
        account = find_source(str(path), config.model).adapted(names(2))[1]
        assert account.startswith(f"weights  {path} (unfinished run, step 3 of 9): ")


@pytest.mark.slow
def test_a_run_never_needs_its_source_again(files, tmp_path, capsys):
    source = tmp_path / "copy"
    shutil.copytree(files / "saved", source)
    config = tuned(tmp_path / "run", str(source), track={"probes": 0})
    train(config)
    run = Path(config.out)
    assert f"weights  {source}: " in capsys.readouterr().out
    shutil.copytree(run, tmp_path / "resumed")
    shutil.rmtree(source)

    saved = load_model(run)
    assert saved.config.model.embed_dim == 24
    assert saved.config.model.pretrained == str(source)
    assert saved.preprocess.mean == (0.1, 0.2, 0.3)
    resumed = dataclasses.replace(config, out=str(tmp_path / "resumed"))
    (tmp_path / "resumed/model.safetensors").unlink()
    checkpoint_paths(tmp_path / "resumed")[-1].unlink()
    train(resumed)
    assert "resuming after step 10" in capsys.readouterr().out
    assert_same(run, tmp_path / "resumed")


# --- timm's own models

SWIN = {"embed_dim": 12, "depths": [1, 2], "num_heads": [1, 2], "window_size": 4}
NAMES = {
    "test_resnet": {},
    "swin_tiny_patch4_window7_224": SWIN,
    TINY: VIT,
    "deit_tiny_distilled_patch16_224": VIT,
}
DISTILLED = "deit_tiny_distilled_patch16_224"


def timm_run(
    pretrained: Path, name: str, arguments: Any, data: dict[str, Any] | None = None, **train: Any
) -> Config:
    """Return the config of a run that starts from weights of a model of timm."""
    return Config(**{
        "data": {"name": "shapes", "val_size": 20, "train_size": 64, **(data or {})},
        "model": {"name": f"timm:{name}", "timm_args": arguments, "pretrained": str(pretrained)},
        "optim": {"name": "adamw"},
        "train": {"batch_size": 32, "small_share": 0, "whiten": False, **train},
    })  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")  # in timm's resampling of relative positions
@pytest.mark.parametrize(("name", "arguments"), NAMES.items())
@pytest.mark.parametrize(
    ("form", "size", "channels", "count"), [("bare.pth", 64, 1, 10), ("folder", 16, 3, 7)]
)
def test_weights_are_fitted_as_timm_does(name, arguments, form, size, channels, count, tmp_path):
    sized = [{} if name == "test_resnet" else {"img_size": side} for side in (32, size)]
    model = draw_timm(name, **arguments, **sized[0], num_classes=10)
    save_timm(model, tmp_path / "folder", **arguments, **sized[0], num_classes=10)
    torch.save(model.state_dict(), tmp_path / "bare.pth")
    images = {"image_size": size, "channels": channels}
    config = timm_run(tmp_path / form, name, arguments, images)
    config, source = resolve_pretrained(config, None)
    weights, account = source.adapted(names(count))
    expected = timm.create_model(
        f"local-dir:{tmp_path / 'folder'}", pretrained=True,
        num_classes=count, in_chans=channels, **sized[1],
    ).state_dict()  # fmt: skip
    head = {key for key in expected if key.startswith(("head", "fc."))}
    assert head and set(source.head) == head
    assert weights.keys() == (expected.keys() - head if count == 7 else expected.keys())
    for key, value in weights.items():
        assert_close(value, expected[key], rtol=0, atol=1e-6, msg=key)
    message = "new: a random classifier, because there are 7 classes instead of 10"
    assert (message in account) == (count == 7)
    assert ("not in the file: mean and std" in account) == (form != "folder")
    assert build_model(config.model, Preprocess.from_config(config.data), count)


@pytest.mark.parametrize(("name", "theirs", "ours"), [
    (TINY, 4, 4), ("test_resnet", 6, 6), (TINY, 1, 3)
])  # fmt: skip
def test_channels_of_a_bare_file_are_those_of_its_first_convolution(name, theirs, ours, tmp_path):
    arguments = VIT if "vit" in name else {}
    sizes = {"img_size": 32} if "vit" in name else {}
    state = draw_timm(name, **arguments, **sizes, in_chans=theirs, num_classes=10).state_dict()
    torch.save(state, tmp_path / "bare.pth")
    run = timm_run(tmp_path / "bare.pth", name, arguments)
    spec = dataclasses.replace(run.data.spec, mean=(0.5,) * ours, std=(0.5,) * ours)
    weights = fit(find_source(run.model.pretrained, run.model), run.model, spec).weights
    (first, *_) = [key for key, value in state.items() if value.ndim == 4]
    for key, value in state.items():
        expected = value.repeat(1, 3, 1, 1) / 3 if key == first and theirs != ours else value
        assert_close(weights[key], expected, msg=key)


@pytest.mark.parametrize(("part", "words"), [
    ({"rel_pos": "rope"}, "rotary positions"), ({"attention": "sigmoid"}, "sigmoid attention")
])  # fmt: skip
def test_a_run_is_not_continued_in_a_model_of_timm_that_lacks_a_part(part, words, tmp_path):
    run = save_untrained(tmp_path, {**VIT, **part})
    with pytest.raises(ValueError, match=f"it lacks their {words}"):
        resolve_pretrained(timm_run(run, TINY, None), None)


def test_a_classifier_of_another_width_is_left_out(tmp_path):
    state = draw_timm(TINY, **SMALL_TIMM, num_classes=10).state_dict()
    torch.save({**state, "head.weight": torch.ones(10, 48)}, tmp_path / "wide.pth")
    source = resolve_pretrained(tuned(tmp_path / "run", str(tmp_path / "wide.pth")), None)[1]
    weights, account = source.adapted(names(10))
    assert weights.keys() == state.keys() - {"head.weight", "head.bias"}
    assert "without the classifier, which reads more than one token" in account


def test_pooling_that_a_bare_file_does_not_tell_is_that_of_the_config(files):
    name = str(files / "bare.safetensors")
    for pool in ("token", "avg"):
        model = ModelConfig(pretrained=name, global_pool=pool)
        source = find_source(name, model)
        assert adopt(model, source.settings, name).global_pool == pool
        assert f"global_pool={pool}" in source.notes[0]


def test_arguments_come_from_the_folder_unless_the_user_gives_them(files):
    changes = {"drop_path_rate": 0.2, "patch_size": 4}
    config = timm_run(files / "saved", TINY, changes)
    found, source = resolve_pretrained(config, None)
    assert found.model.timm_args == {**VIT, **changes, "global_pool": "token"}
    assert (source.mean, source.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    check_config(found)
    expected = timm.create_model(
        f"local-dir:{files / 'saved'}", pretrained=True, patch_size=4, num_classes=10
    )
    key = "patch_embed.proj.weight"
    assert_close(source.weights[key], expected.get_parameter(key))


def test_both_heads_of_a_distilled_model_are_trained(tmp_path):
    model = draw_timm(DISTILLED, **SMALL_TIMM, num_classes=5)
    torch.save(model.state_dict(), tmp_path / "w.pth")
    config = timm_run(tmp_path / "w.pth", DISTILLED, VIT, freeze="backbone")
    config, source = resolve_pretrained(config, None)
    training, _ = load_data(begin(config))
    _, step = build_step(begin(config, source=source), training, source)
    trained = {key for key, value in step.state.model.named_parameters() if value.requires_grad}
    assert trained == {f"{head}.{x}" for head in ("head", "head_dist") for x in ("weight", "bias")}
    assert step.features is None


NAFLEX = "naflexvit_base_patch16_gap"


@pytest.mark.parametrize(
    ("saved", "name", "arguments", "message"),
    [
        (TINY, "test_resnet", None, "tensors differ in blocks.0.*; name their m"),
        (DISTILLED, DISTILLED, {**VIT, "embed_dim": 36}, "size mismatch for cls_token"),
        # timm would start with a random patch embedding and say so in a log.
        (NAFLEX, NAFLEX, VIT, "4D Conv2d"),
    ],
)
def test_weights_of_another_model_are_one_line(saved, name, arguments, message, tmp_path):
    torch.save(draw_timm(saved, **VIT).state_dict(), tmp_path / "w.pth")
    channels = 1 if name == NAFLEX else 3
    words = rf"^model\.pretrained: timm cannot fit .* {channels} channels: .*{message}"
    with pytest.raises(ValueError, match=words) as error:
        resolve_pretrained(
            timm_run(tmp_path / "w.pth", name, arguments, {"channels": channels}), None
        )
    assert "\n" not in str(error.value)


def test_a_run_of_a_timm_model_names_it(tmp_path):
    run = save_untrained(tmp_path, {"name": "timm:test_resnet"})
    config = Config(out="x", model=ModelConfig(pretrained=str(run)))
    found, source = resolve_pretrained(config, None)
    assert found.model.name == "timm:test_resnet"
    assert "nothing is new: its classifier has the same classes" in source.adapted(KINDS)[1]
    for key, value in load_model(run).model.state_dict().items():
        assert torch.equal(source.weights[key], value), key


def test_patches_larger_than_the_images_are_refused(files, tmp_path):
    data, still = DataConfig(name="shapes", image_size=(2, 2)), AugmentConfig(crop_padding=0)
    model = ModelConfig(pretrained=str(files / "bare.safetensors"))
    config = Config(out=str(tmp_path), data=data, model=model, augment=still)
    with pytest.raises(ValueError, match=r"^model\.patch_size: \d+ is larger than the images, 2 x"):
        resolve_pretrained(config, None)
