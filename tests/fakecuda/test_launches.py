"""Launches of kernels for images of usual size, for which the interpreter is too slow. The kernels are compiled to
Triton's first representation and launched, but not run, so that there are no pixels to compare."""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton
from helpers import lacking

import gpuload as gl
from gpuload import transforms as T
from gpuload.stage.fused import separable
from gpuload.stage.fused.launching import BatchKernel
from gpuload.transforms.program.fusing.jobs import BILINEAR, FLOATS, JOB, RESIZE

pytestmark = [
    pytest.mark.cuda,
    lacking.mark_missing("the fake CUDA runtime", not lacking.IS_FAKE),
    lacking.mark_missing("compiled kernels", os.environ.get("TRITON_INTERPRET") == "1"),
]

NORMALIZE = T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
POINTER_COUNT = 12  # the first arguments of the kernel `one_pass` are addresses
CHAINS = {
    "classic": [T.RandomResizedCrop(224), T.RandomHorizontalFlip(), NORMALIZE],
    "RandAugment": [T.RandomResizedCrop(224), T.RandAugment(), NORMALIZE, T.RandomErasing(0.3)],
    "mixed": [T.RandomResizedCrop(224), NORMALIZE, T.CutMix(num_classes=7)],
}


class Photographs:
    def __len__(self) -> int:
        return 4 * 32

    def __getitem__(self, number: int) -> Any:
        return np.full((375 + number, 500 - number, 3), number, np.uint8), number % 7


@pytest.mark.parametrize("chain", CHAINS)
def test_launches_have_valid_grids_and_addresses_of_their_device(chain):
    from fakecuda.runtime import runtime

    launches: list[tuple[str, tuple[int, int, int]]] = []
    wrong_addresses: list[str] = []

    def check_addresses(name: str, grid: tuple[int, int, int], arguments: Any) -> None:
        launches.append((name, grid))
        if name == "one_pass":
            for number in range(POINTER_COUNT):
                address = ctypes.c_uint64.from_address(arguments[number]).value
                if runtime().device_at(address) != 1:
                    wrong_addresses.append(f"argument {number} of {name}: {address:#x}")

    options: dict[str, Any] = {"transforms": CHAINS[chain], "num_workers": 2, "backend": "fused", "device": "cuda:1"}
    with gl.Loader(Photographs(), 32, **options) as loader:
        batches = iter(loader)
        next(batches)
        runtime().watch_launches(check_addresses)
        for images, _ in batches:
            assert images.shape == (32, 3, 224, 224)
            assert torch.cuda.current_device() == 0
    assert "one_pass" in {name for name, _ in launches}
    assert wrong_addresses == []
    for name, grid in launches:
        assert min(grid) > 0, name
        assert np.prod(grid, dtype=object) < 2**31, name
    assert sum(name == "one_pass" for name, _ in launches) <= 3 * 12  # three batches; a launch is for many images


def batches_of_a_loader(chain: str) -> Iterator[Any]:
    options: dict[str, Any] = {"transforms": CHAINS[chain], "num_workers": 0, "backend": "fused", "device": "cuda:1"}
    with gl.Loader(Photographs(), 32, **options) as loader:
        for epoch in range(2):
            loader.set_epoch(epoch)
            yield from loader


def batches_of_a_module(chain: str) -> Iterator[Any]:
    """Yield batches of the same images, which are on the device with various strides."""
    augment, samples = gl.Augment(CHAINS[chain], backend="fused"), Photographs()
    for epoch in range(2):
        augment.set_epoch(epoch)
        for first in range(0, len(samples), 32):
            images, labels = zip(*[samples[number] for number in range(first, first + 32)], strict=True)
            images_on_device = [torch.from_numpy(image).permute(2, 0, 1).to("cuda:1") for image in images]
            yield augment(images_on_device, torch.tensor(labels))


def count_launches(batches: Iterator[Any]) -> Counter[tuple[str, tuple[int, int, int]]]:
    """Count the launches of the second epoch by name and grid; the first epoch compiles the kernels."""
    from fakecuda.runtime import runtime

    counts: Counter[tuple[str, tuple[int, int, int]]] = Counter()
    for _ in range(4):
        next(batches)
    runtime().watch_launches(lambda name, grid, arguments: counts.update([(name, grid)]))
    for images, _ in batches:
        assert images.shape == (32, 3, 224, 224)
    return counts.copy()  # later launches are still added to `counts`


def test_cached_variants_launch_the_same_kernels_as_triton(monkeypatch):
    variant_launches = count_launches(batches_of_a_loader("RandAugment"))
    monkeypatch.setattr(BatchKernel, "__getitem__", triton.JITFunction.__getitem__)
    assert variant_launches == count_launches(batches_of_a_loader("RandAugment"))
    assert sum(variant_launches.values()) > 0


def test_triton_looks_a_kernel_up_once_for_each_variant(monkeypatch):
    """Constants, dtypes and alignments define variants; addresses and grids do not."""
    from fakecuda.runtime import runtime

    lookups: list[None] = []
    launches: list[str] = []
    run = triton.JITFunction.run
    monkeypatch.setattr(
        BatchKernel, "run", lambda self, *args, **named: lookups.append(None) or run(self, *args, **named)
    )
    ints = torch.zeros(8 * JOB, dtype=torch.int64, device="cuda:1")
    floats = torch.zeros(8 * FLOATS + 1, dtype=torch.float64, device="cuda:1")
    kernel = BatchKernel(separable._weigh.fn)

    def weigh(floats: torch.Tensor, rows: int, jobs: int) -> int:
        weights = torch.empty(jobs, dtype=torch.int32, device="cuda:1")
        count_before = len(lookups)
        kernel[4, jobs](
            ints, floats, weights, GEOMETRY=RESIZE, FILTERS=1 << BILINEAR, ROWS=rows, COLUMNS=32, **separable.OPTIONS
        )
        return len(lookups) - count_before

    runtime().watch_launches(lambda name, grid, arguments: launches.append(f"{name} {grid}"))
    with torch.cuda.device(1):
        assert [weigh(floats, 8, 3), weigh(floats[2:], 8, 5), weigh(floats, 8, 3)] == [1, 0, 0]
        assert [weigh(floats, 16, 3), weigh(floats, 16, 3)] == [1, 0]
        assert [weigh(floats[1:], 8, 3), weigh(floats[1:], 8, 3), weigh(floats, 8, 3)] == [1, 0, 0]
        assert [weigh(floats.float(), 8, 3), weigh(floats.float(), 8, 3)] == [1, 0]
    assert launches[:3] == ["_weigh (4, 3, 1)", "_weigh (4, 5, 1)", "_weigh (4, 3, 1)"]
    assert len(launches) == 10


@pytest.mark.parametrize("chain", CHAINS)
def test_augment_launches_the_kernels_of_a_loader(chain):
    augment_launches = count_launches(batches_of_a_module(chain))
    assert augment_launches == count_launches(batches_of_a_loader(chain))
    assert sum(augment_launches.values()) > 0
