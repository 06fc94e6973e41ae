"""Files that are whole or not there, and known to be as they were written.

A crash at any moment, of the process or of the machine, leaves the old file or the new one. A
sealed file ends with the SHA-256 of what is before it, so that a single changed bit is noticed.
"""

import hashlib
import os
from pathlib import Path


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file whole, or leave the old one as it was.

    Raises:
        OSError: It could not be written; nothing of it is left.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # so that the new name outlives a power cut too
    finally:
        os.close(folder)


def seal(data: bytes) -> bytes:
    """Append the digest of data."""
    return data + hashlib.sha256(data).digest()


def unseal(sealed: bytes) -> bytes | None:
    """Return what `seal` was given, or None where anything in it has changed."""
    size = hashlib.sha256().digest_size
    data = sealed[:-size]
    return data if hashlib.sha256(data).digest() == sealed[-size:] else None
