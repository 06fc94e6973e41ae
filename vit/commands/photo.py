"""`eval.py RUN photo`: the classes of photos, and a sheet with attention maps for each."""

import dataclasses
import hashlib
import os

from vit.classifier import PHOTO_KINDS
from vit.commands.config import PhotoConfig
from vit.console import printable, say
from vit.data.photos import find_photos, to_photo
from vit.model.attention_model import no_maps_text
from vit.reporting.loading import load_run, results_folder, warn_skipped
from vit.reporting.tables import TOP, text_table
from vit.run.folder import PHOTOS_FOLDER, SHEET_SUFFIX


def run(name: str, options: PhotoConfig) -> None:
    """Print the most probable classes of photos, and write sheets if the model has maps.

    ValueError if the model or all photos cannot be read, or the class does not exist.
    """
    paths = find_photos(options.photos, "photo")
    saved = load_run(name, options.device, options.precision)
    has_maps = saved.has_maps
    kinds = tuple(dict.fromkeys(options.kinds)) or PHOTO_KINDS
    if options.target is not None:
        saved.class_index(options.target)  # raises before a folder is created
    folder = results_folder(saved, options.out, PHOTOS_FOLDER)
    count = 0
    for path in paths:
        try:
            photo = to_photo(path, saved.preprocess.channels)
        except ValueError as error:
            if len(paths) == 1:
                raise
            warn_skipped(str(error))
            continue
        if not count:
            say(saved.describe())
        count += 1
        say(f"\n{printable(path)}, {photo.shape[1]} × {photo.shape[0]} pixels")
        explanation = saved.explain(photo, kinds, options.target) if has_maps else None
        best = explanation.probabilities if explanation else saved.predict(photo, TOP)
        rows = [(name, f"{probability:.2%}") for name, probability in list(best.items())[:TOP]]
        say("\n".join(f"  {line}" for line in text_table(rows)))
        if explanation is not None:
            # Photos of the same name may be in different folders.
            place = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:6]
            stem = os.fsencode(path.stem)[:200].decode(errors="ignore")  # a name has 255 bytes
            sheet = folder / f"{stem}_{place}{SHEET_SUFFIX}"
            folder.mkdir(parents=True, exist_ok=True)
            dataclasses.replace(explanation, name=path.name).save(sheet)
            say(f"  wrote {printable(sheet)}")
    if not count:
        raise ValueError(f"photo: none of the files ({len(paths):,}) can be read as an image")
    say(f"\nclassified {count:,} of {len(paths):,} files")
    if not has_maps:
        say(f"no sheets: {no_maps_text(saved.model)}")
