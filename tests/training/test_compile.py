"""Compiled training: when it is chosen, that it computes the same, and that it resumes exactly."""

from pathlib import Path
from typing import Any

import pytest
import torch
from einops import rearrange

from small_runs import CPU, assert_same_state, begin, changed, make_step, metrics, small
from vit.classifier import Classifier
from vit.commands.train import load_data, train
from vit.config import Config
from vit.model.dropout import image_keys, keyed_dropout
from vit.model.vit import VisionTransformer
from vit.run.checkpoint import latest_checkpoint
from vit.training import build
from vit.training.build import MANY_STEPS, choose_compilation, compiled, missing_tool
from vit.training.loop import evaluating
from vit.training.step import TrainingStep

pytestmark = pytest.mark.usefixtures("few_test_images")
CAN_COMPILE = pytest.mark.skipif(missing_tool(CPU) is not None, reason="there is no compiler")


def broken(graph: torch.fx.GraphModule, _: Any) -> Any:
    """A compiler that fails."""
    raise RuntimeError("file too short")


def choose(choice: Any = "auto", began: bool | None = None, steps: int = MANY_STEPS) -> bool:
    return choose_compilation(choice, began, CPU, steps)


@CAN_COMPILE
def test_auto_compiles_a_run_that_gains_from_it_and_a_run_goes_on_as_it_began():
    assert choose() and not choose(steps=100)
    assert choose(True, steps=100) and not choose(False)
    assert choose(began=True, steps=100) and not choose(began=False)
    assert choose(True, began=False) and not choose(False, began=True)


def test_without_a_compiler_a_run_that_asks_for_it_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr("vit.training.build.shutil.which", lambda name: None)
    with pytest.raises(ValueError, match=r"^train\.compile: .*--train\.compile false$"):
        train(small(tmp_path / "run", train={"compile": True}))
    assert not list((tmp_path / "run").glob("*.yaml"))
    with pytest.raises(ValueError, match=r"--train\.compile false --resume\.allow_changes$"):
        choose(began=True)
    assert not choose()


def test_a_gpu_needs_triton_and_a_compiler_of_c(monkeypatch):
    cuda, mps = torch.device("cuda"), torch.device("mps")
    monkeypatch.setattr("vit.training.build.sys.platform", "linux")
    monkeypatch.setattr("vit.training.build.shutil.which", lambda name: None)
    monkeypatch.setattr("vit.training.build.importlib.util.find_spec", lambda name: None)
    assert missing_tool(cuda) == "triton" and missing_tool(mps) is None
    monkeypatch.setattr("vit.training.build.importlib.util.find_spec", lambda name: name)
    assert missing_tool(cuda) == "a C compiler"


@torch._dynamo.config.patch(suppress_errors=False)  # put back at the end
def test_failed_compilation_does_not_end_a_run_that_did_not_ask_for_it(monkeypatch, tmp_path):
    def compiled(forward: torch.nn.Module, by_block: bool) -> Any:
        torch._dynamo.reset()
        return torch.compile(forward, backend=broken)

    monkeypatch.setattr(build, "compiled", compiled)
    monkeypatch.setattr(build, "choose_compilation", lambda choice, *_: choice is not False)
    config = tiny(tmp_path / "run")
    batch = torch.zeros(16, 3, 32, 32), torch.eye(10)[torch.arange(16) % 10]
    results = [
        make_step(changed(config, train={"compile": choice})).update(*batch)
        for choice in ("auto", False)
    ]
    assert torch.equal(*results)
    asked = make_step(changed(config, train={"compile": True}))
    with pytest.raises(RuntimeError, match="file too short"):
        asked.update(*batch)


def tiny(out: Path, **train: Any) -> Config:
    """A run of two epochs of three steps, with dropout; of one image size, to compile once."""
    return small(
        out,
        data={"val_size": 16, "train_size": 48},
        model={"depth": 1, "embed_dim": 12, "num_heads": 1, "stem": "linear", "mlp_conv": False},
        train={"epochs": 2, "batch_size": 16, "accumulate": 1, "small_scale": 1.0, **train},
        track={"probes": 0, "every": 1},
    )


def test_a_run_compiles_once_even_if_its_time_budget_changes_its_settings(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(build, "missing_tool", lambda _: None)
    monkeypatch.setattr(build, "compiled", lambda forward, by_block: forward)
    for name in ("WARMUP_STEPS", "TIMED_STEPS"):
        monkeypatch.setattr(build, name, 1)
    config = tiny(tmp_path, compile=True, budget_minutes=1.0)
    plan, run = changed(config, augment={"crop_padding": 3}), begin(config)
    run, step = build.build_step(run, load_data(run)[0], plans={0.0: plan})
    assert run.config == plan and step.compiled
    printed = capsys.readouterr().out
    assert printed.count("budget ") == printed.count("compiling the model") == 1


@pytest.mark.slow
@CAN_COMPILE
def test_a_compiled_run_is_an_eager_one_up_to_rounding_and_resumes_bit_for_bit(
    tmp_path, monkeypatch, capsys
):
    """Dropout draws the same numbers. The second part is compiled because the first one was.

    What evaluates is not compiled.
    """
    sizes, logits = list[int](), Classifier.logits
    part_of_a_model = torch.compile(torch.neg, backend=broken)

    def evaluated(classifier: Classifier, images: Any, *given: Any) -> torch.Tensor:
        sizes.append(len(part_of_a_model(torch.zeros(len(images)))))
        return logits(classifier, images, *given)

    eager, whole, parts = (
        tiny(tmp_path / name, compile=name != "eager") for name in ("eager", "whole", "parts")
    )
    train(eager)
    assert "float32, not compiled\n" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr(Classifier, "logits", evaluated)
        train(whole)
    assert {*sizes} == {16, 200}  # held-out images, and test images
    assert "float32, compiled\n" in capsys.readouterr().out
    losses = [
        [row["train/loss"] for row in metrics(Path(run.out)) if "train/loss" in row]
        for run in (eager, whole)
    ]
    assert len(losses[0]) == 6 and losses[0] == pytest.approx(losses[1], rel=1e-4)
    call = TrainingStep.__call__

    def stop_early(self: Any, *batch: Any) -> Any:
        if self.state.step == 3:
            raise KeyboardInterrupt
        return call(self, *batch)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(TrainingStep, "__call__", stop_early)
        train(parts)
    train(changed(parts, train={"compile": "auto"}))
    assert "float32, compiled\n" in capsys.readouterr().out
    left, right = latest_checkpoint(Path(whole.out)), latest_checkpoint(Path(parts.out))
    assert left is not None and right is not None and left.environment["compiled"] is True
    assert_same_state(vars(left), vars(right))


class Other(torch.Tensor):
    """Another kind of tensor, like those of numpy or of torch.export."""


@CAN_COMPILE
def test_a_model_is_not_compiled_again_after_another_kind_of_tensor():
    """Logging attention has one. The second graph was a quarter slower, for the whole run."""
    torch._dynamo.reset()
    model = VisionTransformer(
        img_size=8, in_chans=3, num_classes=3, patch_size=4, embed_dim=8, depth=1, num_heads=2,
        stem="linear",
    )  # fmt: skip
    forward, images = compiled(model), torch.randn(2, 3, 8, 8)
    forward(images)
    rearrange(torch.eye(2).as_subclass(Other), "n m -> m n")
    with torch._dynamo.config.patch(error_on_recompile=True):
        forward(images)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo's
def test_blocks_share_a_graph_for_each_size_and_evaluation_adds_none():
    """Otherwise torch gives up compiling after eight of them, and training is slow in silence."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = VisionTransformer(
        img_size=16, in_chans=3, num_classes=3, patch_size=4, embed_dim=8, depth=12, num_heads=2,
        stem="linear", drop_path_rate=0.1,
    )  # fmt: skip
    for block in model.blocks:
        block.compile(dynamic=False, backend=backend)
    torch._dynamo.reset()
    for size in (8, 16, 8, 16):
        with keyed_dropout(model, image_keys(seed=size, first=0, count=4)):
            model(torch.randn(4, 3, size, size)).sum().backward()
    assert len(graphs) == 2 * 2  # for each size, the first block drops nothing and the others do
    model.eval()
    with evaluating():
        for count in (1, 2, 3):
            model(torch.randn(count, 3, 16, 16), need_weights=True)
    assert len(graphs) == 4
