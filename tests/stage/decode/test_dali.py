"""DALI as the device's decoder, on the CPU, through the path that a GPU takes."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import weakref
from typing import Any

import lacking
import numpy as np
import pytest
import torch
from pictures import jpeg_bytes, smooth_image
from stage.decode.test_images import KINDS, Photos, assert_same, batches, damaged, grey, photo, without_tables
from stage.decode.test_nvimagecodec import source

import gpuload as gl
from gpuload.decode import Decode, Decoder
from gpuload.stage.decode import choose
from gpuload.stage.decode.backend import NoRoom, Pixels, Refused
from gpuload.stage.decode.choose import find_decoder

pytestmark = lacking.needs("nvidia.dali")
HERE = torch.device("cpu")
NAME = "DALI (CPU)"
MODULE = sys.modules[choose.__module__]


@pytest.fixture(scope="module")
def decoder() -> Any:
    from gpuload.stage.decode.dali import DaliDecoder

    return DaliDecoder(HERE, 1)


@pytest.mark.filterwarnings("ignore:.*it was (left out|replaced by):RuntimeWarning")
def test_batches_are_those_of_workers_to_the_last_bit():
    kinds = [kind for kind in KINDS for _ in range(2)]
    files = Photos([KINDS[kind][0](number) for number, kind in enumerate(kinds)])
    given: dict[str, Any] = {"on_error": "skip", "backend": "dali"}
    expected = batches(files, **given)
    for decode in (gl.Decode(where="device"), gl.Decode(where="both", device_share=0.5)):
        found = batches(files, decode=decode, **given)
        assert_same(found, expected)
    stats = batches(files, decode=gl.Decode(where="device"), **given)[2].stats()
    assert stats.decoders[NAME] == sum(KINDS[kind][1] == "device" for kind in kinds)
    assert sum(stats.device_refused.values()) == sum("refused" in KINDS[k][1] or "after" in KINDS[k][1] for k in kinds)


@pytest.mark.parametrize("subsampling", [0, 1, 2])
def test_levels_are_libjpegs(decoder, subsampling):
    data = jpeg_bytes(smooth_image(83, 121, subsampling), subsampling=subsampling)
    cpu = Decoder(Decode())
    expected = cpu.decode(gl.Encoded(data), cpu.header(gl.Encoded(data)), (0, 0, 83, 121))
    [found] = decoder.decode([source(data)])
    assert isinstance(found, Pixels)
    assert (found.decoder, found.whole) == (NAME, True)
    assert np.array_equal(found.tensor.numpy(), expected)


def test_orientation_is_not_applied(decoder):
    from PIL import Image

    exif = Image.Exif()
    exif[0x0112] = 6
    [found] = decoder.decode([source(photo(1, exif=exif.tobytes()))])
    assert isinstance(found, Pixels)
    assert tuple(found.tensor.shape) == (51, 69, 3)


def test_only_bad_images_are_refused(decoder):
    files = [photo(number) for number in range(7)]
    files[2], files[5] = damaged(files[2]), without_tables(files[5])
    found = decoder.decode([source(data) for data in files])
    assert [isinstance(one, Pixels) for one in found] == [True, True, False, True, True, False, True]
    assert "Corrupt JPEG data" in found[2].why
    assert "Quantization table 0x00 was not defined" in found[5].why
    for number in (0, 6):
        [alone] = [one.tensor.clone() for one in decoder.decode([source(files[number])])]
        assert torch.equal(decoder.decode([source(data) for data in files])[number].tensor, alone)


def test_grey_and_coloured_images_come_in_one_call(decoder):
    found = decoder.decode([source(photo(0)), source(grey(1), grey=True), source(grey(1))])
    assert [tuple(one.tensor.shape)[2] for one in found if isinstance(one, Pixels)] == [3, 1, 3]


def test_an_image_that_is_not_as_large_as_its_header_says_is_refused(decoder):
    lying = source(photo(0))._replace(height=20)
    assert decoder.decode([lying]) == [Refused("the header says 20×70 pixels, it decodes others")]


def test_an_image_beyond_the_librarys_limit_is_not_given_to_it(decoder, monkeypatch):
    from gpuload.stage.decode import dali

    monkeypatch.setattr(dali, "NV_MAX_BYTES", 10_600)
    large, small = decoder.decode([source(photo(3)), source(photo(0))])
    assert isinstance(small, Pixels)
    assert large == Refused("ValueError: an image is beyond its limit")


def test_a_full_device_is_told_apart_from_a_bad_image(decoder, monkeypatch):
    def full(sources: Any, grey: bool) -> Any:
        raise RuntimeError("CUDA allocation failed")

    monkeypatch.setattr(decoder, "_call", full)
    with pytest.raises(NoRoom, match="CUDA allocation failed"):
        decoder.decode([source(photo(0)), source(photo(1))])


def test_closing_gives_dalis_context_back():
    from gpuload.stage.decode.dali import DaliDecoder

    made = DaliDecoder(HERE, 1)
    made.decode([source(photo(0))])
    engine = weakref.ref(made._engine)
    made.close()
    assert engine() is None


def test_what_a_gpu_is_asked_for(monkeypatch):
    """All that its engine takes, and chroma as libjpeg has it; what is printed without an error is about no image."""
    from gpuload.stage.decode import dali

    asked: list[dict[str, Any]] = []
    real = dali.ndd.decoders.image

    class Engine(dali.Engine):
        def __init__(self, device: torch.device, threads: int) -> None:
            assert (device.type, threads) == ("cuda", 3)
            super().__init__(HERE, 1)
            self.on_cpu = False

        def _stream(self) -> Any:
            return contextlib.nullcontext()

    def image(files: Any, **given: Any) -> Any:
        asked.append(given)
        libc = ctypes.CDLL(None)
        libc.fputs(b"a remark\n", ctypes.c_void_p.in_dll(libc, "stderr"))
        return real(files, **given | {"device": "cpu"})

    monkeypatch.setattr(dali, "Engine", Engine)
    monkeypatch.setattr(dali.ndd.decoders, "image", image)
    monkeypatch.setattr(Engine, "_context", lambda self, threads, stream: context)
    context = (dali.ndd.Device("cpu"), dali.ndd.EvalContext(num_threads=1, device_id=None))
    made = dali.DaliDecoder(torch.device("cuda", 1), 3)
    [found] = made.decode([source(photo(0))])
    assert isinstance(found, Pixels)
    assert (made.names, found.decoder) == (("DALI (mixed)",), "DALI (mixed)")
    wanted = {"device": "gpu", "hw_decoder_load": 1.0, "jpeg_fancy_upsampling": True, "adjust_orientation": False}
    assert [wanted.items() <= one.items() for one in asked] == [True, True]
    assert made.note == ""


@pytest.mark.parametrize(
    ("torchs", "dalis", "load"),
    [("native", "1", 1.0), ("cudaMallocAsync", "", 1.0), ("cudaMallocAsync", "0", 1.0), ("cudaMallocAsync", "1", 0.0)],
)
def test_the_engine_is_left_out_where_dali_and_torch_share_a_pool(monkeypatch, torchs, dalis, load):
    from gpuload.stage.decode import dali

    monkeypatch.setattr(torch._C, "_cuda_getAllocatorBackend", lambda: torchs, raising=False)
    monkeypatch.setenv("DALI_USE_CUDA_MALLOC_ASYNC", dalis)
    monkeypatch.setattr(dali, "Engine", lambda device, threads: None)
    monkeypatch.setattr(dali, "complaint_about", lambda decode: "")
    made = dali.DaliDecoder(torch.device("cuda", 1), 1)
    assert (made._options["hw_decoder_load"], made.note.startswith("no JPEG engine: ")) == (load, load == 0)


# -- which of the two ------------------------------------------------------------------------------------------------


def plan(**given: Any) -> str:
    decode = gl.Decode(where="device")
    return str(gl.Loader(Photos([photo(0)]), num_workers=0, device="cpu", decode=decode, **given).plan().decoder)


def test_dali_decodes_for_its_own_backend_or_where_nvimagecodec_cannot(monkeypatch):
    assert plan() == "nvImageCodec (batch) on cpu"
    assert plan(backend="dali") == f"{NAME} on cpu"
    monkeypatch.setitem(sys.modules, "nvidia.nvimgcodec", None)
    assert plan().startswith(f"{NAME} on cpu (nvImageCodec cannot be imported (ModuleNotFoundError")


def broken(*args: Any) -> Any:
    raise RuntimeError("DALI is not well today")


def test_where_dali_cannot_nvimagecodec_decodes_and_the_plan_says_why(monkeypatch):
    monkeypatch.setattr(MODULE, "_dali", broken)
    assert plan(backend="dali") == "nvImageCodec (batch) on cpu (DALI is not well today)"
    monkeypatch.setattr(MODULE, "_nvimagecodec", broken)
    with pytest.raises(RuntimeError, match=r"^DALI is not well today; DALI is not well today$"):
        find_decoder(HERE, 1)


@pytest.mark.parametrize("backend", ["dali", "auto", "torch"])
def test_a_decoder_is_told_that_the_stage_is_dalis(backend):
    found = find_decoder(HERE, 1, backend)
    try:
        assert found.takes_freed_memory == (backend == "dali")
    finally:
        found.close()


def test_dali_that_is_not_installed_is_not_mentioned(monkeypatch):
    monkeypatch.setattr(MODULE.DaliBackend, "missing", lambda device: "not installed")
    monkeypatch.setattr(MODULE, "_nvimagecodec", broken)
    with pytest.raises(RuntimeError, match=r"^DALI is not well today$"):
        find_decoder(HERE, 1, "dali")
