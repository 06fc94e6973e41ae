"""What users wait for: the start of the commands, and the peak memory of a run.

    python -m benchmarks.speed.startup [--rounds 5] [--root data]

Runs whole commands in separate processes, on CIFAR-10, which must be unpacked under --root:

1. `train.py --help`.
2. `import vit`.
3. TensorBoard, until it is ready, with the Attention tab and without any tab of other packages.
4. A photo, from the command to its sheet: `eval.py cifar10_quick photo photo.jpg`.
5. A run of configs/quick.yaml with a single training step: from the start of the command to the
   line that reports the step.
6. The report of cifar10_quick on the 10,000 test images.
7. The peak resident memory of the largest process in one epoch of configs/quick.yaml, including
   evaluation and figures.

Each is given as wall time and as CPU time of the first process, which hardly depends on what else
the machine does. On two idle cores, expect the first step within 9 seconds.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.tables import spread

HERE = Path(__file__).resolve().parents[2]
ALONE = """from tensorboard import default, main
default.get_dynamic_plugins = list
main.run_main()"""


def run(command: Sequence[str], sign: str | None = None) -> tuple[float, float, int]:
    """Run a command to its end, or until it prints a line that begins with `sign`.

    Args:
        command: What follows `python`, run in the root of the project.
        sign: Beginning of a line; None means the end of the command.

    Returns:
        Wall time and CPU time, in seconds, and peak resident memory, in bytes.
    """
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *command], cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    assert process.stdout is not None
    found = sign is None
    for line in process.stdout:
        if sign is not None and line.startswith(sign):
            found = True
            process.kill()
            break
    process.stdout.close()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if not found or (sign is None and process.returncode):
        raise SystemExit(f"{' '.join(command)} failed, or did not print {sign!r}")
    cpu = usage.ru_utime + usage.ru_stime
    return time.perf_counter() - start, cpu, usage.ru_maxrss * 1024


def main() -> None:
    """Run all measurements."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--root", default="data")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        photo, root = f"{folder}/photo.jpg", str(Path(arguments.root).resolve())
        noise = np.random.default_rng(0).integers(0, 256, (12, 16, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((1600, 1200), Image.Resampling.BICUBIC).save(photo)
        out = ("--out", f"{folder}/run", "--data.root", root)
        tabs = ("--logdir", folder, "--port", "0", "--load_fast", "false")
        quick = ("train.py", *out, "--train.epochs", "1", "--overwrite")
        commands: dict[str, tuple[Sequence[str], str | None]] = {
            "train.py --help": (("train.py", "--help"), None),
            "import vit": (("-c", "import vit"), None),
            "TensorBoard": (("-m", "tensorboard.main", *tabs), "TensorBoard"),
            "TensorBoard alone": (("-c", ALONE, *tabs), "TensorBoard"),
            "photo": (("eval.py", "cifar10_quick", "photo", photo, "--out", folder), None),
            "first training step": (
                (*quick, "--data.train_size", "128", "--data.val_size", "0"), "epoch",
            ),
            "report": (("eval.py", "cifar10_quick", *out[:1], f"{folder}/eval", *out[2:]), None),
        }  # fmt: skip
        print(f"{arguments.rounds} rounds: median (lowest to highest), seconds")
        for name, (command, sign) in commands.items():
            rounds = [run(command, sign) for _ in range(arguments.rounds)]
            wall, cpu, _ = zip(*rounds, strict=True)
            print(f"{name:<20} wall {spread(wall)}   CPU {spread(cpu)}", flush=True)
        print(f"{'peak memory':<20}{run(quick)[2] / 1e9:5.2f} GB")


if __name__ == "__main__":
    main()
