"""Live models in a real browser, under TensorBoard's Content-Security-Policy, against torch."""

import base64
import dataclasses
import functools
import hashlib
import io
import itertools
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm
import torch
from onnx import TensorProto, helper, numpy_helper
from PIL import Image
from playwright.sync_api import Browser, Page
from tensorboard.backend import http_util
from werkzeug import serving, wrappers

from attention_tab import ask_torch
from vit.classifier import Classifier
from vit.data.pixels import ArrayPreprocess, bands_of
from vit.data.preprocess import Preprocess
from vit.model.vit import VisionTransformer
from vit.pretrained.load import load as load_model
from vit.reporting import live
from vit.reporting.live import graph_of, weights_of
from vit.tensorboard_plugin.plugin import AttentionPlugin

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
COUNTS = {"quick": 100, "registers": 100, "timm": 3}  # random interventions for each model
KEPT_BYTES = 25e6
MODULES = ("/live.js", "/photo.js")
SCRIPT = f"""window.ready = Promise.all({list(MODULES)}.map((name) => import(name)))
    .then((modules) => Object.assign(window, ...modules));"""
# Arrays as base64, because the browser's protocol would send them as one number after another.
HELPERS = """() => {
window.bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
window.text = (floats) =>
    btoa(Array.from(new Uint8Array(floats.buffer), (code) => String.fromCharCode(code)).join(""));
window.read = async (name) => (await fetch(name)).arrayBuffer();
window.create = async (graph, weights, dtype, spec) =>
    LiveModel.create({ graph: await read(graph), weights: await read(weights), dtype, spec });
window.refusal = (promise) =>
    promise.then(() => "no error", ({ name, message }) => `${name}: ${message}`);
}"""


def spec_of(classifier: Classifier) -> dict[str, Any]:
    """Return what the page gets."""
    return dataclasses.asdict(live._spec(classifier))


class Site:
    """A server of the tab's files, as TensorBoard serves them, and of further ones.

    Attributes:
        files: Contents by path.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        context: Any = SimpleNamespace(data_provider=None)
        self._apps = AttentionPlugin(context).get_plugin_apps()

    @wrappers.Request.application
    def __call__(self, request: wrappers.Request) -> Any:
        digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
        if request.path == "/":
            page = f'<script type="module">{SCRIPT}</script>'
            return http_util.Respond(request, page, "text/html", csp_scripts_sha256s=[digest])
        if app := self._apps.get(request.path):
            return app
        found = self.files.get(request.path)
        code = 404 if found is None else 200
        return http_util.Respond(request, found or b"", "application/octet-stream", code=code)


@pytest.fixture(scope="module")
def site() -> Iterator[tuple[Site, str]]:
    site = Site()
    server = serving.make_server("localhost", 0, site, threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield site, f"http://localhost:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def requests() -> list[str]:
    """Addresses that the page and its workers asked for."""
    return []


@pytest.fixture(scope="module")
def page(site: tuple[Site, str], requests: list[str], browser: Browser) -> Iterator[Page]:
    """A page with the modules; it requests files from its own server only."""
    requests.clear()
    page = browser.new_page()
    page.context.on("request", lambda request: requests.append(request.url))
    page.clock.install()
    page.goto(site[1])
    page.evaluate("() => window.ready")
    page.evaluate(HELPERS)
    assert not [url for url in requests if "onnxruntime" in url]
    yield page
    assert all(url.startswith((site[1], f"blob:{site[1]}")) for url in requests)


@functools.cache
def classifier_of(name: str) -> Classifier:
    """The bundled model, a plain one with registers and normalized queries, or timm's ViT-S/16."""
    if name == "quick":
        return load_model("cifar10_quick", "cpu", "float32")
    torch.manual_seed(0)
    side, model = 224, timm.create_model("vit_small_patch16_224", num_classes=10)
    if name == "registers":
        side, model = 32, VisionTransformer(
            img_size=32, in_chans=3, num_classes=10, patch_size=4, embed_dim=48, depth=3,
            num_heads=3, reg_tokens=2, qk_norm=True,
        )  # fmt: skip
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    preprocess = Preprocess((side, side), (0.5,) * 3, (0.25,) * 3)
    return Classifier(model.eval(), preprocess, tuple("abcdefghij"), CPU, torch.float32)


@pytest.fixture
def spec(site: tuple[Site, str]) -> dict[str, Any]:
    """Serve the files of cifar10_quick, and return their description."""
    site[0].files |= files_of(classifier_of("quick"))
    return spec_of(classifier_of("quick"))


@functools.cache
def files_of(classifier: Classifier) -> dict[str, bytes]:
    weights = {f"/{dtype}": weights_of(classifier, getattr(torch, dtype)) for dtype in DTYPES}
    return {"/graph": graph_of(classifier), **weights}


DTYPES = {"float32": 1e-4, "float16": 1e-2}  # with the largest difference of a logit

Case = tuple[np.ndarray, list[list[int]], list[int]]  # pixels (H, W, 4), mute, hide


def random_cases(spec: dict[str, Any], count: int) -> list[Case]:
    rng = np.random.default_rng(0)
    heads = list(itertools.product(range(spec["layers"]), range(spec["heads"])))
    patches, cases = spec["grid"][0] * spec["grid"][1], []
    for _ in range(count):
        pixels = rng.integers(256, size=(*spec["image_size"], 4), dtype=np.uint8)
        mute = rng.choice(heads, rng.integers(len(heads)), replace=False).tolist()
        hide = rng.choice(patches, rng.integers(patches), replace=False).tolist()
        cases.append((pixels, mute, hide))
    return cases


def in_torch(classifier: Classifier, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    pixels, mute, hide = case
    image = torch.from_numpy(pixels[..., : classifier.preprocess.channels]).permute(2, 0, 1)
    logits, weights, *_ = ask_torch(classifier, image, mute, hide)
    return logits[0], weights[0]


def in_browser(page: Page, cases: list[Case], spec: Any, dtype: str = "float32") -> list[Any]:
    """Classify; return logits, probabilities and, of ten cases with few tokens, weights."""
    coded = [(base64.b64encode(pixels).decode(), mute, hide) for pixels, mute, hide in cases]
    answers = page.evaluate(
        """async ([cases, dtype, spec]) => {
            const model = await create("graph", dtype, dtype, spec), answers = [];
            for (const [pixels, mute, hide] of cases) {
                const answer = await model.classify(bytes(pixels), { mute, hide });
                window.device = answer.device;
                const keys = ["logits", "probabilities", "weights"];
                const all = answers.length < 10 && answer.weights.length < 1e6;
                const sent = all ? keys : keys.slice(0, 2);
                answers.push(sent.map((key) => text(answer[key])));
            }
            return answers;
        }""",
        [coded, dtype, spec],
    )
    return [
        [torch.frombuffer(bytearray(base64.b64decode(part)), dtype=torch.float32) for part in one]
        for one in answers
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", COUNTS)
def test_random_interventions_give_what_torch_gives_and_answers_are_not_kept(
    page, site, requests, name, dtype
):
    classifier, session = classifier_of(name), page.context.new_cdp_session(page)
    site[0].files |= files_of(classifier)
    spec = spec_of(classifier)
    prefix, patches = spec["prefix"], spec["grid"][0] * spec["grid"][1]
    cases = random_cases(spec, COUNTS[name])
    cases[0][2][:] = range(patches)  # nothing is left
    largest = 0.0
    for case, answer in zip(cases, in_browser(page, cases, spec, dtype), strict=True):
        (logits, weights), (found, probabilities, *maps) = in_torch(classifier, case), answer
        largest = max(largest, (found - logits).abs().max().item())
        torch.testing.assert_close(probabilities, found.softmax(dim=0))
        kept = [patch for patch in range(patches) if patch not in case[2]]
        rows = [*range(prefix), *(prefix + patch for patch in kept)]
        for one in maps if rows else []:
            differences = (one.view_as(weights) - weights)[..., rows, :]
            assert differences.abs().max() < DTYPES[dtype]
    assert 0 < largest < DTYPES[dtype]
    names = [url.rsplit("/", 1)[1] for url in requests]
    assert {"ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm.gz"} < set(names)
    session.send("HeapProfiler.collectGarbage")
    usage = session.send("Runtime.getHeapUsage")  # weights are in buffers beside the heap
    if name == "quick":  # of which each answer has 200 kB
        assert usage["usedSize"] + usage["backingStorageSize"] < KEPT_BYTES


def hostile_graph(kind: str, spec: dict[str, Any]) -> bytes:
    """A graph that gives logits and weights of zeros, and is plain but for one thing."""
    layers, heads, classes = spec["layers"], spec["heads"], len(spec["classes"])
    shapes = {"logits": [1, classes], "weights": [1, layers, heads, 64, 64]}
    value = float("nan") if kind == "not finite" else 0.0
    sizes = {name: list(shape) for name, shape in shapes.items()}
    if kind == "other shape":
        sizes["logits"][1] += 1
    inputs = {"images": [1, 3, 32, 32], "gates": [layers, heads], "keep": [1, 64]}
    nodes, initializers = [], []
    for name, size in sizes.items():
        initializers.append(numpy_helper.from_array(np.array(size, np.int64), f"{name} size"))
        fill = numpy_helper.from_array(np.array([value], np.float32))
        nodes.append(helper.make_node("ConstantOfShape", [f"{name} size"], [name], value=fill))
    if kind == "endless":
        on, still_on = (helper.make_tensor_value_info(name, 9, []) for name in ("on", "still on"))
        turn = helper.make_tensor_value_info("turn", TensorProto.INT64, [])
        state, after = (helper.make_tensor_value_info(name, 1, []) for name in ("state", "after"))
        copies = [helper.make_node("Identity", ["on"], ["still on"])]
        copies.append(helper.make_node("Sin", ["state"], ["after"]))
        body = helper.make_graph(copies, "body", [turn, on, state], [still_on, after])
        # Both come from an input, so that nothing can be computed when the graph is loaded.
        nodes += [
            helper.make_node("ReduceMax", ["gates"], ["largest"], keepdims=0),
            helper.make_node("Cast", ["largest"], ["begin"], to=TensorProto.BOOL),
            helper.make_node("Loop", ["", "begin", "largest"], ["last"], body=body),
            helper.make_node("Add", ["logits", "last"], ["endless logits"]),
        ]
        nodes[0].output[0], nodes[-1].input[0], nodes[-1].output[0] = "none", "none", "logits"
    graph = helper.make_graph(
        nodes,
        kind,
        [helper.make_tensor_value_info(name, 1, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, 1, None) for name in shapes],
        initializers,
    )
    opset = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opset, ir_version=8).SerializeToString()


REFUSALS = {
    "truncated graph": "The model cannot be loaded: ",
    "other shape": "The model failed: logits are (1,11), not (1,10).",
    "not finite": "The model failed: some logits are not numbers.",
    "short weights": "The model cannot be loaded: its weights are 1000 bytes, not {size}.",
    "infinite weights": "The model cannot be loaded: some of its weights are not numbers.",
}


def test_damaged_and_hostile_models_are_refused_in_a_sentence_and_the_next_one_works(
    page, site, spec
):
    good, sources = dict(site[0].files), []
    for kind in REFUSALS:
        site[0].files[f"/{kind}"] = {
            "truncated graph": lambda: good["/graph"][:20_000],
            "short weights": lambda: good["/float32"][:1000],
            "infinite weights": lambda: b"\x00\x7c" + good["/float16"][2:],
        }.get(kind, lambda kind=kind: hostile_graph(kind, spec))()
        files = ("graph", kind) if "weights" in kind else (kind, "float32")
        sources.append((*files, "float16" if "infinite" in kind else "float32"))
    found = page.evaluate(
        """async ([sources, spec]) => {
            const found = [];
            for (const source of sources) {
                const model = create(...source, spec);
                found.push(await refusal(model.then((one) => one.classify(new Uint8Array(4096)))));
            }
            return found;
        }""",
        [[*sources, ("graph", "float32", "float32")], spec],
    )
    for line, start in zip(found, REFUSALS.values(), strict=False):
        start = start.format(size=4 * spec["floats"])
        assert line.startswith(f"Error: {start}") and line.endswith(".") and len(line) < 300, line
    assert found[-1] == "no error"


def test_requests_are_replaced_cancelled_and_stopped(page, site, spec):
    """The endless graph runs until it is ended; meanwhile, other models wait."""
    site[0].files["/endless"] = hostile_graph("endless", spec)
    found = page.evaluate(
        """async (spec) => {
            const pixels = new Uint8Array(4096);
            const good = await create("graph", "float32", "float32", spec);
            const endless = await create("endless", "float32", "float32", spec);
            const ask = (model) => refusal(model.classify(pixels));
            const running = ask(endless);
            const later = [ask(good), ask(endless), ask(endless), ask(good)];
            setTimeout(() => endless.cancel(), 100);
            const answers = await Promise.all([running, ...later]);
            window.waiting = [ask(endless), ask(good)]; // for an hour, if nobody looked at a clock
            const heads = [[0, spec.heads], [-1, 0]].map((head) => ({ mute: [head] }));
            const wrong = [...heads, { hide: [64] }, { hide: [0.5] }];
            const errors = wrong.map((options) => refusal(good.classify(pixels, options)));
            errors.push(refusal(good.classify(new Uint8Array(3072))));
            return [answers, await Promise.all(errors)];
        }""",
        spec,
    )
    aborted = "AbortError: The request was replaced or cancelled."
    assert found[0] == [aborted, aborted, aborted, aborted, "no error"]
    assert [line.split(": ")[1] for line in found[1]] == [
        "The model has no head 3 in layer 0.",
        "The model has no head 0 in layer -1.",
        "The model has no patch 64.",
        "The model has no patch 0.5.",
        "The image has 768 pixels, but the model takes 1024.",
    ]
    page.clock.fast_forward(60_000)
    assert page.evaluate("() => Promise.all(window.waiting)") == [
        "Error: The model was stopped after 60 seconds.",
        "no error",
    ]


FILTERS = ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos")
FITS = ("crop", "pad", "squash")


def prepared(
    page: Page, files: list[bytes], preprocesses: list[ArrayPreprocess]
) -> list[np.ndarray]:
    """Prepare image files in the page; return (H, W, 4) uint8."""
    specs = [dataclasses.asdict(one) | {"channels": one.channels} for one in preprocesses]
    found = page.evaluate(
        """async ([files, specs]) => Promise.all(files.map(async (file, index) =>
            text((await prepare(new Blob([bytes(file)]), specs[index])).data)))""",
        [[base64.b64encode(file).decode() for file in files], specs],
    )
    return [
        np.frombuffer(base64.b64decode(one), np.uint8).reshape(*spec["image_size"], 4)
        for one, spec in zip(found, specs, strict=True)
    ]


def make_preprocess(rng: np.random.Generator) -> ArrayPreprocess:
    channels = int(rng.choice([1, 3]))
    return ArrayPreprocess(
        image_size=tuple(rng.integers(1, 50, size=2).tolist()),
        mean=tuple(rng.choice([0.1, 0.3, 0.5, 0.4914], channels).tolist()),
        std=(0.25,) * channels,
        interpolation=str(rng.choice(FILTERS)),
        fit=str(rng.choice(FITS)),
        crop_pct=float(rng.choice([1, 0.875])),
    )


def test_photos_are_prepared_as_predict_does_bit_for_bit(page):
    rng = np.random.default_rng(0)
    sizes = [(1, 1), (1, 2500), (3001, 2), *rng.integers(1, 120, size=(150, 2)).tolist()]
    files, preprocesses, expected = [], [], []
    for size in sizes:
        mode, preprocess = rng.choice(["RGB", "L", "RGBA"]), make_preprocess(rng)
        shape = size if mode == "L" else (*size, len(mode))
        image = Image.fromarray(rng.integers(256, size=shape, dtype=np.uint8))
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        files.append(buffer.getvalue())
        preprocesses.append(preprocess)
        expected.append(preprocess.resize_bands(bands_of(image, preprocess.channels)))
    for found, planes in zip(prepared(page, files, preprocesses), expected, strict=True):
        pixels = np.broadcast_to(planes, (3, *planes.shape[1:])).transpose(1, 2, 0)
        np.testing.assert_array_equal(found[..., :3], pixels)
        assert (found[..., 3] == 255).all()


# A GPU in software, whose numbers are those of a GPU, but which is slower than no GPU.
GPU = ["--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--enable-features=Vulkan"]


@pytest.mark.parametrize("browser", [GPU], ids=["GPU"], indirect=True)
def test_a_gpu_gives_what_torch_gives(page, site, requests):
    """A model large enough for it, with few tokens, which take less time."""
    model = VisionTransformer(
        img_size=32, in_chans=3, num_classes=10, patch_size=16, embed_dim=960, depth=1,
        num_heads=4, reg_tokens=2, qk_norm=True,
    ).eval()  # fmt: skip
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    preprocess = Preprocess((32, 32), (0.5,) * 3, (0.25,) * 3)
    classifier = Classifier(model, preprocess, tuple("abcdefghij"), CPU, torch.float32)
    site[0].files |= files_of(classifier)
    spec = spec_of(classifier)
    cases = random_cases(spec, 2)
    for case, (found, *_) in zip(cases, in_browser(page, cases, spec), strict=True):
        logits, _ = in_torch(classifier, case)
        torch.testing.assert_close(found, logits, rtol=0, atol=1e-3)
    assert page.evaluate("device") == "WebGPU"
    assert any(url.endswith("ort.jspi.bundle.min.mjs") for url in requests)
