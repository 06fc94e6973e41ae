"""Configs as YAML files: found by path or by the name of a recipe, read as text.

The loader makes nothing but text, lists and dictionaries; what the text means is decided by the
annotations of the configs, as for flags.
"""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from vit.data.config import DataConfig
from vit.data.layout import check_default_data, recognize
from vit.settings import require, shorten, suggest
from vit.training.config import Config, TrainConfig

NULL = ("", "~", "null", "Null", "NULL")  # unless quoted
GROUPS = {f.name for f in dataclasses.fields(Config) if dataclasses.is_dataclass(f.type)}
_CODE = Path(__file__).resolve().parent
# Next to the code where the package is installed, beside it in a checkout.
RECIPES = next(
    (folder for folder in (_CODE / "configs", _CODE.parent / "configs") if folder.is_dir()),
    _CODE / "configs",
)


class _TextLoader(yaml.BaseLoader):
    """Reads every value as text, whatever its tag, and null as None; refuses repeated keys."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        is_null = isinstance(node, yaml.ScalarNode) and node.style is None and node.value in NULL
        return None if is_null else super().construct_object(node, deep)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value in names:
                problem = "a key must be text, and given once"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            names.add(key.value)
        return {key.value: self.construct_object(value, deep) for key, value in node.value}


def read_yaml(text: bytes | str, source: str) -> Any:
    """Read YAML as nested lists and dictionaries, in which every value is still text.

    Args:
        text: The YAML.
        source: Where it comes from, which messages begin with.

    Raises:
        ValueError: It is not YAML.
    """
    try:
        return yaml.load(text, Loader=_TextLoader)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        problem = str(error).replace('in "<byte string>", ', "at ")
        raise ValueError(f"{source} is not YAML: {shorten(problem, 200)}") from None


def recipes() -> list[str]:
    """List the names of the recipes."""
    return sorted(file.stem for file in RECIPES.glob("*.yaml"))


def read_config(name: str) -> dict[str, Any]:
    """Read a YAML file as nested dictionaries, in which every value is still text.

    Args:
        name: A file, or a recipe: shapes, shapes.yaml or configs/shapes.yaml, from any folder.

    Raises:
        ValueError: There is no such file, or it is not YAML of the expected form.
    """
    source = f"config: {shorten(name) or repr(name)}"
    try:
        content = _find_config(name).read_bytes()
    except FileNotFoundError:
        hint = suggest(Path(name).stem, recipes()) or f"; the recipes are {', '.join(recipes())}"
        raise ValueError(f"config not found: {shorten(name)}{hint}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{source}: {getattr(error, 'strerror', error)}") from None
    values = read_yaml(content, source)
    if not isinstance(values, dict):
        raise ValueError(f"{source}: a config consists of lines `key: value`")
    return values


def compose(files: list[dict[str, Any]], flags: dict[str, Any]) -> Config:
    """Make the config of a run, and check it.

    Args:
        files: What `read_config` returns, of which the last one wins; without any, "quick" is read.
        flags: Nested dictionaries of text, which win over files.

    Raises:
        ValueError: A key is not known, or a value is not allowed.
    """
    # The recipe's model for short budgets is of no use where the command line chooses another.
    other_model = flags.get("model", {}).keys() & {"name", "pretrained"}
    if not files and not other_model:
        files = [read_config("quick")]
        del files[0]["out"]  # named after the data set below
    budget = merge([*files, flags]).get("train", {}).get("budget_minutes")
    minutes = TrainConfig(budget_minutes=budget).budget_minutes
    values = merge([*(at_budget(file, minutes) for file in files), flags])
    data = values.get("data", {})
    root = None if "name" in data else data.get("root")
    name = recognize(Path(root).expanduser()) if isinstance(root, str) else None
    if name is not None:
        values["data"] = {**data, "name": name}
    config = Config(**values)
    if root not in (None, DataConfig.root) and name is None:
        check_default_data(Path(config.data.root).expanduser())
    if "out" not in values and config.data.name != "cifar10":
        config = dataclasses.replace(config, out=_default_out(config.data))
    return config


def _default_out(data: DataConfig) -> str:
    """Return the folder of a run that none was given for: named after its data set."""
    root = Path(data.root).expanduser().resolve()
    names = {"folder": root.name, "shards": root.name, "table": root.stem}
    return f"runs/{names.get(data.name) or data.name}"


def at_budget(values: dict[str, Any], minutes: float | None) -> dict[str, Any]:
    """Return the settings of a file for a run with a time budget.

    What changes with the budget stands in the file under `budgets`, by minutes; an entry holds from
    its number of minutes up to that of the next entry:

        budgets:
          0: {model: {depth: 3}}
          2: {}

    Args:
        values: What `read_config` returns.
        minutes: train.budget_minutes.

    Returns:
        The settings, without `budgets`.

    Raises:
        ValueError: `budgets` is not of this form.
    """
    settings = {key: value for key, value in values.items() if key != "budgets"}
    budgets = values.get("budgets") or {}
    try:
        entries = {float(start): dict(entry) for start, entry in budgets.items()}
    except (AttributeError, TypeError, ValueError):
        form = "settings by minutes, such as {0: {model: {depth: 3}}, 2: {}}"
        raise ValueError(f"budgets: {shorten(budgets)} is not allowed; it must be {form}") from None
    reached = [start for start in entries if minutes is not None and start <= minutes]
    return merge([settings, entries[max(reached)] if reached else {}])


def merge(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Merge nested dictionaries, of which the later ones win, field by field.

    Raises:
        ValueError: Something else is given for a group of keys.
    """
    merged: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            if key in GROUPS:
                given = "a list" if isinstance(value, list) else value
                require(isinstance(value, dict), key, given, "a group of keys with values")
                merged[key] = {**merged.get(key, {}), **value}
            else:
                merged[key] = value
    return merged


def _find_config(name: str) -> Path:
    """Return the path of a config: a file that exists, or else the recipe of that name."""
    path = Path(name)
    recipe = RECIPES / f"{path.name.removesuffix('.yaml')}.yaml"
    may_be_recipe = path.parent in (Path(), Path("configs")) and recipe.is_file()
    return recipe if may_be_recipe and (path.is_dir() or not path.exists()) else path
