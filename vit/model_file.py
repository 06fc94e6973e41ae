"""Model files: a Classifier with its config as safetensors, sealed by a SHA-256 of the contents.

Loading one, or a checkpoint, executes nothing in it.
"""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from vit.calibration import Calibration
from vit.classifier import Classifier, build_model
from vit.config import Config, StoredConfig
from vit.console import printable, shorten, warn
from vit.data.preprocess import Preprocess
from vit.files import is_sealed, require_file, write_atomically
from vit.hardware import choose_device, choose_precision, describe
from vit.model.definitions import is_in_file
from vit.model.variants import attention_code, find_attention
from vit.run.checkpoint import (
    CHECKPOINT_FOLDER,
    FOREIGN,
    STEP_PATTERN,
    Checkpoint,
    checkpoint_paths,
    read_checkpoint,
)
from vit.run.folder import MODEL_FILE
from vit.settings import ClassNames, Steps, Text, group, parse, suggest

BUNDLED = Path(__file__).resolve().parent / "weights"  # trained models that come with the package
METADATA_KEY = "vit"  # in the file's metadata: `ModelMetadata` as JSON
DIGEST_KEY = "sha256"  # in the file's metadata: of the whole file, with zeros for the digest itself
BLANK = "0" * 64
MODEL_SUFFIX = ".safetensors"


@group("")
class ModelMetadata:
    """What a model file says besides its weights; later versions added the fields with defaults."""

    config: StoredConfig
    classes: ClassNames
    step: Steps
    preprocess: Preprocess | None = None
    fingerprint: Text = ""
    attention_code: Text = ""
    calibration: Calibration | None = None


Metadata = ModelMetadata | Checkpoint


@dataclass(frozen=True, repr=False, kw_only=True)
class SavedModel(Classifier):
    """A classifier from a file."""

    config: Config  # of the run that trained it
    step: int  # optimizer steps of its training
    total_steps: int | None  # of the whole run; None in model files
    path: Path  # the model file or checkpoint
    fingerprint: str = ""  # of the user's files, see `vit.data.images.user_files`
    home: Path | None = None  # where results belong; None means next to the file

    @property
    def finished(self) -> bool:
        """Whether this is a finished model, not a checkpoint."""
        return self.path.suffix == MODEL_SUFFIX

    @property
    def run(self) -> Path:
        """The folder of the run, or the one in which results about the model belong."""
        if self.home:
            return self.home
        folder = self.path.parent.absolute()  # does not follow a link inside the run
        folder = (folder.parent if folder.name == CHECKPOINT_FOLDER else folder).resolve()
        if folder == BUNDLED:  # nothing is written into the package
            return Path("runs/included") / self.path.stem
        cached = folder.parent.parent.name  # in the cache of the Hub, nothing is written either
        if folder.parent.name == "snapshots" and cached.startswith("models--"):
            return Path("runs") / cached.removeprefix("models--").replace("--", "-")
        return folder

    @property
    def superseded(self) -> bool:
        """Whether this is a checkpoint that a later one or the final model has replaced."""
        if self.path.parent.name != CHECKPOINT_FOLDER:
            return False
        earlier = [path.name for path in checkpoint_paths(self.run)[:-1]]
        return (self.run / MODEL_FILE).exists() or self.path.name in earlier

    @property
    def name(self) -> str:
        """The name of the run folder or of the included model."""
        return self.run.name

    def with_progress(self, name: str | Path) -> str:
        """Return a name of the file, with the step of an unfinished run."""
        total = "" if self.total_steps is None else f" of {self.total_steps:,}"
        return str(name) if self.finished else f"{name} (unfinished run, step {self.step:,}{total})"

    def describe(self) -> str:
        """Describe the file, the device and the precision in one line."""
        return (
            f"{printable(self.with_progress(self.path))}: {describe(self.device)}, "
            f"{str(self.precision).removeprefix('torch.')}"
            f"{f', mean of {self.views} views of each image' if self.views > 1 else ''}"
        )


def load_saved(name: str | Path, device: str = "auto", precision: str = "auto") -> SavedModel:
    """Load a run folder, a model file, a checkpoint or an included model, see `vit.load`."""
    path = _find_model(Path(name))
    about: Metadata
    if path.suffix == MODEL_SUFFIX:
        about, weights = _read_model(path)
        code: str | None = about.attention_code
    else:
        about = read_checkpoint(path)
        weights = about.ema or about.model
        code = about.environment.get("attention_code")
    saved, model = build_saved(path, about, weights, device, precision), about.config.model
    if code and code != attention_code(model):
        warn(
            f"{path}: the code of {model.attention} attention has changed since this model was "
            "trained, so its predictions may differ from those in training"
        )
    return saved


def build_saved(
    path: Path, about: Metadata, weights: dict[str, Tensor], device: str, precision: str
) -> SavedModel:
    """Build the model that a file describes, with its weights; errors as for `vit.load`."""
    where, config, classes = choose_device(device), about.config, about.classes
    try:
        find_attention(config.model.attention)  # or says how to name its file again
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    dtype = choose_precision("float32" if precision == "auto" else precision, where)
    preprocess = about.preprocess or Preprocess.from_config(config.data)
    with _fitting(path):
        # Without memory, unless it is code that the caller has named, which may need numbers.
        where_claimed = "cpu" if is_in_file(config.model.attention) else "meta"
        with _at_most(len(weights), where_claimed):
            claimed = build_model(config.model, preprocess, len(classes))
        claimed.load_state_dict(weights, assign=True)
    buffers = {name for name, _ in claimed.named_buffers()}
    for name, weight in weights.items():
        wrong = weight.isnan() if name in buffers else ~weight.isfinite()  # -inf in masks
        if weight.is_complex() or wrong.any():
            raise ValueError(f"{path}: {name} has values that are not finite real numbers")
    with _fitting(path):
        model = build_model(config.model, preprocess, len(classes))
        model.load_state_dict(weights)
    return SavedModel(
        model.to(where).eval(), preprocess, classes, where, dtype,
        calibration=getattr(about, "calibration", None), config=config, step=about.step,
        total_steps=getattr(about, "total_steps", None), path=path, fingerprint=about.fingerprint,
    )  # fmt: skip


@contextlib.contextmanager
def _fitting(path: Path) -> Iterator[None]:
    """Say that weights do not fit the config of their file."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        reason = shorten(error, 300)
        raise ValueError(f"{path}: the weights do not fit the config inside: {reason}") from None


def weights_digest(model: nn.Module, about: str = "") -> str:
    """Identify the weights of a model, and what else is said about it."""
    digest = hashlib.sha256(about.encode())
    for weight in model.state_dict().values():
        digest.update(weight.cpu().numpy().tobytes())
    return digest.hexdigest()


@contextlib.contextmanager
def _at_most(count: int, device: str) -> Iterator[None]:
    """Build modules on a device, with at most ten times `count` parameters."""
    left, builder = 10 * count + 100, threading.get_ident()  # some parameters are replaced

    def register(*_: Any) -> None:
        nonlocal left
        left -= threading.get_ident() == builder
        if left < 0:
            raise RuntimeError(f"it describes a model of many more than {count} tensors")

    hook = register_module_parameter_registration_hook(register)
    try:
        with torch.device(device):
            yield
    finally:
        hook.remove()


def _find_model(path: Path) -> Path:
    """Return the file of a run folder, an included model or a file; else ValueError."""
    bundled = bundled_models()
    if (path / MODEL_FILE).exists():
        return path / MODEL_FILE
    if checkpoints := checkpoint_paths(path):
        return checkpoints[-1]
    if str(path) in bundled and not path.is_file():  # perhaps next to a folder with its data
        return bundled[str(path)]
    if path.is_dir() and not path.match(STEP_PATTERN):  # not a sharded checkpoint
        raise ValueError(
            f"{path} contains neither {MODEL_FILE} nor {CHECKPOINT_FOLDER}/step_*, nor the "
            "config.json of a model that transformers saved"
        )
    if not path.exists():
        names = [*bundled, *map(str, path.parent.glob("*"))]
        raise ValueError(
            f"{path} does not exist; it must be a run folder, a model file, a folder saved by "
            f"transformers (with config.json), or an included model: {', '.join(bundled)}"
            f"{suggest(str(path), names)}"
        )
    if not (path.is_file() or path.is_dir()):  # a device or a pipe, reading which may never end
        raise ValueError(f"{path} is not a regular file; it must be a model file or a run folder")
    return path


def bundled_models() -> dict[str, Path]:
    """Return the files of the included models, by name."""
    return {file.stem: file for file in sorted(BUNDLED.glob(f"*{MODEL_SUFFIX}"))}


def is_own_file(path: Path) -> bool:
    """Return whether a file is a model file or checkpoint of this project, possibly damaged."""
    if path.suffix != MODEL_SUFFIX:
        is_checkpoint = path in checkpoint_paths(path.parent.parent)
        return is_checkpoint or is_sealed(require_file(path).read_bytes())
    try:
        metadata = _metadata(path)
    except (safetensors.SafetensorError, OSError):
        return False
    return METADATA_KEY in metadata or DIGEST_KEY in metadata


def save_model(
    path: Path, classifier: Classifier, config: Config, step: int, fingerprint: str = ""
) -> None:
    """Write a model file."""
    state, layout = classifier.model.state_dict(), torch.contiguous_format
    # Copies, because safetensors refuses parameters that modules share.
    tensors = {k: v.cpu().clone(memory_format=layout) for k, v in state.items()}
    about = ModelMetadata(
        config=config,
        preprocess=classifier.preprocess,
        classes=classifier.classes,
        step=step,
        fingerprint=fingerprint,
        attention_code=attention_code(config.model),
        calibration=classifier.calibration,
    )
    metadata = {METADATA_KEY: json.dumps(asdict(about)), DIGEST_KEY: BLANK}
    data = safetensors.torch.save(tensors, metadata)
    digest = hashlib.sha256(data).hexdigest()
    write_atomically(path, data.replace(BLANK.encode(), digest.encode(), 1))


def _metadata(path: Path) -> dict[str, str]:
    with safetensors.safe_open(require_file(path), "pt") as file:
        return file.metadata() or {}


def _read_model(path: Path) -> tuple[ModelMetadata, dict[str, Tensor]]:
    try:
        metadata, data = _metadata(path), path.read_bytes()
        tensors = safetensors.torch.load(data)
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a safetensors file, or is damaged: {error}") from None
    if METADATA_KEY not in metadata and DIGEST_KEY not in metadata:
        raise ValueError(
            f"{path} contains only weights, without the config of a run of this project{FOREIGN}"
        )
    digest = metadata.get(DIGEST_KEY, "")
    blanked = data.replace(digest.encode(), BLANK.encode(), 1) if digest else data
    if hashlib.sha256(blanked).hexdigest() != digest:
        raise ValueError(f"{path} is damaged: its SHA-256 checksum does not match")
    return parse(ModelMetadata, metadata.get(METADATA_KEY, ""), path), tensors
