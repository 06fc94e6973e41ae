"""The command line: flags and YAML files in, checked objects out, mistakes in one line.

A user's mistake does not end in a traceback: `user_errors` turns it into one line on standard error
and exit code 2.
"""

import argparse
import contextlib
import dataclasses
import difflib
import os
import re
import sys
import typing
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import ArgumentParser, Namespace

from vit.config import DEFAULT_CONFIG, Config, EvalConfig, shorten

LONGEST_FILE = 100_000  # bytes; a config has a few thousand
LONGEST_TEXT = 1_000  # characters
LONGEST_NUMBER = 100
YAML_TAG = "tag:yaml.org,2002:"
PLAIN_TAGS = ("map", "seq", "str", "int", "float", "bool", "null", "timestamp", "merge", "value")


def fail(message: str) -> NoReturn:
    """End the program with one line on standard error and exit code 2.

    Of several processes that torchrun has started, the first speaks.
    """
    line = " ".join(message.split())
    if os.environ.get("RANK", "0") == "0":
        # What a file or a flag holds must not steer the terminal.
        print("error: " + "".join(c if c.isprintable() else "?" for c in line), file=sys.stderr)
    raise SystemExit(2)


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turn what a user can mend, ValueError and OSError, into one line and exit code 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None


def parse_train(arguments: Sequence[str]) -> tuple[Config, dict[str, bool]]:
    """Read train.py's command line.

    Args:
        arguments: The words after `train.py`. Without `--config`, configs/quick.yaml is read.

    Returns:
        The config, and what may be done with a run that is there, as arguments of `train`.

    Raises:
        ValueError: A key is not known, or a value is not allowed.
        SystemExit: `--help` or `--print_config` was asked for.
    """
    parser = ArgumentParser(
        prog="train.py",
        description="Train a Vision Transformer, evaluate it, and follow its attention.",
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        action="config",
        help="YAML file, e.g. configs/shapes.yaml; may be given several times, later ones win "
        "(default: configs/quick.yaml)",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        default=argparse.SUPPRESS,  # so that --print_config leaves it out: no file may set it
        help="delete what the run folder holds and start anew",
    )
    parser.add_argument(
        "--resume.allow_changes",
        action="store_true",
        default=argparse.SUPPRESS,
        help="resume an unfinished run also with another config or number of processes",
    )
    if not any(word == "--config" or word.startswith("--config=") for word in arguments):
        arguments = ["--config", str(DEFAULT_CONFIG), *arguments]
    values = _parse(parser, Config, arguments, own=("config", "overwrite", "resume.allow_changes"))
    options = {
        "overwrite": "overwrite" in values,
        "allow_changes": "resume.allow_changes" in values,
    }
    return Config(**_fields(values, Config)), options


def parse_eval(arguments: Sequence[str]) -> tuple[str, EvalConfig]:
    """Read eval.py's command line.

    Args:
        arguments: The words after `eval.py`.

    Returns:
        The run folder or model file, and how to evaluate it.

    Raises:
        ValueError: A key is not known, or a value is not allowed.
        SystemExit: `--help` was asked for.
    """
    parser = ArgumentParser(
        prog="eval.py",
        usage="%(prog)s run [options]",
        description="Evaluate a trained Vision Transformer: on the test images, or with "
        "--attention, --image or --compare look into it.",
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument(
        "run", help="run folder, model.safetensors, checkpoint, or cifar10_quick, which comes along"
    )
    several = ("image", "indices")
    for name, kind in (("image", str), ("indices", int)):
        parser.add_argument(
            f"--{name}", nargs="+", type=kind, default=[], help=_help_of(EvalConfig, name)
        )
    parser.add_argument("--attention", action="store_true", help=_help_of(EvalConfig, "attention"))
    values = _parse(parser, EvalConfig, arguments, skip={*several, "attention"})
    fields = _fields(values, EvalConfig)
    return values["run"], EvalConfig(**fields | {name: tuple(fields[name]) for name in several})


def _help_of(config: type, name: str) -> str:
    """Read what the docstring of a dataclass says of a field."""
    found = re.search(rf"^ +{name}: (.*(?:\n {{12}}.*)*)", config.__doc__ or "", re.MULTILINE)
    return " ".join(found.group(1).split()) if found else ""


def _parse(
    parser: ArgumentParser,
    config: type,
    arguments: Sequence[str],
    skip: Set[str] = frozenset(),
    own: Sequence[str] = (),
) -> Namespace:
    """Parse a config's fields and what else the parser takes; make the groups' dataclasses.

    The parser has the skipped fields already, and flags of its `own`, of which `config` takes a
    YAML file of the whole config; a group's flag takes one of the group.

    jsonargparse's messages are put into one line that names key, value and what is allowed.
    """
    parser.add_class_arguments(config, skip=set(skip))
    types = _types(config)
    groups = {key.partition(".")[0] for key in types if "." in key}
    files = {group: group for group in groups} | {name: "" for name in own if name == "config"}
    words = _without_files(arguments, files, types)
    _check_words(words, types, own)
    try:
        values = parser.parse_args(words)
    except argparse.ArgumentError as error:
        raise ValueError(_in_one_line(str(error), types, [*types, *own])) from None
    return parser.instantiate(values)


def _types(config: type, prefix: str = "") -> dict[str, Any]:
    """List the keys of a config, as `train.seed`, with their types."""
    types: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        key = prefix + field.name
        if isinstance(field.type, type) and dataclasses.is_dataclass(field.type):
            types |= _types(field.type, f"{key}.")
        else:
            types[key] = field.type
    return types


def _check_words(words: Sequence[str], types: dict[str, Any], own: Sequence[str]) -> None:
    """Refuse what jsonargparse or Python would stumble over.

    jsonargparse takes --overwrite.x for --overwrite; Python does not read a number of any length.
    """
    for before, word in zip(["", *words], words, strict=False):
        flag, equals, value = word.partition("=")
        if word.startswith("--") and "." in flag and flag[2:] not in (*types, *own):
            raise ValueError(_unknown(flag[2:], list(types)))
        if not (word.startswith("-") and equals):
            flag, value = before, word
        key = flag.lstrip("-")
        is_text = key not in types or str in (types[key], *typing.get_args(types[key]))
        longest = LONGEST_TEXT if is_text else LONGEST_NUMBER
        if len(value) > longest:
            raise ValueError(
                f"{shorten(key)}: {shorten(value)!r} is not allowed; "
                f"it must be at most {longest} characters, and it has {len(value)}"
            )


def _without_files(
    arguments: Sequence[str], files: dict[str, str], types: dict[str, Any]
) -> list[str]:
    """Put in place of each YAML file the flags that it stands for.

    So a file's values are checked as flags are, and the later one wins.

    Args:
        arguments: The command line.
        files: The flags that take a file, each with the group it holds; "" is all.
        types: Of all keys.
    """
    words, rest = [], iter(arguments)
    for word in rest:
        name, equals, file = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in files:
            words.append(word)
            continue
        if not equals:
            file = next(rest, "--")
        if file.startswith("--"):
            raise ValueError(f"--{name}: expected one argument, a YAML file")
        words += _flags(_read_yaml(name, file), files[name], types)
    return words


def _read_yaml(name: str, file: str) -> yaml.Node:
    """Read a YAML file, as nodes: nothing is made from what it holds."""
    hint = "" if name == "config" else f"; a single field is set by --{name}.<field>"
    try:
        with Path(file).open("rb") as stream:
            content = stream.read(LONGEST_FILE + 1)
        if len(content) > LONGEST_FILE:
            raise ValueError(f"it is longer than {LONGEST_FILE} bytes")
        node = yaml.compose(content, Loader=yaml.SafeLoader)
        if not isinstance(node, yaml.MappingNode):
            raise ValueError("it must hold lines of `key: value`")
    except RecursionError:
        problem = "it is nested too deep"
    except (OSError, ValueError, yaml.YAMLError) as error:
        problem = shorten(error, 200)
    else:
        return node
    raise ValueError(f"{name}: {shorten(file)} is no YAML file of keys: {problem}{hint}")


def _flags(node: yaml.Node, group: str, types: dict[str, Any]) -> Iterator[str]:
    """Turn YAML into flags: `model: {depth: 3}` is --model.depth=3.

    The group of a whole file is "". It goes no deeper than there are groups, so that an anchor
    which holds itself does no harm.
    """
    _refuse_tag(node, group or "config")
    if not isinstance(node, yaml.MappingNode):
        raise ValueError(
            f"{group}: {_shown(node)} is not a group of keys, as {group}: {{key: value}}"
        )
    seen = set()
    for name, value in node.value:
        if not isinstance(name, yaml.ScalarNode):
            raise ValueError(f"{group or 'config'}: {_shown(name)} is not a key")
        key = f"{group}.{name.value}" if group else name.value
        if key in seen:
            raise ValueError(f"{shorten(key)}: given twice in one file; keep one")
        seen.add(key)
        if key in types:
            yield _flag(value, key, types[key])
        elif any(known.startswith(f"{key}.") for known in types):
            yield from _flags(value, key, types)
        else:
            raise ValueError(_unknown(key, list(types)))


def _flag(node: yaml.Node, key: str, kind: Any) -> str:
    _refuse_tag(node, key)
    is_null = node.tag.endswith(":null")
    if not isinstance(node, yaml.ScalarNode) or (is_null and not _takes_null(kind)):
        raise ValueError(f"{key}: {_shown(node)} is not {_allowed(kind)}")
    return f"--{key}={'null' if is_null else node.value}"


def _refuse_tag(node: yaml.Node, key: str) -> None:
    tag = node.tag.removeprefix(YAML_TAG)
    if tag not in PLAIN_TAGS:
        raise ValueError(f"{key}: the tag !!{shorten(tag)} is not allowed; write plain values")


def _shown(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return "null" if node.tag.endswith(":null") else repr(shorten(node.value))
    return "a list" if isinstance(node, yaml.SequenceNode) else "a group of keys"


def _fields(values: Namespace, config: type) -> dict[str, Any]:
    return {field.name: values[field.name] for field in dataclasses.fields(config)}


def _in_one_line(message: str, types: dict[str, Any], known: list[str]) -> str:
    text = " ".join(message.split())
    if found := re.search(r'Parser key "([\w.]+)"(?: element \d+)?: (.*)', text):
        key, problem = found.groups()
        value = re.search(r"(?:Got|Given) value: ?(.*)$", problem)
        if value and key in types:
            given = "null" if value.group(1) == "None" else repr(shorten(value.group(1)))
            return f"{key}: {given} is not {_allowed(types[key])}"
        return f"{key}: {shorten(problem, 200)}"
    if re.search(r"arguments are required: run", text):
        return "run: missing; name a run folder or model file first: eval.py runs/quick ..."
    if found := re.search(r"[Uu]nrecognized arguments: (\S+)", text):
        return _unknown(found.group(1).lstrip("-").split("=")[0], known)
    return shorten(text, 200)


def _takes_null(kind: Any) -> bool:
    return type(None) in typing.get_args(kind)


def _allowed(kind: Any) -> str:
    """Say in words what a type takes."""
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    if kind in words:
        return words[kind]
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(typing.get_args(kind))
    parts = [part for part in typing.get_args(kind) if part not in (type(None), ...)]
    return " or ".join([_allowed(part) for part in parts] + ["null"] * _takes_null(kind))


def _unknown(key: str, keys: list[str]) -> str:
    key = shorten(key)
    if key.endswith((".yaml", ".yml")):
        return f"{key}: no such key; did you mean --config {key}?"
    group, _, name = key.rpartition(".")
    groups = {known.partition(".")[0] for known in keys}
    last = {known: known.rpartition(".")[2] for known in [*keys, *groups]}
    near = difflib.get_close_matches(name, set(last.values()), n=1, cutoff=0.6)
    found = [known for known in last if last[known] in near]
    found = [known for known in found if known == f"{group}.{near[0]}"] or found
    hint = f"did you mean {' or '.join(found)}?" if found else "--help lists them"
    return f"{key or repr(key)}: no such key; {hint}"
