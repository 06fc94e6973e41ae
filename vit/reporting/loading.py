"""Inputs of eval.py: the model, its test images, and the folder for results."""

import dataclasses
from pathlib import Path

from vit.data.datasets import ImageSet, load_test_images
from vit.data.stream import Decoder
from vit.model_file import SavedModel, load_model
from vit.reporting.config import EvalConfig
from vit.run.folder import EVAL_FOLDER


def load_run(run: str, options: EvalConfig) -> SavedModel:
    """Load a model with the device, the precision and the mirror images of the options.

    Raises:
        ValueError: The model cannot be read, or the device is not available.
    """
    saved = load_model(run, options.device, options.precision)
    classifier = dataclasses.replace(saved.classifier, flip=options.flip)
    return dataclasses.replace(saved, classifier=classifier)


def results_folder(saved: SavedModel, options: EvalConfig) -> Path:
    """Return the folder for results: --out, or eval/ in the run folder."""
    return Path(options.out) if options.out else saved.run / EVAL_FOLDER


def load_test(saved: SavedModel, options: EvalConfig) -> ImageSet:
    """Load the test images of the data set that a model was trained on.

    Raises:
        ValueError: The images are missing and could not be downloaded, or have other classes.
    """
    data, classes = saved.config.data, saved.classifier.classes
    root = options.data.root or data.root
    test = load_test_images(
        dataclasses.replace(data, root=root, download=options.data.download),
        saved.classifier.preprocess,
        Decoder(data.workers),
        report=options.data.root is not None,
    )
    if test.classes != classes:
        different = ", ".join(sorted({*test.classes} ^ {*classes}))
        raise ValueError(
            f"data.root: the test images in {root} do not have the classes of {saved.path}: only "
            f"one of the two has {different}; point --data.root at a folder with its classes"
        )
    require_not_trained_on(test, saved, root)
    return test


def require_not_trained_on(test: ImageSet, saved: SavedModel, root: str) -> None:
    """Check that data.test_fraction chose the same test images when a model was trained.

    Raises:
        ValueError: It did not, so the model may have been trained on some of them.
    """
    if test.split and saved.fingerprint not in ("", test.fingerprint):
        raise ValueError(
            f"data.root: files in {root} were added, deleted or renamed since {saved.path} was "
            "trained, or it was trained on other files or with another data.test_fraction, so it "
            "may have been trained on some of the test images; restore them, or point --data.root "
            "at a folder with other images in test/"
        )
