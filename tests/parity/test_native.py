"""Each backend runs these transforms itself; `Loader.plan` says so."""

from __future__ import annotations

from typing import Any

import pytest
from parity.usable import needs

import gpuload as gl
from gpuload import transforms as T

FLOAT, NORMALIZE = T.ToDtype("float32", scale=True), T.Normalize([0.5] * 3, [0.5] * 3)
EXACT_SIZE = T.CenterCrop(32)

# Chains by name; each transform of a chain must run on the backend. First those that all backends run.
CHAINS: dict[str, list[Any]] = {
    "CenterCrop": [T.CenterCrop(32)],
    "RandomCrop": [T.RandomCrop(32, padding=4)],
    "Pad": [T.Pad(3, fill=7)],
    "RandomZoomOut": [T.RandomZoomOut()],
    "Resize": [T.Resize((32, 32))],
    "Resize(bicubic)": [T.Resize((32, 32), "bicubic")],
    "RandomResizedCrop": [T.RandomResizedCrop(32)],
    "RandomResizedCrop(random)": [T.RandomResizedCrop(32, interpolation="random")],
    "RandomResizedCrop(nearest)": [T.RandomResizedCrop(32, interpolation="nearest")],
    "RandomHorizontalFlip": [T.RandomHorizontalFlip()],
    "RandomVerticalFlip": [T.RandomVerticalFlip()],
    "RandomRotation": [T.RandomRotation(30)],
    "RandomRotation(bilinear)": [T.RandomRotation(30, "bilinear")],
    "RandomAffine": [T.RandomAffine(30, (0.1, 0.1), (0.5, 1.5), 10)],
    "RandomAffine(bilinear)": [T.RandomAffine(30, (0.1, 0.1), (0.5, 1.5), 10, "bilinear")],
    "ColorJitter": [T.ColorJitter(0.4, 0.4, 0.4, 0.1)],
    "Grayscale(3)": [T.Grayscale(3)],
    "RandomGrayscale": [T.RandomGrayscale()],
    "RandomSolarize": [T.RandomSolarize(128)],
    "RandomPosterize": [T.RandomPosterize(4)],
    "RandomInvert": [T.RandomInvert()],
    "RandomEqualize": [T.RandomEqualize()],
    "RandomAutocontrast": [T.RandomAutocontrast()],
    "RandomAdjustSharpness": [T.RandomAdjustSharpness(2)],
    "GaussianBlur": [T.GaussianBlur(9)],
    "RandAugment": [T.RandAugment()],
    "RandAugment(bilinear)": [T.RandAugment(interpolation="bilinear")],
    "TrivialAugmentWide": [T.TrivialAugmentWide()],
    "RandomErasing of levels": [T.RandomErasing(value=9)],
    "RandomErasing": [NORMALIZE, T.RandomErasing()],
    "Normalize": [NORMALIZE],
    "ToDtype": [FLOAT],
    "in a RandomApply": [T.RandomApply([T.ColorJitter(0.4), T.RandomHorizontalFlip()], 0.8)],
}
ONLY: dict[str, dict[str, list[Any]]] = {
    "fused": {
        "RandomCrop(reflect)": [T.RandomCrop(32, padding=4, padding_mode="reflect")],
        "Pad(edge)": [T.Pad(3, padding_mode="edge")],
        "RandomRotation(bicubic)": [T.RandomRotation(30, "bicubic")],
        "RandomPerspective": [T.RandomPerspective()],
        "Grayscale(1)": [T.Grayscale(1)],
        "RandomErasing of random numbers": [NORMALIZE, T.RandomErasing(value="random")],
        "RandomChannelPermutation": [T.RandomChannelPermutation()],
        "MixUp": [EXACT_SIZE, NORMALIZE, T.MixUp(num_classes=3)],
        "CutMix": [EXACT_SIZE, FLOAT, T.CutMix(num_classes=3)],
        "MixUp or CutMix": [EXACT_SIZE, NORMALIZE, T.RandomChoice([T.MixUp(), T.CutMix()])],
    },
    "kornia": {
        "RandomCrop(reflect)": [T.RandomCrop(32, padding=4, padding_mode="reflect")],
        "Pad(edge)": [T.Pad(3, padding_mode="edge")],
        "Resize without antialiasing": [T.Resize((32, 32), antialias=False)],
        "RandomRotate90": [T.RandomRotate90()],
        "RandomRotation(bicubic)": [T.RandomRotation(30, "bicubic")],
        "RandomPerspective": [T.RandomPerspective()],
        "Grayscale(1)": [T.Grayscale(1)],
        "AugMix": [T.AugMix()],
    },
    "dali": {},
}
NATIVE = {backend: CHAINS | chains for backend, chains in ONLY.items()}


@pytest.mark.parametrize(
    ("backend", "name"), [(backend, name) for backend, chains in NATIVE.items() for name in chains]
)
def test_a_backend_runs_every_transform_of_these_chains(backend, name):
    needs(backend)
    chain = NATIVE[backend][name]
    plan = gl.Loader(["a.jpg", "b.jpg"], 2, transforms=chain, backend=backend, device="cpu", num_workers=0).plan()
    assert plan.backend == backend
    assert [step.transform for step in plan.steps] == list(T.Chain(chain).lines[0].transforms)
    elsewhere = {repr(step.transform): step.reason for step in plan.steps if step.backend != backend}
    assert not elsewhere


def test_a_transform_that_a_backend_lacks_runs_on_torch():
    needs("kornia")
    chain = [T.ColorJitter(0.4), T.JPEG(50), NORMALIZE]
    plan = gl.Loader(["a.jpg"], transforms=chain, backend="kornia", device="cpu", num_workers=0).plan()
    assert [step.backend for step in plan.steps] == ["kornia", "torch", "kornia"]
