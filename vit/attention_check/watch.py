"""Recording and changing the projections and scores of any attention; rows of a check.

Shapes: B batch, N tokens, D token width, H heads, d head width.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vit.model.arguments import Attention
from vit.model.attention import MultiHeadSelfAttention
from vit.model.constructors import HEADS, is_whole, takes
from vit.model.read_softmax import SOFTMAXES, by_image
from vit.model.whole_attention import WholeAttention

B, N, D, H = 3, 10, 64, 2  # all different, so that no axis is taken for another
GRID = 2, 5
PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__)
Subject = MultiHeadSelfAttention | WholeAttention
CLOSE = 1e-4
MARKS = {"passed": "✓", "failed": "✗", "remark": "!", "unknown": "–"}


@dataclass(frozen=True)
class Row:
    """A property: a number, and if it is not as usual, a sentence that says why.

    A Vision Transformer needs what "failed"; a "remark" may be a choice; "unknown" could not be
    measured.
    """

    property: str
    result: Literal["passed", "failed", "remark", "unknown"]
    number: str = ""
    advice: str = ""

    def __str__(self) -> str:
        number = f": {self.number}" if self.number else ""
        advice = f"\n    {self.advice}" if self.advice else ""
        return f"{MARKS[self.result]} {self.property}{number}{advice}"


def trial_heads(attention: Attention) -> int:
    """Return the number of heads with which an attention is tried: 1 if it has no heads."""
    return 1 if is_whole(attention) and not takes(attention, HEADS) else H


def judge(what: str, is_wrong: bool, advice: str, number: str = "", is_choice: bool = False) -> Row:
    """Return a row that passes, or gives advice."""
    if not is_wrong:
        return Row(what, "passed", number)
    return Row(what, "remark" if is_choice else "failed", number, advice)


class Watch(TorchFunctionMode):
    """Records the projections and the softmax of an attention, and may change them.

    Args:
        add: Added to the output of a projection, by its number.
        instead: What the softmax returns instead of its result, (N, N); None keeps it.
    """

    def __init__(self, add: dict[int, Tensor] | None = None, instead: Tensor | None = None) -> None:
        super().__init__()
        self.add, self.instead = add or {}, instead
        self.inputs: list[Tensor] = []  # of projections
        self.projections: list[Tensor] = []  # outputs
        self.matrices: list[Tensor] = []
        self.scores: Tensor | None = None  # (B, H, N, N), of the last softmax, unless of one image
        self.softmaxes = self.softmaxed = 0  # their number, and that of their results
        self.output = self.weights = torch.empty(0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        result = func(*args, **keywords)
        matrix: Any = args[1] if len(args) > 1 else keywords.get("weight")
        if func is F.linear or (func in PRODUCTS and isinstance(matrix, nn.Parameter)):
            result = result + self.add.get(len(self.projections), 0)
            self.inputs.append(args[0] if args else keywords["input"])
            self.projections.append(result)
            self.matrices.append(matrix)
        if func in SOFTMAXES and result.shape[-2:] == (N, N):
            scores = args[0] if args else keywords["input"]
            self.softmaxes += 1
            self.softmaxed += result.numel()
            if scores.numel() % (B * N * N) == 0:
                self.scores = scores.view(B, -1, N, N)
            return result if self.instead is None else self.instead.expand_as(result)
        return result

    @classmethod
    def run(cls, subject: Any, tokens: Tensor, mask: Any = None, **changes: Any) -> "Watch":
        """Attend to tokens (B, N, D) with a `Subject` and return what was seen."""
        with torch.no_grad(), cls(**changes) as watch:
            watch.output, watch.weights = subject(tokens, mask, need_weights=True)
        heads_first = isinstance(subject, WholeAttention) and subject.traits.orders[0]
        if watch.scores is not None and heads_first:
            watch.scores = by_image(watch.scores, (B, watch.scores.shape[1], N, N), True)
        return watch

    def by_head(self, heads: int) -> dict[tuple[int, int], Tensor]:
        """Split projections into heads, (B, H, N, d): all of each, and as of three in one."""
        parts: dict[tuple[int, int], Tensor] = {}
        for number, output in enumerate(self.projections):
            if output.ndim == 4 and {heads, N} == {*output.shape[1:3]}:
                parts[number, 0] = output if output.shape[1] == heads else output.transpose(1, 2)
            elif output.ndim == 3 and output.shape[-1] % heads == 0:
                output = output if output.shape[0] == B else output.transpose(0, 1)
                parts[number, 0] = rearrange(output, "b n (h d) -> b h n d", h=heads)
                if output.shape[-1] % (3 * heads) == 0:
                    # Queries of all heads, keys, values; or these three of each head.
                    for first, pattern in ((1, "(t h d)"), (4, "(h t d)")):
                        thirds = rearrange(output, f"b n {pattern} -> t b h n d", t=3, h=heads)
                        parts |= {(number, first + third): x for third, x in enumerate(thirds)}
        return parts
