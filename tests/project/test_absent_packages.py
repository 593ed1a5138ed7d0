"""On a machine that lacks optional packages, tests that need them are skipped, and no others are lost."""

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


def run_pytest(tmp_path: Path, *arguments: str, absent: tuple[str, ...] = ABSENT) -> tuple[int, str]:
    """Run pytest where importing `absent` fails. Returns its exit status, and what it printed."""
    (tmp_path / "without_them.py").write_text(f"import sys\nsys.modules |= dict.fromkeys({absent!r})\n")
    options = [
        "-q",
        "-p",
        "without_them",
        "-p",
        "no:hypothesispytest",
        "-p",
        "no:cacheprovider",
        "-c",
        str(TESTS.parent / "pyproject.toml"),
    ]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *arguments],
        cwd=TESTS.parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        timeout=280,
    )
    return result.returncode, result.stdout + result.stderr


# What becomes of a test, or of a whole file, that says this.
OUTCOMES = {
    "import kornia": "skipped",
    "from kornia.enhance import normalize": "skipped",
    "import no_such_package": "error",
    "def test_it():\n    import simplejpeg": "skipped",
    "def test_it():\n    import no_such_package": "failure",
    "import pytest\n@pytest.fixture\ndef made():\n    import simplejpeg\ndef test_it(made):\n    pass": "skipped",
    "import pytest\n@pytest.fixture\ndef made():\n    import no_such_package\ndef test_it(made):\n    pass": "error",
    "def test_it():\n    import sys\n    raise ModuleNotFoundError(name='sys')": "failure",
    "def test_it():\n"
    "    from gpuload.stage import compile_stage\n"
    "    from gpuload.transforms import CenterCrop, Chain\n"
    "    compile_stage(Chain([CenterCrop(8)]), device='cpu', backend='kornia')": "skipped",
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What one run of pytest says of each."""
    folder = tmp_path_factory.mktemp("absent")
    shutil.copy(TESTS / "conftest.py", folder)
    files = {f"test_{number}": text for number, text in enumerate(OUTCOMES)}
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text + "\n")
    results = folder / "results.xml"
    options = ["--continue-on-collection-errors", "--junitxml", str(results), "--rootdir", str(folder), str(folder)]
    _, printed = run_pytest(folder, *options)
    assert results.exists(), printed
    tags: dict[str, list[str]] = {text: [] for text in OUTCOMES}
    for case in ElementTree.parse(results).getroot().iter("testcase"):
        [name] = {*case.attrib["classname"].split("."), case.attrib["name"]} & files.keys()
        tags[files[name]] += [child.tag for child in case] or ["passed"]
    return tags


@pytest.mark.parametrize("text", OUTCOMES)
def test_test_that_needs_an_absent_package_is_skipped(outcomes: dict[str, list[str]], text: str) -> None:
    assert outcomes[text] == [OUTCOMES[text]]


def test_module_not_found_error_of_an_installed_package_is_a_failure(tmp_path: Path) -> None:
    shutil.copy(TESTS / "conftest.py", tmp_path)
    (tmp_path / "test_it.py").write_text("def test_it():\n    raise ModuleNotFoundError(name='simplejpeg')\n")
    status, printed = run_pytest(tmp_path, "--rootdir", str(tmp_path), str(tmp_path / "test_it.py"), absent=())
    assert (status, "1 failed" in printed) == (1, True), printed


def test_tests_of_absent_backends_are_skipped(tmp_path: Path) -> None:
    folders = [str(TESTS / "stage" / name) for name in ("dali", "kornia")]
    status, printed = run_pytest(tmp_path, *folders)
    assert status in (0, 5), printed  # 5: not one was left
    assert "failed" not in printed.splitlines()[-1], printed
    assert "passed" not in printed.splitlines()[-1], printed


@pytest.mark.slow
def test_cuda_tests_are_collected_without_optional_packages(tmp_path: Path) -> None:
    marked = re.compile(r"^(@|pytestmark = )pytest\.mark\.cuda$", re.MULTILINE)
    files = [str(path) for path in sorted(TESTS.rglob("test_*.py")) if marked.search(path.read_text())]
    everything = run_pytest(tmp_path, "--collect-only", "-m", "cuda", *files, absent=())
    status, printed = run_pytest(tmp_path, "--collect-only", "-m", "cuda", *files, absent=DEPENDENCIES)
    assert status == everything[0] == 0, printed
    lost = {line for line in everything[1].splitlines() if "::" in line} - set(printed.splitlines())
    needing = ("tests/stage/dali/", "tests/stage/kornia/")
    assert [line for line in lost if not line.startswith(needing)] == []
