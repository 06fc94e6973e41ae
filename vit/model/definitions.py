"""Definitions in a Python file or a notebook, without running what else is in it.

Only imports, functions, classes and constants are executed, so a notebook's calls, plots and
downloads are not. Of a name that is defined twice, the last definition counts, and a constant whose
last value is not executed has none.
"""

import __future__

import ast
import contextlib
import hashlib
import json
import linecache
import os
import re
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import TypeGuard

SUFFIXES = (".py", ".ipynb")
PYTHON_MAGICS = ("%%time", "%%timeit", "%%capture", "%%prun")  # of cells that are Python
# Magics, shell lines and questions for help.
IPYTHON = r"\s*%{1,2}\w|\s*[!?]|\s*[\w.]+\?|\s*\w+ *= *[%!]"
IMPORTS = ast.Import, ast.ImportFrom
ASSIGNMENTS = ast.Assign, ast.AnnAssign, ast.AugAssign
FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef
# What a constant may consist of: numbers, texts, names of other constants, and arithmetic.
PLAIN = (
    ast.Constant, ast.Name, ast.Attribute, ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Compare,
    ast.IfExp, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.Starred, ast.Subscript, ast.Slice,
    ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context,
)  # fmt: skip


def is_in_file(attention: str) -> bool:
    """Return whether a name of attention is FILE:NAME, which is defined in a user's file."""
    return attention.rpartition(":")[0].endswith(SUFFIXES)


class Definitions(types.ModuleType):
    """What a file defines, and the lines that were left out, by the names that they assign."""

    left_out: dict[str, str]


def read_definitions(file: Path) -> Definitions:
    """Execute the definitions in a file, which may import from files beside it.

    Raises:
        ValueError: It is not UTF-8, not a notebook, or not Python.
        OSError: It cannot be read.
    """
    source = _source(file)
    lines = source.splitlines(keepends=True)
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise ValueError(f"{file}, line {error.lineno}: {error.msg}") from None
    path = hashlib.sha256(os.fsencode(file.resolve())).hexdigest()
    module = Definitions(f"vit_definitions_{file.stem}_{path[:8]}")  # of this file alone
    module.__file__, module.left_out = str(file), {}
    # So that inspect, and tracebacks, find the source of a notebook too.
    sys.modules[module.__name__] = module
    linecache.cache[str(file)] = len(source), None, _last_classes(tree, lines), str(file)
    if (folder := str(file.parent.resolve())) not in sys.path:
        sys.path.append(folder)
    flags = 0
    for node in _statements(tree.body):
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            flags |= sum(getattr(__future__, alias.name).compiler_flag for alias in node.names)
        why = ""
        try:
            if executed := _defines(node):
                code = compile(ast.Module([node], []), str(file), "exec", flags, dont_inherit=True)
                exec(code, vars(module))
        except Exception as error:  # the user's code may raise anything
            executed, why = False, f" ({error})"
        line = lines[node.lineno - 1].strip()
        for name in _names(node):
            # The last definition counts. A function stays what it is if a call compiles it.
            is_constant = _assigns(node) and not callable(vars(module).get(name))
            if not executed and (is_constant or isinstance(node, FUNCTIONS)):
                vars(module).pop(name, None)
            if name not in vars(module):
                module.left_out.setdefault(name, f"line {node.lineno}: {line}{why}")
    return module


def _source(file: Path) -> str:
    """Return the code of a file; that of a notebook's cells, without those that do not parse."""
    try:
        text = file.read_text(encoding="utf-8-sig")
        if file.suffix != ".ipynb":
            return text
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        sources = [cell["source"] for cell in cells]
    except (UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        kind = "a notebook" if file.suffix == ".ipynb" else "a text file in UTF-8"
        raise ValueError(f"{file} is not {kind} ({error})") from None
    return "\n\n".join(map(_plain, map("".join, sources))) + "\n"


def _plain(cell: str) -> str:
    """Replace magics and shell lines of a cell, or comment all of it out if it is not Python."""
    with contextlib.suppress(SyntaxError):  # a line of Python may begin like a magic
        ast.parse(cell)
        return cell
    lines = cell.splitlines()
    if lines and lines[0].startswith("%%") and lines[0].split()[0] not in PYTHON_MAGICS:
        return "\n".join(f"# {line}" for line in lines)
    # Not a comment, which would leave a block empty.
    lines = [re.sub(r"\S.*", r"pass  # \g<0>", x) if re.match(IPYTHON, x) else x for x in lines]
    try:
        ast.parse("\n".join(lines))
    except SyntaxError:
        lines = [f"# {line}" for line in lines]
    return "\n".join(lines)


def _last_classes(tree: ast.Module, lines: list[str]) -> list[str]:
    """Blank the classes that later ones of the same name replace: inspect finds the first one."""
    lines, later = [*lines], set[str]()
    for node in reversed(tree.body):
        if not isinstance(node, ast.ClassDef):
            continue
        first = min([node.lineno, *(part.lineno for part in node.decorator_list)]) - 1
        end = node.end_lineno or first
        if node.name in later:
            lines[first:end] = ["\n"] * (end - first)
        later.add(node.name)
    return lines


def _statements(body: Iterable[ast.stmt]) -> Iterable[ast.stmt]:
    """Yield the statements of a file; of a `try` that is not executed whole, those inside."""
    for node in body:
        if isinstance(node, ast.Try) and not _defines(node):
            yield from _statements(node.body)
        else:
            yield node


def _assigns(node: ast.stmt) -> TypeGuard[ast.Assign | ast.AugAssign]:
    """Return whether a statement assigns a value, as an annotation alone does not."""
    return isinstance(node, ASSIGNMENTS) and node.value is not None


def _defines(node: ast.stmt) -> bool:
    if isinstance(node, ast.Try):
        handled = (statement for handler in node.handlers for statement in handler.body)
        return all(map(_defines, [*node.body, *handled, *node.orelse, *node.finalbody]))
    if _assigns(node):
        return all(isinstance(part, PLAIN) for part in ast.walk(node.value))
    return isinstance(node, IMPORTS + FUNCTIONS + (ast.Pass,))


def _names(node: ast.stmt) -> Iterable[str]:
    """Yield the names that a statement would define."""
    if isinstance(node, FUNCTIONS):
        yield node.name
        return
    for part in ast.walk(node):
        if isinstance(part, ast.alias):
            yield (part.asname or part.name).partition(".")[0]
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            yield part.id
