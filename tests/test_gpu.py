"""An accelerator computes the same as the CPU: `python -m pytest -m gpu`."""

import dataclasses
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from small_runs import CPU, ROOT, assert_same, command, make_loop, small, watch_updates
from vit.classifier import build_model
from vit.cli import parse_train
from vit.commands.train import train
from vit.config import Config
from vit.data.config import DataConfig
from vit.data.preprocess import Preprocess
from vit.explain.maps import MAP_KINDS, attention_maps
from vit.hardware import autocast
from vit.model.config import ModelConfig
from vit.model.vit import VisionTransformer
from vit.run.length import Length
from vit.training.step import TrainingStep

GPU = torch.accelerator.current_accelerator(check_available=True) or CPU
CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPU == CPU, reason="there is no accelerator")]


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """cuDNN rounds the inputs of convolutions to ten bits unless it is told not to."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    yield
    torch.use_deterministic_algorithms(False)  # as a run leaves them


def read(name: str) -> Config:
    config = parse_train(["--config", str(ROOT / "configs" / f"{name}.yaml")])[0]
    if config.model.pretrained is None:
        return config
    return dataclasses.replace(config, model=ModelConfig(patch_size=4))  # without its weights


def distance(one: Tensor, other: Tensor) -> float:
    """Return how far one is from the other, over how large the other is."""
    one, other = one.detach().cpu().double(), other.detach().cpu().double()
    return float((one - other).norm() / other.norm())


def lively(config: Config, device: torch.device) -> VisionTransformer:
    """Make a model whose every weight does something; zero_init leaves whole blocks silent."""
    torch.manual_seed(0)
    model = build_model(config.model, Preprocess.from_config(DataConfig(name="cifar10")), 10)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    return model.to(device).eval()


@pytest.mark.parametrize("name", CONFIGS)
def test_cpu_and_gpu_agree(name):
    config = read(name)
    images = torch.randn(16, 3, 32, 32)
    on_cpu, on_gpu = lively(config, CPU), lively(config, GPU)
    expected = on_cpu(images)
    assert distance(on_gpu(images.to(GPU)), expected) < 1e-4
    with autocast(GPU, torch.bfloat16):
        assert distance(on_gpu(images.to(GPU)), expected) < 5e-2
    _, wanted = attention_maps(on_cpu, images[:4], MAP_KINDS)
    _, maps = attention_maps(on_gpu, images[:4].to(GPU), MAP_KINDS)
    for kind in MAP_KINDS:
        limit = 1e-4 * float(wanted[kind].abs().max())
        torch.testing.assert_close(maps[kind].cpu(), wanted[kind], rtol=0, atol=limit)


def on_gpu(out: Path, **changes: dict[str, Any]) -> Config:
    # Stretching positions to another grid has no fixed order on a GPU.
    how = {"device": GPU.type, "precision": "auto", "small_share": 0, **changes.pop("train", {})}
    return dataclasses.replace(small(out, train=how, **changes), deterministic=True)


def test_run_that_was_stopped_goes_on_bit_for_bit(tmp_path, monkeypatch):
    """Interrupted three times, in mid-epoch and without a last checkpoint."""
    train(on_gpu(tmp_path / "alone"))
    for end in (7, 15, 23):

        def until(step: TrainingStep, *_: Tensor, end: int = end) -> None:
            if step.state.step == end:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            watch_updates(patch, until)
            train(on_gpu(tmp_path / "stopped"))
    train(on_gpu(tmp_path / "stopped"))
    assert_same(tmp_path / "stopped", tmp_path / "alone")


@pytest.mark.parametrize("name", CONFIGS)
def test_step_of_every_config_learns(name, tmp_path):
    """As it comes, compiled or not, but for the number of images."""
    config = read(name)
    shapes = small(tmp_path / "run", data={"train_size": 2000, "val_size": 0}).data
    config = dataclasses.replace(config, out=str(tmp_path / "run"), data=shapes)
    loop = make_loop(config, device=GPU)
    step = dataclasses.replace(
        loop.step,
        precision=torch.bfloat16,
        schedule=dataclasses.replace(loop.step.schedule, length=Length(1000), warmup=0.01),
    )
    batches = torch.arange(config.train.batch_size).repeat(30, 1)
    losses = torch.stack([step(*batch) for batch in loop.training.batches(batches)])[:, 0].cpu()
    assert step.state.step == 30 and step.state.skipped == 0
    assert losses.isfinite().all()
    assert losses[-5:].mean() < losses[:5].mean()


def test_operation_without_fixed_order_is_refused_in_one_line(tmp_path):
    words = command(on_gpu(tmp_path / "run", train={"small_share": 0.5}), tmp_path / "config")
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "deterministic implementation" in done.stderr
    assert "--train.small_share 0" in done.stderr and "Traceback" not in done.stderr


def test_memory_that_runs_out_is_explained(tmp_path):
    free = torch.accelerator.get_memory_info(GPU)[0]
    config = on_gpu(
        tmp_path / "run", model={"embed_dim": 384, "depth": 12, "patch_size": 1, "num_heads": 6},
        data={"train_size": 40_000}, train={"batch_size": 40_000, "accumulate": 1},
    )  # fmt: skip
    assert free < 40_000 * 12 * 1024 * 384 * 4
    done = subprocess.run(command(config, tmp_path / "config"), capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "error: train.batch_size: out of memory with 40000 images per step" in done.stderr
    assert "Traceback" not in done.stderr
