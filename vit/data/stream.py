"""Image files that are decoded when they are needed, by worker processes.

The workers only decode and resize. Which images they decode, and in which order, is up to the
caller, so their number changes nothing but the speed.

Shapes: N images, B batch, C channels, H height, W width.
"""

import dataclasses
import gc
import math
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from vit.console import rank
from vit.data.photos import TarMember
from vit.data.preprocess import Preprocess
from vit.hardware import local_processes, usable_cores
from vit.seeding import generator

FEW = 200  # files; starting processes takes longer than reading fewer
AT_ONCE = 32  # files that a worker decodes in one go where all files are read
MOST_WORKERS = 16  # unless data.workers says otherwise

ImageFile = str | TarMember
Decoded = tuple[Tensor, dict[int, str]]


class _Decoding(Dataset[Any]):
    """Decodes lists of files; a DataLoader gives it such lists instead of indices."""

    def __init__(self, preprocess: Preprocess) -> None:
        self.preprocess = preprocess

    def __getitem__(self, files: Sequence[ImageFile]) -> Decoded:
        """Return images (B, C, H, W) uint8, and by position what is wrong with unreadable ones."""
        shape = (len(files), self.preprocess.channels, *self.preprocess.image_size)
        images, problems = torch.zeros(shape, dtype=torch.uint8), {}
        for position, file in enumerate(files):
            try:
                images[position] = self.preprocess.resize(file, "data.root")
            except ValueError as error:
                problems[position] = str(error)
        return images, problems


def _start_worker(number: int) -> None:
    """Ignore the signals that ask a run to stop: the parent finishes its step first."""
    gc.freeze()  # what was inherited stays shared with the parent and is not searched for garbage
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.SIG_IGN)


@dataclass(frozen=True)
class ImageFiles:
    """Images that stay in their files and are decoded when they are needed.

    Methods that decode raise a ValueError if a file cannot be read; `problems` and `decode_all` go
    on.
    """

    paths: tuple[ImageFile, ...]  # the N files, or members of tar files
    preprocess: Preprocess  # crops and resizes the images
    # Number of processes that decode; 0 decodes in this one. None means one per usable core, less
    # one, 1 to 16, shared by the processes of a run; 0 for fewer than 200 files.
    workers: int | None = None
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - where the images are moved to

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

    @property
    def num_workers(self) -> int:
        """Number of processes that decode."""
        if self.workers is not None:
            return self.workers
        cores = usable_cores() // local_processes()
        return 0 if len(self) < FEW else min(max(1, cores - 1), MOST_WORKERS)

    def to(self, device: torch.device) -> "ImageFiles":
        """Return the same files, whose images are moved to a device."""
        return dataclasses.replace(self, device=device)

    def split(self, size: int) -> Iterator[Tensor]:
        """Decode all images, at most `size` at a time: (n, C, H, W) uint8, on the device."""
        return self.batches(torch.arange(len(self)).split(size))

    def batches(self, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        """Decode the images at indices (B,) for each batch: (B, C, H, W) uint8, on the device."""
        for images, problems in self._decode([batch.tolist() for batch in batches]):
            _require_readable(problems.values())
            yield images.to(self.device, non_blocking=True)

    def read(self) -> Tensor:
        """Decode all images into one tensor (N, C, H, W) uint8 on the device."""
        pixels = torch.empty(self.shape, dtype=torch.uint8)
        for start, images, problems in self.decode_all("reading images"):
            _require_readable(problems.values())
            pixels[start : start + len(images)] = images
        return pixels.to(self.device)

    def problems(self) -> Iterator[tuple[int, str]]:
        """Decode all images; yield the index of each that cannot be read, and what is wrong."""
        for start, _, problems in self.decode_all("checking images"):
            for position, problem in problems.items():
                yield start + position, problem

    def check(self) -> None:
        """Decode all images without keeping them."""
        _require_readable(problem for _, problem in self.problems())

    def decode_all(self, what: str) -> Iterator[tuple[int, Tensor, dict[int, str]]]:
        """Decode all images in parts, with a progress bar; yield also each part's first index."""
        tasks = [range(len(self))[i : i + AT_ONCE] for i in range(0, len(self), AT_ONCE)]
        hidden = True if rank() else None  # None shows the bar on terminals only
        with tqdm(total=len(self), desc=what, unit="image", leave=False, disable=hidden) as bar:
            for task, (images, problems) in zip(tasks, self._decode(tasks), strict=True):
                yield task.start, images, problems
                bar.update(len(images))

    def _decode(self, tasks: Sequence[Sequence[int]]) -> Iterator[Decoded]:
        """Decode the files of one list after the other; workers decode the next ones meanwhile."""
        decoding, workers = _Decoding(self.preprocess), min(self.num_workers, len(tasks))
        files = [[self.paths[index] for index in task] for task in tasks]
        if workers == 0:
            return map(decoding.__getitem__, files)
        loader = DataLoader(
            decoding,
            sampler=files,
            batch_size=None,  # each task is a batch already
            num_workers=workers,
            pin_memory=self.device.type == "cuda",
            worker_init_fn=_start_worker,
            generator=generator(0, "loader"),  # without it the global one is advanced
        )
        return iter(loader)


def _require_readable(problems: Iterable[str]) -> None:
    for problem in problems:
        raise ValueError(
            f"{problem}; restore, replace or delete it, or train with --data.on_bad_image skip"
        )
