"""Predictions and attention maps for photos."""

import dataclasses
from pathlib import Path

from vit.config import EvalConfig
from vit.data.photos import read_photo
from vit.explain.drawing import SCALE
from vit.reporting.loading import load_run, results_folder

BEST = 5  # number of classes printed
KINDS = ("rollout", "relevance")


def classify_photos(run: str, options: EvalConfig) -> None:
    """Print the most probable classes of photos and write a sheet with maps for each.

    Args:
        run: Run folder, model.safetensors, checkpoint, or the name of a bundled model.
        options: The evaluation; `image` lists the photos.

    Raises:
        ValueError: A photo or the model cannot be read, or the class does not exist.
    """
    photos = {Path(name): read_photo(Path(name), "image") for name in options.image}
    saved = load_run(run, options)
    if options.target is not None:
        saved.classifier.class_index(options.target)  # raises before a folder is created
    folder = results_folder(saved, options) / "photos"
    folder.mkdir(parents=True, exist_ok=True)
    print(saved.describe())
    width = max(20, *(len(name) + 1 for name in saved.classifier.classes))
    written: set[str] = set()
    for path, photo in photos.items():
        explanation = saved.classifier.explain(photo, KINDS, options.target)
        print(f"\n{path}, {photo.shape[1]} × {photo.shape[0]} pixels")
        for name, probability in list(explanation.probabilities.items())[:BEST]:
            print(f"  {name:<{width}}{probability:7.2%}")
        sheet = folder / f"{_unused(path.stem, written)}.png"
        dataclasses.replace(explanation, name=path.name).save(sheet)
        print(f"  wrote {sheet}")
    print(f"\ncolours show {SCALE[0]:g} to {SCALE[1]:g} times uniform attention")


def _unused(stem: str, used: set[str]) -> str:
    """Return a file name that no other photo of this call uses, and add it to `used`."""
    while stem in used:
        stem += "_"
    used.add(stem)
    return stem
