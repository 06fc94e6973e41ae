"""Training steps of the recipes for a GPU: speed, utilization, and a comparison with timm.

    python -m benchmarks.speed.gpu [--steps 30] [--configs configs/cifar10.yaml ...] [--data data]

1. For each config, compiled if the config says so: milliseconds per step and images/s, the model's
   FLOP/s next to those of large bfloat16 matrix products, the fraction of a step spent on
   augmentation, how often the host waits for the device in a step, and the kernels that take the
   most time.
2. timm's VisionTransformer of the same width, depth, heads and tokens, compiled if the config says
   so, under bfloat16 autocast with AdamW: on a batch that stays on the device and, with --data, fed
   by torchvision's CIFAR-10, transforms and DataLoader. The two take turns.

A step in which the host waits, or in which augmentation takes more than a few percent, is worth a
look.

Pixels are random except with --data, because speed does not depend on them. Without a GPU, the CPU
is measured.
"""

import argparse
import itertools
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.speed.train_step import (
    CLASSES,
    ROUNDS,
    SIZE,
    make_step,
    matrix_product,
    profile,
    repeat_step,
    repeated,
    timm_of_size,
    training,
)
from benchmarks.timing import take_turns, timed
from vit.cli import parse_train
from vit.config import Config
from vit.data.config import DATASETS
from vit.hardware import choose_device, describe

CONFIGS = ("configs/cifar10.yaml", "configs/cifar10_fast.yaml", "configs/cifar10_paper.yaml")


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


def measure_config(
    config: Config, device: torch.device, each: int, matrix: int
) -> Callable[[], None]:
    """Print the speed of a config's steps; return a step of the last phase, at full size."""
    step, images = make_step(config, device)
    batch = torch.arange(config.train.batch_size, device=device)
    product, product_flops = matrix_product(torch.bfloat16, device, matrix)
    for phase in step.schedule.phases():
        rows, columns = phase.image_size
        work = repeat_step(step, images, phase.start, batch[None])
        first = timed(work)
        prepare = repeat_step(step, images, phase.start, batch[None], prepare_only=True)
        works = {"step": work, "prepare": prepare, "product": product}
        timings = take_turns(
            {name: repeated(one, device, each) for name, one in works.items()}, ROUNDS
        )
        seconds = timings["step"].seconds / each
        flops = step.flop[phase.image_size]
        print(
            f"  {rows} x {columns}, {phase.fraction:.0%} of the steps: "
            f"{1000 * seconds:.2f} ms per step, {len(batch) / seconds:,.0f} images/s; "
            f"{flops / seconds / 1e12:.1f} TFLOP/s; products of size {matrix} reach "
            f"{timings['product'].speed(product_flops / flops)} that; "
            f"augmentation takes {timings['prepare'].fraction()} of the step; "
            f"the host waits {waits_in_step(work, device)} times; the first step took {first:.1f} s"
        )
        profile(work, device)
    return work


def batches_of_torchvision(config: Config, root: Path) -> Iterator[tuple[Tensor, Tensor]]:
    """Return an endless iterator over CIFAR-10's training batches from torchvision's loader."""
    from torchvision import transforms
    from torchvision.datasets import CIFAR10

    spec = DATASETS["cifar10"]
    augment = config.augment
    changes = [
        transforms.RandomCrop(SIZE, padding=augment.crop_padding),
        transforms.RandomHorizontalFlip(),
        *([transforms.RandAugment(augment.rand_ops)] if augment.rand_ops else []),
        transforms.ToTensor(),
        transforms.Normalize(spec.mean, spec.std),
        transforms.RandomErasing(augment.erasing),
    ]
    images = CIFAR10(root, train=True, transform=transforms.Compose(changes))
    loader = torch.utils.data.DataLoader(
        images, config.train.batch_size, shuffle=True, drop_last=True,
        pin_memory=torch.cuda.is_available(), num_workers=os.cpu_count() or 1,
        persistent_workers=True,
    )  # fmt: skip
    return itertools.chain.from_iterable(itertools.repeat(loader))


def timm_step(
    config: Config, device: torch.device, batches: Iterator[tuple[Tensor, Tensor]]
) -> Callable[[], None]:
    """Return a training step of timm's model of the same size as a config's."""
    model = timm_of_size(config.model).to(device)
    if config.train.compile is True:
        model.compile()
    return training(model, batches, torch.bfloat16)


def main() -> None:
    """Run all measurements."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--configs", nargs="+", default=CONFIGS)
    parser.add_argument("--data", type=Path, help="folder of cifar-10-batches-py, for the loader")
    parser.add_argument("--matrix", type=int, default=8192)
    arguments = parser.parse_args()
    device, each = choose_device("auto"), max(1, arguments.steps // 10)
    print(f"{describe(device)}, torch {torch.__version__}, bfloat16")
    for path in arguments.configs:
        config = parse_train(["--config", path])[0]
        batch = config.train.batch_size
        print(f"\n{path}, batch {batch}")
        ours = repeated(measure_config(config, device, each, arguments.matrix), device, each)
        fixed = torch.randn(batch, 3, SIZE, SIZE, device=device)
        classes = torch.arange(batch, device=device) % CLASSES
        sources: dict[str, Iterator[tuple[Tensor, Tensor]]] = {
            "a batch on the device": itertools.repeat((fixed, classes))
        }
        if arguments.data:
            sources["torchvision's loader"] = batches_of_torchvision(config, arguments.data)
        for name, batches in sources.items():
            timm = repeated(timm_step(config, device, batches), device, each)
            timings = take_turns({"timm": timm, "ours": ours}, ROUNDS)
            speed = batch * each / timings["timm"].seconds
            print(f"  timm with {name}: {speed:,.0f} images/s; ours {timings['ours'].speed()} that")


if __name__ == "__main__":
    main()
