"""Classifying the 10,000 test images of CIFAR-10 in many ways: speed, accuracy, preparation.

    pip install -e .[export] -r benchmarks/requirements.txt
    python benchmarks/inference.py [--routes auto,float32] [--rounds 3]

Every route classifies all images with the bundled model cifar10_quick; "timm" is timm's plain
Vision Transformer of the same width and depth, with random weights. The routes take turns. Those
of torch alone are run by default and need no other packages.

`Classifier.logits` is the route "quick, bfloat16". In those marked "per core" each core classifies
its own parts of 64 images (`vit.parallel`); in the others all cores share every operation.
"""

import argparse
import copy
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
from timing import take_turns
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from vit.classifier import PART, Classifier
from vit.data.datasets import ImageSet, load
from vit.data.preprocess import Preprocess
from vit.hardware import autocast, describe
from vit.model.vit import VisionTransformer
from vit.model_file import load_model
from vit.parallel import map_on_cores
from vit.training.config import Config

CPU = torch.device("cpu")
DATA = Path(__file__).resolve().parent.parent / "data"
BATCH = 500  # of the routes in which all cores share every operation
CALIBRATION = 500  # training images that fix the ranges of int8 activations
REFERENCE = "timm, float32"
Run = Callable[[Tensor], Tensor]  # images to logits


@dataclass(frozen=True)
class Models:
    """What the routes are built from.

    Attributes:
        quick: The bundled model, computing in bfloat16.
        config: Its config.
        timm: timm's model of the same size with random weights, computing in float32.
        calibration: Training images (B, 3, 32, 32), normalized.
    """

    quick: Classifier
    config: Config
    timm: Classifier
    calibration: Tensor

    @property
    def exact(self) -> Classifier:
        """The bundled model, computing in float32."""
        return replace(self.quick, precision=torch.float32)


def build_models() -> Models:
    """Load the bundled model and build timm's of the same size."""
    from timm.models.vision_transformer import VisionTransformer as TimmViT

    saved = load_model("cifar10_quick", "cpu", "bfloat16")
    quick, size = saved.classifier, saved.config.model
    plain = TimmViT(
        quick.preprocess.image_size, size.patch_size or 4, num_classes=len(quick.classes),
        embed_dim=size.embed_dim, depth=size.depth, num_heads=size.num_heads,
        mlp_ratio=size.mlp_ratio,
    ).eval()  # fmt: skip
    training = load("cifar10", DATA, train=True, download=False)
    calibration = quick.normalize(training.select(torch.arange(CALIBRATION)).pixels())
    theirs = replace(quick, model=plain, precision=torch.float32)
    return Models(quick, saved.config, theirs, calibration)


def shared(classifier: Classifier, batch_size: int = BATCH) -> Run:
    """Classify batch after batch; all cores share every operation."""

    @torch.no_grad()
    def classify(images: Tensor) -> Tensor:
        with autocast(CPU, classifier.precision):
            parts = images.split(batch_size)
            return torch.cat([classifier.model(classifier.normalize(p)) for p in parts]).float()

    return classify


def per_core(run: Run, preprocess: Preprocess, size: int = PART) -> Run:
    """Let each core classify its own parts with a function of normalized images."""

    @torch.no_grad()
    def work(images: Tensor) -> Tensor:
        return run(preprocess.normalize(images)).float()

    return lambda images: torch.cat(map_on_cores(work, images.split(size), torch.get_num_threads()))


def auto_routes(models: Models) -> Iterator[tuple[str, Callable[[], Run]]]:
    """What `Classifier.logits` does on a CPU with bfloat16, without and with a thread per core."""
    yield "quick, bfloat16, shared", lambda: shared(models.quick)
    yield "quick, bfloat16", lambda: models.quick.logits


def float32_routes(models: Models) -> Iterator[tuple[str, Callable[[], Run]]]:
    """The same in float32, and timm's model with a thread per core."""
    yield "quick, float32, shared", lambda: shared(models.exact)
    yield "quick, float32", lambda: models.exact.logits
    yield "timm, float32, per core", lambda: models.timm.logits


def part_routes(models: Models) -> Iterator[tuple[str, Callable[[], Run]]]:
    """Sizes of batches and parts."""
    yield "timm, float32, shared, batches of 64", lambda: shared(models.timm, 64)
    yield "quick, bfloat16, shared, batches of 128", lambda: shared(models.quick, 128)
    for size in (16, 32, 64, 128, 256):

        def build(size: int = size) -> Run:
            return per_core(_autocasting(models.quick), models.quick.preprocess, size)

        yield f"quick, bfloat16, parts of {size}", build


def _autocasting(classifier: Classifier) -> Run:
    def run(inputs: Tensor) -> Tensor:
        with autocast(CPU, classifier.precision):
            return classifier.model(inputs)

    return run


def prepared_routes(models: Models) -> Iterator[tuple[str, Callable[[], Run]]]:
    """Copies of the model that are changed for inference; per core."""
    fold, cast_, nchw = fold_batch_norm, cast_once, channels_first
    yield "bfloat16 weights", lambda: on_cores(models, cast_(clone(models)))
    yield (
        "batch norm folded",
        lambda: per_core(
            _autocasting(replace(models.quick, model=fold(clone(models)))), models.quick.preprocess
        ),
    )
    yield "both", lambda: on_cores(models, cast_(fold(clone(models))))
    yield "both, without channels_last", lambda: on_cores(models, nchw(cast_(fold(clone(models)))))
    yield (
        "both, torch's fused attention",
        lambda: with_fused_kernel(on_cores(models, cast_(fold(clone(models))))),
    )


def compiled_routes(models: Models) -> Iterator[tuple[str, Callable[[], Run]]]:
    """torch.compile and AOTInductor; a C++ compiler is needed. Per core."""
    yield "torch.compile, bfloat16", lambda: compiled(models, clone(models), torch.bfloat16)
    yield "AOTInductor, bfloat16", lambda: compiled_ahead(models, clone(models))


def int8_routes(models: Models) -> Iterator[tuple[str, Callable[[], Run]]]:
    """int8 in torch: dynamic for linear layers, static by torchao and inductor. Per core."""
    yield "int8 linear layers, dynamic", lambda: quantized_dynamically(models)
    yield "int8 static, torchao + torch.compile", lambda: quantized_statically(models)


def onnx_routes(models: Models) -> Iterator[tuple[str, Callable[[], Run]]]:
    """ONNX Runtime, one session with one thread for each core's parts."""
    for kind in ("float32", "int8 dynamic", "int8 static"):
        yield f"ONNX Runtime, {kind}", partial(with_onnxruntime, models, kind)


def openvino_routes(models: Models) -> Iterator[tuple[str, Callable[[], Run]]]:
    """OpenVINO, which reads the ONNX files, one stream for each core's parts."""
    for kind in ("float32", "bfloat16", "int8 static"):
        yield f"OpenVINO, {kind}", partial(with_openvino, models, kind)


GROUPS: dict[str, Callable[[Models], Iterator[tuple[str, Callable[[], Run]]]]] = {
    "auto": auto_routes,
    "float32": float32_routes,
    "parts": part_routes,
    "prepared": prepared_routes,
    "compiled": compiled_routes,
    "int8": int8_routes,
    "onnx": onnx_routes,
    "openvino": openvino_routes,
}


# Changing a copy of the model.


def clone(models: Models) -> VisionTransformer:
    """Return a copy of the bundled model."""
    return cast(VisionTransformer, copy.deepcopy(models.quick.model))


def fold_batch_norm(model: VisionTransformer) -> VisionTransformer:
    """Fold the batch norms of the stem into its convolutions, in place."""
    for stack in [m for m in model.patch_embed.modules() if isinstance(m, nn.Sequential)]:
        for number, (conv, norm) in enumerate(zip(list(stack), list(stack)[1:], strict=False)):
            if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                stack[number], stack[number + 1] = fuse_conv_bn_eval(conv, norm), nn.Identity()
    return model


def cast_once(model: VisionTransformer) -> VisionTransformer:
    """Convert the weights to bfloat16 instead of doing it in every forward pass, in place."""
    return model.to(torch.bfloat16)


def channels_first(model: VisionTransformer) -> VisionTransformer:
    """Let the stem compute in torch's default layout, in place."""
    stem = model.patch_embed
    stem.proj.to(memory_format=torch.contiguous_format)

    def forward(images: Tensor) -> tuple[Tensor, tuple[int, int]]:
        tokens = stem.proj(images.contiguous())
        return tokens.flatten(2).transpose(1, 2), stem.grid(*images.shape[-2:])

    stem.forward = forward  # type: ignore[method-assign]
    return model


def with_fused_kernel(run: Run) -> Run:
    """Let attention run on torch's fused kernel also where it is not the faster one."""

    def fused(inputs: Tensor) -> Tensor:
        with mock.patch("vit.model.attention.uses_fused_kernel", return_value=True):
            return run(inputs)

    return fused


def on_cores(models: Models, model: nn.Module) -> Run:
    """Let each core run a model whose weights have the dtype of its input."""
    dtype = next(model.parameters()).dtype
    return per_core(lambda inputs: model(inputs.to(dtype)), models.quick.preprocess)


# Compilers.


def padded(run: Run) -> Run:
    """Fill up parts to PART images for a function that takes no other number."""

    def padding(inputs: Tensor) -> Tensor:
        missing = PART - len(inputs)
        if not missing:
            return run(inputs)
        return run(torch.cat([inputs, inputs.new_zeros(missing, *inputs.shape[1:])]))[:-missing]

    return padding


def compiled(models: Models, model: nn.Module, dtype: torch.dtype) -> Run:
    """Compile a model for one core and parts of PART images, with its weights as constants."""
    import torch._inductor.config as inductor

    inductor.freezing, inductor.cpp.threads = True, 1
    fast = torch.compile(model.to(dtype), dynamic=False)
    return per_core(padded(lambda inputs: fast(inputs.to(dtype))), models.quick.preprocess)


def compiled_ahead(models: Models, model: nn.Module) -> Run:
    """Export a model, compile it into a shared library, and load that."""
    import torch._inductor as inductor

    example = torch.zeros(PART, 3, 32, 32, dtype=torch.bfloat16)
    with torch.no_grad():
        program = torch.export.export(model.to(torch.bfloat16), (example,))
        options = {"freezing": True, "cpp.threads": 1}
        package = inductor.aoti_compile_and_package(program, inductor_configs=options)
    fast = inductor.aoti_load_package(package, num_runners=torch.get_num_threads())
    run = padded(lambda inputs: fast(inputs.to(torch.bfloat16)))
    return per_core(run, models.quick.preprocess)


def quantized_dynamically(models: Models) -> Run:
    """Quantize linear layers: weights once, activations in every pass."""
    model = torch.ao.quantization.quantize_dynamic(clone(models), {nn.Linear}, torch.qint8)
    return per_core(model, models.quick.preprocess)


def quantized_statically(models: Models) -> Run:
    """Quantize convolutions and linear layers with ranges of activations from training images."""
    import torchao.quantization.pt2e.quantizer.x86_inductor_quantizer as x86
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    example = models.calibration[:PART]
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    with torch.no_grad():
        exported = torch.export.export(clone(models), (example,)).module()
        observed = prepare_pt2e(exported, quantizer)
        for part in models.calibration.split(PART)[: CALIBRATION // PART]:
            observed(part)
        return compiled(models, convert_pt2e(observed), torch.float32)


# Other runtimes.


def write_onnx(models: Models, folder: Path, kind: str) -> Path:
    """Write the model as an ONNX file.

    Args:
        models: The models.
        folder: Where to write it.
        kind: "float32", "int8 dynamic" (linear layers) or "int8 static" (convolutions as well).
    """
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    from vit.reporting.export_formats import INPUT, write_onnx

    exact, inferred, small = (folder / f"{name}.onnx" for name in ("exact", "inferred", "int8"))
    write_onnx(models.exact, models.config.model, exact)
    if kind == "float32":
        return exact
    quant_pre_process(exact, inferred)
    if kind == "int8 dynamic":
        quantization.quantize_dynamic(
            inferred, small, per_channel=True, op_types_to_quantize=["MatMul", "Gemm"]
        )
        return small

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        """Reads the calibration images in batches."""

        def __init__(self) -> None:
            self.parts = iter(models.calibration.split(50))

        def get_next(self) -> dict[str, Any] | None:
            part = next(self.parts, None)
            return None if part is None else {INPUT: part.numpy()}

    quantization.quantize_static(
        inferred, small, Reader(), per_channel=True,
        op_types_to_quantize=["Conv", "MatMul", "Gemm"],
    )  # fmt: skip
    return small


def with_onnxruntime(models: Models, kind: str) -> Run:
    """Run the ONNX file of a kind with ONNX Runtime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    with tempfile.TemporaryDirectory() as folder:
        path = write_onnx(models, Path(folder), kind)
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return per_core(
        lambda inputs: torch.from_numpy(session.run(None, {name: inputs.numpy()})[0]),
        models.quick.preprocess,
    )


def with_openvino(models: Models, kind: str) -> Run:
    """Run the ONNX file of a kind with OpenVINO."""
    import openvino

    with tempfile.TemporaryDirectory() as folder:
        path = write_onnx(models, Path(folder), "float32" if kind == "bfloat16" else kind)
        model = openvino.Core().read_model(path)
        hints = {
            "NUM_STREAMS": str(torch.get_num_threads()),
            "INFERENCE_NUM_THREADS": str(torch.get_num_threads()),
            "INFERENCE_PRECISION_HINT": "bf16" if kind == "bfloat16" else "f32",
        }
        fast = openvino.Core().compile_model(model, "CPU", hints)

    mine = threading.local()

    def run(inputs: Tensor) -> Tensor:
        if not hasattr(mine, "request"):
            mine.request = fast.create_infer_request()
        found = mine.request.infer([inputs.numpy()])
        return torch.from_numpy(next(iter(found.values())).copy())

    return per_core(run, models.quick.preprocess)


def main() -> None:
    """Measure the routes of some groups."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--routes", default="auto,float32,parts,prepared", help=", ".join(GROUPS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--images", type=int, default=10_000)
    arguments = parser.parse_args()
    print(f"{describe(CPU)}, torch {torch.__version__}")
    torch.manual_seed(0)
    models = build_models()
    test = load("cifar10", DATA, train=False, download=False)
    test = test.select(torch.arange(arguments.images))
    routes: dict[str, Run] = {REFERENCE: shared(models.timm)}
    preparation = {REFERENCE: 0.0}
    for group in arguments.routes.split(","):
        for name, build in GROUPS[group](models):
            start = time.perf_counter()
            routes[name] = build()
            routes[name](test.pixels()[:PART])  # compiles
            preparation[name] = time.perf_counter() - start
    print_table(routes, preparation, test, arguments.rounds)


def print_table(
    routes: dict[str, Run], preparation: dict[str, float], test: ImageSet, rounds: int
) -> None:
    """Print what each route costs, and how accurate it is."""
    images, labels = test.pixels(), test.labels
    logits: dict[str, Tensor] = {}

    def classify(name: str) -> None:
        logits[name] = routes[name](images)

    timings = take_turns({name: partial(classify, name) for name in routes}, rounds)
    print(f"\nclassifying {len(images):,} images: seconds, and ratio to the first")
    for name, timing in timings.items():
        hits = (logits[name].argmax(dim=1) == labels).double().mean().item()
        accuracy = "" if name.startswith("timm") else f"{hits:7.2%}"
        print(
            f"  {name:<40}{timing.seconds:6.2f}   {timing.speed()}  {accuracy:>7}  "
            f"{preparation[name]:6.1f} s"
        )


if __name__ == "__main__":
    main()
