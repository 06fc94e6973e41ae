"""The logit lens: the classes as which the tokens of every layer would be read.

The final norm and the head are applied to the tokens after each layer, as if the layers after it
were left out: nostalgebraist, "interpreting GPT: the logit lens" (LessWrong, 2020); see also arXiv
2303.08112. The head was trained on the last layer's tokens only, so what it says of earlier ones is
a reading, not a prediction.

Shapes: L layers, B batch, N tokens (prefix, then patches), D token width, C classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vit.model.attention_model import AttentionModel


@dataclass(frozen=True)
class Lens:
    """The most probable classes of what is read from each layer, (L, B, T, k).

    The first of the T readings is what the head reads, such as the class token or the mean of the
    patches; then come the N tokens, each read alone. T is 1 if the head cannot read a token alone.

    Attributes:
        classes: int64, best first.
        probabilities: float32, 0 to 1.
    """

    classes: Tensor
    probabilities: Tensor


@torch.no_grad()
def logit_lens(model: AttentionModel, tokens: Sequence[Tensor], k: int = 3) -> Lens:
    """Read the tokens of every layer with the final norm and the head.

    Args:
        model: In evaluation mode, from `vit.model.attention_model.attention_model`.
        tokens: L outputs of the blocks, (B, N, D), from `forward_intermediates`.
        k: Number of classes to keep, 1 to C.
    """
    best = []
    for layer in tokens:
        pooled, alone = model.read_tokens(layer)
        logits = pooled[:, None] if alone is None else torch.cat([pooled[:, None], alone], dim=1)
        best.append(logits.float().softmax(dim=-1).topk(k))
    return Lens(
        torch.stack([found.indices for found in best]),
        torch.stack([found.values for found in best]),
    )
