"""Where images come from: each data set's pictures, labels and class names, not resized yet."""

from pathlib import Path

from vit.config import DataConfig
from vit.data.cifar import read_cifar
from vit.data.digits import read_digits
from vit.data.folder import list_folder
from vit.data.listing import Source
from vit.data.shapes import KINDS, draw_shapes
from vit.data.shards import list_shards
from vit.data.table import list_table
from vit.seeding import fold_in

SHAPES_TRAIN, SHAPES_TEST = 10_000, 2_000  # images drawn unless a number is given
# Data sets whose test images are there, and undamaged, where the training images are.
TEST_INCLUDED = ("shapes", "digits", "cifar10", "cifar100")


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
    if data.name == "shapes":
        split, default = ("train", SHAPES_TRAIN) if train else ("test", SHAPES_TEST)
        images, labels, masks = draw_shapes(count or default, fold_in(0, "shapes", split))
        return Source(images, labels, KINDS, masks)
    if data.name == "digits":
        return Source(*read_digits(train))
    root = Path(data.root).expanduser()
    if data.name == "folder":
        return list_folder(root, train, data.test_fraction)
    if data.name == "shards":
        return list_shards(root, train, data.test_fraction)
    if data.name == "table":
        return list_table(root, train, data.test_fraction)
    if data.name in ("cifar10", "cifar100"):
        return Source(*read_cifar(data.name, root, train, data.download))
    # Imported late, because torchvision takes seconds.
    from vit.data.torchvision_sets import read_torchvision

    return Source(*read_torchvision(data.name, root, train, data.download))
