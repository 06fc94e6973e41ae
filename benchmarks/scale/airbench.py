"""An anchor for the records: a convolutional network for CIFAR-10 made for speed.

    python -m benchmarks.scale.airbench --minutes 10 [--seeds 0 1 2] [--root data] [--held-out 5000]

The network, augmentation and optimization follow airbench94 (arXiv 2404.00498): a whitened stem,
three pairs of convolutions that start as the identity, images mirrored in every other epoch, Muon.
Written from the paper for a CPU: smaller batches, bfloat16, channels last, and a learning rate that
falls with the time that is left. Trains for some minutes with each seed; prints what it saw and the
accuracy of test images, or of held-out training images, with one view of each image and with six.
"""

import argparse
import dataclasses
import json
import time
from itertools import count

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
from vit.training.optim import Muon, set_lr

CPU = torch.device("cpu")
WIDTHS = 64, 256, 256
BATCH = 500
LABEL_SMOOTHING = 0.2
PADDING = 2  # pixels of the random crops
LOGIT_SCALE = 1 / 9
BIAS_LR, HEAD_LR = 0.053, 0.67  # as published, of the summed loss of a batch
MUON_LR = 0.12  # published: 0.24 with 2,000 images in a batch
MOMENTUM, MUON_MOMENTUM = 0.85, 0.6
WHITEN_BIAS_EPOCHS = 3  # after which it stays


class Pair(nn.Sequential):
    """Two convolutions of 3 x 3, of which the first halves the sides."""

    def __init__(self, before: int, width: int) -> None:
        def conv(channels: int) -> nn.Conv2d:
            layer = nn.Conv2d(channels, width, 3, padding=1, bias=False)
            nn.init.dirac_(layer.weight[:channels])
            return layer

        def norm() -> nn.BatchNorm2d:
            layer = nn.BatchNorm2d(width, eps=1e-12, momentum=0.4)
            layer.weight.requires_grad = False
            return layer

        super().__init__(
            conv(before), nn.MaxPool2d(2), norm(), nn.GELU(), conv(width), norm(), nn.GELU()
        )


class Airbench(nn.Module):
    """The network of airbench94, for 32 x 32 pixels."""

    def __init__(self, images: Tensor, num_classes: int) -> None:
        """Whiten the stem with normalized images (N, 3, 32, 32)."""
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 2)
        self.stem.weight.requires_grad = False
        whiten(self.stem, images)
        widths = (24, *WIDTHS)
        self.pairs = nn.Sequential(*(Pair(*two) for two in zip(widths, WIDTHS, strict=False)))
        self.head = nn.Linear(WIDTHS[-1], num_classes, bias=False)
        self.to(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Tensor:
        """Classify normalized images (B, 3, 32, 32): logits (B, classes)."""
        features = self.pairs(F.gelu(self.stem(images)))
        return self.head(features.amax(dim=(2, 3))) * LOGIT_SCALE


def train(
    training: ImageSet, preprocess: Preprocess, minutes: float, seed: int
) -> tuple[nn.Module, int]:
    """Train for some minutes; return the model and the number of images it has seen."""
    begin, precision = time.perf_counter(), choose_precision("auto", CPU)
    pixels, labels = training.pixels(), training.labels
    torch.manual_seed(seed)
    model = Airbench(preprocess.normalize(pixels[:5000]), len(training.classes))
    kernels = [p for p in model.pairs.parameters() if p.ndim == 4]
    biases = [p for p in model.pairs.parameters() if p.ndim == 1 and p.requires_grad]
    groups = [
        {"params": [model.stem.bias], "initial_lr": BIAS_LR},
        {"params": biases, "initial_lr": BIAS_LR},
        {"params": [model.head.weight], "initial_lr": HEAD_LR},
    ]
    sgd = torch.optim.SGD(groups, lr=1.0, momentum=MOMENTUM, nesterov=True)
    muon_group = {"params": kernels, "initial_lr": MUON_LR}
    muon = Muon([muon_group], dict.fromkeys(kernels, 1), MUON_LR, 0.0, MUON_MOMENTUM, precision)
    forward = torch.compile(model.train(), dynamic=False)
    shape = len(training) // BATCH, BATCH
    mirrored_first = torch.rand(len(training), generator=generator(seed, "mirror")) < 0.5
    for epoch in count():
        for step, chosen in enumerate(epoch_batches(len(training), shape, seed, epoch)):
            done = (time.perf_counter() - begin) / (60 * minutes)
            if done >= 1:
                return model.eval(), BATCH * (epoch * shape[0] + step)
            set_lr([sgd, muon], 1 - done)
            if epoch >= WHITEN_BIAS_EPOCHS:
                groups[0]["lr"] = 0.0
            draws = Draws(fold_in(seed, "airbench", epoch, step), BATCH)
            images = random_crop(pixels[chosen], PADDING, draws)
            mirrored = mirrored_first[chosen] ^ bool(epoch % 2)  # in every other epoch
            images = torch.where(mirrored[:, None, None, None], images.flip(-1), images)
            inputs = preprocess.normalize(images).contiguous(memory_format=torch.channels_last)
            with autocast(CPU, precision):
                logits = forward(inputs)
            F.cross_entropy(
                logits.float(), labels[chosen], label_smoothing=LABEL_SMOOTHING, reduction="sum"
            ).backward()
            with torch.no_grad():
                for kernel in kernels:
                    kernel.mul_(len(kernel) ** 0.5 / kernel.norm())
            for optimizer in (sgd, muon):
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
    raise AssertionError("epochs are endless")


def main() -> None:
    """Train with each seed, and print a line of results as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--root", default="data")
    parser.add_argument("--held-out", type=int, default=0)
    given = parser.parse_args()
    data = DataConfig(root=given.root, val_size=given.held_out)
    preprocess = Preprocess.from_config(data)
    for seed in given.seeds:
        training, held_out = load_training(data, seed, preprocess)
        test = held_out if given.held_out else load_test_images(data, preprocess)
        model, seen = train(training, preprocess, given.minutes, seed)
        one = Classifier(model, preprocess, training.classes, CPU, choose_precision("auto", CPU))
        six = dataclasses.replace(one, flip=True, shift=True)
        results = {
            "minutes": given.minutes, "seed": seed, "epochs": round(seen / len(training), 2),
            "accuracy": evaluate(one, test)[0]["accuracy"],
            "six_views": evaluate(six, test)[0]["accuracy"],
        }  # fmt: skip
        print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
