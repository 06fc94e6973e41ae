"""Settings of the model; imported without torch."""

import dataclasses
import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, JsonValue

from vit import settings

PYTHON = {"True": True, "False": False, "None": None}  # words that JSON spells otherwise
PATCH_SIZE = 4  # of a model trained from scratch, unless set
TIMM = "timm:"  # before the name of a timm model
# Fields of ModelConfig that VisionTransformer does not take.
NOT_OF_VIT = ("name", "timm_args", "pretrained")
# Positions that lose their meaning where attention splits or normalizes queries and keys.
UNFIT = ("rope", "differential"), ("relative", "differential"), ("relative", "cosine")


def _numbers(value: Any) -> Any:
    """Turn text in nested lists and dictionaries into the numbers and switches it means."""
    if isinstance(value, dict):
        return {key: _numbers(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_numbers(part) for part in value]
    try:
        if isinstance(value, str):
            value = PYTHON[value] if value in PYTHON else json.loads(value)
    except ValueError:
        return value
    if isinstance(value, int | float):  # which may be the length of a list
        fits = abs(value) <= settings.LARGE
        settings.require(fits, "model.timm_args", value, f"at most {settings.LARGE:,}")
    return value


def _named(attention: Any) -> Any:
    """Refuse a function or class, which a file of a run could not name."""
    if callable(attention):
        name = getattr(attention, "__name__", "NAME")
        allowed = f"a file and {name}, such as attention.ipynb:{name}; save the file first"
        settings.require(False, "model.attention", attention, allowed)
    return attention


# Of a function of which this project knows neither the names nor the types of arguments.
Arguments = Annotated[dict[str, JsonValue], BeforeValidator(_numbers)]


@settings.group("model")
class ModelConfig:
    """The model: our Vision Transformer, with timm's parameter names, or any timm model.

    The defaults are the paper's (arXiv 2010.11929), with ViT-Ti's width and small patches.

    Attributes:
        name: vit is ours, which the other keys describe; timm:resnet18 is timm's (docs/timm.md)
        timm_args: with name=timm:..., arguments of the model, such as {depth: 4, embed_dim: 96}
        pretrained: weights to start from: timm:NAME (downloaded, e.g.
            timm:vit_small_patch16_224.augreg_in21k), a .safetensors or .pth file with timm's names,
            a folder as timm or transformers saves it, a run folder or model file of this project,
            or cifar10; the architecture then comes from it; null starts from random weights
        patch_size: side of a patch in pixels, a divisor of the images' sides; null is 4, or the
            pretrained model's; another size resamples its patch embedding
        stem: patch embedding: one linear projection, or a stack of 3x3 convolutions (arXiv
            2106.14881)
        stem_width: width of the first convolution of stem=conv, which doubles whenever the image is
            halved, up to embed_dim; null lets the width grow evenly to embed_dim
        embed_dim: width of a token
        depth: number of encoder blocks
        num_heads: number of attention heads; 1 is single-head attention
        head_dim: width of an attention head; null means embed_dim / num_heads
        mlp_ratio: hidden width of the MLP divided by embed_dim
        mlp_conv: add a depthwise 3x3 convolution over patches to the MLP (arXiv 2210.05958)
        qkv_bias: use a bias in the query, key and value projections
        qk_norm: apply layer norm to queries and keys (arXiv 2302.05442)
        init_values: initial value of layer scale (arXiv 2103.17239); null disables layer scale
        zero_init: initialize the output projections of attention and MLP to zero
        class_token: prepend a learned class token
        reg_tokens: number of register tokens (arXiv 2309.16588)
        global_pool: what the classifier reads: the class token (token) or the mean of patches (avg)
        pos_embed: position embedding: learned, sincos (fixed sine and cosine) or none
        no_embed_class: no position embeddings for class token and register tokens
        pre_norm: apply layer norm before the first encoder block too (arXiv 2103.00020)
        fc_norm: apply the last layer norm after pooling; null means with global_pool=avg
        norm_eps: epsilon of layer norms
        act_layer: activation of the MLP: gelu, or its approximations gelu_tanh and quick_gelu
        drop_rate: dropout rate before the classifier
        attn_drop_rate: dropout rate of the attention weights
        proj_drop_rate: dropout rate after the projections in attention and MLP
        drop_path_rate: stochastic depth rate of the last block (arXiv 1603.09382), 0 in the first
        rel_pos: positions that attention itself uses, beside pos_embed: a learned bias per head and
            offset (arXiv 2103.14030), rotary angles (rope, arXiv 2403.13298), or relative keys and
            values (arXiv 1803.02155), see docs/attention.md
        attention: what a head computes: dot (arXiv 1706.03762), cosine (arXiv 2111.09883), sigmoid
            (arXiv 2409.04431), differential (arXiv 2410.05258), torch.nn:MultiheadAttention, or
            FILE:NAME, a function or a module in a .py or .ipynb file (docs/variants.md)
    """

    name: settings.Text = "vit"
    timm_args: Arguments | None = None
    pretrained: settings.PathName | None = None
    patch_size: Annotated[int, Field(ge=1, le=10_000)] | None = None
    stem: Literal["linear", "conv"] = "linear"
    stem_width: Annotated[int, Field(ge=1, le=10_000)] | None = None
    embed_dim: Annotated[int, Field(ge=1, le=10_000)] = 192
    depth: Annotated[int, Field(ge=1, le=1000)] = 12
    num_heads: Annotated[int, Field(ge=1, le=1000)] = 3
    head_dim: Annotated[int, Field(ge=1, le=1000)] | None = None
    mlp_ratio: settings.Positive = 4.0
    mlp_conv: bool = False
    qkv_bias: bool = True
    qk_norm: bool = False
    init_values: Annotated[float, Field(ge=-settings.LARGE, le=settings.LARGE)] | None = None
    zero_init: bool = False
    class_token: bool = True
    reg_tokens: Annotated[int, Field(ge=0, le=1000)] = 0
    global_pool: Literal["token", "avg"] = "token"
    pos_embed: Literal["learned", "sincos", "none"] = "learned"
    no_embed_class: bool = False
    pre_norm: bool = False
    fc_norm: bool | None = None
    norm_eps: Annotated[float, Field(gt=0, le=1)] = 1e-6
    act_layer: Literal["gelu", "gelu_tanh", "quick_gelu"] = "gelu"
    drop_rate: settings.FractionBelow1 = 0.0
    attn_drop_rate: settings.FractionBelow1 = 0.0
    proj_drop_rate: settings.FractionBelow1 = 0.0
    drop_path_rate: settings.FractionBelow1 = 0.0
    rel_pos: Literal["none", "bias", "rope", "relative"] = "none"
    attention: Annotated[settings.PathName, BeforeValidator(_named)] = "dot"

    def __post_init__(self) -> None:
        if self.name == "vit":
            is_wide = int(self.embed_dim * self.mlp_ratio) >= 1
            settings.check(self, "mlp_ratio", is_wide, f"at least 1 / embed_dim, {self.embed_dim}")
            settings.check(self, "timm_args", self.timm_args is None, "null with model.name=vit")
            fits = (self.rel_pos, self.attention) not in UNFIT
            allowed = f"none or bias with model.attention={self.attention}"
            settings.check(self, "rel_pos", fits, allowed)
            if self.patch_size is None and self.pretrained is None:
                object.__setattr__(self, "patch_size", PATCH_SIZE)
            return
        is_timm = self.name.startswith(TIMM) and self.name != TIMM
        allowed = f"vit, or {TIMM} and a model of timm, such as {TIMM}resnet18"
        settings.check(self, "name", is_timm, allowed)
        for field in dataclasses.fields(self):
            if field.name not in NOT_OF_VIT and getattr(self, field.name) != field.default:
                allowed = (
                    f"{json.dumps(field.default)} with model.name={self.name}, whose arguments go "
                    "into model.timm_args, e.g. --model.timm_args '{depth: 4}'"
                )
                settings.check(self, field.name, False, allowed)

    def vit_arguments(self) -> dict[str, Any]:
        """Return the arguments of our VisionTransformer, by name."""
        values = dataclasses.asdict(self)
        return {key: value for key, value in values.items() if key not in NOT_OF_VIT}
