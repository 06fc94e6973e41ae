"""The command line: flags and YAML files in, checked objects out, mistakes in one line.

A user's mistake never ends in a traceback: `user_errors` turns a ValueError into one line on
standard error and exit code 2.
"""

import argparse
import contextlib
import dataclasses
import difflib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, Namespace

from vit.config import DEFAULT_CONFIG, Config


def fail(message: str) -> NoReturn:
    """End the program with one line on standard error and exit code 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turn a ValueError, which is a user's mistake, into one line and exit code 2."""
    try:
        yield
    except ValueError as error:
        fail(" ".join(str(error).split()))


def parse_train(arguments: Sequence[str]) -> tuple[Config, bool]:
    """Read train.py's command line.

    Args:
        arguments: The words after `train.py`. Without `--config`, configs/quick.yaml is read.

    Returns:
        The config, and whether a finished run may be overwritten.

    Raises:
        ValueError: A key is not known, or a value is not allowed.
        SystemExit: `--help` or `--print_config` was asked for.
    """
    parser = ArgumentParser(
        prog="train.py",
        description="Train a Vision Transformer, evaluate it, and follow its attention.",
        exit_on_error=False,
    )
    parser.add_argument(
        "--config",
        action="config",
        help="YAML file, e.g. configs/shapes.yaml; may be given several times, later ones win "
        "(default: configs/quick.yaml)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="delete what the run folder holds and start anew"
    )
    parser.add_class_arguments(Config)
    if not any(word == "--config" or word.startswith("--config=") for word in arguments):
        arguments = ["--config", str(DEFAULT_CONFIG), *arguments]
    values = _parse(parser, arguments)
    overwrite = values.pop("overwrite")
    values.pop("config")
    for part in dataclasses.fields(Config):
        if part.name != "out" and not isinstance(values[part.name], Namespace):
            raise ValueError(f"{part.name}: {values[part.name]!r} is not a group of keys")
    built = parser.instantiate(values)
    return Config(**{part.name: built[part.name] for part in dataclasses.fields(Config)}), overwrite


def _parse(parser: ArgumentParser, arguments: Sequence[str]) -> Any:
    """Parse, with jsonargparse's messages put into one line that names key, value and allowed."""
    try:
        return parser.parse_args(list(arguments))
    except argparse.ArgumentError as error:
        raise ValueError(_in_one_line(str(error), _known_keys())) from None


def _known_keys() -> list[str]:
    keys = ["out", "config", "overwrite"]
    for part in dataclasses.fields(Config):
        if dataclasses.is_dataclass(part.type):
            keys += [f"{part.name}.{key.name}" for key in dataclasses.fields(part.type)]
    return keys


def _in_one_line(message: str, keys: list[str]) -> str:
    text = " ".join(message.split())
    if found := re.search(r'Parser key "([\w.]+)": (.*)', text):
        key, problem = found.groups()
        value, allowed = re.search(r"Got value: (.*)$", problem), _allowed(problem)
        return f"{key}: {value.group(1)!r} is not {allowed}" if value and allowed else problem
    if found := re.search(r"[Uu]nrecognized arguments: (\S+)", text):
        return _unknown(found.group(1).lstrip("-").split("=")[0], keys)
    if found := re.search(r"Group '([\w.]+)' does not accept option '([\w.]+)'", text):
        return _unknown(".".join(found.groups()), keys)
    return text


def _allowed(problem: str) -> str:
    types = {"int": "a whole number", "float": "a number", "bool": "true or false"}
    literal = re.search(r"Literal\[([^\]]*)\]", problem)
    names = [literal.group(1).replace("'", "")] if literal else []
    names += [text for name, text in types.items() if re.search(rf"\b{name}\b", problem)]
    if "None" in problem:
        names.append("null")
    return " or ".join(names)


def _unknown(key: str, keys: list[str]) -> str:
    near = difflib.get_close_matches(key, keys, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else "--help lists them"
    return f"{key}: no such key; {hint}"
