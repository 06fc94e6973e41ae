"""The cost of attention maps, as ratios measured within one run.

    python -m benchmarks.speed.attention [--rounds 7] [--images 1000]
    python -m benchmarks.speed.attention --records RUN ...

1. Attention rollout and layer-wise relevance of 1,000 images, compared with plain forward passes of
   the same quick model with torch's fused kernel and with the hand-written one, and with a forward
   and a backward pass, taking turns (A B C A B C).
2. The logging of a run of configs/quick.yaml, without the model for the tab and muted heads, as a
   fraction of its training time: the measured cost of a training step and of each kind of logging,
   times how often it happens.

The model is untrained, because speed does not depend on the weights. Expect rollout to cost no more
than a forward pass, relevance of tokens twice as much, and this logging less than a twentieth of
the training time.

With --records, nothing is timed: for each run folder, the size of what is logged for the Attention
tab of TensorBoard. Details, weights and features are the bytes of one image at one step, frames
those of a step, raw those of the weights before compression.
"""

import argparse
import contextlib
import dataclasses
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import cast
from unittest import mock

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from benchmarks.speed.train_step import draw_images, make_step, repeat_step
from benchmarks.tables import markdown
from benchmarks.timing import compare, take_times, take_turns
from vit.cli import parse_train
from vit.commands.train import build_loop
from vit.data.preprocess import Preprocess
from vit.data.sampling import HELD_OUT
from vit.explain.maps import attention_maps
from vit.explain.rollout import attention_rollout
from vit.hardware import autocast, choose_precision, describe
from vit.model.vit import VisionTransformer
from vit.reporting.report import write_report
from vit.run.length import Length, Milestones
from vit.run.tracker import Tracker
from vit.tensorboard_plugin.encoding import PLUGIN_NAME, decode_weights, part_of
from vit.training.build import build_step
from vit.training.start import Run

CPU = torch.device("cpu")


@torch.no_grad()
def forward(model: VisionTransformer, images: Tensor, precision: torch.dtype, fused: bool) -> None:
    """Classify images in batches, without attention maps, on torch's fused kernel or without."""
    choice = mock.patch("vit.model.attention.uses_fused_kernel", return_value=fused)
    with choice, autocast(CPU, precision):
        for part in images.split(250):
            model(part)


def backward(model: VisionTransformer, images: Tensor, precision: torch.dtype) -> None:
    """Classify images in batches and differentiate the largest logits by the pixels."""
    for part in images.split(250):
        part = part.clone().requires_grad_()
        with autocast(CPU, precision):
            logits = model(part)
        torch.autograd.grad(logits.amax(dim=1).sum(), part)


def maps(model: VisionTransformer, images: Tensor, precision: torch.dtype, kind: str) -> None:
    """Classify images in batches and compute their maps."""
    for part in images.split(250):
        attention_maps(model, part, [kind], precision=precision)


def compare_maps(images: Tensor, precision: torch.dtype, rounds: int) -> None:
    """Print how long maps take compared with plain forward passes."""
    step, _ = make_step(parse_train([])[0])
    model = cast(VisionTransformer, step.state.model.eval())
    works: dict[str, Callable[[], object]] = {
        "fused forward": lambda: forward(model, images, precision, fused=True),
        "written forward": lambda: forward(model, images, precision, fused=False),
        "forward and backward": lambda: backward(model, images, precision),
        "forward and rollout": lambda: maps(model, images, precision, "rollout"),
        "layer-wise relevance": lambda: maps(model, images, precision, "lrp"),
        "relevance × rollout": lambda: maps(model, images, precision, "lrp_rollout"),
        "relevance of pixels": lambda: maps(model, images, precision, "lrp_pixels"),
    }
    with torch.no_grad(), autocast(CPU, precision):
        _, weights, _ = model.forward_intermediates(images[:250])
    works["rollout alone"] = lambda: [
        attention_rollout(weights, readout="mean", num_prefix_tokens=0)
        for _ in range(0, len(images), 250)
    ]
    print(
        f"\nmaps of {len(images):,} images, {str(precision)[6:]}, median of {rounds} rounds: time, "
        "and ratio to the first"
    )
    for name, timing in take_turns(works, rounds).items():
        print(f"  {name:<22}{1000 * timing.seconds:8.0f} ms   {timing.cost()}")


def measure_logging(precision: torch.dtype, rounds: int) -> None:
    """Print what fraction of the quick run's time its logging takes."""
    config = parse_train(["--train.device", "cpu"])[0]
    steps = config.train.epochs * (49_000 // config.train.batch_size)
    with tempfile.TemporaryDirectory() as folder:
        config = dataclasses.replace(config, out=folder)
        training, held_out = draw_images(6400), draw_images(HELD_OUT)
        run = Run(config, Preprocess.from_config(config.data), CPU, precision)
        _, step = build_step(run, training)
        batch = torch.arange(config.train.batch_size)[None]
        with contextlib.closing(Tracker(Path(folder))) as tracker:
            loop = build_loop(run, step, training, held_out, tracker)
            values = {"train/loss": 1.0, "train/accuracy": 0.5, "train/lr": 0.1, "train/speed": 1.0}
            classifier, test = loop.classifier(), draw_images(10_000)

            def milestone() -> None:
                step.state.step = 0
                loop.evaluate()

            phases = {phase.start: phase.fraction for phase in step.schedule.phases()}
            works: dict[str, Callable[[], object]] = {
                **{f"{at}": repeat_step(step, training, at, batch) for at in phases},
                "milestone": milestone,
                "curves": lambda: tracker.scalars(0, values),
                "report": lambda: write_report(classifier, test, Path(folder) / "eval", step=0),
                "classifying": lambda: classifier.logits(test.pixels()),
            }
            seconds = take_times(works, rounds)
    # What each part of a whole run takes, from the times of each round.
    step_seconds = [
        sum(part * seconds[f"{at}"][turn] for at, part in phases.items()) for turn in range(rounds)
    ]
    at_milestones = len(Milestones(Length(steps), config.track.milestones))
    points = steps // config.track.every
    parts = {
        "training": [steps * one for one in step_seconds],
        f"{at_milestones} milestones of attention": [
            at_milestones * one for one in seconds["milestone"]
        ],
        f"{points} points of the curves": [points * one for one in seconds["curves"]],
        "pictures and files of the report": [
            max(1e-9, both - one)
            for both, one in zip(seconds["report"], seconds["classifying"], strict=True)
        ],
    }
    logging = list(parts.values())[1:]
    parts["all together"] = [sum(each) for each in zip(*logging, strict=True)]
    print(
        f"\nlogging of configs/quick.yaml, {steps:,} steps, without the model for the tab and "
        "muted heads: time, and fraction of training"
    )
    for name, timing in compare(parts).items():
        print(f"  {name:<36}{timing.seconds:6.1f} s   {timing.fraction()}")


def size_of_records(run: Path) -> list[str]:
    """Return the cells of a run in the table of what its Attention tab is logged in."""
    events = EventAccumulator(str(run), size_guidance={"tensors": 0}).Reload()
    sizes = defaultdict[str, list[int]](list)
    steps, raw = set(), 0
    for tag in events.PluginTagToContent(PLUGIN_NAME):
        part: str = part_of(events.SummaryMetadata(tag).plugin_data.content)
        part = "frames" if tag.endswith("/frames") else part
        for event in events.Tensors(tag):
            (data,) = event.tensor_proto.string_val
            sizes[part].append(len(data))
            steps.add(event.step)
            raw = decode_weights(data)[0].size if part == "weights" else raw
    parts = [sizes[part] for part in ("details", "weights", "features", "frames")]
    total = sum(map(sum, parts))
    everything = sum(path.stat().st_size for path in run.glob("events.out.tfevents.*"))
    means = [round(sum(s) / max(len(s), 1)) for s in parts]
    images = len(sizes["details"]) // max(len(steps), 1)
    counts = [f"{number:,}" for number in (images, len(steps), *means, raw)]
    return [str(run), *counts, f"{total / 1e6:.2f} MB", f"{total / everything:.0%}"]


def main() -> None:
    """Run both measurements."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--records", nargs="+", type=Path, metavar="RUN", help="run folders")
    arguments = parser.parse_args()
    if arguments.records:
        heads = ["run", "images", "steps", "details", "weights", "features", "frames", "raw"]
        heads += ["total", "of all events"]
        print(markdown(heads, map(size_of_records, arguments.records)))
        return
    precision = choose_precision("auto", CPU)
    print(f"{describe(CPU)}, torch {torch.__version__}")
    images = torch.randn(arguments.images, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for each in dict.fromkeys((precision, torch.float32)):
        compare_maps(images, each, arguments.rounds)
    measure_logging(precision, arguments.rounds)


if __name__ == "__main__":
    main()
