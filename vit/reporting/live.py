"""A model that answers questions elsewhere, such as in a browser: an ONNX graph, and weights.

The graph is that of `Interventions` for one image, in float32:

    images   (1, channels, H, W) float32, normalized
    gates    (L, H) float32, of the heads
    keep     (1, P) float32, of the patches
    logits   (1, C) float32
    weights  (1, L, H, N, N) float32, of attention
    lens_classes        (L, 1 + N, k) int32, as in `vit.tensorboard_plugin.records.Lens`; (L, 1, k)
                        if the head cannot read a token alone
    lens_probabilities  as many, float32

It has no weights of the model. It refers to them as external data in weights.bin: all tensors of
floats in the order of the model's state dict, as little-endian float32 without gaps. So one graph
serves all steps of a run. Weights that are stored as float16 are widened before they are loaded.
"""

import copy
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call

from vit.classifier import Classifier
from vit.explain.interventions import Answer, Interventions
from vit.files import write_atomically
from vit.model.attention_model import require_attention
from vit.reporting.export_formats import require_packages, trace

GRAPH_FILE, WEIGHTS_FILE = "graph.onnx", "weights.bin"
INPUTS = "images", "gates", "keep"  # names in the graph
OUTPUTS = "logits", "weights", "lens_classes", "lens_probabilities"
PACKAGES = ("onnx", "onnxscript")


def write_live(classifier: Classifier, folder: Path) -> None:
    """Write graph.onnx and weights.bin, in float32, to a folder that may exist.

    Raises:
        ValueError: The same as for `graph_of`.
    """
    graph = graph_of(classifier)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / WEIGHTS_FILE, weights_of(classifier, torch.float32))
    write_atomically(folder / GRAPH_FILE, graph)


def weights_of(classifier: Classifier, dtype: torch.dtype) -> bytes:
    """Return the weights that the graph refers to, without gaps.

    Args:
        classifier: Any classifier with the same architecture as that of the graph.
        dtype: torch.float32, or torch.float16, where numbers beyond 65,504 become infinite.
    """
    tensors = _named_weights(classifier.model).values()
    return b"".join(tensor.to(dtype).numpy().tobytes() for tensor in tensors)


def graph_of(classifier: Classifier) -> bytes:
    """Return the ONNX graph, the same for all weights.

    Whatever the precision of the classifier, the graph computes in float32.

    Raises:
        ValueError: The packages are not installed, the model's attention cannot be read, or
            torch.export does not support the model.
    """
    require_packages("the live model", PACKAGES)
    import onnx_ir as ir
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    model, named = copy.deepcopy(classifier.model).cpu().float(), _named_weights(classifier.model)
    interventions, preprocess = Interventions(model), classifier.preprocess
    rows, columns = require_attention(model).patch_embed.grid(*preprocess.image_size)
    inputs = (
        torch.zeros(1, preprocess.channels, *preprocess.image_size),
        torch.ones(interventions.gates_shape),
        torch.ones(1, rows * columns),
        named,
    )
    # While the exporter optimizes, the weights are inputs. As initializers, it would fold small
    # ones into constants and merge equal ones, which hold for this step only.
    program = torch.onnx.export(
        trace(_WithWeights(interventions), inputs),
        dynamo=True,
        verbose=False,
        input_names=[*INPUTS, *named],
        output_names=OUTPUTS,
    )
    assert program is not None
    graph, offset = program.model.graph, 0
    for value in list(graph.inputs[len(INPUTS) :]):
        assert value.name is not None
        tensor = named[value.name]
        shape = ir.Shape(tensor.shape)
        value.const_value = ir.ExternalTensor(
            WEIGHTS_FILE, offset, tensor.nbytes, ir.DataType.FLOAT, shape=shape, name=value.name
        )
        graph.initializers.add(value)
        offset += tensor.nbytes
    del graph.inputs[len(INPUTS) :]
    ClearMetadataAndDocStringPass()(program.model)  # names and paths of the code
    serialized: bytes = ir.to_proto(program.model).SerializeToString(deterministic=True)
    return serialized


class _WithWeights(nn.Module):
    """`Interventions` with the weights of its model as an argument.

    Args:
        interventions: Theirs are not used.
    """

    def __init__(self, interventions: Interventions) -> None:
        super().__init__()
        self.interventions = interventions

    def forward(
        self, images: Tensor, gates: Tensor, keep: Tensor, weights: dict[str, Tensor]
    ) -> Answer:
        """Do what `Interventions` does, with weights by their names in the model."""
        named = {f"masked.model.{name}": tensor for name, tensor in weights.items()}
        inputs = images, gates, keep
        logits, attention, *lens = functional_call(self.interventions, named, inputs)
        classes, probabilities = (part[:, 0] for part in lens)  # of the only image
        return logits, attention, classes.int(), probabilities


def _named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return all tensors of floats in the state dict, as contiguous float32 on the CPU."""
    return {
        name: tensor.to("cpu", torch.float32).contiguous()
        for name, tensor in model.state_dict().items()
        if tensor.is_floating_point()
    }
