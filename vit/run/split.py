"""Which of the user's files a run trains on, holds out and tests on, as a table."""

import dataclasses
from pathlib import Path

from vit.data.datasets import open_images
from vit.data.images import ImageSet
from vit.files import write_table
from vit.run.folder import SPLIT_FILE
from vit.training.config import Config


def write_split(config: Config, training: ImageSet, held_out: ImageSet) -> None:
    """Write split.csv into the folder of a run on the user's own files."""
    listed = dataclasses.replace(config.data, on_bad_image="error")  # so that no file is read
    parts = {"train": training, "val": held_out, "test": open_images(listed, train=False)}
    rows = (
        {"file": images.name(index), "label": images.classes[label], "part": part}
        for part, images in parts.items()
        for _, index, label in sorted(
            zip(images.origins, range(len(images)), images.labels.tolist(), strict=True)
        )
    )
    write_table(Path(config.out) / SPLIT_FILE, rows)
