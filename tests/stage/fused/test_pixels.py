"""Constants of kernels equal the constants of jobs, and kernels round like torch, even in the interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton

# Type checkers do not know how a kernel is launched.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false
import triton.language as tl

from gpuload.stage.fused import pixels
from gpuload.stage.fused.pixels import round_to
from gpuload.transforms.program.fusing import jobs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_constants_of_the_kernels_equal_the_constants_of_jobs():
    constants = {name: value.value for name, value in vars(pixels).items() if isinstance(value, tl.constexpr)}
    assert constants.pop("INTERPRETED") in (True, False)
    assert constants.pop("OPERATION_COUNT") == jobs.OPERATIONS
    for name in ("NEAREST", "BILINEAR", "BICUBIC"):
        assert constants.pop(f"{name}_BIT") == 1 << getattr(jobs, name)
    assert constants.keys() >= {"JOB", "BASE", "TAPS", "OUT_ROW", "BOXES", "FIXED_POINT"}
    message = "make the constants of fused/pixels.py equal to those of transforms/program/fusing/jobs.py"
    assert constants == {name: getattr(jobs, name) for name in constants}, message


@triton.jit
def round_numbers(numbers_ptr, results_ptr, SIZE: tl.constexpr):
    indices = tl.arange(0, SIZE)
    tl.store(results_ptr + indices, round_to(tl.load(numbers_ptr + indices), results_ptr.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8], ids=str)
def test_round_to_rounds_like_torch(dtype):
    rng = np.random.default_rng(0)
    if dtype == torch.uint8:
        numbers = torch.from_numpy(rng.uniform(0, 256, 4096).astype(np.float32))
    else:
        parts = rng.normal(size=2048), rng.normal(scale=1e-3, size=1024), rng.integers(-300, 300, 1022), (0.0, -0.0)
        numbers = torch.from_numpy(np.concatenate(parts).astype(np.float32))
        # Half of these numbers are in the middle between two bfloat16 numbers, and are rounded to the even one.
        numbers[:512] = torch.from_numpy(np.arange(256, 768).astype(np.float32) / 256 * (1 + 2**-8))
    rounded = torch.empty(4096, dtype=dtype, device=DEVICE)
    round_numbers[(1,)](numbers.to(DEVICE), rounded, SIZE=4096)
    assert torch.equal(rounded.cpu().view(torch.uint8), numbers.to(dtype).view(torch.uint8))
