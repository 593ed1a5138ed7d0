"""The transforms that Kornia runs, the reasons why torch runs all others, and the error if Kornia is not installed."""

from __future__ import annotations

import pytest
import torch
from helpers.programs import run_python

from gpuload import transforms as T
from gpuload.errors import BackendError
from gpuload.stage import compile_stage
from gpuload.stage.kornia import KorniaBackend
from gpuload.stage.kornia.backend import UNSUPPORTED
from gpuload.stage.kornia.operators import OPERATORS
from gpuload.transforms.program.ops import OPS

CPU = torch.device("cpu")
NORMALIZE = T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

SUPPORTED = [
    [T.CenterCrop(20)],
    [T.RandomCrop(20, 4, padding_mode="reflect")],
    [T.Pad(3, fill=7)],
    [T.RandomZoomOut()],
    [T.Resize(20), T.CenterCrop(20)],
    [T.Resize(20, "nearest"), T.RandomResizedCrop(20, interpolation="random")],
    [T.RandomResizedCrop(20, antialias=False)],
    [T.RandomHorizontalFlip(), T.RandomVerticalFlip()],
    [T.RandomRotate90(), T.RandomTranspose()],
    [T.RandomRotation(30)],
    [T.RandomRotation(30, "bicubic", expand=True), T.CenterCrop(20)],
    [T.RandomAffine(30, (0.1, 0.1), (0.8, 1.2), 10)],
    [T.RandomPerspective()],
    [T.ColorJitter(0.4, 0.4, 0.4, 0.1)],
    [T.Grayscale(3)],
    [T.Grayscale(1)],
    [T.RandomGrayscale()],
    [T.RandomSolarize(128), T.RandomPosterize(3), T.RandomInvert()],
    [T.RandomEqualize(), T.RandomAutocontrast(), T.RandomAdjustSharpness(2)],
    [T.GaussianBlur(5)],
    [T.RandAugment()],
    [T.TrivialAugmentWide()],
    [T.AutoAugment()],
    [T.AugMix()],
    [T.TimmRandAugment("rand-m9-mstd0.5", {"interpolation": "bilinear"})],
    [T.RandomErasing()],
    [T.ToDtype("float32", scale=True), T.RandomErasing(value=0.5), NORMALIZE],
    [NORMALIZE, T.RandomErasing(), T.RandomHorizontalFlip()],
    [NORMALIZE, T.RandomApply([T.RandomErasing()], 0.5), T.SanitizeBoundingBoxes()],
    [T.RandomChoice([T.ColorJitter(0.4), T.RandomRotation(9)])],
]


@pytest.mark.parametrize("transforms", SUPPORTED, ids=str)
def test_plan_names_kornia_for_supported_transforms(transforms):
    plan = compile_stage(T.Chain(transforms), device=CPU, backend="kornia").plan
    assert [step.backend for step in plan.steps] == ["kornia"] * len(transforms), str(plan)


UNSUPPORTED_TRANSFORMS = [
    (T.Resize(20, "lanczos"), "Kornia has no Lanczos filter"),
    (T.GaussianNoise(), "noise: Kornia draws its own noise"),
    (T.RandomChannelPermutation(), "permute: Kornia draws its own order of channels"),
    (T.JPEG(50), "jpeg: Kornia's JPEG gives an image other bits in a batch than alone"),
    (T.RandomShadow(), "shadow: Kornia draws its own shadows, which are not polygons"),
    (T.GaussianIllumination(), "illumination: Kornia draws its own illumination"),
    (T.ElasticTransform(), "Kornia's elastic deformation gives an image other bits in a batch than alone"),
    (T.TimmRandAugment("rand-n4-p1-mstdinf-t3aw"), "pillow_blur: Kornia has no box blur with a fractional radius"),
    (T.RandomApply([T.RandomInvert(), T.JPEG(50)]), "JPEG: jpeg: Kornia's JPEG gives"),
]


@pytest.mark.parametrize(("transform", "reason"), UNSUPPORTED_TRANSFORMS, ids=str)
def test_plan_gives_the_reason_for_unsupported_transforms(transform, reason):
    plan = compile_stage(T.Chain([transform, T.RandomInvert()]), device=CPU, backend="kornia").plan
    assert [step.backend for step in plan.steps] == ["torch", "kornia"]
    assert plan.steps[0].reason.startswith(reason)


@pytest.mark.parametrize(
    ("transform", "note"),
    [
        (T.Resize(20), "not antialiased"),
        (T.RandomResizedCrop(20, interpolation="bicubic"), "not antialiased"),
        (T.RandomApply([T.RandomInvert(), T.Resize(20)]), "not antialiased"),
        (T.Resize(20, antialias=False), None),
        (T.Resize(20, "nearest"), None),
        (T.RandomCrop(20, 4), None),
    ],
    ids=str,
)
def test_plan_notes_that_kornia_does_not_antialias(transform, note):
    plan = compile_stage(T.Chain([transform, NORMALIZE]), device=CPU, backend="kornia").plan
    assert [(step.backend, step.reason) for step in plan.steps] == [("kornia", note), ("kornia", None)]


@pytest.mark.parametrize(
    ("transforms", "backends"),
    [
        ([NORMALIZE, T.RandomErasing(), T.RandomErasing(value="random"), T.RandomErasing(), T.MixUp()],
         ["kornia", "kornia", "torch", "torch", "torch"]),
        ([T.JPEG(50), NORMALIZE, T.RandomErasing()], ["torch", "kornia", "kornia"]),
        ([T.Lambda(lambda images: images), NORMALIZE, T.RandomErasing()], ["own", "torch", "torch"]),
    ],
)  # fmt: skip
def test_torch_changes_finished_images_after_its_own_steps(transforms, backends):
    """Kornia changes finished images only in the pass that finishes them."""
    steps = compile_stage(T.Chain(transforms), device=CPU, backend="kornia").plan.steps
    assert [step.backend for step in steps] == backends
    if len(steps) == 5:  # the first case
        in_place = "torch changes finished images in place"
        assert [step.reason for step in steps[2:]] == ["Kornia erases only with constants", in_place, in_place]


PROGRAM = """
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
def test_kornia_is_imported_only_by_its_backend_and_its_absence_raises():
    output, _ = run_python(PROGRAM)
    error, requirement = output.splitlines()
    expected = "the backend 'kornia' needs Kornia, which cannot be imported here; run `pip install 'gpuload[kornia]'`"
    assert error.startswith(f"{expected} (")
    assert requirement == expected


def test_unmet_requirement_refuses_versions_of_kornia_before_0_9(monkeypatch):
    for installed in ("0.9.0", "0.10.1rc1", "0.8.2"):
        monkeypatch.setattr("gpuload.stage.kornia.backend.version", lambda name, installed=installed: installed)
        assert (KorniaBackend.unmet_requirement(CPU) is None) == (installed != "0.8.2")
    with pytest.raises(BackendError, match=r"needs Kornia 0.9 or later, but 0.8.2 is installed; run `pip install -U"):
        compile_stage(T.Chain([T.RandomInvert()]), device=CPU, backend="kornia")


def test_every_operation_has_an_operator_or_a_reason():
    unlisted = {*OPS} - {*OPERATORS, *UNSUPPORTED, "warp", "identity"}
    assert not unlisted, "add these to OPERATORS (gpuload/stage/kornia/operators.py) or UNSUPPORTED (…/backend.py)"
    assert not {*OPERATORS, *UNSUPPORTED} - {*OPS}, "OPERATORS or UNSUPPORTED has operations that OPS does not have"
    assert not {*OPERATORS} & {*UNSUPPORTED}, "remove these operations from OPERATORS or UNSUPPORTED"
