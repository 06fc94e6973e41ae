"""Predictions from an earlier layer, without some heads, or without some patches.

Shapes: B batch, N tokens (prefix, then patches), P patches, D token width, H heads, L layers, C
classes.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from vit.model.attention_model import require_attention
from vit.model.whole_attention import WholeAttention

Answer = tuple[Tensor, Tensor, Tensor, Tensor]  # logits, weights, and the lens: see `Interventions`
Read = Callable[[Tensor], tuple[Tensor, Tensor | None]]


@torch.no_grad()
def logit_lens(read_tokens: Read, tokens: Sequence[Tensor], k: int = 3) -> tuple[Tensor, Tensor]:
    """Read the tokens of every layer with the final norm and the classifier (the logit lens).

    After nostalgebraist, "interpreting GPT: the logit lens" (LessWrong, 2020); see also arXiv
    2303.08112. The head was trained on the last layer's tokens only, so for earlier ones the result
    is no real prediction.

    Args:
        read_tokens: The method of a model in evaluation mode, see `VisionTransformer.read_tokens`.
        tokens: L outputs of the blocks, (B, N, D), from `forward_intermediates`.
        k: Number of classes to keep, C at most.

    Returns:
        The most probable classes, int64, best first, and their probabilities, float32, (L, B, T, k)
        each. The first of the T readings is what the classifier reads, such as the class token or
        the mean of the patches; then come the N tokens, each read alone, if it can do that.
    """
    best = []
    for layer in tokens:
        pooled, alone = read_tokens(layer)
        logits = pooled[:, None] if alone is None else torch.cat([pooled[:, None], alone], dim=1)
        best.append(logits.float().softmax(dim=-1).topk(min(k, logits.shape[-1])))
    return torch.stack([b.indices for b in best]), torch.stack([b.values for b in best])


class Interventions(nn.Module):
    """A model, in evaluation mode, with inputs that scale its heads and leave out patches.

    A gate scales what its head adds to its layer's output, by the columns of the output projection
    that read the head. The projection's bias stays as long as one head of the layer does, so with
    all gates 0 the layer has no attention branch.

    A patch that is left out is no key in any layer, and does not enter the mean, or maximum, over
    the patches that the classifier may read. With timm's attention pooling, or a mean that includes
    the prefix tokens, the mean of the remaining patches takes its place. Convolutions still read
    it: hide its pixels too if its neighbours are to know nothing of it.

    The model is not changed. Gates and patches of ones change no bit of what
    `forward_intermediates` returns.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, gates: Tensor | None, keep: Tensor) -> Answer:
        """Classify images.

        Args:
            images: (B, channels, height, width), normalized.
            gates: (L, H) float, 0 to 1: 0 mutes a head, 1 leaves it as it is; None leaves all.
            keep: (B or 1, P) float or bool: 0 leaves a patch out, all else keeps it.

        Returns:
            Logits (B, C), attention weights before dropout (B, L, H, N, N), and the classes and
            probabilities of `logit_lens`, (L, B, T, k) each. The rows of patches that are left out
            mean nothing.
        """
        if gates is not None:
            gated = {f"model.{k}": v for k, v in gated_weights(self.model, gates).items()}
            result: Answer = functional_call(self, gated, (images, None, keep))
            return result
        model: Any = self.model
        readable, kept = require_attention(model), keep != 0
        prefix = kept.new_ones(len(kept), readable.num_prefix_tokens)
        mask = torch.cat([prefix, kept], dim=1)[:, None]
        _, weights, tokens = readable.forward_intermediates(images, mask)

        def pool(layer: Tensor) -> Tensor:
            logits: Tensor = model.forward_head(_without_patches(model.norm(layer), kept))
            return logits

        lens = logit_lens(lambda layer: (pool(layer), readable.read_tokens(layer)[1]), tokens)
        return pool(tokens[-1]), torch.stack(weights, dim=1), *lens


def gates_of(model: nn.Module) -> Tensor:
    """Return gates (L, H) of ones, which leave all heads of a model as they are."""
    blocks: Any = require_attention(model).blocks
    device = next(model.parameters()).device  # attention itself may have none
    return torch.ones(len(blocks), blocks[0].attn.num_heads, device=device)


def gated_weights(model: nn.Module, gates: Tensor) -> dict[str, Tensor]:
    """Return output projections with gates (L, H), or the gates of whole modules, by name."""
    gated, blocks = {}, cast(Any, model).blocks
    for layer, (block, is_on) in enumerate(zip(blocks, gates.amax(dim=1) > 0, strict=True)):
        if isinstance(block.attn, WholeAttention):
            traits = block.attn.traits
            if not traits.can_mute and block.attn.num_heads > 1:
                raise ValueError(f"{traits.problem}, so none of its heads can be muted")
            gated[f"blocks.{layer}.attn.gates"] = gates[layer]
            continue
        proj, name = block.attn.proj, f"blocks.{layer}.attn.proj"
        width = proj.in_features // block.attn.num_heads
        gated[f"{name}.weight"] = proj.weight * gates[layer].repeat_interleave(width)
        if proj.bias is not None:
            gated[f"{name}.bias"] = proj.bias * is_on
    return gated


def set_gates(copied: nn.Module, model: nn.Module, gates: Tensor) -> None:
    """Scale the heads of a copy of a model by gates (L, H)."""
    copied.load_state_dict(gated_weights(model, gates), strict=False)
    for layer, block in enumerate(cast(Any, copied).blocks):
        if isinstance(block.attn, WholeAttention):
            block.attn.gates, block.attn.is_gated = gates[layer], True


def _without_patches(tokens: Tensor, kept: Tensor) -> Tensor:
    """Replace tokens (B, N, D) of patches that are not kept (B or 1, P) by the mean of the others.

    That changes no mean or maximum. Where no patch is kept, the mean is 0.
    """
    prefix, patches = tokens.split([tokens.shape[1] - kept.shape[1], kept.shape[1]], dim=1)
    inside = kept[..., None]
    total = patches.masked_fill(~inside, 0.0).sum(dim=1, keepdim=True)
    mean = total / inside.sum(dim=1, keepdim=True).clamp(min=1)
    return torch.cat([prefix, torch.where(inside, patches, mean)], dim=1)
