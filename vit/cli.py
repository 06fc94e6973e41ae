"""The command line: flags and YAML files in, checked configs out.

Every value in a file or a flag is text. Files are merged in the order given, flags go on top
wherever they appear, and the annotations of the configs convert and check the result once. So a
range, a default and a description each have one source, and a YAML file can construct nothing.

A user's mistake ends in one line on standard error and exit code 2, not in a traceback.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from vit.console import is_out_of_memory, printable, rank
from vit.data.config import DataConfig
from vit.data.layout import check_default_data, recognize
from vit.recipes import RECIPES, at_budget, merge, read_arguments, read_config
from vit.reporting.config import EvalConfig
from vit.settings import describe, is_list, shorten, unknown
from vit.startup import import_quickly
from vit.training.checks import check_sizes
from vit.training.config import Config, TrainConfig, to_dict


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
        from vit.training.train import on_all_cores, train

        config = on_all_cores(config, options["overwrite"])
        with launched(config.train.processes or 1, train, config, *options.values()):
            train(config, *options.values())


def eval_main() -> None:
    """Run eval.py, alias vit-eval."""
    with user_errors():
        run, options = parse_eval(sys.argv[1:])
        # Imported late, because they import torch: a mistyped flag is answered at once.
        import_quickly("vit.reporting.loading")
        import torch

        from vit.hardware import cores_to_use

        torch.set_num_threads(cores_to_use())  # torch does not know the limits of containers
        for variant in options.model.attention:
            from vit.model.variants import load_attention

            load_attention(variant)
        if options.attention:
            from vit.reporting.attention import explain_run

            explain_run(run, options)
        elif options.image:
            from vit.reporting.photos import classify_photos

            classify_photos(run, options)
        elif options.predict:
            from vit.reporting.predictions import predict_files

            predict_files(run, options)
        elif options.export is not None:
            from vit.reporting.export import export_run

            export_run(run, options)
        elif options.compare:
            from vit.reporting.comparison import compare_runs

            compare_runs(run, options)
        else:
            from vit.reporting.report import evaluate_run

            evaluate_run(run, options)


def parse_train(arguments: Sequence[str]) -> tuple[Config, dict[str, bool]]:
    """Read the command line of train.py.

    Args:
        arguments: The words after `train.py`. Without `--config`, the recipe "quick" is read.

    Returns:
        The config, and the arguments `overwrite`, `allow_changes` and `extend` of `train`.

    Raises:
        ValueError: A key is not known, or a value is not allowed.
        SystemExit: `--help` or `--print_config` was given.
    """
    parser = _Parser("[--config FILE] [--GROUP.FIELD VALUE ...]", "Train a Vision Transformer.")
    parser.add_argument(
        "--config",
        action="append",
        metavar="FILE",
        help="YAML file or name of a recipe, e.g. shapes; may be repeated: later files override "
        "earlier ones, and flags override files (default: quick)",
    )
    parser.add_argument(
        "--print_config", action="store_true", help="print the resulting config as YAML and exit"
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="delete an earlier run in the folder and its evaluations first; other files are kept",
    )
    parser.add_argument(
        "--resume.allow_changes",
        action="store_true",
        help="resume an interrupted run even if settings of the optimizer, the schedule, the "
        "augmentation or the hardware have changed; data and model must be the same",
    )
    parser.add_argument(
        "--resume.extend",
        action="store_true",
        help="extend a finished run to a larger number of --train.epochs: a new schedule for the "
        "added epochs starts from its last weights and optimizer state",
    )
    given = parser.parse_keys(arguments, Config)
    if "model.timm_args" in given:
        given["model.timm_args"] = read_arguments("model.timm_args", given["model.timm_args"])
    files = given.pop("config", [])
    options = {
        "overwrite": given.pop("overwrite", False),
        "allow_changes": given.pop("resume.allow_changes", False),
        "extend": given.pop("resume.extend", False),
    }
    if options["extend"] and options["overwrite"]:
        raise ValueError("resume.extend: not together with --overwrite, which deletes the run")
    only_print = given.pop("print_config", False)
    flags = _nested(given)
    contents = [read_config(file) for file in files]
    # Its model for short budgets is of no use where the command line chooses another.
    other_model = flags.get("model", {}).keys() & {"name", "pretrained"}
    recipe = {} if files or other_model else read_config("quick")
    stated = merge([recipe, *contents, flags]).get("train", {}).get("budget_minutes")
    minutes = TrainConfig(budget_minutes=stated).budget_minutes
    chosen = merge([*(at_budget(part, minutes) for part in contents), flags])
    root = _root_without_name(chosen)
    own = None if root is None else recognize(root)
    recognized = {} if own is None else {"data": {"name": own}}
    config = Config(**merge([at_budget(recipe, minutes), chosen, recognized]))
    if root is not None and own is None and config.data.root != DataConfig.root:
        check_default_data(root)
    if "out" not in chosen and config.data.name != "cifar10":
        config = dataclasses.replace(config, out=_default_out(config.data))
    check_sizes(config)
    if only_print:
        print(yaml.safe_dump(to_dict(config), sort_keys=False), end="")
        raise SystemExit(0)
    return config, options


def _root_without_name(chosen: dict[str, Any]) -> Path | None:
    """Return data.root if it is given and data.name is not."""
    data = chosen.get("data", {})
    root = data.get("root")
    return None if "name" in data or not isinstance(root, str) else Path(root).expanduser()


def _default_out(data: DataConfig) -> str:
    """Return the folder of a run that none was given for: named after its data set."""
    root = Path(data.root).expanduser().resolve()
    own = {"folder": root.name, "shards": root.name, "table": root.stem}
    return f"runs/{own.get(data.name) or data.name}"


def parse_eval(arguments: Sequence[str]) -> tuple[str, EvalConfig]:
    """Read the command line of eval.py.

    Args:
        arguments: The words after `eval.py`.

    Returns:
        The run folder or model file, and the options.

    Raises:
        ValueError: A key is not known, or a value is not allowed.
        SystemExit: `--help` was given.
    """
    parser = _Parser(
        "run [--FIELD VALUE ...]",
        "Evaluate a trained Vision Transformer on the test images; or draw attention maps "
        "(--attention), classify image files with maps (--image) or into a table (--predict), "
        "compare models (--compare) or export one to timm, ONNX or torch (--export).",
    )
    parser.add_argument(
        "run", help="run folder, model.safetensors, checkpoint, or cifar10_quick, which is included"
    )
    given = parser.parse_keys(arguments, EvalConfig, switches=("attention", "flip"))
    run = given.pop("run")
    options = EvalConfig(**_nested(given))
    if options.out is not None:
        _check_out(Path(options.out), options.out_suffix)
    return run, options


def _check_out(out: Path, suffix: str) -> None:
    """Check that a folder, or with a suffix a file, can be written.

    Raises:
        ValueError: A file is in the place of a folder, or the other way round.
    """
    taken = f"a {suffix} file with this flag" if suffix else "a folder"
    if suffix and out.is_dir():
        raise ValueError(f"out: {out} is a folder; --out takes {taken}")
    places = out.parents if suffix else (out, *out.parents)
    existing = next(path for path in places if path.exists())
    if not existing.is_dir():
        raise ValueError(f"out: {existing} is a file; --out takes {taken}")


class _Parser(argparse.ArgumentParser):
    """A parser that leaves values to the config, and raises ValueError for a mistake."""

    def __init__(self, usage: str, description: str) -> None:
        super().__init__(
            usage=f"%(prog)s {usage}",
            description=description,
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        if message.endswith("required: run"):
            message = "run: missing; name a run folder or model file first: eval.py runs/quick"
        key, explicit, value = message.removeprefix("argument --").partition(
            ": ignored explicit argument "
        )
        if explicit:
            message = f"{key}: takes no value, so leave out {value}"
        raise ValueError(shorten(message.removeprefix("argument "), 200))

    def parse_keys(
        self, arguments: Sequence[str], config: type, switches: Collection[str] = ()
    ) -> dict[str, Any]:
        """Return what the command line sets, as {key: text}, with the parser's own arguments.

        Args:
            arguments: The command line.
            config: The dataclass whose fields are flags.
            switches: The fields whose flag takes no value.
        """
        self._add_flags(config, "", switches)
        given, rest = self.parse_known_args(arguments)
        if rest:
            raise ValueError(_no_such_flag(rest[0], [action.dest for action in self._actions]))
        return vars(given)

    def _add_flags(self, config: Any, prefix: str, switches: Collection[str]) -> None:
        """Add a flag for each field, under a heading for each group, described by its docstring."""
        doc = config.__doc__ or ""
        title = doc.partition("\n")[0].strip(".")
        section = self.add_argument_group(f"{prefix.rstrip('.')}: {title}".removeprefix(": "))
        fields = dataclasses.fields(config)
        groups = [field for field in fields if dataclasses.is_dataclass(field.type)]
        for field in (field for field in fields if field not in groups):
            found = re.search(rf"^ +{field.name}: (.*(?:\n {{12}}.*)*)", doc, re.MULTILINE)
            about = " ".join(found.group(1).split()) if found else field.name
            default = json.dumps(field.default).strip('"').replace("[]", "none")
            text = f"{about[0].upper()}{about[1:]}."
            how: dict[str, Any] = {"metavar": "VALUE"}
            if prefix + field.name in switches:
                how = {"action": "store_true"}
            else:
                text += f" ({describe(field.type)}; default: {default})"
            if is_list(field.type):
                how |= {"nargs": "+"}
            section.add_argument(f"--{prefix}{field.name}", help=text.replace("%", "%%"), **how)
        for field in groups:
            self._add_flags(field.type, f"{prefix}{field.name}.", switches)


def _no_such_flag(word: str, known: Sequence[str]) -> str:
    if word in ("true", "false"):
        return f"{word}: follows a flag that takes no value; leave it out"
    key = word.removeprefix("--").partition("=")[0]
    if key.endswith((".yaml", ".yml")) or (RECIPES / f"{key}.yaml").is_file():
        return f"{shorten(key)}: no such key; did you mean --config {shorten(key)}?"
    if any(name.startswith(f"{key}.") for name in known):
        return f"{key}: this is a group of keys; set one with --{key}.<field> VALUE"
    return unknown(key, known)


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    """Turn the flags {"model.depth": "3"} into {"model": {"depth": "3"}}."""
    nested: dict[str, Any] = {}
    for key, value in values.items():
        group, _, name = key.rpartition(".")
        values_of_group = nested.setdefault(group, {}) if group else nested
        values_of_group[name] = None if value in ("null", "~") else value
    return nested
