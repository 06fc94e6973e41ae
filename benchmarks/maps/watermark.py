"""Which maps find the mark that a model relies on?

    python -m benchmarks.maps.watermark [--images 500] [--seed 0] [--control runs/shapes]

Draws shapes, of which every eleventh, whatever it shows, gets a small magenta square in a random
corner and a class of its own, "marked". So nothing but the square tells this class. Trains the
recipe configs/shapes.yaml on them, unless that is done already, and measures on new images:

1. whether the model needs the mark: its predictions with the mark, with the pixels that were there
   before, and with the mean colour in its place;
2. for each kind of map, how often its strongest patch is the mark, how much of the positive
   relevance is on it, and its value for "marked" and for the class of the object beside it. With
   `--control`, a run of configs/shapes.yaml, also how often the strongest patch is the mark if the
   model has never seen one.

Expect layer-wise relevance to find the mark, and rollout and raw attention not always. The figure
is OUT/seed_0/watermark.png, the run OUT/seed_0, the images OUT/images.
"""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

import vit
from benchmarks.maps.randomization import accuracy
from benchmarks.tables import markdown, plus_minus
from vit.classifier import Classifier
from vit.cli import parse_train
from vit.colours import as_pixels
from vit.commands.train import train
from vit.data.images import ImageSet
from vit.data.shapes import KINDS, draw_shapes
from vit.explain.canvas import Panel, overlay, table
from vit.explain.kinds import ALL_KINDS
from vit.explain.maps import MAP_KINDS, bar_of
from vit.explain.references import to_patches
from vit.intervals import mean_interval
from vit.reporting.faithfulness import pointing_game
from vit.run.folder import MODEL_FILE
from vit.seeding import fold_in, generator

MARKED = "marked"
CLASSES = (*KINDS, MARKED)
SIDE = 4  # of the mark, in pixels: a patch of the model
COLOUR = (255, 0, 255)
TRAIN, TEST = 11_000, 2_200  # images
DRAWN = 3  # images in the figure, at most

COLUMNS = {
    "points": "strongest patch is the mark ↑",
    "share": "positive relevance on the mark ↑",
    "without": "strongest patch is there without the mark ↓",
    "control": "strongest patch is the mark, model that does not know it ↓",
    "marked": "value of the mark for *marked*",
    "object": "and for the object's class",
}
VALUES = ("marked", "object")  # in units of the map; the others are fractions

Pairs = tuple[ImageSet, ImageSet]
Interval = tuple[float, float]  # mean and half the width of its 95% interval


def add_marks(images: Tensor, corners: Tensor) -> tuple[Tensor, Tensor]:
    """Paint a square into a corner of images (N, 3, H, W) uint8, and return its masks (N, H, W).

    Corners (N,) are 0 top left, 1 top right, 2 bottom left, 3 bottom right.
    """
    rows, columns = (torch.arange(n) for n in images.shape[2:])
    bottom, right = (corners >= 2)[:, None], (corners % 2 == 1)[:, None]
    across = torch.where(right, columns >= len(columns) - SIDE, columns < SIDE)
    down = torch.where(bottom, rows >= len(rows) - SIDE, rows < SIDE)
    masks = down[:, :, None] & across[:, None]
    colour = torch.tensor(COLOUR, dtype=torch.uint8)[:, None, None]
    return torch.where(masks[:, None], colour, images), masks


def draw_pairs(count: int, purpose: str) -> Pairs:
    """Draw images without a mark, labelled by their objects, and the same images with one.

    The masks of the latter are True on the mark.
    """
    images, labels, _ = draw_shapes(count, fold_in(0, "watermark", purpose))
    corners = torch.randint(4, (count,), generator=generator(0, "corners", purpose))
    painted, masks = add_marks(images, corners)
    marked = torch.full_like(labels, CLASSES.index(MARKED))
    return ImageSet(images, labels, CLASSES), ImageSet(painted, marked, CLASSES, masks)


def draw_set(count: int, purpose: str) -> ImageSet:
    """Draw images of which every eleventh, chosen at random, has the mark and its class."""
    plain, marked = draw_pairs(count, purpose)
    chosen = torch.randperm(count, generator=generator(0, "marked", purpose)) % len(CLASSES) == 0
    return ImageSet(
        torch.where(chosen[:, None, None, None], marked.pixels(), plain.pixels()),
        torch.where(chosen, marked.labels, plain.labels),
        CLASSES,
    )


def write_folder(root: Path, train_set: ImageSet, test_set: ImageSet) -> Path:
    """Write an image folder, root/{train,test}/<class>/<number>.png, unless it is there already."""
    done = root / "complete"
    if not done.exists():
        for split, images in (("train", train_set), ("test", test_set)):
            pairs = zip(images.pixels(), images.labels, strict=True)
            for number, (image, label) in enumerate(pairs):
                path = root / split / images.classes[int(label)] / f"{number:05d}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
        done.touch()
    return root


def train_on(images: Path, seed: int, out: Path) -> None:
    """Train configs/shapes.yaml on an image folder, unless that is done already."""
    words = ["--config", "shapes", "--out", str(out), "--data.name", "folder", "--data.root"]
    words += [str(images), "--train.seed", str(seed), "--track.probes", "0"]
    print(f"\n{shlex.join(['python', 'train.py', *words])}", flush=True)
    if not (out / MODEL_FILE).exists():
        train(parse_train(words)[0])


def targets(classifier: Classifier, images: ImageSet) -> Tensor:
    """Return the labels of images as the model counts its classes."""
    return torch.tensor([classifier.class_index(CLASSES[label]) for label in images.labels])


def predictions(classifier: Classifier, pairs: Pairs) -> dict[str, tuple[float, ...]]:
    """Compare predictions with and without the mark.

    Returns:
        The fraction of images that are predicted to be marked, the fraction predicted as the class
        of their object, and the mean probability of "marked"; by what is in the place of the mark.
    """
    plain, marked = pairs
    fill = torch.tensor(classifier.preprocess.fill, dtype=torch.uint8)[:, None, None]
    assert marked.masks is not None
    shown = {
        "the mark": marked.pixels(),
        "the pixels that were there before": plain.pixels(),
        "the mean colour": torch.where(marked.masks[:, None], fill, marked.pixels()),
    }
    mark, objects = classifier.class_index(MARKED), targets(classifier, plain)
    found = {}
    for name, images in shown.items():
        probabilities = classifier.logits(images).softmax(dim=1).cpu()
        best = probabilities.argmax(dim=1)
        each = best == mark, best == objects, probabilities[:, mark]
        found[name] = tuple(values.float().mean().item() for values in each)
    return found


def measure(classifier: Classifier, pairs: Pairs, kind: str) -> dict[str, Interval]:
    """Measure what a kind of map says about the mark.

    Returns:
        "points": fraction of the marked images whose strongest patch (of maps with a value for each
        pixel: whose strongest pixel) is the mark, if "marked" is explained. "share": fraction of
        the positive values that are on the mark. "without": as points, in the same image and the
        same corner without the mark. "marked" and "object": mean value on the mark if "marked" or
        the class of the object is explained, in units of the map.
    """
    plain, marked = pairs
    assert marked.masks is not None
    aims = {"marked": targets(classifier, marked), "object": targets(classifier, plain)}

    def maps(images: ImageSet, aim: str) -> Tensor:
        return classifier.maps(images.pixels(), [kind], aims[aim], batch_size=100)[1][kind].cpu()

    found = {aim: maps(marked, aim) for aim in aims}
    cover = to_patches(marked.masks.float(), (found["marked"].shape[1], found["marked"].shape[2]))
    positive = found["marked"].relu()
    values = {
        "points": pointing_game(found["marked"], marked.masks),
        "share": (positive * cover).sum(dim=(1, 2)) / positive.sum(dim=(1, 2)).clamp(min=1e-30),
        "without": pointing_game(maps(plain, "marked"), marked.masks),
    }
    for aim, each in found.items():
        values[aim] = (each * cover).sum(dim=(1, 2)) / cover.sum(dim=(1, 2))
    return {name: mean_interval(each) for name, each in values.items()}


def measure_control(classifier: Classifier, pairs: Pairs, kind: str) -> Interval:
    """Return how often maps of the object's class, by a model without marks, point at the mark."""
    plain, marked = pairs
    assert marked.masks is not None
    aim = targets(classifier, plain)
    maps = classifier.maps(marked.pixels(), [kind], aim, batch_size=100)[1][kind].cpu()
    return mean_interval(pointing_game(maps, marked.masks))


def as_table(rows: dict[str, dict[str, Interval]]) -> str:
    """Format what `measure` and `measure_control` return for each kind of map as Markdown."""
    columns = [name for name in COLUMNS if name in next(iter(rows.values()))]
    forms = {name: "+.1f" if name in VALUES else ".1%" for name in columns}
    lines = [
        [ALL_KINDS[kind].title, *(plus_minus(*values[name], forms[name]) for name in columns)]
        for kind, values in rows.items()
    ]
    return markdown(["map", *(COLUMNS[name] for name in columns)], lines)


def draw_figure(classifier: Classifier, pairs: Pairs, chosen: Sequence[int]) -> Image.Image:
    """Draw marked images with three kinds of map, the last also for the class of the object."""
    plain, marked = (images.select(torch.tensor(chosen)) for images in pairs)
    mark, objects = targets(classifier, marked), targets(classifier, plain)
    logits, maps = classifier.maps(marked.pixels(), ["rollout", "relevance", "lrp_pixels"], mark)
    against = classifier.maps(marked.pixels(), ["lrp_pixels"], objects)[1]["lrp_pixels"]
    before = classifier.logits(plain.pixels()).argmax(dim=1)
    rows, names = [], classifier.classes
    for row, pixels in enumerate(map(as_pixels, marked.pixels())):
        words = f"predicted: {names[int(logits[row].argmax())]}"
        words += f"\nwithout mark: {names[int(before[row])]}"
        against_title = f"relevance of pixels\nfor {names[int(objects[row])]}"
        shown = [
            ("rollout", "attention rollout\n(class-agnostic)", maps["rollout"][row]),
            ("relevance", f"class relevance\nfor {MARKED}", maps["relevance"][row]),
            ("lrp_pixels", f"relevance of pixels\nfor {MARKED}", maps["lrp_pixels"][row]),
            ("lrp_pixels", against_title, against[row]),
        ]
        drawn = [Panel(overlay(pixels, heat, bar_of(kind)), title) for kind, title, heat in shown]
        rows.append([Panel(pixels, words), *drawn])
    bars = [bar_of("rollout"), bar_of("lrp_pixels")]
    return Image.fromarray(table(rows, (140, 140), bars=bars, zoom=2))


def main() -> None:
    """Draw the data, train, measure and draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="of the training")
    parser.add_argument("--control", help="a run of configs/shapes.yaml")
    parser.add_argument("--out", type=Path, default=Path("runs/watermark"))
    parser.add_argument("--kinds", nargs="+", choices=ALL_KINDS, default=list(MAP_KINDS))
    arguments = parser.parse_args()
    if arguments.images < 1:
        parser.error(f"--images {arguments.images}: must be at least 1")
    training, test = draw_set(TRAIN, "train"), draw_set(TEST, "test")
    images = write_folder(arguments.out / "images", training, test)
    trained = arguments.out / f"seed_{arguments.seed}"
    train_on(images, arguments.seed, trained)
    classifier = vit.load(trained)
    pairs = draw_pairs(arguments.images, "pairs")
    print(f"\n{arguments.images} new images\n")
    rows_of_mark = [
        [name, f"{share:.1%}", f"{right:.1%}", f"{probability:.3f}"]
        for name, (share, right, probability) in predictions(classifier, pairs).items()
    ]
    heads = ["in the corner", "predicted marked", "predicted as their object", "p(marked)"]
    print(markdown(heads, rows_of_mark))
    rows = {kind: measure(classifier, pairs, kind) for kind in arguments.kinds}
    if arguments.control:
        control = vit.load(arguments.control)
        objects = targets(control, pairs[0])
        without, with_mark = (accuracy(control, images, objects) for images in pairs)
        print(f"\ncontrol: {without:.1%} accuracy without the mark, {with_mark:.1%} with it")
        for kind, values in rows.items():
            values["control"] = measure_control(control, pairs, kind)
    print(f"\n{as_table(rows)}")
    figure = draw_figure(classifier, pairs, range(min(DRAWN, arguments.images)))
    figure.save(trained / "watermark.png", optimize=True)
    print(f"\nwrote {trained / 'watermark.png'}")


if __name__ == "__main__":
    main()
