"""Errors name the broken file of a sample with several files."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.generated_images import encode

import gpuload as gl

pytestmark = pytest.mark.processes


class IntactAndTruncated:
    """A dataset of one sample: an intact image, and a mask or a second image whose file is truncated."""

    def __init__(self, second_kind: str) -> None:
        self.second_kind = second_kind

    def __len__(self):
        return 1

    def __getitem__(self, i):
        rng = np.random.default_rng(0)
        intact = gl.Encoded(encode(rng.integers(0, 256, (40, 50, 3), np.uint8), "PNG"), source="intact.png")
        if self.second_kind == "mask":
            broken = gl.Encoded(
                encode(rng.integers(0, 9, (40, 50), np.uint8), "PNG")[:-600], "unchanged", source="broken.png"
            )
            return intact, gl.Mask(broken)
        return intact, gl.Encoded(
            encode(rng.integers(0, 256, (40, 50, 3), np.uint8), "PNG")[:-3000], source="broken.png"
        )


@pytest.mark.parametrize("second_kind", ["mask", "image"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_error_of_a_truncated_file_names_it_among_several(second_kind, num_workers):
    with (
        gl.Loader(IntactAndTruncated(second_kind), 1, num_workers=num_workers, device="cpu") as loader,
        pytest.raises(gl.SampleError, match=r"sample 0 .*broken\.png") as caught,
    ):
        list(loader)
    assert caught.value.source == "broken.png"


@pytest.mark.parametrize("data", [b"no image", None], ids=["header", "pixels"])
@pytest.mark.parametrize(
    ("sources", "expected_source"),
    [((None, None), None), ((None, "second.png"), None), (("first.png", "second.png"), "first.png")],
)
def test_an_error_of_an_image_does_not_name_the_file_of_its_mask(data, sources, expected_source):
    pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)
    image = gl.Encoded(encode(pixels, "PNG")[:-3000] if data is None else data, source=sources[0])
    mask = gl.Mask(gl.Encoded(encode(pixels[..., 0], "PNG"), "unchanged", source=sources[1]))
    with pytest.raises(gl.SampleError, match=r"\(in sample\[0\]\)") as caught:
        list(gl.Loader([(image, mask)], 1, num_workers=0, device="cpu"))
    assert caught.value.source == expected_source


def test_the_error_of_an_invalid_header_names_the_file_of_its_image():
    intact = gl.Encoded(encode(np.zeros((4, 5, 3), np.uint8), "PNG"), source="intact.png")
    with pytest.raises(gl.SampleError, match=r"sample 0 \(broken\.png\).*\(in sample\[1\]\)"):
        list(gl.Loader([(intact, gl.Encoded(b"no image", source="broken.png"))], 1, num_workers=0, device="cpu"))
