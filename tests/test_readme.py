"""README's Python code runs and gives the shapes in its comments."""

import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import vit

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()


def test_python_of_readme_runs_and_gives_the_shapes_it_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trained: list[vit.Config] = []
    monkeypatch.setattr(vit, "train", trained.append, raising=False)  # which takes too long here
    Image.new("RGB", (60, 40), "green").save("photo.jpg")
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    names: dict[str, Any] = {}
    stated = 0
    for statement in re.split(r"\n(?=[^\s)])", code):
        exec(statement, names)
        for name, shape in re.findall(r"(\w+) (\([\d, ]+\))", statement.partition("#")[2]):
            assert tuple(names[name].shape) == eval(shape), statement
            stated += 1
    assert stated >= 3 and [config.data.root for config in trained] == ["pictures"]
    assert [path.name for path in tmp_path.glob("*.png")] == ["explanation.png"]


def test_pictures_of_readme_are_there() -> None:
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", README)
    assert pictures
    for picture in pictures:
        assert (Path(__file__).resolve().parent.parent / picture).exists(), picture
