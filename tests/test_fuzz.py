"""Hundreds of invalid inputs: each produces a one-line error and exit code 2, and none trains.

The tests call the functions behind train.py and eval.py; test_cli.py runs the commands themselves.
The inputs are the same in every run.
"""

import typing
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from command_line import Parse, answer, refused
from vit.cli import parse_eval, parse_train
from vit.reporting.config import COMMANDS
from vit.settings import keys
from vit.training.config import Config


def types_of(config: type, prefix: str = "") -> dict[str, Any]:
    types: dict[str, Any] = {}
    for name, kind in typing.get_type_hints(config).items():  # without the ranges
        key = prefix + name
        types |= types_of(kind, f"{key}.") if is_dataclass(kind) else {key: kind}  # type: ignore[arg-type]
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
    (b"x" * 99_999, "key: value"),
    (b"\0", "#x0000"),
    (b"\xff\xfe\0", "truncated data"),
    (b"model:\n\tdepth: 3", "line 2"),
    (b"---\nout: a\n---\nout: b", "single document"),
    (b"model: &a {depth: *a}", "recursive node"),
    (b"model: {depth: &a {b: 1}, embed_dim: *a}", "model.embed_dim: a group of keys is not allow"),
    (b"? [1, 2]\n: 3", "a key must be text, and given once"),
    (b"out: !!python/object/apply:os.system ['true']", "out: a list is not allowed"),
    (b"!!python/object:os.system {x: 1}", "x: no such key"),
    (b"model: {depth: 3, depth: 4}", "given once"),
    (b"'': 3", "'': no such key"),
    (b"model: {class_path: os.system}", "model.class_path: no such key"),
    (b"out: ''", "out: '' is not allowed"),
    (b"out:", "out: null is not allowed"),
    (b"train: {seed: 2001-01-01}", "train.seed: 2001-01-01"),
    (b"train: {epochs: 1e1}", "train.epochs: 1e1 is not allowed; it must be a valid integer"),
    (b'"\\e[31m": 3', "?[31m: no such key"),
    (b"? " + b"k" * 5000 + b"\n: 3", "kkk...: no such key"),
    (b"out: " + b"x" * 5000, "out: xxx"),
    (LAUGHS + b"out: *a40", "out: a group of keys is not allowed"),
    (b"[" * 2000, "recursion"),
    (b"seed: 0", "did you mean train.seed?"),  # a key of earlier versions
]


def fuzz(examples: int) -> settings:
    return settings(max_examples=examples, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "bad.yaml"


def setting(key: str, value: str, file: Path | None) -> list[str]:
    """Say key and value as a flag, or in a file."""
    if file is None:
        return [f"--{key}={value}"]
    group, _, name = key.rpartition(".")
    file.write_text(f"{group}:\n  {name}: {value}\n" if group else f"{name}: {value}\n")
    return ["--config", str(file)]


def test_odd_files(file: Path) -> None:
    for content, part in ODD_FILES:
        file.write_bytes(content)
        refused(["--config", str(file)], part)
    for name in (".", "/dev/null", "", "\0", "{a: b}"):
        refused(["--config", name])


@fuzz(100)
@given(st.data(), st.sampled_from(sorted(TYPES)), st.text("xyz", min_size=6), st.booleans())
def test_unknown_keys(
    file: Path, data: st.DataObject, key: str, strange: str, in_file: bool
) -> None:
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
def test_wrong_types(file: Path, data: st.DataObject, key: str, in_file: bool) -> None:
    wrong = ["word", "[1, 2, 3]", "{a: 1}", "2001-01-01", "''", "1 2", "!!str x", "é", "--", "7?"]
    made_of = kinds(TYPES[key])
    wrong += [] if bool in made_of else ["true", "off"]
    wrong += [] if float in made_of else ["1.5", "1e3", ".nan", "-.inf"]
    wrong += [] if type(None) in made_of else ["null", "~"]
    wrong += ["7"] if made_of & {bool, Literal} else []
    value = data.draw(st.sampled_from(wrong))
    where = file if in_file else None
    refused(setting(key, value, where), f"error: {key}: ", " is not allowed; ")


def test_numbers_out_of_range() -> None:
    beyond_all = ("-1000001", "inf", "nan", "1e400", "-1e300", "9" * 5000, hex(2**70))
    for key in NUMBERS:
        for value in (*EDGES.get(key, ()), *beyond_all):
            refused([f"--{key}={value}"], f"error: {key}: ", " is not allowed; ")


EVAL_TYPES = [(name, key) for name, (config, _) in COMMANDS.items() for key in keys(config)]


@fuzz(40)
@given(st.sampled_from(EVAL_TYPES), st.text("xyz", min_size=6))
def test_unknown_keys_for_eval(known: tuple[str, str], strange: str) -> None:
    for wrong in (f"{known[1]}q", f"{known[1]}.{strange}", strange):
        words = ["x", known[0], *(["y"] if known[0] != "export" else ["onnx"]), f"--{wrong}", "1"]
        alone = known[0] in ("report", "maps", "heads")
        problem = "y: not expected here" if alone else f"{wrong}: no such key"
        refused(words, f"error: {problem}", parse=parse_eval)


WORDS = st.one_of(
    st.text(max_size=20),
    st.sampled_from([f"--{key}" for key in [*TYPES, *GROUPS, "config", "overwrite", "kinds"]]),
    st.sampled_from([*COMMANDS]),
    st.builds("--{}={}".format, st.sampled_from(sorted(TYPES)), st.text(max_size=20)),
    st.text("-=.:[]{}&*!0123456789enulltrue", max_size=20),
)


@fuzz(150)
@given(st.lists(WORDS, max_size=4), st.sampled_from([parse_train, parse_eval]))
def test_any_words_give_a_config_or_one_line(words: list[str], parse: Parse) -> None:
    result, _ = answer(words, parse)
    assert result is None or isinstance(result[0], Config) or result[0] in COMMANDS


@fuzz(100)
@given(st.binary(max_size=200) | st.text("model: {}[]depth&*!-\n\t3").map(str.encode))
def test_any_bytes_give_a_config_or_one_line(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    result, _ = answer(["--config", str(file)], parse_train)
    assert result is None or isinstance(result[0], Config)
