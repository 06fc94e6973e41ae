"""`eval.py RUN maps`: attention of test images as sheets, maps and an index."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from vit.commands.config import MapsConfig
from vit.console import argument, counted, installed, printable, say
from vit.data.datasets import choose_images
from vit.data.images import ImageSet
from vit.data.sampling import balanced_subset
from vit.explain.figures import attention_picture, captions_of, distance_picture, features_picture
from vit.explain.kinds import ALL_KINDS, RolloutOptions
from vit.explain.maps import MAP_KINDS, layout_of
from vit.explain.rollout import check_rollout_options, head_maps
from vit.explain.statistics import attention_by_offset
from vit.files import open_atomically, write_json, write_picture
from vit.model.attention_model import require_attention
from vit.model_file import SavedModel
from vit.reporting.attention_records import attention_records, read_frames
from vit.reporting.faithfulness import as_table, score_maps
from vit.reporting.live import add_live
from vit.reporting.loading import load_run, load_test, require_own, results_folder
from vit.run.folder import (
    ATTENTION_FILES,
    ATTENTION_FOLDER,
    DISTANCE,
    FEATURES_FILE,
    HEADS,
    INDEX_FILE,
    TABLE_FILE,
)
from vit.run.tracker import add_summary, event_writer, picture_tag
from vit.tensorboard_plugin.encoding import frames_summary, summaries

LIVE_MB = 100  # for the model, which the Attention tab can run


def run(name: str, options: MapsConfig) -> None:
    """Draw and save attention maps of test images, and measure their faithfulness.

    ValueError if the model or the data cannot be read, an image, class or layer does not exist, or
    the model has no attention maps.
    """
    saved = load_run(name, options.device, options.precision)
    depth = len(require_attention(saved.model).blocks)
    target = None if options.target is None else saved.class_index(options.target)
    rollout = RolloutOptions(options.head_fusion, options.discard_ratio, options.start_layer)
    check_rollout_options(**asdict(rollout), depth=depth)
    kinds: list[str] = list(dict.fromkeys(options.kinds)) or list(MAP_KINDS)
    test = load_test(saved, options.data.root, decode=False)
    indices = _choose_indices(test, options)
    folder = results_folder(saved, options.out, ATTENTION_FOLDER, root=options.data.root)
    require_own(folder, INDEX_FILE, {"readout", "maps", "images"}, ["*"], "maps")
    say(f"{saved.describe()}, test images of {test.folder or saved.config.data.name}\n")
    _write_maps(saved, test, indices, kinds, target, options.batch_size, rollout, folder)
    say(
        f"wrote {counted(len(indices), 'sheet')}, {FEATURES_FILE}, {DISTANCE}.png, maps (.npy) "
        f"and {INDEX_FILE} to {printable(folder)}/\nsee these images in the Attention tab of "
        f"TensorBoard: {installed('tensorboard')} --logdir {argument(folder)}"
    )
    default = 0 if options.indices else 500
    count = min(default if options.faithfulness is None else options.faithfulness, len(test))
    if count == 1:
        say("\nfaithfulness is not measured: a single image has no interval")
    if count > 1:
        say(f"\nmeasuring faithfulness on {count:,} randomly chosen test images")
        chosen = choose_images(test, count, options.seed, "eval.faithfulness")
        batch_size = options.batch_size
        logits, maps = saved.maps(
            chosen.pixels(), kinds, None, saved.precision, batch_size, rollout
        )
        predicted = logits.argmax(dim=1)
        table = score_maps(saved, chosen, maps, predicted, batch_size, options.seed)
        content = {"model": str(saved.path), "images": count, "rollout": asdict(rollout)}
        write_json(folder / TABLE_FILE, {**content, "maps": table})
        say(f"\n{as_table(table, count, rollout)}\n\nwrote {printable(folder / TABLE_FILE)}")


def log_test_images(saved: SavedModel, root: str | None, folder: Path) -> None:
    """Log the test images that `maps` chooses by default; errors as there."""
    test = load_test(saved, root, decode=False)
    indices = _choose_indices(test, MapsConfig())
    with event_writer(folder) as writer:
        _write_records(writer, saved, test, indices, None, RolloutOptions())


def _empty_folder(folder: Path) -> None:
    """Create a folder for maps, or delete an earlier call's files but its index and table."""
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in {*ATTENTION_FILES} - {TABLE_FILE, INDEX_FILE}:
        for path in folder.glob(pattern):
            path.unlink()


def _write_maps(
    saved: SavedModel,
    test: ImageSet,
    indices: Tensor,
    kinds: Sequence[str],
    target: int | None,
    batch_size: int,
    rollout: RolloutOptions,
    folder: Path,
) -> None:
    """Write a sheet and an index entry for each image, and a file for each kind of map."""
    chosen = test.select(indices).in_memory()
    pixels, classes, names = chosen.pixels(), saved.classes, _names(indices)
    targets = None if target is None else torch.full_like(indices, target)
    logits, maps = saved.maps(pixels, kinds, targets, batch_size=batch_size, rollout=rollout)
    explained = logits.argmax(dim=1).cpu() if targets is None else targets
    logits = saved.scaled(logits)
    probabilities, predicted = logits.softmax(dim=1).max(dim=1)
    specs = {kind: ALL_KINDS[kind] for kind in maps}
    content = {
        "data": saved.config.data.name,
        "split": "test",
        "readout": layout_of(require_attention(saved.model), *pixels.shape[-2:]).readout,
        "rollout": asdict(rollout),
        "maps": {
            kind: {"file": f"{kind}.npy", "class_specific": spec.class_specific, "unit": spec.unit}
            for kind, spec in specs.items()
        },
        "images": [
            {
                "row": row,
                **test.entry(index),
                "label": classes[chosen.labels[row]],
                "prediction": classes[predicted[row]],
                "probability": probabilities[row].item(),
                "explained_class": classes[explained[row]],
                "sheet": f"{names[row]}.png",
            }
            for row, index in enumerate(indices.tolist())
        ],
    }
    _empty_folder(folder)
    # Written first, because it marks the folder as one that the next call may empty.
    write_json(folder / INDEX_FILE, content)
    captions = captions_of(logits, chosen.labels, classes)
    with event_writer(folder) as writer:
        heads, offsets = _write_records(writer, saved, test, indices, target, rollout)
        for row, name in enumerate(names):
            own, class_name = {kind: maps[kind][row] for kind in maps}, classes[explained[row]]
            sheet = attention_picture(
                pixels[row], own, captions[row], class_name, chosen.name(row), rollout
            )
            write_picture(folder / f"{name}.png", sheet)
            tag = picture_tag(f"attention/{name}")
            writer.add_image(tag, sheet, saved.step, dataformats="HWC")
    for name, values in (*maps.items(), (HEADS, heads), (DISTANCE, offsets)):
        with open_atomically(folder / f"{name}.npy") as file:
            np.save(file, values.cpu().numpy())


def _choose_indices(test: ImageSet, options: MapsConfig) -> Tensor:
    """Return the indices of the images to draw: --indices, or a balanced random choice."""
    last = len(test) - 1
    for index in options.indices:
        if not 0 <= index <= last:
            raise ValueError(f"indices: {index} is not a test image; it must be 0 to {last}")
    if options.indices:
        return torch.tensor(list(dict.fromkeys(options.indices)))
    return balanced_subset(test.labels, options.probes, options.seed, "eval.attention")


def _write_records(
    writer: SummaryWriter,
    saved: SavedModel,
    test: ImageSet,
    indices: Tensor,
    target: int | None,
    rollout: RolloutOptions,
) -> tuple[Tensor, Tensor]:
    """Write records of images, the model, and sheets of features and of attention by offset.

    Returns:
        The attention of each head in fractions: from what the model reads to the patches, (images,
        layers, heads, rows, columns), and `attention_by_offset` of all images.
    """
    images = test.select(indices).in_memory()
    frames = read_frames(saved, test, saved.config.train.seed)
    if frames is not None:
        add_summary(writer, frames_summary(frames.numpy()), saved.step)
    layout = layout_of(require_attention(saved.model), *saved.preprocess.image_size)
    prefix, names = layout.num_prefix_tokens, iter(_names(indices))
    heads: list[Tensor] = []
    offsets: list[Tensor] = []
    features: list[Tensor] = []
    batches = attention_records(saved, images, frames=frames, target=target, rollout=rollout)
    for attention, records in batches:
        weights = attention.weights
        heads.append(head_maps(weights, readout=layout.readout, num_prefix_tokens=prefix))
        offsets.append(len(weights[0]) * attention_by_offset(weights, layout.grid, prefix).cpu())
        for record, name in zip(records, names, strict=False):
            if record is not None:  # all its numbers are finite
                add_summary(writer, summaries(f"attention/{name}", record), saved.step)
                if record.features is not None:
                    features.append(torch.from_numpy(record.features))
    if features and len(features) == len(indices):
        sheet = features_picture(images.pixels(), torch.stack(features), layout.grid)
        write_picture(Path(writer.log_dir) / FEATURES_FILE, sheet)
    distance = torch.stack(offsets).sum(dim=0) / len(indices)
    sheet = distance_picture(distance, weights[0].shape[-1], len(indices))
    write_picture(Path(writer.log_dir) / f"{DISTANCE}.png", sheet)
    if saved.config.track.live_mb:
        add_live(writer, saved, images.pixels(), saved.step, LIVE_MB)
    return torch.cat(heads, dim=1).transpose(0, 1).unflatten(-1, layout.grid).cpu(), distance


def _names(indices: Tensor) -> list[str]:
    return [f"image_{index:05d}" for index in indices.tolist()]
