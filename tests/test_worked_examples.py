"""The examples of docs/attention.md give the results that the page shows."""

import doctest
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vit.explain.lrp import propagate, smooth
from vit.explain.references import integrated_gradients, occlusion, rise
from vit.explain.rollout import (
    attention_gradients,
    attention_rollout,
    class_relevance,
    gradient_rollout,
    raw_attention,
)
from vit.registry import ALL_KINDS

PAGE = Path(__file__).resolve().parent.parent / "docs/attention.md"
TEXT = PAGE.read_text(encoding="utf-8")
WEIGHTS = [torch.tensor([[0.5, 0.5], [1, 0]]), torch.tensor([[0.0, 1], [0, 1]])]
TOKENS = torch.tensor([[4.0, -2]])


def failures(page: str) -> list[str]:
    """Run the Python sessions of a page, one after the other; report results that differ."""
    runner = doctest.DocTestRunner(verbose=False)
    names: dict[str, Any] = {}
    messages: list[str] = []
    for block in re.finditer(r"^```pycon\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL):
        line = page[: block.start(1)].count("\n")
        session = doctest.DocTestParser().get_doctest(block[1], names, PAGE.name, str(PAGE), line)
        runner.run(session, out=messages.append, clear_globs=False)
        names = session.globs
    assert runner.tries >= 40
    return messages


def test_python_of_the_page_gives_the_results_that_it_shows() -> None:
    found = failures(TEXT)
    assert not found, "".join(found)


def test_a_wrong_number_on_the_page_is_reported() -> None:
    wrong = TEXT.replace("\n[[0.5625, 0.4375]]\n", "\n[[0.5625, 0.4374]]\n")
    assert "Got:\n    [[0.5625, 0.4375]]" in "".join(failures(wrong))


def classify(tokens: Tensor, layers: list[Tensor] = WEIGHTS) -> Tensor:
    for layer in layers:
        tokens = tokens + tokens @ layer.view(2, 2).T
    logit = tokens.mean(dim=1)
    return torch.stack([logit, -logit], dim=1)


def maps_of_the_model(target: Tensor) -> dict[str, Tensor]:
    """Every map of the model of two tokens, in the units of the page."""
    layers = [layer[None, None].clone().requires_grad_() for layer in WEIGHTS]
    gradients = attention_gradients(classify(TOKENS, layers), layers, target)
    layout: Any = {"readout": "mean", "num_prefix_tokens": 0}
    rollout = attention_rollout(layers, **layout)
    _, early = propagate(classify, TOKENS, target)
    middle = TOKENS + TOKENS @ WEIGHTS[0].T
    _, late = propagate(lambda x: classify(x, WEIGHTS[1:]), middle, target)
    product = smooth(((early + late) / 2).relu()[:, None])[:, 0] * rollout

    image = TOKENS[:, None, None]  # (1, 1, 1, 2): a pixel for each patch

    def classify_image(images: Tensor) -> Tensor:
        return classify(images.flatten(1))

    random = torch.Generator().manual_seed(0)
    return {
        "raw": raw_attention(layers, **layout),
        "rollout": rollout,
        "gradient_rollout": gradient_rollout(layers, gradients, **layout),
        "relevance": class_relevance(layers, gradients, **layout),
        "lrp": early,
        "lrp_rollout": product / product.mean(),
        "occlusion": occlusion(classify_image, image, (1, 2), target),
        "integrated_gradients": integrated_gradients(classify_image, image, target),
        "rise": rise(classify_image, image, (1, 2), target, 2000, random),
    }


def stated_table() -> dict[str, list[float]]:
    """The numbers of the table under "Side by side", by kind: bird (2), then plane (2)."""
    section = TEXT.split("### Side by side")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", section, flags=re.MULTILINE)
    return {
        kind: [float(cell.strip().replace("−", "-")) for cell in cells.split("|")]
        for kind, cells in rows
    }


def test_the_table_has_every_map_of_both_classes() -> None:
    stated = stated_table()
    bird, plane = (maps_of_the_model(torch.tensor([target])) for target in (0, 1))
    assert stated.keys() == bird.keys()
    for kind, numbers in stated.items():
        found = torch.cat([bird[kind].flatten(), plane[kind].flatten()]).tolist()
        within = 0.05 if kind == "rise" else 0.005  # RISE is an estimate
        assert numbers == pytest.approx(found, abs=within), kind


def test_the_page_explains_every_kind_of_map() -> None:
    table = TEXT.split("## Every kind of map")[1].split("\n## ")[0]
    explained = re.findall(r"^\| \[[^]]+\]\(#[\w×-]+\) `(\w+)`", table, flags=re.MULTILINE)
    assert sorted(explained) == sorted(ALL_KINDS)
