"""Metrics compared with torchmetrics, scikit-learn and their definitions; unfamiliar images."""

import copy
import dataclasses
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from scipy.special import log_softmax
from scipy.stats import binomtest
from sklearn.metrics import (
    average_precision_score,
    balanced_accuracy_score,
    f1_score,
    roc_auc_score,
    roc_curve,
)
from sklearn.neighbors import NearestNeighbors
from torch import Tensor
from torchmetrics.functional.classification import (
    multiclass_accuracy,
    multiclass_calibration_error,
    multiclass_confusion_matrix,
    multiclass_precision,
    multiclass_recall,
)

from models import PLAIN, names, randomize, save_untrained
from small_runs import draw_pictures
from vit.classifier import Classifier
from vit.data.config import DataConfig
from vit.data.images import ImageSet
from vit.data.preprocess import Preprocess
from vit.evaluation import Validation, evaluate, intervals, report
from vit.intervals import average, mcnemar, wilson_interval
from vit.model.vit import VisionTransformer
from vit.pretrained.load import load as load_model
from vit.reporting import loading, unfamiliar
from vit.reporting.loading import load_split, load_test
from vit.reporting.tables import metrics_table
from vit.reporting.unfamiliar import detection, load_unfamiliar, report_unfamiliar

PREPROCESS = Preprocess.from_config(DataConfig(name="cifar10"))
MEAN, STD = (torch.tensor(values).view(3, 1, 1) for values in (PREPROCESS.mean, PREPROCESS.std))


def draw_case(count: int, num_classes: int, skill: float, scale: float) -> tuple[Tensor, Tensor]:
    """Return logits that lean towards the labels, and the labels."""
    generator = torch.Generator().manual_seed(count + num_classes)
    labels = torch.randint(num_classes, (count,), generator=generator)
    logits = torch.randn(count, num_classes, generator=generator)
    logits[torch.arange(count), labels] += skill
    return logits * scale, labels


@pytest.mark.parametrize(
    ("count", "num_classes", "skill", "scale"),
    [(1000, 10, 2.0, 3.0), (200, 2, 0.5, 1.0), (1000, 1000, 6.0, 1.0), (1000, 1001, 6.0, 1.0)],
)
def test_report_agrees_with_torchmetrics(count, num_classes, skill, scale):
    """Above 1,000 classes, a confusion matrix would be too large."""
    logits, labels = draw_case(count, num_classes, skill, scale)
    result = report(logits, labels, names(num_classes))
    score = partial(multiclass_accuracy, logits, labels, num_classes, average="micro")
    exact = log_softmax(logits.double().numpy(), axis=1)
    for name, expected in (
        ("accuracy", score()),
        ("top5_accuracy", score(top_k=min(5, num_classes))),
        ("ece", multiclass_calibration_error(logits, labels, num_classes, n_bins=15, norm="l1")),
        ("loss", -exact[np.arange(count), labels].mean()),
    ):
        assert result[name] == pytest.approx(expected.item(), abs=1e-5 if name == "loss" else 1e-6)
    assert result["n"] == count
    assert result["accuracy_95"] == wilson_interval(round(result["accuracy"] * count), count)
    confusion = multiclass_confusion_matrix(logits, labels, num_classes)
    assert result["confusion_matrix"] == (confusion.tolist() if num_classes <= 1000 else None)
    table = metrics_table({**result, "images_per_second": 1.0})
    assert ("most often confused" in table) == (num_classes <= 1000)
    bins = result["reliability"]
    assert sum(part["n"] for part in bins) == count
    for part in bins:
        hits = round(part["accuracy"] * part["n"])
        assert part["accuracy_95"] == wilson_interval(hits, part["n"])
    per_class = result["per_class"]
    assert list(per_class) == list(names(num_classes))
    for key, function in (("recall", multiclass_recall), ("precision", multiclass_precision)):
        # torchmetrics writes 0 where there is nothing to divide by.
        found = [values[key] or 0.0 for values in per_class.values()]
        expected = function(logits, labels, num_classes, average=None).tolist()
        assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
@pytest.mark.parametrize("missing", ["nothing", "images", "predictions", "both"])
def test_metrics_of_classes_agree_with_scikit_learn(missing):
    """A class without test images, without predictions, or with neither is in the last column."""
    logits, labels = draw_case(400, 6, skill=1.0, scale=1.0)
    labels[:200] = 0  # classes of different sizes
    if missing in ("images", "both"):
        logits, labels = logits[labels != 5], labels[labels != 5]
    if missing in ("predictions", "both"):
        logits[:, 5] = -100
    predicted, result = logits.argmax(dim=1), report(logits, labels, names(6))
    assert abs(result["balanced_accuracy"] - result["accuracy"]) > 0.01
    balanced = balanced_accuracy_score(labels, predicted)
    assert result["balanced_accuracy"] == pytest.approx(balanced, abs=1e-12)
    macro_f1 = f1_score(labels, predicted, average="macro", zero_division=0)
    assert result["macro_f1"] == pytest.approx(macro_f1, abs=1e-12)


@pytest.mark.parametrize("split", [(5, 5), (0, 1), (5, 0), (2, 3), (0, 2000)])
def test_intervals_and_mcnemar_agree_with_scipy(split):
    test = binomtest(split[0], sum(split))
    assert mcnemar(*split) == pytest.approx(test.pvalue, rel=1e-9, abs=1e-300)
    assert mcnemar(0, 0) == 1.0
    low_high = test.proportion_ci(0.95, method="wilson")
    assert wilson_interval(split[0], sum(split)) == pytest.approx((*low_high,), abs=1e-7)


def test_intervals_of_means_over_classes_agree_with_the_jackknife():
    logits, labels = draw_case(400, 4, skill=1.0, scale=1.0)
    found, result = intervals(logits, labels), report(logits, labels, names(4))
    rest = [torch.arange(400) != one for one in range(400)]
    for key in ("balanced_accuracy", "macro_f1"):
        values = [report(logits[kept], labels[kept], names(4))[key] for kept in rest]
        half = 1.96 * np.std(values) * 399**0.5
        low, high = found[f"{key}_95"]
        assert low < result[key] < high
        assert high - low == pytest.approx(2 * half, rel=0.1)
    certain = 9 * F.one_hot(labels, 4).float()  # the model makes no mistakes
    assert intervals(certain, labels)["macro_f1_95"] == pytest.approx(wilson_interval(400, 400))


@pytest.fixture(scope="module")
def model() -> VisionTransformer:
    # The batch norm of the convolutional stem shows whether images see each other.
    sizes = {"img_size": 8, "num_classes": 10, "embed_dim": 16, "depth": 2, "num_heads": 2}
    return randomize(VisionTransformer(**(PLAIN | sizes | {"stem": "conv"})), 0.3)


@pytest.fixture(scope="module")
def images() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (50, 3, 8, 8), dtype=torch.uint8, generator=generator)


CLASSES = names(10)


def classify(
    model: VisionTransformer, precision: torch.dtype = torch.float32, classes: Any = CLASSES
) -> Classifier:
    return Classifier(model, PREPROCESS, classes, torch.device("cpu"), precision)


def test_logits_are_the_model_whatever_the_batch_size_and_near_it_in_bfloat16(model, images):
    with torch.no_grad():
        expected = model((images / 255 - MEAN) / STD)
    assert expected.std() > 0.1
    for batch_size in (7, 1000):
        logits = classify(model).logits(images, batch_size)
        assert logits.dtype == torch.float32 and not logits.requires_grad
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    rounded = classify(model, torch.bfloat16).logits(images)
    assert rounded.dtype == torch.float32
    assert 0 < (rounded - logits).abs().max() < 0.1 * logits.std()


def test_one_photo_may_be_many_of_a_list(model, tmp_path):
    Image.fromarray(np.full((900, 900, 3), 77, np.uint8)).save(tmp_path / "a.jpg")
    for _ in range(5):
        photo = Image.open(tmp_path / "a.jpg")  # which is read when its pixels are needed
        first, *others = classify(model).predict([photo] * 6)
        assert others == [first] * 5


def test_maps_are_computed_in_float32_whatever_the_callers_precision(model, images):
    classifier = classify(model)
    _, expected = classifier.maps(images[:5], "rollout")
    with torch.autocast("cpu", torch.bfloat16):
        _, found = classifier.maps(images[:5], "rollout")
    assert torch.equal(found["rollout"], expected["rollout"])


def test_what_would_give_wrong_predictions_is_refused(model, images):
    """Images from 0 to 1, a model in training mode, and names that are not those of the logits."""
    fractions = images / 255
    before = fractions.clone()
    with pytest.raises(ValueError, match=r"images: torch.float32 .* torch.uint8, from 0 to 255"):
        classify(model).logits(fractions)
    assert torch.equal(fractions, before)
    classifier = classify(copy.deepcopy(model))
    classifier.model.train()
    for use in (
        lambda: classify(classifier.model),
        lambda: classifier.logits(images),
        lambda: classifier.features(images),
        lambda: classifier.maps(images),
    ):
        with pytest.raises(ValueError, match=r"training mode .* call model.eval\(\)"):
            use()
    with pytest.raises(ValueError, match=r"^classes: 9 names for 10 logits$"):
        dataclasses.replace(classify(model), classes=names(9)).logits(images)
    other = copy.deepcopy(model)  # whose num_classes is still 10
    other.head = torch.nn.Linear(16, 9)
    assert classify(other, classes=names(9)).logits(images).shape[1] == 9
    with pytest.raises(ValueError, match=r"classes: .*; it must be names that differ"):
        dataclasses.replace(classify(model), classes=("crane",) * 10)
    preprocess = Preprocess((2240, 1120), (0.5,), (0.5,))
    large = dataclasses.replace(classify(model), preprocess=preprocess)
    assert large.part_size() <= 10 < classify(model).part_size()
    named = dataclasses.replace(classify(model), classes=[*"abcdefghij"])  # as torchvision does
    labelled = ImageSet(images, torch.zeros(len(images), dtype=torch.int64), tuple("abcdefghij"))
    assert evaluate(named, labelled)[0]["n"] == len(images)
    with pytest.raises(ValueError, match=r"images: 0 is not allowed; it must be at least one"):
        evaluate(named, labelled.select(torch.arange(0)))


def test_mirror_images_count_as_much_as_the_images(model, images):
    both = dataclasses.replace(classify(model), flip=True)
    plain = classify(model).logits(images)
    mirrored = classify(model).logits(images.flip(-1))
    expected = (plain + mirrored) / 2
    assert (expected - plain).abs().max() > 1e-3
    torch.testing.assert_close(both.logits(images, 7), expected, rtol=0, atol=1e-5)
    held = ImageSet(images, torch.arange(50) % 10, names(10))
    result, logits = evaluate(both, held)
    assert result["flip"] is True and torch.equal(logits, both.logits(images))
    assert "flip" not in evaluate(classify(model), held)[0]


def test_six_views_are_shifted_and_mirrored(model, images):
    padded = torch.from_numpy(
        np.pad(images.numpy(), ((0, 0), (0, 0), (1, 1), (1, 1)), mode="reflect")
    )
    single, expected = classify(model), 0
    for weight, view in ((4, images), (8, padded[..., :-2, :-2]), (8, padded[..., 2:, 2:])):
        expected = expected + (single.logits(view) + single.logits(view.flip(-1))) / weight
    six = dataclasses.replace(single, flip=True, shift=True)
    torch.testing.assert_close(six.logits(images, 7), expected, rtol=0, atol=1e-5)
    assert (expected - single.logits(images)).abs().max() > 1e-3
    held = ImageSet(images, torch.arange(50) % 10, names(10))
    assert evaluate(six, held)[0]["views"] == 6


def test_evaluate_and_validation_give_the_report_on_the_predictions(model, images):
    held = ImageSet(images, torch.arange(50) % 10, names(10))
    result, logits = evaluate(classify(model), held, batch_size=13)
    del result["images_per_second"]
    assert torch.equal(logits, classify(model).logits(images, 13))
    assert result == report(logits, held.labels, names(10))
    values = [("val/loss", pytest.approx(result["loss"])), ("val/accuracy", result["accuracy"])]
    assert list(validation(held).run(classify(model), 1)) == values
    none = held.select(torch.empty(0, dtype=torch.int64))
    assert list(validation(none).steps) == []


def validation(held_out: ImageSet, freeze: str = "none") -> Validation:
    preprocess = SimpleNamespace(image_size=held_out.images.shape[2:])
    return Validation(SimpleNamespace(
        config=SimpleNamespace(train=SimpleNamespace(freeze=freeze)), held_out=held_out,
        epoch_ends=range(3), preprocess=preprocess, size_of=lambda _: preprocess.image_size,
    ))  # fmt: skip


def test_validation_of_a_frozen_model_computes_features_once(model, images):
    held = ImageSet(images, torch.arange(50) % 10, names(10))
    tuned, frozen = copy.deepcopy(model), validation(held, "backbone")
    for _ in range(2):
        torch.nn.init.normal_(tuned.head.weight)
        result, _ = evaluate(classify(tuned), held)
        measured = dict(frozen.run(classify(tuned), 1))
        assert measured["val/loss"] == pytest.approx(result["loss"], rel=1e-5)
        assert measured["val/accuracy"] == result["accuracy"]
    torch.nn.init.normal_(tuned.norm.weight)  # does not change in training
    assert dict(frozen.run(classify(tuned), 1)) == measured


def test_table_has_a_row_for_each_class_and_aligned_columns():
    classes = ("airplane", "a" * 60, "ねこ", "cafe\u0301", "e", "f")
    labels, predicted = torch.tensor([0] * 23 + [1] * 8), torch.tensor([0] * 20 + [1] * 3 + [3] * 8)
    result = report(torch.eye(6)[predicted] * 5, labels, classes)
    lines = metrics_table({**result, "images_per_second": 12345.6}).splitlines()
    low, high = result["accuracy_95"]
    assert lines[0].endswith(f" 64.52% ({low:.2%} to {high:.2%}), 31 images")
    assert lines[1].startswith("top-5 accuracy") and " 12,346 images/s" in lines[4]
    assert f" {result['balanced_accuracy']:.2%}, " in lines[2]
    assert f" {result['macro_f1']:.4f}, " in lines[3]
    cells = [line.split("   ") for line in lines[7:]]  # recall, precision, images, confused with
    cut = f"{'a' * 40}..."
    assert [[cell.strip() for cell in row if cell] for row in cells] == [
        ["airplane", "87.0% (67.9% to 95.5%)", "100.0% (83.9% to 100.0%)", "23", f"{cut} (3)"],
        [cut, "0.0% (0.0% to 32.4%)", "0.0% (0.0% to 56.1%)", "8", "cafe\u0301 (8)"],
        ["ねこ", "–", "–", "0", "–"],
        ["cafe\u0301", "–", "0.0% (0.0% to 32.4%)", "0", "–"],
        ["e", "–", "–", "0", "–"],
        ["f", "–", "–", "0", "–"],
    ]
    extra = (0, 1, -2, 1, 0, 0)  # characters more than columns of the terminal
    ends = {len(line) - more for line, more in zip(lines[7:], extra, strict=True)}
    assert ends == {len(lines[6])}


def test_a_single_value_has_no_interval():
    assert average("size", torch.tensor([2.0])) == {"size": 2.0, "size_95": None}
    assert average("size", torch.ones(3)) == {"size": 1.0, "size_95": (1.0, 1.0)}


@pytest.mark.parametrize("digits", [8, 1, 0])  # with fewer digits, scores are equal more often
def test_metrics_are_those_of_scikit_learn(digits):
    random = torch.Generator().manual_seed(0)
    familiar = (torch.randn(300, generator=random) + 1).double().round(decimals=digits)
    others = torch.randn(200, generator=random).double().round(decimals=digits)
    found = detection(familiar, others)
    scores, truth = torch.cat([familiar, others]), [1] * 300 + [0] * 200
    assert found["auroc"] == pytest.approx(roc_auc_score(truth, scores))
    assert found["aupr"] == pytest.approx(average_precision_score(truth, scores))
    fpr, tpr, _ = roc_curve(truth, scores, drop_intermediate=False)
    assert found["fpr95"] == pytest.approx(fpr[np.argmax(tpr >= 0.95)])
    for key in ("auroc", "aupr", "fpr95"):
        low, high = found[f"{key}_95"]
        assert low < found[key] < high
    # DeLong et al. 1988
    beats = (familiar[:, None] > others).double() + 0.5 * (familiar[:, None] == others)
    error = (beats.mean(dim=1).var() / 300 + beats.mean(dim=0).var() / 200).sqrt().item()
    assert np.ptp(found["auroc_95"]) == pytest.approx(2 * 1.96 * error, rel=0.1)


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unfamiliar")
    return save_untrained(folder, {"embed_dim": 24, "depth": 2, "patch_size": 8})


def test_unfamiliar_images_are_loaded_and_a_folder_of_them_is_measured(
    untrained, tmp_path, monkeypatch
):
    monkeypatch.setattr(unfamiliar, "NOISE", 30)
    monkeypatch.setattr("vit.intervals.RESAMPLES", 20)
    draw_pictures(tmp_path, 12, ["photos"])
    saved = load_model(untrained, "cpu", "float32")
    test, training = load_test(saved).select(torch.arange(100)), load_split(saved, None)[0]
    for name, count in (("noise", 30), ("digits", 359), (str(tmp_path / "photos"), 12)):
        images = load_unfamiliar(name, saved, None)
        assert images.pixels().shape == (count, 3, 32, 32)
    part = report_unfamiliar(saved, test, images, training, name, seed=0, batch_size=500)
    found, table = part.numbers, part.table.splitlines()
    assert (found["images"], found["n"]) == (name, count)
    scores = ("maximum softmax", "energy", "nearest neighbours")
    assert "random: 0.500, 0.893, 0.950" in table[-1]  # 100 of 112 images are familiar
    for line, score in zip(table[2:-1], scores, strict=True):
        assert line.startswith(score) and f"{found[score]['auroc']:.3f} (" in line
    assert part.pictures["unfamiliar"].shape == (280, 960, 3)
    logits = saved.logits(test.pixels())
    pair = logits.logsumexp(1), saved.logits(images.pixels()).logsumexp(1)
    assert found["energy"]["auroc"] == pytest.approx(detection(*pair)["auroc"], abs=2e-3)
    reference = F.normalize(saved.features(training.pixels()))
    nearest = NearestNeighbors(n_neighbors=10).fit(reference)
    shown = [F.normalize(saved.features(s.pixels())) for s in (test, images)]
    distances = [torch.tensor(-nearest.kneighbors(part)[0][:, 9]) for part in shown]
    expected = detection(*distances)["auroc"]
    assert found["nearest neighbours"]["auroc"] == pytest.approx(expected, abs=2e-3)


def test_unsuitable_images_are_refused_and_unreadable_ones_left_out(untrained, tmp_path, capsys):
    saved = load_model(untrained, "cpu")
    folder = draw_pictures(tmp_path, 10, ["ten"]) / "ten"
    (folder / "broken.png").write_bytes(b"\x89PNG")
    assert len(load_unfamiliar(str(folder), saved, None)) == 10
    assert "broken.png" in capsys.readouterr().err
    (folder / "0.png").unlink()
    for name, problem in (
        ("digts", "did you mean digits?"),
        (str(folder / "1.png"), "it must be a folder of images or one of noise, cifar10, "),
        (str(folder), "it must be a folder of at least 10 images"),
        ("shapes", "shapes is not allowed; it must be images of other classes"),
    ):
        with pytest.raises(ValueError, match=r"^unfamiliar: ") as error:
            load_unfamiliar(name, saved, None)
        assert problem in str(error.value)


def test_nothing_is_downloaded_where_the_users_images_are(untrained, tmp_path, monkeypatch):
    asked = lambda data, train: SimpleNamespace(resized=lambda _: data.root)  # noqa: E731
    monkeypatch.setattr(unfamiliar, "open_images", asked)
    saved = load_model(untrained, "cpu")
    draw_pictures(tmp_path / "pictures", 2)
    roots = [load_unfamiliar("digits", saved, str(tmp_path / n)) for n in ("pictures", "sets")]
    assert roots == ["data", str(tmp_path / "sets")]


def test_nothing_is_downloaded_into_a_wrong_folder(tmp_path, monkeypatch):
    """Another new or empty folder is the target of a download."""
    places: list[str] = []

    def read(data: DataConfig, *_: object) -> ImageSet:
        places.append(data.root)
        raise ValueError("no network")

    for name in ("load_test_images", "split_training"):
        monkeypatch.setattr(loading, name, read)
    saved = load_model("cifar10_quick", "cpu")
    wrong = tmp_path / "wrong"
    (wrong / "notes").mkdir(parents=True)
    for load in (load_test, load_split):
        with pytest.raises(ValueError, match=r"wrong does not contain cifar10 \(it contains n"):
            load(saved, str(wrong))
        for place in ("new", "sets"):
            (tmp_path / "sets/cifar-10-batches-py").mkdir(parents=True, exist_ok=True)
            with pytest.raises(ValueError, match="no network"):
                load(saved, str(tmp_path / place))
    assert {*places} == {"data", str(tmp_path / "new"), str(tmp_path / "sets")}


def test_training_images_are_where_they_were_or_in_another_root(tmp_path):
    classes, root, other = ("a", "b"), tmp_path / "pictures", tmp_path / "other"
    draw_pictures(root, 40)
    draw_pictures(other, 40, seed=1)
    data = {"name": "folder", "root": str(root), "image_size": [8, 8]}
    model = {"embed_dim": 24, "depth": 1, "patch_size": 4}
    saved = load_model(save_untrained(tmp_path / "run", model, classes=classes, data=data), "cpu")
    expected = load_split(saved, None)[0]
    saved = dataclasses.replace(saved, fingerprint=expected.fingerprint)
    assert load_split(saved, str(other))[0].origins == expected.origins
    root.rename(tmp_path / "moved")
    moved = load_split(saved, str(tmp_path / "moved"))[0]
    assert [Path(name).name for name in moved.origins] == [Path(n).name for n in expected.origins]
    (other / "a/0.png").rename(other / "a/new.png")
    with pytest.raises(ValueError, match=r"^data\.root: .*/other does not contain the images that"):
        load_split(saved, str(other))
