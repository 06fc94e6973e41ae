"""What the fixture `call` returns: a function that runs a command in this process."""

from collections.abc import Callable
from typing import NamedTuple


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    error: str


Call = Callable[..., Ended]
