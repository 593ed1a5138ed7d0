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
from gpuload.stage.plan import plan_line

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def dali() -> DaliBackend:
    return DaliBackend(CPU)


@pytest.mark.parametrize(
    "transform",
    [
        T.CenterCrop(5),
        T.RandomCrop(5, padding=2),
        T.RandomCrop(5, padding=2, padding_mode="edge"),
        T.Pad(2),
        T.RandomZoomOut(),
        T.RandomIoUCrop(),
        T.Resize(5),
        T.RandomResizedCrop(5, interpolation="bicubic"),
        T.ScaleJitter((5, 5)),
        T.RandomHorizontalFlip(),
        T.RandomVerticalFlip(),
        T.ColorJitter(0.4, 0.4, 0.4, 0.1),
        T.RandomPhotometricDistort(),
        T.GaussianBlur(5),
        T.RandomErasing(),
        T.Normalize((0.5,), (0.5,)),
        T.ToDtype("float32"),
        T.RandomApply([T.ColorJitter(0.4)]),
        T.RandomRotation(10, "bilinear"),
    ],
    ids=repr,
)
def test_it_has(transform, dali):
    assert plan_line([transform], dali)[0].reason is None


@pytest.mark.parametrize(
    ("transform", "reason"),
    [
        (T.Resize(5, "nearest"), "DALI takes the next pixel on a tie, which shifts an image that is doubled"),
        (T.RandomEqualize(), "equalize: DALI's equalize is OpenCV's, not Pillow's"),
        (T.RandAugment(), "equalize: DALI's equalize is OpenCV's, not Pillow's"),
        (T.AugMix(), "equalize: DALI's equalize is OpenCV's, not Pillow's"),
        (T.GaussianNoise(), "noise: DALI draws its own noise"),
        (T.MixUp(), "DALI's operators see one image at a time"),
        (T.CutMix(), "DALI's operators see one image at a time"),
        (T.RandomCrop(5, padding=2, padding_mode="reflect"), "DALI does not mirror what it pads with"),
        (T.Pad(2, padding_mode="symmetric"), "DALI does not mirror what it pads with"),
        (T.RandomRotation(10, "bicubic"), "DALI's warp has no bicubic filter"),
        (T.RandomPerspective(), "DALI's warp is affine"),
        (T.RandomApply([T.ColorJitter(0.4), T.RandomEqualize()]), "RandomEqualize: equalize: DALI's equalize is"),
    ],
    ids=lambda value: value if isinstance(value, str) else repr(value),
)
def test_it_lacks(transform, reason, dali):
    found = plan_line([transform], dali)[0].reason
    assert found is not None
    assert reason in found


class Tilted(T.RandomPerspective):
    """A subclass draws what its parent draws."""


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
def test_a_perspective_of_another_name_runs_on_the_reference(interpolation, dali):
    (step,) = plan_line([Tilted(0.5, 1.0, interpolation=interpolation)], dali)
    assert step.reason == "DALI's warp is affine"


def test_dali_is_not_installed(monkeypatch):
    monkeypatch.setattr(backend, "_installed", lambda: False)
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
