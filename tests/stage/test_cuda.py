"""With the same draws, CUDA gives the images of the CPU, within the bounds of `chains.bounds`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from chains.bounds import STEPS, bound, steps_on_cuda
from helpers.tensor_layouts import interleaved_and_planes

from gpuload import transforms as T
from gpuload.rng.philox import epoch_key
from gpuload.stage import compile_stage

NORMALIZE = T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CHAINS = [
    [T.RandomResizedCrop(64), T.RandomHorizontalFlip()],
    [T.RandomResizedCrop(64, interpolation="bicubic"), T.RandomVerticalFlip()],
    [T.Resize(80), T.CenterCrop(64)],
    [T.RandomHorizontalFlip(), T.RandomCrop(64, 4, pad_if_needed=True, fill=(1, 2, 3))],
    [T.RandomCrop(64, 4, pad_if_needed=True, padding_mode="reflect"), T.Resize(30, "nearest")],
    [T.RandomResizedCrop(64), T.ColorJitter(0.4, 0.4, 0.4)],
    [T.ColorJitter(0.4, 0.4, 0.4, 0.1), T.RandomResizedCrop(64)],
]


@pytest.fixture(params=["torch", "kornia", "fused"])
def backend(request) -> str:
    return request.param


@pytest.mark.cuda
@pytest.mark.parametrize("transforms", CHAINS)
@pytest.mark.parametrize("count", [1, 70])
def test_cuda_levels_differ_from_the_cpu_within_bounds(make_images, make_batch, transforms, count, backend):
    chain, cpu_backend = T.Chain(transforms), "kornia" if backend == "kornia" else "torch"
    ragged, draws = make_batch(chain, make_images(0, count))
    expected = compile_stage(chain, device="cpu", backend=cpu_backend)(ragged, draws)
    stage = compile_stage(chain, device="cuda", backend=backend)
    result = stage(replace(ragged, pixels=ragged.pixels.cuda()), draws)
    difference = (result.cpu().int() - expected.int()).abs()
    if backend == "kornia":  # Kornia rounds to levels only once
        max_levels = torch.ones(count)
    else:
        steps = steps_on_cuda(backend)
        max_levels = torch.tensor([bound(steps, draws, row) for row in range(count)])
    assert (difference.amax(dim=(1, 2, 3)) - max_levels).max() <= 0
    assert difference.float().mean() <= 0.05


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("memory_format", ["contiguous_format", "channels_last"])
def test_cuda_floats_equal_the_cpu(make_images, run_stage, dtype, memory_format, backend):
    transforms, options = [T.CenterCrop(40), NORMALIZE], {"dtype": dtype, "memory_format": memory_format}
    expected = run_stage(transforms, make_images(1, 5), **options)
    result = run_stage(transforms, make_images(1, 5), device="cuda", backend=backend, **options)
    assert result.dtype == expected.dtype
    assert result.is_contiguous(memory_format=getattr(torch, memory_format))
    torch.testing.assert_close(result.cpu(), expected, atol=1e-6, rtol=0.01)


@pytest.mark.cuda
@pytest.mark.parametrize("ragged", ["list", "pad"])
def test_cuda_ragged_results_equal_the_cpu(make_images, run_stage, ragged):
    expected, result = (
        run_stage([T.Resize(30), NORMALIZE], make_images(2, 5), device=device, ragged=ragged)
        for device in ("cpu", "cuda")
    )
    for image, expected_image in zip(result, expected, strict=True):
        assert image.is_cuda
        # Levels of a resize, in units of the standard deviation.
        tolerance = STEPS["fused"]["resize bilinear"] / 255 / min(NORMALIZE.std) if image.is_floating_point() else 0
        torch.testing.assert_close(image.cpu(), expected_image, atol=tolerance, rtol=0)


@pytest.mark.cuda
def test_cuda_bits_do_not_depend_on_the_batch(make_images, run_stage, backend):
    transforms = [T.RandomResizedCrop(64), T.ColorJitter(0.4, 0.4, 0.4, 0.1), NORMALIZE]
    images, options = make_images(3, 70), {"device": "cuda", "backend": backend}
    expected = run_stage(transforms, images, **options)
    for position in (0, 33, 69):
        alone = run_stage(transforms, images[position : position + 1], first=position, **options)
        assert torch.equal(alone[0], expected[position])


@pytest.mark.cuda
@pytest.mark.parametrize("layout", ["contiguous", "sliced", "within others", "each channels last"])
def test_cuda_planes_have_the_bits_of_interleaved_images(make_images, layout, backend):
    arrays = [image[:40, :45] for image in make_images(4, 4, low=50)]
    inputs = interleaved_and_planes(arrays, layout, "cuda")
    chain = T.Chain([T.RandomHorizontalFlip(), T.RandomResizedCrop(20), T.ColorJitter(0.4, 0.4), NORMALIZE])
    draws = chain.draw(epoch_key(0, 0), np.arange(4), inputs[0].sizes_hw)
    stage = compile_stage(chain, device="cuda", backend=backend)
    expected, outputs = (stage(images, draws) for images in inputs)
    assert torch.equal(outputs, expected)
