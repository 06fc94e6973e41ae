"""The logit lens: the class each layer's tokens would predict.

The final norm and the head are applied to the tokens after each layer: nostalgebraist,
"interpreting GPT: the logit lens" (LessWrong, 2020); see also arXiv 2303.08112. The head was
trained on the last layer's tokens only, so for earlier ones the result is no real prediction.

Shapes: L layers, B batch, N tokens (prefix, then patches), D token width, C classes.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Read = Callable[[Tensor], tuple[Tensor, Tensor | None]]


@torch.no_grad()
def logit_lens(read_tokens: Read, tokens: Sequence[Tensor], k: int = 3) -> tuple[Tensor, Tensor]:
    """Read the tokens of every layer with the final norm and the head.

    Args:
        read_tokens: The method of a model in evaluation mode, see `VisionTransformer.read_tokens`.
        tokens: L outputs of the blocks, (B, N, D), from `forward_intermediates`.
        k: Number of classes to keep, C at most.

    Returns:
        The most probable classes, int64, best first, and their probabilities, float32, (L, B, T, k)
        each. The first of the T readings is what the head reads, such as the class token or the
        mean of the patches; then come the N tokens, each read alone, if the head can do that.
    """
    best = []
    for layer in tokens:
        pooled, alone = read_tokens(layer)
        logits = pooled[:, None] if alone is None else torch.cat([pooled[:, None], alone], dim=1)
        best.append(logits.float().softmax(dim=-1).topk(min(k, logits.shape[-1])))
    return torch.stack([b.indices for b in best]), torch.stack([b.values for b in best])
