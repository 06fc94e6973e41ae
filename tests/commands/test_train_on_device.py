"""A whole run on a pretended device: every tensor is where it is used.

Like a GPU's, the tensors of the device cannot be combined with tensors on the CPU; unlike a GPU's,
the CPU computes them. So the run ends with the weights of a run on the CPU, and a tensor in the
wrong place is found without a GPU.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

from small_runs import metrics, small
from vit.commands.config import MapsConfig
from vit.commands.maps import run as explain_run
from vit.commands.train import train
from vit.config import OPTIMIZERS, Config
from vit.data import shapes
from vit.pretrained.load import load as load_model

DEVICE = torch.device("meta")  # the other device for which torch needs no driver
# Operators that also take tensors on the CPU; the result is where the first argument is.
CROSSING = {"aten::_to_copy", "aten::copy_", "aten::index", "aten::index_put_"}


class OnDevice(Tensor):
    """A tensor on the pretended device, with its numbers on the CPU."""

    @staticmethod
    def __new__(cls, numbers: Tensor) -> "OnDevice":
        return Tensor._make_wrapper_subclass(
            cls, numbers.size(), numbers.stride(), dtype=numbers.dtype, device=DEVICE,
            requires_grad=numbers.requires_grad,
        )  # fmt: skip

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers

    def tolist(self) -> Any:
        return self.numbers.tolist()

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        return compute(operator, args, kwargs or {})


class PretendedDevice(TorchDispatchMode):
    """Within this mode, the device exists."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        return compute(operator, args, kwargs or {})


def compute(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator of torch on the CPU, and put the results where they belong."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    there = [isinstance(tensor, OnDevice) for tensor in tensors]
    crossing = operator._schema.name in CROSSING
    apart = [t for t, on in zip(tensors, there, strict=True) if not on and t.dim() > 0]
    if any(there) and apart and not crossing:
        raise RuntimeError(f"{operator}: expected all tensors to be on the same device")
    results_there = there[0] if crossing else any(there)
    if kwargs.get("device") is not None:
        results_there = torch.device(kwargs["device"]) == DEVICE
        kwargs = {**kwargs, "device": "cpu"}
    plain_args, plain = tree_map_only(OnDevice, lambda t: t.numbers, (args, kwargs))
    results = operator(*plain_args, **plain)
    if not results_there:
        return results
    results = tree_map_only(Tensor, OnDevice, results)
    return return_and_correct_aliasing(operator, args, kwargs, results) if any(there) else results


@contextlib.contextmanager
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs choose the pretended device here; it does without what torch has for real ones only."""

    class Generator(torch.Generator):
        def __new__(cls, device: Any = None) -> "Generator":
            return super().__new__(cls)

    autocast, swap = torch.autocast, torch.__future__.set_swap_module_params_on_conversion
    monkeypatch.setattr(torch, "Generator", Generator)
    monkeypatch.setattr(torch, "autocast", lambda _, *args, **how: autocast("cpu", *args, **how))
    monkeypatch.delitem(OPTIMIZERS["muon"].arguments, "fused")
    monkeypatch.setattr("vit.training.flop.product_speed", lambda *_: 1e12)  # large matrices
    for module in ("vit.training.start", "vit.model_file"):
        monkeypatch.setattr(f"{module}.choose_device", lambda _: DEVICE)
    real = torch.get_device_module
    module = SimpleNamespace(get_device_name=str, mem_get_info=lambda _: (10**9, 10**9))
    monkeypatch.setattr(
        torch, "get_device_module", lambda kind=None: module if kind == DEVICE else real(kind)
    )
    swap(True)  # else parameters stay what they are, and only share their memory
    try:
        with PretendedDevice():
            yield
    finally:
        swap(False)


@pytest.mark.filterwarnings("ignore:.*to a meta parameter")  # torch mistakes the device for that
def test_a_run_on_another_device_is_the_run_on_the_cpu(tmp_path, monkeypatch):
    on_cpu, run = tmp_path / "cpu", tmp_path / "run"
    monkeypatch.setattr(shapes, "TEST", 100)
    train(a_run(on_cpu))
    with pretended(monkeypatch):
        with pytest.raises(RuntimeError, match="same device"):
            torch.zeros(2, device=DEVICE) + torch.ones(2)
        train(a_run(run))
        found, expected = (load_model(each).model.state_dict() for each in (run, on_cpu))
        for key, value in found.items():
            assert value.device == DEVICE
            assert_close(value.cpu(), expected[key].cpu())
        explain_run(str(run), MapsConfig(probes=3, faithfulness=4))
    assert metrics(run)[-1] == pytest.approx(metrics(on_cpu)[-1], rel=1e-4)


def a_run(folder: Path) -> Config:
    track = {"probes": 1, "milestones": 1}
    return small(folder, train={"epochs": 1}, data={"balance": "loss"}, track=track)
