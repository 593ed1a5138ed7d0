"""The photographs and backends for the tests of recipes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from helpers import lacking
from parity.case import BATCHES, BOUNDED
from parity.usable import needs
from PIL import Image

SHIPPED = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg")  # in scikit-image's package


@pytest.fixture(scope="session")
def images() -> list[Image.Image]:
    """Four RGB photographs, decoded by Pillow: scikit-image's, or shared ones if scikit-image is not installed."""
    from conftest import SHARED

    paths = sorted((SHARED / "photos").glob("*.jpg"))[::24][:4]
    spec = importlib.util.find_spec("skimage")
    if spec is not None and spec.origin is not None:
        paths = [Path(spec.origin).parent / "data" / name for name in SHIPPED]
    if not paths:
        lacking.skip("photographs")
    return [Image.open(path).convert("RGB") for path in paths]


@pytest.fixture(params=[run for run in BOUNDED if run != BATCHES])
def backend(request) -> str:
    """Each backend whose levels are Pillow's and that is available here."""
    needs(request.param)
    return request.param


@pytest.fixture(scope="session")
def small_images(images) -> list[Image.Image]:
    """Small versions of the photographs."""
    return [image.resize((56, 42)) for image in images[:4]]


@pytest.fixture
def pictures(backend, images, small_images) -> list[Image.Image]:
    """The photographs, or two small versions for a backend whose kernels are interpreted."""
    return small_images[:2] if backend == "fused" else images
