"""What a model leaves behind when it is looked at: report.json, pictures, TensorBoard.

Training ends with the same report that eval.py writes.
"""

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
from vit.data.datasets import NORMALIZATION, ImageSet, balanced_subset, load
from vit.evaluation import as_table, evaluate
from vit.explain.figures import attention_picture, confusion_picture, reliability_picture
from vit.explain.rollout import attention_maps
from vit.model.vit import VisionTransformer
from vit.tracking import ROLLOUT_TAG
from vit.training.checkpoint import CHECKPOINT_FOLDER, load_model, write_atomically
from vit.training.hardware import choose_device, choose_precision, describe
from vit.training.run import EVAL_FOLDER, REPORT_FILE, REPORT_FILES


def normalization(name: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return mean and deviation of a data set's channels, (3, 1, 1) each, on a device."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in NORMALIZATION[name])
    return mean.to(device), std.to(device)


def choose_probes(images: ImageSet, count: int, seed: int) -> ImageSet:
    """Choose images to follow attention on, spread over the classes; all if there are fewer."""
    return images.select(
        balanced_subset(images.labels, min(count, len(images)), seed, "track.probes")
    )


def probe_pictures(
    model: VisionTransformer, probes: ImageSet, mean: Tensor, std: Tensor
) -> list[np.ndarray]:
    """Draw the attention rollout of each probe.

    Args:
        model: In evaluation mode.
        probes: Images with labels, on any device.
        mean: (3, 1, 1), on the model's device.
        std: (3, 1, 1), likewise.

    Returns:
        Pictures, (height, width, 3) uint8, with the true and the predicted class.
    """
    if len(probes) == 0:
        return []
    logits, found = attention_maps(model, normalize(probes.images.to(mean.device), mean, std))
    maps = found["rollout"]
    shares, predicted = logits.softmax(dim=1).max(dim=1)
    captions = [
        f"true {probes.classes[label]}\npredicted {probes.classes[guess]} {share:.0%}"
        for label, guess, share in zip(
            probes.labels.tolist(), predicted.tolist(), shares.tolist(), strict=True
        )
    ]
    return [
        attention_picture(probes.images[i : i + 1], maps[i : i + 1], captions[i : i + 1])
        for i in range(len(probes))
    ]


def write_report(
    model: VisionTransformer,
    images: ImageSet,
    data_name: str,
    folder: Path,
    *,
    step: int,
    device: torch.device,
    precision: torch.dtype,
    batch_size: int = 500,
    probes: int = 8,
) -> dict[str, Any]:
    """Evaluate a model and write all that is worth seeing into a folder.

    Args:
        model: In evaluation mode, on the device.
        images: What it is evaluated on.
        data_name: The data set it was trained on, which fixes how images are normalised.
        folder: Gets report.json, confusion_matrix.png, reliability.png, attention/*.png and
            TensorBoard events; what an earlier report left there is replaced.
        step: Steps the model was trained for.
        device: Where to compute.
        precision: Of matrix products.
        batch_size: Images at a time.
        probes: How many images' attention to draw.

    Returns:
        The report, see `vit.evaluation.report`.
    """
    mean, std = normalization(data_name, device)
    result = evaluate(
        model, images.images.to(device), images.labels, images.classes, mean, std, precision,
        batch_size,
    )  # fmt: skip
    pictures = {
        "evaluation/confusion_matrix": confusion_picture(
            result["confusion_matrix"], images.classes
        ),
        "evaluation/reliability": reliability_picture(result["reliability"], result["ece"]),
    }
    drawn = probe_pictures(model, choose_probes(images, probes, seed=0), mean, std)
    pictures |= {ROLLOUT_TAG.format(number): picture for number, picture in enumerate(drawn)}
    (folder / "attention").mkdir(parents=True, exist_ok=True)
    for old in _report_files(folder):
        old.unlink()
    with SummaryWriter(str(folder)) as writer:
        for key in ("accuracy", "top5_accuracy", "loss", "ece"):
            writer.add_scalar(f"test/{key}", result[key], step)
        for tag, pixels in pictures.items():
            writer.add_image(tag, pixels, step, dataformats="HWC")
            part = "attention" if tag.startswith("attention") else "."
            Image.fromarray(pixels).save(folder / part / f"{tag.rpartition('/')[2]}.png")
    write_atomically(folder / REPORT_FILE, json.dumps(result, indent=1).encode())
    return result


def _report_files(folder: Path) -> list[Path]:
    return [path for pattern in REPORT_FILES for path in folder.glob(pattern)]


def evaluate_run(run: str, options: EvalConfig) -> dict[str, Any]:
    """Evaluate the model of a run folder or file on the test images, print and write the report.

    Args:
        run: A run folder, a model.safetensors or a checkpoint.
        options: How.

    Returns:
        The report, see `vit.evaluation.report`.

    Raises:
        ValueError: The model or the data cannot be read.
    """
    saved = load_model(Path(run))
    device = choose_device(options.device)
    precision = choose_precision(options.precision, device)
    data = saved.config.data
    test = load(data.name, options.data.root or data.root, False, options.data.download)
    home = saved.path.resolve().parent
    if home.name == CHECKPOINT_FOLDER:
        home = home.parent
    folder = Path(options.out) if options.out else home / EVAL_FOLDER
    if _report_files(folder) and not (folder / REPORT_FILE).exists():
        raise ValueError(f"out: {folder} holds other things than a report; choose another --out")
    result = write_report(
        saved.model.to(device), test, data.name, folder, step=saved.step, device=device,
        precision=precision, batch_size=options.batch_size, probes=options.probes,
    )  # fmt: skip
    print(f"{saved.path}: {data.name} test images, {describe(device)}, {str(precision)[6:]}\n")
    print(as_table(result))
    print(f"\nwrote {folder / REPORT_FILE}, {folder}/*.png, {folder / 'attention'}/*.png")
    return result
