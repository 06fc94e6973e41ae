"""Files are complete or absent, whatever the disk does, and damage is detected."""

import errno
import os
import stat
from pathlib import Path

import pytest

from vit.files import seal, unseal, write_atomically


@pytest.mark.parametrize("broken", ["open", "fsync", "replace"])
def test_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os if broken == "fsync" else Path, broken, full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"new")
    monkeypatch.undo()
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("file", b"old")]


def test_order_of_what_reaches_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name must not reach the disk before the content does."""
    order: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def watched_fsync(number: int) -> None:
        order.append("folder" if stat.S_ISDIR(os.fstat(number).st_mode) else "content")
        fsync(number)

    def watched_replace(path: Path, target: Path) -> Path:
        assert path.parent == target.parent  # one file system, so that replacing is atomic
        order.append("name")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(Path, "replace", watched_replace)
    write_atomically(tmp_path / "file", b"new")
    assert order == ["content", "name", *(["folder"] if os.name != "nt" else [])]


def test_seal_breaks_with_any_bit() -> None:
    sealed = seal(b"content")
    assert unseal(sealed) == b"content"
    assert unseal(seal(b"")) == b""
    for bit in range(8 * len(sealed)):
        changed = bytearray(sealed)
        changed[bit // 8] ^= 1 << bit % 8
        assert unseal(bytes(changed)) is None
    for length in range(len(sealed)):
        assert unseal(sealed[:length]) is None
