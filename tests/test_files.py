"""Files are complete or absent, whatever the disk does, and damage is detected."""

import errno
import io
import os
import re
import stat
from pathlib import Path

import pytest

import vit
from vit.files import inside, is_sealed, seal, write_atomically

CODE = Path(vit.__file__).parent
WRITES = re.compile(
    r"\b(print|SummaryWriter|FileWriter|save|savez\w*|savetxt|save_file|savefig|imsave|tofile|dump"
    r"|write_text|write_bytes|copy2|copyfile|copytree|mkstemp|NamedTemporaryFile|fdopen)\("
    r"|open\(.*[\"'][rbt+]*[wax]|sys\.std\w+\.write"
)
ALLOWED = """
files.py: with temporary.open("xb") as file:
files.py: Image.fromarray(pixels).save(file, "png")
run/tracker.py: return SummaryWriter(str(folder), filename_suffix=f".{secrets.token_hex(8)}", **how)
run/tracker.py: self._metrics = path.open("ab", buffering=0)
run/sharded.py: save(tensors, storage_writer=writer, planner=planner)
into files that open_atomically has opened, or that it replaces later
commands/maps.py: np.save(file, values.cpu().numpy())
reporting/corruptions.py: np.savez_compressed(file, settings=settings, **correct)  # type: ignore[arg-type]
explain/explanation.py: self.sheet().save(file, formats[suffix], dpi=(200, 200))
commands/photo.py: dataclasses.replace(explanation, name=path.name).save(sheet)
reporting/export_formats.py: program.save(path)
reporting/export_formats.py: torch.export.save(_trace(classifier), path, extra_files=metadata(classifier))
into memory
data/corruptions.py: Image.fromarray(image).save(file := io.BytesIO(), "JPEG", quality=round(quality))
run/checkpoint.py: torch.save({**vars(checkpoint), **plain}, buffer)
run/tracker.py: Image.fromarray(value).save(file, "png", compress_level=1)
model_file.py: data = safetensors.torch.save(tensors, metadata)
reporting/export_formats.py: write_atomically(folder / "model.safetensors", safetensors.torch.save(weights))
tensorboard_plugin/records.py: Image.fromarray(pixels).save(file, "png")
tensorboard_plugin/encoding.py: with archive.open(f"{name}.npy", "w") as member:
a full disk is an error
cli.py: print(yaml.safe_dump(values, sort_keys=False), end="", flush=True)  # or fail
texts
model/timm_model.py: 'python -c "import timm; print(*timm.list_models())"'
pretrained/sources.py: "state dict by itself with torch.save(model.state_dict(), FILE)"
"""  # noqa: E501


def test_nothing_is_written_or_printed_another_way():
    """Files are written by vit/files.py and text is printed by vit/console.py, see there why."""
    lines = {
        f"{file.relative_to(CODE).as_posix()}: {line.strip()}"
        for file in sorted(CODE.rglob("*.py"))
        for line in file.read_text().splitlines()
        if WRITES.search(line) and "def save(" not in line
    }
    assert lines == {line for line in ALLOWED.splitlines() if ": " in line}


def test_a_link_in_place_of_a_file_is_replaced_and_one_in_place_of_a_folder_refused(tmp_path):
    (tmp_path / "victim").write_bytes(b"mine")
    (tmp_path / "file").symlink_to("victim")
    write_atomically(tmp_path / "file", b"new")
    assert (tmp_path / "victim").read_bytes() == b"mine" and not (tmp_path / "file").is_symlink()
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    (tmp_path / "run").mkdir()
    for target in ("../elsewhere", "../missing"):
        link = tmp_path / "run" / "eval"
        link.symlink_to(target)
        for names in (("eval",), ("eval", "deep")):
            with pytest.raises(ValueError, match="run/eval is a link; delete it"):
                inside(tmp_path / "run", *names)
        link.unlink()
    (tmp_path / "linked").symlink_to("run")
    assert inside(tmp_path / "linked", "eval") == tmp_path / "linked" / "eval"


def test_the_permissions_are_those_of_any_new_file(tmp_path):
    (tmp_path / "plain").touch()
    write_atomically(tmp_path / "file", b"")
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("broken", ["open", "fsync", "replace"])
def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, broken):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os if broken == "fsync" else Path, broken, full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"new")
    monkeypatch.undo()
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("file", b"old")]


def test_order_of_what_reaches_the_disk(tmp_path, monkeypatch):
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


def test_seal_breaks_with_any_bit():
    sealed = bytes(seal(io.BytesIO(b"content")))
    assert sealed.startswith(b"content") and is_sealed(sealed)
    assert is_sealed(bytes(seal(io.BytesIO())))
    for bit in range(8 * len(sealed)):
        changed = bytearray(sealed)
        changed[bit // 8] ^= 1 << bit % 8
        assert not is_sealed(bytes(changed))
    for length in range(len(sealed)):
        assert not is_sealed(sealed[:length])


def test_a_file_system_may_be_unable_to_flush_a_folder(tmp_path, monkeypatch):
    """As folders that are shared with a virtual machine."""
    fsync = os.fsync

    def fsync_of_files(number: int) -> None:
        if stat.S_ISDIR(os.fstat(number).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(number)

    monkeypatch.setattr(os, "fsync", fsync_of_files)
    write_atomically(tmp_path / "file", b"whole")
    assert (tmp_path / "file").read_bytes() == b"whole"
