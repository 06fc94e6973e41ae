"""Predictions for any number of image files, as a table.

Shapes: N images, C classes.
"""

import itertools
import re
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vit.classifier import Classifier
from vit.console import printable, warn
from vit.data.photos import find_photos
from vit.data.stream import ImageFiles
from vit.files import write_table
from vit.reporting.calibration import make_sets
from vit.reporting.config import PredictConfig
from vit.reporting.loading import load_run, results_folder
from vit.run.folder import EVAL_FOLDER, PHOTOS_FILE

TOP = 5  # classes per row
COLUMNS = (
    r"file,class,probability(,class_\d+,probability_\d+)*(,familiarity)?(,set_\w+)*"  # a pattern
)


def predict_files(run: str, options: PredictConfig) -> Path:
    """Classify image files and write a table with a row for each.

    The table appears when it is complete. Memory does not grow with the number of files, apart from
    the list of their names.

    Args:
        run: Run folder, model.safetensors, checkpoint, or the name of a bundled model.
        options: The evaluation; `photos` lists image files and folders.

    Returns:
        The table: a CSV file with the columns file, class and probability, and class_1,
        probability_1 to class_5, probability_5, best first; familiarity, see `Calibration`, if the
        model has it and images are not flipped; with a coverage, also set_lac and set_raps, each
        the classes of a set, best first, separated by |.

    Raises:
        ValueError: There are no images, none can be read, the model cannot be read, or the output
            is a file that is not a table of predictions.
    """
    paths = find_photos(options.photos, "predict")
    saved = load_run(run, options, options.flip)
    table = Path(options.out) if options.out else saved.run / EVAL_FOLDER / PHOTOS_FILE
    results_folder(saved, str(table.parent))  # raises where it is a file
    _require_own_table(table)
    print(saved.describe(), flush=True)
    start = time.perf_counter()
    rows = _rank_files(saved.classifier, paths, options)
    first = next(rows, None)
    if first is None:
        raise ValueError(f"predict: none of the files ({len(paths):,}) can be read as an image")
    table.parent.mkdir(parents=True, exist_ok=True)
    count = write_table(table, itertools.chain([first], rows))
    speed = count / (time.perf_counter() - start)
    print(f"classified {count:,} of {len(paths):,} files, {speed:,.0f} files/s; wrote {table}")
    return table


def columns_of(best: str, ranking: dict[str, float]) -> dict[str, Any]:
    """Return the columns `best` and probability, then class_1, probability_1, class_2 and so on."""
    name, probability = next(iter(ranking.items()))
    row = {best: name, "probability": probability}
    for rank, (name, probability) in enumerate(ranking.items(), start=1):
        row |= {f"class_{rank}": name, f"probability_{rank}": probability}
    return row


def _rank_files(
    classifier: Classifier, paths: list[Path], options: PredictConfig
) -> Iterator[dict[str, Any]]:
    """Yield the rows of files, in batches; warn of those that cannot be read, and skip them."""
    decoded = _decode(classifier, paths)
    while batch := list(itertools.islice(decoded, options.batch_size)):
        found, images = zip(*batch, strict=True)
        logits = classifier.logits(torch.stack(images), options.batch_size).cpu()
        rows = [columns_of("class", ranking) for ranking in classifier.ranked(logits, TOP)]
        if (calibration := classifier.calibration) and calibration.energies and not options.flip:
            for row, value in zip(rows, calibration.familiarity(logits).tolist(), strict=True):
                row["familiarity"] = round(value, 4)
        if options.coverage is not None:
            sets = _sets(classifier, images, logits, options.coverage)
            rows = [row | columns for row, columns in zip(rows, sets, strict=True)]
        for path, row in zip(found, rows, strict=True):
            yield {"file": path} | row


def _sets(
    classifier: Classifier, images: Sequence[Tensor], logits: Tensor, coverage: float
) -> list[dict[str, str]]:
    """Return the columns with the sets of images (channels, H, W) with logits (N, C)."""
    # From the pixels, so that the set of a photo does not depend on those before it.
    uniform = torch.tensor([zlib.crc32(image.numpy().tobytes()) / 2**32 for image in images])
    found = make_sets(classifier, logits, uniform, coverage)
    order = logits.argsort(dim=1, descending=True).tolist()
    return [
        {
            f"set_{kind}": "|".join(classifier.classes[c] for c in ranking if inside[row, c])
            for kind, inside in found.items()
        }
        for row, ranking in enumerate(order)
    ]


def _decode(classifier: Classifier, paths: list[Path]) -> Iterator[tuple[Path, Tensor]]:
    """Read files in worker processes; yield path and image (channels, H, W) uint8, in order."""
    files = ImageFiles(tuple(map(str, paths)), classifier.preprocess)
    for start, images, problems in files.decode_all("predict"):
        for number, image in enumerate(images):
            if number in problems:
                problem = problems[number].removeprefix("data.root: ")
                warn(printable(f"skipped: {problem}"))
            else:
                yield paths[start + number], image


def _require_own_table(path: Path) -> None:
    """Check that a file that would be replaced is a table of predictions.

    Raises:
        ValueError: It is not.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        header = file.readline(10_000).decode(errors="replace").strip()
    if not re.fullmatch(COLUMNS, header):
        raise ValueError(
            f"out: {path} exists and is not a table of predictions for image files; rename it, or "
            "use another --out"
        )
