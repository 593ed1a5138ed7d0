"""Images decoded by the device give the same batches, faults and order as if workers decoded all images."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.generated_images import jpeg_bytes, smooth_image
from helpers.jpeg_kinds import KINDS, Photos, assert_same, gray, make_loader, photo, read_batches, without_tables
from PIL import Image
from simulated.decoder import ENGINE, FALLBACK, FakeDecoder, decoding_with

import gpuload as gl
from gpuload import transforms as T
from gpuload.decode.options import select_device_samples

pytestmark = pytest.mark.filterwarnings("ignore:.*it was (skipped|replaced by):RuntimeWarning")

COUNT = 20


def files_and(*kinds: str) -> Photos:
    """Return a dataset of plain files with one file of each kind between them."""
    files = [photo(number) for number in range(COUNT)]
    for number, kind in enumerate(kinds):
        files[(3 * number + 2) % COUNT] = KINDS[kind][0](number)
    return Photos(files)


DIFFICULT = ("many scans", "CMYK", "PNG", "12 bits", "arithmetic", "damaged in the middle", "no tables", "no image")
DECODES = {
    "device": gl.Decode(where="device"),
    "30 %": gl.Decode(where="both", device_share=0.3),
    "80 %": gl.Decode(where="both", device_share=0.8),
}


def assert_decodes_like_the_cpu(
    files: Photos, decode: Any = DECODES["device"], decoder: dict[str, Any] | None = None, **options: Any
) -> tuple[Any, list[FakeDecoder]]:
    """Check that an epoch is the same decoded by a device and by workers; return its statistics and the decoders."""
    expected = read_batches(files, **options)
    with decoding_with(**decoder or {}) as decoders:
        batches, failures, loader = read_batches(files, decode=decode, **options)
    assert_same((batches, failures), expected)
    return loader.stats(), decoders


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("on_error", ["skip", "replace"])
@pytest.mark.parametrize("decode", DECODES)
def test_device_decoding_gives_the_order_draws_and_faults_of_the_cpu(decode, on_error, resumed):
    assert_decodes_like_the_cpu(files_and(*DIFFICULT), DECODES[decode], resumed=resumed, on_error=on_error, seed=3)


@pytest.mark.usefixtures("warm")
@pytest.mark.processes
@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_device_decoding_with_workers_gives_the_order_draws_and_faults_of_the_cpu(on_error):
    options: dict[str, Any] = {"on_error": on_error, "seed": 3, "chunk_size": 3}
    _, failures, _ = expected = read_batches(files_and(*DIFFICULT), **options)
    assert len(failures) >= 3
    with decoding_with():
        for decode in DECODES.values():
            options |= {"decode": decode, "num_workers": 2, "resumed": on_error == "skip"}
            assert_same(read_batches(files_and(*DIFFICULT), **options), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_kind_of_a_file_decides_whether_the_device_or_a_worker_decodes_it(kind):
    make, decoded_by = KINDS[kind]
    files = Photos([make(number) for number in range(3)])
    expected = read_batches(files, on_error="skip", batch_size=3) if "nobody" not in decoded_by else None
    with decoding_with(), make_loader(files, on_error="raise", decode=DECODES["device"], batch_size=3) as loader:
        if expected is None:
            with pytest.raises(gl.SampleError) as device_error:
                next(iter(loader))
            with pytest.raises(gl.SampleError) as cpu_error, make_loader(files, batch_size=3) as cpu_loader:
                next(iter(cpu_loader))
            assert str(device_error.value).splitlines()[0] == str(cpu_error.value).splitlines()[0]
        else:
            [((images, _), _)] = list(loader)
            assert torch.equal(images, expected[0][0][0])
        stats = loader.stats()
        on_device = stats.decode.counts.get(ENGINE, 0) + stats.decode.counts.get(FALLBACK, 0)
        assert on_device == (3 if decoded_by == "device" else 0)
        assert sum(stats.decode.refused.values()) == (3 if decoded_by in ("refused", "nobody after the device") else 0)
        assert stats.part("device decode").count == (3 if decoded_by not in ("worker", "nobody") else 0)


def test_batch_whose_images_are_all_refused_is_decoded_on_the_cpu():
    files = Photos([photo(number) for number in range(10)])
    stats, _ = assert_decodes_like_the_cpu(files, decoder={"refuses": lambda data: "too green"})
    assert stats.decode.refused == {"too green": 10}
    assert sum(stats.decode.counts.values()) == 10
    assert "refused   10 by the device's decoder: too green" in str(stats)


def test_only_the_image_larger_than_device_memory_goes_to_the_cpu():
    files = Photos([photo(number) for number in range(9)] + [jpeg_bytes(smooth_image(400, 500, 1))])
    decode = gl.Decode(where="device", device_memory=60_000)
    stats, [decoder] = assert_decodes_like_the_cpu(files, decode, batch_size=10)
    assert stats.decode.refused == {"more than device_memory=60,000 bytes": 1}
    assert sum(decoder.calls) == 9
    assert len(decoder.calls) > 1
    assert 30_000 < stats.decode.peak_bytes <= 60_000


def test_device_out_of_memory_decodes_fewer_images_per_call_from_then_on():
    files = Photos([photo(number) for number in range(COUNT)])
    stats, [decoder] = assert_decodes_like_the_cpu(files, decoder={"room_bytes": 35_000}, batch_size=10)
    assert (sum(decoder.calls), max(decoder.calls)) == (COUNT, 2)  # a call's limit, ten images, is halved twice
    assert stats.decode.refused == {}


def test_device_memory_counts_regions_if_the_decoder_decodes_regions():
    large = [jpeg_bytes(smooth_image(400, 500, number)) for number in range(4)]
    files = Photos([*files_and(*DIFFICULT).files, *large])
    three_regions_bytes = 3 * (24 * 24 * 3)
    decode = gl.Decode(where="device", device_memory=three_regions_bytes)
    options: dict[str, Any] = {"transforms": [T.RandomCrop(24)], "batch_size": 12, "on_error": "skip"}
    stats, [decoder] = assert_decodes_like_the_cpu(files, decode, {"regions": True}, **options)
    assert max(decoder.calls) == 3
    assert stats.decode.peak_bytes == three_regions_bytes
    assert "device_memory" not in str(stats.decode.refused)


def test_image_too_large_for_the_device_by_itself_goes_to_the_cpu():
    files = Photos([photo(number) for number in range(4)])
    stats, _ = assert_decodes_like_the_cpu(files, decoder={"room_bytes": 1000}, batch_size=4)
    assert stats.decode.refused == {"out of memory": 4}


@pytest.mark.parametrize("orientation", range(1, 9))
def test_device_decoding_applies_exif_orientation_like_the_cpu(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    files = Photos([photo(number, exif=exif.tobytes()) for number in range(4)])
    for upright, regions in ((True, False), (True, True), (False, False)):
        expected = read_batches(files, batch_size=4, decode=gl.Decode(exif=upright))
        with decoding_with(regions=regions):
            assert_same(read_batches(files, batch_size=4, decode=gl.Decode(exif=upright, where="device")), expected)


@pytest.mark.parametrize("mode", ["RGB", "L", "unchanged", "RGBA"])
def test_device_decoding_gives_the_pixels_of_the_cpu_in_each_mode(mode):
    for make in (photo, gray):
        files = Photos([make(number) for number in range(4)], mode)
        stats, _ = assert_decodes_like_the_cpu(files, batch_size=4)
        is_on_device = mode != "RGBA" and (mode != "L" or make is gray)
        assert stats.part("device decode").count == 4 * is_on_device


class Pairs:
    """Samples of two images, a mask and a long array; no decoder accepts the second image of `undecodable` samples."""

    def __init__(self, undecodable: tuple[int, ...] = ()) -> None:
        self.undecodable = undecodable

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        first, second = photo(index % 5), photo(index % 5, subsampling=0)
        if index in self.undecodable:
            second = without_tables(second)
        return {
            "image": gl.Encoded(first, source=f"{index}a.jpg", draws=0),
            "other": gl.Encoded(second, source=f"{index}b.jpg", draws=0),
            "mask": gl.Mask(np.full((50 + index % 5, 70 - index % 5), index, np.uint8)),
            "long": np.full(3000, index, np.int32),
            "index": index,
        }


@pytest.mark.parametrize("decode", DECODES)
def test_sample_whose_second_image_fails_is_dropped_with_all_its_fields(decode):
    def run_epoch(**options: Any) -> Any:
        with make_loader(Pairs(undecodable=(1, 7)), batch_size=4, on_error="skip", info=False, **options) as loader:
            return [dict(batch) for batch in loader], [(e.index, e.source, e.cause) for e in loader.errors]

    expected, expected_failures = run_epoch()
    with decoding_with():
        batches, failures = run_epoch(decode=DECODES[decode])
    assert sorted(failures) == sorted(expected_failures)
    assert {source for _, source, _ in expected_failures} == {"1b.jpg", "7b.jpg"}
    for batch, expected_batch in zip(batches, expected, strict=True):
        assert batch.keys() == expected_batch.keys()
        for name, value in batch.items():
            assert torch.equal(value, expected_batch[name]), name


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        for number in range(COUNT):
            make = KINDS["no tables" if number % 6 == 3 else "plain"][0]
            yield gl.Encoded(make(number), source=f"{number}.jpg"), np.full(3000, number)


def test_iterable_dataset_continues_after_images_that_the_device_cannot_decode():
    def run_epoch(**options: Any) -> Any:
        with make_loader(Stream(), shuffle=None, on_error="skip", info=False, **options) as loader:
            batches = [(images.clone(), labels[:, 0].tolist()) for images, labels in loader]
        return batches, [error.index for error in loader.errors]

    expected_batches, expected_failed = run_epoch()
    with decoding_with():
        batches, failed = run_epoch(decode=DECODES["device"])
    assert failed == expected_failed == [3, 9, 15]
    for (images, labels), (expected_images, expected_labels) in zip(batches, expected_batches, strict=True):
        assert labels == expected_labels
        assert torch.equal(images, expected_images)


def test_too_many_images_that_the_device_cannot_decode_raise():
    files = Photos([KINDS["no tables" if number % 2 else "plain"][0](number) for number in range(40)])
    # Any epoch may have ten failures; here, half of 40 samples fail.
    with (
        decoding_with(),
        make_loader(files, on_error="skip", decode=DECODES["device"]) as loader,
        pytest.raises(gl.TooManyErrors, match="samples of this epoch could not be loaded"),
    ):
        list(loader)


def test_ragged_list_without_transforms_holds_the_images_of_the_cpu():
    files = Photos([photo(number) for number in range(6)])
    options: dict[str, Any] = {"transforms": [], "ragged": "list", "batch_size": 3, "info": False, "shuffle": False}
    with (
        decoding_with(),
        make_loader(files, decode=DECODES["30 %"], **options) as device_loader,
        make_loader(files, **options) as cpu_loader,
    ):
        for (images, _), (expected_images, _) in zip(device_loader, cpu_loader, strict=True):
            torch.testing.assert_close(list(images), list(expected_images), rtol=0, atol=0)


def test_replay_decodes_where_the_position_was_decoded():
    files = Photos([photo(number) for number in range(8)])
    with decoding_with() as decoders, make_loader(files, decode=DECODES["30 %"], info=False) as loader:
        for position in range(4):
            loader.replay(0, position)
    assert select_device_samples(np.arange(4), 0.3).tolist() == [1, 0, 1, 0]
    assert [sum(decoder.calls) for decoder in decoders] == [1, 0, 1, 0]


def test_decoders_of_a_session_and_of_a_plan_are_closed():
    files = Photos([photo(number) for number in range(4)])
    with decoding_with() as decoders, make_loader(files, decode=DECODES["device"]) as loader:
        list(loader)
        loader.plan()
        assert [decoder.closed for decoder in decoders] == [False, True]
    assert [decoder.closed for decoder in decoders] == [True, True]
