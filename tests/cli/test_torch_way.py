"""The DataLoader of the comparison: simplejpeg and torch's operators, with torchvision's results."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
import torch
from helpers import peers
from helpers.generated_images import encode, jpeg_bytes, smooth_image

import gpuload as gl
from gpuload.cli import torch_way
from gpuload.cli.source import MEAN, STD
from gpuload.cli.torch_way import (
    DECODER,
    Pictures,
    augment,
    collate,
    data_loader,
    decode,
    decode_with_pillow,
    random_box,
)

LOW = [(0 - m) / s for m, s in zip(MEAN, STD, strict=True)]
HIGH = [(1 - m) / s for m, s in zip(MEAN, STD, strict=True)]


def test_sample_is_decoded_cropped_and_normalized(jpeg_folder: Path) -> None:
    image = Pictures(gl.ImageFolder(jpeg_folder))[5]
    assert isinstance(image, torch.Tensor)
    assert (image.shape, image.dtype) == ((3, 224, 224), torch.float32)
    for channel in range(3):
        assert LOW[channel] - 1e-5 <= image[channel].min() < image[channel].max() <= HIGH[channel] + 1e-5


@pytest.mark.parametrize("flip", [False, True])
def test_augment_equals_torchvision(flip: bool) -> None:
    peers.torchvision()
    from torchvision.transforms.v2 import functional

    pixels = simplejpeg.decode_jpeg(jpeg_bytes(smooth_image(90, 120, 3)))
    image = augment(pixels, (11, 7, 101, 80), flip)
    expected = functional.resized_crop(
        torch.from_numpy(pixels).permute(2, 0, 1), 7, 11, 73, 90, [224, 224], antialias=True
    )
    if flip:
        expected = functional.horizontal_flip(expected)
    expected = functional.normalize(functional.to_dtype(expected, torch.float32, scale=True), list(MEAN), list(STD))
    torch.testing.assert_close(image, expected)


@pytest.mark.parametrize(("width", "height", "box"), [(1000, 10, (493, 0, 506, 10)), (9, 900, (0, 444, 9, 456))])
def test_random_box_of_an_extreme_image_is_centered_like_torchvisions(
    width: int, height: int, box: tuple[int, ...]
) -> None:
    """No random box fits, so the box is as large as the widest or narrowest allowed ratio."""
    torch.manual_seed(0)
    assert {random_box(width, height) for _ in range(20)} == {box}


def test_decode_reads_other_formats_and_gray_images_as_rgb() -> None:
    pixels = smooth_image(60, 80, 0)
    gray_rgb = np.repeat(pixels[..., :1], 3, axis=2)
    for array, expected in ((pixels, pixels), (pixels[..., 0], gray_rgb)):
        assert np.array_equal(decode(encode(array, "PNG")), expected)
    gray_jpeg = jpeg_bytes(pixels[..., 0], subsampling=-1)
    assert np.array_equal(decode(gray_jpeg), decode_with_pillow(gray_jpeg))


def test_pixels_are_read_from_any_kind_of_sample() -> None:
    pixels = smooth_image(60, 80, 0)
    encoded = gl.Encoded(jpeg_bytes(pixels))
    samples = [(encoded, 3), {"cls": np.int64(4), "jpg": encoded}, gl.Image(pixels), (pixels[..., :1], "a text")]
    pictures = Pictures(samples)
    assert {pictures.pixels(number).shape for number in range(len(pictures))} == {(60, 80, 3)}
    assert np.array_equal(pictures.pixels(2), pixels)
    with pytest.raises(TypeError, match="the sample has no image, only int, str"):
        Pictures([(3, "a")]).pixels(0)


def test_decode_without_simplejpeg_uses_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"simplejpeg {metadata.version('simplejpeg')}" == DECODER
    data = jpeg_bytes(smooth_image(60, 80, 0))
    monkeypatch.setattr(torch_way, "simplejpeg", None)
    assert np.array_equal(decode(data), decode_with_pillow(data))


def test_collate_drops_images_that_cannot_be_loaded() -> None:
    good = gl.Encoded(jpeg_bytes(smooth_image(60, 80, 0)))
    samples = [(good, 5), (gl.Encoded(b"nothing"), 6), (good, 7)]
    dataset = Pictures(samples)
    assert dataset[1] == 1  # in place of its image, the number of the sample that failed
    images, failed = collate([dataset[number] for number in range(3)])
    assert (images.shape, failed) == ((2, 3, 224, 224), [1])
    images, failed = collate([dataset[1]])
    assert (len(images), failed) == (0, [1])
    [(images, failed)] = data_loader(samples, batch_size=3, num_workers=0, pin_memory=False)
    assert (images.shape, failed) == ((2, 3, 224, 224), [1])
