"""TensorBoard on the demo run, in a real browser."""

import contextlib
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

chromium = shutil.which("chromium")
if chromium is None:
    pytest.skip("no chromium here: apt-get install chromium", allow_module_level=True)

from playwright.sync_api import Locator, Page, expect, sync_playwright  # noqa: E402

from vit.run.tracker import Tracker, milestones  # noqa: E402

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
STEPS = 312  # of the demo
WAIT = 30_000  # milliseconds


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Start TensorBoard on a folder, with the command that training prints; yield its address."""
    server = subprocess.Popen(
        [
            sys.executable, "-m", "tensorboard.main", "--logdir", str(folder),
            "--samples_per_plugin", "images=1000", "--port", "0",
        ],
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert server.stderr is not None
    found = None
    for line in server.stderr:
        if found := re.search(r"at (http://localhost:\d+)", line):
            break
    assert found is not None
    yield found.group(1)
    server.terminate()
    server.wait()
    server.stderr.close()


@pytest.fixture(scope="module")
def address(demo: Path) -> Iterator[str]:
    with serve(demo.parent) as found:
        yield found


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser.new_page(viewport={"width": 1500, "height": 1100})
        browser.close()


def picture(page: Page, address: str, tag: str) -> Locator:
    page.goto("about:blank")
    page.goto(f"{address}/?tagFilter=^{tag}$#images&tagFilter=^{tag}$")
    card = page.locator("tf-image-loader").filter(has=page.get_by_text(f"tag: {tag}")).first
    shown = card.locator("img")
    expect(shown).to_be_visible(timeout=WAIT)
    return card


def loaded(card: Locator) -> tuple[int, bytes]:
    """Return the natural width and the bytes of the picture that a card shows."""
    width, source = card.locator("img").evaluate(
        "async i => { await i.decode(); return [i.naturalWidth, i.src] }"
    )
    with urllib.request.urlopen(source) as answer:
        return width, answer.read()


def test_picture_is_on_the_page_and_the_slider_changes_it(page, address):
    card = picture(page, address, "vit/attention/rollout/probe_07")
    natural, last = loaded(card)
    assert natural == 706
    expect(card).to_contain_text(f"step {STEPS}")
    slider = card.locator("paper-slider")
    assert slider.get_attribute("aria-valuemax") == str(len(milestones(STEPS, 10)) - 1)
    slider.focus()
    seen = {last}
    for key, step in (("ArrowLeft", milestones(STEPS, 10)[-2]), ("Home", 0)):
        before = card.locator("img").get_attribute("src") or ""
        page.keyboard.press(key)
        expect(card.locator("img")).not_to_have_attribute("src", before, timeout=WAIT)
        expect(card).to_contain_text(re.compile(rf"step\s+{step}\b"))
        seen.add(loaded(card)[1])
    assert len(seen) == 3


def test_hparams_open_with_the_columns_in_which_runs_differ(page, tmp_path):
    for number, rate in enumerate((0.25, 0.125)):
        run = tmp_path / f"run_{number}"
        run.mkdir()
        tracker = Tracker(run)
        tracker.scalars(1, {"test/accuracy": 0.5 + rate, "train/loss": rate})
        same = {f"augment.key_{key}": 1.0 for key in range(9)}
        tracker.hyperparameters({**same, "optim.lr": rate, "train.seed": number})
        tracker.close()
    with serve(tmp_path) as address:
        page.goto("about:blank")
        page.goto(f"{address}/#hparams")
        row = page.locator("vaadin-grid, tf-hparams-table-view").first
        expect(row).to_be_visible(timeout=WAIT)
        checked = page.locator("tf-hparams-query-pane paper-checkbox[checked]")
        expect(checked.first).to_be_visible(timeout=WAIT)
        names = [" ".join(text.split()) for text in checked.all_inner_texts()]
        assert names[:2] == ["optim.lr", "train.seed"]
        assert "test/accuracy" in names
        for value in ("0.25000", "0.12500", "0.75000", "0.62500"):
            expect(page.get_by_text(value).first).to_be_visible()
