"""The command line: flags and YAML files in, checked configs out.

Every value in a file or a flag is text. Files are merged in the order given, flags go on top
wherever they appear, and the annotations of the configs convert and check the result once. So a
range, a default and a description each have one source, and a YAML file can construct nothing.

A user's mistake ends in one line on standard error and exit code 2, not in a traceback.
"""

import argparse
import contextlib
import dataclasses
import inspect
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn

import yaml

from vit.console import is_out_of_memory, printable, program, rank
from vit.recipes import compose, read_config, read_yaml, recipes
from vit.reporting.config import COMMANDS
from vit.settings import Switch, describe, is_list, keys, shorten, suggest, unknown
from vit.startup import import_quickly
from vit.training.config import Config, to_dict

# What train.py is told beside the config.
OPTIONS = {
    "overwrite": "delete an earlier run in the folder and its evaluations first; other files are "
    "kept",
    "resume.allow_changes": "resume an interrupted run even if settings of the optimizer, the "
    "schedule, the augmentation or the hardware have changed; data and model must be the same",
}
RENAMED = {"attention": "maps", "image": "photo"}  # flags of version 0.1, commands now


def fail(message: str) -> NoReturn:
    """End the program with one line on standard error and exit code 2."""
    who = f"error (process {rank()}): " if rank() else "error: "
    print(who + printable(message), file=sys.stderr)
    raise SystemExit(2)


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turn errors that the user can fix, ValueError and OSError, into one line and exit code 2."""
    try:
        yield
    except BrokenPipeError:  # such as `| head`; the interpreter must not flush to it again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except (ValueError, OSError) as error:
        fail(str(error))
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            fail(f"out of memory; use a smaller model or batch: {shorten(error, 200)}")
        if "DataLoader worker" in str(error):
            fail(
                "data.workers: a process that decodes images has ended "
                f"({shorten(error, 200)}); rerun the command, and if memory runs out, lower "
                "--data.workers or the batch size"
            )
        if "does not have a deterministic implementation" in str(error):
            operation = str(error).partition(" ")[0]
            fail(
                "deterministic: true is not possible with this config on this device: "
                f"{operation} has no deterministic implementation; train without --deterministic, "
                "or, if the operation is upsample_*, with --train.small_share 0"
            )
        raise


def train_main() -> None:
    """Run train.py, alias vit-train."""
    with user_errors():
        config, options = parse_train(sys.argv[1:])
        # Imported late, because it imports torch: a mistyped flag is answered at once.
        import_quickly("vit.training.train")
        from vit.distributed.launch import launched
        from vit.training.start import on_all_cores
        from vit.training.train import train

        config = on_all_cores(config, options["overwrite"])
        with launched(config.train.processes or 1, train, config, *options.values()):
            train(config, *options.values())


def eval_main() -> None:
    """Run eval.py, alias vit-eval."""
    with user_errors():
        command, run, options = parse_eval(sys.argv[1:])
        # Imported late, because they import torch: a mistyped flag is answered at once.
        import_quickly("vit.reporting.loading")
        import torch

        from vit.hardware import cores_to_use
        from vit.model.variants import load_attention

        torch.set_num_threads(cores_to_use())  # torch does not know the limits of containers
        for variant in options.model.attention:
            load_attention(variant)
        resolve_name(f"vit.reporting.{COMMANDS[command].function}")(run, options)


def parse_train(arguments: Sequence[str]) -> tuple[Config, dict[str, bool]]:
    """Read the command line of train.py.

    Args:
        arguments: The words after `train.py`. Without `--config`, the recipe "quick" is read.

    Returns:
        The config, and the arguments `overwrite` and `allow_changes` of `train`.

    Raises:
        ValueError: A key is not known, or a value is not allowed.
        SystemExit: `--help` or `--print_config` was given.
    """
    usage = "%(prog)s [--config FILE] [--GROUP.FIELD VALUE ...]"
    about = (
        "Train a Vision Transformer.\n\nDefaults below are those of a setting that no file names. "
        "Without --config, the recipe quick\nis read, which names many: --print_config shows them."
    )
    parser = _Parser(usage, about, _asks(arguments))
    parser.add_argument(
        "--config",
        action="append",
        metavar="FILE",
        help="YAML file or name of a recipe, e.g. shapes; may be repeated: later files override "
        "earlier ones, and flags override files (default: quick)",
    )
    parser.add_switch("print_config", "print the resulting config as YAML and exit")
    for name, help_text in OPTIONS.items():
        parser.add_switch(name, help_text)
    parser.add_fields(Config)
    given = parser.parse(arguments)
    files, print_config = given.pop("config", []), given.pop("print_config", False)
    options = {name.rpartition(".")[2]: given.pop(name, False) for name in OPTIONS}
    if text := given.get("model.timm_args"):
        given["model.timm_args"] = read_yaml(text, f"model.timm_args: {shorten(text)}")
    config = compose([read_config(file) for file in files], _nested(given))
    if print_config:
        print(yaml.safe_dump(to_dict(config), sort_keys=False), end="")
        raise SystemExit(0)
    return config, options


def parse_eval(arguments: Sequence[str]) -> tuple[str, str, Any]:
    """Read the command line of eval.py.

    Args:
        arguments: The words after `eval.py`.

    Returns:
        The command, the run folder or model file, and the command's settings.

    Raises:
        ValueError: A command or key is not known, or a value is not allowed.
        SystemExit: `--help` was given.
    """
    words, asks = list(arguments), _asks(arguments)
    if asks and words[0].startswith("-"):
        usage = f"%(prog)s RUN [{' | '.join(COMMANDS)}] ..."
        _Parser(usage, _list_commands(), asks).parse(["--help"])
    for flag in (word[2:].partition("=")[0] for word in words if word.startswith("--")):
        if (command := RENAMED.get(flag, flag)) in COMMANDS:
            usage = f"{program('eval')} RUN {command} {COMMANDS[command].words}".strip()
            raise ValueError(f"{flag}: this is a command now: {usage}")
    # `eval.py maps --help` has no run, and needs none.
    run = "RUN" if asks and words[0] in COMMANDS else "".join(words[:1])
    words = words if run == "RUN" else words[1:]
    if not run or run.startswith("-") or (run in COMMANDS and not Path(run).exists()):
        raise ValueError(f"run: missing; it comes first: {program('eval')} runs/quick {run}")
    name = words.pop(0) if words and not words[0].startswith("-") else "report"
    if name not in COMMANDS:
        meant = suggest(name, COMMANDS) or f"; it must be one of {', '.join(COMMANDS)}"
        raise ValueError(f"{shorten(name)}: no such command{meant}")
    for word in words:
        key = word.removeprefix("--").partition("=")[0]
        owners = [owner for owner, command in COMMANDS.items() if key in keys(command.config)]
        if word.startswith("--") and owners and name not in owners:
            raise ValueError(f"{key}: not a setting of {name}, but of {', '.join(owners)}")
    config, _, first = COMMANDS[name]
    usage = f"%(prog)s RUN {name} {first} [--FIELD VALUE ...]".replace("  ", " ")
    parser = _Parser(usage, _title(config), asks)
    parser.add_fields(config, brief=True, first=first.partition(" ")[0])
    return name, run, config(**_nested(parser.parse(words)))


def _list_commands() -> str:
    """Say what the commands of eval.py do."""
    lines = (f"  {name:<9}{_title(command.config)}\n" for name, command in COMMANDS.items())
    return (
        "Evaluate a trained Vision Transformer.\n\n"
        "RUN is a run folder, model.safetensors, a checkpoint, or cifar10_quick, which is\n"
        f"included. Commands, whose settings `{program('eval')} RUN COMMAND --help` lists:\n\n"
        + "".join(lines)
    )


def _title(config: Any) -> str:
    return str(config.__doc__).partition("\n")[0]


def _asks(arguments: Sequence[str]) -> bool:
    """Tell whether a command line asks for help."""
    return bool({"-h", "--help"} & {*arguments})


class _Parser(argparse.ArgumentParser):
    """A parser that leaves values to the config, and raises ValueError for a mistake."""

    def __init__(self, usage: str, description: str, asked: bool) -> None:
        self.asked = asked  # for help
        super().__init__(
            usage=usage,
            description=description,
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        raise ValueError(shorten(message.removeprefix("argument "), 200))

    def add_switch(self, name: str, about: str) -> None:
        self.add_argument(f"--{name}", action="store_true", help=about)

    def parse(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Return what the command line sets, as {key: text}."""
        given, rest = self.parse_known_args(arguments)
        if rest:
            raise ValueError(_no_such_flag(rest[0], [action.dest for action in self._actions]))
        return vars(given)

    def add_fields(
        self, config: Any, prefix: str = "", brief: bool = False, first: str = ""
    ) -> None:
        """Add a flag for each field, described by the docstring.

        Args:
            config: A dataclass of settings.
            prefix: What its keys begin with, such as "data.".
            brief: Whether the help text has no headings and no ranges, and a switch no value.
            first: What to call the words before the flags, for a field without a default.
        """
        doc: dict[str, str] = {}
        for cls in config.__mro__ if self.asked else ():
            text = inspect.cleandoc(cls.__doc__ or "")
            for name, about in re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", text, re.MULTILINE):
                doc.setdefault(name, " ".join(about.split()).replace("%", "%%"))
        title = f"{prefix.rstrip('.')}: {_title(config).strip('.')}".removeprefix(": ")
        section: Any = self if brief else self.add_argument_group(title)
        order = [*doc, *(field.name for field in dataclasses.fields(config))]
        for field in sorted(dataclasses.fields(config), key=lambda field: order.index(field.name)):
            if dataclasses.is_dataclass(field.type):
                self.add_fields(field.type, f"{prefix}{field.name}.", brief)
                continue
            how: dict[str, Any] = {"nargs": "+"} if is_list(field.type) else {}
            how["help"] = about = doc.get(field.name, "")
            if field.default is field.default_factory:  # neither is given
                self.add_argument(field.name, metavar=first, **how)
                continue
            if self.asked:  # describing every field takes longer than all else
                how["help"] = _help_text(about, describe(field.type), field.default, brief)
            if brief and field.type == Switch:
                how["action"] = "store_true"
            else:
                how["metavar"] = "V" if brief else "VALUE"
            section.add_argument(f"--{prefix}{field.name}", **how)


def _help_text(about: str, allowed: str, default: Any, brief: bool) -> str:
    """Say what a setting is, what it accepts, and its default."""
    shown = json.dumps(default).strip('"').replace("[]", "none")
    if not brief:
        return f"{about[0].upper()}{about[1:]}. ({allowed}; default: {shown})"
    choices = allowed.partition("one of ")[2]  # of which the first is the default
    notes = choices or (f"default: {shown}" if default else "")
    return f"{about} ({notes})" if notes else about


def _no_such_flag(word: str, known: Sequence[str]) -> str:
    if word in ("true", "false"):
        return f"{word}: follows a flag that takes no value; leave it out"
    key = word.removeprefix("--").partition("=")[0]
    if any(name.startswith(f"{key}.") for name in known):
        return f"{key}: this is a group of keys; set one with --{key}.<field> VALUE"
    if word.startswith("-"):
        return unknown(key, known)
    is_config = word.endswith((".yaml", ".yml")) or word in recipes()
    is_config = is_config and "config" in known
    hint = f"did you mean --config {shorten(word)}?" if is_config else "settings are --KEY VALUE"
    return f"{shorten(word) or repr(word)}: not expected here; {hint}"


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    """Turn the flags {"model.depth": "3"} into {"model": {"depth": "3"}}."""
    nested: dict[str, Any] = {}
    for key, value in values.items():
        group, _, name = key.rpartition(".")
        values_of_group = nested.setdefault(group, {}) if group else nested
        values_of_group[name] = None if value in ("null", "~") else value
    return nested
