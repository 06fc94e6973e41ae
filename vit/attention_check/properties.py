"""Tests of an attention: one function for each property, which returns a row of the report.

Shapes: B batch, N tokens, D token width, H heads, d head width.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from vit.attention_check.mask import check_mask
from vit.attention_check.projections import check_scale, compare_with_torch, match_projections
from vit.attention_check.trial import what_is_lost
from vit.attention_check.watch import CLOSE, GRID, B, D, N, Row, Subject, Watch, judge, trial_heads
from vit.console import shorten
from vit.hardware import autocast
from vit.model.arguments import Attention, FewerArguments
from vit.model.constructors import DROPOUTS, is_whole, takes
from vit.model.copying import copy_module
from vit.model.whole_attention import WholeAttention, build_attention
from vit.seeding import generator


def properties(attention: Attention) -> Iterator[Row]:
    """Check all properties, or those without which the others cannot be checked."""
    no_dropout = isinstance(attention, FewerArguments) or (
        is_whole(attention) and not takes(attention, DROPOUTS)
    )
    heads, drop = trial_heads(attention), 0.0 if no_dropout else 0.5
    subject = build_attention(attention, D, heads, grid=GRID, attn_drop=drop).eval()
    for module in subject.modules():  # as in a model, where zeros would hide every fault
        if isinstance(module, nn.Linear) and not module.weight.any():
            module.reset_parameters()
    tokens = torch.randn(B, N, D, generator=generator(0, "check"))
    yield (repeats := _repeats(subject, tokens))
    if repeats.result == "failed":
        return
    yield _images(subject, tokens)
    lost = what_is_lost(attention, D, heads, GRID)
    yield judge("model files store all of it", bool(lost), lost)
    seen = Watch.run(subject, tokens)
    yield (shapes := _shapes(subject, tokens, seen))
    if shapes.result == "failed":
        return
    yield from _finite(subject, tokens)
    yield _sums(subject, seen)
    pair = match_projections(seen)
    yield check_scale(pair)
    yield (permutation := _permutation(subject, tokens, seen))
    yield _independence(subject, tokens, seen, permutation.result == "passed")
    yield check_mask(subject, tokens, seen)
    yield _dropout(subject, tokens, seen, drop)
    yield _residual(subject, tokens)
    yield _gradients(subject, tokens, seen)
    if pair is not None:
        advice = "queries and keys have the same projection, so scores are symmetric"
        what = "queries and keys have their own projections"
        yield judge(what, pair.is_shared, advice, is_choice=True)
    yield compare_with_torch(subject, seen, pair)


def _repeats(subject: Subject, tokens: Tensor) -> Row:
    given = tokens.clone()
    with torch.no_grad():
        outputs = [subject(given) for _ in range(2)]
    far = (outputs[0] - outputs[1]).abs().max().item()
    advice = "dropout is active in evaluation: use nn.Dropout, or F.dropout(..., self.training)"
    if not torch.equal(given, tokens):
        advice = "the input is changed in place: write x = x + y, not x += y"
    elif not outputs[0].isfinite().all():
        advice = "the output is NaN or infinite: does a row of scores hide every key?"
    is_wrong = far != 0 or not torch.equal(given, tokens)
    return judge("evaluation is deterministic", is_wrong, advice, f"off by {far:.1g}")


def _images(subject: Subject, tokens: Tensor) -> Row:
    with torch.no_grad():
        far = (subject(tokens) - subject(_others(tokens)))[0].abs().max().item()
    advice = "an image attends to the others of its batch: tokens are (batch, tokens, width); "
    advice += "attend along dim 1, torch's modules with batch_first=True"
    return judge("images are independent", not far < CLOSE, advice, f"off by {far:.1g}")


def _others(tokens: Tensor) -> Tensor:
    """Return a batch with the same first image and other images beside it."""
    return torch.cat([tokens[:1], tokens[1:].flip(0, 2) * 2])


def _shapes(subject: Subject, tokens: Tensor, seen: Watch) -> Row:
    """Check the shapes, and that weights of an image do not change where its output does not."""
    expected = B, subject.num_heads, N, N
    advice = f"the weights must be {[*expected]}: batch, heads, queries, keys"
    is_wrong = seen.weights.shape != expected
    if not is_wrong:
        other = Watch.run(subject, _others(tokens))
        pairs = (other.output, seen.output), (other.weights, seen.weights)
        output, weights = (bool((a - b)[0].abs().max() < CLOSE) for a, b in pairs)
        is_wrong = output and not weights
        advice += "; the softmax has all images of one head, then those of the next"
    number = f"output {[*seen.output.shape]}, weights {[*seen.weights.shape]}"
    return judge("shapes", is_wrong, advice, number)


def _finite(subject: Subject, tokens: Tensor) -> Iterator[Row]:
    advice = "subtract the largest score before exp, as torch.softmax does"
    for what, scale, precision in (
        ("finite in float32", 1, torch.float32), ("finite in bfloat16", 1, torch.bfloat16),
        ("finite with large scores", 300, torch.float32),
    ):  # fmt: skip
        try:
            with torch.no_grad(), autocast(tokens.device, precision):
                is_finite = bool(subject(scale * tokens).isfinite().all())
        except Exception as error:  # the user's code may raise anything
            yield Row(what, "failed", "", f"{type(error).__name__}: {shorten(error, 200)}")
        else:
            yield judge(what, not is_finite, advice)


def _sums(subject: Subject, seen: Watch) -> Row:
    axes = {"keys": -1, "queries": -2, "heads": 1, "batch": 0}
    far = {name: (seen.weights.sum(dim) - 1).abs().max().item() for name, dim in axes.items()}
    what, number = "rows of weights sum to 1", f"off by {far['keys']:.1g}"
    axis = next((name for name in axes if far[name] < CLOSE), "")
    if axis == "keys":
        is_wrong = seen.softmaxed not in (0, seen.weights.numel())
        advice = f"there are {seen.softmaxes} softmaxes; one is enough"
        return judge(what, is_wrong, advice, number, is_choice=True)
    if axis:
        advice = f"softmax runs over the {axis} (dim={axes[axis]}); use dim=-1, over the keys"
        advice += ", of weights (queries, keys)" if axis == "queries" else ""
        return Row(what, "failed", number, advice)
    if seen.softmaxed != seen.weights.numel():
        return Row(what, "remark", number, "the weights are not those of one softmax")
    is_shown = isinstance(subject, WholeAttention) and subject.traits.changes
    advice = "something changes the weights after the softmax"
    return Row(what, "remark" if is_shown else "failed", number, advice)


def _permutation(subject: Subject, tokens: Tensor, seen: Watch) -> Row:
    order = torch.randperm(N, generator=generator(1, "check"))
    moved = Watch.run(subject, tokens[:, order])
    far = (moved.output - seen.output[:, order]).abs().max().item()
    convolutions = [m for m in subject.modules() if isinstance(m, nn.modules.conv._ConvNd)]
    convolves = any(max(module.kernel_size) > 1 for module in convolutions)
    is_mixed = not convolves and _mixes_tokens(subject, tokens)
    advice = "the place of a token matters: positions, or an order, as with a causal mask"
    if is_mixed:
        advice = "tokens are mixed between heads: split the width with view(B, N, heads, d), then "
        advice += "transpose(1, 2); a view alone mixes them"
    what = "permuting tokens permutes outputs"
    return judge(what, not far < CLOSE, advice, f"off by {far:.1g}", is_choice=not is_mixed)


def _mixes_tokens(subject: Subject, tokens: Tensor) -> bool:
    """Return whether the last token changes others' scores, or what a token takes of itself."""
    other = torch.cat([tokens[:, :-1], tokens[:, -1:] + 1], dim=1)
    first, second = (Watch.run(subject, x, instead=torch.eye(N)) for x in (tokens, other))
    changes = [(first.output - second.output)[:, :-1]]
    if first.scores is not None and second.scores is not None:
        changes.append((first.scores - second.scores)[..., :-1, :-1].nan_to_num())
    return any(bool(change.abs().max() > CLOSE) for change in changes)


def _independence(subject: Subject, tokens: Tensor, seen: Watch, keeps_tokens: bool) -> Row:
    """Check that a change of one part of a projection changes the weights of one head only.

    Heads that exchange scores or weights are a choice if tokens are kept apart.
    """
    what, heads = "heads are independent", subject.num_heads
    first, *others = seen.weights.unbind(dim=1)
    varies = bool((first[0] - first[1]).abs().max() > CLOSE)
    if others and varies and all(torch.allclose(first, other, atol=CLOSE) for other in others):
        advice = "heads share their layers: [Head()] * n repeats one head; write a comprehension, "
        advice += "[Head() for _ in range(n)]"
        return Row(what, "failed", "all heads have the same weights", advice)
    for number, output in enumerate(seen.projections):
        noise = torch.zeros_like(output)
        part = noise[..., :1]  # the columns of a head may be anywhere
        if output.ndim == 4:  # (B, H, N, d) or (B, N, H, d)
            part = noise[:, 0] if output.shape[1] == heads else noise[:, :, 0]
        part[:] = 1 + torch.rand(part.shape[-1], generator=generator(2, "check"))
        weights = Watch.run(subject, tokens, add={number: noise}).weights
        changed = int(((weights - seen.weights).abs().amax(dim=(0, 2, 3)) > CLOSE).sum())
        if changed:
            effect = f"a part of a projection changes {changed} of {heads}"
            advice = "heads are mixed: each needs its own part of queries and keys, unless heads "
            advice += "exchange scores or weights, as talking heads do"
            return judge(what, changed != 1, advice, effect, is_choice=keeps_tokens)
    return Row(what, "unknown", "", "no projection was seen to change the weights")


def _dropout(subject: Subject, tokens: Tensor, seen: Watch, drop: float) -> Row:
    """Check that dropout acts on the weights, and that those returned are from before it."""
    what = "weights are from before dropout"
    own = subject.call(tokens)[1] if isinstance(subject, WholeAttention) else None
    own = seen.weights if own is None or own.shape != seen.weights.shape else own
    changes = not torch.allclose(own, seen.weights, atol=CLOSE)
    dropping = copy_module(subject).train()
    with torch.no_grad(), Watch() as watch:
        if isinstance(dropping, WholeAttention):  # what the module itself returns
            output, weights = dropping.call(tokens)
        else:
            output, weights = dropping(tokens, need_weights=True)
    lost = not changes and weights is not None and _share_of_zeros(weights, seen.weights) > 0.01
    are_scores = watch.scores is not None and _share_of_zeros(watch.scores, seen.scores) > 0.01
    if drop and torch.allclose(output, seen.output):
        advice = "it takes dropout, but never applies it, so attn_drop_rate has no effect"
        return Row(what, "remark", "", advice)
    advice = "it returns weights after dropout; those before are shown"
    if changes:
        advice = "it returns other weights than it multiplies by the values, which are shown"
    if are_scores:
        advice = "dropout acts on the scores, where 0 is as good as others; apply it to the weights"
    number = "it returns none, so those of its softmax are shown" if weights is None else ""
    if isinstance(subject, WholeAttention) and subject.traits.changes:
        number = "those that multiply the values are shown"
    return judge(what, lost or are_scores or changes, advice, number, is_choice=True)


def _share_of_zeros(numbers: Tensor, before: Tensor | None) -> float:
    """Return the fraction of numbers that are zero and were not."""
    is_lost = numbers == 0
    if before is not None and before.shape == numbers.shape:
        is_lost &= before != 0
    return is_lost.float().mean().item()


def _residual(subject: Subject, tokens: Tensor) -> Row:
    """Check that without attention nothing of the tokens is left."""
    what = "output has no residual or norm"
    muted = torch.zeros(N, N)
    first, other = (Watch.run(subject, x, instead=muted) for x in (tokens, tokens.flip(0) * 2))
    if not first.softmaxes:
        return Row(what, "unknown", "", "it has no softmax to mute")
    far = (first.output - other.output).abs().max().item()
    if far > CLOSE:
        advice = "the output contains the input, which an encoder block adds again, or weights get "
        advice += "a bias after the softmax"
        return Row(what, "remark", f"without attention, it changes by {far:.2g}", advice)
    output = Watch.run(subject, 10 * tokens).output
    normal = output.mean(-1).abs().max() < CLOSE and (output.std(-1, False) - 1).abs().max() < 0.01
    advice = "the output is normalized: an encoder block normalizes its input instead"
    return judge(what, bool(normal), advice, is_choice=True)


def _gradients(subject: Subject, tokens: Tensor, seen: Watch) -> Row:
    """Check that all weights learn, and that no others are used."""
    what, ours = "all weights get gradients", {*map(id, subject.parameters())}
    if any(id(matrix) not in ours for matrix in seen.matrices if isinstance(matrix, nn.Parameter)):
        advice = "a projection is no part of the module, so it never learns: keep layers in an "
        return Row(what, "failed", "", advice + "attribute or an nn.ModuleList, not in a list")
    learner = copy_module(subject)
    before = dict(learner.named_parameters())
    # With both signs, so that some tokens pass any activation.
    learner(torch.cat([tokens, -tokens]).requires_grad_()).square().sum().backward()
    # Few tokens use few rows of a table. The bias of keys changes all scores of a row alike, so it
    # never has a gradient.
    projections = {id(matrix) for matrix in seen.matrices}
    idle = []
    for (name, matrix), weight in zip(subject.named_parameters(), before.values(), strict=True):
        grad, learns = weight.grad, weight.grad is not None or not weight.requires_grad
        if grad is not None and weight.ndim == 2:
            learns = bool(grad.any(dim=1).all() if id(matrix) in projections else grad.any())
        if not learns:
            idle.append(name.removeprefix("module."))
    advice = f"{', '.join(idle)} get no gradient, or only a part: it is not used, or detached"
    is_constant = torch.equal(Watch.run(subject, tokens * tokens.flip(1)).weights, seen.weights)
    return judge(what, bool(idle), advice, is_choice=is_constant)  # as in uniform attention
