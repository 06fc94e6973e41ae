"""Image files that are decoded when they are needed, by worker processes.

The caller says which images the workers decode, and in which order, so their number changes nothing
but the speed. Each worker has its own pipe, which returns pickled arrays. So the limits of shared
memory, sockets and open files do not matter, and each side notices when the other one ends. A
DataLoader hands results over in a thread: where that fails, its worker lives on and all wait.

Shapes: N images, B batch, C channels, H height, W width.
"""

import contextlib
import dataclasses
import functools
import gc
import hashlib
import math
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from vit.console import rank
from vit.data.photos import TarMember
from vit.data.preprocess import Preprocess
from vit.hardware import PROCESSES, local_processes, usable_cores

FEW = 200  # files; starting processes takes longer than reading fewer
FIRST_BYTES = 4096  # of a file, which tell nearly all files of a size apart
AT_ONCE = 32  # files that a worker decodes in one go where all files are read
UNREADABLE = "restore, replace or delete it; training skips it with --data.on_bad_image skip"
MOST_WORKERS = 16  # unless data.workers says otherwise

ImageFile = str | TarMember
Decoded = tuple[np.ndarray, dict[int, str]]


def first_copies(files: Sequence[ImageFile | int]) -> Tensor:
    """Return for each file the index of the first with the same bytes, e.g. its link: (N,) int64.

    Nothing is decoded. Only files whose size and first bytes are equal are read completely. A
    number has no copies.
    """
    stats = [_stat(file) for file in files]
    keys: list[object] = [at[:1] if at[0] else file for file, at in zip(files, stats, strict=True)]
    for count in (FIRST_BYTES, None):
        number, triples = Counter(keys), zip(keys, files, stats, strict=True)
        keys = [
            (key, _digest(file, at, count)) if at[0] and number[key] > 1 else key
            for key, file, at in triples
        ]
    first = dict[object, int]()
    return torch.tensor([first.setdefault(key, index) for index, key in enumerate(keys)])


def _stat(file: ImageFile | int) -> tuple[int, int]:
    """Return the size and the modification time, 0 where they are not known."""
    with contextlib.suppress(OSError):
        if isinstance(file, str):
            stat = os.stat(file)  # noqa: PTH116 - faster
            return stat.st_size, stat.st_mtime_ns
    return (file.size if isinstance(file, TarMember) else 0), 0


@functools.cache  # images are listed several times in a run
def _digest(file: ImageFile, stat: tuple[int, int], count: int | None) -> object:
    """Return a digest of a file, or of its first bytes."""
    try:
        with Path(file).open("rb") if isinstance(file, str) else file.open(count) as stream:
            if count is not None:
                return hashlib.sha256(stream.read(count)).digest()
            return hashlib.file_digest(stream, "sha256").digest()
    except OSError:  # decoding reports it
        return file


def _require_readable(problems: dict[int, str]) -> None:
    for problem in problems.values():
        raise ValueError(f"{problem}; {UNREADABLE}")


def _decode_files(files: Sequence[ImageFile], preprocess: Preprocess) -> Decoded:
    """Return images (B, C, H, W) uint8, and the problems of unreadable ones by their position."""
    shape = (len(files), preprocess.channels, *preprocess.image_size)
    images, problems = np.zeros(shape, dtype=np.uint8), {}
    for position, file in enumerate(files):
        try:
            images[position] = preprocess.resize(file, "data.root").numpy()
        except ValueError as error:
            problems[position] = str(error)
    return images, problems


def _work(preprocess: Preprocess, pipe: Connection, other_end: Connection) -> None:
    """Decode lists of files in a worker, until the parent closes the pipe or ends."""
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.SIG_IGN)  # the parent decides when the run stops
    other_end.close()  # or this copy keeps the pipe open
    gc.freeze()  # what was inherited stays shared with the parent and is not searched for garbage
    while True:
        try:
            pipe.send(_decode_files(pipe.recv(), preprocess))
        except (EOFError, ConnectionError):
            return
        except MemoryError:
            raise SystemExit(1) from None  # the parent reports it


@contextlib.contextmanager
def _worker(preprocess: Preprocess) -> Iterator[tuple[BaseProcess, Connection]]:
    """Start a process that decodes lists of files, one at a time; yield it and the pipe to it."""
    pipe, end = PROCESSES.Pipe()
    process = PROCESSES.Process(target=_work, args=(preprocess, end, pipe), daemon=True)
    with end:
        process.start()
    # Also at exit, when Python itself would send SIGTERM, which is ignored, and wait forever.
    kill = Finalize(None, process.kill, exitpriority=0)
    try:
        yield process, pipe
    finally:
        kill()
        process.join()


@dataclass(frozen=True)
class ImageFiles:
    """Images that stay in their files and are decoded when they are needed.

    Except for `problems` and `decode_all`, decoding raises a ValueError if a file cannot be read.
    """

    paths: tuple[ImageFile, ...]  # the N files
    preprocess: Preprocess  # crops and resizes the images
    # Number of processes that decode; 0 decodes in this one. None means one per usable core, up to
    # 16, less one in each process of a run that computes meanwhile; 0 for fewer than 200 files.
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
        """Number of processes that decode while this one computes."""
        return self.workers_on(usable_cores() // local_processes() - 1)

    def workers_on(self, cores: int) -> int:
        """Return the number of processes that decode on a number of cores."""
        if self.workers is not None:
            return self.workers
        is_worker = multiprocessing.current_process().daemon  # which may not start processes
        return 0 if len(self) < FEW or is_worker else min(max(1, cores), MOST_WORKERS)

    def to(self, device: torch.device) -> "ImageFiles":
        """Return the same files, whose images are moved to a device."""
        return dataclasses.replace(self, device=device)

    def split(self, size: int) -> Iterator[Tensor]:
        """Decode all images, at most `size` at a time: (n, C, H, W) uint8, on the device.

        On as many cores as torch has threads: all of them while the other processes of a run wait.
        """
        count = max(self.num_workers, self.workers_on(torch.get_num_threads() - 1))
        return self.batches(torch.arange(len(self)).split(size), count)

    def batches(
        self, batches: Iterable[Tensor], num_workers: int | None = None
    ) -> Iterator[Tensor]:
        """Decode the images at indices (B,) for each batch: (B, C, H, W) uint8, on the device."""
        tasks = [batch.tolist() for batch in batches]
        count = self.num_workers if num_workers is None else num_workers
        for pixels, problems in self._decode(tasks, count):
            _require_readable(problems)
            images = torch.from_numpy(pixels)
            is_cuda = self.device.type == "cuda"
            if is_cuda:
                images = images.pin_memory()  # or the copy would not be asynchronous
            yield images.to(self.device, non_blocking=is_cuda)

    def read(self) -> Tensor:
        """Decode all images into one tensor (N, C, H, W) uint8 on the device."""
        pixels = torch.empty(self.shape, dtype=torch.uint8)
        for start, images, problems in self.decode_all("reading images", waits=True):
            _require_readable(problems)
            pixels[start : start + len(images)] = images
        return pixels.to(self.device)

    def problems(self) -> Iterator[tuple[int, str]]:
        """Decode all images; yield the index and the problem of each that cannot be read."""
        for start, _, problems in self.decode_all("checking images", waits=True):
            for position, problem in problems.items():
                yield start + position, problem

    def decode_all(
        self, title: str, waits: bool = False
    ) -> Iterator[tuple[int, Tensor, dict[int, str]]]:
        """Decode all images in parts, with a progress bar; yield also each part's first index.

        `waits` is whether all processes of a run wait meanwhile; else this one computes, too.
        """
        tasks = [range(len(self))[i : i + AT_ONCE] for i in range(0, len(self), AT_ONCE)]
        count = self.workers_on(usable_cores()) if waits else self.num_workers
        hidden = True if rank() else None  # None shows the bar on terminals only
        with tqdm(total=len(self), desc=title, unit="image", leave=False, disable=hidden) as bar:
            for task, (images, problems) in zip(tasks, self._decode(tasks, count), strict=True):
                yield task.start, torch.from_numpy(images), problems
                bar.update(len(images))

    def _decode(self, tasks: Sequence[Sequence[int]], count: int) -> Iterator[Decoded]:
        """Decode the files of one list after the other; workers decode the next ones meanwhile."""
        files = [[self.paths[index] for index in task] for task in tasks]
        if not (count := min(count, len(tasks))):
            yield from (_decode_files(part, self.preprocess) for part in files)
            return
        with contextlib.ExitStack() as stack:
            workers = [stack.enter_context(_worker(self.preprocess)) for _ in range(count)]
            for number in range(count + len(files)):
                process, pipe = workers[number % count]  # they take turns
                try:
                    # On Windows, a pipe stays open if its process fails to start.
                    if number >= count and pipe not in wait([pipe, process.sentinel]):
                        raise EOFError
                    answer = pipe.recv() if number >= count else None
                    if number < len(files):
                        pipe.send(files[number])
                except (EOFError, ConnectionError):
                    process.join()
                    raise ValueError(
                        f"data.workers: a process ended with exit code {process.exitcode}; "
                        "rerun the command; if memory ran out, free some, or train with fewer "
                        "data.workers"
                    ) from None
                if answer:
                    yield answer
