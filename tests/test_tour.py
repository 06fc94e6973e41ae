"""The notebook docs/tour.ipynb runs from top to bottom, without outputs in the repository."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
TOUR = ROOT / "docs/tour.ipynb"


def test_committed_notebook_has_no_outputs():
    notebook = nbformat.read(TOUR, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert (cell.outputs, cell.execution_count) == ([], None), cell.id


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Jupyter's own packages
def test_notebook_runs_and_shows_what_it_says(tmp_path, monkeypatch):
    # The kernel finds the package in the checkout, and its temporary files are removed.
    monkeypatch.setenv("PYTHONPATH", str(ROOT) + os.pathsep + os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    notebook = nbformat.read(TOUR, as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": tmp_path}}).execute()
    outputs = {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}

    def text(cell: str) -> str:
        return "".join(output.get("text", "") for output in outputs[cell])

    def shows_picture(cell: str) -> bool:
        return any("image/png" in output.get("data", {}) for output in outputs[cell])

    assert "(4, 1, 3, 64, 64)" in text("weights") and "sums to 1: True" in text("weights")
    for cell in (
        "map-code",
        "map-target",
        "map-signed-code",
        "heads-code",
        "rollout-code",
        "draw",
        "trained",
    ):
        assert shows_picture(cell), cell
    accuracy = float(text("trained").split()[2].rstrip("%"))
    assert accuracy > 60  # chance is 33
    assert "largest difference of a logit on 100 test images" in text("export-code")
    assert "torch.Size([2, 3])" in text("export-code")
