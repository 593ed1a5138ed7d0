"""A release, built like `make dist`: the contents of wheel and sdist, and the installed wheel outside this folder."""

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


def run(*command: object, cwd: Path, **further_variables: str) -> str:
    """Run a command without Python's paths to this folder. Return its output."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**environment, **further_variables},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
    return result.stdout + result.stderr


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel."""
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


def test_wheel_has_the_package_and_its_metadata(dist: Path) -> None:
    with zipfile.ZipFile(dist / f"gpuload-{VERSION}-py3-none-any.whl") as wheel:
        names = set(wheel.namelist())
        metadata = email.message_from_bytes(wheel.read(f"gpuload-{VERSION}.dist-info/METADATA"))
    sources = [*(ROOT / "gpuload").rglob("*.py"), *(ROOT / "gpuload").rglob("*.pyi")]
    expected = {*(path.relative_to(ROOT).as_posix() for path in sources), "gpuload/py.typed"}
    assert {name for name in names if ".dist-info/" not in name} == {*expected, "gpuload/inspection/page.html"}, (
        "the wheel lacks files of the package, or has further files: see [tool.hatch] in pyproject.toml"
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [word for word in metadata.get_all("Requires-Dist") or [] if "extra ==" not in word]
    packages = {re.match(r"[\w-]+", word)[0] for word in required}
    assert packages == {"cloudpickle", "numpy", "pillow", "simplejpeg", "torch"}, "dependencies changed: edit this set"
    assert metadata.get_all("Provides-Extra") == sorted(project["optional-dependencies"])
    assert metadata["Version"] == VERSION
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = metadata.get_payload()
    assert text.startswith("# gpuload")
    assert re.findall(r"\]\((?!https://|#)[^)]*\)", text) == [], "these links are dead on the package's page"


def test_twine_accepts_wheel_and_sdist(dist: Path) -> None:
    lacking.require("twine")
    output = run(sys.executable, "-m", "twine", "check", "--strict", *sorted(dist.iterdir()), cwd=dist)
    assert output.count("PASSED") == 2, output


def test_sdist_has_the_files_of_git_and_runs_tests(sdist: Path) -> None:
    files = {path.relative_to(sdist).as_posix() for path in sdist.rglob("*") if path.is_file()}
    if (ROOT / ".git").exists():
        listed = run("git", "ls-files", "--cached", "--", ".", cwd=ROOT).splitlines()
        assert {name for name in listed if (ROOT / name).exists()} - files == set()
    assert {"docs/data.md", "notebooks/first_steps.ipynb", "constraints.txt", "tests/bits/recorded.json"} <= files
    tests = ["tests/project/test_pages.py", "tests/rng/test_philox.py"]
    output = run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests, cwd=sdist)
    assert re.search(r"^\d+ passed", output, re.MULTILINE), output


@pytest.fixture(scope="module")
def installed_bin(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of commands of an environment with the wheel, which finds its dependencies in this environment."""
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", "--without-pip", "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    (wheel,) = dist.glob("*.whl")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    # Packages of an environment that a .pth file names are found, but its own .pth files, by which gpuload is
    # installed for development, are not read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    location = run(python, "-c", "import gpuload; print(gpuload.__file__)", cwd=folder)
    assert Path(location.strip()).is_relative_to(site)
    return python.parent


def test_installed_wheel_runs_the_demo(installed_bin: Path, tmp_path: Path) -> None:
    lacking.require("typer", "skimage")
    assert run(installed_bin / "gpuload", "--version", cwd=tmp_path) == f"gpuload {VERSION}\n"
    options = ["--images=16", "--seconds=0.1", "--rounds=1", "--workers=1", "--batch-size=8"]
    output = run(installed_bin / "gpuload", "demo", *options, cwd=tmp_path)
    assert "images/s" in output
    assert (tmp_path / "demo-out" / "inspect.html").stat().st_size > 10_000


def test_installed_wheel_passes_doctor(installed_bin: Path, tmp_path: Path) -> None:
    lacking.require("typer")
    assert VERSION in run(installed_bin / "gpuload", "doctor", cwd=tmp_path)
