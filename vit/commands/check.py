"""`eval.py FILE:NAME check`: what is wrong with an attention, one property a row.

Shapes: B batch, N tokens, D token width, H heads, d head width.
"""

import copy
import itertools
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vit.commands.config import CheckConfig
from vit.console import printable, say, shorten
from vit.files import write_json
from vit.hardware import autocast
from vit.model.attention import Attention, MultiHeadSelfAttention
from vit.model.variants import (
    FewerArguments,
    attention_of,
    load_attention,
    place_of,
    with_all_arguments,
)
from vit.model.whole_attention import SOFTMAXES, WholeAttention, has_heads, is_whole
from vit.seeding import generator

B, N, D, H = 3, 10, 64, 4  # all different, so that no axis is taken for another
CLOSE = 1e-4
Subject = MultiHeadSelfAttention | WholeAttention
MARKS = {"passed": "✓", "failed": "✗", "remark": "!", "unknown": "–"}


@dataclass(frozen=True)
class Row:
    """A property: what was found, a number, and if it is not as usual, a sentence.

    A Vision Transformer needs what "failed"; a "remark" may be a choice; "unknown" could not be
    measured.
    """

    property: str
    result: Literal["passed", "failed", "remark", "unknown"]
    number: str = ""
    advice: str = ""


def run(name: str, options: CheckConfig) -> None:
    """Check an attention and print a row for each property.

    Raises:
        ValueError: There is no such attention.
        SystemExit: With code 1, if a property fails that a Vision Transformer needs.
    """
    load_attention(name)
    rows = check(attention_of(name))
    say(f"{printable(name)}, tried with {B} images of {N} tokens of width {D}\n")
    for row in rows:
        number = f": {row.number}" if row.number else ""
        say(f"{MARKS[row.result]} {row.property}{number}")
        if row.advice:
            say(f"    {row.advice}")
    if options.json:
        write_json(Path(options.json), [asdict(row) for row in rows])
    if any(row.result == "failed" for row in rows):
        raise SystemExit(1)


def check(attention: Attention, with_cost: bool = True) -> list[Row]:
    """Check an attention: a function or a class of a head, or a whole module's class.

    Returns:
        A row for each property; with_cost also time and memory.
    """
    attention = with_all_arguments(attention)
    heads = 1 if is_whole(attention) and not has_heads(attention) else H
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            subject = build(attention, D, heads, N).eval()
            tokens = torch.randn(B, N, D, generator=generator(0, "check"))
            seen = Watch.run(subject, tokens)
            rows = [*_shapes(subject, tokens, seen)]
            if rows[0].result == "passed":
                rows += [*_properties(attention, subject, tokens, seen)]
                rows += [_cost(attention, subject)] if with_cost else []
    except Exception as error:  # whatever their code raises
        reason = f"{type(error).__name__}: {shorten(error, 300)} ({place_of(error, attention)})"
        return [Row("can be called", "failed", "", reason)]
    return rows


def build(attention: Attention, dim: int, heads: int, tokens: int, drop: float = 0.0) -> Subject:
    """Build the module that stands in an encoder block."""
    if is_whole(attention):
        return WholeAttention(attention, dim, heads, tokens, dropout=drop)
    module = MultiHeadSelfAttention(dim, heads, attn_drop=drop, attention=attention)
    module.proj.reset_parameters()
    return module


class Watch(TorchFunctionMode):
    """Records the linear layers and the softmax of an attention, and may change them.

    Args:
        add: Added to the output of a linear layer, by its number.
        mute: Whether the softmax returns zeros.
    """

    def __init__(self, add: dict[int, Tensor] | None = None, mute: bool = False) -> None:
        super().__init__()
        self.add, self.mute = add or {}, mute
        self.linears: list[Tensor] = []
        self.scores: Tensor | None = None
        self.softmaxes = 0
        self.output = self.weights = torch.empty(0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        result = func(*args, **(kwargs or {}))
        if func is F.linear:
            result = result + self.add.get(len(self.linears), 0)
            self.linears.append(result)
        if func in SOFTMAXES and result.shape[-2:] == (N, N):
            self.scores, self.softmaxes = args[0].view(B, -1, N, N), self.softmaxes + 1
            return torch.zeros_like(result) if self.mute else result
        return result

    @classmethod
    def run(cls, subject: Subject, tokens: Tensor, mask: Any = None, **changes: Any) -> "Watch":
        """Attend to tokens (B, N, D) and return what was seen."""
        with torch.no_grad(), cls(**changes) as watch:
            watch.output, watch.weights = subject(tokens, mask, need_weights=True)
        return watch


def _judge(
    what: str, is_right: bool, number: str = "", advice: str = "", is_choice: bool = False
) -> Row:
    """Return a row that passes or not, and gives advice only if not."""
    if is_right:
        return Row(what, "passed", number)
    return Row(what, "remark" if is_choice else "failed", number, advice)


def _shapes(subject: Subject, tokens: Tensor, seen: Watch) -> Iterator[Row]:
    """Check shapes, and that numbers are finite in two precisions and with large scores."""
    expected = B, subject.num_heads, N, N
    advice = f"the weights must be {[*expected]}: batch, heads, queries, keys"
    shapes = f"output {[*seen.output.shape]}, weights {[*seen.weights.shape]}"
    yield _judge("shapes", seen.weights.shape == expected, shapes, advice)
    advice = "subtract the largest score before exp, as torch.softmax does"
    for what, scale, precision in (
        ("finite in float32", 1, torch.float32), ("finite in bfloat16", 1, torch.bfloat16),
        ("finite with large scores", 300, torch.float32),
    ):  # fmt: skip
        with torch.no_grad(), autocast(tokens.device, precision):
            is_finite = bool(subject(scale * tokens).isfinite().all())
        yield _judge(what, is_finite, advice=advice)


def _properties(
    attention: Attention, subject: Subject, tokens: Tensor, seen: Watch
) -> Iterator[Row]:
    """Check everything but shapes and cost."""
    yield _rows(seen)
    pair = _match(seen, subject.num_heads)
    yield _scale(pair)
    yield _permutation(subject, tokens, seen)
    yield _independence(subject, tokens, seen)
    yield _mask(subject, tokens, seen)
    yield from _dropout(attention, subject, tokens)
    yield _residual(subject, tokens)
    yield from _gradients(subject, tokens, pair)
    yield _as_torch(subject, tokens, seen, pair)


def _rows(seen: Watch) -> Row:
    """Check that the rows of weights sum to 1 over the keys."""
    weights, what = seen.weights, "rows of weights sum to 1"
    far = {
        name: (weights.sum(dim=dim) - 1).abs().max().item()
        for name, dim in (("keys", -1), ("queries", -2), ("heads", 1), ("batch", 0))
    }
    number = f"off by {far['keys']:.1g}"
    if seen.softmaxes not in (0, 1, weights.shape[1]) and far["keys"] < CLOSE:
        return Row(what, "remark", number, f"there are {seen.softmaxes} softmaxes; one is enough")
    if far["keys"] < CLOSE:
        return Row(what, "passed", number)
    for name, dim in (("queries", -2), ("heads", 1), ("batch", 0)):
        if far[name] < CLOSE:
            advice = f"softmax runs over the {name} (dim={dim}); use dim=-1, over the keys"
            return Row(what, "failed", number, advice)
    if seen.softmaxes != 1:
        return Row(what, "remark", number, "the weights are not those of one softmax")
    return Row(what, "failed", number, "something changes the weights after the softmax")


@dataclass(frozen=True)
class Pair:
    """Queries and keys (B, H, N, d), where they come from, and what their product is divided by."""

    query: Tensor
    key: Tensor
    numbers: tuple[tuple[int, int], tuple[int, int]]  # of a linear layer, and of a third of it
    divisor: float


def _match(seen: Watch, heads: int) -> Pair | None:
    """Find the two projections whose product, up to a factor, are the scores."""
    if seen.scores is None or seen.scores.shape[1] != heads:
        return None
    parts: dict[tuple[int, int], Tensor] = {}
    for number, output in enumerate(seen.linears):
        if output.ndim != 3 or output.shape[-1] % heads:
            continue
        output = output if output.shape[0] == B else output.transpose(0, 1)
        parts[number, 0] = output.unflatten(-1, (heads, -1)).transpose(1, 2)
        if output.shape[-1] % (3 * heads) == 0:
            for third, part in enumerate(output.chunk(3, dim=-1)):
                parts[number, third + 1] = part.unflatten(-1, (heads, -1)).transpose(1, 2)
    usable = seen.scores.isfinite() & (seen.scores > -1e4)
    for (a, query), (b, key) in itertools.product(parts.items(), repeat=2):
        if query.shape != key.shape:
            continue
        product, scores = (query @ key.transpose(-2, -1))[usable], seen.scores[usable]
        factor = ((product * scores).sum() / product.square().sum()).item()
        if (scores - factor * product).abs().max() < 1e-3 * scores.abs().max():
            return Pair(query, key, (a, b), 1 / factor)
    return None


def _scale(pair: Pair | None) -> Row:
    """Compare the scale of the scores with the root of a head's width."""
    what = "scores are divided by √d"
    if pair is None:
        advice = "the scores are no scaled product of two projections, split into heads"
        return Row(what, "unknown", "", advice)
    width, divisor = pair.query.shape[-1], pair.divisor
    if math.isclose(divisor, math.sqrt(width), rel_tol=1e-2):
        return Row(what, "passed", f"{divisor:.2f} = √{width}")
    usual = f"the paper divides by √{width}, the width of a head"
    if math.isclose(divisor, 1, rel_tol=1e-2):
        return Row(what, "remark", "not divided", usual)
    if math.isclose(divisor, width, rel_tol=1e-2):
        advice = f"the paper divides by √{width}: take the square root of the width of a head"
        return Row(what, "remark", f"divided by {divisor:.2f}, the width of a head", advice)
    root = f" = √{D}, the model's width" if math.isclose(divisor**2, D, rel_tol=1e-2) else ""
    return Row(what, "remark", f"divided by {divisor:.2f}{root}", usual)


def _permutation(subject: Subject, tokens: Tensor, seen: Watch) -> Row:
    """Check that permuting the tokens permutes the outputs."""
    order = torch.randperm(N, generator=generator(1, "check"))
    moved = Watch.run(subject, tokens[:, order])
    far = (moved.output - seen.output[:, order]).abs().max().item()
    advice = "tokens are mixed between heads: split the width with view(B, N, heads, d), then "
    advice += "transpose(1, 2); a view alone mixes them"
    is_causal = bool((seen.weights.triu(1).abs() < 1e-6).all())
    if is_causal:
        advice = "tokens attend only to those before them: patches of an image have no such order"
    what = "permuting tokens permutes outputs"
    return _judge(what, far < CLOSE, f"off by {far:.1g}", advice, is_causal)


def _independence(subject: Subject, tokens: Tensor, seen: Watch) -> Row:
    """Check that a part of a projection, the width of a head, changes the weights of one head."""
    what, heads = "heads are independent", subject.num_heads
    for number, output in enumerate(seen.linears):
        noise, width = torch.zeros_like(output), D // heads
        noise[..., :width] = 1 + torch.rand(width, generator=generator(2, "check"))
        weights = Watch.run(subject, tokens, add={number: noise}).weights
        changed = int(((weights - seen.weights).abs().amax(dim=(0, 2, 3)) > CLOSE).sum())
        if changed:
            effect = f"the first {width} columns of a projection change {changed} of {heads}"
            advice = "heads are mixed: each needs its own part of queries and keys"
            return _judge(what, changed == 1, effect, advice)
    return Row(what, "unknown", "", "no projection changes the weights")


def _mask(subject: Subject, tokens: Tensor, seen: Watch) -> Row:
    """Check that keys that a mask hides get no weight, for each image and with no key at all."""
    what = "mask"
    if isinstance(subject, WholeAttention) and subject.mask_name is None:
        return Row(what, "passed", "taken by no argument, so it is applied to the softmax")
    keep = torch.ones(B, 1, N, dtype=torch.bool)
    for image in range(B):
        keep[image, 0, image : image + 3] = False
    masked = Watch.run(subject, tokens, keep)
    weights = masked.weights
    hidden, shown = (weights.masked_fill(~m[:, None], 0).abs() for m in (~keep, keep))
    by_image = hidden.amax(dim=(1, 2, 3))
    number = f"largest hidden weight {hidden.max():.1g}"
    advice = ""
    after = "the mask is applied after the softmax, so rows do not sum to 1; mask the scores"
    if torch.allclose(weights, seen.weights):
        unchanged = torch.allclose(masked.output, seen.output)
        advice = "the mask is ignored" if unchanged else after
    elif shown.max() < CLOSE:
        advice = "the mask is inverted: it is True where a query may attend; hide mask == 0"
    elif by_image.max() > CLOSE > by_image.min():
        advice = "the mask of one image is used for others: it has a row for each image"
    elif by_image.max() > CLOSE:
        advice = "hidden keys keep weight: fill their scores with -inf before the softmax"
    elif seen.scores is not None and (weights - seen.weights).sum(dim=-1).abs().max() > 0.01:
        advice = after
    if advice:
        return Row(what, "failed", number, advice)
    none = Watch.run(subject, tokens, torch.zeros(N, N, dtype=torch.bool))
    if not none.output.isfinite().all():
        advice = "rows that hide every key become NaN; if there are any, fill with -1e9, not -inf"
        return Row(what, "remark", "keys are hidden", advice)
    return Row(what, "passed", number)


def _dropout(attention: Attention, subject: Subject, tokens: Tensor) -> Iterator[Row]:
    """Check that evaluation is deterministic, and that weights are from before dropout."""
    drop = 0.0 if isinstance(attention, FewerArguments) else 0.5
    dropping = build(attention, D, subject.num_heads, N, drop).train()
    with torch.no_grad():
        far = (subject(tokens) - subject(tokens)).abs().max().item()
        if isinstance(dropping, WholeAttention):  # what the module itself returns
            mask = {dropping.mask_name: None} if dropping.mask_name else {}
            result = dropping.module(*[tokens] * dropping.inputs, **mask)
        else:
            result = dropping(tokens, need_weights=True)
    advice = "dropout is active in evaluation: use nn.Dropout, or F.dropout(..., self.training)"
    yield _judge("evaluation is deterministic", far == 0, f"off by {far:.1g}", advice)
    weights = result[1] if isinstance(result, tuple) and isinstance(result[1], Tensor) else None
    number = "it returns none, so those of its softmax are shown" if weights is None else ""
    is_before = weights is None or bool((weights == 0).float().mean() < 0.1)
    advice = "it returns weights after dropout; those before are shown"
    yield _judge("weights are from before dropout", is_before, number, advice, is_choice=True)


def _residual(subject: Subject, tokens: Tensor) -> Row:
    """Check that without attention nothing of the tokens is left."""
    what = "output has no residual or norm"
    first, other = (Watch.run(subject, x, mute=True) for x in (tokens, tokens.flip(0) * 2))
    if first.scores is None:
        return Row(what, "unknown", "", "it has no softmax to mute")
    far = (first.output - other.output).abs().max().item()
    if far > CLOSE:
        advice = "the output contains the input: an encoder block adds it again"
        return Row(what, "remark", f"{far:.2g} without attention", advice)
    output = Watch.run(subject, 10 * tokens).output
    normal = output.mean(-1).abs().max() < CLOSE and (output.std(-1, False) - 1).abs().max() < 0.01
    advice = "the output is normalized: an encoder block normalizes its input instead"
    return _judge(what, not normal, advice=advice, is_choice=True)


def _gradients(subject: Subject, tokens: Tensor, pair: Pair | None) -> Iterator[Row]:
    """Check that all weights learn, and that queries and keys have projections of their own."""
    learner = copy.deepcopy(subject)
    learner(tokens).square().sum().backward()
    idle = [
        name.removeprefix("module.")
        for name, weight in learner.named_parameters()
        # The bias of keys changes all scores of a row alike, so it never has a gradient.
        if weight.grad is None or (weight.ndim > 1 and not weight.grad.abs().max() > 0)
    ]
    advice = f"{', '.join(idle)} get no gradient: they are not used, or detached"
    yield _judge("all weights get gradients", not idle, advice=advice)
    if pair is not None:
        advice = "queries and keys have the same projection, so scores are symmetric"
        what, differ = "queries and keys have their own projections", len({*pair.numbers}) == 2
        yield _judge(what, differ, advice=advice, is_choice=True)


def _as_torch(subject: Subject, tokens: Tensor, seen: Watch, pair: Pair | None) -> Row:
    """Compare the output with that of torch's fused attention for the same projections."""
    what = "equals torch's attention"
    if pair is None:
        return Row(what, "unknown", "", "its queries and keys were not found")
    (query, third), (key, _) = pair.numbers
    if third:  # of one layer for queries, keys and values
        candidates = [seen.linears[query].chunk(3, dim=-1)[2]]
    else:
        candidates = [part for n, part in enumerate(seen.linears) if n not in (query, key)]
    last = [module for module in subject.modules() if isinstance(module, nn.Linear)][-1]
    differences = []
    for values in candidates:
        values = values if values.shape[0] == B else values.transpose(0, 1)
        value = values.unflatten(-1, (subject.num_heads, -1)).transpose(1, 2)
        heads = F.scaled_dot_product_attention(pair.query, pair.key, value)
        with torch.no_grad():
            merged = heads.transpose(1, 2).flatten(2)
            outputs = [merged, last(merged)] if last.in_features == merged.shape[-1] else [merged]
        differences += [(x - seen.output).abs().max() for x in outputs if x.shape == tokens.shape]
    far = float(min(differences, default=math.inf))
    advice = "it computes something else than softmax(QKᵀ / √d) V; the rows above say what"
    return _judge(what, far < CLOSE, f"off by {far:.2g}", advice, is_choice=True)


def _cost(attention: Attention, subject: Subject) -> Row:
    """Compare time and memory of a training step with ours, for 64 images of 65 tokens."""
    heads = subject.num_heads
    modules = [build(attention, 192, heads, 65), MultiHeadSelfAttention(192, heads)]
    tokens = torch.randn(64, 65, 192, generator=generator(3, "check"))
    ratios = []
    for _ in range(3):
        seconds = []
        for module in modules:
            begin = time.perf_counter()
            module(tokens).sum().backward()
            seconds.append(time.perf_counter() - begin)
        ratios.append(seconds[0] / seconds[1])
    sizes = [_saved_bytes(module, tokens) for module in modules]
    number = f"{statistics.median(ratios):.1f} and {sizes[0] / sizes[1]:.1f} times ours"
    return Row("time and memory of a training step", "passed", number)


def _saved_bytes(module: nn.Module, tokens: Tensor) -> int:
    sizes: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(tokens)
    return sum(sizes.values())
