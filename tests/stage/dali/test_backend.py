"""Which transforms DALI runs, which torch runs instead and why, and the errors if DALI is missing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.programs import run_python

import gpuload
from gpuload import transforms as T
from gpuload.stage import compile_stage
from gpuload.stage.dali import DaliBackend, backend
from gpuload.stage.dali.operators import OPERATIONS
from gpuload.stage.plan import plan_steps
from gpuload.transforms.program.ops import OPS

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def dali() -> DaliBackend:
    return DaliBackend(CPU)


NORMALIZE = T.Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
JITTER = T.ColorJitter(0.4, 0.4, 0.4, 0.1)
CROP, CIFAR_CROP, FLIP = T.RandomResizedCrop(32), T.RandomCrop(32, padding=4), T.RandomHorizontalFlip()
TIMM_CROP = T.RandomResizedCrop(32, interpolation="random")
TIMM_POLICY = T.TimmRandAugment("rand-m9-mstd0.5-inc1", {"interpolation": "random"})
SIMCLR_COLORS = [T.RandomApply([JITTER], p=0.8), T.RandomGrayscale(0.2), T.RandomApply([T.GaussianBlur(5)])]
RECIPES: dict[str, list[Any]] = {
    "crop": [CROP, FLIP, NORMALIZE],
    "jitter": [CROP, FLIP, JITTER, NORMALIZE],
    "evaluation": [T.Resize(40), T.CenterCrop(32), NORMALIZE],
    "CIFAR": [CIFAR_CROP, FLIP, NORMALIZE],
    "CIFAR, RandAugment": [CIFAR_CROP, FLIP, T.RandAugment(), NORMALIZE, T.RandomErasing()],
    "timm": [TIMM_CROP, FLIP, TIMM_POLICY, NORMALIZE, T.RandomErasing(mode="pixel")],
    "SimCLR": [CROP, FLIP, *SIMCLR_COLORS, NORMALIZE],
    "robot": [T.RandomAffine(10, (0.1, 0.1), interpolation="bilinear"), JITTER, NORMALIZE],
    "segmentation": [T.RandomResize(40, 60), T.RandomCrop(32, pad_if_needed=True), FLIP, NORMALIZE],
    "TrivialAugmentWide": [CROP, FLIP, T.TrivialAugmentWide(), NORMALIZE, T.RandomErasing()],
}


@pytest.mark.parametrize("name", RECIPES)
def test_plan_runs_common_recipes_on_dali(name, dali):
    """Only timm's erasing with random values runs on torch."""
    steps = plan_steps(T.Chain(RECIPES[name]).lines[0].transforms, dali)
    on_torch = [type(step.transform) for step in steps if step.backend != "dali"]
    assert on_torch == ([T.RandomErasing] if name == "timm" else [])


@pytest.mark.parametrize(
    "transform",
    [
        T.Pad(2),
        T.RandomZoomOut(),
        T.RandomIoUCrop(),
        T.Resize(5, "nearest"),
        T.Resize(5, "lanczos"),
        T.Resize(5, antialias=False),
        T.ScaleJitter((5, 5)),
        T.RandomVerticalFlip(),
        T.RandomRotate90(),
        T.RandomPerspective(),
        T.RandomInvert(),
        T.RandomEqualize(),
        T.AutoAugment(),
        T.GaussianNoise(),
        T.JPEG(50),
        T.ToDtype("float32"),
    ],
    ids=repr,
)
def test_plan_runs_supported_transforms_on_dali(transform, dali):
    assert plan_steps([transform], dali)[0].backend == "dali"


@pytest.mark.parametrize(
    ("transform", "reason"),
    [
        (T.AugMix(), "DALI does not mix the results of several chains of operations"),
        (T.RandomPhotometricDistort(), "permute: DALI has no operator that reorders each image's channels"),
        (T.MixUp(), "DALI's operators process each image separately"),
        (T.CutMix(), "DALI's operators process each image separately"),
        (T.RandomErasing(value="random"), "DALI erases only with constants"),
        (T.RandomErasing(mode="rand"), "DALI erases only with constants"),
        (T.RandomCrop(5, padding=2, padding_mode="reflect"), "DALI pads only with constants"),
        (T.Pad(2, padding_mode="edge"), "DALI pads only with constants"),
        (T.ElasticTransform(), "DALI has no elastic deformation"),
        (T.RandomApply([JITTER, T.ElasticTransform()]), "ElasticTransform: DALI has no elastic deformation"),
    ],
    ids=lambda value: value if isinstance(value, str) else repr(value),
)
def test_plan_runs_unsupported_transforms_on_torch_with_a_reason(transform, reason, dali):
    [step] = plan_steps([transform], dali)
    assert (step.backend, step.reason) == ("torch", reason)


def test_plan_changes_finished_images_on_dali_only_before_a_step_on_torch(dali):
    chain = T.Chain([NORMALIZE, T.RandomErasing(), T.MixUp(num_classes=4), T.RandomErasing()])
    steps = plan_steps(chain.lines[0].transforms, dali)
    assert [step.backend for step in steps] == ["dali", "dali", "torch", "torch"]
    assert steps[3].reason == "torch changes finished images in place"


def test_plan_notes_that_color_jitter_has_dalis_order(dali):
    note = "in DALI's order: hue, saturation, contrast, brightness"
    assert plan_steps([JITTER], dali)[0].reason == note
    assert plan_steps([T.ColorJitter(0.4)], dali)[0].reason is None


def test_each_operation_is_supported_or_has_a_reason():
    color_operations = {"brightness", "contrast", "saturation", "hue", "grayscale"}
    known = {*OPERATIONS, *backend.UNSUPPORTED, *color_operations, "warp", "identity"}
    assert not set(OPS) - known, "add these to OPERATIONS (stage/dali/operators.py) or UNSUPPORTED (…/backend.py)"
    assert not known - set(OPS), "OPERATIONS or UNSUPPORTED has operations that OPS does not have"


def test_backend_without_dali_raises_backend_error(monkeypatch):
    monkeypatch.setattr(backend, "_is_installed", lambda: False)
    expected = r"needs NVIDIA's DALI, .*'gpuload\[dali-cu13\]'.*'gpuload\[dali-cu12\]'"
    with pytest.raises(gpuload.BackendError, match=expected):
        DaliBackend(CPU)
    with pytest.raises(ImportError, match="which is not installed"):
        compile_stage(T.Chain([T.Resize(5)]), device="cpu", backend="dali")


@pytest.mark.processes
def test_backend_without_dalis_dynamic_mode_raises_backend_error():
    """The program runs in a separate process, because this process has imported DALI."""
    program = (
        "import sys, torch\n"
        "sys.modules['nvidia.dali.experimental'] = None\n"
        "from gpuload.stage.dali import DaliBackend\n"
        "try:\n"
        "    DaliBackend(torch.device('cpu'))\n"
        "except ImportError as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    assert run_python(program)[0].startswith("BackendError backend='dali' needs DALI with its dynamic mode")


@pytest.mark.processes
def test_import_of_the_package_imports_no_dali():
    program = "import sys, gpuload.stage.dali; print([name for name in sys.modules if name.startswith('nvidia')])"
    assert run_python(program)[0].strip() == "[]"
