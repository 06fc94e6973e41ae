"""Variants of attention: their formulas, everything that uses them, and variants from a file.

Shapes: B images, H heads, N tokens, d head width.
"""

import math
import pickle
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from timm.layers.diff_attention import DiffAttention
from torch import Tensor, nn
from torch.testing import assert_close

from models import PLAIN, draw, randomize
from small_runs import UNIFORM, changed, small
from vit.attention_check.trial import check_attention
from vit.classifier import Classifier
from vit.cli import eval_main, train_main
from vit.commands.check import check
from vit.commands.train import say_what_fails, train
from vit.config import Config, OptimConfig, to_dict
from vit.data.images import ImageSet
from vit.data.preprocess import Preprocess
from vit.explain.kinds import ALL_KINDS
from vit.explain.lrp import propagate, token_relevance
from vit.explain.maps import MAP_KINDS
from vit.explain.statistics import attention_entropy, sink_mass
from vit.model import attention, variants
from vit.model.attention import (
    Grid,
    MultiHeadSelfAttention,
    causal_mask,
    masked_softmax,
    scaled_dot_product_attention,
)
from vit.model.config import ModelConfig
from vit.model.positions import REL_POS
from vit.model.variants import ATTENTION, attention_code, find_attention, load_attention
from vit.model.vit import VisionTransformer
from vit.model.whole_attention import stores_results
from vit.pretrained.load import load
from vit.reporting.attention_records import attention_records
from vit.reporting.export_formats import FORMATS
from vit.run.checkpoint import checkpoint_paths, read_checkpoint, save_checkpoint
from vit.seeding import generator
from vit.training.optim import build_optimizers
from vit.training.start import check_config

pytestmark = pytest.mark.usefixtures("few_test_images")
ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/variants.md").read_text(encoding="utf-8")
NAMES = [name for name in ATTENTION if name != "dot"]
with_names = pytest.mark.parametrize("name", NAMES)
MASK = causal_mask(9).clone()
MASK[4] = False  # a query that may attend to nothing
SMALL = PLAIN | {
    "img_size": 32, "num_classes": 10, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3
}  # fmt: skip
POOLED = {"class_token": False, "global_pool": "avg"}


def attend(name: str, mask: Tensor | None, query: Tensor, key: Tensor, value: Tensor):
    found = find_attention(name)
    torch.manual_seed(0)
    function = found(query.shape[1], query.shape[-1]).double() if isinstance(found, type) else found
    return function(query, key, value, mask, nn.Identity())


def softmax(scores: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    exponentials = np.exp(scores) * allowed
    total = exponentials.sum(-1, keepdims=True)
    return exponentials / np.where(total > 0, total, 1)


@pytest.mark.parametrize("mask", [None, MASK], ids=["no mask", "mask"])
def test_cosine_and_sigmoid_are_their_formulas(mask):
    qkv = draw(3, 2, 3, 9, 4)
    q, k, v = qkv.numpy()
    allowed = np.ones((9, 9), bool) if mask is None else mask.numpy()
    product = np.einsum("bhnd,bhmd->bhnm", q, k)
    lengths = np.linalg.norm(q, axis=-1)[..., None] * np.linalg.norm(k, axis=-1)[..., None, :]
    expected = {
        "cosine": softmax(10 * product / lengths, allowed),  # a temperature of 0.1 at the start
        "sigmoid": allowed / (1 + np.exp(-(product / 2 - np.log(9)))),
    }
    for name, weights in expected.items():
        output, found = attend(name, mask, *qkv)
        # The logarithm of the temperature is a float32 number.
        assert_close(found, torch.from_numpy(weights), rtol=0, atol=1e-6)
        assert_close(output, torch.from_numpy(weights @ v), rtol=0, atol=1e-6)


@pytest.mark.parametrize("mask", [None, causal_mask(9)], ids=["no mask", "mask"])
def test_differential_attention_is_timms(mask):
    ours = MultiHeadSelfAttention(24, 3, attention=ATTENTION["differential"]).double()
    theirs = DiffAttention(24, 3, qkv_bias=True).double()
    theirs.lambda_init = 0.8
    state = randomize(ours, 0.5).state_dict()
    theirs.load_state_dict(
        {
            **{key: state[key] for key in ("qkv.weight", "qkv.bias", "proj.weight", "proj.bias")},
            "sub_norm.weight": state["attention.norm.weight"],
            **{
                f"lambda_{key}": state[f"attention.lambdas.{number}"]
                for number, key in enumerate(("q1", "k1", "q2", "k2"))
            },
        }
    )
    x = draw(2, 9, 24)
    output, weights = ours(x, mask, need_weights=True)
    expected = theirs(x, attn_mask=None if mask is None else mask.expand(2, 1, 9, 9))
    assert_close(output, expected, rtol=0, atol=1e-6)  # timm computes λ in float32
    assert (weights < 0).any() and (mask is None or not weights[..., ~mask].any())
    sums = weights.sum(dim=-1)
    assert_close(sums, sums[:1, :1, :1].expand_as(sums))  # 1 - λ
    output, weights = attend("differential", MASK, *draw(3, 2, 3, 9, 4))
    assert not output[:, :, 4].any() and output.isfinite().all() and weights.isfinite().all()


@pytest.mark.parametrize("name", ATTENTION)
def test_everything_that_reads_attention_reads_a_variant(name, tmp_path, monkeypatch):
    """Or the function that most models use, after it was edited."""
    released = attention.scaled_dot_product_attention

    def edited(query, *others):
        return released(3 * query, *others)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", edited)
    model = randomize(VisionTransformer(**SMALL, attention=name), 0.3)
    preprocess = Preprocess((32, 32), (0.5,) * 3, (0.25,) * 3)
    classes = tuple("abcdefghij")
    images = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8)
    classifier = Classifier(model, preprocess, classes, torch.device("cpu"), torch.float32)
    inputs = classifier.normalize(images)
    with torch.no_grad():
        expected, weights = model(inputs, need_weights=True)

    logits, maps = classifier.maps(images, tuple(MAP_KINDS))
    assert_close(classifier.logits(images), expected)
    assert_close(logits, expected)
    assert all(each.isfinite().all() and each.std() > 0 for each in maps.values())
    assert (maps["rollout"] >= 0).all()
    for measure in (attention_entropy, sink_mass):
        assert (measure(list(weights)) >= 0).all() and (measure(list(weights)) <= 1 + 1e-6).all()
    labels = torch.zeros(4, dtype=torch.int64)
    ((_, records),) = attention_records(classifier, ImageSet(images, labels, classes))
    stored = np.stack([record.weights for record in records], axis=1)
    assert_close(torch.from_numpy(stored), weights, rtol=0, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        close = model(inputs).float()
    assert (close - expected).abs().max() < 0.1 * expected.abs().max()
    FORMATS["torch"].write(classifier, ModelConfig(attention=name), tmp_path / "model.pt2")
    assert_close(FORMATS["torch"].load(tmp_path / "model.pt2")(inputs), expected)


@pytest.mark.parametrize(
    ("name", "rel_pos"),
    [*((name, "none") for name in NAMES), *(("dot", kind) for kind in REL_POS if kind != "none")],
)
def test_relevance_of_a_variant_adds_up_to_the_logit(name, rel_pos):
    own = {"attention": name, "rel_pos": rel_pos, "pos_embed": "none"}
    model = VisionTransformer(**(SMALL | POOLED), **own).double()
    for key, parameter in randomize(model, 0.3).named_parameters():
        if key.endswith("bias") or "rel_pos.value" in key:  # added to sums
            nn.init.zeros_(parameter)
    images = draw(2, 3, 32, 32)
    target = torch.tensor([3, 7])
    logits, relevance = propagate(model, images, target)
    chosen = logits.gather(1, target[:, None])[:, 0]
    assert_close(relevance.sum(dim=(1, 2, 3)), chosen, rtol=1e-8, atol=1e-8)
    _, (tokens,), weights = token_relevance(model, images, [target])
    assert_close(tokens.sum(dim=-1), chosen.expand(2, 2), rtol=1e-8, atol=1e-8)
    assert not any(layer.requires_grad for layer in weights)


@with_names
def test_parameters_of_a_variant_have_no_weight_decay(name):
    model = VisionTransformer(**SMALL, attention=name)
    own = {p for key, p in model.named_parameters() if ".attn.attention." in key}
    assert bool(own) == isinstance(ATTENTION[name], type)
    for optimizer in build_optimizers(model, OptimConfig(name="muon", weight_decay=0.1)):
        for group in optimizer.param_groups:
            assert group["weight_decay"] == 0 or not own & set(group["params"])


# --- variants from a file ---

CUBE = """
def cube(query, key, value, mask, dropout):
    weights = (query @ key.transpose(-2, -1)).pow(3).softmax(dim=-1)
    return dropout(weights) @ value, weights
"""


def small_run(out: Path, attention: str) -> Config:
    return small(
        out,
        data={"train_size": 64, "val_size": 16},
        model={"depth": 1, "attention": attention},
        train={"epochs": 1, "batch_size": 32, "accumulate": 1},
        track={"probes": 0},
    )


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget afterwards what a test registers."""
    monkeypatch.setattr("vit.model.variants.ATTENTION", dict(ATTENTION))


def test_a_model_file_names_a_variant_and_contains_no_code(tmp_path, registry, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run, file = tmp_path / "run", tmp_path / "code/mine.py"
    file.parent.mkdir()
    file.write_text(CUBE)
    train(small_run(run, "code/mine.py:cube"))
    classifier = load(run)
    assert classifier.model.blocks[0].attn.attention.__name__ == "cube"
    assert b"softmax" not in (run / "model.safetensors").read_bytes()

    del variants.ATTENTION["mine.py:cube"]
    file.unlink()
    message = "attention: mine.py:cube is not loaded; name the file with --model.attention FOLDER/"
    with pytest.raises(ValueError, match=message):
        load(run)

    (tmp_path / "mine.py").write_text(CUBE.replace("weights = ", "# a comment\n    weights  =  "))
    load_attention("mine.py:cube")
    photo = np.zeros((32, 32, 3), np.uint8)
    assert load(run).predict(photo) == classifier.predict(photo)
    assert "has changed" not in capsys.readouterr().err

    file.write_text(CUBE.replace("pow(3)", "pow(5)"))
    load_attention("code/mine.py:cube")
    for path in (run, checkpoint_paths(run)[-1]):
        load(path)
        assert "mine.py:cube attention has changed" in capsys.readouterr().err
    (run / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"\(the code of code/mine.py:cube has changed\)"):
        train(small_run(run, "code/mine.py:cube"), allow_changes=True)


@pytest.mark.slow
def test_only_a_file_that_the_caller_names_is_executed(tmp_path, registry, monkeypatch):
    """Not one that a config in a run folder, a model file or a checkpoint names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(CUBE)
    first = small_run(tmp_path / "first", "mine.py:cube")
    train(first)
    del variants.ATTENTION["mine.py:cube"]

    run, proof = tmp_path / "run", tmp_path / "proof"
    plain = small_run(run, "dot")
    fine = changed(plain, model={"pretrained": "first"})
    hostile = changed(fine, model={"attention": "run/data/mine.py:cube"})
    shutil.copytree(first.out, run)
    (run / "data").mkdir()
    (run / "data/mine.py").write_text(
        f"import pathlib\ndef hostile(x=pathlib.Path({str(proof)!r}).touch()): pass\n{CUBE}"
    )
    (run / "model.safetensors").unlink()
    (run / "config.yaml").write_text(yaml.safe_dump(to_dict(hostile)))
    (path,) = checkpoint_paths(run)
    save_checkpoint(run, replace(read_checkpoint(path), config=hostile))
    message = "model.attention: mine.py:cube is not loaded"
    for config, overwrite in ((fine, False), (fine, True), (plain, False)):
        with pytest.raises(ValueError, match=f"{message}|unfinished run with other data"):
            train(config, overwrite)
    for stored in (run, path, run / "config.yaml"):
        with pytest.raises(ValueError, match=r"is not loaded|is not a checkpoint"):
            load(stored)
    assert not proof.exists()

    # A file of the same name that the caller names takes its place, whatever its folder.
    named = changed(fine, model={"attention": "mine.py:cube"})
    train(replace(named, out="second"))
    train(named, overwrite=True)
    (run / "model.safetensors").unlink()
    train(named)  # resumes
    assert not proof.exists()
    train(replace(hostile, out="third"))
    assert proof.exists()  # it would have run


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine.py:cubes", "mine.py has no function or class 'cubes'; .*; did you mean"),
        ("mine.py", "mine.py has no function or class ''; it defines cube"),
        ("broken.py:cube", r"broken.py, line 2: invalid syntax"),
        ("cosin", "cosin is not known here; it must be one of dot, .*; did you mean cosine[?]$"),
    ],
)
def test_an_attention_that_cannot_be_loaded_is_refused(name, message, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(CUBE)
    (tmp_path / "broken.py").write_text("x = 1\ndef cube(:\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"^model.attention: {message}"):
        load_attention(name)


MISTAKES = {
    "shapes .1, 1, 12. and .1, 3, 5, 5.": "return (weights @ value)[:, :, :1], weights",
    "mat1 and mat2 shapes": "return (weights @ value).mT, weights",
    "RuntimeError: mat.*|RuntimeError: Exp.*": "return (query @ key) @ value, weights",
    "an output that does not depend on the weights": "return weights @ value, weights.mT",
    "numbers that are not finite": "return weights.log() @ value, weights.log().log()",
}
OWN = """import torch.nn.functional as F
def mine(query, key, value, mask, dropout):
    weights = (query @ key.mT).softmax(-1)
    {}
"""


def write_own(path: Path, line: str):
    """Write a variant and return it."""
    path.write_text(OWN.format(line))
    return load_attention(f"{path}:mine")


@pytest.mark.parametrize("problem", MISTAKES)
def test_an_attention_that_does_not_fit_is_refused_before_training(
    problem, tmp_path, registry, monkeypatch
):
    """Whether it is a variant or the function that was edited; the line of the file is named."""
    mine = write_own(tmp_path / "wrong.py", MISTAKES[problem])
    line = 4 if "Error" in problem else 2
    for name in ("wrong.py:mine", "dot"):
        message = f"^model.attention: {name} gives .*({problem}).*[(]wrong.py, line {line}[)]"
        with pytest.raises(ValueError, match=message):
            check_attention(ModelConfig(attention=name, num_heads=3, embed_dim=12), (1, 5))
        with pytest.raises(ValueError, match=f"^model.attention: {name} gives "):
            check_config(small_run(tmp_path / "run", name))
        monkeypatch.setattr(attention, "scaled_dot_product_attention", mine)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("return weights @ value, weights", "attention fails: mask; see "),
        ("weights = (query @ key.mT).softmax(-2); return weights @ value, weights",
         "attention fails: rows of weights sum to 1, mask; see "),
        ("weights = weights - 0.5; return weights @ value, weights",
         "attention fails: rows of weights sum to 1, mask; see "),
        ("weights = 0 * weights.detach() + 0.2; return weights @ value, weights",
         "own.py:mine: maps that need gradients of its constant weights are empty"),
        # More keys than the check has tokens.
        ("weights = query @ key.mT; few = weights.topk(16).values.min(-1, keepdim=True).values; "
         "weights = weights.masked_fill(weights < few, float('-inf')).softmax(-1); "
         "return weights @ value, weights", ""),
    ],
)  # fmt: skip
def test_what_is_unusual_about_weights_is_said(line, words, tmp_path, registry, capsys):
    """Once, also with images of two sizes."""
    write_own(tmp_path / "own.py", line)
    config = small_run(tmp_path / "run", "own.py:mine")
    check_config(config)
    say_what_fails(config.model)
    said = "".join(capsys.readouterr())
    assert said.count(words) == 1 if words else not said, said


def test_released_attention_is_not_checked_before_training(tmp_path, capsys):
    for name in ("dot", "cosine"):
        config = small_run(tmp_path / "run", name)
        check_config(config)
        say_what_fails(config.model)
    assert not "".join(capsys.readouterr())


def test_a_function_of_a_head_may_take_no_dropout_and_no_mask(tmp_path, registry):
    heads = [torch.randn(2, 3, 5, 4, generator=generator(number, "heads")) for number in range(3)]
    keep = torch.ones(2, 1, 1, 5, dtype=torch.bool)
    expected = attention.scaled_dot_product_attention(*heads)
    for number, arguments in enumerate(
        (
            "query, key, value",
            "query, key, value, mask=None",
            "query, key, value, scale=1",
            "query, key, value, mask=None, causal=False",
            "query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False",  # as torch's
        )
    ):
        file = tmp_path / f"few{number}.py"
        code = OWN.format("return weights @ value, weights").replace(
            "query, key, value, mask, dropout", arguments
        )
        file.write_text(code.replace(".softmax(-1)", ".div(2).softmax(-1)"))
        mine = pickle.loads(pickle.dumps(load_attention(f"{file}:mine")))
        assert_close(mine(*heads, None, nn.Identity()), expected)
        with pytest.raises(ValueError, match="attn_drop_rate must be 0 with mine, which takes no"):
            mine(*heads, None, nn.Dropout(0.1))
        with_bias = ModelConfig(attention=f"few{number}.py:mine", rel_pos="bias")
        if "mask" not in arguments:
            with pytest.raises(ValueError, match=r"^model\.rel_pos: bias .* takes no mask"):
                check_attention(with_bias, (2, 3), 1)
            with pytest.raises(ValueError, match="mine takes no mask, so tokens cannot be hidden"):
                mine(*heads, keep, nn.Identity())
        rows = check(mine, with_cost=False)  # which builds a module of it
        failed = [row.property for row in rows if row.result == "failed"]
        assert failed == (["mask"] if "mask" in arguments else [])  # which it ignores
        dropping = ModelConfig(attention=f"few{number}.py:mine", attn_drop_rate=0.1)
        with pytest.raises(ValueError, match=r"^model\.attn_drop_rate: 0\.1 is not allowed"):
            check_attention(dropping, (2, 3), 1)
        before = attention_code(ModelConfig(attention=f"few{number}.py:mine"))
        file.write_text(code)
        load_attention(f"{file}:mine")
        assert before and attention_code(ModelConfig(attention=f"few{number}.py:mine")) != before


TABLE = """
import torch
class Table(torch.nn.Module):
    def __init__(self, num_heads, head_dim):
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(65, 65))
    def forward(self, query, key, value, mask, dropout):
        weights = (query @ key.mT + self.table).softmax(-1)
        return weights @ value, weights
"""


def test_attention_is_checked_with_all_numbers_of_tokens_of_a_run(tmp_path, registry):
    (tmp_path / "table.py").write_text(TABLE)
    load_attention(f"{tmp_path}/table.py:Table")
    whole = replace(small_run(tmp_path / "run", "table.py:Table"), model=ModelConfig(
        attention="table.py:Table", patch_size=4
    ))  # fmt: skip
    check_config(changed(whole, train={"small_share": 0.0}))
    for share, scale, patch in ((0.5, 0.75, 4), (0.0, 1.0, 8)):
        sizes = {"small_share": share, "small_scale": scale}
        with pytest.raises(ValueError, match=r"\(table\.py, line 8\)") as caught:
            check_config(changed(whole, train=sizes, model={"patch_size": patch}))
        assert str(caught.value).endswith("no fewer") == (share > 0)


def test_uniform_attention_is_trained_and_logged(tmp_path, registry, monkeypatch):
    """With queries, keys and a matrix that the loss does not depend on."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "uniform.py").write_text(UNIFORM)
    load_attention("uniform.py:Uniform")
    config = small_run(tmp_path / "run", "uniform.py:Uniform")
    track, optim = {"probes": 2}, {"name": "muon"}
    train(changed(config, model={"qk_norm": True}, track=track, optim=optim))
    classifier = load(tmp_path / "run")
    images = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
    _, maps = classifier.maps(images, tuple(ALL_KINDS))
    assert all(each.isfinite().all() for each in maps.values())
    assert not maps["relevance"].any() and maps["lrp"].any() and maps["rollout"].any()
    assert (tmp_path / "run/eval/report.json").exists()


def test_the_page_and_the_help_name_all_variants():
    text = " ".join((ModelConfig.__doc__ or "").split())
    about = text.partition(" attention: ")[2].partition("my_attention.py")[0]
    assert all(name in about and f"| `{name}` |" in PAGE for name in ATTENTION)


@pytest.mark.slow
def test_the_exercise_of_the_page(tmp_path, registry, monkeypatch, capsys):
    """Each command is run as it stands, on few images and with a small model."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    exercise = PAGE.partition("## Write one of your own")[2]
    dot, own, compare = re.findall(r"^    (vit-(?:train|eval) .*)$", exercise, flags=re.MULTILINE)
    (tmp_path / "my_attention.py").write_text(code)
    small = (
        "--data.name shapes --data.train_size 64 --data.val_size 16 --train.batch_size 32 "
        "--track.probes 0 --track.live_mb 0 --model.embed_dim 24 --model.depth 1 "
        "--model.patch_size 8"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", f"{dot} {small} --train.processes 1".split())
    train_main()
    words = f"{own.removeprefix('vit-train ')} {small} --train.processes 2"  # which inherit it
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *words.split()], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert ", my_attention.py:top8 attention" in done.stdout

    monkeypatch.setattr(sys, "argv", compare.split())
    eval_main()
    table = capsys.readouterr().out
    assert "McNemar" in table and "top8" in table and "dot" in table


class Placed(nn.Module):
    """Uniform attention that records where its patches are."""

    def __init__(self, num_heads: int, head_dim: int, grid: Grid, num_prefix_tokens: int) -> None:
        super().__init__()
        self.built, self.places = (grid, num_prefix_tokens), []

    def forward(self, query, key, value, mask, dropout, num_prefix_tokens: int, grid: Grid):
        self.places.append((grid, num_prefix_tokens))
        return uniform(query, key, value, grid)


def uniform(query, key, value, grid: Grid):
    assert query.shape[-2] == 2 + math.prod(grid)
    weights = torch.full((*query.shape[:-1], key.shape[-2]), 1 / key.shape[-2])
    return weights @ value, weights


class WholePlaced(nn.Module):
    def __init__(self, dim: int, num_heads: int, grid: Grid) -> None:
        super().__init__()
        self.built, self.places = (grid, 2), []

    def forward(self, x: Tensor, num_prefix_tokens: int, grid: Grid):
        self.places.append((grid, num_prefix_tokens))
        return x, uniform(x[:, None].expand(-1, 3, -1, -1), x[:, None], x[:, None], grid)[1]


@pytest.mark.parametrize("attention", [Placed, uniform, WholePlaced])
def test_attention_is_told_the_grid(attention):
    """The constructor that of the model's images, and forward that of each image."""
    sizes = {"img_size": (8, 12), "patch_size": 4, "in_chans": 3, "num_classes": 10}
    sizes |= {"embed_dim": 12, "depth": 1, "num_heads": 3, "reg_tokens": 1}
    model = VisionTransformer(**sizes, attention=attention)
    for size in ((8, 12), (16, 8)):
        model(torch.zeros(1, 3, *size), need_weights=True)
    if attention is uniform:  # which asserts
        return
    attn = model.blocks[0].attn
    module = attn.attention if attention is Placed else attn.module
    assert module.built == ((2, 3), 2)
    assert module.places[-2:] == [((2, 3), 2), ((4, 2), 2)]


@pytest.mark.parametrize(("hidden", "words"), [
    ("~mask", r"TypeError: .*[(]own.py, line 4[)]"),
    ("(mask == 0)", "does not depend on its float mask"),
])  # fmt: skip
def test_an_attention_that_adds_no_float_mask_is_refused_with_a_bias(
    hidden, words, tmp_path, registry
):
    line = f"return (weights if mask is None else weights * {hidden}) @ value, weights"
    write_own(tmp_path / "own.py", line)
    config = small_run(tmp_path / "run", "own.py:mine")
    check_config(config)
    with pytest.raises(ValueError, match=f"own.py:mine gives .*{words}"):
        check_config(changed(config, model={"rel_pos": "bias"}))


class Bilinear(nn.Module):
    """Scores with a matrix as wide as a head."""

    def __init__(self, num_heads, head_dim):
        super().__init__()
        self.matrix = nn.Parameter(torch.eye(head_dim))

    def forward(self, query, key, value, mask, dropout):
        self.weights = masked_softmax(query @ self.matrix @ key.mT, mask)
        return dropout(self.weights) @ value, self.weights


def test_a_head_whose_width_positions_change_is_refused_before_training(monkeypatch):
    monkeypatch.setitem(ATTENTION, "mine", Bilinear)
    for kind in ("none", "bias", "rope", "relative"):
        model = ModelConfig(attention="mine", num_heads=3, embed_dim=12, rel_pos=kind)
        refused = pytest.raises(ValueError, match="gives RuntimeError: ")
        with refused if kind == "relative" else nullcontext():
            check_attention(model, (2, 3))
    tiny = {"img_size": 8, "in_chans": 3, "num_classes": 2}
    for own in ("differential", find_attention("differential")):
        with pytest.raises(ValueError, match="rel_pos: rope does not fit differential attention"):
            VisionTransformer(**tiny, rel_pos="rope", attention=own)
    with pytest.raises(ValueError, match="pass a function or a class, not an object of partial"):
        VisionTransformer(**tiny, attention=partial(scaled_dot_product_attention))


@pytest.mark.parametrize("name", ["mine", "cosine", "torch.nn:MultiheadAttention", "dot"])
def test_user_attention_runs_in_one_thread(name, monkeypatch):
    """It may store what it computes, as `Bilinear` does."""
    monkeypatch.setitem(ATTENTION, "mine", Bilinear)
    tiny = {"img_size": 8, "in_chans": 3, "num_classes": 2, "embed_dim": 12, "depth": 1}
    model = VisionTransformer(**tiny, attention=name)
    assert stores_results(model) == (name in ("mine", "torch.nn:MultiheadAttention"))


def test_files_of_one_name_in_two_folders_are_told_apart(tmp_path, registry, capsys):
    for folder, factor in (("one", 1), ("two", 2)):
        (tmp_path / folder).mkdir()
        code = OWN.format(f"return weights @ value * {factor}, weights")
        code += "\n\nclass Mine(F.torch.nn.Module):\n    def forward(self, x):\n        return x\n"
        (tmp_path / folder / "apart.py").write_text(code)
    for folder, is_other in (("one", False), ("one/../one", False), ("two", True)):
        for name in ("mine", "Mine"):
            load_attention(str(tmp_path / folder / f"apart.py:{name}"))
            warning = f"apart.py:{name} now means the one in {tmp_path}/{folder}/apart.py, not in"
            assert (warning in capsys.readouterr().err) == is_other
    windows = find_attention("folder\\apart.py:mine")  # as a run that was trained there names it
    assert windows is find_attention("apart.py:mine")


class Ordered(nn.Module):
    """A head whose constructor has another order, and only names."""

    def __init__(self, *, head_dim: int, num_heads: int) -> None:
        super().__init__()
        self.scale = head_dim**-0.5

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, dropout: Any):
        weights = (query @ key.mT * self.scale).softmax(-1)
        return weights @ value, weights


def three(query: Tensor, key: Tensor, value: Tensor):
    return scaled_dot_product_attention(query, key, value)


def test_a_module_of_attention_takes_what_a_model_takes():
    expected = MultiHeadSelfAttention(12, 3)
    x = torch.randn(2, 5, 12, generator=generator(0, "tokens"))
    for mine in (Ordered, three):
        module = MultiHeadSelfAttention(12, 3, attention=mine)
        module.load_state_dict(expected.state_dict())
        assert_close(module(x), expected(x))
