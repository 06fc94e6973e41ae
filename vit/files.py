"""Writing files: completely or not at all, and never through a link; and files with a checksum.

A crash at any moment leaves either the old file or the new one. A folder from somebody else may
contain links, so a file is written under a random name and then replaces even a link. A sealed file
ends with the SHA-256 of its content, so that a single changed bit is detected.
"""

import contextlib
import csv
import errno
import hashlib
import io
import json
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image


def inside(base: Path, *names: str) -> Path:
    """Return a folder below `base`, for writing into it.

    Raises:
        ValueError: One of the folders below `base` is a link, which may lead anywhere.
    """
    folder = base
    for name in names:
        folder /= name
        if folder.is_symlink():
            raise ValueError(f"out: {folder} is a link; delete it, or use another --out")
    return folder


def require_file(path: Path) -> Path:
    """Return a path; OSError if it is a folder, or a pipe or device, which might never end."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is not a regular file; delete it")
    return path


def write_atomically(path: Path, data: bytes | memoryview) -> None:
    """Write a file completely, or leave the old one unchanged; errors as `open_atomically`."""
    with open_atomically(path) as file:
        file.write(data)


@contextlib.contextmanager
def open_atomically(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` when the context ends without an exception.

    Raises:
        OSError: The file could not be written; no part of it is left behind.
    """
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)  # not the random name
        raise
    sync_folder(path.parent)


def write_json(path: Path, values: Any) -> None:
    """Write a JSON file."""
    # JSON cannot hold file names that are not UTF-8: such bytes become question marks.
    text = json.dumps(values, ensure_ascii=False).encode(errors="replace")
    write_atomically(path, json.dumps(json.loads(text), indent=1).encode())


def write_picture(path: Path, pixels: np.ndarray) -> None:
    """Write a picture, (height, width, 3) uint8, as a PNG file."""
    with open_atomically(path) as file:
        Image.fromarray(pixels).save(file, "png")


def write_table(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    """Write rows that have the same columns as a CSV file; return how many there are."""
    count = 0
    with open_atomically(path) as file:
        # File names that are not UTF-8 are written as they are.
        text = io.TextIOWrapper(file, encoding="utf-8", errors="surrogateescape", newline="")
        writer = csv.writer(text, lineterminator="\n")
        for count, row in enumerate(rows, start=1):
            if count == 1:
                writer.writerow(row)
            writer.writerow(f"{v:.6g}" if isinstance(v, float) else v for v in row.values())
        text.detach()  # flushes, and leaves the file open
    return count


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk, so that they survive a power failure."""
    if os.name == "nt":  # which cannot open a folder as a file; NTFS journals names itself
        return
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems cannot, as folders shared with a VM
            raise
    finally:
        os.close(number)


def seal(buffer: io.BytesIO) -> memoryview:
    """Append the SHA-256 digest of a buffer's content to it, without copying it; return both."""
    digest = hashlib.sha256(buffer.getbuffer()).digest()
    buffer.seek(0, io.SEEK_END)
    buffer.write(digest)
    return buffer.getbuffer()


def is_sealed(data: bytes) -> bool:
    """Return whether data end with the digest of the rest."""
    size = hashlib.sha256().digest_size
    return hashlib.sha256(memoryview(data)[:-size]).digest() == data[-size:]
