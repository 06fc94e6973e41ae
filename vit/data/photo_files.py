"""Finding image files in folders."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from vit.data.layout import IMAGE_SUFFIXES, is_visible, report_ignored


def find_photos(names: Iterable[str], key: str) -> list[Path]:
    """List image files, and the image files in folders and the folders below them.

    Args:
        names: Files, which may have any suffix, and folders. In a folder, hidden files and folders
            are ignored, and so are files without an image suffix, which a line counts.
        key: The flag or config key that gave the names, for the error message.

    Returns:
        The files in the order given, those of a folder sorted; each of them once.

    Raises:
        ValueError: A file does not exist or is not a regular file, or a folder has no image files.
    """
    found: dict[Path, None] = {}
    for path in map(Path, names):
        if path.is_dir():
            inside = sorted(_files_in(path))  # as text, of which a million fit into memory
            images = [name for name in inside if name.lower().endswith(IMAGE_SUFFIXES)]
            if not images:
                raise ValueError(
                    f"{key}: {path} contains no image files ({', '.join(IMAGE_SUFFIXES)})"
                )
            report_ignored(path, map(Path, inside))
            found.update(dict.fromkeys(map(Path, images)))
        elif path.is_file():
            found[path] = None
        else:
            problem = "not a regular file" if path.exists() else "file not found"
            raise ValueError(f"{key}: {path}: {problem}")
    return list(found)


def _files_in(folder: Path) -> Iterator[str]:
    for parent, folders, files in os.walk(folder):
        folders[:] = filter(is_visible, folders)
        yield from (str(Path(parent, name)) for name in filter(is_visible, files))
