"""The changes that CONTRIBUTING.md shows work as they stand; the docs list what is registered."""

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name

import numpy as np
import pytest
import torch.optim
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from torchvision import datasets as tv

from vit.config import OPTIMIZERS
from vit.data.config import DATASETS
from vit.explain.kinds import ALL_KINDS
from vit.tensorboard_plugin.encoding import decode_details

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
DIFFS = re.findall(r"^```diff\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
NEW, TITLE = "last_relevance", "last layer's relevance"
# What a reader types after applying the changes; the flags make the run short.
COMMANDS = """
import sys
from pathlib import Path

import vit.cli

def run(main, *words):
    sys.argv = [main.__name__, *map(str, words)]
    main()

root, out = map(Path, sys.argv[1:])
run(
    vit.cli.train_main, "--config", "mnist", "--optim.name", "sgd", "--data.root", root,
    "--data.val_size", "0", "--data.download", "false", "--out", out, "--train.epochs", "1",
    "--train.batch_size", "10", "--train.processes", "1", "--train.device", "cpu",
    "--model.depth", "2", "--model.embed_dim", "24", "--track.probes", "1",
    "--track.live_mb", "0",
)
run(
    vit.cli.eval_main, out, "maps", "--data.root", root, "--probes", "2",
    "--faithfulness", "2", "--device", "cpu", "--precision", "float32",
)
import numpy as np

found = vit.load(out).explain(np.zeros((40, 30, 1), np.uint8), "last_relevance")
print("explained", *found.maps, found.map.shape)
try:
    run(vit.cli.eval_main, "maps", "--help")
except SystemExit:
    pass
from vit.run.folder import ATTENTION_FILES

print("deleted by --overwrite:", "last_relevance.npy" in ATTENTION_FILES)
"""


def write_digits(folder: Path) -> None:
    """Write files like MNIST's, with two training images and one test image of each digit."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for part, count in (("train", 20), ("t10k", 10)):
        head = struct.pack(">4i", 0x803, count, 28, 28)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(head + random.bytes(count * 28 * 28))
        head, labels = struct.pack(">2i", 0x801, count), bytes(n % 10 for n in range(count))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(head + labels)


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of a copy of the project to which all changes were applied, and what it printed."""
    copy = tmp_path_factory.mktemp("copy")
    for name in ("vit", "configs", "docs"):
        ignored = shutil.ignore_patterns("__pycache__", "images", "scaling")
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    alone = {**os.environ, "GIT_CEILING_DIRECTORIES": str(copy.parent), "PYTHONPATH": str(copy)}
    for diff in DIFFS:
        subprocess.run(["git", "apply"], cwd=copy, env=alone, input=diff, text=True, check=True)
    write_digits(copy / "data/MNIST/raw")
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, copy / "data", copy / "run"],
        cwd=copy, env=alone, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    return copy / "run", done.stdout + done.stderr


@pytest.mark.slow
def test_a_data_set_an_optimizer_an_evaluator_and_a_recipe_train(changed):
    run, printed = changed
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert logged[-1]["step"] == 2 and any("weights/norm" in entry for entry in logged), printed
    config = (run / "config.yaml").read_text()
    assert "name: mnist" in config and "name: sgd" in config and "flip: false" in config
    assert "mnist: 20 training images" in printed


@pytest.mark.slow
def test_a_map_is_everywhere(changed):
    run, printed = changed
    folder = run / "eval/attention"
    index = json.loads((folder / "index.json").read_text())
    about = {"file": f"{NEW}.npy", "class_specific": True, "unit": "mean"}
    assert index["maps"][NEW] == about
    found, other = (np.load(folder / f"{kind}.npy") for kind in (NEW, "relevance"))
    assert found.shape == (2, 7, 7) and np.abs(found - other).max() > 0.01
    np.testing.assert_allclose(found.mean(axis=(1, 2)), 1, rtol=1e-5)
    assert NEW in json.loads((folder / "faithfulness.json").read_text())["maps"]
    assert re.search(rf"^{TITLE} +\d\.\d{{3}} ±", printed, re.MULTILINE)
    for events in (run, folder):
        records = EventAccumulator(str(events), tensor_size_guidance={"attention": 0}).Reload()
        tags = [t for t in records.PluginTagToContent("attention") if re.search(r"_\d+$", t)]
        assert tags
        for tag in tags:
            details = decode_details(records.Tensors(tag)[-1].tensor_proto.string_val[0])
            maps = [(shown.target, shown.title) for shown in details.maps if shown.kind == NEW]
            assert maps == [(target, TITLE) for target in range(10)]
    assert f"explained {NEW} torch.Size([7, 7])" in printed
    assert re.search(rf"--kinds V .*?{NEW}.*?--", printed, re.DOTALL)
    assert "deleted by --overwrite: True" in printed


def test_every_entry_names_what_exists():
    for entry in DATASETS.values():
        assert callable(resolve_name(f"vit.data.{entry.reader}"))
        is_torchvisions = entry.reader == "published:read_torchvision"
        assert hasattr(tv, entry.torchvision) if entry.torchvision else not is_torchvisions
        assert bool(entry.archive) == bool(entry.torchvision)
    for kind in ALL_KINDS.values():
        assert callable(resolve_name(f"vit.explain.{kind.function}"))
    for optimizer in OPTIMIZERS.values():
        assert issubclass(getattr(torch.optim, optimizer.name), torch.optim.Optimizer)


@pytest.mark.parametrize(
    ("page", "heading", "names"),
    [("data.md", "Data sets", DATASETS), ("attention.md", "Every kind of map", ALL_KINDS)],
)
def test_the_docs_list_every_entry(page, heading, names):
    section = (ROOT / "docs" / page).read_text(encoding="utf-8").split(f"## {heading}\n")[1]
    table = re.findall(r"^\|.*\|$", section.split("\n## ")[0], flags=re.MULTILINE)[2:]
    first = " ".join(row.split("|")[1] for row in table)
    assert sorted(re.findall(r"(?<!\[)`(\w+)`", first)) == sorted(names)
