"""Regions of cuttable files, which are cut out together for a chunk, have the pixels of the original files."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.generated_images import jpeg_bytes

import gpuload as gl
from gpuload import transforms as T
from gpuload.decode import decoder
from gpuload.packing.jpeg_cuttable import make_cuttable
from gpuload.workers.sample import SampleReader

COUNT = 12
_noise = np.random.default_rng(0).integers(0, 256, (3, 384, 512, 3), np.uint8)
ORIGINALS = [jpeg_bytes(noise, quality=90, subsampling=number) for number, noise in enumerate(_noise)]
CUTTABLE = [make_cuttable(data) for data in ORIGINALS]


class ImagePairs:
    """Samples of a color image, a grey image and their number. With `broken`, the first file of every fifth sample is
    truncated."""

    def __init__(self, files: list[bytes], *, broken: bool = False) -> None:
        self.files, self.broken = files, broken

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        color_file, grey_file = self.files[index % 3], self.files[(index + 1) % 3]
        if self.broken and index % 5 == 4:
            color_file = color_file[: len(color_file) // 2]
        return gl.Encoded(color_file), gl.Encoded(grey_file, "L"), index


def load_epoch(files: list[bytes], *, broken: bool = False) -> tuple[dict[int, list[np.ndarray]], Any, list[int]]:
    """Load an epoch. Return the images by number, the counts of decoders, and the samples that failed."""
    transforms = [T.RandomResizedCrop(48, scale=(0.05, 0.4))]
    dataset = ImagePairs(files, broken=broken)
    with gl.Loader(
        dataset,
        batch_size=6,
        transforms=transforms,
        num_workers=0,
        device="cpu",
        faults=gl.Faults(on_error="skip", max_error_rate=1.0),
    ) as loader:
        images_by_number = {
            int(number): [color.numpy().copy(), grey.numpy().copy()]
            for images, greys, numbers in loader
            for color, grey, number in zip(images, greys, numbers, strict=True)
        }
        return images_by_number, loader.stats().decode.counts, sorted(error.index for error in loader.errors)


def assert_same_images(images_by_number: dict[int, list[np.ndarray]], expected: dict[int, list[np.ndarray]]) -> None:
    for number, images in images_by_number.items():
        for image, expected_image in zip(images, expected[number], strict=True):
            np.testing.assert_array_equal(image, expected_image)


@pytest.mark.parametrize("cut_bytes", [1, 8 << 20])
def test_cuttable_files_have_the_pixels_of_their_originals_for_any_cut_bytes(cut_bytes, monkeypatch):
    monkeypatch.setattr("gpuload.workers.sample.CUT_BYTES", cut_bytes)
    cut_counts: list[int] = []
    cut_files = SampleReader.cut_files

    def cut_and_count(*arguments):
        cut_counts.append(cut_files(*arguments))
        return cut_counts[-1]

    monkeypatch.setattr(SampleReader, "cut_files", cut_and_count)
    expected, counts, _ = load_epoch(ORIGINALS)
    assert "cut" not in counts
    cut_counts.clear()
    images_by_number, counts, _ = load_epoch(CUTTABLE)
    assert counts["cut"] > COUNT
    assert sum(cut_counts) == COUNT
    assert (set(cut_counts) == {1}) == (cut_bytes == 1)
    assert list(images_by_number) == list(expected)
    assert_same_images(images_by_number, expected)


@pytest.mark.filterwarnings("ignore:sample 4:RuntimeWarning")
def test_a_truncated_cuttable_file_fails_alone():
    expected, *_ = load_epoch(CUTTABLE)
    images_by_number, _, failed = load_epoch(CUTTABLE, broken=True)
    assert failed == [4, 9]
    assert sorted(images_by_number) == [number for number in range(COUNT) if number not in failed]
    assert_same_images(images_by_number, expected)


@pytest.mark.filterwarnings("ignore:sample 3:RuntimeWarning")
def test_an_error_of_cut_files_is_an_error_of_one_sample(monkeypatch):
    cut_files, region_of_sample_3 = decoder.cut_files, (194, 167, 144, 162)  # top, left, height, width

    def refuse_one(requests: Any) -> Any:
        if any(data is CUTTABLE[0] and region == region_of_sample_3 for data, _, region in requests):
            raise MemoryError("too large")
        return cut_files(requests)

    expected, *_ = load_epoch(CUTTABLE)
    monkeypatch.setattr(decoder, "cut_files", refuse_one)
    images_by_number, _, failed = load_epoch(CUTTABLE)
    assert failed == [3]
    assert sorted(images_by_number) == [number for number in range(COUNT) if number != 3]
    assert_same_images(images_by_number, expected)
