"""One optimizer step: accumulation, clipping, what it draws, and that a model learns at all."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from small_runs import make_step, small
from vit.data.config import DataConfig
from vit.data.datasets import load
from vit.data.preprocess import Preprocess
from vit.distributed.world import World
from vit.training.config import Config
from vit.training.step import TrainingStep

SHAPES = Preprocess.from_config(DataConfig(name="shapes"))


def bare_step(config: Config) -> TrainingStep:
    """Build a step on a few shapes whose learning rate is constant."""
    config = replace(
        config,
        data=replace(config.data, name="shapes", train_size=64, val_size=0),
        train=replace(config.train, batch_size=64, accumulate=1, whiten=False, device="cpu"),
    )
    return replace(make_step(config), label_smoothing=0.0, clip_grad=None)


@pytest.mark.slow
def test_overfits_one_batch(tmp_path: Path) -> None:
    """A model that cannot learn 64 images by heart is broken."""
    config = Config(out=str(tmp_path / "run"))
    config = replace(config, model=replace(config.model, embed_dim=48, depth=2))
    data = load("shapes", "", train=True, count=64)
    step = bare_step(config)
    images, targets = SHAPES.normalize(data.images), torch.eye(10)[data.labels]
    for _ in range(120):
        loss, accuracy = step.update(images, targets).tolist()
    assert accuracy == 1.0
    assert loss < 0.1


def without_dropout(**optim: str) -> Config:
    config = small(Path("unused"), model={"stem": "linear"}, optim={"ema_decay": None, **optim})
    rates = {key: 0.0 for key in asdict(config.model) if key.endswith("_rate")}
    return replace(config, model=replace(config.model, **rates))


def test_accumulated_step_equals_the_whole_one() -> None:
    config = without_dropout(name="adamw")
    images, targets = torch.randn(8, 3, 32, 32), torch.eye(10)[torch.arange(8)]
    results = []
    for parts in (1, 4):
        step = replace(bare_step(config), clip_grad=1.0, accumulate=parts)
        results.append((step.update(images, targets), *step.state.model.parameters()))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-6)


class HalfOfTheWorld(World):
    """Two processes, of which the other one has a gradient of zero."""

    def average(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            tensor /= 2


@pytest.mark.parametrize("limit", [0.01, 1e3])
def test_the_average_gradient_is_clipped_to_its_norm(limit: float) -> None:
    step = replace(
        bare_step(without_dropout()), clip_grad=limit, accumulate=2, world=HalfOfTheWorld()
    )
    weights = [*step.state.model.parameters()]
    # Unlike AdamW and Muon, plain SGD does not hide the scale of a gradient.
    step.state.optimizers[:] = [torch.optim.SGD(weights, lr=100.0)]
    images, targets = torch.randn(8, 3, 32, 32), torch.eye(10)[torch.arange(8)]
    loss = torch.nn.functional.cross_entropy(step.state.model.train()(images), targets) / 2
    gradients = torch.autograd.grad(loss, weights)
    norm = sum(gradient.square().sum() for gradient in gradients) ** 0.5
    assert 0.02 < norm < 1e2
    factor = min(1.0, limit / norm)
    expected = [p.detach() - 100 * factor * g for p, g in zip(weights, gradients, strict=True)]
    step.update(images, targets)
    torch.testing.assert_close([p.detach() for p in weights], expected, rtol=1e-4, atol=1e-6)


def test_each_step_draws_its_own_augmentation() -> None:
    step = bare_step(small(Path("unused")))
    images, labels = torch.randint(256, (8, 3, 32, 32), dtype=torch.uint8), torch.arange(8)
    first, again = (step.prepare(images, labels)[0] for _ in range(2))
    step.state.step = 1
    later, _ = step.prepare(images, labels)
    assert torch.equal(first, again) and not torch.equal(first, later)
