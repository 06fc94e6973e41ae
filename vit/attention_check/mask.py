"""The mask of an attention: keys that it hides must get no weight.

Shapes: B batch, N tokens.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor

from vit.attention_check.watch import CLOSE, B, N, Row, Subject, Watch, judge
from vit.console import shorten
from vit.model.whole_attention import WholeAttention

HIDDEN = 1e-6  # largest weight of a key that is hidden


def check_mask(subject: Subject, tokens: Tensor, seen: Watch) -> Row:
    """Check that keys that a mask hides get no weight, for each image and with no key at all."""
    own = subject if isinstance(subject, WholeAttention) else subject.attention
    traits = subject.traits if isinstance(subject, WholeAttention) else None
    has_softmax = traits is not None and traits.has_softmax
    if getattr(own, "mask_name", "") is None and not has_softmax:
        return Row("mask", "remark", "", "taken by no argument, so tokens cannot be hidden")
    place = torch.arange(N) - torch.arange(B)[:, None, None]
    keep = (place < 0) | (place > 2)  # (B, 1, N): three keys of each image are hidden
    # Rows that attend to hidden keys only, as those of causal attention may, have no right result.
    usual = (seen.weights.abs() * keep[:, None]).sum(dim=-1, keepdim=True) > CLOSE
    attend, mask = _masking(subject, tokens, keep, usual)
    whole = attend is not subject
    changes = traits is not None and has_softmax and traits.changes
    try:
        masked = Watch.run(attend, tokens, mask)
    except Exception as error:  # the user's code may raise anything
        shapes = f"{[B, 1, N, N]}, {[B, N, N]} or {[B, N]}" if whole else f"{[B, 1, N, N]}"
        advice = f"fails with a boolean mask, {shapes}: "
        advice += f"{type(error).__name__}: {shorten(error, 200)}"
        return Row("mask", "remark" if whole else "failed", "", advice)
    weights = _masked_weights(subject, tokens, keep, masked)
    hidden, shown = ((weights * (m[:, None] & usual)).abs() for m in (~keep, keep))
    by_image = hidden.amax(dim=(1, 2, 3))
    sums = (weights - seen.weights).sum(dim=-1, keepdim=True)
    is_one = bool((seen.weights.sum(dim=-1) - 1).abs().max() < CLOSE)
    after = "the mask is applied after the softmax, so rows do not sum to 1; mask the scores"
    advice, again = "", "hidden keys get weight again after the softmax"
    inverted = "the mask is inverted: it is True where a query may attend; hide mask == 0"
    if whole:
        inverted = "the mask is inverted: True hides a key, as in torch.nn.MultiheadAttention. It "
        inverted += "does not matter, because a model masks the softmax"
    if torch.allclose(weights, seen.weights):
        unchanged = torch.allclose(masked.output, seen.output)
        advice = "the mask is ignored" if unchanged else after
    elif shown.max() < CLOSE:
        advice = inverted
    elif by_image.max() > HIDDEN > by_image.min():
        advice = "the mask of one image is used for others: it has a row for each image"
    elif by_image.max() > HIDDEN:
        keeps = "hidden keys keep weight: fill their scores with -1e9 before the softmax"
        advice = again if changes else keeps
    elif seen.scores is not None and is_one and (sums * usual).abs().max() > 0.01:
        advice = after
    if advice:
        is_choice = advice is again or (whole and advice is inverted)  # as torch's module
        result: Any = "remark" if is_choice else "failed"
        return Row("mask", result, f"largest hidden weight {hidden.max():.1g}", advice)
    blank = torch.zeros_like(mask) if mask.dtype == torch.bool else torch.full_like(mask, -1e9)
    none = Watch.run(attend, tokens, blank)
    advice = "rows that hide every key become NaN; if there are any, fill with -1e9, not -inf"
    is_wrong = not none.output.isfinite().all()
    return judge("mask", is_wrong, advice, "hidden keys get no weight", is_choice=True)


def _masked_weights(subject: Subject, tokens: Tensor, keep: Tensor, masked: Watch) -> Tensor:
    """Return weights under a mask, which a module may mask itself if its output is right."""
    if isinstance(subject, WholeAttention) and subject.traits.has_softmax:
        with torch.no_grad():
            output, weights = subject.attend(tokens, allowed=keep[:, None])
        if torch.allclose(masked.output, output, atol=CLOSE):
            return weights
    return masked.weights


def _masking(subject: Subject, tokens: Tensor, keep: Tensor, usual: Tensor) -> tuple[Any, Tensor]:
    """Return a function that attends with a mask, and the mask in a form that it takes.

    A model applies masks to the softmax of a whole module, but here the module's own code is tried,
    on the rows that are `usual`.
    """
    if not (
        isinstance(subject, WholeAttention) and subject.mask_name and subject.traits.has_softmax
    ):
        return subject, keep

    def attend(x: Tensor, mask: Tensor, need_weights: bool) -> tuple[Tensor, Tensor]:
        return subject.attend(x, own=mask)

    pairs = keep.expand(B, N, N)
    added = torch.zeros(B, 1, N, N).masked_fill(~pairs[:, None], -1e9)
    taken = []
    for mask in (pairs[:, None], pairs, keep[:, 0], added):
        with contextlib.suppress(Exception):  # the user's code may raise anything
            weights = (Watch.run(attend, tokens, mask).weights * usual).abs()
            taken.append(mask)
            shown = pairs[:, None].expand_as(weights)
            inverts = mask is not added and weights[shown].max() < CLOSE
            if inverts or weights[~shown].max() <= HIDDEN:
                return attend, mask
    return attend, taken[0] if taken else pairs
