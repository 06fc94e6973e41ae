"""The notebook docs/tour.ipynb runs from top to bottom, and shows what is stored in it.

python tests/test_tour.py    # runs the notebook and stores what it shows
"""

import os
import re
import tempfile
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
TOUR = ROOT / "docs/tour.ipynb"


def run(folder: Path, tuning: str = '"epochs": 15') -> NotebookNode:
    """Run the notebook on one thread, with its temporary files in a folder."""
    notebook = nbformat.read(TOUR, as_version=4)
    (cell,) = (cell for cell in notebook.cells if cell.id == "tune-code")
    cell.source = cell.source.replace('"epochs": 15', tuning)
    path = str(ROOT) + os.pathsep + os.environ.get("PYTHONPATH", "")
    # Without Jupyter's widgets, tqdm warns of their absence.
    kernel = {"PYTHONPATH": path, "TMPDIR": str(folder), "PYTHONWARNINGS": "ignore:IProgress"}
    client = NotebookClient(
        notebook, timeout=600, record_timing=False, coalesce_streams=True,
        resources={"metadata": {"path": folder}},
    )  # fmt: skip
    client.execute(env={**os.environ, "OMP_NUM_THREADS": "1", **kernel})
    nbformat.validate(notebook)
    return notebook


def words(cell: NotebookNode) -> set[str]:
    """Return the words that a cell shows, without files, and "image/png" for a picture."""
    shown = set[str]()
    for output in cell.outputs:
        text = output.get("text") or output["data"]["text/plain"]
        lines = [line for line in text.splitlines() if "CPU" not in line]  # its precision
        plain = " ".join(word for line in lines for word in line.split() if "/tmp" not in word)
        shown |= {*re.findall("[A-Za-z_]{2,}", plain)} | ({"image/png"} & {*output.get("data", ())})
    return shown


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Jupyter's own packages
def test_notebook_runs_and_shows_what_is_stored(tmp_path):
    found, stored = run(tmp_path, '"epochs": 3').cells, nbformat.read(TOUR, as_version=4).cells
    code = [number for number, cell in enumerate(stored) if cell.cell_type == "code"]
    for number in code:
        assert words(found[number]) == words(stored[number]), found[number].id
    pictures = sum("image/png" in words(stored[number]) for number in code)
    assert pictures == 7 and TOUR.stat().st_size < 600_000
    (trained,) = (cell for cell in found if cell.id == "trained")
    accuracy = float(trained.outputs[0].text.split()[2].rstrip("%"))
    assert accuracy > 60  # chance is 33


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        nbformat.write(run(Path(folder)), TOUR)
