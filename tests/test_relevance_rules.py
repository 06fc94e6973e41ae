"""The benchmark of rules: its gamma rule, and that it leaves the package's own rules alone."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from models import PLAIN
from vit.explain.lrp import RULES, LayerwiseRules, propagate, terms_of_same_sign
from vit.explain.maps import attention_maps
from vit.model.vit import VisionTransformer

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import relevance_rules

    return relevance_rules


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.parametrize("gamma", [0.0, 0.25, 1e9])
def test_gamma_rule_shares_relevance_by_its_formula(bench, gamma):
    x, weight, bias = (
        draw(6).requires_grad_(),
        draw(3, 6, seed=1),
        draw(3, seed=2),
    )
    y = bench.gamma_rule(gamma)(F.linear, x, weight, bias)
    torch.testing.assert_close(y, F.linear(x, weight, bias))
    (gradient,) = torch.autograd.grad(y.sum(), x)
    terms = torch.cat([weight * x.detach(), bias[:, None]], dim=1)
    raised = terms + gamma * terms * (terms * y.detach()[:, None] > 0)
    shares = raised / raised.sum(dim=1, keepdim=True) * y.detach()[:, None]
    torch.testing.assert_close(x.detach() * gradient, shares[:, :-1].sum(dim=0))


def test_rules_are_changed_for_a_while(bench):
    torch.manual_seed(0)
    sizes = {"img_size": (8, 12), "embed_dim": 12, "num_classes": 5, "stem": "conv"}
    vit = VisionTransformer(**(PLAIN | sizes)).eval()
    for parameter in vit.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    images, before = draw(2, 3, 8, 12).float(), dict(RULES)
    expected = attention_maps(vit, images, ["lrp_pixels"])[1]["lrp_pixels"]
    for name, (added, left_out) in bench.VARIANTS.items():
        with bench.rules_changed(added, left_out):
            logits, found = propagate(vit, images)
            maps = bench.relevance_maps(vit, images, logits.argmax(dim=1))
        assert dict(RULES) == before and RULES[F.conv2d] is terms_of_same_sign
        assert {each.shape for each in maps.values()} == {(2, 2, 3)}
        scaled = found.sum(dim=1) / found.sum(dim=1).abs().mean(dim=(1, 2), keepdim=True)
        same = torch.allclose(scaled, expected, rtol=1e-3, atol=1e-3)
        assert same == (name == "the rules of vit.explain.lrp"), name
    with bench.rules_changed({}, tuple(RULES)), LayerwiseRules():
        assert not RULES
