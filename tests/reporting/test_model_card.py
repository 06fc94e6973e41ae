"""Models on the Hugging Face Hub, for which a local server stands in, and bundled models."""

import dataclasses
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.testing import assert_close

import vit
from small_runs import load
from vit.config import Config, to_dict
from vit.data.config import DataConfig
from vit.data.preprocess import Preprocess
from vit.evaluation import report
from vit.model_file import BUNDLED, weights_digest
from vit.pretrained.load import load as load_model
from vit.reporting.model_card import model_card, write_hub
from vit.reporting.tables import metrics_table

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "0" * 40
LOAD = """
import sys, torch, vit
from vit.model.config import ModelConfig
from vit.pretrained.sources import find_source

classifier = vit.load("hf-hub:me/model", device="cpu", precision="float32")
source = find_source("hf-hub:me/model", ModelConfig())
assert all(torch.equal(source.weights[k], v) for k, v in classifier.model.state_dict().items())
images = torch.arange(2 * 3 * 32 * 32).remainder(256).byte().view(2, 3, 32, 32)
torch.save(classifier.logits(images), sys.argv[1])
print(classifier.run)
vit.export(classifier, "hub")
try:
    vit.load("hf-hub:me/other")
except ValueError as error:
    print(error)
"""


def serve(repositories: Path) -> ThreadingHTTPServer:
    """Serve OWNER/NAME/FILE in a folder as the Hub does."""

    class Hub(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def answer(self, content: bytes, status: int = 200, **headers: str) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def do_GET(self) -> None:
            parts = self.path.partition("?")[0].strip("/").split("/")
            folder, file = repositories.joinpath(*parts[2:4]), repositories.joinpath(*parts[:2])
            if parts[:2] == ["api", "models"] and folder.is_dir():
                kind = {"type": "file", "oid": "0" * 40}
                tree = [
                    {**kind, "path": file.name, "size": file.stat().st_size}
                    for file in sorted(folder.iterdir())
                ]
                about = {"id": "/".join(parts[2:4]), "sha": COMMIT}
                content = json.dumps(about if parts[4] == "revision" else tree).encode()
                self.answer(content, Content_Type="application/json")
            elif parts[2:3] == ["resolve"] and file.joinpath(*parts[4:]).is_file():
                content = file.joinpath(*parts[4:]).read_bytes()
                digest = hashlib.sha256(content).hexdigest()
                self.answer(content, ETag=f'"{digest}"', X_Repo_Commit=COMMIT)
            else:
                self.answer(b"{}", 404, X_Error_Code="RepoNotFound")

        do_HEAD = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.mark.slow
def test_a_model_is_loaded_from_the_hub_and_without_it_from_the_cache(tmp_path: Path) -> None:
    saved = load_model("cifar10_quick", "cpu", "float32")
    images = torch.arange(2 * 3 * 32 * 32).remainder(256).byte().view(2, 3, 32, 32)
    (tmp_path / "me").mkdir()
    write_hub(saved, tmp_path / "me/model")
    server = serve(tmp_path)
    # In processes of their own, because huggingface_hub reads its settings once.
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "home"),
    }
    for problem in ("cannot be downloaded (404", "is not in the cache, and the Hub cannot be"):
        run = subprocess.run(
            [sys.executable, "-c", LOAD, tmp_path / "logits.pt"],
            env=environment, capture_output=True, text=True, cwd=tmp_path,
        )  # fmt: skip
        home, *_, error = run.stdout.splitlines()
        assert home == str(Path("runs/me-model"))
        card = (tmp_path / home / "export/hub/README.md").read_text()
        assert re.findall("^# (.*)", card, flags=re.MULTILINE) == ["me-model"]
        shutil.rmtree(tmp_path / home)
        assert error.startswith(f"hf-hub:me/other {problem}")
        assert_close(torch.load(tmp_path / "logits.pt"), saved.logits(images))
        (tmp_path / "logits.pt").unlink()
        server.shutdown()
        server.server_close()


def test_an_export_is_written_where_results_belong(tmp_path: Path, monkeypatch: Any) -> None:
    classifier = dataclasses.replace(vit.load("cifar10_quick", "cpu"), home=tmp_path)
    monkeypatch.setattr("vit.commands.export._export", lambda _, name, draft: draft.touch() or name)
    # Not beside a file in a cache.
    assert vit.export(classifier, "onnx") == tmp_path / "export/model.onnx"
    assert vit.export(classifier, "onnx", tmp_path / "here") == tmp_path / "here/model.onnx"


def test_the_card_says_what_was_measured_and_no_paths(tmp_path: Path) -> None:
    saved = load_model("cifar10_quick", "cpu", "float32")
    data = dataclasses.replace(saved.config.data, root="/home/ada/photos")
    config = dataclasses.replace(saved.config, data=data, out="/home/ada/runs/quick")
    saved = dataclasses.replace(saved, config=config, home=tmp_path)
    (tmp_path / "eval").mkdir()
    result = report(torch.eye(10), torch.arange(10), saved.classes)
    content = json.dumps({**result, "images_per_second": 1.0})
    (tmp_path / "eval/report.json").write_text(content)
    write_hub(saved, tmp_path / "hub")
    assert b"/home/ada" not in b"".join(file.read_bytes() for file in (tmp_path / "hub").iterdir())
    _, metadata, text = (tmp_path / "hub/README.md").read_text().split("---\n", 2)
    (measured,) = yaml.safe_load(metadata)["model-index"][0]["results"]
    assert measured["metrics"] == [{"type": "accuracy", "value": 1.0}]
    assert measured["dataset"]["name"] == "cifar10"
    assert textwrap.indent(metrics_table(json.loads(content)), "    ") in text
    assert f"{saved.step:,} optimizer steps on `cifar10`" in text
    (tmp_path / "eval/report.json").write_text(json.dumps({**json.loads(content), "flip": True}))
    assert "Not measured." in model_card(saved)  # not as the code in the card classifies
    (tmp_path / "eval/report.json").write_text(json.dumps({**json.loads(content), "weights": "0"}))
    assert "Not measured." in model_card(saved)  # of another model in this folder
    own = json.dumps({**json.loads(content), "weights": weights_digest(saved.model)})
    (tmp_path / "eval/report.json").write_text(own)
    assert "Not measured." not in model_card(saved)


# Bundled models.


CIFAR = ROOT / "data" / "cifar-10-batches-py"
needs_cifar = pytest.mark.skipif(not CIFAR.exists(), reason="data/cifar-10-batches-py is missing")


@pytest.mark.parametrize("name", ["cifar10", "cifar10_quick"])
def test_included_models_are_small_and_carry_their_config(name: str) -> None:
    assert (BUNDLED / f"{name}.safetensors").stat().st_size < 4e6
    saved, same = load_model(name), load_model(Path(name))
    assert saved.path == same.path and saved.name == name
    assert saved.run == Path("runs/included") / name and saved.finished
    assert saved.path == BUNDLED / f"{name}.safetensors"
    assert saved.config == Config(**to_dict(saved.config)) and saved.config.data.name == "cifar10"
    assert saved.classes[8] == "ship" and len(saved.classes) == 10
    assert saved.preprocess == Preprocess.from_config(DataConfig(name="cifar10"))
    assert (saved.calibration is not None) == (name == "cifar10")


@pytest.mark.slow
@needs_cifar
@pytest.mark.parametrize("name", ["cifar10", "cifar10_quick"])
def test_included_models_are_as_good_as_readme_says(name: str) -> None:
    classifier = load_model(name, precision="float32")
    test = load("cifar10", ROOT / "data", train=False, download=False)
    logits = classifier.logits(test.images).cpu()
    accuracy = (logits.argmax(dim=1) == test.labels).double().mean().item()
    readme = (ROOT / "README.md").read_text()
    (stated,) = re.findall(rf"`{name}`\s+by the [^()]*recipe[^()]*\(([\d.]+)%", readme)
    # Other kernels round differently.
    assert accuracy == pytest.approx(float(stated) / 100, abs=5e-4)
