"""Command lines: what they mean; invalid input ends in a line, before any file is changed."""

import contextlib
import io
import itertools
import re
import subprocess
import sys
import typing
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass, replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vit.cli import parse_eval, parse_train, user_errors
from vit.commands.config import (
    COMMANDS,
    CompareConfig,
    EvalDataConfig,
    ExportConfig,
    MapsConfig,
    PhotoConfig,
    PredictConfig,
    ReportConfig,
)
from vit.config import Config, to_dict
from vit.console import counted
from vit.explain.kinds import ALL_KINDS
from vit.model.config import ModelConfig
from vit.recipes import RECIPES
from vit.settings import changed_keys, keys
from vit.training.start import check_config

ROOT = Path(__file__).resolve().parent.parent
Parse = Callable[[Sequence[str]], Any]

# Arguments of train.py, and what the error must contain.
BAD_FLAGS = [
    ("--model.depth 1.5", "model.depth: 1.5 is not allowed; it must be a valid integer\n"),
    ("--augment.crop_scale 1 0.5", "(1.0, 0.5) is not allowed; it must be the smallest fraction"),
    ("--data.channels 2", "data.channels: 2 is not allowed; it must be 1 or 3 with data.name="),
    ("--train.lr 0.1", "train.lr: no such key; did you mean optim.lr?"),
    ("--model.depth", "--model.depth: expected one argument"),
    ("shapes", "shapes: not expected here; settings are --KEY VALUE"),
    ("--config nowhere.yaml", "config not found: nowhere.yaml; the recipes are cifar10, "),
    ("--config shpaes", "config not found: shpaes; did you mean shapes?"),
    ("--modle 3", "modle: no such group of keys; did you mean model?"),
    ("--model 3", "model: a group of keys, such as model.name"),
    ("--augment.crop_scale 0.5", "augment.crop_scale: a list is not allowed; it must have more"),
    ("--data.root ~nobody_here/x", "data.root: ~nobody_here/x does not exist"),
    ("--overwite", "overwite: no such key; did you mean overwrite?"),
]

# The same for eval.py.
BAD_EVAL = [
    ("", "run: missing; it comes first"),
    ("x draw", "draw: no such command; it must be one of report, maps, photo, "),
    ("x phto", "; did you mean photo?\n"),
    ("x --indices 3", "indices: not a setting of report, but of vit-eval RUN maps\n"),
    ("x --seed 3 maps", "maps: not expected here; the command follows RUN"),
    ("--data.root x runs/quick", "run: missing; it comes first"),
    ("dot check --json a.txt", "json: a.txt is not allowed; it must be a .json file"),
    ("--export=onnx", "export: not a setting of report, but of vit-eval RUN export\n"),
    ("x photo", "the following arguments are required: PHOTO; they come before settings"),
    ("x maps --indices", "--indices: expected at least one argument"),
    ("x maps --faithfulness 1", "faithfulness: 1 is not allowed; it must be 0, or 2 or more"),
    ("x predict y --out table.txt", "out: table.txt is not allowed; it must be a .csv file"),
    ("x --data.rot y", "did you mean data.root?"),
]


def answer(words: Sequence[str], parse: Parse) -> tuple[Any, str]:
    """Return the config of a command line, or the error line."""
    result, printed = None, io.StringIO()
    with contextlib.redirect_stderr(printed):
        try:
            with user_errors():
                result = parse(words)
        except SystemExit as end:
            assert end.code == 2
    line = printed.getvalue()
    assert (result is None) == bool(line)
    if line:
        assert line.startswith("error: ") and line.endswith("\n")
        assert line[:-1].isprintable() and len(line) < 600, line
    return result, line


def refused(words: Sequence[str], *parts: str, parse: Parse = parse_train) -> None:
    """Check that a command line ends with a line that contains the parts."""
    result, line = answer(words, parse)
    assert result is None, f"{words} would run: {result}"
    for part in parts:
        assert part in line, f"{words}: {line}"


def help_of(words: Sequence[str], parse: Parse = parse_eval) -> str:
    """Return what `--help` prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        parse([*words, "--help"])
    return printed.getvalue()


def test_bad_words_are_one_line_that_names_key_value_and_allowed():
    for parse, cases in ((parse_train, BAD_FLAGS), (parse_eval, BAD_EVAL)):
        for words, line in cases:
            refused(words.split(), line, parse=parse)


def test_a_path_that_is_not_utf_8_is_named_as_such():
    refused(["--out", "runs/\udcfc"], "out: ", "it must be in UTF-8")


def test_a_mistake_ends_the_program_in_one_line(tmp_path):
    words = ["--modle.depth", "3", "--out", str(tmp_path / "out")]
    command = [sys.executable, str(ROOT / "train.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: modle.depth: no such key; did you mean model.depth?\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ValueError("a\n\x1b[31mb"), 2, "error: a \\x1b[31mb\n"),
        (ValueError("out of memory"), 2, "error: out of memory\n"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), 2, "out of memory; use a smaller"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 2, "out of memory; use a"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), 2, "out of memory; use a"),
        (RuntimeError("ERROR_HOST_ALLOCATION_FAILED"), 2, "out of memory; use a"),  # of cuDNN 9
        (MemoryError("no room"), 2, "out of memory; use a smaller model or batch: no room\n"),
        (RuntimeError("put_ does not have a deterministic implementation"), 2, "; train without"),
        (RuntimeError("CUDA error: no kernel image is available"), 2, "use the CPU ("),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_expected_errors_are_one_line_and_bugs_keep_their_traceback(error, code, line, capsys):
    with pytest.raises(SystemExit) as ended, user_errors():
        raise error
    assert ended.value.code == code
    printed = capsys.readouterr().err
    assert line in printed and printed.count("\n") == 1
    with pytest.raises(RuntimeError, match="shapes"), user_errors():
        raise RuntimeError("shapes cannot be multiplied")


def test_help_of_train_has_each_key_with_its_choices_and_default():
    text = help_of([], parse_train)
    assert text.startswith("usage: ") and text.splitlines()[1] == ""
    about = dict(re.findall(r"^  --([\w.]+)((?:.|\n {4,})*)", text, re.MULTILINE))
    assert all(len(about[key].split()) > 4 for key in keys(Config))
    words = " ".join(text.split())
    assert "hardware is fast at it (auto, float32, bfloat16, default: auto)" in words
    assert "number of encoder blocks (default: 12) " in words
    assert "optim: The optimizer, the learning rate schedule and the loss:" in words


def test_help_of_eval_fits_on_a_screen(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = help_of([])
    assert "RUN [report | maps | photo | predict | heads | compare | export | check] ..." in text
    for name, config in COMMANDS.items():
        assert f"  {name:<9}{config.__doc__.splitlines()[0]}\n" in text
        help_text = help_of([name])
        assert help_text == help_of(["runs/x", name]) and len(help_text.splitlines()) <= 25
        for key in keys(config):
            given = key.removesuffix("s").upper() if f"--{key} " not in help_text else f"--{key}"
            assert f"\n  {given} " in help_text
        assert callable(resolve_name(f"vit.commands.{name}:run"))
    assert len(text.splitlines()) <= 25
    assert ", ".join(ALL_KINDS) in " ".join(help_of(["maps"]).split())


def test_printed_config_is_a_config_that_gives_the_same_run(tmp_path, capsys):
    words = ["--model.depth", "7", "--train.budget_minutes", "3"]
    with pytest.raises(SystemExit) as ended:
        parse_train([*words, "--print_config"])
    assert ended.value.code == 0
    file = tmp_path / "printed.yaml"
    file.write_text(capsys.readouterr().out)
    again, options = parse_train(["--config", str(file)])
    config, same_options = parse_train(words)
    assert again == config == Config(**to_dict(config)) and config.model.depth == 7
    assert options == same_options and set(options["plans"]) == {0, 4, 10}
    old = to_dict(parse_train(["--out", "x", "--train.budget_minutes", "3"])[0])
    assert changed_keys(old, to_dict(config)) == ["model.depth: 4 -> 7", "out: x -> runs/quick"]


def test_a_flag_beats_every_file_and_a_later_file_an_earlier(tmp_path):
    first, second = tmp_path / "1.yaml", tmp_path / "2.yaml"
    first.write_text("out: first\nmodel: {depth: 2, embed_dim: 48}\noptim: {clip_grad: 1}\n")
    second.write_text("out: second\nmodel: {depth: 3}\noptim: {clip_grad: }\n")
    parts = [("--config", str(first)), ("--config", str(second)), ("--model.depth", "4")]
    for order in itertools.permutations(range(3)):
        words = [parts[index] for index in order]
        config, _ = parse_train([*itertools.chain(*words)])
        assert parse_train(["=".join(pair) for pair in words])[0] == config
        second_wins = order.index(1) > order.index(0)
        assert (config.model.depth, config.model.embed_dim) == (4, 48)
        assert config.out == ("second" if second_wins else "first")
        assert config.optim.clip_grad == (None if second_wins else 1)


BUDGETS = """
model: {depth: 6, embed_dim: 48}
budgets:
  5: {model: {depth: 5}, augment: {flip: false}}
  0: {model: {depth: 2}}
  20.5: {}
"""


def test_budgets_change_settings_by_epochs(tmp_path):
    file, budget = tmp_path / "mine.yaml", tmp_path / "budget.yaml"
    file.write_text(BUDGETS)
    budget.write_text("train: {budget_minutes: 2}\n")
    words, both = ["--config", str(file)], ["--config", str(file), "--config", str(budget)]
    assert parse_train(words)[1]["plans"] == {}
    config, options = parse_train([*words, "--train.budget_minutes", "2"])
    assert (config.model.depth, config.model.embed_dim) == (6, 48)
    base, fewer = replace(config.model, depth=2), replace(config.model, depth=5)
    assert options["plans"] == {
        0: replace(config, model=base),
        5: replace(config, model=fewer, augment=replace(config.augment, flip=False)),
        20.5: config,
    }
    assert parse_train(["--config", str(budget), *words])[1] == options

    def depths(*words: str) -> list[int]:
        return [plan.model.depth for plan in parse_train(words)[1]["plans"].values()]

    assert depths(*both, "--model.depth", "9") == [9, 9, 9]
    budget.write_text(f"{budget.read_text()}model: {{depth: 7}}\n")
    assert depths(*both) == [7, 7, 7]
    assert depths(*both, "--model.pretrained", "weights") == []


@pytest.mark.parametrize("name", ["shapes", "shapes.yaml", "configs/shapes", "configs/shapes.yaml"])
def test_a_recipe_is_found_from_any_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shapes").mkdir()  # a folder of that name is no config
    assert parse_train(["--config", name])[0].out == "runs/shapes"
    (tmp_path / "configs").mkdir()
    (tmp_path / "shapes").rmdir()
    (tmp_path / name).write_text("out: mine")
    assert parse_train(["--config", name])[0].out == "mine"


def test_every_recipe_is_whole_and_named_after_its_run():
    for file in RECIPES.glob("*.yaml"):
        config, options = parse_train(["--config", str(file), "--train.budget_minutes", "7"])
        for plan in (config, *options["plans"].values()):
            assert (plan.out, plan.train.budget_minutes) == (f"runs/{file.stem}", 7)
        assert file.read_text().startswith("# ")


def test_epochs_that_a_time_budget_would_ignore_are_refused(tmp_path):
    epochs, both = tmp_path / "epochs.yaml", tmp_path / "both.yaml"
    epochs.write_text("train: {epochs: 2}")
    both.write_text("train: {epochs: 2, budget_minutes: 3}")  # as a run writes it
    for more in (["--train.epochs", "2"], ["--config", str(epochs)]):
        words = ["--config", "plain", *more]
        with pytest.raises(ValueError, match=r"^train.epochs: .* add --train.budget_minutes null"):
            parse_train(words)
        config, _ = parse_train([*words, "--train.budget_minutes", "null"])
        assert (config.train.epochs, config.train.budget_minutes) == (2, None)
    for words in ([epochs, "--config", "plain"], [both], [epochs, "--train.budget_minutes", 3]):
        assert parse_train(["--config", *map(str, words)])[0].train.budget_minutes is not None


def test_a_home_folder_is_found_in_every_setting(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    config, _ = parse_train(
        ["--out=~/runs/a", "--optim.teacher=~/b", "--data.root=~/c", "--data.name=folder"]
    )
    assert config.out == "/home/ada/runs/a"
    assert (config.optim.teacher, config.data.root) == ("/home/ada/b", "/home/ada/c")
    report = ReportConfig(data=EvalDataConfig(root="/home/ada/c"))
    assert parse_eval(["~/run", "--data.root=~/c"])[1:] == ("/home/ada/run", report)


def test_quick_is_the_default_unless_another_model_is_chosen(tmp_path):
    assert parse_train([])[0].out == "runs/quick"
    other = tmp_path / "other.yaml"
    other.write_text("out: elsewhere\n")
    assert parse_train(["--config", str(other)])[0] == Config(out="elsewhere")
    minute = ["--train.budget_minutes", "1"]
    assert parse_train(minute)[1]["plans"][0].model.depth == 3
    for words in (["--model.name", "vit"], ["--model.pretrained", "null"]):
        assert parse_train(words)[0] == parse_train([])[0]
    for words in (["--model.name", "timm:resnet18"], ["--model.pretrained", "cifar10_quick"]):
        config, options = parse_train([*minute, *words])
        assert (config.model.depth, options["plans"]) == (12, {})


def test_pretrained_and_frozen_models_train_at_full_size(tmp_path):
    file, asks = tmp_path / "share.yaml", ["--train.small_share", "0.5"]
    file.write_text("train: {small_share: 0.25}")
    for words, share in (
        ([], 0.75), (["--model.pretrained", "x"], 0), (["--train.freeze", "backbone"], 0),
        (["--config", "quick", "--train.freeze", "backbone"], 0),
        (["--train.freeze", "backbone", *asks], 0.5), (["--config", str(file)], 0.25),
        (["--config", str(file), "--model.pretrained", "x"], 0.25),
        (["--config", str(file), "--train.small_share", "null"], 0.75),
    ):  # fmt: skip
        config, _ = parse_train(words)
        assert config.train.small_share == share, words
        assert Config(**to_dict(config)) == config


def test_a_command_has_its_settings_and_report_is_the_default(tmp_path, monkeypatch):
    there = EvalDataConfig(root="there")
    for words, command, options in (
        ("--seed 3 --flip", "report", ReportConfig(seed=3, flip=True)),
        ("--views 6", "report", ReportConfig(views=6)),
        ("report --data.root there", "report", ReportConfig(data=there)),
        ("maps --indices 3 17 --seed 2", "maps", MapsConfig(indices=(3, 17), seed=2)),
        ("photo a maps --target cat", "photo", PhotoConfig(photos=("a", "maps"), target="cat")),
        ("predict --flip photos", "predict", PredictConfig(photos=("photos",), flip=True)),
        ("compare y z", "compare", CompareConfig(others=("y", "z"))),
        ("export onnx timm", "export", ExportConfig(formats=("onnx", "timm"))),
    ):
        assert parse_eval(["x", *words.split()]) == (command, "x", options)
    monkeypatch.chdir(tmp_path)
    Path("maps").mkdir()  # a run may be called like a command
    assert parse_eval(["maps", "maps"]) == ("maps", "maps", MapsConfig())


def test_a_model_that_cannot_be_built_is_refused_before_data_is_read():
    data = {"name": "shapes", "image_size": (32, 48)}
    with pytest.raises(ValueError, match=r"^model\.patch_size: 5 does not divide img_size=32 x 48"):
        check_config(Config(**{"data": data, "model": {"patch_size": 5}}))
    for values, line in (
        ({"train": {"small_share": 1}}, "small_share: 1.0 is not allowed; it must be less than 1"),
        ({"augment": {"mixup": 0.001}}, "mixup: 0.001 is not allowed; it must be 0, or at least"),
    ):
        with pytest.raises(ValueError, match=line):
            check_config(Config(**values))
    line = "^model.depth: 0 is not allowed; it must be greater than or equal to 1$"
    for make in (ModelConfig, partial(replace, ModelConfig())):  # as on the command line
        with pytest.raises(ValueError, match=line):
            make(depth=0)


SWITCH_VALUES = [([], True), (["true"], True), (["False"], False), (["on"], True), (["0"], False)]


@pytest.mark.parametrize(("value", "meant"), SWITCH_VALUES)
def test_a_switch_may_have_a_value_everywhere(value, meant):
    for key in (key for key, kind in types_of(Config).items() if kind is bool):
        for words in ([f"--{key}", *value], [f"--{key}={text}" for text in value]):
            config, _ = parse_train([*words, "--model.depth", "3"])
            group, _, name = key.rpartition(".")
            of_key = getattr(getattr(config, group) if group else config, name)
            assert of_key is meant or (not words and not value)
    for index, key in enumerate(("overwrite", "resume.allow_changes")):
        assert [*parse_train([f"--{key}", *value, "--out", "x"])[1].values()][index] is meant
        refused([f"--{key}=perhaps"], f"error: {key}: perhaps is not allowed; it must be true")
    for name, command in COMMANDS.items():
        others = {"photo": ["true.jpg"], "predict": ["a.jpg", "b"], "compare": ["c"]}.get(name, [])
        for key in (key for key, kind in types_of(command).items() if kind is bool):
            for words in ([*others, f"--{key}", *value], [f"--{key}", *value, *others]):
                options = parse_eval(["x", name, *words])[2]
                assert getattr(options, key) is meant
                assert not others or tuple(others) in vars(options).values()


def test_image_size_is_one_number_or_two(tmp_path):
    file = tmp_path / "config.yaml"
    for text, expected in (
        ("64", (64, 64)), ("[64, 96]", (64, 96)), ("[64]", (64, 64)), ("null", None),
    ):  # fmt: skip
        file.write_text(f"data: {{image_size: {text}}}")
        config, _ = parse_train(["--config", str(file)])
        assert config.data.image_size == expected
        assert Config(**to_dict(config)) == config
        words = text.strip("[]").replace(",", "").split()
        assert parse_train(["--data.image_size", *words])[0].data.image_size == expected


# Hundreds of invalid inputs, the same in every run.


def types_of(config: type, prefix: str = "") -> dict[str, Any]:
    types: dict[str, Any] = {}
    for name, kind in typing.get_type_hints(config).items():  # without the ranges
        key = prefix + name
        types |= types_of(kind, f"{key}.") if is_dataclass(kind) else {key: kind}
    return types


def kinds(kind: Any) -> set[Any]:
    """Return what a type is made of: int, float, bool, str, NoneType, Literal."""
    if typing.get_origin(kind) is Literal:
        return {Literal}
    parts = typing.get_args(kind)
    return set().union(*map(kinds, parts)) if parts else {kind}


TYPES = types_of(Config)
GROUPS = sorted({key.partition(".")[0] for key in TYPES if "." in key})
NUMBERS = sorted(key for key, kind in TYPES.items() if kinds(kind) & {int, float})
NAMED = sorted(key for key, kind in TYPES.items() if str not in kinds(kind))  # take no text

# The first values beyond each kind of range, and beyond some of their own.
EDGES = {
    "track.every": ("0", "1000001"),  # Count
    "track.probes": ("-1", "1000001"),  # CountOrZero
    "data.val_size": ("-1", "1.5", "1000001"),  # CountOrFraction
    "optim.lr": ("0", "-1", "1000001"),  # Positive
    "augment.mixup": ("-0.1", "1000001"),  # NonNegative
    "augment.erasing": ("-0.1", "1.1"),  # Fraction
    "train.small_scale": ("0", "1.1"),  # FractionAbove0
    "optim.warmup": ("-0.1", "1"),  # FractionBelow1
    "optim.ema_decay": ("0", "1"),  # Between0And1
    "train.seed": ("-1", str(2**63)),
    "train.accumulate": ("0", "3", "256"),
    "augment.crop_padding": ("-1", "32"),
}

# Aliases that double what they stand for, forty times over.
LAUGHS = b"data: {root: &a0 {x: 1}}\n" + b"".join(
    b"data%d: &a%d {x: *a%d, y: *a%d}\n" % (n, n, n - 1, n - 1) for n in range(1, 41)
)

# Whole files, and what the line must name.
ODD_FILES = [
    (b"", "key: value"),
    (b"\0", "#x0000"),
    (b"model:\n\tdepth: 3", "line 2"),
    (b"model: &a {depth: *a}", "aliases"),
    (b"? [1, 2]\n: 3", "a key must be text, and given once"),
    (b"out: !!python/object/apply:os.system ['true']", "out: a list is not allowed"),
    (b"model: {depth: 3, depth: 4}", "given once"),
    (b"out:", "out: null is not allowed"),
    (b'"\\e[31m": 3', "\\x1b[31m: no such key"),
    (b"? " + b"k" * 5000 + b"\n: 3", "kkk...: no such key"),
    (LAUGHS + b"out: *a40", "aliases"),
    (b"[" * 2000, "recursion"),
    (b"seed: 0", "did you mean train.seed?"),  # a key of earlier versions
    (b"budgets: {soon: {}}", "budgets: soon.[key]: soon is not allowed; it must be a valid number"),
    (b"budgets: {0: {data: {val_size: 3}}}", "it must be 'model', 'augment' or 'optim'"),
    (b"budgets: {-1: {}}", "budgets: -1.[key]: -1 is not allowed; it must be greater than or"),
    (b"budgets: {0: {model: {pretrained: cifar10}}}", "it must be None, as without budgets"),
    (b"model.depth: 3", "model.depth: no such key in a file; write depth in the lines below model"),
    (b"budgets: {0: }", "budgets: 0: null is not allowed"),
    (b"budgets: {0: {model: {depht: 3}}}", "model.depht: no such key; did you mean model.depth"),
    (b"model: 3", "model: 3 is not allowed"),
]


def fuzz(examples: int) -> settings:
    return settings(max_examples=examples, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "bad.yaml"


def setting(key: str, value: str, file: Path | None) -> list[str]:
    """Return arguments that set a key by a flag or a file."""
    if file is None:
        return [f"--{key}={value}"]
    group, _, name = key.rpartition(".")
    file.write_text(f"{group}:\n  {name}: {value}\n" if group else f"{name}: {value}\n")
    return ["--config", str(file)]


def test_odd_files(file):
    for content, part in ODD_FILES:
        file.write_bytes(content)
        refused(["--config", str(file), "--train.budget_minutes=1", "--model.depth=4"], part)
    for name in (".", "/dev/null", "", "\0", "{a: b}"):
        refused(["--config", name])


@fuzz(100)
@given(st.data(), st.sampled_from(sorted(TYPES)), st.text("xyz", min_size=6), st.booleans())
def test_unknown_keys(file, data, key, strange, in_file):
    group, _, name = key.rpartition(".")
    at = data.draw(st.integers(0, len(name) - 1))
    letter = data.draw(st.sampled_from(["", "Q", name[at] * 2]))  # left out, mistaken, doubled
    wrong = f"{group}.{name[:at]}{letter}{name[at + 1 :]}".lstrip(".")
    near = ["did you mean"] if len(name) >= 4 else []
    where = file if in_file else None
    refused(setting(wrong, "1", where), f"error: {wrong}: no such key", *near)
    refused(setting(f"{group}.{strange}".lstrip("."), "1", where), f"{strange}: no such key")
    refused(setting(f"{strange}.{name}", "1", where), f"error: {strange}", "no such key")


@fuzz(100)
@given(st.data(), st.sampled_from(NAMED), st.booleans())
def test_wrong_types(file, data, key, in_file):
    wrong = ["word", "[1, 2, 3]", "{a: 1}", "2001-01-01", "''", "1 2", "!!str x", "é", "--", "7?"]
    made_of = kinds(TYPES[key])
    wrong += [] if bool in made_of else ["true", "off"]
    wrong += [] if float in made_of else ["1.5", "1e3", ".nan", "-.inf"]
    wrong += [] if type(None) in made_of else ["null", "~"]
    wrong += ["7"] if made_of & {bool, Literal} else []
    value = data.draw(st.sampled_from(wrong))
    where = file if in_file else None
    refused(setting(key, value, where), f"error: {key}: ", " is not allowed; ")


def test_numbers_out_of_range():
    odd = ("nan", "1e400", "-1e300", "9" * 5000, hex(2**70))
    for key in NUMBERS:
        more = odd if key in ("model.depth", "optim.lr") else ()
        for value in (*EDGES.get(key, ()), "-1000001", "inf", *more):
            refused([f"--{key}={value}"], f"error: {key}: ", " is not allowed; ")


WORDS = st.one_of(
    st.text(max_size=20),
    st.sampled_from([f"--{key}" for key in [*TYPES, *GROUPS, "config", "overwrite", "kinds"]]),
    st.sampled_from([*COMMANDS]),
    st.builds("--{}={}".format, st.sampled_from(sorted(TYPES)), st.text(max_size=20)),
    st.text("-=.:[]{}&*!0123456789enulltrue", max_size=20),
)


BYTES = st.binary(max_size=200) | st.text("model: {}[]depth&*!-\n\t3").map(str.encode)


@fuzz(250)
@given(st.lists(WORDS, max_size=4) | BYTES, st.sampled_from([parse_train, parse_eval]))
def test_any_input_gives_a_config_or_one_line(file, words, parse):
    if isinstance(words, bytes):
        file.write_bytes(words)
        words, parse = ["--config", str(file)], parse_train
    result, _ = answer(words, parse)
    assert result is None or isinstance(result[0], Config) or result[0] in COMMANDS


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_does_not_end_the_program():
    # Without the flush of a normal end.
    program = "import os; from vit.console import say, warn; say('a'); warn('b'); os._exit(7)"
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = subprocess.run([sys.executable, "-c", program], stdout=full, stderr=full)
    assert done.returncode == 7


def test_nouns_are_plural_unless_there_is_one():
    assert [counted(n, "image", ",") for n in (1, 2000)] == ["1 image", "2,000 images"]
    assert [counted(n, "epoch", ".4g") for n in (0.5, 1.0)] == ["0.5 epochs", "1 epoch"]
    assert counted(1000, "worker") == "1000 workers"


def test_a_closed_stderr_is_written_to_without_an_error(monkeypatch):
    monkeypatch.setattr("sys.stderr", None)
    with user_errors():
        print("progress", file=sys.stderr, flush=True)
        assert not sys.stderr.isatty()


def test_true_may_be_spelled_as_in_yaml_or_in_python():
    for word in ("true", "True"):
        assert parse_train(["--train.compile", word])[0].train.compile is True
