"""Write the pages of the documentation site, which are those of GitHub, for its builder.

    python docs/write_site.py FOLDER [REPOSITORY_URL]

The pages are written for GitHub: some lie outside docs/, the tour is a notebook, and links may lead
to any file of the repository. The folder gets Markdown whose links stay within it, or lead to the
files of the repository on the web.
"""

import json
import posixpath
import re
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Where pages are on the site; the others lie in docs/ and keep their names.
ELSEWHERE = {"README.md": "index.md", "docs/README.md": "start.md", "docs/tour.ipynb": "tour.md"}
OUTSIDE = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CODE_OF_CONDUCT.md")
LIVE_PAGE = "live.html"  # eval.py cifar10 export html


def place(path: str) -> str | None:
    """Return where a file of the repository is on the site, or None if it is not there."""
    if path in OUTSIDE:
        return path
    return ELSEWHERE.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)


def resolve_links(text: str, path: str, repository: str) -> str:
    """Let the links of a page lead to the same files on the site, or in the repository."""

    def resolve(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link[1]))
        if not (ROOT / target).exists():
            return link[0]  # an address, or a broken link, which the builder reports
        if (there := place(target)) is None:
            return f"]({repository}/blob/main/{target}{link[2]})"
        here = place(path) or path
        return f"]({posixpath.relpath(there, posixpath.dirname(here))}{link[2]})"

    return re.sub(r"\]\(([^)\s#:]+)(#[^)\s]*|)\)", resolve, text)


def notebook_text(notebook: dict[str, Any]) -> str:
    """Return a notebook as Markdown, with the texts and pictures that its cells have put out."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if picture := "".join(data.get("image/png", "")):
                parts.append(
                    f"![what the cell shows](data:image/png;base64,{''.join(picture.split())})"
                )
            elif text := "".join(output.get("text", data.get("text/plain", ""))):
                parts.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def page_text(path: str, repository: str) -> str:
    """Return a page of the repository as the site shows it."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".ipynb"):
        text = notebook_text(json.loads(text))
    text = resolve_links(text, path, repository)
    if path == "README.md" and (ROOT / "docs" / LIVE_PAGE).exists():
        first, rest = text.split("\n\n", 1)
        text = f"{first}\n\n**[Try the included model in your browser]({LIVE_PAGE})**\n\n{rest}"
    if path == "docs/api.md":  # directives of mkdocstrings
        names = re.findall(r"^\| `([\w.]+)`", text, flags=re.MULTILINE)
        text += "\n\n## Reference\n\n" + "\n\n".join(f"::: {name}" for name in names) + "\n"
    return text


def write_pages(folder: Path, repository: str) -> None:
    """Write all pages, pictures and other files of the site into a folder, which is emptied."""
    shutil.rmtree(folder, ignore_errors=True)
    files = [file for file in (ROOT / "docs").rglob("*") if file.is_file()]
    for file in [*files, ROOT / "README.md", *(ROOT / name for name in OUTSIDE)]:
        path = file.relative_to(ROOT).as_posix()
        target = folder / str(place(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix in (".md", ".ipynb"):
            target.write_text(page_text(path, repository), encoding="utf-8")
        elif file.parent != ROOT / "docs" or file.suffix in (".css", ".html"):
            shutil.copy(file, target)


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ROOT.as_uri())
