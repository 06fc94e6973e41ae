"""Learning from a trained model besides the labels."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from models import save_untrained
from small_runs import STILL, begin, changed, make_state, make_step, small
from vit.commands.train import load_data, train
from vit.config import Config, to_dict
from vit.data.preprocess import Preprocess
from vit.data.shapes import KINDS
from vit.pretrained.load import load as load_model
from vit.pretrained.sources import resolve_pretrained
from vit.run.checkpoint import CHECKPOINT_FOLDER, Checkpoint, save_checkpoint
from vit.training.build import build_step
from vit.training.teacher import may_have_seen, warn_of_seen_images

pytestmark = pytest.mark.usefixtures("few_test_images")
PREPROCESS = Preprocess.from_config(small(Path("unused")).data)


@pytest.fixture
def teacher(tmp_path):
    """A function that saves an untrained model, unless told otherwise one of the run's images."""

    def save(classes=KINDS, preprocess=PREPROCESS, seed=0, **settings):
        config, folder = to_dict(small(tmp_path, **settings)), tmp_path / "teacher"
        about = {key: config[key] for key in ("data", "train")}
        save_untrained(folder, config["model"], preprocess, classes, seed=seed, **about)
        return str(folder / "model.safetensors")

    return save


def test_a_fraction_of_the_target_is_the_softmax_of_the_teacher_on_the_same_images(
    tmp_path, teacher
):
    path = teacher()
    model = load_model(path, "cpu").model
    alone = make_step(small(tmp_path / "alone"))
    taught = make_step(small(tmp_path / "taught", optim={"teacher": path, "teacher_share": 0.3}))
    batch = torch.randint(256, (16, 3, 32, 32), dtype=torch.uint8), torch.arange(16) % len(KINDS)
    images, targets = alone.prepare(*batch)
    same, mixed = taught.prepare(*batch)
    assert_close(same, images, rtol=0, atol=0)
    with torch.no_grad():
        assert_close(mixed, 0.7 * targets + 0.3 * model(images).softmax(dim=1))
    assert (mixed - targets).abs().max() > 0.1
    assert torch.isfinite(taught(*batch)).all()


def test_a_frozen_model_learns_from_the_teacher_too(tmp_path, teacher, capsys):
    """Without a teacher, this run would train on features that are computed once."""
    path = teacher()
    config = small(
        tmp_path / "run",
        augment=STILL,
        optim={"teacher": path},
        train={"freeze": "backbone", "small_share": 0, "epochs": 1},
    )
    alone = make_step(changed(config, optim={"teacher": None}))
    assert alone.features is not None
    images = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
    assert make_step(config).prepare(images, torch.zeros(2, dtype=torch.int64))[1].min() > 0
    train(config)
    assert f"teacher  {path}, 50% of the target" in capsys.readouterr().out
    make_step(config)
    teacher(seed=1)
    with pytest.raises(ValueError, match=rf"^optim.teacher: {path} has changed since the run"):
        make_step(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"classes": tuple("abcdefghij")}, "has the classes a, b, .* but the data "),
        ({"preprocess": replace(PREPROCESS, mean=(0.5,) * 3)}, "normalizes images with mean"),
        ({"preprocess": replace(PREPROCESS, image_size=(64, 64))}, "was trained on images of 64 "),
    ],
)
def test_a_teacher_of_other_images_is_refused(tmp_path, teacher, changes, message):
    path = teacher(**changes)
    with pytest.raises(ValueError, match=rf"^optim.teacher: .*model.safetensors {message}"):
        make_step(small(tmp_path / "run", optim={"teacher": path}))


def test_a_model_with_another_split_may_have_seen_held_out_images():
    own = Config(data={"name": "folder", "val_size": 0.2, "test_fraction": 0.3})
    without = changed(own, data={"val_size": 0})
    data = {"val_size": 0.1}, {"test_fraction": 0.1}, {"name": "table"}
    others = [changed(own, data=changes) for changes in data]
    others.append(changed(own, train={"seed": 1}))
    seen = [may_have_seen(other, own) for other in (own, *others)]
    assert seen == [False, True, True, False, True]
    seen = [may_have_seen(other, without) for other in (own, *others)]
    assert seen == [False, False, True, False, False]  # where only test images are held out


@pytest.mark.parametrize("settings", [{}, {"train": {"seed": 1}}])
@pytest.mark.parametrize("part", ["optim", "model"])
def test_a_model_that_has_seen_held_out_images_gives_a_warning(
    tmp_path, teacher, settings, part, capsys, monkeypatch
):
    path = teacher(**settings)
    key = {"optim": "teacher", "model": "pretrained"}[part]
    config = small(tmp_path / "run", **{part: {key: path}})
    config, source = resolve_pretrained(config, None)
    run = begin(config, source=source)
    build_step(run, load_data(run)[0], source)
    expected = f"{part}.{key}: {path} was trained with another data.val_size"
    assert (expected in capsys.readouterr().err) == bool(settings)
    monkeypatch.setenv("RANK", "1")  # of several processes, the first one says so
    build_step(run, load_data(run)[0], source)
    assert capsys.readouterr().err == ""


def test_a_model_of_other_files_may_have_seen_held_out_images(tmp_path, capsys):
    config, now = small(tmp_path), SimpleNamespace(fingerprint="now")
    for files, warned in (("", False), ("now", False), ("before", True)):
        source = SimpleNamespace(config=config, fingerprint=files)
        warn_of_seen_images("optim.teacher", "it", source, config, now)
        assert ("it was trained with other files" in capsys.readouterr().err) == warned
    table, folder = (Config(data={"name": name}) for name in ("table", "folder"))
    source = SimpleNamespace(config=table, fingerprint="before")
    warn_of_seen_images("optim.teacher", "it", source, folder, now)
    assert "it was trained with other files" in capsys.readouterr().err


def test_an_unfinished_teacher_is_named_as_such(tmp_path):
    folder, config = tmp_path / "teacher", small(tmp_path / "teacher")
    model = make_state(config).model.state_dict()
    (folder / CHECKPOINT_FOLDER).mkdir(parents=True)
    save_checkpoint(folder, Checkpoint(3, to_dict(config), [*KINDS], model, total_steps=9))
    step = make_step(small(tmp_path / "run", optim={"teacher": str(folder)}))
    assert step.teacher.name == f"{folder} (unfinished run, step 3 of 9)"


def test_a_run_cannot_be_its_own_teacher(tmp_path, teacher):
    path = teacher()
    with pytest.raises(ValueError, match=r"^optim.teacher: .* is the run itself"):
        make_step(small(tmp_path / "teacher", optim={"teacher": path}))


def test_a_teacher_that_does_not_take_the_smaller_images_is_refused(tmp_path, teacher):
    path = teacher()
    run = small(
        tmp_path / "run", optim={"teacher": path}, train={"small_scale": 0.7, "small_share": 0.5}
    )
    with pytest.raises(ValueError, match=r"does not take images of 22 x 22 pixels"):
        make_step(changed(run, model={"patch_size": 2}))
