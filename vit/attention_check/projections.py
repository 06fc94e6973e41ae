"""What is computed from the projections of an attention: scale of the scores, and output.

Shapes: B batch, N tokens, D token width, H heads, d head width.
"""

import itertools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit.attention_check.watch import CLOSE, D, Row, Subject, Watch, judge


@dataclass(frozen=True)
class Pair:
    """Queries and keys (B, H, N, d), and what their product is divided by."""

    query: Tensor
    key: Tensor
    is_shared: bool  # whether both are the same projection
    divisor: float


def match_projections(seen: Watch) -> Pair | None:
    """Find two projections whose product, up to a factor, are the scores of the last softmax."""
    if seen.scores is None:
        return None
    usable = seen.scores.isfinite() & (seen.scores > -1e4)
    pairs = itertools.product(seen.by_head(seen.scores.shape[1]).items(), repeat=2)
    # Copies of a layer give the same numbers, so two projections go before one for both.
    for (a, query), (b, key) in sorted(pairs, key=lambda pair: pair[0][0] == pair[1][0]):
        if query.shape != key.shape or query.shape[:2] != seen.scores.shape[:2]:
            continue
        product, scores = (query @ key.transpose(-2, -1))[usable], seen.scores[usable]
        factor = ((product * scores).sum() / product.square().sum()).item()
        if (scores - factor * product).abs().max() < 1e-3 * scores.abs().max():
            is_shared = a[1] == b[1] and seen.matrices[a[0]] is seen.matrices[b[0]]
            return Pair(query, key, is_shared, 1 / factor)
    return None


def check_scale(pair: Pair | None) -> Row:
    """Compare the scale of the scores with the root of a head's width."""
    what = "scores are divided by √d"
    if pair is None:
        advice = (
            "the scores were not recognized as a product of two projections, so nothing is known"
        )
        return Row(what, "unknown", "", advice)
    width, number = pair.query.shape[-1], f"divided by {pair.divisor:.2f}"
    for value, name in (
        (math.sqrt(width), f" = √{width}"), (width, ", the width of a head, not its root"),
        (math.sqrt(D), f" = √{D}, the model's width"), (1.0, ", so not at all"),
    ):  # fmt: skip
        if math.isclose(pair.divisor, value, rel_tol=1e-2):
            number += name
            break
    is_wrong = not math.isclose(pair.divisor, math.sqrt(width), rel_tol=1e-2)
    advice = f"the paper divides by √{width}, the root of the width of a head"
    return judge(what, is_wrong, advice, number, is_choice=True)


def compare_with_torch(subject: Subject, seen: Watch, pair: Pair | None) -> Row:
    """Compare the output with that of torch's fused attention for the same projections."""
    what = "equals torch's attention"
    if pair is None:
        return Row(what, "unknown", "", "its queries and keys were not found")
    last = [module for module in subject.modules() if isinstance(module, nn.Linear)][-1:]
    # The output itself, if it is the same for all tokens, would pass as values.
    final = [number for number, x in enumerate(seen.projections) if torch.equal(x, seen.output)]
    far = alone = math.inf  # alone: of heads without an output projection
    values = seen.by_head(pair.query.shape[1])
    for value in (part for (number, _), part in values.items() if number not in final):
        heads = F.scaled_dot_product_attention(pair.query, pair.key, value)
        merged = heads.transpose(1, 2).flatten(2)
        with torch.no_grad():
            outputs = [merged] + [x(merged) for x in last if x.in_features == merged.shape[-1]]
        same = [(output, seen.output) for output in outputs if output.shape == seen.output.shape]
        same += [(merged, seen.inputs[n]) for n in final if seen.inputs[n].shape == merged.shape]
        far = min([far, *((one - other).abs().max().item() for one, other in same)])
        if merged.shape == seen.output.shape and pair.query.shape[1] > 1:
            alone = min(alone, (merged - seen.output).abs().max().item())
    if far == math.inf:
        return Row(what, "unknown", "", "its values were not found")
    advice = "it computes something else than softmax(QKᵀ / √d) V of its projections"
    if alone < CLOSE:
        advice = "its heads are joined without an output projection, nn.Linear(dim, dim)"
    return judge(
        what, not far < CLOSE or alone < CLOSE, advice, f"off by {far:.2g}", is_choice=True
    )
