"""nvImageCodec itself, on the CPU, through the path that a GPU takes; and what it does where decoders are missing."""

from __future__ import annotations

import importlib
import io
import sys
from contextlib import ExitStack
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.decoders import decoder_by
from helpers.generated_images import jpeg_bytes, smooth_image
from PIL import Image
from simulated.runtime import simulated
from stage.decode.test_images import KINDS, Photos, assert_same, batches, damaged, photo

import gpuload as gl
from gpuload.decode import Decode, Decoder
from gpuload.decode.jpeg import load_nvimgcodec
from gpuload.stage.decode import choose, nvimagecodec
from gpuload.stage.decode.backend import EncodedRegion, OutOfDeviceMemory, Pixels, Refusal, fetch
from gpuload.stage.decode.nvimagecodec import CPU, ENGINE, GPU, NvImageCodec

HERE = torch.device("cpu")
DEVICE = gl.Decode(where="device")


@pytest.fixture(scope="module")
def library() -> Any:
    return load_nvimgcodec()


def source(data: bytes, *, grey: bool = False) -> EncodedRegion:
    header = Decoder(Decode()).header(gl.Encoded(data))
    region = (0, 0, header.height, header.width)
    return EncodedRegion(np.frombuffer(data, np.uint8), header.height, header.width, grey, region)


@pytest.mark.filterwarnings("ignore:.*it was (skipped|replaced by):RuntimeWarning")
def test_batches_are_those_of_workers_to_the_last_bit():
    kinds = [kind for kind in KINDS for _ in range(2)]
    files = Photos([KINDS[kind][0](number) for number, kind in enumerate(kinds)])
    expected = batches(files, on_error="skip")
    for decode in (DEVICE, gl.Decode(where="both", device_share=0.5)):
        found = batches(files, decode=decode, on_error="skip")
        assert_same(found, expected)
    stats = batches(files, decode=DEVICE, on_error="skip")[2].stats()
    plain = sum(KINDS[kind][1] == "device" for kind in kinds)
    assert stats.decode.counts[CPU] == plain
    assert sum(stats.decode.refused.values()) == sum("refused" in KINDS[k][1] or "after" in KINDS[k][1] for k in kinds)


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
    assert found[2].stats().decode.counts == {CPU: 8}


def test_a_crop_of_the_whole_image_is_what_its_region_decodes_to(library):
    decoder, cpu = NvImageCodec(HERE, 1, library), decoder_by("nvImageCodec")
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
            assert np.array_equal(whole.owner[top : top + height, left : left + width], region)


REGIONS = ((7, 3, 50, 64), (82, 120, 1, 1), (16, 16, 16, 16), (1, 0, 9, 1), (0, 120, 83, 1), (0, 57, 1, 64))


@pytest.mark.parametrize("grey", [False, True])
def test_regions_have_the_bits_of_the_whole_image(library, grey):
    decoder = NvImageCodec(HERE, 1, library)
    wholes = NvImageCodec(HERE, 1, library, exact_versions={CPU: ("0.8.7", "1.0")})
    assert (decoder.decodes_regions, decoder.note) == (True, "")
    assert (wholes.decodes_regions, wholes.note) == (
        False,
        f"{CPU} {library.__version__} decodes entire images, not regions",
    )
    for subsampling in (0, 1, 2):
        whole = source(jpeg_bytes(smooth_image(83, 121, subsampling), subsampling=subsampling), grey=grey)
        sources = [whole, *(whole._replace(region_tlhw=region) for region in REGIONS)]
        for one, other, asked in zip(decoder.decode(sources), wholes.decode(sources), sources, strict=True):
            assert isinstance(one, Pixels)
            assert isinstance(other, Pixels)
            assert np.array_equal(one.owner, other.owner)
            assert one.owner.shape[:2] == asked.region_tlhw[2:]


def test_pixels_keep_their_memory(library):
    decoder = NvImageCodec(HERE, 1, library)
    [first] = decoder.decode([source(photo(0))])
    assert isinstance(first, Pixels)
    before = first.owner.copy()
    for number in range(20):
        decoder.decode([source(photo(number))])
    assert np.array_equal(first.owner, before)


def test_only_the_image_that_libjpeg_complains_about_is_refused(library):
    decoder = NvImageCodec(HERE, 1, library)
    files = [photo(number) for number in range(6)]
    files[4] = damaged(files[4])
    found = decoder.decode([source(data) for data in files])
    assert [isinstance(one, Pixels) for one in found] == [True] * 4 + [False, True]
    assert "Corrupt JPEG data" in found[4].reason  # type: ignore[union-attr]


def test_grey_and_coloured_images_come_in_one_call(library):
    grey = KINDS["grey"][0](1)
    found = NvImageCodec(HERE, 1, library).decode([source(photo(0)), source(grey, grey=True), source(grey)])
    assert [one.owner.shape[2] for one in found if isinstance(one, Pixels)] == [3, 1, 3]


def test_one_that_is_too_old_is_not_used_on_a_device_either(monkeypatch):
    old = ModuleType("nvidia.nvimgcodec")
    monkeypatch.setattr(old, "__version__", "0.7.0", raising=False)
    monkeypatch.setitem(sys.modules, "nvidia.nvimgcodec", old)
    with pytest.raises(ImportError, match=r"^found version 0\.7\.0, but 0\.9 or newer is needed$"):
        load_nvimgcodec()
    choice = choose(DEVICE, HERE, 1)
    assert choice.decoder is None
    said = "nvImageCodec cannot be imported (ImportError: found version 0.7.0, but 0.9 or newer is needed); run pip i"
    assert said in str(choice.text)


class CodeStream:
    """Its picture, or a region of it."""

    def __init__(self, data: np.ndarray, region: Any = None) -> None:
        self.data, self.region = data, region
        self.width, self.height = Image.open(io.BytesIO(data.tobytes())).size

    def tobytes(self) -> bytes:
        return self.data.tobytes()

    def get_sub_code_stream(self, region: Any) -> CodeStream:
        return CodeStream(self.data, region)


class OnGpu:
    """An image as the library gives it on a GPU, with memory behind each row."""

    def __init__(self, picture: np.ndarray) -> None:
        height, width, channels = picture.shape
        self.rows = np.full((height, width + 5, channels), 0x5A, np.uint8)
        self.rows[:, :width] = picture
        self.__cuda_array_interface__ = self.rows[:, :width].__array_interface__


class Library:
    """A module ``nvimgcodec`` whose decoders do as they are told: ``works`` for each kind of backend."""

    NVIMGCODEC_DEVICE_CPU_ONLY = -99999
    __version__ = "0.9.0"
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
            return [None if picture is None else OnGpu(picture) for picture in works(codes)]

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


class Gpu:
    """A simulated GPU, within which its decoder may be used. Its stream is the one that is current."""

    device = torch.device("cuda", 1)

    def __enter__(self) -> Gpu:
        importlib.import_module("gpuload.stage.decode.crops")  # or its launches would not be queued
        self._open = ExitStack()
        self._open.enter_context(simulated("eager"))
        patch = self._open.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def decoder(
        self, exact_versions: Any = nvimagecodec.EXACT_REGION_VERSIONS, *, only: str = "", **works: Any
    ) -> NvImageCodec:
        """The decoder, whose library works like that."""
        return NvImageCodec(self.device, 3, Library(**works), exact_versions=exact_versions, only=only)


@pytest.fixture
def gpu() -> Any:
    with Gpu() as made:
        yield made


def test_the_jpeg_engine_comes_first_and_the_gpu_gets_what_it_refuses(gpu):
    wide = {photo(1)}

    def engine(codes: list[Any]) -> list[Any]:
        return [None if code.tobytes() in wide else pictures([code])[0] for code in codes]

    decoder = gpu.decoder(engine=engine, gpu=pictures)
    assert decoder.names == (ENGINE, GPU)
    assert (
        decoder.note == f"{ENGINE} and {GPU} 0.9.0 decodes entire images, not regions"
    )  # as long as the list does not have them
    found = decoder.decode([source(photo(0)), source(photo(1)), source(photo(2))])
    assert [one.decoder for one in found if isinstance(one, Pixels)] == [ENGINE, GPU, ENGINE]
    assert decoder._library.made == [
        {"device_id": 1, "max_num_cpu_threads": 3, "backends": kinds, "options": ":fancy_upsampling=1"}
        for kinds in (["engine"], ["gpu", "hybrid"])
    ]


@pytest.mark.parametrize("right", [(), (GPU,), (ENGINE, GPU)])
def test_whole_images_are_decoded_unless_regions_are_known_to_be_right(gpu, right):
    """The pixels are the same; so is where they are read, in rows that are farther apart than they are long."""
    asked: list[Any] = []

    def engine(codes: list[Any]) -> list[Any]:
        asked.extend(code.region for code in codes)
        return [None if code.tobytes() == photo(1) else pictures([code])[0] for code in codes]

    decoder = gpu.decoder(dict.fromkeys(right, ("0.9.0",)), engine=engine, gpu=pictures)
    whole = " and ".join(name for name in (ENGINE, GPU) if name not in right)
    assert decoder.decodes_regions == (not whole)
    assert decoder.note == (f"{whole} 0.9.0 decodes entire images, not regions" if whole else "")
    parts = [source(photo(number))._replace(region_tlhw=(3, 5, 20, 30)) for number in range(2)]
    found = decoder.decode(parts)
    assert [one.decoder for one in found] == [ENGINE, GPU]
    assert asked[-2:] == [(3, 5, 23, 35) if ENGINE in right else None] * 2
    for number, (one, part) in enumerate(zip(found, parts, strict=True)):
        expected = np.array(Image.open(io.BytesIO(photo(number))))[3:23, 5:35]
        assert np.array_equal(fetch(one, part, gpu.device), expected)


def test_one_decoder_may_be_asked_for_alone(gpu):
    decoder = gpu.decoder(only=GPU, engine=pictures, gpu=pictures)
    assert (decoder.names, len(decoder._library.made)) == ((GPU,), 1)


def test_a_gpu_without_an_engine_says_so(gpu):
    decoder = gpu.decoder({GPU: ("0.9.0",)}, engine=nothing, gpu=pictures)
    assert decoder.names == (GPU,)
    assert decoder.note == "no JPEG engine: it returned no image and no reason"


@pytest.mark.parametrize("whose", ["torch's allocator cudaMallocAsync", "DALI (DALI_USE_CUDA_MALLOC_ASYNC=1)"])
def test_no_engine_writes_to_memory_that_others_share(gpu, monkeypatch, whose):
    """It writes when it is called, and others free in the order of their streams."""
    if "DALI" in whose:
        monkeypatch.setenv("DALI_USE_CUDA_MALLOC_ASYNC", "1")
    else:
        monkeypatch.setattr(torch._C, "_cuda_getAllocatorBackend", lambda: "cudaMallocAsync", raising=False)
    decoder = gpu.decoder(engine=pictures, gpu=pictures)
    assert decoder.names == (GPU,)
    assert decoder.note.startswith(f"no JPEG engine: the engine could write to memory that {whose} has freed but")


def test_a_decoder_whose_picture_is_another_one_is_not_used(gpu):
    decoder = gpu.decoder(engine=other, gpu=pictures)
    assert decoder.names == (GPU,)
    assert "the decoder returned wrong pixels for a test image (" in decoder.note


def test_a_gpu_that_decodes_nothing_is_an_error_that_says_why(gpu):
    with pytest.raises(RuntimeError) as there:
        gpu.decoder(engine=nothing, gpu=other)
    assert str(there.value).startswith(
        f"{ENGINE}: it returned no image and no reason; {GPU}: the decoder returned wrong pixels for a test image ("
    )


def test_a_full_device_is_told_apart_from_a_bad_image(gpu):
    decoder = gpu.decoder(engine=nothing, gpu=pictures)
    decoder._library.works["gpu"] = full
    decoder._decoders[GPU] = decoder._make_decoder(["gpu"], 1)
    with pytest.raises(OutOfDeviceMemory, match="out of memory"):
        decoder.decode([source(photo(0))])


def test_an_image_that_is_not_as_large_as_its_header_says_is_refused(library):
    lying = source(photo(0))._replace(height=20, region_tlhw=(0, 0, 20, 70))
    decoder = NvImageCodec(HERE, 1, library)
    assert decoder.decode([lying]) == [Refusal("the header says 20×70 pixels, but the decoded image has another size")]
    found, good = decoder.decode([lying._replace(height=90, region_tlhw=(60, 0, 30, 9)), source(photo(0))])
    assert found == Refusal("ValueError: the header says 90×70 pixels, but nvImageCodec reads another size")
    assert isinstance(good, Pixels)


def test_an_image_beyond_the_librarys_limit_is_not_given_to_it(library, monkeypatch):
    decoder = NvImageCodec(HERE, 1, library)
    monkeypatch.setattr(nvimagecodec, "NV_MAX_BYTES", 10_600)
    large, small = decoder.decode([source(photo(3)), source(photo(0))])
    assert isinstance(small, Pixels)
    assert large == Refusal("ValueError: an image exceeds the size limit of nvImageCodec")
