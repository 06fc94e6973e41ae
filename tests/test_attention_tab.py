"""The Attention tab in a real TensorBoard and a real browser, compared with numpy."""

import base64
import io
import itertools
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary

from attention_tab import (
    HOSTILE,
    STEPS,
    event_file,
    make_record,
    serve,
    softmax,
    write_record,
)
from vit.explain.canvas import overlay
from vit.explain.colours import SIGNED
from vit.tensorboard_plugin.encoding import summaries
from vit.tensorboard_plugin.records import Record

chromium = shutil.which("chromium")
if chromium is None:
    pytest.skip("no chromium here: apt-get install chromium", allow_module_level=True)

from playwright.sync_api import Browser, Frame, Page, expect, sync_playwright  # noqa: E402

from test_tensorboard import FLAGS  # noqa: E402

pytestmark = pytest.mark.slow

WAIT = 30_000  # milliseconds
VIEWPORT = {"width": 1280, "height": 800}
TAG = "attention/probe_01"
RUNS: dict[str, dict[str, Any]] = {
    "square": {"grid": (8, 8), "prefix": [], "layers": 3, "heads": 2},
    "other": {"grid": (8, 8), "prefix": [], "layers": 3, "heads": 2},
    # 4 x 7 patches, class token, two registers, and hostile names of a class and a file.
    "rectangle": {"label": 2, "name": f"pictures/{HOSTILE}"},
}


SHARPNESS = {"even": 0.01, "sharp": 12}  # weights of 0.95 to 1.05 and of 0 to 64 times uniform


def deep_record(sharpness: float) -> Record:
    """A record of 12 layers with 12 heads, with a class token."""
    record = make_record(grid=(8, 8), prefix=["class token"], layers=12, heads=12)
    logits = np.random.default_rng(0).normal(size=(12, 12, 65, 65))
    weights = softmax(sharpness * logits).astype(np.float32)
    return Record(details=record.details, weights=weights)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logs")
    for seed, (run, options) in enumerate(RUNS.items()):
        with event_file(folder / run) as writer:
            for step in STEPS:
                for number in range(2):
                    record = make_record(10_000 * seed + 1000 * number + step, **options)
                    write_record(writer, f"attention/probe_{number:02d}", record, step)
            loss = Summary(value=[Summary.Value(tag="loss", simple_value=1.0)])
            writer.add_event(Event(step=0, summary=loss))  # so that there is another tab
    with event_file(folder / HOSTILE) as writer:
        write_record(writer, TAG, Record(details=make_record().details, weights=None), 0)
    for run, sharpness in SHARPNESS.items():
        with event_file(folder / run) as writer:
            write_record(writer, TAG, deep_record(sharpness), 0)
    with event_file(folder / "muted") as writer:
        for number, step in itertools.product(range(2), (0, 100)):
            record = make_record(number, **RUNS["square"], muted=step == 100)
            write_record(writer, f"attention/probe_{number:02d}", record, step)
    with event_file(folder / "damaged") as writer:
        summary = summaries(TAG, make_record())
        summary.value[1].tensor.string_val[0] = b"damaged"
        writer.add_event(Event(step=0, wall_time=1.7e9, summary=summary))
    with event_file(folder / "signed") as writer:
        record = make_record(**RUNS["square"])
        assert record.weights is not None
        weights = record.weights - 0.8 * record.weights[..., ::-1, :]  # differential attention
        write_record(writer, TAG, Record(details=record.details, weights=weights), 0)
    return folder


@pytest.fixture(scope="module")
def address(logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serve(logs, tmp_path_factory.mktemp("metadata")) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser
        browser.close()


def complaints_of(page: Page) -> list[str]:
    """Return a list that collects the errors and dialogs of a page."""
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda one: one.type == "error" and complaints.append(one.text))
    page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
    return complaints


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page; a test fails if anything in it complains."""
    page = browser.new_page(viewport=VIEWPORT)
    complaints = complaints_of(page)
    yield page
    page.close()
    assert not complaints


new_page = page  # another one


def weights_of(logs: Path, run: str, tag: str = TAG, step: int = STEPS[-1]) -> np.ndarray:
    """Read the weights from the event files, (L, H, N, N)."""
    for path in sorted((logs / run).iterdir()):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if event.step == step and value.tag == f"{tag}/weights":
                    with np.load(io.BytesIO(value.tensor.string_val[0])) as arrays:
                        return arrays["weights"] * arrays["scale"][..., None]
    raise AssertionError(f"no weights of {run} {tag} at step {step}")


def link(parameters: dict[str, Any]) -> str:
    parts = [f"p.attention.{key}={quote(str(value))}" for key, value in parameters.items()]
    return "&".join(["attention", *parts])


def show(page: Page, address: str, **parameters: Any) -> Frame:
    """Show a state in the tab; return its frame when it is painted.

    If the tab is open already, only the end of the address changes, and nothing is loaded again.
    """
    parameters = {"run": "square", "image": TAG, **parameters}
    page.goto(f"{address}/#{link(parameters)}")
    frame = ready(page)
    wait_until(frame, "run", parameters["run"])
    return frame


def ready(page: Page) -> Frame:
    handle = page.wait_for_selector("iframe[src*='name=attention']", timeout=WAIT)
    frame = handle.content_frame()
    assert frame is not None
    frame.wait_for_function("() => window.attentionTab?.panes[0].painted", timeout=WAIT)
    frame.evaluate("() => new Promise(setTimeout).then(() => window.attentionTab.ready)")
    return frame


def numbers(frame: Frame, pane: int = 0) -> dict[str, Any]:
    return frame.evaluate("pane => window.attentionTab.numbers()[pane]", pane)


def wait_until(frame: Frame, key: str, value: Any, pane: int = 0) -> dict[str, Any]:
    """Wait until what is painted has a value."""
    frame.wait_for_function(
        "([pane, key, value]) => window.attentionTab.numbers()[pane]?.[key] === value",
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


def attention(weights: np.ndarray, token: int, direction: str) -> np.ndarray:
    """Return one token's attention in all heads, (L, H, N), in units of uniform attention."""
    picked = weights[:, :, token] if direction == "to" else weights[..., token]
    return picked * weights.shape[-1]


def rollouts(weights: np.ndarray) -> np.ndarray:
    """Return the rollout up to each layer, (L, N, N)."""
    product, found = np.eye(weights.shape[-1]), []
    for layer in weights.mean(axis=1, dtype=np.float64):
        layer = layer / layer.sum(axis=-1, keepdims=True)  # 8 bits do not keep the sum
        product = (0.5 * layer + 0.5 * np.eye(len(layer))) @ product
        found.append(product)
    return np.stack(found)


def pixels_of_map(frame: Frame, layer: int, head: int | str, pane: int = 0) -> np.ndarray:
    """Read the colour in the middle of every patch of a small map, (rows, columns, 3)."""
    found = frame.evaluate(
        """([layer, head, pane]) => {
            const view = window.attentionTab.panes[pane].views.heads;
            const { left, top, zoom } = view.place(layer, head);
            const { rows, columns } = view.record;
            const context = view.maps.canvas.getContext("2d");
            const read = (row, column) => Array.from(context.getImageData(
                left + (column + 0.5) * zoom, top + (row + 0.5) * zoom, 1, 1).data.slice(0, 3));
            return Array.from({ length: rows }, (_, row) =>
                Array.from({ length: columns }, (_, column) => read(row, column)));
        }""",
        [layer, head, pane],
    )
    return np.asarray(found)


def choose_map(page: Page, frame: Frame, layer: int, head: int) -> None:
    place = frame.evaluate(
        "([layer, head]) => window.attentionTab.panes[0].views.heads.place(layer, head)",
        [layer, head],
    )
    position = {key: place[name] + 3 for key, name in (("x", "left"), ("y", "top"))}
    frame.locator(".stack").first.click(position=position)
    wait_until(frame, "layer", layer)
    wait_until(frame, "head", head)


@pytest.mark.parametrize("direction", ["to", "from"])
def test_hovering_a_patch_paints_its_weights(
    page: Page, address: str, logs: Path, direction: str
) -> None:
    frame = show(page, address, direction=direction)
    weights = weights_of(logs, "square")
    for layer, head, row, column in ((0, 1, 0, 0), (2, 1, 7, 5)):
        choose_map(page, frame, layer, head)
        painted = hover(page, frame, row, column)
        token = 8 * row + column
        expected = attention(weights, token, direction)
        np.testing.assert_allclose(painted["heads"], expected, rtol=1e-5)
        np.testing.assert_allclose(painted["values"], expected[layer, head], rtol=1e-5)
        np.testing.assert_allclose(painted["mean"], expected.mean(axis=1), rtol=1e-5)
        np.testing.assert_allclose(painted["max"], expected.max(axis=1), rtol=1e-5)
        product = rollouts(weights) * 64
        rolled = product[:, token] if direction == "to" else product[..., token]
        np.testing.assert_allclose(painted["rollout"], rolled, rtol=1e-5)
        colours = matplotlib.colormaps["inferno"](
            expected[layer, head].reshape(8, 8) / 3, bytes=True
        )
        # A value between two of the 256 colours may be rounded either way.
        np.testing.assert_allclose(pixels_of_map(frame, layer, head), colours[..., :3], atol=6)


def colours_of(values: np.ndarray, contrast: str, shown: Sequence[np.ndarray]) -> np.ndarray:
    """Return the colours of values beside all others that are shown."""
    low, high = min(one.min() for one in shown), max(one.max() for one in shown)
    if low < 0:
        low, high = -max(high, -low), max(high, -low)
    if contrast == "fixed":
        low, high = -3 if low < 0 else 0, 3
    colour_map = matplotlib.colormaps["RdBu_r" if low < 0 else "inferno"]
    return colour_map((values - low) / (high - low), bytes=True)[..., :3].astype(int)


@pytest.mark.parametrize("contrast", ["fixed", "auto"])
def test_both_panes_have_the_colours_of_one_scale(
    new_page: Page, address: str, logs: Path, contrast: str
) -> None:
    state = {"image": TAG, "token": "3, 3", "contrast": contrast}
    frame = show(new_page, address, run="even", run2="sharp", **state)
    wait_until(frame, "run", "sharp", pane=1)
    wait_until(frame, "contrast", contrast, pane=1)
    shown = [attention(weights_of(logs, run, TAG, 0), 28, "to") for run in ("even", "sharp")]
    for pane, values in enumerate(shown):
        for layer, head in ((0, 0), (11, 7)):
            expected = colours_of(values[layer, head, 1:].reshape(8, 8), contrast, shown)
            # A value between two of the 256 colours may be rounded either way.
            found = pixels_of_map(frame, layer, head, pane)
            np.testing.assert_allclose(found, expected, atol=6)
    named = {"fixed": "fixed", "auto": "automatic"}[contrast]
    bars = frame.locator(".scale").all_inner_texts()
    assert len(set(bars)) == 1 or contrast == "fixed"  # which also says what is beyond
    assert all(f"× uniform, {named} scale on both sides" in bar for bar in bars)


@pytest.mark.parametrize("contrast", ["fixed", "auto"])
def test_negative_weights_have_a_signed_scale(
    page: Page, address: str, logs: Path, contrast: str
) -> None:
    frame = show(page, address, run="signed", token="3, 3", contrast=contrast)
    painted = wait_until(frame, "contrast", contrast)
    weights = weights_of(logs, "signed", TAG, 0)
    expected = attention(weights, 27, "to")
    assert expected.min() < -1
    np.testing.assert_allclose(painted["heads"], expected, rtol=1e-5)
    np.testing.assert_allclose(painted["max"], expected.max(axis=1), rtol=1e-5)
    rolled = rollouts(np.maximum(weights, 0))[:, 27] * 64
    np.testing.assert_allclose(painted["rollout"], rolled, rtol=1e-5)
    colours = colours_of(expected[1, 1].reshape(8, 8), contrast, [expected])
    np.testing.assert_allclose(pixels_of_map(frame, 1, 1), colours, atol=6)


def test_two_runs_side_by_side_are_linked(page: Page, address: str, logs: Path) -> None:
    frame = show(page, address, layer=0, head=1)
    frame.get_by_label("compare with").select_option(label="other")
    wait_until(frame, "run", "other", pane=1)
    frame.get_by_role("slider", name="Step").first.press("Home")
    wait_until(frame, "step", 0, pane=1)
    hover(page, frame, 5, 1)
    for pane, run in enumerate(("square", "other")):
        painted = wait_until(frame, "token", "5, 1", pane)
        assert (painted["run"], painted["step"]) == (run, 0)
        expected = attention(weights_of(logs, run, step=0), 41, "to")[0, 1]
        np.testing.assert_allclose(painted["values"], expected, rtol=1e-5)
    frame.get_by_label("Image of the second pane").select_option("attention/probe_00")
    wait_until(frame, "image", "attention/probe_00", pane=1)
    expect(frame.get_by_text("These are different images.")).to_be_visible()


def test_a_step_written_meanwhile_appears_and_the_patch_stays(
    page: Page, address: str, logs: Path
) -> None:
    frame = show(page, address, run="other", layer=2, head=0)
    page.mouse.click(*patch_at(frame, 6, 4))
    wait_until(frame, "token", "6, 4")
    with event_file(logs / "other") as writer:
        for number in range(2):
            record = make_record(77 + number, **RUNS["other"])
            write_record(writer, f"attention/probe_{number:02d}", record, 125)
    painted = wait_until(frame, "step", 125)
    assert painted["token"] == "6, 4"
    expected = attention(weights_of(logs, "other", step=125), 52, "to")[2, 0]
    np.testing.assert_allclose(painted["values"], expected, rtol=1e-5)


def test_a_link_restores_the_state_and_a_pinned_patch_stays(
    page: Page, new_page: Page, address: str, logs: Path
) -> None:
    frame = show(page, address, run="rectangle")
    page.mouse.click(*patch_at(frame, 1, 2))
    choose_map(page, frame, 0, 1)
    page.mouse.move(1, 1)
    frame.locator("body").press("x")
    frame.get_by_role("slider", name="Step").first.press("Home")
    wait_until(frame, "step", 0)
    expect(frame.locator("output").first).to_have_text("step 0 (1 of 10)")
    before = wait_until(frame, "direction", "from")
    expected = attention(weights_of(logs, "rectangle", step=0), 3 + 9, "from")[0, 1]
    np.testing.assert_allclose(before["values"], expected, rtol=1e-5)
    page.wait_for_function("() => location.hash.includes('p.attention.step=0')")
    new_page.goto(page.url)
    assert numbers(ready(new_page)) == before
    assert (before["token"], before["image"]) == ("1, 2", TAG)


def test_everything_by_keyboard(page: Page, address: str, logs: Path) -> None:
    frame = show(page, address, run="rectangle")
    frame.locator("select").first.focus()
    for _ in range(40):  # presses of Tab until the picture is reached
        page.keyboard.press("Tab")
        if frame.evaluate("() => document.activeElement.matches('canvas.picture')"):
            break
    outline = frame.evaluate("() => getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    page.keyboard.press("ArrowRight")  # the patch in the middle
    wait_until(frame, "token", "1, 3")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    wait_until(frame, "token", "2, 4")
    for key, name, value in (
        ("x", "direction", "from"), ("[", "step", STEPS[-2]), ("t", "token", "mean of patches"),
        ("t", "token", "class token"), ("2", "view", "maps"), ("3", "view", "lens"),
        ("1", "view", "heads"),
    ):  # fmt: skip
        page.keyboard.press(key)
        painted = wait_until(frame, name, value)
    frame.locator(".stack").first.press("ArrowUp")  # from the mean of the last layer
    painted = wait_until(frame, "layer", 1)
    frame.locator(".chooser button").first.press("Enter")
    painted = wait_until(frame, "image", "attention/probe_00")
    weights = weights_of(logs, "rectangle", "attention/probe_00", STEPS[-2])
    expected = attention(weights, 0, "from")[1].mean(axis=0)
    np.testing.assert_allclose(painted["values"], expected, rtol=1e-5)
    page.keyboard.press("?")
    expect(frame.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(frame.get_by_role("dialog")).to_be_hidden()
    spoken = frame.locator("[aria-live=polite]")
    expect(spoken).to_contain_text("class token receives attention from")


def test_names_of_classes_and_files_are_never_html(page: Page, address: str) -> None:
    frame = show(page, address, run="rectangle")
    expect(frame.locator(".file").first).to_have_text(HOSTILE)
    first = frame.locator(".chooser button").first
    expect(first).to_have_attribute("title", f"pictures/{HOSTILE}")
    expect(first).to_contain_text(HOSTILE)
    expect(frame.locator(".caption").first).to_contain_text(f"true {HOSTILE}")
    for view in ("2", "3"):
        page.keyboard.press(view)
        wait_until(frame, "view", {"2": "maps", "3": "lens"}[view])
    assert frame.locator("img:not([src^='data:image/png;base64,'])").count() == 0


def test_maps_and_predictions(page: Page, address: str, logs: Path) -> None:
    frame = show(page, address, run="rectangle", view="maps")
    details = make_record(20_000 + 1000 + STEPS[-1], label=2).details
    cards = frame.locator(".card")
    expect(cards).to_have_count(3)
    expect(cards.nth(1)).to_contain_text(f"for {details.classes[details.top[0][0]]}")
    frame.get_by_label("Class that the maps explain").select_option(index=1)
    expect(cards.nth(1)).to_contain_text(f"for {details.classes[details.top[1][0]]}")
    page.mouse.move(*patch_at(frame, 1, 1))
    value = details.maps[0].values[8]
    expect(cards.first).to_contain_text(f"here {value:.2f} × uniform")
    frame.get_by_role("tab", name="Predictions").click()
    page.mouse.move(*patch_at(frame, 0, 2))
    assert details.lens is not None
    for layer in range(3):
        row = frame.locator(".lens-row").nth(1 + layer)
        for index in (details.lens.classes[layer][0][0], details.lens.classes[layer][1 + 5][0]):
            expect(row).to_contain_text(details.classes[index])


def test_a_signed_map_has_colours_and_a_unit_of_its_own(page: Page, address: str) -> None:
    frame = show(page, address, run="rectangle", view="maps", map="lrp")
    details = make_record(20_000 + 1000 + STEPS[-1], label=2).details
    (shown,) = (m for m in details.maps if m.kind == "lrp" and m.target == details.top[0][0])
    painted = numbers(frame)
    np.testing.assert_allclose(painted["values"], shown.values, rtol=1e-3)
    assert painted["unit"] == "mean of absolute values"
    picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(details.image.partition(",")[2]))))
    expected = overlay(picture, torch.tensor(shown.values).reshape(4, 7), SIGNED)
    found = frame.evaluate(
        """() => {
            const canvas = document.querySelectorAll(".card canvas")[2];
            const context = canvas.getContext("2d");
            const read = (row, column) => Array.from(context.getImageData(
                (column + 0.4) * canvas.width / 7, (row + 0.4) * canvas.height / 4, 1, 1).data);
            return [0, 1, 2, 3].map((row) => [0, 1, 2, 3, 4, 5, 6].map((column) =>
                read(row, column).slice(0, 3)));
        }"""
    )
    # The opacity is rounded to 8 bits in both, at different places.
    np.testing.assert_allclose(found, expected[1::4, 1::4].astype(int), atol=3)
    expect(frame.locator(".scale").first).to_contain_text("−3← against0for →3× mean")
    page.mouse.move(*patch_at(frame, 1, 2))
    value = f"{shown.values[9]:.2f} × mean".replace("-", "−")
    expect(frame.locator(".readout").first).to_contain_text(f"patch (1, 2) at {value}")


def test_heads_are_sorted_by_a_statistic(page: Page, address: str) -> None:
    statistic = "importance"
    frame = show(page, address, run="muted", statistic=statistic, order="lowest")
    expected = make_record(1, **RUNS["square"], muted=True).details.statistics
    note = frame.locator(".heads .note").first
    expect(note).to_have_text("Below each map: layer/head, importance, from held-out images.")
    shown = numbers(frame)["statistics"]
    for name in ("entropy", "distance", "sink", "importance"):
        np.testing.assert_allclose(shown[name], getattr(expected, name), rtol=1e-3)
    places = [
        frame.evaluate(
            "([l, h]) => window.attentionTab.panes[0].views.heads.place(l, h)",
            [int(index) // 2, int(index) % 2],
        )
        for index in np.argsort(shown[statistic], axis=None)
    ]
    assert places == sorted(places, key=lambda place: (place["top"], place["left"]))


def test_an_empty_log_directory_says_how_to_make_a_run(new_page: Page, address: str) -> None:
    new_page.route("**/plugin/attention/runs*", lambda route: route.fulfill(json={"runs": []}))
    new_page.goto(f"{address}/#attention")
    shown = new_page.frame_locator("iframe").get_by_text("python train.py --config shapes")
    expect(shown).to_be_visible(timeout=WAIT)


@pytest.mark.parametrize("run", [HOSTILE, "damaged"])
def test_without_weights_the_maps_remain(browser: Browser, address: str, run: str) -> None:
    page = browser.new_page(viewport=VIEWPORT)
    complaints = complaints_of(page)
    frame = show(page, address, run=run)
    expect(frame.get_by_role("heading", name=run)).to_be_visible()
    why = {HOSTILE: "weights of this image were not stored", "damaged": "cannot be read: the weigh"}
    expect(frame.get_by_text(why[run]).first).to_be_visible()
    frame.get_by_role("tab", name="Maps").click()
    card = frame.locator(".card").nth(1)
    card.press("Enter")
    assert wait_until(frame, "view", "maps")["values"] == pytest.approx(
        make_record().details.maps[1].values, rel=1e-3
    )
    expect(card).to_be_focused()
    assert len(complaints) == (run == "damaged")  # the browser's line for status 400
    page.close()


def test_a_narrow_window_does_not_scroll_sideways(new_page: Page, address: str) -> None:
    new_page.set_viewport_size({"width": 480, "height": 800})
    for view in ("heads", "maps", "lens"):
        for run2 in ("", "rectangle"):
            frame = show(new_page, address, run="rectangle", view=view, run2=run2)
            wait_until(frame, "view", view, pane=1 if run2 else 0)
            expect(frame.locator(".pane").nth(1)).to_be_visible(visible=bool(run2))
            wider = frame.evaluate(
                """() => ["html", ".toolbar", ".body", "main"].filter((name) => {
                    const { scrollWidth, clientWidth } = document.querySelector(name);
                    return scrollWidth > clientWidth;
                })"""
            )
            assert wider == [], (view, run2)


def test_dark_mode_follows_tensorboard(page: Page, address: str) -> None:
    frame = show(page, address)
    for theme, colour in (("Dark", "rgb(48, 48, 48)"), ("Light", "rgb(255, 255, 255)")):
        page.get_by_role("button", name="Menu for changing light or dark theme").click()
        page.get_by_role("menuitem", name=theme).click()
        frame.wait_for_function(
            "theme => document.documentElement.dataset.theme === theme", arg=theme.lower()
        )
        assert frame.evaluate("() => getComputedStyle(document.body).backgroundColor") == colour
