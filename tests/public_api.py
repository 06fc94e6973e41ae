"""What the package promises to its users: names, signatures and one line about each.

    python tests/public_api.py

writes tests/public_api.txt and the table of docs/api.md after an intended change.
"""

import dataclasses
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import vit  # noqa: E402
from vit.data.preprocess import Preprocess  # noqa: E402
from vit.explain.explanation import Explanation  # noqa: E402
from vit.integrations import AttentionLog  # noqa: E402

SIGNATURES = ROOT / "tests/public_api.txt"
PAGE = ROOT / "docs/api.md"
CONSTRUCTED = [Preprocess, AttentionLog]  # of which the arguments are public, and no members
PLAIN = (bool, int, float, str, tuple, type(None))


def public() -> dict[str, Any]:
    """Everything public by name: what is exported, and the objects that it returns and takes."""
    found = {f"{module.__name__}.{name}": getattr(module, name)
             for module in (vit,) for name in module.__all__}  # fmt: skip
    parts = [field.type for field in dataclasses.fields(vit.Config)]
    settings = [part for part in parts if dataclasses.is_dataclass(part)]
    others = [Explanation, *CONSTRUCTED, *settings]
    return found | {f"{part.__module__}.{part.__name__}": part for part in others}


def signature(function: Any) -> str:
    """The names, kinds and defaults of parameters: annotations are checked by mypy."""

    def plain(parameter: inspect.Parameter) -> inspect.Parameter:
        shown = isinstance(parameter.default, (*PLAIN, type))  # `empty` is a class
        default = parameter.default if shown else ...
        return parameter.replace(annotation=inspect.Parameter.empty, default=default)

    parameters = map(plain, inspect.signature(function).parameters.values())
    return str(inspect.Signature([*parameters])).replace("Ellipsis", "...")


def members(kind: type) -> Iterator[str]:
    """Public methods and properties of a class, those of classes outside the package excluded."""
    names = {
        name for base in kind.__mro__ if base.__module__.startswith("vit.") for name in vars(base)
    }
    for name in sorted(names):
        member = inspect.getattr_static(kind, name)
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            yield f"{name}: property"
        elif callable(function := getattr(kind, name)):
            yield name + signature(function)


def signatures() -> str:
    """One line for each public name, and one for each of its public members."""
    lines = []
    for name, value in public().items():
        lines.append(name + signature(value))
        if isinstance(value, type) and value not in CONSTRUCTED:
            lines += [f"    {member}" for member in members(value)]
    return "\n".join(lines) + "\n"


def page() -> str:
    """The page with its table as the docstrings have it."""
    rows = [
        f"| `{name}` | {inspect.getdoc(value).splitlines()[0]} |"
        for name, value in public().items()
    ]
    head = PAGE.read_text(encoding="utf-8").partition("\n| `")[0]
    return "\n".join([head, *rows]) + "\n"


if __name__ == "__main__":
    SIGNATURES.write_text(signatures(), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
