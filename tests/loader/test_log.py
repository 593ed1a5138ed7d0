"""The log of a loader: session, decoders, plan, resuming, growth of the ring, restarted workers."""

from __future__ import annotations

import gc
import logging
import re
import threading

import numpy as np
import pytest
from helpers import lacking
from loader.affinity_samples import AffinitySamples

import gpuload as gl
from gpuload import transforms as T
from gpuload.decode import decoder
from gpuload.decode.jpeg import NvImageCodecRegions

PICTURES = [np.full((20, 24, 3), number, np.uint8) for number in range(6)]
CHAIN = [T.CenterCrop(16), T.RandomPosterize(4), T.ToDtype("float32", scale=True)]


def make_loader(**options):
    return gl.Loader(PICTURES, 2, **{"transforms": CHAIN, "num_workers": 0, "device": "cpu", **options})


class ThreadLogHandler(logging.Handler):
    """A handler of the log records of this thread. Loaders of earlier tests may log in other threads."""

    def __init__(self) -> None:
        super().__init__()
        self.thread_id = threading.get_ident()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == self.thread_id:
            self.records.append(record)

    def lines(self, name: str = "gpuload.loader") -> list[str]:
        return [record.getMessage() for record in self.records if record.name == name]


@pytest.fixture
def listen():
    """Return a function that starts to record at a level.

    Garbage is collected before, and not during the test, since closing a loader of an earlier test would log.
    """
    logger, handler = logging.getLogger("gpuload"), ThreadLogHandler()
    level_before = logger.level
    gc.collect()
    gc.disable()

    def listen(level: int) -> ThreadLogHandler:
        logger.addHandler(handler)
        logger.setLevel(level)
        return handler

    yield listen
    gc.enable()
    logger.setLevel(level_before)
    logger.removeHandler(handler)


def test_session_start_is_logged_with_decoders_and_plan(listen):
    log = listen(logging.INFO)
    with make_loader() as loader:
        list(loader)
        list(loader)  # the same session
    begun, jpegs, plan = log.lines()
    assert begun == (
        "session started: no worker processes (num_workers=0), batches of 2 on cpu, prefetch_factor=2, "
        f"ring_bytes={2 << 30}"
    )
    assert jpegs.startswith("JPEGs: ")
    assert plan == "plan: backend torch on cpu: CenterCrop by torch, RandomPosterize by torch, ToDtype by torch"
    assert {record.levelno for record in log.records if record.name == "gpuload.loader"} == {logging.INFO}


def test_plan_in_the_log_says_why_a_transform_runs_on_a_different_backend(listen):
    transforms = [T.MultiView([[T.JPEG(50)], [T.CenterCrop(8)]])]
    *_, plan = log_first_batch(listen(logging.INFO), backend="kornia", transforms=transforms)
    assert plan.startswith("plan: backend kornia on cpu: view 1: JPEG by torch (jpeg: Kornia's JPEG gives")
    assert "; view 2: CenterCrop by " in plan


def log_first_batch(log: ThreadLogHandler, **options) -> list[str]:
    with make_loader(**options) as loader:
        next(iter(loader))
    return log.lines()


def test_unusable_nvimagecodec_is_logged_with_its_remedy(listen, monkeypatch):
    def raise_import_error(self):
        raise ImportError("libnvjpeg.so: cannot open")

    monkeypatch.setattr(NvImageCodecRegions, "__init__", raise_import_error)
    _, jpegs, _ = log_first_batch(listen(logging.INFO))
    assert jpegs == (
        "JPEGs: simplejpeg, then Pillow; nvImageCodec: not usable (ImportError: libnvjpeg.so: cannot open). With "
        "nvImageCodec only the region of a crop is decoded: pip install 'gpuload[cu13]', or 'gpuload[cu12]' for CUDA 12"
    )


@lacking.needs("nvidia.nvimgcodec")
def test_usable_decoders_are_logged(listen):
    _, jpegs, _ = log_first_batch(listen(logging.INFO))
    assert jpegs == "JPEGs: crops by nvImageCodec, entire images by simplejpeg, other images by Pillow"


def test_log_lines_are_not_computed_at_a_level_that_drops_them(listen, monkeypatch):
    def fail(self):
        raise AssertionError("the decoders were determined")

    monkeypatch.setattr(decoder.Decoder, "jpeg_decoders", property(fail))
    log = listen(logging.WARNING)
    with make_loader() as loader:
        assert len(list(loader)) == 3
    assert not log.records


def test_load_state_dict_logs_where_it_resumes(listen):
    with make_loader() as first:
        next(iter(first))
        state = first.state_dict()
    log = listen(logging.INFO)
    make_loader().load_state_dict(state)
    assert log.lines() == ["resuming in epoch 0 at position 2 of 6"]


def test_ring_growth_is_logged_at_debug_level(listen):
    log = listen(logging.DEBUG)
    with make_loader() as loader:
        list(loader)
    lines = log.lines("gpuload.ring")
    assert lines
    assert lines[0].startswith("the ring grows by a slot of ")
    assert lines[0].endswith(f" of {2 << 30} bytes")
    assert {record.levelno for record in log.records if record.name == "gpuload.ring"} == {logging.DEBUG}


@pytest.mark.processes
def test_restarted_worker_is_logged_as_a_warning(listen, tmp_path):
    log = listen(logging.INFO)
    with gl.Loader(AffinitySamples(str(tmp_path / "died")), 2, num_workers=1, device="cpu") as loader:
        assert len(list(loader)) == 4
    start, restart = (record for record in log.records if record.name == "gpuload.workers")
    assert start.getMessage().startswith("workers are forked from a template (process ")
    assert restart.levelno == logging.WARNING
    assert re.fullmatch(
        r"a worker died: worker 0 \(process \d+\): killed by SIGKILL at sample 3 \(position 3\); "
        r"a new worker replaces it \(death 1 of this epoch, max_restarts=10\)",
        restart.getMessage(),
    )
    assert log.lines()[0].startswith("session started: 1 worker, batches of 2 on cpu")


def test_warning_without_a_configured_handler_prints_nothing(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's
    logging.getLogger("gpuload.workers").warning("a warning")
    assert capsys.readouterr().err == ""
