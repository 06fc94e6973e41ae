"""Predictions for any number of image files, as a table.

Shapes: N images, C classes.
"""

import itertools
import os
import re
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from tqdm import tqdm

from vit.classifier import Classifier
from vit.console import printable, warn
from vit.data.photos import find_photos, pillow_warnings
from vit.files import write_table
from vit.reporting.config import PredictConfig
from vit.reporting.loading import load_run, results_folder
from vit.run.folder import EVAL_FOLDER, PHOTOS_FILE

TOP = 5  # classes per row
COLUMNS = r"file,class,probability(,class_\d+,probability_\d+)*"  # a pattern
MAX_THREADS = 8  # that decode image files


def predict_files(run: str, options: PredictConfig) -> Path:
    """Classify image files and write a table with a row for each.

    The table appears when it is complete. Memory does not grow with the number of files, apart from
    the list of their names.

    Args:
        run: Run folder, model.safetensors, checkpoint, or the name of a bundled model.
        options: The evaluation; `photos` lists image files and folders.

    Returns:
        The table: a CSV file with the columns file, class and probability, and class_1,
        probability_1 to class_5, probability_5, best first.

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
    with (
        pillow_warnings(),  # for all threads that read files
        # disable=None shows the bar on terminals only.
        tqdm(total=len(paths), desc="predict", unit="image", leave=False, disable=None) as bar,
    ):
        rows = _rank_files(saved.classifier, paths, options.batch_size, bar)
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
    name, share = next(iter(ranking.items()))
    row = {best: name, "probability": share}
    for rank, (name, share) in enumerate(ranking.items(), start=1):
        row |= {f"class_{rank}": name, f"probability_{rank}": share}
    return row


def _rank_files(
    classifier: Classifier, paths: list[Path], batch_size: int, bar: "tqdm[NoReturn]"
) -> Iterator[dict[str, Any]]:
    """Yield the rows of files, in batches; warn of those that cannot be read, and skip them."""
    decoded = _decode(classifier, paths, batch_size, bar)
    while batch := list(itertools.islice(decoded, batch_size)):
        found, images = zip(*batch, strict=True)
        ranked = classifier.rank(torch.stack(images), TOP, batch_size)
        for path, ranking in zip(found, ranked, strict=True):
            yield {"file": path} | columns_of("class", ranking)


def _decode(
    classifier: Classifier, paths: list[Path], ahead: int, bar: "tqdm[NoReturn]"
) -> Iterator[tuple[Path, Tensor]]:
    """Read files in worker threads; yield path and image (channels, H, W) uint8, in order.

    At most `ahead` files are read in advance. Pillow decodes and resizes without the interpreter's
    lock, so threads are enough.
    """
    preprocess = classifier.preprocess

    def read(path: Path) -> Tensor | ValueError:
        try:
            return preprocess.resize(path, "predict")
        except ValueError as error:
            return error

    workers = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1))
    running: deque[Future[Tensor | ValueError]] = deque()
    remaining = iter(paths)
    try:
        for path in paths:
            for later in itertools.islice(remaining, 1 + ahead - len(running)):
                running.append(workers.submit(read, later))
            image = running.popleft().result()
            bar.update()
            if isinstance(image, ValueError):
                warn(printable(f"skipped: {str(image).removeprefix('predict: ')}"))
            else:
                yield path, image
    finally:
        workers.shutdown(cancel_futures=True)


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
