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
from collections.abc import Iterator, Sequence, Set
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, Namespace

from vit.config import DEFAULT_CONFIG, Config, EvalConfig


def fail(message: str) -> NoReturn:
    """End the program with one line on standard error and exit code 2.

    Of several processes that torchrun has started, the first speaks.
    """
    if os.environ.get("RANK", "0") == "0":
        print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turn what a user can mend, ValueError and OSError, into one line and exit code 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        fail(" ".join(str(error).split()))
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
        "--overwrite", action="store_true", help="delete what the run folder holds and start anew"
    )
    parser.add_argument(
        "--resume.allow_changes",
        action="store_true",
        help="resume an unfinished run also with another config or number of processes",
    )
    if not any(word == "--config" or word.startswith("--config=") for word in arguments):
        arguments = ["--config", str(DEFAULT_CONFIG), *arguments]
    values = _parse(parser, Config, arguments)
    options = {
        "overwrite": values["overwrite"],
        "allow_changes": values["resume.allow_changes"],
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
    parser: ArgumentParser, config: type, arguments: Sequence[str], skip: Set[str] = frozenset()
) -> Namespace:
    """Parse a config's fields and what else the parser takes; make the groups' dataclasses.

    The parser has the skipped fields already.

    jsonargparse's messages are put into one line that names key, value and what is allowed.
    """
    parser.add_class_arguments(config, skip=set(skip))
    groups = {
        field.name: field.type
        for field in dataclasses.fields(config)
        if dataclasses.is_dataclass(field.type)
    }
    keys = [field.name for field in dataclasses.fields(config)]
    for name, group in groups.items():
        keys += [f"{name}.{field.name}" for field in dataclasses.fields(group)]
    try:
        values = parser.parse_args(list(arguments))
    except argparse.ArgumentError as error:
        raise ValueError(_in_one_line(str(error), keys)) from None
    for name in groups:
        if not isinstance(values[name], Namespace):
            raise ValueError(f"{name}: {values[name]!r} is not a group of keys")
    return parser.instantiate(values)


def _fields(values: Namespace, config: type) -> dict[str, Any]:
    return {field.name: values[field.name] for field in dataclasses.fields(config)}


def _in_one_line(message: str, keys: list[str]) -> str:
    text = " ".join(message.split())
    if found := re.search(r'Parser key "([\w.]+)"(?: element \d+)?: (.*)', text):
        key, problem = found.groups()
        if "Unable to load config" in problem:
            return f"{key}: what follows is no YAML file; a single field is set by --{key}.<field>"
        value, allowed = re.search(r"(?:Got|Given) value: (.*)$", problem), _allowed(problem)
        if value and allowed:
            problem = f"{value.group(1)!r} is not {allowed}"
        return f"{key}: {problem}"
    if re.search(r"arguments are required: run", text):
        return "run: missing; name a run folder or model file first: eval.py runs/quick ..."
    if found := re.search(r"Option '([\w.]+)' is not accepted", text):
        return _unknown(found.group(1), keys)
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
    if key.endswith((".yaml", ".yml")):
        return f"{key}: no such key; did you mean --config {key}?"
    name = key.rpartition(".")[2]
    near = [known for known in keys if known.rpartition(".")[2] == name]
    near = near or difflib.get_close_matches(key, keys, n=1, cutoff=0.6)
    hint = f"did you mean {' or '.join(near)}?" if near else "--help lists them"
    return f"{key}: no such key; {hint}"
