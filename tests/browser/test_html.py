"""eval.py RUN export html: the Attention tab as one file, opened in a browser without a network."""

import base64
import gzip
import html
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest
import torch
from playwright.sync_api import Page, expect
from tensorboard.compat.proto.event_pb2 import Event
from werkzeug import Response

from attention_tab import (
    HOSTILE,
    STEPS,
    TAG,
    ask_torch,
    attention,
    event_file,
    link,
    make_record,
    wait_until,
    weights_of,
    write_run,
)
from models import ONE_BLOCK, save_untrained
from vit.commands.config import ExportConfig
from vit.commands.export import write_exports
from vit.data.config import DataConfig
from vit.data.datasets import load_test_images
from vit.data.preprocess import Preprocess
from vit.data.shapes import KINDS
from vit.explain.interventions import gates_of
from vit.pretrained.load import load
from vit.tensorboard_plugin.encoding import summaries
from vit.tensorboard_plugin.plugin import AttentionPlugin

NAME = f"it's~*&+%\"{HOSTILE}"
CLASSES = ["cat", "dog", "</script><script>alert(1)</script>", HOSTILE]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with hostile names that logged two images, an image of `maps`, and a damaged one."""
    folder = save_untrained(
        tmp_path_factory.mktemp("runs") / NAME,
        ONE_BLOCK,
        Preprocess((32, 32), (0.5,) * 3, (0.25,) * 3),
    )
    write_run(folder, classes=CLASSES, label=2, name=CLASSES[2])
    write_run(folder / "eval/attention", images=1, steps=[100])
    with event_file(folder) as writer:
        summary = summaries("attention/damaged", make_record())
        summary.value[1].tensor.string_val[0] = b"damaged"
        writer.add_event(Event(step=0, wall_time=1.7e9, summary=summary))
    return folder


def export(run: Path, **options: Any) -> Path:
    (file,) = write_exports(load(run, "cpu"), ExportConfig(formats=("html",), **options))
    return file


def stored(file: Path) -> dict[str, Any]:
    """Return the files and answers in a page by name, JSON as Python's objects."""
    found = {}
    pattern = r'data-name="(.*?)" data-type="(.*?)" data-status="\d+">(.*?)</script>'
    for name, kind, text in re.findall(pattern, file.read_text()):
        data = gzip.decompress(base64.b64decode(text))
        found[html.unescape(name)] = json.loads(data) if kind == "application/json" else data
    return found


def test_last_step_alone_and_all_steps_replace_each_other_but_no_other_file(run, tmp_path):
    for steps, expected in (("all", STEPS), ("last", STEPS[-1:])):
        file = export(run, out=str(tmp_path), steps=steps)
        found = stored(file)
        images = [
            entry for name in found if name.startswith("images?") for entry in found[name]["images"]
        ]
        assert len(images) == 4
        assert [at["step"] for at in images[1]["steps"]] == expected
        assert sum(name.startswith("weights?") for name in found) == 2 + 2 * len(expected)
    file.write_text("mine")
    with pytest.raises(ValueError, match=r"live\.html exists and is not an export; move it"):
        export(run, out=str(tmp_path))
    assert file.read_text() == "mine"


@pytest.fixture(scope="module")
def shapes_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of shapes that has not been trained, and no logs, exported."""
    run = save_untrained(tmp_path_factory.mktemp("shapes"), ONE_BLOCK)
    assert export(run) == run / "export/live.html"
    return run


@pytest.mark.slow
def test_model_without_logs_shows_test_images(shapes_run):
    found = stored(shapes_run / "export/live.html")
    (images,) = (found[name]["images"] for name in found if name.startswith("images?"))
    assert {at["step"] for image in images for at in image["steps"]} == {1}
    assert len({image["label"] for image in images} & {*KINDS}) == 8
    assert [path.name for path in shapes_run.rglob("events*")] == []


def test_model_without_logs_and_test_images_is_refused(tmp_path):
    data = {"name": "folder", "root": str(tmp_path / "none")}
    run = save_untrained(tmp_path, ONE_BLOCK, data=data)
    with pytest.raises(ValueError, match=r"^data\.root: .*none.*$"):
        export(run)


def answer(found: Any) -> Any:
    """An application that gives one answer."""
    data, kind = (
        (found, None) if isinstance(found, bytes) else (json.dumps(found), "application/json")
    )
    return lambda *call: Response(data, content_type=kind or "application/octet-stream")(*call)


@pytest.mark.parametrize(
    ("floats", "steps", "expected"), [(5, "all", [3, 9]), (5, "last", [9]), (26_000_000, "all", [])]
)
def test_page_has_the_live_model_of_its_steps_unless_it_is_large(
    monkeypatch, run, tmp_path, floats, steps, expected
):
    spec = {"spec": {"floats": floats}, "steps": [{"step": 3}, {"step": 9}], "note": ""}
    live = {"/live": answer(spec), "/live_graph": answer(b"graph"), "/live_weights": answer(b"w")}
    apps = AttentionPlugin.get_plugin_apps
    monkeypatch.setattr(AttentionPlugin, "get_plugin_apps", lambda self: {**apps(self), **live})
    found = stored(export(run, out=str(tmp_path), steps=steps))
    name = urlencode({"run": NAME}).replace("~", "%7E").replace("%2A", "*")
    assert found[f"live?{name}"]["steps"] == [{"step": step} for step in expected]
    assert (f"live_graph?{name}" in found) == bool(expected)
    assert [key for key in found if key.startswith(f"live_weights?{name}&")] == [
        f"live_weights?{name}&step={step}" for step in expected
    ]
    assert ("100 MB" in found[f"live?{name}"]["note"]) == (not expected)


@pytest.fixture
def page(page: Page) -> Page:
    """A page without a network, in which nothing complains."""
    page.context.set_offline(True)
    return page


@pytest.mark.slow
def test_file_shows_the_records_and_asks_for_nothing(page, run):
    address = export(run).as_uri()
    requested = []
    page.on("request", lambda request: requested.append(request.url))
    page.goto(f"{address}#{link({'run': NAME, 'image': TAG, 'token': '1, 2'})}")
    token = 3 + 1 * 7 + 2
    shown = wait_until(page, "step", 100)
    assert (shown["run"], shown["file"], shown["classes"]) == (NAME, CLASSES[2], CLASSES)
    np.testing.assert_allclose(
        shown["heads"], attention(weights_of(run, TAG, 100), token, "to"), rtol=1e-5
    )
    page.keyboard.press("[")
    shown = wait_until(page, "step", 79)
    np.testing.assert_allclose(
        shown["heads"], attention(weights_of(run, TAG, 79), token, "to"), rtol=1e-5
    )
    page.keyboard.press("3")
    # The address opens the same again.
    page.wait_for_function(
        "() => location.hash.includes('view=lens') && location.hash.includes('step=79')"
    )
    page.reload()
    assert wait_until(page, "view", "lens")["step"] == 79
    # A damaged record, and the run of `maps`.
    page.evaluate("window.attentionTab.set({view: 'heads', image: 'attention/damaged'})")
    expect(page.get_by_text("weights of this step cannot be read: the weights")).to_be_visible()
    page.evaluate("window.attentionTab.set({image: 'attention/probe_00'})")
    page.get_by_label("Run").select_option(f"{NAME}/eval/attention")
    assert wait_until(page, "run", f"{NAME}/eval/attention")["step"] == 100
    assert page.title() == NAME
    assert page.locator("img[src=x]").count() == 0
    assert {url.partition(":")[0] for url in requested} <= {"file", "blob", "data"}
    assert sum(url.startswith("file:") for url in requested) == 2  # the page itself, twice


@pytest.mark.slow
def test_file_follows_the_system_and_connects_to_nothing(browser, run):
    page = browser.new_page(offline=True)
    page.goto(f"{export(run).as_uri()}#{link({'step': 100, 'image': 'attention/damaged'})}")
    wait_until(page, "step", 0)  # the only one
    for scheme, colour in (("dark", "rgb(48, 48, 48)"), ("light", "rgb(255, 255, 255)")):
        page.emulate_media(color_scheme=scheme)
        page.wait_for_function(
            "theme => document.documentElement.dataset.theme === theme", arg=scheme
        )
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == colour
    page.set_viewport_size({"width": 480, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    violated = page.evaluate(
        """async () => {
            const found = [];
            document.addEventListener("securitypolicyviolation",
                ({ effectiveDirective }) => found.push(effectiveDirective));
            const add = (tag, properties) =>
                document.body.append(Object.assign(document.createElement(tag), properties));
            await fetch("https://example.org").catch(() => {});
            add("img", { src: "https://example.org/x.png" });
            add("script", { text: "window.injected = true" });
            add("iframe", { src: "https://example.org" });
            for (let wait = 0; found.length < 4 && wait < 500; wait++)
                await new Promise((done) => setTimeout(done, 20));
            return [found.sort(), window.injected];
        }"""
    )
    assert violated == [["connect-src", "frame-src", "img-src", "script-src-elem"], None]


@pytest.mark.slow
def test_live_model_of_a_file_gives_the_logits_of_torch(page, shapes_run):
    page.goto((shapes_run / "export/live.html").as_uri())
    wait_until(page, "step", 1)
    classifier, rng = load(shapes_run, "cpu", "float32"), np.random.default_rng(0)
    heads = list(np.ndindex(*gates_of(classifier.model).shape))
    questions = [
        ([head for head in heads if rng.random() < 0.5], np.flatnonzero(rng.random(16) < 0.3))
        for _ in range(10)  # test_live_browser.py asks many more
    ]
    found = page.evaluate(
        """async (all) => {
            const found = [];
            for (const [mute, hide] of all)
                found.push(Array.from((await attention.classify(null, { mute, hide })).logits));
            return found;
        }""",
        [(mute, hide.tolist()) for mute, hide in questions],
    )
    test = load_test_images(DataConfig(name="shapes"), classifier.preprocess)
    image = int(page.evaluate("attentionTab.state.image").rpartition("_")[2])
    pixels = test.select(torch.tensor([image])).pixels()[0]
    expected = [ask_torch(classifier, pixels, *question)[0][0] for question in questions]
    np.testing.assert_allclose(found, expected, atol=1e-2)
    assert np.std(np.stack(expected), axis=0).max() > 0.1
    for options in ({"fill": "other"}, {"mute": [3]}, {"patches": [1]}):
        ask = "(options) => attention.classify(null, options).catch((error) => error.message)"
        assert next(iter(options)) in page.evaluate(ask, options)
