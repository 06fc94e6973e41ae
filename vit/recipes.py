"""Configs as YAML files: found by path or by the name of a recipe, and composed."""

import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from vit.config import Config, Plans, TrainConfig, translated
from vit.console import shorten
from vit.data.config import DataConfig
from vit.data.layout import check_stored, recognize
from vit.settings import expand, parse, read_yaml, require, suggest

GROUPS = {f.name for f in dataclasses.fields(Config) if dataclasses.is_dataclass(f.type)}
Epochs: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Budgets: TypeAlias = dict[Epochs, dict[Literal["model", "augment", "optim"], dict[str, Any]]]
_CODE = Path(__file__).resolve().parent
# Inside the installed package, or beside it in a checkout.
RECIPES = _CODE / "configs" if (_CODE / "configs").is_dir() else _CODE.parent / "configs"


def read_config(name: str) -> dict[str, Any]:
    """Read a file, or a recipe such as shapes, shapes.yaml or configs/shapes.yaml from any folder.

    Raises:
        ValueError: There is no such file, or it is not YAML of the expected form.
        OSError: The file cannot be read.
    """
    path = Path(expand(name))
    if not path.is_file() and path.parent in (Path(), Path("configs")):
        path = RECIPES / f"{path.name.removesuffix('.yaml')}.yaml"
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        recipes = sorted(file.stem for file in RECIPES.glob("*.yaml"))
        hint = suggest(Path(name).stem, recipes) or f"; the recipes are {', '.join(recipes)}"
        raise ValueError(f"config not found: {shorten(name)}{hint}") from None
    except IsADirectoryError:
        hint = f"name a file, such as {shorten(name)}/config.yaml"
        raise ValueError(f"config: {shorten(name)} is a folder; {hint}") from None
    values = read_yaml(text, f"config: {shorten(name)}")
    if not isinstance(values, dict):
        raise ValueError(f"config: {shorten(name)}: a config consists of lines `key: value`")
    return values


def compose(files: list[dict[str, Any]], flags: dict[str, Any]) -> tuple[Config, Plans]:
    """Make the config of a run, and plans for its time budget, and check them.

    Flags win over files, and later files over earlier ones; without a file, "quick" is read.

    Raises:
        ValueError: A key is not known, a value is not allowed, or a flag has no effect.
    """
    # The recipe's model is of no use where the command line chooses another.
    model = flags.get("model", {})
    if not files and model.get("name", "vit") == "vit" and not model.get("pretrained"):
        files = [read_config("quick")]
    budget, ignored = None, False
    for part in [*files, flags]:
        train = _merge([part]).get("train", {})
        if "budget_minutes" in train:
            budget, ignored = train["budget_minutes"], False
        if "epochs" in train and (part is flags or "budget_minutes" not in train):
            ignored = True
    files = [translated(file) for file in files]
    minutes = TrainConfig(budget_minutes=budget).budget_minutes
    if minutes is not None and ignored:
        raise ValueError(
            f"train.epochs: with train.budget_minutes {minutes:g}, a benchmark sets the length; "
            "to choose the epochs, add --train.budget_minutes null"
        )
    parts = [*(_at_epochs(file, -1) for file in files), flags]
    config = _with_data_set(parts)
    if config.data.name != "cifar10" and not any("out" in part for part in parts):
        root = Path(os.path.realpath(config.data.root))
        name = root.stem if config.data.name == "table" else root.name
        name = (config.data.spec.own_files and name) or config.data.name
        config = dataclasses.replace(config, out=f"runs/{name}")
    plans = {}
    for epochs in sorted({float(start) for file in files for start in file.get("budgets", {})}):
        values = _merge([*(_at_epochs(file, epochs) for file in files), flags])
        try:
            plan = Config(**{**values, "data": config.data, "out": config.out})
        except ValueError as error:  # of what only the budgets say
            raise ValueError(f"budgets: {epochs:g}: {error}") from None
        for key in ("name", "pretrained"):  # they decide what is read before steps are timed
            value, usual = getattr(plan.model, key), getattr(config.model, key)
            require(value == usual, f"budgets: model.{key}", value, f"{usual}, as without budgets")
        plans[epochs] = plan
    # Pretrained weights determine their model.
    return config, {} if minutes is None or config.model.pretrained else plans


def _with_data_set(parts: list[dict[str, Any]]) -> Config:
    """Merge the parts of a config, the flags last, and recognize a root that no name follows."""
    values = _merge(parts)
    data = values.get("data", {})
    root, name = (
        max((at for at, part in enumerate(parts) if key in part.get("data", {})), default=-1)
        for key in ("root", "name")
    )
    if name < root and isinstance(data["root"], str):
        recognized = recognize(Path(expand(data["root"])))
        data = {**data, "name": recognized or data.get("name", DataConfig.name)}
    config = Config(**{**values, "data": data})
    # A name is meant for a root if the same file or a flag says it.
    if root not in (-1, name) and name != len(parts) - 1:
        check_stored(config.data, name >= 0 or config.data.root == DataConfig.root)
    return config


def _at_epochs(values: dict[str, Any], epochs: float) -> dict[str, Any]:
    """Return the settings of a file for a time budget that buys a number of epochs."""
    # By the epochs from which they hold: {0: {model: {depth: 3}}}.
    budgets = parse(Budgets, values.get("budgets", {}), "budgets")
    reached = [start for start in budgets if start <= epochs]
    settings = {key: value for key, value in values.items() if key != "budgets"}
    return _merge([settings, budgets[max(reached)] if reached else {}])


def _merge(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Merge nested dictionaries, of which the later ones win, field by field."""
    merged: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            if key in GROUPS:
                require(isinstance(value, dict), key, value, "a group of keys with values")
                value = {**merged.get(key, {}), **value}
            merged[key] = value
    return merged
