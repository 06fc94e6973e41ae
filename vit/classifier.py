"""The Classifier: a trained model with everything needed to use it.

Shapes: N images, C classes, D feature width.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit.calibration import Calibration
from vit.console import is_out_of_memory
from vit.data.images import ImageSet
from vit.data.layout import join
from vit.data.photos import Photo, to_photo
from vit.data.preprocess import Preprocess
from vit.explain.explanation import Explanation
from vit.explain.kinds import ALL_KINDS, RolloutOptions
from vit.explain.maps import DEFAULTS, attention_maps
from vit.hardware import autocast, describe, map_on_cores
from vit.model.attention_model import attention_model, require_attention
from vit.model.config import ModelConfig
from vit.model.copying import copy_module
from vit.model.timm_model import complete_arguments, create
from vit.model.vit import VisionTransformer
from vit.model.whole_attention import stores_results
from vit.settings import require

PART = 64  # images per forward pass on a CPU, whose activations fit into a core's cache
MOST_PIXELS = 500 * 224**2  # of images per forward pass
MOST_WEIGHTS = 2**27  # attention weights per forward pass for maps: half a gigabyte in float32
PHOTO_KINDS = tuple(kind for kind, entry in ALL_KINDS.items() if entry.photos)
Photos = list[Any] | tuple[Any, ...]  # of Photo; not a Sequence, because a str is one, too
Kinds = str | Sequence[str]  # one kind of map or several
Ranking = dict[str, float]  # probabilities by class, best first


def build_model(config: ModelConfig, preprocess: Preprocess, num_classes: int) -> nn.Module:
    """Build the untrained model of a config; ValueError if timm cannot build it."""
    size, channels = preprocess.image_size, preprocess.channels
    if config.name != "vit":
        arguments = complete_arguments(config.name, config.timm_args or {}, size, channels)
        model = create(config.name, {**arguments, "num_classes": num_classes})
        return model.to(memory_format=torch.channels_last)  # faster
    return VisionTransformer(
        img_size=size, in_chans=channels, num_classes=num_classes, **config.vit_arguments()
    )


def most_with_weights(model: nn.Module, count: int, height: int, width: int) -> int:
    """Return how many of `count` images to classify at once if all their weights are kept."""
    reader: Any = require_attention(model)
    tokens = reader.num_prefix_tokens + math.prod(reader.patch_embed.grid(height, width))
    num_weights = tokens**2 * sum(block.attn.num_heads for block in reader.blocks)
    return max(1, min(count, MOST_WEIGHTS // num_weights))


def _dividing(work: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function of images that halves them until the memory is enough for `work`."""

    def divided(images: Tensor) -> Tensor:
        try:
            return work(images)
        except (MemoryError, RuntimeError) as error:
            if len(images) == 1 or not is_out_of_memory(error):
                raise
        # Not above: while an error is handled, it keeps what was computed in memory.
        return torch.cat([divided(part) for part in images.split(math.ceil(len(images) / 2))])

    return divided


@dataclass(frozen=True, repr=False)
class Classifier:
    """A model in evaluation mode with its preprocessing and class names.

    Attributes:
        model: Our VisionTransformer or any timm model, in evaluation mode, on the device.
        preprocess: Turns an image into the model's input.
        classes: The C class names.
        device: Where to compute.
        precision: Precision of matrix products, torch.float32 or torch.bfloat16.
        flip: Whether `logits` averages each image and its mirror image; maps explain the image.
        calibration: Calibration of the probabilities on the run's held-out images, or None.
        shift: Whether `logits` also averages views shifted by (-1, -1) and by (1, 1) pixels, with
            reflected borders, half of the weight together, as airbench does (arXiv 2404.00498).
    """

    model: nn.Module
    preprocess: Preprocess
    classes: tuple[str, ...]
    device: torch.device
    precision: torch.dtype
    flip: bool = False
    calibration: Calibration | None = None
    shift: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", torch.device(self.device))
        object.__setattr__(self, "classes", tuple(self.classes))
        self._require_evaluation()
        different = len({*self.classes}) == len(self.classes)
        require(different, "classes", self.classes, "names that differ from each other")
        if any(t.is_inference() for t in (*self.model.parameters(), *self.model.buffers())):
            with torch.inference_mode(False):  # where copies may have gradients, which maps need
                object.__setattr__(self, "model", copy_module(self.model))

    def _require_evaluation(self) -> None:
        allowed = "in evaluation mode; call model.eval()"
        require(not self.model.training, "model", "in training mode", allowed)

    def __repr__(self) -> str:
        """Describe this in a line, instead of listing every module."""
        kind, size = type(self.model).__name__, "x".join(map(str, self.preprocess.image_size))
        return (
            f"Classifier({kind}, {len(self.classes)} classes, {size} pixels, "
            f"{self.preprocess.channels} channels, {describe(self.device)}, {self.precision})"
        )

    @property
    def has_maps(self) -> bool:
        """Whether the model's attention can be read."""
        return attention_model(self.model) is not None

    @property
    def views(self) -> int:
        """Number of views of an image that `logits` averages: 1, 2, 3 or 6."""
        return (1 + self.flip) * (3 if self.shift else 1)

    @property
    def threads(self) -> int:
        """Number of threads that each compute their own images: torch's on a CPU, else 1.

        Attention modules from notebooks may store what they compute, so they get a single thread.
        """
        alone = self.device.type != "cpu" or stores_results(self.model)
        return 1 if alone else torch.get_num_threads()

    def forward(self, inputs: Tensor, batch_size: int = 500) -> Tensor:
        """Classify normalized images (N, channels, H, W) on the device: logits (N, C) float32."""
        return self._by_parts(self._forward, inputs, batch_size)

    def normalize(self, images: Tensor) -> Tensor:
        """Move images (N, channels, H, W) uint8 to the device and normalize them to float32."""
        return self.preprocess.normalize(images.to(self.device))

    def logits(self, images: Tensor | ImageSet, batch_size: int = 500) -> Tensor:
        """Classify images (N, channels, H, W) uint8, on any device, `batch_size` at most at once.

        Returns:
            Logits (N, C) float32, on the device.
        """
        return self._by_parts(self._classify, images, batch_size)

    def features(self, images: Tensor | ImageSet | Photo | Photos, batch_size: int = 500) -> Tensor:
        """Return the last layer's input for images or photos: (N, D) float32, on the device."""
        if not isinstance(images, Tensor | ImageSet):
            images = self._resize(images)
        return self._by_parts(self._features, images, batch_size)

    def part_size(self, batch_size: int = 500) -> int:
        """Return the number of images per forward pass that is fastest; fewer of large images."""
        batch_size = max(1, min(batch_size, MOST_PIXELS // math.prod(self.preprocess.image_size)))
        if self.device.type != "cpu":
            return batch_size
        return max(1, min(PART, batch_size // torch.get_num_threads()))

    def _by_parts(
        self, work: Callable[[Tensor], Tensor], images: Tensor | ImageSet, batch_size: int
    ) -> Tensor:
        """Apply a function to images in parts; on a CPU, each core works on another part."""
        size = self.part_size(batch_size)
        pixels = images if isinstance(images, Tensor) else images.images
        count = max(1, math.ceil(len(images) / size))
        parts, threads = pixels.split(size), min(self.threads, count)
        return torch.cat(map_on_cores(_dividing(work), parts, threads))

    def _classify(self, images: Tensor) -> Tensor:
        inputs = self.normalize(images)
        logits = self._classify_view(inputs)
        if not self.shift:
            return logits
        padded = F.pad(inputs, (1, 1, 1, 1), mode="reflect")
        down_right, up_left = padded[..., :-2, :-2], padded[..., 2:, 2:]
        shifted = self._classify_view(down_right) + self._classify_view(up_left)
        return logits / 2 + shifted / 4

    def _classify_view(self, inputs: Tensor) -> Tensor:
        logits = self._forward(inputs)
        return (logits + self._forward(inputs.flip(-1))) / 2 if self.flip else logits

    @torch.no_grad()
    def _forward(self, inputs: Tensor) -> Tensor:
        self._require_evaluation()
        with autocast(self.device, self.precision):
            logits: Tensor = self.model(inputs)
        if logits.shape[1] != len(self.classes):
            raise ValueError(f"classes: {len(self.classes)} names for {logits.shape[1]} logits")
        return logits.float()

    @torch.no_grad()
    def _features(self, images: Tensor) -> Tensor:
        self._require_evaluation()
        model: Any = self.model  # ours and timm's have both methods
        with autocast(self.device, self.precision):
            tokens = model.forward_features(self.normalize(images))
            features: Tensor = model.forward_head(tokens, pre_logits=True)
        return features.flatten(1).float()

    def maps(
        self,
        images: Tensor,
        kinds: Kinds = ("rollout",),
        target: Tensor | None = None,
        precision: torch.dtype = torch.float32,
        batch_size: int = 500,
        rollout: RolloutOptions = DEFAULTS,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Classify images (N, channels, H, W) uint8, on any device, and map the attention.

        Args:
            kinds: One kind of map or several, keys of `vit.explain.kinds.ALL_KINDS`.
            target: (N,) int64, the classes that class-specific maps explain; None explains the
                predicted ones.
            precision: Precision of the model's matrix products; maps are computed in float32.
            batch_size: Most images per forward pass, unless their attention weights take more than
                half a gigabyte.
            rollout: Options for kind "rollout" only.

        Returns:
            Logits (N, C) float32, and for each kind maps (N, rows, columns) of the images' own grid
            in the units of the kind, see `vit.explain.kinds`; (N, H, W) for "lrp_pixels".

        Raises:
            ValueError: The model has no maps, a kind is unknown, or an option is out of range.
        """
        self._require_evaluation()
        kinds = [kinds] if isinstance(kinds, str) else kinds
        require(len(images) > 0, "images", "none", "one or more")
        if target is not None:
            require(len(target) == len(images), "target", len(target), f"{len(images)} classes")
        parts = []
        batch_size = most_with_weights(self.model, batch_size, *images.shape[2:])
        for start in range(0, len(images), batch_size):
            part = slice(start, start + batch_size)
            labels = None if target is None else target[part].to(self.device)
            inputs = self.normalize(images[part])
            with autocast(self.device, torch.float32):  # not in the caller's autocast
                maps = attention_maps(self.model, inputs, kinds, labels, precision, rollout)
            parts.append(maps)
        logits = torch.cat([logits for logits, _ in parts])
        return logits, {kind: torch.cat([maps[kind] for _, maps in parts]) for kind in kinds}

    @overload
    def predict(self, photos: Photo, top: int = ...) -> Ranking: ...
    @overload
    def predict(self, photos: Photos, top: int = ...) -> list[Ranking]: ...
    def predict(self, photos: Photo | Photos, top: int = 5) -> Ranking | list[Ranking]:
        """Return the probabilities of the `top` classes, best first, by name.

        They are calibrated if the model has a `calibration`.

        Args:
            photos: A path, a Pillow image or an array (height, width, channels) uint8, of any
                size; or a list of them, which returns a list.

        Raises:
            ValueError: A photo cannot be read.
        """
        require(top >= 1, "top", top, "at least 1")
        several = isinstance(photos, list | tuple)
        if several and not photos:
            return []
        rankings = self.ranked(self.logits(self._resize(photos)), top)
        return rankings if several else rankings[0]

    def _resize(self, photos: Photo | Photos) -> Tensor:
        """Return photos as (N, channels, H, W) uint8."""
        photos = photos if isinstance(photos, list | tuple) else [photos]
        require(len(photos) > 0, "photos", "an empty list", "one or more")
        # Two threads must not load one Pillow image.
        repeated = len({*map(id, photos)}) < len(photos)
        threads = 1 if repeated else min(len(photos), torch.get_num_threads())
        return torch.stack(map_on_cores(self.preprocess.resize, photos, threads))

    @overload
    def explain(
        self, photos: Photo, kinds: Kinds = ..., target: str | None = ...
    ) -> Explanation: ...
    @overload
    def explain(
        self, photos: Photos, kinds: Kinds = ..., target: str | None = ...
    ) -> list[Explanation]: ...
    def explain(
        self, photos: Photo | Photos, kinds: Kinds = PHOTO_KINDS, target: str | None = None
    ) -> Explanation | list[Explanation]:
        """Map what the model attends to in a photo or a list of photos, as for `predict`.

        Args:
            photos: As for `predict`.
            kinds: One kind of map or several, keys of `vit.explain.kinds.ALL_KINDS`.
            target: The class that class-specific maps explain; None explains the predicted one.

        Raises:
            ValueError: A photo cannot be read, a kind or class is unknown, or there are no maps.
        """
        kinds = [kinds] if isinstance(kinds, str) else list(kinds)
        require(bool(kinds), "kinds", kinds, f"one or more of {', '.join(ALL_KINDS)}")
        label = None if target is None else self.class_index(target)
        if isinstance(photos, list | tuple):
            return [self._explain(photo, kinds, label) for photo in photos]
        return self._explain(photos, kinds, label)

    def _explain(self, photo: Photo, kinds: list[str], label: int | None) -> Explanation:
        pixels = to_photo(photo, self.preprocess.channels)
        image = self.preprocess.resize(pixels)[None]
        logits = self.logits(image)  # in the precision of `predict`; maps are made in float32
        (probabilities,) = self.ranked(logits, len(self.classes))
        if label is None:
            label = self.classes.index(next(iter(probabilities)))
        _, maps = self.maps(image, kinds, torch.tensor([label]))
        seen, padding = self.preprocess.view(*pixels.shape[:2])
        return Explanation(
            photo=pixels,
            seen=seen,
            padding=padding,
            fill=self.preprocess.fill,
            maps={kind: values[0].cpu() for kind, values in maps.items()},
            probabilities=probabilities,
            target=self.classes[label],
            name=Path(photo).name if isinstance(photo, str | Path) else "photo",
        )

    def scaled(self, logits: Tensor) -> Tensor:
        """Divide logits (N, C) by the temperature, if there is one."""
        return logits / self.calibration.temperature if self.calibration else logits

    def ranked(self, logits: Tensor, top: int) -> list[Ranking]:
        """Return the calibrated probabilities of the `top` classes, from logits (N, C)."""
        best = self.scaled(logits).softmax(dim=1).topk(min(top, len(self.classes)))
        return [
            {self.classes[index]: probability for probability, index in zip(*row, strict=True)}
            for row in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ]

    def class_index(self, name: str) -> int:
        """Return the index of a class; ValueError if there is none of this name."""
        allowed = f"a class of this model, one of {join(self.classes)}"
        require(name in self.classes, "target", name, allowed)
        return self.classes.index(name)
