"""Fine-tuning: a frozen backbone, and checkpointed blocks."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models import PLAIN
from small_runs import STILL, make_step, small
from vit.data.config import AugmentConfig
from vit.data.datasets import load_training
from vit.data.sampling import epoch_batches
from vit.model.vit import VisionTransformer

DROPS = {"attn_drop_rate": 0.1, "proj_drop_rate": 0.1, "drop_path_rate": 0.3, "drop_rate": 0.1}
DEEP = {
    **PLAIN, **DROPS, "img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 6, "num_heads": 2,
    "num_classes": 3, "class_token": False, "global_pool": "avg", "stem": "conv", "mlp_conv": True,
}  # fmt: skip
# A linear probe of a model with batch norm, without augmentation.
FROZEN = {
    "augment": STILL,
    "train": {"freeze": "backbone", "small_share": 0, "epochs": 2},
    "track": {"probes": 0},
}


def train_steps(step, number: int) -> list[Tensor]:
    training, _ = load_training(small(Path("unused")).data, 0)
    batches = epoch_batches(len(training), (5, 64), 0, 0)[:number]
    return [step(*batch) for batch in step.batches(training, batches)]


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_a_frozen_backbone_keeps_everything_but_the_head(tmp_path, name):
    changes = {"augment": {"crop_padding": 2}, "optim": {"name": name, "layer_decay": 0.7}}
    config = small(tmp_path, FROZEN, changes)
    step = make_step(config)
    assert step.features is None  # cropped differently in every epoch
    model = step.state.model
    before = {k: v.clone() for k, v in model.state_dict().items()}
    train_steps(step, 3)
    changed = {k for k, v in model.state_dict().items() if not torch.equal(v, before[k])}
    assert changed == {"head.weight", "head.bias"}  # batch-norm statistics stay too
    (adamw,) = step.state.optimizers
    assert len(adamw.state) == 2
    assert {id(p) for group in adamw.param_groups for p in group["params"]} == {
        id(model.head.weight), id(model.head.bias)
    }  # fmt: skip


def test_features_computed_once_train_the_same_head(tmp_path):
    once = make_step(small(tmp_path, FROZEN))
    assert once.features is not None and once.features.shape == (320, 24)
    other = make_step(small(tmp_path, FROZEN))
    always = replace(other, features=None, forward=other.state.model)
    points = [train_steps(step, 5) for step in (once, always)]
    torch.testing.assert_close(*points, rtol=1e-5, atol=1e-6)
    weights = [step.state.model.head.weight for step in (once, always)]
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-6)


def test_features_are_computed_at_each_step_if_anything_differs(tmp_path):
    for train in ({"small_share": 0.5}, {"freeze": "none"}):
        assert make_step(small(tmp_path, FROZEN, train=train)).features is None
    for change in (
        {"crop_padding": 1}, {"flip": True}, {"rand_ops": 1}, {"erasing": 0.1}, {"mixup": 0.1},
        {"cutmix": 0.1},
    ):  # fmt: skip
        assert AugmentConfig(**STILL | change).changes_images
    assert not AugmentConfig(**STILL | {"mixup": 0.8, "mix_share": 0.0}).changes_images


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_checkpointed_blocks_give_the_same_gradients_from_less_memory(precision):
    images, labels = torch.randn(6, 3, 8, 8), torch.arange(6) % 3
    found = []
    for enable in (False, True):
        torch.manual_seed(0)
        model = VisionTransformer(**DEEP).train()
        model.set_grad_checkpointing(enable)
        stored: dict[int, int] = {}

        def keep(tensor: Tensor, stored: dict[int, int] = stored) -> Tensor:
            stored[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        torch.manual_seed(1)
        with (
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
            torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16),
        ):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        gradients = {key: value.grad for key, value in model.named_parameters()}
        found.append((gradients, torch.rand(1), sum(stored.values())))
    (plain, drawn, much), (checkpointed, drawn_too, little) = found
    for key, gradient in plain.items():
        assert torch.equal(gradient, checkpointed[key]), key
    assert torch.equal(drawn, drawn_too)  # random numbers go on where they were
    assert little < much / 2
