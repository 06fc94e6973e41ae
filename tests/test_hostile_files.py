"""Untrusted files: every field is checked, and a wrong one is named in one line."""

import contextlib
import copy
import hashlib
import io
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from models import save_untrained
from small_runs import make_loop, small
from vit.calibration import Calibration
from vit.config import to_dict
from vit.data.config import DataConfig
from vit.data.datasets import open_images
from vit.data.images import ImageSet
from vit.files import seal
from vit.model_file import BLANK, DIGEST_KEY, METADATA_KEY
from vit.pretrained.load import load as load_model
from vit.reporting.loading import load_split, load_test
from vit.reporting.model_card import model_card
from vit.reporting.report import write_report
from vit.run.checkpoint import Checkpoint, read_checkpoint, save_checkpoint
from vit.run.folder import check_run, stored_config
from vit.run.sharded import SUMS_FILE

DEEP: Any = []
for _ in range(300):
    DEEP = [DEEP]
REMOVED, NESTED = "removed", ": dict of dict"
VALUES = {
    "null": None, "true": True, "minus": -1, "zero": 0, "three": 3, "large": 10**30, "huge": 1e308,
    "nan": math.nan, "infinite": -math.inf, "empty": "", "escape": "x\x1b]52;c;x\x07",
    "long": "a" * 5000, "list": [], "mixed": [1, None], "twice": ["a", "a"], "dict": {},
    "dict of list": {"x": [1]}, "dict of dict": {"x": {"y": None}}, "deep": DEEP,
    REMOVED: None,
}  # fmt: skip


def variants(content: Any, values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield what a file may contain instead: one field removed, added or replaced, at any depth."""

    def places(part: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        yield path
        if isinstance(part, dict):
            for key in part:
                yield from places(part[key], (*path, key))
        elif isinstance(part, list | tuple) and part:
            yield from places(part[0], (*path, 0))

    for path in places(content, ()):
        for name, value in values.items():
            whole = {"": copy.deepcopy(content)}
            *above, last = ("", *path)
            owner: Any = whole
            for key in above:
                if isinstance(owner[key], tuple):
                    owner[key] = list(owner[key])
                owner = owner[key]
            if name != REMOVED:
                owner[last] = value
            elif path:
                del owner[last]
            yield f"{'.'.join(map(str, path))}: {name}", whole[""]
    yield "new field", {**content, "new": 1}


def outcomes(
    content: Any,
    write: Callable[[Any], Path],
    read: Callable[[], Any],
    values: dict[str, Any] = VALUES,
    free: tuple[str, ...] = (),
) -> dict[str, str]:
    """Write and read each variant of a file; return the messages of those that are refused.

    Each field must refuse at least a dictionary of dictionaries, except for those that are free.
    """
    refused, names = {}, []
    for name, variant in variants(content, values):
        names.append(name)
        path = write(variant)
        try:
            read()
        except ValueError as error:
            line = str(error)
            assert "\n" not in line and len(line) < 1000, (name, line)
            assert str(path) in line, (name, line)
            assert "pydantic" not in line and "__init__" not in line, (name, line)
            refused[name] = line
    checked = {name.removesuffix(NESTED) for name in refused}
    fields = {name.removesuffix(NESTED) for name in names if name.endswith((NESTED, "new field"))}
    assert fields - checked == {*free}
    return refused


def write_model(path: Path, about: str, tensors: dict[str, torch.Tensor]) -> Path:
    """Write a model file with any metadata and a digest that is right."""
    data = safetensors.torch.save(tensors, {METADATA_KEY: about, DIGEST_KEY: BLANK})
    digest = hashlib.sha256(data).hexdigest()
    path.write_bytes(data.replace(BLANK.encode(), digest.encode(), 1))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a calibration."""
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(200, 10, generator=random)
    calibration = Calibration.fit(logits, logits.argmax(dim=1))
    calibration = replace(
        calibration,
        energies=calibration.energies[:20],
        quantiles={kind: values[:20] for kind, values in calibration.quantiles.items()},
    )
    folder = tmp_path_factory.mktemp("model")
    tiny = {"embed_dim": 12, "depth": 1, "num_heads": 2, "patch_size": 16, "mlp_ratio": 1}
    return save_untrained(folder, tiny, calibration=calibration) / "model.safetensors"


def write_sealed(path: Path, content: Any) -> Path:
    """Write a checkpoint with any content and a digest that is right."""
    torch.save(content, buffer := io.BytesIO())
    path.write_bytes(seal(buffer))
    return path


def metadata_of(path: Path) -> dict[str, Any]:
    with safetensors.safe_open(path, "pt") as file:
        content: dict[str, Any] = json.loads(file.metadata()[METADATA_KEY])
    return content


def use(path: Path) -> None:
    """Load a model and use all that its metadata say."""
    classifier = load_model(path, "cpu", "float32")
    photo = np.zeros((40, 30, classifier.preprocess.channels), dtype=np.uint8)
    assert set(classifier.predict(photo, 3)) <= set(classifier.classes)
    logits = classifier.logits(classifier.preprocess.resize(photo)[None])
    if classifier.calibration:
        assert classifier.calibration.familiarity(logits).isfinite().all()
        # Fewer scores than for this coverage are allowed, and refused when it is asked for.
        with contextlib.suppress(ValueError):
            classifier.calibration.sets(logits, torch.full((1,), 0.5), 0.02)


def test_every_field_of_a_model_file(model, tmp_path):
    about, weights = metadata_of(model), safetensors.torch.load_file(model)
    path = tmp_path / "model.safetensors"
    # The settings of a config are checked as those of a command; some of their kinds are enough.
    about["config"] = {"data": {"name": "shapes"}, "model": about["config"]["model"], "out": "x"}
    refused = outcomes(
        about, lambda content: write_model(path, json.dumps(content), weights), lambda: use(path)
    )
    for field in ("config", "classes", "step"):
        assert "missing" in refused[f"{field}: removed"]
    for field in ("classes", "preprocess", "config.model", "calibration", "step"):
        assert {f"{field}: list", f"{field}: long"} <= refused.keys()
    assert "later version" in refused["new field"]
    for text in ("", "{", "null", "[]", "1", "[" * 100_000, '{"step": 1e999}'):
        write_model(path, text, weights)
        with pytest.raises(ValueError, match=r"model\.safetensors"):
            load_model(path)


def config_of(**model: Any) -> dict[str, Any]:
    return {"data": {"name": "shapes"}, "model": model}


def timm_config(name: str, **arguments: Any) -> dict[str, Any]:
    return config_of(name=f"timm:{name}", timm_args=arguments)


UNFIT, PIXELS = "the weights do not fit", {"image_size": [32, 32], "mean": [0.5], "std": [0.5]}


@pytest.mark.parametrize(
    ("part", "values", "words"),
    [
        ("config", config_of(embed_dim=10_000, depth=1000, num_heads=1), UNFIT),
        ("config", timm_config("vit_tiny_patch16_224", depth=1_000_000), UNFIT),
        ("config", timm_config("vit_tiny_patch16_224", embed_dim=999_999), UNFIT),
        ("config", timm_config("resnet18", layers=[10**6, 1, 1, 1]), UNFIT),
        ("config", timm_config("vit_tiny_patch16_224", depth=3 * 10**9), "timm_args"),
        ("config", timm_config("convnext_atto", depths=[3 * 10**9]), "timm_args"),
        ("preprocess", PIXELS | {"crop_pct": 1e-4}, "crop_pct"),
        ("preprocess", PIXELS | {"image_size": [20000, 20001]}, "image_size"),
        ("preprocess", PIXELS | {"std": [1e-300]}, "std"),
    ],
)
def test_numbers_that_would_fill_the_memory(part, values, words, model, tmp_path):
    """Such as a model that is larger than the weights in its file."""
    about = {**metadata_of(model), part: values}
    path = tmp_path / "model.safetensors"
    write_model(path, json.dumps(about), safetensors.torch.load_file(model))
    with pytest.raises(ValueError, match=rf"model\.safetensors: .*{words}"):
        load_model(path)


def checkpoint_of(model: Path) -> Checkpoint:
    about, weights = metadata_of(model), safetensors.torch.load_file(model)
    environment = {"processes": 1, "device": "cpu", "precision": "torch.float32", "threads": 1}
    return Checkpoint(
        step=1, config=about["config"], classes=about["classes"], model=weights, total_steps=10,
        environment={**environment, "compiled": False, "steps_per_epoch": 5, "attention_code": "a"},
        preprocess=about["preprocess"], points=torch.zeros(1, 2),
    )  # fmt: skip


def test_every_field_of_a_checkpoint(model, tmp_path):
    save_checkpoint(tmp_path, checkpoint_of(model))
    (path,) = (tmp_path / "checkpoints").iterdir()
    content = torch.load(io.BytesIO(path.read_bytes()), weights_only=True)
    content["config"] = {"data": {"name": "shapes"}, "model": content["config"]["model"]}
    content["model"] = {key: content["model"][key] for key in list(content["model"])[:2]}

    write = partial(write_sealed, path)
    refused = outcomes(content, write, lambda: read_checkpoint(path), free=("folder",))
    for field in ("config", "classes", "model", "ema", "environment", "preprocess", "step"):
        assert {f"{field}: list", f"{field}: escape"} <= refused.keys()
    assert "later version" in refused["new field"]
    write({**content, "folder": str(tmp_path)})
    assert read_checkpoint(path).folder is None  # whatever the file says


def test_every_field_of_a_checkpoint_that_is_a_folder(model, tmp_path):
    folder = tmp_path / "checkpoints" / "step_00000001"
    folder.mkdir(parents=True)
    state = {
        key: value for key, value in vars(checkpoint_of(model)).items()
        if key not in ("model", "ema", "optimizers", "folder")
    }  # fmt: skip
    state |= {"points": [[1.0, 0.5]], "preprocess": to_dict(state["preprocess"])}
    state["config"] = {"data": {"name": "shapes"}}

    def write(variant: Any) -> Path:
        (folder / "state.json").write_text(json.dumps(variant))
        digest = hashlib.sha256((folder / "state.json").read_bytes()).hexdigest()
        (folder / SUMS_FILE).write_text(f"{digest}  state.json\n")
        return folder

    refused = outcomes(state, write, lambda: read_checkpoint(folder, tensors=False))
    assert {"points: three", "environment.threads: list"} <= refused.keys()
    write(state)
    assert read_checkpoint(folder, tensors=False).step == 1


def test_the_length_in_a_checkpoint_is_one_that_a_run_can_have(model):
    """Others would divide by zero, raise weights instead of lowering the loss, or never end."""
    costs = (0.5, 1.0), (1.0, 2.0)
    length = {"step": 5, "total_steps": 10, "changed_at": 5, "changed_done": 0.4, "costs": costs}
    values = vars(checkpoint_of(model)) | length
    assert Checkpoint(**values).costs == costs
    for change in (
        {"changed_at": 6}, {"step": 10, "changed_at": 10}, {"changed_done": 1.0},
        {"costs": costs[:1]}, {"costs": costs[::-1]}, {"costs": ((1.0, 0.0),)},
        {"costs": ((1.0, 1e300),)},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=rf"^{[*change][-1]}"):
            Checkpoint(**values | change)


def test_every_field_of_a_runs_config(tmp_path):
    config = small(tmp_path / "run")
    run, plain = tmp_path / "run", json.loads(json.dumps(to_dict(config)))
    run.mkdir()

    def write(variant: Any) -> Path:
        (run / "config.yaml").write_text(json.dumps(variant))  # which is YAML, too
        return run / "config.yaml"

    # Reading YAML is slow.
    kinds = ("removed", "null", "list", "dict of dict", "deep", "escape", "nan")
    values = {name: VALUES[name] for name in kinds}
    # Without its groups, a file is not the config of a run.
    refused = outcomes(plain, write, lambda: stored_config(run), values, free=("",))
    assert "later version" in refused["new field"] and len(refused) > 300
    write(plain)
    assert stored_config(run) == config
    for text in (
        "a: &a [x]\n" + "\n".join(f"{b}: &{b} [{', '.join(['*a'] * 9)}]" for b in "bcdefgh"),
        "data: &a\n  x: *a\n", "[" * 100_000, "data: [" * 5000, "\x00", "data: {model: }",
    ):  # fmt: skip
        (run / "config.yaml").write_text(text)
        assert stored_config(run) is None
        with pytest.raises(ValueError, match="contains files other than a run"):
            check_run(config, overwrite=True, environment={})


def test_every_field_of_a_report_that_is_read_again(model):
    saved = load_model(model, "cpu", "float32")
    random = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (20, 3, 32, 32), dtype=torch.uint8, generator=random)
    images = ImageSet(pixels, torch.arange(20) % 10, saved.classes)
    file = model.parent / "eval" / "report.json"
    write_report(saved, images, file.parent, step=1)
    content = json.loads(file.read_text())
    unread = ("mistakes", "reliability", "loss", "loss_95", "ece", "ece_95", "date", "precision")
    for part in (*unread, "digest"):  # the digest is for the next report
        del content[part]
    content["source"] = {"own": True}
    for row in content["calibration"].values():
        del row["reliability"]
    content["per_class"] = {name: content["per_class"][name] for name in ("arrow", "circle")}
    content["confusion_matrix"] = [[3, 1], [0, 4]]

    def write(variant: Any) -> Path:
        file.write_text(json.dumps(variant))
        return file

    outcomes(content, write, lambda: model_card(saved), free=("new field",))


def test_weights_that_are_not_finite_real_numbers(model, tmp_path):
    about, weights = metadata_of(model), safetensors.torch.load_file(model)
    for value in (math.nan, -math.inf, 1j):
        odd = {**weights, "norm.weight": weights["norm.weight"] * value}
        path = write_model(tmp_path / "model.safetensors", json.dumps(about), odd)
        with pytest.raises(ValueError) as info:
            load_model(path)
        assert str(info.value).startswith(f"{path}: norm.weight has values that")


def test_a_long_run_and_an_endless_epoch(model, tmp_path):
    long = replace(checkpoint_of(model), seconds=3e6, step=10**9)
    save_checkpoint(tmp_path, long)
    (path,) = (tmp_path / "checkpoints").iterdir()
    assert read_checkpoint(path).seconds == 3e6
    content = torch.load(io.BytesIO(path.read_bytes()), weights_only=True)
    content["points"] = torch.zeros(1).expand(10**7, 2)  # of 4 bytes in the file
    write_sealed(path, content)
    with pytest.raises(ValueError, match="points: these are not pairs of numbers"):
        read_checkpoint(path)


def test_the_state_of_an_optimizer_of_another_form(tmp_path):
    config = small(tmp_path / "run", train={"epochs": 1})
    (tmp_path / "run").mkdir()
    make_loop(config).run()
    (path,) = (tmp_path / "run" / "checkpoints").iterdir()
    content = torch.load(io.BytesIO(path.read_bytes()), weights_only=True)

    def write(optimizers: Any) -> None:
        write_sealed(path, {**content, "optimizers": optimizers})

    good = content["optimizers"]
    group = {k: v for k, v in good[0]["param_groups"][0].items() if k != "lr"}
    state = {key: {name: torch.ones(3) for name in part} for key, part in good[0]["state"].items()}
    for bad in (
        [], good[:1], [{}, {}], [{**part, "state": {0: {"step": "x"}}} for part in good],
        [{**good[0], "param_groups": [group]}, *good[1:]],
        [{**good[0], "state": state}, *good[1:]],
    ):  # fmt: skip
        write(bad)
        with pytest.raises(ValueError, match=r"checkpoint of the run in .* does not fit") as info:
            make_loop(config)
        assert "\n" not in str(info.value)
    write(good)
    make_loop(config)


def test_a_model_file_chooses_no_place_for_downloads(model, tmp_path, monkeypatch):
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: pytest.fail("a download"))
    about = metadata_of(model)
    place = tmp_path / "elsewhere"
    for name in ("cifar10", "fashion_mnist"):
        about["config"]["data"] = {"name": name, "root": str(place)}
        path = write_model(
            tmp_path / "model.safetensors", json.dumps(about), safetensors.torch.load_file(model)
        )
        with pytest.raises(ValueError, match=f"data.root: {name} is not in {place}"):
            load_test(load_model(path, "cpu", "float32"))
        with pytest.raises(ValueError, match=rf"data.root: {name} is not in {place}"):
            load_split(load_model(path, "cpu", "float32"), None)
        assert not place.exists()


def test_a_download_goes_through_no_link(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "data" / "cifar-10-python.tar.gz").symlink_to(tmp_path / "victim")
    data = DataConfig(name="cifar10", root=str(tmp_path / "data"))
    with pytest.raises(ValueError, match=r"cifar-10-python\.tar\.gz is a link; delete it"):
        open_images(data, train=True)
    inner = tmp_path / "data" / "FashionMNIST" / "raw"
    inner.mkdir(parents=True)
    (inner / "train-images-idx3-ubyte.gz").symlink_to(tmp_path / "victim")
    with pytest.raises(ValueError, match=r"idx3-ubyte\.gz is a link; delete it to download fash"):
        open_images(DataConfig(name="fashion_mnist", root=data.root), train=True)
    assert (tmp_path / "victim").read_text() == "mine"


def test_results_stay_in_a_folder_of_snapshots_of_ones_own(model, tmp_path):
    own = tmp_path / "snapshots" / "mine"
    cached = tmp_path / "models--owner--name" / "snapshots" / "abc"
    for folder in (own, cached):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(model.read_bytes())
    assert load_model(own).run == own
    assert load_model(cached).run == Path("runs/owner-name")
