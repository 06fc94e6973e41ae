"""The softmax of attention that somebody else wrote: read, masked, and scaled for each head.

Shapes: B batch, H heads, N tokens.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vit.model.attention import masked_softmax

# Whether a softmax of all heads has (H·B, N, N), not (B·H, N, N), and whether what is multiplied by
# the values has.
Orders = tuple[bool, bool]
SOFTMAXES = (torch.softmax, Tensor.softmax, F.softmax)
PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.einsum)


def by_image(weights: Tensor, size: tuple[int, ...], heads_first: bool) -> Tensor:
    """Return a softmax of all heads as (B, H, N, N), its `size`."""
    images, heads, *tokens = size
    if heads_first:
        return weights.reshape(heads, images, *tokens).transpose(0, 1)
    return weights.reshape(size)


def _in_order(whole: Tensor, result: Tensor, heads_first: bool) -> Tensor:
    """Return (B, H, N, N) in the shape and order of a softmax of all heads."""
    return (whole.transpose(0, 1) if heads_first else whole).reshape(result.shape)


class ReadSoftmax(TorchFunctionMode):
    """A context in which the softmax of one attention is read, masked, and scaled by gates.

    Args:
        size: B, H, N, N of the weights.
        mask: Boolean, broadcastable to them; None if the module applies its own.
        gates: (H,), by which the weights of each head are multiplied after they are read.
        given: (B, H, N, N) of an earlier call, which the softmaxes of single heads return.
        orders: Those of the softmax and of what is multiplied by the values.

    A module may have a softmax for each head, (B, N, N), or for each head of each image, (N, N).
    """

    def __init__(
        self, size: tuple[int, ...], mask: Tensor | None, gates: Tensor,
        given: Tensor | None = None, orders: Orders = (False, False),
    ) -> None:  # fmt: skip
        super().__init__()
        self.size, self.mask, self.gates, self.given = size, mask, gates, given
        self.heads_first, self.used_heads_first = orders
        self.weights: Tensor | None = None  # (B, H, N, N)
        # Of the products after the last softmax, the first factor of the last one, likewise, and
        # the number of those with such a factor.
        self.used: Tensor | None = None
        self.products = 0
        self.softmaxes = 0  # of all heads at once
        self.heads: list[Tensor] = []  # of single heads, (B, N, N) or (N, N) each
        self.surplus = False  # whether heads have further softmaxes
        self.other: torch.Size | None = None  # of a softmax that is not one of all or single heads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self._project(*args, **kwargs)
        if func in PRODUCTS and len(args) > 1:
            args = *args[:-2], self._used(args[-2]), args[-1]  # einsum begins with a formula
        if func not in SOFTMAXES:
            return func(*args, **kwargs)
        given: Tensor = args[0] if args else kwargs["input"]
        if given.shape[-2:] != self.size[2:]:
            self.other = given.shape
            return func(*args, **kwargs)
        if (mask := self._mask_of(given)) is None:
            return self._gated(func(*args, **kwargs))
        # As `masked_softmax`, but along the dimension of the call.
        scores = given.masked_fill(~mask, torch.finfo(given.dtype).min)
        options = {key: value for key, value in kwargs.items() if key != "input"}
        return self._gated(func(scores, *args[1:], **options).masked_fill(~mask, 0.0))

    def _used(self, factor: Any) -> Any:
        """Keep the first factor of a product if it has the shape of weights; return it."""
        is_pairs = isinstance(factor, Tensor) and factor.shape[-2:] == self.size[2:]
        if not is_pairs or factor.numel() != math.prod(self.size):
            return factor
        self.products += 1
        self.used = by_image(factor, self.size, self.used_heads_first)
        return _in_order(self.used, factor, self.used_heads_first)

    @property
    def changed(self) -> Tensor | None:
        """What was multiplied by the values, unless that is what a softmax returned."""
        if self.used is None or self.weights is None:
            return self.used
        is_same = torch.allclose(self.used.float(), self.weights.float(), atol=1e-5)
        return None if is_same else self.used

    def _mask_of(self, scores: Tensor) -> Tensor | None:
        """Return the mask of scores (..., N, N), in their shape."""
        if self.mask is None or scores.shape[-2:] != self.size[2:]:
            return None
        mask, first = self.mask.expand(self.size), len(self.heads)
        if self._is_part(scores):
            return mask[:, first : first + scores.shape[1]]
        if scores.numel() == mask.numel():
            return _in_order(mask, scores, self.heads_first)
        return self._single(mask, scores.ndim)

    def _is_part(self, scores: Tensor) -> bool:
        """Tell whether scores or weights are those of some heads: (B, n, N, N) with n < H."""
        images, heads, *tokens = self.size
        is_part = scores.ndim == 4 and scores.shape[1] < heads
        return is_part and scores[:, 0].shape == (images, *tokens)

    def _single(self, whole: Tensor, ndim: int) -> Tensor:
        """Return the part of (B, H, N, N) that belongs to the next single head."""
        parts = whole.flatten(0, 1) if ndim == 2 else whole.transpose(0, 1)
        return parts[min(len(self.heads), len(parts) - 1)]

    def _gated(self, weights: Tensor) -> Tensor:
        if weights.numel() == math.prod(self.size):
            self.softmaxes += 1
            self.used, self.products = None, 0
            self.weights = by_image(weights, self.size, self.heads_first)
            return _in_order(self.weights * self.gates[:, None, None], weights, self.heads_first)
        if self._is_part(weights):
            return torch.stack([self._gated(head) for head in weights.unbind(dim=1)], dim=1)
        images, heads, *tokens = self.size
        counts = {(images, *tokens): heads, (*tokens,): images * heads}
        count, number = counts.get((*weights.shape,), 0), len(self.heads)
        if number >= count:
            self.surplus |= count > 0
            self.other = self.other if count else weights.shape
            return weights
        if self.given is not None:
            weights = self._single(self.given, weights.ndim)
        self.heads.append(weights)
        if len(self.heads) == count:
            stacked = torch.stack(self.heads, dim=0 if weights.ndim == 2 else 1)
            self.weights = stacked.view(self.size)
        return weights * self.gates[number % heads]

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """Do what torch's function does, with weights that can be read."""
        if enable_gqa:  # several heads of queries share a head of keys and values
            shared = query.shape[-3] // key.shape[-3]
            key, value = (part.repeat_interleave(shared, dim=-3) for part in (key, value))
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        scores = query @ key.transpose(-2, -1) * scale
        if is_causal:
            attn_mask = torch.ones_like(scores, dtype=torch.bool).tril()
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            scores, attn_mask = scores + attn_mask, None
        if (mask := self._mask_of(scores)) is not None:
            attn_mask = mask if attn_mask is None else mask & attn_mask
        weights = self._gated(masked_softmax(scores, attn_mask))
        return F.dropout(weights, dropout_p) @ value

    def _project(
        self, query: Tensor, key: Tensor, value: Tensor, width: int, heads: int, *weights: Any,
        training: bool = True, key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None, **options: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Do what torch's function does, for tokens (N, B, D) and masks that are added."""
        weight, bias, *extra, dropout, out_weight, out_bias = weights
        if any(part is not None and part is not False for part in extra):
            raise ValueError("bias_k, bias_v and add_zero_attn, which attend to more than tokens")
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        # Keys and values of another width have projections of their own.
        separate = [options[f"{name}_proj_weight"] for name in "qkv"]
        parts = separate if weight is None else weight.chunk(3)
        query, key, value = (
            F.linear(x, *layer).unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)
            for x, *layer in zip((query, key, value), parts, biases, strict=True)
        )
        mask = None if attn_mask is None else attn_mask.view(-1, *self.size[2:])
        if mask is not None and len(mask) > 1:
            mask = mask.view(self.size)
        if key_padding_mask is not None:
            mask = key_padding_mask[:, None, None] + (0 if mask is None else mask)
        output = self._attend(query, key, value, mask, dropout if training else 0.0)
        output = output.permute(2, 0, 1, 3).flatten(2)
        found = self.weights if options.get("need_weights", True) else None
        if found is not None and options.get("average_attn_weights", True):
            found = found.mean(dim=1)
        return F.linear(output, out_weight, out_bias), found
