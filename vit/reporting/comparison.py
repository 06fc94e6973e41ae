"""Comparison of two models on the same test images: accuracy, and where their attention differs."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vit.classifier import Classifier
from vit.config import EvalConfig
from vit.data.datasets import ImageSet
from vit.evaluation import mcnemar, wilson_interval
from vit.explain.figures import comparison_picture
from vit.model.attention_model import no_maps_text
from vit.model_file import SavedModel
from vit.reporting.loading import load_run, load_test, results_folder

SUMMED_AT_ONCE = 500  # images; limits peak memory


def compare_runs(run: str, options: EvalConfig) -> None:
    """Compare two models on the test images; print the result, and write numbers and a figure.

    Without attention maps of both, there is no figure.

    Args:
        run: Run folder, model.safetensors, checkpoint, or the name of a bundled model.
        options: The evaluation; `compare` is the other model.

    Raises:
        ValueError: A model or the data cannot be read, or the models have different data or
            classes.
    """
    first, second = load_run(run, options), load_run(str(options.compare), options)
    _require_same_classes(first, second)
    test, names = load_test(first, options), _short_names(first.name, second.name)
    folder = results_folder(first, options) / f"compare_{names[1]}"
    folder.mkdir(parents=True, exist_ok=True)
    for saved in (first, second):
        print(saved.describe(), flush=True)
    classifiers = first.classifier, second.classifier
    without = [classifier.model for classifier in classifiers if not classifier.has_maps]
    guesses, maps = zip(
        *(_predict(each, test, options.batch_size, not without) for each in classifiers),
        strict=True,
    )
    content = {
        "data": first.config.data.name,
        "images": len(test),
        "models": [str(first.path), str(second.path)],
        "steps": [first.step, second.step],
        **compare_guesses(guesses[0], guesses[1], test.labels),
    }
    picture = folder / "comparison.png"
    picture.unlink(missing_ok=True)  # of an earlier comparison
    if not without:
        finest = max((found.shape[1:] for found in maps), key=lambda size: size[0])
        one, other = (F.interpolate(found[:, None], tuple(finest))[:, 0] for found in maps)
        moved = (one - other).abs().mean(dim=(1, 2)) / 2
        drawn = moved.topk(min(options.probes, len(test))).indices
        content["moved_attention"] = moved.mean().item()
        content["most_moved"] = [
            {"index": index, "moved": moved[index].item()} for index in drawn.tolist()
        ]
        drawing = _draw(test, drawn, guesses, (one, other), names)
        Image.fromarray(drawing).save(picture)
    (folder / "comparison.json").write_text(json.dumps(content, indent=1))
    _print(content, names)
    if without:
        print(f"  {no_maps_text(without[0])}\n\nwrote {folder / 'comparison.json'}")
    else:
        print(f"\nwrote {picture}, {folder / 'comparison.json'}")


def _require_same_classes(first: SavedModel, second: SavedModel) -> None:
    data, classes = first.config.data.name, first.classifier.classes
    if second.config.data.name != data:
        raise ValueError(
            f"compare: {second.path} was trained on {second.config.data.name}, not on {data} like "
            f"{first.path}; only models of the same data set can be compared"
        )
    if second.classifier.classes != classes:
        different = ", ".join(sorted({*second.classifier.classes} ^ {*classes}))
        raise ValueError(
            f"compare: {second.path} does not have the classes of {first.path}: only one of the "
            f"two has {different}; only models of the same classes can be compared"
        )


def compare_guesses(first: Tensor, second: Tensor, labels: Tensor) -> dict[str, Any]:
    """Compare two models' predictions, (N,) int64 each, on images with labels (N,).

    Returns:
        For both models: accuracy, its 95% interval accuracy_95, and only_right, the number of
        images that only this model classifies correctly; and mcnemar_p, see
        `vit.evaluation.mcnemar`.
    """
    right = [guess == labels for guess in (first, second)]
    only = [int((right[0] & ~right[1]).sum()), int((right[1] & ~right[0]).sum())]
    return {
        "accuracy": [part.double().mean().item() for part in right],
        "accuracy_95": [wilson_interval(int(part.sum()), len(labels)) for part in right],
        "only_right": only,
        "mcnemar_p": mcnemar(*only),
    }


def _draw(
    test: ImageSet,
    drawn: Tensor,
    guesses: Sequence[Tensor],
    maps: tuple[Tensor, Tensor],
    names: tuple[str, str],
) -> np.ndarray:
    """Draw the mean over all test images, followed by the images at `drawn`."""
    chosen = test.select(drawn)
    captions = [
        f"true {test.classes[label]}, no. {index}\n"
        f"{test.classes[guesses[0][index]]} / {test.classes[guesses[1][index]]}"
        for index, label in zip(drawn.tolist(), chosen.labels.tolist(), strict=True)
    ]
    sums = torch.stack([part.sum(dim=0) for part in test.parts(SUMMED_AT_ONCE)])
    average = (sums.sum(dim=0) / len(test)).round().to(torch.uint8)
    one, other = (torch.cat([found.mean(dim=0)[None], found[drawn]]) for found in maps)
    return comparison_picture(
        torch.cat([average[None], chosen.pixels()]),
        (one, other),
        names,
        [f"mean of all\n{len(test):,} test images", *captions],
    )


def _short_names(first: str, second: str) -> tuple[str, str]:
    """Cut names to 20 characters; number them if they are the same."""
    one, other = first[:20], second[:20]
    return (one, other) if one != other else (f"{one}_1", f"{other}_2")


def _predict(
    classifier: Classifier, test: ImageSet, batch_size: int, needs_maps: bool
) -> tuple[Tensor, Tensor | None]:
    """Return predictions (N,) and rollout (N, rows, columns) of all test images, on the CPU."""
    guesses, maps = [], []
    for part in test.parts(batch_size):
        if needs_maps:
            logits, found = classifier.maps(part, ["rollout"], precision=classifier.precision)
            maps.append(found["rollout"].cpu())
        else:
            logits = classifier.logits(part, batch_size)
        guesses.append(logits.argmax(dim=1).cpu())
    return torch.cat(guesses), torch.cat(maps) if needs_maps else None


def _print(content: dict[str, Any], names: tuple[str, str]) -> None:
    width = max(map(len, names))
    print(f"\n{content['data']}: {content['images']:,} test images")
    for name, accuracy, interval, only in zip(
        names, content["accuracy"], content["accuracy_95"], content["only_right"], strict=True
    ):
        low, high = interval
        print(
            f"  {name:<{width}}  accuracy {accuracy:.2%} (95% interval {low:.2%} to {high:.2%}); "
            f"correct on {only:,} images that the other misclassifies"
        )
    p_value = content["mcnemar_p"]
    value = f"p = {p_value:.2g}" if p_value > 0 else "p < 1e-300"
    verdict = "significant" if p_value < 0.05 else "not significant"
    print(f"  McNemar's exact test: {value}; the difference is {verdict} at the 5% level")
    if "moved_attention" in content:
        most = ", ".join(str(moved["index"]) for moved in content["most_moved"])
        print(
            f"  attention rollout (class-agnostic): {content['moved_attention']:.1%} of the "
            f"attention is on other patches, most on images {most}"
        )
