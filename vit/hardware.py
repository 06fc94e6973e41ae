"""The device a run computes on, its precision, and what a device cannot do."""

from typing import Literal

import torch

# What torch does not implement on a type of device. `device_for` names where to compute it instead.
MISSING = {"mps": frozenset({"float64", "eigh"})}


def choose_device(name: str) -> torch.device:
    """Return the device with a name.

    Args:
        name: "cpu", a type of accelerator ("cuda", "mps" or "xpu"), or "auto" for this machine's
            accelerator if it has one and the CPU otherwise.

    Raises:
        ValueError: This machine does not have the device.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    available = ["cpu"] if accelerator is None else [accelerator.type, "cpu"]
    if name == "auto":
        return torch.device(available[0])
    if name not in available:
        raise ValueError(
            f"device: {name} is not available on this machine; it must be auto or "
            f"{' or '.join(available)}"
        )
    return torch.device(name)


def device_for(feature: Literal["float64", "eigh"], device: torch.device) -> torch.device:
    """Return where to compute something: on the device, or on the CPU if the device cannot.

    Args:
        feature: float64 tensors or `torch.linalg.eigh`.
        device: Where the rest is computed.
    """
    return torch.device("cpu") if feature in MISSING.get(device.type, ()) else device


def has_native_bfloat16(device: torch.device) -> bool:
    """Tell whether the hardware multiplies bfloat16 matrices faster than float32 ones.

    MPS does not report it, so it counts as slower.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "xpu":
        return torch.xpu.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        # The oldest supported releases of torch do not report it; they take float32.
        capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
        return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16"))
    return False


def choose_precision(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of matrix products; "auto" is bfloat16 where the hardware is fast at it.

    Raises:
        ValueError: The name is unknown.
    """
    if name == "auto":
        name = "bfloat16" if has_native_bfloat16(device) else "float32"
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if name not in dtypes:
        raise ValueError(f"precision: {name} is not allowed; it must be auto, {', '.join(dtypes)}")
    return dtypes[name]


def autocast(device: torch.device, precision: torch.dtype) -> torch.autocast:
    """Return the context in which matrix products run in a precision."""
    return torch.autocast(device.type, precision, enabled=precision != torch.float32)


def describe(device: torch.device) -> str:
    """Return a readable name of the device, such as "CPU with 2 threads"."""
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"CPU with {threads} thread{'s' if threads != 1 else ''}"
    if device.type == "mps":
        return "Apple GPU (MPS)"
    return str(torch.get_device_module(device).get_device_name(device))
