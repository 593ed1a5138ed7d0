"""Fixtures for the tests of the DALI backend, which run one chain on one batch with DALI and with the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from gpuload import transforms as T
from gpuload.stage import compile_stage


class Comparison:
    """The results of DALI and the reference, and their differences.

    Attributes:
        ours, reference: the outputs of DALI and the reference, tensors C×H×W.
        plan: DALI's plan, with the backend of each transform.
    """

    def __init__(self, ours: Sequence[torch.Tensor], reference: Sequence[torch.Tensor], plan: Any) -> None:
        self.ours, self.reference, self.plan = list(ours), list(reference), plan
        assert [image.shape for image in self.ours] == [image.shape for image in self.reference]
        assert [image.dtype for image in self.ours] == [image.dtype for image in self.reference]
        self.differences = [
            (image.double() - expected.double()).abs()
            for image, expected in zip(self.ours, self.reference, strict=True)
        ]

    @property
    def mean(self) -> float:
        return float(torch.cat([image.flatten() for image in self.differences]).mean())

    @property
    def max(self) -> float:
        return max(float(image.max()) for image in self.differences)

    @property
    def backends(self) -> list[str]:
        """The backends of all steps, without repeats."""
        return list(dict.fromkeys(step.backend for step in self.plan.steps))


@pytest.fixture(scope="session")
def compare(make_batch) -> Callable[..., Comparison]:
    """A function that runs transforms on images with DALI and with the reference."""

    def run(transforms: Sequence[Any], images: Sequence[np.ndarray], *, uncut: bool = False, **options) -> Comparison:
        chain = T.Chain(list(transforms))
        ragged, program = make_batch(chain, images, uncut=uncut)
        options.setdefault("ragged", "list")
        stages = [compile_stage(chain, device="cpu", backend=name, **options) for name in ("dali", "torch")]
        ours, reference = (stage(ragged, program) for stage in stages)
        return Comparison(list(ours), list(reference), stages[0].plan)

    return run


@pytest.fixture(scope="session")
def images(make_images, photo_arrays) -> list[np.ndarray]:
    """Photographs, pictures of waves and edges, and noise, of many sizes."""
    noise = np.random.default_rng(0).integers(0, 256, (60, 70, 3), dtype=np.uint8)
    return [*photo_arrays[:4], *make_images(3, 9), noise]
