"""The command line: flags and YAML files in, checked configs out.

Values stay text until the annotations of the configs convert and check them. Invalid input ends
with one line on standard error and exit code 2.
"""

import argparse
import contextlib
import dataclasses
import gc
import importlib
import inspect
import io
import json
import os
import re
import sys
import typing
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

import yaml

from vit.commands.config import COMMANDS
from vit.config import Config, Plans, to_dict
from vit.console import is_out_of_memory, note_once, printable, program, rank, say, shorten
from vit.recipes import compose, read_config
from vit.settings import ImageSize, expand, keys, read_yaml, require, suggest, unknown

# Switches of train.py that are not part of the config.
SWITCHES = {
    "print_config": "print the resulting config as YAML and exit",
    "overwrite": "delete an earlier run in the folder and its evaluations first; other files are "
    "kept",
    "resume.allow_changes": "resume an interrupted run even if settings of the optimizer, the "
    "schedule, the augmentation or the hardware have changed; data and model must be the same",
}
# Values of a switch, as pydantic reads a bool; without one, it is true.
TRUE, FALSE = ("true", "t", "yes", "y", "on", "1"), ("false", "f", "no", "n", "off", "0")


def fail(message: str) -> NoReturn:
    """End the program with one line on standard error and exit code 2."""
    process = f" (process {rank()})" if rank() else ""
    say(f"error{process}: {printable(message)}", sys.stderr)
    raise SystemExit(2)


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turn errors that the user can fix, ValueError and OSError, into one line and exit code 2."""
    note_once.cache_clear()  # a command of its own, also in a notebook
    sys.stderr = sys.stderr or io.StringIO()  # closed, as that of a daemon may be
    try:
        yield
    except KeyboardInterrupt:
        say("interrupted", sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:  # such as `| head`; the interpreter must not flush to it again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except (ValueError, OSError) as error:
        fail(str(error))
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            fail(f"out of memory; use a smaller model or batch: {shorten(error, 200)}")
        if "deterministic implementation" in str(error):
            advice = "or, if the operation is upsample_*, with --train.small_share 0"
            fail(f"{shorten(error, 200)}; train without --deterministic, {advice}")
        # The GPU is older than those that torch was built for, or torch lacks an operation on it.
        if any(text in str(error) for text in ("no kernel image", "for the MPS device")):
            advice = "use the CPU (--train.device cpu, or --device cpu), or a PyTorch for this GPU"
            fail(f"{shorten(error, 200)}; {advice}")
        raise


@contextlib.contextmanager
def _importing() -> Iterator[None]:
    """Import what takes seconds, late, so that a mistyped flag is answered at once.

    Garbage collection would take a fifth of the time and find nothing; freezing spares the imports
    from later collections.
    """
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def train_main() -> None:
    """Run train.py, alias vit-train."""
    with user_errors():
        config, options = parse_train(sys.argv[1:])
        with _importing():
            from vit.commands.train import train
            from vit.distributed.launch import launch
            from vit.training.start import on_all_cores

        config = on_all_cores(config, options["overwrite"])
        launch(config.train.processes or 1, partial(train, config, **options))


def eval_main() -> None:
    """Run eval.py, alias vit-eval."""
    with user_errors():
        command, run, options = parse_eval(sys.argv[1:])
        with _importing():
            import torch

            from vit.hardware import cores_to_use
            from vit.model.variants import load_attention

            function = importlib.import_module(f"vit.commands.{command}").run
        torch.set_num_threads(cores_to_use())  # torch does not know the limits of containers
        for variant in options.model.attention if hasattr(options, "model") else ():
            load_attention(variant)
        function(run, options)


def parse_train(arguments: Sequence[str]) -> tuple[Config, dict[str, Any]]:
    """Parse the arguments of train.py; return a config, and the other arguments of `train`.

    Raises:
        ValueError: A key is not known, or a value is not allowed.
    """
    about = (
        "Train a Vision Transformer.\n\nDefaults below apply to settings that no file sets. "
        "Without --config,\nthe recipe quick is read, unless --model.name or --model.pretrained "
        "names another\nmodel: --print_config shows all values."
    )
    parser = _Parser(usage="%(prog)s [--config FILE] [--GROUP.FIELD VALUE ...]", description=about)
    parser.add_argument(
        "--config", action="append", default=[], metavar="FILE",
        help="YAML file or name of a recipe, e.g. shapes; may be repeated: later files override "
        "earlier ones, and flags override files (default: quick)",
    )  # fmt: skip
    for name, help_text in SWITCHES.items():
        parser.add_argument(f"--{name}", default="false", metavar="[VALUE]", help=help_text)
    _add_fields(parser, Config)
    flags = parser.parse(arguments)
    files = flags.pop("config")
    switches = {name: flags.pop(name) for name in SWITCHES}
    for name, text in switches.items():
        require(text.lower() in TRUE + FALSE, name, text, "true or false")
    print_config, overwrite, allow_changes = (text.lower() in TRUE for text in switches.values())
    if text := flags.get("model.timm_args"):
        flags["model.timm_args"] = read_yaml(text, f"model.timm_args: {shorten(text)}")
    config, plans = compose([read_config(file) for file in files], _nested(flags))
    if print_config:
        values = to_dict(config) | ({"budgets": _differences(config, plans)} if plans else {})
        print(yaml.safe_dump(values, sort_keys=False), end="", flush=True)  # or fail
        raise SystemExit(0)
    return config, {"overwrite": overwrite, "allow_changes": allow_changes, "plans": plans}


def parse_eval(arguments: Sequence[str]) -> tuple[str, str, Any]:
    """Parse the arguments of eval.py; return a command, its run or model file, and its settings.

    Raises:
        ValueError: A command or key is not known, or a value is not allowed.
    """
    words = list(arguments)
    if words[:1] in (["-h"], ["--help"]):
        lines = (f"  {name:<9}{_title(config)}\n" for name, config in COMMANDS.items())
        about = (
            "Evaluate a trained Vision Transformer.\n\n"
            "RUN is a run folder, model.safetensors, a checkpoint, or the name of an included\n"
            "model: cifar10 or cifar10_quick. Commands, whose settings\n"
            f"`{program('eval')} RUN COMMAND --help` lists:\n\n"
        )
        usage = f"%(prog)s RUN [{' | '.join(COMMANDS)}] ..."
        _Parser(usage=usage, description=about + "".join(lines)).parse(words)
    run = words.pop(0) if words and not words[0].startswith("-") else ""
    if run in COMMANDS and not Path(run).exists():  # as in `eval.py maps --help`
        words, run = [run, *words], ""
    name = words.pop(0) if words and not words[0].startswith("-") else "report"
    if name not in COMMANDS:
        names = ", ".join(COMMANDS) + suggest(name, COMMANDS)
        raise ValueError(f"{shorten(name)}: no such command; it must be one of {names}")
    for key in (word[2:].partition("=")[0] for word in words if word.startswith("--")):
        owners = [command for command in COMMANDS if key in (command, *keys(COMMANDS[command]))]
        if owners and name not in owners:
            commands = f"{program('eval')} RUN {' or '.join(owners)}"
            raise ValueError(f"{key}: not a setting of {name}, but of {commands}")
    config = COMMANDS[name]
    usage = f"%(prog)s RUN {name} ... [--FIELD VALUE ...]"
    parser = _Parser(usage=usage, description=_title(config))
    _add_fields(parser, config, short=True)
    if not run and not {"-h", "--help"} & {*words}:
        raise ValueError(f"run: missing; it comes first: {program('eval')} runs/quick {name}")
    return name, expand(run), config(**_nested(parser.parse(words)))


def _differences(config: Config, plans: Plans) -> dict[float, Any]:
    """Return plans as what they change, as in a file."""
    usual = to_dict(config)
    return {
        epochs: {
            group: {key: new for key, new in values.items() if new != usual[group][key]}
            for group, values in to_dict(plan).items()
            if values != usual[group]
        }
        for epochs, plan in plans.items()
    }


def _title(config: Any) -> str:
    return str(config.__doc__).partition("\n")[0]


class _Parser(argparse.ArgumentParser):
    """A parser that leaves values to the config, and raises ValueError for a mistake."""

    def __init__(self, **texts: Any) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(allow_abbrev=False, formatter_class=formatter, **texts)

    def error(self, message: str) -> NoReturn:
        hint = "; they come before settings" if "arguments are required" in message else ""
        raise ValueError(shorten(message.removeprefix("argument "), 200) + hint)

    def parse(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Return what the command line sets, as {key: text}."""
        words = list(arguments)
        switches = {f"--{a.dest}" for a in self._actions if str(a.metavar).startswith("[")}
        for index, word in enumerate(arguments):
            after = "".join(arguments[index + 1 : index + 2]).lower()
            words[index] += "=true" if word in switches and after not in TRUE + FALSE else ""
        values, rest = self.parse_known_args(words)
        if rest and rest[0].startswith("-"):
            key = rest[0].removeprefix("--").partition("=")[0]
            raise ValueError(unknown(key, [action.dest for action in self._actions]))
        if rest:
            word = shorten(rest[0]) or "''"
            hint = "the command follows RUN" if word in COMMANDS else "settings are --KEY VALUE"
            raise ValueError(f"{word}: not expected here; {hint}")
        return vars(values)


def _add_fields(parser: Any, config: Any, prefix: str = "", short: bool = False) -> None:
    """Add a flag for each field, or an argument for a field without a default.

    The help is in groups, or short and without them.
    """
    about: dict[str, str] = {}
    for base in reversed(config.__mro__):
        text = inspect.cleandoc(base.__doc__ or "")
        about |= dict(re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", text, re.MULTILINE))
    for field in dataclasses.fields(config):
        if dataclasses.is_dataclass(field.type):
            title = f"{field.name}: {_title(field.type)}".strip(".")
            group = parser if short else parser.add_argument_group(title)
            _add_fields(group, field.type, f"{field.name}.", short)
            continue
        help_text = " ".join(about[field.name].split()).replace("%", "%%")
        is_list = field.type == ImageSize or typing.get_origin(field.type) is tuple
        options: dict[str, Any] = {"nargs": "+"} if is_list else {}
        if field.default is field.default_factory:  # neither is given
            singular = field.name.removesuffix("s").upper()
            parser.add_argument(field.name, metavar=singular, help=help_text, **options)
            continue
        value = "V" if short else "VALUE"
        options["metavar"] = f"[{value}]" if field.type is bool else value
        notes = _choices(field.type)  # in short texts, the first is the default
        if not (short and (notes or field.type is bool)) and field.default not in (None, ()):
            notes.append("default: " + json.dumps(field.default).strip('"'))
        help_text += f" ({', '.join(notes)})" if notes else ""
        options |= {"default": argparse.SUPPRESS, "help": help_text}
        parser.add_argument(f"--{prefix}{field.name}", **options)


def _choices(kind: Any) -> list[str]:
    """List the values that an annotation names."""
    if typing.get_origin(kind) is Literal:
        return [json.dumps(value).strip('"') for value in typing.get_args(kind)]
    return [choice for part in typing.get_args(kind) for choice in _choices(part)]


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    """Turn the flags {"model.depth": "3"} into {"model": {"depth": "3"}}."""
    nested: dict[str, Any] = {}
    for key, value in values.items():
        group, _, name = key.rpartition(".")
        values_of_group = nested.setdefault(group, {}) if group else nested
        values_of_group[name] = None if value in ("null", "~", ["null"]) else value
    return nested
