"""The kinds of attention map; imported without torch. CONTRIBUTING.md shows how to add one.

Shapes: L layers, B batch, H heads, N tokens.
"""

from dataclasses import dataclass
from typing import Literal

HeadFusion = Literal["mean", "max", "min"]


@dataclass(frozen=True)
class RolloutOptions:
    """Options of attention rollout, see `vit.explain.rollout.attention_rollout`."""

    head_fusion: HeadFusion = "mean"
    discard_ratio: float = 0.0
    start_layer: int = 0


@dataclass(frozen=True)
class MapKind:
    """A kind of attention map. Its function takes what it needs:

        weights    weights, L tensors (B, H, N, N)
        gradients  weights; their gradients of the logit of the explained class
        relevance  layer-wise relevance of the patches that enter each layer,
                   (L, B, rows, columns); weights
        pixels     layer-wise relevance of the input, (B, channels, height, width)
        passes     the model, to be called any number of times, in float32 whatever the
                   precision; images, grid (rows, columns) and explained classes (B,)

    The first three also take `readout` and `num_prefix_tokens`, see
    `vit.explain.rollout.attention_rollout`. Kinds with the same needs share their passes. A map
    that needs more than weights explains a class.
    """

    title: str  # in figures and tables
    function: str  # in `vit.explain`, imported when needed: (B, patches) or (B, rows, columns)
    needs: Literal["weights", "gradients", "relevance", "pixels", "passes"]
    # The value scaled to 1: what each token gets if all get the same (of fractions of what the head
    # reads), or the mean of absolute values.
    unit: Literal["uniform", "mean"]
    signed: bool = False  # positive for the class, negative against it
    photos: bool = False  # drawn for photos by default
    has_options: bool = False  # its function takes the fields of `RolloutOptions`

    @property
    def class_specific(self) -> bool:
        """Whether it explains one class, rather than being the same for all."""
        return self.needs != "weights"


ALL_KINDS = {  # those that take many passes come last
    "rollout": MapKind(
        "attention rollout", "rollout:attention_rollout", "weights", "uniform",
        photos=True, has_options=True,
    ),
    "gradient_rollout": MapKind(
        "gradient rollout", "rollout:gradient_rollout", "gradients", "uniform"
    ),
    "relevance": MapKind("class relevance", "rollout:class_relevance", "gradients", "mean"),
    "raw": MapKind("last layer's attention", "rollout:raw_attention", "weights", "uniform"),
    "lrp": MapKind(
        "layer-wise relevance", "maps:relevance_of_patches", "relevance", "mean", signed=True
    ),
    "lrp_rollout": MapKind(
        "relevance × rollout", "maps:relevance_times_rollout", "relevance", "mean"
    ),
    "lrp_pixels": MapKind(
        "layer-wise relevance of pixels", "maps:relevance_of_pixels", "pixels", "mean",
        signed=True, photos=True,
    ),
    "occlusion": MapKind("occlusion", "references:occlusion", "passes", "mean", signed=True),
    "integrated_gradients": MapKind(
        "integrated gradients", "references:integrated_gradients_of_patches", "passes", "mean",
        signed=True,
    ),
    "rise": MapKind("RISE", "references:rise", "passes", "mean", signed=True),
}  # fmt: skip
