"""Where optional packages are missing, pytest skips the tests that are marked or import them, or does not start."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

TESTS = Path(__file__).parents[1]
DEPENDENCIES = ("kornia", "simplejpeg", "nvidia.dali", "nvidia.nvimgcodec")  # of gpuload and its extras
ABSENT = (*DEPENDENCIES, "hypothesis", "rich", "scipy", "timm")


def run_pytest(tmp_path: Path, *arguments: str, absent: tuple[str, ...] = ABSENT, target: str = "") -> tuple[int, str]:
    """Run pytest where importing `absent` fails, for a target of make. Return its exit status and its output."""
    (tmp_path / "without_them.py").write_text(f"import sys\nsys.modules |= dict.fromkeys({absent!r})\n")
    plugins = ["-p", "without_them", "-p", "no:hypothesispytest", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugins, "-c", str(TESTS.parent / "pyproject.toml"), *arguments],
        cwd=TESTS.parent,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
            "GPULOAD_REQUIRE_PACKAGES": target,
        },
        capture_output=True,
        text=True,
        timeout=280,
    )
    return result.returncode, result.stdout + result.stderr


# The outcome of a file with this content.
OUTCOMES = {
    "import kornia\ndef test_it():\n    pass": "skipped",
    "from kornia.enhance import normalize\ndef test_it():\n    pass": "skipped",
    "import no_such_package": "error",
    "from helpers import lacking\n@lacking.needs('simplejpeg')\ndef test_it():\n    import simplejpeg": "skipped",
    "def test_it():\n    import simplejpeg": "failure",
    "import pytest\n@pytest.fixture\ndef jpeg():\n    import simplejpeg\ndef test_it(jpeg):\n    pass": "error",
    "def test_it():\n    raise ModuleNotFoundError(name='simplejpeg')": "failure",
    "def test_it():\n"
    "    from gpuload.stage import compile_stage\n"
    "    from gpuload.transforms import CenterCrop, Chain\n"
    "    compile_stage(Chain([CenterCrop(8)]), device='cpu', backend='kornia')": "failure",
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Run pytest once on a file for each content, and return the outcomes of each."""
    folder = tmp_path_factory.mktemp("absent")
    shutil.copy(TESTS / "conftest.py", folder)
    files = {f"test_{number}": content for number, content in enumerate(OUTCOMES)}
    for name, content in files.items():
        (folder / f"{name}.py").write_text(content + "\n")
    results = folder / "results.xml"
    options = ["--continue-on-collection-errors", "--junitxml", str(results), "--rootdir", str(folder), str(folder)]
    _, output = run_pytest(folder, *options)
    assert results.exists(), output
    outcomes: dict[str, list[str]] = {content: [] for content in OUTCOMES}
    for case in ElementTree.parse(results).getroot().iter("testcase"):
        [name] = {*case.attrib["classname"].split("."), case.attrib["name"]} & files.keys()
        outcomes[files[name]] += [child.tag for child in case] or ["passed"]
    return outcomes


@pytest.mark.parametrize("content", OUTCOMES)
def test_only_marked_tests_and_modules_that_import_an_absent_package_are_skipped(outcomes, content) -> None:
    assert outcomes[content] == [OUTCOMES[content]]


def test_make_target_does_not_start_without_the_packages_that_it_requires(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it():\n    pass\n")
    shutil.copy(TESTS / "conftest.py", tmp_path)
    options = ("--rootdir", str(tmp_path), str(tmp_path / "test_it.py"))
    status, output = run_pytest(tmp_path, *options, absent=("kornia", "scipy"), target="test")
    assert status == pytest.ExitCode.USAGE_ERROR, output
    assert "make test requires packages that are not installed" in output
    assert ": kornia, scipy." in output
    assert run_pytest(tmp_path, *options, absent=("kornia", "scipy"))[0] == 0


@pytest.mark.parametrize("folder", ["stage/dali", "stage/kornia"])
def test_tests_of_a_backend_are_skipped_without_its_package(tmp_path: Path, folder: str) -> None:
    status, output = run_pytest(tmp_path, "-m", "", str(TESTS / folder))
    assert status == pytest.ExitCode.NO_TESTS_COLLECTED, output
    assert "failed" not in output.splitlines()[-1], output


@pytest.mark.slow
def test_tests_for_a_gpu_are_collected_without_optional_packages(tmp_path: Path) -> None:
    marked = re.compile(r"^(@|pytestmark = )pytest\.mark\.cuda$", re.MULTILINE)
    files = [str(path) for path in sorted(TESTS.rglob("test_*.py")) if marked.search(path.read_text())]
    expected_status, expected = run_pytest(tmp_path, "--collect-only", "-m", "cuda", *files, absent=())
    status, output = run_pytest(tmp_path, "--collect-only", "-m", "cuda", *files, absent=DEPENDENCIES)
    assert status == expected_status == 0, output
    missing = {line for line in expected.splitlines() if "::" in line} - set(output.splitlines())
    needing = ("tests/stage/dali/", "tests/stage/kornia/")
    assert [line for line in missing if not line.startswith(needing)] == []
