"""The documentation: links lead somewhere, also on the site, and code gives what it shows."""

import doctest
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

import vit
from vit.explain.lrp import propagate, smooth
from vit.explain.references import integrated_gradients, occlusion, rise
from vit.explain.rollout import (
    attention_gradients,
    attention_rollout,
    class_relevance,
    gradient_rollout,
    raw_attention,
)

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("docs/*.ipynb")])
SITE = runpy.run_path(str(ROOT / "docs/write_site.py"))
REPOSITORY = "https://example.com/repository"


def text_of(page: Path) -> str:
    """A page without its code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.DOTALL)


def links(page: Path) -> list[str]:
    """Links and pictures of a page, but not those to other sites."""
    found = re.findall(r"\]\(([^)\s]+)\)", text_of(page))
    return [link for link in found if not link.startswith(("https://", "http://", "data:"))]


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", text_of(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere_and_every_picture_is_shown():
    shown = set()
    for page in PAGES:
        for link in links(page):
            file, _, anchor = link.partition("#")
            target = (page.parent / file).resolve() if file else page
            assert target.exists(), (page, link)
            assert not anchor or anchor in anchors(target), (page, link)
            shown.add(target)
    assert {*(ROOT / "docs/images").iterdir()} <= shown


def test_links_of_the_site_stay_on_it_or_lead_to_the_repository(tmp_path):
    SITE["write_pages"](tmp_path, REPOSITORY)
    pages = sorted(tmp_path.rglob("*.md"))
    for page in pages:
        for link in links(page):
            target = (page.parent / link.partition("#")[0]).resolve() if link[0] != "#" else page
            assert target.is_file() and target.is_relative_to(tmp_path.resolve()), (page, link)
    elsewhere = re.findall(rf"\]\({REPOSITORY}/blob/main/([^)#]+)", "".join(map(text_of, pages)))
    assert {"vit/model/attention.py", "configs"} <= {*elsewhere}
    assert all((ROOT / path).exists() for path in elsewhere)
    listed = re.findall(r"^ +- (?:\w+: )?(\S+\.md)", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(listed) == sorted(page.relative_to(tmp_path).as_posix() for page in pages)


def test_notebook_becomes_a_page_with_its_outputs():
    outputs = [
        {"text": ["1\n"]},
        {"data": {"image/png": ["AB\n", "C="], "text/plain": ["<Figure>"]}},
        {"data": {"text/plain": ["{2: 3}"]}},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "text"]},
        {"cell_type": "code", "source": ["print(1)"], "outputs": outputs},
    ]
    assert SITE["notebook_text"]({"cells": cells}).split("\n\n") == [
        "# Title\ntext",
        "```python\nprint(1)\n```",
        "```text\n1\n```",
        "![what the cell shows](data:image/png;base64,ABC=)",
        "```text\n{2: 3}\n```\n",
    ]


@pytest.mark.parametrize("page", ["README.md", "docs/api.md"])
def test_python_of_a_page_runs_and_gives_the_shapes_it_states(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained: list[vit.Config] = []
    monkeypatch.setattr(vit, "train", trained.append, raising=False)  # which takes too long here
    Image.new("RGB", (60, 40), "green").save("photo.jpg")
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    names: dict[str, Any] = {"__name__": "__main__"}
    stated = 0
    for statement in re.split(r"\n(?=[^\s)])", code):
        exec(statement, names)
        for name, shape in re.findall(r"(\w+) (\([\d, ]+\))", statement.partition("#")[2]):
            assert tuple(names[name].shape) == eval(shape), statement
            stated += 1
    if page == "README.md":
        assert [config.data.root for config in trained] == ["pictures"]
        assert [path.name for path in tmp_path.glob("*.png")] == ["explanation.png"]
    else:
        assert stated == 5


# The examples of docs/attention.md.


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


def test_python_of_the_page_gives_the_results_that_it_shows(page):
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


def test_the_table_has_every_map_of_both_classes(page):
    section = TEXT.split("### Side by side")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", section, flags=re.MULTILINE)
    bird, plane = (maps_of_the_model(page[1], torch.tensor([target])) for target in (0, 1))
    assert [kind for kind, _ in rows] == list(bird)
    for kind, cells in rows:
        stated = [float(cell.strip().replace("−", "-")) for cell in cells.split("|")]
        found = torch.cat([bird[kind].flatten(), plane[kind].flatten()]).tolist()
        assert stated == pytest.approx(found, abs=0.005), kind
