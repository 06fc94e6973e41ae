"""Atomic writes, and files sealed with a checksum.

A crash of the process or the machine at any moment leaves either the old file or the new one. A
sealed file ends with the SHA-256 of its content, so that a single changed bit is detected.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file completely, or leave the old one unchanged.

    Raises:
        OSError: The file could not be written; no part of it is left behind.
    """
    with open_atomically(path) as file:
        file.write(data)


@contextlib.contextmanager
def open_atomically(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` when the context ends without an exception.

    Raises:
        OSError: The file could not be written; no part of it is left behind.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk, so that they survive a power failure.

    Does nothing on Windows, which cannot open a folder as a file; NTFS journals names itself.
    """
    if os.name == "nt":
        return
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def seal(data: bytes) -> bytes:
    """Append the SHA-256 digest of data to it."""
    return data + hashlib.sha256(data).digest()


def unseal(sealed: bytes) -> bytes | None:
    """Return the data that `seal` was given, or None if anything in it has changed."""
    size = hashlib.sha256().digest_size
    data = sealed[:-size]
    return data if hashlib.sha256(data).digest() == sealed[-size:] else None
