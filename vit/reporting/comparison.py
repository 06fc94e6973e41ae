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

import torch
import torch.nn.functional as F
from torch import Tensor

from vit.classifier import Classifier
from vit.console import counted, printable
from vit.data.images import ImageSet
from vit.evaluation import mcnemar, report
from vit.hardware import describe
from vit.model.attention_model import no_maps_text
from vit.model_file import SavedModel
from vit.reporting.config import CompareConfig
from vit.reporting.corruptions import compare_corrupted
from vit.reporting.loading import load_run, load_test, results_folder
from vit.reporting.tables import text_table, with_interval

MOST_MOVED = 8  # images listed
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
    """Compare models with the first on the test images; print a table, and write it with numbers.

    Args:
        run: The first model, see `vit.model_file.load`.
        options: The evaluation; `others` are the other models.

    Raises:
        ValueError: A model or the data cannot be read, or the models have different data or
            classes.
    """
    models = [load_run(name, options) for name in (run, *options.others)]
    first, size = models[0], options.batch_size
    tests = [_load_test(saved, first, options.data.root) for saved in models]
    names = [printable(saved.name)[:LONGEST_NAME] for saved in models]
    if len({*names}) < len(names):
        names = [f"{name}_{number}" for number, name in enumerate(names, start=1)]
    name = f"compare_{'_'.join(names[1:])}"[:60]  # file systems allow 255 bytes
    folder = results_folder(first, options.out) / name
    folder.mkdir(parents=True, exist_ok=True)
    print("\n".join(saved.describe() for saved in models), flush=True)
    classified = classify_in_turns([saved.classifier for saved in models], tests, size)
    measured = [
        Measured(name, saved, logits, _rollouts(saved.classifier, test, size), speed)
        for name, saved, test, (logits, speed) in zip(names, models, tests, classified, strict=True)
    ]
    classifier = first.classifier
    content = {
        "data": first.config.data.name,
        "images": len(tests[0]),
        "options": dataclasses.asdict(options),
        "hardware": f"{describe(classifier.device)}, {str(classifier.precision)[len('torch.') :]}",
        "models": [_describe(each, tests[0]) for each in measured],
        "pairs": [_compare(measured[0], other, tests[0]) for other in measured[1:]],
    }
    text = as_text(content)
    (folder / "comparison.md").write_text(f"{text}\n", encoding="utf-8")
    print(f"\n{text}")
    if options.corruptions:
        pairs = [(saved.classifier, test) for saved, test in zip(models, tests, strict=True)]
        corrupted = compare_corrupted(dict(zip(names, pairs, strict=True)), folder, options)
        content["corruptions"], table = corrupted
        print(f"\n{table}")
    (folder / "comparison.json").write_text(json.dumps(content, indent=1))
    without = [each.saved.classifier.model for each in measured if each.maps is None]
    for line in dict.fromkeys(map(no_maps_text, without)):
        print(line)
    print(f"\nwrote comparison.md and comparison.json to {folder}/")


def _load_test(saved: SavedModel, first: SavedModel, root: str | None) -> ImageSet:
    """Load the test images of the first model in the size of a model.

    Raises:
        ValueError: The models have different data or classes, or the images cannot be read.
    """
    data = first.config.data
    if saved.config.data.name != data.name:
        raise ValueError(
            f"compare: {saved.path} was trained on {saved.config.data.name}, not on {data.name} "
            f"like {first.path}; only models of the same data set can be compared"
        )
    config = dataclasses.replace(saved.config, data=data)
    return load_test(dataclasses.replace(saved, config=config), root)


def classify_in_turns(
    classifiers: Sequence[Classifier], tests: Sequence[ImageSet], batch_size: int
) -> list[tuple[Tensor, float]]:
    """Return each model's logits (N, C) and its images per second, the median over batches.

    The models take turns with every batch, so that other programs slow them down alike. Reading is
    not timed.
    """
    logits: list[list[Tensor]] = [[] for _ in classifiers]
    speeds: list[list[float]] = [[] for _ in classifiers]
    for parts in zip(*(test.parts(batch_size) for test in tests), strict=True):
        for number, part in enumerate(parts):
            start = time.perf_counter()
            logits[number].append(classifiers[number].logits(part, batch_size).cpu())
            speeds[number].append(len(part) / (time.perf_counter() - start))
    return list(zip(map(torch.cat, logits), map(statistics.median, speeds), strict=True))


def _rollouts(classifier: Classifier, test: ImageSet, batch_size: int) -> Tensor | None:
    """Return the rollout of all test images, (N, rows, columns); None if there are no maps."""
    if not classifier.has_maps:
        return None
    parts = test.parts(batch_size)
    maps = (classifier.maps(part, precision=classifier.precision)[1]["rollout"] for part in parts)
    return torch.cat([found.cpu() for found in maps])


def _describe(each: Measured, test: ImageSet) -> dict[str, Any]:
    """Return what the table and comparison.json say about a model."""
    saved, model = each.saved, each.saved.config.model
    architecture = f"vit, depth {model.depth}, width {model.embed_dim}, patch {model.patch_size}"
    if model.attention != "dot":
        architecture += f", {model.attention} attention"
    if model.name != "vit":
        architecture = f"{model.name}{' with timm_args' if model.timm_args else ''}"
    result = report(each.logits, test.labels.cpu(), test.classes)
    return {
        "name": each.name,
        "path": str(saved.path),
        "architecture": architecture,
        "parameters": sum(p.numel() for p in saved.classifier.model.parameters()),
        "steps": saved.step,
        "finished": saved.finished,
        **{key: result[key] for key in ("accuracy", "accuracy_95", "balanced_accuracy")},
        "images_per_second": each.images_per_second,
    }


def _compare(first: Measured, other: Measured, test: ImageSet) -> dict[str, Any]:
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
    finest = max(first.maps.shape[1:], other.maps.shape[1:])
    one, two = (F.interpolate(maps[:, None], finest) for maps in (first.maps, other.maps))
    moved = (one - two).abs().mean(dim=(1, 2, 3)) / 2
    most = moved.topk(min(MOST_MOVED, len(moved)))
    listed = zip(most.indices.tolist(), most.values.tolist(), strict=True)
    return {
        **pair,
        "moved_attention": moved.mean().item(),
        "most_moved": [{**test.entry(index), "moved": value} for index, value in listed],
    }


def as_text(content: dict[str, Any]) -> str:
    """Format what comparison.json says in Markdown: a table, and a sentence about each pair."""
    rows = [
        ["model", "architecture", "parameters", "steps", "accuracy (95% interval)", "mean recall"],
        ["---"] * 6,
    ]
    rows[0] += [f"p against {content['models'][0]['name']}", "images/s"]
    rows[1] += ["---"] * 2
    p_values = ["–", *(f"{pair['mcnemar_p']:.2g}" for pair in content["pairs"])]
    for model, p_value in zip(content["models"], p_values, strict=True):
        unfinished = "" if model["finished"] else " (unfinished)"
        rows.append([
            model["name"].replace("|", "\\|"),
            model["architecture"],
            f"{model['parameters']:,}",
            f"{model['steps']:,}{unfinished}",
            with_interval(model, "accuracy", ".2%"),
            f"{model['balanced_accuracy']:.2%}",
            p_value,
            f"{model['images_per_second']:,.0f}",
        ])  # fmt: skip
    return "\n".join([
        f"{content['data']}: {content['images']:,} test images, {content['hardware']}",
        "",
        *(f"| {line} |" for line in text_table(rows, " | ")),
        "",
        *(f"- {_sentence(pair)}." for pair in content["pairs"]),
    ])  # fmt: skip


def _sentence(pair: dict[str, Any]) -> str:
    """Say how two models differ, without the full stop."""
    first, other, only = pair["first"], pair["other"], pair["only_right"]
    verdict = "significant" if pair["mcnemar_p"] < 0.05 else "not significant"
    sentence = (
        f"{first} and {other}: only {first} is right on {counted(only[0], 'image', ',')}, only "
        f"{other} on {only[1]:,}; McNemar's exact test: p = {pair['mcnemar_p']:.2g}; the "
        f"difference is {verdict} at the 5% level"
    )
    if "moved_attention" in pair:
        sentence += (
            f"; {pair['moved_attention']:.1%} of the attention (rollout, class-agnostic) is on "
            "other patches"
        )
    if pair.get("most_moved"):
        most = ", ".join(str(moved["index"]) for moved in pair["most_moved"])
        sentence += f", most on images {most}"
    return sentence
