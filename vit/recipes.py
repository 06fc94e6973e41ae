"""Configs as YAML files: found by path or by the name of a recipe, read as text.

The loader makes nothing but text, lists and dictionaries; what the text means is decided by the
annotations of the configs, as for flags.
"""

import dataclasses
import difflib
import io
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import yaml

from vit.data.config import DataConfig
from vit.data.layout import check_default_data, recognize
from vit.settings import require, shorten
from vit.training.config import Config, TrainConfig

NULL = ("", "~", "null", "Null", "NULL")  # unless quoted
LONGEST_FILE = 100_000  # bytes; a config has a few thousand
_CODE = Path(__file__).resolve().parent
# Next to the code where the package is installed, beside it in a checkout.
RECIPES = next(
    (folder for folder in (_CODE / "configs", _CODE.parent / "configs") if folder.is_dir()),
    _CODE / "configs",
)


class _TextLoader(yaml.BaseLoader):
    """Reads every value as text, and null as None; refuses tags and repeated keys."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        plain = (self.DEFAULT_SCALAR_TAG, self.DEFAULT_SEQUENCE_TAG, self.DEFAULT_MAPPING_TAG)
        if node.tag not in plain:
            tag = shorten(node.tag.replace("tag:yaml.org,2002:", "!!"))
            self._refuse(node, f"the tag {tag} is not allowed; write plain values")
        is_null = isinstance(node, yaml.ScalarNode) and node.style is None and node.value in NULL
        return None if is_null else super().construct_object(node, deep)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self._refuse(key, "a key must be text")
            if key.value in mapping:
                self._refuse(key, f"{shorten(key.value)}: given twice; keep one")
            mapping[key.value] = self.construct_object(value, deep)
        return mapping

    def _refuse(self, node: yaml.Node, problem: str) -> NoReturn:
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def read_config(name: str) -> dict[str, Any]:
    """Read a YAML file as nested dictionaries, in which every value is still text.

    Args:
        name: A file, or a recipe: shapes, shapes.yaml or configs/shapes.yaml, from any folder.

    Raises:
        ValueError: There is no such file, or it is not YAML of the expected form.
    """
    try:
        with _find_config(name).open("rb") as stream:
            content = stream.read(LONGEST_FILE + 1)  # no more: /dev/zero has no end
        if len(content) > LONGEST_FILE:
            raise ValueError(f"longer than {LONGEST_FILE} bytes")
        values = yaml.load(io.BytesIO(content), Loader=_TextLoader)
        if not isinstance(values, dict):
            raise ValueError("a config consists of lines `key: value`")
    except FileNotFoundError:
        recipes = sorted(file.stem for file in RECIPES.glob("*.yaml"))
        near = difflib.get_close_matches(Path(name).stem, recipes, n=1)
        known = f"the recipes are {', '.join(recipes)}"
        hint = f"did you mean {near[0]}?" if near else known
        raise ValueError(f"config not found: {shorten(name)} ({hint})") from None
    except RecursionError:
        raise ValueError(f"config: {shorten(name)}: nested too deeply") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        problem = getattr(error, "strerror", None) or str(error).replace('in "<file>", ', "at ")
        raise ValueError(
            f"config: {shorten(name) or repr(name)}: {shorten(problem, 200)}"
        ) from None
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
    recipe = {} if files or other_model else read_config("quick")
    stated = _require_groups(merge([recipe, *files, flags]))
    given = stated.get("train", {}).get("budget_minutes")
    minutes = TrainConfig(budget_minutes=given).budget_minutes
    chosen = _require_groups(merge([*(at_budget(file, minutes) for file in files), flags]))
    data = chosen.get("data", {})
    root, name = data.get("root"), None
    root = None if "name" in data or not isinstance(root, str) else Path(root).expanduser()
    if root is not None and (name := recognize(root)):
        chosen = merge([chosen, {"data": {"name": name}}])
    config = Config(**merge([at_budget(recipe, minutes), chosen]))
    if root is not None and name is None and config.data.root != DataConfig.root:
        check_default_data(root)
    if "out" not in chosen and config.data.name != "cifar10":
        config = dataclasses.replace(config, out=_default_out(config.data))
    return config


def _require_groups(values: dict[str, Any]) -> dict[str, Any]:
    """Return settings, of which the config refuses those that are no groups of keys and should be.

    Raises:
        ValueError: There are such.
    """
    for field in dataclasses.fields(Config):
        value = values.get(field.name, {})
        if dataclasses.is_dataclass(field.type) and not isinstance(value, dict):
            Config(**{field.name: value})
    return values


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
        ValueError: `budgets` is not of this form, or a setting is not allowed.
    """
    settings = {**values}
    entries = settings.pop("budgets", None) or {}
    form = "settings by minutes, such as {0: {model: {depth: 3}}, 2: {}}"
    require(isinstance(entries, dict), "budgets", entries, form)
    starts: dict[float, dict[str, Any]] = {}
    for key, entry in entries.items():
        is_number = re.fullmatch(r"[\d.]*\d[\d.]*", key) and key.count(".") <= 1
        require(bool(is_number), "budgets", key, "a number of minutes, at least 0")
        require(isinstance(entry, dict), f"budgets.{key}", entry, "settings: {model: {depth: 3}}")
        starts[float(key)] = entry
    reached = [start for start in starts if minutes is not None and start <= minutes]
    return merge([settings, starts[max(reached)] if reached else {}])


def merge(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Merge nested dictionaries, of which the later ones win, field by field.

    What is no group of keys where another part has one stays, so that the config refuses it.
    """
    merged: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            old = merged.get(key, value)
            if isinstance(old, dict) and isinstance(value, dict):
                merged[key] = {**old, **value}
            else:
                merged[key] = old if isinstance(value, dict) else value
    return merged


def read_arguments(key: str, text: str) -> Any:
    """Read a flag such as `{depth: 4}` as a dictionary of text; other text is returned as it is.

    Args:
        key: The key of the flag, for messages.
        text: Its value.

    Raises:
        ValueError: It is not YAML of the expected form.
    """
    try:
        value = yaml.load(text, Loader=_TextLoader)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        problem = getattr(error, "problem", None) or error
        raise ValueError(
            f"{key}: {shorten(text) or repr(text)} is not YAML such as '{{depth: 4}}': "
            f"{shorten(problem, 200)}"
        ) from None
    return value if isinstance(value, dict) else text


def _find_config(name: str) -> Path:
    """Return the path of a config: a file that exists, or else the recipe of that name."""
    path = Path(name)
    recipe = RECIPES / f"{path.name.removesuffix('.yaml')}.yaml"
    may_be_recipe = path.parent in (Path(), Path("configs")) and recipe.is_file()
    return recipe if may_be_recipe and (path.is_dir() or not path.exists()) else path
