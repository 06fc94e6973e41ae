"""Comparison of models on the same test images: accuracy, speed, and where attention differs.

Shapes: N test images, C classes.
"""

import dataclasses
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vit.classifier import Classifier
from vit.console import printable
from vit.data.images import ImageSet
from vit.data.preprocess import Preprocess
from vit.data.sampling import balanced_subset
from vit.evaluation import mcnemar, report
from vit.explain.figures import comparison_picture
from vit.hardware import describe
from vit.model.attention_model import no_maps_text
from vit.model_file import SavedModel
from vit.reporting.comparison_table import as_markdown, as_text
from vit.reporting.config import CompareConfig
from vit.reporting.corruptions import compare_corrupted
from vit.reporting.loading import load_run, load_test, require_not_trained_on, results_folder

SUMMED_AT_ONCE = 500  # images; limits peak memory
LONGEST_NAME = 20  # characters of a model's name


@dataclass(frozen=True)
class Measured:
    """What a model does with the test images.

    Attributes:
        name: Its short name.
        saved: The model.
        logits: (N, C) float32, on the CPU.
        maps: Attention rollout (N, rows, columns), on the CPU; None if the model has no maps.
        images_per_second: Speed of computing the logits, the median over batches.
    """

    name: str
    saved: SavedModel
    logits: Tensor
    maps: Tensor | None
    images_per_second: float

    @property
    def guesses(self) -> Tensor:
        """The predicted classes, (N,) int64."""
        return self.logits.argmax(dim=1)


def compare_runs(run: str, options: CompareConfig) -> None:
    """Compare models on the test images; print a table, and write it with numbers and a picture.

    Every other model is compared with the first. If no model has attention maps, there is no
    picture.

    Args:
        run: Run folder, model.safetensors, checkpoint, or the name of a bundled model.
        options: The evaluation; `others` are the other models.

    Raises:
        ValueError: A model or the data cannot be read, or the models have different data or
            classes.
    """
    models = [load_run(name, options) for name in (run, *options.others)]
    for other in models[1:]:
        _require_same_classes(models[0], other)
    test = load_test(models[0], options.data.root)
    names = _short_names([saved.name for saved in models])
    for other in models[1:]:
        require_not_trained_on(test, other, options.data.root or models[0].config.data.root)
    name = f"compare_{'_'.join(names[1:])}"[:60]  # file systems allow 255 bytes
    folder = results_folder(models[0], options.out) / name
    folder.mkdir(parents=True, exist_ok=True)
    print("\n".join(saved.describe() for saved in models), flush=True)
    tests = _resize(test, models, options)
    measured = _measure(names, models, tests, options.batch_size)
    classifier, mapped = models[0].classifier, [each for each in measured if each.maps is not None]
    content = {
        "data": models[0].config.data.name,
        "images": len(test),
        "options": dataclasses.asdict(options),
        "hardware": f"{describe(classifier.device)}, {str(classifier.precision)[len('torch.') :]}",
        "batch_size": options.batch_size,
        "models": [_describe(each, test) for each in measured],
        "pairs": [_compare(measured[0], other, test, options.probes) for other in measured[1:]],
        "drawn": [each.name for each in mapped],
    }
    table, picture = folder / "comparison.md", folder / "comparison.png"
    picture.unlink(missing_ok=True)  # of an earlier comparison
    if mapped:
        drawn = _choose(measured, test, options.probes, options.seed)
        Image.fromarray(_draw(test, drawn, measured)).save(picture)
    table.write_text(as_markdown(content, picture.name if mapped else None), encoding="utf-8")
    print(f"\n{as_text(content)}")
    if options.corruptions:
        pairs = ((s.classifier, tests[s.classifier.preprocess]) for s in models)
        tested = dict(zip(names, pairs, strict=True))
        content["corruptions"], text = compare_corrupted(tested, folder, options)
        print(f"\n{text}")
    (folder / "comparison.json").write_text(json.dumps(content, indent=1))
    without = [each.saved.classifier.model for each in measured if each.maps is None]
    for line in dict.fromkeys(map(no_maps_text, without)):
        print(line)
    print(f"\nwrote {f'{picture}, ' if mapped else ''}{table}, {folder / 'comparison.json'}")


def _require_same_classes(first: SavedModel, second: SavedModel) -> None:
    data, classes = first.config.data.name, first.classifier.classes
    if (other := second.config.data.name) != data:
        raise ValueError(
            f"compare: {second.path} was trained on {other}, not on {data} like "
            f"{first.path}; only models of the same data set can be compared"
        )
    if second.classifier.classes != classes:
        different = ", ".join(sorted({*second.classifier.classes} ^ {*classes}))
        raise ValueError(
            f"compare: {second.path} does not have the classes of {first.path}: only one of the "
            f"two has {different}; only models of the same classes can be compared"
        )


def _short_names(names: Sequence[str]) -> list[str]:
    """Cut names to 20 characters; number them if two are the same."""
    short = [printable(name)[:LONGEST_NAME] for name in names]
    if len({*short}) == len(short):
        return short
    return [f"{name}_{number}" for number, name in enumerate(short, start=1)]


def _resize(
    test: ImageSet, models: Sequence[SavedModel], options: CompareConfig
) -> dict[Preprocess, ImageSet]:
    """Return the first model's test images as each model takes them, perhaps of another size."""
    tests = {models[0].classifier.preprocess: test}
    for saved in models[1:]:
        if saved.classifier.preprocess not in tests:
            same_data = dataclasses.replace(saved, config=models[0].config)
            tests[saved.classifier.preprocess] = load_test(same_data, options.data.root)
    return tests


def _measure(
    names: Sequence[str],
    models: Sequence[SavedModel],
    tests: dict[Preprocess, ImageSet],
    batch_size: int,
) -> list[Measured]:
    """Classify and map all test images.

    The models take turns with every batch, and a speed is the median over the batches, so that
    other programs on the machine slow them down alike. Reading and maps are not timed.
    """
    classifiers = [saved.classifier for saved in models]
    logits: list[list[Tensor]] = [[] for _ in models]
    speeds: list[list[float]] = [[] for _ in models]
    for parts in zip(*(test.parts(batch_size) for test in tests.values()), strict=True):
        resized = dict(zip(tests, parts, strict=True))
        for number, classifier in enumerate(classifiers):
            part = resized[classifier.preprocess]
            if not logits[number]:
                classifier.logits(part, batch_size).cpu()  # warms up
            start = time.perf_counter()
            logits[number].append(classifier.logits(part, batch_size).cpu())
            speeds[number].append(len(part) / (time.perf_counter() - start))
    return [
        Measured(
            name,
            saved,
            torch.cat(logits[number]),
            _map_all(saved.classifier, tests[saved.classifier.preprocess], batch_size),
            statistics.median(speeds[number]),
        )
        for number, (name, saved) in enumerate(zip(names, models, strict=True))
    ]


def _map_all(classifier: Classifier, test: ImageSet, batch_size: int) -> Tensor | None:
    """Return the rollout of all test images, (N, rows, columns); None if there are no maps."""
    if not classifier.has_maps:
        return None
    parts = test.parts(batch_size)
    maps = (classifier.maps(part, precision=classifier.precision)[1]["rollout"] for part in parts)
    return torch.cat([found.cpu() for found in maps])


def _describe(each: Measured, test: ImageSet) -> dict[str, Any]:
    """Return what the table and comparison.json say about a model."""
    saved = each.saved
    model, train = saved.config.model, saved.config.train
    architecture = f"vit, depth {model.depth}, width {model.embed_dim}, patch {model.patch_size}"
    if model.attention != "dot":
        architecture += f", {model.attention} attention"
    if model.name != "vit":
        architecture = f"{model.name}{' with timm_args' if model.timm_args else ''}"
    result = report(each.logits, test.labels.cpu(), test.classes)
    shown = ["accuracy", "accuracy_95"]
    if len({*test.class_counts()}) > 1:
        shown.append("balanced_accuracy")
    return {
        "name": each.name,
        "path": str(saved.path),
        "architecture": architecture,
        "parameters": sum(p.numel() for p in saved.classifier.model.parameters()),
        "steps": saved.step,
        "finished": saved.finished,
        "epochs": train.epochs if train.budget_minutes is None else None,
        "budget_minutes": train.budget_minutes,
        "pretrained": model.pretrained,
        **{key: result[key] for key in shown},
        "images_per_second": each.images_per_second,
    }


def _compare(first: Measured, other: Measured, test: ImageSet, probes: int) -> dict[str, Any]:
    """Compare two models.

    Returns:
        first and other, their names; only_right, the numbers of images that only the first and only
        the other classifies correctly; mcnemar_p, see `vit.evaluation.mcnemar`; and if both have
        maps, moved_attention, the mean fraction of the attention that is on other patches, and
        most_moved, the images where it is largest.
    """
    labels = test.labels.cpu()
    right, right_other = first.guesses == labels, other.guesses == labels
    only = [int((right & ~right_other).sum()), int((right_other & ~right).sum())]
    names = {"first": first.name, "other": other.name}
    pair = {**names, "only_right": only, "mcnemar_p": mcnemar(*only)}
    if first.maps is None or other.maps is None:
        return pair
    moved = _moved(first.maps, other.maps)
    most = moved.topk(min(probes, len(moved)))
    listed = zip(most.indices.tolist(), most.values.tolist(), strict=True)
    return {
        **pair,
        "moved_attention": moved.mean().item(),
        "most_moved": [{**test.entry(index), "moved": value} for index, value in listed],
    }


def _moved(one: Tensor, other: Tensor) -> Tensor:
    """Return the fraction of each image's attention that is on other patches, (N,), 0 to 1."""
    one, other = _on_one_grid([one, other])
    return (one - other).abs().mean(dim=(1, 2)) / 2


def _on_one_grid(maps: Sequence[Tensor]) -> list[Tensor]:
    """Enlarge maps (N, rows, columns) to the finest of their grids."""
    finest = max((found.shape[1:] for found in maps), key=lambda size: size[0])
    return [F.interpolate(found[:, None], tuple(finest))[:, 0] for found in maps]


def _choose(measured: Sequence[Measured], test: ImageSet, probes: int, seed: int) -> Tensor:
    """Choose the test images to draw.

    Returns:
        Indices of the images where the maps of the first two models that have maps differ most,
        most different first; or with maps of a single model, of images on which the models
        disagree.
    """
    maps = [each.maps for each in measured if each.maps is not None]
    if len(maps) > 1:
        return _moved(maps[0], maps[1]).topk(min(probes, len(test))).indices
    guesses = torch.stack([each.guesses for each in measured])
    differ = (guesses != guesses[0]).any(dim=0).nonzero().squeeze(1)
    labels = test.labels.cpu()[differ]
    return differ[balanced_subset(labels, min(probes, len(differ)), seed, "probes")]


def _draw(test: ImageSet, drawn: Tensor, measured: Sequence[Measured]) -> np.ndarray:
    """Draw the mean over all test images, followed by the images at `drawn`."""
    chosen, classes = test.select(drawn), test.classes
    sums = torch.stack([part.sum(dim=0) for part in test.parts(SUMMED_AT_ONCE)])
    average = (sums.sum(dim=0) / len(test)).round().to(torch.uint8)
    captions, maps, titles = [f"mean of all\n{len(test):,} test images"], [], []
    for index, label in zip(drawn.tolist(), chosen.labels.tolist(), strict=True):
        lines = [f"true {classes[label]}, no. {index}"]
        for each in measured:
            if each.maps is None:
                lines.append(f"{each.name}: {classes[each.guesses[index]]}")
        captions.append("\n".join(lines))
    for each in measured:
        if each.maps is not None:
            maps.append(torch.cat([each.maps.mean(dim=0)[None], each.maps[drawn]]))
            predicted = [classes[guess] for guess in each.guesses[drawn].tolist()]
            titles.append([each.name, *(f"{each.name}: {name}" for name in predicted)])
    pixels = torch.cat([average[None], chosen.pixels()])
    return comparison_picture(pixels, _on_one_grid(maps), titles, captions)
