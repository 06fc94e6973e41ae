"""The Classifier: a trained model with everything needed to use it, and the file that holds it.

Shapes: N images, C classes, D feature width.
"""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from vit.checkpoint import (
    CHECKPOINT_FOLDER,
    checkpoint_paths,
    describe_foreign,
    read_checkpoint,
)
from vit.config import Config, ModelConfig, from_dict, to_dict
from vit.data.photos import Photo, to_photo
from vit.data.preprocess import Preprocess
from vit.explain.explanation import Explanation
from vit.explain.rollout import attention_maps
from vit.files import write_atomically
from vit.hardware import autocast, choose_device, choose_precision, describe
from vit.model.vit import VisionTransformer
from vit.run_folder import MODEL_FILE

BUNDLED = Path(__file__).resolve().parent / "weights"  # trained models that come with the package
METADATA_KEY = "vit"  # in model.safetensors: config, preprocessing, classes and step as JSON
DIGEST_KEY = "sha256"  # in model.safetensors: of the whole file with zeros in place of the digest
BLANK = "0" * 64
MODEL_SUFFIX = ".safetensors"

Photos = list[Any] | tuple[Any, ...]  # of Photo, which a Sequence could not tell from a str


def build_model(config: ModelConfig, preprocess: Preprocess, num_classes: int) -> VisionTransformer:
    """Build the untrained model of a config for images of a given size and number of channels."""
    return VisionTransformer(
        img_size=preprocess.image_size,
        in_chans=preprocess.channels,
        num_classes=num_classes,
        **dataclasses.asdict(config),
    )


@dataclass(frozen=True)
class Classifier:
    """A model in evaluation mode with its preprocessing and class names.

    Evaluation, attention maps and reports take a Classifier, so no caller can forget to normalize.

    Attributes:
        model: In evaluation mode, on the device.
        preprocess: Turns an image into the model's input.
        classes: The C class names.
        device: Where to compute.
        precision: Precision of matrix products, torch.float32 or torch.bfloat16.
    """

    model: VisionTransformer
    preprocess: Preprocess
    classes: tuple[str, ...]
    device: torch.device
    precision: torch.dtype

    @torch.no_grad()
    def forward(self, inputs: Tensor) -> Tensor:
        """Classify normalized images (N, channels, H, W) on the device: logits (N, C) float32."""
        with autocast(self.device, self.precision):
            logits: Tensor = self.model(inputs)
        return logits.float()

    def normalize(self, images: Tensor) -> Tensor:
        """Move images (N, channels, H, W) uint8 to the device and normalize them to float32."""
        return self.preprocess.normalize(images.to(self.device))

    def logits(self, images: Tensor, batch_size: int = 500) -> Tensor:
        """Classify images.

        Args:
            images: (N, channels, H, W) uint8, on any device.
            batch_size: Images per forward pass.

        Returns:
            Logits (N, C) float32, on the device.
        """
        return torch.cat([self.forward(self.normalize(part)) for part in images.split(batch_size)])

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """Return what the head gets for images (N, channels, H, W) uint8: (N, D) float32."""
        with autocast(self.device, self.precision):
            tokens = self.model.forward_features(self.normalize(images))
            return self.model.forward_head(tokens, pre_logits=True).float()

    def maps(
        self,
        images: Tensor,
        kinds: Sequence[str] = ("rollout",),
        target: Tensor | None = None,
        precision: torch.dtype = torch.float32,
        batch_size: int = 500,
        **options: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Classify images and map what the model attends to.

        Args:
            images: (N, channels, H, W) uint8, on any device.
            kinds: Kinds of map, keys of `vit.explain.rollout.MAP_KINDS`.
            target: (N,) int64, the classes that class-specific maps explain; None explains the
                predicted ones.
            precision: Precision of the forward pass.
            batch_size: Images per forward pass.
            **options: Options of `vit.explain.rollout.attention_maps`.

        Returns:
            Logits (N, C) float32, and for each kind maps (N, rows, columns) in units of uniform
            attention; all on the device.
        """
        parts = []
        for start in range(0, len(images), batch_size):
            part = slice(start, start + batch_size)
            aim = None if target is None else target[part].to(self.device)
            inputs = self.normalize(images[part])
            parts.append(attention_maps(self.model, inputs, kinds, aim, precision, **options))
        logits = torch.cat([logits for logits, _ in parts])
        return logits, {kind: torch.cat([maps[kind] for _, maps in parts]) for kind in kinds}

    @overload
    def predict(self, photos: Photo, top: int = ...) -> dict[str, float]: ...
    @overload
    def predict(self, photos: Photos, top: int = ...) -> list[dict[str, float]]: ...
    def predict(
        self, photos: Photo | Photos, top: int = 5
    ) -> dict[str, float] | list[dict[str, float]]:
        """Return the most probable classes of one photo or of several.

        Args:
            photos: A path, a Pillow image or an array (height, width, 3) uint8, of any size; or a
                list of them.
            top: Number of classes.

        Returns:
            Probabilities, 0 to 1, by class name, best first; a list of photos gives a list.

        Raises:
            ValueError: A photo cannot be read.
        """
        if not isinstance(photos, list | tuple):
            return self.predict([photos], top)[0]
        if not photos:
            return []
        inputs = torch.stack([self.preprocess.resize(to_photo(photo)) for photo in photos])
        return [self._ranked(row, top) for row in self.logits(inputs)]

    @overload
    def explain(
        self, photos: Photo, kind: str | Sequence[str] = ..., target: str | None = ...
    ) -> Explanation: ...
    @overload
    def explain(
        self, photos: Photos, kind: str | Sequence[str] = ..., target: str | None = ...
    ) -> list[Explanation]: ...
    def explain(
        self,
        photos: Photo | Photos,
        kind: str | Sequence[str] = "relevance",
        target: str | None = None,
    ) -> Explanation | list[Explanation]:
        """Map what the model attends to in one photo or in several.

        Args:
            photos: A path, a Pillow image or an array (height, width, 3) uint8, of any size; or a
                list of them.
            kind: One kind of map or several: "rollout", "gradient_rollout", "relevance", "raw".
            target: The class that class-specific maps explain; None explains the predicted one.

        Returns:
            The explanation; a list of photos gives a list. In a notebook it shows as a picture.

        Raises:
            ValueError: A photo cannot be read, or a kind or class does not exist.
        """
        kinds = [kind] if isinstance(kind, str) else list(kind)
        aim = None if target is None else torch.tensor([self.class_index(target)])
        if isinstance(photos, list | tuple):
            return [self._explain(photo, kinds, aim) for photo in photos]
        return self._explain(photos, kinds, aim)

    def _explain(self, photo: Photo, kinds: list[str], target: Tensor | None) -> Explanation:
        pixels = to_photo(photo)
        logits, maps = self.maps(self.preprocess.resize(pixels)[None], kinds, target)
        probabilities = self._ranked(logits[0], len(self.classes))
        best = next(iter(probabilities))
        return Explanation(
            photo=pixels,
            seen=self.preprocess.crop(*pixels.shape[:2]),
            maps={kind: found[0].cpu() for kind, found in maps.items()},
            probabilities=probabilities,
            target=best if target is None else self.classes[int(target)],
            name=Path(photo).name if isinstance(photo, str | Path) else "photo",
        )

    def _ranked(self, logits: Tensor, top: int) -> dict[str, float]:
        best = logits.softmax(dim=0).topk(min(top, len(self.classes)))
        return {
            self.classes[index]: probability
            for probability, index in zip(*(part.tolist() for part in best), strict=True)
        }

    def class_index(self, name: str) -> int:
        """Return the index of a class.

        Raises:
            ValueError: The model has no such class.
        """
        if name not in self.classes:
            raise ValueError(
                f"target: {name!r} is not a class of this model; "
                f"it must be one of {', '.join(self.classes)}"
            )
        return self.classes.index(name)


@dataclass(frozen=True)
class SavedModel:
    """A classifier as it comes out of a file, and where it comes from.

    Attributes:
        classifier: The model, ready to use.
        config: The config it was trained with.
        step: Optimizer steps it was trained for.
        total_steps: Optimizer steps of the whole run; None if the file does not say.
        path: The file.
    """

    classifier: Classifier
    config: Config
    step: int
    total_steps: int | None
    path: Path

    @property
    def finished(self) -> bool:
        """Whether this is the result of a finished run rather than a checkpoint."""
        return self.path.suffix == MODEL_SUFFIX

    @property
    def run(self) -> Path:
        """The folder of the run, or the one in which results about the model belong."""
        folder = self.path.resolve().parent
        if folder == BUNDLED:  # nothing is written into the package
            return Path("runs") / self.path.stem
        return folder.parent if folder.name == CHECKPOINT_FOLDER else folder

    @property
    def name(self) -> str:
        """A short name: that of the run folder, or of the bundled model."""
        return self.run.name

    def describe(self) -> str:
        """Name the file, whether the run is unfinished, the device and the precision."""
        classifier = self.classifier
        total = "" if self.total_steps is None else f" of {self.total_steps:,}"
        unfinished = "" if self.finished else f" (unfinished run, step {self.step:,}{total})"
        return (
            f"{self.path}{unfinished}: {describe(classifier.device)}, "
            f"{str(classifier.precision).removeprefix('torch.')}"
        )


def load(name: str | Path, device: str = "auto", precision: str = "auto") -> Classifier:
    """Load a trained model.

    Args:
        name: Run folder (its finished model, or else its newest checkpoint), model.safetensors,
            checkpoint, or the name of a bundled model such as "cifar10_quick".
        device: "auto" (an accelerator if there is one), "cpu", "cuda", "mps" or "xpu".
        precision: "auto" (bfloat16 where the hardware supports it), "float32" or "bfloat16".

    Raises:
        ValueError: There is no such model, the file is not a model of this project, or the device
            is not available.
    """
    return load_model(name, device, precision).classifier


def load_model(name: str | Path, device: str = "auto", precision: str = "auto") -> SavedModel:
    """Load a trained model together with its config; arguments and errors as for `load`."""
    path = _find_model(Path(name))
    where = choose_device(device)
    is_model = path.suffix == MODEL_SUFFIX
    state = _read_model(path) if is_model else vars(read_checkpoint(path))
    config, classes = from_dict(state["config"]), tuple(state["classes"])
    if preprocess := state.get("preprocess"):
        preprocess = Preprocess.from_dict(preprocess)
    else:  # written before files carried it
        preprocess = Preprocess.for_dataset(config.data.name)
    model = build_model(config.model, preprocess, len(classes))
    try:
        model.load_state_dict(state.get("ema") or state["model"])
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: the weights do not fit the config inside: {reason}") from None
    classifier = Classifier(
        model.to(where).eval(), preprocess, classes, where, choose_precision(precision, where)
    )
    return SavedModel(classifier, config, state["step"], state.get("total_steps"), path)


def _find_model(path: Path) -> Path:
    """Return the file of a run folder, a bundled model or a file.

    Raises:
        ValueError: There is none.
    """
    if not path.exists():
        bundled = {file.stem: file for file in sorted(BUNDLED.glob(f"*{MODEL_SUFFIX}"))}
        if str(path) in bundled:
            return bundled[str(path)]
        raise ValueError(
            f"{path} does not exist; it must be a run folder, a model file, "
            f"or a bundled model: {', '.join(bundled)}"
        )
    if path.is_dir() and (path / MODEL_FILE).exists():
        path = path / MODEL_FILE
    if path.is_dir():
        checkpoints = checkpoint_paths(path)
        if not checkpoints:
            raise ValueError(f"{path} contains neither {MODEL_FILE} nor {CHECKPOINT_FOLDER}/*.pt")
        path = checkpoints[-1]
    if not path.is_file():  # a device or a pipe, which might never end
        raise ValueError(f"{path} is not a regular file; it must be a model file or a run folder")
    return path


def save_model(path: Path, classifier: Classifier, config: Config, step: int) -> None:
    """Write a classifier as safetensors with config, preprocessing, classes, step and digest."""
    tensors = {
        name: tensor.detach().cpu().contiguous()
        for name, tensor in classifier.model.state_dict().items()
    }
    about = {
        "config": to_dict(config),
        "preprocess": classifier.preprocess.to_dict(),
        "classes": classifier.classes,
        "step": step,
    }
    metadata = {METADATA_KEY: json.dumps(about), DIGEST_KEY: BLANK}
    data = safetensors.torch.save(tensors, metadata)
    digest = hashlib.sha256(data).hexdigest()
    write_atomically(path, data.replace(BLANK.encode(), digest.encode(), 1))


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
            f"{path} contains only weights, without the config of a run of this project"
            f"{describe_foreign(tensors)}"
        )
    digest = metadata.get(DIGEST_KEY, "")
    blanked = data.replace(digest.encode(), BLANK.encode(), 1) if digest else data
    if hashlib.sha256(blanked).hexdigest() != digest:
        raise ValueError(f"{path} is damaged: its SHA-256 checksum does not match")
    return {"model": tensors, **json.loads(metadata[METADATA_KEY])}
