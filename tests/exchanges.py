"""A training step in several processes, and what its collective operations exchange.

As a program, one of two processes of a step: python tests/exchanges.py RANK FILE.
"""

import gc
import json
import sys
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from models import PLAIN
from vit.distributed.shard import replicate, shard, synchronize
from vit.model.vit import VisionTransformer

# Sizes that two processes cannot divide evenly, too: class token, positions and an odd head.
TINY: dict[str, Any] = {
    **PLAIN, "img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 3, "num_heads": 2,
    "num_classes": 5,
}  # fmt: skip
# Kind of parallelism, micro-batches, and whether blocks are recomputed.
CASES = [("replicate", 1, False), ("replicate", 2, False), ("shard", 1, False), ("shard", 2, True)]


class Exchanges(TorchDispatchMode):
    """Adds up the bytes of the whole tensors that are gathered or reduced, by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.payloads: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            kind, whole = {
                "_allgather_base_": ("all_gather", args[:1]),
                "_reduce_scatter_base_": ("reduce_scatter", args[1:2]),
                "allreduce_": ("all_reduce", args[0]),
            }[func._schema.name.removeprefix("c10d::")]
            self.payloads[kind] += sum(tensor.nbytes for tensor in whole)
        return func(*args, **(kwargs or {}))


def exchanged(model: Any, images: Tensor, accumulate: int = 1) -> dict[str, int]:
    """Make the forward and backward passes of a step; return what is exchanged."""
    with Exchanges() as found:
        for number in range(1, accumulate + 1):
            synchronize(model, number == accumulate)
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(images)
            F.cross_entropy(logits.float(), torch.empty(logits.shape)).backward()
    return dict(found.payloads)


def main(rank: int, file: str) -> None:
    """Print what the first of two processes exchanges in each case."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{file}", rank=rank, world_size=2)
    results = [exchanged_in(*case) for case in CASES]
    gc.collect()  # models that outlive the processes' connections can abort the program at its end
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(results))


def exchanged_in(parallel: str, accumulate: int, checkpointed: bool) -> dict[str, int]:
    """Return what a step of a small model exchanges."""
    model = VisionTransformer(**TINY)
    model.set_grad_checkpointing(checkpointed)
    trained: nn.Module = model
    if parallel == "shard":
        shard(model, init_device_mesh("cpu", (2,)), torch.bfloat16)
    else:
        trained = replicate(model)
    return exchanged(trained, torch.randn(2, 3, 16, 16), accumulate)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
