"""Learning from a trained model besides the labels: distillation (arXiv 1503.02531)."""

from dataclasses import dataclass, replace

from torch import Tensor

from vit.classifier import Classifier
from vit.config import Config
from vit.console import shorten, sides, warn
from vit.data.config import DataConfig
from vit.data.images import ImageSet
from vit.model_file import SavedModel, weights_digest
from vit.pretrained.adapt import Pretrained
from vit.pretrained.load import load
from vit.training.schedule import Schedule
from vit.training.start import Run, problem_with


@dataclass(frozen=True)
class Teacher:
    """A trained model to learn from besides the labels."""

    classifier: Classifier
    fraction: float  # of the target that is the teacher's, 0 to 1
    name: str
    digest: str  # of its weights

    def mix(self, images: Tensor, targets: Tensor) -> Tensor:
        """Mix targets (B, C) with the probabilities of normalized images (B, channels, H, W)."""
        probabilities = self.classifier.forward(images).softmax(dim=1)
        return targets.lerp(probabilities, self.fraction)


def load_teacher(run: Run, training: ImageSet, schedule: Schedule) -> Teacher | None:
    """Load the teacher of a run, if it has one.

    Raises:
        ValueError: It cannot be loaded, is the run itself, or does not fit the data.
    """
    name = run.config.optim.teacher
    if name is None:
        return None
    try:
        saved = load(name, "cpu")
        if saved.run.resolve() == run.folder.resolve():
            raise ValueError(f"{name} is the run itself; train in another folder with --out")
        _check(saved, run, training.classes, schedule.size_at(0.0))
        digest, before = weights_digest(saved.model), run.checkpoint
        began = digest if before is None else before.environment.get("teacher", digest)
        if began != digest and before is not None and before.config.optim.teacher == name:
            raise ValueError(f"{name} has changed since the run began; restore it")
    except ValueError as error:
        raise ValueError(f"optim.teacher: {error}") from None
    warn_of_seen_images("optim.teacher", name, saved, run.config, training)
    model = saved.model.to(run.device)
    teacher = replace(saved, model=model, device=run.device, precision=run.precision)
    return Teacher(teacher, run.config.optim.teacher_share, saved.with_progress(name), digest)


def _check(teacher: Classifier, run: Run, classes: tuple[str, ...], size: tuple[int, int]) -> None:
    """Check that a teacher fits the classes and images of a run, the first of which have a size."""
    name, own, other = run.config.optim.teacher, run.preprocess, teacher.preprocess
    if teacher.classes != classes:
        known, needed = ", ".join(teacher.classes), ", ".join(classes)
        raise ValueError(f"{name} has the classes {known}, but the data {needed}")
    if (other.mean, other.std) != (own.mean, own.std):
        raise ValueError(
            f"{name} normalizes images with mean {other.mean} and standard deviation {other.std}, "
            f"but the run with {own.mean} and {own.std}"
        )
    if other.image_size != own.image_size:
        raise ValueError(
            f"{name} was trained on images of {sides(other.image_size)} pixels, but the run's have "
            f"{sides(own.image_size)}; choose another teacher or data.image_size"
        )
    if problem := problem_with(teacher, size):
        raise ValueError(
            f"{name} does not take images of {sides(size)} pixels ({shorten(problem, 150)}); "
            "choose another teacher, or train without smaller images (--train.small_share 0)"
        )


def warn_of_seen_images(
    key: str, name: str, source: SavedModel | Pretrained, own: Config, training: ImageSet
) -> None:
    """Warn if the trained model of a key may have learned from images that a run holds out."""
    other = source.config
    if other is None:  # another project trained it
        return
    same_files = source.fingerprint in ("", training.fingerprint)
    files_differ = _is_same_set(other.data, own.data) and not same_files
    if files_differ or may_have_seen(other, own):
        split = "another data.val_size, data.test_fraction or train.seed"
        warn(
            f"{key}: {name} was trained with {'other files' if files_differ else split}, and may "
            "have seen images that this run holds out, whose accuracy would be too high"
        )


def _is_same_set(one: DataConfig, other: DataConfig) -> bool:
    """Tell whether images may be the same ones, as may those of two layouts of own files."""
    return one.name == other.name or (one.spec.own_files and other.spec.own_files)


def may_have_seen(other: Config, own: Config) -> bool:
    """Tell whether a model may have learned from images that a run validates or tests with."""
    old, new = other.data, own.data
    if not _is_same_set(old, new):
        return False
    same_split = (old.val_size, other.train.seed) == (new.val_size, own.train.seed)
    return old.test_fraction != new.test_fraction or (new.val_size != 0 and not same_split)
