"""What runs on Kornia, what runs in its place and why, and what is said where Kornia is not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from gpuload import transforms as T
from gpuload.stage import compile_stage
from gpuload.stage.kornia import KorniaBackend
from gpuload.stage.kornia.backend import UNSUPPORTED as LACKS
from gpuload.stage.kornia.runner import OPERATIONS
from gpuload.transforms.program.ops import OPS

CPU = torch.device("cpu")
NORMALIZE = T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

NATIVE = [
    [T.CenterCrop(20)],
    [T.RandomCrop(20, 4, padding_mode="reflect")],
    [T.Pad(3, fill=7)],
    [T.RandomZoomOut()],
    [T.RandomHorizontalFlip(), T.RandomVerticalFlip()],
    [T.RandomRotation(30)],
    [T.RandomRotation(30, "bilinear", expand=True), T.CenterCrop(20)],
    [T.RandomAffine(30, (0.1, 0.1), (0.8, 1.2), 10)],
    [T.RandomPerspective()],
    [T.ColorJitter(0.4)],
    [T.Grayscale(3)],
    [T.Grayscale(1)],
    [T.RandomGrayscale()],
    [T.RandomSolarize(128)],
    [T.RandomPosterize(3)],
    [T.RandomInvert()],
    [T.RandomEqualize()],
    [T.GaussianBlur(5)],
    [T.RandomErasing()],
    [T.ToDtype("float32", scale=True), T.RandomErasing(value=0.5), NORMALIZE],
    [T.RandomChoice([T.ColorJitter(0.4), T.RandomRotation(9)])],
    [NORMALIZE, T.SanitizeBoundingBoxes()],  # on finished images, of which it changes none
]


@pytest.mark.parametrize("transforms", NATIVE, ids=str)
def test_these_run_on_kornia(transforms):
    plan = compile_stage(T.Chain(transforms), device=CPU, backend="kornia").plan
    assert [step.backend for step in plan.steps] == ["kornia"] * len(transforms), str(plan)


UNSUPPORTED = [
    (T.Resize(20), "Kornia's resize differs by up to 87 levels from Pillow's"),
    (T.Resize(20, "nearest"), "Kornia's nearest resize takes the pixel at the corner, Pillow's"),
    (T.RandomResizedCrop(20), "Kornia's resize differs by up to 87 levels from Pillow's"),
    (T.RandomRotation(9, "bicubic"), "Kornia's bicubic filter is not Pillow's (a = -0.75, not -1)"),
    (T.ColorJitter(0.4, 0.4, 0.4, 0.1), "contrast: Kornia multiplies the levels"),
    (T.ColorJitter(saturation=0.4), "saturation: Kornia works in HSV (up to 195 levels from Pillow)"),
    (T.ColorJitter(hue=0.1), "hue: Kornia does not round hue and saturation to 8 bits"),
    (T.RandomPhotometricDistort(), "contrast: Kornia multiplies the levels"),
    (T.RandomAdjustSharpness(2), "sharpness: Kornia does not round the smoothed image"),
    (T.RandomAutocontrast(), "autocontrast: Kornia turns a channel with a single level black"),
    (T.GaussianNoise(), "noise: Kornia draws its own noise"),
    (T.RandomChannelPermutation(), "permute: Kornia draws its own order of channels"),
    (T.JPEG(50), "jpeg: Kornia's JPEG rounds smoothly"),
    (T.ElasticTransform(), "Kornia draws its own fields"),
    (T.RandAugment(), "autocontrast: Kornia turns a channel with a single level black"),
    (T.TrivialAugmentWide(), "autocontrast: "),
    (T.AutoAugment(), "autocontrast: "),
    (T.AugMix(), "autocontrast: "),
    (T.TimmRandAugment("rand-m9-mstd0.5", {"interpolation": "bilinear"}), "autocontrast: "),
    (T.TimmRandAugment("rand-n4-p1-mstdinf-t3aw"), "autocontrast: "),
    (T.RandomApply([T.RandomInvert(), T.Resize(20)]), "Resize: Kornia's resize differs by up to 87 levels"),
    (T.RandomApply([T.RandomInvert(), T.ColorJitter(contrast=1)]), "ColorJitter: contrast: Kornia multiplies"),
]


@pytest.mark.parametrize(("transform", "reason"), UNSUPPORTED, ids=str)
def test_these_do_not_and_the_plan_says_why(transform, reason):
    plan = compile_stage(T.Chain([transform, T.RandomInvert()]), device=CPU, backend="kornia").plan
    assert [step.backend for step in plan.steps] == ["torch", "kornia"]
    assert plan.steps[0].reason.startswith(reason)


@pytest.mark.parametrize("late", [T.RandomErasing(), T.RandomErasing(value="random"), T.RandomHorizontalFlip()])
def test_finished_images_are_left_to_torch(late):
    chain = T.Chain([T.CenterCrop(20), NORMALIZE, T.RandomErasing(value="random"), late, T.MixUp(num_classes=10)])
    plan = compile_stage(chain, device=CPU, backend="kornia").plan
    assert [step.backend for step in plan.steps] == ["kornia", "kornia", "torch", "torch", "torch"]
    assert {step.reason for step in plan.steps[2:]} == {"torch changes finished images in place"}


ABSENT = """
import sys
import gpuload, gpuload.workers.main, torch
from gpuload import transforms as T
from gpuload.stage import compile_stage
from gpuload.stage.kornia import KorniaBackend
from gpuload.errors import BackendError
compile_stage(T.Chain([T.ColorJitter(0.4)]), device="cpu")
assert KorniaBackend.unmet_requirement(torch.device("cpu")) is None
assert "kornia" not in sys.modules, "only the backend imports Kornia"
sys.modules["kornia"] = None  # as if it were not installed
try:
    KorniaBackend(torch.device("cpu"))
except BackendError as error:
    print(error)
print(KorniaBackend.unmet_requirement(torch.device("cpu")))
"""


@pytest.mark.processes
def test_it_says_what_is_missing_and_imports_kornia_late():
    done = subprocess.run([sys.executable, "-c", ABSENT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    text = "the backend 'kornia' needs Kornia, which cannot be imported here; run `pip install 'gpuload[kornia]'`"
    assert first.startswith(f"{text} (")
    assert second == text


def test_all_other_operations_are_lacking():
    assert set(OPS) - set(OPERATIONS) - {"warp", "identity"} == set(LACKS)


def test_its_name_is_that_of_the_option():
    assert KorniaBackend.name == "kornia"
    assert compile_stage(T.Chain([T.RandomInvert()]), device=CPU, backend="kornia").plan.backend == "kornia"
