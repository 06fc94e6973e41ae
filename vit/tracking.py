"""What goes to TensorBoard under which tag, and to metrics.jsonl.

Steps count optimizer steps done: step 0 is the untrained model.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from vit.files import write_atomically
from vit.training.run import METRICS_FILE

ROLLOUT_TAG = "attention/rollout/probe_{:02d}"
MILESTONES = 10  # pictures TensorBoard keeps of one tag, unless it is told otherwise


def milestones(total_steps: int) -> list[int]:
    """Choose the steps at which attention is drawn: 0, the last, and up to 8 between.

    They lie closer together at the start, where attention changes fastest.
    """
    last = MILESTONES - 1
    return sorted({round(total_steps * (number / last) ** 2) for number in range(MILESTONES)})


class Tracker:
    """Writes scalars and pictures of one run.

    Args:
        run: The run folder.
        step: The step that is resumed from; what an earlier process wrote beyond it is dropped.
    """

    def __init__(self, run: Path, step: int = 0) -> None:
        path = run / METRICS_FILE
        if path.exists():
            lines = path.read_text().splitlines(keepends=True)
            whole = [line for line in lines if line.endswith("\n")]  # a crash may have cut one
            kept = "".join(line for line in whole if json.loads(line)["step"] <= step)
            write_atomically(path, kept.encode())
        self._metrics = path.open("a")
        self._writer = SummaryWriter(str(run), purge_step=step + 1 if step else None)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Write numbers by tag."""
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)
        self._metrics.write(json.dumps({"step": step, **values}) + "\n")

    def picture(self, step: int, tag: str, pixels: np.ndarray) -> None:
        """Write a picture, (height, width, 3) uint8."""
        self._writer.add_image(tag, pixels, step, dataformats="HWC")

    def text(self, tag: str, words: str) -> None:
        """Write a text, in Markdown."""
        self._writer.add_text(tag, words, 0)

    def aside(self, step: int, values: dict[str, float]) -> None:
        """Write numbers by tag to TensorBoard alone.

        So metrics.jsonl is free of what depends on the clock, and two runs alike have it alike.
        """
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)

    def hyperparameters(self, values: dict[str, Any], metrics: list[str]) -> None:
        """Make a row of TensorBoard's HParams table.

        Args:
            values: Numbers, truth values and texts by key; anything else is written as text.
            metrics: Tags of this run's scalars, the last value of which the table shows.
        """
        # Into this run's own events: add_hparams would open a second run, whose name is a time.
        plain = {
            key: value if isinstance(value, int | float | str) else str(value)
            for key, value in values.items()
        }
        for summary in hparams(plain, dict.fromkeys(metrics, 0.0)):
            self._writer._get_file_writer().add_summary(summary)

    def flush(self) -> None:
        """Bring everything to the disk; before a checkpoint, so that it is never ahead."""
        self._metrics.flush()
        self._writer.flush()

    def close(self) -> None:
        """Flush and close."""
        self._metrics.close()
        self._writer.close()
