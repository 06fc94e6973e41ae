"""Invalid input produces a one-line error and exit code 2, before any file is changed."""

import contextlib
import itertools
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
import yaml

from command_line import help_of, refused
from vit.cli import parse_eval, parse_train, user_errors
from vit.data.config import DataConfig
from vit.model.config import ModelConfig
from vit.registry import ALL_KINDS
from vit.reporting.config import (
    COMMANDS,
    CompareConfig,
    EvalDataConfig,
    ExportConfig,
    MapsConfig,
    PhotoConfig,
    PredictConfig,
    ReportConfig,
)
from vit.settings import changed_keys, keys
from vit.training.config import Config, OptimConfig, from_dict, to_dict
from vit.training.train import train

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))

# What is typed after train.py, and what the one line must name: key, value, what is allowed.
BAD_FLAGS = [
    ("--model.embed_dim 97", "model.num_heads: 3", "divisor of model.embed_dim=97: 1, 97"),
    ("--model.patch_size 5", "model.patch_size: 5", "1, 2, 4, 8, 16, 32"),
    ("--model.class_token false --model.global_pool token", "model.global_pool: token", "avg"),
    ("--model.pos_embed sincos --model.embed_dim 99", "model.embed_dim: 99", "multiple of 4"),
    (
        "--model.embed_dim 2 --model.num_heads 1",
        "model.embed_dim: 2",
        "3 or more with model.stem=conv and model.patch_size=4",
    ),
    ("--model.depth 1.5", "model.depth: '1.5'", "a whole number from 1 to 1000"),
    ("--model.head_dim big", "model.head_dim: 'big'", "a whole number from 1 to 1000, or null\n"),
    ("--model.stem convolution", "model.stem: 'convolution'", "linear, conv"),
    ("--data.name cifar-10", "data.name: 'cifar-10'", "; did you mean cifar10?\n"),
    ("--data.download 1", "data.download: '1'", "true or false"),
    ("--augment.crop_padding 32", "augment.crop_padding: 32", "0 to 31"),
    ("--augment.crop_scale 1 0.5", "augment.crop_scale: 1.0 0.5", "the smallest fraction first"),
    ("--augment.crop_scale 0.5", "augment.crop_scale: a list", "2 values, each a number above 0"),
    ("--data.image_size 62", "data.image_size: 62 ", "a multiple of model.patch_size=4, e.g. 64\n"),
    ("--data.image_size 62 96", "data.image_size: 62x96 ", "model.patch_size=4, e.g. 64 96\n"),
    ("--data.channels 2", "data.channels: 2", "1 or 3 with data.name=cifar10\n"),
    ("--optim.lr=", "optim.lr: ''", "a number"),
    (f"--optim.lr {'9' * 400}", "optim.lr: 999", "a number above 0, up to 1000000"),
    ("--model.depth null", "model.depth: null", "it must be a whole number from 1 to 1000\n"),
    ("--modle.depth 3", "modle.depth", "did you mean model.depth?"),
    ("--depth 3", "depth", "did you mean model.depth?"),
    ("--train.lr 0.1", "train.lr", "did you mean optim.lr?"),
    ("--data shapes", "data: ", "--data.<field>"),
    ("configs/shapes.yaml", "configs/shapes.yaml", "did you mean --config configs/shapes.yaml?"),
    ("--model.depth", "--model.depth", "expected one argument"),
    ("shapes", "shapes", "did you mean --config shapes?"),
    ("stray", "stray", "not expected here"),
    ("--config nowhere.yaml", "config not found: nowhere.yaml", "the recipes are cifar10, "),
    ("--config shpaes", "config not found: shpaes", "did you mean shapes?"),
    ("--overwite", "overwite", "did you mean overwrite?"),
]

# The same after eval.py.
BAD_EVAL = [
    ("", "run: missing; it comes first"),
    ("maps --indices 3", "run: missing"),
    ("x photos a.png", "photos: no such command; did you mean photo?"),
    (
        "x draw",
        "draw: no such command; it must be one of report, maps, photo, ",
    ),
    ("x export pdf", "formats: 'pdf' is not allowed; it must be one of timm, onnx, torch, html, "),
    ("x --attention --indices 3", "attention: this is a command now: vit-eval RUN maps\n"),
    ("--export=onnx", "export: this is a command now: vit-eval RUN export FORMAT ...\n"),
    ("x photo", "the following arguments are required: PHOTO"),
    ("x --indices 3", "indices: not a setting of report, but of maps\n"),
    ("x export onnx --device cpu", "device: not a setting of export, but of report, maps, photo"),
    ("x maps --indices", "--indices: expected at least one argument"),
    ("x maps --indices 3.5", "indices: '3.5' is not allowed; it must be a whole number"),
    ("x maps --kinds lpr", "did you mean lrp?"),
    ("x maps --probes 0", "probes: 0 is not allowed; it must be a whole number from 1 to 1000000"),
    ("x maps --faithfulness 1", "faithfulness: 1 is not allowed; it must be 0, or 2 to 1000000"),
    ("x predict y --out table.txt", "out: table.txt is not allowed; it must be a .csv file"),
    ("x --data.rot y", "did you mean data.root?"),
    ("x --flip true", "true: follows a flag that takes no value; leave it out"),
]


@pytest.mark.parametrize(("flags", "given", "allowed"), BAD_FLAGS)
def test_bad_flag_is_one_line_that_names_key_value_and_allowed(
    flags: str, given: str, allowed: str
) -> None:
    refused(flags.split(), given, allowed)


@pytest.mark.parametrize(("words", "part"), BAD_EVAL)
def test_bad_words_for_eval_are_one_line(words: str, part: str) -> None:
    refused(words.split(), part, parse=parse_eval)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["train.py", "--modle.depth", "3", "--out", "OUT"], "did you mean model.depth?"),
        (["eval.py", str(ROOT / "README.md"), "maps", "--out", "OUT"], "is not a checkpoint"),
    ],
)
def test_a_mistake_ends_the_program_in_one_line(
    words: list[str], part: str, tmp_path: Path
) -> None:
    script, *rest = (word.replace("OUT", str(tmp_path / "out")) for word in words)
    command = [sys.executable, str(ROOT / script), *rest]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and part in done.stderr
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_missing_data_says_what_was_tried_and_what_to_do(tmp_path: Path) -> None:
    out, data = tmp_path / "run", tmp_path / "data"
    config = Config(out=str(out), data=DataConfig(root=str(data), download=False))
    with pytest.raises(ValueError, match="cifar10") as error:
        train(config)
    for part in (str(data), "cifar-10-python.tar.gz", "cifar-10-batches-py/", "--data.root"):
        assert part in str(error.value)
    assert "make demo" in str(error.value) and not out.exists()


@pytest.mark.parametrize(
    "error", [MemoryError("no room"), RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")]
)
def test_memory_that_runs_out_anywhere_is_one_line(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended, user_errors():
        raise error
    assert ended.value.code == 2
    assert (
        capsys.readouterr().err == f"error: out of memory; use a smaller model or batch: {error}\n"
    )


def test_operation_without_fixed_order_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(SystemExit) as ended, user_errors():
            torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: deterministic: true") and "put_ has no" in error
    assert error.count("\n") == 1


def test_mistake_of_ours_keeps_its_traceback() -> None:
    with pytest.raises(RuntimeError, match="shapes"), user_errors():
        raise RuntimeError("shapes cannot be multiplied")


def test_help_of_train_has_each_key_with_its_range_and_default() -> None:
    text = help_of([], parse_train)
    assert text.startswith("usage: ") and text.splitlines()[1] == ""
    about = dict(re.findall(r"^  --([\w.]+)((?:.|\n {4,})*)", text, re.MULTILINE))
    for key in keys(Config):
        found = " ".join(about[key].split())
        assert re.search(r"[A-Z].{8}[^.]+.*\. \(.*; default: .+\)$", found), key
    words = " ".join(text.split())
    for part in (
        "Precision of matrix products: float32 or bfloat16; auto chooses bfloat16 where the "
        "hardware supports it. (one of auto, float32, bfloat16; default: auto)",
        "Number of encoder blocks. (a whole number from 1 to 1000; default: 12)",
        "(a number above 0, up to 1000000, or null; default: null)",
        "optim: The optimizer, the learning rate schedule and the loss:",
    ):
        assert part in words


def test_help_of_eval_lists_the_commands() -> None:
    text = help_of([])
    assert (
        "RUN [report | maps | photo | predict | heads | compare | export] ..."
        in text.splitlines()[0]
    )
    for name, command in COMMANDS.items():
        assert f"  {name:<9}{command.config.__doc__.splitlines()[0]}\n" in text
    assert len(text.splitlines()) <= 25


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_fits_on_a_screen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text, config = help_of([name]), COMMANDS[name].config
    assert text == help_of(["runs/x", name]) and len(text.splitlines()) <= 25
    for key in keys(config):
        is_flag = key not in ("photos", "others", "formats")
        assert (f"\n  --{key} " if is_flag else f"\n  {key.removesuffix('s').upper()} ") in text
    assert callable(resolve_name(f"vit.reporting.{COMMANDS[name].function}"))


def test_maps_of_registry_are_in_the_help() -> None:
    assert ", ".join(ALL_KINDS) in " ".join(help_of(["maps"]).split())


def test_printed_config_is_a_config_that_gives_the_same_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_train(["--model.depth", "7", "--print_config"])
    assert ended.value.code == 0
    file = tmp_path / "printed.yaml"
    file.write_text(capsys.readouterr().out)
    again, options = parse_train(["--config", str(file)])
    assert again == parse_train(["--model.depth", "7"])[0]
    assert again.model.depth == 7
    assert options == {"overwrite": False, "allow_changes": False}


FLAG = ("--model.depth", "4")


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_flag_beats_every_file_and_a_later_file_an_earlier(
    order: tuple[int, ...], tmp_path: Path
) -> None:
    first, second = tmp_path / "1.yaml", tmp_path / "2.yaml"
    first.write_text("out: first\nmodel: {depth: 2, embed_dim: 48}\n")
    second.write_text("out: second\nmodel: {depth: 3, embed_dim: 24}\n")
    parts = [("--config", str(first)), ("--config", str(second)), FLAG]
    words = [parts[index] for index in order]
    config, _ = parse_train([*itertools.chain(*words)])
    assert parse_train(["=".join(pair) for pair in words])[0] == config
    last_file = [index for index in order if index < 2][-1]
    assert config.model.depth == 4
    assert (config.out, config.model.embed_dim) == (("first", 48), ("second", 24))[last_file]


def test_of_files_only_what_they_set_is_replaced(tmp_path: Path) -> None:
    first, second = tmp_path / "1.yaml", tmp_path / "2.yaml"
    first.write_text("model: {depth: 2, embed_dim: 48}\noptim: {clip_grad: 1}\n")
    second.write_text("model: {depth: 3}\noptim: {clip_grad: }\n")
    config, _ = parse_train(["--config", str(first), "--config", str(second)])
    assert (config.model.depth, config.model.embed_dim, config.optim.clip_grad) == (3, 48, None)


BUDGETS = """
model: {depth: 6, embed_dim: 48}
budgets:
  5: {model: {depth: 5}, augment: {flip: false}}
  0: {model: {depth: 2}}
  20.5: {}
"""


@pytest.mark.parametrize(
    ("minutes", "depth", "flip"),
    [
        (None, 6, True),
        (0.5, 2, True),
        (4.99, 2, True),
        (5, 5, False),
        (20, 5, False),
        (60, 6, True),
    ],
)
def test_a_file_says_what_changes_with_the_time_budget(
    minutes: float | None, depth: int, flip: bool, tmp_path: Path
) -> None:
    file, budget = tmp_path / "mine.yaml", tmp_path / "budget.yaml"
    file.write_text(BUDGETS)
    budget.write_text(f"train: {{budget_minutes: {'null' if minutes is None else minutes}}}\n")
    words = ["--config", str(file)]
    config, _ = parse_train([*words, "--train.budget_minutes", str(minutes or "null")])
    assert (config.model.depth, config.augment.flip) == (depth, flip)
    assert config.model.embed_dim == 48
    assert parse_train([*words, "--config", str(budget)])[0] == config
    assert parse_train(["--config", str(budget), *words])[0] == config
    assert parse_train([*words, "--config", str(budget), "--model.depth", "9"])[0].model.depth == 9
    budget.write_text(f"{budget.read_text()}model: {{depth: 7}}\n")
    assert parse_train([*words, "--config", str(budget)])[0].model.depth == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "budgets: ['1', '2'] is not allowed; it must be settings by minutes"),
        ("{soon: {}}", "budgets: {'soon': {}} is not allowed; it must be settings by minutes"),
        ("{2: deep}", "budgets: {'2': 'deep'} is not allowed; it must be settings by minutes"),
        ("{0: {model: {depht: 3}}}", "model.depht: no such key; did you mean model.depth"),
    ],
)
def test_wrong_settings_for_budgets_are_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"budgets: {text}\n")
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_train(["--config", str(file), "--train.budget_minutes", "1"])


def test_a_broken_group_is_refused_even_where_a_flag_sets_its_keys(tmp_path: Path) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text("model: 3\n")
    with pytest.raises(ValueError, match="model: 3 is not allowed"):
        parse_train(["--config", str(file), *FLAG])


@pytest.mark.parametrize("name", ["shapes", "shapes.yaml", "configs/shapes", "configs/shapes.yaml"])
def test_a_recipe_is_found_from_any_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_train(["--config", name])[0].out == "runs/shapes"
    (tmp_path / "shapes").mkdir()  # a folder of that name is no config
    assert parse_train(["--config", name])[0].out == "runs/shapes"
    (tmp_path / "configs").mkdir()
    (tmp_path / "shapes").rmdir()
    (tmp_path / name).write_text("out: mine")
    assert parse_train(["--config", name])[0].out == "mine"


def test_without_a_config_quick_is_taken_and_with_one_it_is_not(tmp_path: Path) -> None:
    quick = yaml.safe_load((ROOT / "configs" / "quick.yaml").read_text())
    assert parse_train([])[0].out == "runs/quick"
    assert parse_train([])[0].model.stem == quick["model"]["stem"] == "conv"
    other = tmp_path / "other.yaml"
    other.write_text("out: elsewhere\n")
    assert parse_train(["--config", str(other)])[0] == Config(out="elsewhere")


@pytest.mark.parametrize("file", CONFIGS, ids=[file.stem for file in CONFIGS])
def test_every_recipe_takes_a_budget(file: Path) -> None:
    words = ["--config", str(file), "--train.budget_minutes", "1"]
    assert parse_train(words)[0].train.budget_minutes == 1


def test_quick_is_smaller_for_a_minute_but_other_models_are_as_they_are() -> None:
    minute = ["--train.budget_minutes", "1"]
    config, _ = parse_train(minute)
    assert (config.model.depth, config.augment.crop_padding) == (3, 0)
    assert parse_train(["--train.budget_minutes", "10"])[0].model.depth == 4
    timm = parse_train([*minute, "--model.name", "timm:resnet18", "--optim.name", "adamw"])[0]
    assert (timm.model.depth, timm.augment.crop_padding) == (12, 2)
    pretrained = parse_train([*minute, "--model.pretrained", "cifar10_quick"])[0]
    assert pretrained.augment.crop_padding == 2


@pytest.mark.parametrize("file", CONFIGS, ids=[file.stem for file in CONFIGS])
def test_every_recipe_is_whole_and_named_after_its_run(file: Path) -> None:
    config, _ = parse_train(["--config", str(file)])
    assert config.out == f"runs/{file.stem}"
    assert file.read_text().startswith("# ")


def test_config_survives_the_way_through_dictionaries() -> None:
    config, _ = parse_train(["--model.init_values", "0.1", "--optim.clip_grad", "1"])
    assert from_dict(to_dict(config)) == config
    with pytest.raises(ValueError, match=r"^model.depht: no such key; did you mean model.depth\?$"):
        from_dict({"model": {"depht": 3}})
    with pytest.raises(ValueError, match=r"^log: no such key"):
        from_dict({"log": {"every": 3}})


def test_changed_keys_names_key_and_both_values() -> None:
    old, new = (to_dict(parse_train(w)[0]) for w in ([], ["--model.depth", "7", "--out", "x"]))
    assert changed_keys(old, new) == ["model.depth: 4 -> 7", "out: runs/quick -> x"]


def test_a_command_has_its_settings_and_report_is_the_default() -> None:
    words = ["--data.root", "there", "--seed", "3", "--flip"]
    options = ReportConfig(data=EvalDataConfig(root="there"), seed=3, flip=True)
    assert parse_eval(["runs/x", *words]) == ("report", "runs/x", options)
    assert parse_eval(["runs/x", "report", *words]) == ("report", "runs/x", options)
    words = ["--head_fusion", "min", "--discard_ratio", "0.9", "--indices", "3", "17"]
    options = MapsConfig(head_fusion="min", discard_ratio=0.9, indices=(3, 17))
    assert parse_eval(["x", "maps", *words]) == ("maps", "x", options)
    options = PhotoConfig(photos=("a.png", "maps"), kinds=("lrp",), target="cat")
    words = ["a.png", "maps", "--kinds", "lrp", "--target", "cat"]
    assert parse_eval(["x", "photo", *words]) == ("photo", "x", options)
    options = PredictConfig(photos=("photos",), flip=True)
    assert parse_eval(["x", "predict", "--flip", "photos"]) == ("predict", "x", options)
    assert parse_eval(["x", "compare", "y", "z"])[2] == CompareConfig(others=("y", "z"))
    assert parse_eval(["x", "export", "onnx", "timm"])[2] == ExportConfig(formats=("onnx", "timm"))


def test_a_run_may_be_called_like_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("maps").mkdir()
    assert parse_eval(["maps", "maps"]) == ("maps", "maps", MapsConfig())


def test_python_gets_the_same_line_as_the_command_line() -> None:
    line = "^model.depth: 0 is not allowed; it must be a whole number from 1 to 1000$"
    with pytest.raises(ValueError, match=line):
        ModelConfig(depth=0)
    with pytest.raises(ValueError, match=line):
        from_dict({"model": {"depth": 0}})
    with pytest.raises(ValueError, match=line):
        replace(ModelConfig(), depth=0)
    with pytest.raises(ValueError, match=r"^model.num_heads: 5 is not allowed; it must be a div"):
        ModelConfig(num_heads=5)
    with pytest.raises(ValueError, match=r"^optim.lr: nan is not allowed; it must be a number"):
        OptimConfig(lr=float("nan"))
    with pytest.raises(ValueError, match=r"^model: '3' is not allowed; it must be a group of keys"):
        Config(model="3")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "patch_size", "augment", "problem"),
    [
        ((32, 48), 32, {}, "data.image_size: 32x48 .* multiple of model.patch_size=32, e.g. 32 64"),
        (None, 64, {}, "model.patch_size: 64 .* a divisor of the image size, 32: 1, .*, 32$"),
        ((24, 24), 3, {}, "model.patch_size: 3 .* a power of two with model.stem=conv"),
        (
            (32, 48), 16, {"crop_padding": 32},
            "augment.crop_padding: 32 .* 0 to 31 pixels with images of 32x48",
        ),
        ((24, 24), 8, {"crop_padding": 23}, None),
        ((32, 48), 16, {"crop_padding": 32, "crop": "resized"}, None),
    ],
)  # fmt: skip
def test_model_and_augmentation_must_fit_the_images(
    size: tuple[int, int] | None, patch_size: int, augment: dict[str, Any], problem: str | None
) -> None:
    values = {
        "data": {"name": "shapes", "image_size": size},
        "model": {"patch_size": patch_size, "stem": "conv"},
        "augment": augment,
    }
    with pytest.raises(ValueError, match=problem) if problem else contextlib.nullcontext():
        from_dict(values)


def test_image_size_is_one_number_or_two(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    for text, expected in (
        ("64", (64, 64)), ("[64, 96]", (64, 96)), ("[64]", (64, 64)), ("null", None),
    ):  # fmt: skip
        file.write_text(f"data: {{image_size: {text}}}")
        config, _ = parse_train(["--config", str(file)])
        assert config.data.image_size == expected
        assert from_dict(to_dict(config)) == config
        words = text.strip("[]").replace(",", "").split()
        assert parse_train(["--data.image_size", *words])[0].data.image_size == expected
    assert from_dict({"data": {"image_size": 64}}).data.image_size == (64, 64)
