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


@pytest.fixture(scope="module")
def page() -> tuple[list[str], dict[str, Any]]:
    """Results that differ from those of the page's Python sessions, and the names they define."""
    runner, names = doctest.DocTestRunner(verbose=False), dict[str, Any]()
    messages: list[str] = []
    for block in re.finditer(r"^```pycon\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL):
        line = TEXT[: block.start(1)].count("\n")
        session = doctest.DocTestParser().get_doctest(block[1], names, PAGE.name, str(PAGE), line)
        runner.run(session, out=messages.append, clear_globs=False)
        names = session.globs
    assert runner.tries >= 40
    return messages, names


def test_python_of_the_page_gives_the_results_that_it_shows(page) -> None:
    assert not page[0], "".join(page[0])


def maps_of_the_model(page: dict[str, Any], target: Tensor) -> dict[str, Tensor]:
    """Every map of the model of two tokens, in the units of the page."""
    weights, tokens, classify, mean = (page[n] for n in ("weights", "tokens", "classify", "mean"))
    gradients = attention_gradients(classify(tokens), weights, target)
    rollout = attention_rollout(weights, **mean)
    _, early = propagate(classify, tokens, target)
    _, late = propagate(lambda x: classify(x, weights[1:]), page["middle"].detach(), target)
    product = smooth(((early + late) / 2).relu()[:, None])[:, 0] * rollout
    called = page["classify_image"], page["image"]
    return {
        "raw": raw_attention(weights, **mean),
        "rollout": rollout,
        "gradient_rollout": gradient_rollout(weights, gradients, **mean),
        "relevance": class_relevance(weights, gradients, **mean),
        "lrp": early,
        "lrp_rollout": product / product.mean(),
        "occlusion": occlusion(*called, (1, 2), target),
        "integrated_gradients": integrated_gradients(*called, target).view(2, 3).sum(dim=1),
        "rise": rise(*called, (1, 2), target, 4, torch.Generator().manual_seed(8)),
    }


def test_the_table_has_every_map_of_both_classes(page) -> None:
    section = TEXT.split("### Side by side")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", section, flags=re.MULTILINE)
    bird, plane = (maps_of_the_model(page[1], torch.tensor([target])) for target in (0, 1))
    assert [kind for kind, _ in rows] == list(bird)
    for kind, cells in rows:
        stated = [float(cell.strip().replace("−", "-")) for cell in cells.split("|")]
        found = torch.cat([bird[kind].flatten(), plane[kind].flatten()]).tolist()
        assert stated == pytest.approx(found, abs=0.005), kind


def test_the_page_explains_every_kind_of_map() -> None:
    table = TEXT.split("## Every kind of map")[1].split("\n## ")[0]
    explained = re.findall(r"^\| \[[^]]+\]\(#[\w×-]+\) `(\w+)`", table, flags=re.MULTILINE)
    assert sorted(explained) == sorted(ALL_KINDS)
