"""Training speed compared with other implementations of the Vision Transformer, in one run.

    pip install -r benchmarks/requirements.txt
    python benchmarks/train_step.py [--rounds 5] [--steps 1]

1. Forward, backward and AdamW of one architecture (dim 192, depth 9, 3 heads, patch size 4, MLP
   ratio 2, batch size 256, 32 x 32 pixels, 10 classes) in this project, timm, vit-pytorch
   (SimpleViT) and transformers, each with its defaults, in float32 and under bfloat16 autocast.
2. The FLOP/s of this project's step as a fraction of what large matrix products reach.
3. The attention of such a step alone: hand-written, and torch's fused kernel.
4. Steps of configs/quick.yaml: the fraction spent selecting and augmenting images; a profile.

Pixels are random, because speed does not depend on them.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from timing import take_turns
from torch import Tensor, nn

from vit.config import Config
from vit.data.datasets import ImageSet
from vit.hardware import autocast, choose_precision, describe
from vit.model.attention import scaled_dot_product_attention
from vit.model.vit import VisionTransformer
from vit.training.budget import mean_step_seconds
from vit.training.build import build_step
from vit.training.distributed import World
from vit.training.environment import Environment
from vit.training.step import TrainingStep
from vit.training.stopping import StopRequest

CPU = torch.device("cpu")
DIM, DEPTH, HEADS, HIDDEN, PATCH, SIZE, CLASSES = 192, 9, 3, 384, 4, 32, 10


def ours(attn_kernel: Literal["auto", "math"] = "auto") -> VisionTransformer:
    """Build this project's model."""
    return VisionTransformer(
        img_size=SIZE, in_chans=3, num_classes=CLASSES, patch_size=PATCH, stem="linear",
        embed_dim=DIM, depth=DEPTH, num_heads=HEADS, mlp_ratio=2, mlp_conv=False, zero_init=False,
        class_token=True, global_pool="token", attn_kernel=attn_kernel,
    )  # fmt: skip


def timm_model() -> nn.Module:
    """Build timm's model."""
    from timm.models.vision_transformer import VisionTransformer as TimmViT

    return TimmViT(
        SIZE, PATCH, num_classes=CLASSES, embed_dim=DIM, depth=DEPTH, num_heads=HEADS, mlp_ratio=2
    )


def simple_vit() -> nn.Module:
    """Build vit-pytorch's SimpleViT."""
    from vit_pytorch import SimpleViT

    return SimpleViT(
        image_size=SIZE, patch_size=PATCH, num_classes=CLASSES, dim=DIM, depth=DEPTH,
        heads=HEADS, mlp_dim=HIDDEN, dim_head=DIM // HEADS,
    )  # fmt: skip


class Transformers(nn.Module):
    """The ViT of transformers, returning logits like the others."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import ViTConfig, ViTForImageClassification

        config = ViTConfig(
            hidden_size=DIM, num_hidden_layers=DEPTH, num_attention_heads=HEADS,
            intermediate_size=HIDDEN, image_size=SIZE, patch_size=PATCH, num_labels=CLASSES,
        )  # fmt: skip
        self.vit = ViTForImageClassification(config)

    def forward(self, images: Tensor) -> Tensor:
        """Classify images."""
        return self.vit(images).logits


MODELS: dict[str, Callable[[], nn.Module]] = {
    "timm": timm_model,
    "ours": ours,
    "vit-pytorch SimpleViT": simple_vit,
    "transformers ViT": Transformers,
}


def training(
    model: nn.Module, batches: Iterator[tuple[Tensor, Tensor]], precision: torch.dtype, steps: int
) -> Callable[[], None]:
    """Return a function that trains a model for some steps."""
    optimizer = torch.optim.AdamW(model.parameters())
    device = next(model.parameters()).device

    def work() -> None:
        for _ in range(steps):
            images, labels = (part.to(device, non_blocking=True) for part in next(batches))
            with autocast(device, precision):
                logits = model(images)
            F.cross_entropy(logits.float(), labels).backward()
            optimizer.step()
            optimizer.zero_grad()

    return work


def seconds_each(work: Callable[[], object], device: torch.device, times: int = 1) -> float:
    """Return the median duration of a call in seconds; the device is synchronized every `times`."""

    def some() -> None:
        for _ in range(times):
            work()
        if device.type != "cpu":
            torch.accelerator.synchronize()

    return take_turns({"work": some}, rounds=9)["work"].seconds / times


def matrix_peak(precision: torch.dtype, device: torch.device = CPU, size: int = 2048) -> float:
    """Return the throughput of large matrix products, in FLOP/s."""
    a, b = (torch.randn(size, size, dtype=precision, device=device) for _ in range(2))
    return 2 * size**3 / seconds_each(lambda: a @ b, device)


def flops_of_step(model: nn.Module, batch: int, size: int = SIZE) -> float:
    """Count the FLOP of matrix products and convolutions, forward and backward."""
    from torch.utils.flop_counter import FlopCounterMode

    few, device = 2, next(model.parameters()).device
    with FlopCounterMode(display=False) as counter:
        model(torch.randn(few, 3, size, size, device=device)).sum().backward()
    model.zero_grad()
    return counter.get_total_flops() / few * batch


def compare_peers(batch: int, rounds: int, steps: int) -> None:
    """Print the throughput of each model in each precision."""
    draw = torch.Generator().manual_seed(0)
    images = torch.randn(batch, 3, SIZE, SIZE, generator=draw)
    labels = torch.randint(CLASSES, (batch,), generator=draw)
    works = {
        f"{name}, {str(precision)[6:]}": training(
            make().train(), itertools.repeat((images, labels)), precision, steps
        )
        for precision in (torch.float32, torch.bfloat16)
        for name, make in MODELS.items()
    }
    print(f"\ntraining, batch {batch}: images/s, and ratio to the first (lowest to highest round)")
    timings = take_turns(works, rounds)
    for name, timing in timings.items():
        print(
            f"  {name:<34}{batch * steps / timing.seconds:6.0f}   "
            f"{timing.ratio:.2f} x  ({timing.low:.2f} to {timing.high:.2f})"
        )
    flops = flops_of_step(ours("math"), batch)
    for precision in (torch.float32, torch.bfloat16):
        name = str(precision)[6:]
        peak = matrix_peak(precision)
        rate = flops * steps / timings[f"ours, {name}"].seconds
        print(
            f"  {name}: matrix products of 2048 reach {peak / 1e9:.0f} GFLOP/s; our step's "
            f"{flops / 1e9:.0f} GFLOP run at {rate / 1e9:.0f}, {rate / peak:.0%} of that"
        )


def compare_kernels(batch: int, rounds: int) -> None:
    """Print the cost of one layer's attention, forward and backward, with either kernel."""

    def by_hand(query: Tensor, key: Tensor, value: Tensor) -> None:
        scaled_dot_product_attention(query, key, value)[0].sum().backward()

    def fused(query: Tensor, key: Tensor, value: Tensor) -> None:
        F.scaled_dot_product_attention(query, key, value).sum().backward()

    shape = (batch, HEADS, (SIZE // PATCH) ** 2, DIM // HEADS)
    print(f"\nattention of one layer, {' x '.join(map(str, shape))}, forward and backward")
    for precision in (torch.float32, torch.bfloat16):
        parts = [torch.randn(shape, dtype=precision, requires_grad=True) for _ in range(3)]
        works = {"fused": partial(fused, *parts), "by hand": partial(by_hand, *parts)}
        timings = take_turns(works, rounds)
        hand = timings["by hand"]
        print(
            f"  {str(precision)[6:]}: fused {1000 * timings['fused'].seconds:.0f} ms, by hand "
            f"{1000 * hand.seconds:.0f} ms: {hand.ratio:.2f} x as fast "
            f"({hand.low:.2f} to {hand.high:.2f})"
        )


def profile(work: Callable[[], object], device: torch.device = CPU, rows: int = 14) -> None:
    """Print the operations in which a call spends the device's time."""
    with torch.profiler.profile() as profiler:
        work()
    averages = profiler.key_averages()
    cost = f"self_{'cpu' if device.type == 'cpu' else 'device'}_time_total"
    total = sum(getattr(row, cost) for row in averages)
    for row in sorted(averages, key=lambda row: -getattr(row, cost))[:rows]:
        print(f"  {row.key[:44]:<46}{getattr(row, cost) / total:6.1%}{row.count:8,} calls")


def make_step(config: Config, device: torch.device = CPU) -> tuple[TrainingStep, ImageSet]:
    """Build the training step of a config, and images of random pixels for it."""
    pixels = torch.randint(256, (10_000, 3, SIZE, SIZE), dtype=torch.uint8)
    labels = torch.arange(10_000) % 10
    images = ImageSet(pixels, labels, tuple("0123456789")).to(device)
    precision = choose_precision(config.train.precision, device)
    env = Environment(device, precision, World(), StopRequest())
    return build_step(config, None, images, env), images


def repeat_step(
    step: TrainingStep,
    images: ImageSet,
    start: int,
    batches: Tensor,
    prepare_only: bool = False,
) -> Callable[[], None]:
    """Return a function that repeats one step of a run, once for each batch.

    Args:
        step: The training step.
        images: The training images.
        start: Number of the step, which determines its image size.
        batches: (times, B) indices of images, on their device.
        prepare_only: Whether to stop after selecting and augmenting the images.
    """

    def work() -> None:
        for pixels, labels in images.batches(batches):
            step.state.step = start
            _ = step.prepare(pixels, labels) if prepare_only else step(pixels, labels)

    return work


def measure_quick(rounds: int, steps: int = 10) -> None:
    """Print the speed of configs/quick.yaml, and where the time of a step goes."""
    config = Config()
    (step, images), size = make_step(config), config.train.batch_size
    batches = torch.randint(10_000, (steps, size))
    speed = size / mean_step_seconds(step, images, size)
    print(f"\nconfigs/quick.yaml, batch {size}: {speed:.0f} images/s, mean over a run")
    for phase in step.schedule.phases():
        whole = repeat_step(step, images, phase.start, batches)
        works = {"step": whole, "prepare": repeat_step(step, images, phase.start, batches, True)}
        timings = take_turns(works, rounds)
        seconds, part = timings["step"].seconds, timings["prepare"].seconds
        rows, columns = phase.image_size
        print(
            f"  {rows} x {columns} pixels: {size * steps / seconds:.0f} images/s; "
            f"selecting, augmenting and shrinking takes {part / seconds:.1%} of the step"
        )
    profile(whole)


def main() -> None:
    """Run all measurements."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--batch", type=int, default=256)
    arguments = parser.parse_args()
    print(f"{describe(CPU)}, torch {torch.__version__}")
    torch.manual_seed(0)
    compare_peers(arguments.batch, arguments.rounds, arguments.steps)
    compare_kernels(arguments.batch, arguments.rounds)
    measure_quick(arguments.rounds)


if __name__ == "__main__":
    main()
