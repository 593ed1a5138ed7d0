"""The kernel that copies crops equals NumPy for regions of any size and orientation, whose rows may be far apart."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from helpers.programs import run_python
from simulated.runtime import simulated

from gpuload.decode.header import turn_upright
from gpuload.stage.decode import crops
from gpuload.stage.decode.backend import DESTINATION, Pixels, copy_crops


def random_crops(rng: np.random.Generator, count: int) -> list[np.ndarray]:
    """Return crops of less than 90 rows and columns and one or three channels, within larger images."""
    crops_hwc = []
    for number in range(count):
        top, left, height, width = (int(n) for n in rng.integers(1, 90, 4))
        image = rng.integers(0, 256, (top + height + 3, left + width + 2, 1 if number % 3 == 2 else 3), np.uint8)
        crops_hwc.append(image[top : top + height, left : left + width])
    return crops_hwc


def run_copy_crops(
    device: str, stored_crops: list[np.ndarray], orientations: np.ndarray, starts: np.ndarray, target_size: int
) -> Any:
    shapes = [
        turn_upright(crop, int(orientation)).shape for crop, orientation in zip(stored_crops, orientations, strict=True)
    ]
    destinations = np.array([*zip(shapes, orientations.tolist(), starts.tolist(), strict=True)], DESTINATION)
    target = torch.full((target_size,), 7, dtype=torch.uint8).to(device)
    copy_crops([Pixels(crop, "", crop.ctypes.data, crop.strides[0]) for crop in stored_crops], destinations, target)
    return target.cpu().numpy()


def test_copy_crops_writes_crops_of_any_orientation_at_their_offsets():
    rng = np.random.default_rng(5)
    stored_crops = random_crops(rng, 24)
    stored_crops[3] = rng.integers(0, 256, (70, 80, 3), np.uint8)  # larger than a block
    assert stored_crops[3].size > crops.BLOCK
    orientations = np.arange(24) % 8 + 1
    sizes = np.array([crop.size for crop in stored_crops])
    starts = 11 + np.cumsum(sizes + 5) - sizes  # with unused bytes before, between and after the crops
    target_size = int(starts[-1] + sizes[-1] + 9)
    expected = np.full(target_size, 7, np.uint8)
    for crop, orientation, start in zip(stored_crops, orientations.tolist(), starts.tolist(), strict=True):
        expected[start : start + crop.size] = turn_upright(crop, orientation).ravel()
    assert np.array_equal(run_copy_crops("cpu", stored_crops, orientations, starts, target_size), expected)
    with simulated("eager"):
        assert np.array_equal(run_copy_crops("cuda:1", stored_crops, orientations, starts, target_size), expected)


def test_copy_crops_of_no_crops_launches_no_kernel():
    with simulated("eager"):
        assert run_copy_crops("cuda:1", [], np.ones(0, np.int64), np.zeros(0, np.int64), 3).tolist() == [7, 7, 7]


PROGRAM = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from gpuload.stage.decode import crops
types = {"crops_ptr": "*i64", "target_ptr": "*u8", "BLOCK": "constexpr"}
for capability in (75, 80, 90):
    source = ASTSource(crops._copy, types, {(2,): crops.BLOCK})
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    print("st.global" in compiled.asm["ptx"], "ld.global" in compiled.asm["ptx"], len(compiled.asm["cubin"]) > 0)
"""


@pytest.mark.slow
@pytest.mark.processes
def test_copy_kernel_compiles_for_cuda(tmp_path):
    """The program runs in a separate process, because this process may use the interpreter, which accepts more code."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    output, _ = run_python(PROGRAM, env=environment, timeout=300)
    assert output.split() == ["True"] * 9  # three checks for each of three capabilities
