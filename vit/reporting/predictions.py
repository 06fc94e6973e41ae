"""Predictions for image files: a table for any number of them, or sheets with attention maps.

Shapes: N images, C classes.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import os
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vit.classifier import PHOTO_KINDS, Classifier
from vit.console import printable, say, warn
from vit.data.photos import find_photos, to_photo
from vit.data.stream import ImageFiles
from vit.distributed.stop import Stopped, StopRequest, stop_on_signals
from vit.files import require_file, write_table
from vit.model.attention_model import no_maps_text
from vit.reporting.calibration import make_sets, set_columns
from vit.reporting.config import PhotoConfig, PredictConfig
from vit.reporting.loading import load_run, results_folder
from vit.reporting.tables import text_table
from vit.run.folder import PHOTOS_FILE, PHOTOS_FOLDER, SHEET_SUFFIX

TOP = 5  # classes per row
COLUMNS = "file,class,probability,class_1,"  # the first of a table


def predict_files(run: str, options: PredictConfig) -> Path:
    """Classify image files and write a table with a row for each.

    The table appears when it is complete, or with the rows so far after Ctrl-C: beside an earlier
    one, as NAME_part.csv. Memory grows only with the list of files.

    Returns:
        The table: a CSV file with the columns file, class, probability, class_1, probability_1 and
        so on, best first; familiarity, see `Calibration`, if the model has it and images are not
        flipped; with a coverage, set_lac and set_raps: classes, best first, separated by |.

    Raises:
        ValueError: No images or the model can be read, or the output is a file that is not a table
            of predictions.
        KeyboardInterrupt: After Ctrl-C or SIGTERM, when the rows so far are written.
    """
    paths = find_photos(options.photos, "predict")
    saved = load_run(run, options, options.flip)
    table = Path(options.out or results_folder(saved, None) / PHOTOS_FILE)
    results_folder(saved, str(table.parent))  # raises where it is a file
    part = table.with_stem(f"{table.stem}_part") if table.exists() else table
    for path in (table, part):
        _require_own_table(path)
    say(saved.describe())
    if part != table:
        say(f"{printable(table)} exists and will be replaced when all files are classified")
    start, count = time.perf_counter(), 0
    with contextlib.suppress(Stopped), stop_on_signals() as stop, stop.deferred():
        rows = _rank_files(saved.classifier, paths, options, stop)
        if first := next(rows, None):
            table.parent.mkdir(parents=True, exist_ok=True)
            count = write_table(part, itertools.chain([first], rows))
    if not (count or stop.signal):
        raise ValueError(f"predict: none of the files ({len(paths):,}) can be read as an image")
    speed, place = count / (time.perf_counter() - start), part if stop.signal else table
    if place != part:
        part.replace(table)
    wrote = f"; wrote {printable(place)}" if count else ""
    say(f"classified {count:,} of {len(paths):,} files, {speed:,.0f} files/s{wrote}")
    if stop.signal:
        raise KeyboardInterrupt
    return table


def _require_own_table(path: Path) -> None:
    """Check that a file that would be replaced is a table of predictions; ValueError if not."""
    if not path.exists():
        return
    with require_file(path).open("rb") as file:
        if file.read(len(COLUMNS)) != COLUMNS.encode():
            raise ValueError(
                f"out: {path} exists and is not a table of predictions for image files; rename it, "
                "or use another --out"
            )


def columns_of(best: str, ranking: dict[str, float]) -> dict[str, Any]:
    """Return the columns `best` and probability, then class_1, probability_1, class_2 and so on."""
    row = dict(zip((best, "probability"), next(iter(ranking.items())), strict=True))
    for rank, (name, probability) in enumerate(ranking.items(), start=1):
        row |= {f"class_{rank}": name, f"probability_{rank}": probability}
    return row


def _rank_files(
    classifier: Classifier, paths: list[Path], options: PredictConfig, stop: StopRequest
) -> Iterator[dict[str, Any]]:
    """Yield the rows of files, in batches; warn of those that cannot be read, and skip them."""
    decoded = itertools.takewhile(lambda _: not stop.signal, _decode(classifier, paths))
    while batch := list(itertools.islice(decoded, options.batch_size)):
        found, images = zip(*batch, strict=True)
        logits = classifier.logits(torch.stack(images), options.batch_size).cpu()
        rows = [columns_of("class", ranking) for ranking in classifier.ranked(logits, TOP)]
        if classifier.calibration and not options.flip:
            familiarity = classifier.calibration.familiarity(logits).tolist()
            for row, value in zip(rows, familiarity, strict=True):
                row["familiarity"] = round(value, 4)
        if options.coverage is not None:
            # From the pixels, so that the set of a photo does not depend on those before it.
            uniform = [zlib.crc32(image.numpy().tobytes()) / 2**32 for image in images]
            sets = make_sets(classifier, logits, torch.tensor(uniform), options.coverage)
            columns = set_columns(sets, logits, classifier.classes)
            rows = [row | more for row, more in zip(rows, columns, strict=True)]
        for path, row in zip(found, rows, strict=True):
            yield {"file": path} | row


def _decode(classifier: Classifier, paths: list[Path]) -> Iterator[tuple[Path, Tensor]]:
    """Read files in worker processes; yield path and image (channels, H, W) uint8, in order."""
    files = ImageFiles(tuple(map(str, paths)), classifier.preprocess)
    for start, images, problems in files.decode_all("predict"):
        for number, image in enumerate(images):
            if number in problems:
                _skip(problems[number])
            else:
                yield paths[start + number], image


def _skip(problem: str) -> None:
    warn(f"skipped: {problem.removeprefix('data.root: ').removeprefix('photo: ')}")


def classify_photos(run: str, options: PhotoConfig) -> None:
    """Print the most probable classes of photos, and write a sheet with maps for each.

    A model without maps gets no sheets.

    Raises:
        ValueError: The model or all photos cannot be read, or the class does not exist.
    """
    paths = find_photos(options.photos, "photo")
    saved = load_run(run, options)
    classifier, has_maps = saved.classifier, saved.classifier.has_maps
    kinds = tuple(dict.fromkeys(options.kinds)) or PHOTO_KINDS
    if options.target is not None:
        classifier.class_index(options.target)  # raises before a folder is created
    folder = results_folder(saved, options.out, PHOTOS_FOLDER)
    count = 0
    for path in paths:
        try:
            photo = to_photo(path, classifier.preprocess.channels, "photo")
        except ValueError as error:
            if len(paths) == 1:
                raise
            _skip(str(error))
            continue
        if not count:
            say(saved.describe())
        count += 1
        say(f"\n{printable(path)}, {photo.shape[1]} × {photo.shape[0]} pixels")
        explanation = classifier.explain(photo, kinds, options.target) if has_maps else None
        best = explanation.probabilities if explanation else classifier.predict(photo, TOP)
        rows = [(name, f"{probability:.2%}") for name, probability in list(best.items())[:TOP]]
        say("\n".join(f"  {line}" for line in text_table(rows)))
        if explanation is not None:
            # Photos of one name in different folders keep apart.
            place = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:6]
            stem = os.fsdecode(os.fsencode(path.stem)[:200])  # of the 255 bytes of a name
            sheet = folder / f"{stem}_{place}{SHEET_SUFFIX}"
            folder.mkdir(parents=True, exist_ok=True)
            dataclasses.replace(explanation, name=path.name).save(sheet)
            say(f"  wrote {printable(sheet)}")
    if not count:
        raise ValueError(f"photo: none of the files ({len(paths):,}) can be read as an image")
    say(f"\nclassified {count:,} of {len(paths):,} files")
    if not has_maps:
        say(f"no sheets: {no_maps_text(classifier.model)}")
