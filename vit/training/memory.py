"""How much memory a training step takes, and how much there is."""

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vit.config import IMAGE_SIZE
from vit.model.vit import VisionTransformer
from vit.training.hardware import autocast

FEW, MORE = 2, 6  # images by which a step's memory is measured
WORKING = 1.3  # what a step takes, over what it keeps for its backward pass; measured
CGROUP_LIMIT, CGROUP_USED = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory.current"),
)


def bytes_per_image(model: VisionTransformer, device: torch.device, precision: torch.dtype) -> int:
    """Measure what each image of a batch adds to the memory of a training step.

    Args:
        model: On the device; is not changed.
        device: Where it computes.
        precision: Of matrix products.
    """
    model = copy.deepcopy(model).train()
    kept = [_kept(model, torch.zeros(n, 3, IMAGE_SIZE, IMAGE_SIZE), device, precision)
            for n in (FEW, MORE)]  # fmt: skip
    return int(WORKING * (kept[1] - kept[0]) / (MORE - FEW))


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
    free = []
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            free.append(1024 * int(line.split()[1]))
    limit, used = _read(CGROUP_LIMIT).strip(), _read(CGROUP_USED).strip()
    if limit.isdigit() and used.isdigit():
        free.append(int(limit) - int(used))
    return min(free, default=None)


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
        needed: Bytes that they need.
        free: Bytes that are free; None where the system does not say.
    """

    images: int
    needed: int
    free: int | None

    def advice(self) -> str:
        """Say how much is needed, and what to do where that is too much."""
        return (
            f"train.batch_size: {self.images} images at a time need about "
            f"{self.needed / 1e9:.2g} GB of memory"
            f"{'' if self.free is None else f', {self.free / 1e9:.2g} GB were free at the start'}; "
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


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error is torch's or Python's way to say that memory is short."""
    texts = ("can't allocate memory", "not enough memory", "out of memory", "bad allocation")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
    )
