"""Peak memory and time of a training step with and without train.checkpoint_blocks.

    python -m benchmarks.scale.checkpointing [--batch 8] [--depths 6 12 24] [--rounds 3]

Forward, backward and AdamW of a plain Vision Transformer (256 tokens, dim 192, 3 heads, MLP
ratio 4) in float32 on the CPU, with random pixels. Each number comes from a process of its own,
whose largest resident memory is read after three steps; the memory before the first step, mostly
torch itself, is subtracted. Time is that of the fastest step. The processes take turns; numbers are
medians over the rounds. Expect half of the memory at 12 blocks, and 1.3 to 1.7 times the time.
"""

import argparse
import itertools
import resource
import statistics
import subprocess
import sys

import torch

from benchmarks.speed.train_step import training
from benchmarks.tables import markdown
from benchmarks.timing import compare, timed
from vit.hardware import describe
from vit.model.vit import VisionTransformer

SIZE, STEPS = 64, 3
MEBIBYTE = 1024  # in the kibibytes in which Linux reports resident memory


def measure(depth: int, checkpointed: bool, batch: int) -> tuple[float, float]:
    """Train a few steps in this process; return added peak memory in MiB, and seconds per step."""
    torch.manual_seed(0)
    model = VisionTransformer(
        img_size=SIZE, in_chans=3, num_classes=10, patch_size=4, stem="linear", embed_dim=192,
        depth=depth, num_heads=3, mlp_ratio=4, mlp_conv=False, zero_init=False,
    )  # fmt: skip
    model.set_grad_checkpointing(checkpointed)
    images, labels = torch.randn(batch, 3, SIZE, SIZE), torch.arange(batch) % 10
    step = training(model.train(), itertools.repeat((images, labels)), torch.float32)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = min(timed(step) for _ in range(STEPS))
    added = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return added / MEBIBYTE, seconds


def measure_apart(depth: int, checkpointed: bool, batch: int) -> tuple[float, float]:
    """Call `measure` in a new process."""
    words = [
        sys.executable,
        "-m",
        "benchmarks.scale.checkpointing",
        "--batch",
        str(batch),
        "--depths",
        str(depth),
        "--one",
    ]
    words += ["--checkpointed"] if checkpointed else []
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    memory, seconds = map(float, done.stdout.split())
    return memory, seconds


def main() -> None:
    """Print a table with a row for each depth."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--depths", type=int, nargs="+", default=(6, 12, 24))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--checkpointed", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(*measure(options.depths[0], options.checkpointed, options.batch))
        return
    device = describe(torch.device("cpu"))
    print(f"{device}, torch {torch.__version__}, float32, batch {options.batch}\n")
    rows = []
    for depth in options.depths:
        rounds = [
            [measure_apart(depth, flag, options.batch) for flag in (False, True)]
            for _ in range(options.rounds)
        ]
        memory = [statistics.median(one[flag][0] for one in rounds) for flag in (0, 1)]
        times = {f"{flag}": [one[flag][1] for one in rounds] for flag in (0, 1)}
        stored, little = compare(times).values()
        rows.append([
            f"{depth}", *(f"{value:,.0f}" for value in memory), f"{memory[1] / memory[0]:.2f} x",
            f"{stored.seconds:.2f}", f"{little.seconds:.2f}", little.cost(),
        ])  # fmt: skip
    heads = ["depth", "stored, MiB", "checkpointed, MiB", "memory", "stored, s", "checkpointed, s"]
    print(markdown([*heads, "time"], rows))


if __name__ == "__main__":
    main()
