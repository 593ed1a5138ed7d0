"""A file that is broken is the one that is named, also where a sample has several."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

import gpuload as gl

pytestmark = pytest.mark.processes


def png(array: np.ndarray, *, cut: int = 0) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(array).save(stream, "PNG")
    return stream.getvalue()[: -cut or None]


class Two:
    """A sound image, and beside it a second one or a mask, whose file is cut off."""

    def __init__(self, beside: str) -> None:
        self.beside = beside

    def __len__(self):
        return 1

    def __getitem__(self, i):
        rng = np.random.default_rng(0)
        sound = gl.Encoded(png(rng.integers(0, 256, (40, 50, 3), np.uint8)), source="sound.png")
        if self.beside == "mask":
            broken = gl.Encoded(png(rng.integers(0, 9, (40, 50), np.uint8), cut=600), "unchanged", source="broken.png")
            return sound, gl.Mask(broken)
        return sound, gl.Encoded(png(rng.integers(0, 256, (40, 50, 3), np.uint8), cut=3000), source="broken.png")


@pytest.mark.parametrize("beside", ["mask", "image"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_broken_file_is_named(beside, num_workers):
    with (
        gl.Loader(Two(beside), 1, num_workers=num_workers, device="cpu") as loader,
        pytest.raises(gl.SampleError, match=r"sample 0 .*broken\.png") as caught,
    ):
        list(loader)
    assert caught.value.source == "broken.png"


@pytest.mark.parametrize(("place", "data"), [("header", b"no image"), ("pixels", None)])
@pytest.mark.parametrize(
    ("sources", "named"),
    [((None, None), None), ((None, "second.png"), None), (("first.png", "second.png"), "first.png")],
)
def test_an_error_about_an_image_does_not_name_the_file_of_its_mask(place, data, sources, named):
    pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)
    image = gl.Encoded(png(pixels, cut=3000) if data is None else data, source=sources[0])
    mask = gl.Mask(gl.Encoded(png(pixels[..., 0]), "unchanged", source=sources[1]))
    with pytest.raises(gl.SampleError, match=r"\(in sample\[0\]\)") as caught:
        list(gl.Loader([(image, mask)], 1, num_workers=0, device="cpu"))
    assert caught.value.source == named


def test_an_error_in_a_header_names_the_file_of_that_image():
    sound = gl.Encoded(png(np.zeros((4, 5, 3), np.uint8)), source="sound.png")
    with pytest.raises(gl.SampleError, match=r"sample 0 \(broken\.png\).*\(in sample\[1\]\)"):
        list(gl.Loader([(sound, gl.Encoded(b"no image", source="broken.png"))], 1, num_workers=0, device="cpu"))
