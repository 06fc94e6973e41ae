"""The cost of reading attention weights, here and with output_attentions=True of transformers.

    python -m benchmarks.speed.reading_weights [--size 224] [--images 2] [--rounds 5]

A ViT-B/16 of transformers with random weights, and the same weights in this project's
VisionTransformer and in timm's. Each classifies images in float32 with weights and without, taking
turns (A B C A B C), on one thread, whose processor time hardly depends on other load. Memory is the
largest increase of a fresh process during one forward pass, with the weights themselves,
L x B x H x N x N numbers of 4 bytes. Linux only.

Expect weights to take up to a fifth more time than logits, and about as much in each library.
"""

import argparse
import ctypes
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.memory import in_new_process, memory
from benchmarks.tables import markdown
from benchmarks.timing import take_turns
from vit.classifier import build_model
from vit.data.config import DataConfig
from vit.hardware import describe
from vit.model.attention_model import require_attention
from vit.model.config import ModelConfig
from vit.pretrained.adapt import fit
from vit.pretrained.architecture import adopt
from vit.pretrained.transformers import read_transformers

WAYS = {  # the model, its attention in transformers, and whether weights are read
    "VisionTransformer, logits": ("vit", "", False),
    "VisionTransformer, weights": ("vit", "", True),
    "timm's, logits": ("timm:vit_base_patch16_224", "", False),
    "timm's, weights": ("timm:vit_base_patch16_224", "", True),
    "transformers, logits": ("transformers", "sdpa", False),
    "transformers, weights": ("transformers", "eager", True),
}


def prepare(folder: Path, size: int) -> None:
    """Save a ViT-B/16 of transformers with random weights for images of a size."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    ViTForImageClassification(ViTConfig(image_size=size, num_labels=10)).save_pretrained(folder)


def load_way(way: str, folder: Path, size: int, number: int) -> Callable[[], Any]:
    """Return what is measured: a function that classifies images, with weights or without."""
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    images = torch.zeros(number, 3, size, size)
    name, attention, reads = WAYS[way]
    if name == "transformers":
        from transformers import ViTForImageClassification

        other = ViTForImageClassification.from_pretrained(folder, attn_implementation=attention)
        return lambda: other.eval()(images, output_attentions=reads)
    source, preprocess = read_transformers(folder)
    config = adopt(ModelConfig(name=name, pretrained=str(folder)), source.settings, str(folder))
    model = build_model(config, preprocess, 10).eval()
    data = DataConfig(name="folder", image_size=preprocess.image_size)
    model.load_state_dict(fit(source, config, data.spec).weights)
    if reads:
        return lambda: require_attention(model).forward_intermediates(images)
    return lambda: model(images)


def measure_memory(way: str, folder: Path, size: int, number: int) -> float:
    """Return by how many MB this process grows in a forward pass."""
    work = load_way(way, folder, size, number)
    work()  # which also reads what is stored in files
    ctypes.CDLL(None).malloc_trim(0)  # gives back what is free
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = memory("VmRSS")
    work()
    return memory("VmHWM") - before


def main() -> None:
    """Print a row for each way."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=int, default=224, help="pixels")
    parser.add_argument("--images", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, size, number = Path(name), arguments.size, arguments.images
        prepare(folder, size)
        grown = {way: in_new_process(measure_memory, way, folder, size, number) for way in WAYS}
        works = {way: load_way(way, folder, size, number) for way in WAYS}
        timings = take_turns(works, arguments.rounds, time.process_time)
    print(f"{describe(torch.device('cpu'))}, torch {torch.__version__}, {size} pixels")
    rows = [
        [way, f"{1000 * timing.seconds / number:.0f}", timing.cost(), f"{grown[way]:.0f} MB"]
        for way, timing in timings.items()
    ]
    print(markdown(["ViT-B/16", "ms for an image", "over the first", "memory"], rows))


if __name__ == "__main__":
    main()
