"""Bad input ends in one line and exit code 2, with no traceback, before anything is touched."""

import re
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import torch
import yaml

from vit.cli import parse_eval, parse_train, user_errors
from vit.config import Config, EvalConfig, changed_keys, from_dict, to_dict

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))

# What is typed after train.py, and what the one line must name: key, value, what is allowed.
BAD_FLAGS = [
    ("--model.embed_dim 97", "model.num_heads: 3", "divisor of model.embed_dim=97: 1, 97"),
    ("--model.patch_size 5", "model.patch_size: 5", "1, 2, 4, 8, 16, 32"),
    ("--model.patch_size 64", "model.patch_size: 64", "1, 2, 4, 8, 16, 32"),
    ("--model.class_token false --model.global_pool token", "model.global_pool: token", "avg"),
    ("--model.pos_embed sincos --model.embed_dim 99", "model.embed_dim: 99", "multiple of 4"),
    (
        "--model.embed_dim 2 --model.num_heads 1",
        "model.embed_dim: 2",
        "3 or more with model.stem=conv and model.patch_size=4",
    ),
    ("--model.embed_dim x", "model.embed_dim: 'x'", "a whole number"),
    ("--model.depth 1.5", "model.depth: '1.5'", "a whole number"),
    ("--model.depth 0", "model.depth: 0", "1 to 1000"),
    ("--model.head_dim big", "model.head_dim: 'big'", "a whole number or null"),
    ("--model.stem convolution", "model.stem: 'convolution'", "linear, conv"),
    ("--model.attn_kernel flash", "model.attn_kernel: 'flash'", "auto, math, fused"),
    ("--model.qkv_bias maybe", "model.qkv_bias: 'maybe'", "true or false"),
    ("--model.drop_path_rate 1.0", "model.drop_path_rate: 1.0", "from 0"),
    ("--data.name imagenet", "data.name: 'imagenet'", "cifar10, cifar100, shapes, folder"),
    ("--data.on_bad_image warn", "data.on_bad_image: 'warn'", "error, skip"),
    ("--data.val_size -1", "data.val_size: -1", "0 to 1000000"),
    ("--augment.crop_padding 32", "augment.crop_padding: 32", "0 to 31"),
    ("--optim.lr -1", "optim.lr: -1", "above 0"),
    ("--optim.lr .inf", "optim.lr: inf", "up to 1000000"),
    ("--optim.lr .nan", "optim.lr: nan", "up to 1000000"),
    ("--optim.lr=", "optim.lr: ''", "a number"),
    ("--optim.lr nan", "optim.lr: 'nan'", "a number"),
    ("--optim.warmup 1", "optim.warmup: 1", "from 0"),
    ("--optim.ema_decay 1", "optim.ema_decay: 1", "between 0 and 1, or null"),
    ("--train.accumulate 3", "train.accumulate: 3", "divisor of train.batch_size=128"),
    ("--train.epochs 0", "train.epochs: 0", "1 to 1000000"),
    ("--train.epochs 1000000000000000000", "train.epochs: 1000000000000000000", "1 to 1000000"),
    ("--model.embed_dim 1000000000", "model.embed_dim: 1000000000", "1 to 10000"),
    (f"--optim.lr {'9' * 400}", "optim.lr: '999", "at most 100 characters"),
    ("--augment.mixup .inf", "augment.mixup: inf", "0 to 1000000"),
    ("--model.depth null", "model.depth: null", "is not a whole number\n"),
    ("--train.budget_minutes 0", "train.budget_minutes: 0", "above 0"),
    ("--train.budget_minutes soon", "train.budget_minutes: 'soon'", "a number or null"),
    ("--train.seed -1", "train.seed: -1", "0 to 2^63 - 1"),
    ("--modle.depth 3", "modle.depth", "did you mean model.depth?"),
    ("--model.embed_dims=3", "model.embed_dims", "did you mean model.embed_dim?"),
    ("--depth 3", "depth", "did you mean model.depth?"),
    ("--train.lr 0.1", "train.lr", "did you mean optim.lr?"),
    ("--model.dept 3", "model.dept", "did you mean model.depth?"),
    ("--data shapes", "data: ", "--data.<field>"),
    ("configs/shapes.yaml", "configs/shapes.yaml", "did you mean --config configs/shapes.yaml?"),
    ("--model.depth", "--model.depth", "expected one argument"),
    ("stray", "stray", "no such key"),
    ("--config nowhere.yaml", "config", "nowhere.yaml"),
    ("--config configs", "config: configs", "Is a directory"),
    ("--overwrite.x", "overwrite.x", "no such key"),
    ("--overwite", "overwite", "did you mean overwrite?"),
    ("--config", "--config", "expected one argument"),
]

BAD_FILES = [
    ("model:\n  embed_dims: 96\n", "model.embed_dims", "did you mean model.embed_dim?"),
    ("modle:\n  depth: 3\n", "modle", "did you mean model?"),
    ("model: 3\n", "model", "3"),
    ("model:\n  depth: many\n", "model.depth: 'many'", "a whole number"),
    ("train: [1\n", "config", "line 1, column 8"),
    ("", "config", "`key: value`"),
    ("model:\n  depth: null\n", "model.depth: null", "a whole number"),
    ("model: {depth: 3, depth: 4}\n", "model.depth", "given twice"),
    ("model: &a {depth: *a}\n", "model.depth: a group of keys", "a whole number"),
    ("out: !!python/object:os.system {}\n", "out: the tag !!python/object", "plain values"),
    ("model: {dropout: 0.1}\n", "model.dropout", "no such key"),
    ("[" * 10_000, "config", "nested too deep"),
]


def run(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / script), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def assert_refused(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    for part in parts:
        assert part in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("flags", "given", "allowed"), BAD_FLAGS, ids=[b[0][:40] for b in BAD_FLAGS]
)
def test_bad_flag_is_one_line_that_names_key_value_and_allowed(
    flags: str, given: str, allowed: str, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    assert_refused(run("train.py", "--out", str(out), *flags.split()), given, allowed)
    assert not out.exists()


@pytest.mark.parametrize(
    ("text", "given", "allowed"), BAD_FILES, ids=[b[0][:40] for b in BAD_FILES]
)
def test_bad_file_is_one_line_too(text: str, given: str, allowed: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    assert_refused(run("train.py", "--config", str(file)), given, allowed)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "run"),
        (["runs/nowhere"], "runs/nowhere does not exist"),
        (["x", "--data.rot", "y"], "did you mean data.root?"),
        (["x", "--batch_size", "0"], "batch_size: 0"),
        (["x", "--device", "tpu"], "auto, cpu, cuda"),
        ([str(ROOT / "README.md")], "README.md is not a checkpoint"),
        ([str(ROOT / "configs")], "holds neither"),
        (["--image", "y", "x"], "run: missing; name a run folder or model file first"),
        (["x", "--seed", "-1"], "seed: -1 is not allowed; it must be 0 to 2^63 - 1"),
        (
            ["x", "--faithfulness", "-1"],
            "faithfulness: -1 is not allowed; it must be 0, or 2 to 1000000",
        ),
        (
            ["x", "--faithfulness", "1"],
            "faithfulness: 1 is not allowed; it must be 0, or 2 to 1000000",
        ),
        (["x", "--atention"], "did you mean attention?"),
        (["x", "--attention", "--indices"], "--indices: expected at least one argument"),
        (["x", "--attention", "--indices", "3.5"], "indices: '3.5' is not a whole number"),
        (["x", "--attention", "--indices", "3,17"], "indices: '3,17' is not a whole number"),
        (["x", "--attention", "--indices", "3", "y"], "indices"),
        (["x", "--indices", "3"], "indices: only with --attention"),
        (["x", "--image", "y", "--indices", "3"], "indices: only with --attention"),
        (["x", "--image"], "--image: expected at least one argument"),
        (["x", "--compare"], "--compare: expected one argument"),
        (["x", "--target", "star"], "target: only with --attention or --image"),
        (["x", "--compare", "y", "--target", "star"], "target: only with --attention or --image"),
        (["x", "--attention", "--image", "y"], "image: not together with --attention"),
        (["x", "--attention", "--compare", "y"], "compare: not together with --attention"),
        (["x", "--image", "y", "--compare", "z"], "compare: not together with --image"),
    ],
)
def test_bad_eval_is_one_line(words: list[str], part: str) -> None:
    assert_refused(run("eval.py", *words), part)


def test_missing_data_says_what_was_tried_and_what_to_do(tmp_path: Path) -> None:
    out, data = tmp_path / "run", tmp_path / "data"
    done = run("train.py", "--data.root", str(data), "--data.download", "false", "--out", str(out))
    assert_refused(
        done, "CIFAR10", str(data), "cifar-10-python.tar.gz", "cifar-10-batches-py/",
        "--data.root", "make demo",
    )  # fmt: skip
    assert not out.exists()


@pytest.mark.parametrize(
    "error", [MemoryError("no room"), RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")]
)
def test_memory_that_runs_out_anywhere_is_one_line(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended, user_errors():
        raise error
    assert ended.value.code == 2
    assert (
        capsys.readouterr().err
        == f"error: out of memory; a smaller model or batch takes less: {error}\n"
    )


def test_operation_without_fixed_order_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(SystemExit) as ended, user_errors():
            torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: deterministic: true") and "put_ adds" in error
    assert error.count("\n") == 1


def test_mistake_of_ours_keeps_its_traceback() -> None:
    with pytest.raises(RuntimeError, match="shapes"), user_errors():
        raise RuntimeError("shapes cannot be multiplied")


@pytest.mark.parametrize("script", ["train.py", "eval.py"])
def test_help_names_every_key(script: str) -> None:
    done = run(script, "--help")
    assert done.returncode == 0
    for key in keys(Config if script == "train.py" else EvalConfig):
        assert f"--{key} " in done.stdout


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("image", "picture files to classify"),
        ("indices", "the test images to draw"),
        ("attention", "draw every kind of map"),
        ("compare", "another run or model file"),
        ("target", "the class that is explained"),
        ("faithfulness", "that the maps are measured on"),
    ],
)
def test_help_of_eval_says_what_its_ways_to_look_do(key: str, words: str) -> None:
    about = re.split(r"\n  --", run("eval.py", "--help").stdout)
    (found,) = [part for part in about if part.startswith(f"{key} ")]
    assert words in " ".join(found.split())


def keys(config: type, prefix: str = "") -> list[str]:
    names = []
    for field in fields(config):
        if is_dataclass(field.type):
            names += keys(field.type, f"{prefix}{field.name}.")  # type: ignore[arg-type]
        else:
            names.append(prefix + field.name)
    return names


def test_printed_config_is_a_config_that_gives_the_same_run(tmp_path: Path) -> None:
    printed = run("train.py", "--model.depth", "7", "--print_config")
    file = tmp_path / "printed.yaml"
    file.write_text(printed.stdout)
    again, options = parse_train(["--config", str(file)])
    assert again == parse_train(["--model.depth", "7"])[0]
    assert again.model.depth == 7
    assert options == {"overwrite": False, "allow_changes": False}


def test_later_config_wins_and_flags_win_over_all(tmp_path: Path) -> None:
    first, second = tmp_path / "1.yaml", tmp_path / "2.yaml"
    first.write_text("model: {depth: 2, embed_dim: 48}\n")
    second.write_text("model: {depth: 3}\n")
    words = ["--config", str(first), "--config", str(second)]
    config, _ = parse_train(words)
    assert (config.model.depth, config.model.embed_dim) == (3, 48)
    config, _ = parse_train([*words, "--model.depth", "4"])
    assert (config.model.depth, config.model.embed_dim) == (4, 48)


def test_without_a_config_quick_is_taken_and_with_one_it_is_not(tmp_path: Path) -> None:
    quick = yaml.safe_load((ROOT / "configs" / "quick.yaml").read_text())
    assert parse_train([])[0].out == quick["out"] == "runs/quick"
    assert parse_train([])[0] == Config()  # so that --help shows what is run
    other = tmp_path / "other.yaml"
    other.write_text("out: elsewhere\n")
    assert parse_train(["--config", str(other)])[0] == Config(out="elsewhere")


@pytest.mark.parametrize("file", CONFIGS, ids=[file.stem for file in CONFIGS])
def test_every_recipe_is_whole_and_named_after_its_run(file: Path) -> None:
    config, _ = parse_train(["--config", str(file)])
    assert config.out == f"runs/{file.stem}"
    assert file.read_text().startswith("# ")


def test_config_survives_the_way_through_dictionaries() -> None:
    config, _ = parse_train(["--model.init_values", "0.1", "--optim.clip_grad", "1"])
    assert from_dict(to_dict(config)) == config
    with pytest.raises(ValueError, match="depht"):
        from_dict({"model": {"depht": 3}})


def test_changed_keys_names_key_and_both_values() -> None:
    old, new = to_dict(Config()), to_dict(parse_train(["--model.depth", "7", "--out", "x"])[0])
    assert changed_keys(old, new) == ["model.depth: 4 -> 7", "out: runs/quick -> x"]


def test_eval_flags() -> None:
    run_folder, options = parse_eval(["runs/x", "--data.root", "there", "--probes", "3"])
    assert run_folder == "runs/x"
    assert options.data.root == "there"
    assert options.probes == 3
