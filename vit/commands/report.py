"""`eval.py RUN report`: accuracy and other metrics on the test images, with figures."""

from pathlib import Path
from typing import Any

import torch

from vit import evaluation
from vit.classifier import Classifier
from vit.commands.config import ReportConfig
from vit.console import printable, say
from vit.data.images import ImageSet
from vit.data.layout import join
from vit.model.attention_model import no_maps_text
from vit.reporting.calibration import calibration_table, make_sets, sets_table
from vit.reporting.corruptions import report_corruptions
from vit.reporting.loading import (
    data_of,
    load_run,
    load_split,
    load_test,
    report_seen,
    require_loaded,
    require_packages,
    results_folder,
)
from vit.reporting.report import require_own_report, write_part, write_report
from vit.reporting.tables import Part, metrics_table
from vit.reporting.unfamiliar import load_unfamiliar, report_unfamiliar
from vit.run.folder import PREDICTIONS_FILE, REPORT_FILE
from vit.settings import require


def evaluate(
    classifier: Classifier, images: ImageSet | str | Path | None = None, batch_size: int = 500
) -> dict[str, Any]:
    """Measure accuracy and other metrics, see `vit.evaluation.report`.

    Args:
        classifier: The model; from `vit.load` unless `images` is an ImageSet.
        images: Images with labels, or the folder of a data set like that of the run, whose test
            images are taken; None takes the test images of the run.
        batch_size: Most images at once.

    Raises:
        ValueError: The images cannot be read, or have other classes.
    """
    if not isinstance(images, ImageSet):
        kind = type(images).__name__
        fits = images is None or isinstance(images, str | Path)
        require(fits, "images", kind, "a folder, an ImageSet or None")
        images = load_test(require_loaded(classifier), None if images is None else str(images))
    allowed = f"those of the model, in its order: {join(classifier.classes)}"
    require(images.classes == classifier.classes, "classes", join(images.classes), allowed)
    images = images.resized(classifier.preprocess)
    return evaluation.evaluate(classifier, images, batch_size)[0]


def run(name: str, options: ReportConfig) -> dict[str, Any]:
    """Evaluate a model on the test images; print, write and return the report.

    ValueError if the model or the data cannot be read, or the folder contains other files.
    """
    saved = load_run(name, options.device, options.precision, options.flip, options.views)
    # What cannot work is refused before minutes of classifying.
    root, batch_size, seed = options.data.root, options.batch_size, options.seed
    folder = results_folder(saved, options.out, root=root)
    require_own_report(folder)
    test, (data, own) = load_test(saved, root), data_of(saved, root)
    unfamiliar = None
    if options.unfamiliar:
        unfamiliar = load_unfamiliar(options.unfamiliar, saved, root), load_split(saved, root)[0]
    if options.corruptions:
        require_packages("corruptions", ("scipy",), "evaluation")
    if options.coverage is not None:
        none = torch.zeros(0, len(test.classes))
        make_sets(saved, none, none[:, 0], options.coverage)
    if not own:
        report_seen(saved, test)
    say(f"{saved.describe()}, test images of {test.folder or saved.config.data.name}\n")
    source = {"data": data.name, "root": data.root, "own": own}
    result = write_report(saved, test, folder, saved.step, batch_size, options.coverage, source)
    say(f"{metrics_table(result)}\n\n{calibration_table(result['calibration'])}")
    if sets := result.get("sets"):
        say(f"\n{sets_table({kind: sets[kind] for kind in ('lac', 'raps')}, sets['coverage'])}")
    if unfamiliar is not None:
        say("\nscoring training, test and unfamiliar images")
        part = report_unfamiliar(
            saved, test, *unfamiliar, str(options.unfamiliar), seed, batch_size
        )
        _add(part, result, folder, saved.step)
    if options.corruptions:
        say("\nclassifying corrupted images; after Ctrl-C, the same command goes on")
        part = report_corruptions(saved, test, folder, seed, batch_size)
        _add(part, result, folder, saved.step)
    if not saved.has_maps:
        say(f"\n{no_maps_text(saved.model)}")
    say(f"\nwrote {REPORT_FILE}, {PREDICTIONS_FILE} and pictures to {printable(folder)}/")
    return result


def _add(part: Part, result: dict[str, Any], folder: Path, step: int) -> None:
    """Add a part to a report and its folder, and print its table."""
    result[part.name] = {"date": result["date"], "precision": result["precision"], **part.numbers}
    write_part(result, part.scalars, part.pictures, folder, step)
    say(f"\n{part.table}")
