"""YAML files as the flags they stand for: `model: {depth: 3}` is --model.depth=3.

A file's nodes are read, and nothing is made from them: no tag, no anchor and no depth does harm.
Here are also the words for what a key or a value ought to be.
"""

import difflib
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from vit.config import shorten

LONGEST_FILE = 100_000  # bytes; a config has a few thousand
YAML_TAG = "tag:yaml.org,2002:"
PLAIN_TAGS = ("map", "seq", "str", "int", "float", "bool", "null", "timestamp", "merge", "value")


def without_files(
    arguments: Sequence[str], files: dict[str, str], types: dict[str, Any]
) -> list[str]:
    """Put in place of each YAML file the flags that it stands for.

    So a file's values are checked as flags are, and the later one wins.

    Args:
        arguments: The command line.
        files: The flags that take a file, each with the group it holds; "" is all.
        types: Of all keys.
    """
    words, rest = [], iter(arguments)
    for word in rest:
        name, equals, file = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in files:
            words.append(word)
            continue
        if not equals:
            file = next(rest, "--")
        if file.startswith("--"):
            raise ValueError(f"--{name}: expected one argument, a YAML file")
        words += _flags(_read_yaml(name, file), files[name], types)
    return words


def _read_yaml(name: str, file: str) -> yaml.Node:
    """Read a YAML file, as nodes: nothing is made from what it holds."""
    hint = "" if name == "config" else f"; a single field is set by --{name}.<field>"
    try:
        with Path(file).open("rb") as stream:
            content = stream.read(LONGEST_FILE + 1)
        if len(content) > LONGEST_FILE:
            raise ValueError(f"it is longer than {LONGEST_FILE} bytes")
        node = yaml.compose(content, Loader=yaml.SafeLoader)
        if not isinstance(node, yaml.MappingNode):
            raise ValueError("it must hold lines of `key: value`")
    except RecursionError:
        problem = "it is nested too deep"
    except (OSError, ValueError, yaml.YAMLError) as error:
        problem = shorten(error, 200)
    else:
        return node
    raise ValueError(f"{name}: {shorten(file)} is no YAML file of keys: {problem}{hint}")


def _flags(node: yaml.Node, group: str, types: dict[str, Any]) -> Iterator[str]:
    """Turn YAML into flags: `model: {depth: 3}` is --model.depth=3.

    The group of a whole file is "". It goes no deeper than there are groups, so that an anchor
    which holds itself does no harm.
    """
    _refuse_tag(node, group or "config")
    if not isinstance(node, yaml.MappingNode):
        raise ValueError(
            f"{group}: {_shown(node)} is not a group of keys, as {group}: {{key: value}}"
        )
    seen = set()
    for name, value in node.value:
        if not isinstance(name, yaml.ScalarNode):
            raise ValueError(f"{group or 'config'}: {_shown(name)} is not a key")
        key = f"{group}.{name.value}" if group else name.value
        if key in seen:
            raise ValueError(f"{shorten(key)}: given twice in one file; keep one")
        seen.add(key)
        if key in types:
            yield _flag(value, key, types[key])
        elif any(known.startswith(f"{key}.") for known in types):
            yield from _flags(value, key, types)
        else:
            raise ValueError(unknown(key, list(types)))


def _flag(node: yaml.Node, key: str, kind: Any) -> str:
    _refuse_tag(node, key)
    is_null = node.tag.endswith(":null")
    if not isinstance(node, yaml.ScalarNode) or (is_null and not takes_null(kind)):
        raise ValueError(f"{key}: {_shown(node)} is not {allowed(kind)}")
    return f"--{key}={'null' if is_null else node.value}"


def _refuse_tag(node: yaml.Node, key: str) -> None:
    tag = node.tag.removeprefix(YAML_TAG)
    if tag not in PLAIN_TAGS:
        raise ValueError(f"{key}: the tag !!{shorten(tag)} is not allowed; write plain values")


def _shown(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return "null" if node.tag.endswith(":null") else repr(shorten(node.value))
    return "a list" if isinstance(node, yaml.SequenceNode) else "a group of keys"


def takes_null(kind: Any) -> bool:
    """Tell whether None is of a type."""
    return type(None) in typing.get_args(kind)


def allowed(kind: Any) -> str:
    """Say in words what a type takes."""
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    if kind in words:
        return words[kind]
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(typing.get_args(kind))
    parts = [part for part in typing.get_args(kind) if part not in (type(None), ...)]
    return " or ".join([allowed(part) for part in parts] + ["null"] * takes_null(kind))


def unknown(key: str, keys: list[str]) -> str:
    """Say that there is no such key, and which of the keys there are is near."""
    key = shorten(key)
    if key.endswith((".yaml", ".yml")):
        return f"{key}: no such key; did you mean --config {key}?"
    group, _, name = key.rpartition(".")
    groups = {known.partition(".")[0] for known in keys}
    last = {known: known.rpartition(".")[2] for known in [*keys, *groups]}
    near = difflib.get_close_matches(name, set(last.values()), n=1, cutoff=0.6)
    found = [known for known in last if last[known] in near]
    found = [known for known in found if known == f"{group}.{near[0]}"] or found
    hint = f"did you mean {' or '.join(found)}?" if found else "--help lists them"
    return f"{key or repr(key)}: no such key; {hint}"
