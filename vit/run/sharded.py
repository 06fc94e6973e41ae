"""Checkpoints of sharded runs: a folder into which each process writes its part of the tensors.

torch's Distributed Checkpoint (DCP) writes the tensors as safetensors, which contain no code, and
reads them back into any number of processes. STATE_FILE contains everything else. SUMS_FILE lists
the SHA-256 of all other files, for `sha256sum -c`; it is written last.
"""

import contextlib
import hashlib
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vit.console import shorten
from vit.files import require_file, sync_folder, write_atomically
from vit.settings import parse

STATE_FILE = "state.json"
SUMS_FILE = "SHA256SUMS"


def write_folder(
    target: Path, tensors: dict[str, Tensor], state: dict[str, Any], main: bool
) -> None:
    """Write a checkpoint; called by all processes, each of which writes its part of the tensors.

    The first process, `main`, writes what is not sharded, and the other values, `state`, as JSON.

    Raises:
        OSError: A process could not write its part.
    """
    # Imported late, because that takes half a second.
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    folder = target.with_name(f".{target.name}.tmp")
    if main:  # before torch's exchange, after which all processes write
        with contextlib.suppress(OSError):  # torch's exchange tells the others if it fails
            delete(folder)
            folder.mkdir(parents=True)  # so that no link is there
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    try:
        save(tensors, storage_writer=writer, planner=planner)
    except CheckpointException as error:
        if main:  # its remains would keep a full disk full
            shutil.rmtree(folder, ignore_errors=True)
        raise OSError(_first_failure(error)) from None
    if main:
        finish_writing(folder, state, target)


def finish_writing(folder: Path, state: dict[str, Any], target: Path) -> None:
    """Complete a folder of tensors with the state and checksums, and rename it."""
    write_atomically(folder / STATE_FILE, json.dumps(state).encode())
    sums = {path.name: _sha256(path) for path in sorted(folder.iterdir())}
    text = "".join(f"{digest}  {name}\n" for name, digest in sums.items())
    write_atomically(folder / SUMS_FILE, text.encode())
    delete(target)  # damaged, if the run went back to an earlier step
    folder.rename(target)
    sync_folder(target.parent)


def delete(path: Path) -> None:
    """Delete a checkpoint, a file or a folder, but not the target of a link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def read_state(folder: Path) -> dict[str, Any]:
    """Read everything that is not a tensor, and check all files.

    Raises:
        ValueError: A file is missing, added or changed.
    """
    sums = {}
    with contextlib.suppress(OSError, UnicodeDecodeError):
        lines = require_file(folder / SUMS_FILE).read_text().splitlines()
        sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    names = {path.name for path in folder.iterdir()} - {SUMS_FILE}
    for name in sorted(names | sums.keys() | {STATE_FILE}):
        path = folder / name
        if name not in sums or not path.is_file() or _sha256(path) != sums[name]:
            raise ValueError(f"{folder} is damaged: {name} does not match {SUMS_FILE}")
    return parse(dict[str, Any], (folder / STATE_FILE).read_bytes(), folder / STATE_FILE)


def read_tensors(folder: Path, into: dict[str, Tensor]) -> None:
    """Read tensors by name in place, whole or sharded; called by all processes that share them.

    Raises:
        ValueError: The checkpoint lacks a tensor, or has one of another shape.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(str(folder))
    try:
        with warnings.catch_warnings():  # torch warns that there is a single process
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            load(into, storage_reader=reader, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise ValueError(f"{folder} does not fit the run: {_first_failure(error)}") from None


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors by name, with their shapes and types but without values."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    try:
        stored: Any = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
        return {
            name: torch.empty(about.size, dtype=about.properties.dtype, device="meta")
            for name, about in stored.items()
        }
    except Exception as error:  # torch checks nothing that it reads
        raise ValueError(f"{folder} is damaged: {shorten(repr(error), 200)}") from None


def read_whole(folder: Path, prefix: str) -> dict[str, Tensor]:
    """Read the tensors whose names begin with a prefix; return them without it."""
    tensors = {
        name: torch.empty_like(tensor, device="cpu")
        for name, tensor in stored_tensors(folder).items()
        if name.startswith(prefix)
    }
    read_tensors(folder, tensors)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def _first_failure(error: Any) -> str:
    """Describe what went wrong in the first process that failed, in one line."""
    rank, (failure, _) = min(error.failures.items())
    return f"process {rank}: {' '.join(str(failure).split())}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
