"""Predictions and attention maps for photos."""

import dataclasses
import hashlib
import os
from pathlib import Path

from vit.classifier import PHOTO_KINDS
from vit.console import printable, warn
from vit.data.photos import find_photos, to_photo
from vit.model.attention_model import no_maps_text
from vit.reporting.config import PhotoConfig
from vit.reporting.loading import load_run, results_folder
from vit.run.folder import PHOTOS_FOLDER, SHEET_SUFFIX

BEST = 5  # number of classes printed


def classify_photos(run: str, options: PhotoConfig) -> None:
    """Print the most probable classes of photos, and write a sheet with maps for each.

    A model without maps gets no sheets.

    Args:
        run: The model, see `vit.model_file.load`.
        options: The evaluation; `photos` lists photos and folders of photos.

    Raises:
        ValueError: The model or all photos cannot be read, or the class does not exist.
    """
    paths = find_photos(options.photos, "photo")
    saved = load_run(run, options)
    classifier, has_maps = saved.classifier, saved.classifier.has_maps
    kinds = tuple(dict.fromkeys(options.kinds)) or PHOTO_KINDS
    channels = classifier.preprocess.channels
    if options.target is not None:
        classifier.class_index(options.target)  # raises before a folder is created
    folder = results_folder(saved, options.out) / PHOTOS_FOLDER
    width = max(20, *(len(name) + 1 for name in classifier.classes))
    count = 0
    for path in paths:
        try:
            photo = to_photo(path, channels, "photo")
        except ValueError as error:
            if len(paths) == 1:
                raise
            warn(printable(f"skipped: {str(error).removeprefix('photo: ')}"))
            continue
        if not count:
            print(saved.describe())
        count += 1
        print(f"\n{path}, {photo.shape[1]} × {photo.shape[0]} pixels")
        explanation = classifier.explain(photo, kinds, options.target) if has_maps else None
        best = explanation.probabilities if explanation else classifier.predict(photo, BEST)
        for name, probability in list(best.items())[:BEST]:
            print(f"  {name:<{width}}{probability:7.2%}")
        if explanation is not None:
            sheet = _sheet_path(folder, path)
            folder.mkdir(parents=True, exist_ok=True)
            dataclasses.replace(explanation, name=path.name).save(sheet)
            print(f"  wrote {sheet}")
    if not count:
        raise ValueError(f"photo: none of the files ({len(paths):,}) can be read as an image")
    print(f"\nclassified {count:,} of {len(paths):,} files")
    if not has_maps:
        print(f"no sheets: {no_maps_text(classifier.model)}")


def _sheet_path(folder: Path, photo: Path) -> Path:
    """Return the file for a photo's sheet; photos of one name in different folders keep apart."""
    place = hashlib.sha256(os.fsencode(photo.resolve())).hexdigest()[:6]
    return folder / f"{photo.stem}_{place}{SHEET_SUFFIX}"
