"""Models of timm: building them by name, and reading the attention weights of those that are ViTs.

timm is imported in the functions that need it, because importing it takes seconds.

Shapes: B batch, N tokens (prefix, then patches), D token width, H heads, L layers, C classes.
"""

import difflib
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from vit.model.config import TIMM
from vit.settings import shorten

# Arguments of timm.create_model that come from the data set, or that this project does not offer.
FROM_DATA = ("in_chans", "img_size", "num_classes")
WEIGHTS = ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path")
REFUSED = (
    *WEIGHTS, "cache_dir", "features_only", "scriptable", "exportable", "no_jit", "device", "dtype"
)  # fmt: skip


def build_timm_model(
    name: str,
    arguments: Mapping[str, Any],
    img_size: tuple[int, int],
    in_chans: int,
    num_classes: int,
) -> nn.Module:
    """Build a model of timm with random weights; nothing is downloaded.

    Args:
        name: "timm:" and the name of a model, see `timm.list_models`.
        arguments: Arguments of the model, such as {"depth": 4}.
        img_size: Height and width of the images, in pixels.
        in_chans: Channels of the images.
        num_classes: C.

    Raises:
        ValueError: There is no such model, an argument is unknown or comes from the data set, or
            the model cannot be built with these arguments or for this image size.
    """
    complete = complete_arguments(name, arguments, img_size, in_chans)
    # For `Muon`, which needs kernels in this layout; convolutions are faster in it too.
    return create(name, {**complete, "num_classes": num_classes}).to(
        memory_format=torch.channels_last
    )


def complete_arguments(
    name: str, arguments: Mapping[str, Any], img_size: tuple[int, int], in_chans: int
) -> dict[str, Any]:
    """Add what depends on the images to the arguments of a model of timm.

    A model that takes an image size gets `img_size`. If it can resample its positions, it does, so
    that training may start on smaller images. Arguments and errors as for `build_timm_model`.
    """
    _require_known(name)
    for key in arguments:
        if key in FROM_DATA:
            raise ValueError(f"model.timm_args: {key} is not allowed; the data set determines it")
        if key in REFUSED:
            hint = "; weights are named by model.pretrained" if key in WEIGHTS else ""
            raise ValueError(
                f"model.timm_args: {key} is not allowed; it is about timm, not about {name}{hint}"
            )
    complete = {**arguments, "in_chans": in_chans}
    with torch.device("meta"):  # without memory, only to see which arguments it takes
        accepted = _arguments_of(create(name, complete))
    if "img_size" in accepted:
        complete["img_size"] = img_size
    if "dynamic_img_size" in accepted:
        complete.setdefault("dynamic_img_size", True)
    return complete


def _require_known(name: str) -> None:
    import timm

    known = timm.list_models()
    architecture = architecture_of(name)
    if architecture not in known:
        near = difflib.get_close_matches(architecture.partition(".")[0], known, n=3)
        hint = f"did you mean {' or '.join(TIMM + other for other in near)}? " if near else ""
        raise ValueError(
            f"model.name: {shorten(name)} is not a model of timm {timm.__version__}; {hint}"
            'all names: python -c "import timm; print(*timm.list_models())"'
        )


def architecture_of(name: str) -> str:
    """Return the name by which timm knows a model of `ModelConfig.name`."""
    return name.removeprefix(TIMM)


def create(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Call timm.create_model.

    Raises:
        ValueError: The model cannot be built; the line names all arguments it lacks.
    """
    import timm

    arguments, unknown = dict(arguments), []
    while True:
        try:
            model = timm.create_model(architecture_of(name), pretrained=False, **arguments)
        except Exception as error:  # timm checks arguments in many places and ways
            found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            if found is None or found[1] not in arguments:
                raise ValueError(
                    f"model.timm_args: timm cannot build {name} with {shorten(arguments, 200)}: "
                    f"{shorten(str(error) or repr(error), 200)}"
                ) from None
            unknown.append(found[1])
            del arguments[found[1]]
            continue
        if unknown:
            offered = _arguments_of(model).difference(FROM_DATA, REFUSED)
            raise ValueError(
                f"model.timm_args: {', '.join(unknown)} {'is' if len(unknown) == 1 else 'are'} not "
                f"among the arguments of {name}: {', '.join(sorted(offered))}"
            )
        return model


def _arguments_of(model: nn.Module) -> set[str]:
    """Return the names of the arguments of a model's class and of the classes it extends."""
    return {
        key
        for cls in type(model).__mro__
        if issubclass(cls, nn.Module) and cls is not nn.Module
        for key, parameter in inspect.signature(cls.__init__).parameters.items()
        if key != "self"
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }


def head_names(name: str, arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the parameters whose shape depends on the number of classes.

    Args:
        name: "timm:" and the name of a model.
        arguments: Its arguments, see `complete_arguments`.
    """
    with torch.device("meta"):
        models = [create(name, {**arguments, "num_classes": number}) for number in (2, 3)]
    one, other = (model.state_dict() for model in models)
    return tuple(key for key in one if one[key].shape != other[key].shape)


def is_timm(model: nn.Module) -> bool:
    """Tell whether a model is one of timm's, without importing timm."""
    return type(model).__module__.startswith("timm.")


def timm_name(model: nn.Module) -> str:
    """Return the name by which timm knows a model, or else the name of its class."""
    about = getattr(model, "pretrained_cfg", None) or {}
    return str(about.get("architecture") or type(model).__name__)


def heads(model: nn.Module) -> tuple[nn.Module, ...]:
    """Return the layers that turn features into logits; models with a distillation token have two.

    Args:
        model: A VisionTransformer, or any model of timm.
    """
    vit: Any = model
    head = vit.get_classifier()
    return head if isinstance(head, tuple) else (head,)


class TimmPatches:
    """The division of an image into patches by a timm ViT, with the interface of our PatchEmbed.

    Args:
        patch_embed: The patch embedding.
    """

    def __init__(self, patch_embed: Any) -> None:
        self._patch_embed = patch_embed
        self.patch_size: int = patch_embed.feat_ratio()

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the grid, (rows, columns), of an image with this height and width in pixels."""
        rows, columns = self._patch_embed.dynamic_feat_size((height, width))
        return rows, columns


class TimmAttentionModel:
    """Reads the attention weights of timm's VisionTransformer or NaFlexVit, as ours returns them.

    It runs the model's own modules in the model's own order, and computes attention step by step
    as timm does without a fused kernel: no hooks, and the model is not changed. The head may read
    more than `global_pool` says: with attention or maximum pooling, maps start from the mean of the
    patches; with a distillation token, from the class token.

    Args:
        model: A model that `fits`.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.patch_embed = TimmPatches(getattr(model, "patch_embed", None) or model.embeds)
        self.blocks = model.blocks
        self.num_prefix_tokens: int = model.num_prefix_tokens
        self.global_pool: str = model.global_pool

    @staticmethod
    def fits(model: Any) -> bool:
        """Tell whether a model is a timm ViT with one sequence of tokens and timm's Attention."""
        from timm.layers.attention import Attention
        from timm.models import vision_transformer as vits
        from timm.models.naflexvit import NaFlexVit

        known = (vits.Block, vits.ResPostBlock, vits.ParallelThingsBlock)
        features = getattr(type(model), "forward_features", None)
        return (
            features in (vits.VisionTransformer.forward_features, NaFlexVit.forward_features)
            and all(type(block) in known for block in model.blocks)
            and all(type(a) is Attention for block in model.blocks for a in attentions(block))
        )

    def forward_intermediates(self, images: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Classify images and keep the attention weights and tokens of every layer.

        Args:
            images: (B, in_chans, height, width), normalized.

        Returns:
            As `VisionTransformer.forward_intermediates`. A block with several attention modules
            side by side counts as one layer with the heads of all.
        """
        return self.forward_tokens(*self.embed(images))

    def embed(self, images: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Turn images into the input of the first block, as `VisionTransformer.embed` does."""
        return _embed(self._model, images), self.patch_embed.grid(*images.shape[-2:])

    def forward_tokens(
        self, x: Tensor, grid: tuple[int, int]
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Do what `forward_intermediates` does after `embed`; the grid is not used."""
        weights, tokens = [], []
        for block in self.blocks:
            x, attention = _run_block(block, x)
            weights.append(attention)
            tokens.append(x)
        return self._model.forward_head(self._model.norm(x)), weights, tokens

    def read_tokens(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Classify the output of any block with the final norm and the head.

        Args:
            tokens: (B, N, D), from `forward_intermediates`.

        Returns:
            As `VisionTransformer.read_tokens`. Logits of every token are None if the head cannot
            read one alone: with attention pooling, or with one head for each of two tokens.
        """
        from timm.models.vision_transformer import VisionTransformer

        model = self._model
        normed = model.norm(tokens)
        pooled = model.forward_head(normed)
        if model.attn_pool is not None or (
            type(model).forward_head is not VisionTransformer.forward_head
        ):
            return pooled, None
        return pooled, model.head(model.head_drop(model.fc_norm(normed)))


def _embed(model: Any, images: Tensor) -> Tensor:
    """Turn images into the tokens that the first block gets, (B, N, D)."""
    if hasattr(model, "embeds"):  # NaFlexVit, without the masks of images that differ in size
        parts = model._forward_embeds(images, patch_coord=None, patch_valid=None, attn_mask=None)
        tokens: Tensor = parts["patches"]
        return tokens
    embedded: Tensor = model._pos_embed(model.patch_embed(images))
    return model.norm_pre(model.patch_drop(embedded))


def attentions(block: Any) -> list[Any]:
    """List the attention modules of a block, ours or timm's."""
    return [branch.attn for branch in block.attns] if hasattr(block, "attns") else [block.attn]


def _run_block(block: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Apply a block as its forward does: tokens (B, N, D), and attention weights (B, H, N, N)."""
    found = attentions(block)
    if hasattr(block, "attns"):  # ParallelThingsBlock
        outputs, weights = _attend(found, [branch.norm(x) for branch in block.attns])
        branches = zip(block.attns, outputs, strict=True)
        x = x + torch.stack([b.drop_path(b.ls(y)) for b, y in branches]).sum(dim=0)
        return x + torch.stack([branch(x) for branch in block.ffns]).sum(dim=0), weights
    if not hasattr(block, "ls1"):  # ResPostBlock
        (output,), weights = _attend(found, [x])
        x = x + block.drop_path1(block.norm1(output))
        return x + block.drop_path2(block.norm2(block.mlp(x))), weights
    (output,), weights = _attend(found, [block.norm1(x)])
    x = x + block.drop_path1(block.ls1(output))
    return x + block.drop_path2(block.ls2(block.mlp(block.norm2(x)))), weights


def _attend(attentions: Sequence[Any], inputs: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Apply timm's Attention modules, each to its input (B, N, D), as their forward does.

    Returns:
        The outputs, (B, N, D) each, and the weights of all heads before dropout, (B, H, N, N).
    """
    parts = []
    for attn, x in zip(attentions, inputs, strict=True):
        query, key, value = rearrange(
            attn.qkv(x), "b n (three h d) -> three b h n d", three=3, h=attn.num_heads
        )
        parts.append((attn.q_norm(query), attn.k_norm(key), value))
    query, key, value = (torch.cat(each, dim=1) for each in zip(*parts, strict=True))
    # As in timm; `scaled_dot_product_attention` may be edited, and these models do not call it.
    weights = ((query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)).softmax(dim=-1)
    heads = attentions[0].attn_drop(weights) @ value
    outputs = []
    for attn, x, own in zip(attentions, inputs, heads.chunk(len(attentions), dim=1), strict=True):
        y = attn.norm(rearrange(own, "b h n d -> b n (h d)"))
        if getattr(attn, "gate", None) is not None:
            y = y * attn.gate(x).sigmoid()
        outputs.append(attn.proj_drop(attn.proj(y)))
    return outputs, weights
