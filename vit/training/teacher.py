"""Learning from a trained model besides the labels: distillation (arXiv 1503.02531).

Shapes: B batch, C classes, H height, W width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vit.classifier import Classifier
from vit.model_file import load
from vit.settings import shorten
from vit.training.schedule import Schedule
from vit.training.start import Run


@dataclass(frozen=True)
class Teacher:
    """A trained model with the fraction of the target that is its own, 0 to 1."""

    classifier: Classifier
    fraction: float

    def mix(self, images: Tensor, targets: Tensor) -> Tensor:
        """Mix targets (B, C) with the probabilities of the teacher for the same images.

        Args:
            images: (B, channels, H, W) float32, normalized and augmented.
            targets: (B, C) float32, probabilities of the classes.
        """
        probabilities = self.classifier.forward(images).softmax(dim=1)
        return targets.lerp(probabilities, self.fraction)


def load_teacher(run: Run, classes: tuple[str, ...], schedule: Schedule) -> Teacher | None:
    """Load the teacher of a run, if it has one.

    Raises:
        ValueError: It cannot be loaded, has other classes, or does not take the run's images.
    """
    name, own = run.config.optim.teacher, run.preprocess
    if name is None:
        return None
    file = load(name, "cpu")
    theirs = file.preprocess
    teacher = Classifier(file.model.to(run.device), theirs, file.classes, run.device, run.precision)
    problem = ""
    if teacher.classes != classes:
        problem = f"has the classes {', '.join(file.classes)}, the data {', '.join(classes)}"
    elif (theirs.mean, theirs.std) != (own.mean, own.std):
        problem = (
            f"normalizes images by {theirs.mean}, {theirs.std}, the run by {own.mean}, {own.std}"
        )
    else:
        for height, width in (schedule.small_size, schedule.full_size):
            images = torch.zeros(1, own.channels, height, width, device=run.device)
            try:
                teacher.forward(images)
            except (AssertionError, ValueError) as error:  # timm's models raise either
                problem = f"does not take images of {height} x {width} pixels ({error})"
                break
    if problem:
        raise ValueError(f"optim.teacher: {shorten(name, 100)} {problem}; choose another teacher")
    return Teacher(teacher, run.config.optim.teacher_share)
