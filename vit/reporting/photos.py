"""Pictures of one's own: what a model takes them for, and what it looked at."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vit.config import EvalConfig
from vit.data.augment import normalize
from vit.data.photos import as_image, central_square, read_photo
from vit.explain.figures import SCALE, overlay
from vit.explain.rollout import CLASS_SPECIFIC, attention_maps
from vit.reporting.opening import class_number, open_run

BEST = 5  # classes that are printed
DRAWN = ("rollout", "relevance")


def classify_photos(run: str, options: EvalConfig) -> None:
    """Print the best classes of pictures and write overlays at their own resolution.

    A model sees the central square of a picture, shrunk to what it was trained on.

    Args:
        run: A run folder, a model.safetensors or a checkpoint.
        options: How.

    Raises:
        ValueError: A picture or the model cannot be read, or there is no such class.
    """
    photos = {Path(name): read_photo(Path(name), "image") for name in options.image}
    opened = open_run(run, options)
    classes = opened.saved.classes
    target = class_number(options.target, classes)
    folder = opened.folder / "photos"
    folder.mkdir(parents=True, exist_ok=True)
    print(opened.describe())
    written: set[str] = set()
    for path, photo in photos.items():
        square = central_square(*photo.shape[:2])
        pixels = as_image(photo)[None]
        aim = None if target is None else torch.tensor([target], device=opened.device)
        logits, maps = attention_maps(
            opened.model, normalize(pixels.to(opened.device), opened.mean, opened.std), DRAWN, aim
        )
        shares, best = logits[0].softmax(dim=0).topk(min(BEST, len(classes)))
        print(f"\n{path}, {photo.shape[1]} × {photo.shape[0]} pixels")
        for share, number in zip(shares.tolist(), best.tolist(), strict=True):
            print(f"  {classes[number]:<20}{share:7.2%}")
        stem = path.stem  # pictures of one name, from several folders, keep apart
        while stem in written:
            stem += "_"
        written.add(stem)
        for kind in DRAWN:
            # What the model did not see stays grey.
            drawn = np.repeat(photo.mean(axis=-1, keepdims=True).astype(np.uint8), 3, axis=-1)
            drawn[square] = overlay(photo[square], maps[kind][0])
            explained = classes[best[0] if target is None else target]
            what = explained if kind in CLASS_SPECIFIC else "class-agnostic"
            place = folder / f"{stem}_{kind}_{what}.png"
            Image.fromarray(drawn).save(place)
            print(f"  wrote {place}")
    print(
        f"\nthe model sees the central square of a picture; "
        f"colours run from {SCALE[0]:g} to {SCALE[1]:g} times uniform attention"
    )
