"""Memory, communication and time of a training run, before any GPU is rented.

    python -m benchmarks.scale.plan --model vit_base --gpus 8 --batch_size 4096 --epochs 90
    python -m benchmarks.scale.plan --model vit_giant --gpus 512 --hosts 64 --parallel hybrid
    python -m benchmarks.scale.plan --config configs/imagenet_vit_b.yaml --gpus 8

Nothing is measured. The model is built and a step traced with tensors that have shapes but no
values: parameters, FLOP and the tensors that autograd saves are those of the code, in bfloat16
autocast with flash attention. Bytes sent are those of ring algorithms. Times are estimates: FLOP
over the part of a GPU's peak that is assumed to be reached (--mfu), bytes over bandwidth, and the
longer of the two where they overlap. Any key of a config can be added, e.g. --model.reg_tokens 4.

Not counted: workspaces of kernels, gradients of activations, fragmentation, and what driver and
NCCL reserve, so leave a tenth of the memory free; the first gather and the last reduction of a
step, which nothing hides; AdamW, reading images, validation and checkpoints. All steps have images
of full size.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NoReturn

import torch

from benchmarks.scale.planning import Cluster, Phase, Transfer, memory, phases, transfers
from benchmarks.scale.tracing import build, count_flops, muons, trace_activations
from vit.cli import parse_train, user_errors
from vit.distributed.shard import fits_replicated
from vit.settings import require
from vit.training.checks import check_processes
from vit.training.config import Config

# Classes and training images of data sets; those of others are taken to be ImageNet-1k's.
KNOWN = {"cifar10": (10, 50_000), "cifar100": (100, 50_000)}
IMAGENET = (1000, 1_281_167)
POSITIVE = ("classes", "gpus", "hosts", "train_images", "within", "between", "epochs", "images")
USABLE = 0.9  # fraction of the memory

# Width, depth, heads, MLP ratio and patch size (arXiv 2010.11929; of giant 2106.04560).
SIZES = {
    "vit_tiny": (192, 12, 3, 4, 16),
    "vit_small": (384, 12, 6, 4, 16),
    "vit_base": (768, 12, 12, 4, 16),
    "vit_large": (1024, 24, 16, 4, 16),
    "vit_huge": (1280, 32, 16, 4, 14),
    "vit_giant": (1408, 40, 16, 48 / 11, 14),
}


@dataclass(frozen=True)
class Device:
    """A GPU and its links; the bandwidths of NVIDIA's data sheets are twice these, in and out.

    Attributes:
        memory: Bytes.
        peak: FLOP/s of dense bfloat16 matrix products.
        within: Bytes/s that it sends to the GPUs of its host: NVLink.
        between: Bytes/s that it sends to other hosts: the InfiniBand card that each GPU of a DGX
            host has.
    """

    memory: float
    peak: float
    within: float
    between: float


DEVICES = {
    "a100": Device(80e9, 312e12, 300e9, 25e9),  # NVLink 3, 200 Gb/s
    "h100": Device(80e9, 989e12, 450e9, 50e9),  # NVLink 4, 400 Gb/s
    "h200": Device(141e9, 989e12, 450e9, 50e9),
}


def read_options() -> tuple[argparse.Namespace, Config]:
    """Read the command line: the options, and the config of the run.

    Raises:
        ValueError: A value is not allowed.
    """
    parser = _Parser(
        description=__doc__.partition("\n")[0], allow_abbrev=False,
        epilog="Any key of a config can be added, e.g. --model.reg_tokens 4.",
    )  # fmt: skip
    add = parser.add_argument
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", choices=SIZES, help="plain model (default: vit_base)")
    model.add_argument("--config", metavar="FILE", help="config of train.py")
    add("--classes", type=int, help="default: those of CIFAR-10 and CIFAR-100, 1000 for others")
    add("--gpus", type=int, default=8, help="GPUs on all hosts together (default: 8)")
    add("--hosts", type=int, default=1, help="hosts that they are on (default: 1)")
    add("--device", choices=DEVICES, default="h100", help="kind of GPU (default: h100)")
    add("--mfu", type=float, default=0.4, help="fraction of its peak reached (default: 0.4)")
    add("--within", type=float, metavar="GB/S", help="what a GPU sends to others on its host")
    add("--between", type=float, metavar="GB/S", help="what a GPU sends to other hosts")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=float, help="length of the run (default: the config's)")
    length.add_argument("--images", type=float, help="length of the run, in place of epochs")
    add(
        "--train_images", type=float,
        help="of an epoch (default: those of CIFAR-10 and CIFAR-100, of others ImageNet-1k's, "
        "without those that data.val_size holds out)",
    )  # fmt: skip
    # What follows are keys of the config.
    add("--image_size", dest="data.image_size", help="pixels (--model: 224)")
    add("--batch_size", dest="train.batch_size", help="images of a step (--model: 4096)")
    add("--accumulate", dest="train.accumulate", help="micro-batches of a step (--model: 1)")
    add("--optimizer", dest="optim.name", help="adamw or muon (--model: adamw)")
    add(
        "--parallel", dest="train.parallel",
        help="replicate the model on all GPUs, shard it among all, or hybrid: among those of a "
        "host (default: replicate, or shard if it takes more than half of the memory)",
    )  # fmt: skip
    add(
        "--ema", dest="optim.ema_decay", action="store_const", const="0.9999",
        help="keep a moving average of the weights",
    )  # fmt: skip
    add(
        "--checkpoint_blocks", dest="train.checkpoint_blocks", action="store_const", const="true",
        help="recompute the activations of the blocks",
    )  # fmt: skip
    options, keys = parser.parse_known_args()
    for key in POSITIVE:
        value = getattr(options, key)
        require(value is None or value > 0, f"--{key}", value, "more than 0")
    require(0 < options.mfu <= 1, "--mfu", options.mfu, "more than 0 and up to 1")
    gpus, hosts = options.gpus, options.hosts
    require(gpus % hosts == 0, "--hosts", hosts, f"a divisor of --gpus={gpus}")
    if options.config is None:
        options.model = options.model or "vit_base"
    words = plain(options.model) if options.model else ["--config", options.config]
    for key, value in vars(options).items():
        words += [f"--{key}", value] if "." in key and value is not None else []
    config, _ = parse_train([*words, *keys])
    train = replace(config.train, processes=None)  # a run on a CPU writes down how many it had
    require(train.freeze == "none", "train.freeze", train.freeze, "none in a plan")
    require(train.budget_minutes is None, "train.budget_minutes", train.budget_minutes, "null here")
    config = replace(config, train=train)
    check_processes(config, gpus)
    given = any(key.partition("=")[0] == "--train.epochs" for key in keys)
    if options.epochs is None and (options.config or given):
        options.epochs = train.epochs
    assume(options, config)
    return options, config


def assume(options: argparse.Namespace, config: Config) -> None:
    """Fill in the numbers of classes and of training images, where they are not given."""
    classes, images = KNOWN.get(config.data.name, IMAGENET)
    held_out = config.data.val_size or 0
    images -= round(held_out * images if held_out < 1 else held_out)
    options.classes = options.classes or classes
    options.train_images = options.train_images or images


class _Parser(argparse.ArgumentParser):
    """A parser that raises ValueError for a mistake."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


def plain(name: str) -> list[str]:
    """Return the arguments of train.py for a plain Vision Transformer."""
    width, depth, heads, ratio, patch = SIZES[name]
    return (
        "--data.name folder --data.image_size 224 --train.batch_size 4096 --optim.name adamw "
        "--model.stem linear --model.mlp_conv false --model.zero_init false "
        f"--model.class_token true --model.global_pool token --model.patch_size {patch} "
        f"--model.embed_dim {width} --model.depth {depth} --model.num_heads {heads} "
        f"--model.mlp_ratio {ratio}"
    ).split()


def show_memory(rows: dict[str, float], capacity: float) -> Iterator[str]:
    """Format the bytes in a GPU's memory."""
    yield "Memory of a GPU, GB"
    for name, value in rows.items():
        yield f"  {name:<36}{value / 1e9:9.2f}"
    total = sum(rows.values())
    found = "fits into" if total < USABLE * capacity else "more than"
    yield f"  {'total':<36}{total / 1e9:9.2f}   {found} {USABLE:.0%} of {capacity / 1e9:.0f} GB"


def show_transfers(exchanged: list[Transfer]) -> Iterator[str]:
    """Format the bytes that a GPU sends."""
    yield f"{'Sent by a GPU in a step, GB':<38}{'in its host':>12}{'to others':>12}"
    for name in dict.fromkeys(one.name for one in exchanged if one.sent):
        same = [one for one in exchanged if one.name == name]
        within, between = sum(one.within for one in same), sum(one.between for one in same)
        yield f"  {name:<36}{within / 1e9:12.3f}{between / 1e9:12.3f}"


def show_phases(found: list[Phase], images: int) -> Iterator[str]:
    """Format the duration of the parts of a step with a number of images."""
    accumulates = any(one.name == "backward" and one.computing for one in found)
    names = {"last": "backward, last micro-batch" if accumulates else "backward"}
    yield f"{'A step, ms':<38}{'computing':>12}{'sending':>12}"
    for one in found:
        if one.seconds:
            hidden = "hidden" if one.seconds == one.computing else "not hidden"
            yield (
                f"  {names.get(one.name, one.name):<36}{1e3 * one.computing:12.1f}"
                f"{1e3 * one.sending:12.1f}   {hidden if one.sending else ''}"
            ).rstrip()
    total = sum(one.seconds for one in found)
    yield f"  {'total':<36}{1e3 * total:12.1f}{'':15}{images / total:,.0f} images/s"


def duration(seconds: float) -> str:
    """Format the length of a run."""
    units = (("days", 86400), ("hours", 3600), ("minutes", 60))
    name, unit = next((pair for pair in units if seconds >= 2 * pair[1]), units[-1])
    return f"{seconds / unit:.1f} {name}"


def show_step(
    options: argparse.Namespace,
    config: Config,
    flops: tuple[float, float],
    update: float,
    exchanged: list[Transfer],
) -> Iterator[str]:
    """Format the duration of a step and of the run.

    Args:
        options: The command line.
        config: The run.
        flops: FLOP of a GPU in the forward and the backward pass of a step.
        update: FLOP of a GPU in the update of the weights.
        exchanged: What is sent in a step.
    """
    train, device = config.train, DEVICES[options.device]
    within, between = options.within or device.within / 1e9, options.between or device.between / 1e9
    forward, backward, updating = (flop / (options.mfu * device.peak) for flop in (*flops, update))
    found = phases(
        (forward, backward), updating, exchanged, train.accumulate, 1e9 * within, 1e9 * between
    )
    yield from show_phases(found, train.batch_size)
    images = options.images or (options.epochs or 0) * options.train_images
    if images:
        seconds = images / train.batch_size * sum(one.seconds for one in found)
        yield f"  {f'{images:,.0f} images':<36}{duration(seconds):>12}"
    yield ""
    counts = f", an epoch of {options.train_images:,.0f} images" if options.epochs else ""
    yield f"Assumed: {options.classes} classes{counts}."
    yield (
        f"An estimate with {options.mfu:.0%} of {device.peak / 1e12:.0f} TFLOP/s, and for each GPU "
        f"{within:g} GB/s within its host and {between:g} GB/s to others."
    )


def report(options: argparse.Namespace, config: Config) -> Iterator[str]:
    """Yield the lines of the plan."""
    train, spec = config.train, config.data.spec
    model = build(config, options.classes)
    parallel = train.parallel
    if parallel == "auto":
        num_weights = sum(parameter.numel() for parameter in model.parameters())
        fits = fits_replicated(num_weights, DEVICES[options.device].memory)
        parallel = "replicate" if fits else "shard"
    cluster = Cluster(options.gpus, options.hosts, parallel)
    size = (spec.channels, *spec.image_size)
    forward, backward = count_flops(model, size, train.checkpoint_blocks)
    weights = torch.float32 if cluster.parallel == "replicate" else torch.bfloat16
    activations = trace_activations(model, size, weights)
    muon = muons(model, config.optim.name)
    parameters, each = sum(p.numel() for p in model.parameters()), train.batch_size / cluster.gpus
    yield f"{options.config or options.model}: {parameters / 1e6:,.1f} million parameters"
    yield (
        f"An image of {size[1]} x {size[2]}: {forward / 1e9:,.1f} GFLOP forward, "
        f"{backward / 1e9:,.1f} backward; activations {activations.stored / 1e6:,.1f} MB, with "
        f"train.checkpoint_blocks {activations.checkpointed / 1e6:,.1f} MB"
    )
    yield (
        f"{cluster.gpus} {options.device} on {cluster.hosts} host{'s' * (cluster.hosts > 1)}, "
        f"{cluster.parallel}, {config.optim.name}; {train.batch_size} images a step, {each:g} on "
        f"each GPU, {each / train.accumulate:g} at a time"
    )
    yield ""
    rows = memory(model, config, cluster, activations, muon.parameters)
    yield from show_memory(rows, DEVICES[options.device].memory)
    yield ""
    exchanged = transfers(model, cluster, train.accumulate, muon.parameters)
    if cluster.gpus > 1:
        yield from show_transfers(exchanged)
        yield ""
    flops = (each * forward, each * backward)
    yield from show_step(options, config, flops, muon.flops / cluster.gpus, exchanged)


def main() -> None:
    """Print the plan of a run."""
    with user_errors():
        for line in report(*read_options()):
            print(line)


if __name__ == "__main__":
    main()
