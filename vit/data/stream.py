"""Image files that are decoded when they are needed, by worker processes.

The workers only decode and resize. Which images they decode, and in which order, is up to the
caller, so their number changes nothing but the speed.

Shapes: N images, B batch, C channels, H height, W width.
"""

import atexit
import dataclasses
import gc
import math
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate
from tqdm import tqdm

from vit.console import rank
from vit.data.preprocess import Preprocess
from vit.data.source import TarMember
from vit.hardware import local_processes, usable_cores
from vit.seeding import generator

FEW = 200  # files; starting processes takes longer than reading fewer
AT_ONCE = 32  # files per task where all files are read
MOST_WORKERS = 16  # unless data.workers says otherwise

ImageFile = str | TarMember
Task = tuple[Preprocess, Sequence[ImageFile]]
Decoded = tuple[Tensor, dict[int, str]]


def decode(task: Task) -> Decoded:
    """Decode and resize image files.

    Args:
        task: The preprocessing, and B files.

    Returns:
        The images that can be read, (at most B, C, H, W) uint8, and what is wrong with each of the
        others, by position, 0 to B - 1.
    """
    preprocess, paths = task
    images, problems = [], {}
    for position, path in enumerate(paths):
        try:
            images.append(preprocess.resize(path, "data.root"))
        except ValueError as error:
            problems[position] = str(error)
    if images:
        return default_collate(images), problems  # in a worker, stacks them in shared memory
    shape = (0, preprocess.channels, *preprocess.image_size)
    return torch.empty(shape, dtype=torch.uint8), problems


class Decoder:
    """Decodes image files, in worker processes that are started once and then kept.

    Args:
        workers: Number of processes; 0 decodes in this one. None uses one per usable core, less
            one, but at most 16, and none before it is given 200 files.
        pin_memory: Whether the workers' images are put into pinned memory, from which they are
            copied to a GPU while it computes.
    """

    def __init__(self, workers: int | None = 0, pin_memory: bool = False) -> None:
        self.workers = default_workers() if workers is None else workers
        self.few = FEW if workers is None else 0
        self.pin_memory = pin_memory
        self._tasks: list[Task] = []
        self._loader: DataLoader[Any] | None = None
        self._calls = 0

    def decode(self, tasks: Sequence[Task]) -> Iterator[Decoded]:
        """Decode one task after the other; workers decode the next ones meanwhile.

        Args:
            tasks: Each as for the function `decode`.

        Yields:
            What that function returns, in the order of the tasks.
        """
        few = sum(len(paths) for _, paths in tasks) < self.few
        if self.workers == 0 or (few and self._loader is None):
            yield from map(decode, tasks)
            return
        self._loader = self._loader or self._start()
        self._calls += 1
        call = self._calls
        self._tasks[:] = tasks
        results = iter(self._loader)
        for _ in tasks:
            assert call == self._calls, "another call has taken over the workers"
            yield next(results)

    def _start(self) -> "DataLoader[Any]":
        atexit.register(self.close)
        return DataLoader(
            _Files(),
            batch_sampler=self._tasks,  # type: ignore[arg-type]  # read anew for each call
            num_workers=self.workers,
            collate_fn=_unchanged,
            pin_memory=self.pin_memory,
            worker_init_fn=_start_worker,
            persistent_workers=True,
            generator=generator(0, "loader"),  # without it the global one is advanced
        )

    def close(self) -> None:
        """Stop the processes, if there are any; they are started again when they are needed."""
        atexit.unregister(self.close)
        if self._loader is not None and self._loader._iterator is not None:
            # Otherwise they would live until nothing refers to the iterator, and a traceback does.
            self._loader._iterator._shutdown_workers()  # type: ignore[attr-defined]
        self._loader = None


class _Files(Dataset[Any]):
    """Lets a DataLoader fetch tasks instead of indices, so that workers hold no list of files."""

    def __getitems__(self, task: Task) -> Decoded:
        return decode(task)


def _unchanged(decoded: Any) -> Any:
    return decoded


def _start_worker(number: int) -> None:
    """Ignore the signals that ask a run to stop: the parent finishes its step first."""
    gc.freeze()  # what was inherited stays shared with the parent and is not searched for garbage
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.SIG_IGN)


def default_workers() -> int:
    """Return one worker per usable core, less one, shared by the processes of a run; 1 to 16."""
    cores = usable_cores() // local_processes()
    return min(max(1, cores - 1), MOST_WORKERS)


@dataclass(frozen=True)
class ImageFiles:
    """Images that stay in their files and are decoded when they are needed.

    Attributes:
        paths: The N files, or members of tar files.
        preprocess: Crops and resizes the images.
        decoder: Decodes them.
        device: Where the images are moved to.
    """

    paths: tuple[ImageFile, ...]
    preprocess: Preprocess
    decoder: Decoder
    device: torch.device = torch.device("cpu")  # noqa: RUF009

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, indices: Tensor) -> "ImageFiles":
        """Return the files at `indices` (n,), in that order."""
        return dataclasses.replace(self, paths=tuple(self.paths[i] for i in indices.tolist()))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the decoded images: (N, C, H, W)."""
        return (len(self), self.preprocess.channels, *self.preprocess.image_size)

    @property
    def nbytes(self) -> int:
        """Memory that the decoded images would take, in bytes."""
        return math.prod(self.shape)

    def to(self, device: torch.device) -> "ImageFiles":
        """Return the same files, whose images are moved to a device."""
        return dataclasses.replace(self, device=device)

    def batches(self, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        """Decode images batch by batch.

        Args:
            batches: Indices (B,) of each batch.

        Yields:
            Images (B, C, H, W) uint8, on the device.

        Raises:
            ValueError: A file cannot be read any more.
        """
        tasks = [
            (self.preprocess, [self.paths[index] for index in batch.tolist()]) for batch in batches
        ]
        for images, problems in self.decoder.decode(tasks):
            for problem in problems.values():
                raise ValueError(f"{problem}; restore the file and rerun the command")
            yield images.to(self.device, non_blocking=True)

    def read(self) -> Tensor:
        """Decode all images into one tensor (N, C, H, W) uint8 on the device.

        Raises:
            ValueError: A file cannot be read.
        """
        pixels = torch.empty(self.shape, dtype=torch.uint8)
        for start, images, problems in self._all("reading images"):
            _require_readable(problems)
            pixels[start : start + len(images)] = images
        return pixels.to(self.device)

    def check(self) -> None:
        """Decode all images without keeping them.

        Raises:
            ValueError: A file cannot be read.
        """
        for _, _, problems in self._all("checking images"):
            _require_readable(problems)

    def unreadable(self) -> list[int]:
        """Decode all images and return the indices of those that cannot be read."""
        found = self._all("checking images")
        return [start + position for start, _, problems in found for position in problems]

    def _all(self, what: str) -> Iterator[tuple[int, Tensor, dict[int, str]]]:
        """Decode all images, with a progress bar on terminals; yield also each task's first index.

        Where all can be read, images[0] of a task is the image with this index.
        """
        starts = range(0, len(self), AT_ONCE)
        tasks = [(self.preprocess, self.paths[start : start + AT_ONCE]) for start in starts]
        hidden = True if rank() else None  # None shows the bar on terminals only
        with tqdm(total=len(self), desc=what, unit="image", leave=False, disable=hidden) as bar:
            decoded = self.decoder.decode(tasks)
            for start, (images, problems) in zip(starts, decoded, strict=True):
                yield start, images, problems
                bar.update(len(images) + len(problems))


def _require_readable(problems: dict[int, str]) -> None:
    for problem in problems.values():
        raise ValueError(f"{problem}; replace or delete it, or use --data.on_bad_image skip")
