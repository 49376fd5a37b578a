"""The wheel and the source archive, built from what git tracks, and used where nothing else of fxquant is."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import fxquant

ROOT = Path(__file__).parents[1]
HOMES = {"fxquant": ROOT / "fxquant", "fxquant/passes": ROOT / "passes", "fxquant/kernels": ROOT / "kernels"}
IMPORTS = """
import importlib, pathlib, pkgutil, sys
import fxquant
from fxquant.__main__ import main
assert pathlib.Path(fxquant.__file__).parent.parent == pathlib.Path(sys.argv[1]), fxquant.__file__
names = [module.name for module in pkgutil.walk_packages(fxquant.__path__, "fxquant.")]
outside = ("onnx", "gluon", "lightning", "transformers", "triton")
for name in names:
    if not name.endswith("__main__") and not any(part in name for part in outside):
        importlib.import_module(name)
print(len(names))
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both, built beside a copy, since a build leaves files in its source."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    folder = tmp_path_factory.mktemp("package")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in tracked.splitlines():
        if (ROOT / name).is_file():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "source" / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(folder / "source")]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout[-3000:] + built.stderr[-3000:]
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "installed")
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder / "unpacked", filter="data")
    return folder


def run(folder: Path, arguments: list[str], cwd: Path) -> str:
    """Runs Python where the unpacked wheel comes before everything else."""
    env = {**os.environ, "PYTHONPATH": str(folder / "installed"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-P", *arguments], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_wheel_has_every_file_of_the_package_and_no_other(archives: Path) -> None:
    packed = {
        str(path.relative_to(archives / "installed")) for path in (archives / "installed").rglob("*") if path.is_file()
    }
    kept = {name for name in packed if ".dist-info/" not in name}
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    expected = {
        f"{place}/{(ROOT / name).relative_to(home)}"
        for place, home in HOMES.items()
        for name in tracked
        if (ROOT / name).is_relative_to(home) and (ROOT / name).is_file()
    }
    assert kept == expected


def test_metadata(archives: Path) -> None:
    (path,) = (archives / "installed").glob("*.dist-info/METADATA")
    metadata = email.message_from_string(path.read_text(encoding="utf-8"))
    assert metadata["Version"] == fxquant.__version__ and metadata["Author"] == "fxquant contributors"
    assert metadata["Description-Content-Type"] == "text/markdown" and metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Keywords"] and metadata.get_all("Classifier")
    assert "](" not in str(metadata.get_payload()), "links of README.md lead nowhere on an index"


def test_wheel_is_enough(archives: Path) -> None:
    printed = run(archives, ["-c", IMPORTS, str(archives / "installed")], archives)
    assert int(printed.splitlines()[-1]) > 200
    assert fxquant.__version__ in run(archives, ["-m", "fxquant", "--version"], archives)


def test_archive_has_tests_that_run(archives: Path) -> None:
    (root,) = (archives / "unpacked").iterdir()
    for name in ("LICENSE", "CHANGELOG.md", "mkdocs.yml", "docs/start.md", "tests/golden", "tests/conftest.py"):
        assert (root / name).exists(), name
    printed = run(archives, ["-m", "pytest", "-p", "no:cacheprovider", "tests/test_formats.py"], root)
    assert " passed" in printed
