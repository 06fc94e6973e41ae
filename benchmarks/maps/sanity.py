"""Sanity checks of the maps of a run: what do they depend on?

    python -m benchmarks.maps.sanity RUN [--other RUN] [--images 300] [--kinds lrp ...]

Compares maps of test images by their mean rank correlation. All maps of an image explain the same
class, the one that RUN predicts.

1. Random weights (arXiv 1810.03292): the weights of RUN are replaced from the head down to the
   stem, by those of an untrained model, and by its own in random order. A map that explains what
   the model has learned becomes unrelated to that of RUN.
2. Random labels (the same paper): the recipe of RUN is trained on a few of its images until it has
   memorised them, with their labels and with the same labels in random order. `--other` is a run of
   the same recipe with another seed, to see how far maps of well trained models agree.
3. Shifted inputs (arXiv 1711.00867): the images get brighter by a constant that the first layer
   subtracts. The logits are the same, and so is a map of what the model computes. This needs
   model.stem=linear.

Two columns show what is chance: the correlation of RUN's maps with those of the random model for
other images, and with RUN's own for other images. A map fails if it is above chance by more than
0.1. Maps with signs fail it in either sign: correlations of opposite sign would cancel in the mean
if a random model shows the same map or its negative. So the mean of their absolute values counts,
for chance as well. Intervals are those of the mean over images (95%).
"""

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.maps.randomization import (
    accuracy,
    cascade,
    for_shifted_inputs,
    rank_correlation,
    shuffled_weights,
)
from benchmarks.tables import markdown, plus_minus
from vit.classifier import Classifier, build_model
from vit.cli import user_errors
from vit.data.config import AugmentConfig
from vit.data.datasets import load_training
from vit.data.images import ImageSet
from vit.data.preprocess import Preprocess
from vit.data.sampling import balanced_subset, epoch_batches
from vit.explain.kinds import ALL_KINDS
from vit.explain.maps import MAP_KINDS, attention_maps
from vit.intervals import mean_interval
from vit.model_file import SavedModel
from vit.pretrained.load import load as load_model
from vit.reporting.loading import load_test
from vit.seeding import fold_in, generator
from vit.training.build import build_step
from vit.training.start import Run

SEED = 100  # added to that of RUN, so that nothing but the images is the same
BATCH = 100  # images per forward pass
MARGIN = 0.1  # correlation above chance at which a map fails a test with random weights or labels
TRAINED_CHANCE = "trained, other image"
SHIFT = 1.0  # in standard deviations of the training images
SIGNED = [entry.title for entry in ALL_KINDS.values() if entry.signed]
UNAUGMENTED = AugmentConfig(crop_padding=0, flip=False)

Maps = dict[str, Tensor]  # (B, rows, columns) by name of the row in a table
Rows = dict[str, Tensor]  # (B,) by name of the row
Columns = dict[str, Rows]


@dataclass(frozen=True)
class Question:
    """What the maps are to explain."""

    inputs: Tensor  # B normalized test images (B, channels, H, W)
    target: Tensor  # (B,) int64, the class of each that all models are asked about
    kinds: Sequence[str]  # of map

    def ask(self, model: nn.Module, shift: float = 0.0) -> Maps:
        """Return a model's maps of the shifted inputs; of signed kinds also without their signs."""
        parts = [
            attention_maps(model, part + shift, self.kinds, aim)[1]
            for part, aim in zip(self.inputs.split(BATCH), self.target.split(BATCH), strict=True)
        ]
        maps: Maps = {}
        for kind in self.kinds:
            title = ALL_KINDS[kind].title
            maps[title] = found = torch.cat([part[kind] for part in parts])
            if title in SIGNED:
                maps[f"{title}, absolute"] = found.abs()
        return maps


def correlations(maps: Maps, others: Maps) -> Rows:
    """Correlate each kind of map, image by image.

    For maps with signs, the sizes of the correlations come too: they do not cancel if a model shows
    the same map for some images and its negative for others.
    """
    rows: Rows = {}
    for name, found in maps.items():
        rows[name] = rank_correlation(found, others[name])
        if name in SIGNED:
            rows[f"{name}, either sign"] = rows[name].abs()
    return rows


def of_next_image(maps: Maps) -> Maps:
    """Give each image the maps of another one."""
    return {name: found.roll(1, dims=0) for name, found in maps.items()}


def untrained_weights(saved: SavedModel, seed: int) -> dict[str, Tensor]:
    """Return the weights of an untrained model.

    No layer is zero, as the recipes have it: maps of blocks that do nothing would be empty.
    """
    config = saved.config.model
    torch.manual_seed(fold_in(seed, "untrained"))
    config = dataclasses.replace(config, zero_init=False) if config.name == "vit" else config
    return build_model(config, saved.preprocess, len(saved.classes)).state_dict()


def random_weights(
    saved: SavedModel, question: Question, maps: Maps, shuffle: bool, draws: int
) -> Columns:
    """Correlate maps with those of models with more and more random weights.

    Returns:
        Correlations, means over `draws` random models, by stage; and with all weights random, those
        with the maps of another image.
    """
    model, found = saved.model, []
    for seed in range(draws):
        weights = shuffled_weights(model, seed) if shuffle else untrained_weights(saved, seed)
        columns: Columns = {}
        for stage, changed in cascade(model, weights):
            others = question.ask(changed)
            columns[stage] = correlations(maps, others)
        columns["stem, other image"] = correlations(maps, of_next_image(others))
        found.append(columns)
    return {
        stage: {
            name: torch.stack([columns[stage][name] for columns in found]).mean(dim=0)
            for name in found[0][stage]
        }
        for stage in found[0]
    }


def memorise(saved: SavedModel, training: ImageSet, epochs: int) -> Classifier:
    """Train the recipe of a run on a few images, without augmentation, from other weights."""
    train = dataclasses.replace(
        saved.config.train, seed=saved.config.train.seed + SEED, epochs=epochs,
        batch_size=max(1, len(training) // 10), small_share=0, budget_minutes=None, accumulate=1,
    )  # fmt: skip
    config = dataclasses.replace(saved.config, train=train, augment=UNAUGMENTED)
    device, precision = saved.device, saved.precision
    run = Run(config, Preprocess.from_config(config.data), device, precision)
    training = training.to(device)
    _, step = build_step(run, training)
    for epoch in range(epochs):
        shape = step.schedule.steps_per_epoch, step.schedule.batch_size
        order = epoch_batches(len(training), shape, train.seed, epoch)
        for images, labels in training.batches(order):
            step(images, labels)
    model = step.state.evaluated()
    return Classifier(model, step.preprocess, training.classes, device, precision)


def random_labels(
    saved: SavedModel, question: Question, maps: Maps, test: ImageSet, few: int, epochs: int
) -> Columns:
    """Correlate maps with those of models that have memorised a few true and random labels."""
    data, preprocess = saved.config.data, saved.preprocess
    data = dataclasses.replace(data, train_size=few)
    training = load_training(data, saved.config.train.seed, preprocess)[0].in_memory()
    order = torch.randperm(len(training), generator=generator(0, "random labels"))
    columns: Columns = {}
    for name, labels in (("true", training.labels), ("random", training.labels[order])):
        images = dataclasses.replace(training, labels=labels)
        trained = memorise(saved, images, epochs)
        print(
            f"{name} labels: {accuracy(trained, images, labels):.1%} training accuracy, "
            f"{accuracy(trained, test, test.labels):.1%} test accuracy",
            flush=True,
        )
        others = question.ask(trained.model)
        columns[f"{name} labels"] = correlations(maps, others)
    columns["random labels, other image"] = correlations(maps, of_next_image(others))
    return columns


def shifted_inputs(model: nn.Module, question: Question, maps: Maps) -> Columns:
    """Compare maps with those of brighter images by the model for them.

    Returns:
        Correlations, and differences in units of the largest absolute value of each map.
    """
    changed, inputs = for_shifted_inputs(model, SHIFT), question.inputs
    with torch.no_grad():
        difference = (changed(inputs + SHIFT) - model(inputs)).abs().max()
    print(f"logits differ by at most {difference:.1g}", flush=True)
    others = question.ask(changed, SHIFT)
    return {
        "rank correlation": {
            name: rank_correlation(found, others[name]) for name, found in maps.items()
        },
        "largest relative difference": {
            name: (found - others[name]).flatten(1).abs().amax(dim=1)
            / found.flatten(1).abs().amax(dim=1).clamp(min=1e-30)
            for name, found in maps.items()
        },
    }


def show(title: str, columns: Columns) -> None:
    """Print a Markdown table: mean and 95% interval of each cell."""
    rows = [
        [name, *(plus_minus(*mean_interval(found[name]), ".2f") for found in columns.values())]
        for name in next(iter(columns.values()))
    ]
    print(f"\n{title}\n\n{markdown(['map', *columns], rows)}\n", flush=True)


def related(columns: Columns, column: str, chance: str) -> str:
    """Name the rows that are above chance by more than `MARGIN`, on average over the images."""
    names = [
        name
        for name, found in columns[column].items()
        if (found - columns[chance][name]).mean() > MARGIN
    ]
    return "; ".join(names) or "none"


def main() -> None:
    """Run the three checks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", help="run folder, model file or the name of a bundled model")
    parser.add_argument("--other", help="the same, of another seed, to compare with")
    parser.add_argument("--images", type=int, default=300, help="test images")
    parser.add_argument("--draws", type=int, default=3, help="random models per stage")
    parser.add_argument("--few", type=int, default=500, help="images to memorise")
    parser.add_argument("--epochs", type=int, default=60, help="epochs to memorise them")
    parser.add_argument("--kinds", nargs="+", choices=ALL_KINDS, default=list(MAP_KINDS))
    given = parser.parse_args()
    saved = load_model(given.run)
    another = load_model(given.other).model if given.other else None
    test = load_test(saved)
    test = test.select(balanced_subset(test.labels, given.images, 0, "sanity")).in_memory()
    target = saved.logits(test.pixels()).argmax(dim=1)
    question = Question(saved.normalize(test.pixels()), target, given.kinds)
    maps = question.ask(saved.model)
    other = {TRAINED_CHANCE: correlations(maps, of_next_image(maps))}
    print(f"{saved.describe()}, {len(test)} test images, maps in float32")

    for how, shuffle in (("those of an untrained model", False), ("its own, shuffled", True)):
        columns = random_weights(saved, question, maps, shuffle, given.draws) | other
        show(f"weights replaced by {how}, {given.draws} draws", columns)
        print(f"fail without the trained head: {related(columns, 'head', TRAINED_CHANCE)}")
        print(f"fail without any trained weights: {related(columns, 'stem', 'stem, other image')}")
    columns = random_labels(saved, question, maps, test, given.few, given.epochs)
    if another:
        columns = {"another seed": correlations(maps, question.ask(another))} | columns
    show(f"models trained on {given.few} images", columns | other)
    failing = related(columns, "random labels", "random labels, other image")
    print(f"fail with random labels: {failing}")
    try:
        show("shifted inputs", shifted_inputs(saved.model, question, maps))
    except ValueError as error:
        print(f"no shifted inputs: {error}")


if __name__ == "__main__":
    with user_errors():
        main()
