"""Messages on the terminal, or in a log file on a disk that may be full."""

import contextlib
import functools
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TextIO

from tqdm import tqdm


def rank() -> int:
    """Return this process's number among the processes of a run, from 0."""
    return int(os.environ.get("RANK", "0"))


def say(text: str, file: TextIO | None = None) -> None:
    """Print lines above any progress bar and flush them; an unwritable log does not end the run.

    Names that may contain line breaks need `printable`.
    """
    file = file or sys.stdout
    encoding = getattr(file, "encoding", None) or "utf-8"
    lines = "\n".join(map(_escaped, text.split("\n"))).encode(encoding, "backslashreplace")
    with contextlib.suppress(OSError, AttributeError):  # None if it was closed
        tqdm.write(lines.decode(encoding), file=file)
        file.flush()


def note(text: str) -> None:
    """Print a line on standard error, in the first process only."""
    if rank() == 0:
        say(printable(text), sys.stderr)


note_once = functools.cache(note)  # prints each text once in a process


def warn(text: str) -> None:
    """Print a warning on standard error in the first process."""
    note(f"warning: {text}")


def program(name: str) -> str:
    """Name train or eval as the user calls it: a script of a checkout, or an installed command."""
    called, checkout = Path(sys.argv[0]), Path(__file__).resolve().parents[1]
    is_script = called.name in ("train.py", "eval.py")
    if not is_script or called.resolve() != checkout / called.name:
        return installed(f"vit-{name}")
    return f"{installed('python')} {argument(called.with_name(f'{name}.py'))}"


def installed(name: str) -> str:
    """Name a program of this environment, with its folder where the shell finds another or none."""
    own, other = Path(sys.executable).absolute().parent / name, shutil.which(name)
    if not own.exists() or (other and Path(other).absolute() == own):
        return name
    return argument(own.relative_to(Path.cwd()) if own.is_relative_to(Path.cwd()) else own)


def counted(count: float, noun: str, form: str = "") -> str:
    """Return a number, in a format such as ",", and its noun, plural except for 1."""
    return f"{count:{form}} {noun}{'' if count == 1 else 's'}"


def printable(text: object) -> str:
    """Return text as one line that cannot control a terminal, wherever it comes from."""
    return _escaped(" ".join(str(text).split()))


def argument(text: object) -> str:
    """Return text as one argument of a command that can be copied into a shell."""
    if os.name == "nt":
        return subprocess.list2cmdline([printable(text)])
    return shlex.quote(printable(text))


def _escaped(line: str) -> str:
    """Write control, format and bidirectional characters as in Python's source: \\x1b."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error raised by torch or Python means that memory ran out."""
    texts = (
        *("can't allocate memory", "not enough memory", "out of memory", "bad allocation"),
        *("STATUS_ALLOC_FAILED", "ALLOCATION_FAILED"),  # of cuBLAS and cuDNN
    )
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
    )


def shorten(value: object, length: int = 60) -> str:
    """Return a value as one line of text, cut where it is too long."""
    text = " ".join(str(value).split())
    return text if len(text) <= length else text[:length] + "..."


def sides(size: tuple[int, ...]) -> str:
    """Return the sides of something as text: "32 x 32"."""
    return " x ".join(map(str, size))
