"""Two models on the same images: which is better, and where they look at different things."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vit.checkpoint import CHECKPOINT_FOLDER
from vit.config import EvalConfig
from vit.data.augment import normalize
from vit.data.datasets import ImageSet
from vit.evaluation import mcnemar, wilson_interval
from vit.explain.figures import comparison_picture
from vit.explain.rollout import attention_maps
from vit.reporting.opening import OpenRun, load_test, open_run


def compare_runs(run: str, options: EvalConfig) -> None:
    """Compare a run with another on the test images: print, and write a picture and numbers.

    Args:
        run: A run folder, a model.safetensors or a checkpoint.
        options: How; `compare` is the other one.

    Raises:
        ValueError: A model or the data cannot be read, or they were trained on different data.
    """
    first, second = open_run(run, options), open_run(str(options.compare), options)
    data = first.saved.config.data.name
    if second.saved.config.data.name != data:
        raise ValueError(
            f"compare: {second.saved.path} was trained on {second.saved.config.data.name}, not on "
            f"{data} as {first.saved.path}; only models of one data set can be compared"
        )
    if second.saved.classes != first.saved.classes:
        apart = ", ".join(sorted({*second.saved.classes} ^ {*first.saved.classes}))
        raise ValueError(
            f"compare: {second.saved.path} does not have the classes of {first.saved.path}: only "
            f"one of both has {apart}; only models of the same classes can be compared"
        )
    test = load_test(first, options)
    names = _names(first.saved.path, second.saved.path)
    guesses, maps = zip(
        *(_look(opened, test, options.batch_size) for opened in (first, second)), strict=True
    )
    finest = max((found.shape[1:] for found in maps), key=lambda size: size[0])
    one, other = (F.interpolate(found[:, None], tuple(finest))[:, 0] for found in maps)
    moved = (one - other).abs().mean(dim=(1, 2)) / 2
    drawn = moved.topk(min(options.probes, len(test))).indices
    content = {
        "data": data,
        "images": len(test),
        "models": [str(first.saved.path), str(second.saved.path)],
        **compare_guesses(guesses[0], guesses[1], test.labels),
        "moved_attention": moved.mean().item(),
        "most_moved": [{"index": index, "moved": moved[index].item()} for index in drawn.tolist()],
    }
    folder = first.folder / f"compare_{names[1]}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "comparison.json").write_text(json.dumps(content, indent=1))
    picture = _draw(test, drawn, guesses, (one, other), names)
    Image.fromarray(picture).save(folder / "comparison.png")
    _print(content, names, folder)


def compare_guesses(first: Tensor, second: Tensor, labels: Tensor) -> dict[str, Any]:
    """Compare two models' predictions, (N,) int64 each, on images with labels (N,).

    Returns:
        Of both models accuracy, its 95 % interval accuracy_95, and how many images only_right
        knows; and mcnemar_p, see `vit.evaluation.mcnemar`.
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
    """Draw the mean over all test images, what moved in general, and the images at `drawn`."""
    chosen = test.select(drawn)
    captions = [
        f"true {test.classes[label]}, no. {index}\n"
        f"{test.classes[guesses[0][index]]} / {test.classes[guesses[1][index]]}"
        for index, label in zip(drawn.tolist(), chosen.labels.tolist(), strict=True)
    ]
    average = test.images.float().mean(dim=0).round().to(torch.uint8)
    one, other = (torch.cat([found.mean(dim=0)[None], found[drawn]]) for found in maps)
    return comparison_picture(
        torch.cat([average[None], chosen.images]),
        (one, other),
        names,
        [f"mean of all\n{len(test):,} test images", *captions],
    )


def _names(first: Path, second: Path) -> tuple[str, str]:
    """Name models after their run folders, briefly; numbered where these are the same."""
    one, other = (
        (path.parent.parent if path.parent.name == CHECKPOINT_FOLDER else path.parent).name[:20]
        for path in (first.resolve(), second.resolve())
    )
    return (one, other) if one != other else (f"{one}_1", f"{other}_2")


def _look(opened: OpenRun, test: ImageSet, batch_size: int) -> tuple[Tensor, Tensor]:
    """Return predictions (N,) and rollout (N, rows, columns) of all test images, on the CPU."""
    guesses, maps = [], []
    for part in test.images.split(batch_size):
        pixels = normalize(part.to(opened.device), opened.mean, opened.std)
        logits, found = attention_maps(opened.model, pixels, precision=opened.precision)
        guesses.append(logits.argmax(dim=1).cpu())
        maps.append(found["rollout"].cpu())
    return torch.cat(guesses), torch.cat(maps)


def _print(content: dict[str, Any], names: tuple[str, str], folder: Path) -> None:
    width = max(map(len, names))
    print(f"{content['data']}: {content['images']:,} test images")
    for name, accuracy, interval, only in zip(
        names, content["accuracy"], content["accuracy_95"], content["only_right"], strict=True
    ):
        low, high = interval
        print(
            f"  {name:<{width}}  {accuracy:.2%} right (95 % interval {low:.2%} to {high:.2%}), "
            f"{only:,} images that the other gets wrong"
        )
    p_value = content["mcnemar_p"]
    value = f"p = {p_value:.2g}" if p_value > 0 else "p < 1e-300"
    verdict = "they differ" if p_value < 0.05 else "no difference is shown"
    print(
        f"  McNemar's exact test: {value}; {verdict} at 5 %\n"
        f"  attention rollout (class-agnostic): {content['moved_attention']:.1%} of it lies "
        f"elsewhere; most on images {', '.join(str(m['index']) for m in content['most_moved'])}\n"
        f"\nwrote {folder / 'comparison.png'}, {folder / 'comparison.json'}"
    )
