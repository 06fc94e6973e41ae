"""Logging of a run: TensorBoard events and metrics.jsonl.

Steps count optimizer steps done: step 0 is the untrained model.
"""

import contextlib
import io
import json
import math
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from PIL import Image
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from vit.console import warn
from vit.files import require_file, write_atomically
from vit.run.folder import METRICS_FILE
from vit.settings import parse

LOGGED_FRACTION = 0.1  # of a run that logging attention may take
LOGGED_IMAGES = 80  # logging one image costs as much as training on 80
# Scalars that TensorBoard shows first: it sorts tags by name, and all others begin with vit/.
CURVES = ("train/", "val/", "test/")

# A number, a picture (height, width, 3) uint8, or anything else for TensorBoard, with its own tag.
Logged: TypeAlias = float | np.ndarray | Summary


def picture_tag(tag: str) -> str:
    """Return the tag under which TensorBoard shows a picture, after all curves."""
    return f"vit/{tag}"


def event_writer(folder: Path, **how: Any) -> SummaryWriter:
    """Open an event file in a folder, under a random name, where no link can be waiting."""
    return SummaryWriter(str(folder), filename_suffix=f".{secrets.token_hex(8)}", **how)


def add_summary(writer: SummaryWriter, summary: Summary, step: int) -> None:
    """Write a summary that is complete with its tags, such as that of a record, at a step."""
    writer._get_file_writer().add_summary(summary, step)


class Tracker:
    """Logs scalars, pictures, text and other summaries of one run.

    A full disk does not end the run: metrics.jsonl catches up later, TensorBoard misses points.
    What an earlier process logged after the step to resume from is dropped.
    """

    def __init__(self, run: Path, step: int = 0) -> None:
        path = run / METRICS_FILE
        lines = require_file(path).read_bytes().splitlines(keepends=True) if path.exists() else []
        lines = [line for line in lines if line.endswith(b"\n") and _step_of(line) <= step]
        write_atomically(path, b"".join(lines))  # which also replaces a link
        self._metrics = path.open("ab", buffering=0)
        self._pending = b""  # lines not yet in the file
        self._run = run
        # A new run purges, too: TensorBoard drops later points only at the second purge it reads.
        self._writer: SummaryWriter | None = event_writer(run, purge_step=step + 1 if step else 0)

    def scalars(self, step: int, values: dict[str, float], tensorboard_only: bool = False) -> None:
        """Log numbers by tag; timings are for TensorBoard only: metrics.jsonl is reproducible."""
        if not tensorboard_only:
            self._pending += (json.dumps({"step": step, **values}) + "\n").encode()

        def write(writer: SummaryWriter) -> None:
            for tag, value in values.items():
                writer.add_scalar(tag if tag.startswith(CURVES) else f"vit/{tag}", value, step)

        self._show(write)

    def show(self, step: int, tag: str, value: np.ndarray | Summary) -> None:
        """Log a picture, (height, width, 3) uint8, or a summary that is complete with its tags."""
        if isinstance(value, Summary):
            summary = value
        else:
            file = io.BytesIO()
            # SummaryWriter.add_image compresses by a seventh more, but takes twice as long.
            Image.fromarray(value).save(file, "png", compress_level=1)
            height, width, channels = value.shape
            image = Summary.Image(height=height, width=width, colorspace=channels)
            image.encoded_image_string = file.getvalue()
            summary = Summary(value=[Summary.Value(tag=picture_tag(tag), image=image)])
        self._show(lambda writer: add_summary(writer, summary, step))

    def text(self, tag: str, text: str) -> None:
        """Log a text in Markdown."""
        self._show(lambda writer: writer.add_text(tag, text, 0))

    def hyperparameters(self, values: dict[str, Any]) -> None:
        """Add the finished run to TensorBoard's HParams table, with all scalars as metrics."""
        plain = {k: v if isinstance(v, int | float | str) else str(v) for k, v in values.items()}
        # SummaryWriter.add_hparams would open a second run with the time as its name. Without the
        # summary of the experiment, TensorBoard opens with the columns in which the runs differ.
        _, start, end = hparams(plain, {})
        for summary in (start, end):
            self.show(0, "hparams", summary)

    def flush(self) -> None:
        """Write everything to disk; called before a checkpoint, which must not precede the logs.

        Raises:
            OSError: metrics.jsonl could not be written; the next flush tries again.
        """
        if self._writer is None:
            with contextlib.suppress(OSError):  # the disk is still full
                self._writer = event_writer(self._run)
        self._show(lambda writer: writer.flush())
        while self._pending:
            self._pending = self._pending[self._metrics.write(self._pending) :]
        os.fsync(self._metrics.fileno())

    def close(self) -> None:
        """Flush as far as the disk allows, and close."""
        try:
            self.flush()
        except OSError as error:
            warn(f"{METRICS_FILE} misses lines: {error}")
        self._show(lambda writer: writer.close())
        self._metrics.close()

    def _show(self, write: Callable[[SummaryWriter], None]) -> None:
        """Write to TensorBoard; a writer that fails is dropped and replaced at the next flush."""
        if self._writer is None:
            return
        try:
            write(self._writer)
        except OSError as error:
            self._writer = None
            warn(f"TensorBoard misses points: {error}")


def _step_of(line: bytes) -> float:
    """Return the step of a line of metrics, or infinity if the line is damaged."""
    try:
        return int(parse(dict[str, Any], line, METRICS_FILE)["step"])
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return math.inf
