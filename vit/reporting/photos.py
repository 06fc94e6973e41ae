"""Predictions and attention maps for photos."""

import dataclasses
from pathlib import Path

from vit.classifier import PHOTO_KINDS
from vit.config import EvalConfig
from vit.data.photo_files import find_photos
from vit.data.photos import to_photo
from vit.explain.drawing import SCALE
from vit.model.attention_model import no_maps_text
from vit.registry import ALL_KINDS
from vit.reporting.loading import load_run, results_folder
from vit.run_folder import PHOTOS_FOLDER, SHEET_SUFFIX

BEST = 5  # number of classes printed


def classify_photos(run: str, options: EvalConfig) -> None:
    """Print the most probable classes of photos, and write a sheet with maps for each.

    A model without maps gets no sheets.

    Args:
        run: Run folder, model.safetensors, checkpoint, or the name of a bundled model.
        options: The evaluation; `image` lists photos and folders of photos.

    Raises:
        ValueError: A photo or the model cannot be read, or the class does not exist.
    """
    photos = find_photos(options.image, "image")
    saved = load_run(run, options)
    classifier, has_maps = saved.classifier, saved.classifier.has_maps
    kinds = tuple(dict.fromkeys(options.kinds)) or PHOTO_KINDS
    channels = classifier.preprocess.channels
    for path in photos:  # before a file is written
        to_photo(path, channels, "image")
    if options.target is not None:
        classifier.class_index(options.target)  # raises before a folder is created
    folder = results_folder(saved, options) / PHOTOS_FOLDER
    sheets = _sheet_paths(folder, photos)
    if has_maps:
        folder.mkdir(parents=True, exist_ok=True)
    print(saved.describe())
    width = max(20, *(len(name) + 1 for name in classifier.classes))
    for path, sheet in zip(photos, sheets, strict=True):
        photo = to_photo(path, channels, "image")
        print(f"\n{path}, {photo.shape[1]} × {photo.shape[0]} pixels")
        explanation = classifier.explain(photo, kinds, options.target) if has_maps else None
        best = explanation.probabilities if explanation else classifier.predict(photo, BEST)
        for name, probability in list(best.items())[:BEST]:
            print(f"  {name:<{width}}{probability:7.2%}")
        if explanation is not None:
            dataclasses.replace(explanation, name=path.name).save(sheet)
            print(f"  wrote {sheet}")
    if has_maps:
        low, high = SCALE
        scales = {
            False: f"{low:g} to {high:g} × uniform attention",
            True: f"signed maps {-high:g} to {high:g} × their mean size, red for the class, blue "
            "against it",
        }
        drawn = dict.fromkeys(ALL_KINDS[kind].signed for kind in kinds)
        print(f"\ncolour scale: {'; '.join(scales[signed] for signed in drawn)}")
    else:
        print(f"\nno sheets: {no_maps_text(classifier.model)}")


def _sheet_paths(folder: Path, photos: list[Path]) -> list[Path]:
    """Choose a file for the sheet of each photo; photos of one name get different ones.

    Raises:
        ValueError: A sheet would replace one of the photos.
    """
    sheets: dict[Path, None] = {}
    taken = {photo.resolve() for photo in photos}
    for photo in photos:
        stem = photo.stem
        while (sheet := folder / f"{stem}{SHEET_SUFFIX}") in sheets:
            stem += "_"
        if sheet.resolve() in taken:
            raise ValueError(f"out: {sheet} is one of the photos; use another --out")
        sheets[sheet] = None
    return list(sheets)
