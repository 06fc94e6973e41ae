"""How long the Attention tab takes from the pointer to what is painted, in headless Chromium.

    python benchmarks/attention_tab.py [--moves 100] [--layers 12] [--heads 12] [--side 14]

Writes random attention of the size of a ViT-B/16 at 224 pixels (14 x 14 patches and a class token),
starts TensorBoard on it and opens its Attention tab, for which the project must be installed. Then
the pointer moves to other patches, and all maps are painted for each: the time in JavaScript alone,
and until the frame after it has been drawn, which includes waiting for that frame. In both
directions, because keys → queries reads columns of the matrices.
"""

import argparse
import contextlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import timing  # noqa: F401  so that vit is found from any folder
import torch
from playwright.sync_api import Frame, sync_playwright
from torch.utils.tensorboard import SummaryWriter

from vit.hardware import describe
from vit.tensorboard_plugin import add_attention

MEASURE = """async moves => {
    const app = window.attentionTab;
    const picture = document.querySelector("canvas.picture");
    const { patchWidth, patchHeight } = app.panes[0].picture.size;
    const { rows, columns } = app.panes[0].record;
    const { left, top } = picture.getBoundingClientRect();
    const frame = () => new Promise(done => requestAnimationFrame(done));
    const drawn = () => new Promise(done => requestAnimationFrame(() => setTimeout(done)));
    const script = [], whole = [];
    for (let move = 0; move < moves; move++) {
        const at = (move * 37) % (rows * columns);
        await frame();
        const before = app.paints;
        const start = performance.now();
        picture.dispatchEvent(new PointerEvent("pointermove", {
            clientX: left + (at % columns + 0.5) * patchWidth,
            clientY: top + (Math.floor(at / columns) + 0.5) * patchHeight,
        }));
        await drawn();
        whole.push(performance.now() - start);
        if (app.paints !== before + 1) throw new Error("not painted");
        const next = (at + 1) % (rows * columns);
        app.pointed = `${Math.floor(next / columns)}, ${next % columns}`;
        const again = performance.now();
        app.panes[0].paint();
        script.push(performance.now() - again);
    }
    return [script, whole];
}"""


@contextlib.contextmanager
def serve(folder: str) -> Iterator[str]:
    """Start TensorBoard; yield its address."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", folder, "--port", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    addresses = (re.search(r"at (http://localhost:\d+)", line) for line in server.stderr)
    yield next(found.group(1) for found in addresses if found)
    server.terminate()
    server.wait()


def measure(frame: Frame, direction: str, moves: int) -> tuple[list[float], list[float]]:
    """Return milliseconds of each move: in JavaScript, and until the frame has been drawn."""
    frame.evaluate("direction => window.attentionTab.set({ direction })", direction)
    frame.evaluate(MEASURE, 10)
    script, whole = frame.evaluate(MEASURE, moves)
    return script, whole


def describe_times(times: list[float]) -> str:
    """Return median, 95th percentile and maximum."""
    percentile = statistics.quantiles(times, n=20)[-1]
    return f"{statistics.median(times):6.1f} {percentile:6.1f} {max(times):6.1f}"


def main() -> None:
    """Print a table with a row for each direction and measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--moves", type=int, default=100)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--side", type=int, default=14)
    options = parser.parse_args()
    side, tokens = options.side, 1 + options.side**2
    generator = torch.Generator().manual_seed(0)
    shape = (options.layers, 1, options.heads, tokens, tokens)
    weights = (3 * torch.randn(shape, generator=generator)).softmax(dim=-1)
    images = torch.rand((1, 3, 16 * side, 16 * side), generator=generator)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        with SummaryWriter(folder) as writer:
            add_attention(
                writer, "image", images, weights, 0, grid=(side, side), num_prefix_tokens=1,
                readout="class_token",
            )  # fmt: skip
        with serve(folder) as address:
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
            )
            page = browser.new_page(viewport={"width": 1920, "height": 1080})
            page.goto(f"{address}/#attention")
            element = page.wait_for_selector("iframe[src*='name=attention']")
            assert element is not None
            frame = element.content_frame()
            assert frame is not None
            frame.wait_for_function("() => window.attentionTab?.panes[0].painted")
            print(f"{describe(torch.device('cpu'))}, Chromium {browser.version}")
            print(f"{tokens} tokens, {options.layers} layers, {options.heads} heads; milliseconds:")
            print(f"{'':46} median    95%    max")
            for direction, words in (("to", "queries → keys"), ("from", "keys → queries")):
                script, whole = measure(frame, direction, options.moves)
                print(f"{words}, in JavaScript{'':18} {describe_times(script)}")
                print(f"{words}, until the frame has been drawn {describe_times(whole)}")
            browser.close()


if __name__ == "__main__":
    main()
