"""How processes share a model: a copy in each of them, or a part of every weight.

- `replicate`: `DistributedDataParallel` (arXiv 2006.15704). Each process has the whole model; the
  gradients are averaged while the backward pass is still running. On a CPU, they are averaged after
  it instead, by `World.average`: in an order that does not change when a run is resumed.
- `shard`: `fully_shard` (FSDP2; ZeRO stage 3, arXiv 1910.02054). Each process holds a part of every
  weight, its gradient and its optimizer state, and gathers a block's weights when it computes it.

torch's modules for sharding are imported late, because that takes half a second.
"""

import copy
import warnings
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from vit.distributed.world import World

BYTES_PER_WEIGHT = 16  # weight, gradient and two moments of AdamW, float32 each
MOST_MEMORY = 0.5  # fraction of a device's memory for them, above which `auto` shards


def needs_shards(choice: str, world: World, device: torch.device, num_weights: int) -> bool:
    """Decide whether the processes of a run shard its model; a single one has the whole model.

    The choice is "replicate", "shard" or "auto", which shards if weights, gradients and optimizer
    state take more than half of an accelerator's memory.
    """
    if world.size == 1 or choice != "auto" or device.type == "cpu":
        return world.size > 1 and choice == "shard"
    memory = torch.get_device_module(device).mem_get_info()[1]
    fits: bool = world.agree(BYTES_PER_WEIGHT * num_weights <= MOST_MEMORY * memory)
    return not fits


def shard(model: nn.Module, device: torch.device, precision: torch.dtype) -> None:
    """Shard a model in place, and move its weights to a type of device.

    Each encoder block, in `blocks` if there are any, is sharded on its own, and the rest together.
    While a block computes, its weights are whole and have the given precision. Weights outside of
    blocks, which are few, and of blocks with batch norm stay float32, as torch's operations need.
    Gradients are added in float32. Buffers stay whole in each process. The weights must be the same
    in all processes when this is called.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    for parameter in model.parameters():  # FSDP2 refuses the channels-last kernels of timm models
        parameter.data = parameter.data.contiguous()
    exact = MixedPrecisionPolicy(torch.float32, torch.float32, cast_forward_inputs=False)
    fast = MixedPrecisionPolicy(precision, torch.float32)
    norms = nn.modules.batchnorm._BatchNorm
    for block in cast(Any, getattr(model, "blocks", ())):
        has_batch_norm = any(isinstance(module, norms) for module in block.modules())
        fully_shard(block, mesh=mesh, mp_policy=exact if has_batch_norm else fast)
    # The rest is needed at the start of the forward pass and at the end of the backward pass.
    fully_shard(model, mesh=mesh, mp_policy=exact, reshard_after_forward=False)


def replicate(forward: nn.Module, unused: bool = False) -> DistributedDataParallel:
    """Average the gradients of a model, possibly compiled, in its backward pass.

    `unused` is whether the logits may be independent of some parameters.
    """
    with warnings.catch_warnings():  # torch 2.15 has a new name for it, which 2.11 does not know
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        return DistributedDataParallel(
            forward,
            broadcast_buffers=False,  # batch norm uses the statistics of a process's own images
            gradient_as_bucket_view=True,
            find_unused_parameters=unused,
        )


def synchronize(forward: nn.Module, enabled: bool) -> None:
    """Set whether the next backward pass averages the gradients over the processes.

    `enabled` is False for all micro-batches of a step but the last.
    """
    if isinstance(forward, DistributedDataParallel):
        forward.require_backward_grad_sync = enabled
    elif is_sharded(forward):
        cast(Any, forward).set_requires_gradient_sync(enabled)


def averages_gradients(forward: nn.Module) -> bool:
    """Return whether the backward pass of a model averages its gradients over the processes."""
    return isinstance(forward, DistributedDataParallel) or is_sharded(forward)


def is_sharded(model: nn.Module) -> bool:
    """Return whether `shard` has divided a model's weights among processes."""
    return hasattr(model, "set_requires_gradient_sync")


def to_local(tensor: Any) -> Tensor:
    """Return this process's part of a tensor that may be sharded; a view of its memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def to_full(tensor: Any) -> Tensor:
    """Gather a tensor that may be sharded; called by all processes."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gathered(model: nn.Module, into: nn.Module) -> nn.Module:
    """Collect the weights of a sharded model in a whole one; called by all processes.

    The first process gets a copy of `into`, a whole model of the same kind on the CPU, with the
    weights; the others get the sharded model.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    if not weights:  # not the first process
        return model
    into.load_state_dict(weights)
    return copy.deepcopy(into)
