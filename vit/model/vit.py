"""The Vision Transformer (arXiv 2010.11929): patch embedding, encoder blocks, classifier.

Shapes: B batch, N tokens (prefix, then patches), D token width, H heads, L layers, C classes.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.fx
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vit.model.arguments import Attention
from vit.model.config import UNFIT
from vit.model.dropout import Dropout
from vit.model.embed import PatchEmbed, resample_pos_embed, sincos_pos_embed
from vit.model.encoder import EncoderBlock, Mlp, NeighbourConv
from vit.model.positions import Grid
from vit.model.variants import find_attention
from vit.model.whole_attention import build_attention

torch.fx.wrap("resample_pos_embed")  # it branches, so it cannot be traced


def check_pool(global_pool: str, class_token: bool) -> None:
    """Check what the classifier reads."""
    if global_pool not in ("token", "avg"):
        raise ValueError(f"global_pool: {global_pool!r} is not token or avg")
    if global_pool == "token" and not class_token:
        raise ValueError("global_pool: token needs class_token=True; or use avg")


class VisionTransformer(nn.Module):
    """A Vision Transformer with timm's parameter names.

    The defaults are the plain model of the paper, with the width of ViT-Ti. Without stem="conv",
    head_dim, mlp_conv, attention and rel_pos, timm's VisionTransformer loads its weights, and vice
    versa.

    Args:
        img_size: Height and width in pixels of the images that position embeddings are for, or one
            number for both. They are resampled for other multiples of patch_size.
        attention: What each head computes, or a whole attention module: a name in
            `vit.model.variants.ATTENTION`, or a function or class that could be there.

    `ModelConfig` describes the other arguments.

    Raises:
        ValueError: global_pool is "token" without class_token, a size does not divide another, or
            an option is unknown.
    """

    def __init__(  # noqa: PLR0913 - timm's arguments
        self,
        *,
        img_size: int | tuple[int, int],
        in_chans: int,
        num_classes: int,
        patch_size: int = 4,
        stem: Literal["linear", "conv"] = "linear",
        stem_width: int | None = None,
        embed_dim: int = 192,
        depth: int = 12,
        num_heads: int = 3,
        head_dim: int | None = None,
        mlp_ratio: float = 4.0,
        mlp_conv: bool = False,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        init_values: float | None = None,
        zero_init: bool = False,
        class_token: bool = True,
        reg_tokens: int = 0,
        global_pool: Literal["token", "avg"] = "token",
        pos_embed: Literal["learned", "sincos", "none"] = "learned",
        no_embed_class: bool = False,
        pre_norm: bool = False,
        fc_norm: bool | None = None,
        norm_eps: float = 1e-6,
        act_layer: Literal["gelu", "gelu_tanh", "quick_gelu"] = "gelu",
        drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        attention: str | Attention = "dot",
        rel_pos: Literal["none", "bias", "rope", "relative"] = "none",
    ) -> None:
        super().__init__()
        check_pool(global_pool, class_token)
        attend = find_attention(attention) if isinstance(attention, str) else attention
        for position, name in UNFIT:
            if rel_pos == position and attend is find_attention(name):
                raise ValueError(f"rel_pos: {rel_pos} does not fit {name} attention")
        pooled = global_pool == "avg"
        self.global_pool: str = global_pool
        self.num_classes, self.num_features = num_classes, embed_dim
        self.num_prefix_tokens = int(class_token) + reg_tokens
        self.num_pos_prefix = 0 if no_embed_class else self.num_prefix_tokens
        self.patch_embed = PatchEmbed(
            img_size, patch_size, in_chans, embed_dim, stem, stem_width, bias=not pre_norm
        )
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim)) if class_token else None
        self.reg_token = nn.Parameter(torch.zeros(1, reg_tokens, embed_dim)) if reg_tokens else None
        positions = torch.zeros(1, self.num_pos_prefix + self.patch_embed.num_patches, embed_dim)
        self.pos_embed: Tensor | None
        if pos_embed == "learned":
            self.pos_embed = nn.Parameter(positions)
        elif pos_embed == "sincos":
            grid = self.patch_embed.grid_size
            positions[0, self.num_pos_prefix :] = sincos_pos_embed(grid, embed_dim)
            self.register_buffer("pos_embed", positions)
        elif pos_embed == "none":
            self.pos_embed = None
        else:
            raise ValueError(f"pos_embed: {pos_embed!r} is not learned, sincos or none")
        self.norm_pre = nn.LayerNorm(embed_dim, eps=norm_eps) if pre_norm else nn.Identity()
        hidden_dim = int(embed_dim * mlp_ratio)
        self.blocks = nn.ModuleList()
        for layer in range(depth):
            like = self.blocks[0].attn if layer else None
            attn = build_attention(
                attend, embed_dim, num_heads, head_dim=head_dim, attn_drop=attn_drop_rate,
                qkv_bias=qkv_bias, qk_norm=qk_norm, proj_drop=proj_drop_rate, norm_eps=norm_eps,
                rel_pos=rel_pos, grid=self.patch_embed.grid_size,
                num_prefix_tokens=self.num_prefix_tokens, like=like,
            )  # fmt: skip
            # In the last block, a convolution matters only if the classifier reads patches.
            mixes = mlp_conv and (pooled or layer < depth - 1)
            conv = NeighbourConv(hidden_dim, self.num_prefix_tokens) if mixes else None
            mlp = Mlp(embed_dim, hidden_dim, proj_drop_rate, conv, act_layer)
            drop_path = drop_path_rate * layer / max(depth - 1, 1)
            self.blocks.append(EncoderBlock(attn, mlp, embed_dim, init_values, drop_path, norm_eps))
        norm_last = pooled if fc_norm is None else fc_norm
        self.norm = nn.Identity() if norm_last else nn.LayerNorm(embed_dim, eps=norm_eps)
        self.fc_norm = nn.LayerNorm(embed_dim, eps=norm_eps) if norm_last else nn.Identity()
        self.head_drop = Dropout(drop_rate)
        self.head: nn.Module = nn.Linear(embed_dim, num_classes) if num_classes else nn.Identity()
        self.grad_checkpointing = False
        self._init_weights(zero_init)

    def _init_weights(self, zero_init: bool) -> None:
        """Initialise as timm does: linear weights and positions from a truncated normal."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        if isinstance(self.pos_embed, nn.Parameter):
            nn.init.trunc_normal_(self.pos_embed, std=0.02)
        for token in (self.cls_token, self.reg_token):
            if token is not None:
                nn.init.normal_(token, std=1e-6)
        if zero_init:
            for name, parameter in self.blocks.named_parameters():
                if name.endswith(("attn.proj.weight", "mlp.fc2.weight")):
                    nn.init.zeros_(parameter)

    def forward(
        self, images: Tensor, mask: Tensor | None = None, need_weights: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Classify images.

        Args:
            images: (B, in_chans, height, width), normalized; any multiples of patch_size.
            mask: Attention mask over the N tokens, see `MultiHeadSelfAttention.forward`.
            need_weights: Whether to return the attention weights of all layers too.

        Returns:
            Logits (B, C); with need_weights also the attention weights before dropout,
            (L, B, H, N, N).

        Raises:
            ValueError: height or width is not a multiple of patch_size.
        """
        if isinstance(images, torch.fx.Proxy):  # torch.fx traces arguments that are not given, too
            mask, need_weights = None, False
        if need_weights:
            logits, weights, _ = self.forward_intermediates(images, mask)
            return logits, torch.stack(weights)
        return self.forward_head(self.forward_features(images, mask))

    def embed(self, images: Tensor) -> tuple[Tensor, Grid]:
        """Turn images, (B, in_chans, height, width), into the input of the first block.

        Returns:
            Tokens (B, N, D): class token, registers, patches row by row; and the grid (rows,
            columns) of the patches.
        """
        x, grid = self.patch_embed(images)
        dtype = x.dtype  # of the whole residual stream, so that it stays bfloat16 under autocast
        tokens = [token for token in (self.cls_token, self.reg_token) if token is not None]
        prefix = [token.to(dtype).expand(x.shape[0], -1, -1) for token in tokens]
        if self.num_pos_prefix > 0:
            x = torch.cat([*prefix, x], dim=1)
        if self.pos_embed is not None:
            old_grid = self.patch_embed.grid_size
            positions = resample_pos_embed(self.pos_embed, old_grid, grid, self.num_pos_prefix)
            x = x + positions.to(dtype)
        if prefix and self.num_pos_prefix == 0:
            x = torch.cat([*prefix, x], dim=1)
        return self.norm_pre(x).to(dtype), grid

    def forward_features(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the normalized tokens after the last block, (B, N, D); arguments as `forward`."""
        x, grid = self.embed(images)
        for block in self.blocks:
            if self.grad_checkpointing and self.training:
                x = checkpoint(block, x, grid, mask, use_reentrant=False)
            else:
                x = block(x, grid, mask)
        return self.norm(x)

    def forward_head(self, tokens: Tensor, pre_logits: bool = False) -> Tensor:
        """Pool the tokens (B, N, D) of `forward_features` and classify them: logits (B, C).

        With pre_logits, return the input of the last linear layer instead, (B, D).
        """
        if self.global_pool == "token":
            pooled = tokens[:, 0]
        else:
            pooled = tokens[:, self.num_prefix_tokens :].mean(dim=1)
        features = self.head_drop(self.fc_norm(pooled))
        return features if pre_logits else self.head(features)

    def forward_intermediates(
        self, images: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Classify images and keep the attention weights and tokens of every layer.

        Returns:
            Logits (B, C); attention weights before dropout, (B, H, N, N), of each layer; and its
            output, (B, N, D). The logits can be differentiated with respect to weights and tokens.
        """
        return self.forward_tokens(*self.embed(images), mask)

    def forward_tokens(
        self, x: Tensor, grid: Grid, mask: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Do what `forward_intermediates` does, after `embed`."""
        weights, tokens = [], []
        for block in self.blocks:
            x, attention = block(x, grid, mask, need_weights=True)
            weights.append(attention)
            tokens.append(x)
        return self.forward_head(self.norm(x)), weights, tokens

    def read_tokens(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Classify the output of any block, (B, N, D), with the final norm and the classifier.

        Returns:
            Logits (B, C); and logits (B, N, C) of every token as if the classifier read it alone.
        """
        normed = self.norm(tokens)
        return self.forward_head(normed), self.head(self.head_drop(self.fc_norm(normed)))

    # --- what tools written for timm's models call ---

    def get_intermediate_layers(
        self,
        images: Tensor,
        n: int | Sequence[int] = 1,
        reshape: bool = False,
        return_prefix_tokens: bool = False,
        norm: bool = False,
    ) -> list[Any]:
        """Return the patches' tokens, (B, P, D), after the last n blocks or those with indices n.

        As in DINO and timm, reshape returns (B, D, rows, columns), return_prefix_tokens returns
        pairs of patches and prefix tokens, and norm applies the final norm.
        """
        layers = range(len(self.blocks))[-n:] if isinstance(n, int) else n
        x, grid = self.embed(images)
        outputs = []
        for block in self.blocks:
            x = block(x, grid)
            tokens = self.norm(x) if norm else x
            prefix, patches = tokens.tensor_split([self.num_prefix_tokens], dim=1)
            patches = patches.mT.unflatten(2, grid) if reshape else patches
            outputs.append((patches, prefix) if return_prefix_tokens else patches)
        return [outputs[layer] for layer in layers]

    def get_classifier(self) -> nn.Module:
        """Return the classifier, the only part that depends on the classes; as in timm."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier, as in timm: 0 classes for features; global_pool None keeps it."""
        if global_pool is not None:
            check_pool(global_pool, self.cls_token is not None)
            self.global_pool = global_pool
        weight = next(self.parameters())
        self.num_classes, self.head = num_classes, nn.Identity()
        if num_classes:
            self.head = nn.Linear(self.num_features, num_classes).to(weight.device, weight.dtype)
            nn.init.trunc_normal_(self.head.weight, std=0.02)
            nn.init.zeros_(self.head.bias)

    def no_weight_decay(self) -> set[str]:
        """Name the parameters without weight decay, besides vectors; as in timm."""
        return {"cls_token", "reg_token", "pos_embed"}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return the patterns by which timm assigns parameters to layers; coarse is not used."""
        return {
            "stem": r"^cls_token|reg_token|pos_embed|patch_embed|norm_pre",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],  # with the last block
        }

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Keep only the inputs of blocks in training and recompute the rest (arXiv 1604.06174)."""
        self.grad_checkpointing = enable
