"""The server side of the Attention tab.

It reads event files only through TensorBoard's data provider, so a request can name a run and a
tag, but no path. The answers are JSON, bytes, and the files in static/; an error is one line of
JSON that says what to do.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from tensorboard import plugin_util
from tensorboard.backend import http_util
from tensorboard.data.provider import RunTagFilter, TensorDatum, TensorTimeSeries
from tensorboard.plugins import base_plugin
from werkzeug import wrappers

from vit.colours import SIGNED, UNIFORM, table_of
from vit.console import shorten
from vit.tensorboard_plugin import encoding
from vit.tensorboard_plugin.records import Details, Live

STATIC = Path(__file__).parent / "static"
CONTENT_TYPES = {
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".css": "text/css",
    ".gz": "application/octet-stream",  # not as Content-Encoding: the page decompresses it
    ".bin": "application/octet-stream",
    ".json": "application/json",
}
EVERYTHING = 1000  # steps of a tag that are listed at most; of more, a random choice
LONGEST = 900  # characters of a message, because names in it may be long
NO_MODEL = (
    "this run stored no model; vit-eval RUN maps does (not with track.live_mb=0), and "
    "add_attention with model="
)

Answer = dict[str, Any] | bytes
Series = dict[str, TensorTimeSeries]  # what TensorBoard knows about the tags of a run
Known = dict[str, tuple[Any, bool]]  # by run: its newest record, and whether it has several steps


class AttentionPlugin(base_plugin.TBPlugin):  # type: ignore[misc]  # it has no types
    """The Attention tab of TensorBoard."""

    plugin_name = encoding.PLUGIN_NAME

    def __init__(self, context: base_plugin.TBContext) -> None:
        self._provider = context.data_provider

    def get_plugin_apps(self) -> dict[str, Any]:
        """Return the applications that answer requests, by path."""
        # Only the names listed here can be requested.
        files = {
            f"/{folder}{file.name}": (lambda _, file=file: file.read_bytes(), file.suffix)
            for folder in ("", "onnxruntime/")
            for file in (STATIC / folder).iterdir()
            if file.suffix in CONTENT_TYPES
        }
        question = partial(Question, self._provider, {})
        return {
            path: _application(question, answer, CONTENT_TYPES[suffix])
            for path, (answer, suffix) in {**files, **ROUTES}.items()
        }

    def is_active(self) -> bool:
        """Always show the tab: without records, it explains how to log some."""
        return True

    def frontend_metadata(self) -> base_plugin.FrontendMetadata:
        """Return the name of the tab and the script that draws it."""
        return base_plugin.FrontendMetadata(es_module_path="/index.js", tab_name="Attention")


class Question:
    """A request, and what is stored of the run that it names; its errors are one line."""

    def __init__(self, provider: Any, known: Known, request: wrappers.Request) -> None:
        self._provider, self._known, self.asked = provider, known, request.args
        self._place = {
            "ctx": plugin_util.context(request.environ),
            "experiment_id": plugin_util.experiment_id(request.environ),
            "plugin_name": encoding.PLUGIN_NAME,
        }

    @property
    def step(self) -> int:
        """The step that is asked for."""
        return int(self.asked["step"])

    def list_runs(self, **names: Any) -> dict[str, Series]:
        """Return what TensorBoard knows about every tag of every run."""
        listed = self._provider.list_tensors(**self._place, **names)
        # A tag whose steps were all written again by a resumed run is listed without any.
        return {
            run: {tag: series for tag, series in tags.items() if series.max_step is not None}
            for run, tags in listed.items()
        }

    @cached_property
    def series(self) -> Series:
        """The tags of the run."""
        run = self.asked["run"]
        series = self.list_runs(run_tag_filter=RunTagFilter(runs=[run])).get(run)
        if not series:
            raise ValueError(f"no run {run!r} with attention; reload the page")
        return series

    def has_several_steps(self, run: str, tag: str, series: TensorTimeSeries) -> bool:
        """Return whether a tag is stored at several steps; False if it is damaged.

        An open tab asks every few seconds, so a run is read only when it has something new.
        """
        newest = self._place["experiment_id"], tag, series.max_step, series.max_wall_time
        read, several = self._known.get(run, (None, False))
        if read != newest:
            try:
                several = len({datum.step for datum in self._stored(run, tag, 2)}) > 1
            except ValueError:
                several = False
            self._known[run] = newest, several
        return several

    def read(self, tag: str) -> dict[int, tuple[TensorDatum, bytes]]:
        """Return what is stored at all steps of a tag; the last, if one was written again."""
        stored = sorted(self._stored(self.asked["run"], tag), key=lambda datum: datum.step)
        return {datum.step: (datum, _bytes(datum)) for datum in stored}

    def _stored(self, run: str, tag: str, most: int = EVERYTHING) -> list[TensorDatum]:
        names = RunTagFilter(runs=[run], tags=[tag])
        try:
            data = self._provider.read_tensors(**self._place, downsample=most, run_tag_filter=names)
        except (TypeError, ArithmeticError, MemoryError) as error:
            raise ValueError(f"{tag!r} is damaged: {error}") from None
        return list(data.get(run, {}).get(tag, []))

    def read_at(self, tag: str, step: int) -> bytes:
        """Return what is stored under a tag at a step."""
        steps = self.read(tag)
        if step not in steps:
            kept = ", ".join(map(str, steps))
            raise ValueError(f"{tag!r} has no step {step}; TensorBoard keeps {kept}")
        return steps[step][1]

    def details(self) -> Details:
        """Return the details of the image that is asked for."""
        run, tag = self.asked["run"], self.asked["tag"]
        if tag not in _image_tags(self.series):
            raise ValueError(f"run {run!r} has no image {tag!r}; reload the page")
        encoding.part_of(self.series[tag].plugin_content)
        return encoding.decode_details(self.read_at(tag, self.step))

    def live(self) -> Live:
        """Return the model that the run stored last, without weights."""
        tag = encoding.LIVE_TAG
        series = self.series.get(tag)
        if series is None or encoding.part_of(series.plugin_content) != "live":
            raise ValueError(NO_MODEL)
        return encoding.decode_live(self.read_at(tag, series.max_step))


def _runs(question: Question) -> Answer:
    """List the runs that have images; those with several steps, which a training writes, first."""
    runs = [
        {
            "name": run,
            "wall_time": max(tag.max_wall_time for tag in series.values()),
            "several_steps": question.has_several_steps(run, images[0], series[images[0]]),
        }
        for run, series in question.list_runs().items()
        if (images := _image_tags(series))
    ]
    return {"runs": sorted(runs, key=lambda run: (not run["several_steps"], _natural(run["name"])))}


def _images(question: Question) -> Answer:
    """List the images of a run with the predictions at every step, and those that are damaged."""
    series = question.series
    images, problems = [], []
    for tag in sorted(_image_tags(series), key=_natural):
        try:
            encoding.part_of(series[tag].plugin_content)
            if stored := question.read(tag):
                images.append(_image(series, tag, stored.values()))
        except ValueError as error:
            problems.append(shorten(f"{tag}: {error}", LONGEST))
    if problems and not images:
        raise ValueError(problems[0])
    return {"images": images, "problems": problems}


def _image(series: Series, tag: str, stored: Iterable[tuple[TensorDatum, bytes]]) -> dict[str, Any]:
    """Return what the list of images says about one of them; it is the image of the last step."""
    name, frames, steps = encoding.FEATURES_TAG.format(tag), None, {}
    if _part(series.get(name)) == "features":
        frames = json.loads(series[name].plugin_content).get("frames")
        frames = frames if isinstance(frames, str) else None
    for datum, data in stored:
        image, steps[datum.step] = _at_step(datum, data)
    return {
        "tag": tag,
        **image,
        "steps": [*steps.values()],
        "has_weights": encoding.WEIGHTS_TAG.format(tag) in series,
        "features": frames and {"tag": name, "frames": frames},
    }


def _at_step(datum: TensorDatum, data: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the image and the prediction, not the details: those of all steps fill the memory."""
    details = encoding.decode_details(data)
    label = None if details.label is None else details.classes[details.label]
    index, probability = details.top[0] if details.top else (None, None)
    return {"name": details.name, "label": label, "image": details.image}, {
        "step": datum.step,
        "wall_time": datum.wall_time,
        "prediction": None if index is None else details.classes[index],
        "probability": probability,
        "correct": None if index is None or label is None else index == details.label,
    }


def _weights(question: Question) -> Answer:
    """Return the weights of an image at a step, see `_numbers`."""
    details, tag = question.details(), question.asked["tag"]
    if (name := encoding.WEIGHTS_TAG.format(tag)) not in question.series:
        raise ValueError(f"no weights of {tag!r} are stored; the tab shows its maps only")
    codes, scale = encoding.decode_weights(question.read_at(name, question.step))
    shape = (details.layers, details.heads, details.tokens, details.tokens)
    if codes.shape != shape:
        raise ValueError(f"the weights of {tag!r} are {codes.shape}; the details say {shape}")
    return _numbers(codes, scale)


def _features(question: Question) -> Answer:
    """Return features of an image, L*K*P numbers, or frames, L*K*D, see `_numbers`."""
    tag = question.asked["tag"]
    if _part(question.series.get(tag)) != "features":
        raise ValueError(f"no features {tag!r} are stored; reload the page")
    return _numbers(*encoding.decode_weights(question.read_at(tag, question.step)))


def _live(question: Question) -> Answer:
    """Describe a run's model, if it has one, and list the steps whose weights are stored."""
    series = question.series
    try:
        live = question.live()
    except ValueError as error:
        return {"spec": None, "steps": [], "note": shorten(error, LONGEST)}
    steps = [
        {"step": tag.max_step, "wall_time": tag.max_wall_time, "dtype": dtype}
        for tag in sorted(series.values(), key=lambda tag: tag.max_step)
        if _part(tag) and (dtype := encoding.live_dtype(tag.plugin_content, live))
    ]
    spec = live.spec and dataclasses.asdict(live.spec)
    return {"spec": spec, "steps": steps, "note": live.note}


def _live_weights(question: Question) -> Answer:
    """Return the weights of a run's model at a step; the page checks their size."""
    return question.read_at(encoding.LIVE_WEIGHTS_TAG.format(question.step), question.step)


def _palettes(_: Question) -> Answer:
    """Return the colour tables of maps as a script."""
    inferno, red_blue = (table_of(bar[0]).tobytes().hex() for bar in (UNIFORM, SIGNED))
    return f'export const INFERNO = "{inferno}";\nexport const RED_BLUE = "{red_blue}";\n'.encode()


ROUTES: dict[str, tuple[Callable[[Question], Answer], str]] = {
    "/runs": (_runs, ".json"),
    "/images": (_images, ".json"),
    "/details": (lambda question: encoding.details_json(question.details()), ".json"),
    "/weights": (_weights, ".bin"),
    "/features": (_features, ".bin"),
    "/live": (_live, ".json"),
    "/live_graph": (lambda question: question.live().graph, ".bin"),
    "/live_weights": (_live_weights, ".bin"),
    "/palettes.js": (_palettes, ".js"),
}


def _application(
    question: Callable[..., Question], answer: Callable[[Question], Answer], content_type: str
) -> Any:
    """Turn a function from a question to JSON or bytes into a WSGI application."""

    @wrappers.Request.application
    def application(request: wrappers.Request) -> wrappers.Response:
        try:
            return http_util.Respond(request, answer(question(request)), content_type)
        except (KeyError, ValueError) as error:  # or a parameter is missing
            code, text = 400, str(error)
        except grpc.RpcError as error:
            reason = f"TensorBoard's data server failed ({error.code().name})"
            few = "--samples_per_plugin attention=20, which keeps fewer steps"
            code, text = 503, f"{reason}; restart it with {few}, or --load_fast=false"
        problem = {"error": shorten(text, LONGEST)}
        return http_util.Respond(request, problem, "application/json", code=code)

    return application


def _image_tags(series: Series) -> list[str]:
    """Return the tags of images, including tags whose metadata cannot be read."""
    parts = {tag: _part(entry) for tag, entry in series.items()}
    unreadable = {tag for tag in parts if not parts[tag] and not tag.startswith(encoding.LIVE_TAG)}
    return [tag for tag in parts if parts[tag] == "details" or tag in unreadable]


def _part(series: TensorTimeSeries | None) -> encoding.Part | None:
    """Return which part a tag holds; None if there is none, or it cannot be read."""
    try:
        return None if series is None else encoding.part_of(series.plugin_content)
    except ValueError:
        return None


def _numbers(codes: np.ndarray, scale: np.ndarray) -> bytes:
    """Join codes, uint8 or, if a last byte says so, int8, and scale, float32."""
    signed = b"\1" if codes.dtype.kind == "i" else b""
    return codes.tobytes() + scale.astype("<f4").tobytes() + signed


def _bytes(datum: TensorDatum) -> bytes:
    if datum.numpy.shape != () or not isinstance(data := datum.numpy.item(), bytes):
        raise ValueError(f"step {datum.step} is damaged: not a single string of bytes")
    return data


def _natural(text: str) -> list[Any]:
    """Return a key that sorts run_2 before run_10: words and numbers in turn."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d{1,18})", text)]
