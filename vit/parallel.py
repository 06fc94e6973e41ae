"""One thread per core, each with a part of the work.

torch divides every operation among the cores and waits for all of them before the next one. For
small models the waiting costs more than the division saves, above all when another program keeps
one of the cores busy. Threads that each classify their own images wait once, at the end.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


@contextmanager
def one_core() -> Iterator[int]:
    """Run operations of torch on one core; yield the number of threads that they had."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield before
    finally:
        torch.set_num_threads(before)


def map_on_cores(work: Callable[[T], R], items: Iterable[T], threads: int) -> list[R]:
    """Apply a function to items, as many at a time as there are threads.

    A thread takes the next item when it has finished one, so at most `threads` items are in memory
    and a thread on a busy core takes fewer. Operations of torch run on one core in each thread.
    Its modes (`no_grad`, autocast) belong to a thread: `work` sets those that it needs.

    Args:
        work: The function; it is called by several threads at once.
        items: The items; an iterator is advanced by one thread at a time.
        threads: Number of threads, at least 1. A single one is the calling thread, in which torch
            divides operations among the cores as usual.

    Returns:
        The results in the order of the items.
    """
    if threads == 1:
        return [work(item) for item in items]
    numbered: Iterator[tuple[int, T]] = enumerate(items)
    results: dict[int, R] = {}
    turn, stop = threading.Lock(), threading.Event()

    def take_items() -> None:
        torch.set_num_threads(1)  # of this thread, and of those that start from now on
        try:
            while not stop.is_set():
                with turn:
                    number, item = next(numbered)
                results[number] = work(item)
        except StopIteration:
            return
        finally:
            stop.set()  # no items are left, or an error ends the work of all

    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads) as pool:
            try:
                for done in [pool.submit(take_items) for _ in range(threads)]:
                    done.result()
            finally:
                stop.set()  # after Ctrl-C; the threads finish their items
    finally:
        torch.set_num_threads(before)
    return [results[number] for number in range(len(results))]
