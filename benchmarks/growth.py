"""Scaling: training speed as a function of tokens, depth, width and batch size.

    python benchmarks/growth.py [--rounds 5]

Forward, backward and AdamW of a plain Vision Transformer (linear stem, dim 192, depth 4, 3 heads,
MLP ratio 2, batch size 16), changing one of them at a time, in the precision that `auto` selects.
"""

import argparse
import itertools
from collections.abc import Callable

import torch
from timing import take_turns
from torch import nn
from train_step import training

from vit.hardware import autocast, choose_precision, describe
from vit.model.attention import scaled_dot_product_attention
from vit.model.vit import VisionTransformer

CPU = torch.device("cpu")
BATCH, DIM, DEPTH, HEADS = 16, 192, 4, 3


def steps(
    precision: torch.dtype, tokens: int = 64, depth: int = DEPTH, dim: int = DIM, batch: int = BATCH
) -> Callable[[], None]:
    """Return a function that trains a model of the given size for one step."""
    size = 4 * int(tokens**0.5)
    model = VisionTransformer(
        img_size=size, in_chans=3, num_classes=10, patch_size=4, stem="linear", embed_dim=dim,
        depth=depth, num_heads=HEADS, mlp_ratio=2, mlp_conv=False, zero_init=False,
    )  # fmt: skip
    batches = itertools.repeat((torch.randn(batch, 3, size, size), torch.arange(batch) % 10))
    return training(model.train(), batches, precision, 1)


def attention_alone(precision: torch.dtype, tokens: int) -> Callable[[], None]:
    """Return a function that runs only the attention of such a step, forward and backward."""
    shape = (BATCH, HEADS, tokens, DIM // HEADS)
    query, key, value = (nn.Parameter(torch.randn(shape, dtype=precision)) for _ in range(3))

    def work() -> None:
        for _ in range(DEPTH):
            with autocast(CPU, precision):
                output, _ = scaled_dot_product_attention(query, key, value)
            output.backward(output.detach())

    return work


def main() -> None:
    """Print a table for each dimension."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    precision = choose_precision("auto", CPU)
    print(f"{describe(CPU)}, torch {torch.__version__}, {str(precision)[6:]}, batch {BATCH}")
    torch.manual_seed(0)

    print("\ntokens   ms a step   images/s   attention's share")
    for tokens in (64, 256, 1024):
        works = {
            "step": steps(precision, tokens=tokens),
            "attention": attention_alone(precision, tokens),
        }
        timings = take_turns(works, rounds)
        step = timings["step"].seconds
        share = timings["attention"].fraction()
        print(f"{tokens:>6}{1000 * step:>12.0f}{BATCH / step:>11.0f}   {share}")

    grown: tuple[tuple[str, tuple[int, ...]], ...] = (
        ("depth", (2, 4, 8, 16)),
        ("dim", (96, 192, 384, 768)),
        ("batch", (16, 32, 64, 128, 256)),
    )
    for name, values in grown:
        works = {f"{value}": steps(precision, **{name: value}) for value in values}
        print(f"\n{name:>6}   ms a step   images/s   time over the first")
        for (label, timing), value in zip(take_turns(works, rounds).items(), values, strict=True):
            batch = value if name == "batch" else BATCH
            print(
                f"{label:>6}{1000 * timing.seconds:>12.0f}{batch / timing.seconds:>11.0f}"
                f"   {timing.cost()}"
            )


if __name__ == "__main__":
    main()
