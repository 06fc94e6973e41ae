"""Images of no class: metrics compared with scikit-learn, and what the report says of them."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve
from sklearn.neighbors import NearestNeighbors

from models import save_untrained
from vit.model_file import load_model
from vit.reporting import calibration, unfamiliar
from vit.reporting.config import ReportConfig
from vit.reporting.loading import load_split, load_test
from vit.reporting.unfamiliar import detection, load_unfamiliar, report_unfamiliar


@pytest.mark.parametrize("digits", [8, 1, 0])  # with fewer digits, scores are equal more often
def test_metrics_are_those_of_scikit_learn(digits: int) -> None:
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
    perfect = detection(familiar + 10, others)
    assert [perfect[key] for key in ("auroc", "aupr", "fpr95")] == pytest.approx([1, 1, 0])
    # DeLong et al. 1988
    beats = (familiar[:, None] > others).double() + 0.5 * (familiar[:, None] == others)
    error = (beats.mean(dim=1).var() / 300 + beats.mean(dim=0).var() / 200).sqrt().item()
    assert np.ptp(found["auroc_95"]) == pytest.approx(2 * 1.96 * error, rel=0.1)


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unfamiliar")
    return save_untrained(folder, {"embed_dim": 24, "depth": 2, "patch_size": 8})


def test_report_gets_metrics_of_every_kind_of_images(
    untrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unfamiliar, "NOISE", 30)
    monkeypatch.setattr(calibration, "RESAMPLES", 20)
    (tmp_path / "photos").mkdir()
    for number in range(12):
        Image.new("L", (50, 40), 20 * number).save(tmp_path / f"photos/{number}.png")
    saved = load_model(untrained, "cpu", "float32")
    test = load_test(saved).select(torch.arange(100))
    for name, count in (("noise", 30), ("digits", 359), (str(tmp_path / "photos"), 12)):
        images = load_unfamiliar(name, saved, None)
        assert images.pixels().shape == (count, 3, 32, 32)
        part = report_unfamiliar(saved, test, images, ReportConfig(unfamiliar=name))
        found, table = part.numbers, part.table.splitlines()
        assert (found["images"], found["n"]) == (name, count)
        for line, score in zip(
            table[2:], ("maximum softmax", "energy", "nearest neighbours"), strict=True
        ):
            assert line.startswith(score) and f"{found[score]['auroc']:.3f} (" in line
        assert part.pictures["unfamiliar"].shape == (280, 960, 3)
    logits = saved.classifier.logits(test.pixels())
    pair = logits.logsumexp(1), saved.classifier.logits(images.pixels()).logsumexp(1)
    assert found["energy"]["auroc"] == pytest.approx(detection(*pair)["auroc"], abs=2e-3)
    training = load_split(saved, None)[0].pixels()
    nearest = NearestNeighbors(n_neighbors=10).fit(F.normalize(saved.classifier.features(training)))
    shown = [F.normalize(saved.classifier.features(s.pixels())) for s in (test, images)]
    distances = [torch.tensor(-nearest.kneighbors(part)[0][:, 9]) for part in shown]
    expected = detection(*distances)["auroc"]
    assert found["nearest neighbours"]["auroc"] == pytest.approx(expected, abs=2e-3)


def test_unsuitable_images_are_refused(untrained: Path, tmp_path: Path) -> None:
    saved = load_model(untrained, "cpu")
    Image.new("L", (8, 8)).save(tmp_path / "one.png")
    for name, problem in (
        ("digts", "did you mean digits?"),
        (str(tmp_path / "one.png"), "it must be a folder of images or one of noise, cifar10, "),
        (str(tmp_path), "it must be a folder of at least 10 images"),
        ("shapes", "shapes is not allowed; it must be images of other classes"),
    ):
        with pytest.raises(ValueError, match=r"^unfamiliar: ") as error:
            load_unfamiliar(name, saved, None)
        assert problem in str(error.value)
