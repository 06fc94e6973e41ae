"""SECURITY.md: each row of its table names a test, and what no other module tests."""

import json
import re
from pathlib import Path

import pytest
import safetensors.torch
import torch

import vit
from small_runs import Payload
from vit.model.config import ModelConfig
from vit.pretrained.sources import find_source

ROOT = Path(__file__).resolve().parent.parent


def test_each_row_of_the_table_names_its_test():
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 10
    for row in rows:
        found = re.fullmatch(r"`(test_\w+\.py)::(test_\w+)` \|", row[-1])
        assert found is not None, row
        file, name = found.groups()
        (path,) = (ROOT / "tests").rglob(file)
        assert f"\ndef {name}(" in path.read_text(encoding="utf-8"), row


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["timm", "transformers"])
@pytest.mark.parametrize("whole", [False, True])
def test_code_in_folders_of_timm_and_transformers_never_runs(kind, whole, tmp_path):
    """Whether or not there are weights that can be read beside the code."""
    folder, proof = tmp_path / "folder", tmp_path / "proof"
    folder.mkdir()
    about: dict[str, object] = {
        "auto_map": {"AutoModel": "modeling.Evil"}, "architectures": ["Evil"],
        "custom_load": "modeling.py", "trust_remote_code": True,
    }  # fmt: skip
    if kind == "timm":
        about |= {
            "architecture": "vit_tiny_patch16_224", "num_classes": 2,
            "model_args": {"depth": 1, "embed_dim": 12, "num_heads": 2, "img_size": 32},
            "pretrained_cfg": {"input_size": [3, 32, 32]},
        }  # fmt: skip
    else:
        about |= {"model_type": "vit", "num_attention_heads": 2, "image_size": 32}
    (folder / "config.json").write_text(json.dumps(about))
    for name in ("modeling.py", "__init__.py", "setup.py"):
        (folder / name).write_text(f"import pathlib; pathlib.Path({str(proof)!r}).touch()")
    for name in ("pytorch_model.bin", "model.pth", "training_args.bin", "optimizer.pt"):
        torch.save({"state_dict": {"head.bias": Payload(proof)}}, folder / name)
    if whole:
        weights = {"head.bias": torch.zeros(2)}
        safetensors.torch.save_file(weights, folder / "model.safetensors")
    for name in ("vit", "timm:vit_tiny_patch16_224"):
        with pytest.raises(ValueError, match=r"folder"):
            find_source(str(folder), ModelConfig(name=name, pretrained=str(folder)))
    with pytest.raises(ValueError, match=r"folder"):
        vit.load(folder)
    assert not proof.exists()
