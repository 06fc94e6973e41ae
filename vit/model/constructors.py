"""What the constructors of whole attention modules take, as people write them."""

import inspect
import math
from typing import Any, TypeGuard

from torch import nn

from vit.model.arguments import accepted_arguments, is_required
from vit.settings import require

# What constructors call their arguments.
WIDTHS = (
    "dim", "embed_dim", "d_model", "input_dim", "input_size", "hidden_size", "n_embd", "d_in",
    "d_out", "hidden_dim", "emb_dim", "embedding_dim", "model_dim", "output_dim", "out_dim",
    "embed_size", "emb_size", "num_hiddens", "n_embed", "d", "hid_dim", "d_embed", "in_dim",
    "embedding_size", "emb", "feats", "num_units",
)  # fmt: skip
HEADS = (
    "num_heads", "heads", "n_heads", "nhead", "n_head", "num_attention_heads", "n_attention_heads",
    "h", "head",
)  # fmt: skip
HEAD_WIDTHS = ("head_dim", "dim_head", "head_size", "d_head", "d_k", "d_v")
DROPOUTS = (
    "dropout", "dropout_rate", "dropout_p", "attn_drop", "attn_dropout", "attn_pdrop",
    "resid_pdrop", "resid_dropout", "attention_probs_dropout_prob", "hidden_dropout_prob",
    "drop_rate",
)  # fmt: skip
LENGTHS = ("context_length", "block_size", "seq_len", "max_len", "max_seq_len", "num_tokens")
KNOWN = f"{', '.join(WIDTHS[:3])} (width), {HEADS[0]}, {HEAD_WIDTHS[0]}, dropout or {LENGTHS[0]}"
CONFIGS = ("config", "cfg", "args")  # an object or a dictionary with all of these
# Fields of `ModelConfig`, their defaults, and what constructors call them if they take them; rates
# of dropout have other names in `MultiHeadSelfAttention`.
OPTIONS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "rel_pos": ("none", ()), "qk_norm": (False, ()), "qkv_bias": (True, ()),
    "proj_drop_rate": (0.0, ()), "attn_drop_rate": (0.0, DROPOUTS), "head_dim": (None, HEAD_WIDTHS),
}  # fmt: skip
RATES = {"attn_drop": "attn_drop_rate", "proj_drop": "proj_drop_rate"}


class Fields(dict[str, Any]):
    """A config whose values constructors read as attributes or as keys."""

    def __missing__(self, name: str) -> Any:
        raise KeyError(self.unknown(name))

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(self.unknown(name))
        return self[name]

    @staticmethod
    def unknown(name: str) -> str:
        """Say what to do about a field that has no value here."""
        return f"{name} is not known in a config; read it with a default, or call it {KNOWN}"


def is_whole(attention: Any) -> TypeGuard[type[nn.Module]]:
    """Return whether an attention is a whole module's class, not a function or class of a head.

    The latter's constructor takes num_heads and head_dim, and no width; its forward, three tensors.
    """
    if not (isinstance(attention, type) and issubclass(attention, nn.Module)):
        return False
    names = {*inspect.signature(attention).parameters}
    of_heads = {"num_heads", "head_dim"} <= names and names.isdisjoint(WIDTHS)
    return not of_heads or len(inspect.signature(attention.forward).parameters) < 4  # with self


def takes(attention: type, names: tuple[str, ...]) -> bool:
    """Return whether the constructor of a whole module has an argument of one of the names."""
    return bool(accepted_arguments(attention, dict.fromkeys((*names, *CONFIGS))))


def constructor_arguments(
    attention: type,
    dim: int,
    num_heads: int,
    head_dim: int,
    attn_drop: float,
    place: dict[str, Any],
) -> dict[str, Any]:
    """Return what the constructor of a whole module takes, by its own names.

    Raises:
        ValueError: It takes something unknown, or no number of heads.
    """
    name = attention.__name__
    allowed = f"1 with {name}, whose constructor takes no number of heads ({', '.join(HEADS)})"
    require(num_heads == 1 or takes(attention, HEADS), "num_heads", num_heads, allowed)
    num_tokens = place["num_prefix_tokens"] + math.prod(place["grid"])
    values: dict[str, Any] = {"batch_first": True} | place
    for names, value in (
        (WIDTHS, dim), (HEADS, num_heads), (HEAD_WIDTHS, head_dim), (DROPOUTS, attn_drop),
        (LENGTHS, num_tokens),
    ):  # fmt: skip
        values |= dict.fromkeys(names, value)
    values |= dict.fromkeys(CONFIGS, Fields(values, bias=True, qkv_bias=True))
    for parameter in inspect.signature(attention).parameters.values():
        if parameter.name not in values and is_required(parameter):
            raise ValueError(
                f"attention: the constructor of {name} takes {parameter.name}, which is not "
                f"known here; give it a default, or call it {KNOWN}"
            )
    return accepted_arguments(attention, values)


def refuse_options(attention: type, options: dict[str, Any], group: str = "") -> None:
    """Raise a ValueError if fields of `ModelConfig` would have no effect on a whole module."""
    for key, (usual, names) in OPTIONS.items():
        value = options.get(key, usual)
        fits = value == usual or (names != () and takes(attention, names))
        allowed = f"{usual} with {attention.__name__}, a whole module that does not take it"
        require(fits, f"{group}{key}", value, allowed)
