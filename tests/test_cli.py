"""Invalid input produces a one-line error and exit code 2, before any file is changed."""

import itertools
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import yaml

from command_line import help_of, refused
from vit.cli import parse_eval, parse_train, user_errors
from vit.data.config import DataConfig
from vit.model.config import ModelConfig
from vit.recipes import RECIPES
from vit.registry import ALL_KINDS
from vit.reporting.config import (
    COMMANDS,
    CompareConfig,
    EvalDataConfig,
    ExportConfig,
    MapsConfig,
    PhotoConfig,
    PredictConfig,
    ReportConfig,
)
from vit.settings import changed_keys, keys
from vit.training.checks import check_config
from vit.training.config import Config, OptimConfig, from_dict, to_dict
from vit.training.train import train

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = sorted(RECIPES.glob("*.yaml"))

# What is typed after train.py, and what the one line must name: key, value, what is allowed.
BAD_FLAGS = [
    ("--model.depth 1.5", "model.depth: 1.5 is not allowed; it must be a valid integer\n"),
    ("--model.depth null", "model.depth: null is not allowed; it must be a valid integer\n"),
    ("--model.stem convolution", "model.stem: convolution is not allowed; it must be 'linear' or"),
    ("--augment.crop_padding 32", "augment.crop_padding: 32 is not allowed; it must be less than"),
    ("--augment.crop_scale 1 0.5", "(1.0, 0.5) is not allowed; it must be the smallest fraction"),
    ("--augment.crop_scale 0.5", "augment.crop_scale: a list is not allowed"),
    ("--data.channels 2", "data.channels: 2 is not allowed; it must be 1 or 3 with data.name="),
    ("--optim.lr=", "optim.lr: '' is not allowed; it must be a valid number"),
    ("--modle.depth 3", "modle.depth: no such key; did you mean model.depth?"),
    ("--depth 3", "depth: no such key; did you mean model.depth?"),
    ("--train.lr 0.1", "train.lr: no such key; did you mean optim.lr?"),
    ("--model.depth", "--model.depth: expected one argument"),
    ("shapes", "shapes: not expected here; settings are --KEY VALUE"),
    ("--config nowhere.yaml", "config not found: nowhere.yaml; the recipes are cifar10, "),
    ("--config shpaes", "config not found: shpaes; did you mean shapes?"),
    ("--overwite", "overwite: no such key; did you mean overwrite?"),
]

# The same after eval.py.
BAD_EVAL = [
    ("", "run: missing; it comes first"),
    ("maps --indices 3", "run: missing"),
    ("x draw", "draw: no such command; it must be one of report, maps, photo, "),
    ("x export pdf", "formats: pdf is not allowed; it must be 'timm', 'onnx', 'torch', 'html' or "),
    ("x --attention --indices 3", "attention: not a setting of report, but of vit-eval RUN maps\n"),
    ("--export=onnx", "export: not a setting of report, but of vit-eval RUN export\n"),
    ("x photo", "the following arguments are required: PHOTO"),
    ("x --indices 3", "indices: not a setting of report, but of vit-eval RUN maps\n"),
    ("x maps --indices", "--indices: expected at least one argument"),
    ("x maps --faithfulness 1", "faithfulness: 1 is not allowed; it must be 0, or 2 or more"),
    ("x predict y --out table.txt", "out: table.txt is not allowed; it must be a .csv file"),
    ("x --data.rot y", "did you mean data.root?"),
]


@pytest.mark.parametrize(("flags", "line"), BAD_FLAGS)
def test_bad_flag_is_one_line_that_names_key_value_and_allowed(flags: str, line: str) -> None:
    refused(flags.split(), line)


@pytest.mark.parametrize(("words", "part"), BAD_EVAL)
def test_bad_words_for_eval_are_one_line(words: str, part: str) -> None:
    refused(words.split(), part, parse=parse_eval)


def test_a_mistake_ends_the_program_in_one_line(tmp_path: Path) -> None:
    words = ["--modle.depth", "3", "--out", str(tmp_path / "out")]
    command = [sys.executable, str(ROOT / "train.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: modle.depth: no such key; did you mean model.depth?\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_missing_data_says_what_was_tried_and_what_to_do(tmp_path: Path) -> None:
    out, data = tmp_path / "run", tmp_path / "data"
    config = Config(out=str(out), data=DataConfig(root=str(data), download=False))
    with pytest.raises(ValueError, match="cifar10") as error:
        train(config)
    for part in (str(data), "cifar-10-python.tar.gz", "cifar-10-batches-py/", "--data.root"):
        assert part in str(error.value)
    assert "make demo" in str(error.value) and not out.exists()


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ValueError("a\n\x1b[31mb"), 2, "error: a ?[31mb\n"),
        (
            MemoryError("no room"),
            2,
            "error: out of memory; use a smaller model or batch: no room\n",
        ),
        (RuntimeError("DataLoader worker (pid 3) is killed"), 2, "fewer data.workers if memory"),
        (RuntimeError("put_ does not have a deterministic implementation"), 2, "; train without"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_errors_of_the_outside_are_one_line(
    error: BaseException,
    code: int,
    line: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended, user_errors():
        raise error
    assert ended.value.code == code
    printed = capsys.readouterr().err
    assert line in printed and printed.count("\n") == 1


def test_mistake_of_ours_keeps_its_traceback() -> None:
    with pytest.raises(RuntimeError, match="shapes"), user_errors():
        raise RuntimeError("shapes cannot be multiplied")


def test_help_of_train_has_each_key_with_its_choices_and_default() -> None:
    text = help_of([], parse_train)
    assert text.startswith("usage: ") and text.splitlines()[1] == ""
    about = dict(re.findall(r"^  --([\w.]+)((?:.|\n {4,})*)", text, re.MULTILINE))
    assert all(len(about[key].split()) > 4 for key in keys(Config))
    words = " ".join(text.split())
    for part in (
        "precision of matrix products: float32 or bfloat16; auto chooses bfloat16 where the "
        "hardware supports it (auto, float32, bfloat16, default: auto)",
        "number of encoder blocks (default: 12)",
        "optim: The optimizer, the learning rate schedule and the loss:",
    ):
        assert part in words


def test_help_of_eval_fits_on_a_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = help_of([])
    assert "RUN [report | maps | photo | predict | heads | compare | export] ..." in text
    for name, (config, function) in COMMANDS.items():
        assert f"  {name:<9}{config.__doc__.splitlines()[0]}\n" in text
        help_text = help_of([name])
        assert help_text == help_of(["runs/x", name]) and len(help_text.splitlines()) <= 25
        for key in keys(config):
            given = key.removesuffix("s").upper() if f"--{key} " not in help_text else f"--{key}"
            assert f"\n  {given} " in help_text
        assert callable(resolve_name(f"vit.reporting.{function}"))
    assert len(text.splitlines()) <= 25
    assert ", ".join(ALL_KINDS) in " ".join(help_of(["maps"]).split())


def test_printed_config_is_a_config_that_gives_the_same_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_train(["--model.depth", "7", "--print_config"])
    assert ended.value.code == 0
    file = tmp_path / "printed.yaml"
    file.write_text(capsys.readouterr().out)
    again, options = parse_train(["--config", str(file)])
    assert again == parse_train(["--model.depth", "7"])[0] and again.model.depth == 7
    assert options == {"overwrite": False, "allow_changes": False}


def test_a_flag_beats_every_file_and_a_later_file_an_earlier(tmp_path: Path) -> None:
    first, second = tmp_path / "1.yaml", tmp_path / "2.yaml"
    first.write_text("out: first\nmodel: {depth: 2, embed_dim: 48}\noptim: {clip_grad: 1}\n")
    second.write_text("out: second\nmodel: {depth: 3}\noptim: {clip_grad: }\n")
    parts = [("--config", str(first)), ("--config", str(second)), ("--model.depth", "4")]
    for order in itertools.permutations(range(3)):
        words = [parts[index] for index in order]
        config, _ = parse_train([*itertools.chain(*words)])
        assert parse_train(["=".join(pair) for pair in words])[0] == config
        second_wins = order.index(1) > order.index(0)
        assert (config.model.depth, config.model.embed_dim) == (4, 48)
        assert config.out == ("second" if second_wins else "first")
        assert config.optim.clip_grad == (None if second_wins else 1)


BUDGETS = """
model: {depth: 6, embed_dim: 48}
budgets:
  5: {model: {depth: 5}, augment: {flip: false}}
  0: {model: {depth: 2}}
  20.5: {}
"""


def test_a_file_says_what_changes_with_the_time_budget(tmp_path: Path) -> None:
    file, budget = tmp_path / "mine.yaml", tmp_path / "budget.yaml"
    file.write_text(BUDGETS)
    words = ["--config", str(file)]
    for minutes, depth in (("null", 6), ("4.99", 2), ("5", 5), ("20", 5), ("60", 6)):
        config, _ = parse_train([*words, "--train.budget_minutes", minutes])
        assert (config.model.depth, config.model.embed_dim) == (depth, 48)
        assert config.augment.flip == (depth != 5)
        budget.write_text(f"train: {{budget_minutes: {minutes}}}\n")
        both = [*words, "--config", str(budget)]
        assert parse_train(["--config", str(budget), *words])[0] == config
        assert parse_train([*both, "--model.depth", "9"])[0].model.depth == 9
        budget.write_text(f"{budget.read_text()}model: {{depth: 7}}\n")
        assert parse_train(both)[0].model.depth == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("budgets: {soon: {}}", "it must be settings by minutes"),
        ("budgets: {2: deep}", "it must be settings by minutes"),
        ("budgets: {0: {model: {depht: 3}}}", "model.depht: no such key; did you mean model.depth"),
        ("model: 3", "model: 3 is not allowed"),
    ],
)
def test_wrong_groups_are_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    words = ["--config", str(file), "--train.budget_minutes", "1", "--model.depth", "4"]
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_train(words)


@pytest.mark.parametrize("name", ["shapes", "shapes.yaml", "configs/shapes", "configs/shapes.yaml"])
def test_a_recipe_is_found_from_any_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shapes").mkdir()  # a folder of that name is no config
    assert parse_train(["--config", name])[0].out == "runs/shapes"
    (tmp_path / "configs").mkdir()
    (tmp_path / "shapes").rmdir()
    (tmp_path / name).write_text("out: mine")
    assert parse_train(["--config", name])[0].out == "mine"


@pytest.mark.parametrize("file", CONFIGS, ids=[file.stem for file in CONFIGS])
def test_every_recipe_is_whole_and_named_after_its_run(file: Path) -> None:
    config, _ = parse_train(["--config", str(file), "--train.budget_minutes", "1"])
    assert (config.out, config.train.budget_minutes) == (f"runs/{file.stem}", 1)
    assert file.read_text().startswith("# ")


def test_without_a_config_quick_is_taken_unless_there_is_another_model(tmp_path: Path) -> None:
    quick = yaml.safe_load((RECIPES / "quick.yaml").read_text())
    assert parse_train([])[0].out == "runs/quick"
    assert parse_train([])[0].model.stem == quick["model"]["stem"] == "conv"
    other = tmp_path / "other.yaml"
    other.write_text("out: elsewhere\n")
    assert parse_train(["--config", str(other)])[0] == Config(out="elsewhere")
    minute = ["--train.budget_minutes", "1"]
    config, _ = parse_train(minute)
    assert (config.model.depth, config.augment.crop_padding) == (3, 0)
    for words in (["--model.name", "timm:resnet18"], ["--model.pretrained", "cifar10_quick"]):
        config, _ = parse_train([*minute, *words])
        assert (config.model.depth, config.augment.crop_padding) == (12, 2)


def test_config_survives_the_way_through_dictionaries() -> None:
    config, _ = parse_train(["--model.init_values", "0.1", "--optim.clip_grad", "1"])
    assert from_dict(to_dict(config)) == config
    with pytest.raises(ValueError, match=r"^model.depht: no such key; did you mean model.depth\?$"):
        from_dict({"model": {"depht": 3}})
    old, new = (to_dict(parse_train(w)[0]) for w in ([], ["--model.depth", "7", "--out", "x"]))
    assert changed_keys(old, new) == ["model.depth: 4 -> 7", "out: runs/quick -> x"]


def test_a_command_has_its_settings_and_report_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--data.root", "there", "--seed", "3", "--flip"]
    options = ReportConfig(data=EvalDataConfig(root="there"), seed=3, flip=True)
    assert parse_eval(["runs/x", *words]) == ("report", "runs/x", options)
    assert parse_eval(["runs/x", "report", *words]) == ("report", "runs/x", options)
    words = ["--head_fusion", "min", "--discard_ratio", "0.9", "--indices", "3", "17"]
    options = MapsConfig(head_fusion="min", discard_ratio=0.9, indices=(3, 17))
    assert parse_eval(["x", "maps", *words]) == ("maps", "x", options)
    options = PhotoConfig(photos=("a.png", "maps"), kinds=("lrp",), target="cat")
    words = ["a.png", "maps", "--kinds", "lrp", "--target", "cat"]
    assert parse_eval(["x", "photo", *words]) == ("photo", "x", options)
    options = PredictConfig(photos=("photos",), flip=True)
    assert parse_eval(["x", "predict", "--flip", "photos"]) == ("predict", "x", options)
    assert parse_eval(["x", "compare", "y", "z"])[2] == CompareConfig(others=("y", "z"))
    assert parse_eval(["x", "export", "onnx", "timm"])[2] == ExportConfig(formats=("onnx", "timm"))
    monkeypatch.chdir(tmp_path)
    Path("maps").mkdir()  # a run may be called like a command
    assert parse_eval(["maps", "maps"]) == ("maps", "maps", MapsConfig())


def test_python_gets_the_same_line_as_the_command_line() -> None:
    line = "^model.depth: 0 is not allowed; it must be greater than or equal to 1$"
    with pytest.raises(ValueError, match=line):
        ModelConfig(depth=0)
    with pytest.raises(ValueError, match=line):
        from_dict({"model": {"depth": 0}})
    with pytest.raises(ValueError, match=line):
        replace(ModelConfig(), depth=0)
    with pytest.raises(ValueError, match=r"^optim.lr: nan is not allowed; it must be a finite num"):
        OptimConfig(lr=float("nan"))
    with pytest.raises(ValueError, match=r"^model: 3 is not allowed; it must be a dictionary"):
        Config(model="3")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ({"embed_dim": 97}, "model.num_heads: 3 does not divide dim=97"),
        ({"patch_size": 5}, "model.patch_size: 5 does not divide img_size=32 x 48"),
        ({"class_token": False}, "model.global_pool: token needs class_token=True; or use avg"),
    ],
)
def test_a_model_that_cannot_be_built_is_refused_before_data_is_read(
    model: dict[str, Any], problem: str
) -> None:
    config = from_dict({"data": {"name": "shapes", "image_size": (32, 48)}, "model": model})
    with pytest.raises(ValueError, match=problem):
        check_config(config)


def test_image_size_is_one_number_or_two(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    for text, expected in (
        ("64", (64, 64)), ("[64, 96]", (64, 96)), ("[64]", (64, 64)), ("null", None),
    ):  # fmt: skip
        file.write_text(f"data: {{image_size: {text}}}")
        config, _ = parse_train(["--config", str(file)])
        assert config.data.image_size == expected
        assert from_dict(to_dict(config)) == config
        words = text.strip("[]").replace(",", "").split()
        assert parse_train(["--data.image_size", *words])[0].data.image_size == expected
    assert from_dict({"data": {"image_size": 64}}).data.image_size == (64, 64)
