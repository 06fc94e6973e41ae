"""Reading command lines in this process, as train.py and eval.py do."""

import contextlib
import io
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from vit.cli import parse_eval, parse_train, user_errors


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    error: str


Call = Callable[..., Ended]
Parse = Callable[[Sequence[str]], Any]


def answer(words: Sequence[str], parse: Parse) -> tuple[Any, str]:
    """Return what comes of a command line: a config, or the line with which it ends."""
    result, printed = None, io.StringIO()
    with contextlib.redirect_stderr(printed):
        try:
            with user_errors():
                result = parse(words)
        except SystemExit as end:
            assert end.code == 2
    line = printed.getvalue()
    assert (result is None) == bool(line)
    if line:
        assert line.startswith("error: ") and line.endswith("\n")
        assert line[:-1].isprintable() and len(line) < 600, line
    return result, line


def refused(words: Sequence[str], *parts: str, parse: Parse = parse_train) -> None:
    """Check that a command line ends with a line that contains the parts."""
    result, line = answer(words, parse)
    assert result is None, f"{words} would run: {result}"
    for part in parts:
        assert part in line, f"{words}: {line}"


def help_of(words: Sequence[str], parse: Parse = parse_eval) -> str:
    """Return what `--help` prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        parse([*words, "--help"])
    return printed.getvalue()
