"""What a training step computes and what autograd saves in it, derived from the code; see plan.py.

The model is on the meta device, where tensors have shapes but no values.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from vit.hardware import autocast
from vit.model.vit import VisionTransformer
from vit.settings import require
from vit.training.config import Config, OptimConfig
from vit.training.muon import Muon, orthogonalize
from vit.training.optim import build_optimizers

GPU = torch.device("cuda")
BATCHES = (2, 4)  # from whose difference the bytes of an image follow


def build(config: Config, classes: int) -> VisionTransformer:
    """Build the model of a config on the meta device."""
    require(config.model.name == "vit", "model.name", config.model.name, "vit to be planned")
    spec = config.data.spec
    with torch.device("meta"):
        model = VisionTransformer(
            img_size=spec.image_size, in_chans=spec.channels, num_classes=classes,
            **config.model.vit_arguments(),
        )  # fmt: skip
    return model.train()


def flash(query: Tensor, key: Tensor, value: Tensor, mask: None = None, drop: float = 0) -> Tensor:
    """Call torch's flash attention; without a GPU, torch would choose another kernel."""
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, drop)[0]


@contextlib.contextmanager
def with_flash() -> Iterator[None]:
    """Let the model call `flash`."""
    with (
        mock.patch("vit.model.attention.uses_fused_kernel", return_value=True),
        mock.patch("torch.nn.functional.scaled_dot_product_attention", flash),
    ):
        yield


def convolution_backward(
    gradient: torch.Size, _: torch.Size, weight: torch.Size, *others: Any, **shapes: Any
) -> int:
    """Count the FLOP of a convolution's gradients: each takes as many as the convolution.

    torch's own formula ignores groups, and counts too many for depthwise convolutions.
    """
    wanted = others[-1][:2]  # gradients of the input and of the kernel
    return sum(wanted) * 2 * gradient.numel() * weight[1:].numel()


FORMULAS = {torch.ops.aten.convolution_backward: convolution_backward}


def count_flops(
    model: VisionTransformer, images: tuple[int, ...], checkpointed: bool
) -> tuple[float, float]:
    """Count the FLOP of matrix products for one image.

    Args:
        model: On the meta device.
        images: Channels, height and width of an image.
        checkpointed: Whether blocks are computed again in the backward pass.

    Returns:
        FLOP of the forward and of the backward pass.
    """
    model.set_grad_checkpointing(checkpointed)
    counter, batch = FlopCounterMode(display=False, custom_mapping=FORMULAS), BATCHES[0]
    with torch.device("meta"), with_flash(), counter:
        logits = model(torch.empty(batch, *images))
        forward = counter.get_total_flops()
        F.cross_entropy(logits, torch.empty_like(logits)).backward()
    model.zero_grad()
    return forward / batch, (counter.get_total_flops() - forward) / batch


@contextlib.contextmanager
def pretended_gpu() -> Iterator[None]:
    """Create tensors on a GPU that need not exist, with autocast as on a real one."""
    with (
        mock.patch("torch.cuda.amp.common.amp_definitely_not_available", return_value=False),
        mock.patch("torch.cuda.is_bf16_supported", return_value=True),
        with_flash(),
        FakeTensorMode(),
        GPU,
    ):
        yield


def saved_bytes(module: nn.Module, forward: Callable[[], object]) -> int:
    """Return the bytes of the storages that autograd saves in a forward pass, each counted once.

    Args:
        module: Its parameters and buffers are not counted.
        forward: The forward pass.
    """
    own = {t.untyped_storage()._cdata for t in (*module.parameters(), *module.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
    return sum(storage.nbytes() for storage in kept.values())


@dataclass(frozen=True)
class Activations:
    """Bytes that autograd saves.

    Attributes:
        stored: For each image.
        checkpointed: For each image with train.checkpoint_blocks: the inputs of all blocks, and
            everything of the one that is being recomputed.
        casts: Copies of the weights in bfloat16, which autocast makes once.
    """

    stored: float
    checkpointed: float
    casts: float


def trace_activations(
    model: VisionTransformer,
    images: tuple[int, ...],
    weights: torch.dtype,
    precision: torch.dtype = torch.bfloat16,
) -> Activations:
    """Find out what autograd saves in a training step on a GPU.

    Args:
        model: On the meta device.
        images: Channels, height and width of an image.
        weights: Dtype that the weights have in the forward pass: sharded ones are gathered in
            bfloat16.
        precision: Precision of matrix products.
    """
    model = copy.deepcopy(model)
    with pretended_gpu():
        for module in model.modules():
            for name, old in module.named_parameters(recurse=False):
                new = torch.empty_strided(old.shape, old.stride(), dtype=weights)
                setattr(module, name, nn.Parameter(new))
            for name, held in module.named_buffers(recurse=False):
                new = torch.empty_strided(held.shape, held.stride(), dtype=held.dtype)
                setattr(module, name, new)
        block, grid = model.blocks[0], model.patch_embed.grid_size
        tokens = model.num_prefix_tokens + model.patch_embed.num_patches
        width = model.num_features

        def whole(batch: int) -> None:
            with autocast(GPU, precision):
                logits = model(torch.empty(batch, *images))
            F.cross_entropy(logits.float(), torch.empty(logits.shape))

        def single(batch: int) -> None:
            x = torch.empty(batch, tokens, width, dtype=precision, requires_grad=True)
            with autocast(GPU, precision):
                block(x, grid)

        model.set_grad_checkpointing(False)
        stored, casts = _per_image(partial(saved_bytes, model), whole)
        model.set_grad_checkpointing(True)
        inputs, _ = _per_image(partial(saved_bytes, model), whole)
        recomputed, _ = _per_image(partial(saved_bytes, block), single)
    return Activations(stored, inputs + recomputed, casts)


def _per_image(
    measure: Callable[[Callable[[], object]], int], forward: Callable[[int], None]
) -> tuple[float, float]:
    """Return the bytes for each image, and those that do not depend on the number of images."""
    few, many = (measure(partial(forward, batch)) for batch in BATCHES)
    each = (many - few) / (BATCHES[1] - BATCHES[0])
    return each, few - BATCHES[0] * each


@dataclass(frozen=True)
class Muons:
    """What Muon updates in a model; nothing with AdamW.

    Attributes:
        parameters: The parameters.
        flops: FLOP of orthogonalizing all of their matrices.
    """

    parameters: list[nn.Parameter]
    flops: int


def muons(model: VisionTransformer, optimizer: str) -> Muons:
    """Find out what Muon does in a step of a model on the meta device.

    Args:
        model: On the meta device.
        optimizer: "adamw" or "muon".
    """
    counter = FlopCounterMode(display=False)
    found = []
    for built in build_optimizers(model, OptimConfig(name=optimizer)):
        if isinstance(built, Muon):
            found = [p for group in built.param_groups for p in group["params"]]
            with counter:
                for p in found:
                    number, rows = built.numbers[p], len(p) // built.numbers[p]
                    orthogonalize(p.new_empty(number, rows, p.numel() // len(p)))
    return Muons(found, counter.get_total_flops())
