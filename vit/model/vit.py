"""The Vision Transformer (arXiv 2010.11929): patch embedding, encoder blocks, head.

Shapes: B batch, C classes, D width of a token, H heads, L layers, N tokens (prefix and patches).
"""

from typing import Literal

import torch
from torch import Tensor, nn

from vit.model.embed import PatchEmbed, resample_pos_embed, sincos_pos_embed
from vit.model.encoder import EncoderBlock


class VisionTransformer(nn.Module):
    """A Vision Transformer with timm's parameter names.

    With the linear stem, without head_dim and mlp_conv, weights go to and come from timm's
    VisionTransformer with `load_state_dict(..., strict=True)`.

    Args:
        img_size: Pixels on a side of the square image.
        patch_size: Pixels on a side of a patch; divides img_size.
        in_chans: Colour channels.
        num_classes: C.
        stem: "linear" or "conv", see `PatchEmbed`.
        embed_dim: D.
        depth: L, encoder blocks.
        num_heads: H.
        head_dim: Width of a head; None means embed_dim / num_heads.
        mlp_ratio: Hidden width of the MLP over embed_dim.
        mlp_conv: Whether the MLPs mix neighbouring patches by a depthwise 3 x 3 convolution, see
            `NeighbourConv`; timm has none.
        qkv_bias: Whether the qkv projections have a bias.
        qk_norm: Whether queries and keys are normalised.
        init_values: Initial layer scale; None leaves layer scale out.
        zero_init: Whether the output projections of attention and MLP start at zero, so that every
            block starts as the identity.
        class_token: Whether a learned token is prepended.
        reg_tokens: Register tokens, which collect what belongs to no place (arXiv 2309.16588).
        global_pool: "token" classifies from the class token, "avg" from the patch tokens' mean.
        pos_embed: "learned", "sincos" (fixed) or "none".
        drop_rate: Dropout probability before the head.
        attn_drop_rate: Dropout probability on the attention weights.
        proj_drop_rate: Dropout probability after the projections of attention and MLP.
        drop_path_rate: Stochastic depth of the last block; it rises linearly from 0.
        attn_kernel: "auto", "math" or "fused", see `MultiHeadSelfAttention`.

    Raises:
        ValueError: global_pool is "token" without class_token, or a size does not divide another.
    """

    def __init__(
        self,
        img_size: int = 32,
        patch_size: int = 4,
        in_chans: int = 3,
        num_classes: int = 10,
        stem: Literal["linear", "conv"] = "linear",
        embed_dim: int = 96,
        depth: int = 5,
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
        drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        attn_kernel: Literal["auto", "math", "fused"] = "auto",
    ) -> None:
        super().__init__()
        if global_pool not in ("token", "avg"):
            raise ValueError(f"global_pool: {global_pool!r} is not token or avg")
        if global_pool == "token" and not class_token:
            raise ValueError("global_pool: token needs class_token=True; or use avg")
        self.global_pool = global_pool
        self.num_prefix_tokens = int(class_token) + reg_tokens
        self.patch_embed = PatchEmbed(img_size, patch_size, in_chans, embed_dim, stem)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim)) if class_token else None
        self.reg_token = nn.Parameter(torch.zeros(1, reg_tokens, embed_dim)) if reg_tokens else None
        num_tokens = self.num_prefix_tokens + self.patch_embed.num_patches
        self.pos_embed: Tensor | None
        if pos_embed == "learned":
            self.pos_embed = nn.Parameter(torch.zeros(1, num_tokens, embed_dim))
        elif pos_embed == "sincos":
            fixed = torch.zeros(1, num_tokens, embed_dim)
            fixed[0, self.num_prefix_tokens :] = sincos_pos_embed(
                self.patch_embed.grid_size, embed_dim
            )
            self.register_buffer("pos_embed", fixed)
        elif pos_embed == "none":
            self.pos_embed = None
        else:
            raise ValueError(f"pos_embed: {pos_embed!r} is not learned, sincos or none")
        # After the last block only what is read out matters: the patches, if they are pooled.
        num_mixing = 0 if not mlp_conv else depth if global_pool == "avg" else depth - 1
        self.blocks = nn.ModuleList(
            EncoderBlock(
                embed_dim, num_heads, head_dim, mlp_ratio, qkv_bias, qk_norm, init_values,
                attn_drop_rate, proj_drop_rate, drop_path_rate * layer / max(depth - 1, 1),
                attn_kernel, self.patch_embed.grid_size if layer < num_mixing else None,
                self.num_prefix_tokens,
            )
            for layer in range(depth)
        )  # fmt: skip
        pooled = global_pool == "avg"
        self.norm = nn.Identity() if pooled else nn.LayerNorm(embed_dim, eps=1e-6)
        self.fc_norm = nn.LayerNorm(embed_dim, eps=1e-6) if pooled else nn.Identity()
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(embed_dim, num_classes)
        self._init_weights(zero_init)

    def _init_weights(self, zero_init: bool) -> None:
        """Draw linear weights and positions from a normal of 0.02, cut at two units, as timm."""
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

    def embed(self, images: Tensor) -> Tensor:
        """Return the tokens before the first block, (B, N, D): class token, registers, patches.

        Images of another size than img_size get the position embeddings of another grid.
        """
        x = self.patch_embed(images)
        prefix = [token for token in (self.cls_token, self.reg_token) if token is not None]
        if prefix:
            x = torch.cat(
                [*(token.to(x.dtype).expand(len(x), -1, -1) for token in prefix), x], dim=1
            )
        if self.pos_embed is None:
            return x
        positions = resample_pos_embed(
            self.pos_embed, self.patch_embed.grid_size, x.shape[1] - self.num_prefix_tokens,
            self.num_prefix_tokens,
        )  # fmt: skip
        # In the stem's precision: under autocast the tokens then stay in it from block to block.
        return x + positions.to(x.dtype)

    def forward_features(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the tokens after the last block, normalised, (B, N, D)."""
        x = self.embed(images)
        for block in self.blocks:
            x = block(x, mask)
        return self.norm(x)

    def forward_intermediates(
        self, images: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Classify images and keep what every layer made of them.

        Returns:
            Logits (B, C), the L layers' attention weights before dropout, (B, H, N, N) each, and
            the tokens after each, (B, N, D). The logits can be differentiated by all of them.
        """
        x = self.embed(images)
        weights, tokens = [], []
        for block in self.blocks:
            x, attention = block(x, mask, need_weights=True)
            weights.append(attention)
            tokens.append(x)
        return self.forward_head(self.norm(x)), weights, tokens

    def forward_head(self, tokens: Tensor, pre_logits: bool = False) -> Tensor:
        """Pool the tokens (B, N, D) and classify them: logits (B, C).

        With pre_logits, return what the last linear layer gets, (B, D).
        """
        if self.global_pool == "token":
            pooled = tokens[:, 0]
        else:
            pooled = tokens[:, self.num_prefix_tokens :].mean(dim=1)
        features = self.head_drop(self.fc_norm(pooled))
        return features if pre_logits else self.head(features)

    def forward(
        self, images: Tensor, mask: Tensor | None = None, need_weights: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Classify images.

        Args:
            images: (B, in_chans, img_size, img_size), normalised. Another size, a multiple of
                patch_size, works too.
            mask: As for `MultiHeadSelfAttention`, over all N tokens.
            need_weights: Whether to return the attention weights of all layers too.

        Returns:
            Logits (B, C); with need_weights also the weights before dropout, (L, B, H, N, N).
        """
        if need_weights:
            logits, weights, _ = self.forward_intermediates(images, mask)
            return logits, torch.stack(weights)
        return self.forward_head(self.forward_features(images, mask))
