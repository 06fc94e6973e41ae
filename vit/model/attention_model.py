"""Read the attention weights of a model: ours returns them, timm's are read while it runs.

A timm model's own modules run, in their order. `ReadWeights` applies a mask to their softmax, and
keeps the weights that are multiplied by the values. Masks are as in our
`MultiHeadSelfAttention.forward`; timm's are added to scores. Models are in evaluation mode.

Shapes: B batch, N tokens (prefix, then patches), D token width, H heads, L layers, C classes.
"""

import copy
from types import SimpleNamespace
from typing import Any, TypeAlias, Union

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vit.model.attention import for_all_heads, masked_softmax
from vit.model.positions import Grid
from vit.model.timm_model import timm_name
from vit.model.vit import VisionTransformer

# timm's classes are named, not imported, because importing timm takes seconds.
EVA, BEIT = "timm.models.eva.Eva", "timm.models.beit.Beit"
FAMILIES = ("timm.models.vision_transformer.VisionTransformer", EVA, BEIT)
# Without a fused kernel, each has one softmax, followed by one product with the values.
ATTENTIONS = (
    "timm.layers.attention.Attention", "timm.layers.attention.AttentionRope",
    "timm.layers.diff_attention.DiffAttention", "timm.models.eva.EvaAttention",
    "timm.models.beit.Attention",
)  # fmt: skip

AttentionModel: TypeAlias = Union[VisionTransformer, "TimmAttentionModel"]


def attention_model(model: nn.Module) -> AttentionModel | None:
    """Return what reads a model's attention; None if it cannot be read, see `require_attention`."""
    if isinstance(model, VisionTransformer):
        return model
    return None if _unread_class(model) else TimmAttentionModel(model)


def require_attention(model: nn.Module) -> AttentionModel:
    """Return what reads a model's attention: our model itself, or an adapter for a timm model.

    Raises:
        ValueError: The model's attention cannot be read.
    """
    if (readable := attention_model(model)) is None:
        raise ValueError(no_maps_text(model))
    return readable


def prefix_names(model: nn.Module) -> list[str]:
    """Name the tokens before the patches, for a model whose attention can be read."""
    names = {"cls_token": "class token", "dist_token": "distillation token"}
    known = [name for key, name in names.items() if getattr(model, key, None) is not None]
    registers = require_attention(model).num_prefix_tokens - len(known)
    return [*known, *(f"register {number + 1}" for number in range(registers))]


def size_unit(model: nn.Module) -> int:
    """Return the step in pixels between the image sizes of a model: a patch, or one pixel."""
    readable = attention_model(model)
    return 1 if readable is None else readable.patch_embed.patch_size


def no_maps_text(model: nn.Module) -> str:
    """Explain in one line why there are no maps for a model: which class cannot be read."""
    return (
        f"attention maps are not available for {timm_name(model)}: they need one sequence of "
        f"tokens and attention of a class listed in docs/timm.md, unlike {_unread_class(model)}"
    )


def _path(code: Any) -> str:
    return f"{code.__module__}.{code.__qualname__}"


def _family(model: Any) -> str:
    """Return the class whose `forward_features` a model has; a subclass may have another head."""
    features = getattr(type(model), "forward_features", type(model))
    return _path(features).removesuffix(".forward_features")


def _unread_class(model: Any) -> str | None:
    """Return the name of the class, of a model or its attention, that cannot be read, or None."""
    if not type(model).__module__.startswith("timm.") or _family(model) not in FAMILIES:
        return _path(type(model))
    if getattr(model.patch_embed, "dynamic_img_pad", False):  # its grid is that of a larger image
        return "PatchEmbed with dynamic_img_pad"
    classes = [type(getattr(block, "attn", block)) for block in model.blocks]
    return next((cls.__name__ for cls in classes if _path(cls) not in ATTENTIONS), None)


def _block_arguments(model: Any, grid: Grid) -> list[dict[str, Any]]:
    """Return what each block of a timm model takes besides tokens."""
    depth = len(model.blocks)
    if _family(model) == EVA:
        rope: Any = None if model.rope is None else model.rope.get_embed(shape=list(grid))
        is_mixed = getattr(model, "rope_mixed", False)  # with a rotation for each block
        return [{"rope": rotation} for rotation in (rope if is_mixed else [rope] * depth)]
    if _family(model) == BEIT:
        bias = None if model.rel_pos_bias is None else model.rel_pos_bias()
        return [{"shared_rel_pos_bias": bias}] * depth
    return [{}] * depth


class ReadWeights(TorchFunctionMode):
    """A context in which the softmax of attention follows a mask, and the weights are kept.

    The mask is as in `scaled_dot_product_attention`. Differential attention (arXiv 2410.05258)
    subtracts weights between softmax and product, so its weights may be negative.
    """

    def __init__(self, mask: Tensor | None) -> None:
        super().__init__()
        self.weights: list[Tensor] = []  # (B, H, N, N) for each block that ran
        self._mask = mask
        self._is_attending = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.softmax:
            self._is_attending = True
            return masked_softmax(args[0], self._mask)
        if func is Tensor.matmul and self._is_attending:
            self._is_attending = False
            self.weights.append(args[0])
        return func(*args, **(kwargs or {}))


def _with(module: Any, **parts: nn.Module) -> Any:
    """Copy a module with other submodules; both have the same parameters."""
    module = copy.copy(module)
    module._modules = {**module._modules, **parts}
    return module


def _without_kernel(block: Any) -> Any:
    """Copy a block so that its attention computes weights."""
    attn = _with(block.attn)
    attn.fused_attn = False
    return _with(block, attn=attn)


class TimmAttentionModel:
    """Reads the attention of a timm model, and neither changes nor hooks it.

    Methods with the names of `VisionTransformer`'s do the same. With attention or maximum pooling,
    maps start from the mean of the patches; with a distillation token, from the class token.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._stem = _with(model, blocks=nn.Sequential(), norm=nn.Identity())
        patches = model.patch_embed
        self.patch_embed = SimpleNamespace(  # what `PatchEmbed` calls them
            patch_size=patches.feat_ratio(),
            grid=lambda height, width: patches.dynamic_feat_size((height, width)),
        )
        self.blocks = [_without_kernel(block) for block in model.blocks]
        self.num_prefix_tokens: int = model.num_prefix_tokens
        self.global_pool: str = model.global_pool

    def embed(self, images: Tensor) -> tuple[Tensor, Grid]:
        """Turn images into the input of the first block."""
        return self._stem.forward_features(images), self.patch_embed.grid(*images.shape[-2:])

    def forward_intermediates(
        self, images: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Classify images and keep the attention weights and tokens of every layer."""
        return self.forward_tokens(*self.embed(images), mask)

    def forward_tokens(
        self, x: Tensor, grid: Grid, mask: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Do what `forward_intermediates` does, after `embed`."""
        tokens = []
        with ReadWeights(for_all_heads(mask, (len(x), 1, x.shape[1], x.shape[1]))) as read:
            arguments = _block_arguments(self._model, grid)
            for block, keywords in zip(self.blocks, arguments, strict=True):
                x = block(x, **keywords)
                tokens.append(x)
        return self._model.forward_head(self._model.norm(x)), read.weights, tokens

    def read_tokens(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Classify the output of any block with the final norm and the classifier.

        Logits of every token are None if the classifier cannot read one alone: with attention
        pooling, or with one head for each of two tokens.
        """
        model = self._model
        normed = model.norm(tokens)
        pooled = model.forward_head(normed)
        is_plain = _path(type(model).forward_head) == f"{_family(model)}.forward_head"
        if getattr(model, "attn_pool", None) is not None or not is_plain:
            return pooled, None
        return pooled, model.head(model.head_drop(model.fc_norm(normed)))
