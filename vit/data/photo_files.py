"""Finding image files in folders."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from vit.data.layout import IMAGE_SUFFIXES


def find_photos(names: Iterable[str], key: str) -> list[Path]:
    """List image files, and the image files in folders and the folders below them.

    Args:
        names: Files, which may have any suffix, and folders. In a folder, hidden files and folders
            and files without an image suffix are ignored.
        key: The flag or config key that gave the names, for the error message.

    Returns:
        The files in the order given, those of a folder sorted; each of them once.

    Raises:
        ValueError: A file does not exist or is not a regular file, or a folder has no image files.
    """
    found: dict[Path, None] = {}
    for path in map(Path, names):
        if path.is_dir():
            inside = sorted(_photos_in(path))  # as text, of which a million fit into memory
            if not inside:
                raise ValueError(
                    f"{key}: {path} contains no image files ({', '.join(IMAGE_SUFFIXES)})"
                )
            found.update(dict.fromkeys(map(Path, inside)))
        elif path.is_file():
            found[path] = None
        else:
            problem = "not a regular file" if path.exists() else "file not found"
            raise ValueError(f"{key}: {path}: {problem}")
    return list(found)


def _photos_in(folder: Path) -> Iterator[str]:
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            if not name.startswith(".") and name.lower().endswith(IMAGE_SUFFIXES):
                yield str(Path(parent, name))
