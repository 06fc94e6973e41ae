"""Runs with attention records, and a TensorBoard server that has the Attention tab."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
import torch
from playwright.sync_api import Frame, Page
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from torch import Tensor

from vit.classifier import Classifier
from vit.explain.interventions import Answer, Interventions, gates_of
from vit.model.attention_model import require_attention
from vit.tensorboard_plugin.encoding import summaries
from vit.tensorboard_plugin.plugin import AttentionPlugin
from vit.tensorboard_plugin.records import (
    Details,
    Lens,
    Live,
    LiveSpec,
    Map,
    Record,
    Statistics,
    image_url,
)

ROOT = Path(__file__).resolve().parent.parent
HOSTILE = "<img src=x onerror=alert(1)>"
CLASSES = ["cat", "dog", HOSTILE, "truck"]
TAG = "attention/probe_01"
WAIT = 30_000  # milliseconds
STEPS = [0, 1, 5, 11, 20, 31, 44, 60, 79, 100]


@torch.no_grad()
def ask_torch(
    classifier: Classifier,
    pixels: Tensor,
    mute: Sequence[Sequence[int]] = (),
    hide: Sequence[int] = (),
) -> Answer:
    """Ask torch about an image, (channels, H, W) uint8, without some heads and patches."""
    model, (rows, columns) = Interventions(classifier.model), classifier.preprocess.image_size
    grid = require_attention(classifier.model).patch_embed.grid(rows, columns)
    gates, keep = gates_of(classifier.model), torch.ones(1, grid[0] * grid[1])
    for layer, head in mute:
        gates[layer, head] = 0
    keep[0, list(hide)] = 0
    answer: Answer = model(classifier.normalize(pixels[None]), gates, keep)
    return answer


def softmax(logits: np.ndarray) -> np.ndarray:
    numbers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return numbers / numbers.sum(axis=-1, keepdims=True)


def make_record(
    seed: int = 0,
    *,
    grid: tuple[int, int] = (4, 7),
    prefix: Sequence[str] = ("class token", "register 1", "register 2"),
    layers: int = 3,
    heads: int = 2,
    patch_size: int = 4,
    classes: Sequence[str] = CLASSES,
    label: int | None = 0,
    name: str = "",
    muted: bool = False,
) -> Record:
    """A record of random numbers that agree with each other: maps and statistics of its weights."""
    rng = np.random.default_rng(seed)
    prefix_tokens, patches = len(prefix), grid[0] * grid[1]
    tokens = prefix_tokens + patches
    weights = softmax(3 * rng.normal(size=(layers, heads, tokens, tokens))).astype(np.float32)
    entropy = -(weights * np.log(weights)).sum(axis=-1).mean(axis=-1) / max(np.log(tokens), 1)
    size = (grid[0] * patch_size, grid[1] * patch_size)
    row = np.zeros(tokens)
    row[0 if prefix else slice(None)] = 1 if prefix else 1 / tokens
    for layer in weights[::-1]:
        row = 0.5 * row @ layer.mean(axis=0) + 0.5 * row
    order, lens = [], None
    if classes:
        probabilities = softmax(rng.normal(size=len(classes)))
        order = [(int(i), float(probabilities[i])) for i in np.argsort(-probabilities)][:5]
        read = softmax(rng.normal(size=(layers, 1 + tokens, len(classes))))
        best = np.argsort(-read, axis=-1)[..., :3]
        lens = Lens(
            classes=best.tolist(), probabilities=np.take_along_axis(read, best, axis=-1).tolist()
        )
    relevance = (patches * softmax(rng.normal(size=patches))).tolist()
    signed = (2 * rng.normal(size=patches)).tolist()
    details = Details(
        image=image_url(rng.integers(256, size=(*size, 3), dtype=np.uint8)),
        image_size=size,
        grid=grid,
        prefix=list(prefix),
        layers=layers,
        heads=heads,
        readout="class_token" if prefix else "mean",
        classes=list(classes),
        label=label if classes else None,
        top=order,
        statistics=Statistics(
            entropy=entropy.tolist(),
            distance=rng.uniform(0, 20, size=(layers, heads)).tolist(),
            sink=weights.mean(axis=2).max(axis=-1).tolist(),
            importance=rng.uniform(-0.1, 1, size=(layers, heads)).tolist() if muted else None,
        ),
        maps=[
            make_map("rollout", "attention rollout", None, (row[prefix_tokens:] * tokens).tolist()),
            *(make_map("relevance", "class relevance", index, relevance) for index, _ in order[:2]),
            *(make_map("lrp", "layer-wise relevance", index, signed) for index, _ in order[:2]),
        ],
        lens=lens,
        name=name,
    )
    return Record(details=details, weights=weights)


def make_live(graph: bytes = b"graph", note: str = "", **changes: Any) -> Live:
    """A live model with five weights and a placeholder for its graph."""
    spec: dict[str, Any] = {
        "channels": 3, "image_size": (16, 28), "grid": (4, 7), "prefix": 3, "layers": 3, "heads": 2,
        "classes": CLASSES, "floats": 5, "mean": [0.5] * 3, "std": [0.25] * 3,
        "interpolation": "bicubic", "fit": "crop", "crop_pct": 0.875,
    }  # fmt: skip
    return Live(spec=LiveSpec(**spec | changes), note=note, graph=graph)


def make_map(kind: str, title: str, target: int | None, values: list[float]) -> Map:
    return Map(kind=kind, title=title, target=target, values=values, signed=kind == "lrp")


@contextlib.contextmanager
def event_file(run: Path) -> Iterator[EventFileWriter]:
    """Open a new event file, without torch."""
    writer = EventFileWriter(str(run))
    yield writer
    writer.close()


def write_record(writer: EventFileWriter, tag: str, record: Record, step: int) -> None:
    event = Event(step=step, wall_time=1.7e9 + step, summary=summaries(tag, record))
    writer.add_event(event)


def write_run(
    run: Path, images: int = 2, steps: Sequence[int] = STEPS, **options: Any
) -> dict[tuple[str, int], Record]:
    """Write a run; return its records by tag and step."""
    records = {}
    with event_file(run) as writer:
        for step in steps:
            for number in range(images):
                tag = f"attention/probe_{number:02d}"
                records[tag, step] = make_record(1000 * number + step, **options)
                write_record(writer, tag, records[tag, step], step)
    return records


def plugin_of(folder: Path) -> dict[str, Any]:
    """Return the plugin's applications for the runs in a folder, in this process."""
    events = EventMultiplexer(tensor_size_guidance={"attention": 0})
    provider = MultiplexerDataProvider(events.AddRunsFromDirectory(str(folder)).Reload(), "")
    return AttentionPlugin(TBContext(data_provider=provider)).get_plugin_apps()


class Response(NamedTuple):
    status: int
    headers: Any
    data: bytes

    def json(self) -> Any:
        return json.loads(self.data)


def fetch(address: str, **request: Any) -> Response:
    """Send a request; an error status is a response, too."""
    try:
        with urllib.request.urlopen(urllib.request.Request(address, **request)) as found:
            return Response(found.status, found.headers, found.read())
    except urllib.error.HTTPError as error:
        with error:
            return Response(error.code, error.headers, error.read())


@contextlib.contextmanager
def serve(folder: Path, *flags: str) -> Iterator[str]:
    """Start TensorBoard on a folder; yield its address.

    It finds the tab through the entry point of the installed package.
    """
    server = subprocess.Popen(
        [
            sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--port", "0",
            "--reload_interval", "1", *flags,
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert server.stderr is not None
    printed, found = [], None
    for line in server.stderr:
        printed.append(line)
        if found := re.search(r"at (http://localhost:\d+)", line):
            break
    assert found is not None, "".join(printed)
    try:
        yield found.group(1)
    finally:
        server.terminate()
        server.wait()
        server.stderr.close()


def weights_of(run: Path, tag: str = TAG, step: int = STEPS[-1]) -> np.ndarray:
    """Read the weights from the event files, (L, H, N, N)."""
    for path in sorted(run.glob("events*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if event.step == step and value.tag == f"{tag}/weights":
                    with np.load(io.BytesIO(value.tensor.string_val[0])) as arrays:
                        return arrays["weights"] * arrays["scale"][..., None]
    raise AssertionError(f"no weights of {tag} at step {step}")


def attention(weights: np.ndarray, token: int, direction: str) -> np.ndarray:
    """Return one token's attention in all heads, (L, H, N), in units of uniform attention."""
    picked = weights[:, :, token] if direction == "to" else weights[..., token]
    return picked * weights.shape[-1]


def link(parameters: dict[str, Any]) -> str:
    parts = [f"p.attention.{key}={quote(str(value))}" for key, value in parameters.items()]
    return "&".join(["attention", *parts])


def ready(page: Page) -> Frame:
    handle = page.wait_for_selector("iframe[src*='name=attention']", timeout=WAIT)
    frame = handle.content_frame()
    assert frame is not None
    frame.wait_for_function("() => window.attentionTab?.panes[0].painted", timeout=WAIT)
    frame.evaluate("() => new Promise(setTimeout).then(() => window.attentionTab.ready)")
    return frame


def numbers(frame: Frame | Page, pane: int = 0) -> dict[str, Any]:
    return frame.evaluate("pane => window.attentionTab.numbers()[pane]", pane)


def wait_until(frame: Frame | Page, key: str, value: Any, pane: int = 0) -> dict[str, Any]:
    """Wait until what is painted has a value."""
    frame.wait_for_function(
        "([pane, key, value]) => window.attentionTab?.numbers()[pane]?.[key] === value",
        arg=[pane, key, value],
        timeout=WAIT,
    )
    return numbers(frame, pane)


def patch_at(frame: Frame, row: int, column: int, pane: int = 0) -> tuple[float, float]:
    """Return where the middle of a patch is on the page."""
    rows, columns = numbers(frame, pane)["grid"]
    box = frame.locator("canvas.picture").nth(pane).bounding_box()
    assert box is not None
    return (
        box["x"] + (column + 0.5) * box["width"] / columns,
        box["y"] + (row + 0.5) * box["height"] / rows,
    )


def hover(page: Page, frame: Frame, row: int, column: int, pane: int = 0) -> dict[str, Any]:
    page.mouse.move(*patch_at(frame, row, column, pane))
    return wait_until(frame, "token", f"{row}, {column}", pane)
