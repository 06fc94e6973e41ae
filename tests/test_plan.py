"""benchmarks/scale/plan.py agrees with what real steps compute, keep and send."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.flop_counter import FlopCounterMode

import exchanges
from benchmarks.scale import plan, planning, tracing
from models import PLAIN
from small_runs import ROOT, counts_fused_kernel
from vit.distributed.shard import shard
from vit.model.config import ModelConfig
from vit.model.vit import VisionTransformer
from vit.training.config import Config

SMALL: dict[str, Any] = {
    **PLAIN, "img_size": 32, "patch_size": 4, "embed_dim": 48, "depth": 3, "num_heads": 3,
    "num_classes": 10, "reg_tokens": 2,
}  # fmt: skip
CONV: dict[str, Any] = {**SMALL, "stem": "conv", "mlp_conv": True, "drop_path_rate": 0.2}
IMAGE = (3, 32, 32)


fused = pytest.mark.parametrize("kernel", ["fused"], indirect=True)


def on_meta(**arguments: Any) -> VisionTransformer:
    with torch.device("meta"):
        return VisionTransformer(**arguments).train()


@counts_fused_kernel
@fused
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("arguments", [SMALL, CONV], ids=["linear", "conv"])
def test_flops_are_those_of_a_real_step(
    kernel: str, arguments: dict[str, Any], checkpointed: bool
) -> None:
    planned = tracing.count_flops(on_meta(**arguments), IMAGE, checkpointed)
    model = VisionTransformer(**arguments).train()
    model.set_grad_checkpointing(checkpointed)
    with FlopCounterMode(display=False, custom_mapping=tracing.FORMULAS) as counter:
        loss = model(torch.randn(3, *IMAGE)).sum()
        forward = counter.get_total_flops()
        loss.backward()
    assert planned[0] == pytest.approx(forward / 3, rel=0.01)
    assert planned[1] == pytest.approx((counter.get_total_flops() - forward) / 3, rel=0.01)


def test_gradients_of_a_convolution_take_twice_its_flops() -> None:
    """For groups too, which torch's own formula ignores."""
    for groups, formulas in ((1, {}), (1, tracing.FORMULAS), (4, tracing.FORMULAS)):
        conv = nn.Conv2d(8, 8, 3, padding=1, groups=groups)
        with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
            output = conv(torch.randn(2, 8, 5, 5, requires_grad=True))
            forward = counter.get_total_flops()
            output.sum().backward()
        assert forward == 2 * (2 * 8 * 5 * 5) * (8 // groups * 9)
        assert counter.get_total_flops() == 3 * forward


# Millions of parameters, as in the table of timm's results.
PUBLISHED = {
    "vit_tiny": 5.72, "vit_small": 22.05, "vit_base": 86.57, "vit_large": 304.33,
    "vit_huge": 632.05, "vit_giant": 1012.61,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_are_those_of_the_papers(name: str) -> None:
    config, _ = plan.parse_train(plan.plain(name))
    model = tracing.build(config, classes=1000)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(
        1e6 * PUBLISHED[name], rel=1e-3
    )
    assert len(model.blocks[0].mlp.fc1.weight) == (
        6144 if name == "vit_giant" else 4 * model.head.in_features
    )


def test_flops_of_vit_base_are_those_of_the_formula() -> None:
    """A block has 12 D² weights, and attention takes two products of N x N x D."""
    config, _ = plan.parse_train(plan.plain("vit_base"))
    forward, backward = tracing.count_flops(tracing.build(config, 1000), (3, 224, 224), False)
    patches, tokens, dim = 196, 197, 768
    block = tokens * 12 * dim**2 + 2 * tokens**2 * dim
    products = 12 * block + patches * 3 * 16**2 * dim + dim * 1000
    assert forward == pytest.approx(2 * products, rel=1e-3)
    assert backward == pytest.approx(2 * forward, rel=0.02)  # flash attention repeats a product


def norms_in_float32(model: nn.Module) -> None:
    """Let layer norms compute in float32 under autocast on a CPU, as they do on a GPU."""

    def normalize(norm: nn.LayerNorm, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return F.layer_norm(x.float(), norm.normalized_shape, norm.weight, norm.bias, norm.eps)

    for norm in model.modules():
        if isinstance(norm, nn.LayerNorm):
            norm.forward = normalize.__get__(norm)  # type: ignore[method-assign]


@fused
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("arguments", [SMALL, CONV], ids=["linear", "conv"])
def test_activations_are_those_that_a_real_step_saves(
    kernel: str, arguments: dict[str, Any], precision: torch.dtype
) -> None:
    planned = tracing.trace_activations(on_meta(**arguments), IMAGE, torch.float32, precision)
    model = VisionTransformer(**arguments).train()
    norms_in_float32(model)
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    batch, saved = 16, {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with torch.autocast("cpu", precision, enabled=precision != torch.float32):
            logits = model(torch.randn(batch, *IMAGE))
        loss = F.cross_entropy(logits.float(), torch.rand(batch, 10))
    real = sum(storage.nbytes() for start, storage in saved.items() if start not in own)
    assert loss.isfinite()
    assert batch * planned.stored + planned.casts == pytest.approx(real, rel=0.01)


def test_checkpointed_blocks_save_their_inputs_and_one_block() -> None:
    """From 3 to 12 blocks, only inputs are added: a token has 48 numbers of 2 bytes."""
    few, many = (
        tracing.trace_activations(on_meta(**{**SMALL, "depth": depth}), IMAGE, torch.float32)
        for depth in (3, 12)
    )
    tokens = 64 + 1 + 2
    assert many.checkpointed - few.checkpointed == 9 * tokens * 48 * 2
    assert many.stored - few.stored > 10 * (many.checkpointed - few.checkpointed)


def payloads(planned: list[Any]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for one in planned:
        sums[one.kind] += one.payload * (one.sent > 0)
    return {kind: number for kind, number in sums.items() if number}


@pytest.mark.slow
def test_two_processes_exchange_what_is_planned(tmp_path: Path) -> None:
    words = [sys.executable, exchanges.__file__]
    others = [
        subprocess.Popen(
            [*words, str(rank), str(tmp_path / "meeting")],
            cwd=ROOT, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for rank in (0, 1)
    ]  # fmt: skip
    printed = [process.communicate(timeout=300)[0] for process in others]
    assert [process.returncode for process in others] == [0, 0]
    for (parallel, accumulate, _), real in zip(
        exchanges.CASES, json.loads(printed[0]), strict=True
    ):
        cluster = planning.Cluster(2, 1, parallel)
        planned = planning.transfers(on_meta(**exchanges.TINY), cluster, accumulate, [])
        assert payloads(planned) == pytest.approx(real, rel=0.01), (parallel, accumulate)


@pytest.fixture
def fake_world() -> Iterator[None]:
    """Make this process the first of 512, of which the others do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=512, store=FakeStore())
    yield
    dist.destroy_process_group()


def of_adamw(model: nn.Module) -> int:
    """Return the bytes of AdamW's state in this process after a step."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    optimizer.step()
    states = [
        state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")
    ]
    return sum(state.to_local().nbytes for state in states)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["shard", "hybrid"])
def test_512_processes_hold_and_exchange_what_is_planned(fake_world: None, parallel: str) -> None:
    """ViT-g, without values, divided among 64 hosts with 8 GPUs each."""
    config, _ = plan.parse_train(plan.plain("vit_giant"))
    cluster = planning.Cluster(512, 64, parallel)
    model = tracing.build(config, 1000)
    nothing = tracing.Activations(0, 0, 0)
    rows = planning.memory(model, config, cluster, nothing, [])
    planned = payloads(planning.transfers(model, cluster, 1, []))
    sizes, names = ((64, 8), ("hosts", "gpus")) if parallel == "hybrid" else ((512,), ("gpus",))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    shard(model, mesh, torch.bfloat16)
    local = [parameter.to_local() for parameter in model.parameters()]
    assert sum(shard.nbytes for shard in local) == rows["weights (float32)"]
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        assert planned == exchanges.exchanged(model, torch.empty(1, 3, 224, 224))
        gradients = [parameter.grad.to_local() for parameter in model.parameters()]
        assert sum(gradient.nbytes for gradient in gradients) == rows["gradients (float32)"]
        assert of_adamw(model) == rows["optimizer (float32)"]


def test_links_within_and_between_hosts_are_used_at_the_same_time() -> None:
    """Eight bytes from each of 16 GPUs on two hosts: a ring sends 15 of 16 parts, twice."""
    one = planning.Transfer("", "all_reduce", 8, gpus=16, hosts=2, phase="last")
    assert (one.sent, one.between) == (15.0, 15 / 8)
    assert planning.Transfer("", "all_gather", 8, gpus=8, hosts=1, phase="last").within == 7
    _, early, last, update = planning.phases((1.0, 6.0), 2.0, [one], 3, within=1.0, between=0.1)
    assert (early.computing, last.computing, early.sending) == (4.0, 2.0, 0.0)
    assert last.seconds == pytest.approx(18.75) and update.seconds == 2.0


MISTAKES = [
    ("--hosts 3", "--hosts: 3 is not allowed; it must be a divisor of --gpus=8"),
    ("--mfu 40", "--mfu: 40.0 is not allowed; it must be more than 0 and up to 1"),
    ("--gpus 0", "--gpus: 0 is not allowed; it must be more than 0"),
    ("--batch_size 100", "train.batch_size: 100 cannot be divided among 8 processes"),
    ("--image_size 225", "data.image_size: 225 is not allowed; it must be a multiple of"),
    ("--config nowhere", "config not found: nowhere"),
    ("--modle vit_base", "modle: no such key"),
    ("--model vit_base --config quick", "--config: not allowed with argument --model"),
    ("--epochs 10 --images 5", "--images: not allowed with argument --epochs"),
    ("--device x", "--device: invalid choice: 'x'"),
    ("--train.freeze backbone", "train.freeze: backbone is not allowed; it must be none in a plan"),
    ("--train.budget_minutes 9", "train.budget_minutes: 9.0 is not allowed; it must be null"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES)
def test_mistake_ends_in_one_line(
    words: str, message: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["plan.py", *words.split()])
    with pytest.raises(SystemExit) as ended:
        plan.main()
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.startswith(f"error: {message}"), error
    assert error.count("\n") == 1


LENGTHS = [  # classes, images of an epoch, and epochs
    ("--config cifar10 --data.val_size 0", 10, 50_000, 200),
    ("--config cifar10 --data.val_size 1000 --classes 7 --train.processes 1", 7, 49_000, 200),
    ("--config imagenet_vit_b --train_images 5e5 --epochs 3", 1000, 500_000, 3),
    ("--model vit_base", 1000, 1_281_167, None),
    ("--model vit_base --train.epochs 7", 1000, 1_281_167, 7),
    ("--train.epochs=7", 1000, 1_281_167, 7),
    ("--config cifar10 --images 1000 --data.val_size 0", 10, 50_000, 200),
]


@pytest.mark.parametrize(("words", "classes", "images", "epochs"), LENGTHS)
def test_length_is_that_of_the_data_set(
    words: str, classes: int, images: int, epochs: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["plan.py", *words.split()])
    options, config = plan.read_options()
    found = (options.classes, options.train_images, options.epochs)
    assert found == (classes, images, epochs)
    assert config.train.processes is None


def test_models_of_timm_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^model\.name: timm:resnet18 is not allowed"):
        tracing.build(Config(model=ModelConfig(name="timm:resnet18")), classes=10)


PAGE = ROOT / "docs/scaling.md"
PLANS = ROOT / "docs/measurements/plans.md"
SCALING = ROOT / "docs/scaling"


def shown() -> list[tuple[str, list[str]]]:
    """The commands of plan.py on the page of plans, each with the lines of output below it."""
    found: list[tuple[str, list[str]]] = []
    printed = False
    for line in PLANS.read_text().splitlines():
        if line.startswith("    python -m benchmarks.scale.plan "):
            found.append((line.partition(".plan ")[2].partition(" | ")[0], []))
            printed = True
        elif line and not line.startswith("    "):
            printed = False
        elif line and printed:
            found[-1][1].append(line.removeprefix("    "))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("words", "lines"), shown(), ids=[words for words, _ in shown()])
def test_page_shows_what_is_printed(
    words: str, lines: list[str], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["plan.py", *words.split()])
    plan.main()
    real = capsys.readouterr().out.splitlines()
    assert lines and [line for line in real if line in lines] == lines


def commands() -> list[list[str]]:
    """The arguments of train.py on the page, in the script and in the manifest."""
    texts = [PAGE.read_text(), (SCALING / "slurm.sh").read_text()]
    lines = "\n".join(texts).replace("\\\n", " ").splitlines()
    words = [line.split() for line in lines if re.match(r" {4}(python|torchrun) |srun ", line)]
    job = yaml.safe_load((SCALING / "pytorchjob.yaml").read_text())
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    words.append(worker["containers"][0]["command"])
    return [line[line.index("train.py") + 1 :] for line in words if "train.py" in line]


def test_commands_of_the_page_are_accepted() -> None:
    for words in commands():
        config, _ = plan.parse_train(words)
        assert config.data.image_size == (224, 224), words
    assert len(commands()) == 5


def test_script_and_manifest_ask_for_the_hosts_of_the_page() -> None:
    subprocess.run(["bash", "-n", SCALING / "slurm.sh"], check=True)
    job = yaml.safe_load((SCALING / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    worker, elastic = job["spec"]["pytorchReplicaSpecs"]["Worker"], job["spec"]["elasticPolicy"]
    assert worker["replicas"] == elastic["minReplicas"] == elastic["maxReplicas"] == 8
    (container,) = worker["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"  # which the operator looks for
    assert job["spec"]["nprocPerNode"] == str(container["resources"]["limits"]["nvidia.com/gpu"])
    volumes = {volume["name"] for volume in worker["template"]["spec"]["volumes"]}
    assert volumes == {mount["name"] for mount in container["volumeMounts"]}
