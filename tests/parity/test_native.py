"""What each backend runs itself, and does not leave to the reference: `Loader.plan` says so."""

from __future__ import annotations

from typing import Any

import pytest
from parity.usable import needs

import gpuload as gl
from gpuload import transforms as T

FLOAT, NORMALIZE = T.ToDtype("float32", scale=True), T.Normalize([0.5] * 3, [0.5] * 3)
EXACT_SIZE = T.CenterCrop(32)

# By name, a chain that has it, of which each transform must run there.
PIXELS: dict[str, list[Any]] = {
    "CenterCrop": [T.CenterCrop(32)],
    "RandomCrop": [T.RandomCrop(32, padding=4)],
    "RandomHorizontalFlip": [T.RandomHorizontalFlip()],
    "RandomVerticalFlip": [T.RandomVerticalFlip()],
    "ColorJitter": [T.ColorJitter(0.4, 0.4, 0.4, 0.1)],
    "RandomErasing of levels": [T.RandomErasing(value=9)],
    "RandomErasing": [NORMALIZE, T.RandomErasing()],
    "RandomErasing of random numbers": [NORMALIZE, T.RandomErasing(value="random")],
    "Normalize": [NORMALIZE],
}
RESIZING: dict[str, list[Any]] = {
    "Resize": [T.Resize((32, 32))],
    "RandomResizedCrop": [T.RandomResizedCrop(32)],
}
RESIZING_CUBIC: dict[str, list[Any]] = {
    "Resize(bicubic)": [T.Resize((32, 32), "bicubic")],
    "RandomResizedCrop(random)": [T.RandomResizedCrop(32, interpolation="random")],
}
MOST: dict[str, list[Any]] = {
    **PIXELS,
    "RandomCrop(reflect)": [T.RandomCrop(32, padding=4, padding_mode="reflect")],
    "Pad": [T.Pad(3, fill=7)],
    "Pad(edge)": [T.Pad(3, padding_mode="edge")],
    "RandomZoomOut": [T.RandomZoomOut()],
    "RandomRotation": [T.RandomRotation(30)],
    "RandomRotation(bilinear)": [T.RandomRotation(30, "bilinear")],
    "RandomAffine": [T.RandomAffine(30, (0.1, 0.1), (0.5, 1.5), 10)],
    "RandomAffine(bilinear)": [T.RandomAffine(30, (0.1, 0.1), (0.5, 1.5), 10, "bilinear")],
    "Grayscale": [T.Grayscale(3)],
    "Grayscale(1)": [T.Grayscale(1)],
    "RandomGrayscale": [T.RandomGrayscale()],
    "RandomSolarize": [T.RandomSolarize(128)],
    "RandomPosterize": [T.RandomPosterize(4)],
    "RandomInvert": [T.RandomInvert()],
    "RandomChannelPermutation": [T.RandomChannelPermutation()],
    "ToDtype": [FLOAT],
    "RandAugment": [T.RandAugment()],
    "RandAugment(bilinear)": [T.RandAugment(interpolation="bilinear")],
    "TrivialAugmentWide": [T.TrivialAugmentWide()],
    "TrivialAugmentWide(bilinear)": [T.TrivialAugmentWide(interpolation="bilinear")],
    # One transform for each of their operations: whoever lacks one lacks both of the above.
    "RandomEqualize": [T.RandomEqualize()],
    "RandomAutocontrast": [T.RandomAutocontrast()],
    "RandomAdjustSharpness": [T.RandomAdjustSharpness(2)],
    "MixUp": [EXACT_SIZE, NORMALIZE, T.MixUp(num_classes=3)],
    "CutMix": [EXACT_SIZE, FLOAT, T.CutMix(num_classes=3)],
    "MixUp or CutMix": [EXACT_SIZE, NORMALIZE, T.RandomChoice([T.MixUp(), T.CutMix()])],
    "in a RandomApply": [T.RandomApply([T.ColorJitter(0.4), T.RandomRotation(9)], 0.8)],
}
NATIVE: dict[str, dict[str, list[Any]]] = {
    "fused": {
        **MOST,
        **RESIZING,
        **RESIZING_CUBIC,
        "RandomResizedCrop(nearest)": [T.RandomResizedCrop(32, interpolation="nearest")],
        "RandomRotation(bicubic)": [T.RandomRotation(30, "bicubic")],
        "RandomAffine(bicubic)": [T.RandomAffine(30, interpolation="bicubic")],
        "RandomPerspective": [T.RandomPerspective()],
        "RandAugment(bicubic)": [T.RandAugment(interpolation="bicubic")],
        "GaussianBlur": [T.GaussianBlur(9)],
    },
    "kornia": {**MOST, "GaussianBlur": [T.GaussianBlur(9)]},
    "dali": {**PIXELS, **RESIZING, **RESIZING_CUBIC, "GaussianBlur": [T.GaussianBlur(9)]},
}


@pytest.mark.parametrize(
    ("backend", "name"), [(backend, name) for backend, chains in NATIVE.items() for name in chains]
)
def test_native(backend, name):
    needs(backend)
    chain = NATIVE[backend][name]
    plan = gl.Loader(["a.jpg", "b.jpg"], 2, transforms=chain, backend=backend, device="cpu", num_workers=0).plan()
    assert plan.backend == backend
    assert [step.transform for step in plan.steps] == list(T.Chain(chain).lines[0].transforms)
    elsewhere = {repr(step.transform): step.reason for step in plan.steps if step.backend != backend}
    assert not elsewhere


def test_a_transform_that_is_lacking_is_found():
    needs("kornia")
    chain = [T.ColorJitter(0.4), T.Resize((32, 32)), NORMALIZE]
    plan = gl.Loader(["a.jpg"], transforms=chain, backend="kornia", device="cpu", num_workers=0).plan()
    assert [step.backend for step in plan.steps] == ["kornia", "torch", "kornia"]
