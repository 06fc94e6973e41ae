"""The data sets that `data.name` may name; imported without torch.

CONTRIBUTING.md shows how to add one.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class DatasetSpec:
    """A data set: how it is read, and what a model depends on."""

    image_size: tuple[int, int]  # height and width, in pixels
    mean: tuple[float, ...]  # of each channel, 0 to 1
    std: tuple[float, ...]  # standard deviation of each channel, 0 to 1
    # Function in `vit.data` that maps a `DataConfig` and `train` to an `ImageSet`.
    reader: str = "published:read_torchvision"
    own_files: bool = False  # of a user, with any number of channels; all others are grey or RGB
    drawn: bool = False  # the reader then also takes the number of images, or None
    test_included: bool = False  # reading the training images shows that test images can be read
    files: str = ""  # pattern of what is in data.root once the set is downloaded; "" for no files
    torchvision: str = ""  # name of the class that downloads it
    training_splits: tuple[str, ...] = ("train",)  # torchvision's names of what is for training
    archive: str = ""  # what users who download it by hand put into data.root

    @property
    def channels(self) -> int:
        """Number of colour channels."""
        return len(self.mean)


IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

# Means and standard deviations of the training images. Image files of any size are normalized like
# ImageNet, so that a model does not depend on the folder it was trained on, and weights trained on
# ImageNet fit. 64 pixels let a CPU train on photos from scratch.
DATASETS = {
    "cifar10": DatasetSpec(
        (32, 32), (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), "published:read_cifar10",
        files="cifar-10-*", torchvision="CIFAR10",
        archive="cifar-10-python.tar.gz or the unpacked cifar-10-batches-py/",
    ),
    "cifar100": DatasetSpec(
        (32, 32), (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), test_included=True,
        files="cifar-100-*", torchvision="CIFAR100",
        archive="cifar-100-python.tar.gz or the unpacked cifar-100-python/",
    ),
    "shapes": DatasetSpec(
        (32, 32), (0.5003, 0.5005, 0.4999), (0.2818, 0.2822, 0.2817), "shapes:read_shapes",
        drawn=True, test_included=True,
    ),
    "folder": DatasetSpec((32, 32), *IMAGENET, "folder:list_folder", own_files=True),
    "shards": DatasetSpec((32, 32), *IMAGENET, "shards:list_shards", own_files=True),
    "table": DatasetSpec((32, 32), *IMAGENET, "table:list_table", own_files=True),
    "digits": DatasetSpec((8, 8), (0.3045,), (0.3755,), "published:digits", test_included=True),
    "fashion_mnist": DatasetSpec(
        (28, 28), (0.2860,), (0.3530,), files="FashionMNIST", torchvision="FashionMNIST",
        archive="FashionMNIST/raw/",
    ),
    "svhn": DatasetSpec(
        (32, 32), (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970), files="*_32x32.mat",
        torchvision="SVHN", archive="train_32x32.mat and test_32x32.mat",
    ),
    # As is usual, both of the small parts of Flowers102, 1,020 images each, are for training.
    "flowers102": DatasetSpec(
        (64, 64), *IMAGENET, files="flowers-102*", torchvision="Flowers102",
        training_splits=("train", "val"), archive="flowers-102/",
    ),
    "food101": DatasetSpec(
        (64, 64), *IMAGENET, files="food-101*", torchvision="Food101", archive="food-101/"
    ),
    "oxford_iiit_pet": DatasetSpec(
        (64, 64), *IMAGENET, files="oxford-iiit-pet*", torchvision="OxfordIIITPet",
        training_splits=("trainval",), archive="oxford-iiit-pet/",
    ),
}  # fmt: skip
