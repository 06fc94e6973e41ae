"""What is executed of a file with attention: definitions, and nothing that a cell calls."""

import inspect
import json
import sys
from pathlib import Path

import pytest

from vit.model.definitions import read_definitions
from vit.model.variants import load_attention

CELLS = [
    "%matplotlib inline\n!pip install torch\nimport math\nimport seaborn_is_not_here as sns",
    "%%timeit\nthis is not = Python",
    "try:\n    import einops\n    import nobody_has_this\nexcept ImportError:\n    pass",
    "width, heads = 64, 4\nhead_dim = width // heads\nroot = math.pi",
    "device = open('touched', 'w')\nprint('called')",
    "def attend(x):\n    return x + 1",
    "if 'google.colab' in sys.modules:\n    !pip install einops\ndef below():\n    return 3",
    "Summary of the above, in words",
    "def attend(x):\n    return x + head_dim\n\nresult = attend(1)\nfor _ in range(3): result += 1",
    "class Mine:\n    def forward(self):\n        return device",
]


def write(folder: Path, cells: list[str]) -> Path:
    file = folder / "notes.ipynb"
    code = [{"cell_type": "code", "source": cell.splitlines(keepends=True)} for cell in cells]
    file.write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": "def"}, *code]}))
    return file


def test_only_definitions_of_a_notebook_are_executed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    found = read_definitions(write(tmp_path, CELLS))
    assert not Path("touched").exists() and not capsys.readouterr().out
    assert found.attend(1) == 17 and found.einops and found.root > 3  # the last of two counts
    assert found.below() == 3
    assert {*found.left_out} >= {"sns", "nobody_has_this", "device", "result"}
    assert found.left_out["device"].endswith("device = open('touched', 'w')")
    assert "No module named" in found.left_out["sns"]
    assert inspect.getsource(found.attend).splitlines()[1] == "    return x + head_dim"
    with pytest.raises(NameError, match="device"):
        found.Mine().forward()


def test_a_notebook_and_a_file_beside_it_are_told_apart(tmp_path):
    code = "class Mine:\n    of = {!r}\n"
    (tmp_path / "mine.py").write_text(code.format("file"))
    script = read_definitions(tmp_path / "mine.py").Mine
    notebook = {"cells": [{"cell_type": "code", "source": code.format("notebook")}]}
    (tmp_path / "mine.ipynb").write_text(json.dumps(notebook))
    other = read_definitions(tmp_path / "mine.ipynb").Mine
    assert "'file'" in inspect.getsource(script) and "'notebook'" in inspect.getsource(other)


def test_a_python_file_is_read_likewise(tmp_path):
    text = "SCALE = 2.0\nraise SystemExit\n\ndef f(x):\n    return SCALE"
    (tmp_path / "mine.py").write_text(text, encoding="utf-8-sig")  # with a byte order mark
    assert read_definitions(tmp_path / "mine.py").f(0) == 2.0


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("mine.py", "def f(:", "mine.py, line 1: "),
        ("mine.ipynb", "[]", "mine.ipynb is not a notebook"),
        ("mine.ipynb", '{"cells": [{}]}', "mine.ipynb is not a notebook"),
        ("mine.ipynb", "no JSON", "mine.ipynb is not a notebook"),
        ("mine.py", "\udcff", "mine.py is not a text file in UTF-8"),
    ],
)
def test_other_files_are_refused_in_a_line(tmp_path, name, text, words):
    (tmp_path / name).write_text(text, errors="surrogateescape")
    with pytest.raises(ValueError) as info:
        read_definitions(tmp_path / name)
    assert words in str(info.value) and "\n" not in str(info.value)


def test_cells_are_read_as_ipython_runs_them(tmp_path):
    cells = [
        "%%time\ndef timed(): pass", "%%bash\ndef shell(): pass", "files = !ls\ndef kept(): pass",
        "kept?\ndef asked(): pass", "print 'hello'\nclass Broken: pass",
        "class Derived:\n    pass\nclass Derived(nobody.Module):\n    pass\nzero = 1 // 0",
    ]  # fmt: skip
    found = read_definitions(write(tmp_path, cells))
    assert found.timed and found.kept and found.asked and not hasattr(found, "shell")
    assert "nobody" in found.left_out["Derived"]
    for name, words in (
        ("Broken", "in a cell that is not Python"),
        ("Derived", "name 'nobody' is"),
    ):
        with pytest.raises(ValueError, match=rf"has no function or class '{name}'.*{words}"):
            load_attention(f"{tmp_path}/notes.ipynb:{name}")


WRAPPED = "def wrapped(a, b):\n    return (\n        a\n        % b\n    )"
# What stands in a cell, and an expression of what it defines that must be true.
LIKE_PYTHON = [
    (WRAPPED, "found.wrapped(7, 4) == 3"),  # % b is no magic, nor beside one
    (f"%time\n{WRAPPED}", "found.wrapped(7, 4) == 3"),
    ("heads = 4; heads *= 2", "found.heads == 8"),
    # A call is not executed, and then the value is not the one before it.
    ("x = 1.0\nx = abs(4)", "'abs(4)' in found.left_out['x'] and not hasattr(found, 'x')"),
    ("d = 64\nd: int", "found.d == 64"),
    ("d = 64\nif __name__ == '__main__':\n    d = 2", "found.d == 64"),
    ("d = 64\nprint([d for d in range(3)])", "found.d == 64"),
    (
        "try:\n    from nobody_has_this import attend\n    fast = True\n"
        "except ImportError:\n    fast, attend = False, None",
        "not found.fast and found.attend is None",
    ),
    ("from __future__ import annotations\ndef f(x: Nobody) -> Nobody: return x", "found.f(3) == 3"),
    ("from helping import three", "found.three == 3"),  # a file beside it
    ("@print\nclass C:\n    x = 1\n\n\n\nclass C:\n    x = 2", "'x = 2' in getsource(found.C)"),
]


@pytest.mark.parametrize(("cell", "expression"), LIKE_PYTHON)
def test_definitions_mean_what_they_mean_in_python(cell, expression, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "helping.py").write_text("three = 3")
    found = read_definitions(write(tmp_path, [cell]))
    assert eval(expression, {"found": found, "getsource": inspect.getsource}), found.left_out
