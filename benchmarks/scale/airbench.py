"""An anchor for the records: a convolutional network for CIFAR-10 made for speed.

    python -m benchmarks.scale.speedrun run airbench_10 cnn 10
    python -m benchmarks.scale.airbench 3     # minutes; accuracy of 5,000 held-out images, seed 0

The network and augmentation follow airbench94 (arXiv 2404.00498): a whitened stem, three pairs of
convolutions that start as the identity, images mirrored in every other epoch. Optimization follows
airbench94_muon.py of github.com/KellerJordan/cifar10-airbench. For a CPU: smaller batches, half the
widths below 30 minutes, and learning rates that fall with the time that is left, to zero at its
end. Muon takes 5 Newton-Schulz steps instead of 3.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from vit.classifier import Classifier
from vit.data.augment import random_crop
from vit.data.config import DataConfig
from vit.data.datasets import load_test_images, load_training
from vit.data.images import ImageSet
from vit.data.preprocess import Preprocess
from vit.data.sampling import epoch_batches
from vit.evaluation import evaluate
from vit.hardware import autocast, choose_precision
from vit.model.embed import whiten
from vit.seeding import Draws, fold_in, generator
from vit.training.flop import product_speed
from vit.training.optim import Muon, set_lr

CPU = torch.device("cpu")
SMALL, PUBLISHED = (32, 128, 128), (64, 256, 256)  # widths of the pairs
LONG = 30  # minutes from which the published widths are used
BATCH = 250
WHITENING_EPS = 5e-4
LABEL_SMOOTHING = 0.2
PADDING = 2  # pixels of the random crops
# As published, of losses summed over a batch, which therefore fit all sizes of batches.
BIAS_LR, HEAD_LR = 0.053, 0.67
DECAY = 2e-6 * BATCH  # weight decay of both, times their rates
MUON_LR = 0.24 * (BATCH / 2000) ** 0.5  # published for 2,000 images
MOMENTUM, MUON_MOMENTUM = 0.85, 0.6
NORM_MOMENTUM = 1 - 0.6 ** (BATCH / 2000)  # remembers as many images as the published 0.4
STEM_BIAS_EPOCHS = 3  # after which it stays


class Pair(nn.Sequential):
    """Two convolutions of 3 x 3, of which the first halves the sides."""

    def __init__(self, before: int, width: int) -> None:
        def conv(channels: int) -> nn.Conv2d:
            layer = nn.Conv2d(channels, width, 3, padding=1, bias=False)
            nn.init.dirac_(layer.weight[:channels])
            return layer

        def norm() -> nn.BatchNorm2d:
            layer = nn.BatchNorm2d(width, eps=1e-12, momentum=NORM_MOMENTUM)
            layer.weight.requires_grad = False
            return layer

        super().__init__(
            conv(before), nn.MaxPool2d(2), norm(), nn.GELU(), conv(width), norm(), nn.GELU()
        )


class Airbench(nn.Module):
    """The network of airbench94, for 32 x 32 pixels.

    Args:
        widths: Channels of the three pairs of convolutions.
        images: Normalized images (N, 3, 32, 32), whose patches the stem whitens.
        num_classes: Number of classes.
    """

    @torch.no_grad()
    def __init__(self, widths: tuple[int, ...], images: Tensor, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 2)
        self.stem.weight.requires_grad = False
        whiten(self.stem, images, WHITENING_EPS)
        pairs = zip((24, *widths), widths, strict=False)
        self.pairs = nn.Sequential(*(Pair(*pair) for pair in pairs))
        self.head = nn.Linear(widths[-1], num_classes, bias=False)
        self.head.weight.mul_(1 / self.head.weight.std())
        self.to(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Tensor:
        """Classify normalized images (B, 3, 32, 32): logits (B, classes)."""
        features = self.pairs(F.gelu(self.stem(images))).amax(dim=(2, 3))
        return self.head(features) / features.shape[1]


def batches(
    training: ImageSet, preprocess: Preprocess, seed: int
) -> Iterator[tuple[float, Tensor, Tensor]]:
    """Yield epochs so far, augmented and normalized images (B, 3, 32, 32) and labels, for ever."""
    pixels, labels = training.pixels(), training.labels
    shape = len(training) // BATCH, BATCH
    mirrored_first = torch.rand(len(training), generator=generator(seed, "mirror")) < 0.5
    for epoch in count():
        for step, chosen in enumerate(epoch_batches(len(training), shape, seed, epoch)):
            draws = Draws(fold_in(seed, "airbench", epoch, step), BATCH)
            images = random_crop(pixels[chosen], PADDING, draws)
            mirrored = mirrored_first[chosen] ^ bool(epoch % 2)  # in every other epoch
            images = torch.where(mirrored[:, None, None, None], images.flip(-1), images)
            images = preprocess.normalize(images).contiguous(memory_format=torch.channels_last)
            yield epoch + step / shape[0], images, labels[chosen]


def train(
    training: ImageSet, preprocess: Preprocess, minutes: float, seed: int
) -> tuple[nn.Module, dict[str, Any]]:
    """Train for some minutes; return the model, and what a record says of its training."""
    begin, precision = time.perf_counter(), choose_precision("auto", CPU)
    torch.manual_seed(seed)
    images = preprocess.normalize(training.pixels()[:5000])
    widths = PUBLISHED if minutes >= LONG else SMALL
    model = Airbench(widths, images, len(training.classes)).train()
    kernels = [p for p in model.pairs.parameters() if p.ndim == 4]
    biases = [p for p in model.pairs.parameters() if p.ndim == 1 and p.requires_grad]
    rates = (([model.stem.bias], BIAS_LR), (biases, BIAS_LR), ([model.head.weight], HEAD_LR))
    groups = [
        {"params": params, "initial_lr": rate, "weight_decay": DECAY / rate}
        for params, rate in rates
    ]
    sgd = torch.optim.SGD(groups, lr=1.0, momentum=MOMENTUM, nesterov=True)
    group = {"params": kernels, "initial_lr": MUON_LR}
    muon = Muon([group], dict.fromkeys(kernels, 1), MUON_LR, 0.0, MUON_MOMENTUM, precision)

    def summed_loss(images: Tensor, labels: Tensor) -> Tensor:
        with autocast(CPU, precision):
            logits = model(images)
        losses = F.cross_entropy(
            logits.float(), labels, label_smoothing=LABEL_SMOOTHING, reduction="none"
        )
        return losses.sum()

    flop = 0.0
    for steps, (epochs, *batch) in enumerate(batches(training, preprocess, seed)):
        left = 1 - (time.perf_counter() - begin) / (60 * minutes)
        if left <= 0:
            break
        set_lr([sgd, muon], left)
        sgd.param_groups[0]["lr"] *= max(0, 1 - epochs / STEM_BIAS_EPOCHS)
        if steps:
            summed_loss(*batch).backward()
        else:
            with FlopCounterMode(display=False) as counter:
                summed_loss(*batch).backward()
            flop = counter.get_total_flops()
        with torch.no_grad():
            for kernel in kernels:
                kernel.mul_(len(kernel) ** 0.5 / kernel.norm())
        for optimizer in (sgd, muon):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    seconds = time.perf_counter() - begin
    return model.eval(), {
        "seconds": seconds, "epochs": epochs, "steps": steps, "pflop": steps * flop / 1e15,
        "of_products": steps * flop / (seconds * product_speed(CPU, precision, 1)),
    }  # fmt: skip


def run(minutes: float, seed: int, root: str, held_out: int | None = None) -> dict[str, Any]:
    """Train and evaluate on the test images, or on some held-out ones; return a record's run."""
    data = DataConfig(root=root, val_size=held_out)
    preprocess = Preprocess.from_config(data)
    training, others = load_training(data, seed, preprocess)
    model, about = train(training, preprocess, minutes, seed)
    precision = choose_precision("auto", CPU)
    one = Classifier(model, preprocess, training.classes, CPU, precision)
    six = dataclasses.replace(one, flip=True, shift=True)
    images = others if held_out else load_test_images(data, preprocess)
    single, views = (evaluate(classifier, images)[0]["accuracy"] for classifier in (one, six))
    return {"seed": seed, "accuracy": single, "six_views": views, **about}


def main() -> None:
    """Train with seed 0, and print the result for held-out images."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("minutes", type=float)
    print(json.dumps(run(parser.parse_args().minutes, 0, "data", held_out=5000)))


if __name__ == "__main__":
    main()
