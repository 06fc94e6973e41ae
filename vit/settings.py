"""Frozen dataclasses whose values are checked, and parsing of files, with one-line errors.

A field's annotation states its type and range, and pydantic enforces both.
"""

import dataclasses
import difflib
import functools
import os
import typing
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass

from vit.console import shorten

T = TypeVar("T")

# Pydantic's options for checked dataclasses.
CHECKED = ConfigDict(extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)
NULL = ("", "~", "null")  # in YAML, unless quoted
# What pydantic's kinds of error mean to a user.
IN_WORDS = {
    "missing": "it must have more values", "too_long": "it must have fewer values",
    "string_too_short": "it must not be empty", "string_unicode": "it must be in UTF-8",
}  # fmt: skip
LATER = "unknown, so a later version of this project has written it; update this one"
# What pydantic's kinds of error mean in a file.
IN_FILES = {"json_invalid": "it is not JSON", "missing": "missing"}
IN_FILES |= dict.fromkeys(("unexpected_keyword_argument", "extra_forbidden"), LATER)
LARGE = 1_000_000  # more than any run needs, and small enough that no product of two overflows


def _unique(names: tuple[str, ...]) -> tuple[str, ...]:
    if len({*names}) < len(names):
        raise ValueError("names must differ")
    return names


def _rows_and_columns(value: Any) -> Any:
    """Turn one number, as itself or as a list of one, into two."""
    if isinstance(value, list | tuple) and len(value) == 1:
        (value,) = value
    return (value, value) if isinstance(value, int | str) else value


def expand(path: str) -> str:
    """Replace a leading ~ by the home of a user, if there is one."""
    return os.path.expanduser(path)  # noqa: PTH111 - Path.expanduser fails without


Count = Annotated[int, Field(ge=1, le=LARGE)]
CountOrZero = Annotated[int, Field(ge=0, le=LARGE)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Steps = Annotated[int, Field(ge=0, le=10**12)]
ImageCount = Annotated[int, Field(ge=1, le=10**9)]
Fraction = Annotated[float, Field(ge=0, le=1)]
FractionAbove0 = Annotated[float, Field(gt=0, le=1)]
FractionBelow1 = Annotated[float, Field(ge=0, lt=1)]
Between0And1 = Annotated[float, Field(gt=0, lt=1)]
CountOrFraction = CountOrZero | Between0And1
Positive = Annotated[float, Field(gt=0, le=LARGE)]
NonNegative = Annotated[float, Field(ge=0, le=LARGE)]
AutoOrSwitch = Annotated[
    Literal["auto", True, False],
    BeforeValidator(lambda value: {"true": True, "false": False}.get(str(value).lower(), value)),
]
Text = Annotated[str, Field(max_length=1000)]
ClassNames = Annotated[tuple[Text, ...], Field(min_length=1), AfterValidator(_unique)]
PathName = Annotated[
    str, Field(min_length=1, max_length=1000), AfterValidator(expand),
    BeforeValidator(lambda path: os.fspath(path) if isinstance(path, os.PathLike) else path),
]  # fmt: skip
DeviceName = Literal["auto", "cpu", "cuda", "mps", "xpu"]
Precision = Literal["auto", "float32", "bfloat16"]
Pixels = Annotated[int, Field(ge=1, le=10_000)]
ImageSize = Annotated[tuple[Pixels, Pixels] | None, BeforeValidator(_rows_and_columns)]


def _shown(value: object) -> str:
    names = {dict: "a group of keys", list: "a list", type(None): "null"}
    return names.get(type(value)) or shorten(value) or "''"


def require(condition: bool, key: str, value: object, allowed: str) -> None:
    """Raise ValueError with key, value and what is allowed if a condition is not met."""
    if not condition:
        raise ValueError(f"{key}: {_shown(value)} is not allowed; it must be {allowed}")


def check(config: Any, name: str, condition: bool, allowed: str) -> None:
    """Check a rule for a field of a group of settings, as `require`."""
    require(condition, f"{config.group}.{name}".lstrip("."), getattr(config, name), allowed)


def suggest(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean NAME?" for the known name that is most like a word, if any."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def keys(config: Any, prefix: str = "") -> list[str]:
    """List the keys of a config, as `train.seed`."""
    names = []
    for field in dataclasses.fields(config):
        is_group = dataclasses.is_dataclass(field.type)
        names += keys(field.type, f"{field.name}.") if is_group else [field.name]
    return [prefix + name for name in names]


def unknown(key: str, known: Iterable[str]) -> str:
    """Return a message that there is no such key, with a suggestion."""
    last = {name: name.rpartition(".")[2] for name in known}
    group, _, name = key.rpartition(".")
    if key in last:
        return f"{key}: no such key in a file; write {name} in the lines below {group}"
    groups = {name.partition(".")[0]: name for name in reversed(last) if "." in name}
    if key in groups:
        return f"{key}: a group of keys, such as {groups[key]}; --help lists all"
    near = difflib.get_close_matches(key, groups, n=1, cutoff=0.7)
    if near and "." not in key:
        return f"{shorten(key)}: no such group of keys; did you mean {near[0]}?"
    near = difflib.get_close_matches(name, {*last.values()}, n=1, cutoff=0.7)
    names = [name for name in last if last[name] in near]
    best = difflib.get_close_matches(key, names, n=1, cutoff=0)
    hint = f"did you mean {best[0]}?" if best else "--help lists all keys"
    return f"{shorten(key) or repr(key)}: no such key; {hint}"


def _one_line(error: ValidationError, config: Any) -> str:
    """Turn the first of pydantic's errors into one line: key, value, what is allowed."""
    known = keys(config, f"{config.group}.".lstrip("."))
    path, kind, problem = _first(error, config.group)
    if kind == "unexpected_keyword_argument":
        return unknown(path, known)
    # What follows the key is the place of an item in its value.
    key = max((key for key in known if f"{path}.".startswith(f"{key}.")), key=len, default=path)
    return problem if kind == "value_error" else f"{key}: {problem}"


def _first(error: ValidationError, group: str = "") -> tuple[str, str, str]:
    """Return the key of the first of pydantic's errors, its kind, and what is wrong."""
    first = error.errors(include_url=False)[0]
    path = ".".join([group, *map(str, first["loc"])]).lstrip(".")
    if first["type"] == "value_error":  # of a rule between settings, which names its key itself
        return path, first["type"], str(first["ctx"]["error"])
    message = first["msg"].replace("Input should", "it must").partition(", unable")[0]
    allowed = IN_WORDS.get(first["type"], message)
    return path, first["type"], f"{_shown(first['input'])} is not allowed; {allowed}"


def parse(kind: Any, content: Any, source: object) -> Any:
    """Convert the content of an untrusted file to a type, such as a dataclass, and check it.

    The content is JSON as bytes or text, or values read from another format.

    Raises:
        ValueError: It is not JSON, or a field is missing, unknown or not allowed.
    """
    adapter = TypeAdapter(kind)
    try:
        is_json = isinstance(content, bytes | str)
        return adapter.validate_json(content) if is_json else adapter.validate_python(content)
    except RecursionError:
        raise ValueError(f"{source} is damaged: it is nested too deeply") from None
    except ValidationError as error:
        path, problem, text = _first(error)
        text = f"{path}: {IN_FILES.get(problem, text)}".removeprefix(": ")
        raise ValueError(f"{source}: {shorten(text, 300)}") from None


class _TextLoader(yaml.BaseLoader):
    """Reads every value as text, whatever its tag, and null as None; refuses repeated keys."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):  # with which a few lines mean billions of values
            raise yaml.YAMLError("aliases (*name) are not supported")
        return super().compose_node(parent, index)

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
    """Read YAML as nested lists and dictionaries of text; source is for messages.

    Raises:
        ValueError: It is not YAML.
    """
    try:
        return yaml.load(text, Loader=_TextLoader)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        reason = shorten(str(error).replace('in "<byte string>", ', "in "), 200)
        raise ValueError(f"{source} is not YAML: {reason}") from None


@typing.dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,)
)
def group(name: str, *, kw_only: bool = True) -> Callable[[type[T]], type[T]]:
    """Make a frozen dataclass whose values are checked; name is its key, or "" for a config."""

    def decorate(cls: type[T]) -> type[T]:
        checked: Any = dataclass(cls, frozen=True, kw_only=kw_only, config=CHECKED)
        checked.group = name
        init = checked.__init__

        @functools.wraps(init)
        def __init__(self: T, *values: Any, **named: Any) -> None:
            try:
                init(self, *values, **named)
            except ValidationError as error:
                raise ValueError(_one_line(error, checked)) from None

        checked.__init__ = __init__
        return checked

    return decorate


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dictionaries as one, with keys like `train.seed`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        is_group = isinstance(value, dict)
        flat |= flatten(value, f"{prefix}{key}.") if is_group else {prefix + key: value}
    return flat


def changed_keys(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """List the keys whose values differ, each as `key: old -> new`."""
    before, after = flatten(old), flatten(new)
    return [
        f"{key}: {before.get(key)} -> {after.get(key)}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]
