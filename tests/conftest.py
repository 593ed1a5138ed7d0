"""What all tests share: where the real photographs are, a folder of JPEGs made on the spot, the markers, what an
unmarked test may take, and that a test is skipped where a package that it needs is absent."""

from __future__ import annotations

import gc
import importlib.util
import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import cloudpickle
import lacking
import pytest
from lacking import PACKAGES
from pictures import jpeg_bytes, smooth_image
from warm import warm_interpreters

from benchmarks.interpreter import hasten

# A shell's background jobs are started with ctrl-C ignored, and hand that on; programs that tests start must hear it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in each run, and no limit of time on a busy machine.
if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import settings

    settings.register_profile("gpuload", deadline=None, derandomize=True)
    settings.load_profile("gpuload")

# Triton's kernels run in its interpreter where there is no GPU; it is asked for before a kernel is declared.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

TESTS = Path(__file__).parent
SHARED = Path(os.environ.get("GPULOAD_SHARED", TESTS.parent.parent / "shared"))


# What whole folders are.
FOLDERS = {
    "tests/faults/": "processes",
    "tests/frameworks/": "processes",
    "tests/recipes/": "slow",
    "notebooks/": "processes",
}
# Where tests are about what loaders give, and not about how workers start: these are forked, with what each worker
# imports. Two of them take 0.1 CPU seconds, and 0.5 as fresh interpreters.
FORKED = tuple(
    f"tests/{room}/"
    for room in ("batches", "bits", "datasets", "loader", "recipes", "simulated", "stage", "targets", "transforms")
)
IS_OF_XDIST = "PYTEST_XDIST_WORKER" in os.environ
OF_THIS_PYTEST = ("PYTEST_ADDOPTS", "PYTEST_DISABLE_PLUGIN", "PYTEST_PLUGINS", "PYTEST_TIMEOUT", "PYTEST_XDIST_")
BOOTSTRAP = str(TESTS.parent / "gpuload" / "workers" / "bootstrap.py")
# Folders whose tests need one, whatever error they would fail with.
NEEDED = {"tests/stage/dali/": "DALI", "tests/stage/kornia/": "kornia"}


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what follows from where a test is, or from its name: Triton's kernels are interpreted for "fused". Notebooks
    come first: they take longest, and at the end one process would run them while the others have nothing to do."""
    items.sort(key=lambda item: not item.nodeid.startswith("notebooks/"))
    for item in items:
        if "fused" in item.nodeid:
            item.add_marker("interpreter")
        for folder, marker in FOLDERS.items():
            if item.nodeid.startswith(folder):
                item.add_marker(marker)
        for folder, name in NEEDED.items():
            if item.nodeid.startswith(folder) and is_absent(name):
                item.add_marker(pytest.mark.skip(f"{PACKAGES[name]} is not installed"))


def is_absent(name: str) -> bool:
    """Whether this is what errors call an optional package that is not installed."""
    return name in PACKAGES and lacking.is_absent(PACKAGES[name])


def absence(error: BaseException | None) -> str | None:
    """The optional package whose absence an error comes from, by itself or by what caused it; else None."""
    while error is not None:
        names: list[str] = []
        if isinstance(error, ModuleNotFoundError):
            parts = (error.name or "").split(".")
            names = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
        elif type(error).__name__ == "BackendError":
            words = re.findall(r"[\w.]+\b", str(error))  # "ray" is not in "array"
            names = [name for name in PACKAGES if name in words]
        for name in filter(is_absent, names):
            return PACKAGES[name]
        error = error.__cause__
    return None


class TestModule(pytest.Module):
    """A module of tests; skipped where it imports a package that is absent."""

    __test__ = False

    def _getobj(self):
        try:
            return super()._getobj()
        except self.CollectError as error:
            if (package := absence(error)) is not None:
                pytest.skip(f"{package} is not installed", allow_module_level=True)
            raise


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return TestModule.from_parent(parent, path=module_path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Skip a test that finds an optional package absent."""
    try:
        return (yield)
    except Exception as error:
        if (package := absence(error)) is not None:
            pytest.skip(f"{package} is not installed")
        raise


@pytest.hookimpl(wrapper=True, specname="pytest_runtest_setup")
def pytest_setup_of_fixtures() -> Iterator[None]:
    """Skip a test whose fixtures find one absent."""
    return (yield from pytest_runtest_call())


def pytest_collection_finish() -> None:
    """Let what tests define travel to workers by value, as a notebook's classes do: a worker that imported a module of
    tests would import torch and pytest with it, which took 1.95 CPU seconds in place of 0.2. Not what refers to
    torchvision, which can only be imported in the tests' own way.

    What is there by now stays: a collection of garbage need not look through it, which took half a second. And what
    the environment tells this pytest is taken out of it: it is not for those that tests start. Not before: xdist's
    processes inherit the variables, and this is not called in the one that starts them.
    """
    for name in list(os.environ):
        if name.startswith(OF_THIS_PYTEST):
            del os.environ[name]
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if path and Path(path).is_relative_to(TESTS) and not any(map(_is_torchvisions, vars(module).values())):
            cloudpickle.register_pickle_by_value(module)
    gc.collect()
    gc.freeze()


def _is_torchvisions(value: object) -> bool:
    return isinstance(value, ModuleType) and value.__name__.partition(".")[0] == "torchvision"


@cache
def why_no_cuda() -> str | None:
    """Why no CUDA device can be used here, or None where one can."""
    import torch

    with warnings.catch_warnings(record=True) as caught:  # a driver too old for torch is told by a warning
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return None
    return "; ".join(str(warning.message) for warning in caught) or "torch finds no CUDA device"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked `cuda` where there is no CUDA device; fail it where GPULOAD_REQUIRE_CUDA=1."""
    if item.get_closest_marker("interpreter") and os.environ.get("TRITON_INTERPRET") == "1" and not is_absent("triton"):
        hasten()
    if item.get_closest_marker("cuda") and (reason := why_no_cuda()):
        if os.environ.get("GPULOAD_REQUIRE_CUDA") == "1":
            pytest.fail(f"GPULOAD_REQUIRE_CUDA=1, but {reason}", pytrace=False)
        pytest.skip(f"needs a CUDA device: {reason}")


FAILED: set[str] = set()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        FAILED.add(report.nodeid)


@pytest.hookimpl(trylast=True)  # when its reports are on their way
def pytest_runtest_logfinish(nodeid: str) -> None:
    """End a process of xdist whose CUDA context a test has broken: later ones would fail too. xdist starts another."""
    torch = sys.modules.get("torch")
    if nodeid in FAILED and IS_OF_XDIST and torch is not None and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(3)


@pytest.fixture(autouse=True)
def _on_fake_devices(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests marked `cuda` run on fake devices where fakecuda/build.py started Python."""
    if lacking.IS_FAKE and request.node.get_closest_marker("cuda"):
        from fakecuda.running import on_fake_devices

        with on_fake_devices():
            yield
    else:
        yield


@pytest.fixture(scope="session")
def forked_workers() -> Iterator[type[subprocess.Popen]]:
    with warm_interpreters("import gpuload.workers.main", BOOTSTRAP) as popen:
        yield popen


@pytest.fixture(autouse=True)
def _workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork workers where their start does not matter."""
    if request.node.nodeid.startswith(FORKED) and not request.node.get_closest_marker("fresh"):
        monkeypatch.setattr(subprocess, "Popen", request.getfixturevalue("forked_workers"))


@pytest.fixture(scope="session")
def warm_popen() -> Iterator[type[subprocess.Popen]]:
    with warm_interpreters() as popen:
        yield popen


@pytest.fixture
def warm(warm_popen: type[subprocess.Popen], monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers and programs in Python have torch imported when they begin: for tests that are about what comes later."""
    monkeypatch.setattr(subprocess, "Popen", warm_popen)


@pytest.fixture(scope="session")
def warm_popen_of_torchvision() -> Iterator[type[subprocess.Popen]]:
    paths = [str(TESTS), str(TESTS.parent)]
    with warm_interpreters(f"import sys; sys.path[:0] = {paths}; import originals; originals.torchvision()") as popen:
        yield popen


@pytest.fixture
def warm_torchvision(warm_popen_of_torchvision: type[subprocess.Popen], monkeypatch: pytest.MonkeyPatch) -> None:
    """As `warm`, for workers that import torchvision, which takes as long again."""
    monkeypatch.setattr(subprocess, "Popen", warm_popen_of_torchvision)


@pytest.fixture(scope="session")
def photos() -> list[Path]:
    """The paths of real photographs, sorted; the test is skipped where there are none."""
    found = sorted((SHARED / "photos").glob("*.jpg"))
    if not found:
        lacking.skip("photographs", f"none in {SHARED / 'photos'}")
    return found


@pytest.fixture(scope="session")
def corpus() -> Path:
    """The folder of odd and damaged files; the test is skipped where it is absent."""
    folder = SHARED / "corpus"
    if not (folder / "SOURCES.tsv").exists():
        lacking.skip("corpus", f"none in {folder}")
    return folder


@pytest.fixture(scope="session")
def jpeg_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder root/class/*.jpg of 3 classes and 48 made images of 15 sizes."""
    root = tmp_path_factory.mktemp("jpegs")
    for number in range(48):
        folder = root / ("ant", "bee", "cat")[number % 3]
        folder.mkdir(exist_ok=True)
        image = smooth_image(90 + 17 * (number % 5), 120 + 13 * (number % 3), number)
        (folder / f"{number:03d}.jpg").write_bytes(jpeg_bytes(image))
    return root
