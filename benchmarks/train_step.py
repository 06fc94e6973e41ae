"""Training speed compared with other implementations of the Vision Transformer, in one run.

    pip install -r benchmarks/requirements.txt
    python benchmarks/train_step.py [--rounds 5] [--compile] [--cpu_time]

1. Forward, backward and AdamW of one architecture (dim 192, depth 9, 3 heads, patch size 4, MLP
   ratio 2, batch size 256, 32 x 32 pixels, 10 classes) in this project, timm, vit-pytorch and
   transformers, each with its defaults, in float32 and, where the CPU supports it natively, under
   bfloat16 autocast. Models with a class token (65 tokens) and models that average 64 tokens,
   without biases of queries, keys and values as in SimpleViT, are compared separately.
   With --cpu_time it is the CPU time of one thread, which hardly depends on other load.
2. The same of this project and the fastest of the others, compiled, with --compile.
3. The FLOP/s of this project's step next to those of large matrix products.
4. The attention of such a step alone: hand-written, and torch's fused kernel.
5. Steps of configs/quick.yaml: the fraction spent selecting and augmenting images; a profile.

Pixels are random, because speed does not depend on them.
"""

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import cast
from unittest import mock

import torch
import torch.nn.functional as F
from timing import Clock, Timing, take_turns, timed
from torch import Tensor, nn

from vit.data.datasets import ImageSet
from vit.distributed.stop import StopRequest
from vit.distributed.world import World
from vit.hardware import autocast, choose_precision, describe
from vit.model.attention import scaled_dot_product_attention
from vit.model.vit import VisionTransformer
from vit.training.budget import mean_step_seconds
from vit.training.build import build_step
from vit.training.config import Config
from vit.training.start import Environment, Run
from vit.training.step import TrainingStep

CPU = torch.device("cpu")
DIM, DEPTH, HEADS, HIDDEN, PATCH, SIZE, CLASSES = 192, 9, 3, 384, 4, 32, 10
ROUNDS = 9  # of measurements whose number of rounds is not an argument


def ours(class_token: bool) -> VisionTransformer:
    """Build this project's model."""
    return VisionTransformer(
        img_size=SIZE, in_chans=3, num_classes=CLASSES, patch_size=PATCH, stem="linear",
        embed_dim=DIM, depth=DEPTH, num_heads=HEADS, mlp_ratio=2, mlp_conv=False, zero_init=False,
        class_token=class_token, global_pool="token" if class_token else "avg",
        qkv_bias=class_token,
    )  # fmt: skip


def timm_model(class_token: bool) -> nn.Module:
    """Build timm's model."""
    from timm.models.vision_transformer import VisionTransformer as TimmViT

    return TimmViT(
        SIZE, PATCH, num_classes=CLASSES, embed_dim=DIM, depth=DEPTH, num_heads=HEADS, mlp_ratio=2,
        class_token=class_token, global_pool="token" if class_token else "avg",
        qkv_bias=class_token,
    )  # fmt: skip


def vit_pytorch() -> nn.Module:
    """Build vit-pytorch's ViT."""
    from vit_pytorch import ViT

    return ViT(
        image_size=SIZE, patch_size=PATCH, num_classes=CLASSES, dim=DIM, depth=DEPTH,
        heads=HEADS, mlp_dim=HIDDEN, dim_head=DIM // HEADS,
    )  # fmt: skip


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


Models = dict[str, Callable[[], nn.Module]]
GROUPS: dict[str, Models] = {
    "with a class token": {
        "ours": partial(ours, class_token=True),
        "timm": partial(timm_model, class_token=True),
        "vit-pytorch ViT": vit_pytorch,
        "transformers ViT": Transformers,
    },
    "without a class token": {
        "ours": partial(ours, class_token=False),
        "timm": partial(timm_model, class_token=False),
        "vit-pytorch SimpleViT": simple_vit,
    },
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


def repeated(work: Callable[[], object], device: torch.device, times: int) -> Callable[[], None]:
    """Return a function that does some work a number of times and waits for the device."""

    def some() -> None:
        for _ in range(times):
            work()
        if device.type != "cpu":
            torch.accelerator.synchronize()

    return some


def matrix_product(
    precision: torch.dtype, device: torch.device = CPU, size: int = 2048
) -> tuple[Callable[[], object], float]:
    """Return a function that multiplies large matrices, and the FLOP it needs."""
    a, b = (torch.randn(size, size, dtype=precision, device=device) for _ in range(2))
    return lambda: a @ b, 2 * size**3


def flops_of_step(model: nn.Module, batch: int, size: int = SIZE) -> float:
    """Count the FLOP of matrix products and convolutions, forward and backward."""
    from torch.utils.flop_counter import FlopCounterMode

    few, device = 2, next(model.parameters()).device
    with FlopCounterMode(display=False) as counter:
        model(torch.randn(few, 3, size, size, device=device)).sum().backward()
    model.zero_grad()
    return counter.get_total_flops() / few * batch


def compare_peers(
    group: str, precision: torch.dtype, batch: int, rounds: int, steps: int, clock: Clock
) -> str:
    """Print the training speed of the models of a group; return the fastest of the others."""
    batches = random_batches(batch)
    works = {
        name: training(make().train(), batches, precision, steps)
        for name, make in GROUPS[group].items()
    }
    timings = take_turns(works, rounds, clock)
    print(f"\n{group}, {str(precision)[6:]}, batch {batch}: images/s, and ours over each")
    print_ours_over(timings, batch * steps)
    return min(list(timings)[1:], key=lambda name: timings[name].seconds)


def print_ours_over(timings: dict[str, Timing], images: int) -> None:
    """Print the speed of each model, and the speed of the first one divided by it."""
    for name, timing in timings.items():
        print(f"  {name:<34}{images / timing.seconds:6.0f}   {timing.cost()}")


def random_batches(batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Return an endless iterator over the same batch of random pixels and labels."""
    draw = torch.Generator().manual_seed(0)
    images = torch.randn(batch, 3, SIZE, SIZE, generator=draw)
    labels = torch.randint(CLASSES, (batch,), generator=draw)
    return itertools.repeat((images, labels))


def compare_compiled(
    group: str,
    peer: str,
    precision: torch.dtype,
    batch: int,
    rounds: int,
    steps: int,
    clock: Clock,
) -> None:
    """Print the training speed of our model and another one, each compiled and not."""
    batches, works, first = random_batches(batch), {}, {}
    for name in ("ours", peer):
        model = GROUPS[group][name]().train()
        works[f"{name}, compiled"] = training(
            cast(nn.Module, torch.compile(model, dynamic=False)), batches, precision, steps
        )
        first[name] = timed(works[f"{name}, compiled"])
        works[name] = training(GROUPS[group][name]().train(), batches, precision, steps)
    timings = take_turns(works, rounds, clock)
    taken = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in first.items())
    print(f"\n{group}, {str(precision)[6:]}, compiled (first step: {taken})")
    print_ours_over(timings, batch * steps)


def native_precisions() -> list[torch.dtype]:
    """List the precisions in which this CPU computes natively."""
    return sorted({torch.float32, choose_precision("auto", CPU)}, key=str, reverse=True)


def compare_to_products(batch: int, rounds: int) -> None:
    """Print how the FLOP/s of our training step compare with those of large matrix products."""
    model = ours(class_token=False)
    with mock.patch("vit.model.attention.uses_fused_kernel", return_value=False):
        flops = flops_of_step(model, batch)
    print(f"\nour step without a class token, {flops / 1e9:.0f} GFLOP, and products of 2048")
    for precision in native_precisions():
        product, product_flops = matrix_product(precision)
        works = {"product": product, "step": training(model, random_batches(batch), precision, 1)}
        timings = take_turns(works, rounds)
        peak, rate = product_flops / timings["product"].seconds, flops / timings["step"].seconds
        print(
            f"  {str(precision)[6:]}: products {peak / 1e9:.0f} GFLOP/s, step {rate / 1e9:.0f}: "
            f"{timings['step'].speed(flops / product_flops)}"
        )


def compare_kernels(batch: int, rounds: int) -> None:
    """Print the cost of one layer's attention, forward and backward, with either kernel."""

    def by_hand(query: Tensor, key: Tensor, value: Tensor) -> None:
        scaled_dot_product_attention(query, key, value)[0].sum().backward()

    def fused(query: Tensor, key: Tensor, value: Tensor) -> None:
        F.scaled_dot_product_attention(query, key, value).sum().backward()

    shape = (batch, HEADS, (SIZE // PATCH) ** 2, DIM // HEADS)
    print(f"\nattention of one layer, {' x '.join(map(str, shape))}, forward and backward")
    for precision in native_precisions():
        parts = [torch.randn(shape, dtype=precision, requires_grad=True) for _ in range(3)]
        works = {"fused": partial(fused, *parts), "by hand": partial(by_hand, *parts)}
        timings = take_turns(works, rounds)
        hand = timings["by hand"]
        print(
            f"  {str(precision)[6:]}: fused {1000 * timings['fused'].seconds:.0f} ms, by hand "
            f"{1000 * hand.seconds:.0f} ms: speed {hand.speed()}"
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
    return build_step(Run.begin(config, env), images), images


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
    speed = size / mean_step_seconds(step, images)
    print(f"\nconfigs/quick.yaml, batch {size}: {speed:.0f} images/s, mean over a run")
    for phase in step.schedule.phases():
        whole = repeat_step(step, images, phase.start, batches)
        works = {"step": whole, "prepare": repeat_step(step, images, phase.start, batches, True)}
        timings = take_turns(works, rounds)
        rows, columns = phase.image_size
        print(
            f"  {rows} x {columns} pixels: {size * steps / timings['step'].seconds:.0f} images/s; "
            f"selecting, augmenting and shrinking takes {timings['prepare'].fraction()} of the step"
        )
    profile(whole)


def main() -> None:
    """Run all measurements."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--compile", action="store_true", help="compare compiled models too")
    parser.add_argument("--cpu_time", action="store_true", help="compare CPU time of one thread")
    arguments = parser.parse_args()
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    if arguments.cpu_time:
        torch.set_num_threads(1)
    print(f"{describe(CPU)}, torch {torch.__version__}")
    torch.manual_seed(0)
    batch, rounds, steps = arguments.batch, arguments.rounds, arguments.steps
    for group, precision in itertools.product(GROUPS, native_precisions()):
        fastest = compare_peers(group, precision, batch, rounds, steps, clock)
        if arguments.compile:
            compare_compiled(group, fastest, precision, batch, rounds, steps, clock)
    compare_to_products(batch, rounds)
    compare_kernels(arguments.batch, arguments.rounds)
    measure_quick(arguments.rounds)


if __name__ == "__main__":
    main()
