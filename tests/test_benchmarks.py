"""Benchmarks start with the command in their docstring; ratios and tables are right."""

import importlib
import sys
from functools import partial
from pathlib import Path

import pytest

from benchmarks import tables, timing

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
SCRIPTS = [
    f"benchmarks.{path.parent.name}.{path.stem}"
    for path in sorted(FOLDER.glob("*/*.py"))
    if "__main__" in path.read_text()
]


@pytest.mark.parametrize("name", SCRIPTS)
def test_benchmark_starts(name, monkeypatch, capsys):
    script = importlib.import_module(name)
    assert f"\n    python -m {name}" in script.__doc__
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ")


def test_ratios_come_from_the_same_round() -> None:
    """The machine is twice as slow in the second round, which affects both alike."""
    first, second = timing.compare({"a": [1.0, 2.0, 1.0], "b": [0.5, 1.0, 0.4]}).values()
    assert first.speed() == "1.00 x  (1.00 to 1.00)"
    assert second.speed() == "2.00 x  (2.00 to 2.50)"
    assert second.speed(scale=0.5) == "1.00 x  (1.00 to 1.25)"
    assert second.cost() == "0.50 x  (0.40 to 0.50)"
    assert second.fraction() == "50.0%  (40.0% to 50.0%)"
    assert second.seconds == 0.5
    busy = timing.Timing(1.0, 1.2, 1.0, high=1.6)  # rounds may differ by half, and no more
    assert busy.cost() == "no verdict: the machine is busy, rounds differ by 1.6 x; run again"


def test_functions_take_turns_after_a_round_of_warm_up() -> None:
    calls: list[str] = []
    works = {name: partial(calls.append, name) for name in "ab"}
    assert list(timing.take_turns(works, rounds=2)) == ["a", "b"] and calls == ["a", "b"] * 3


def test_tables_by_hand() -> None:
    assert tables.markdown(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"
    assert tables.plus_minus(1.5, 0.25, "+.2f") == "+1.50 ± 0.25"
    assert tables.spread([3.0, 1.0, 2.0]) == "2.00 (1.00 to 3.00)"
    # Student's t with two degrees of freedom: 4.3027.
    found = tables.mean_of_runs([0.1, 0.2, 0.3])
    assert found == pytest.approx((0.2, 4.3027 * 0.1 / 3**0.5), abs=1e-5)
