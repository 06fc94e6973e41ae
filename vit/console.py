"""What is said on the terminal, which may be a log file on a full disk."""

import contextlib
import os
import sys
from typing import TextIO

from tqdm import tqdm


def rank() -> int:
    """Return the number of this process among those torchrun has started; the first is 0."""
    return int(os.environ.get("RANK", "0"))


def say(text: str, file: TextIO | None = None) -> None:
    """Print at once, around a progress bar; a log that cannot be written ends no run.

    Args:
        text: A line or more.
        file: Where to; None is standard output.
    """
    file = file or sys.stdout
    with contextlib.suppress(OSError):
        tqdm.write(text, file=file)
        file.flush()


def warn(text: str) -> None:
    """Print a warning on standard error."""
    say(f"warning: {text}", sys.stderr)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error is torch's or Python's way to say that memory is short."""
    texts = ("can't allocate memory", "not enough memory", "out of memory", "bad allocation")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
    )
