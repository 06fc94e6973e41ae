"""The report: mistakes and precision-recall curves."""

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

from models import PLAIN
from vit.classifier import Classifier
from vit.config import DataConfig
from vit.data.datasets import ImageSet, load
from vit.data.preprocess import Preprocess
from vit.model.vit import VisionTransformer
from vit.reporting.report import FRAME, class_frames, worst_mistakes, write_report

CPU = torch.device("cpu")


def test_worst_mistakes_are_wrong_and_the_surest_first():
    logits = torch.tensor([[9.0, 0.0], [0.0, 1.0], [0.0, 5.0], [3.0, 0.0], [0.0, 2.0]])
    labels = torch.tensor([0, 0, 0, 1, 1])  # the first and the last are right
    assert worst_mistakes(logits, labels, 2).tolist() == [2, 3]
    assert worst_mistakes(logits, labels, 10).tolist() == [2, 3, 1]
    assert worst_mistakes(logits, logits.argmax(dim=1), 10).tolist() == []


def test_precision_recall_curves_count_their_own_class(tmp_path):
    torch.manual_seed(0)
    model = VisionTransformer(**PLAIN, img_size=32, num_classes=10, embed_dim=12, depth=1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    model.eval()
    images = load("shapes", ".", train=False, count=105)  # five classes have one more
    preprocess = Preprocess.from_config(DataConfig(name="shapes"))
    classifier = Classifier(model, preprocess, images.classes, CPU, torch.float32)
    write_report(classifier, images, tmp_path, step=1, probes=0)
    shown = EventAccumulator(str(tmp_path), size_guidance={"tensors": 0}).Reload()
    shares = classifier.logits(images.images).softmax(dim=1)
    for number, name in enumerate(images.classes):
        (event,) = shown.Tensors(f"precision_recall/{name}")
        curve = tensor_util.make_ndarray(event.tensor_proto)
        true = images.labels == number
        assert curve[0, 0] == true.sum() and curve[1, 0] == (~true).sum()  # at threshold 0
        middle = curve.shape[1] // 2
        above = shares[:, number] >= middle / (curve.shape[1] - 1)
        assert curve[0, middle] == (above & true).sum(), name
        assert curve[1, middle] == (above & ~true).sum(), name


def test_thumbnails_are_framed_in_the_colours_of_their_classes():
    for count in (3, 15, 100):
        labels = torch.arange(2 * count) % count
        images = torch.randint(256, (2 * count, 3, 6, 8), dtype=torch.uint8)
        framed = class_frames(ImageSet(images, labels, tuple(map(str, range(count)))))
        assert framed.shape == (2 * count, 3, 6 + 2 * FRAME, 8 + 2 * FRAME)
        assert torch.equal(framed[:, :, FRAME:-FRAME, FRAME:-FRAME], images)
        edges = framed[:, :, 0, 0]
        assert torch.equal(framed[:, :, -1, -1], edges) and torch.equal(framed[:, :, 0, -1], edges)
        assert torch.equal(edges[:count], edges[count:])
        assert len(edges.unique(dim=0)) == count
