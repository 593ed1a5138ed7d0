"""What a release holds: built as `make dist` builds it, looked into, and run where nothing else of this folder is."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from helpers import lacking

import gpuload

pytestmark = [pytest.mark.processes, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
VERSION = gpuload.__version__


def run(*command: object, cwd: Path, **variables: str) -> str:
    """Run a command where no path leads back here. Returns what it printed; a failure shows it."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**kept, **variables},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    lacking.require("build", "hatchling")
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def sdist(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked sdist."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(dist / f"gpuload-{VERSION}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / f"gpuload-{VERSION}"


def test_the_wheel_has_the_package_and_the_metadata(dist: Path) -> None:
    with zipfile.ZipFile(dist / f"gpuload-{VERSION}-py3-none-any.whl") as wheel:
        names = set(wheel.namelist())
        metadata = email.message_from_bytes(wheel.read(f"gpuload-{VERSION}.dist-info/METADATA"))
    sources = [*(ROOT / "gpuload").rglob("*.py"), *(ROOT / "gpuload").rglob("*.pyi")]
    assert {name for name in names if ".dist-info/" not in name} == {
        *(path.relative_to(ROOT).as_posix() for path in sources),
        "gpuload/py.typed",
        "gpuload/inspection/page.html",
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [word for word in metadata.get_all("Requires-Dist") or [] if "extra ==" not in word]
    assert {re.match(r"[\w-]+", word)[0] for word in required} == {
        "cloudpickle", "numpy", "pillow", "simplejpeg", "torch",
    }  # fmt: skip
    assert metadata.get_all("Provides-Extra") == sorted(project["optional-dependencies"])
    assert metadata["Version"] == VERSION
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = metadata.get_payload()
    assert text.startswith("# gpuload")
    assert re.findall(r"\]\((?!https://|#)[^)]*\)", text) == [], "these lead nowhere from the package's page"


def test_the_index_takes_both(dist: Path) -> None:
    lacking.require("twine")
    told = run(sys.executable, "-m", "twine", "check", "--strict", *sorted(dist.iterdir()), cwd=dist)
    assert told.count("PASSED") == 2, told


def test_the_sdist_has_all_that_git_has_and_runs_tests(sdist: Path) -> None:
    held = {path.relative_to(sdist).as_posix() for path in sdist.rglob("*") if path.is_file()}
    if (ROOT / ".git").exists():
        listed = run("git", "ls-files", "--cached", "--", ".", cwd=ROOT).splitlines()
        assert {name for name in listed if (ROOT / name).exists()} - held == set()
    assert {"docs/data.md", "notebooks/first_steps.ipynb", "constraints.txt", "tests/bits/recorded.json"} <= held
    tests = ["tests/project/test_pages.py", "tests/rng/test_philox.py"]
    told = run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests, cwd=sdist)
    assert re.search(r"^\d+ passed", told, re.MULTILINE), told


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of commands of an environment that has the wheel, and finds what it depends on in this one."""
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", "--without-pip", "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    (wheel,) = dist.glob("*.whl")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    # Packages of an environment that a .pth file names are found, but its own .pth files, by which gpuload is
    # installed for development, are not read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    found = run(python, "-c", "import gpuload; print(gpuload.__file__)", cwd=folder)
    assert Path(found.strip()).is_relative_to(site)
    return python.parent


def test_what_is_installed_runs_the_demo(installed: Path, tmp_path: Path) -> None:
    lacking.require("typer", "skimage")
    assert run(installed / "gpuload", "--version", cwd=tmp_path) == f"gpuload {VERSION}\n"
    told = run(
        installed / "gpuload",
        "demo",
        "--images=16",
        "--seconds=0.1",
        "--rounds=1",
        "--workers=1",
        "--batch-size=8",
        cwd=tmp_path,
    )
    assert "images/s" in told
    assert (tmp_path / "demo-out" / "inspect.html").stat().st_size > 10_000


def test_what_is_installed_passes_its_own_examination(installed: Path, tmp_path: Path) -> None:
    lacking.require("typer")
    assert VERSION in run(installed / "gpuload", "doctor", cwd=tmp_path)
