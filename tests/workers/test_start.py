"""The time that workers take to start: its measurement, and its report in `stats()` and the log."""

from __future__ import annotations

import importlib
import logging
import os
import re
import signal
import sys
import textwrap
import traceback
from importlib.machinery import SourceFileLoader
from types import SimpleNamespace

import pytest

import gpuload as gl
from gpuload.workers.start import DEFAULT_REMEDY, REMEDIES, Start, Stopwatch

# The code of modules, which advance the fake clock when they are imported.
MODULES = {
    "own/own_module.py": "fake_clock.now += 1\nimport big\nfake_clock.now += 2\nimport json, helper, csv\n",
    "own/helper.py": "fake_clock.now += 4\nimport big.more\n",
    "own/broken.py": "fake_clock.now += 8\n1 / 0\n",
    "site-packages/big/__init__.py": "fake_clock.now += 16\nimport small\n",
    "site-packages/big/more.py": "fake_clock.now += 32\n",
    "site-packages/small.py": "fake_clock.now += 64\nimport dis\n",
}


@pytest.fixture
def clock(monkeypatch, tmp_path):
    """A clock that is advanced by the imports of `MODULES`."""
    monkeypatch.setitem(sys.modules, "fake_clock", clock := SimpleNamespace(now=0.0))  # pyright: ignore[reportArgumentType]
    for name, text in MODULES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"import fake_clock\n{text}")
        monkeypatch.syspath_prepend(str(tmp_path / name.split("/")[0]))
    importlib.invalidate_caches()
    yield clock
    for name in ("own_module", "helper", "big", "big.more", "small"):
        sys.modules.pop(name, None)


def test_stopwatch_attributes_import_times_to_modules(clock):
    stopwatch = Stopwatch(lambda: clock.now)
    clock.now += 128
    with stopwatch.measure():
        clock.now += 256
        own_module = importlib.import_module("own_module")
        importlib.import_module("own_module")
        with pytest.raises(ZeroDivisionError):
            importlib.import_module("broken")
        clock.now += 512
    clock.now += 1024
    importlib.import_module("base64")
    start = Start.unpack(stopwatch.pack(), started_at=-3.0)
    # The time of a library includes the libraries that it imports; the time of the user's modules does not.
    expected = {"big": 16.0 + 64 + 32, "broken": 8.0, "helper": 4.0, "own_module": 3.0}
    assert {name: seconds for name, seconds in start.imports_s.items() if seconds} == expected
    assert list(start.imports_s)[:4] == list(expected)
    assert (start.interpreter_s, start.unpickling_s, start.seconds) == (3.0, 768.0, 0.0)
    assert start.interpreter_start_s == 3 + 768 + 127  # the imports take 1 + 2 + 4 + … + 64 s
    assert type(own_module.__spec__.loader) is type(own_module.__loader__) is SourceFileLoader


def test_stopwatch_leaves_no_frame_in_tracebacks_and_no_import_hook(clock):
    before = importlib._bootstrap._find_and_load
    frames = []
    for context in (Stopwatch().measure(), pytest.MonkeyPatch.context()):
        with pytest.raises(ZeroDivisionError) as caught, context:
            import broken  # pyright: ignore[reportMissingImports] # noqa: F401
        frames.append([frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)][1:])
    assert frames[0] == frames[1]
    assert importlib._bootstrap._find_and_load is before


def test_stopwatch_measures_nothing_if_the_import_function_is_missing(clock, monkeypatch):
    monkeypatch.setattr("gpuload.workers.start.importlib", SimpleNamespace(_bootstrap=SimpleNamespace()))
    stopwatch = Stopwatch(lambda: clock.now)
    with stopwatch.measure():
        clock.now += 1
    assert Start.unpack(stopwatch.pack(), started_at=0.0) == Start()


def test_start_describes_its_times_and_advises_on_the_slowest_import():
    start = Start(9.0, 0.25, {"torchvision": 4.0, "torch": 3.0, "own": 0.5, "yaml": 0.25, "re": 0.001}, 0.125)
    assert start.describe() == (
        "interpreter 0.25 s, imports 7.75 s (torchvision 4.00 s, torch 3.00 s, own 0.50 s, others 0.25 s), "
        "unpickling 0.12 s"
    )
    assert Start(1.0, 0.5, {"re": 0.001}).describe() == "interpreter 0.50 s, imports 0.00 s, unpickling 0.00 s"
    assert start.advise() == f"torchvision took longest: {REMEDIES['torchvision']}"
    assert Start(9.0, imports_s={"own": 1.0}).advise() == f"own took longest: {DEFAULT_REMEDY}"
    assert Start(9.0, imports_s={"own": 0.5}).advise() == ""
    assert Start().advise() == ""


@pytest.fixture
def slow_dataset(monkeypatch, tmp_path):
    """A dataset from a module that is imported slowly. Its workers are separate interpreters unless `is_forkable`."""
    text = """
        import os, time
        time.sleep(0.5 if os.environ.get("GPULOAD_TEST_SLOW") else 0)
        class Slow:
            def __init__(self, is_forkable): self.is_forkable = is_forkable
            def __setstate__(self, state):
                vars(self).update(state)
                self.pipe = None if self.is_forkable else os.pipe()
            def __len__(self): return 8
            def __getitem__(self, index): return index
    """
    (tmp_path / "slow_module.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("slow_module")
    monkeypatch.setenv("GPULOAD_TEST_SLOW", "1")
    yield module.Slow
    del sys.modules["slow_module"]


@pytest.mark.processes
@pytest.mark.parametrize("module", ["PIL.Image", "PIL.ImageMode"])
def test_pillows_plugins_are_imported_if_the_dataset_imports_pil_image(monkeypatch, tmp_path, module):
    text = f"""
        import sys, {module}
        class Data:
            def __len__(self): return 4
            def __getitem__(self, index):
                return "PIL.PngImagePlugin" in sys.modules
    """
    (tmp_path / "with_pillow.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(str(tmp_path))
    dataset = importlib.import_module("with_pillow").Data()
    with make_loader(dataset, workers=1) as loader:
        assert [batch.tolist() for batch in loader] == 2 * [2 * [module == "PIL.Image"]]
    del sys.modules["with_pillow"]


def make_loader(dataset, workers=2):
    return gl.Loader(dataset, 2, num_workers=workers, device="cpu")


def stats_once_ready(loader):
    """Wait until all workers are ready, which may be after the end of an epoch, and return the statistics."""
    while not loader._session.engine.ready:
        loader._session.engine.collect_events(0.05)
    return loader.stats()


@pytest.mark.processes
@pytest.mark.parametrize("is_forkable", [True, False], ids=["forked", "fresh"])
def test_stats_start_describes_the_sessions_first_workers(slow_dataset, is_forkable):
    with make_loader(slow_dataset(is_forkable)) as loader:
        batches = iter(loader)
        assert loader.stats().start == Start()
        list(batches)
        first_stats = stats_once_ready(loader)
        os.kill(loader._session.engine.pids[0], signal.SIGKILL)
        list(loader)
        stats_once_ready(loader)
        # A session has one start.
        assert loader.stats().start == loader.stats(since=first_stats).start == first_stats.start
    start = first_stats.start
    assert start.imports_s["slow_module"] >= 0.5
    assert start.interpreter_s > 0
    assert start.seconds >= start.interpreter_start_s
    assert "start     " in str(first_stats)
    assert re.search(r"\(slow_module \d+\.\d+ s", str(first_stats))
    assert first_stats.as_dict()["start"]["imports_s"] == start.imports_s


def test_stats_start_is_empty_without_workers(slow_dataset):
    with make_loader(slow_dataset(True), workers=0) as loader:
        list(loader)
        assert loader.stats().start == Start()
        assert "until workers were ready" not in str(loader.stats())


@pytest.mark.processes
@pytest.mark.parametrize(("limit_s", "count"), [(0.1, 1), (1000.0, 0)])
def test_a_start_of_more_than_slow_start_s_is_logged_with_its_module(slow_dataset, monkeypatch, caplog, limit_s, count):
    monkeypatch.setattr("gpuload.workers.pool.SLOW_START_S", limit_s)
    with caplog.at_level(logging.INFO, "gpuload.workers"), make_loader(slow_dataset(True)) as loader:
        list(loader)
        stats_once_ready(loader)
        list(loader)
    lines = [line for line in caplog.messages if line.startswith("workers were ready after ")]
    assert len(lines) == count
    for line in lines:
        assert line.endswith(f". slow_module took longest: {DEFAULT_REMEDY}")
