"""A sample's bytes, whatever it is."""

from __future__ import annotations

import numpy as np
import pytest

import gpuload as gl
from gpuload.cli.bench.reading import OnlyRead, bytes_of


@pytest.mark.parametrize(
    ("sample", "nbytes"),
    [
        ((gl.Encoded(b"12345"), 3), 5),
        ({"jpg": gl.Encoded(b"12345"), "mask": gl.Mask(gl.Encoded(b"123")), "cls": 3}, 8),
        (gl.Image(np.zeros((4, 5, 3), np.uint8)), 60),
        ((np.zeros((4, 5), np.float32), "a text"), 80),
    ],
)
def test_bytes_of_a_sample(sample: object, nbytes: int) -> None:
    assert bytes_of(sample) == nbytes
    only = OnlyRead([sample, sample])
    assert (len(only), only[1]) == (2, nbytes)
