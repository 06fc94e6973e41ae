"""Export of a model for other programs, checked with the runtime that will load it."""

import importlib.metadata
import inspect
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from vit.classifier import Classifier
from vit.data import pixels
from vit.data.datasets import choose_probes
from vit.data.preprocess import Preprocess
from vit.files import write_atomically
from vit.model.vit import VisionTransformer
from vit.model_file import SavedModel, load_model
from vit.reporting.config import ExportConfig
from vit.reporting.export_formats import FORMATS, Runner, require_packages
from vit.reporting.loading import load_test, results_folder
from vit.reporting.model_card import write_hub
from vit.reporting.page import export_page
from vit.run.folder import EXPORT_FOLDER, EXPORTS, PREPROCESS_FILE
from vit.seeding import generator

CHECKED = 100  # images
CHECKED_AT_ONCE = 32  # so that the last batch has another size
TOLERANCE = 1e-4  # largest difference of a logit


def export_run(run: str, options: ExportConfig) -> list[Path]:
    """Write a model in other formats and compare the results with the model.

    Each export for another runtime is loaded by it and gets 100 test images, or noise where they
    are not on this machine. It appears only if all logits agree. With it comes preprocess.py, which
    reads image files for the model. For html see `export_page`, for hub `write_hub`.

    Args:
        run: Run folder, model.safetensors, checkpoint, or the name of a bundled model.
        options: The formats, keys of `EXPORTS`, and where to write.

    Returns:
        The folders or files, in the order of the formats.

    Raises:
        ValueError: The model cannot be read, the format cannot represent it, its packages are not
            installed, other files are in the way, or the logits differ by more than 1e-4.
    """
    for name in FORMATS.keys() & options.formats:
        require_packages(f"export: {name}", FORMATS[name].packages)
    saved = load_model(run, "cpu", "float32")
    folder = results_folder(saved, options.out, EXPORT_FOLDER)
    program = preprocess_program(saved.classifier.preprocess)
    targets = {name: folder / EXPORTS[name] for name in dict.fromkeys(options.formats)}
    written = list(targets.values())
    print(saved.describe(), flush=True)
    if page := targets.pop("html", None):
        export_page(saved, page, options)
    if hub := targets.pop("hub", None):
        write_hub(saved, hub)
    if not targets:
        return written
    for name, target in targets.items():
        _require_replaceable(name, target, program)
    images, source = _images_to_check(saved, options.data.root)
    with tempfile.TemporaryDirectory() as drafts:  # nothing is written if one of them fails
        checked = [_export(saved, name, Path(drafts), images, source) for name in targets]
        for (name, target), compared in zip(targets.items(), checked, strict=True):
            reader = _reader_of(name, target)
            reader.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(reader, program)  # first: it marks what the next call may replace
            draft = Path(drafts) / EXPORTS[name]
            for file in sorted(draft.iterdir()) if draft.is_dir() else [draft]:
                place = target / file.name if draft.is_dir() else target
                write_atomically(place, file.read_bytes())
            print(f"{compared}\nwrote {target} and {reader}")
    return written


def _reader_of(name: str, target: Path) -> Path:
    """Return the program that reads images for an export: in its folder, or next to its file."""
    return (target if name == "timm" else target.parent) / PREPROCESS_FILE


def _require_replaceable(name: str, target: Path, program: bytes) -> None:
    """Check that what an export would replace is an export of this model: preprocess.py says so.

    Raises:
        ValueError: It is not.
    """
    reader = _reader_of(name, target)
    settings = program[program.rindex(b"\nload = ") :]
    if reader.exists():
        if not reader.read_bytes().endswith(settings):
            raise ValueError(f"out: {reader} is not that of this model; use another --out")
    elif target.exists():
        raise ValueError(f"out: {target} exists and is not an export; use another --out")


def _export(saved: SavedModel, name: str, drafts: Path, images: Tensor, source: str) -> str:
    """Write a model in a format, load it, and say how far its logits of images are the model's.

    Raises:
        ValueError: The format cannot represent the model, or a logit differs by more than 1e-4.
    """
    kind, draft = FORMATS[name], drafts / EXPORTS[name]
    kind.write(saved.classifier, saved.config.model, draft)
    difference = largest_difference(saved.classifier, kind.load(draft), images)
    version = importlib.metadata.version(kind.runtime)
    compared = (
        f"largest difference of a logit on {len(images)} {source}, "
        f"{kind.runtime} {version}: {difference:.2g}"
    )
    if not difference <= TOLERANCE:  # also if it is NaN
        raise ValueError(f"export: {name}: {compared}; it must be at most {TOLERANCE:g}")
    return compared


def preprocess_program(preprocess: Preprocess) -> bytes:
    """Return `vit.data.pixels` as a program that ends with `load` for a model's images."""
    fields = "".join(f"    {key}={value!r},\n" for key, value in preprocess.to_dict().items())
    return f"{inspect.getsource(pixels)}\n\nload = ArrayPreprocess(\n{fields}).load\n".encode()


def largest_difference(classifier: Classifier, run: Runner, images: Tensor) -> float:
    """Return the largest difference of the calibrated logits of a classifier and its export's.

    Those of our VisionTransformer are computed with need_weights=True, which never takes torch's
    fused kernel: the export is compared with attention as it is written.

    Args:
        classifier: In float32 on the CPU.
        run: The export.
        images: (N, channels, H, W) uint8.
    """
    inputs = [classifier.normalize(part) for part in images.split(CHECKED_AT_ONCE)]
    model = classifier.model
    if isinstance(model, VisionTransformer):
        with torch.no_grad():
            expected = torch.cat([model(part, need_weights=True)[0] for part in inputs])
    else:
        expected = torch.cat([classifier.forward(part) for part in inputs])
    found = torch.cat([run(part) for part in inputs])
    expected = classifier.scaled(expected)
    assert found.shape == expected.shape
    return (found - expected).abs().max().item()


def _images_to_check(saved: SavedModel, root: str | None) -> tuple[Tensor, str]:
    """Return uint8 images and what they are; nothing is downloaded for them."""
    try:
        test = load_test(saved, root, download=False)
    except (ValueError, OSError):
        preprocess = saved.classifier.preprocess
        size = (CHECKED, preprocess.channels, *preprocess.image_size)
        noise = torch.randint(256, size, dtype=torch.uint8, generator=generator(0, "export"))
        return noise, f"images of noise (no test images of {saved.config.data.name} here)"
    return choose_probes(test, CHECKED, seed=0).pixels(), f"test images of {saved.config.data.name}"
