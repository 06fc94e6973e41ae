"""Inputs of eval.py: the model, its test images, and the folder for results."""

import contextlib
import dataclasses
import hashlib
import importlib.util
import os
import tempfile
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from vit.classifier import Classifier
from vit.console import note, printable, warn
from vit.data.config import DataConfig
from vit.data.datasets import load_test_images, open_images, report_copies, split_training
from vit.data.images import ImageSet
from vit.data.layout import check_stored, is_stored, join, recognize
from vit.files import inside, require_file
from vit.model_file import BUNDLED, SavedModel
from vit.pretrained.load import load
from vit.run.folder import EVAL_FOLDER
from vit.settings import parse


def load_run(
    name: str, device: str, precision: str, flip: bool = False, views: int = 1
) -> SavedModel:
    """Load a model as `vit.load` does, which averages 1, 2 (flip) or 6 views of an image."""
    saved = load(name, device, precision)
    return dataclasses.replace(saved, flip=flip or views > 1, shift=views == 6)


def require_loaded(classifier: Classifier) -> SavedModel:
    """Return a classifier that `vit.load` has loaded; ValueError for another one."""
    if not isinstance(classifier, SavedModel):
        raise ValueError("classifier: it must be one that vit.load has loaded")
    return classifier


def results_folder(
    saved: SavedModel, out: str | None, *names: str, top: str = EVAL_FOLDER, root: str | None = None
) -> Path:
    """Return the folder for results: `names` in out, or in the folder `top` of the run.

    Results for other images, in `root`, several views or an earlier checkpoint do not replace the
    run's own: they are in with_... there. ValueError if the folder is a file, read-only, or a link
    inside the run or `out`, see `inside`.
    """
    variant = {1: [], 2: ["flip"]}.get(saved.views, [f"views_{saved.views}"])
    if saved.superseded:
        variant.append(f"step_{saved.step}")
    if root is not None and not data_of(saved, root)[1]:
        place = Path(os.path.realpath(root))
        digest = hashlib.sha256(os.fsencode(place)).hexdigest()[:8]
        variant.append(f"{printable(place.name)[:40]}_{digest}".replace("\\", "_"))
    if variant and not out:
        names = (f"with_{'_'.join(variant)}", *names)
    folder = inside(Path(out), *names) if out else inside(saved.run, top, *names)
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        raise ValueError(f"out: {existing} is a file; --out takes a folder")
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        reason = error.strerror
        raise ValueError(f"out: cannot write to {existing} ({reason}); use another --out") from None
    return folder


def require_replaceable(is_own: bool, paths: Iterable[Path], why: str, key: str = "out") -> None:
    """Raise ValueError if one of the paths exists and is not the command's own; `why` says so."""
    if not is_own and (path := next(filter(Path.exists, paths), None)):
        raise ValueError(f"{key}: {path} exists and {why}; move it away, or use another --{key}")


def require_own(
    folder: Path, file: str, keys: set[str], patterns: Iterable[str], name: str
) -> None:
    """Raise ValueError if files in a folder match the patterns and are not a command's own.

    They are its own if `file`, among them, is a JSON object with the keys; `name` is their name.
    """
    is_own = False
    with contextlib.suppress(OSError, ValueError):
        data = require_file(folder / file).read_bytes()
        is_own = keys <= parse(dict[str, Any], data, file).keys()
    paths = (path for pattern in patterns for path in folder.glob(pattern))
    require_replaceable(is_own, paths, f"is not part of {name}")


def data_of(saved: SavedModel, root: str | None) -> tuple[DataConfig, bool]:
    """Return where test images are, and whether they are the run's: a published set always is."""
    data = own = saved.config.data
    if root is not None:
        name = recognize(Path(root)) or data.name
        data = dataclasses.replace(data, name=name, root=root)
        check_stored(data)
    is_own = os.path.realpath(data.root) == os.path.realpath(own.root)
    return data, is_own or not data.spec.own_files


def load_test(saved: SavedModel, root: str | None = None, decode: bool = True) -> ImageSet:
    """Load the test images of a model's data set, from `root` or where they were in training.

    With `decode`, they are decoded if they fit into memory. Some of the model's classes may have
    none. An included model has eight test images with it, for when its data set is not there.
    ValueError if the images are missing and could not be downloaded, have other classes, or if the
    model may have been trained on some of them.
    """
    data, own = data_of(saved, root)
    if root is None and saved.path.parent == BUNDLED and not is_stored(data):
        return _included(saved)
    # Nothing is downloaded into a folder that only the model file names.
    download = root is not None or data.root == type(data).root
    data = dataclasses.replace(data, download=download)
    if decode:
        test = load_test_images(data, saved.preprocess)
    else:
        test = open_images(data, train=False).resized(saved.preprocess)
    root, classes = data.root, saved.classes
    known = {_plain(name): name for name in classes}
    names = (name if name in classes else known.get(_plain(name), name) for name in test.classes)
    test = dataclasses.replace(test, classes=tuple(names))
    if others := {*test.classes} - {*classes}:
        raise ValueError(
            f"data.root: the test images in {root} have classes that {saved.path} does not know: "
            f"{join(sorted(others))}; point --data.root at a folder with its classes only"
        )
    if test.classes != classes:
        missing = [name for name in classes if name not in test.classes]
        if missing:
            counts = f"{len(test.classes)} of {len(classes)} classes"
            note(f"test images of {counts}; none: {join(missing)}")
        numbers = torch.tensor([classes.index(name) for name in test.classes])
        test = dataclasses.replace(test, labels=numbers[test.labels], classes=classes)
    if test.split and not saved.fingerprint:
        note(
            f"{root} does not say which images are for testing, so {len(test):,} of them are "
            "chosen, as in training; put all of them into test/<class>/ of a folder to test on all"
        )
    elif test.split and saved.fingerprint != test.fingerprint:
        problem = (
            f"the list of files in {root}, their labels or copies among them have changed since "
            f"{saved.path} was trained, or it had another data.test_fraction"
        )
        if not own:
            problem = f"{saved.path} was trained on other files than those in {root}"
        raise ValueError(
            f"data.root: {problem}, so it may have been trained on some of the test images; "
            "undo the changes, or put images to test with into test/<class>/ of another "
            "folder, or a table (the run's split.csv is one, if copied beside them), and point "
            "--data.root at it"
        )
    return test


def _plain(name: str) -> str:
    """Return the name of a class without what nobody sees: its encoding, and spaces around it."""
    return unicodedata.normalize("NFC", name).strip()


def _included(saved: SavedModel) -> ImageSet:
    """Load the test images that come with the included models, and say how to get all."""
    name, root = saved.config.data.name, saved.config.data.root
    tensors = safetensors.torch.load_file(BUNDLED / "test_images" / f"{name}.safetensors")
    images, labels, origins = (tensors[key] for key in ("images", "labels", "origins"))
    note(
        f"{name} is not in {root}/, so only the {len(images)} test images that come with the model "
        f"are used; --data.root {root} downloads all"
    )
    test = ImageSet(images, labels, saved.classes, origins=tuple(origins.tolist()))
    return test.resized(saved.preprocess)


def load_split(
    saved: SavedModel, root: str | None, download: bool = True
) -> tuple[ImageSet, ImageSet]:
    """Find the training images of a model and the held-out ones.

    Files are decoded only with `data.on_bad_image` "skip". They are where they were in training, or
    else in `root`. ValueError if they are missing, or differ from those of the training run.
    """
    data = saved.config.data
    if root is not None:
        with contextlib.suppress(ValueError):
            return load_split(saved, None, download=False)
        data = dataclasses.replace(data, root=root)
        check_stored(data)
    else:  # nothing is downloaded into a folder that only the model file names
        data = dataclasses.replace(data, download=download and data.root == type(data).root)
    training, held_out = split_training(data, saved.config.train.seed)
    if saved.fingerprint not in ("", training.fingerprint):
        raise ValueError(
            f"data.root: {data.root} does not contain the images that {saved.path} was trained on, "
            "which this needs; restore them, or point --data.root at them"
        )
    return training, held_out


def report_seen(saved: SavedModel, test: ImageSet) -> None:
    """Report which test images a model was trained on, if its training images are there."""
    with contextlib.suppress(ValueError):  # of missing images
        data = dataclasses.replace(saved.config.data, on_bad_image="error")  # so no file is read
        config = dataclasses.replace(saved.config, data=data)
        listed = dataclasses.replace(saved, config=config)
        training = load_split(listed, None, download=False)[0]
        if training.fingerprint and test.fingerprint:  # only files can be compared
            report_copies([training, test])


def require_packages(user: str, packages: Sequence[str], extra: str) -> None:
    """Raise ValueError if packages of an extra, which `user` needs, are not installed."""
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise ValueError(
            f"{user} needs {', '.join(missing)}, not installed here; run "
            f'pip install "vit-from-scratch[{extra}]", or pip install ".[{extra}]" in a checkout'
        )


def warn_skipped(problem: str) -> None:
    """Warn that a file is skipped, and say why."""
    warn(f"skipped: {problem.removeprefix('data.root: ').removeprefix('photo: ')}")
