"""nvImageCodec on the CPU, through the code that a GPU uses; and the choice of its decoders on a simulated GPU."""

from __future__ import annotations

import io
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from helpers import lacking
from helpers.decoders import decoder_by
from helpers.generated_images import jpeg_bytes, smooth_image
from helpers.jpeg_kinds import KINDS, Photos, assert_same, damaged, photo, read_batches
from helpers.simulated_nvimagecodec import (
    SimulatedGpu,
    decode_images,
    decode_inverted,
    decode_nothing,
    run_out_of_memory,
)
from PIL import Image

import gpuload as gl
from gpuload.decode import Decode, Decoder
from gpuload.decode.jpeg import load_nvimgcodec
from gpuload.stage.decode import choose, nvimagecodec
from gpuload.stage.decode.backend import EncodedRegion, OutOfDeviceMemory, Pixels, Refusal, fetch
from gpuload.stage.decode.nvimagecodec import CPU, ENGINE, GPU, NvImageCodec

CPU_DEVICE = torch.device("cpu")
ON_DEVICE = gl.Decode(where="device")
REGIONS = ((7, 3, 50, 64), (82, 120, 1, 1), (16, 16, 16, 16), (1, 0, 9, 1), (0, 120, 83, 1), (0, 57, 1, 64))


@pytest.fixture
def nvimagecodec_on_cpu() -> NvImageCodec:
    return NvImageCodec(CPU_DEVICE, 1, load_nvimgcodec())


def encoded_region(data: bytes, *, is_gray: bool = False) -> EncodedRegion:
    header = Decoder(Decode()).header(gl.Encoded(data))
    region = (0, 0, header.height, header.width)
    return EncodedRegion(np.frombuffer(data, np.uint8), header.height, header.width, is_gray, region)


@lacking.needs("nvidia.nvimgcodec")
@pytest.mark.filterwarnings("ignore:.*it was (skipped|replaced by):RuntimeWarning")
def test_nvimagecodec_on_the_cpu_is_bit_identical_to_workers():
    kinds = [kind for kind in KINDS for _ in range(2)]
    files = Photos([KINDS[kind][0](number) for number, kind in enumerate(kinds)])
    expected = read_batches(files, on_error="skip")
    for decode in (ON_DEVICE, gl.Decode(where="both", device_share=0.5)):
        decoded = read_batches(files, decode=decode, on_error="skip")
        assert_same(decoded, expected)
    _, _, loader = read_batches(files, decode=ON_DEVICE, on_error="skip")
    stats, decoded_by = loader.stats().decode, [KINDS[kind][1] for kind in kinds]
    assert stats.counts[CPU] == decoded_by.count("device")
    assert sum(stats.refused.values()) == sum("refused" in decoder or "after" in decoder for decoder in decoded_by)


@lacking.needs("nvidia.nvimgcodec")
@pytest.mark.parametrize("upright", [False, True])
def test_nvimagecodec_on_the_cpu_applies_exif_orientation_once(upright):
    exif = Image.Exif()
    files = []
    for orientation in range(1, 9):
        exif[0x0112] = orientation
        files.append(photo(orientation, exif=exif.tobytes()))
    options: dict[str, Any] = {"batch_size": 8}
    expected = read_batches(Photos(files), decode=gl.Decode(exif=upright), **options)
    _, _, loader = decoded = read_batches(Photos(files), decode=gl.Decode(exif=upright, where="device"), **options)
    assert_same(decoded, expected)
    assert loader.stats().decode.counts == {CPU: 8}


def test_region_decoded_by_workers_equals_the_crop_of_the_entire_image(nvimagecodec_on_cpu):
    cpu_decoder = decoder_by("nvImageCodec")
    for subsampling in (0, 1, 2):
        encoded = gl.Encoded(jpeg_bytes(smooth_image(83, 121, subsampling), subsampling=subsampling))
        [entire] = nvimagecodec_on_cpu.decode([encoded_region(encoded.data)])
        assert isinstance(entire, Pixels)
        for top, left, height, width in ((0, 0, 83, 121), *REGIONS):
            region = cpu_decoder.decode(encoded, cpu_decoder.header(encoded), (top, left, height, width))
            assert np.array_equal(entire.owner[top : top + height, left : left + width], region)


@pytest.mark.parametrize("is_gray", [False, True])
def test_decode_of_regions_is_bit_identical_to_the_entire_image(nvimagecodec_on_cpu, is_gray):
    library = load_nvimgcodec()
    entire_decoder = NvImageCodec(CPU_DEVICE, 1, library, exact_versions={CPU: ("0.8.7", "1.0")})
    assert (nvimagecodec_on_cpu.decodes_regions, nvimagecodec_on_cpu.note) == (True, "")
    assert not entire_decoder.decodes_regions
    assert entire_decoder.note == f"{CPU} {library.__version__} decodes entire images, not regions"
    for subsampling in (0, 1, 2):
        entire = encoded_region(
            jpeg_bytes(smooth_image(83, 121, subsampling), subsampling=subsampling), is_gray=is_gray
        )
        sources = [entire, *(entire._replace(region_tlhw=region) for region in REGIONS)]
        results, expected_results = nvimagecodec_on_cpu.decode(sources), entire_decoder.decode(sources)
        for pixels, expected, source in zip(results, expected_results, sources, strict=True):
            assert isinstance(pixels, Pixels)
            assert isinstance(expected, Pixels)
            assert np.array_equal(pixels.owner, expected.owner)
            assert pixels.owner.shape[:2] == source.region_tlhw[2:]


def test_pixels_keep_their_memory_during_later_calls(nvimagecodec_on_cpu):
    [pixels] = nvimagecodec_on_cpu.decode([encoded_region(photo(0))])
    assert isinstance(pixels, Pixels)
    copy = pixels.owner.copy()
    for number in range(20):
        nvimagecodec_on_cpu.decode([encoded_region(photo(number))])
    assert np.array_equal(pixels.owner, copy)


def test_decode_refuses_only_the_image_that_libjpeg_warns_about(nvimagecodec_on_cpu):
    files = [photo(number) for number in range(6)]
    files[4] = damaged(files[4])
    results = nvimagecodec_on_cpu.decode([encoded_region(data) for data in files])
    assert [isinstance(result, Pixels) for result in results] == [True] * 4 + [False, True]
    assert "Corrupt JPEG data" in results[4].reason  # type: ignore[union-attr]


def test_decode_of_gray_and_color_images_in_one_call_returns_their_channels(nvimagecodec_on_cpu):
    gray = KINDS["gray"][0](1)
    results = nvimagecodec_on_cpu.decode(
        [encoded_region(photo(0)), encoded_region(gray, is_gray=True), encoded_region(gray)]
    )
    assert [pixels.owner.shape[2] for pixels in results if isinstance(pixels, Pixels)] == [3, 1, 3]


def test_choose_with_an_nvimagecodec_that_is_too_old_finds_no_decoder(monkeypatch):
    old_module = ModuleType("nvidia.nvimgcodec")
    monkeypatch.setattr(old_module, "__version__", "0.7.0", raising=False)
    monkeypatch.setitem(sys.modules, "nvidia.nvimgcodec", old_module)
    with pytest.raises(ImportError, match=r"^found version 0\.7\.0, but 0\.9 or newer is needed$"):
        load_nvimgcodec()
    choice = choose(ON_DEVICE, CPU_DEVICE, 1)
    assert choice.decoder is None
    text = "nvImageCodec cannot be imported (ImportError: found version 0.7.0, but 0.9 or newer is needed); run pip"
    assert text in str(choice.text)


@pytest.fixture
def gpu() -> Any:
    with SimulatedGpu() as simulated_gpu:
        yield simulated_gpu


def test_jpeg_engine_decodes_first_and_the_gpu_decodes_what_it_refuses(gpu):
    refused = {photo(1)}

    def engine(codes: list[Any]) -> list[Any]:
        return [None if code.tobytes() in refused else decode_images([code])[0] for code in codes]

    decoder = gpu.decoder(engine=engine, gpu=decode_images)
    assert decoder.names == (ENGINE, GPU)
    assert decoder.note == f"{ENGINE} and {GPU} 0.9.0 decodes entire images, not regions"
    results = decoder.decode([encoded_region(photo(0)), encoded_region(photo(1)), encoded_region(photo(2))])
    assert [pixels.decoder for pixels in results if isinstance(pixels, Pixels)] == [ENGINE, GPU, ENGINE]
    assert decoder._library.calls == [
        {"device_id": 1, "max_num_cpu_threads": 3, "backends": kinds, "options": ":fancy_upsampling=1"}
        for kinds in (["engine"], ["gpu", "hybrid"])
    ]


@pytest.mark.parametrize("exact", [(), (GPU,), (ENGINE, GPU)])
def test_decode_reads_entire_images_unless_regions_of_this_version_are_exact(gpu, exact):
    """The pixels are the same in both cases, although rows in the GPU's memory are farther apart than their length."""
    regions: list[Any] = []

    def engine(codes: list[Any]) -> list[Any]:
        regions.extend(code.region for code in codes)
        return [None if code.tobytes() == photo(1) else decode_images([code])[0] for code in codes]

    decoder = gpu.decoder(dict.fromkeys(exact, ("0.9.0",)), engine=engine, gpu=decode_images)
    inexact = " and ".join(name for name in (ENGINE, GPU) if name not in exact)
    assert decoder.decodes_regions == (not inexact)
    assert decoder.note == (f"{inexact} 0.9.0 decodes entire images, not regions" if inexact else "")
    parts = [encoded_region(photo(number))._replace(region_tlhw=(3, 5, 20, 30)) for number in range(2)]
    results = decoder.decode(parts)
    assert [pixels.decoder for pixels in results] == [ENGINE, GPU]
    assert regions[-2:] == [(3, 5, 23, 35) if ENGINE in exact else None] * 2
    for number, (pixels, part) in enumerate(zip(results, parts, strict=True)):
        expected = np.array(Image.open(io.BytesIO(photo(number))))[3:23, 5:35]
        assert np.array_equal(fetch(pixels, part, gpu.device), expected)


def test_decoder_with_only_the_gpu_has_no_engine(gpu):
    decoder = gpu.decoder(only=GPU, engine=decode_images, gpu=decode_images)
    assert (decoder.names, len(decoder._library.calls)) == ((GPU,), 1)


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        (decode_nothing, "it returned no image and no reason"),
        (decode_inverted, "the decoder returned wrong pixels for a test image ("),
    ],
)
def test_engine_that_does_not_decode_the_test_image_is_not_used(gpu, engine, reason):
    decoder = gpu.decoder({GPU: ("0.9.0",)}, engine=engine, gpu=decode_images)
    assert decoder.names == (GPU,)
    assert decoder.note.startswith(f"no JPEG engine: {reason}")


@pytest.mark.parametrize("allocator", ["torch's allocator cudaMallocAsync", "DALI (DALI_USE_CUDA_MALLOC_ASYNC=1)"])
def test_engine_is_not_used_with_an_allocator_that_shares_memory(gpu, monkeypatch, allocator):
    """The engine writes as soon as it is called, but such an allocator frees memory in stream order."""
    if "DALI" in allocator:
        monkeypatch.setenv("DALI_USE_CUDA_MALLOC_ASYNC", "1")
    else:
        monkeypatch.setattr(torch._C, "_cuda_getAllocatorBackend", lambda: "cudaMallocAsync", raising=False)
    decoder = gpu.decoder(engine=decode_images, gpu=decode_images)
    assert decoder.names == (GPU,)
    assert decoder.note.startswith(f"no JPEG engine: the engine could write to memory that {allocator} has freed but")


def test_gpu_whose_decoders_all_fail_raises_with_each_reason(gpu):
    with pytest.raises(RuntimeError) as caught:
        gpu.decoder(engine=decode_nothing, gpu=decode_inverted)
    assert str(caught.value).startswith(
        f"{ENGINE}: it returned no image and no reason; {GPU}: the decoder returned wrong pixels for a test image ("
    )


def test_decode_on_a_full_device_raises_out_of_device_memory(gpu):
    decoder = gpu.decoder(engine=decode_nothing, gpu=decode_images)
    decoder._library.decoders["gpu"] = run_out_of_memory
    decoder._decoders[GPU] = decoder._make_decoder(["gpu"], 1)
    with pytest.raises(OutOfDeviceMemory, match="out of memory"):
        decoder.decode([encoded_region(photo(0))])


def test_decode_refuses_an_image_whose_size_differs_from_its_header(nvimagecodec_on_cpu):
    region = encoded_region(photo(0))._replace(height=20, region_tlhw=(0, 0, 20, 70))
    assert nvimagecodec_on_cpu.decode([region]) == [
        Refusal("the header says 20×70 pixels, but the decoded image has another size")
    ]
    refused, decoded = nvimagecodec_on_cpu.decode(
        [region._replace(height=90, region_tlhw=(60, 0, 30, 9)), encoded_region(photo(0))]
    )
    assert refused == Refusal("ValueError: the header says 90×70 pixels, but nvImageCodec reads another size")
    assert isinstance(decoded, Pixels)


def test_decode_refuses_an_image_above_the_librarys_size_limit(nvimagecodec_on_cpu, monkeypatch):
    monkeypatch.setattr(nvimagecodec, "NV_MAX_BYTES", 10_600)  # photo(0) has 10,500 bytes, and photo(3) 10,653
    large, small = nvimagecodec_on_cpu.decode([encoded_region(photo(3)), encoded_region(photo(0))])
    assert isinstance(small, Pixels)
    assert large == Refusal("ValueError: an image exceeds the size limit of nvImageCodec")
