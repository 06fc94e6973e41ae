"""Frozen dataclasses that check their values, and the words for what each field accepts.

A field's annotation states its type and range; pydantic enforces both. Its errors are structured
(place, kind, input), and are turned here into one line that names the key, the value and what is
allowed.
"""

import contextlib
import dataclasses
import difflib
import functools
import json
import math
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    TypeAdapter,
    ValidationError,
)  # fmt: skip
from pydantic.dataclasses import dataclass

T = TypeVar("T")

LARGE = 1_000_000  # more than any run needs, and small enough that no product of two overflows
LARGEST_SEED = 2**63 - 1

_SWITCHES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def _switch(value: Any) -> Any:
    return _SWITCHES.get(value.lower(), value) if isinstance(value, str) else value


def _plain(value: Any) -> Any:
    """Turn the text in nested lists and dictionaries into the numbers and switches it means."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    for number in (int, float) if isinstance(value, str) else ():
        with contextlib.suppress(ValueError, OverflowError):
            if math.isfinite(number(value)):
                return number(value)
    return _switch(value)


Count = Annotated[int, Field(ge=1, le=LARGE)]
CountOrZero = Annotated[int, Field(ge=0, le=LARGE)]
# Whole numbers as int, so that a config keeps 1000 and does not say 1000.0.
CountOrFraction = Annotated[
    float, Field(ge=0, le=LARGE), AfterValidator(lambda n: int(n) if n.is_integer() else n)
]
Seed = Annotated[int, Field(ge=0, le=LARGEST_SEED)]
Fraction = Annotated[float, Field(ge=0, le=1)]
FractionAbove0 = Annotated[float, Field(gt=0, le=1)]
FractionBelow1 = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, le=LARGE)]
NonNegative = Annotated[float, Field(ge=0, le=LARGE)]
# Strict, because pydantic would accept 0 and 1 as well.
Switch = Annotated[bool, Field(strict=True), BeforeValidator(_switch)]
AutoOrSwitch = Annotated[Literal["auto", True, False], BeforeValidator(_switch)]
Text = Annotated[str, Field(max_length=1000)]
DeviceName = Literal["auto", "cpu", "cuda", "mps", "xpu"]
Precision = Literal["auto", "float32", "bfloat16"]
# Arguments of a function, of which this project knows neither the names nor the types.
Arguments = Annotated[
    dict[str, JsonValue],
    BeforeValidator(_plain),
    Field(description="arguments by name, such as {depth: 4, embed_dim: 96}"),
]
# Not blank, and without the null character, which no file system accepts.
PathName = Annotated[
    str,
    Field(max_length=1000, pattern=r"^[^\x00]*[^\x00\s][^\x00]*$", description="a non-empty path"),
]


def _rows_and_columns(value: Any) -> Any:
    """Turn one number, as itself or as a list of one, into two; "null" from a flag into None."""
    if isinstance(value, list | tuple) and len(value) == 1:
        value = None if value[0] in ("null", "~") else value[0]
    return (value, value) if isinstance(value, int | str) else value


Pixels = Annotated[int, Field(ge=1, le=10_000)]
Size = tuple[Pixels, Pixels]
ImageSize = Annotated[
    Size | None,
    BeforeValidator(_rows_and_columns),
    Field(description="one or two whole numbers from 1 to 10000 (rows and columns), or null"),
]


def shorten(value: object, length: int = 60) -> str:
    """Return a value as one line of text, cut where it is too long."""
    text = " ".join(str(value).split())
    return text if len(text) <= length else text[:length] + "..."


def require(condition: bool, key: str, value: object, allowed: str) -> None:
    """Check a rule for a setting.

    Raises:
        ValueError: The condition is false; the line names key, value and what is allowed.
    """
    if not condition:
        given = "null" if value is None else shorten(value)
        raise ValueError(f"{key}: {given} is not allowed; it must be {allowed}")


def check(config: Any, name: str, condition: bool, allowed: str) -> None:
    """Check a rule for a field of a group of settings; arguments and errors as for `require`."""
    value = getattr(config, name)
    if isinstance(value, tuple):  # as it is typed
        value = " ".join(map(str, value))
    require(condition, f"{config.group}.{name}".lstrip("."), value, allowed)


def divisors(number: int) -> str:
    """List the divisors of a number, for a message."""
    return shorten(", ".join(str(n) for n in range(1, number + 1) if number % n == 0))


def suggest(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean NAME?" for the known name that a word is most like; "" if for none."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def is_list(kind: Any) -> bool:
    """Tell whether a field takes several values; kind is its annotation."""
    return kind == ImageSize or typing.get_origin(kind) is tuple


def describe(kind: Any) -> str:
    """Say in words what a field accepts, e.g. "a whole number from 1 to 1000".

    Args:
        kind: The field's annotation.
    """
    return _describe(TypeAdapter(kind).json_schema())


def _describe(schema: dict[str, Any]) -> str:
    if "properties" in schema:
        return "a group of keys with values"
    if "description" in schema:
        return str(schema["description"])
    if "anyOf" in schema:
        return f"{_describe(schema['anyOf'][0])}, or null"
    if "enum" in schema:
        return "one of " + ", ".join(json.dumps(value).strip('"') for value in schema["enum"])
    if "prefixItems" in schema:
        first, *others = schema["prefixItems"]
        return f"{1 + len(others)} values, each {_describe(first)}"
    if "items" in schema:
        return _describe(schema["items"])
    names = {"integer": "a whole number", "number": "a number", "boolean": "true or false"}
    ranges = {
        ("minimum", "maximum"): " from {} to {}",
        ("exclusiveMinimum", "maximum"): " above {}, up to {}",
        ("minimum", "exclusiveMaximum"): " from {} up to, not including, {}",
        ("exclusiveMinimum", "exclusiveMaximum"): " between {} and {}",
        ("maxLength",): " of at most {} characters",
    }
    words = names.get(schema["type"], "text")
    for bounds, text in ranges.items():
        if schema.keys() >= {*bounds}:
            shown = ["2^63 - 1" if schema[b] == LARGEST_SEED else schema[b] for b in bounds]
            words += text.format(*shown)
    return words


def keys(config: Any, prefix: str = "") -> list[str]:
    """List the keys of a config, as `train.seed`."""
    found = []
    for field in dataclasses.fields(config):
        is_group = dataclasses.is_dataclass(field.type)
        found += keys(field.type, f"{field.name}.") if is_group else [field.name]
    return [prefix + key for key in found]


def unknown(key: str, known: Sequence[str]) -> str:
    """Say that there is no such key, and which of the known ones may have been meant."""
    key = shorten(key)
    group, _, name = key.rpartition(".")
    groups = {name.partition(".")[0] for name in known if "." in name}
    last = {name: name.rpartition(".")[2] for name in [*known, *groups]}
    near = difflib.get_close_matches(name, set(last.values()), n=1, cutoff=0.6)
    found = [name for name in last if last[name] in near]
    found = [name for name in found if name == f"{group}.{near[0]}"] or found
    hint = f"did you mean {' or '.join(found)}?" if found else "--help lists all keys"
    return f"{key or repr(key)}: no such key; {hint}"


def _one_line(error: ValidationError, config: Any, group: str) -> str:
    """Turn the first of pydantic's errors into one line: key, value, what is allowed."""
    first = error.errors(include_url=False)[0]
    kind, names = config, [group] if group else []
    for name in first["loc"]:  # those after the field are of an item in it
        if dataclasses.is_dataclass(kind):
            kind = {field.name: field.type for field in dataclasses.fields(kind)}.get(str(name))
            names.append(str(name))
    key, value = ".".join(names), first["input"]
    if first["type"] == "value_error":  # in our own words; a rule between settings names its key
        words = str(first["ctx"]["error"])
        return words if words.startswith(key) else f"{key}: {words}"
    if kind is None:
        return unknown(key, keys(config, f"{group}." if group else ""))
    if value is None:
        given = "null"
    elif isinstance(value, dict | list | tuple):  # which may be of any size
        given = "a group of keys" if isinstance(value, dict) else "a list"
    else:
        outside = first["type"].startswith(("greater_", "less_", "finite_"))
        given = shorten(value) if outside else repr(shorten(value))
    allowed = describe(kind)
    choices = allowed.removeprefix("one of ").split(", ") if allowed.startswith("one of ") else []
    meant = suggest(value, choices) if isinstance(value, str) else ""
    return f"{key}: {given} is not allowed; it must be {allowed}{meant}"


@typing.dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,)
)
def settings(group: str) -> Callable[[type[T]], type[T]]:
    """Make a frozen dataclass whose values are checked, with errors that fit on a line.

    Args:
        group: Its key in a config, which messages begin with; "" for a whole config.
    """

    def decorate(cls: type[T]) -> type[T]:
        checks = ConfigDict(extra="forbid", allow_inf_nan=False)
        made: Any = dataclass(cls, frozen=True, kw_only=True, config=checks)
        made.group = group
        init = made.__init__

        @functools.wraps(init)
        def __init__(self: T, **values: Any) -> None:
            try:
                init(self, **values)
            except ValidationError as error:
                raise ValueError(_one_line(error, made, group)) from None

        made.__init__ = __init__
        return made

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
