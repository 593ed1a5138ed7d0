"""nvImageCodec itself, on the CPU, through the path that a GPU takes; and what it does where decoders are missing."""

from __future__ import annotations

import io
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pictures import jpeg_bytes, smooth_image
from PIL import Image
from stage.decode.test_images import KINDS, Photos, assert_same, batches, damaged, photo

import gpuload as gl
from gpuload.decode import Decode, Decoder
from gpuload.stage.decode import choose, nvimagecodec
from gpuload.stage.decode.backend import NoRoom, Pixels, Refused, Source
from gpuload.stage.decode.nvimagecodec import CPU, ENGINE, GPU, NvImageCodec, load_library

HERE = torch.device("cpu")
DEVICE = gl.Decode(where="device")


@pytest.fixture(scope="module")
def library() -> Any:
    return load_library()


def source(data: bytes, *, grey: bool = False) -> Source:
    header = Decoder(Decode()).header(gl.Encoded(data))
    region = (0, 0, header.height, header.width)
    return Source(np.frombuffer(data, np.uint8), header.height, header.width, grey, region)


@pytest.mark.filterwarnings("ignore:.*it was (left out|replaced by):RuntimeWarning")
def test_batches_are_those_of_workers_to_the_last_bit():
    kinds = [kind for kind in KINDS for _ in range(2)]
    files = Photos([KINDS[kind][0](number) for number, kind in enumerate(kinds)])
    expected = batches(files, on_error="skip")
    for decode in (DEVICE, gl.Decode(where="both", device_share=0.5)):
        found = batches(files, decode=decode, on_error="skip")
        assert_same(found, expected)
    stats = batches(files, decode=DEVICE, on_error="skip")[2].stats()
    plain = sum(KINDS[kind][1] == "device" for kind in kinds)
    assert stats.decoders[CPU] == plain
    assert sum(stats.device_refused.values()) == sum("refused" in KINDS[k][1] or "after" in KINDS[k][1] for k in kinds)


@pytest.mark.parametrize("upright", [False, True])
def test_orientation_is_applied_once(upright):
    exif = Image.Exif()
    files = []
    for orientation in range(1, 9):
        exif[0x0112] = orientation
        files.append(photo(orientation, exif=exif.tobytes()))
    given: dict[str, Any] = {"batch_size": 8}
    expected = batches(Photos(files), decode=gl.Decode(exif=upright), **given)
    found = batches(Photos(files), decode=gl.Decode(exif=upright, where="device"), **given)
    assert_same(found, expected)
    assert found[2].stats().decoders == {CPU: 8}


def test_a_crop_of_the_whole_image_is_what_its_region_decodes_to(library):
    decoder, cpu = NvImageCodec(HERE, 1, library), Decoder(Decode(), prefer="nvimgcodec")
    for subsampling in (0, 1, 2):
        data = jpeg_bytes(smooth_image(83, 121, subsampling), subsampling=subsampling)
        header, given = cpu.header(gl.Encoded(data)), gl.Encoded(data)
        [whole] = decoder.decode([source(data)])
        assert isinstance(whole, Pixels)
        for top, left, height, width in (
            (0, 0, 83, 121),
            (7, 3, 50, 64),
            (82, 120, 1, 1),
            (16, 16, 16, 16),
            (1, 0, 9, 1),
        ):
            region = cpu.decode(given, header, (top, left, height, width))
            assert np.array_equal(whole.tensor.numpy()[top : top + height, left : left + width], region)


REGIONS = ((7, 3, 50, 64), (82, 120, 1, 1), (16, 16, 16, 16), (1, 0, 9, 1), (0, 120, 83, 1), (0, 57, 1, 64))


@pytest.mark.parametrize("grey", [False, True])
def test_regions_have_the_bits_of_the_whole_image(library, grey):
    decoder = NvImageCodec(HERE, 1, library)
    wholes = NvImageCodec(HERE, 1, library, no_regions=lambda name: "never tried")
    assert (decoder.regions, decoder.note) == (True, "")
    assert (wholes.regions, wholes.note) == (False, f"{CPU} decodes whole images: never tried")
    for subsampling in (0, 1, 2):
        whole = source(jpeg_bytes(smooth_image(83, 121, subsampling), subsampling=subsampling), grey=grey)
        sources = [whole, *(whole._replace(region_tlhw=region) for region in REGIONS)]
        for one, other, asked in zip(decoder.decode(sources), wholes.decode(sources), sources, strict=True):
            assert isinstance(one, Pixels)
            assert isinstance(other, Pixels)
            assert (one.whole, other.whole) == (asked is whole, True)
            top, left, height, width = asked.region_tlhw
            assert torch.equal(one.tensor, other.tensor[top : top + height, left : left + width])


def test_only_the_image_that_libjpeg_complains_about_is_refused(library):
    decoder = NvImageCodec(HERE, 1, library)
    files = [photo(number) for number in range(6)]
    files[4] = damaged(files[4])
    found = decoder.decode([source(data) for data in files])
    assert [isinstance(one, Pixels) for one in found] == [True] * 4 + [False, True]
    assert "Corrupt JPEG data" in found[4].why  # type: ignore[union-attr]


def test_grey_and_coloured_images_come_in_one_call(library):
    grey = KINDS["grey"][0](1)
    found = NvImageCodec(HERE, 1, library).decode([source(photo(0)), source(grey, grey=True), source(grey)])
    assert [tuple(one.tensor.shape)[2] for one in found if isinstance(one, Pixels)] == [3, 1, 3]


def test_one_that_is_too_old_is_not_used_on_a_device_either(monkeypatch):
    old = ModuleType("nvidia.nvimgcodec")
    monkeypatch.setattr(old, "__version__", "0.7.0", raising=False)
    monkeypatch.setitem(sys.modules, "nvidia.nvimgcodec", old)
    with pytest.raises(ImportError, match=r"^version 0\.7\.0, and 0\.9 or newer is needed$"):
        load_library()
    choice = choose(DEVICE, HERE, 1, backend="torch")
    assert "nvImageCodec cannot be imported (ImportError: version 0.7.0, and 0.9 or newer is needed)" in str(
        choice.text
    )
    if choice.decoder is not None:
        choice.decoder.close()


class CodeStream:
    """Its picture, or a region of it."""

    def __init__(self, data: np.ndarray, region: Any = None) -> None:
        self.data, self.region = data, region
        self.width, self.height = Image.open(io.BytesIO(data.tobytes())).size

    def tobytes(self) -> bytes:
        return self.data.tobytes()

    def get_sub_code_stream(self, region: Any) -> CodeStream:
        return CodeStream(self.data, region)


class Library:
    """A module ``nvimgcodec`` whose decoders do as they are told: ``works`` for each kind of backend."""

    NVIMGCODEC_DEVICE_CPU_ONLY = -99999
    CodeStream = CodeStream
    BackendKind = SimpleNamespace(CPU_ONLY="cpu", GPU_ONLY="gpu", HYBRID_CPU_GPU="hybrid", HW_GPU_ONLY="engine")
    ColorSpec = SimpleNamespace(GRAY="grey", SRGB="rgb")
    Backend = staticmethod(lambda kind: kind)
    Region = staticmethod(lambda *box: box)

    def __init__(self, **works: Any) -> None:
        self.works = works
        self.made: list[dict[str, Any]] = []

    def DecodeParams(self, **given: Any) -> Any:
        return SimpleNamespace(**given)

    def Decoder(self, **given: Any) -> Any:
        self.made.append(given)
        works = self.works[given["backends"][0]]

        def decode(codes: list[Any], params: Any, cuda_stream: int) -> Any:
            return works(codes)

        return SimpleNamespace(decode=decode)


def pictures(codes: list[Any]) -> list[Any]:
    found = []
    for code in codes:
        picture = np.array(Image.open(io.BytesIO(code.tobytes())))
        picture = picture if picture.ndim == 3 else picture[:, :, None]
        top, left, bottom, right = code.region or (0, 0, *picture.shape[:2])
        found.append(picture[top:bottom, left:right])
    return found


def nothing(codes: list[Any]) -> list[Any]:
    return [None] * len(codes)


def other(codes: list[Any]) -> list[Any]:
    return [255 - picture for picture in pictures(codes)]


def full(codes: list[Any]) -> list[Any]:
    raise RuntimeError("CUDA Runtime failure: 'out of memory'")


def gpu(monkeypatch: pytest.MonkeyPatch, given: dict[str, Any] | None = None, **works: Any) -> NvImageCodec:
    """What is made for a GPU, with what is `given`; its results lie on this CPU."""
    monkeypatch.setattr(torch, "from_dlpack", torch.from_numpy)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    return NvImageCodec(torch.device("cuda", 1), 3, Library(**works), **(given or {}))


def test_the_jpeg_engine_comes_first_and_the_gpu_gets_what_it_refuses(monkeypatch):
    wide = {photo(1)}

    def engine(codes: list[Any]) -> list[Any]:
        return [None if code.tobytes() in wide else pictures([code])[0] for code in codes]

    decoder = gpu(monkeypatch, engine=engine, gpu=pictures)
    assert (decoder.names, decoder.note) == ((ENGINE, GPU), "")
    found = decoder.decode([source(photo(0)), source(photo(1)), source(photo(2))])
    assert [one.decoder for one in found if isinstance(one, Pixels)] == [ENGINE, GPU, ENGINE]
    assert decoder._library.made == [
        {"device_id": 1, "max_num_cpu_threads": 3, "backends": kinds, "options": ":fancy_upsampling=1"}
        for kinds in (["engine"], ["gpu", "hybrid"])
    ]


def test_regions_go_to_the_decoders_that_have_them(monkeypatch):
    """What the engine refuses of them, the other decoder gives whole."""
    refused = {photo(1)}

    def engine(codes: list[Any]) -> list[Any]:
        return [None if code.tobytes() in refused else pictures([code])[0] for code in codes]

    given = {"no_regions": lambda name: "" if name == ENGINE else "it ended by SIGSEGV"}
    decoder = gpu(monkeypatch, given, engine=engine, gpu=pictures)
    assert not decoder.regions
    assert decoder.note == f"{GPU} decodes whole images: it ended by SIGSEGV"
    parts = [source(photo(number))._replace(region_tlhw=(3, 5, 20, 30)) for number in range(2)]
    by_engine, by_gpu = decoder.decode(parts)
    assert isinstance(by_engine, Pixels)
    assert isinstance(by_gpu, Pixels)
    assert (by_engine.decoder, by_engine.whole, tuple(by_engine.tensor.shape)) == (ENGINE, False, (20, 30, 3))
    assert (by_gpu.decoder, by_gpu.whole, tuple(by_gpu.tensor.shape)) == (GPU, True, (51, 69, 3))


def test_one_decoder_may_be_asked_for_alone(monkeypatch):
    decoder = gpu(monkeypatch, {"only": GPU}, engine=pictures, gpu=pictures)
    assert (decoder.names, len(decoder._library.made)) == ((GPU,), 1)


def test_a_gpu_without_an_engine_says_so(monkeypatch):
    decoder = gpu(monkeypatch, engine=nothing, gpu=pictures)
    assert decoder.names == (GPU,)
    assert decoder.note == "no JPEG engine: it gave no image and no reason"


def test_no_engine_writes_to_memory_that_torch_shares(monkeypatch):
    """It writes when it is called, and torch frees in the order of its streams."""
    monkeypatch.setattr(torch._C, "_cuda_getAllocatorBackend", lambda: "cudaMallocAsync", raising=False)
    decoder = gpu(monkeypatch, engine=pictures, gpu=pictures)
    assert decoder.names == (GPU,)
    assert decoder.note.startswith("no JPEG engine: it would write to memory that torch's allocator cudaMallocAsync ")


def test_a_decoder_whose_picture_is_another_one_is_not_used(monkeypatch):
    decoder = gpu(monkeypatch, engine=other, gpu=pictures)
    assert decoder.names == (GPU,)
    assert "its picture is another one (" in decoder.note


def test_a_gpu_that_decodes_nothing_is_an_error_that_says_why(monkeypatch):
    with pytest.raises(RuntimeError) as there:
        gpu(monkeypatch, engine=nothing, gpu=other)
    assert str(there.value).startswith(f"{ENGINE}: it gave no image and no reason; {GPU}: its picture is another one (")


def test_a_full_device_is_told_apart_from_a_bad_image(monkeypatch):
    decoder = gpu(monkeypatch, engine=nothing, gpu=pictures)
    decoder._library.works["gpu"] = full
    decoder._decoders[GPU] = decoder._make(["gpu"], 1)
    with pytest.raises(NoRoom, match="out of memory"):
        decoder.decode([source(photo(0))])


def test_an_image_that_is_not_as_large_as_its_header_says_is_refused(library):
    lying = source(photo(0))._replace(height=20, region_tlhw=(0, 0, 20, 70))
    decoder = NvImageCodec(HERE, 1, library)
    assert decoder.decode([lying]) == [Refused("the header says 20×70 pixels, it decodes others")]
    found, good = decoder.decode([lying._replace(height=90, region_tlhw=(60, 0, 30, 9)), source(photo(0))])
    assert found == Refused("ValueError: the header says 90×70 pixels, it finds others")
    assert isinstance(good, Pixels)


def test_an_image_beyond_the_librarys_limit_is_not_given_to_it(library, monkeypatch):
    decoder = NvImageCodec(HERE, 1, library)
    monkeypatch.setattr(nvimagecodec, "NV_MAX_BYTES", 10_600)
    large, small = decoder.decode([source(photo(3)), source(photo(0))])
    assert isinstance(small, Pixels)
    assert large == Refused("ValueError: an image is beyond its limit")
