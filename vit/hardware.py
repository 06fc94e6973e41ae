"""Which device and precision a run takes."""

import torch


def choose_device(name: str) -> torch.device:
    """Return the device of a name; "auto" is a GPU if there is one.

    Raises:
        ValueError: "cuda" is asked for and there is none.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: cuda is not available here; it must be cpu or auto")
    return torch.device(name)


def has_native_bfloat16(device: torch.device) -> bool:
    """Tell whether the hardware multiplies bfloat16 matrices itself, and so faster than float32."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    # Older releases of torch cannot tell; they take float32.
    able: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(able.get(name, False) for name in ("avx512_bf16", "amx_bf16"))


def choose_precision(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of matrix products; "auto" is bfloat16 where the hardware has it."""
    if name == "auto":
        name = "bfloat16" if has_native_bfloat16(device) else "float32"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def autocast(device: torch.device, precision: torch.dtype) -> torch.autocast:
    """Return the context in which matrix products run in a precision."""
    return torch.autocast(device.type, precision, enabled=precision != torch.float32)


def describe(device: torch.device) -> str:
    """Name the hardware for the person who reads the output."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU with {torch.get_num_threads()} threads"
