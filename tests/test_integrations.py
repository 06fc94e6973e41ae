"""Callbacks for other training loops, in short trainings with the packages themselves."""

import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter

import vit
from vit.data.shapes import KINDS, draw_shapes
from vit.integrations import AttentionLog
from vit.model.attention_model import require_attention
from vit.tensorboard_plugin.encoding import decode_details, decode_weights

pytestmark = [
    pytest.mark.slow,  # importing the packages takes seconds
    pytest.mark.filterwarnings("ignore"),  # of the packages
]

ROOT = Path(__file__).resolve().parent.parent
_, LIGHTNING, TRANSFORMERS = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs/tensorboard.md").read_text(), flags=re.DOTALL
)
COUNT, STEPS = 256, 6
IMAGES, LABELS, _ = draw_shapes(COUNT, 0)
GIVEN = {"images": IMAGES[:2], "mean": (0.4,) * 3, "std": (0.2,) * 3, "names": KINDS}


def normalized(images: Tensor) -> Tensor:
    return (images / 255 - 0.4) / 0.2


def run_example(code: str, changes: dict[str, str], **given: Any) -> None:
    """Run code of the guide with shorter settings."""
    for before, after in {"every=100": "every=3", **changes}.items():
        assert before in code
        code = code.replace(before, after)
    exec(code, {**GIVEN, **given})


def check(
    folder: Path, weights: Sequence[Tensor], logits: Tensor, prefix: int, readout: str
) -> None:
    """Check the records; weights and logits are those of the model after the last step."""
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
    for number in range(2):
        tag = f"attention_{number:02d}"
        found = {part: events.Tensors(f"{tag}{part}") for part in ("", "/weights")}
        assert [event.step for event in found[""]] == [3, 6]
        details, stored = (event[-1].tensor_proto.string_val[0] for event in found.values())
        shown = decode_details(details)
        assert (shown.grid, len(shown.prefix), shown.classes) == ((4, 4), prefix, [*KINDS])
        assert shown.readout == readout
        assert [index for index, _ in shown.top] == logits[number].topk(5).indices.tolist()
        codes, scale = decode_weights(stored)
        expected = torch.stack([layer[number] for layer in weights]).numpy()
        assert np.abs(codes * scale[..., None] - expected).max() <= expected.max() / 510 + 1e-6


def test_attention_that_cannot_be_shown_does_not_end_a_training(capsys):
    found = {"weights": torch.ones(1, 2, 1, 17, 17), "grid": (4, 4), "num_prefix_tokens": 1}
    AttentionLog(IMAGES[:2], 3).add(object(), torch.nn.Linear(2, 2), 3, lambda *_: found)
    assert "the attention of step 3 is not logged: weights: rows" in capsys.readouterr().err


def small_model(seed: int = 0, **changes: Any) -> vit.VisionTransformer:
    torch.manual_seed(seed)
    options = {"img_size": 32, "num_classes": 10, "patch_size": 8, "embed_dim": 24, "depth": 2}
    return vit.VisionTransformer(**options | {"in_chans": 3, "num_heads": 2} | changes)


def test_the_model_that_is_trained_is_logged_or_has_to_be_named(tmp_path):
    """Beside a frozen teacher, which comes first, and an average of the weights."""
    loggers = pytest.importorskip("lightning.pytorch.loggers")
    from vit.integrations.lightning import AttentionCallback

    module = torch.nn.Module()
    module.teacher, module.student = small_model(1).requires_grad_(False), small_model(2)

    def log(is_first: bool = True, **options: Any) -> Tensor:
        """Return the probabilities that the first of several processes, or another, has logged."""
        logger = loggers.TensorBoardLogger(tmp_path, name=f"run_{len([*tmp_path.iterdir()])}")
        trainer = SimpleNamespace(fast_dev_run=False, is_global_zero=is_first, global_step=3)
        trainer.loggers = [loggers.CSVLogger(tmp_path), logger]
        callback, reads = AttentionCallback(IMAGES[:2], every=3, **options), list[int]()
        callback.on_train_start(trainer, module)
        with register_module_forward_hook(lambda *_: reads.append(1)):
            callback.on_train_batch_end(trainer, module)
        logger.experiment.close()
        events = EventAccumulator(logger.log_dir, size_guidance={"tensors": 0}).Reload()
        tags = [tag for tag in events.Tags()["tensors"] if tag == "attention_00"]
        details = [events.Tensors(tag)[0].tensor_proto.string_val[0] for tag in tags]
        assert reads  # by all processes, which may share the weights
        return torch.tensor([share for one in details for _, share in decode_details(one).top])

    def top(model: torch.nn.Module) -> Tensor:
        pixels = (IMAGES[:1] / 255 - 0.5) / 0.5
        return model.eval()(pixels).softmax(dim=1)[0].topk(5).values

    torch.testing.assert_close(log(), top(module.student), atol=1e-4, rtol=0)
    module.average = torch.optim.swa_utils.AveragedModel(small_model(3))
    with pytest.raises(ValueError, match=r"student, average.module are all trained; choose .*stud"):
        log()
    assert not log(is_first=False, model=module.average.module).numel()
    named = log(model=module.average.module)
    torch.testing.assert_close(named, top(module.average.module), atol=1e-4, rtol=0)
    module.requires_grad_(False)
    del module.teacher, module.average  # a probe is trained on the only model
    torch.testing.assert_close(log(), top(module.student), atol=1e-4, rtol=0)


def test_a_model_that_cannot_be_logged_is_refused_when_the_training_starts():
    pytest.importorskip("lightning.pytorch")
    pytest.importorskip("transformers", minversion="5.0")
    from vit.integrations import lightning, transformers

    convolution, trainer = torch.nn.Conv2d(3, 3, 3), SimpleNamespace(fast_dev_run=True, loggers=[])
    with pytest.raises(ValueError, match=r"^Conv2d cannot be logged: attention maps are not avail"):
        lightning.AttentionCallback(IMAGES[:1]).on_train_start(trainer, convolution)
    callback = transformers.AttentionCallback(None, IMAGES[:1])
    with pytest.raises(ValueError, match=r"^Conv2d cannot be logged: .* no attribute 'config'"):
        callback.on_train_begin(None, None, None, model=convolution)
    assert convolution.training
    trainer.fast_dev_run = False
    with pytest.raises(ValueError, match="needs a trainer with a TensorBoardLogger"):
        lightning.AttentionCallback(IMAGES[:1]).on_train_start(trainer, small_model())


def lightning_module(model: torch.nn.Module) -> Any:
    """A module of Lightning that trains a model of shapes, and keeps the losses."""
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses = model, list[float]()

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            loss = cross_entropy(self.model(normalized(batch[0])), batch[1])
            self.losses.append(float(loss))
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    return Module()


def test_lightning(tmp_path, monkeypatch):
    lightning = pytest.importorskip("lightning.pytorch")

    def begin() -> dict[str, Any]:
        torch.manual_seed(0)
        model = timm.create_model(
            "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=24,
            num_heads=2, num_classes=len(KINDS), proj_drop_rate=0.2,
        )  # fmt: skip
        model.blocks[0].eval()  # as a frozen part
        loader = DataLoader(TensorDataset(IMAGES, LABELS), 16)
        return {"module": lightning_module(model), "loader": loader}

    options: dict[str, Any] = {
        "max_steps": STEPS, "accumulate_grad_batches": 2, "accelerator": "cpu",
        "enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False,
    }  # fmt: skip
    plain = begin()
    lightning.Trainer(**options, logger=False).fit(plain["module"], plain["loader"])
    logged = begin()  # as the random numbers begin again
    monkeypatch.chdir(tmp_path)
    run_example(LIGHTNING, {"max_epochs=10": "**options"}, options=options, **logged)
    module = logged["module"]
    assert module.losses == plain["module"].losses and len(module.losses) == 2 * STEPS
    with torch.no_grad():
        reader = require_attention(module.model.eval())
        logits, weights, _ = reader.forward_intermediates(normalized(IMAGES[:2]))
    check(tmp_path / "runs/lightning_logs/version_0", weights, logits, 1, "class_token")


@pytest.mark.parametrize(
    ("name", "prefix", "readout"),
    [("ViT", 1, "class_token"), ("Beit", 1, "mean"), ("Siglip", 0, "mean")],
)
def test_transformers(name, prefix, readout, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers", minversion="5.0")
    pytest.importorskip("accelerate")
    values = {
        "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 10,
        "intermediate_size": 48, "image_size": 32, "patch_size": 8, "hidden_dropout_prob": 0.1,
    }  # fmt: skip

    photos = [
        {"pixel_values": image, "labels": int(label)}
        for image, label in zip(normalized(IMAGES), LABELS, strict=True)
    ]

    def begin() -> dict[str, Any]:
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")
        made = config(vision_config=values, num_labels=10) if name == "Siglip" else config(**values)
        model = getattr(transformers, f"{name}ForImageClassification")(made)
        arguments = transformers.TrainingArguments(
            str(tmp_path / "out"), max_steps=STEPS, per_device_train_batch_size=16, use_cpu=True,
            report_to=[], save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        return {"model": model, "arguments": arguments, "photos": photos}

    plain = begin()
    transformers.Trainer(plain["model"], plain["arguments"], train_dataset=photos).train()
    logged = begin()
    monkeypatch.chdir(tmp_path)
    run_example(TRANSFORMERS, {}, **logged)
    model = logged["model"]
    assert model.config._attn_implementation == plain["model"].config._attn_implementation
    for key, value in plain["model"].state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model.eval()(pixel_values=normalized(IMAGES[:2]), output_attentions=True)
    check(tmp_path / "runs/finetuned", output.attentions, output.logits, prefix, readout)


def test_a_callback_may_have_a_tag_but_not_another_step(tmp_path):
    log = AttentionLog(IMAGES[:1], every=1, tag="validation", grid=(1, 1), num_prefix_tokens=0)
    with SummaryWriter(tmp_path) as writer:
        log.add(writer, nn.Linear(1, 1), 1, lambda *_: {"weights": torch.ones(1, 1, 1, 1, 1)})
    events = EventAccumulator(str(tmp_path)).Reload()
    assert any(tag.startswith("validation") for tag in events.Tags()["tensors"])
    with pytest.raises(TypeError, match=r"multiple values for .*argument 'step'"):
        AttentionLog(IMAGES[:1], step=1)
