"""Interventions, compared with hooks, and their ONNX graph in ONNX Runtime."""

import copy
import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from torch import Tensor, nn
from werkzeug.test import Client

from attention_tab import plugin_of
from models import names, with_gates
from small_runs import make_loop, small
from vit.classifier import Classifier
from vit.data.preprocess import Preprocess
from vit.explain.interventions import Interventions, gates_of, logit_lens
from vit.model.attention_model import require_attention
from vit.model.positions import REL_POS
from vit.model.variants import ATTENTION
from vit.model.vit import VisionTransformer
from vit.pretrained.load import load as load_model
from vit.reporting.attention_logging import AttentionLogging
from vit.reporting.live import INPUTS, WEIGHTS_FILE, LiveLog, graph_of, weights_of
from vit.run.tracker import Tracker
from vit.tensorboard_plugin.encoding import decode_live

SMALL = {"img_size": 32, "patch_size": 8, "num_classes": 5, "embed_dim": 48, "num_heads": 3}
RGB = Preprocess((32, 32), (0.5,) * 3, (0.25,) * 3)
NAMES = ("quick", "registers", "timm", "bias", "rope", "relative")
COUNT = 20  # random interventions for each model

Case = tuple[Tensor, Tensor, Tensor]  # images, gates, keep


def ours(**arguments: Any) -> nn.Module:
    return VisionTransformer(**SMALL, in_chans=3, **arguments)


def untrained(name: str) -> nn.Module:
    """A model whose norms have not been trained: many of its weights are equal."""
    torch.manual_seed(0)
    if name == "quick":
        model = copy.deepcopy(load_model("cifar10_quick", "cpu", "float32").model)
        for module in model.modules():
            if isinstance(module, (nn.LayerNorm, nn.BatchNorm2d, nn.Linear, nn.Conv2d)):
                module.reset_parameters()
        return model
    if name == "registers":
        return ours(depth=3, reg_tokens=2, qk_norm=True)
    if name == "timm":
        return timm.models.VisionTransformer(**SMALL, depth=3, global_pool="avg")
    if name in REL_POS:
        return ours(depth=2, reg_tokens=1, rel_pos=name)
    return ours(depth=2, attention=name)


def trained(name: str) -> nn.Module:
    """The same architecture at another step."""
    if name == "quick":
        return load_model("cifar10_quick", "cpu", "float32").model
    model = untrained(name).eval()
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def classifier_of(model: nn.Module) -> Classifier:
    classes = names(model.get_classifier().out_features)
    return Classifier(model.eval(), RGB, classes, torch.device("cpu"), torch.float32)


@functools.cache
def graph(name: str) -> bytes:
    return graph_of(classifier_of(untrained(name)))


def session(content: bytes, weights: bytes) -> onnxruntime.InferenceSession:
    """Load a graph with float32 weights from memory, as a page does."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    files = [WEIGHTS_FILE], [weights], [len(weights)]
    options.add_external_initializers_from_files_in_memory(*files)
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def run(loaded: onnxruntime.InferenceSession, case: Case) -> list[Tensor]:
    inputs = {name: part.float().numpy() for name, part in zip(INPUTS, case, strict=True)}
    return [torch.from_numpy(output) for output in loaded.run(None, inputs)]


def random_case(shape: tuple[int, int], patches: int) -> Case:
    """Some heads muted, some scaled, in every third case a layer removed; some patches left."""
    gates = torch.rand(shape) * (torch.rand(shape) < 0.7)
    gates[torch.rand(shape) < 0.4] = 1
    if torch.rand(()) < 1 / 3:
        gates[torch.randint(shape[0], ())] = 0
    keep = torch.rand(1, patches) < torch.rand(())
    keep[0, torch.randint(patches, ())] = True
    return torch.randn(1, 3, 32, 32), gates, keep


@torch.no_grad()
def differences(name: str, dtype: torch.dtype) -> Tensor:
    """Largest differences of logits, and, in rows of kept tokens, of weights and the lens."""
    model = trained(name)
    stored = np.frombuffer(weights_of(classifier_of(model), dtype), str(dtype).split(".")[1])
    loaded, asked = session(graph(name), stored.astype(np.float32).tobytes()), Interventions(model)
    prefix, found = require_attention(model).num_prefix_tokens, []
    patches = math.prod(require_attention(model).patch_embed.grid(32, 32))
    torch.manual_seed(2)
    for _ in range(COUNT):
        case = random_case(gates_of(model).shape, patches)
        kept = torch.cat([torch.ones(prefix, dtype=torch.bool), case[2][0]])
        rows = torch.cat([torch.ones(1, dtype=torch.bool), kept])
        logits, weights, classes, lens = run(loaded, case)
        expected = asked(*case)
        assert classes.dtype == torch.int32 and classes.shape == lens.shape
        found.append([
            (logits - expected[0]).abs().max(),
            (weights - expected[1])[..., kept, :].abs().max(),
            (lens - expected[3][:, 0])[:, rows].abs().max(),
        ])  # fmt: skip
    return torch.tensor(found).max()


@pytest.mark.parametrize("name", [pytest.param("quick", marks=pytest.mark.slow), *NAMES[1:]])
def test_graph_with_weights_of_another_step_gives_what_torch_gives(name):
    assert differences(name, torch.float32) < 1e-4
    assert 0 < differences(name, torch.float16) < 1e-2


@pytest.mark.parametrize("name", [*NAMES, *ATTENTION])
@torch.no_grad()
def test_ones_change_no_bit_and_gates_scale_heads(name):
    """A layer without heads adds nothing, and the model stays as it is."""
    model, images = trained(name), torch.randn(2, 3, 32, 32)
    interventions, readable = Interventions(model), require_attention(model)
    keep, gates = torch.ones(1, math.prod(readable.patch_embed.grid(32, 32))), gates_of(model)
    found, weights, *lens = interventions(images, gates, keep)
    expected, by_layer, tokens = readable.forward_intermediates(images)
    assert torch.equal(found, expected) and torch.equal(weights, torch.stack(by_layer, dim=1))
    assert all(map(torch.equal, lens, logit_lens(readable.read_tokens, tokens)))
    plain = model(images)
    gates[0], gates[1] = 0, torch.tensor([1, 0.3, 0])
    found, *_ = interventions(images, gates, keep)
    muted = with_gates(model, gates)(images)
    assert torch.equal(model(images), plain)
    scaled = model.blocks[1].attn.proj
    scale = gates[1].repeat_interleave(scaled.in_features // 3)
    scaled.register_forward_pre_hook(lambda _, inputs: (inputs[0] * scale,))
    model.blocks[0].attn.register_forward_hook(lambda _, __, output: torch.zeros_like(output))
    torch.testing.assert_close(found, model(images))
    torch.testing.assert_close(muted, model(images))


@pytest.mark.parametrize("pool", ["token", "avg"])
@torch.no_grad()
def test_hiding_patches_equals_removing_their_tokens(pool):
    model = ours(depth=3, reg_tokens=2, global_pool=pool, fc_norm=False).eval()
    for parameter in model.parameters():
        parameter.normal_(std=0.2)
    images, keep = torch.randn(2, 3, 32, 32), torch.rand(2, 16) < 0.5
    found, _, classes, probabilities = Interventions(model)(images, torch.ones(3, 3), keep)
    tokens, grid = model.embed(images)
    for image, kept in enumerate(keep):
        fewer = torch.cat([tokens[image, :3], tokens[image, 3:][kept]])[None]
        expected, _, layers = model.forward_tokens(fewer, grid)
        torch.testing.assert_close(found[image], expected[0])
        rows = torch.cat([torch.ones(4, dtype=torch.bool), kept])  # what is read, then tokens
        lens = logit_lens(model.read_tokens, layers)
        assert torch.equal(classes[:, image, rows], lens[0][:, 0])
        torch.testing.assert_close(probabilities[:, image, rows], lens[1][:, 0])
    nothing_kept, *_ = Interventions(model)(images, torch.ones(3, 3), torch.zeros(1, 16))
    assert nothing_kept.isfinite().all()


def test_graph_depends_on_no_weight_and_names_no_code():
    content = graph_of(classifier_of(trained("differential")))
    assert content == graph("differential") and len(content) < 100_000 and b".py" not in content


def test_models_of_the_last_steps_that_fit_are_stored(tmp_path, monkeypatch):
    loop = make_loop(small(tmp_path, train={"epochs": 2}, track={"probes": 2, "milestones": 5}))
    loop.tracker = Tracker(tmp_path)
    (logging,) = loop.evaluators = [e for e in loop.evaluators if isinstance(e, AttentionLogging)]
    graph = graph_of(loop.classifier())
    size = len(weights_of(loop.classifier(), torch.float16))
    # Two steps as float16 beside the graph, with room for the last one as float32.
    logging.live = LiveLog((len(graph) + 3.5 * size) / 1e6, planned=5)
    monkeypatch.setattr("vit.reporting.live.graph_of", lambda _: graph)
    expected, inputs, evaluate = {}, torch.randn(2, 3, 32, 32), logging.run

    def watched(classifier: Classifier, step: int) -> Iterator[Any]:
        expected[step] = classifier.forward(inputs)
        yield from evaluate(classifier, step)

    monkeypatch.setattr(logging, "run", watched)
    loop.run()
    loop.tracker.close()
    apps = plugin_of(tmp_path)

    def ask(route: str, **parameters: Any) -> Any:
        return Client(apps[route]).get("/", query_string={"run": ".", **parameters})

    images = ask("/images").json["images"]
    steps = [[at["step"] for at in image["steps"]] for image in images]
    assert steps == [sorted(expected)] * 2 and all(image["has_weights"] for image in images)
    found = ask("/live").json
    spec, last = found["spec"], sorted(expected)[-2:]
    assert (spec["grid"], spec["prefix"], spec["image_size"]) == ([8, 8], 2, [32, 32])
    assert spec["floats"] == size // 2
    assert "the weights of at most 2 of 5 steps fit into 0." in found["note"]
    assert "--track.live_mb 1 stores all" in found["note"]
    assert [(at["step"], at["dtype"]) for at in found["steps"]] == [(at, "float16") for at in last]
    gates, keep = torch.ones(spec["layers"], spec["heads"]), torch.ones(1, 64)
    for step in last:
        weights = np.frombuffer(ask("/live_weights", step=step).data, np.float16)
        loaded = session(ask("/live_graph").data, weights.astype(np.float32).tobytes())
        for image, logits in zip(inputs, expected[step], strict=True):
            difference = run(loaded, (image[None], gates, keep))[0][0] - logits
            assert difference.abs().max() < 1e-2


def test_a_model_that_cannot_be_exported_gives_a_warning(monkeypatch, capsys):
    def fail(_: Classifier) -> bytes:
        raise RuntimeError("no operator\nfor this")

    def why(classifier: Classifier, megabytes: float = 20) -> str:
        log, images = LiveLog(megabytes, 10), torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
        (summary,) = log.summaries(classifier, images, 0)
        assert not [*log.summaries(classifier, images, 1)]
        live = decode_live(stored(summary))
        warning = capsys.readouterr().err
        assert live.spec is None
        assert warning.startswith("warning: the Attention tab cannot run this model: ")
        assert live.note in warning
        return live.note

    plain = classifier_of(untrained("timm"))
    monkeypatch.setattr("vit.reporting.live.graph_of", fail)
    assert why(plain) == "no operator for this"
    assert why(plain, 0.1) == (
        "the weights of at most 0 of 10 steps fit into 0.1 MB; "
        "training with --track.live_mb 3 stores all"
    )
    four = Preprocess((32, 32), (0.5,) * 4, (0.25,) * 4)
    assert why(replace(plain, preprocess=four)).startswith(
        "its settings: channels: 4 is not allowed"
    )
    monkeypatch.setattr("vit.tensorboard_plugin.records.MAX_WEIGHTS", 100)
    assert why(plain).endswith("attention weights are more than 100")
    convolutions = timm.create_model("test_resnet", num_classes=5)
    assert "attention" in why(classifier_of(convolutions))


def test_weights_that_float16_cannot_hold_are_float32_and_diverged_ones_are_left_out(
    monkeypatch, capsys
):
    monkeypatch.setattr("vit.reporting.live.graph_of", lambda classifier: b"graph")
    classifier, images = classifier_of(untrained("timm")), torch.zeros(1, 3, 32, 32).byte()
    floats = sum(tensor.numel() for tensor in classifier.model.state_dict().values())
    bias = classifier.model.get_parameter("blocks.0.attn.qkv.bias")

    def sizes(log: LiveLog, values: list[float], later: int = 0) -> list[int]:
        found = []
        for value in values:
            bias.data[48] = value  # a key's bias changes no weight
            found += [len(stored(s)) for s in log.summaries(classifier, images, 0, later)]
        return found[1:]

    assert sizes(LiveLog(20, 3), [0, 1e5, torch.nan]) == [2 * floats, 4 * floats]
    # Of two steps, with 3.5 times the room of one as float16, only the last one may be float32.
    log = LiveLog(7e-6 * floats, 2)
    assert sizes(log, [1e5], later=1) == []
    assert "cannot run step 0: its weights, " in capsys.readouterr().err
    assert [len(stored(s)) for s in log.summaries(classifier, images, 0)] == [4 * floats]


def stored(summary: Any) -> bytes:
    return summary.value[0].tensor.string_val[0]
