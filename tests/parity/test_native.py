"""What each backend runs itself, and does not leave to the reference: `Loader.plan` says so."""

from __future__ import annotations

from typing import Any

import pytest
from parity.usable import needs

import gpuload as gl
from gpuload import transforms as T

FLOAT, NORMALIZE = T.ToDtype("float32", scale=True), T.Normalize([0.5] * 3, [0.5] * 3)
EXACT_SIZE = T.CenterCrop(32)

# By name, a chain that has it, of which each transform must run there. First what all backends have.
PIXELS: dict[str, list[Any]] = {
    "CenterCrop": [T.CenterCrop(32)],
    "RandomCrop": [T.RandomCrop(32, padding=4)],
    "Pad": [T.Pad(3, fill=7)],
    "RandomZoomOut": [T.RandomZoomOut()],
    "RandomHorizontalFlip": [T.RandomHorizontalFlip()],
    "RandomVerticalFlip": [T.RandomVerticalFlip()],
    "ColorJitter(brightness)": [T.ColorJitter(0.4)],
    "GaussianBlur": [T.GaussianBlur(9)],
    "RandomErasing of levels": [T.RandomErasing(value=9)],
    "Normalize": [NORMALIZE],
    "ToDtype": [FLOAT],
    "in a RandomApply": [T.RandomApply([T.ColorJitter(0.4), T.RandomHorizontalFlip()], 0.8)],
}
RESIZING: dict[str, list[Any]] = {
    "Resize": [T.Resize((32, 32))],
    "RandomResizedCrop": [T.RandomResizedCrop(32)],
}
KORNIAS: dict[str, list[Any]] = {
    "RandomCrop(reflect)": [T.RandomCrop(32, padding=4, padding_mode="reflect")],
    "Pad(edge)": [T.Pad(3, padding_mode="edge")],
    "RandomRotation": [T.RandomRotation(30)],
    "RandomRotation(bilinear)": [T.RandomRotation(30, "bilinear")],
    "RandomAffine": [T.RandomAffine(30, (0.1, 0.1), (0.5, 1.5), 10)],
    "RandomAffine(bilinear)": [T.RandomAffine(30, (0.1, 0.1), (0.5, 1.5), 10, "bilinear")],
    "RandomPerspective": [T.RandomPerspective()],
    "Grayscale": [T.Grayscale(3)],
    "Grayscale(1)": [T.Grayscale(1)],
    "RandomGrayscale": [T.RandomGrayscale()],
    "RandomSolarize": [T.RandomSolarize(128)],
    "RandomPosterize": [T.RandomPosterize(4)],
    "RandomInvert": [T.RandomInvert()],
    "RandomEqualize": [T.RandomEqualize()],
}
NATIVE: dict[str, dict[str, list[Any]]] = {
    "fused": {
        **PIXELS,
        **RESIZING,
        **KORNIAS,
        "Resize(bicubic)": [T.Resize((32, 32), "bicubic")],
        "RandomResizedCrop(random)": [T.RandomResizedCrop(32, interpolation="random")],
        "RandomResizedCrop(nearest)": [T.RandomResizedCrop(32, interpolation="nearest")],
        "RandomRotation(bicubic)": [T.RandomRotation(30, "bicubic")],
        "RandomAffine(bicubic)": [T.RandomAffine(30, interpolation="bicubic")],
        "ColorJitter": [T.ColorJitter(0.4, 0.4, 0.4, 0.1)],
        "RandomErasing": [NORMALIZE, T.RandomErasing()],
        "RandomErasing of random numbers": [NORMALIZE, T.RandomErasing(value="random")],
        "RandomChannelPermutation": [T.RandomChannelPermutation()],
        "RandAugment": [T.RandAugment()],
        "RandAugment(bilinear)": [T.RandAugment(interpolation="bilinear")],
        "RandAugment(bicubic)": [T.RandAugment(interpolation="bicubic")],
        "TrivialAugmentWide": [T.TrivialAugmentWide()],
        "TrivialAugmentWide(bilinear)": [T.TrivialAugmentWide(interpolation="bilinear")],
        "RandomAutocontrast": [T.RandomAutocontrast()],
        "RandomAdjustSharpness": [T.RandomAdjustSharpness(2)],
        "MixUp": [EXACT_SIZE, NORMALIZE, T.MixUp(num_classes=3)],
        "CutMix": [EXACT_SIZE, FLOAT, T.CutMix(num_classes=3)],
        "MixUp or CutMix": [EXACT_SIZE, NORMALIZE, T.RandomChoice([T.MixUp(), T.CutMix()])],
    },
    "kornia": {**PIXELS, **KORNIAS},
    "dali": {**PIXELS, **RESIZING, "RandomErasing": [NORMALIZE, T.RandomErasing()]},
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
