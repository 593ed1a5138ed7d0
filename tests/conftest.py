"""Fixtures and hooks of all tests: real photographs, a generated folder of JPEGs, markers, forked workers, and skipping
of tests whose optional packages are not installed."""

from __future__ import annotations

import gc
import importlib.util
import os
import re
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import cloudpickle
import pytest
from helpers import lacking
from helpers.generated_images import jpeg_bytes, smooth_image
from helpers.warm_interpreters import warm_interpreters

from benchmarks.interpreter import speed_up_interpreter

# A shell starts background jobs with SIGINT ignored, which child processes inherit; tests' programs must receive it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Use the same examples in each run, and no deadline, since the machine may be busy.
if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import settings

    settings.register_profile("gpuload", deadline=None, derandomize=True)
    settings.load_profile("gpuload")

# Without a GPU, Triton's kernels run in its interpreter, which must be selected before a kernel is declared.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

TESTS = Path(__file__).parent
SHARED = Path(os.environ.get("GPULOAD_SHARED", TESTS.parent.parent / "shared"))


MARKERS_BY_FOLDER = {
    "tests/faults/": "processes",
    "tests/frameworks/": "processes",
    "tests/recipes/": "slow",
    "notebooks/": "processes",
}
# Folders and files whose tests check the output of loaders, not the start of workers. Their workers are forked from a
# process with the imports that every worker needs, and with torch, which the datasets of many tests import: two workers
# take 0.1 CPU seconds, instead of 0.5 as fresh interpreters, or 2 if these import torch.
FORKED = (
    *(f"tests/{folder}/" for folder in ("batches", "bits", "dataloader", "datasets", "inspection", "loader", "order")),
    *(f"tests/{folder}/" for folder in ("recipes", "simulated", "stage", "targets", "transforms")),
    *(f"tests/faults/test_{name}.py" for name in ("deaths", "on_error")),
    *(f"tests/workers/test_{name}.py" for name in ("dataset_changes", "pool", "ray")),
)
IS_XDIST_PROCESS = "PYTEST_XDIST_WORKER" in os.environ
PYTEST_VARIABLES = ("PYTEST_ADDOPTS", "PYTEST_DISABLE_PLUGIN", "PYTEST_PLUGINS", "PYTEST_TIMEOUT", "PYTEST_XDIST_")
BOOTSTRAP = str(TESTS.parent / "gpuload" / "workers" / "bootstrap.py")
# Folders and files whose tests need optional packages, without which their modules are not imported.
NEEDED = {
    "tests/cli/": ("rich", "typer"),
    "tests/datasets/stores/test_hdf5.py": ("h5py",),
    "tests/datasets/stores/test_lmdb.py": ("lmdb",),
    "tests/datasets/stores/test_parquet.py": ("pyarrow",),
    "tests/datasets/stores/test_remote.py": ("aiohttp",),
    "tests/datasets/stores/test_remote_datasets.py": ("aiohttp", "h5py", "pyarrow", "typer"),
    "tests/exporters/": ("prometheus_client",),
    "tests/frameworks/test_accelerate.py": ("accelerate",),
    "tests/frameworks/test_lightning.py": ("pytorch_lightning", "torchdata"),
    "tests/frameworks/test_ray.py": ("ray",),
    "tests/frameworks/test_stateful_dataloader.py": ("torchdata",),
    "tests/recipes/test_timm.py": ("timm",),
    "tests/stage/dali/": ("nvidia.dali",),
    "tests/stage/kornia/": ("kornia",),
    "tests/test_control_characters.py": ("h5py", "lmdb", "pyarrow", "typer"),
    "tests/transforms/test_from_albumentations.py": ("albumentations", "cv2"),
    "tests/transforms/test_from_timm.py": ("timm",),
}
# The packages that a test needs because it uses a fixture of this name, or because a parameter has this value.
NEEDED_BY_NAME = {
    "dali": ("nvidia.dali",),
    "hdf5": ("h5py",),
    "hf": ("datasets",),
    "lmdb": ("lmdb",),
    "make_detection": ("pycocotools",),
    "nvImageCodec": ("nvidia.nvimgcodec",),
    "nvimagecodec_on_cpu": ("nvidia.nvimgcodec",),
    "parquet": ("pyarrow",),
    "zstd": ("zstandard",),
}


def needed_by(nodeid: str) -> set[str]:
    """Return the optional packages that a test or a file of tests needs by its path (`NEEDED`)."""
    return {name for path, names in NEEDED.items() if nodeid.startswith(path) for name in names}


def pytest_configure() -> None:
    """Do not start if the target of make that runs pytest requires a package that is not installed."""
    if missing := lacking.missing_packages():
        target = os.environ["GPULOAD_REQUIRE_PACKAGES"]
        raise pytest.UsageError(
            f"make {target} requires packages that are not installed in {sys.prefix}: {', '.join(missing)}. "
            f"make {target} installs them, unless {sys.prefix}/.installed-… says that it has: make clean"
        )


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add the markers that follow from a test's folder or name; "fused" means that Triton's kernels are interpreted.
    Notebooks come first, since they take longest: at the end, one process would run them while the others are idle."""
    items.sort(key=lambda item: not item.nodeid.startswith("notebooks/"))
    for item in items:
        if re.search(r"(?<!re)fused", item.nodeid):  # not "refused"
            item.add_marker("interpreter")
        for folder, marker in MARKERS_BY_FOLDER.items():
            if item.nodeid.startswith(folder):
                item.add_marker(marker)
        needed = {name for marker in item.iter_markers("needs") for name in marker.args} | needed_by(item.nodeid)
        callspec = getattr(item, "callspec", None)
        parameters = [value for value in callspec.params.values() if isinstance(value, str)] if callspec else []
        for name in (*parameters, *getattr(item, "fixturenames", ())):
            needed.update(NEEDED_BY_NAME.get(name, ()))
        if not needed <= lacking.REQUIRED["test"]:
            item.add_marker("integration")
        for name in filter(lacking.is_absent, sorted(needed)):
            item.add_marker(pytest.mark.skip(f"{name} is not installed"))


class TestModule(pytest.Module):
    """A module of tests, skipped if it needs an optional package that is not installed, or imports one by itself."""

    __test__ = False

    def _getobj(self):
        lacking.require(*needed_by(self.nodeid))
        try:
            return super()._getobj()
        except self.CollectError as error:
            if (package := absent_import(error.__cause__)) is not None:
                pytest.skip(f"{package} is not installed", allow_module_level=True)
            raise


def absent_import(error: BaseException | None) -> str | None:
    """Return the optional package whose import by a file of tests or benchmarks failed; None if gpuload imported it."""
    if not isinstance(error, ModuleNotFoundError):
        return None
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    parts = (error.name or "").split(".")
    names = {".".join(parts[:count]) for count in range(1, len(parts) + 1)} & lacking.OPTIONAL
    is_of_gpuload = files[-1].startswith(f"{TESTS.parent / 'gpuload'}/")
    return None if is_of_gpuload else next(filter(lacking.is_absent, names), None)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return TestModule.from_parent(parent, path=module_path)


def pytest_collection_finish() -> None:
    """Prepare the process for running tests, once collection is complete.

    Classes and functions of test modules are pickled by value, like those of a notebook. A worker that imported a test
    module would also import torch and pytest, which took 1.95 CPU seconds instead of 0.2. The exception is modules that
    refer to torchvision, which only tests can import (`helpers.peers`).

    Existing objects are frozen, so that the garbage collector does not traverse them, which took half a second.

    The variables that configure this pytest are removed from the environment, so that programs started by tests do not
    inherit them. This must not happen earlier: xdist's processes inherit the variables from the process that starts
    them, in which this hook is not called.
    """
    for name in list(os.environ):
        if name.startswith(PYTEST_VARIABLES):
            del os.environ[name]
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if path and Path(path).is_relative_to(TESTS) and not any(map(_is_torchvision_module, vars(module).values())):
            cloudpickle.register_pickle_by_value(module)
    gc.collect()
    gc.freeze()


def _is_torchvision_module(value: object) -> bool:
    return isinstance(value, ModuleType) and value.__name__.partition(".")[0] == "torchvision"


@cache
def why_no_cuda() -> str | None:
    """Return why no CUDA device can be used here, or None if one can."""
    import torch

    with warnings.catch_warnings(record=True) as caught:  # torch only warns about a driver that is too old
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return None
    return "; ".join(str(warning.message) for warning in caught) or "torch finds no CUDA device"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked `cuda` if there is no CUDA device, or fail it if GPULOAD_REQUIRE_CUDA=1. Speed up Triton's
    interpreter for tests that use it."""
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1" and not lacking.is_absent("triton")
    if item.get_closest_marker("interpreter") and is_interpreted:
        speed_up_interpreter()
    if item.get_closest_marker("cuda") and (reason := why_no_cuda()):
        if os.environ.get("GPULOAD_REQUIRE_CUDA") == "1":
            pytest.fail(f"GPULOAD_REQUIRE_CUDA=1, but {reason}", pytrace=False)
        pytest.skip(f"needs a CUDA device: {reason}")


FAILED_IDS: set[str] = set()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        FAILED_IDS.add(report.nodeid)


@pytest.hookimpl(trylast=True)  # after the test's reports have been sent
def pytest_runtest_logfinish(nodeid: str) -> None:
    """End an xdist process whose CUDA context a test has broken, since later tests would fail too. xdist starts another
    process."""
    torch = sys.modules.get("torch")
    if nodeid in FAILED_IDS and IS_XDIST_PROCESS and torch is not None and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(3)


@pytest.fixture(autouse=True)
def _on_fake_devices(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run tests marked `cuda` on fake devices if fakecuda/build.py started this Python."""
    if lacking.IS_FAKE and request.node.get_closest_marker("cuda"):
        from fakecuda.running import on_fake_devices

        with on_fake_devices():
            yield
    else:
        yield


@pytest.fixture(scope="session")
def forked_workers() -> Iterator[type[subprocess.Popen]]:
    with warm_interpreters("import torch, gpuload.workers.main", BOOTSTRAP) as popen:
        yield popen


@pytest.fixture(autouse=True)
def _workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the workers of tests in `FORKED`, which do not depend on how workers start."""
    if request.node.nodeid.startswith(FORKED) and not request.node.get_closest_marker("fresh"):
        monkeypatch.setattr(subprocess, "Popen", request.getfixturevalue("forked_workers"))


@pytest.fixture(scope="session")
def warm_popen() -> Iterator[type[subprocess.Popen]]:
    with warm_interpreters() as popen:
        yield popen


@pytest.fixture
def warm(warm_popen: type[subprocess.Popen], monkeypatch: pytest.MonkeyPatch) -> None:
    """Start workers and Python programs with torch already imported, for tests that do not depend on their start."""
    monkeypatch.setattr(subprocess, "Popen", warm_popen)


@pytest.fixture(scope="session")
def warm_popen_of_torchvision() -> Iterator[type[subprocess.Popen]]:
    paths = [str(TESTS), str(TESTS.parent)]
    imports = f"import sys; sys.path[:0] = {paths}; from helpers import peers; peers.torchvision()"
    with warm_interpreters(imports) as popen:
        yield popen


@pytest.fixture
def warm_torchvision(warm_popen_of_torchvision: type[subprocess.Popen], monkeypatch: pytest.MonkeyPatch) -> None:
    """Like `warm`, for workers that import torchvision, which takes as long as torch."""
    monkeypatch.setattr(subprocess, "Popen", warm_popen_of_torchvision)


@pytest.fixture(scope="session")
def photos() -> list[Path]:
    """The paths of real photographs, sorted; the test is skipped if there are none."""
    paths = sorted((SHARED / "photos").glob("*.jpg"))
    if not paths:
        lacking.skip("photographs", f"none in {SHARED / 'photos'}")
    return paths


@pytest.fixture(scope="session")
def corpus() -> Path:
    """The folder of unusual and damaged files; the test is skipped if it does not exist."""
    folder = SHARED / "corpus"
    if not (folder / "SOURCES.tsv").exists():
        lacking.skip("corpus", f"none in {folder}")
    return folder


@pytest.fixture(scope="session")
def jpeg_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder root/class/*.jpg with 3 classes and 48 generated images of 15 sizes."""
    root = tmp_path_factory.mktemp("jpegs")
    for number in range(48):
        folder = root / ("ant", "bee", "cat")[number % 3]
        folder.mkdir(exist_ok=True)
        image = smooth_image(90 + 17 * (number % 5), 120 + 13 * (number % 3), number)
        (folder / f"{number:03d}.jpg").write_bytes(jpeg_bytes(image))
    return root
