"""The view Features in a real TensorBoard and a real browser, compared with numpy."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from playwright.sync_api import Frame, Page, expect
from torch.utils.tensorboard import SummaryWriter

from attention_tab import serve
from test_attention_tab import browser, hover, link, new_page, numbers, ready, wait_until
from vit.tensorboard_plugin.summary import add_attention

__all__ = ["browser", "new_page"]  # fixtures

pytestmark = pytest.mark.slow

ROWS, COLUMNS, STEPS = 4, 5, (0, 10)
WIDTHS = {"run": 20, "other": 28}  # so few that no component is left out
LAYERS, IMAGES = 2, 3


def tokens_of(run: str, step: int) -> torch.Tensor:
    """Tokens of a class token and 20 patches, (L, B, N, D)."""
    generator = torch.Generator().manual_seed(WIDTHS[run] + step)
    width = WIDTHS[run]
    random = torch.randn(LAYERS, IMAGES, 1 + ROWS * COLUMNS, width, generator=generator)
    return random * 0.8 ** torch.arange(width) + 0.5


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("logs")
    weights = torch.full((LAYERS, IMAGES, 2, 21, 21), 1 / 21)
    images = torch.rand(IMAGES, 3, 8 * ROWS, 8 * COLUMNS)
    for run in (*WIDTHS, "old"):
        with SummaryWriter(str(folder / run)) as writer:
            for step in STEPS:
                add_attention(
                    writer, "image", images, weights, step, grid=(ROWS, COLUMNS),
                    num_prefix_tokens=1, readout="class_token",
                    tokens=None if run == "old" else tokens_of(run, step),
                )  # fmt: skip
    with serve(folder, Path(tmp_path_factory.mktemp("metadata"))) as found:
        yield found


def show(page: Page, address: str, **parameters: Any) -> Frame:
    state = {"run": "run", "image": "image_00", "view": "features", **parameters}
    page.goto(f"{address}/#{link(state)}")
    frame = ready(page)
    wait_until(frame, "view", state["view"])
    return frame


def components(run: str, step: int, image: int) -> np.ndarray:
    """Three components in standard deviations, on the axes of the last step, (L, P, 3)."""
    last, tokens = (tokens_of(run, at)[:, :, 1:].double().numpy() for at in (STEPS[-1], step))
    found = []
    for reference, layer in zip(last, tokens, strict=True):
        patches = reference.reshape(-1, reference.shape[-1])
        _, lengths, axes = np.linalg.svd(patches - patches.mean(axis=0), full_matrices=False)
        signs = np.sign(axes[np.arange(len(axes)), np.abs(axes).argmax(axis=1)])
        along = (layer[image] - layer.mean(axis=(0, 1))) @ (axes * signs[:, None])[:3].T
        found.append(along / (lengths[:3] / np.sqrt(len(patches))))
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


def test_colours_are_components_on_the_axes_of_the_last_step(new_page: Page, address: str) -> None:
    frame = show(new_page, address, run2="run", step2=0, linked="no", layer=0)
    wait_until(frame, "step", 0, pane=1)
    for pane, step in enumerate((10, 0)):
        expected = (127.5 + 51 * components("run", step, 0)).clip(0, 255)
        found = maps_of(frame, 4, pane)[:, 0]
        np.testing.assert_allclose(found, expected, atol=5)  # of 8 bits
        picture = frame.locator("canvas.picture").nth(pane).evaluate(PIXELS)
        np.testing.assert_array_equal(np.reshape(picture, (-1, 3)), found[0])
    second = (127.5 + 51 * components("run", 10, 1)).clip(0, 255)
    frame = show(new_page, address, image="image_01")
    np.testing.assert_allclose(maps_of(frame, 3)[:, 0], second, atol=5)


def test_pointing_at_a_patch_shows_its_cosines(new_page: Page, address: str) -> None:
    frame = show(new_page, address, run2="run", step2=0, linked="no", second="image_02")
    wait_until(frame, "step", 0, pane=1)
    found = hover(new_page, frame, 2, 3)
    compared = [(10, 0), (10, 2), (0, 0)]  # this image, the second one, the other side
    assert [(one["step"], one["tag"]) for one in found["compared"]] == [
        (step, f"image_{image:02d}") for step, image in compared
    ]
    for shown, (step, image) in zip(found["cosines"], compared, strict=True):
        exact = cosines("run", 10, 0, 13, step, image)
        np.testing.assert_allclose(shown, exact, atol=0.02)
    shown = numbers(frame, 1)["cosines"][2]  # from the other side
    np.testing.assert_allclose(shown, cosines("run", 0, 0, 13, 10, 0), atol=0.02)
    frame.locator(".features > canvas").nth(LAYERS * 4 - 3).click(position={"x": 3, "y": 3})
    new_page.wait_for_function("() => location.hash.includes('p.attention.feature=similarity')")
    found = hover(new_page, frame, 2, 3)
    assert found["layer"] == 1
    np.testing.assert_allclose(found["values"], found["cosines"][0][1], atol=1e-6)
    best = max((value, at) for at, value in enumerate(found["values"]) if at != 13)
    line = f"patch ({best[1] // COLUMNS}, {best[1] % COLUMNS}) at {best[0]:.2f}"
    expect(frame.locator(".readout").first).to_contain_text(line)
    label = frame.locator(".features button").first
    label.press("Enter")
    assert hover(new_page, frame, 2, 3)["layer"] == 0
    expect(label).to_be_focused()
    colours = matplotlib.colormaps["inferno"](np.array(found["cosines"]), bytes=True)[..., :3]
    maps = np.moveaxis(maps_of(frame, 4)[:, 1:], 1, 0)
    away = np.arange(ROWS * COLUMNS) != 13  # the outline of the patch
    np.testing.assert_allclose(maps[:, :, away], colours[:, :, away].astype(int), atol=6)


def test_runs_of_another_width_and_without_features_say_so(new_page: Page, address: str) -> None:
    frame = show(new_page, address, run2="other", token="1, 1")
    wait_until(frame, "run", "other", pane=1)
    assert numbers(frame)["cosines"][2] == [None, None]
    expect(frame.get_by_text("do not compare colours")).to_have_count(2)
    frame = show(new_page, address, run="old", run2="")
    expect(frame.get_by_text("python eval.py RUN maps logs those")).to_be_visible()
    frame = show(new_page, address, view="heads", token="class token")
    new_page.keyboard.press("4")
    wait_until(frame, "view", "features")
    assert numbers(frame)["cosines"] == [None, None]
    new_page.set_viewport_size({"width": 480, "height": 800})
    wider = "one => one.scrollWidth - one.clientWidth"
    assert [frame.locator(name).evaluate(wider) for name in (".toolbar", "main")] == [0, 0]
