"""Classifying the 10,000 test images of CIFAR-10 in several ways: speed, accuracy, preparation.

    python -m benchmarks.speed.inference [--routes auto float32 compiled onnx] [--rounds 3]

Every route classifies all images with the bundled model cifar10_quick; "timm" is timm's plain
Vision Transformer of the same width and depth, with random weights. The routes take turns. Those
that are run by default need nothing but torch; `compiled` needs a C++ compiler, and `onnx` the
packages of `pip install -e .[export]`.

`Classifier.logits` is the route "quick, bfloat16". In those marked "shared" all cores share every
operation; in the others each core classifies its own parts of 64 images (`vit.hardware`). Expect
that to be faster, most of all where the CPU computes natively in bfloat16, with equal accuracy.
"""

import argparse
import copy
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.speed.train_step import timm_of_size
from benchmarks.timing import take_turns
from vit.classifier import PART, Classifier
from vit.data.config import DataConfig
from vit.data.datasets import load_test_images
from vit.data.images import ImageSet
from vit.hardware import autocast, describe, map_on_cores
from vit.model_file import SavedModel
from vit.pretrained.load import load as load_model

CPU = torch.device("cpu")
DATA = Path(__file__).resolve().parents[2] / "data"
BATCH = 500  # of the routes in which all cores share every operation
REFERENCE = "timm, float32"
Run = Callable[[Tensor], Tensor]  # images to logits
Build = Callable[[], Run]  # what comes before the first image


def shared(classifier: Classifier) -> Run:
    """Classify batch after batch; all cores share every operation."""

    @torch.no_grad()
    def classify(images: Tensor) -> Tensor:
        with autocast(CPU, classifier.precision):
            parts = images.split(BATCH)
            return torch.cat([classifier.model(classifier.normalize(p)) for p in parts]).float()

    return classify


def per_core(run: Run, classifier: Classifier) -> Run:
    """Let each core classify its own parts with a function of normalized images."""

    @torch.no_grad()
    def work(images: Tensor) -> Tensor:
        return run(classifier.preprocess.normalize(images)).float()

    return lambda images: torch.cat(map_on_cores(work, images.split(PART), torch.get_num_threads()))


def compiled(classifier: Classifier) -> Run:
    """Compile a model for one core and parts of PART images, with its weights as constants."""
    import torch._inductor.config as inductor

    inductor.freezing, inductor.cpp.threads = True, 1
    model = copy.deepcopy(classifier.model).to(torch.bfloat16)
    fast = torch.compile(model, dynamic=False)

    def run(inputs: Tensor) -> Tensor:
        missing = PART - len(inputs)  # compiled code takes no other number of images
        filled = torch.cat([inputs, inputs.new_zeros(missing, *inputs.shape[1:])])
        return fast(filled.to(torch.bfloat16))[: len(inputs)]

    return per_core(run, classifier)


def with_onnxruntime(saved: SavedModel) -> Run:
    """Run the model in ONNX Runtime, in float32: one thread for each core's parts."""
    import onnxruntime

    from vit.reporting.export_formats import write_onnx

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        write_onnx(replace(saved, precision=torch.float32), saved.config.model, path)
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name

    def run(inputs: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {name: inputs.numpy()})[0])

    return per_core(run, saved)


def routes_of(group: str, quick: SavedModel, timm: Classifier) -> Iterator[tuple[str, Build]]:
    """Yield the routes of a group: their names, and functions that prepare them."""
    exact = replace(quick, precision=torch.float32)
    match group:
        case "auto":
            yield "quick, bfloat16, shared", lambda: shared(quick)
            yield "quick, bfloat16", lambda: quick.logits
        case "float32":
            yield "quick, float32, shared", lambda: shared(exact)
            yield "quick, float32", lambda: exact.logits
            yield "timm, float32, per core", lambda: timm.logits
        case "compiled":
            yield "torch.compile, bfloat16", lambda: compiled(quick)
        case "onnx":
            yield "ONNX Runtime, float32", lambda: with_onnxruntime(quick)


GROUPS = ("auto", "float32", "compiled", "onnx")


def main() -> None:
    """Measure the routes of some groups."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--routes", nargs="+", choices=GROUPS, default=GROUPS[:2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--images", type=int, default=10_000)
    arguments = parser.parse_args()
    print(f"{describe(CPU)}, torch {torch.__version__}")
    torch.manual_seed(0)
    saved = load_model("cifar10_quick", "cpu", "bfloat16")
    model = timm_of_size(saved.config.model).eval()
    timm = replace(saved, model=model, precision=torch.float32)
    test = load_test_images(DataConfig(name="cifar10", root=str(DATA), download=False))
    test = test.select(torch.arange(arguments.images))
    routes: dict[str, Run] = {REFERENCE: shared(timm)}
    preparation = {REFERENCE: 0.0}
    for group in arguments.routes:
        for name, build in routes_of(group, saved, timm):
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
