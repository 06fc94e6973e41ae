"""One thread per core, each with a part of the work.

torch divides every operation among the cores and waits for all of them before the next one. For
small models this costs more than it saves, above all when another program keeps a core busy.
Threads that each classify their own images wait once, at the end.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


@contextmanager
def on_cores(count: int) -> Iterator[None]:
    """Limit torch to `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def map_on_cores(work: Callable[[T], R], items: Iterable[T], threads: int) -> list[R]:
    """Apply a function to items, each thread to one at a time; return the results in order.

    Each thread computes on one core; a single one is the calling thread, with all of its cores. At
    most two items per thread are in memory, and the calling thread takes them from their iterator.
    Modes of torch (`no_grad`, autocast) belong to a thread: `work` sets those that it needs.
    """
    if threads == 1:
        return [work(item) for item in items]
    results: list[R] = []
    pending: deque[Future[R]] = deque()
    with (
        on_cores(1),
        ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool,
    ):
        for item in items:
            if len(pending) == 2 * threads:
                results.append(pending.popleft().result())
            pending.append(pool.submit(work, item))
        return results + [future.result() for future in pending]
