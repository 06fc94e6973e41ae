"""`eval.py RUN heads`: what a model loses on held-out images when its heads are muted."""

import json
from dataclasses import asdict

from vit.commands.config import HeadsConfig
from vit.console import counted, printable, say
from vit.data.datasets import choose_images
from vit.data.images import ImageSet
from vit.files import write_json, write_picture
from vit.model.attention_model import require_attention
from vit.model_file import SavedModel
from vit.reporting.heads import Effect, draw_heads, measure_groups, ranked
from vit.reporting.loading import load_run, load_split, require_own, results_folder
from vit.reporting.tables import text_table
from vit.run.folder import HEADS_FILE, HEADS_PICTURE

LISTED = 6  # of the largest and of the smallest effects in each part of the table


def run(name: str, options: HeadsConfig) -> None:
    """Mute each head, each layer and pairs of heads of a model, and write what it loses.

    ValueError if the model, its heads or the data cannot be read, or without held-out images.
    """
    saved = load_run(name, options.device, options.precision)
    require_attention(saved.model)
    images = load_held_out(saved, options)
    folder = results_folder(saved, options.out)
    files = (HEADS_FILE, HEADS_PICTURE)
    require_own(folder, HEADS_FILE, {"model", "images", "heads"}, files, "heads")
    say(f"{saved.describe()}, {len(images):,} held-out images of {saved.config.data.name}")
    groups = measure_groups(saved, images, options.pairs, options.batch_size)
    table = {part: [asdict(effect) for effect in effects] for part, effects in groups.items()}
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / HEADS_FILE, {"model": str(saved.path), "images": len(images), **table})
    write_picture(folder / HEADS_PICTURE, draw_heads(groups["heads"]))
    say(f"\n{as_table(groups)}\n\nwrote {HEADS_FILE} and {HEADS_PICTURE} to {printable(folder)}/")


def load_held_out(saved: SavedModel, options: HeadsConfig) -> ImageSet:
    """Load `options.images` of the images that were held out when a model was trained."""
    held_out = load_split(saved, options.data.root)[1]
    if len(held_out) < 2:  # of which there is no interval
        size = json.dumps(saved.config.data.val_size)
        images = counted(len(held_out), "image")
        raise ValueError(f"{saved.path}: {images} held out (data.val_size={size}); 2 are needed")
    held_out = held_out.resized(saved.preprocess)
    return choose_images(held_out, options.images, options.seed, "heads")


def as_table(groups: dict[str, list[Effect]]) -> str:
    """Format the result of `measure_groups` as text: the largest and smallest effects."""
    rows = [["muted", "fall in probability", "fall in accuracy"]]
    for part, effects in groups.items():
        lines = []
        for effect in ranked(effects):
            named = [f"layer {layer} head {head}" for layer, head in effect.heads]
            name = f"layer {effect.heads[0][0]}" if part == "layers" else " and ".join(named)
            (mean, half), (points, spread) = effect.probability, effect.accuracy
            lines.append([name, f"{mean:.4f} ± {half:.4f}", f"{points:.2%} ± {spread:.2%}"])
        if (between := len(lines) - 2 * LISTED) > 0:
            lines[LISTED:-LISTED] = [[f"{counted(between, part[:-1])} between", "", ""]]
        rows += lines
    return "\n".join(line.rstrip() for line in text_table(rows))
