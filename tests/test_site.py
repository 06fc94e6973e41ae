"""The pages of the documentation site, before `make docs` builds it."""

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SITE = runpy.run_path(str(ROOT / "docs/write_site.py"))
REPOSITORY = "https://example.com/repository"


def test_links_of_the_site_stay_on_it_or_lead_to_the_repository(tmp_path: Path) -> None:
    SITE["write_pages"](tmp_path, REPOSITORY)
    pages = sorted(tmp_path.rglob("*.md"))
    elsewhere = set()
    for page in pages:
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.DOTALL)
        for link in re.findall(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)", text):
            if link.startswith(REPOSITORY):
                path = link.removeprefix(f"{REPOSITORY}/blob/main/")
                assert (ROOT / path).exists(), link
                elsewhere.add(path)
            elif not link.startswith(("https://", "http://", "data:")):
                target = (page.parent / link).resolve()
                assert target.is_file() and target.is_relative_to(tmp_path.resolve()), (page, link)
    assert {"vit/model/attention.py", "configs"} <= elsewhere
    listed = re.findall(r"^ +- (?:\w+: )?(\S+\.md)", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(listed) == sorted(page.relative_to(tmp_path).as_posix() for page in pages)


def test_notebook_becomes_a_page_with_its_outputs() -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "text"]},
        {
            "cell_type": "code",
            "source": ["print(1)"],
            "outputs": [
                {"text": ["1\n"]},
                {"data": {"image/png": ["AB\n", "C="], "text/plain": ["<Figure>"]}},
                {"data": {"text/plain": ["{2: 3}"]}},
            ],
        },
    ]
    assert SITE["notebook_text"]({"cells": cells}).split("\n\n") == [
        "# Title\ntext",
        "```python\nprint(1)\n```",
        "```text\n1\n```",
        "![what the cell shows](data:image/png;base64,ABC=)",
        "```text\n{2: 3}\n```\n",
    ]
