"""Settings of the model; imported without torch."""

import dataclasses
import json
from typing import Annotated, Any, Literal

from pydantic import Field

from vit.settings import (
    LARGE,
    Arguments,
    FractionBelow1,
    PathName,
    Positive,
    Switch,
    Text,
    check,
    divisors,
    settings,
    shorten,
)

PATCH_SIZE = 4  # of a model trained from scratch, unless set
TIMM = "timm:"  # how the name of a model of timm begins
# Fields of ModelConfig that VisionTransformer does not take.
NOT_OF_VIT = ("name", "timm_args", "pretrained")


@settings("model")
class ModelConfig:
    """The model: our Vision Transformer, with timm's parameter names, or any timm model.

    The defaults are the plain Vision Transformer of the paper (arXiv 2010.11929) with the width of
    ViT-Ti (arXiv 2012.12877) and patches for small images.

    Attributes:
        name: which model: vit is ours, which the other keys describe; timm:resnet18 is timm's
            resnet18, and so on (docs/timm.md)
        timm_args: with name=timm:..., arguments of the model by name, such as
            {depth: 4, embed_dim: 96}; null keeps timm's defaults
        pretrained: weights to start from: timm:NAME (downloaded, e.g.
            timm:vit_small_patch16_224.augreg_in21k), a .safetensors or .pth file with timm's names,
            a folder as timm or transformers saves it, a run folder or model file of this project,
            or cifar10_quick; the keys below that describe the architecture then come from it; with
            name=timm:..., weights of that model; null starts from random weights
        patch_size: height and width of a patch in pixels; must divide the image size; null is 4, or
            the patch size of the pretrained model, whose patch embedding is otherwise resampled
        stem: patch embedding: linear is one linear projection, conv a stack of 3x3 convolutions
            (arXiv 2106.14881)
        embed_dim: width of a token
        depth: number of encoder blocks
        num_heads: number of attention heads; 1 is single-head attention
        head_dim: width of an attention head; null means embed_dim / num_heads
        mlp_ratio: hidden width of the MLP divided by embed_dim
        mlp_conv: add a depthwise 3x3 convolution over neighbouring patches to the MLP
            (arXiv 2210.05844)
        qkv_bias: use a bias in the query, key and value projections
        qk_norm: apply layer norm to queries and keys (arXiv 2302.05442)
        init_values: initial value of layer scale (arXiv 2103.17239); null disables layer scale
        zero_init: initialize the output projections of attention and MLP to zero
        class_token: prepend a learned class token
        reg_tokens: number of register tokens (arXiv 2309.16588)
        global_pool: input of the classification head: token is the class token, avg the mean of the
            patch tokens
        pos_embed: position embedding: learned, sincos (fixed sine and cosine) or none
        no_embed_class: no position embeddings for class token and register tokens
        pre_norm: apply layer norm before the first encoder block too (arXiv 2103.00020); the linear
            patch embedding then has no bias
        fc_norm: apply the last layer norm after pooling instead of before; null means with
            global_pool=avg
        norm_eps: epsilon of layer norms
        act_layer: activation of the MLP: gelu, or its approximations gelu_tanh and quick_gelu
        drop_rate: dropout rate before the classification head
        attn_drop_rate: dropout rate of the attention weights
        proj_drop_rate: dropout rate after the projections in attention and MLP
        drop_path_rate: stochastic depth rate of the last block, increasing linearly from 0 in the
            first (arXiv 1603.09382)
        attention: what each attention head computes: dot is that of the paper
            (arXiv 1706.03762), cosine (arXiv 2111.09883), sigmoid (arXiv 2409.04431), differential
            (arXiv 2410.05258), or a function of a Python file, my_attention.py:function
            (docs/variants.md)
    """

    name: Text = "vit"
    timm_args: Arguments | None = None
    pretrained: PathName | None = None
    patch_size: Annotated[int, Field(ge=1, le=10_000)] | None = None
    stem: Literal["linear", "conv"] = "linear"
    embed_dim: Annotated[int, Field(ge=1, le=10_000)] = 192
    depth: Annotated[int, Field(ge=1, le=1000)] = 12
    num_heads: Annotated[int, Field(ge=1, le=1000)] = 3
    head_dim: Annotated[int, Field(ge=1, le=1000)] | None = None
    mlp_ratio: Positive = 4.0
    mlp_conv: Switch = False
    qkv_bias: Switch = True
    qk_norm: Switch = False
    init_values: Annotated[float, Field(ge=-LARGE, le=LARGE)] | None = None
    zero_init: Switch = False
    class_token: Switch = True
    reg_tokens: Annotated[int, Field(ge=0, le=1000)] = 0
    global_pool: Literal["token", "avg"] = "token"
    pos_embed: Literal["learned", "sincos", "none"] = "learned"
    no_embed_class: Switch = False
    pre_norm: Switch = False
    fc_norm: Switch | None = None
    norm_eps: Annotated[float, Field(gt=0, le=1)] = 1e-6
    act_layer: Literal["gelu", "gelu_tanh", "quick_gelu"] = "gelu"
    drop_rate: FractionBelow1 = 0.0
    attn_drop_rate: FractionBelow1 = 0.0
    proj_drop_rate: FractionBelow1 = 0.0
    drop_path_rate: FractionBelow1 = 0.0
    attention: Text = "dot"

    def __post_init__(self) -> None:
        if self.name != "vit":
            self._check_timm()
            return
        allowed = (
            "null with model.name=vit; or choose a model of timm, e.g. --model.name timm:resnet18"
        )
        check(self, "timm_args", self.timm_args is None, allowed)
        if self.pretrained is not None:
            return  # until the values of the pretrained model are known, see `adopt`
        if self.patch_size is None:
            object.__setattr__(self, "patch_size", PATCH_SIZE)
        width, patch_size = self.embed_dim, self.patch_size or PATCH_SIZE
        allowed = f"{1 / width:.3g} to {LARGE / width:.3g} with model.embed_dim={width}"
        check(self, "mlp_ratio", 1 <= self.mlp_ratio * width <= LARGE, allowed)
        least = patch_size.bit_length()
        allowed = f"{least} or more with model.stem=conv and model.patch_size={patch_size}"
        check(self, "embed_dim", self.stem == "linear" or width >= least, allowed)
        divides = self.head_dim is not None or width % self.num_heads == 0
        allowed = f"a divisor of model.embed_dim={width}: {divisors(width)}; or set model.head_dim"
        check(self, "num_heads", divides, allowed)
        allowed = "avg where model.class_token=false; or set model.class_token=true"
        check(self, "global_pool", self.class_token or self.global_pool != "token", allowed)
        divides = self.pos_embed != "sincos" or width % 4 == 0
        check(self, "embed_dim", divides, "a multiple of 4 with model.pos_embed=sincos")

    def _check_timm(self) -> None:
        is_timm = self.name.startswith(TIMM) and self.name != TIMM
        allowed = f"vit, or {TIMM} and a model of timm, such as {TIMM}resnet18"
        check(self, "name", is_timm, allowed)
        for field in dataclasses.fields(self):
            name, value, default = field.name, getattr(self, field.name), field.default
            if name not in NOT_OF_VIT and value != default:
                raise ValueError(
                    f"model.{name}: {shorten(value)} is only for model.name=vit; arguments of "
                    f"{self.name} go into model.timm_args, e.g. --model.timm_args '{{depth: 4}}'; "
                    f"if a config file sets it, add --model.{name} {json.dumps(default)}"
                )

    def vit_arguments(self) -> dict[str, Any]:
        """Return the arguments of our VisionTransformer, by name."""
        values = dataclasses.asdict(self)
        return {key: value for key, value in values.items() if key not in NOT_OF_VIT}
