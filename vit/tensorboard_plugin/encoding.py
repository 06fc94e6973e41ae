"""The bytes of a record in an event file, and back.

An image has up to three tags. TAG holds the details, JSON compressed by zlib; TAG/weights the
attention weights, an npz file of 8-bit numbers with a scale for each row; TAG/features the numbers
of its patches, likewise, with a scale for each kind of number. Its metadata name the tag of their
frames, which images share and which are stored in the same way. A model that the page can run has
LIVE_TAG, JSON compressed by zlib, and a tag for its weights at each step, so that steps are listed
without reading weights: numbers without gaps, whose metadata have their dtype and the SHA-256 of
their graph. TensorBoard reads files that anybody may have written, so decoding checks everything
and trusts no size that the data claims.

Shapes: L layers, H heads, N tokens, P of them patches, K numbers of a patch.
"""

import io
import json
import zipfile
import zlib
from typing import Literal, TypeVar, get_args

import numpy as np
from pydantic import TypeAdapter, ValidationError
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_TENSOR, Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING

from vit.tensorboard_plugin.records import MAX_WEIGHTS, VERSION, Details, Live, Record

PLUGIN_NAME = "attention"
WEIGHTS_TAG = "{}/weights"  # of an image
FEATURES_TAG = "{}/features"
FRAMES_TAG = "attention/frames"  # in runs of this project
LIVE_TAG = "attention/live"
LIVE_WEIGHTS_TAG = "attention/live/weights/{:08d}"  # of a step
MAX_DETAILS = 2**26  # bytes of JSON, that of a live model included
MAX_NPZ = 5 * MAX_WEIGHTS + 2**12  # bytes of weights, of at most as many scales, and of headers

T = TypeVar("T")
Part = Literal["details", "weights", "features", "live", "live_weights"]
Floats = Literal["float16", "float32"]

_details, _live = TypeAdapter(Details), TypeAdapter(Live)


def part_of(plugin_content: bytes) -> Part:
    """Return which part of a record a tag holds; a ValueError if of another version, or damaged."""
    try:
        metadata = json.loads(plugin_content)
        version, part = metadata["version"], metadata["part"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError("the record does not say its version; it is damaged") from None
    if version != VERSION:
        raise ValueError(
            f"the record is of version {version}, and this Attention tab reads version {VERSION}; "
            "update vit-from-scratch, or log the run again"
        )
    if part not in get_args(Part):
        raise ValueError(f"the record has an unknown part {part!r}; it is damaged")
    return part


def summaries(tag: str, record: Record, frames: str = FRAMES_TAG) -> Summary:
    """Return the details, weights and features, which name the tag of their frames, as values."""
    values = [_value(tag, "details", zlib.compress(details_json(record.details)))]
    if record.weights is not None:
        values.append(_value(WEIGHTS_TAG.format(tag), "weights", encode_weights(record.weights)))
    if record.features is not None:
        data = encode_weights(record.features.swapaxes(1, 2))
        values.append(_value(FEATURES_TAG.format(tag), "features", data, frames=frames))
    return Summary(value=values)


def frames_summary(frames: np.ndarray, tag: str = FRAMES_TAG) -> Summary:
    """Return frames (L, K, D), see `vit.explain.features`, as TensorBoard stores them."""
    return Summary(value=[_value(tag, "features", encode_weights(frames))])


def decode_details(data: bytes) -> Details:
    """Decode and check details, compressed JSON; a one-line ValueError if they are damaged."""
    most = min(MAX_DETAILS, 2**23 + 16 * len(data))  # honest details are hardly compressible
    return _decoded(data, _details, "the details of the record are damaged", most)


def details_json(details: Details) -> bytes:
    """Return the details as JSON."""
    return _details.dump_json(details)


def live_summary(live: Live) -> Summary:
    """Return a live model, without its weights, as TensorBoard stores it."""
    return Summary(value=[_value(LIVE_TAG, "live", zlib.compress(_live.dump_json(live)))])


def decode_live(data: bytes) -> Live:
    """Decode and check what `live_summary` contains; errors as for `decode_details`."""
    return _decoded(data, _live, "the live model is damaged")


def live_weights(step: int, live: Live, dtype: Floats, weights: bytes) -> Summary:
    """Return the weights of a live model at a step, little-endian, as TensorBoard stores them."""
    tag, about = LIVE_WEIGHTS_TAG.format(step), {"dtype": dtype, "graph": live.digest}
    return Summary(value=[_value(tag, "live_weights", weights, **about)])


def live_dtype(plugin_content: bytes, live: Live) -> Floats | None:
    """Return the dtype of the weights under a tag; None if they do not belong to this model."""
    metadata = json.loads(plugin_content)
    belongs = metadata["part"] == "live_weights" and metadata.get("graph") == live.digest
    return metadata["dtype"] if belongs and metadata.get("dtype") in get_args(Floats) else None


def encode_weights(weights: np.ndarray) -> bytes:
    """Return finite weights (L, H, N, N), or features (L, K, P), as an npz file of 8-bit numbers.

    Every row is divided by its largest absolute value, so a weight is off by at most 1/510 of it,
    or 1/254 if there are negative weights. The file has "weights", (L, H, N, N) uint8, or int8 if
    any is negative, and "scale", (L, H, N) float32: row i of a head is weights[l, h, i] *
    scale[l, h, i].
    """
    dtype = np.uint8 if weights.min() >= 0 else np.int8
    scale = np.abs(weights).max(axis=-1).astype(np.float32) / np.iinfo(dtype).max
    codes = np.rint(weights / np.where(scale > 0, scale, 1)[..., None]).astype(dtype)
    file = io.BytesIO()
    # As np.savez_compressed, whose level of compression is six times slower and saves little.
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, array in {"weights": codes, "scale": scale}.items():
            with archive.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
    return file.getvalue()


def decode_weights(data: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Decode and check what `encode_weights` returned: the numbers, and the scale of each row.

    Raises:
        ValueError: The data is damaged or has too many weights; one line.
    """
    damaged = "the weights of the record are damaged"
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if sum(file.file_size for file in archive.infolist()) > MAX_NPZ:
                raise ValueError(f"more than {MAX_NPZ} bytes")
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            codes, scale = (np.asarray(arrays[name]) for name in ("weights", "scale"))
    except Exception as error:  # zipfile, zlib and NumPy raise many kinds for damaged files
        raise ValueError(f"{damaged}: {' '.join(str(error).split())}") from None
    fits = codes.ndim >= 3 and scale.shape == codes.shape[:-1] and 0 < codes.size <= MAX_WEIGHTS
    if not fits or codes.dtype not in (np.uint8, np.int8) or scale.dtype != np.float32:
        arrays = codes.shape, codes.dtype.name, scale.shape, scale.dtype.name
        raise ValueError(f"{damaged}: {arrays}")
    if not (np.isfinite(scale).all() and (scale >= 0).all()):
        raise ValueError(f"{damaged}: scale is negative or not finite")
    return codes, scale


def _decoded(data: bytes, adapter: TypeAdapter[T], damaged: str, most: int = MAX_DETAILS) -> T:
    """Decompress and check JSON; `damaged` begins the message of an error."""
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(data, most)
        if not unpacker.eof:
            raise ValueError(f"{damaged}: cut short, or longer than {most} bytes")
        return adapter.validate_json(text, strict=True)
    except zlib.error as error:
        raise ValueError(f"{damaged}: {error}") from None
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, problem["loc"])) or "record"
        message = " ".join(problem["msg"].removeprefix("Value error, ").split())
        raise ValueError(f"{damaged}: {place}: {message}") from None


def _value(tag: str, part: Part, data: bytes, **about: str) -> Summary.Value:
    content = json.dumps({"version": VERSION, "part": part, **about}).encode()
    return Summary.Value(
        tag=tag,
        # Without data_class, TensorBoard drops the value.
        metadata=SummaryMetadata(
            plugin_data=SummaryMetadata.PluginData(plugin_name=PLUGIN_NAME, content=content),
            data_class=DATA_CLASS_TENSOR,
        ),
        tensor=TensorProto(dtype=DT_STRING, string_val=[data], tensor_shape=TensorShapeProto()),
    )
