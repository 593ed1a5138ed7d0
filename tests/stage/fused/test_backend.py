"""The fused backend: the transforms that it runs, and the warnings and errors if it cannot run."""

from __future__ import annotations

import re
import sys
import warnings

import pytest
import torch
from helpers import lacking
from helpers.programs import run_python

import gpuload as gl
from gpuload import transforms as T
from gpuload.stage import compile_stage
from gpuload.stage.fused.backend import FusedBackend
from gpuload.stage.fused.pixels import INTERPRETED
from gpuload.stage.plan import make_plan
from gpuload.stage.reference.backend import TorchBackend
from gpuload.stage.stage import _select
from gpuload.transforms.program.fusing import passes
from gpuload.transforms.program.ops import code

CPU = torch.device("cpu")
needs_interpreter = lacking.mark_missing("Triton's interpreter", not INTERPRETED.value)


def reasons_for_torch(*transforms):
    """Return the reason why torch runs a transform in place of the kernels, or None, for each transform's name."""
    plan = make_plan(T.Chain(transforms), FusedBackend(CPU))
    return {type(step.transform).__name__: step.reason for step in plan.steps}


def test_why_unsupported_gives_a_reason_for_each_transform_that_torch_runs():
    assert reasons_for_torch(
        T.GaussianNoise(), T.AugMix(), T.TimmRandAugment("rand-t3a"), T.RandomApply([T.AugMix()])
    ) == {
        "GaussianNoise": "a normal number for each pixel and channel is drawn by torch",
        "AugMix": "several results of an image are mixed by torch",
        "TimmRandAugment": "three box blurs along each axis would need six passes",
        "RandomApply": "AugMix: several results of an image are mixed by torch",
    }
    levels = [T.RandomVerticalFlip(), T.Normalize([0.5], [0.5])]
    mixing = T.RandomChoice([T.MixUp(num_classes=2), T.CutMix(num_classes=2)])
    assert reasons_for_torch(*levels, T.RandomErasing(), T.RandomHorizontalFlip(), mixing) == {
        "RandomVerticalFlip": None,
        "Normalize": None,
        "RandomErasing": None,
        "RandomHorizontalFlip": "finished images are moved by torch",
        "RandomChoice": None,
    }


@needs_interpreter
def test_plan_leaves_images_of_four_channels_to_torch():
    chain = T.Chain([T.Resize(9), T.Normalize([0.5] * 4, [0.5] * 4), T.RandomHorizontalFlip()])
    plan = compile_stage(chain, device="cpu", backend="fused").plan
    assert [(step.backend, step.reason) for step in plan.steps] == [
        ("fused", None),
        ("torch", "images with 4 channels are left to torch"),
        ("torch", "combined with Normalize before it"),
    ]


def make_raising_function(error):
    def function(*_):
        raise error

    return function


@pytest.mark.parametrize(
    ("function", "replacement", "text"),
    [
        ("find_spec", lambda name: None, "needs Triton, which is not installed; run `pip install triton`"),
        ("_is_interpreted", lambda: False,
         "requires a GPU, got device 'cpu'; use backend='torch' on this device (or"),
        ("_is_interpreted", make_raising_function(ImportError("libtriton.so is gone")),
         "cannot be imported: ImportError: libtriton.so is gone"),
    ],
    ids=["without Triton", "on a CPU", "with a broken Triton"],
)  # fmt: skip
def test_loader_raises_backend_error_if_the_kernels_cannot_run(monkeypatch, function, replacement, text):
    monkeypatch.setattr(f"gpuload.stage.fused.backend.{function}", replacement)
    with pytest.raises(gl.BackendError, match=re.escape(text)):
        gl.Loader(["a.jpg"], backend="fused", device="cpu")


def select_backend(*, forced: bool):
    """Return the name of the backend selected on a GPU, which this machine need not have, and the note."""
    device = torch.device("cuda:0")
    backend, note = _select("fused", device, TorchBackend(device), forced=forced)
    return backend.name, note


@pytest.mark.parametrize("forced", [False, True], ids=["auto", "fused"])
def test_select_without_a_compiler_warns_once_and_uses_torch(monkeypatch, forced):
    monkeypatch.setattr("gpuload.stage.fused.backend._is_interpreted", lambda: False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    with pytest.warns(RuntimeWarning, match="'torch' is used on cuda:0, because fused cannot be used") as caught:
        name, note = select_backend(forced=forced)
    assert len(caught) == 1
    assert name == "torch"
    assert "neither gcc nor clang was found; install one, or set CC" in str(note)


@pytest.mark.parametrize("forced", [False, True], ids=["auto", "fused"])
def test_select_if_the_trial_kernel_does_not_compile_warns_and_uses_torch(monkeypatch, forced):
    monkeypatch.setattr(
        "gpuload.stage.fused.runner.compile_trial_kernel", make_raising_function(OSError("ptxas is gone"))
    )
    with pytest.warns(RuntimeWarning, match="Triton cannot compile a kernel for cuda:0: OSError: ptxas is gone"):
        name, _ = select_backend(forced=forced)
    assert name == "torch"


@pytest.mark.parametrize("forced", [False, True], ids=["auto", "fused"])
def test_select_on_a_gpu_without_memory_raises_out_of_memory(monkeypatch, forced):
    error = torch.cuda.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr("gpuload.stage.fused.runner.compile_trial_kernel", make_raising_function(error))
    with pytest.raises(torch.cuda.OutOfMemoryError, match="CUDA out of memory"):
        select_backend(forced=forced)


def test_select_if_triton_cannot_be_imported_warns_and_uses_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "gpuload.stage.fused.runner", None)
    with pytest.warns(RuntimeWarning, match="Triton cannot compile a kernel for cuda:0: ModuleNotFoundError"):
        name, _ = select_backend(forced=True)
    assert name == "torch"


@needs_interpreter
def test_plan_leaves_an_operation_without_a_kernel_to_torch(monkeypatch):
    monkeypatch.setattr(passes, "OPERATIONS", passes.OPERATIONS - {"solarize_add"})
    plan = compile_stage(T.Chain([T.TimmRandAugment("rand-m9")]), device="cpu", backend="fused").plan
    [step] = plan.steps
    assert (step.backend, step.reason) == ("torch", "the kernels do not support solarize_add")


@needs_interpreter
def test_operation_that_the_kernels_do_not_support_raises(make_batch, make_images, monkeypatch):
    operation_needs = passes.NEEDS.copy()
    operation_needs[code("invert")] = passes.UNKNOWN
    monkeypatch.setattr(passes, "NEEDS", operation_needs)
    chain = T.Chain([T.RandomInvert(1.0)])
    with pytest.raises(TypeError, match="the fused kernels do not support the operation invert"):
        compile_stage(chain, device="cpu", backend="fused")(*make_batch(chain, make_images(1, 1, low=9, high=12)))


def test_select_without_triton_raises_only_if_forced(monkeypatch):
    monkeypatch.setattr("gpuload.stage.fused.backend.find_spec", lambda name: None)
    with pytest.warns(RuntimeWarning, match="not installed; run `pip install triton`"):
        name, _ = select_backend(forced=False)
    assert name == "torch"
    with pytest.raises(gl.BackendError, match="not installed"):
        select_backend(forced=True)


def test_compile_stage_on_the_cpu_chooses_torch_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compile_stage(T.Chain([T.Resize(9)]), device="cpu").plan.backend == "torch"


@pytest.mark.cuda
def test_compile_stage_on_cuda_chooses_the_kernels():
    assert compile_stage(T.Chain([T.Resize(9)]), device="cuda").plan.backend == "fused"


def test_plan_on_the_cpu_imports_no_backend_library():
    program = (
        "import sys; import gpuload as gl; gl.Loader(['a.jpg'], transforms=[gl.transforms.Resize(9)], device='cpu')"
        ".plan(); sys.exit(bool({'triton', 'kornia', 'nvidia.dali'} & set(sys.modules)))"
    )
    run_python(program)
