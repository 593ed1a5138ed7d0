"""Fixtures that make batches for tests of backends: images cut to the regions that a chain needs, as by a worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from helpers.cut_batches import cut_batch, smooth_images

from gpuload import transforms as T
from gpuload.stage import RaggedImages, compile_stage


@pytest.fixture(scope="session")
def make_images() -> Callable[..., list[np.ndarray]]:
    return smooth_images


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., tuple[RaggedImages, T.Program]]:
    return cut_batch


@pytest.fixture(scope="session")
def run_stage() -> Callable[..., Any]:
    """A function that runs transforms on images; the default device is the CPU."""

    def run(
        transforms: Sequence[Any], images: Sequence[np.ndarray], *, device: str = "cpu", first: int = 0, **options: Any
    ) -> Any:
        chain = T.Chain(transforms)
        ragged, draws = cut_batch(chain, images, first=first)
        ragged.pixels = ragged.pixels.to(device)
        return compile_stage(chain, device=device, **options)(ragged, draws)

    return run


@pytest.fixture(scope="session")
def photo_arrays(photos) -> list[np.ndarray]:
    from PIL import Image

    return [np.asarray(Image.open(path).convert("RGB")) for path in photos]
