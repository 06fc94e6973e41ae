"""Fine-tuning: learning rates by layer, a frozen backbone, checkpointed blocks."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer as TimmViT
from timm.optim import param_groups_layer_decay
from torch import Tensor, nn

from models import PLAIN
from small_runs import StopAt, make_loop, make_step, small
from vit.data.config import AugmentConfig
from vit.data.datasets import load_training
from vit.data.sampling import epoch_batches
from vit.distributed.stop import Stopped
from vit.model.vit import VisionTransformer
from vit.training.config import OptimConfig
from vit.training.optim import build_optimizers

RATES = {
    "lr": 0.01, "weight_decay": 0.5,
    "muon_lr": 0.02, "muon_weight_decay": 0.75, "muon_momentum": 0.9,
}  # fmt: skip
TINY = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 3, "num_heads": 2}
STILL = {"crop_padding": 0, "flip": False, "erasing": 0.0, "mixup": 0.0, "cutmix": 0.0}
CONV = {"class_token": False, "global_pool": "avg", "stem": "conv", "mlp_conv": True}


def build_vit(**changes) -> VisionTransformer:
    torch.manual_seed(0)
    return VisionTransformer(**(PLAIN | TINY | {"num_classes": 3} | changes))


def names(model: nn.Module, groups: list[dict]) -> dict[str, dict]:
    """Return the group of each parameter by name."""
    by_id = {id(parameter): group for group in groups for parameter in group["params"]}
    return {key: by_id[id(value)] for key, value in model.named_parameters() if id(value) in by_id}


def of_timm(model: nn.Module) -> dict[str, tuple[float, float]]:
    """Return timm's learning rate and weight decay of each parameter."""
    groups = param_groups_layer_decay(
        model, 0.5, no_weight_decay_list=model.no_weight_decay(), layer_decay=0.7
    )
    return {
        key: (0.01 * group["lr_scale"], group["weight_decay"])
        for key, group in names(model, groups).items()
    }


def of_adamw(model: nn.Module) -> dict[str, tuple[float, float]]:
    (adamw,) = build_optimizers(model, OptimConfig(name="adamw", **RATES, layer_decay=0.7))
    return {
        key: (group["initial_lr"], group["weight_decay"])
        for key, group in names(model, adamw.param_groups).items()
    }


@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"reg_tokens": 2, "init_values": 0.1, "qk_norm": True},
        {"class_token": False, "global_pool": "avg"},
    ],
    ids=["class token", "all", "mean"],
)
def test_rates_by_layer_are_timms_for_its_model_and_ours(variant):
    model = build_vit(**variant)
    theirs = TimmViT(**TINY, num_classes=3, mlp_ratio=4, **{"global_pool": "token", **variant})
    expected = of_timm(theirs)
    assert of_adamw(model) == of_timm(model) == of_adamw(theirs) == expected
    assert expected["head.weight"] == (0.01, 0.5)
    assert expected["blocks.2.attn.qkv.weight"][0] == pytest.approx(0.01 * 0.7)
    assert expected["patch_embed.proj.weight"][0] == pytest.approx(0.01 * 0.7**4)


def test_muon_and_its_adamw_both_have_rates_by_layer():
    model = build_vit(**CONV)  # which timm does not have
    optimizers = build_optimizers(model, OptimConfig(name="muon", **RATES, layer_decay=0.7))
    expected = of_timm(model)
    assert of_adamw(model) == expected
    assert expected["blocks.0.mlp.conv.conv.weight"][0] == pytest.approx(0.01 * 0.7**3)
    for optimizer, lr in zip(optimizers, (0.01, 0.02), strict=True):
        assert optimizer.param_groups[0]["initial_lr"] == max(
            group["initial_lr"] for group in optimizer.param_groups
        )  # the rate that is logged
        for key, group in names(model, optimizer.param_groups).items():
            assert group["initial_lr"] / lr == pytest.approx(expected[key][0] / 0.01), key
            assert group["weight_decay"] == (0.75 if lr == 0.02 else expected[key][1]), key


def frozen(out: Path, **changes):
    """A linear probe of a model with batch norm, without augmentation."""
    parts = {
        "augment": STILL,
        "train": {"freeze": "backbone", "small_share": 0, "epochs": 2},
        "track": {"probes": 0},
    }
    return small(
        out, **{part: parts.get(part, {}) | changes.get(part, {}) for part in [*parts, *changes]}
    )


def train_steps(step, number: int) -> list[Tensor]:
    training, _ = load_training(small(Path("unused")).data, 0)
    batches = epoch_batches(len(training), (5, 64), 0, 0)[:number]
    return [step(*batch) for batch in step.inputs(training).batches(batches)]


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_a_frozen_backbone_keeps_everything_but_the_head(tmp_path, name):
    config = frozen(tmp_path, augment={"crop_padding": 2}, optim={"name": name, "layer_decay": 0.7})
    step = make_step(config)
    assert step.features is None  # cropped differently in every epoch
    model, before = (
        step.state.model,
        {k: v.clone() for k, v in step.state.model.state_dict().items()},
    )
    train_steps(step, 3)
    changed = {k for k, v in model.state_dict().items() if not torch.equal(v, before[k])}
    assert changed == {"head.weight", "head.bias"}  # batch-norm statistics stay too
    (adamw,) = step.state.optimizers
    assert len(adamw.state) == 2
    assert {id(p) for group in adamw.param_groups for p in group["params"]} == {
        id(model.head.weight), id(model.head.bias)
    }  # fmt: skip


def test_features_computed_once_train_the_same_head(tmp_path):
    once = make_step(frozen(tmp_path))
    assert once.features is not None and once.features.shape == (320, 24)
    other = make_step(frozen(tmp_path))
    always = replace(other, features=None, forward=other.state.model)
    points = [train_steps(step, 5) for step in (once, always)]
    torch.testing.assert_close(*points, rtol=1e-5, atol=1e-6)
    weights = [step.state.model.head.weight for step in (once, always)]
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-6)


def test_features_are_computed_at_each_step_if_anything_differs(tmp_path):
    for train in ({"small_share": 0.5}, {"freeze": "none"}):
        assert make_step(frozen(tmp_path, train=train)).features is None
    for change in (
        {"crop_padding": 1}, {"flip": True}, {"rand_ops": 1}, {"erasing": 0.1}, {"mixup": 0.1},
        {"cutmix": 0.1},
    ):  # fmt: skip
        assert AugmentConfig(**STILL | change).changes_images
    assert not AugmentConfig(**STILL | {"mixup": 0.8, "mix_share": 0.0}).changes_images


@pytest.mark.parametrize("augment", [{}, {"crop_padding": 2}], ids=["once", "each step"])
def test_a_linear_probe_resumes_bit_for_bit(tmp_path, augment):
    def run(name: str, stop_at: int = 0) -> nn.Module:
        (tmp_path / name).mkdir(exist_ok=True)
        stop = StopAt(stop_at)
        loop = make_loop(frozen(tmp_path / name, augment=augment, data={"val_size": 0}), stop=stop)
        stop.state = loop.step.state
        loop.run()
        return loop.step.state.model

    whole = run("whole")
    with pytest.raises(Stopped):
        run("parts", stop_at=5)
    resumed = run("parts")
    for key, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[key]), key


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_checkpointed_blocks_give_the_same_gradients_from_less_memory(precision):
    drops = {"attn_drop_rate": 0.1, "proj_drop_rate": 0.1, "drop_path_rate": 0.3, "drop_rate": 0.1}
    images, labels = torch.randn(6, 3, 8, 8), torch.arange(6) % 3
    found = []
    for enable in (False, True):
        model = build_vit(**CONV, **drops, depth=6).train()
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
