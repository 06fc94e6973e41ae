"""Training speed compared with other implementations of the Vision Transformer, in one run.

    pip install -r benchmarks/requirements.txt
    python -m benchmarks.speed.train_step [--rounds 5] [--compile] [--cpu_time]

1. Forward, backward and AdamW of one architecture (dim 192, depth 9, 3 heads, patch size 4, MLP
   ratio 2, batch size 256, 32 x 32 pixels, 10 classes) in this project, timm, vit-pytorch and
   transformers, each with its defaults, in float32 and, where the CPU supports it natively, under
   bfloat16 autocast. Models with a class token (65 tokens) and models that average 64 tokens,
   without biases of queries, keys and values as in SimpleViT, are compared separately.
   With --compile, compiled models too; with --cpu_time, the CPU time of one thread, which hardly
   depends on other load.
2. The FLOP/s of configs/quick.yaml on one core next to those of large matrix products, compiled too
   with --compile.
3. Steps of configs/quick.yaml: the fraction spent selecting and augmenting images; a profile.

Expect this project to be as fast as the fastest of the others, within a tenth.

Pixels are random, because speed does not depend on them.
"""

import argparse
import itertools
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.timing import Clock, take_turns, timed
from vit.cli import parse_train
from vit.config import Config
from vit.data.images import ImageSet
from vit.data.preprocess import Preprocess
from vit.hardware import autocast, choose_precision, describe, on_cores
from vit.model.config import PATCH_SIZE, ModelConfig
from vit.model.vit import VisionTransformer
from vit.run.length import Length
from vit.training.build import build_step, time_phases
from vit.training.build import compiled as compile_model
from vit.training.start import Run
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


def timm_of_size(size: ModelConfig) -> nn.Module:
    """Build timm's plain model, with the width and depth of a config."""
    from timm.models.vision_transformer import VisionTransformer as TimmViT

    return TimmViT(
        SIZE, size.patch_size or PATCH_SIZE, num_classes=CLASSES, embed_dim=size.embed_dim,
        depth=size.depth, num_heads=size.num_heads, mlp_ratio=size.mlp_ratio,
    )  # fmt: skip


def vit_pytorch(name: str) -> nn.Module:
    """Build vit-pytorch's ViT or SimpleViT."""
    import vit_pytorch

    return getattr(vit_pytorch, name)(
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
        "vit-pytorch ViT": partial(vit_pytorch, "ViT"),
        "transformers ViT": Transformers,
    },
    "without a class token": {
        "ours": partial(ours, class_token=False),
        "timm": partial(timm_model, class_token=False),
        "vit-pytorch SimpleViT": partial(vit_pytorch, "SimpleViT"),
    },
}


def training(
    model: nn.Module, batches: Iterator[tuple[Tensor, Tensor]], precision: torch.dtype
) -> Callable[[], None]:
    """Return a function that trains a model for a step."""
    optimizer = torch.optim.AdamW(model.parameters())
    device = next(model.parameters()).device

    def work() -> None:
        images, labels = (part.to(device, non_blocking=True) for part in next(batches))
        backward(model, images, labels, precision)
        optimizer.step()
        optimizer.zero_grad()

    return work


def backward(model: nn.Module, images: Tensor, labels: Tensor, precision: torch.dtype) -> None:
    """Run the forward and backward pass of a model, which adds to its gradients."""
    with autocast(images.device, precision):
        logits = model(images)
    F.cross_entropy(logits.float(), labels).backward()


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


def compare_peers(
    group: str, precision: torch.dtype, batch: int, rounds: int, clock: Clock, compiled: bool
) -> None:
    """Print the training speed of the models of a group, and that of ours divided by each."""
    batches, works, notes = random_batches(batch), {}, {}
    for name, make in GROUPS[group].items():
        works[name] = training(make().train(), batches, precision)
        if compiled:
            model = cast(nn.Module, torch.compile(make().train(), dynamic=False))
            work = training(model, batches, precision)
            notes[f"{name}, compiled"] = f"   first step {timed(work):.0f} s"
            works[f"{name}, compiled"] = work
    print(f"\n{group}, {str(precision)[6:]}, batch {batch}: images/s, and ours over each")
    for name, timing in take_turns(works, rounds, clock).items():
        speed = f"{batch / timing.seconds:6.0f}"
        print(f"  {name:<34}{speed}   {timing.cost()}{notes.get(name, '')}")


def random_batches(batch: int, size: int = SIZE) -> Iterator[tuple[Tensor, Tensor]]:
    """Return an endless iterator over the same batch of random pixels and labels."""
    draw = torch.Generator().manual_seed(0)
    images = torch.randn(batch, 3, size, size, generator=draw)
    labels = torch.randint(CLASSES, (batch,), generator=draw)
    return itertools.repeat((images, labels))


def native_precisions() -> list[torch.dtype]:
    """List the precisions in which this CPU computes natively."""
    return sorted({torch.float32, choose_precision("auto", CPU)}, key=str, reverse=True)


def compare_to_products(rounds: int, compiled: bool, batch: int = 64) -> None:
    """Print how the FLOP/s of configs/quick.yaml on a core compare with those of large products."""
    step, _ = make_step(parse_train([])[0])
    models = {"quick": step.state.model}
    if compiled:
        models["quick, compiled"] = compile_model(step.state.model)
    for precision, phase in itertools.product(native_precisions(), step.schedule.phases()):
        size = phase.image_size[0]
        images, labels = next(random_batches(batch, size))
        flops = step.flop[phase.image_size] * batch / step.schedule.batch_size
        product, product_flops = matrix_product(precision)
        passes = {
            name: partial(backward, model, images, labels, precision)
            for name, model in models.items()
        }
        with on_cores(1):
            timings = take_turns({"products of 2048": product, **passes}, rounds)
        print(f"\n{size} x {size} pixels, forward and backward, one core, {str(precision)[6:]}")
        for name, timing in timings.items():
            work = flops if name in models else product_flops
            print(
                f"  {name:<34}{work / timing.seconds / 1e9:6.0f} GFLOP/s   "
                f"{timing.speed(work / product_flops)}"
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


def draw_images(count: int) -> ImageSet:
    """Return images of random pixels."""
    pixels = torch.randint(256, (count, 3, SIZE, SIZE), dtype=torch.uint8)
    return ImageSet(pixels, torch.arange(count) % 10, tuple("0123456789"))


def make_step(config: Config, device: torch.device = CPU) -> tuple[TrainingStep, ImageSet]:
    """Build the training step of a config, and images of random pixels for it."""
    images = draw_images(10_000).to(device)
    precision = choose_precision(config.train.precision, device)
    run = Run(config, Preprocess.from_config(config.data), device, precision)
    return build_step(run, images)[1], images


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
    config = parse_train([])[0]
    (step, images), size = make_step(config), config.train.batch_size
    batches = torch.randint(10_000, (steps, size))
    speed = size / Length(costs=time_phases(step, images, math.inf)).seconds(0, 1)
    print(f"\nconfigs/quick.yaml, batch {size}: {speed:.0f} images/s, mean over a run")
    for phase in step.schedule.phases():
        work = repeat_step(step, images, phase.start, batches)
        works = {"step": work, "prepare": repeat_step(step, images, phase.start, batches, True)}
        timings = take_turns(works, rounds)
        rows, columns = phase.image_size
        print(
            f"  {rows} x {columns} pixels: {size * steps / timings['step'].seconds:.0f} images/s; "
            f"selecting, augmenting and shrinking takes {timings['prepare'].fraction()} of the step"
        )
    profile(work)


def main() -> None:
    """Run all measurements."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--compile", action="store_true", help="compare compiled models too")
    parser.add_argument("--cpu_time", action="store_true", help="compare CPU time of one thread")
    arguments = parser.parse_args()
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    if arguments.cpu_time:
        torch.set_num_threads(1)
    print(f"{describe(CPU)}, torch {torch.__version__}")
    torch.manual_seed(0)
    batch, rounds = arguments.batch, arguments.rounds
    for group, precision in itertools.product(GROUPS, native_precisions()):
        compare_peers(group, precision, batch, rounds, clock, arguments.compile)
    compare_to_products(rounds, arguments.compile)
    measure_quick(rounds)


if __name__ == "__main__":
    main()
