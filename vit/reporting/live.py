"""A model that answers questions elsewhere, such as in a browser: an ONNX graph, and weights.

The graph is that of `Interventions` for one image, in float32:

    images   (1, channels, H, W) float32, normalized
    gates    (L, H) float32, of the heads
    keep     (1, P) float32, of the patches
    logits   (1, C) float32
    weights  (1, L, H, N, N) float32, of attention
    lens_classes        (L, 1 + N, k) int32, as in `vit.tensorboard_plugin.records.Lens`; (L, 1, k)
                        if the classifier cannot read a token alone
    lens_probabilities  float32, of the same shape

It refers to the weights as external data in weights.bin: all tensors of floats in the order of the
model's state dict, as little-endian float32 without gaps. So one graph serves all steps of a run.
Weights that are stored as float16 are widened before they are loaded.
"""

import math
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from tensorboard.compat.proto.summary_pb2 import Summary
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.tensorboard import SummaryWriter

from vit.classifier import Classifier
from vit.console import note_once, shorten, warn
from vit.explain.interventions import Answer, Interventions, gates_of
from vit.model.attention_model import require_attention
from vit.model.copying import copy_module
from vit.reporting.export_formats import to_onnx, trace
from vit.run.tracker import add_summary
from vit.settings import parse
from vit.tensorboard_plugin.encoding import live_summary, live_weights
from vit.tensorboard_plugin.records import MAX_LIVE_WEIGHTS, Live, LiveSpec

WEIGHTS_FILE = "weights.bin"  # to which the graph refers
INPUTS = "images", "gates", "keep"  # names in the graph
OUTPUTS = "logits", "weights", "lens_classes", "lens_probabilities"
HALF_ERROR = 1e-2  # of a logit, up to which weights are stored as float16
COMPARED = 32  # images whose logits are compared, at most


def weights_of(classifier: Classifier, dtype: torch.dtype) -> bytes:
    """Return the weights that the graph refers to, float32 or float16, without gaps."""
    tensors = _floats(classifier.model).values()
    return b"".join(tensor.to("cpu", dtype).numpy().tobytes() for tensor in tensors)


def graph_of(classifier: Classifier) -> bytes:
    """Return the ONNX graph, in float32 and the same for all weights.

    ValueError if the model's attention cannot be read or exported.
    """
    import onnx_ir as ir
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass
    from onnxscript.optimizer import fold_constants, remove_unused_nodes

    module, floats = copy_module(classifier.model).cpu().float(), _floats(classifier.model)
    named = {name: v.to("cpu", torch.float32).contiguous() for name, v in floats.items()}
    interventions, preprocess = Interventions(module), classifier.preprocess
    rows, columns = require_attention(module).patch_embed.grid(*preprocess.image_size)
    images = torch.zeros(1, preprocess.channels, *preprocess.image_size)
    inputs = images, gates_of(module), torch.ones(1, rows * columns), named
    # While the exporter optimizes, the weights are inputs. As initializers, it would fold small
    # ones into constants and merge equal ones, which hold for this step only.
    # The exporter's optimization would look for patterns for a second, as ONNX Runtime does later.
    traced, names = trace(_WithWeights(interventions), inputs), [*INPUTS, *named]
    model = to_onnx(traced, names, [*OUTPUTS], optimize=False).model
    fold_constants(model)
    remove_unused_nodes(model)
    graph, offset = model.graph, 0
    for value, (name, tensor) in zip(graph.inputs[len(INPUTS) :], named.items(), strict=True):
        shape, size = ir.Shape(tensor.shape), tensor.nbytes
        value.const_value = ir.ExternalTensor(
            WEIGHTS_FILE, offset, size, ir.DataType.FLOAT, shape=shape, name=name
        )
        graph.initializers.add(value)
        offset += size
    del graph.inputs[len(INPUTS) :]
    ClearMetadataAndDocStringPass()(model)  # names and paths of the code
    return ir.to_proto(model).SerializeToString(deterministic=True)


class LiveLog:
    """Stores a model at `planned` steps, in at most 10^6 * `megabytes`, for the Attention tab."""

    def __init__(self, megabytes: float, planned: int = 1) -> None:
        self.megabytes, self.planned = megabytes, planned
        self._room = 1e6 * megabytes
        self._live: Live | None = None  # made once in a process: exporting takes seconds

    def summaries(
        self, classifier: Classifier, images: Tensor, step: int, later: int = 0
    ) -> Iterator[Summary]:
        """Yield the graph, the first time, and weights, if they fit beside those of later steps.

        Weights are float16 if that changes no logit of the first images (B, channels, H, W) uint8
        by more than `HALF_ERROR`. `later` is the number of planned steps after this one. If the
        model cannot be exported, a warning says why, and so does the tab.
        """
        if self._live is None:
            self._live = self._export(classifier)
            self._room -= len(self._live.graph)
            yield live_summary(self._live)
        if self._live.spec is None:
            return
        half = 2 * self._live.spec.floats
        room = min(self._room - half * (later + (later > 0)), MAX_LIVE_WEIGHTS)
        dtype = _dtype(classifier, images) if half <= room else None
        if dtype is None:
            return
        weights = weights_of(classifier, dtype)
        if len(weights) > room:
            reason = f"its weights, {len(weights) / 1e6:.1f} MB as float32, do not fit into the "
            reason += f"{max(room, 0) / 1e6:.1f} MB left for them"
            warn(f"the Attention tab cannot run step {step}: {reason}")
            return
        self._room -= len(weights)
        name: Any = str(dtype).removeprefix("torch.")
        yield live_weights(step, self._live, name, weights)

    def _export(self, classifier: Classifier) -> Live:
        """Return the model without weights, or the reason why it cannot be exported.

        The last steps that fit as float16 are live, with room for the very last as float32.
        """
        try:
            spec = _spec(classifier)
            half = 2 * spec.floats
            graph = graph_of(classifier) if half <= self._room else b""
            fitting = int((self._room - len(graph)) // half)
            count = min(self.planned, max(int(fitting > 0), fitting - 1))
            wanted = math.ceil((half * (self.planned + 1) + len(graph)) / 1e6)
            note = f"the weights of at most {count} of {self.planned} steps fit into "
            note += f"{self.megabytes:g} MB"
            if self.planned > 1:  # in training
                note += f"; training with --track.live_mb {wanted} stores all"
            if not count:
                raise ValueError(note)
            return Live(spec=spec, note=note if count < self.planned else "", graph=graph)
        except Exception as error:  # of many kinds; logging must not end a run
            reason = shorten(error, 300)
        warn(f"the Attention tab cannot run this model: {reason}")
        return Live(spec=None, note=reason)


def add_live(
    writer: SummaryWriter, classifier: Classifier, images: Tensor, step: int, megabytes: float = 1e6
) -> None:
    """Write a model for the Attention tab at a step, and its graph with the writer's first one.

    A writer belongs to one model. Images are (B, channels, height, width) uint8, of any size.
    """
    log = _logs.setdefault(writer, LiveLog(megabytes))
    try:
        pixels = classifier.preprocess.resize_all(images.cpu())
        for summary in log.summaries(classifier, pixels, step):
            add_summary(writer, summary, step)
    except (RuntimeError, ValueError) as error:  # such as other channels or another precision
        note_once(f"the Attention tab cannot run this model: {shorten(error, 300)}")


_logs: WeakKeyDictionary[SummaryWriter, LiveLog] = WeakKeyDictionary()


def _spec(classifier: Classifier) -> LiveSpec:
    """Describe a model; a ValueError tells that the page could not run it."""
    model, preprocess = require_attention(classifier.model), classifier.preprocess
    grid = model.patch_embed.grid(*preprocess.image_size)
    layers, heads = gates_of(classifier.model).shape
    floats = sum(tensor.numel() for tensor in _floats(classifier.model).values())
    if (most := MAX_LIVE_WEIGHTS // 2) < floats:  # as float16
        raise ValueError(f"it has {floats:,} weights, and the page runs at most {most:,}")
    values = {
        **vars(preprocess), "channels": preprocess.channels, "grid": grid,
        "prefix": model.num_prefix_tokens, "layers": layers, "heads": heads,
        "classes": list(classifier.classes), "floats": floats,
    }  # fmt: skip
    spec: LiveSpec = parse(LiveSpec, values, "its settings")
    return spec


@torch.no_grad()
def _dtype(classifier: Classifier, images: Tensor) -> torch.dtype | None:
    """Return the dtype that weights are stored in; None if the model diverged."""
    model, inputs = classifier.model, classifier.normalize(images[:COMPARED])
    logits = model(inputs)
    if not logits.isfinite().all():
        return None
    rounded = {name: tensor.half().to(tensor.dtype) for name, tensor in _floats(model).items()}
    if not all(tensor.isfinite().all() for tensor in rounded.values()):
        return torch.float32
    # In a copy: a signal that breaks this off must not leave the run with rounded weights.
    trial = copy_module(model)
    changed = functional_call(trial, rounded, (inputs,), tie_weights=False)  # each has its value
    error = (changed - logits).abs().max()
    return torch.float16 if error <= HALF_ERROR else torch.float32


class _WithWeights(nn.Module):
    """`Interventions` with the weights of its model as an argument."""

    def __init__(self, interventions: Interventions) -> None:
        super().__init__()
        self.interventions = interventions

    def forward(
        self, images: Tensor, gates: Tensor, keep: Tensor, weights: dict[str, Tensor]
    ) -> Answer:
        """Classify one image, with weights by their names in the model."""
        named = {f"model.{name}": tensor for name, tensor in weights.items()}
        inputs = images, gates, keep
        answer: Answer = functional_call(self.interventions, named, inputs, tie_weights=False)
        logits, attention, *lens = answer
        classes, probabilities = (part[:, 0] for part in lens)
        return logits, attention, classes.int(), probabilities


def _floats(model: nn.Module) -> dict[str, Tensor]:
    """Return all tensors of floats in the state dict."""
    return {name: v for name, v in model.state_dict().items() if v.is_floating_point()}
