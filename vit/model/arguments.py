"""What attention may be, a function or class of a head or a module, and its arguments."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from vit.model.dropout import Dropout

# A function like `scaled_dot_product_attention`, a module class whose forward is one and whose
# constructor takes num_heads and head_dim, or the class of a whole module, see
# `vit.model.whole_attention`. Any of these may take the arguments in `PLACE` too.
Attention = Callable[..., tuple[Tensor, Tensor]] | type[nn.Module]
# num_prefix_tokens tokens come first, then the patches of the grid, row by row.
PLACE = ("grid", "num_prefix_tokens")
MASKS = ("mask", "attn_mask", "attention_mask")  # what masks are called
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def accepted_arguments(function: Callable[..., Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return the values that a function or a constructor has arguments for."""
    parameters = inspect.signature(function).parameters
    names = {name for name, parameter in parameters.items() if parameter.kind not in VARIADIC}
    return {name: value for name, value in values.items() if name in names}


def is_required(parameter: inspect.Parameter) -> bool:
    """Return whether a call must pass a parameter."""
    return parameter.default is parameter.empty and parameter.kind not in VARIADIC


def with_all_arguments(attention: Attention) -> Attention:
    """Return an attention; a function of a head without a mask or dropout is wrapped."""
    if isinstance(attention, type) and not issubclass(attention, nn.Module):
        raise ValueError(f"attention: the class {attention.__name__} is not a torch.nn.Module")
    if isinstance(attention, type | FewerArguments):
        return attention
    if isinstance(attention, nn.Module):
        raise ValueError(f"attention: pass the class {type(attention).__name__}, not an instance")
    if not hasattr(attention, "__code__"):
        kind = type(attention).__name__
        raise ValueError(f"attention: pass a function or a class, not an object of {kind}")
    parameters = inspect.signature(attention).parameters
    names = [name for name in parameters if name not in PLACE]
    last = parameters[names[4]] if len(names) > 4 else None
    # A number as default is that of a rate, as in torch's function.
    is_rate = last is not None and isinstance(last.default, float)
    if last is not None and not is_rate and (is_required(last) or "drop" in last.name):
        return attention
    return FewerArguments(attention, next((name for name in names[3:] if name in MASKS), None))


class FewerArguments:
    """A function of a head without dropout, and perhaps without a mask."""

    def __init__(self, function: Callable[..., Any], mask_name: str | None) -> None:
        self.function, self.mask_name = function, mask_name
        self.__code__, self.__module__ = function.__code__, function.__module__
        self.__signature__ = inspect.signature(function)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: Dropout,
        **place: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Attend like `scaled_dot_product_attention`; ValueError if the dropout rate is above 0."""
        name = self.function.__name__
        if getattr(dropout, "p", 0):
            raise ValueError(f"attn_drop_rate must be 0 with {name}, which takes no dropout module")
        if mask is not None and self.mask_name is None:
            raise ValueError(f"{name} takes no mask, so tokens cannot be hidden from it")
        if self.mask_name is not None:
            place[self.mask_name] = mask
        return self.function(query, key, value, **place)

    def __reduce__(self) -> tuple[Any, ...]:
        """Let pickle call the constructor, because it cannot store `__code__`."""
        return FewerArguments, (self.function, self.mask_name)
