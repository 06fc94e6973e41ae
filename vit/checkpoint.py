"""Files that hold a model: checkpoints to resume from, and the finished model with its config.

Every file is written whole or not at all, carries the SHA-256 of its content, by which a single
changed bit is noticed, and only tensors and plain values are read back: nothing in a file is ever
executed.
"""

import errno
import hashlib
import io
import json
import warnings
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from vit.config import Config, from_dict, to_dict
from vit.console import warn
from vit.files import seal, unseal, write_atomically
from vit.model.vit import VisionTransformer

MODEL_FILE = "model.safetensors"
SHIPPED = Path(__file__).resolve().parent / "weights"  # finished models by name
METADATA_KEY = "vit"  # in model.safetensors: config, classes and step as JSON
DIGEST_KEY = "sha256"  # likewise: of the whole file, with zeros where the digest itself stands
BLANK = "0" * 64
CHECKPOINT_FOLDER = "checkpoints"
KEEP = 2  # checkpoints; the older one is there in case the newer cannot be read


@dataclass(frozen=True)
class SavedModel:
    """A model as it comes out of a file.

    Attributes:
        model: In evaluation mode, on the CPU.
        config: What it was trained with.
        classes: The names of what it tells apart.
        step: Steps it was trained for.
        path: The file.
    """

    model: VisionTransformer
    config: Config
    classes: tuple[str, ...]
    step: int
    path: Path


def build_model(config: Config, num_classes: int) -> VisionTransformer:
    """Make the untrained model of a config."""
    return VisionTransformer(num_classes=num_classes, **asdict(config.model))


def save_checkpoint(run: Path, step: int, state: dict[str, Any]) -> None:
    """Write RUN/checkpoints/step_N.pt and, once it is known to be whole, delete older ones but one.

    Later ones, which were damaged if the run has come back to an earlier step, are deleted too.

    Args:
        run: The run folder.
        step: Steps done.
        state: Tensors and plain values, step among them.

    Raises:
        OSError: It could not be written, or is not what was written; the older ones are left.
    """
    folder = run / CHECKPOINT_FOLDER
    folder.mkdir(exist_ok=True)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    path = folder / f"step_{step:08d}.pt"
    write_atomically(path, seal(buffer.getvalue()))
    if unseal(path.read_bytes()) is None:
        path.unlink()
        raise OSError(errno.EIO, "it does not read back as it was written", str(path))
    saved = _checkpoints(run)
    end = saved.index(path) + 1
    for old in (*saved[: max(0, end - KEEP)], *saved[end:], *folder.glob(".step_*.tmp")):
        old.unlink()


def checkpoint_steps(run: Path) -> list[int]:
    """List the steps of a run's checkpoints, oldest first."""
    return [int(path.stem.removeprefix("step_")) for path in _checkpoints(run)]


def _checkpoints(run: Path) -> list[Path]:
    return sorted((run / CHECKPOINT_FOLDER).glob("step_*.pt"))


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint without executing anything in it.

    Raises:
        ValueError: The file is not a checkpoint of this project, or is damaged.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    content = unseal(data)
    state = _unpickle(data if content is None else content)
    if not isinstance(state, dict):
        raise ValueError(f"{path} is not a checkpoint, or is damaged")
    if not {"step", "config", "classes", "model"} <= state.keys():
        raise ValueError(f"{path} is not a checkpoint of this project{_weights_of(state)}")
    if content is None:
        raise ValueError(f"{path} is damaged: it is not what was written (SHA-256)")
    return state


def _unpickle(data: bytes) -> Any:
    """Read tensors and plain values; None where data holds anything else."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of foreign pickles
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception:  # what a foreign or damaged file raises is not for us to list
            return None


def _weights_of(names: Collection[str]) -> str:
    """Say what kind of weights somebody else's file holds, and what can be done with them."""
    for wrapper in ("state_dict", "model"):
        if isinstance(names, dict) and isinstance(names.get(wrapper), dict):
            names = names[wrapper]
    if not {"patch_embed.proj.weight", "blocks.0.attn.qkv.weight"} <= set(names):
        return ""
    return (
        ": it holds a ViT's weights in timm's names without a config; load them in Python with "
        "VisionTransformer(...).load_state_dict (vit.model.vit)"
    )


def latest_checkpoint(run: Path) -> tuple[Path, dict[str, Any]] | None:
    """Read the newest checkpoint of a run that can be read.

    Returns:
        Its path and its content, or None where the run has no checkpoint.

    Raises:
        ValueError: There are checkpoints, and none can be read.
    """
    paths = _checkpoints(run)
    for path in reversed(paths):
        try:
            return path, read_checkpoint(path)
        except ValueError as error:
            warn(f"{error}; trying an older one")
    if paths:
        raise ValueError(f"{run}: none of its checkpoints can be read; start anew with --overwrite")
    return None


def save_model(
    path: Path, model: VisionTransformer, config: Config, classes: tuple[str, ...], step: int
) -> None:
    """Write the weights as safetensors, with config, class names, step and digest inside."""
    tensors = {
        name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()
    }
    about = {"config": to_dict(config), "classes": classes, "step": step}
    metadata = {METADATA_KEY: json.dumps(about), DIGEST_KEY: BLANK}
    data = safetensors.torch.save(tensors, metadata)
    digest = hashlib.sha256(data).hexdigest()
    write_atomically(path, data.replace(BLANK.encode(), digest.encode(), 1))


def load_model(path: Path) -> SavedModel:
    """Load the model of a run folder or of a file.

    Args:
        path: A run folder (its finished model, or else its newest checkpoint), a model.safetensors,
            a checkpoint, or the name of a model that comes with the project, e.g. cifar10_quick.

    Raises:
        ValueError: There is no such thing, or it is not a model of this project.
    """
    if not path.exists():
        shipped = {file.stem: file for file in sorted(SHIPPED.glob("*.safetensors"))}
        if str(path) not in shipped:
            raise ValueError(
                f"{path} does not exist; it must be a run folder, a model file, "
                f"or a model that comes along: {', '.join(shipped)}"
            )
        path = shipped[str(path)]
    if path.is_dir() and (path / MODEL_FILE).exists():
        path = path / MODEL_FILE
    if path.is_dir():
        checkpoints = _checkpoints(path)
        if not checkpoints:
            raise ValueError(f"{path} holds neither {MODEL_FILE} nor {CHECKPOINT_FOLDER}/*.pt")
        path = checkpoints[-1]
    state = _read_model(path) if path.suffix == ".safetensors" else read_checkpoint(path)
    config, classes = from_dict(state["config"]), tuple(state["classes"])
    model = build_model(config, len(classes))
    try:
        model.load_state_dict(state.get("ema") or state["model"])
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: the weights do not fit the config inside: {reason}") from None
    return SavedModel(model.eval(), config, classes, state["step"], path)


def _read_model(path: Path) -> dict[str, Any]:
    try:
        with safetensors.safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        data = path.read_bytes()
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a safetensors file, or is damaged: {error}") from None
    if METADATA_KEY not in metadata and DIGEST_KEY not in metadata:
        raise ValueError(
            f"{path} holds weights only, without the config of a run of this project"
            f"{_weights_of(tensors)}"
        )
    digest = metadata.get(DIGEST_KEY, "")
    blanked = data.replace(digest.encode(), BLANK.encode(), 1) if digest else data
    if hashlib.sha256(blanked).hexdigest() != digest:
        raise ValueError(f"{path} is damaged: it is not what was written (SHA-256)")
    return {"model": tensors, **json.loads(metadata[METADATA_KEY])}
