"""How much memory a training step takes, and how much there is."""

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vit.config import IMAGE_SIZE
from vit.console import is_out_of_memory
from vit.hardware import autocast
from vit.model.vit import VisionTransformer

FEW, MORE = 2, 6  # images by which a step's memory is measured
COPIES = 4  # of the weights beside themselves: gradients, two averages of them, and one of weights
CGROUP = Path("/sys/fs/cgroup")  # of a container, version 2


def bytes_per_image(model: VisionTransformer, device: torch.device, precision: torch.dtype) -> int:
    """Measure what each image of a batch makes a training step keep for its backward pass.

    Args:
        model: On the device; is not changed.
        device: Where it computes.
        precision: Of matrix products.
    """
    model = copy.deepcopy(model).train()
    few, more = (
        _kept(model, torch.zeros(number, 3, IMAGE_SIZE, IMAGE_SIZE), device, precision)
        for number in (FEW, MORE)
    )
    return (more - few) // (MORE - FEW)


def _kept(
    model: VisionTransformer, images: Tensor, device: torch.device, precision: torch.dtype
) -> int:
    """Add up what a forward pass keeps for the backward pass, in bytes."""
    sizes: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        autocast(device, precision),
    ):
        logits = model(images.to(device))
    del logits  # till here it held all that was kept, so that no address came twice
    return sum(sizes.values())


def free_bytes(device: torch.device) -> int | None:
    """Return how much memory there is for more; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    machine = _numbers(Path("/proc/meminfo"))
    free = [1024 * machine["MemAvailable:"]] if "MemAvailable:" in machine else []
    limit, used = _read(CGROUP / "memory.max").strip(), _read(CGROUP / "memory.current").strip()
    if limit.isdigit() and used.isdigit():
        cached = _numbers(CGROUP / "memory.stat").get("inactive_file", 0)  # is given up when asked
        free.append(int(limit) - int(used) + cached)
    return min(free, default=None)


def _numbers(path: Path) -> dict[str, int]:
    """Read lines of a name and a whole number."""
    rows = (line.split() for line in _read(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


@dataclass(frozen=True)
class StepMemory:
    """What a training step takes of memory.

    Attributes:
        images: Computed at a time.
        needed: Bytes that they need, at least.
        free: Bytes that are free; None where the system does not say.
    """

    images: int
    needed: int
    free: int | None

    def advice(self) -> str:
        """Say how much is needed, and what to do where that is too much."""
        free = "" if self.free is None else f", {self.free / 1e9:,.1f} GB were free at the start"
        return (
            f"train.batch_size: {self.images} images at a time need at least "
            f"{self.needed / 1e9:,.1f} GB of memory{free}; "
            f"lower --train.batch_size, or raise --train.accumulate: it computes a batch in parts"
        )

    def require(self) -> None:
        """Refuse a step that does not fit.

        Raises:
            ValueError: It needs more than is free.
        """
        if self.free is not None and self.needed > self.free:
            raise ValueError(self.advice())

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Train inside this.

        Raises:
            ValueError: Memory has run out nevertheless.
        """
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise ValueError(f"out of memory; {self.advice()}") from None
            raise


def measure_step(
    model: VisionTransformer, images: int, device: torch.device, precision: torch.dtype
) -> StepMemory:
    """Measure what a step with so many images at a time takes at least, and what is free."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    needed = COPIES * weights + images * bytes_per_image(model, device, precision)
    return StepMemory(images, needed, free_bytes(device))
