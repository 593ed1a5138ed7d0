"""tests/conftest.py: which tests are skipped without a package or a device, and when pytest does not start."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from helpers import lacking

pytestmark = pytest.mark.processes

TESTS = Path(__file__).parents[1]
DEPENDENCIES = ("kornia", "simplejpeg", "nvidia.dali", "nvidia.nvimgcodec")  # of gpuload and its extras
ABSENT = (*DEPENDENCIES, "hypothesis", "rich", "scipy", "timm")


def run_pytest(*arguments: str, **environment: str) -> tuple[int, str]:
    """Run pytest with this project's configuration. Return its exit status and its output."""
    options = ["-q", "-p", "no:cacheprovider", "-c", str(TESTS.parent / "pyproject.toml")]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *arguments],
        cwd=TESTS.parent,
        env={**os.environ, "GPULOAD_REQUIRE_PACKAGES": "", **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )
    return result.returncode, result.stdout + result.stderr


def run_pytest_on(folder: Path, text: str, *options: str, **environment: str) -> tuple[int, str]:
    """Run pytest on a file with this text, next to a copy of conftest.py."""
    shutil.copy(TESTS / "conftest.py", folder)
    (folder / "test_example.py").write_text(text)
    return run_pytest("--rootdir", str(folder), *options, str(folder / "test_example.py"), **environment)


def run_pytest_without(absent: tuple[str, ...], folder: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    """Run pytest where importing the packages `absent` fails."""
    (folder / "without_them.py").write_text(f"import sys\nsys.modules |= dict.fromkeys({absent!r})\n")
    options = ["-p", "without_them", "-p", "no:hypothesispytest"]
    return run_pytest(*options, *arguments, PYTHONPATH=os.pathsep.join([str(folder), *sys.path]), **environment)


# The outcome of a test, or of a file of tests, with this text.
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
    """The outcomes of each text of `OUTCOMES` in one run of pytest."""
    folder = tmp_path_factory.mktemp("absent")
    shutil.copy(TESTS / "conftest.py", folder)
    files = {f"test_{number}": text for number, text in enumerate(OUTCOMES)}
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text + "\n")
    results = folder / "results.xml"
    options = ["--continue-on-collection-errors", "--junitxml", str(results), "--rootdir", str(folder), str(folder)]
    _, output = run_pytest_without(ABSENT, folder, *options)
    assert results.exists(), output
    tags: dict[str, list[str]] = {text: [] for text in OUTCOMES}
    for case in ElementTree.parse(results).getroot().iter("testcase"):
        [name] = {*case.attrib["classname"].split("."), case.attrib["name"]} & files.keys()
        tags[files[name]] += [child.tag for child in case] or ["passed"]
    return tags


@pytest.mark.parametrize("text", OUTCOMES)
def test_only_marked_tests_and_modules_that_import_an_absent_package_are_skipped(outcomes, text) -> None:
    assert outcomes[text] == [OUTCOMES[text]]


def test_make_target_does_not_start_without_a_package_that_it_requires(tmp_path: Path) -> None:
    (tmp_path / "test_example.py").write_text("def test_it():\n    pass\n")
    shutil.copy(TESTS / "conftest.py", tmp_path)
    options = ("--rootdir", str(tmp_path), str(tmp_path / "test_example.py"))
    status, output = run_pytest_without(("kornia", "scipy"), tmp_path, *options, GPULOAD_REQUIRE_PACKAGES="test")
    assert status == pytest.ExitCode.USAGE_ERROR, output
    assert "make test requires packages that are not installed" in output
    assert ": kornia, scipy." in output
    status, output = run_pytest_without(("kornia", "scipy"), tmp_path, *options, GPULOAD_REQUIRE_PACKAGES="")
    assert status == 0, output


@pytest.mark.parametrize("folder", ["stage/dali", "stage/kornia"])
def test_tests_of_a_backend_are_skipped_without_its_package(tmp_path: Path, folder: str) -> None:
    status, output = run_pytest_without(ABSENT, tmp_path, "-m", "", str(TESTS / folder))
    assert status == pytest.ExitCode.NO_TESTS_COLLECTED, output
    assert not re.search("failed|passed", output.splitlines()[-1]), output


@pytest.mark.slow
def test_cuda_tests_are_collected_without_optional_packages(tmp_path: Path) -> None:
    marked = re.compile(r"^(@|pytestmark = )pytest\.mark\.cuda$", re.MULTILINE)
    files = [str(path) for path in sorted(TESTS.rglob("test_*.py")) if marked.search(path.read_text())]
    arguments = ["--collect-only", "-m", "cuda", *files]
    complete_status, complete_output = run_pytest_without((), tmp_path, *arguments)
    status, output = run_pytest_without(DEPENDENCIES, tmp_path, *arguments)
    assert status == complete_status == 0, output
    lost = {line for line in complete_output.splitlines() if "::" in line} - set(output.splitlines())
    assert [line for line in lost if not line.startswith(("tests/stage/dali/", "tests/stage/kornia/"))] == []


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("require", "exit_status", "message"),
    [("0", 0, "1 skipped"), ("1", 1, "GPULOAD_REQUIRE_CUDA=1, but torch finds no CUDA device")],
)
def test_cuda_marker_without_a_device_skips_or_fails_if_required(
    tmp_path: Path, require: str, exit_status: int, message: str
) -> None:
    text = "import pytest\n\n@pytest.mark.cuda\ndef test_it():\n    pass\n"
    status, output = run_pytest_on(tmp_path, text, GPULOAD_REQUIRE_CUDA=require, CUDA_VISIBLE_DEVICES="")
    assert status == exit_status, output
    assert message in output, output


def test_process_with_a_broken_cuda_context_is_replaced(tmp_path: Path) -> None:
    lacking.require("xdist")
    text = (
        "import torch\n\nBROKEN = []\ntorch.cuda.is_initialized = lambda: True\n\n"
        "def synchronize():\n    if BROKEN:\n        raise RuntimeError('illegal access')\n\n"
        "torch.cuda.synchronize = synchronize\n\n"
        "def test_first():\n    BROKEN.append(1)\n    raise AssertionError('expected')\n\n"
        "def test_second():\n    torch.cuda.synchronize()\n"
    )
    _, output = run_pytest_on(tmp_path, text, "-n", "1")
    assert "AssertionError: expected" in output, output
    assert "1 passed" in output
