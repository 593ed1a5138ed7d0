"""Fixtures for the tests of decoding: a picture, encoded files, and the three JPEG decoders."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from helpers import generated_images
from helpers.decoders import NAMES, decoder_by

from gpuload.decode import Decoder


@pytest.fixture(scope="session")
def picture() -> np.ndarray:
    """83×122×3, smooth with noise and strong colours, so that chroma upsampling and edges show; never black."""
    rng = np.random.default_rng(7)
    y, x = np.mgrid[0:83, 0:122]
    waves = [128 + 90 * np.sin(x * a + y * b) for a, b in ((0.11, 0.03), (0.05, 0.13), (0.21, 0.17))]
    return np.clip(np.stack(waves, -1) + rng.normal(0, 12, (83, 122, 3)), 1, 255).astype(np.uint8)


@pytest.fixture(scope="session")
def encode() -> Callable[..., bytes]:
    """`encode(array, "PNG", mode=None, **options)` encodes an array with Pillow."""
    return generated_images.encode


@pytest.fixture(params=NAMES)
def decoder(request: pytest.FixtureRequest) -> Decoder:
    """Each of the three decoders in turn."""
    return decoder_by(request.param)


@pytest.fixture(params=NAMES)
def upright_decoder(request: pytest.FixtureRequest) -> Decoder:
    """Each of the three decoders in turn, with ``exif=True``."""
    return decoder_by(request.param, exif=True)
