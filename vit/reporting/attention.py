"""Attention of test images: sheets, maps, an index, and how far each kind can be believed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from vit.config import EvalConfig
from vit.data.augment import normalize
from vit.data.datasets import ImageSet, balanced_subset
from vit.explain.faithfulness import (
    mask_iou,
    mean_interval,
    pointing_game,
    score_maps,
    with_baselines,
)
from vit.explain.figures import attention_picture, captions_of
from vit.explain.rollout import CLASS_SPECIFIC, MAP_KINDS, attention_maps, map_title, readout_of
from vit.reporting.opening import OpenRun, class_number, load_test, open_run

INDEX_FILE = "index.json"
TABLE_FILE = "faithfulness.json"
BASELINES = {"random": "random", "centred": "centred Gaussian"}
METRICS = {  # title and, where the map is better the higher it is, ↑
    "deletion": "deletion ↓",
    "insertion": "insertion ↑",
    "lerf_morf": "(LeRF−MoRF)/2 ↑",
    "over_centred": "over centred ↑",
    "pointing": "pointing ↑",
    "iou": "IoU ↑",
}
_WRITTEN = (
    TABLE_FILE,
    f"image_{'[0-9]' * 5}.png",
    *(f"{kind}.npy" for kind in MAP_KINDS),
    "events.out.tfevents.*",
    INDEX_FILE,
)

Table = dict[str, dict[str, tuple[float, float]]]  # mean and half of its 95 % interval


def explain_run(run: str, options: EvalConfig) -> None:
    """Draw, save and measure the attention maps of a run on test images.

    Args:
        run: A run folder, a model.safetensors or a checkpoint.
        options: How.

    Raises:
        ValueError: The model or the data cannot be read, or an image or class does not exist.
    """
    opened = open_run(run, options)
    target = class_number(options.target, opened.saved.classes)
    test = load_test(opened, options)
    for index in options.indices:
        if not 0 <= index < len(test):
            raise ValueError(
                f"indices: {index} is not a test image; there are 0 to {len(test) - 1}"
            )
    if options.indices:
        indices = torch.tensor(list(dict.fromkeys(options.indices)))
    else:
        count = min(options.probes, len(test))
        indices = balanced_subset(test.labels, count, options.seed, "eval.attention")
    folder = opened.folder / "attention"
    old = [path for pattern in _WRITTEN for path in folder.glob(pattern)]
    if folder.exists() and any(folder.iterdir()) and not (folder / INDEX_FILE).exists():
        raise ValueError(f"out: {folder} holds other things than maps; choose another --out")
    folder.mkdir(parents=True, exist_ok=True)
    for path in old:
        path.unlink()
    print(f"{opened.describe()}, {opened.saved.config.data.name} test images\n")
    _write_maps(opened, test, indices, target, folder)
    print(f"wrote {len(indices)} sheets, maps (.npy) and {INDEX_FILE} to {folder}/")
    if options.faithfulness:
        count = min(options.faithfulness, len(test))
        print(f"\nmeasuring the maps on {count:,} test images drawn by seed", flush=True)
        chosen = balanced_subset(test.labels, count, options.seed, "eval.faithfulness")
        table = measure_maps(opened, test.select(chosen), options.batch_size, options.seed)
        content = {"images": count, "maps": table}
        (folder / TABLE_FILE).write_text(json.dumps(content, indent=1))
        print(f"\n{as_table(table, count)}\n\nwrote {folder / TABLE_FILE}")


def _write_maps(
    opened: OpenRun, test: ImageSet, indices: Tensor, target: int | None, folder: Path
) -> None:
    """Write a sheet and an entry in the index for each image, and a file for each kind of map."""
    chosen, classes = test.select(indices), opened.saved.classes
    aims = None if target is None else torch.full_like(indices, target).to(opened.device)
    pixels = normalize(chosen.images.to(opened.device), opened.mean, opened.std)
    logits, maps = attention_maps(opened.model, pixels, list(MAP_KINDS), aims)
    shares, predicted = logits.softmax(dim=1).cpu().max(dim=1)
    explained = predicted if target is None else torch.full_like(predicted, target)
    entries = [
        {
            "row": row,
            "index": index,
            "label": classes[chosen.labels[row]],
            "prediction": classes[predicted[row]],
            "probability": shares[row].item(),
            "explained_class": classes[explained[row]],
            "sheet": f"image_{index:05d}.png",
        }
        for row, index in enumerate(indices.tolist())
    ]
    content: dict[str, Any] = {
        "data": opened.saved.config.data.name,
        "split": "test",
        "readout": readout_of(opened.model),
        "unit": "1 is what each token (relevance: each patch) would get if all got the same",
        "maps": {
            kind: {"file": f"{kind}.npy", "class_specific": kind in CLASS_SPECIFIC} for kind in maps
        },
        "images": entries,
    }
    # First of all, because by it the next call knows that the folder is ours.
    (folder / INDEX_FILE).write_text(json.dumps(content, indent=1))
    captions = captions_of(logits, chosen.labels, classes)
    with SummaryWriter(str(folder)) as writer:
        for row, index in enumerate(indices.tolist()):
            sheet = attention_picture(
                chosen.images[row].expand(len(maps), -1, -1, -1),
                torch.stack([found[row] for found in maps.values()]),
                [captions[row]] * len(maps),
                [map_title(kind, classes[explained[row]]) for kind in maps],
            )
            name = f"image_{index:05d}"
            Image.fromarray(sheet).save(folder / f"{name}.png")
            tag = f"attention/{name}"
            writer.add_image(tag, sheet, opened.saved.step, dataformats="HWC")
    for kind, found in maps.items():
        np.save(folder / f"{kind}.npy", found.cpu().numpy())


def measure_maps(opened: OpenRun, images: ImageSet, batch_size: int, seed: int) -> Table:
    """Measure every kind of map, and maps that know nothing of the model, on the same images.

    The class that is followed is the predicted one.

    Args:
        opened: The model.
        images: What to measure on; where they have masks, maps are compared with these too.
        batch_size: Images at a time.
        seed: Of the random maps.

    Returns:
        For each map and metric the mean over images and half of its 95 % interval; "over_centred"
        is the difference in (LeRF - MoRF) / 2 to the centred map, image by image.
    """
    pixels = normalize(images.images.to(opened.device), opened.mean, opened.std)
    parts = [
        attention_maps(opened.model, part, list(MAP_KINDS), precision=opened.precision)
        for part in pixels.split(batch_size)
    ]
    target = torch.cat([logits.argmax(dim=1) for logits, _ in parts])
    maps = {kind: torch.cat([found[kind] for _, found in parts]).cpu() for kind in MAP_KINDS}
    maps = with_baselines(maps, seed)
    scores = score_maps(
        opened.model, pixels, maps, target, precision=opened.precision, batch_size=batch_size
    )
    for kind, values in scores.items():
        if kind != "centred":
            values["over_centred"] = values["lerf_morf"] - scores["centred"]["lerf_morf"]
        if images.masks is not None:
            values["pointing"] = pointing_game(maps[kind], images.masks)
            values["iou"] = mask_iou(maps[kind], images.masks)
    return {
        kind: {metric: mean_interval(found) for metric, found in values.items()}
        for kind, values in scores.items()
    }


def as_table(table: Table, count: int) -> str:
    """Lay out what `measure_maps` returns as text."""
    metrics = [m for m in METRICS if any(m in values for values in table.values())]
    lines = [
        f"how far maps can be believed: {count:,} test images, mean ± 95 % interval; "
        "the class followed is the predicted one",
        "map".ljust(40) + "".join(METRICS[metric].rjust(17) for metric in metrics),
    ]
    for kind, values in table.items():
        cells = (
            "{:.3f} ± {:.3f}".format(*values[metric]) if metric in values else "–"
            for metric in metrics
        )
        name = (MAP_KINDS | BASELINES)[kind]
        if kind in MAP_KINDS and kind not in CLASS_SPECIFIC:
            name += ", class-agnostic"
        lines.append(name.ljust(40) + "".join(cell.rjust(17) for cell in cells))
    return "\n".join(lines)
