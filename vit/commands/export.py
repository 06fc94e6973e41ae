"""`eval.py RUN export`: a model for other programs, checked with the runtime that will load it."""

import dataclasses
import importlib.metadata
import inspect
import tempfile
from functools import partial
from pathlib import Path

import torch

from vit.classifier import Classifier
from vit.commands.config import ExportConfig
from vit.commands.maps import log_test_images
from vit.console import printable, say
from vit.data import pixels
from vit.data.preprocess import Preprocess
from vit.files import inside, require_file, write_atomically
from vit.model.copying import copy_module
from vit.model_file import SavedModel
from vit.pretrained.load import load
from vit.reporting.export_formats import FORMATS, Runner
from vit.reporting.loading import (
    require_loaded,
    require_packages,
    require_replaceable,
    results_folder,
)
from vit.reporting.model_card import write_hub
from vit.reporting.page import export_page
from vit.run.folder import EXPORT_FOLDER, EXPORTS, PREPROCESS_FILE
from vit.seeding import generator

CHECKED = 100  # images of noise
CHECKED_AT_ONCE = 32  # so that the last batch has another size
TOLERANCE = 1e-4  # largest difference of a logit


def export(classifier: Classifier, name: str, out: str | Path | None = None) -> Path:
    """Write a model in a format of other programs; return the file or folder.

    Args:
        classifier: A model from `vit.load`.
        name: A format of `eval.py RUN export`, such as "onnx".
        out: Folder for the export; None is export/ next to the model.

    Raises:
        ValueError: The model cannot be exported, see `run`.
    """
    options = ExportConfig(formats=(name,), out=out and str(out))  # type: ignore[arg-type]
    return write_exports(require_loaded(classifier), options)[0]


def run(name: str, options: ExportConfig) -> None:
    """Write a model in other formats.

    An export for another runtime is written only if the runtime computes the same logits of 100
    images of noise. With it comes preprocess.py, which reads image files for the model. For html
    see `export_page`, for hub `write_hub`. ValueError if the model cannot be read, the format
    cannot represent it, its packages are not installed, other files are in the way, or logits
    differ by more than 1e-4.
    """
    write_exports(load(name, "cpu"), options)


def write_exports(saved: SavedModel, options: ExportConfig) -> list[Path]:
    """Write a model in the formats of `options`, see `run`; return the folders or files."""
    if saved.device.type != "cpu":  # where exports are made and compared
        model, cpu = copy_module(saved.model).cpu(), torch.device("cpu")
        saved = dataclasses.replace(saved, model=model, device=cpu)
    size = saved.preprocess.channels, *saved.preprocess.image_size
    saved.logits(torch.zeros(1, *size, dtype=torch.uint8))  # refuses what would be exported wrongly
    formats = [name for name in dict.fromkeys(options.formats) if name in FORMATS]
    for name in formats:
        require_packages(f"export: {name}", FORMATS[name].packages, "export")
    folder = results_folder(saved, options.out, top=EXPORT_FOLDER)
    targets = {name: inside(folder, EXPORTS[name]) for name in options.formats}
    say(saved.describe())
    if "html" in targets:
        log = partial(log_test_images, saved, options.data.root)
        export_page(saved, targets["html"], options.steps, log)
    loader = _loader(saved.preprocess)
    for name in formats:
        reader = _reader_of(targets[name])
        # What comes before its loader may be of another version of this package.
        is_own = reader.exists() and require_file(reader).read_bytes().endswith(loader)
        require_replaceable(is_own, [reader, targets[name]], "is not from an export of this model")
    with tempfile.TemporaryDirectory() as drafts:  # nothing is written if one of them fails
        for name in formats:
            draft = Path(drafts) / EXPORTS[name]
            say(_export(saved, name, draft))
            write_atomically(_reader_of(draft), inspect.getsource(pixels).encode() + loader)
        # preprocess.py comes first: it marks what the next call may replace.
        for file in sorted(filter(Path.is_file, Path(drafts).rglob("*")), reverse=True):
            place = folder / file.relative_to(drafts)
            place.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(place, file.read_bytes())
    if "hub" in targets:
        write_hub(saved, targets["hub"])
    for name in formats:
        say(f"wrote {printable(targets[name])} and {printable(_reader_of(targets[name]))}")
    return list(targets.values())


def _reader_of(target: Path) -> Path:
    """Return the program that reads images for an export: in its folder, or next to its file."""
    return (target.parent if target.suffix else target) / PREPROCESS_FILE


def _export(saved: SavedModel, name: str, draft: Path) -> str:
    """Write a model in a format, load it, and say how far its logits are from the model's."""
    _, runtime, write, load_export = FORMATS[name]
    write(saved, saved.config.model, draft)
    difference = largest_difference(saved, load_export(draft))
    compared = (
        f"largest difference of a logit on {CHECKED} images of noise, "
        f"{runtime} {importlib.metadata.version(runtime)}: {difference:.2g}"
    )
    if not difference <= TOLERANCE:  # also if it is NaN
        raise ValueError(f"export: {name}: {compared}; it must be at most {TOLERANCE:g}")
    return compared


def _loader(preprocess: Preprocess) -> bytes:
    """Return what follows `vit.data.pixels` in preprocess.py: `load` for a model's images."""
    fields = "".join(f"    {key}={value!r},\n" for key, value in vars(preprocess).items())
    return f"\n\nload = ArrayPreprocess(\n{fields}).load\n".encode()


@torch.no_grad()
def largest_difference(classifier: Classifier, run: Runner) -> float:
    """Return the largest difference between the calibrated logits of a model and of its export."""
    preprocess = classifier.preprocess
    shape = (CHECKED, preprocess.channels, *preprocess.image_size)
    noise = torch.randint(256, shape, dtype=torch.uint8, generator=generator(0, "export"))
    differences = [
        (run(part) - classifier.scaled(classifier.model(part))).abs().max()
        for part in classifier.normalize(noise).split(CHECKED_AT_ONCE)
    ]
    return torch.stack(differences).max().item()
