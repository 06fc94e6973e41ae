"""`eval.py RUN predict`: a table of predictions for any number of image files."""

import contextlib
import itertools
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vit.classifier import Classifier
from vit.commands.config import PredictConfig
from vit.console import printable, say
from vit.data.photos import find_photos
from vit.data.stream import ImageFiles
from vit.distributed.world import Stopped, StopRequest, stop_on_signals
from vit.files import require_file, write_table
from vit.reporting.calibration import make_sets, with_sets
from vit.reporting.loading import load_run, require_replaceable, results_folder, warn_skipped
from vit.reporting.tables import TOP, columns_of
from vit.run.folder import PHOTOS_FILE

SHOWN = 10  # files whose classes are printed, too
COLUMNS = "file,class,probability,class_1,"  # the first of a table


def run(name: str, options: PredictConfig) -> None:
    """Classify image files and write a table with a row for each.

    The table appears when it is complete, and NAME_part.csv with the rows so far after Ctrl-C, or
    if a worker ends. Memory grows only with the list of files. The table is a CSV file with the
    columns file, class, probability, class_1, probability_1 and so on, best first; familiarity, see
    `Calibration`, if the model has it and there is one view of an image; with a coverage, set_lac
    and set_raps: classes, best first, separated by |.

    Raises:
        ValueError: The model or all images cannot be read, or the output is another kind of file.
        KeyboardInterrupt: After Ctrl-C or SIGTERM, when the rows so far are written.
    """
    paths = find_photos(options.photos, "predict")
    saved = load_run(name, options.device, options.precision, options.flip, options.views)
    table = Path(options.out or results_folder(saved, None) / PHOTOS_FILE)
    results_folder(saved, str(table.parent))  # raises where it is a file
    part = table.with_stem(f"{table.stem}_part")
    problem = "is not a table of predictions for image files"
    for path in (table, part):
        require_replaceable(_is_table(path), [path], problem)
    say(saved.describe())
    if table.exists():
        say(f"{printable(table)} exists and will be replaced when all files are classified")
    start, count, first = time.perf_counter(), 0, list[dict[str, Any]]()
    failures: list[ValueError] = []
    with contextlib.suppress(Stopped), stop_on_signals() as stop, stop.deferred():
        rows = _rank_files(saved, paths, options, stop, failures)
        if first := list(itertools.islice(rows, SHOWN + 1)):
            table.parent.mkdir(parents=True, exist_ok=True)
            count = write_table(part, itertools.chain(first, rows))
    if not (count or stop.signal or failures):
        raise ValueError(f"predict: none of the files ({len(paths):,}) can be read as an image")
    speed = count / (time.perf_counter() - start)
    place = part if stop.signal or failures else part.replace(table)
    wrote = f"; wrote {printable(place)}" if count else ""
    for row in first if count <= SHOWN else ():
        say(f"{printable(row['file'])}: {printable(row['class'])} ({row['probability']:.1%})")
    say(f"classified {count:,} of {len(paths):,} files, {speed:,.0f} files/s{wrote}")
    if stop.signal:
        raise KeyboardInterrupt
    if failures:
        raise failures[0]


def _is_table(path: Path) -> bool:
    """Tell whether a file is a table of predictions for image files."""
    if not path.exists():
        return False
    with require_file(path).open("rb") as file:
        return file.read(len(COLUMNS)) == COLUMNS.encode()


def _rank_files(
    classifier: Classifier,
    paths: list[Path],
    options: PredictConfig,
    stop: StopRequest,
    failures: list[ValueError],
) -> Iterator[dict[str, Any]]:
    """Yield the rows of files, in batches; warn of those that cannot be read, and skip them."""
    decoded = itertools.takewhile(lambda _: not stop.signal, _decode(classifier, paths, failures))
    while batch := list(itertools.islice(decoded, options.batch_size)):
        files, images = zip(*batch, strict=True)
        logits = classifier.logits(torch.stack(images), options.batch_size).cpu()
        ranked = zip(files, classifier.ranked(logits, TOP), strict=True)
        rows = [{"file": file} | columns_of("class", ranking) for file, ranking in ranked]
        if classifier.calibration and classifier.views == 1:
            familiarity = classifier.calibration.familiarity(logits).tolist()
            for row, value in zip(rows, familiarity, strict=True):
                row["familiarity"] = round(value, 4)
        if options.coverage is not None:
            # From the pixels, so that the set of a photo does not depend on those before it.
            uniform = [zlib.crc32(image.numpy().tobytes()) / 2**32 for image in images]
            sets = make_sets(classifier, logits, torch.tensor(uniform), options.coverage)
            rows = [*with_sets(rows, sets, logits, classifier.classes)]
        yield from rows


def _decode(
    classifier: Classifier, paths: list[Path], failures: list[ValueError]
) -> Iterator[tuple[Path, Tensor]]:
    """Read files in worker processes; yield path and image (channels, H, W) uint8, in order.

    If a worker ends, no more images follow, and the error is among the failures.
    """
    files = ImageFiles(tuple(map(str, paths)), classifier.preprocess)
    try:
        for start, images, problems in files.decode_all("predict"):
            for number, image in enumerate(images):
                if number in problems:
                    warn_skipped(problems[number])
                else:
                    yield paths[start + number], image
    except ValueError as error:
        failures.append(error)
