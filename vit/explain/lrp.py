"""Layer-wise relevance propagation (LRP): how much each token or pixel contributes to a logit.

Relevance starts as a logit at the output and is passed back layer by layer to the input, without
gain or loss (arXiv 1604.00825). A linear layer z = W x + b passes relevance R on in proportion to
the terms of its sums,

    R_j = Σ_k x_j W_kj / z_k · R_k.

Divided by the values, G = R / z, it is passed on like a gradient, G_j = Σ_k W_kj G_k. So R is the
input times its gradient, for every layer that is linear in its input (with ReLU: piecewise). The
other layers become linear if a factor is held fixed at its value:

    layer           written as              held fixed      rule
    attention       A V                     A, the weights  arXiv 2202.07304, section 4
    layer norm      (x - mean(x)) / σ · γ   σ               arXiv 2402.05602, prop. 3.4
    GELU            x · (GELU(x) / x)       the ratio       arXiv 2402.05602, eq. 9
    gated MLP       g y / 2 + g y / 2       g, then y       arXiv 2402.05602, uniform rule

Group norm and RMS norm are treated like layer norm, and SiLU like GELU. In a convolution, large
terms of both signs cancel, which would make the relevance of pixels noise. There, only terms that
have the sign of their sum get relevance, in proportion: the z+ rule (arXiv 1512.02479), for inputs
and sums of either sign.

`LayerwiseRules` replaces the gradients of these functions while a model runs. The model is then
linear in its input and its biases, so their relevances add up to the logit exactly.

Shapes: B batch, N tokens (prefix, then patches), H heads, L layers, C classes.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vit.model.attention_model import AttentionModel

Function = Callable[..., Tensor]
Parameter = Tensor | None  # weight or bias of a layer, if it has one


def fixed_result(function: Function, *args: Any, **kwargs: Any) -> Tensor:
    """Hold the result fixed: attention weights, the gate of QuickGELU, the root of an RMS norm."""
    return function(*args, **kwargs).detach()


def fixed_weights(sdpa: Function, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Hold the weights of torch's fused attention fixed: only values get relevance."""
    return sdpa(query.detach(), key.detach(), *args, **kwargs)


def fixed_deviation(
    _: Function, x: Tensor, shape: Sequence[int], weight: Parameter, bias: Parameter, eps: float
) -> Tensor:
    """Apply a layer norm whose standard deviation is held fixed."""
    axes = tuple(range(-len(shape), 0))
    variance = x.detach().var(axes, correction=0, keepdim=True)
    y = (x - x.mean(axes, keepdim=True)) * (variance + eps).rsqrt()
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def fixed_group_deviation(
    _: Function, x: Tensor, num_groups: int, weight: Parameter, bias: Parameter, eps: float
) -> Tensor:
    """Apply a group norm whose standard deviations are held fixed."""
    groups, shape = x.unflatten(1, (num_groups, -1)), (num_groups, -1, *[1] * (x.ndim - 2))
    scale, shift = (None if part is None else part.view(shape) for part in (weight, bias))
    return fixed_deviation(_, groups, groups.shape[2:], scale, shift, eps).flatten(1, 2)


def fixed_root(
    normalize: Function, x: Tensor, shape: Sequence[int], weight: Parameter, eps: float | None
) -> Tensor:
    """Apply an RMS norm whose root of the mean square is held fixed."""
    y = fixed_ratio(normalize, x, shape, None, eps)
    return y if weight is None else y * weight


def fixed_ratio(function: Function, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Apply a function with f(0) = 0, as a product with f(x) / x, which is held fixed."""
    nonzero = x.detach().masked_fill(x == 0, torch.finfo(x.dtype).eps)  # f'(0) at x = 0
    return x * (function(nonzero, *args, **kwargs) / nonzero)


def fixed_activation(function: Function, x: Tensor, inplace: bool = False, **kwargs: Any) -> Tensor:
    """Apply an activation as `fixed_ratio` does, never in place, so that `half_each` knows it."""
    y: Any = fixed_ratio(function, x, **kwargs)
    y.is_activation = True
    return y


def half_each(multiply: Function, x: Any, other: Any) -> Tensor:
    """Multiply; in a gated MLP, each of the two factors gets half of the product's relevance."""
    factors = [factor for factor in (x, other) if isinstance(factor, Tensor)]
    is_gate = any(getattr(factor, "is_activation", False) for factor in factors)
    if len(factors) < 2 or not is_gate:
        return multiply(x, other)
    return (x.detach() * other + x * other.detach()) / 2


def terms_of_same_sign(
    convolve: Function, x: Tensor, weight: Tensor, bias: Parameter = None, *args: Any, **kwargs: Any
) -> Tensor:
    """Convolve, with relevance only for terms that have the sign of their sum."""
    y = convolve(x, weight, bias, *args, **kwargs)
    size = convolve(x.abs(), weight.abs(), bias if bias is None else bias.abs(), *args, **kwargs)
    return _SameSign.apply(y, size)


def scaled_terms(
    normalize: Function,
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Parameter,
    bias: Parameter,
    **settings: Any,
) -> Tensor:
    """Apply the batch norm of a model in evaluation mode, as part of the convolution before it."""
    node: Any = x.grad_fn  # of what computed x last, also in place
    if getattr(node, "_forward_cls", None) is not _SameSign:
        return normalize(x, mean, variance, weight, bias, **settings)
    y, size = node.saved_tensors  # the sums of the convolution
    scale = (variance + settings["eps"]).rsqrt() * (1 if weight is None else weight)
    shift = (0 if bias is None else bias) - mean * scale
    scale, shift = (part.to(x.dtype)[:, None, None] for part in (scale, shift))
    return _SameSign.apply(y * scale + shift, size * scale.abs() + shift.abs())


def refuse(*_: Any, **__: Any) -> Tensor:
    """Stop at a function that has no rule and calls others unseen."""
    raise ValueError("relevance cannot be passed through nn.MultiheadAttention of torch")


class _SameSign(torch.autograd.Function):
    """Sums y, with relevance only for terms of their sign; size sums the terms' absolute values.

    The gradient is that of (y + sign(y) size) times a fixed ratio: there, the terms of the other
    sign cancel.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, size: Tensor) -> Tensor:
        ctx.save_for_backward(y, size)
        return y.clone()  # an activation may change it in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        y, size = ctx.saved_tensors
        high = y.abs()
        share = gradients[0] * (high / (high + size).clamp_(min=torch.finfo(y.dtype).tiny))
        return share, share * y.sign()


# torch passes all arguments of a norm, those without a default by position and the others by name.
RULES: dict[Any, Function] = {
    F.scaled_dot_product_attention: fixed_weights,
    F.multi_head_attention_forward: refuse,
    F.softmax: fixed_result,
    torch.softmax: fixed_result,
    Tensor.softmax: fixed_result,
    F.layer_norm: fixed_deviation,
    F.group_norm: fixed_group_deviation,
    F.rms_norm: fixed_root,
    torch.rsqrt: fixed_result,
    Tensor.rsqrt: fixed_result,
    F.gelu: fixed_activation,
    F.silu: fixed_activation,
    Tensor.mul: half_each,
    torch.sigmoid: fixed_result,
    Tensor.sigmoid: fixed_result,
    F.conv2d: terms_of_same_sign,
    F.batch_norm: scaled_terms,
}


class LayerwiseRules(TorchFunctionMode):
    """A context in which gradients, times their inputs, are relevances.

    In the current thread, the functions in `RULES` return the same values, but have other
    gradients. No module, parameter or function is changed. The model must be in evaluation mode.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, by its rule if it has one."""
        call = partial(RULES[func], func) if func in RULES else func
        return call(*args, **(kwargs or {}))


def propagate(
    classify: Callable[[Tensor], Tensor], inputs: Tensor, target: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Classify inputs (B, ...) and distribute one logit of each over its values.

    Args:
        classify: Maps inputs to logits (B, C), such as a model.
        inputs: Such as normalized images.
        target: (B,) int64, the class whose logit is explained; None explains the predicted class.

    Returns:
        Logits (B, C), and the relevance of each input value, in units of the logit: positive for
        the class, negative against it. With what biases contribute, they add up to the logit.
    """
    inputs = inputs.detach().requires_grad_()
    with torch.enable_grad(), LayerwiseRules():
        logits = classify(inputs)
    target = logits.argmax(dim=1) if target is None else target
    return logits.detach(), _relevances(logits, [inputs], target)[0]


def token_relevance(
    model: AttentionModel, images: Tensor, targets: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Classify images and distribute logits over the tokens that enter each block.

    In every layer, the relevances of the tokens and what the biases of this and later layers
    contribute add up to the logit. Position embeddings, class token and registers are inputs of the
    first block. One forward pass serves all targets.

    Args:
        model: In evaluation mode.
        images: (B, channels, height, width), normalized.
        targets: The classes to explain, (B,) int64 each.

    Returns:
        Logits (B, C); for each target, relevances of the tokens, (L, B, N), in units of the logit;
        and L attention weights, (B, H, N, N).
    """
    with torch.no_grad():
        tokens, grid = model.embed(images)
    tokens.requires_grad_()
    with torch.enable_grad(), LayerwiseRules():
        logits, weights, outputs = model.forward_tokens(tokens, grid)
    entering = [tokens, *outputs[:-1]]
    relevances = []
    for number, target in enumerate(targets, start=1):
        layers = _relevances(logits, entering, target, keep_graph=number < len(targets))
        relevances.append(torch.stack([layer.sum(dim=-1) for layer in layers]))
    return logits.detach(), relevances, [layer.detach() for layer in weights]


def _relevances(
    logits: Tensor, values: list[Tensor], target: Tensor, keep_graph: bool = False
) -> list[Tensor]:
    """Return values times the gradients of the target's logit."""
    with torch.enable_grad():
        chosen = logits.gather(1, target[:, None]).sum()
    settings: Any = {"retain_graph": keep_graph, "materialize_grads": True}
    gradients = torch.autograd.grad(chosen, values, **settings)
    return [x.detach() * gradient for x, gradient in zip(values, gradients, strict=True)]


def smooth(maps: Tensor) -> Tensor:
    """Average maps (B, rows, columns) over neighbours, by a Gaussian with a deviation of one patch.

    At the border, the weights of the neighbours that exist sum to 1.
    """
    places = [torch.arange(n, device=maps.device).float() for n in maps.shape[1:]]
    down, across = ((-0.5 * (place[:, None] - place) ** 2).softmax(dim=1) for place in places)
    return down @ maps @ across.T
