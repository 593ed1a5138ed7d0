"""Results on DALI: layouts, dtypes, lists, finished images, memory and threads."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpuload import transforms as T
from gpuload.rng.philox import epoch_key
from gpuload.stage import RaggedImages, compile_stage

NORMALIZE = T.Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
CROPS = [T.RandomCrop(40, pad_if_needed=True), T.RandomHorizontalFlip()]


@pytest.mark.parametrize("memory_format", ["contiguous_format", "channels_last"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-6), ("float16", 2e-3), ("bfloat16", 1.6e-2), ("uint8", 0.0)]
)
def test_results_of_each_layout_and_dtype_are_close_to_the_reference(memory_format, dtype, tolerance, compare, images):
    end = [] if dtype == "uint8" else [NORMALIZE]
    options: dict[str, Any] = {} if dtype == "uint8" else {"dtype": dtype}
    compared = compare([*CROPS, *end], images, ragged="error", memory_format=memory_format, **options)
    assert compared.backends == ["dali"]
    assert compared.ours[0].dtype == getattr(torch, dtype)
    assert compared.ours[0].stride() == compared.reference[0].stride()
    assert compared.max <= tolerance


FLIPS = [T.RandomHorizontalFlip(), T.RandomVerticalFlip()]
ERASING = T.RandomErasing(0.7, value=(0.3, -0.4, 0.5), max_count=3)
SOME_ERASED = T.RandomApply([T.RandomErasing(1.0, value=2), T.RandomHorizontalFlip(1.0)], p=0.5)
# DALI does not pad by reflection, so torch runs this step.
REFLECTED = T.RandomCrop(50, padding=6, pad_if_needed=True, padding_mode="reflect")
SWITCHING = [T.RandomCrop(58, pad_if_needed=True), FLIPS[0], REFLECTED, T.RandomCrop(30), FLIPS[0], NORMALIZE]
CASES: dict[str, tuple[list[Any], dict[str, Any], float]] = {
    "list": ([T.Pad(2), NORMALIZE], {}, 1e-6),
    "pad": ([T.Pad(2), NORMALIZE], {"ragged": "pad"}, 1e-6),
    "ToDtype, scaled": ([*CROPS, T.ToDtype("float32", scale=True)], {}, 1e-6),
    "ToDtype": ([*CROPS, T.ToDtype("float32", scale=False)], {}, 0.0),
    "finished images of several sizes": ([T.Pad(2), NORMALIZE, SOME_ERASED], {}, 1e-6),
    "DALI and torch in turn": (SWITCHING, {}, 1e-6),
}
CASES |= {
    f"{erasing}, {layout}": ([*CROPS, NORMALIZE, erasing, *FLIPS], {"ragged": "error", "memory_format": layout}, 1e-6)
    for erasing in (T.RandomErasing(0.7), ERASING)
    for layout in ("contiguous_format", "channels_last")
}


@pytest.mark.parametrize("name", CASES)
def test_results_are_close_to_the_reference(name, compare, images):
    transforms, options, tolerance = CASES[name]
    compared = compare(transforms, images, **options)
    assert compared.backends == (["dali", "torch"] if REFLECTED in transforms else ["dali"])
    assert compared.max <= tolerance


@pytest.mark.slow
def test_batch_of_more_images_than_a_piece_is_close_to_the_reference(compare, images):
    # No image of the second piece takes this branch.
    rarely_applied = T.RandomApply([T.ColorJitter(0.4), T.RandomCrop(20), T.Pad(10)], p=0.02)
    transforms = [*CROPS, rarely_applied, T.ColorJitter(0.4), NORMALIZE, T.RandomErasing()]
    compared = compare(transforms, images * 5, ragged="error")
    assert compared.backends == ["dali"]
    assert len(compared.ours) > 64  # `CPU_PIECE_IMAGES`
    assert compared.max < 0.05  # one level is 1/255 / 0.2


def compile_chain(transforms: list[Any]) -> tuple[T.Chain, Any]:
    chain = T.Chain(transforms)
    return chain, compile_stage(chain, device="cpu", backend="dali", cpu_threads=1)


@pytest.mark.slow
def test_stage_releases_its_input_at_once_and_memory_does_not_grow(make_images, request):
    """Batches differ in sizes, order and count, and the garbage collector does not run."""
    gc.collect()
    gc.disable()
    request.addfinalizer(gc.enable)
    transforms = [T.RandomResizedCrop(32), T.RandomApply([T.ColorJitter(0.4)]), T.GaussianBlur(5), NORMALIZE]
    chain, stage = compile_chain(transforms)
    arrays = make_images(2, 12)
    resident_bytes = []
    for epoch in range(60):
        count = 3 + epoch % 10
        memory = np.concatenate([array.ravel() for array in arrays[:count]])
        memory_ref = weakref.ref(memory)
        images = RaggedImages.from_arrays(arrays[:count])
        images.pixels = torch.from_numpy(memory)
        stage(images, chain.draw(epoch_key(0, epoch), np.arange(count), images.sizes_hw))
        del images, memory
        assert memory_ref() is None, "the stage still refers to its input"
        resident_bytes.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    assert max(resident_bytes[-10:]) - max(resident_bytes[20:30]) < 4 << 20  # the first 20 batches fill DALI's pools


def test_make_batch_does_not_copy_its_input(make_images):
    """DALI's samples change when the input's memory is written later."""
    from gpuload.stage.dali.engine import DaliEngine
    from gpuload.stage.dali.runner import make_batch

    images = RaggedImages.from_arrays(make_images(4, 3))
    with DaliEngine(torch.device("cpu")).activate():
        batch = make_batch(images, images.regions_tlhw)
        samples = [sample.torch() for sample in batch]
        assert [sample.data_ptr() - images.pixels.data_ptr() for sample in samples] == images.offsets.tolist()
        images.pixels.fill_(7)
        assert [sample.unique().tolist() for sample in samples] == [[7]] * 3


def test_stage_works_after_an_error(make_images):
    chain, stage = compile_chain([T.RandomResizedCrop(32), NORMALIZE])
    arrays = make_images(2, 4)
    images = RaggedImages.from_arrays(arrays)
    program = chain.draw(epoch_key(0, 0), np.arange(4), images.sizes_hw)
    images_out_of_bounds = RaggedImages.from_arrays(arrays)
    images_out_of_bounds.table["offset"] += 10**9
    with pytest.raises(RuntimeError):
        stage(images_out_of_bounds, program)
    assert stage(images, program).shape == (4, 3, 32, 32)


@pytest.mark.slow
def test_stage_starts_no_threads_in_later_batches_and_ends_them_when_collected(make_images):
    chain, stage = compile_chain([T.RandomResizedCrop(32), NORMALIZE])
    images = RaggedImages.from_arrays(make_images(2, 8))
    program = chain.draw(epoch_key(0, 0), np.arange(8), images.sizes_hw)
    stage(images, program)
    thread_count = len(os.listdir("/proc/self/task"))
    for _ in range(3):
        stage(images, program)
    assert len(os.listdir("/proc/self/task")) == thread_count
    del stage
    gc.collect()
    assert len(os.listdir("/proc/self/task")) < thread_count  # DALI's threads end with the stage


def test_several_stages_run_in_turn(make_images):
    """Each call leaves its stage's DALI context, so that another stage can enter its own."""
    images = RaggedImages.from_arrays(make_images(2, 4))
    stages = [compile_chain([T.RandomResizedCrop(size), NORMALIZE]) for size in (16, 24)]
    for epoch in range(4):
        for (chain, stage), size in zip(stages, (16, 24), strict=True):
            program = chain.draw(epoch_key(0, epoch), np.arange(4), images.sizes_hw)
            assert stage(images, program).shape == (4, 3, size, size)


@pytest.mark.cuda
def test_cuda_results_are_close_to_the_cpus(make_batch, make_images):
    level_transforms = [T.RandomResizedCrop(64), T.RandomHorizontalFlip(), T.ColorJitter(0.4), T.GaussianBlur(5)]
    chain = T.Chain([*level_transforms, NORMALIZE, T.RandomErasing(0.5)])
    ragged, program = make_batch(chain, make_images(2, 20))
    expected = compile_stage(chain, device="cpu", backend="dali")(ragged, program)
    ragged.pixels = ragged.pixels.cuda()
    stage = compile_stage(chain, device="cuda", backend="dali")
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            result = stage(ragged, program)
        assert isinstance(result, torch.Tensor)
        assert isinstance(expected, torch.Tensor)
        assert float((result.cpu() - expected).abs().mean()) < 0.02
