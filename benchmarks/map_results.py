"""The results file of map_faithfulness.py: reading, checking and joining."""

import hashlib
import json
from pathlib import Path
from typing import Any

from vit.explain.filling import FILLINGS

# images, seed, and by run: fillings (scores of every image), passes, digest of the model file
Results = dict[str, Any]


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file, which tells whether a run has been trained again."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read(path: Path, images: int | None, seed: int | None, digests: dict[str, str]) -> Results:
    """Read results, and add the digests of their model files to those by run.

    Raises:
        ValueError: The file has no results, those of other images, or those of a model whose file
            has another digest.
    """
    try:
        results = json.loads(path.read_text())
    except (OSError, ValueError):
        results = None
    if not is_results(results):
        raise ValueError(f"{path}: not a file that --out wrote")
    if images is not None and (results["images"], results["seed"]) != (images, seed):
        raise ValueError(
            f"{path}: has --images {results['images']} --seed {results['seed']}, not "
            f"--images {images} --seed {seed}; use the same, or another file"
        )
    for name, entry in results["runs"].items():
        run = str(Path(name))
        digest = entry.get("digest")  # None: written before files had it
        if digest is not None and digests.setdefault(run, digest) != digest:
            raise ValueError(
                f"{path}: its scores of {run} are those of another model file; give another --out, "
                "or leave the file out of --add"
            )
    return results


def is_results(content: Any) -> bool:
    """Tell whether the content of a JSON file has the form of results."""
    match content:
        case {"images": int(), "seed": int(), "runs": dict(runs)}:
            return all(is_entry(entry) for entry in runs.values())
        case _:
            return False


def is_entry(content: Any) -> bool:
    """Tell whether a part of a JSON file has the form of a run's results."""
    match content:
        case {"fillings": dict(fillings), "passes": dict()} if fillings:
            return {*fillings} <= {*FILLINGS} and all(map(are_scores, fillings.values()))
        case _:
            return False


def are_scores(content: Any) -> bool:
    """Tell whether a part of a JSON file has the form of scores by kind, with the baseline."""
    match content:
        case {"centred": _}:
            return all(
                isinstance(scores, dict) and {"deletion", "insertion"} <= {*scores}
                for scores in content.values()
            )
        case _:
            return False


def add(results: Results, more: Results) -> None:
    """Add the scores of other results to results."""
    for name, entry in more["runs"].items():
        own = results["runs"].setdefault(str(Path(name)), {"fillings": {}, "passes": {}})
        own["passes"] |= entry["passes"]
        for filling, kinds in entry["fillings"].items():
            own["fillings"].setdefault(filling, {}).update(kinds)
        if "digest" in entry:
            own["digest"] = entry["digest"]
