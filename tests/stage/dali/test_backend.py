"""What DALI lacks, and what is said where DALI itself is lacking."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

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


@pytest.mark.parametrize(
    "transform",
    [
        T.CenterCrop(5),
        T.RandomCrop(5, padding=2),
        T.Pad(2),
        T.RandomZoomOut(),
        T.RandomIoUCrop(),
        T.Resize(5),
        T.RandomResizedCrop(5),
        T.ScaleJitter((5, 5)),
        T.RandomHorizontalFlip(),
        T.RandomVerticalFlip(),
        T.ColorJitter(0.4),
        T.GaussianBlur(5),
        T.RandomErasing(),
        T.Normalize((0.5,), (0.5,)),
        T.ToDtype("float32"),
        T.RandomApply([T.ColorJitter(0.4)]),
    ],
    ids=repr,
)
def test_it_has(transform, dali):
    assert plan_steps([transform], dali)[0].reason is None


@pytest.mark.parametrize(
    ("transform", "reason"),
    [
        (T.Resize(5, "nearest"), "DALI takes the next pixel on a tie, which shifts an image whose size is doubled"),
        (T.Resize(5, "bicubic"), "DALI does not clamp bicubic overshoots between the two resizing passes"),
        (T.RandomResizedCrop(5, interpolation="random"), "DALI does not clamp bicubic overshoots"),
        (T.Resize(5, "lanczos"), "only the torch backend has lanczos resampling"),
        (T.ColorJitter(0.4, 0.4, 0.4, 0.1), "contrast: DALI scales around a constant"),
        (T.ColorJitter(saturation=0.4), "saturation: DALI scales in YIQ"),
        (T.ColorJitter(hue=0.1), "hue: DALI rotates in YIQ"),
        (T.RandomPhotometricDistort(), "contrast: DALI scales around a constant"),
        (T.Grayscale(), "grayscale: DALI reduces three channels to one"),
        (T.RandomInvert(), "invert: DALI has no such operator"),
        (T.RandomEqualize(), "equalize: DALI uses OpenCV's algorithm, not Pillow's"),
        (T.RandAugment(), "autocontrast: DALI has no such operator"),
        (T.AugMix(), "DALI does not mix the results of several chains of operations"),
        (T.GaussianNoise(), "noise: DALI draws its own noise"),
        (T.MixUp(), "DALI's operators process each image separately"),
        (T.CutMix(), "DALI's operators process each image separately"),
        (T.RandomErasing(value="random"), "DALI erases only with constants"),
        (T.RandomErasing(mode="rand"), "DALI erases only with constants"),
        (T.RandomCrop(5, padding=2, padding_mode="reflect"), "DALI pads only with constants"),
        (T.Pad(2, padding_mode="edge"), "DALI pads only with constants"),
        (T.RandomRotation(10, "bilinear"), "DALI's warp computes coordinates in float32"),
        (T.RandomPerspective(), "DALI's warp computes coordinates in float32"),
        (T.ElasticTransform(), "DALI has no elastic deformation"),
        (
            T.RandomApply([T.ColorJitter(0.4), T.RandomEqualize()]),
            "RandomEqualize: equalize: DALI uses OpenCV's algorithm",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else repr(value),
)
def test_it_lacks(transform, reason, dali):
    found = plan_steps([transform], dali)[0].reason
    assert found is not None
    assert found.startswith(reason)


def test_all_other_operations_are_lacking():
    assert set(OPS) - set(OPERATIONS) - {"identity"} == set(backend.UNSUPPORTED)


def test_dali_is_not_installed(monkeypatch):
    monkeypatch.setattr(backend, "_is_installed", lambda: False)
    expected = r"needs NVIDIA's DALI, .*'gpuload\[dali-cu13\]'.*'gpuload\[dali-cu12\]'"
    with pytest.raises(gpuload.BackendError, match=expected):
        DaliBackend(CPU)
    with pytest.raises(ImportError, match="which is not installed"):
        compile_stage(T.Chain([T.Resize(5)]), device="cpu", backend="dali")


@pytest.mark.processes
def test_dali_cannot_be_imported():
    """One without its dynamic mode, say. In a process of its own, since DALI is imported here already."""
    program = (
        "import sys, torch\n"
        "sys.modules['nvidia.dali.experimental'] = None\n"
        "from gpuload.stage.dali import DaliBackend\n"
        "try:\n"
        "    DaliBackend(torch.device('cpu'))\n"
        "except ImportError as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("BackendError backend='dali' needs DALI with its dynamic mode")


@pytest.mark.processes
def test_importing_the_package_imports_no_dali():
    program = "import sys, gpuload.stage.dali; print([name for name in sys.modules if name.startswith('nvidia')])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
