"""Kernel variants: a session compiles every kernel that its batches launch before the first batch."""

from __future__ import annotations

import contextlib
import inspect
import io
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from bits.cases import CASES
from bits.samples import Samples
from helpers import lacking
from helpers.matrix import matrix

import gpuload as gl
from benchmarks.startup import recipes
from gpuload import transforms as T
from gpuload.stage import compile_stage
from gpuload.stage.fused import erasing, mixing, runner, separable, statistics, variants
from gpuload.transforms.program.fusing.plan import KernelTile

NORMALIZE = T.Normalize((0.5,) * 3, (0.2,) * 3)
KERNEL_FUNCTIONS = [
    (runner, "one_pass"),
    (separable, "_weigh"),
    (statistics, "_count"),
    (statistics, "_tabulate"),
    (mixing, "_mix"),
    (erasing, "_erase_images"),
]


def specialization(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """Return the properties of a launch for which Triton compiles a kernel again.

    These are constants and options, the types and alignment of pointers, and whether numbers are 1 or divisible by 16.
    """
    unspecialized = kernel.kwargs["do_not_specialize"] or []
    unaligned = kernel.kwargs["do_not_specialize_on_alignment"] or []
    specializations: list[Any] = []
    for name, arg in zip(inspect.signature(kernel.fn).parameters, args, strict=False):
        if isinstance(arg, torch.dtype):
            specializations.append((name, arg, True))
        elif isinstance(arg, torch.Tensor):
            specializations.append((name, arg.dtype, name in unaligned or arg.data_ptr() % 16 == 0))
        else:
            assert -(2**31) <= arg < 2**31, "this number would be an int64"
            specializations.append((name, None if name in unspecialized else 1 if arg == 1 else arg % 16 == 0))
    return (kernel.fn.__name__, *specializations, *sorted(options.items()))


class RecordedKernel:
    """A kernel whose launches are recorded instead of run."""

    def __init__(self, kernel: Any, launched: set[Any]) -> None:
        self.kernel, self.launched = kernel, launched
        self.fn = kernel.fn

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: self.launched.add(specialization(self.kernel, args, options))


@pytest.fixture
def launched(monkeypatch) -> set[Any]:
    """The specializations of all launches in this test."""
    specializations: set[Any] = set()
    for module, name in KERNEL_FUNCTIONS:
        monkeypatch.setattr(module, name, RecordedKernel(getattr(module, name), specializations))
    monkeypatch.setattr(runner, "tile_of", lambda device: KernelTile(8, 32, 1))  # as on most GPUs
    return specializations


@pytest.fixture
def compiled(monkeypatch) -> set[Any]:
    """The specializations of all kernels compiled in this test."""
    if not variants.INTERPRETED.value:
        lacking.skip("Triton's interpreter")
    specializations: set[Any] = set()

    def record(requested: set[variants.Variant], device: torch.device) -> None:
        specializations.update(
            specialization(variants.KERNELS[variant.kernel], variant.args, dict(variant.options))
            for variant in requested
        )

    monkeypatch.setattr(variants, "compile_all", record)
    return specializations


def load_three_epochs(options: dict[str, Any]) -> Iterator[Any]:
    loader_options = {"batch_size": 4, "device": "cpu", "backend": "fused", **options, "num_workers": 0}
    with warnings.catch_warnings(), gl.Loader(loader_options.pop("dataset"), **loader_options) as loader:
        warnings.simplefilter("ignore", RuntimeWarning)
        for _ in range(3):
            yield from loader


KERNEL_CASES = [name for name, case in CASES.items() if "fused" in case.runs and case.drive is None]
# Images of one channel, in chains without a Normalize that shows the number of channels.
GRAY_CASES = ("grey", "several_images")


@pytest.mark.parametrize("name", [name for name in KERNEL_CASES if name not in GRAY_CASES])
def test_session_of_each_case_compiles_all_kernels_it_launches(launched, compiled, name):
    for _ in load_three_epochs(CASES[name].make(Samples(small=True))):
        pass
    assert launched - compiled == set()


CHAINS = {
    "all or nothing": [
        T.RandomApply([T.ColorJitter(0.4, 0.4, 0.4, 0.1), T.GaussianBlur(5)], p=0.3),
        T.Resize((16, 16)),
    ],
    "any order": [T.RandomOrder([T.RandomSolarize(99), T.RandomAutocontrast(), T.RandomRotation(9)]), T.CenterCrop(12)],
    "random choice": [
        T.RandomResizedCrop(16),
        T.RandomChoice([T.RandAugment(2), T.TrivialAugmentWide(), T.RandomCrop(16, padding=4)]),
    ],
    "sharpness first": [T.RandomAdjustSharpness(2), T.RandomEqualize(), T.Resize((9, 12)), T.RandomPosterize(3)],
    "quarter turns": [
        T.RandomApply([T.RandomRotate90()]),
        T.RandomResizedCrop(16),
        T.RandomTranspose(),
        T.RandomEqualize(),
    ],
    "only crops": [T.RandomCrop(12), T.RandomVerticalFlip()],
    "a crop larger than the image": [T.Resize(12), T.CenterCrop(16)],
    "a crop after a turn": [T.Resize((20, 10)), T.RandomTranspose(0.5), T.CenterCrop((20, 10))],
    "colors first": [T.RandomPhotometricDistort(), T.RandomZoomOut(side_range=(1, 2)), T.Resize((16, 16))],
    "a Lambda for some images": [
        T.RandomResizedCrop(16),
        T.RandomOrder([T.RandomApply([T.Lambda(torch.neg, per="image")]), T.GaussianBlur(3), T.RandomEqualize()]),
    ],
    "a Lambda for all images": [T.Resize((16, 16)), T.Lambda(torch.neg), T.RandomAutocontrast(), T.GaussianBlur(3)],
}
CONVERSIONS = {
    "levels": [],
    "floats": [NORMALIZE],
    "erased": [NORMALIZE, T.RandomErasing(p=0.3)],
    "perhaps erased": [NORMALIZE, T.RandomApply([T.RandomErasing(p=1)], p=0.3)],
    "one erased": [NORMALIZE, T.RandomChoice([T.RandomErasing(p=1), T.Identity()])],
    "mixed": [NORMALIZE, T.RandomChoice([T.MixUp(num_classes=2), T.CutMix(num_classes=2)]), T.RandomErasing(p=0.3)],
}


@matrix(chain_name=CHAINS, conversion=CONVERSIONS, memory_format=["contiguous_format", "channels_last"])
def test_prepare_compiles_all_kernels_for_any_batch_size_and_draw(
    launched, compiled, make_images, make_batch, chain_name, conversion, memory_format
):
    chain, stage = prepare([*CHAINS[chain_name], *CONVERSIONS[conversion]], memory_format=memory_format)
    for batch in range(12):
        images = make_images(batch, 1 + 3 * (batch % 2), low=16, high=30)
        stage(*make_batch(chain, images, first=5 * batch))
    assert launched - compiled == set()


def prepare(transforms, **options):
    chain = T.Chain(transforms)
    stage = compile_stage(chain, device="cpu", backend="fused", dtype="float16", **options)
    stage.prepare()
    return chain, stage


def test_prepare_with_a_normalize_of_one_mean_compiles_for_gray_and_color_images(
    launched, compiled, make_images, make_batch
):
    chain, stage = prepare([T.CenterCrop(8), T.Normalize([0.5], [0.25])])
    for channels in (3, 1):
        stage(*make_batch(chain, make_images(3, 2, channels, low=16, high=30)))
    assert set() < launched <= compiled


def test_prepare_compiles_all_kernels_for_any_epoch(launched, compiled, make_images, make_batch):
    """The contrast changes only in the second epoch."""
    chain, stage = prepare([T.Resize((16, 16)), T.ColorJitter(contrast=T.by_epoch({0: 0, 1: 0.4})), NORMALIZE])
    for batch in range(6):
        images = make_images(batch, 4, low=16, high=30)
        stage(*make_batch(chain.at(batch % 2), images, first=5 * batch))
    assert launched - compiled == set()


@matrix(chain_name=["all or nothing", "quarter turns"], conversion=CONVERSIONS)
def test_sizes_that_change_from_batch_to_batch_launch_at_most_two_variants_of_a_kernel(
    launched, compiled, make_images, make_batch, chain_name, conversion
):
    """The sizes are 1, odd, and multiples of 8 and of 16."""
    size = T.RandomResizedCrop(T.by_batch([*range(8, 40, 3), (1, 1), (7, 1), (16, 16), (32, 48), (24, 16), (40, 40)]))
    chain, stage = prepare([*CHAINS[chain_name], size, T.RandomInvert(), *CONVERSIONS[conversion]])
    shapes = set()
    for step in range(60):
        images = make_images(step, 4, low=16, high=30)
        shapes.add(stage(*make_batch(chain.at(0, step), images, first=4 * step)).shape[2:])
    assert len(shapes) > 12  # of 17
    assert launched <= compiled
    # A pass of another geometry, or that writes other results, is another kernel.
    constants = ("GEOMETRY", "FINISHED", "ERASES")
    kernels = Counter((name, *(entry for entry in rest if entry[0] in constants)) for name, *rest in launched)
    assert max(kernels.values()) <= 2, kernels


RESULT_SIZE = 8
# Of these images, some need no resize, some need no crop, and some are smaller than the result.
IMAGE_SIZES = [(RESULT_SIZE, RESULT_SIZE), (RESULT_SIZE + 1, RESULT_SIZE + 1), (5, 5), (5, 20), (20, 6), (30, 30)]


@pytest.mark.parametrize("name", recipes(RESULT_SIZE))
def test_prepare_compiles_only_kernels_that_a_recipe_launches(launched, compiled, make_batch, name):
    chain, stage = prepare([*recipes(RESULT_SIZE)[name], NORMALIZE])
    images = [np.zeros((*size, 3), np.uint8) for size in IMAGE_SIZES] * 16  # enough draws to launch all kernels
    for batch in range(12):
        stage(*make_batch(chain, images, first=batch * len(images)))
    assert launched <= compiled
    # The copy kernel of "warps" would be launched only for a rotation by exactly 0°.
    assert len(compiled - launched) == (1 if name == "warps" else 0)


def test_loader_compiles_kernels_before_its_first_batch(compiled):
    images = [gl.Image(torch.zeros(9, 9, 3, dtype=torch.uint8).numpy())] * 4
    next(iter(load_three_epochs({"dataset": images, "transforms": [T.Resize(8)]})))
    assert compiled


@pytest.mark.parametrize(("is_terminal", "quiet_s"), [(True, 1e9), (True, -1), (False, -1)])
def test_compile_all_shows_progress_in_a_terminal_after_quiet_s(monkeypatch, is_terminal, quiet_s):
    compiled_numbers: list[Any] = []
    stderr = io.StringIO()
    stderr.isatty = lambda: is_terminal
    shared_kernel = SimpleNamespace(device_caches=defaultdict(tuple))

    class SlowVariant:
        kernel = "slow"

        def __init__(self, number: int) -> None:
            self.number = number

        def compile(self) -> None:
            assert set(shared_kernel.device_caches) == {0}, "two threads could create the cache, and one would be lost"
            compiled_numbers.append(self.number)
            if self.number == 1:
                raise RuntimeError("a failure here is raised again by the launch")

    monkeypatch.setattr(variants, "INTERPRETED", SimpleNamespace(value=False))
    monkeypatch.setattr(variants, "QUIET_S", quiet_s)
    monkeypatch.setitem(variants.KERNELS, "slow", shared_kernel)
    monkeypatch.setattr(torch.accelerator, "device_index", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(sys, "stderr", stderr)
    variants.compile_all([SlowVariant(number) for number in range(3)], torch.device("cuda:0"))  # pyright: ignore
    assert sorted(compiled_numbers) == [0, 1, 2]
    assert ("compiling kernels, 3 of 3" in stderr.getvalue()) == (is_terminal and quiet_s < 0)
