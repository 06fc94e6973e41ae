"""Streaming images from files and tar shards: memory and speed, next to torchvision's DataLoader.

    python -m benchmarks.speed.data_loading [--images 2000 20000] [--workers 2]

1. Makes folders of JPEGs of 256 x 256 pixels in a temporary folder: enlarged shapes with noise.
2. For each folder, in a process of its own: the time to list the files and to check each of them,
   and the peak memory of the process and its workers while equally many batches are streamed from
   each folder.
3. Images/s of epochs over the smallest folder and over tar shards of the same files, in turns with
   torchvision: ImageFolder, Resize and CenterCrop to 224 x 224 pixels, PILToTensor, in a DataLoader
   with as many workers. All give the same pixels, which is checked. The CPU time per image is that
   of the main process and its workers; unlike the speed, it hardly depends on what else the machine
   does. The time to index the shards is printed too. Expect
   no difference in speed, and memory that does not depend on the number of images.
"""

import argparse
import dataclasses
import io
import itertools
import os
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import active_children
from pathlib import Path
from typing import cast

import PIL
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from benchmarks.memory import in_new_process, memory
from benchmarks.tables import spread
from benchmarks.timing import take_turns
from vit.data.config import DataConfig, DataName
from vit.data.datasets import open_images
from vit.data.images import ImageSet
from vit.data.photos import TarMember
from vit.data.preprocess import Preprocess
from vit.data.sampling import epoch_batches
from vit.data.shapes import KINDS, draw_shapes
from vit.data.stream import ImageFiles
from vit.hardware import usable_cores

STORED, SIZE, BATCH = 256, 224, 64
DISTINCT = 2000  # files; larger folders repeat them
PER_SHARD = 1000  # about 25 MB
NOISE, QUALITY = 8.0, 90  # which give files of about 25 kB, like photos of this size
PREPROCESS = Preprocess.from_config(DataConfig(name="folder", image_size=(SIZE, SIZE)))


def make_folder(root: Path, count: int) -> float:
    """Write JPEGs of shapes to root/train/<class>/ and one per class to root/test/<class>/.

    Returns:
        Their mean size in bytes.
    """
    images, labels, _ = draw_shapes(min(count, DISTINCT), seed=0)
    noise = torch.Generator().manual_seed(0)
    total = 0
    for half, name in itertools.product(("train", "test"), KINDS):
        (root / half / name).mkdir(parents=True)
    for number, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
        large = Image.fromarray(image.permute(1, 2, 0).numpy()).resize((STORED, STORED))
        pixels = v2.functional.pil_to_tensor(large).float()
        pixels += NOISE * torch.randn(pixels.shape, generator=noise)
        picture = Image.fromarray(pixels.clamp(0, 255).byte().permute(1, 2, 0).numpy())
        first = root / "train" / KINDS[label] / f"{number:06d}.jpg"
        picture.save(first, quality=QUALITY)
        content = first.read_bytes()
        total += len(content)
        for copy in range(number + DISTINCT, count, DISTINCT):
            (first.parent / f"{copy:06d}.jpg").write_bytes(content)
        (root / "test" / KINDS[label] / "one.jpg").write_bytes(content)
    return total / len(images)


def make_shards(folder: Path, root: Path) -> None:
    """Write the training images of a folder to tar shards in root/train/, one image to test/."""
    files = sorted((folder / "train").glob("*/*.jpg"), key=lambda file: file.name)
    parts = {"train": files, "test": [folder / "test" / name / "one.jpg" for name in KINDS]}
    for half, found in parts.items():
        (root / half).mkdir(parents=True)
        for start in range(0, len(found), PER_SHARD):
            with tarfile.open(root / half / f"{start:06d}.tar", "w") as tar:
                for number, file in enumerate(found[start : start + PER_SHARD]):
                    tar.add(file, f"{number:06d}.jpg")
                    label = tarfile.TarInfo(f"{number:06d}.cls")
                    text = str(KINDS.index(file.parent.name)).encode()
                    label.size = len(text)
                    tar.addfile(label, io.BytesIO(text))


def open_files(root: Path, workers: int, name: DataName = "folder") -> tuple[ImageSet, ImageFiles]:
    """Return the training images of a folder or of shards, in their files."""
    images = open_images(DataConfig(name=name, root=str(root), workers=workers), train=True)
    assert isinstance(images.images, ImageFiles)
    files = dataclasses.replace(images.images, preprocess=PREPROCESS)
    return dataclasses.replace(images, images=files), files


def measure_memory(root: Path, workers: int, batches: int) -> None:
    """Print what it costs to list, check and stream a folder; runs in a process of its own."""
    start = time.perf_counter()
    images, files = open_files(root, workers)
    listed = time.perf_counter() - start
    start = time.perf_counter()
    assert not list(files.problems())
    checked = time.perf_counter() - start
    workers_peak = 0.0
    for epoch in range(max(1, batches * BATCH // len(images))):
        for _ in stream_epoch(images, epoch):
            peaks = [memory("VmHWM", child.pid or 0) for child in active_children()]
            workers_peak = max([workers_peak, *peaks])
    own = memory("VmHWM")
    print(
        f"{len(images):>8,}{listed:>9.2f} s{checked:>9.1f} s{1000 * checked / len(images):>9.2f} ms"
        f"{own:>10,.0f} MB{workers_peak:>10,.0f} MB",
        flush=True,
    )


def stream_epoch(images: ImageSet, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the images and labels of an epoch's batches."""
    yield from images.batches(epoch_batches(len(images), (len(images) // BATCH, BATCH), 0, epoch))


def torchvision_loader(root: Path, workers: int) -> "DataLoader[tuple[Tensor, Tensor]]":
    """Build a loader of the same pixels from torchvision's parts."""
    bicubic = v2.InterpolationMode.BICUBIC
    transform = v2.Compose(
        [v2.Resize(SIZE, interpolation=bicubic), v2.CenterCrop(SIZE), v2.PILToTensor()]
    )
    return DataLoader(
        ImageFolder(root / "train", transform), BATCH, shuffle=True, num_workers=workers,
        drop_last=True,
    )  # fmt: skip


def check_pixels(folder: ImageFolder, shards: ImageFiles, count: int = 20) -> None:
    """Check that all ways give the same pixels for the first images."""
    for number, (path, _) in enumerate(folder.samples[:count]):
        assert torch.equal(PREPROCESS.resize(Path(path)), folder[number][0]), path
    contents = {Path(path).read_bytes(): number for number, (path, _) in enumerate(folder.samples)}
    for member in shards.paths[:count]:
        assert isinstance(member, TarMember)
        assert torch.equal(PREPROCESS.resize(member), folder[contents[member.open().read()]][0]), (
            member
        )


def cpu_seconds() -> float:
    """Return the CPU time that this process and its workers, which have ended, have used so far."""
    return sum(os.times()[:4])


def metered(work: Callable[[], object], spent: list[float]) -> Callable[[], None]:
    """Return the same work, which also notes the CPU time that it takes."""

    def run() -> None:
        before = cpu_seconds()
        work()
        spent.append(cpu_seconds() - before)

    return run


def measure_speed(root: Path, workers: int, rounds: int) -> None:
    """Print images/s and CPU time of epochs over a folder and shards, in turns with torchvision."""
    epochs = itertools.count()
    spent: dict[str, list[float]] = {"torchvision": [], "ours": [], "shards": []}
    shards_root = root.with_name(f"{root.name}-shards")
    make_shards(root, shards_root)
    images, _ = open_files(root, workers)
    start = time.perf_counter()
    shards, members = open_files(shards_root, workers, "shards")
    indexed = time.perf_counter() - start
    loader = torchvision_loader(root, workers)
    check_pixels(cast(ImageFolder, loader.dataset), members)
    works: dict[str, Callable[[], object]] = {
        "torchvision": lambda: [None for _ in loader],
        "ours": lambda: [None for _ in stream_epoch(images, next(epochs))],
        "shards": lambda: [None for _ in stream_epoch(shards, next(epochs))],
    }
    timings = take_turns({name: metered(work, spent[name]) for name, work in works.items()}, rounds)
    count = len(images) // BATCH * BATCH
    print(
        f"\nindexing shards: {1000 * indexed / len(shards):.3f} ms per image\n"
        f"an epoch of {count:,} images, {workers} workers: images/s, ratio to the first, and CPU "
        "time per image"
    )
    for name, timing in timings.items():
        cpu = [1000 * seconds / count for seconds in spent[name][1:]]  # without the warm-up
        print(f"  {name:<14}{count / timing.seconds:8,.0f}   {timing.speed()}   {spread(cpu)} ms")


def main() -> None:
    """Make the folders and run both measurements."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=int, nargs="+", default=[2000, 20_000])
    parser.add_argument("--workers", type=int, default=usable_cores())
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    counts, rounds = sorted(arguments.images), arguments.rounds
    cores, workers = usable_cores(), arguments.workers
    print(f"{cores} cores, torch {torch.__version__}, Pillow {PIL.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        roots = {count: Path(folder) / str(count) for count in counts}
        sizes = [make_folder(root, count) for count, root in roots.items()]
        batches = counts[-1] // BATCH
        print(
            f"JPEGs of {STORED} x {STORED} pixels, {sizes[-1] / 1000:.1f} kB on average, decoded "
            f"to {SIZE} x {SIZE}\n\nstreaming {batches:,} batches of {BATCH} with {workers} "
            "workers: peak memory\n"
            "  images    listing   checking  per image          main    a worker"
        )
        for root in roots.values():
            in_new_process(measure_memory, root, workers, batches)
        measure_speed(roots[counts[0]], workers, rounds)


if __name__ == "__main__":
    main()
