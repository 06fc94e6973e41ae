"""Pretrained weights of timm's models: fitted to other images and classes as timm does."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn
from torch.testing import assert_close

from small_runs import assert_same, begin
from vit.classifier import build_model
from vit.data import shapes
from vit.data.preprocess import Preprocess
from vit.model_file import load_model
from vit.pretrained.adapt import Pretrained
from vit.pretrained.resolve import resolve_pretrained, with_statistics
from vit.run.checkpoint import checkpoint_paths
from vit.training.build import build_step
from vit.training.checks import check_config
from vit.training.config import Config, from_dict
from vit.training.train import load_data, train

VIT = {"patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
SWIN = {"embed_dim": 12, "depths": [1, 2], "num_heads": [1, 2], "window_size": 4}
NAMES = {
    "test_resnet": {},
    "swin_tiny_patch4_window7_224": SWIN,
    "vit_tiny_patch16_224": VIT,
    "deit_tiny_distilled_patch16_224": VIT,
}
SIZED = ("swin_tiny_patch4_window7_224", "vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224")


def draw(name: str, **arguments: Any) -> nn.Module:
    """Build one of timm's models all of whose parameters and statistics are random."""
    torch.manual_seed(0)
    model = timm.create_model(name, **NAMES.get(name, {}), **arguments).eval()
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.is_floating_point():
                value.add_(torch.rand_like(value), alpha=0.1)
    return model


def own_size(name: str, size: int | tuple[int, int] = 32) -> dict[str, Any]:
    return {"img_size": size} if name in SIZED else {}


def save(model: nn.Module, folder: Path, name: str, **arguments: Any) -> None:
    """Save a model as timm does, with the arguments that its architecture needs."""
    timm.models.save_for_hf(
        model, folder, model_args={**NAMES.get(name, {}), **arguments}, safe_serialization=True
    )


def config(name: str, pretrained: Path | str, **parts: Any) -> Config:
    """Return the config of a run that starts from weights of a model of timm."""
    values: dict[str, Any] = {
        "out": "nowhere",
        "data": {"name": "shapes", "val_size": 20, "train_size": 64, **parts.pop("data", {})},
        "model": {"name": f"timm:{name}", "timm_args": NAMES.get(name),
                  "pretrained": str(pretrained), **parts.pop("model", {})},
        "optim": {"name": "adamw"},
        "train": {"epochs": 2, "batch_size": 32, "small_share": 0, "whiten": False,
                  "device": "cpu", "precision": "float32", **parts.pop("train", {})},
        "track": {"probes": 0},
        **parts,
    }  # fmt: skip
    return from_dict(values)


def fitted(run: Config) -> tuple[Config, Pretrained]:
    found, source = resolve_pretrained(run, overwrite=False)
    assert source is not None
    return found, source


def classes(number: int) -> tuple[str, ...]:
    return tuple(f"class {index}" for index in range(number))


@pytest.mark.filterwarnings("ignore::UserWarning")  # in timm's resampling of relative positions
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("form", "size", "channels", "number"), [("bare.pth", 64, 1, 10), ("folder", 16, 3, 7)]
)
def test_weights_are_fitted_as_timm_does(
    name: str, form: str, size: int, channels: int, number: int, tmp_path: Path
) -> None:
    model = draw(name, num_classes=10, **own_size(name))
    save(model, tmp_path / "folder", name, num_classes=10, **own_size(name))
    torch.save(model.state_dict(), tmp_path / "bare.pth")
    data = {"image_size": size, "channels": channels}
    run, source = fitted(config(name, tmp_path / form, data=data))
    weights, account = source.adapted(classes(number))
    expected = timm.create_model(
        f"local-dir:{tmp_path / 'folder'}", pretrained=True,
        num_classes=number, in_chans=channels, **own_size(name, size),
    ).state_dict()  # fmt: skip
    head = {key for key in expected if key.startswith(("head", "fc."))}
    assert head and set(source.head) == head
    assert weights.keys() == (expected.keys() - head if number == 7 else expected.keys())
    for key, value in weights.items():
        assert_close(value, expected[key], rtol=0, atol=1e-6, msg=key)
    resampled = size < 32 if name.startswith("swin") else name in SIZED and size != 32
    assert ("adapted: " in account) == (resampled or channels != 3)
    assert ("new: a random head, because there are 7 classes instead of 10" in account) == (
        number == 7
    )
    assert (source.mean is None) == (form != "folder")
    assert ("images are normalized as for these weights" in account) == (form == "folder")
    assert ("not in the file: mean and std" in account) == (form != "folder")
    assert build_model(run.model, Preprocess.from_config(run.data), number)


def test_positions_of_images_that_are_not_square(tmp_path: Path) -> None:
    name = "vit_tiny_patch16_224"
    model = draw(name, num_classes=10, img_size=(64, 16))
    save(model, tmp_path / "folder", name, num_classes=10, img_size=[64, 16])
    run = config(name, tmp_path / "folder", data={"image_size": [32, 32]})
    _, source = fitted(run)  # 8 x 2 patches become 4 x 4, as many
    assert "pos_embed 1 x 17 x 24 -> 1 x 17 x 24" in source.notes[0]
    expected = timm.create_model(
        f"local-dir:{tmp_path / 'folder'}", pretrained=True, img_size=32
    ).state_dict()["pos_embed"]
    assert_close(source.weights["pos_embed"], expected)


def test_arguments_come_from_the_folder_and_the_users_win(tmp_path: Path) -> None:
    name = "vit_tiny_patch16_224"
    save(draw(name, num_classes=5, img_size=32), tmp_path / "folder", name, img_size=[32, 32])
    run = config(name, tmp_path / "folder", model={"timm_args": {"drop_path_rate": 0.2}})
    found, source = fitted(run)
    assert found.model.timm_args == {**VIT, "drop_path_rate": 0.2, "global_pool": "token"}
    assert found.model.pretrained == str(tmp_path / "folder")
    assert source.mean == source.std == (0.5, 0.5, 0.5)
    preprocess = with_statistics(Preprocess.from_config(run.data), source, None)
    assert preprocess.mean == (0.5, 0.5, 0.5)
    check_config(found)
    other = config(name, tmp_path / "folder", model={"timm_args": {"patch_size": 4}})
    patches = fitted(other)[1].weights["patch_embed.proj.weight"]
    expected = timm.create_model(
        f"local-dir:{tmp_path / 'folder'}", pretrained=True, patch_size=4, num_classes=10
    )
    assert_close(patches, expected.patch_embed.proj.weight)


def test_the_start_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All weights reach the model, its moving average and the frozen part; the head is new."""
    name = "test_resnet"
    model = draw(name, num_classes=5)
    save(model, tmp_path / "folder", name)
    run, source = fitted(
        config(name, tmp_path / "folder", train={"freeze": "backbone"},
               optim={"name": "adamw", "ema_decay": 0.9}, augment={"crop_padding": 0, "flip": False,
               "erasing": 0.0, "mixup": 0.0, "cutmix": 0.0})
    )  # fmt: skip
    training, _ = load_data(begin(run))
    step = build_step(begin(run, source=source), training, source)
    shown = capsys.readouterr().out
    assert f"weights  {tmp_path / 'folder'}: " in shown
    assert "new: a random head, because there are 10 classes instead of 5" in shown
    assert step.features is not None and step.features.shape == (64, model.num_features)
    before, now = model.state_dict(), step.state.model.state_dict()
    averaged = step.state.ema.module.state_dict()
    assert now.keys() == before.keys()
    for key, value in now.items():
        assert torch.equal(averaged[key], value), key
        if not key.startswith("fc."):
            assert torch.equal(value, before[key]), key
    trained = [key for key, value in step.state.model.named_parameters() if value.requires_grad]
    assert trained == ["fc.weight", "fc.bias"]


def test_both_heads_of_a_distilled_model_are_trained(tmp_path: Path) -> None:
    name = "deit_tiny_distilled_patch16_224"
    torch.save(draw(name, num_classes=5, img_size=32).state_dict(), tmp_path / "w.pth")
    run, source = fitted(config(name, tmp_path / "w.pth", train={"freeze": "backbone"}))
    training, _ = load_data(begin(run))
    step = build_step(begin(run, source=source), training, source)
    trained = {key for key, value in step.state.model.named_parameters() if value.requires_grad}
    assert trained == {
        f"{head}.{part}" for head in ("head", "head_dist") for part in ("weight", "bias")
    }
    assert step.features is None


@pytest.mark.parametrize(
    ("name", "model", "message"),
    [
        (
            "test_resnet",
            "vit_tiny_patch16_224",
            r"does not fit timm:test_resnet: cls_token has no place in it, and conv1\.0\.weight is "
            r"missing \(\d+ more\); name their model",
        ),
    ],
)
def test_weights_of_another_architecture_are_one_line(
    name: str, model: str, message: str, tmp_path: Path
) -> None:
    torch.save(draw(model).state_dict(), tmp_path / "w.pth")
    with pytest.raises(ValueError, match=rf"^model\.pretrained: .*{message}") as error:
        resolve_pretrained(config(name, tmp_path / "w.pth"), overwrite=False)
    assert "\n" not in str(error.value)
    # The folder's own arguments, such as global_pool=token, are not those of this model.
    save(draw(model, **own_size(model)), tmp_path / "folder", model, **own_size(model))
    with pytest.raises(ValueError, match=rf"^model\.pretrained: .*{message}"):
        resolve_pretrained(config(name, tmp_path / "folder"), overwrite=False)


def test_weights_of_another_width_are_one_line(tmp_path: Path) -> None:
    name = "vit_tiny_patch16_224"
    torch.save(draw(name, img_size=32).state_dict(), tmp_path / "w.pth")
    run = config(name, tmp_path / "w.pth", model={"timm_args": {**VIT, "embed_dim": 36}})
    with pytest.raises(
        ValueError, match=r"timm cannot fit .* channels: cls_token: copying"
    ) as error:
        resolve_pretrained(run, overwrite=False)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("pretrained", "message"),
    [
        ("nan.pth", "has NaN or infinite values in conv1.0.weight"),
        (
            "cifar10_quick",
            "cifar10_quick is a model with model.name=vit, not timm:test_res",
        ),
        ("timm:test_resnett.r160_in1k", "test_resnett.r160_in1k; did you mean test_resnet"),
    ],
)
def test_a_bad_source_is_one_line(pretrained: str, message: str, tmp_path: Path) -> None:
    state = draw("test_resnet").state_dict()
    state["conv1.0.weight"][0, 0, 0, 0] = torch.nan
    torch.save(state, tmp_path / "nan.pth")
    path = tmp_path / pretrained
    name = str(path) if path.exists() else pretrained
    with pytest.raises(ValueError, match=rf"^model\.pretrained: .*{message}") as error:
        resolve_pretrained(config("test_resnet", name), overwrite=False)
    assert "\n" not in str(error.value)


def test_channels_that_timm_cannot_adapt_are_refused(tmp_path: Path) -> None:
    """timm would start with a random patch embedding and say so in a log."""
    name, arguments = "naflexvit_base_patch16_gap", VIT
    torch.save(draw(name, **arguments).state_dict(), tmp_path / "w.pth")
    run = config(name, tmp_path / "w.pth", model={"timm_args": arguments}, data={"channels": 1})
    with pytest.raises(
        ValueError, match=r"timm cannot fit .* images of 1 channels: .*4D Conv2d"
    ) as error:
        resolve_pretrained(run, overwrite=False)
    assert "\n" not in str(error.value)
    again = config(name, tmp_path / "w.pth", model={"timm_args": arguments})
    assert fitted(again)[1].notes == ()


@pytest.mark.parametrize("name", ["pit_ti_224", "test_resnet"])
def test_checkpointing_is_refused_where_timm_does_not_offer_it(name: str) -> None:
    run = from_dict({
        "model": {"name": f"timm:{name}"}, "optim": {"name": "adamw"},
        "data": {"name": "shapes", "image_size": 224 if name == "pit_ti_224" else 32},
        "train": {"checkpoint_blocks": True, "small_share": 0, "whiten": False},
    })  # fmt: skip
    if name == "test_resnet":
        check_config(run)
        return
    with pytest.raises(ValueError, match=r"^train\.checkpoint_blocks: True .* must be false with"):
        check_config(run)


@pytest.mark.slow
def test_a_run_starts_from_another_run_and_never_needs_it_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shapes, "TEST", 100)
    first = dataclasses.replace(
        config("test_resnet", "x", model={"pretrained": None}), out=str(tmp_path / "first")
    )
    train(first)
    run = dataclasses.replace(config("test_resnet", first.out), out=str(tmp_path / "second"))
    capsys.readouterr()
    train(run)
    shown = capsys.readouterr().out
    assert "nothing is new: its head has the same classes" in shown
    assert load_model(run.out).config.model.pretrained == first.out
    with pytest.raises(ValueError, match=r"first is .* add --model\.name timm:test_"):
        resolve_pretrained(from_dict({"model": {"pretrained": first.out}}), overwrite=False)

    shutil.copytree(run.out, tmp_path / "resumed")
    shutil.rmtree(first.out)
    (tmp_path / "resumed/model.safetensors").unlink()
    checkpoint_paths(tmp_path / "resumed")[-1].unlink()
    train(dataclasses.replace(run, out=str(tmp_path / "resumed")))
    assert "resuming after step 2" in capsys.readouterr().out
    assert_same(Path(run.out), tmp_path / "resumed")
