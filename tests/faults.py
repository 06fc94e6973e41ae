"""Applies single-line faults to vit/, one at a time, and says which of them the tests catch.

Run it before and after a change to many tests: a fault that was caught must not survive. The
faults are in faults.toml; each is a text that occurs once in vit/ and the text that replaces it, so
they follow a module that is moved. Where such a line is rewritten, test_faults.py fails: adapt the
fault, or replace it by another of the same kind under a new number.

    python tests/faults.py --jobs 2          all faults
    python tests/faults.py --only 7 12       some of them
    python tests/faults.py --near            only the test files that name the faulty module

A fault is applied to a temporary copy of the repository, with uncommitted changes but without
ignored files. The fast tests run until one fails: first the test file of the module, then those
that name it, then the others. The test that failed runs again without the fault, and must pass.
Libraries are imported once; each run is a fork of this process.
"""

import argparse
import importlib
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = ("torchvision.transforms.v2", "timm", "torch.utils.tensorboard", "matplotlib.figure")
TIMEOUT = 3600  # seconds, after which a fault counts as caught, because it makes a test hang
FORK: Any = multiprocessing.get_context("fork")


class Fault(NamedTuple):
    number: int
    area: str
    old: str
    new: str


def read_faults() -> list[Fault]:
    areas = tomllib.loads((ROOT / "tests/faults.toml").read_text())
    return [Fault(int(n), area, *texts) for area in areas for n, texts in areas[area].items()]


def find_fault(fault: Fault, root: Path = ROOT) -> tuple[Path, str]:
    """Return the module that contains the text of a fault, and its content with the fault."""
    contents = {path: path.read_text() for path in (root / "vit").rglob("*.py")}
    found = [path for path, text in contents.items() for _ in range(text.count(fault.old))]
    if len(found) != 1:
        raise ValueError(f"fault {fault.number}: {len(found)} places in vit/ have {fault.old!r}")
    return found[0], contents[found[0]].replace(fault.old, fault.new)


def copy_repository(target: Path) -> None:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, files.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    if (ROOT / "data").exists():
        (target / "data").symlink_to((ROOT / "data").resolve())


def group_tests(module: Path, copy: Path) -> list[list[str]]:
    """Return the test file of a module, those that name it, and the others, small ones first."""
    package = r"\.".join(module.relative_to(copy).parent.parts)
    names = re.compile(rf"{package}(\.| import .*\b){module.stem}\b")
    groups: list[list[str]] = [[], [], []]
    for path in sorted((copy / "tests").rglob("test_*.py"), key=lambda path: path.stat().st_size):
        named = names.search(path.read_text()) is not None
        group = 0 if path.stem == f"test_{module.stem}" else 1 if named else 2
        groups[group].append(str(path.relative_to(copy)))
    groups[2].remove("tests/test_faults.py")
    return groups


def run_in_fork(copy: Path, tests: list[str]) -> None:
    with Path(f"{copy}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.chdir(copy)
    os.environ["PYTHONPATH"] = sys.path[0] = str(copy)
    options = ["-x", "-m", "not slow", "--tb=no", "-rfE", "--assert=plain"]
    options += ["-p", "no:cacheprovider", f"--basetemp={copy}.tmp"]
    sys.exit(pytest.main([*options, *tests]))


def first_failure(copy: Path, tests: list[str]) -> str | None:
    """Return the first test or file of tests that fails in a copy, or how its process ended."""
    process = FORK.Process(target=run_in_fork, args=(copy, tests))
    process.start()
    process.join(TIMEOUT)
    process.kill()
    process.join()
    if process.exitcode in (0, 5):  # 5: all tests of the files are slow
        return None
    log = Path(f"{copy}.log").read_text()
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", log, re.MULTILINE)
    return failed[1] if failed else f"exit code {process.exitcode}"


def catch(fault: Fault, copy: Path, near: bool) -> str | None:
    """Return the first test that fails with a fault in a copy, and passes without it."""
    module, faulty = find_fault(fault, copy)
    original = module.read_text()
    # Python would take a compiled file of the same second and size.
    shutil.rmtree(module.parent / "__pycache__", ignore_errors=True)
    module.write_text(faulty)
    try:
        groups = [group for group in group_tests(module, copy)[: 2 if near else 3] if group]
        test = next(filter(None, (first_failure(copy, group) for group in groups)), None)
    finally:
        shutil.rmtree(module.parent / "__pycache__", ignore_errors=True)
        module.write_text(original)
    if test is None:
        return None
    control = [test] if "test_" in test else groups[0]
    if first_failure(copy, control):
        raise RuntimeError(
            f"{control[0]} fails without a fault, too: make the fast tests pass first"
        )
    return test


def try_fault(fault: Fault, folder: Path, near: bool) -> bool:
    copy = folder / str(os.getpid())
    if not copy.exists():
        copy_repository(copy)
    test = catch(fault, copy, near)
    result = f"caught by {test}" if test else f"survived: {fault.old!r} -> {fault.new!r}"
    print(f"{fault.number:3} {fault.area:10} {result}", flush=True)
    return test is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", type=int, nargs="+", metavar="NUMBER", help="faults; else all")
    parser.add_argument("--near", action="store_true", help="run the tests that name the module")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time (default: 1)")
    options = parser.parse_args()
    chosen = [f for f in read_faults() if options.only is None or f.number in options.only]
    for fault in chosen:
        find_fault(fault)  # raises if it is gone
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in LIBRARIES:
        importlib.import_module(name)
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(options.jobs, mp_context=FORK) as pool,
    ):
        results = [pool.submit(try_fault, f, Path(folder), options.near) for f in chosen]
        try:
            caught = sum(result.result() for result in results)
        finally:
            pool.shutdown(cancel_futures=True)
    print(f"caught {caught} of {len(chosen)} faults")


if __name__ == "__main__":
    main()
