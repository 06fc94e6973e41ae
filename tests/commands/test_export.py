"""eval.py RUN export: timm, ONNX and torch.export give the same logits; what they cannot do."""

import io
import json
import re
import runpy
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from onnxruntime.quantization import quantize_dynamic
from PIL import Image
from timm.data import create_transform, resolve_data_config

from models import ONE_BLOCK, randomize, save_untrained
from small_runs import rows_of
from vit.calibration import Calibration
from vit.classifier import Classifier
from vit.commands import export
from vit.commands.config import ExportConfig, PredictConfig
from vit.commands.export import run as export_run
from vit.commands.export import write_exports
from vit.commands.predict import run as predict_files
from vit.data.preprocess import Preprocess
from vit.model import attention
from vit.pretrained.load import load
from vit.reporting.export_formats import FORMATS

MODELS: dict[str, dict[str, Any]] = {  # that timm has too
    "mean": {"qk_norm": True, "init_values": 0.1, "qkv_bias": False, "mlp_ratio": 2.7},
    "token": {"class_token": True, "global_pool": "token", "reg_tokens": 2},
    "sincos": {"pos_embed": "sincos", "class_token": True},
    "none": {"pos_embed": "none", "head_dim": 8},
    "clip": {
        "class_token": True, "global_pool": "token", "pre_norm": True, "norm_eps": 1e-5,
        "act_layer": "quick_gelu",
    },
    "patches": {
        "class_token": True, "reg_tokens": 1, "no_embed_class": True, "fc_norm": False,
        "act_layer": "gelu_tanh",
    },
    "bias": {"rel_pos": "bias", "pos_embed": "none", "class_token": False, "global_pool": "avg"},
    "bias, class token": {
        "rel_pos": "bias", "pos_embed": "none", "qk_norm": True, "qkv_bias": False, "fc_norm": True,
        "init_values": 0.1,
    },
    "bias, positions": {"rel_pos": "bias", "class_token": True, "global_pool": "avg"},
    "bias, positions, layer scale": {
        "rel_pos": "bias", "class_token": True, "init_values": 0.1, "qkv_bias": False,
    },
    "rope": {"rel_pos": "rope", "pos_embed": "none", "mlp_ratio": 2.7},
    "rope, positions": {
        "rel_pos": "rope", "reg_tokens": 2, "no_embed_class": True, "global_pool": "avg",
        "init_values": 0.1, "pre_norm": True, "qk_norm": True, "fc_norm": False,
    },
}  # fmt: skip
RGB = Preprocess((32, 32), (0.4, 0.5, 0.6), (0.2, 0.25, 0.3))
CLASSES = ("circle", "square", "star")


def save(
    folder: Path,
    model: dict[str, Any],
    preprocess: Preprocess = RGB,
    base: dict[str, Any] = ONE_BLOCK,
) -> Path:
    calibration = Calibration(images=100, temperature=0.5, quantiles={})
    return save_untrained(folder, base | model, preprocess, CLASSES, calibration=calibration)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("run"), MODELS["token"])


def noise(preprocess: Preprocess, count: int) -> torch.Tensor:
    size = (count, preprocess.channels, *preprocess.image_size)
    return torch.randint(256, size, dtype=torch.uint8)


@pytest.mark.parametrize("name", MODELS)
def test_timm_loads_the_same_model(tmp_path, name):
    preprocess = Preprocess((16, 40), (0.5,), (0.3,))
    run = save(tmp_path / "run", MODELS[name], preprocess)
    classifier = load(run, "cpu", "float32")
    randomize(classifier.model, 0.1)
    (folder,) = write_exports(classifier, ExportConfig(formats=("timm",)))
    assert folder == run / "export/timm"
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    inputs = classifier.normalize(noise(preprocess, 3))
    expected = classifier.scaled(classifier.forward(inputs))
    torch.testing.assert_close(model(inputs).detach(), expected, atol=1e-5, rtol=1e-5)
    assert model.num_classes == 3
    assert tuple(model.pretrained_cfg["label_names"]) == CLASSES


@pytest.mark.slow
def test_a_timm_model_goes_back_to_timm_and_to_torch(tmp_path):
    model = {"name": "timm:vit_tiny_patch16_224", "timm_args": {"depth": 1, "patch_size": 8}}
    run = save(tmp_path / "run", model, Preprocess((32, 32), (0.5,), (0.3,)), base={})
    folder, _ = write_exports(
        load(run, "cpu"), ExportConfig(formats=("timm", "torch"))
    )  # compares logits
    loaded = timm.create_model(f"local-dir:{folder}", pretrained=True)
    assert type(loaded) is type(load(run, "cpu", "float32").model)
    content = json.loads((folder / "config.json").read_text())
    assert content["architecture"] == "vit_tiny_patch16_224"


def test_timm_makes_our_transform_from_an_export(tmp_path):
    run = save(tmp_path / "run", {}, replace(RGB, interpolation="bilinear"))
    (folder,) = write_exports(load(run, "cpu"), ExportConfig(formats=("timm",)))
    model = timm.create_model(f"local-dir:{folder}", pretrained=True)
    transform = create_transform(**resolve_data_config(model=model))
    classifier = load(run, "cpu", "float32")
    for height, width in [(60, 60), (20, 20), (500, 333), (33, 67)]:
        photo = np.random.default_rng(0).integers(256, size=(height, width, 3), dtype=np.uint8)
        ours = classifier.normalize(classifier.preprocess.resize(photo)[None])[0]
        torch.testing.assert_close(transform(Image.fromarray(photo)), ours, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("model", "part"),
    [
        ({"stem": "conv", "mlp_conv": True}, "no model.stem=conv and no model.mlp_conv=True; "),
        ({"head_dim": 4}, "it differs from timm's in blocks.0.attn.proj.weight, "),
        ({"rel_pos": "relative"}, "timm has no model.rel_pos=relative; export to onnx or torch"),
        ({"rel_pos": "bias", "class_token": False, "global_pool": "avg"}, "cls_token, pos_embed; "),
        ({"rel_pos": "bias", "pos_embed": "none", "reg_tokens": 1}, "from timm's in reg_token; "),
        ({"rel_pos": "rope", "act_layer": "gelu_tanh"}, "act_layer=gelu_tanh with model.rel_pos="),
        ({"attention": "cosine"}, "timm has no model.attention=cosine; export to onnx or torch"),
    ],
)
def test_a_model_that_timm_cannot_build_is_refused(tmp_path, model, part):
    run = save(tmp_path / "run", model)
    with pytest.raises(ValueError, match=r"^export: timm is not possible") as error:
        export_run(str(run), ExportConfig(formats=("hub", "timm")))
    assert part in str(error.value)
    assert [path.name for path in run.iterdir()] == ["model.safetensors"]


def test_timm_is_refused_when_attention_was_edited(run, monkeypatch):
    """Logits of noise may be the same: this edit changes no score below 100."""

    def edited(query, key, value, mask=None, dropout_p=0.0, need_weights=False):
        scores = (query @ key.mT * query.shape[-1] ** -0.5).clamp(max=100)
        return scores.softmax(-1) @ value, None

    monkeypatch.setattr(attention, "scaled_dot_product_attention", edited)
    with pytest.raises(ValueError, match=r"because vit/model/attention\.py was edited and timm"):
        export_run(str(run), ExportConfig(formats=("timm",)))


CONV = {"stem": "conv", "mlp_conv": True, "head_dim": 4, "patch_size": 2, "rel_pos": "relative"}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a model that timm lacks, exported as model.onnx and model.pt2."""
    run = save(tmp_path_factory.mktemp("exported"), CONV)
    export_run(str(run), ExportConfig(formats=("onnx", "torch")))
    return run


@pytest.mark.slow
def test_graphs_take_any_batch_and_say_what_they_are(exported):
    session = onnxruntime.InferenceSession(exported / "export/model.onnx")
    (given,), (output,) = session.get_inputs(), session.get_outputs()
    assert (given.name, given.type, output.name) == ("images", "tensor(float)", "logits")
    assert given.shape == ["batch", 3, 32, 32]
    about = dict.fromkeys(("classes", "preprocess", "input"), "")
    module = torch.export.load(exported / "export/model.pt2", extra_files=about).module()
    assert session.get_modelmeta().custom_metadata_map == about
    assert json.loads(about["classes"]) == list(CLASSES)
    assert Preprocess(**json.loads(about["preprocess"])) == RGB
    assert "(batch, 3, 32, 32), normalized: (pixels / 255 - mean) / std" in about["input"]
    for file in (exported / "export").iterdir():  # no paths of the machine that exported it
        assert b"/vit/model/" not in file.read_bytes()
    classifier = load(exported, "cpu", "float32")
    for count in (1, 5):
        inputs = classifier.normalize(noise(RGB, count))
        expected = classifier.scaled(classifier.forward(inputs))
        (onnx,) = session.run(["logits"], {"images": inputs.numpy()})
        np.testing.assert_allclose(onnx, expected, atol=1e-5)
        torch.testing.assert_close(module(inputs), expected, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_a_graph_can_be_quantized(exported, tmp_path):
    quantize_dynamic(exported / "export/model.onnx", tmp_path / "small.onnx")
    inputs = noise(RGB, 3).numpy().astype(np.float32) / 255
    whole, small = (
        onnxruntime.InferenceSession(path).run(["logits"], {"images": inputs})[0]
        for path in (exported / "export/model.onnx", tmp_path / "small.onnx")
    )
    assert 0 < np.abs(small - whole).max() < 0.1 * whole.std()


@pytest.mark.parametrize("wrong", [2e-4, float("nan")])
def test_an_export_with_other_logits_is_discarded(tmp_path, monkeypatch, wrong):
    run = save(tmp_path / "run", {})
    kind = FORMATS["timm"]

    def load_wrong(path: Path) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda images: kind.load(path)(images) + wrong

    monkeypatch.setitem(export.FORMATS, "timm", kind._replace(load=load_wrong))
    with pytest.raises(ValueError, match=r"export: timm: largest difference .* at most 0.0001"):
        export_run(str(run), ExportConfig(formats=("timm",)))
    assert [path.name for path in run.iterdir()] == ["model.safetensors"]


def test_export_replaces_its_own_result_but_nothing_else(tmp_path, run):
    options, target = ExportConfig(formats=("timm",), out=str(tmp_path)), tmp_path / "timm"
    export_run(str(run), options)
    reader = target / "preprocess.py"
    earlier = f"# of another version\n{reader.read_text()}"
    reader.write_text(earlier)
    export_run(str(run), options)
    assert len(list(target.iterdir())) == 3 and reader.read_text() != earlier
    other = save(tmp_path / "other", {}, replace(RGB, fit="pad"))
    (tmp_path / "model.onnx").write_text("mine")
    for source, name, file in ((other, "timm", "timm/preprocess.py"), (run, "onnx", "model.onnx")):
        before = (tmp_path / file).read_bytes()
        with pytest.raises(ValueError, match=rf"out: .*{file} exists and is not from an export"):
            export_run(str(source), ExportConfig(formats=(name,), out=str(tmp_path)))
        assert (tmp_path / file).read_bytes() == before


def save_files(folder: Path) -> list[Path]:
    """Save small images of all kinds; each is another picture of coarse noise."""
    generator = np.random.default_rng(0)

    def draw(mode: str, width: int = 40, height: int = 30) -> Image.Image:
        bands = len(Image.new(mode, (1, 1)).getbands())
        pixels = generator.integers(256, size=(3, 4, bands), dtype=np.uint8)
        return Image.frombytes(mode, (4, 3), pixels.tobytes()).resize((width, height))

    folder.mkdir()
    turned = Image.Exif()
    turned[0x0112] = 6  # taken with the camera turned
    deep = generator.integers(65_536, size=(30, 40), dtype=np.uint16)
    for name, image, how in (
        ("colour.png", draw("RGB"), {}),
        ("wide.webp", draw("RGB", 300, 40), {}),
        ("tall.bmp", draw("RGB", 7, 50), {}),
        ("grey.png", draw("L"), {}),
        ("bits.png", draw("L").convert("1"), {}),
        ("deep.png", Image.fromarray(deep), {}),
        ("shallow.png", Image.fromarray(deep[::-1] // 256), {}),
        ("shallow.tif", Image.fromarray(deep.T.astype(np.int32) // 256), {}),
        ("pages.tif", draw("L"), {"save_all": True, "append_images": [draw("L") for _ in "1234"]}),
        ("palette.png", draw("RGB").quantize(16), {}),
        ("clear_palette.png", draw("RGB").quantize(16), {"transparency": 3}),
        ("clear_colour.png", draw("RGBA"), {}),
        ("clear_grey.png", draw("LA"), {}),
        ("ink.jpg", draw("CMYK"), {}),
        ("turned.jpg", draw("RGB"), {"exif": turned}),
        ("moving.gif", draw("RGB"), {"save_all": True, "append_images": [draw("RGB")]}),
    ):
        image.save(folder / name, **how)
    return sorted(folder.iterdir())


@pytest.mark.parametrize(("fit", "channels"), [("crop", 3), ("pad", 3), ("squash", 1), ("pad", 5)])
def test_exported_preprocess_gives_the_bits_that_predict_gives_the_model(
    tmp_path, monkeypatch, fit, channels
):
    interpolation = {"crop": "bicubic", "pad": "bilinear", "squash": "lanczos"}[fit]
    mean, std = (0.49, 0.48, 0.45, 0.5, 0.4)[:channels], (0.247, 0.24, 0.26, 0.3, 0.2)[:channels]
    preprocess = Preprocess((24, 32), mean, std, interpolation, fit, crop_pct=0.9)
    run, files, given = save(tmp_path / "run", {}, preprocess), save_files(tmp_path / "in"), []
    if channels == 5:  # which the other files do not have
        files = [file for file in files if file.name == "pages.tif" or file.unlink()]
    export_run(str(run), ExportConfig(formats=("timm",)))
    forward = Classifier._forward

    def listen(classifier: Classifier, inputs: torch.Tensor) -> torch.Tensor:
        given.append(inputs.numpy().copy())
        return forward(classifier, inputs)

    monkeypatch.setattr(Classifier, "_forward", listen)
    predict_files(
        str(run), PredictConfig(photos=(str(tmp_path / "in"),), device="cpu", batch_size=1)
    )
    with monkeypatch.context() as without:
        for module in ("torch", "vit"):
            without.setitem(sys.modules, module, None)
        read = runpy.run_path(str(run / "export/timm/preprocess.py"))["load"]
    assert len(given) == len(files)
    for file, expected in zip(files, given, strict=True):
        found = read(file)
        assert found.dtype == np.float32 and found.shape == (1, channels, 24, 32), file
        assert found.tobytes() == expected.tobytes(), file


PAGE = (Path(__file__).resolve().parents[2] / "docs/export.md").read_text()


def programs() -> dict[str, str]:
    """The Python programs of the page, by their heading."""
    return dict(re.findall(r"### ([\w. ]+)\n(?:(?!###).)*?```python\n(.*?)```", PAGE, re.DOTALL))


def test_the_server_answers_four_clients_at_once_as_predict_does(tmp_path, monkeypatch):
    (code,) = re.findall(r"## In a server\n.*?```python\n(.*?server)\.serve_", PAGE, re.DOTALL)
    save(tmp_path, {})
    monkeypatch.setattr("http.server.BaseHTTPRequestHandler.log_message", lambda *_: None)
    names: dict[str, Any] = {}
    exec(code.replace('"RUN"', repr(str(tmp_path))).replace("8000", "0"), names)
    server, classifier = names["server"], names["classifier"]
    contents = [file.read_bytes() for file in save_files(tmp_path / "in")] * 5
    contents = [content for content in contents if content[:3] in (b"\xff\xd8\xff", b"\x89PN")]
    expected = [classifier.predict(Image.open(io.BytesIO(content))) for content in contents]
    url = f"http://127.0.0.1:{server.server_address[1]}"

    def ask(content: bytes) -> Any:
        with urlopen(url, content, timeout=100) as answer:
            return json.load(answer)

    with ThreadPoolExecutor(5) as pool, server:
        serving = pool.submit(server.serve_forever)
        try:
            assert [*pool.map(ask, contents)] == [pytest.approx(each) for each in expected]
            with pytest.raises(HTTPError, match="400"):
                ask(b"%!PS-Adobe-3.0 EPSF-3.0")
        finally:
            server.shutdown()
        serving.result()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ONNX Runtime", "torch.export", "timm"])
def test_programs_give_the_classes_and_probabilities_of_predict(
    tmp_path, monkeypatch, capsys, exported, run, name
):
    if name == "timm":
        (folder,) = write_exports(
            load(run, "cpu"), ExportConfig(formats=("timm",), out=str(tmp_path))
        )
    else:
        run, folder = exported, exported / "export"
    files, table = save_files(tmp_path / "in"), tmp_path / "table.csv"
    words = {"photos": (str(tmp_path / "in"),), "out": str(table), "device": "cpu"}
    predict_files(str(run), PredictConfig(**words, precision="float32"))
    rows = rows_of(table)
    assert len({row["probability"] for row in rows}) == len(rows) == len(files)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "preprocess", raising=False)
    capsys.readouterr()
    for file, row in zip(files, rows, strict=True):
        exec(programs()[name].replace("photo.jpg", str(file)), {})
        found = dict(line.split() for line in capsys.readouterr().out.splitlines())
        assert list(found) == [row[f"class_{number}"] for number in (1, 2, 3)], file
        expected = [float(row[f"probability_{number}"]) for number in (1, 2, 3)]
        assert [float(share) for share in found.values()] == pytest.approx(expected, abs=1e-4)
    del sys.modules["preprocess"]
