"""The lock files contain every pinned requirement, with hashes."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def pins(text: str) -> dict[str, set[str]]:
    """Return the versions of each package; markers may choose among several."""
    found: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([\w.-]+)(?:\[[\w,]+\])?==(\S+)", text, re.MULTILINE):
        found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), set()).add(version)
    return found


@pytest.mark.parametrize(
    ("lock", "sources"),
    [
        ("requirements.lock", ["requirements.txt"]),
        (
            "requirements-dev.lock",
            ["requirements.txt", "requirements-dev.txt", "requirements.lock"],
        ),
    ],
)
def test_lock_holds_every_pin_with_hashes(lock: str, sources: list[str]) -> None:
    text = (ROOT / lock).read_text()
    locked = pins(text)
    for source in sources:
        wanted = pins((ROOT / source).read_text())
        assert wanted
        assert {name: locked.get(name) for name in wanted} == wanted, f"make lock: {source} changed"
    lines = [line for line in re.sub(r" \\\n", " ", text).splitlines() if line[:1] not in "# "]
    assert len(lines) >= len(locked)
    for line in lines:
        assert re.fullmatch(r"[\w.-]+(\[\w+\])?==\S+( ; .+?)?( +--hash=sha256:[0-9a-f]{64})+", line)
