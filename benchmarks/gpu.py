"""Steps of the recipes for a GPU: their speed, their share of the card, beside timm's.

    python benchmarks/gpu.py [--steps 30] [--configs configs/cifar10.yaml ...] [--data data]

1. What large bfloat16 matrix products reach here.
2. For each config: milliseconds a step and images/s, compiled as the config says, what share of the
   products' rate the model's operations run at, what share of a step is augmentation, how often the
   host waits for the device in a step, and which kernels take the time.
3. timm's VisionTransformer of the same width, depth, heads and tokens, compiled, under bfloat16
   autocast, with AdamW, fed by torchvision's CIFAR-10, transforms and DataLoader.

Pixels are random but for timm's: speed does not depend on them. Without a GPU it measures the CPU.
"""

import argparse
import itertools
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from timing import timed
from torch import Tensor

from vit.cli import parse_train
from vit.config import IMAGE_SIZE, Config
from vit.data.datasets import ImageSet, normalization
from vit.training.hardware import autocast, choose_device, choose_precision, describe
from vit.training.loop import Loop
from vit.training.state import build_state

CONFIGS = ("configs/cifar10.yaml", "configs/cifar10_fast.yaml", "configs/cifar10_paper.yaml")
CLASSES = 10
WARM = 5  # steps that are not counted: compiling and choosing kernels


def wait(device: torch.device) -> None:
    """Wait until a device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds_a_step(work: Callable[[], object], steps: int, device: torch.device) -> float:
    """Return the median seconds of a tenth of the steps, over their number."""
    for _ in range(WARM):
        work()
    each = max(1, steps // 10)

    def some() -> None:
        for _ in range(each):
            work()
        wait(device)

    wait(device)
    return statistics.median(timed(some) for _ in range(max(1, steps // each))) / each


def matrix_rate(device: torch.device, size: int) -> float:
    """Return what bfloat16 products of matrices of a size reach, FLOP/s."""
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    return 2 * size**3 / seconds_a_step(lambda: a @ b, 50, device)


def make_loop(config: Config, device: torch.device) -> Loop:
    """Make the loop of a config on random pixels."""
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (50_000, 3, IMAGE_SIZE, IMAGE_SIZE), generator=draw).byte()
    images = ImageSet(pixels, torch.arange(50_000) % CLASSES, tuple("0123456789"))
    state = build_state(config, CLASSES, device)
    precision = choose_precision(config.train.precision, device)
    loop = Loop(config, state, images, images.select(torch.arange(8)), device, precision)
    loop.count_steps()
    return loop


def flops_of_step(loop: Loop, size: int) -> float:
    """Count the operations of products and convolutions of a step, forward and backward."""
    from torch.utils.flop_counter import FlopCounterMode

    images = torch.randn(2, 3, size, size, device=loop.device)
    with FlopCounterMode(display=False) as counter:
        loop.state.model(images).sum().backward()
    loop.state.model.zero_grad(set_to_none=True)
    return counter.get_total_flops() / 2 * loop.config.train.batch_size


def waits_in_step(step: Callable[[], object], device: torch.device) -> int:
    """Count how often a step makes the host wait for the device."""
    if device.type != "cuda":
        return 0
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
    torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


def profile(work: Callable[[], object], device: torch.device, rows: int = 12) -> None:
    """Print which kernels some work spends the device's time in."""
    with torch.profiler.profile() as profiler:
        work()
        wait(device)
    averages = profiler.key_averages()

    def cost(row: torch.autograd.profiler_util.FunctionEventAvg) -> float:
        on_gpu = device.type == "cuda"
        return row.self_device_time_total if on_gpu else row.self_cpu_time_total

    total = sum(cost(row) for row in averages)
    for row in sorted(averages, key=lambda row: -cost(row))[:rows]:
        print(f"    {row.key[:60]:<62}{cost(row) / total:6.1%}{row.count:8,} calls")


def measure_config(config: Config, device: torch.device, steps: int, rate: float) -> float:
    """Print what a config's steps cost; return the images/s of those at full size."""
    loop = make_loop(config, device)
    batch = torch.arange(config.train.batch_size, device=device)
    full = 0.0
    for size, share in loop.plan.stages():
        begin = time.perf_counter()
        loop._train_batch(batch, 0.1, size)
        wait(device)
        first = time.perf_counter() - begin

        def step(size: int = size) -> None:
            loop._train_batch(batch, 0.1, size)

        def prepare(size: int = size) -> None:
            loop._augmented(batch, size)

        seconds = seconds_a_step(step, steps, device)
        augmenting = seconds_a_step(prepare, steps, device)
        flops = flops_of_step(loop, size)
        full = len(batch) / seconds
        print(
            f"  {size} x {size}, {share:.0%} of the steps: {1000 * seconds:.2f} ms a step, "
            f"{full:,.0f} images/s; {flops / seconds / 1e12:.1f} TFLOP/s, "
            f"{flops / seconds / rate:.0%} of the products' rate; augmentation alone takes "
            f"{augmenting / seconds:.1%} of that; the host waits {waits_in_step(step, device)} "
            f"times; the first step took {first:.1f} s"
        )
        profile(step, device)
    return full


def batches_of_torchvision(config: Config, root: Path) -> Iterator[tuple[Tensor, Tensor]]:
    """Return CIFAR-10's training images as torchvision's loader gives them, for ever."""
    from torchvision import transforms
    from torchvision.datasets import CIFAR10

    mean, std = normalization("cifar10", torch.device("cpu"))
    augment = config.augment
    changes = [
        transforms.RandomCrop(IMAGE_SIZE, padding=augment.crop_padding),
        transforms.RandomHorizontalFlip(),
        *([transforms.RandAugment(augment.rand_ops)] if augment.rand_ops else []),
        transforms.ToTensor(),
        transforms.Normalize(mean.flatten().tolist(), std.flatten().tolist()),
        transforms.RandomErasing(augment.erasing),
    ]
    images = CIFAR10(root, train=True, transform=transforms.Compose(changes))
    loader = torch.utils.data.DataLoader(
        images, config.train.batch_size, shuffle=True, drop_last=True, pin_memory=True,
        num_workers=os.cpu_count() or 1, persistent_workers=True,
    )  # fmt: skip
    return itertools.chain.from_iterable(itertools.repeat(loader))


def timm_images_per_second(
    config: Config, device: torch.device, steps: int, root: Path | None
) -> float:
    """Measure timm's model of a config's size; without root on one batch that stays there."""
    from timm.models.vision_transformer import VisionTransformer as TimmViT

    sizes = config.model
    model = TimmViT(
        IMAGE_SIZE, sizes.patch_size, num_classes=CLASSES, embed_dim=sizes.embed_dim,
        depth=sizes.depth, num_heads=sizes.num_heads, mlp_ratio=sizes.mlp_ratio,
    ).to(device)  # fmt: skip
    forward = torch.compile(model) if config.train.compile else model
    optimizer = torch.optim.AdamW(model.parameters())
    fixed = torch.randn(config.train.batch_size, 3, IMAGE_SIZE, IMAGE_SIZE, device=device)
    classes = torch.arange(len(fixed), device=device) % CLASSES
    batches = batches_of_torchvision(config, root) if root else itertools.repeat((fixed, classes))

    def step() -> None:
        images, labels = (part.to(device, non_blocking=True) for part in next(batches))
        with autocast(device, torch.bfloat16):
            logits = forward(images)
        F.cross_entropy(logits.float(), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return len(fixed) / seconds_a_step(step, steps, device)


def main() -> None:
    """Run all of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--configs", nargs="+", default=CONFIGS)
    parser.add_argument("--data", type=Path, help="where cifar-10-batches-py is, for timm's loader")
    parser.add_argument("--matrix", type=int, default=8192)
    arguments = parser.parse_args()
    device = choose_device("auto")
    rate = matrix_rate(device, arguments.matrix)
    print(
        f"{describe(device)}, torch {torch.__version__}; bfloat16 products of "
        f"{arguments.matrix} reach {rate / 1e12:.2f} TFLOP/s"
    )
    for path in arguments.configs:
        config = parse_train(["--config", path])[0]
        print(f"\n{path}, batch {config.train.batch_size}")
        ours = measure_config(config, device, arguments.steps, rate)
        for name, root in {"a batch on the device": None, "its loader": arguments.data}.items():
            if name == "its loader" and root is None:
                continue
            theirs = timm_images_per_second(config, device, arguments.steps, root)
            print(f"  timm with {name}: {theirs:,.0f} images/s; ours {ours / theirs:.2f} x that")


if __name__ == "__main__":
    main()
