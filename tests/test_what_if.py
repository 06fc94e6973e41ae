"""Questions to the live model in a real TensorBoard and a real browser, answered by torch too."""

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from playwright.sync_api import Frame, Page, expect
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from attention_tab import asked, serve
from test_attention_tab import browser, link, numbers, page, patch_at, ready, wait_until
from vit.classifier import Classifier
from vit.data.images import ImageSet
from vit.explain.rollout import attention_rollout
from vit.model_file import load_model
from vit.reporting.attention_records import attention_records
from vit.reporting.live import add_live
from vit.tensorboard_plugin.summary import add_record

__all__ = ["browser", "page"]  # fixtures

pytestmark = pytest.mark.slow

SIDE, GRID, STEPS, RUN = 32, 8, (0, 100, 200), "quick"
TAG = "attention/probe_{:02d}"
HALF = 1e-2  # error of a logit with weights of float16


class Logged(NamedTuple):
    """Images of a run, and its model at each step; the first step is not live."""

    folder: Path
    pixels: Tensor
    models: dict[int, Classifier]


def images() -> Tensor:
    """Three images of smooth noise, (3, 3, 32, 32) uint8."""
    coarse = torch.rand(3, 3, 7, 7, generator=torch.Generator().manual_seed(0))
    return (255 * torch.nn.functional.interpolate(coarse, SIDE, mode="bicubic").clamp(0, 1)).byte()


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Logged:
    folder, pixels = tmp_path_factory.mktemp("logs"), images()
    original = load_model("cifar10_quick", "cpu", "float32").classifier
    models = {}
    with SummaryWriter(str(folder / RUN)) as writer:
        for step in STEPS:
            model = copy.deepcopy(original.model)
            torch.manual_seed(step)
            for parameter in model.parameters():
                parameter.data.add_(torch.randn_like(parameter), alpha=0.0001 * (STEPS[-1] - step))
            models[step] = Classifier(
                model, original.preprocess, original.classes, original.device, torch.float32
            )
            probes = ImageSet(pixels, torch.tensor([3, 4, 5]), original.classes)
            for _, records in attention_records(models[step], probes):
                for number, record in enumerate(records):
                    assert record is not None
                    add_record(writer, TAG.format(number), record, step)
            if step:
                add_live(writer, models[step], pixels, step)
    return Logged(folder, pixels, models)


@pytest.fixture(scope="module")
def address(logged: Logged, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serve(logged.folder, tmp_path_factory.mktemp("metadata")) as found:
        yield found


def show(page: Page, address: str, **parameters: Any) -> Frame:
    page.goto(f"{address}/#{link({'run': RUN, 'image': TAG.format(0), **parameters})}")
    return ready(page)


def answered(frame: Frame, pane: int = 0, **change: str) -> dict[str, Any]:
    """Wait until the page shows a change; return what it shows."""
    frame.wait_for_function(
        "([pane, wanted]) => { const { change } = window.attentionTab.numbers()[pane];"
        " return change && Object.keys(wanted).every((key) => change[key] === wanted[key]); }",
        arg=[pane, change],
        timeout=30_000,
    )
    return numbers(frame, pane)


def logits_of(*question: Any, **options: Any) -> np.ndarray:
    return asked(*question, **options)[0][0].numpy()


def patch(pixels: Tensor, number: int) -> Tensor:
    """A view of a patch, (3, 4, 4)."""
    row, column = divmod(number, GRID)
    return pixels[:, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]


def test_muted_heads_by_keyboard(page: Page, address: str, logged: Logged) -> None:
    frame = show(page, address, layer=3, head=1)
    for key, mute in {
        "m": [(3, 1)], "o": [(3, 0), (3, 2)], "l": [(3, 0), (3, 2), (3, 1)],
    }.items():  # fmt: skip
        page.keyboard.press(key)
        shown = answered(frame, mute=",".join(f"{layer}.{head}" for layer, head in mute))["change"]
        before, after = (
            logits_of(logged.models[200], logged.pixels[0], mute=m) for m in ([], mute)
        )
        np.testing.assert_allclose(shown["before"], before, atol=HALF)
        np.testing.assert_allclose(shown["after"], after, atol=HALF)
        assert np.abs(after - before).max() > 2 * HALF
    expect(frame.locator(".change").first).to_contain_text("layer 3 without its attention")
    page.keyboard.press("u")
    answered(frame, mute="3.0,3.2")
    page.keyboard.press("r")
    expect(frame.locator(".change").first).to_be_hidden()


def test_a_stroke_hides_patches_and_redraws_everything(
    page: Page, address: str, logged: Logged
) -> None:
    frame = show(page, address, view="maps")
    frame.get_by_label("Brush").select_option("mean")
    page.mouse.move(*patch_at(frame, 2, 1))
    page.mouse.down()
    page.mouse.move(*patch_at(frame, 2, 3))  # so fast that the patch between is skipped
    page.mouse.up()
    frame.get_by_label("Brush").select_option("out")
    page.mouse.click(*patch_at(frame, 6, 6))
    hidden, out = [17, 18, 19], 54
    shown = answered(frame, patches="17:mean,18:mean,19:mean,54:out")
    classifier, pixels = logged.models[200], logged.pixels[0].clone()
    mean = (255 * torch.tensor(classifier.preprocess.mean)).round().byte()
    for number in hidden:
        patch(pixels, number)[:] = mean[:, None, None]
    logits, weights, *_ = asked(classifier, pixels, hide=[out])
    np.testing.assert_allclose(shown["change"]["after"], logits[0], atol=HALF)
    best = logits[0].softmax(0).topk(5)
    assert [index for index, _ in shown["top"]] == best.indices.tolist()

    layers = list(weights.unbind(1))
    kept = torch.tensor([number for number in range(GRID**2) if number != out])
    inside = [layer[..., kept[:, None], kept] for layer in layers]
    rollout = attention_rollout(inside, readout="mean", num_prefix_tokens=0)[0]
    [only] = shown["maps"]
    values = np.array(only["values"])
    np.testing.assert_allclose(values[kept], rollout * GRID**2, atol=0.02)

    page.mouse.move(1, 1)
    frame.evaluate("() => window.attentionTab.set({ view: 'heads', head: 2, layer: 1 })")
    shown = wait_until(frame, "view", "heads")
    to_patches = weights[0, 1, 2][kept].mean(dim=0) * GRID**2
    np.testing.assert_allclose(shown["values"], to_patches, atol=0.02)


def test_lens_and_rollout_of_a_change_are_those_of_python(
    page: Page, address: str, logged: Logged
) -> None:
    frame = show(page, address, mute="2.0", view="heads")
    answered(frame, mute="2.0")
    expect(frame.get_by_text("After a change, statistics are not")).to_be_visible()
    _, weights, *lens = asked(logged.models[200], logged.pixels[0], mute=[(2, 0)])
    layers = list(weights.unbind(1))
    frame.evaluate("() => window.attentionTab.set({ view: 'lens' })")
    shown = wait_until(frame, "view", "lens")
    np.testing.assert_allclose(shown["lens"]["probabilities"], lens[1][:, 0], atol=5e-3)
    same = np.array(shown["lens"]["classes"])[..., 0] == lens[0][:, 0, :, 0].numpy()
    assert same.mean() > 0.97  # the others are almost as probable
    heard = [*layers[:2], layers[2][:, 1:], *layers[3:]]
    rollout = attention_rollout(heard, readout="mean", num_prefix_tokens=0)[0]
    frame.evaluate("() => window.attentionTab.set({ view: 'maps' })")
    shown = wait_until(frame, "view", "maps")
    np.testing.assert_allclose(shown["maps"][0]["values"], rollout * GRID**2, atol=0.02)
    frame.evaluate("() => window.attentionTab.set({ view: 'heads', layer: 2, head: 'mean' })")
    shown = wait_until(frame, "view", "heads")
    mean = layers[2][0, 1:].mean(dim=(0, 1)) * GRID**2
    np.testing.assert_allclose(shown["values"], mean, atol=0.02)


def test_moved_blurred_and_borrowed_patches(page: Page, address: str, logged: Logged) -> None:
    frame = show(page, address)
    frame.get_by_label("Brush").select_option("swap")
    page.mouse.move(*patch_at(frame, 0, 0))
    page.mouse.down()
    page.mouse.move(*patch_at(frame, 5, 5), steps=3)
    page.mouse.up()
    swapped = answered(frame, patches="45:0,0:45")["change"]["after"]
    pixels = logged.pixels[0].clone()
    patch(pixels, 0)[:], patch(pixels, 45)[:] = (
        patch(logged.pixels[0], 45), patch(logged.pixels[0], 0),
    )  # fmt: skip
    np.testing.assert_allclose(swapped, logits_of(logged.models[200], pixels), atol=HALF)
    frame.get_by_label("Brush").select_option("other")
    frame.get_by_label("Second image").select_option(TAG.format(2))
    page.mouse.click(*patch_at(frame, 7, 7))
    borrowed = answered(frame, patches="45:0,0:45,63:other")["change"]["after"]
    patch(pixels, 63)[:] = patch(logged.pixels[2], 63)
    np.testing.assert_allclose(borrowed, logits_of(logged.models[200], pixels), atol=HALF)
    frame.get_by_label("Brush").select_option("blur")
    page.mouse.click(*patch_at(frame, 3, 3))
    blurred = answered(frame, patches="45:0,0:45,63:other,27:blur")["change"]["after"]
    assert np.abs(np.subtract(blurred, borrowed)).max() > 0


def test_both_panes_answer_the_same_question_and_a_step_says_that_it_is_not_live(
    page: Page, address: str, logged: Logged
) -> None:
    question = {"mute": "0.2,1.1", "patches": "9:out"}
    frame = show(page, address, run2=RUN, linked="no", step=200, step2=100, **question)
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
    frame.get_by_label("Brush").select_option("mean")
    frame.evaluate("() => window.attentionTab.set({ step: 0, run2: '' })")
    wait_until(frame, "step", 0)
    page.mouse.click(*patch_at(frame, 2, 2))  # keeps the patch
    page.keyboard.press("l")
    state = "() => [window.attentionTab.state.mute, window.attentionTab.state.patches]"
    assert frame.evaluate(state) == ["0.2,1.1", "9:out"]
    frame.get_by_role("button", name="Reset").click()
    frame.wait_for_function("() => window.attentionTab.state.mute === ''")


def test_a_photo_is_prepared_as_predict_does(
    page: Page, address: str, logged: Logged, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 256, (50, 70, 3), dtype=np.uint8)).save(tmp_path / "photo.png")
    frame = show(page, address)
    frame.locator("input[type=file]").set_input_files(tmp_path / "photo.png")
    shown = answered(frame)
    expected = logged.models[200].predict(str(tmp_path / "photo.png"))
    classifier = logged.models[200]
    named = {classifier.classes[index]: value for index, value in shown["top"]}
    assert list(named) == list(expected)
    np.testing.assert_allclose(list(named.values()), list(expected.values()), atol=HALF)
    assert shown["file"] == "photo.png"
    assert shown["label"] is None
    frame.get_by_role("button", name="Remove the photo").click()
    wait_until(frame, "label", 3)
    frame.locator("input[type=file]").set_input_files(tmp_path / "photo.png")  # the same again
    wait_until(frame, "file", "photo.png")
    (tmp_path / "bad.jpg").write_bytes(b"no image")
    frame.locator("input[type=file]").set_input_files(tmp_path / "bad.jpg")
    expect(frame.get_by_text("bad.jpg: This browser cannot read the file")).to_be_visible()
    assert numbers(frame)["file"] == "photo.png"
    # Another image takes its place, and no undo brings it back.
    frame.locator(".chooser button").nth(1).click()
    wait_until(frame, "label", 4)
    page.keyboard.press("u")
    assert numbers(frame)["label"] == 4


def test_scripts_ask_through_the_page(page: Page, address: str, logged: Logged) -> None:
    frame = show(page, address)
    pixels = torch.cat([logged.pixels[1], torch.full((1, SIDE, SIDE), 255)]).permute(1, 2, 0)
    answer = frame.evaluate(
        "async ([pixels, options]) => { const found = await attention.classify(pixels, options);"
        " return [found.logits, found.probabilities, found.weights].map((one) => [...one]); }",
        [pixels.flatten().tolist(), {"step": 100, "mute": [[1, 2]], "hide": [5, 6]}],
    )
    logits, weights, *_ = asked(logged.models[100], logged.pixels[1], mute=[(1, 2)], hide=[5, 6])
    np.testing.assert_allclose(answer[0], logits[0], atol=HALF)
    np.testing.assert_allclose(answer[1], logits[0].softmax(0), atol=HALF)
    found = torch.tensor(answer[2]).view_as(weights)
    kept = [number for number in range(GRID**2) if number not in (5, 6)]
    np.testing.assert_allclose(found[..., kept, :], weights[..., kept, :], atol=5e-3)
    for options in ({"fill": "other"}, {"mute": [3]}, {"patches": [1]}):
        ask = "(options) => attention.classify(null, options).catch((error) => error.message)"
        assert next(iter(options)) in frame.evaluate(ask, options)


def test_a_link_brings_the_question_along(page: Page, address: str) -> None:
    frame = show(page, address, mute="1.0", patches="3:mean")
    first = answered(frame, mute="1.0", patches="3:mean")
    page.wait_for_url(re.compile("mute"))
    with page.expect_download() as download:
        frame.get_by_role("button", name="JSON").click()
    saved = json.loads(Path(download.value.path()).read_text())
    assert saved["panes"][0]["change"] == first["change"]
    assert "patches=3%3Amean" in saved["address"]
