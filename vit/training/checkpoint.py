"""Files that hold a model: checkpoints to resume from, and the finished model with its config.

Every file is written whole or not at all, and only tensors and plain values are read back: nothing
in a file is ever executed.
"""

import io
import json
import os
import pickle
import sys
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from vit.config import Config, from_dict, to_dict
from vit.model.vit import VisionTransformer

MODEL_FILE = "model.safetensors"
SHIPPED = Path(__file__).resolve().parent.parent / "weights"  # finished models by name
METADATA_KEY = "vit"  # in model.safetensors: config, classes and step as JSON
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


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a crash leaves either the old one or the new one, whole."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def save_checkpoint(run: Path, step: int, state: dict[str, Any]) -> None:
    """Write RUN/checkpoints/step_N.pt and delete all but the last two.

    Args:
        run: The run folder.
        step: Steps done.
        state: Tensors and plain values.
    """
    folder = run / CHECKPOINT_FOLDER
    folder.mkdir(exist_ok=True)
    buffer = io.BytesIO()
    torch.save({"step": step, **state}, buffer)
    write_atomically(folder / f"step_{step:08d}.pt", buffer.getvalue())
    for old in (*sorted(folder.glob("step_*.pt"))[:-KEEP], *folder.glob(".step_*.tmp")):
        old.unlink()


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint without executing anything in it.

    Raises:
        ValueError: The file is not a whole checkpoint.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of foreign pickles; the error says it all
            state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # torch's own text advises to execute what is in the file
        raise ValueError(f"{path} is not a checkpoint, or is damaged") from None
    except (RuntimeError, EOFError, OSError, KeyError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path} is not a checkpoint, or is damaged: {reason}") from None
    if not isinstance(state, dict) or not {"step", "config", "classes", "model"} <= state.keys():
        raise ValueError(f"{path} is not a checkpoint of this project")
    return state


def latest_checkpoint(run: Path) -> tuple[Path, dict[str, Any]] | None:
    """Read the newest checkpoint of a run that can be read.

    Returns:
        Its path and its content, or None where the run has no checkpoint.

    Raises:
        ValueError: There are checkpoints, and none can be read.
    """
    paths = sorted((run / CHECKPOINT_FOLDER).glob("step_*.pt"), reverse=True)
    for path in paths:
        try:
            return path, read_checkpoint(path)
        except ValueError as error:
            print(f"warning: {error}; trying an older one", file=sys.stderr)
    if paths:
        raise ValueError(f"{run}: none of its checkpoints can be read")
    return None


def save_model(
    path: Path, model: VisionTransformer, config: Config, classes: tuple[str, ...], step: int
) -> None:
    """Write the weights as safetensors, with config, class names and step inside."""
    tensors = {
        name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()
    }
    about = {"config": to_dict(config), "classes": classes, "step": step}
    write_atomically(path, safetensors.torch.save(tensors, {METADATA_KEY: json.dumps(about)}))


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
        newest = latest_checkpoint(path)
        if newest is None:
            raise ValueError(f"{path} holds neither {MODEL_FILE} nor {CHECKPOINT_FOLDER}/*.pt")
        path, state = newest
    else:
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
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a safetensors file, or is damaged: {error}") from None
    if METADATA_KEY not in metadata:
        raise ValueError(f"{path} holds weights only, without the config of a run of this project")
    return {"model": tensors, **json.loads(metadata[METADATA_KEY])}
