"""Formats that other programs load: timm's folder, ONNX, and torch.export.

Each has a function that writes a model and one that loads the result with its own runtime. ONNX and
torch.export take images that are normalized already; their metadata say how, the first two as JSON:

    classes     the class names
    preprocess  the fields of `vit.data.preprocess.Preprocess`
    input       what the model takes, in words
"""

import inspect
import json
import re
import warnings
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor, nn

from vit.classifier import Classifier
from vit.console import shorten
from vit.data.preprocess import Preprocess
from vit.files import write_atomically, write_json
from vit.model.config import TIMM, ModelConfig
from vit.model.copying import copy_module
from vit.model.timm_model import NORM_EPS, classifier_layers, complete_arguments
from vit.model.variants import is_edited
from vit.pretrained.architecture import by_their_names

INPUT, OUTPUT = "images", "logits"  # names in the ONNX graph
# timm's models, by class and the epsilon of their layer norms, which is no argument. All arguments
# are replaced by those of the model.
TIMM_ARCHITECTURES = {
    "VisionTransformer": {1e-6: "vit_tiny_patch16_224", 1e-5: "vit_base_patch32_clip_224"},
    "VisionTransformerRelPos": {1e-6: "vit_relpos_small_patch16_224"},
    "Beit": {1e-6: "beit_base_patch16_224"},
    "Eva": {1e-6: "vit_small_patch16_rope_224"},
}
# Settings of which timm's Vision Transformers have some values only.
IN_TIMM: dict[str, set[Any]] = {
    "stem": {"linear"}, "mlp_conv": {False}, "attention": {"dot"},
    "rel_pos": {"none", "bias", "rope"},
}  # fmt: skip
CROP_MODES = {"crop": "center", "pad": "border", "squash": "squash"}  # timm's words for `fit`
TRACED_BATCH = 2  # torch.export takes a batch of 1 for a constant

Runner = Callable[[Tensor], Tensor]  # normalized images (B, channels, H, W) to logits (B, C)


class Format(NamedTuple):
    """A format: the packages it needs, the one that loads it, and functions that write and load."""

    packages: tuple[str, ...]
    runtime: str
    write: Callable[[Classifier, ModelConfig, Path], None]
    load: Callable[[Path], Runner]


def timm_arguments(config: ModelConfig, preprocess: Preprocess) -> tuple[str, dict[str, Any]]:
    """Return the name and arguments with which timm builds a model; ValueError if it cannot."""
    if config.name != "vit":
        size, channels = preprocess.image_size, preprocess.channels
        arguments = complete_arguments(config.name, config.timm_args or {}, size, channels)
        arguments.pop(NORM_EPS, None)
        return config.name.removeprefix(TIMM), arguments
    own = vars(config)
    lacking = [f"model.{key}={own[key]}" for key in IN_TIMM if own[key] not in IN_TIMM[key]]
    if config.rel_pos != "none" and config.act_layer != "gelu":
        lacking.append(f"model.act_layer={config.act_layer} with model.rel_pos={config.rel_pos}")
    if lacking:
        raise ValueError(
            f"export: timm is not possible, because timm has no {' and no '.join(lacking)}; export "
            "to onnx or torch, or train the recipe plain"
        )
    if is_edited("dot"):
        raise ValueError(
            "export: timm is not possible, because vit/model/attention.py was edited and timm has "
            "its own attention; export to onnx or torch"
        )
    import timm

    bias = "VisionTransformerRelPos" if config.pos_embed == "none" else "Beit"
    name = {"bias": bias, "rope": "Eva"}.get(config.rel_pos, "VisionTransformer")
    # The fields of the config have the names of timm's VisionTransformer; `values` adds those of
    # the other classes.
    fc_norm = config.global_pool == "avg" if config.fc_norm is None else config.fc_norm
    values = own | {
        "img_size": list(preprocess.image_size),
        "in_chans": preprocess.channels,
        "pos_embed": "none" if config.pos_embed == "none" else "learn",
        "use_abs_pos_emb": config.pos_embed != "none",
        "num_reg_tokens": config.reg_tokens,
        "use_pre_transformer_norm": config.pre_norm,
        "fc_norm": fc_norm,
        "use_fc_norm": fc_norm,
        "rel_pos_type": "bias",
        "use_rel_pos_bias": True,
        "act_layer": config.act_layer if config.rel_pos == "none" else None,
    }
    accepted = inspect.signature(getattr(timm.models, name)).parameters
    # Dropout is a matter of training. timm takes None for the architecture's value or for none,
    # depending on who passes it.
    arguments = {k: v for k, v in values.items() if k in accepted and not k.endswith("_rate")}
    arguments = {k: v for k, v in arguments.items() if v is not None}
    architectures = TIMM_ARCHITECTURES[name]
    return architectures.get(config.norm_eps, architectures[1e-6]), arguments


def write_timm(classifier: Classifier, config: ModelConfig, folder: Path) -> None:
    """Write a folder that `load_timm` loads; ValueError if timm has no such model."""
    import timm

    preprocess, num_classes = classifier.preprocess, len(classifier.classes)
    architecture, arguments = timm_arguments(config, preprocess)
    twin: Any = timm.create_model(architecture, num_classes=num_classes, **arguments)
    theirs = twin.state_dict()
    weights = by_their_names(_portable(classifier).state_dict(), theirs)
    # timm's models with positions in attention always have layer scales: 1 where ours has none.
    scales = {k: torch.ones_like(v) for k, v in theirs.items() if re.search(r"\.gamma(_\d)?$", k)}
    weights = scales | weights
    shapes, their_shapes = ({k: v.shape for k, v in s.items()} for s in (weights, theirs))
    differing = sorted({name for name, _ in shapes.items() ^ their_shapes.items()})
    if differing:
        raise ValueError(
            "export: timm is not possible for this model: it differs from timm's in "
            f"{shorten(', '.join(differing), 200)}; export it to onnx or torch"
        )
    kept = ("first_conv", "classifier", "fixed_input_size")  # of layers; and what timm may resize
    content = {
        "architecture": architecture,
        "num_classes": num_classes,
        "num_features": twin.num_features,
        "label_names": list(classifier.classes),
        "model_args": arguments,
        "pretrained_cfg": {
            "num_classes": num_classes,
            "input_size": [preprocess.channels, *preprocess.image_size],
            **{key: vars(preprocess)[key] for key in ("mean", "std", "interpolation", "crop_pct")},
            "crop_mode": CROP_MODES[preprocess.fit],
            **{key: twin.pretrained_cfg[key] for key in kept},
        },
    }
    folder.mkdir()
    write_json(folder / "config.json", content)
    write_atomically(folder / "model.safetensors", safetensors.torch.save(weights))


def load_timm(folder: Path) -> Runner:
    """Load a folder with timm."""
    import timm  # takes seconds

    model: nn.Module = timm.create_model(f"local-dir:{folder}", pretrained=True)
    return torch.no_grad()(model.eval())


def write_onnx(classifier: Classifier, _: ModelConfig, path: Path) -> None:
    """Write an ONNX file with a dynamic batch, named input and output, and metadata."""
    axes = ({0: "batch"},)  # names
    program = to_onnx(_trace(classifier), [INPUT], [OUTPUT], dynamic_shapes=axes)
    program.model.metadata_props.update(metadata(classifier))
    for weight in program.model.graph.initializers.values():
        weight.shape = weight.type = None  # ONNX Runtime's quantize_dynamic would leave them stale
    program.save(path)


def to_onnx(
    program: torch.export.ExportedProgram, inputs: list[str], outputs: list[str], **options: Any
) -> torch.onnx.ONNXProgram:
    """Convert a traced module with named inputs and outputs, and options of torch.onnx.export."""
    names: dict[str, Any] = {"input_names": inputs, "output_names": outputs}
    try:
        converted = torch.onnx.export(program, dynamo=True, verbose=False, **names, **options)
    except torch.onnx.OnnxExporterError as error:
        cause: BaseException = error  # the first error says why
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = f"{type(cause).__name__}: {shorten(cause, 300)}"
        raise ValueError(f"export: torch.onnx does not support this model: {reason}") from error
    assert converted is not None
    return converted


def load_onnx(path: Path) -> Runner:
    """Load an ONNX file with ONNX Runtime, on the CPU."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run([OUTPUT], {INPUT: images.numpy()})[0])


def write_torch(classifier: Classifier, _: ModelConfig, path: Path) -> None:
    """Write a program for `torch.export.load` with a dynamic batch, and metadata as extra files."""
    torch.export.save(_trace(classifier), path, extra_files=metadata(classifier))


def load_torch(path: Path) -> Runner:
    """Load a program of torch.export."""
    return torch.no_grad()(torch.export.load(path).module())


def metadata(classifier: Classifier) -> dict[str, str]:
    """Describe the input and output of a model, see the head of this file."""
    preprocess = classifier.preprocess
    rows, columns = preprocess.image_size
    return {
        "classes": json.dumps(classifier.classes),
        "preprocess": json.dumps(vars(preprocess)),
        "input": f"float32 (batch, {preprocess.channels}, {rows}, {columns}), normalized: "
        "(pixels / 255 - mean) / std",
    }


def _trace(classifier: Classifier) -> torch.export.ExportedProgram:
    """Trace a model for images of its own size in batches of any size; errors as for `trace`."""
    preprocess = classifier.preprocess
    images = torch.zeros(TRACED_BATCH, preprocess.channels, *preprocess.image_size)
    shapes = ({0: torch.export.Dim("batch", min=1)},)
    return trace(_portable(classifier), (images,), shapes)


def trace(
    module: nn.Module, inputs: tuple[Any, ...], dynamic_shapes: Any = None
) -> torch.export.ExportedProgram:
    """Trace a module in evaluation mode; ValueError if torch.export does not support it."""
    try:
        with torch.no_grad(), warnings.catch_warnings():
            # Modules from notebooks store their weights in an attribute; exports do not.
            warnings.filterwarnings("ignore", r"The tensor attributes? .* assigned during export")
            program = torch.export.export(module, inputs, dynamic_shapes=dynamic_shapes)
    except Exception as error:  # of many kinds
        reason = shorten(error, 200)
        raise ValueError(f"export: torch.export does not support this model: {reason}") from error
    for node in program.graph.nodes:  # the paths of this machine
        node.meta.pop("stack_trace", None)
    return program


def _portable(classifier: Classifier) -> nn.Module:
    """Copy a model with contiguous weights, as the formats expect, and with calibrated logits.

    No format has a place for the temperature, so it is divided out of the last layer.
    """
    model = copy_module(classifier.model).to(memory_format=torch.contiguous_format)
    if classifier.calibration:
        with torch.no_grad():
            for parameter in chain(*(head.parameters() for head in classifier_layers(model))):
                parameter.div_(classifier.calibration.temperature)
    return model


FORMATS = {
    "timm": Format((), "timm", write_timm, load_timm),
    "onnx": Format(("onnx", "onnxscript", "onnxruntime"), "onnxruntime", write_onnx, load_onnx),
    "torch": Format((), "torch", write_torch, load_torch),
}
