"""A loader's draws are bitwise the same on every backend."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from parity.case import BATCHES, RUNS
from parity.usable import unusable_reason
from recipes.comparison import IMAGENET_MEAN, IMAGENET_STD, Pictures

import gpuload as gl
from gpuload import transforms as T
from gpuload.stage.stage import Stage

NORMALIZE = T.Normalize(IMAGENET_MEAN, IMAGENET_STD)
RECIPES: dict[str, list[Any]] = {
    "classification": [
        T.RandomResizedCrop(20),
        T.RandomHorizontalFlip(),
        T.TrivialAugmentWide(),
        NORMALIZE,
        T.RandomErasing(value="random"),
        T.RandomChoice([T.MixUp(num_classes=5), T.CutMix(num_classes=5)]),
    ],
    "timm": [
        T.RandomResizedCrop(20, interpolation="random"),
        T.TimmRandAugment("rand-m9-mstd0.5-inc1"),
        NORMALIZE,
        T.RandomErasing(mode="pixel"),
    ],
    "views": [
        T.MultiView(
            [
                [T.RandomResizedCrop(16), T.RandomApply([T.ColorJitter(0.8, 0.8, 0.8, 0.2)], 0.8)],
                [T.RandomResizedCrop(12), T.RandomOrder([T.GaussianBlur(3), T.RandomSolarize(128)])],
            ]
        ),
        NORMALIZE,
    ],
}


def comparable(value: Any) -> Any:
    """Return draws as values that can be compared with ==."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, tuple):
        return [comparable(inner) for inner in value]
    if hasattr(value, "__dataclass_fields__"):
        return type(value).__name__, [comparable(getattr(value, field.name)) for field in fields(value)]
    return value


@pytest.mark.parametrize("name", RECIPES)
def test_draws_are_the_same_on_all_backends(images, monkeypatch, name):
    seen_draws: list[Any] = []
    call = Stage.__call__

    def record_draws(stage, images_, draws, **options_):
        seen_draws.append(comparable(draws))
        return call(stage, images_, draws, **options_)

    monkeypatch.setattr(Stage, "__call__", record_draws)
    small = Pictures([image.resize((32, 24)) for image in images[:4]])
    draws_by_backend = {}
    for backend in [run for run in RUNS if run != BATCHES and unusable_reason(run) is None]:
        seen_draws.clear()
        options: dict[str, Any] = {"num_workers": 0, "device": "cpu", "seed": 3, "shuffle": True}
        with gl.Loader(small, 2, transforms=RECIPES[name], backend=backend, **options) as loader:
            labels = [batch[1].tolist() for batch in loader]
        draws_by_backend[backend] = sorted(seen_draws, key=repr), labels
    assert len(draws_by_backend["torch"][0]) == (4 if name == "views" else 2)
    for backend, draws_ in draws_by_backend.items():
        assert draws_ == draws_by_backend["torch"], backend
