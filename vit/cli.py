"""The command line: flags and YAML files in, checked objects out, mistakes in one line.

A user's mistake does not end in a traceback: `user_errors` turns it into one line on standard error
and exit code 2.
"""

import argparse
import contextlib
import dataclasses
import re
import sys
import typing
from collections.abc import Iterator, Sequence, Set
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, Namespace

from vit.config import DEFAULT_CONFIG, Config, EvalConfig, shorten
from vit.console import is_out_of_memory, rank
from vit.yaml_flags import allowed, unknown, without_files

LONGEST_TEXT = 1_000  # characters
LONGEST_NUMBER = 100


def fail(message: str) -> NoReturn:
    """End the program with one line on standard error and exit code 2."""
    line = " ".join(message.split())
    who = f"error (process {rank()}): " if rank() else "error: "
    # What a file or a flag holds must not steer the terminal.
    print(who + "".join(c if c.isprintable() else "?" for c in line), file=sys.stderr)
    raise SystemExit(2)


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turn what a user can mend, ValueError and OSError, into one line and exit code 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        fail(str(error))
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            fail(f"out of memory; a smaller model or batch takes less: {shorten(error, 200)}")
        if "does not have a deterministic implementation" in str(error):
            operation = str(error).partition(" ")[0]
            fail(
                f"deterministic: true is not possible with this config on this device: {operation} "
                "adds in no fixed order; train without --deterministic, or, where the operation is "
                "upsample_*, with --train.small_share 0"
            )
        raise
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
        help="resume an unfinished run also with other rates, epochs, batch, augmentation, device "
        "or number of processes; data and model stay",
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
    words = without_files(arguments, files, types)
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
            raise ValueError(unknown(flag[2:], list(types)))
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


def _fields(values: Namespace, config: type) -> dict[str, Any]:
    return {field.name: values[field.name] for field in dataclasses.fields(config)}


def _in_one_line(message: str, types: dict[str, Any], known: list[str]) -> str:
    text = " ".join(message.split())
    if found := re.search(r'Parser key "([\w.]+)"(?: element \d+)?: (.*)', text):
        key, problem = found.groups()
        value = re.search(r"(?:Got|Given) value: ?(.*)$", problem)
        if value and key in types:
            given = "null" if value.group(1) == "None" else repr(shorten(value.group(1)))
            return f"{key}: {given} is not {allowed(types[key])}"
        return f"{key}: {shorten(problem, 200)}"
    if re.search(r"arguments are required: run", text):
        return "run: missing; name a run folder or model file first: eval.py runs/quick ..."
    if found := re.search(r"[Uu]nrecognized arguments: (\S+)", text):
        return unknown(found.group(1).lstrip("-").split("=")[0], known)
    return shorten(text, 200)
