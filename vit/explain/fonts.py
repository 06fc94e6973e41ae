"""Fonts for class names in any script: matplotlib's own lacks Chinese, Japanese and Korean."""

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib
from matplotlib.font_manager import fontManager

from vit.console import warn

# Common fonts on Linux, macOS and Windows, which supply what the font before them lacks.
EAST_ASIAN = (
    "Noto Sans CJK JP", "Noto Sans CJK SC", "Source Han Sans", "WenQuanYi Zen Hei", "IPAexGothic",
    "Hiragino Sans", "PingFang SC", "Hiragino Sans GB", "Apple SD Gothic Neo", "Arial Unicode MS",
    "Yu Gothic", "Microsoft YaHei", "Malgun Gothic",
)  # fmt: skip


@functools.cache
def font_families() -> list[str]:
    """Return matplotlib's default font and the installed fonts that supply what it lacks."""
    installed = set(fontManager.get_font_names())
    return ["sans-serif", *(name for name in EAST_ASIAN if name in installed)]


_boxes: set[str] = set()  # matplotlib's warnings of letters that no font has


@contextmanager
def missing_letters() -> Iterator[None]:
    """Keep matplotlib's warnings of letters that no font has for `report_boxes`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", "Glyph .* missing from font")
        yield
    for found in caught:
        if "missing from font" in str(found.message):
            _boxes.add(str(found.message))
        else:
            warnings.warn_explicit(found.message, found.category, found.filename, found.lineno)


def report_boxes() -> None:
    """Print a line if pictures drawn since the last call show boxes in place of letters."""
    if _boxes:
        warn(
            "pictures show boxes for letters that no installed font has; install one that has "
            f"them, such as Noto Sans CJK, and delete {matplotlib.get_cachedir()}/fontlist-*.json"
        )
    _boxes.clear()
