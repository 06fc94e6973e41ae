"""Records: what the Attention tab shows of one image at one step, and the model that it can run.

Details and live models are checked when they are made, whether by this project or from a file that
anybody may have written; see `vit.tensorboard_plugin.encoding` for the bytes.

Shapes: L layers, H heads, N tokens (prefix, then P patches, row by row), C classes, K numbers of a
patch in `vit.explain.features`.
"""

import base64
import dataclasses
import hashlib
import io
import math
import struct
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import ConfigDict, Field, PlainSerializer
from pydantic.dataclasses import dataclass

VERSION = 1
LENS_CLASSES = 3  # classes of each token in the logit lens
TOP_CLASSES = 5

MAX_WEIGHTS = 2**24  # of one image, L * H * N * N; ViT-L/16 at 224 pixels has 14.9 million
MAX_PIXELS = 2**24  # of one image, 4096 x 4096
MAX_GRAPH = 2**24  # bytes of a live model's ONNX graph
MAX_LIVE_WEIGHTS = 2**28  # bytes of a live model's weights

PNG_URL = "data:image/png;base64,"

Count = Annotated[int, Field(ge=1, le=100_000)]
Index = Annotated[int, Field(ge=0, le=1_000_000)]
Number = Annotated[float, Field(allow_inf_nan=False)]
# Stored with four significant digits.
Finite = Annotated[Number, PlainSerializer(lambda value: float(f"{value:.4g}"))]
Fraction = Annotated[Finite, Field(ge=0, le=1.0001)]  # float32 may round to just above 1
Heads = list[list[Fraction]]  # (L, H)


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Statistics of every head for one image, each (L, H), see `vit.explain.statistics`."""

    entropy: Heads
    # In pixels; None if patches are not square.
    distance: list[list[Annotated[Finite, Field(ge=0)]]] | None
    sink: Heads
    # Fall of the true class's probability on held-out images when the head is muted, if measured.
    importance: list[list[Annotated[Finite, Field(ge=-1, le=1)]]] | None = None


@dataclass(frozen=True, kw_only=True)
class Map:
    """A map of the whole image."""

    kind: str  # the same in all records, e.g. "rollout"
    title: str
    target: Index | None  # the class that it explains; None if it is class-agnostic
    values: list[Finite]  # (P,) in units of uniform attention, or of the mean of absolute values
    signed: bool = False  # positive for the class, negative against it


@dataclass(frozen=True, kw_only=True)
class Lens:
    """The classes that the tokens of every layer predict, and their probabilities.

    Both are (L, 1 + N, k), best first, with k the smaller of 3 and C: for what the classifier reads
    after that layer, then for each token.
    """

    classes: list[list[list[Index]]]
    probabilities: list[list[list[Fraction]]]


@dataclass(frozen=True, kw_only=True)
class Details:
    """Everything about an image at a step but the attention weights; errors as `Record`."""

    # The image as the model sees it: an RGB PNG file, see `image_url`.
    image: Annotated[str, Field(pattern=f"^{PNG_URL}[A-Za-z0-9+/]+=*$")]
    image_size: tuple[Count, Count]  # height and width
    grid: tuple[Count, Count]  # rows and columns of patches
    prefix: list[str]  # names of the tokens before the patches
    layers: Count
    heads: Count
    readout: Literal["class_token", "mean"] | None  # what the classifier reads, if known
    classes: list[str]  # empty if unknown
    label: Index | None
    # The most probable classes, best first.
    top: Annotated[list[tuple[Index, Fraction]], Field(max_length=TOP_CLASSES)]
    statistics: Statistics
    maps: Annotated[list[Map], Field(max_length=1000)]
    lens: Lens | None = None  # the logit lens, if tokens can be read
    name: str = ""  # of the file that the image is from

    @property
    def tokens(self) -> int:
        """N, the number of tokens."""
        return len(self.prefix) + math.prod(self.grid)

    def __post_init__(self) -> None:
        if _png_size(self.image) != self.image_size:
            raise ValueError(f"image is not a PNG file of {self.image_size} pixels")
        if math.prod(self.image_size) > MAX_PIXELS:
            raise ValueError(f"image_size: {self.image_size} is more than {MAX_PIXELS} pixels")
        for name, values in vars(self.statistics).items():
            if values is not None:
                _check_shape(name, values, (self.layers, self.heads))
        for heat in self.maps:
            _check_shape(f"map {heat.kind}", heat.values, (math.prod(self.grid),))
        indices = [self.label, *(index for index, _ in self.top), *(m.target for m in self.maps)]
        largest = max((index for index in indices if index is not None), default=-1)
        if self.lens is not None:
            shape = (self.layers, 1 + self.tokens, min(LENS_CLASSES, len(self.classes)))
            _check_shape("lens", self.lens.probabilities, shape)
            largest = max(largest, int(_check_shape("lens", self.lens.classes, shape).max()))
        if largest >= len(self.classes):
            raise ValueError(f"class {largest} does not exist; there are {len(self.classes)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """What the Attention tab shows of one image at one step."""

    details: Details
    weights: np.ndarray | None  # (L, H, N, N), finite; without them, the tab shows maps only
    features: np.ndarray | None = None  # (L, P, K), finite, see `vit.explain.features`


@dataclass(frozen=True, kw_only=True)
class LiveSpec:
    """What a model that runs in the page takes and returns."""

    channels: Literal[1, 3]
    image_size: tuple[Count, Count]  # height and width of its images
    grid: tuple[Count, Count]  # rows and columns of patches
    prefix: Annotated[int, Field(ge=0, le=100_000)]  # number of tokens before the patches
    layers: Count
    heads: Count
    classes: Annotated[list[str], Field(min_length=1)]
    floats: Annotated[int, Field(ge=1, le=MAX_LIVE_WEIGHTS // 2)]  # number of weights
    # Those of `vit.data.pixels.ArrayPreprocess`.
    mean: list[Number]
    std: list[Annotated[Number, Field(gt=0)]]
    interpolation: str
    fit: Literal["crop", "pad", "squash"]
    crop_pct: Annotated[float, Field(gt=0, le=1)]

    def __post_init__(self) -> None:
        _check_shape("mean", self.mean, (self.channels,))
        _check_shape("std", self.std, (self.channels,))
        if math.prod(self.image_size) > MAX_PIXELS:
            raise ValueError(f"image_size: {self.image_size} is more than {MAX_PIXELS} pixels")
        weights = self.layers * self.heads * (self.prefix + math.prod(self.grid)) ** 2
        if weights > MAX_WEIGHTS:
            raise ValueError(f"{weights} attention weights are more than {MAX_WEIGHTS}")


BASE64 = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")


@dataclass(frozen=True, kw_only=True, config=BASE64)
class Live:
    """The model of a run, without its weights, or why the page cannot run it."""

    spec: LiveSpec | None
    note: Annotated[str, Field(max_length=1000)]  # why there is no model, or no weights of steps
    graph: bytes = b""  # ONNX, see `vit.reporting.live`

    def __post_init__(self) -> None:
        if len(self.graph) > MAX_GRAPH or bool(self.graph) != (self.spec is not None):
            raise ValueError(f"the graph has {len(self.graph)} bytes; at most {MAX_GRAPH}")

    @property
    def digest(self) -> str:
        """SHA-256 of the graph, which its weights name."""
        return hashlib.sha256(self.graph).hexdigest()


def image_url(pixels: np.ndarray) -> str:
    """Return an image, (height, width, 3) uint8, as a PNG file in a data URL."""
    from PIL import Image  # TensorBoard starts without it

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return PNG_URL + base64.b64encode(file.getvalue()).decode()


def _check_shape(name: str, values: Sequence[Any], shape: tuple[int, ...]) -> np.ndarray:
    """Return nested lists as an array; a ValueError if they do not have the shape."""
    try:
        array = np.asarray(values)
    except ValueError:  # lists of different lengths
        raise ValueError(f"{name} is ragged; it must be {shape}") from None
    if array.shape != shape:
        raise ValueError(f"{name} is {array.shape}; it must be {shape}")
    return array


def _png_size(url: str) -> tuple[int, int] | None:
    """Return height and width from the header of a PNG file in a data URL, or None."""
    start = base64.b64decode(url[len(PNG_URL) : len(PNG_URL) + 32])
    if len(start) < 24 or not start.startswith(b"\x89PNG\r\n\x1a\n"):
        return None
    width, height = struct.unpack(">II", start[16:24])
    return height, width
