"""Applies single-line faults to vit/, one at a time, and reports which of them the tests catch.

Run it before and after a change to many tests: a fault that was caught must not survive. The
faults are in faults.toml; each is a text that occurs once in vit/ and the text that replaces it, so
moving a module needs no change there. If somebody rewrites such a line, test_faults.py fails: adapt
the fault, or replace it by another of the same kind under a new number.

    python tests/faults.py --jobs 2          all faults, which takes hours
    python tests/faults.py --only 7 12       some of them
    python tests/faults.py --near            only the test files that name the faulty module
    python tests/faults.py --list

A fault is applied to a temporary copy of the repository, with uncommitted changes but without
ignored files. The fast tests run until one fails, those that name the faulty module first.
"""

import argparse
import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 3600  # seconds, after which a fault counts as caught: it makes a test hang


class Fault(NamedTuple):
    number: int
    area: str
    old: str
    new: str


def read_faults() -> list[Fault]:
    areas = tomllib.loads((ROOT / "tests/faults.toml").read_text())
    return [
        Fault(int(number), area, *texts)
        for area, faults in areas.items()
        for number, texts in faults.items()
    ]


def find_fault(fault: Fault, root: Path = ROOT) -> tuple[Path, str]:
    """Return the module that contains the text of a fault, and its content with the fault."""
    contents = {path: path.read_text() for path in (root / "vit").rglob("*.py")}
    found = [path for path, text in contents.items() for _ in range(text.count(fault.old))]
    if len(found) != 1:
        raise ValueError(f"fault {fault.number}: {len(found)} places in vit/ have {fault.old!r}")
    return found[0], contents[found[0]].replace(fault.old, fault.new)


def copy_repository(target: Path) -> None:
    subprocess.run(["git", "clone", "--quiet", "--shared", ROOT, target], check=True)
    command = ["git", "ls-files", "-z", "--modified", "--others", "--exclude-standard"]
    changed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, changed.stdout.split("\0")):
        (target / name).unlink(missing_ok=True)
        if (ROOT / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    if (ROOT / "data").exists() and not (target / "data").exists():
        (target / "data").symlink_to((ROOT / "data").resolve())


@contextlib.contextmanager
def applied(module: Path, faulty: str) -> Iterator[None]:
    original, compiled = module.read_text(), Path(importlib.util.cache_from_source(str(module)))
    try:
        module.write_text(faulty)
        compiled.unlink(missing_ok=True)  # Python compares only its time in seconds and its size
        yield
    finally:
        module.write_text(original)
        compiled.unlink(missing_ok=True)


def order_tests(module: Path, root: Path, near: bool) -> list[str]:
    """List the test files, first that of the module, then those that name it, then the others."""
    name = ".".join(module.relative_to(root).with_suffix("").parts)
    files = [path for path in (root / "tests").glob("test_*.py") if path.stem != "test_faults"]
    ranks = {
        path: 0 if path.stem == f"test_{module.stem}" else 1 if name in path.read_text() else 2
        for path in files
    }
    chosen = sorted(files, key=lambda path: (ranks[path], path.stat().st_size))
    return [f"tests/{path.name}" for path in chosen if not near or ranks[path] < 2]


def catch(fault: Fault, copy: Path, near: bool = False) -> str | None:
    """Return the first test that fails with a fault in a copy of the repository."""
    module, faulty = find_fault(fault, copy)
    files = order_tests(module, copy, near)
    options = ["-x", "-m", "not slow", "--tb=no", "-rfE", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, "--basetemp", f"{copy}.tmp", *files]
    with applied(module, faulty):
        try:
            result = subprocess.run(
                command, cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)}, timeout=TIMEOUT,
                capture_output=True, text=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return "the timeout"
    if not files or result.returncode in (0, 5):  # 5: all tests of the files are slow
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", result.stdout, re.MULTILINE)
    return failed[1] if failed else f"pytest with exit code {result.returncode}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", type=int, nargs="+", metavar="NUMBER", help="faults; else all")
    parser.add_argument("--near", action="store_true", help="run the tests that name the module")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time (default: 1)")
    parser.add_argument("--list", action="store_true", help="list the faults and exit")
    options = parser.parse_args()
    faults = [f for f in read_faults() if options.only is None or f.number in options.only]
    if options.list:
        for fault in faults:
            module = find_fault(fault)[0].relative_to(ROOT)
            print(f"{fault.number:3} {module}: {fault.old!r} -> {fault.new!r}")
        return
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as threads:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(options.jobs):
            copies.put(Path(folder) / str(number))
            copy_repository(Path(folder) / str(number))

        def run(fault: Fault) -> bool:
            copy = copies.get()
            test = catch(fault, copy, options.near)
            copies.put(copy)
            result = f"caught by {test}" if test else f"survived: {fault.old!r} -> {fault.new!r}"
            print(f"{fault.number:3} {fault.area:10} {result}", flush=True)
            return test is not None

        print(f"caught {sum(threads.map(run, faults))} of {len(faults)} faults")


if __name__ == "__main__":
    main()
