"""The package: locked dependencies, its contents, running outside a checkout, imports."""

import ast
import hashlib
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections import defaultdict
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from PIL import Image

from vit import __version__

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
BUILD = PYPROJECT["build-system"]["requires"]


def by_name(lines: list[str]) -> dict[str, Requirement]:
    found = map(Requirement, lines)
    return {canonicalize_name(requirement.name): requirement for requirement in found}


RANGES = {
    "requirements.txt": PYPROJECT["project"]["dependencies"] + BUILD,
    "requirements-dev.txt": EXTRAS["dev"],
    "benchmarks/requirements.txt": EXTRAS["benchmarks"],
}


@pytest.mark.parametrize(("file", "ranges"), RANGES.items())
def test_package_allows_every_pinned_version(file, ranges):
    pinned, allowed = pins((ROOT / file).read_text()), by_name(ranges)
    build_tools = set(by_name(BUILD))  # pinned once, for both
    assert pinned.keys() | build_tools == allowed.keys() | build_tools
    for name, (version,) in pinned.items():
        assert allowed[name].specifier.contains(version), f"{file}: {name}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run_pip("wheel", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT))
    (path,) = folder.iterdir()
    return path


def run_pip(*words: str) -> None:
    """Run pip without the network."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    done = subprocess.run([*command, "--no-index", "--no-deps"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_wheel_holds_the_package_with_its_data_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        configs = {
            Path(name).name: archive.read(name) for name in names if name.startswith("vit/configs/")
        }
    metadata = f"vit_from_scratch-{__version__}.dist-info"
    assert {name.partition("/")[0] for name in names} == {"vit", metadata}
    listed = subprocess.run(
        ["git", "ls-files", "vit"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert set(listed.stdout.splitlines()) <= names
    assert {"vit/weights/cifar10.safetensors", "vit/py.typed"} <= names
    assert "vit/tensorboard_plugin/static/index.js" in names
    assert configs == {path.name: path.read_bytes() for path in (ROOT / "configs").glob("*.yaml")}
    assert wheel.stat().st_size < 13e6


def test_vendored_files_are_those_that_their_readme_names():
    folder = ROOT / "vit/tensorboard_plugin/static/onnxruntime"
    lines = re.findall(r"^    ([0-9a-f]{64})  (\S+)$", (folder / "README.md").read_text(), re.M)
    found = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "README.md"}
    assert {name: hashlib.sha256(data).hexdigest() for name, data in found.items()} == {
        name: digest for digest, name in lines
    }


@pytest.fixture(scope="module")
def commands(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of commands of a virtual environment that has the wheel, but no checkout.

    It sees the dependencies that are installed here, but not an editable install of this package: a
    folder that a .pth file names is searched for modules, not for more .pth files.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=os.name != "nt")
    scripts = folder / ("Scripts" if os.name == "nt" else "bin")
    run_pip("--python", str(scripts / "python"), "install", str(wheel))
    paths = {"base": str(folder), "platbase": str(folder)}
    packages = Path(sysconfig.get_path("purelib", vars=paths))
    outer = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "dependencies.pth").write_text("\n".join(outer))
    return scripts


def run_installed(commands: Path, cwd: Path, name: str, *words: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(commands / name), *words], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_tensorboard_finds_the_attention_tab_of_the_installed_package(commands, tmp_path):
    program = (
        "import vit\n"
        "from tensorboard.default import get_dynamic_plugins\n"
        "(plugin,) = [p for p in get_dynamic_plugins() if p.plugin_name == 'attention']\n"
        "context = type('Context', (), {'data_provider': None})\n"
        "print(vit.__file__, *plugin(context).get_plugin_apps())\n"
    )
    file, *routes = run_installed(commands, tmp_path, "python", "-c", program).split()
    assert Path(file).is_relative_to(commands.parent)
    assert {"/index.js", "/runs", "/images", "/details", "/weights"} <= set(routes)


@pytest.mark.slow
def test_installed_commands_find_the_bundled_recipes_and_model(commands, tmp_path):
    words = ("--config", "shapes", "--print_config")
    assert run_installed(commands, tmp_path, "vit-train", *words).startswith("out: runs/shapes\n")
    Image.new("RGB", (60, 40), "green").save(tmp_path / "photo.png")
    printed = run_installed(commands, tmp_path, "vit-eval", "cifar10", "photo", "photo.png")
    assert sum(line.endswith("%") for line in printed.splitlines()) == 5
    assert len([*tmp_path.glob("runs/included/cifar10/eval/photos/photo_*_sheet.png")]) == 1


def pins(text: str) -> dict[str, set[str]]:
    """Return the versions of each package; markers may choose among several."""
    found = defaultdict[str, set[str]](set)
    for name, version in re.findall(r"^([\w.-]+)(?:\[[\w,]+\])?==(\S+)", text, re.MULTILINE):
        found[canonicalize_name(name)].add(version)
    return found


@pytest.mark.parametrize("lock", ["requirements.lock", "requirements-dev.lock"])
def test_lock_holds_every_pin_with_hashes(lock):
    text = (ROOT / lock).read_text()
    sources = ["requirements.txt"]
    if "dev" in lock:
        sources += ["requirements-dev.txt", "requirements.lock"]
    for source in sources:
        wanted = pins((ROOT / source).read_text())
        found = {name: pins(text).get(name) for name in wanted}
        assert wanted and found == wanted, f"make lock: {source} changed"
    lines = [line for line in re.sub(r" \\\n", " ", text).splitlines() if line[:1] not in "# "]
    for line in lines:
        assert re.fullmatch(r"[\w.-]+(\[\w+\])?==\S+( ; .+?)?( +--hash=sha256:[0-9a-f]{64})+", line)


# Where a name that a user chooses is looked up, and the names that `vit` itself offers.
LOOKUPS = {"vit/__init__.py", "vit/cli.py", "vit/data/datasets.py", "vit/explain/maps.py"}


def test_modules_are_imported_by_statements_which_the_contracts_see():
    """A string leads to a module only where a table of user-chosen names is looked up."""
    places = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "vit").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Name | ast.Attribute)
        and getattr(node, "id", getattr(node, "attr", ""))
        in ("resolve_name", "import_module", "__import__", "find_loader")
    }
    assert places == LOOKUPS


# What takes seconds to import: torch's compiler, and what is only for figures and other data sets.
SLOW = {"torch._dynamo", "torchvision", "timm", "sklearn", "sympy", "triton"}
CHECK = f"""
import sys
import vit.config, vit.commands.config, vit.cli
print("config", *({{"torch", "matplotlib", "tensorboard", *{SLOW}}} & sys.modules.keys()))
import vit.commands.photo
print("photo", *({{"matplotlib.figure", "tensorboard", *{SLOW}}} & sys.modules.keys()))
import vit.commands.report
print("report", *({SLOW} & sys.modules.keys()))
"""


PLUGIN = f"""
import sys
import vit.tensorboard_plugin.plugin
print("plugin", *({{"torch", "matplotlib", "PIL", *{SLOW}}} & sys.modules.keys()))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "printed"), [(CHECK, ["config", "photo", "report"]), (PLUGIN, ["plugin"])]
)
def test_nothing_imports_what_it_does_not_need(program, printed):
    """So that a mistyped flag is answered at once, and TensorBoard starts as before."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert (done.stdout.split(), done.stderr) == (printed, "")
