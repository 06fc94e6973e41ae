"""The report: how good a model is, in numbers and pictures; training ends with it too."""

import contextlib
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
from vit.data.datasets import ImageSet, choose_probes, normalization
from vit.evaluation import as_table, evaluate
from vit.explain.charts import confusion_picture, reliability_picture
from vit.explain.figures import captions_of, gallery_picture, rollout_pictures
from vit.explain.rollout import attention_maps
from vit.files import write_atomically
from vit.hardware import autocast
from vit.model.vit import VisionTransformer
from vit.reporting.opening import load_test, open_run
from vit.run_folder import REPORT_FILE, REPORT_FILES

MISTAKES = 16  # in the gallery
PROJECTED = 1000  # images in TensorBoard's projector
PROJECTED_AT_ONCE = 250  # of them, which bounds the memory of a run


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
        folder: Gets report.json, confusion_matrix.png, reliability.png, mistakes.png,
            probes/*.png and TensorBoard events, among them precision-recall curves and a projector
            of the features; what an earlier report left there is replaced.
        step: Steps the model was trained for.
        device: Where to compute.
        precision: Of matrix products.
        batch_size: Images at a time.
        probes: How many images' attention to draw.

    Returns:
        The report, see `vit.evaluation.report`.
    """
    mean, std = normalization(data_name, device)
    result, logits = evaluate(
        model, images.images.to(device), images.labels, images.classes, mean, std, precision,
        batch_size,
    )  # fmt: skip
    pictures = {
        "confusion_matrix": confusion_picture(result["confusion_matrix"], images.classes),
        "reliability": reliability_picture(result["reliability"], result["ece"]),
    }
    wrong = worst_mistakes(logits, images.labels, MISTAKES)
    if len(wrong):
        pictures["mistakes"] = draw_gallery(model, images.select(wrong), mean, std)
    drawn = draw_probes(model, choose_probes(images, probes, seed=0), mean, std)
    pictures |= {f"probes/probe_{number:02d}": picture for number, picture in enumerate(drawn)}
    (folder / "probes").mkdir(parents=True, exist_ok=True)
    for old in report_files(folder):
        old.unlink()
    for old in (*folder.glob("*/features"), *folder.glob("[0-9]*")):
        with contextlib.suppress(OSError):  # not empty: not ours alone
            old.rmdir()
    with SummaryWriter(str(folder)) as writer:
        for key in ("accuracy", "top5_accuracy", "loss", "ece"):
            writer.add_scalar(f"test/{key}", result[key], step)
        for tag, pixels in pictures.items():
            writer.add_image(f"test/{tag}", pixels, step, dataformats="HWC")
            Image.fromarray(pixels).save(folder / f"{tag}.png")
        shares = logits.softmax(dim=1)
        for number, name in enumerate(images.classes):
            writer.add_pr_curve(
                f"precision_recall/{name}", images.labels == number, shares[:, number], step
            )
        _project(writer, model, choose_probes(images, PROJECTED, 0), mean, std, precision, step)
    write_atomically(folder / REPORT_FILE, json.dumps(result, indent=1).encode())
    return result


def worst_mistakes(logits: Tensor, labels: Tensor, count: int) -> Tensor:
    """Find the images that were most confidently taken for something else.

    Args:
        logits: (N, C).
        labels: (N,) int64.
        count: At most so many.

    Returns:
        Indices, most confident first.
    """
    confidence, predicted = logits.softmax(dim=1).max(dim=1)
    confidence = confidence.masked_fill(predicted == labels, -1.0)
    wrong = int((predicted != labels).sum())
    return confidence.topk(min(count, wrong)).indices


def draw_probes(
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
    logits, maps = attention_maps(model, normalize(probes.images.to(mean.device), mean, std))
    captions = captions_of(logits, probes.labels, probes.classes)
    return rollout_pictures(probes.images, maps["rollout"], captions)


def draw_gallery(
    model: VisionTransformer, mistakes: ImageSet, mean: Tensor, std: Tensor
) -> np.ndarray:
    """Draw mistakes beside what spoke for the wrong class (class relevance)."""
    logits, maps = attention_maps(
        model, normalize(mistakes.images.to(mean.device), mean, std), ["relevance"]
    )
    captions = captions_of(logits, mistakes.labels, mistakes.classes)
    captions = [caption.replace("\npredicted", "\nas") for caption in captions]
    title = "most confident mistakes, with class relevance for what they were taken for"
    return gallery_picture(title, mistakes.images, maps["relevance"], captions)


@torch.no_grad()
def _project(
    writer: SummaryWriter,
    model: VisionTransformer,
    images: ImageSet,
    mean: Tensor,
    std: Tensor,
    precision: torch.dtype,
    step: int,
) -> None:
    """Write what the last layer sees of images for TensorBoard's projector, with the images."""
    features = []
    for part in images.images.split(PROJECTED_AT_ONCE):
        with autocast(mean.device, precision):
            tokens = model.forward_features(normalize(part.to(mean.device), mean, std))
            features.append(model.forward_head(tokens, pre_logits=True).float().cpu())
    writer.add_embedding(
        torch.cat(features), [images.classes[label] for label in images.labels],
        images.images / 255, step, "features",
    )  # fmt: skip


def report_files(folder: Path) -> list[Path]:
    """List what a report left in a folder, but for report.json."""
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
    opened = open_run(run, options)
    test = load_test(opened, options)
    folder, data_name = opened.folder, opened.saved.config.data.name
    if report_files(folder) and not (folder / REPORT_FILE).exists():
        raise ValueError(f"out: {folder} holds other things than a report; choose another --out")
    result = write_report(
        opened.model, test, data_name, folder, step=opened.saved.step, device=opened.device,
        precision=opened.precision, batch_size=options.batch_size, probes=options.probes,
    )  # fmt: skip
    print(f"{opened.describe()}, {data_name} test images\n")
    print(as_table(result))
    probes = f", {folder / 'probes'}/*.png" if options.probes else ""
    print(f"\nwrote {folder / REPORT_FILE}, {folder}/*.png{probes}")
    return result
