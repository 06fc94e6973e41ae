"""The Attention tab in a real TensorBoard and a real browser, compared with numpy."""

import copy
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from playwright.sync_api import Frame, Page, expect
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from attention_tab import (
    HOSTILE,
    STEPS,
    TAG,
    WAIT,
    ask_torch,
    attention,
    event_file,
    hover,
    link,
    make_live,
    make_record,
    numbers,
    patch_at,
    ready,
    serve,
    softmax,
    wait_until,
    weights_of,
    write_record,
)
from models import PLAIN, randomize
from vit.classifier import Classifier
from vit.data.images import ImageSet
from vit.explain.rollout import attention_rollout
from vit.explain.statistics import attention_by_offset, attention_entropy
from vit.model.vit import VisionTransformer
from vit.pretrained.load import load as load_model
from vit.reporting.add_attention import add_attention
from vit.reporting.attention_records import attention_records
from vit.reporting.live import add_live
from vit.run.tracker import add_summary
from vit.tensorboard_plugin.encoding import live_summary, live_weights, summaries
from vit.tensorboard_plugin.records import Record

pytestmark = pytest.mark.slow

RUNS: dict[str, dict[str, Any]] = {
    "square": {"grid": (8, 8), "prefix": [], "layers": 3, "heads": 2},
    "other": {"grid": (8, 8), "prefix": [], "layers": 3, "heads": 2},
    # 4 x 7 patches, class token, two registers, and hostile names of a class and a file.
    "rectangle": {"label": 2, "name": f"pictures/{HOSTILE}"},
}

SHARPNESS = {"even": 0.01, "sharp": 12}  # weights of 0.95 to 1.05 and of 0 to 64 times uniform
# Of features: the widths of runs, so few that no component is left out; the last has other images.
WIDTHS = {"narrow": 20, "wide": 28, "alone": 24}
FEATURE_STEPS, ROWS, COLUMNS, LAYERS, IMAGES = (0, 10), 4, 5, 2, 3


def deep_record(sharpness: float) -> Record:
    """A record of 12 layers with 12 heads, with a class token."""
    record = make_record(grid=(8, 8), prefix=["class token"], layers=12, heads=12)
    logits = np.random.default_rng(0).normal(size=(12, 12, 65, 65))
    weights = softmax(sharpness * logits).astype(np.float32)
    return Record(details=record.details, weights=weights)


def half_right() -> list[Record]:
    """Twelve records, of which every other image is taken for what it is."""
    found = []
    for number in range(12):
        record = make_record(number)
        details = replace(record.details, label=record.details.top[1 - number % 2][0])
        found.append(replace(record, details=details))
    return found


def tokens_of(run: str, step: int) -> torch.Tensor:
    """Tokens of a class token and 20 patches, (L, B, N, D); "wide" has those of "narrow" in it."""
    generator = torch.Generator().manual_seed(WIDTHS[run] + step)
    width, layers = WIDTHS[run], LAYERS + (run == "wide")
    random = torch.randn(layers, IMAGES, 1 + ROWS * COLUMNS, width, generator=generator)
    tokens = random * 0.8 ** torch.arange(width) + 0.5
    if run == "wide":
        tokens[..., -WIDTHS["narrow"] :] += tokens_of("narrow", step)[[0, 1, 1]]
    return tokens


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
    with event_file(folder / "misfit") as writer:
        write_record(writer, TAG, make_record(**RUNS["square"]), 0)
        live = make_live()  # of 3 layers and 4 x 7 patches
        for summary in (live_summary(live), live_weights(0, live, "float32", bytes(20))):
            writer.add_event(Event(step=0, wall_time=1.7e9, summary=summary))
    with event_file(folder / "signed") as writer:
        record = make_record(**RUNS["square"])
        assert record.weights is not None
        weights = record.weights - 0.8 * record.weights[..., ::-1, :]  # differential attention
        write_record(writer, TAG, Record(details=record.details, weights=weights), 0)
    with event_file(folder / "sure") as writer:
        for number, record in enumerate(half_right()):
            write_record(writer, f"image_{number:02d}", record, 0)
    with event_file(folder / "right") as writer:
        for number in range(2):
            record = make_record(number, **RUNS["rectangle"])
            assert record.weights is not None
            weights = record.weights.copy()
            weights[1, 0] = np.eye(31, k=1)  # each patch attends to the one at its right
            weights[1, 0, 9::7] = 1 / 31  # and those without one to all
            weights[2, 1] = 1 / 31
            write_record(
                writer, f"image_{number}", Record(details=record.details, weights=weights), 0
            )
    uniform = torch.full((IMAGES, 2, 21, 21), 1 / 21)
    images = torch.rand(IMAGES, 3, 8 * ROWS, 8 * COLUMNS)
    for run in WIDTHS:
        with SummaryWriter(str(folder / run)) as writer:
            for step in FEATURE_STEPS:
                tokens = tokens_of(run, step)
                add_attention(
                    writer, "image", 1 - images if run == "alone" else images,
                    [uniform] * len(tokens), step, grid=(ROWS, COLUMNS), num_prefix_tokens=1,
                    readout="class_token", tokens=tokens,
                )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def address(logs: Path, logged: Any) -> Iterator[str]:
    with serve(logs) as found:
        yield found


def show(page: Page, address: str, **parameters: Any) -> Frame:
    """Show a state in the tab; return its frame when it is painted.

    If the tab is open already, only the end of the address changes, and nothing is loaded again.
    """
    parameters = {"run": "square", "image": TAG, **parameters}
    page.goto(f"{address}/#{link(parameters)}")
    frame = ready(page)
    wait_until(frame, "run", parameters["run"])
    return frame


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
def test_hovering_a_patch_paints_its_weights(page, address, logs, direction):
    frame = show(page, address, direction=direction)
    weights = weights_of(logs / "square")
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
def test_both_panes_have_the_colours_of_one_scale(page, address, logs, contrast):
    state = {"image": TAG, "token": "3, 3", "contrast": contrast}
    frame = show(page, address, run="even", run2="sharp", **state)
    wait_until(frame, "run", "sharp", pane=1)
    wait_until(frame, "contrast", contrast, pane=1)
    shown = [attention(weights_of(logs / run, TAG, 0), 28, "to") for run in ("even", "sharp")]
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


@pytest.mark.parametrize(("run", "named"), [("even", "automatic"), ("sharp", "fixed")])
def test_a_nearly_uniform_map_has_its_own_scale(page, address, logs, run, named):
    """Only where it is shown large: small maps remain comparable."""
    frame = show(page, address, run=run, token="3, 3", layer=0, head=0)
    values = attention(weights_of(logs / run, TAG, 0), 28, "to")[0, 0, 1:].reshape(8, 8)
    expect(frame.locator(".scale .unit").first).to_contain_text(f"× uniform, {named} scale")
    low, high = numbers(frame)["range"]
    if run == "even":
        assert (low + high) / 2 == pytest.approx((values.min() + values.max()) / 2, rel=1e-3)
        assert high - low == pytest.approx(0.5)  # not narrower, though the values are
    else:
        assert (low, high) == (0, 3)
    small = pixels_of_map(frame, 0, 0)
    np.testing.assert_allclose(small, colours_of(values, "fixed", [values]), atol=6)


@pytest.mark.parametrize("contrast", ["fixed", "auto"])
def test_negative_weights_have_a_signed_scale(page, address, logs, contrast):
    frame = show(page, address, run="signed", token="3, 3", contrast=contrast)
    painted = wait_until(frame, "contrast", contrast)
    weights = weights_of(logs / "signed", TAG, 0)
    expected = attention(weights, 27, "to")
    assert expected.min() < -1
    np.testing.assert_allclose(painted["heads"], expected, rtol=1e-5)
    np.testing.assert_allclose(painted["max"], expected.max(axis=1), rtol=1e-5)
    rolled = rollouts(np.maximum(weights, 0))[:, 27] * 64
    np.testing.assert_allclose(painted["rollout"], rolled, rtol=1e-5)
    colours = colours_of(expected[1, 1].reshape(8, 8), contrast, [expected])
    np.testing.assert_allclose(pixels_of_map(frame, 1, 1), colours, atol=6)


def test_attention_by_offset_is_the_mean_over_images(page, address, logs):
    frame = show(page, address, run="right", image="image_0", layer=1, head=0)
    frame.get_by_label("Direction").select_option("attention by offset")
    painted = wait_until(frame, "direction", "offset")
    layers = [weights_of(logs / "right", f"image_{number}", 0) for number in range(2)]
    stacked = torch.from_numpy(np.stack(layers, axis=1))
    expected = 31 * attention_by_offset([*stacked], (4, 7), 3).numpy()
    found = np.reshape(painted["heads"], expected.shape)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert sorted(painted["averaged"]) == ["image_0", "image_1"]
    right = np.zeros((7, 13), bool)
    right[3, 7] = True
    bright = pixels_of_map(frame, 1, 0).sum(axis=-1) > 600
    np.testing.assert_array_equal(bright, right)
    even = pixels_of_map(frame, 2, 1).reshape(-1, 3)
    assert np.ptp(even, axis=0).max() == 0
    place = frame.evaluate("() => window.attentionTab.panes[0].views.heads.place(1, 0)")
    position = {"x": place["left"] + 7.5 * place["zoom"], "y": place["top"] + 3.5 * place["zoom"]}
    frame.locator(".stack").first.hover(position=position)
    readout = frame.locator(".readout").first
    expect(readout).to_contain_text("layer 1, head 0: attention by offset, 2 images")
    expect(readout).to_contain_text(f"1 right at {expected[1, 0, 3, 7]:.1f} × uniform")
    page.mouse.click(*patch_at(frame, 2, 2))
    page.mouse.move(*patch_at(frame, 2, 3))
    expect(readout).to_contain_text("1 right at")
    page.keyboard.press("x")
    wait_until(frame, "direction", "to")


def test_the_most_confident_hit_is_first_and_the_most_confident_mistake_second(page, address):
    records = half_right()
    sure = sorted(range(12), key=lambda number: -records[number].details.top[0][1])
    first = [next(number for number in sure if number % 2 == right) for right in (1, 0)]
    page.goto(f"{address}/#{link({'run': 'sure'})}")
    frame = ready(page)
    shown = wait_until(frame, "run", "sure")
    assert (shown["image"], shown["head"]) == (f"image_{first[0]:02d}", "rollout")
    titles = frame.locator(".chooser button").evaluate_all("all => all.map((one) => one.title)")
    expected = [*first, *(number for number in range(12) if number not in first)]
    assert titles == [f"image_{number:02d}" for number in expected]


def test_two_runs_side_by_side_are_linked(page, address, logs):
    frame = show(page, address, layer=0, head=1)
    frame.get_by_label("compare with").select_option(label="other")
    wait_until(frame, "run", "other", pane=1)
    frame.get_by_role("slider", name="Step").first.press("Home")
    for pane in (0, 1):  # either may be painted first
        wait_until(frame, "step", 0, pane)
    hover(page, frame, 5, 1)
    for pane, run in enumerate(("square", "other")):
        painted = wait_until(frame, "token", "5, 1", pane)
        assert (painted["run"], painted["step"]) == (run, 0)
        expected = attention(weights_of(logs / run, step=0), 41, "to")[0, 1]
        np.testing.assert_allclose(painted["values"], expected, rtol=1e-5)
    frame.get_by_label("Image of the second pane").select_option("attention/probe_00")
    wait_until(frame, "image", "attention/probe_00", pane=1)
    expect(frame.get_by_text("These are different images.")).to_be_visible()


def test_the_nearest_step_is_shown_and_keys_pressed_at_once_all_count(page, address):
    frame = show(page, address, run="square", step=STEPS[-1] + 1000)
    wait_until(frame, "step", STEPS[-1])
    with page.expect_download() as download:
        frame.get_by_role("button", name="JSON").click()
    assert download.value.suggested_filename.endswith(f"_step_{STEPS[-1]}.json")
    for _ in STEPS[1:]:
        page.keyboard.press("[")
    wait_until(frame, "step", STEPS[0])


def test_a_step_written_meanwhile_appears_and_the_patch_stays(page, address, logs):
    frame = show(page, address, run="other", layer=2, head=0)
    page.mouse.click(*patch_at(frame, 6, 4))
    wait_until(frame, "token", "6, 4")
    with event_file(logs / "other") as writer:
        for number in range(2):
            record = make_record(77 + number, **RUNS["other"])
            write_record(writer, f"attention/probe_{number:02d}", record, 125)
    painted = wait_until(frame, "step", 125)
    assert painted["token"] == "6, 4"
    expected = attention(weights_of(logs / "other", step=125), 52, "to")[2, 0]
    np.testing.assert_allclose(painted["values"], expected, rtol=1e-5)


def test_a_run_with_steps_is_shown_first_and_each_run_shows_an_image_that_it_has(page, tmp_path):
    """As after a training and `eval.py RUN maps`, which writes a newer run with other images."""
    for run, steps, tags in (
        ("demo", (0, 10), ("probe_00", "probe_01")), ("demo/eval/attention", (20,), ("image_7",)),
        ("other", (0, 5), ("probe_01", "probe_02")),
    ):  # fmt: skip
        with event_file(tmp_path / "logs" / run) as writer:
            for step, tag in itertools.product(steps, tags):
                write_record(writer, tag, make_record(sum(map(ord, tag)), label=None), step)
    with serve(tmp_path / "logs") as address:
        page.goto(f"{address}/#attention")
        frame = ready(page)
        wait_until(frame, "run", "demo")
        frame.locator(".chooser button").nth(1).click()
        wait_until(frame, "image", "probe_01")
        choose, beside = frame.get_by_label("Run"), frame.get_by_label("compare with")
        for run, image in (
            ("other", "probe_01"), ("demo", "probe_01"), ("demo/eval/attention", "image_7"),
            ("demo", "probe_00"),
        ):  # fmt: skip
            choose.select_option(label=run)
            assert wait_until(frame, "run", run)["image"] == image
        for run, image in (("other", "probe_01"), ("demo/eval/attention", "image_7")):
            beside.select_option(label=run)
            assert wait_until(frame, "run", run, pane=1)["image"] == image
        expect(frame.get_by_text("These are different images.")).to_be_visible()
        shown = frame.get_by_label("Image of the second pane").locator("option:checked")
        expect(shown).to_contain_text("image_7")


def test_everything_by_keyboard(page, address, logs):
    frame = show(page, address, run="rectangle", image="attention/probe_01")
    # Hostile names of the class and the file are text.
    expect(frame.locator(".caption").first).to_contain_text(f"true {HOSTILE}")
    frame.locator("select").first.focus()
    for _ in range(40):  # presses of Tab until the picture is reached
        page.keyboard.press("Tab")
        if frame.evaluate("() => document.activeElement.matches('canvas.picture')"):
            break
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
        assert frame.locator("img:not([src^='data:image/png;base64,'])").count() == 0
    frame.locator(".stack").first.press("ArrowUp")  # from rollout up to the last layer
    frame.locator(".stack").first.press("ArrowLeft")
    frame.locator(".stack").first.press("ArrowLeft")
    painted = wait_until(frame, "head", "mean")
    assert painted["layer"] == 1
    frame.locator(".chooser [aria-pressed=false]").press("Enter")
    painted = wait_until(frame, "image", "attention/probe_00")
    weights = weights_of(logs / "rectangle", "attention/probe_00", STEPS[-2])
    expected = attention(weights, 0, "from")[1].mean(axis=0)
    np.testing.assert_allclose(painted["values"], expected, rtol=1e-5)
    page.keyboard.press("?")
    expect(frame.get_by_role("dialog")).to_be_visible()


def test_maps_and_predictions(page, address):
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


def test_a_signed_map_has_a_unit_of_its_own(page, address):
    frame = show(page, address, run="rectangle", view="maps", map="lrp")
    details = make_record(20_000 + 1000 + STEPS[-1], label=2).details
    (shown,) = (m for m in details.maps if m.kind == "lrp" and m.target == details.top[0][0])
    np.testing.assert_allclose(numbers(frame)["values"], shown.values, rtol=1e-3)
    expect(frame.locator(".scale").first).to_contain_text("−3← against0for →3× mean")
    page.mouse.move(*patch_at(frame, 1, 2))
    value = f"{shown.values[9]:.2f} × mean".replace("-", "−")
    expect(frame.locator(".readout").first).to_contain_text(f"patch (1, 2) at {value}")


def test_heads_are_sorted_by_a_statistic(page, address):
    frame = show(page, address, run="muted", statistic="importance", order="lowest")
    expected = make_record(1, **RUNS["square"], muted=True).details.statistics
    note = frame.locator(".heads .note").nth(2)
    expect(note).to_have_text("Below each map: layer/head, importance, from held-out images.")
    shown = numbers(frame)["statistics"]
    for name in ("entropy", "distance", "sink", "importance"):
        np.testing.assert_allclose(shown[name], getattr(expected, name), rtol=1e-3)
    places = [
        frame.evaluate(
            "([l, h]) => window.attentionTab.panes[0].views.heads.place(l, h)",
            [int(index) // 2, int(index) % 2],
        )
        for index in np.argsort(shown["importance"], axis=None)
    ]
    assert places == sorted(places, key=lambda place: (place["top"], place["left"]))


def test_an_empty_log_directory_says_how_to_make_a_run(page, address):
    page.route("**/plugin/attention/runs*", lambda route: route.fulfill(json={"runs": []}))
    page.goto(f"{address}/#attention")
    shown = page.frame_locator("iframe").get_by_text("vit-train --config shapes")
    expect(shown).to_be_visible(timeout=WAIT)


def test_without_weights_the_maps_remain(page, address):
    frame = show(page, address, run=HOSTILE)
    expect(frame.get_by_role("heading", name=HOSTILE)).to_be_visible()
    expect(frame.get_by_text("weights of this image were not stored").first).to_be_visible()
    frame.get_by_role("tab", name="Maps").click()
    card = frame.locator(".card").nth(1)
    card.press("Enter")
    assert wait_until(frame, "view", "maps")["values"] == pytest.approx(
        make_record().details.maps[1].values, rel=1e-3
    )
    expect(card).to_be_focused()


def test_a_narrow_window_does_not_scroll_sideways(page, address):
    page.set_viewport_size({"width": 480, "height": 800})
    for view in ("heads", "maps", "lens"):
        for run2 in ("", "rectangle"):
            frame = show(page, address, run="rectangle", view=view, run2=run2)
            wait_until(frame, "view", view, pane=1 if run2 else 0)
            expect(frame.locator(".pane").nth(1)).to_be_visible(visible=bool(run2))
            wider = frame.evaluate(
                """() => ["html", ".toolbar", ".body", "main"].filter((name) => {
                    const { scrollWidth, clientWidth } = document.querySelector(name);
                    return scrollWidth > clientWidth;
                })"""
            )
            assert wider == [], (view, run2)


def test_a_low_window_can_be_scrolled(page, address):
    """As at 200% zoom."""
    page.set_viewport_size({"width": 683, "height": 330})
    frame = show(page, address)
    box = frame.locator(".body").bounding_box()
    assert box is not None and box["height"] > 300
    page.mouse.move(300, 300)
    page.mouse.wheel(0, 300)
    expect(frame.locator("canvas.picture").first).to_be_in_viewport()
    readout = frame.locator(".readout").first
    readout.evaluate("one => one.scrollIntoView()")
    place = readout.bounding_box()
    page.keyboard.press("[")
    wait_until(frame, "step", STEPS[-2])
    assert readout.bounding_box() == place  # not back at the list of images


def test_dark_mode_follows_tensorboard(page, address):
    frame = show(page, address)
    for theme, colour in (("Dark", "rgb(48, 48, 48)"), ("Light", "rgb(255, 255, 255)")):
        page.get_by_role("button", name="Menu for changing light or dark theme").click()
        page.get_by_role("menuitem", name=theme).click()
        frame.wait_for_function(
            "theme => document.documentElement.dataset.theme === theme", arg=theme.lower()
        )
        assert frame.evaluate("() => getComputedStyle(document.body).backgroundColor") == colour


# The view Features


def show_features(page: Page, address: str, **parameters: Any) -> Frame:
    frame = show(
        page, address, **{"run": "narrow", "image": "image_00", "view": "features"} | parameters
    )
    wait_until(frame, "view", parameters.get("view", "features"))
    return frame


def components(
    run: str, step: int, image: int, count: int = 3, frame: int = FEATURE_STEPS[-1]
) -> np.ndarray:
    """Components in standard deviations, on the axes of the step of a frame, (L, P, count)."""
    last, tokens = (tokens_of(run, at)[:, :, 1:].double().numpy() for at in (frame, step))
    found = []
    for reference, layer in zip(last, tokens, strict=True):
        patches = reference.reshape(-1, reference.shape[-1])
        _, lengths, axes = np.linalg.svd(patches - patches.mean(axis=0), full_matrices=False)
        signs = np.sign(axes[np.arange(len(axes)), np.abs(axes).argmax(axis=1)])
        along = (layer[image] - layer.mean(axis=(0, 1))) @ (axes * signs[:, None])[:count].T
        found.append(along / (lengths[:count] / np.sqrt(len(patches))))
    return np.stack(found)


def cosines(run: str, step: int, image: int, patch: int, at: int, other: int) -> np.ndarray:
    """Exact cosines of a patch with those of an image at a step, (L, P)."""
    one, many = tokens_of(run, step)[:, image, 1 + patch], tokens_of(run, at)[:, other, 1:]
    return torch.cosine_similarity(one[:, None], many, dim=-1).numpy()


PIXELS = """canvas => {
    const context = canvas.getContext("2d");
    const [width, height] = [canvas.width / 5, canvas.height / 4];
    const read = (row, column) => Array.from(context.getImageData(
        (column + 0.5) * width, (row + 0.5) * height, 1, 1).data).slice(0, 3);
    return [0, 1, 2, 3].map((row) => [0, 1, 2, 3, 4].map((column) => read(row, column)));
}"""


def maps_of(frame: Frame, columns: int, pane: int = 0) -> np.ndarray:
    """Read the colours of all small maps of a pane, (L, columns, P, 3)."""
    canvases = frame.locator(".pane").nth(pane).locator(".features > canvas")
    assert canvases.count() == LAYERS * columns
    found = np.array([canvas.evaluate(PIXELS) for canvas in canvases.all()])
    return found.reshape(LAYERS, columns, ROWS * COLUMNS, 3)


def test_colours_are_components_on_the_axes_of_the_last_step(page, address):
    frame = show_features(page, address, run2="narrow", step2=0, linked="no", layer=0)
    wait_until(frame, "step", 0, pane=1)
    for pane, step in enumerate((10, 0)):
        expected = (127.5 + 51 * components("narrow", step, 0)).clip(0, 255)
        found = maps_of(frame, 4, pane)[:, 0]
        np.testing.assert_allclose(found, expected, atol=5)  # of 8 bits
        picture = frame.locator("canvas.picture").nth(pane).evaluate(PIXELS)
        np.testing.assert_array_equal(np.reshape(picture, (-1, 3)), found[0])
    second = (127.5 + 51 * components("narrow", 10, 1)).clip(0, 255)
    frame = show_features(page, address, image="image_01")
    np.testing.assert_allclose(maps_of(frame, 3)[:, 0], second, atol=5)


@pytest.mark.parametrize("step", FEATURE_STEPS)
def test_another_run_has_the_colours_of_the_first(page, address, step):
    """60 shared patches: 7 components of "wide" and a constant predict those of "narrow"."""
    pair = {"run2": "wide", "image2": "image_01", "second": "image_02", "step": step}
    frame = show_features(page, address, **pair, token="1, 1")
    wait_until(frame, "step", step, pane=1)
    maps = frame.locator(".pane").nth(1).locator(".features > canvas:nth-child(5n + 2)").all()
    shown = np.reshape([canvas.evaluate(PIXELS) for canvas in maps], (LAYERS + 1, -1, 3))
    given = np.stack([components("wide", step, image, 7, step) for image in range(IMAGES)], axis=1)
    wanted = np.stack([components("narrow", step, image) for image in range(IMAGES)], axis=1)
    expected = []
    for layer, to in zip(np.insert(given, 0, 1, axis=-1), wanted[[0, 1, 1]], strict=True):
        found, *_ = np.linalg.lstsq(layer.reshape(-1, 8), to.reshape(-1, 3))
        expected.append((127.5 + 51 * layer[1] @ found).clip(0, 255))
    np.testing.assert_allclose(shown, expected, atol=5)
    exact = cosines("wide", step, 1, 6, step, 1)
    np.testing.assert_allclose(numbers(frame, 1)["cosines"][0], exact, atol=0.02)
    expect(frame.get_by_text("Those of wide are predicted by a linear map")).to_have_count(2)


def test_pointing_at_a_patch_shows_its_cosines(page, address):
    frame = show_features(page, address, run2="narrow", step2=0, linked="no", second="image_02")
    wait_until(frame, "step", 0, pane=1)
    found = hover(page, frame, 2, 3)
    compared = [(10, 0), (10, 2), (0, 0)]  # this image, the second one, the other side
    assert [(one["step"], one["tag"]) for one in found["compared"]] == [
        (step, f"image_{image:02d}") for step, image in compared
    ]
    for shown, (step, image) in zip(found["cosines"], compared, strict=True):
        exact = cosines("narrow", 10, 0, 13, step, image)
        np.testing.assert_allclose(shown, exact, atol=0.02)
    shown = numbers(frame, 1)["cosines"][2]  # from the other side
    np.testing.assert_allclose(shown, cosines("narrow", 0, 0, 13, 10, 0), atol=0.02)
    for heading, wanted in (("cosine", "true"), ("components", "false")):  # with the keyboard
        frame.get_by_role("button", name=heading, exact=True).first.press("Enter")
        page.wait_for_function(f"() => location.hash.includes('feature=similarity') === {wanted}")
    frame.locator(".features > canvas").nth(LAYERS * 4 - 3).click(position={"x": 3, "y": 3})
    page.wait_for_function("() => location.hash.includes('p.attention.feature=similarity')")
    found = hover(page, frame, 2, 3)
    assert found["layer"] == 1
    np.testing.assert_allclose(found["values"], found["cosines"][0][1], atol=1e-6)
    colours = matplotlib.colormaps["inferno"](np.array(found["cosines"]), bytes=True)[..., :3]
    maps = np.moveaxis(maps_of(frame, 4)[:, 1:], 1, 0)
    away = np.arange(ROWS * COLUMNS) != 13  # the outline of the patch
    np.testing.assert_allclose(maps[:, :, away], colours[:, :, away].astype(int), atol=6)


def test_runs_of_another_width_and_without_features_say_so(page, address):
    frame = show_features(page, address, run2="alone", token="1, 1")
    wait_until(frame, "run", "alone", pane=1)
    assert numbers(frame)["cosines"][2] == [None, None]
    expect(frame.get_by_text("do not compare colours")).to_have_count(2)
    expected = (127.5 + 51 * components("alone", 10, 0)).clip(0, 255)
    np.testing.assert_allclose(maps_of(frame, 4, 1)[:, 0], expected, atol=5)
    frame = show(page, address, view="features")
    expect(frame.get_by_text("vit-eval RUN maps logs those")).to_be_visible()
    frame = show_features(page, address, view="heads", token="class token")
    page.keyboard.press("4")
    wait_until(frame, "view", "features")
    assert numbers(frame)["cosines"] == [None, None]


# Questions to the live model, answered by torch too

SIDE, GRID, LIVE_STEPS, RUN, SMALL_RUN = 32, 8, (0, 100, 200), "quick", "small"
PROBE = "attention/probe_{:02d}"
HALF = 1e-2  # error of a logit with weights of float16


def images() -> Tensor:
    """Three images of smooth noise, (3, 3, 32, 32) uint8."""
    coarse = torch.rand(3, 3, 7, 7, generator=torch.Generator().manual_seed(0))
    return (255 * torch.nn.functional.interpolate(coarse, SIDE, mode="bicubic").clamp(0, 1)).byte()


@pytest.fixture(scope="module")
def logged(logs: Path) -> SimpleNamespace:
    """Images of a run, and its model at each step; the first step is not live.

    Another run, `SMALL_RUN`, has one image, a coarser grid and sigmoid attention.
    """
    pixels = images()
    original = load_model("cifar10_quick", "cpu", "float32")
    models = {}
    for step in LIVE_STEPS:
        model = copy.deepcopy(original.model)
        torch.manual_seed(step)
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.0001 * (LIVE_STEPS[-1] - step))
        models[step] = replace(original, model=model, calibration=None)
    write_live(logs / RUN, models, pixels)
    sizes = {"img_size": SIDE, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
    model = VisionTransformer(**(PLAIN | sizes), num_classes=10, attention="sigmoid")
    small = replace(original, model=randomize(model, 0.3), calibration=None)
    write_live(logs / SMALL_RUN, {200: small}, pixels[:1])
    return SimpleNamespace(pixels=pixels, models=models, small=small)


def write_live(run: Path, models: dict[int, Classifier], pixels: Tensor) -> None:
    """Log the attention of models at steps, and, but for step 0, the models."""
    with SummaryWriter(str(run)) as writer:
        for step, classifier in models.items():
            probes = ImageSet(pixels, torch.tensor([3, 4, 5])[: len(pixels)], classifier.classes)
            for _, records in attention_records(classifier, probes):
                for number, record in enumerate(records):
                    assert record is not None
                    add_summary(writer, summaries(PROBE.format(number), record), step)
            if step:
                add_live(writer, classifier, pixels, step)


def show_live(page: Page, address: str, **parameters: Any) -> Frame:
    return show(page, address, **{"run": RUN, "image": PROBE.format(0)} | parameters)


def answered(frame: Frame, pane: int = 0, **change: str) -> dict[str, Any]:
    """Wait until the page shows a change; return what it shows."""
    frame.wait_for_function(
        "([pane, wanted]) => { const { change } = window.attentionTab.numbers()[pane];"
        " return change && Object.keys(wanted).every((key) => change[key] === wanted[key]); }",
        arg=[pane, change],
        timeout=WAIT,
    )
    return numbers(frame, pane)


def logits_of(*question: Any, **options: Any) -> np.ndarray:
    return ask_torch(*question, **options)[0][0].numpy()


def patch(pixels: Tensor, number: int) -> Tensor:
    """A view of a patch, (3, 4, 4)."""
    row, column = divmod(number, GRID)
    return pixels[:, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]


def test_muted_heads_by_keyboard(page, address, logged):
    """In all views, and the file of numbers and the address have the question."""
    frame = show_live(page, address, layer=2, head=1)
    for key, mute in {
        "m": [(2, 1)], "o": [(2, 0), (2, 2)], "l": [(2, 0), (2, 2), (2, 1)],
    }.items():  # fmt: skip
        page.keyboard.press(key)
        question = ",".join(f"{layer}.{head}" for layer, head in mute)
        shown = answered(frame, mute=question)["change"]
        before, after = (
            logits_of(logged.models[200], logged.pixels[0], mute=m) for m in ([], mute)
        )
        np.testing.assert_allclose(shown["before"], before, atol=HALF)
        np.testing.assert_allclose(shown["after"], after, atol=HALF)
        assert np.abs(after - before).max() > 2 * HALF
    expect(frame.locator(".change").first).to_contain_text("layer 2 without its attention")
    page.keyboard.press("u")
    answered(frame, mute="2.0,2.2")
    _, weights, *lens = ask_torch(logged.models[200], logged.pixels[0], mute=[(2, 0), (2, 2)])
    layers = list(weights.unbind(1))
    entropy = numbers(frame)["statistics"]["entropy"]
    np.testing.assert_allclose(entropy, attention_entropy(layers), atol=0.01)
    frame.evaluate("() => window.attentionTab.set({ statistic: 'sink' })")
    expect(frame.get_by_text("After a change, only entropy is")).to_be_visible()
    page.keyboard.press("3")
    shown = wait_until(frame, "view", "lens")
    np.testing.assert_allclose(shown["lens"]["probabilities"], lens[1][:, 0], atol=5e-3)
    same = np.array(shown["lens"]["classes"])[..., 0] == lens[0][:, 0, :, 0].numpy()
    assert same.mean() > 0.97  # the others are almost as probable
    row = frame.get_by_role("button", name="layer 0", exact=True)
    row.press("Enter")
    wait_until(frame, "layer", 0)
    expect(row).to_be_focused()  # the same question is not asked again
    heard = [*layers[:2], layers[2][:, 1:2], *layers[3:]]
    rollout = attention_rollout(heard, readout="mean", num_prefix_tokens=0)[0]
    page.keyboard.press("2")
    shown = wait_until(frame, "view", "maps")
    np.testing.assert_allclose(shown["maps"][0]["values"], rollout * GRID**2, atol=0.02)
    frame.evaluate("() => window.attentionTab.set({ view: 'heads', layer: 2, head: 'mean' })")
    shown = wait_until(frame, "view", "heads")
    np.testing.assert_allclose(shown["values"], layers[2][0, 1].mean(dim=0) * GRID**2, atol=0.02)
    page.wait_for_url(re.compile("mute=2.0%2C2.2"))
    with page.expect_download() as download:
        frame.get_by_role("button", name="JSON").click()
    saved = json.loads(Path(download.value.path()).read_text())
    assert saved["panes"][0]["change"] == shown["change"]
    page.keyboard.press("r")
    expect(frame.locator(".change").first).to_be_hidden()


def test_attention_by_offset_follows_a_change(page, address, logged):
    frame = show_live(page, address, direction="offset")
    wait_until(frame, "direction", "offset")  # the mean over all images
    frame.evaluate("() => window.attentionTab.edit({ mute: '0.0' })")
    found = answered(frame, mute="0.0")["heads"]
    layers = [*ask_torch(logged.models[200], logged.pixels[0], mute=[(0, 0)])[1].unbind(1)]
    expected = GRID**2 * attention_by_offset(layers, (GRID, GRID), 0)[1:].numpy()
    found = np.reshape(found, (-1, *expected.shape[1:]))[1:]
    np.testing.assert_allclose(found, expected, rtol=0.02, atol=0.02)


def test_a_stroke_hides_patches_and_redraws_everything(page, address, logged):
    frame = show_live(page, address, view="maps")
    frame.get_by_label("Brush").select_option("mean")
    page.mouse.move(*patch_at(frame, 2, 1))
    page.mouse.down()
    page.mouse.move(*patch_at(frame, 2, 3))  # so fast that the patch between is skipped
    page.mouse.move(1, 1)
    page.mouse.up()  # outside, which ends the stroke, too
    page.mouse.move(*patch_at(frame, 4, 4))
    frame.get_by_label("Brush").select_option("out")
    page.mouse.click(*patch_at(frame, 6, 6))
    hidden, out = [17, 18, 19], 54
    shown = answered(frame, patches="17:mean,18:mean,19:mean,54:out")
    classifier, pixels = logged.models[200], logged.pixels[0].clone()
    mean = (255 * torch.tensor(classifier.preprocess.mean)).round().byte()
    for number in hidden:
        patch(pixels, number)[:] = mean[:, None, None]
    logits, weights, *_ = ask_torch(classifier, pixels, hide=[out])
    np.testing.assert_allclose(shown["change"]["after"], logits[0], atol=HALF)
    layers = list(weights.unbind(1))
    kept = torch.tensor([number for number in range(GRID**2) if number != out])
    inside = [layer[..., kept[:, None], kept] for layer in layers]
    rollout = attention_rollout(inside, readout="mean", num_prefix_tokens=0)[0]
    [only] = shown["maps"]
    values = np.array(only["values"])
    np.testing.assert_allclose(values[kept], rollout * GRID**2, atol=0.02)


def test_a_brush_changes_a_patch_and_not_what_the_maps_are_of(page, address):
    frame = show_live(page, address, view="heads")
    assert numbers(frame)["token"] == "mean of patches"
    page.mouse.move(*patch_at(frame, 2, 1))
    wait_until(frame, "token", "2, 1")
    frame.get_by_label("Brush").select_option("mean")
    page.mouse.click(*patch_at(frame, 2, 1))
    assert answered(frame, patches="17:mean")["token"] == "mean of patches"
    frame.get_by_label("Brush").select_option("point")
    hover(page, frame, 2, 3)


def test_a_question_is_cancelled_while_its_model_is_loaded(page, address):
    held = []
    page.goto("about:blank")  # which forgets all models
    page.route("**/live_weights*", lambda route: held.append(route))
    frame = show_live(page, address, view="maps")
    frame.get_by_label("Brush").select_option("mean")
    page.mouse.click(*patch_at(frame, 2, 1))
    frame.get_by_role("button", name="Cancel").click()
    expect(frame.get_by_text("The request was replaced or cancelled.").first).to_be_visible()
    for route in held:
        route.continue_()


def drag(page: Page, frame: Frame, brush: str, start: int, end: int) -> None:
    frame.get_by_label("Brush").select_option(brush)
    page.mouse.move(*patch_at(frame, *divmod(start, GRID)))
    page.mouse.down()
    page.mouse.move(*patch_at(frame, *divmod(end, GRID)), steps=3)
    page.mouse.up()


def test_moved_and_borrowed_patches(page, address, logged):
    frame = show_live(page, address)
    drag(page, frame, "swap", 0, 45)
    swapped = answered(frame, patches="45:0,0:45")["change"]["after"]
    pixels = logged.pixels[0].clone()
    patch(pixels, 0)[:], patch(pixels, 45)[:] = (
        patch(logged.pixels[0], 45), patch(logged.pixels[0], 0),
    )  # fmt: skip
    np.testing.assert_allclose(swapped, logits_of(logged.models[200], pixels), atol=HALF)
    frame.get_by_label("Brush").select_option("other")
    frame.get_by_label("Second image").select_option(PROBE.format(2))
    page.mouse.click(*patch_at(frame, 7, 7))
    borrowed = answered(frame, patches="45:0,0:45,63:other")["change"]["after"]
    patch(pixels, 63)[:] = patch(logged.pixels[2], 63)
    np.testing.assert_allclose(borrowed, logits_of(logged.models[200], pixels), atol=HALF)


def test_blurred_lent_and_removed_patches_are_moved_as_they_look(page, address):
    """A patch that is out of attention has its pixels, and stays out if they move elsewhere."""
    read = """() => { const { colour } = window.attentionTab.panes[0].record;
        return [...colour.getContext("2d").getImageData(0, 0, 32, 32).data]; }"""

    def shown(frame: Frame, patches: str) -> Tensor:
        answered(frame, patches=patches)
        data = np.reshape(frame.evaluate(read), (SIDE, SIDE, 4))[..., :3]
        return torch.from_numpy(data).permute(2, 0, 1)

    for fills, brush, moved in (
        ("0:blur,9:mean", "move", "0:mean,9:mean,45:blur0"), ("0:other", "swap", "0:45,45:other0"),
        ("0:out", "move", "0:out,45:0"), ("0:out,45:blur", "swap", "0:blur45,45:0"),
    ):  # fmt: skip
        frame = show_live(page, address, patches=fills, second=PROBE.format(2))
        before = shown(frame, fills)
        drag(page, frame, brush, 0, 45)
        after = shown(frame, moved)
        assert torch.equal(patch(after, 45), patch(before, 0)), fills
        assert torch.equal(patch(after, 0), patch(before, 45)) == (brush == "swap"), fills
    frame = show_live(page, address, patches="45:blur0")
    expect(frame.locator(".change").first).to_contain_text("patch (5, 5) shows (0, 0) blurred")
    drag(page, frame, "move", 45, 0)
    answered(frame, patches="45:mean,0:blur")


def test_both_panes_answer_the_same_question_and_a_step_says_that_it_is_not_live(
    page, address, logged
):
    question = {"mute": "0.2,1.1", "patches": "9:out"}
    frame = show_live(page, address, run2=RUN, linked="no", step=200, step2=100, **question)
    for pane, step in enumerate((200, 100)):
        shown = answered(frame, pane, **question)["change"]["after"]
        expected = logits_of(logged.models[step], logged.pixels[0], mute=[(0, 2), (1, 1)], hide=[9])
        np.testing.assert_allclose(shown, expected, atol=HALF, err_msg=str(step))
    before = numbers(frame)["change"]
    frame.evaluate("() => window.attentionTab.set({ step2: 0 })")
    wait_until(frame, "step", 0, pane=1)
    expect(frame.locator(".change").nth(1)).to_contain_text("Step 0 is not live (100, 200 are)")
    assert "change" not in numbers(frame, 1)
    assert numbers(frame)["change"] == before
    frame.get_by_role("button", name="Reset").click()
    frame.wait_for_function("() => window.attentionTab.state.mute === ''")


def test_another_run_may_have_another_grid_other_attention_and_one_image(page, address, logged):
    mute, patches = "0.1", "10:mean"
    frame = show_live(page, address, run2=SMALL_RUN, mute=mute, patches=patches)
    answered(frame, mute=mute, patches=patches)
    change = frame.locator(".change")
    expect(change.nth(1)).to_contain_text("the grids of patches differ")
    frame.evaluate("(run) => window.attentionTab.chooseRun(run)", SMALL_RUN)
    shown = answered(frame, mute=mute, patches="")  # a patch of another grid is another place
    logits, weights, *_ = ask_torch(logged.small, logged.pixels[0], mute=[(0, 1)])
    np.testing.assert_allclose(shown["change"]["after"], logits[0], atol=HALF)
    # Rows of weights are taken as fractions of their sum.
    entropy = attention_entropy(list(weights.unbind(1)))
    np.testing.assert_allclose(shown["statistics"]["entropy"], entropy, atol=0.01)
    frame.evaluate("() => window.attentionTab.edit({ patches: '1:other' })")
    expect(change.first).to_contain_text("There is no other image")


def test_a_model_of_another_shape_than_the_image_is_refused_and_the_rest_shown(page, address):
    frame = show(page, address, run="misfit", mute="0.1")
    change = frame.locator(".change").first
    expect(change).to_contain_text("The stored model is not that of the image.")
    assert "change" not in numbers(frame)
    record = make_record(**RUNS["square"])
    assert numbers(frame)["image"] == TAG and len(numbers(frame)["heads"]) == record.details.layers


def said(frame: Frame, step: int) -> str:
    """Wait for what a step of the tour says; return it without its title."""
    text = frame.locator(".tour p")
    expect(text).to_contain_text(re.compile(rf"^{step}/7 [^.]+\. \w"), timeout=WAIT)
    return text.inner_text().partition(". ")[2]


def figures(text: str) -> list[float]:
    """Numbers in a text, percentages as fractions, without the places of patches."""
    text = re.sub(r"\(\d, \d\)", "", text)
    found = re.findall(r"(\d+(?:\.\d+)?)(%?)", text)
    return [float(number) / (100 if unit else 1) for number, unit in found]


def test_the_tour_says_what_torch_says_of_each_image_in_two_languages(page, address, logged):
    """By keyboard, to the end and from a link; the figures are those of the image that is shown."""
    classifier = logged.models[200]
    mean = (255 * torch.tensor(classifier.preprocess.mean)).round().byte()
    frame = show_live(page, address, patches="1:mean")  # which the tour takes back
    frame.get_by_role("button", name="Tour").press("Enter")
    for number in range(2):  # in English, then in German
        pixels = logged.pixels[number]
        logits, weights, _, read = ask_torch(classifier, pixels)
        best = float(logits.softmax(dim=-1).max())
        rollout = (
            GRID**2
            * attention_rollout(list(weights.unbind(1)), readout="mean", num_prefix_tokens=0)[0]
        )
        here = int(rollout.argmax())
        others = weights[0, :, :, here].clone()
        others[..., here] = 0
        shares = others.amax(dim=-1)
        layer, head = divmod(int(shares.argmax()), shares.shape[1])
        least = divmod(int(shares.argmin()), shares.shape[1])
        place = f"({here // GRID}, {here % GRID})"
        expected: list[list[float]] = [
            [GRID, GRID, best],
            [layer, head, float(shares.max())],
            [layer, head, float(shares.max()), *least, float(shares.min()), 1],
            [float(rollout.max() / rollout.mean())],
            [0, float(read[0, 0, 0, 0]), len(shares) - 1, best],
        ]
        for step, wanted in enumerate(expected, 1):
            text = said(frame, step)
            assert figures(text) == pytest.approx(wanted, abs=0.011), text
            assert (place in text) == (step in (2, 4)) and len(text.split()) <= 40
            page.keyboard.press("Enter")  # Next has the focus
        text = said(frame, 6)
        predicted = logits.argmax(dim=1)
        probe = ImageSet(pixels[None], predicted, classifier.classes)
        maps = [
            one
            for _, [record] in attention_records(classifier, probe)
            for one in record.details.maps
        ]
        [relevance] = [one for one in maps if (one.kind, one.target) == ("lrp", int(predicted))]
        changed = pixels.clone()
        for hidden in np.argsort(-np.array(relevance.values))[: GRID**2 // 4]:
            patch(changed, hidden)[:] = mean[:, None, None]
        after = float(ask_torch(classifier, changed)[0].softmax(dim=-1)[0, predicted])
        assert figures(text) == pytest.approx([GRID**2 // 4, best, after], abs=0.011), text
        assert len(text.split()) <= 40
        page.keyboard.press("u")
        expect(frame.locator(".tour p")).to_contain_text(
            re.compile("look around|Sehen Sie sich um")
        )
        page.keyboard.press("Enter")
        assert len(said(frame, 7).split()) <= 40
        assert "change" not in numbers(frame)
        if number == 0:
            frame.evaluate("() => window.attentionTab.set({ layer: 1, head: 1 })")
            page.keyboard.press("m")
            answered(frame, mute="1.1")
            frame.get_by_role("button", name="Deutsch").click()
            expect(frame.locator(".tour p")).to_contain_text("kennt 10 Klassen")
            assert numbers(frame)["change"]["mute"] == "1.1"  # what is done in the last step stays
            frame.locator(".chooser button", has_text=classifier.classes[4]).click()
            for _ in range(6):
                frame.get_by_role("button", name="Zurück").click()
    frame.get_by_role("button", name="Zurück").click()
    said(frame, 6)
    page.keyboard.press("Escape")
    expect(frame.locator(".tour")).to_be_hidden()
    answered(frame, patches="1:mean")  # as it was before the tour
    expect(frame.get_by_role("button", name="Tour")).to_be_focused()
    frame = show_live(page, address, tour=5, language="de")
    assert "Schicht" in said(frame, 5) and numbers(frame)["view"] == "lens"


def test_a_photo_is_prepared_as_predict_does(page, address, logged, tmp_path):
    """A JPEG file that is to be turned; it is smooth, as decoders differ in enlarging colours."""
    rows, columns = np.mgrid[:60, :90]
    smooth = np.stack([4 * rows, 2 * columns, rows + columns], axis=-1).astype(np.uint8)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6  # a quarter turn
    Image.fromarray(smooth).save(tmp_path / "photo.jpg", quality=95, exif=exif)
    frame = show_live(page, address)
    frame.locator("input[type=file]").set_input_files(tmp_path / "photo.jpg")
    shown = answered(frame)
    expected = logged.models[200].predict(str(tmp_path / "photo.jpg"))
    classifier = logged.models[200]
    named = {classifier.classes[index]: value for index, value in shown["top"]}
    assert list(named) == list(expected)
    np.testing.assert_allclose(list(named.values()), list(expected.values()), atol=HALF)
    assert shown["file"] == "photo.jpg"
    # Another image takes its place, and no undo brings it back.
    frame.get_by_role("button", name=classifier.classes[4]).click()
    wait_until(frame, "label", 4)
    page.keyboard.press("u")
    assert numbers(frame)["label"] == 4
