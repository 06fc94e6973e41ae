"""Where images come from: each data set's pictures, labels and class names, not resized yet."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from pkgutil import resolve_name

from vit.data.config import DataConfig
from vit.data.folder import list_folder
from vit.data.listing import Source
from vit.data.shapes import KINDS, draw_shapes
from vit.data.shards import list_shards
from vit.data.table import list_table
from vit.seeding import fold_in

SHAPES_TRAIN, SHAPES_TEST = 10_000, 2_000  # images drawn unless a number is given


def read_source(data: DataConfig, train: bool, count: int | None = None) -> Source:
    """Find the training or test images of a data set; files are listed but not read.

    Args:
        data: Which data set, and the folder it is in.
        train: Whether to find the training images rather than the test images.
        count: Number of shapes to draw; None draws 10,000 training and 2,000 test images. Other
            data sets are always complete.

    Returns:
        The pictures, in the data set's own order.

    Raises:
        ValueError: The data is missing and could not be downloaded.
    """
    reader = resolve_name(f"vit.data.{data.spec.reader}")
    return reader(data, train, count) if data.spec.drawn else reader(data, train)


def shapes(data: DataConfig, train: bool, count: int | None) -> Source:
    """Draw shapes."""
    split, default = ("train", SHAPES_TRAIN) if train else ("test", SHAPES_TEST)
    images, labels, masks = draw_shapes(count or default, fold_in(0, "shapes", split))
    return Source(images, labels, KINDS, masks)


def own_files(find: Callable[..., Source], data: DataConfig, train: bool) -> Source:
    """List image files of the user's own."""
    return find(Path(data.root).expanduser(), train, data.test_fraction)


folder = partial(own_files, list_folder)
shards = partial(own_files, list_shards)
table = partial(own_files, list_table)
