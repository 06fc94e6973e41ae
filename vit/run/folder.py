"""The run folder: its layout, its lock and its config."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from vit.config import Config, StoredConfig, to_dict
from vit.data.datasets import open_images
from vit.data.images import ImageSet
from vit.explain.kinds import ALL_KINDS
from vit.files import inside, require_file, write_atomically, write_table
from vit.run.checkpoint import CHECKPOINT_FOLDER, FOLDER_PATTERN
from vit.run.sharded import delete
from vit.settings import changed_keys, parse, read_yaml

CONFIG_FILE = "config.yaml"
MODEL_FILE = "model.safetensors"
LOCK_FILE = ".lock"
METRICS_FILE = "metrics.jsonl"
SPLIT_FILE = "split.csv"
EVAL_FOLDER = "eval"
REPORT_FILE = "report.json"
PREDICTIONS_FILE = "predictions.csv"  # for the test images
REPORT_FILES = (  # written next to the report
    PREDICTIONS_FILE,
    "confusion_matrix.png",
    "reliability.png",
    "mistakes.png",
    "unfamiliar.png",
    "corruptions.png",
    "corrupted_images.png",
    "events.out.tfevents.*",
    "probes/probe_*.png",  # of earlier versions
)
CORRUPTIONS_FILE = "corruptions.npz"  # results that the next report can use again
HEADS_FILE = "heads.json"  # what muting heads costs
HEADS_PICTURE = "heads.png"
ATTENTION_FOLDER = "attention"  # in the folder of the report
INDEX_FILE = "index.json"
TABLE_FILE = "faithfulness.json"
FEATURES_FILE = "features.png"
ATTENTION_FILES = (  # the index comes last: it says that the folder may be emptied
    TABLE_FILE,
    FEATURES_FILE,
    f"image_{'[0-9]' * 5}.png",
    *(f"{kind}.npy" for kind in ALL_KINDS),
    "events.out.tfevents.*",
    INDEX_FILE,
)
PHOTOS_FOLDER = "photos"
SHEET_SUFFIX = "_sheet.png"
PHOTOS_FILE = "photos.csv"
EXPORT_FOLDER = "export"
PREPROCESS_FILE = "preprocess.py"  # with each export
EXPORTS = {
    "timm": "timm", "onnx": "model.onnx", "torch": "model.pt2", "html": "live.html", "hub": "hub"
}  # fmt: skip
_RESULTS = (
    *(REPORT_FILE, *REPORT_FILES, CORRUPTIONS_FILE, HEADS_FILE, HEADS_PICTURE, PHOTOS_FILE),
    *(f"{ATTENTION_FOLDER}/{pattern}" for pattern in ATTENTION_FILES),
    *(f"{PHOTOS_FOLDER}/*{SHEET_SUFFIX}", "photos_part.csv"),
)
# The files that a run and its evaluations write, and so those that --overwrite deletes. The config
# comes last, so that a folder is still recognized as a run if the deletion is interrupted.
_WRITTEN = (
    METRICS_FILE,
    SPLIT_FILE,
    MODEL_FILE,
    "events.out.tfevents.*",
    *(f"{CHECKPOINT_FOLDER}/{pattern}" for pattern in ("step_*.pt", FOLDER_PATTERN, ".*.tmp")),
    *(f"attention/{pattern}" for pattern in ("step_*.npy", ".step_*.tmp")),  # of earlier versions
    *(f"{EVAL_FOLDER}/{part}{name}" for part in ("", "with_*/") for name in _RESULTS),
    *(f"{EVAL_FOLDER}/compare_*/comparison.{suffix}" for suffix in ("json", "md", "png")),
    f"{EVAL_FOLDER}/compare_*/corruptions_*.npz",
    *(f"{EXPORT_FOLDER}/timm/{name}" for name in ("config.json", MODEL_FILE, PREPROCESS_FILE)),
    *(
        f"{EXPORT_FOLDER}/{name}"
        for name in (PREPROCESS_FILE, "model.onnx", "model.pt2", "live.html")
    ),
    *(f"{folder}.*.tmp" for folder in ("", "eval/", "eval/*/", "eval/*/*/", "export/")),
    CONFIG_FILE,
)


@contextlib.contextmanager
def lock_run(run: Path) -> Iterator[None]:
    """Lock a run folder against other processes, creating it if it does not exist.

    The operating system holds the lock, so a process that dies leaves no lock behind. A folder that
    was created for the lock and is still empty at the end is removed.

    Raises:
        ValueError: Another process holds the lock, or `run` is a file.
    """
    if run.is_file():
        raise ValueError(f"out: {run} is a file; it must be a folder or not exist")
    created = [folder for folder in (run, *run.parents) if not folder.exists()]
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"out: cannot write to {run} ({error.strerror}); use another --out"
        ) from None
    path = run / LOCK_FILE
    lock = FileLock(path, blocking=False)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(
            f"out: {run} is being written by another process; "
            "wait for it, stop it, or train in another folder with --out"
        ) from None
    try:
        yield
    finally:
        # Removed while the lock is held, so that no other process locks a file that is about to go.
        # Windows cannot delete an open file; there, filelock removes it on release.
        with contextlib.suppress(PermissionError):
            path.unlink(missing_ok=True)
        lock.release()
        with contextlib.suppress(OSError):  # not empty: a run
            for folder in created:
                folder.rmdir()


def stored_config(run: Path) -> Config | None:
    """Read the config of a run, with the defaults of keys that an earlier version did not have.

    Returns:
        The config; None if the folder has none of this project.

    Raises:
        ValueError: A key is not known or a value is not allowed.
    """
    values = read_config(run)
    return None if values is None else parse(StoredConfig, values, run / CONFIG_FILE)


def read_config(run: Path) -> dict[str, Any] | None:
    """Read the config of a run of any version as text; None if the folder has none."""
    try:
        values = read_yaml(require_file(run / CONFIG_FILE).read_bytes(), CONFIG_FILE)
    except (OSError, ValueError):
        return None
    groups = {"data", "model", "optim", "train"}
    known = isinstance(values, dict) and all(isinstance(values.get(g), dict) for g in groups)
    return values if known else None


def lasting(values: dict[str, Any]) -> dict[str, Any]:
    """Drop what may always differ when a run is resumed: folders, and how files are read.

    The number of processes is part of the environment, with which torchrun's are compared too.
    """
    free = ("root", "download", "memory_gb", "workers")
    data = {key: value for key, value in values["data"].items() if key not in free}
    train = {key: value for key, value in values["train"].items() if key != "processes"}
    return {**values, "data": data, "train": train, "out": None}


def prepare_run(config: Config, resume: bool, step: int = 0) -> Path:
    """Create the run folder and write the config; unless resuming, delete an earlier run first.

    Only files that this project writes are deleted. When resuming, the folder contains an earlier
    part of the run, of `step` steps.
    """
    run = Path(config.out)
    run.mkdir(parents=True, exist_ok=True)
    if not resume:
        for path in written_files(run):
            delete(path)
    write_config(config, step, run)
    return run


def written_files(run: Path) -> list[Path]:
    """List what an earlier run and its evaluations have written, in the order of deletion.

    Raises:
        ValueError: One of the folders is a link, see `inside`; they are not for writing either.
    """
    written = [path for pattern in _WRITTEN for path in run.glob(pattern)]
    folders = {path.relative_to(run).parent for path in written}
    for folder in {*folders, Path(CHECKPOINT_FOLDER), Path(EVAL_FOLDER)}:
        inside(run, *folder.parts)
    return written


def write_config(config: Config, step: int, run: Path) -> None:
    """Write a config, with comments about what the steps before `step` were trained with."""
    values, path = to_dict(config), run / CONFIG_FILE
    stored = stored_config(run)
    comments = []
    if stored is not None:
        comments = [
            line for line in path.read_text(errors="replace").splitlines() if line.startswith("#")
        ]
        changes = changed_keys(lasting(to_dict(stored)), lasting(values))
        if changes:
            comments.append(f"# changed after step {step}: {'; '.join(changes)}")
    text = "\n".join([*comments, yaml.safe_dump(values, sort_keys=False)])
    write_atomically(path, text.encode())


def write_split(config: Config, training: ImageSet, held_out: ImageSet) -> None:
    """Write split.csv: which of the user's files a run trains on, holds out and tests on."""
    listed = dataclasses.replace(config.data, on_bad_image="error")  # so that no file is read
    parts = {"train": training, "val": held_out, "test": open_images(listed, train=False)}
    rows = (
        {"file": images.name(index), "label": images.classes[label], "part": part}
        for part, images in parts.items()
        for _, index, label in sorted(
            zip(images.origins, range(len(images)), images.labels.tolist(), strict=True)
        )
    )
    write_table(Path(config.out) / SPLIT_FILE, rows)
