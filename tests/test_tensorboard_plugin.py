"""The Attention tab's records, its server side, and add_attention."""

import base64
import dataclasses
import io
import json
import math
import re
import shutil
import time
import urllib.parse
import weakref
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.base_plugin import TBContext
from torch.utils.tensorboard import SummaryWriter
from werkzeug.test import Client

from attention_tab import (
    CLASSES,
    HOSTILE,
    ROOT,
    STEPS,
    WAIT,
    event_file,
    fetch,
    make_live,
    make_record,
    plugin_of,
    serve,
    write_record,
    write_run,
)
from models import grey_classifier
from vit.explain.rollout import attention_rollout
from vit.reporting.add_attention import add_attention
from vit.run.tracker import add_summary
from vit.tensorboard_plugin.encoding import (
    LIVE_TAG,
    decode_details,
    decode_live,
    decode_weights,
    details_json,
    encode_weights,
    live_summary,
    live_weights,
    part_of,
    summaries,
)
from vit.tensorboard_plugin.plugin import AttentionPlugin
from vit.tensorboard_plugin.records import MAX_GRAPH, Live, Record


def plain(record: Record) -> dict[str, Any]:
    return json.loads(details_json(record.details))


def close(found: Any, expected: Any) -> bool:
    """Compare nested JSON, with floats to four significant digits."""
    if isinstance(expected, float) and isinstance(found, float | int):
        return found == pytest.approx(expected, rel=5.1e-4)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(
            close(found[key], value) for key, value in expected.items()
        )
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(close, found, expected))
    return type(found) is type(expected) and found == expected


# Records


@settings(max_examples=12)
@given(
    seed=st.integers(0, 2**32 - 1),
    grid=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    prefix=st.lists(st.text(max_size=5), max_size=3),
    layers=st.integers(1, 3),
    heads=st.integers(1, 3),
    classes=st.lists(st.text(max_size=9), max_size=6),
)
def test_a_record_survives_encoding(**options):
    record = make_record(**options)
    found = decode_details(zlib.compress(details_json(record.details)))
    assert close(json.loads(details_json(found)), plain(record))


def test_older_records_are_read():
    """Their maps have no sign, but a faithfulness, and the image has no file."""
    old = plain(make_record())
    assert {shown.pop("signed") for shown in old["maps"]} == {False, True}
    old["maps"][0]["faithfulness"] = 0.25
    del old["name"]
    read = decode_details(zlib.compress(json.dumps(old).encode()))
    assert [shown.signed for shown in read.maps] == [False] * 5 and read.name == ""


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), least=st.sampled_from([-1, 0]), size=st.sampled_from([1e-6, 9]))
def test_weights_of_any_sign_and_sum_survive_encoding(seed, least, size):
    weights = np.random.default_rng(seed).uniform(least, 1, (2, 3, 5, 5)).astype(np.float32) * size
    codes, scale = decode_weights(encode_weights(weights))
    assert codes.dtype == (np.int8 if least < 0 else np.uint8)
    error = np.abs(codes * scale[..., None] - weights)
    largest = np.abs(weights).max(axis=-1, keepdims=True)
    assert (error <= largest / (254 if least < 0 else 510) * (1 + 1e-5)).all()


def large_image(details: dict[str, Any]) -> None:
    """Claim 60,000 x 60,000 pixels, in the header of the PNG file, too."""
    header = base64.b64decode(details["image"].partition(",")[2])
    bomb = header[:16] + (60_000).to_bytes(4) * 2 + header[24:]
    details["image"] = "data:image/png;base64," + base64.b64encode(bomb).decode()
    details["image_size"] = [60_000, 60_000]


def npz(weights: bytes, scale: bytes = b"") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("weights.npy", weights)
        archive.writestr("scale.npy", scale or npy((1, 1, 2), "<f4", bytes(8)))
    return file.getvalue()


def npy(shape: tuple[int, ...], dtype: str, content: bytes) -> bytes:
    file = io.BytesIO()
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue() + content


NAN = npy((1, 1, 2), "<f4", np.float32([1, np.nan]).tobytes())


Change = Callable[[dict[str, Any]], Any]


def details_with(change: Change) -> bytes:
    parts = plain(make_record())
    change(parts)
    return zlib.compress(json.dumps(parts).encode())


def live_with(change: Change) -> bytes:
    parts = json.loads(zlib.decompress(stored(live_summary(make_live()))))
    change(parts)
    return zlib.compress(json.dumps(parts).encode())


def stored(summary: Summary) -> bytes:
    (value,) = summary.value
    return value.tensor.string_val[0]


# Compressing some of them takes seconds.
REFUSED: dict[Callable[[bytes], Any], Callable[[], list[tuple[bytes, str]]]] = {
    decode_details: lambda: [
        (zlib.compress(bytes(10**7)), "longer than "),
        *(
            (details_with(change), message)
            for change, message in (
                (lambda d: d.update(grid=[4, 6]), "rollout is .28,.; it must be .24,."),
                (lambda d: d.update(label=4), "class 4 does not exist; there are 4"),
                (lambda d: d["statistics"]["sink"][0].pop(), "sink is ragged"),
                (lambda d: d["maps"][0]["values"].__setitem__(0, math.nan), "maps.0.values.0: "),
                (lambda d: d.update(image=d["image"] + '"onload="'), "image: "),
                (large_image, "more than 16777216 pixels"),
            )
        ),
    ],
    decode_weights: lambda: [
        (npz(npy((1, 1, 2, 2), "|u1", bytes(3))), "EOF: reading array data"),
        (npz(npy((1, 1, 2, 2), "|u1", bytes(10**8))), "more than 8389"),
        (npz(npy((1, 1, 2, 2), "<f4", bytes(16))), "float32"),
        (npz(npy((1, 1, 2, 2), "|O", b"cos\nsystem\n.")), "Object arrays"),
        (npz(npy((1, 1, 10**6, 10**6), "|u1", b"")), "damaged"),
        (npz(npy((1, 1, 2, 2), "|u1", bytes(4)), NAN), "scale is negative or not finite"),
    ],
    decode_live: lambda: [
        (live_with(change), message)
        for change, message in (
            (lambda d: d.update(graph=""), "the graph has 0 bytes"),
            (lambda d: d.update(graph="A" * (MAX_GRAPH // 3 * 4 + 4)), "at most 16777216"),
            (lambda d: d["spec"].update(mean=[0.5]), "mean is .1,.; it must be .3,."),
            (lambda d: d["spec"].update(floats=2**27 + 1), "spec.floats: "),
            (lambda d: d["spec"].update(grid=[90, 90]), "weights are more than 16777216"),
        )
    ],
    part_of: lambda: [
        (b"[1]", "does not say its version"),
        (b'{"version": 2, "part": "details"}', "is of version 2, and this Attention tab reads"),
        (b'{"version": 1, "part": "more"}', "unknown part 'more'"),
    ],
}


@pytest.mark.parametrize("decode", REFUSED, ids=lambda decode: decode.__name__)
def test_what_contradicts_itself_is_refused_in_one_short_line(decode):
    for data, message in REFUSED[decode]():
        with pytest.raises(ValueError, match=message) as caught:
            decode(data)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@given(st.data())
def test_damaged_bytes_raise_nothing_but_value_error(data):
    record = make_record(grid=(2, 2), layers=1, heads=1)
    scale = npy((1, 1, 4), "<f4", np.ones(4, "<f4").tobytes())
    for decode, encoded, pack in (
        (decode_details, details_json(record.details), zlib.compress),
        (decode_weights, encode_weights(record.weights), bytes),
        (decode_weights, npy((1, 1, 4, 4), "|u1", bytes(16)), lambda data: npz(data, scale)),
        (decode_live, stored(live_summary(make_live())), bytes),
    ):
        damaged = bytearray(encoded)
        for _ in range(data.draw(st.integers(1, 3))):
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
        try:
            decode(pack(bytes(damaged[: data.draw(st.integers(0, len(damaged)))])))
        except ValueError as error:
            assert "\n" not in str(error)


# The server side


def foreign(tag: str, data: bytes, version: int = 1, part: str = "details") -> Summary:
    """A value of the plugin that this project would not write."""
    (value, *_) = summaries(tag, make_record()).value
    value.tensor.string_val[0] = data
    value.metadata.plugin_data.content = json.dumps({"version": version, "part": part}).encode()
    return Summary(value=[value])


def write_odd_runs(folder: Path) -> None:
    """A run with a model at two steps, and with odd weights at others; and runs that are odd."""
    live, other = make_live(note="two steps"), make_live(b"another")
    unknown: Any = "float64"
    runs: dict[str, list[tuple[int, Summary]]] = {
        "run_2": [
            (0, live_summary(other)),  # before the packages were updated
            (5, live_summary(live)),
            (20, live_weights(20, other, "float16", bytes(10))),
            (31, live_weights(31, live, unknown, bytes(40))),
            (44, live_weights(44, live, "float16", bytes(range(10)))),
            (100, live_weights(100, live, "float32", bytes(range(20)))),
        ],
        "many_steps": [(0, live_summary(Live(spec=None, note="no exporter")))],
        "only_live": [(0, live_summary(live))],
        "newer": [(0, foreign("attention/probe_00", b"", version=2))],
        "damaged": [
            (0, foreign(LIVE_TAG, b"", part="live")),
            (0, foreign("bad", zlib.compress(b"{}"))),
        ],
    }
    lying = summaries("lying", make_record())
    lying.value[1].tensor.string_val[0] = encode_weights(np.ones((1, 1, 2, 2), np.float32))
    runs["damaged"].append((0, lying))
    overflowing = foreign("half", b"")
    del overflowing.value[0].tensor.string_val[:]
    overflowing.value[0].tensor.dtype = 19  # float16
    overflowing.value[0].tensor.half_val.append(70_000)
    runs["damaged"].append((0, overflowing))
    for run, found in runs.items():
        with event_file(folder / run) as writer:
            for step, summary in found:
                writer.add_event(Event(step=step, wall_time=1.7e9 + step, summary=summary))
            if run == "damaged":
                write_record(writer, "good", make_record(), 0)
                mute = Record(details=make_record().details, weights=None)
                write_record(writer, "maps only", mute, 0)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[tuple[str, int], Record]]:
    folder = tmp_path_factory.mktemp("logs")
    records = write_run(folder / "run_2", images=2, name="cats/1.jpg")
    write_run(folder / "run_10", images=1, prefix=(), grid=(3, 3))
    write_run(folder / "many_steps", images=1, steps=range(25))
    write_odd_runs(folder)
    return folder, records


def asker(folder: Path) -> Callable[..., Any]:
    """Ask the plugin, as TensorBoard's Python loader does."""
    apps = plugin_of(folder)

    def ask(route: str, **parameters: Any) -> Any:
        return Client(apps[f"/{route}"]).get("/", query_string=parameters)

    return ask


@pytest.fixture(scope="module")
def ask(logs: tuple[Path, Any]) -> Callable[..., Any]:
    return asker(logs[0])


def test_runs_with_several_steps_are_listed_first_in_natural_order(ask):
    runs = ask("runs").json["runs"]
    assert [run["name"] for run in runs] == ["many_steps", "run_2", "run_10", "damaged", "newer"]
    assert runs[1] == {"name": "run_2", "wall_time": 1.7e9 + 100, "several_steps": True}
    assert not any(run["several_steps"] for run in runs[3:])


def test_a_list_of_runs_reads_only_those_with_something_new(tmp_path, monkeypatch):
    events = EventMultiplexer()
    provider = MultiplexerDataProvider(events, "")
    read = Mock(wraps=provider.read_tensors)
    monkeypatch.setattr(provider, "read_tensors", read)
    runs = Client(AttentionPlugin(TBContext(data_provider=provider)).get_plugin_apps()["/runs"])
    with event_file(tmp_path / "run") as writer:
        for count, step in enumerate((0, 9), 1):
            write_record(writer, "photo", make_record(), step)
            writer.flush()
            events.AddRunsFromDirectory(str(tmp_path)).Reload()
            for _ in range(2):
                (run,) = runs.get("/").get_json()["runs"]
                assert (run["several_steps"], read.call_count) == (step > 0, count)


def test_images_have_predictions_details_and_weights_of_each_step(ask, logs):
    found = ask("images", run="run_2").json
    assert found["problems"] == []
    tags = [image["tag"] for image in found["images"]]
    assert tags == ["attention/probe_00", "attention/probe_01"]
    for image in found["images"]:
        assert image["has_weights"]
        assert (image["label"], image["name"]) == ("cat", "cats/1.jpg")
        assert [step["step"] for step in image["steps"]] == STEPS
        assert image["image"] == logs[1][image["tag"], 100].details.image
        for step in image["steps"]:
            index, probability = logs[1][image["tag"], step["step"]].details.top[0]
            assert step["prediction"] == CLASSES[index]
            assert step["probability"] == pytest.approx(probability, rel=5.1e-4)
            assert step["correct"] == (index == 0)
            assert step["wall_time"] == 1.7e9 + step["step"]
    check_records(ask, logs[1])


def check_records(ask: Callable[..., Any], records: dict[tuple[str, int], Record]) -> None:
    """Details and weights are those that were written, within half a unit of 8 bits."""
    for (tag, step), record in records.items():
        place = {"run": "run_2", "tag": tag, "step": step}
        assert close(json.loads(ask("details", **place).data), plain(record))
        body, count = ask("weights", **place).data, record.weights.size
        codes = np.frombuffer(body, np.uint8, count).reshape(record.weights.shape)
        scale = np.frombuffer(body[count:], "<f4").reshape(record.weights.shape[:3])
        largest = record.weights.max(axis=-1, keepdims=True)
        error = np.abs(codes * scale[..., None] - record.weights)
        assert (error <= largest / 510 * (1 + 1e-5)).all()


def test_live_model_is_what_was_stored_last_with_the_steps_that_belong_to_it(ask):
    found, live = ask("live", run="run_2").json, make_live(note="two steps")
    assert found["note"] == "two steps"
    assert found["spec"] == json.loads(json.dumps(dataclasses.asdict(live.spec)))
    assert found["steps"] == [
        {"step": 44, "wall_time": 1.7e9 + 44, "dtype": "float16"},
        {"step": 100, "wall_time": 1.7e9 + 100, "dtype": "float32"},
    ]
    assert ask("live_graph", run="run_2").data == b"graph"
    assert ask("live_weights", run="run_2", step=44).data == bytes(range(10))
    notes = {"run_10": "this run stored no model", "many_steps": "no exporter"}
    for run, note in {**notes, "damaged": "the live model is damaged"}.items():
        found = ask("live", run=run).json
        assert (found["spec"], found["steps"]) == (None, []) and found["note"].startswith(note)


def test_details_are_decoded_one_step_at_a_time(ask, monkeypatch):
    """Those of all steps of hostile records would fill the memory."""
    made: list[weakref.ref[Any]] = []

    def decode(data: bytes) -> Any:
        assert all(ref() is None for ref in made)
        details = decode_details(data)
        made.append(weakref.ref(details))
        return details

    monkeypatch.setattr("vit.tensorboard_plugin.encoding.decode_details", decode)
    images = ask("images", run="run_2").json["images"]
    assert len(made) == sum(len(image["steps"]) for image in images) > len(images) > 1


def test_a_large_picture_is_read_but_not_a_small_file_that_becomes_large():
    details = plain(make_record())
    start, noise = details["image"].rstrip("="), np.random.default_rng(0).bytes(9 * 2**20)
    for content, is_read in ((base64.b64encode(noise).decode(), True), ("A" * 12 * 2**20, False)):
        details["image"] = start + content
        data = zlib.compress(json.dumps(details).encode(), 1)
        if is_read:
            assert decode_details(data).image == details["image"]
        else:
            with pytest.raises(
                ValueError, match=r"are damaged: cut short, or longer than \d+ bytes$"
            ):
                decode_details(data)
    few, many = (
        {**plain(make_record()), "maps": plain(make_record())["maps"] * n} for n in (9, 999)
    )
    assert len(decode_details(zlib.compress(json.dumps(few).encode())).maps) == 45
    with pytest.raises(ValueError, match=r"maps: List should have at most 1000 items"):
        decode_details(zlib.compress(json.dumps(many).encode(), 0))


PLACE = {"run": "run_2", "tag": "attention/probe_00", "step": 5}
ODD = [
    ("images", {"run": "run_3"}, "no run 'run_3'"),
    ("images", {"run": "newer"}, "is of version 2, and this Attention tab reads version 1"),
    ("details", {**PLACE, "step": "5.0"}, "invalid literal for int() with base 10: '5.0'"),
    ("details", {**PLACE, "step": "9" * 2000}, "has no step 999"),
    ("details", {**PLACE, "step": 6}, "has no step 6; TensorBoard keeps 0, 1, 5, 11"),
    ("details", {"run": "damaged", "tag": "bad", "step": 0}, "the details of the record are"),
    ("weights", {"run": "damaged", "tag": "maps only", "step": 0}, "no weights of"),
    ("weights", {"run": "damaged", "tag": "lying", "step": 0}, "the details say (3, 2, 31,"),
    ("features", PLACE, "no features 'attention/probe_00' are stored"),
    ("details", {**PLACE, "tag": LIVE_TAG}, "no image 'attention/live'"),
]  # fmt: skip


@pytest.mark.parametrize(("route", "parameters", "message"), ODD)
def test_bad_requests_get_one_line_of_json(ask, route, parameters, message):
    found = ask(route, **parameters)
    assert found.status_code == 400
    assert found.headers["X-Content-Type-Options"] == "nosniff"
    (line,) = found.json.values()
    assert message in line and len(line) <= 1000 and "\n" not in line


def test_damaged_records_do_not_hide_the_others(ask):
    found = ask("images", run="damaged").json
    assert [image["tag"] for image in found["images"]] == ["good", "lying", "maps only"]
    assert [image["has_weights"] for image in found["images"]] == [True, True, False]
    assert [problem.partition(" damaged")[0] for problem in found["problems"]] == [
        "bad: the details of the record are", "half: 'half' is"
    ]  # fmt: skip


def test_a_failing_data_server_is_one_line_of_json():
    """TensorBoard's fast loader is another process, which may end or refuse a large answer."""

    class Refusal(grpc.RpcError):
        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.RESOURCE_EXHAUSTED

    class Provider:
        def list_tensors(self, *_: Any, **__: Any) -> None:
            raise Refusal

    plugin = AttentionPlugin(TBContext(data_provider=Provider()))
    found = Client(plugin.get_plugin_apps()["/runs"]).get("/")
    assert found.status_code == 503
    reason = "TensorBoard's data server failed (RESOURCE_EXHAUSTED)"
    assert found.json is not None and found.json["error"].startswith(f"{reason}; restart it with ")


@pytest.mark.slow
def test_tensorboard_has_the_tab_and_its_loaders_read_records(logs, tmp_path):
    """A resumed run shows what it logged last: after an interruption, it goes on from step 5.

    The Python loader, in this process, takes the first purge_step for the start of the run, so that
    needs one, too.
    """
    folder, records = shutil.copytree(logs[0], tmp_path / "logs"), {}
    run = folder / "resumed"
    with serve(folder, "--load_fast=true") as address:

        def ask(route: str, **parameters: object) -> Any:
            query = urllib.parse.urlencode(parameters)
            return fetch(f"{address}/data/plugin/attention/{route}?{query}")

        def wait(name: str, step: int) -> None:
            deadline, found = time.monotonic() + WAIT / 1000, dict[str, Any]()
            while step not in (
                at["step"] for one in found.get("images", ()) for at in one["steps"]
            ):
                assert time.monotonic() < deadline, found
                time.sleep(0.2)
                found = ask("images", run=name).json()

        listing = fetch(f"{address}/data/plugins_listing").json()["attention"]
        assert (listing["enabled"], listing["tab_name"]) == (True, "Attention")
        script = fetch(address + listing["loading_mechanism"]["module_path"])
        assert script.headers.get_content_type() == "text/javascript"
        outside = ("plugin.py", "../plugin.py", "%2e%2e/plugin.py", "static/index.js", "index.js/x")
        for route in (*outside, "onnxruntime/README.md", "onnxruntime/../index.js", "onnxruntime"):
            assert ask(route).status == 404
        wait("run_2", 100)
        check_records(ask, logs[1])
        for first, steps in ((0, (0, 5, 10, 20)), (6, (10, 30))):
            with SummaryWriter(str(run), purge_step=first) as writer:
                for step in steps:
                    records[step] = make_record(step + 100 * first)
                    add_summary(writer, summaries("photo", records[step]), step)
            wait(run.name, steps[-1])
        for loader in (ask, asker(folder)):
            (image,) = json.loads(loader("images", run=run.name).data)["images"]
            assert [step["step"] for step in image["steps"]] == [0, 5, 10, 30]
            for step in (0, 5, 10, 30):
                found = json.loads(loader("details", run=run.name, tag="photo", step=step).data)
                assert close(found, plain(records[step]))


# add_attention


def attention(layers: int = 2, batch: int = 2, heads: int = 3, tokens: int = 13) -> torch.Tensor:
    return torch.randn(layers, batch, heads, tokens, tokens).softmax(dim=-1)


ROW_OF_TWO = attention()
ROW_OF_TWO[0, 0, 0, 0] *= 2
DECODE: dict[str, Callable[[bytes], Any]] = {
    "details": decode_details, "weights": decode_weights, "live": decode_live, "live_weights": len
}  # fmt: skip


def read_back(folder: Path) -> dict[str, Any]:
    """Return the decoded records in an event file by tag."""
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
    found: dict[str, Any] = {}
    for tag in events.Tags()["tensors"]:
        part = part_of(events.SummaryMetadata(tag).plugin_data.content)
        (event,) = events.Tensors(tag)
        found[tag] = DECODE[part](event.tensor_proto.string_val[0])
    return found


@pytest.fixture
def arguments(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Valid arguments: 2 images, a grid of 3 x 4, one class token."""
    torch.manual_seed(0)
    with SummaryWriter(str(tmp_path)) as writer:
        yield {
            "writer": writer, "tag": "photo", "images": torch.rand(2, 3, 24, 32),
            "weights": attention(), "step": 3, "grid": (3, 4), "num_prefix_tokens": 1,
            "readout": "class_token", "logits": torch.randn(2, 4), "labels": [0, 3],
        }  # fmt: skip


def test_add_attention_writes_what_the_tab_shows(tmp_path, arguments, monkeypatch):
    """The model may be of another size."""
    monkeypatch.setattr("vit.reporting.live.graph_of", lambda classifier: b"graph")
    add_attention(**arguments, model=grey_classifier())
    arguments["writer"].close()
    found = read_back(tmp_path)
    spec, stored = found.pop(LIVE_TAG).spec, found.pop(f"{LIVE_TAG}/weights/00000003")
    assert (spec.channels, spec.image_size, 2 * spec.floats) == (1, (16, 24), stored)
    assert (spec.grid, spec.prefix, spec.classes) == ((4, 6), 1, ["a", "b", "c"])
    assert sorted(found) == ["photo_00", "photo_00/weights", "photo_01", "photo_01/weights"]
    weights, images = arguments["weights"], arguments["images"]
    rollout = attention_rollout(weights, readout="class_token", num_prefix_tokens=1) * 13
    for number in range(2):
        details = found[f"photo_{number:02d}"]
        (shown,) = details.maps
        assert (shown.kind, shown.title, shown.target) == ("rollout", "attention rollout", None)
        torch.testing.assert_close(torch.tensor(shown.values), rollout[number], rtol=6e-4, atol=0)
        assert details.prefix == ["class token"]
        assert details.classes == ["class 0", "class 1", "class 2", "class 3"]
        assert details.label == arguments["labels"][number]
        pixels = Image.open(io.BytesIO(base64.b64decode(details.image.partition(",")[2])))
        expected = (images[number] * 255).round().permute(1, 2, 0)
        np.testing.assert_array_equal(np.asarray(pixels), expected)


def test_add_attention_needs_only_images_and_weights_and_takes_maps(tmp_path):
    maps, names = {"lrp": torch.randn(1, 3, 4), "my own": torch.rand(1, 3, 4)}, ["cat", HOSTILE]
    for tag, more in (("plain", {}), ("more", {"maps": maps, "classes": names})):
        with SummaryWriter(str(tmp_path / tag)) as writer:
            add_attention(
                writer, tag, torch.zeros(1, 1, 20, 30, dtype=torch.uint8),
                list(attention(batch=1).bfloat16()), 0, grid=(3, 4), num_prefix_tokens=1, **more,
            )  # fmt: skip
    details = read_back(tmp_path / "plain")["plain"]
    assert (details.classes, details.label, details.top, details.maps) == ([], None, [], [])
    assert details.statistics.distance is None  # patches of 6.7 x 7.5 pixels are not square
    assert details.prefix == ["prefix token 1"]
    details = read_back(tmp_path / "more")["more"]
    assert [(shown.kind, shown.title, shown.signed) for shown in details.maps] == [
        ("lrp", "layer-wise relevance", True), ("my own", "my own", False),
    ]  # fmt: skip
    expected = maps["my own"][0].flatten()
    torch.testing.assert_close(torch.tensor(details.maps[1].values), expected, rtol=6e-4, atol=0)
    assert details.classes == names


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"writer": None}, "writer: builtins.NoneType is not torch.utils.tensorboard"),
        ({"tag": "a/weights"}, "tag: 'a/weights' is empty or ends with /weights"),
        ({"images": torch.rand(2, 2, 24, 32)}, r"images: \(2, 2, 24, 32\) is not \(B, 3 or 1,"),
        (
            {"images": torch.randn(2, 3, 24, 32)},
            "images: values are neither uint8 nor 0 to 1; undo",
        ),
        ({"grid": (4, 4)}, "N = 17 tokens, 1 before a grid of 4 x 4"),
        ({"weights": ROW_OF_TWO}, "rows of layer 0 sum to 1 to 2, not 1; pass the softmax"),
        ({"weights": attention() * torch.nan}, "layer 0 has negative numbers, inf or nan"),
        ({"readout": "max"}, "readout: 'max' is not class_token, mean or None"),
        (
            {"num_prefix_tokens": 0, "weights": attention(tokens=12)},
            "readout: class_token needs num_prefix_tokens of at least 1",
        ),
        ({"model": torch.nn.Linear(2, 2)}, "model: Linear is not a vit.Classifier"),
        ({"labels": [0, 4]}, r"labels: \[0, 4\] are not all 0 to 3"),
        ({"maps": {"mine": torch.rand(2, 12)}}, r"maps: mine is \(2, 12\), not \(2, 3, 4\)"),
        ({"tokens": torch.zeros(2, 2, 12, 8)}, "^tokens: "),
        ({"tokens": torch.full((2, 2, 13, 8), torch.nan)}, "^tokens: "),
    ],
)
def test_add_attention_refuses_in_one_line_before_it_writes(tmp_path, arguments, changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        add_attention(**{**arguments, **changes})
    assert "\n" not in str(caught.value)
    arguments["writer"].close()
    assert read_back(tmp_path) == {}


@pytest.mark.slow
def test_example_of_the_guide_runs(tmp_path, monkeypatch):
    guide = (ROOT / "docs/tensorboard.md").read_text()
    code, *_ = re.findall(r"```python\n(.*?)```", guide, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Image.fromarray(np.zeros((300, 200, 3), np.uint8)).save("photo.jpg")
    assert code.count("pretrained=True") == 1
    exec(code.replace("pretrained=True", "pretrained=False"), {})
    found = read_back(tmp_path / "runs/timm")
    assert sorted(found) == ["photo", "photo/weights"]
    assert found["photo"].grid == (14, 14)
    assert found["photo/weights"][0].shape == (12, 3, 197, 197)
