"""Kernels read jobs as the host writes them; their arithmetic rounds as torch's does, in the interpreter too."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton

# Type checkers do not know how a kernel is launched.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false
import triton.language as tl

from gpuload.stage.fused import pixels
from gpuload.stage.fused.pixels import multiply_add, round_to
from gpuload.transforms.program.fusing import jobs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_the_numbers_of_a_job_are_those_of_the_host():
    constants = {name: value.value for name, value in vars(pixels).items() if isinstance(value, tl.constexpr)}
    assert constants.pop("INTERPRETED") in (True, False)
    assert constants.pop("OPERATION_COUNT") == jobs.OPERATIONS
    for name in ("NEAREST", "BILINEAR", "BICUBIC"):
        assert constants.pop(f"{name}_BIT") == 1 << getattr(jobs, name)
    assert constants.keys() >= {"JOB", "BASE", "TAPS", "OUT_ROW", "BOXES", "FIXED_POINT"}
    assert constants == {name: getattr(jobs, name) for name in constants}


@triton.jit
def blend(factor_ptr, numbers_ptr, added_ptr, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    added = tl.load(added_ptr + places)
    tl.store(added_ptr + places, multiply_add(tl.load(factor_ptr), tl.load(numbers_ptr + places), added))


@triton.jit
def cast(numbers_ptr, results_ptr, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    tl.store(results_ptr + places, round_to(tl.load(numbers_ptr + places), results_ptr.dtype.element_ty))


@pytest.mark.parametrize("factor", [0.6, -0.30000001, 0.12, 1e-4, 3.7])
def test_a_product_and_a_sum_round_once(factor):
    numbers, added = np.meshgrid(np.arange(-255, 257, 4), np.arange(0, 128, 2))
    factor = float(np.float32(factor))
    exact = (factor * numbers + added).astype(np.float32).ravel()  # both exact in float64
    found = torch.from_numpy(added.astype(np.float32).ravel()).to(DEVICE)
    factors = torch.tensor([factor], dtype=torch.float32, device=DEVICE)
    blend[(1,)](factors, torch.from_numpy(numbers.astype(np.float32).ravel()).to(DEVICE), found, SIZE=8192)
    np.testing.assert_array_equal(found.cpu().numpy(), exact)
    assert (np.float32(factor) * numbers.astype(np.float32) + added.astype(np.float32) != exact.reshape(64, -1)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8], ids=str)
def test_numbers_are_rounded_as_torch_rounds_them(dtype):
    rng = np.random.default_rng(0)
    if dtype == torch.uint8:
        numbers = torch.from_numpy(rng.uniform(0, 256, 4096).astype(np.float32))
    else:
        kinds = rng.normal(size=2048), rng.normal(scale=1e-3, size=1024), rng.integers(-300, 300, 1022), (0.0, -0.0)
        numbers = torch.from_numpy(np.concatenate(kinds).astype(np.float32))
        # Those that lie in the middle between two numbers of eight bits, which go to the even one.
        numbers[:512] = torch.from_numpy(np.arange(256, 768).astype(np.float32) / 256 * 1.00390625)
    found = torch.empty(4096, dtype=dtype, device=DEVICE)
    cast[(1,)](numbers.to(DEVICE), found, SIZE=4096)
    assert torch.equal(found.cpu().view(torch.uint8), numbers.to(dtype).view(torch.uint8))
