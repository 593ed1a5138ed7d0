"""What a loader writes to the log."""

from __future__ import annotations

import gc
import logging
import re
import threading

import numpy as np
import pytest
from helpers import lacking
from loader.test_limits import Where

import gpuload as gl
from gpuload import transforms as T
from gpuload.decode import decoder
from gpuload.decode.jpeg import NvImageCodecRegions

PICTURES = [np.full((20, 24, 3), number, np.uint8) for number in range(6)]
CHAIN = [T.CenterCrop(16), T.RandomPosterize(4), T.ToDtype("float32", scale=True)]


def loader(**options):
    return gl.Loader(PICTURES, 2, **{"transforms": CHAIN, "num_workers": 0, "device": "cpu", **options})


class Heard(logging.Handler):
    """What this thread logs to gpuload's loggers from now on: not what anybody else in this process does, who may be of
    an earlier test. It is heard at "gpuload" itself, whatever others have done to the handlers of the root."""

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
    """Listen from a level on, and collect no garbage: a loader that an earlier test left is closed before."""
    logger, handler = logging.getLogger("gpuload"), Heard()
    level = logger.level
    gc.collect()
    gc.disable()

    def listen(level: int) -> Heard:
        logger.addHandler(handler)
        logger.setLevel(level)
        return handler

    yield listen
    gc.enable()
    logger.setLevel(level)
    logger.removeHandler(handler)


def test_a_session_tells_how_it_works(listen):
    heard = listen(logging.INFO)
    with loader() as found:
        list(found)
        list(found)  # the same session
    begun, jpegs, plan = heard.lines()
    assert begun == (
        "session started: no worker processes (num_workers=0), batches of 2 on cpu, prefetch_factor=2, "
        f"ring_bytes={2 << 30}"
    )
    assert jpegs.startswith("JPEGs: ")
    assert plan == "plan: backend torch on cpu: CenterCrop by torch, RandomPosterize by torch, ToDtype by torch"
    assert {record.levelno for record in heard.records if record.name == "gpuload.loader"} == {logging.INFO}


def test_what_runs_elsewhere_has_its_reason(listen):
    heard = listen(logging.INFO)
    with loader(backend="kornia", transforms=[T.MultiView([[T.JPEG(50)], [T.CenterCrop(8)]])]) as found:
        next(iter(found))
    told = heard.lines()[-1]
    assert told.startswith("plan: backend kornia on cpu: view 1: JPEG by torch (jpeg: Kornia's JPEG gives")
    assert "; view 2: CenterCrop by " in told


def test_a_missing_decoder_is_told_with_its_remedy(listen, monkeypatch):
    def refuse(self):
        raise ImportError("libnvjpeg.so: cannot open")

    monkeypatch.setattr(NvImageCodecRegions, "__init__", refuse)
    heard = listen(logging.INFO)
    with loader() as found:
        next(iter(found))
    assert heard.lines()[1] == (
        "JPEGs: simplejpeg, then Pillow; nvImageCodec: not usable (ImportError: libnvjpeg.so: cannot open). With "
        "nvImageCodec only the region of a crop is decoded: pip install 'gpuload[cu13]', or 'gpuload[cu12]' for CUDA 12"
    )


def test_decoders_that_are_there(listen):
    lacking.nvimgcodec()
    heard = listen(logging.INFO)
    with loader() as found:
        next(iter(found))
    assert heard.lines()[1] == "JPEGs: crops by nvImageCodec, entire images by simplejpeg, other images by Pillow"


def test_nothing_is_put_together_where_nobody_listens(listen, monkeypatch):
    def look(self):
        raise AssertionError("the decoders were looked for")

    monkeypatch.setattr(decoder.Decoder, "jpeg_decoders", property(look))
    heard = listen(logging.WARNING)
    with loader() as found:
        assert len(list(found)) == 3
    assert not heard.records


def test_resuming(listen):
    with loader() as first:
        next(iter(first))
        state = first.state_dict()
    heard = listen(logging.INFO)
    loader().load_state_dict(state)
    assert heard.lines() == ["resuming in epoch 0 at position 2 of 6"]


def test_the_ring_tells_of_its_growth(listen):
    heard = listen(logging.DEBUG)
    with loader() as found:
        list(found)
    told = heard.lines("gpuload.ring")
    assert told
    assert told[0].startswith("the ring grows by a slot of ")
    assert told[0].endswith(f" of {2 << 30} bytes")
    assert {record.levelno for record in heard.records if record.name == "gpuload.ring"} == {logging.DEBUG}


@pytest.mark.processes
def test_a_worker_that_is_started_again(listen, tmp_path):
    heard = listen(logging.INFO)
    with gl.Loader(Where(str(tmp_path / "died")), 2, num_workers=1, device="cpu") as found:
        assert len(list(found)) == 4
    way, told = (record for record in heard.records if record.name == "gpuload.workers")
    assert way.getMessage().startswith("workers are forked from a template (process ")
    assert told.levelno == logging.WARNING
    assert re.fullmatch(
        r"a worker died: worker 0 \(process \d+\): killed by SIGKILL at sample 3 \(position 3\); "
        r"a new worker replaces it \(death 1 of this epoch, max_restarts=10\)",
        told.getMessage(),
    )
    assert heard.lines()[0].startswith("session started: 1 worker, batches of 2 on cpu")


def test_a_program_without_a_log_sees_nothing(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's
    logging.getLogger("gpuload.workers").warning("unasked")
    assert capsys.readouterr().err == ""
