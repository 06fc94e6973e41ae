"""Choosing devices and precision, and falling back to the CPU for missing operations."""

import pytest
import torch

from vit.hardware import (
    autocast,
    choose_device,
    choose_precision,
    device_for,
    has_native_bfloat16,
)

CPU = torch.device("cpu")


@pytest.fixture
def accelerator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Pretend that this machine has an accelerator of a type, or none."""
    device = torch.device(request.param) if request.param else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: device)
    return request.param


@pytest.mark.parametrize("accelerator", ["cuda", "mps", "xpu"], indirect=True)
def test_auto_takes_the_accelerator(accelerator: str) -> None:
    assert choose_device("auto") == choose_device(accelerator) == torch.device(accelerator)
    assert choose_device("cpu") == CPU


@pytest.mark.parametrize(
    ("accelerator", "name", "allowed"),
    [(None, "cuda", "auto or cpu"), ("mps", "cuda", "auto or mps or cpu"), ("cuda", "xpu", "cuda")],
    indirect=["accelerator"],
)
def test_device_that_is_not_there_is_refused_with_those_that_are(
    accelerator: str | None, name: str, allowed: str
) -> None:
    with pytest.raises(ValueError, match=rf"^device: {name} is not .*must be .*{allowed}"):
        choose_device(name)


@pytest.mark.parametrize("feature", ["float64", "eigh"])
def test_what_mps_lacks_is_computed_on_the_cpu(feature: str) -> None:
    assert device_for(feature, torch.device("mps")) == CPU
    for name in ("cpu", "cuda", "xpu"):
        assert device_for(feature, torch.device(name)) == torch.device(name)


@pytest.mark.parametrize(("capability", "fast"), [((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_bfloat16_is_native_from_ampere_on(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], fast: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    cuda = torch.device("cuda")
    assert has_native_bfloat16(cuda) is fast
    assert choose_precision("auto", cuda) == (torch.bfloat16 if fast else torch.float32)


@pytest.mark.parametrize(
    ("capabilities", "fast"),
    [({}, False), ({"avx512_f": True, "avx512_bf16": False}, False), ({"amx_bf16": True}, True)],
)
def test_bfloat16_of_a_cpu_depends_on_its_instructions(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, bool], fast: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert has_native_bfloat16(CPU) is fast


@pytest.mark.parametrize("fast", [False, True])
def test_bfloat16_of_an_intel_gpu_must_not_be_emulated(
    monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    monkeypatch.setattr(torch.xpu, "is_bf16_supported", lambda including_emulation: fast)
    assert has_native_bfloat16(torch.device("xpu")) is fast


def test_precision_is_what_is_asked_for() -> None:
    assert choose_precision("float32", CPU) == torch.float32
    assert choose_precision("bfloat16", torch.device("mps")) == torch.bfloat16
    assert choose_precision("auto", torch.device("mps")) == torch.float32


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_autocast_multiplies_in_the_precision(precision: torch.dtype) -> None:
    with autocast(CPU, precision):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == precision
