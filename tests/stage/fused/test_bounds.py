"""Kernels read no byte outside an image: the memory before and after an image cannot be accessed.

The test runs in a separate process, because such a read would end it.
"""

from __future__ import annotations

import pytest
import torch
from helpers import lacking
from helpers.programs import run_python

lacking.require("triton")

PROGRAM = """
import ctypes
import mmap
from itertools import product

import numpy as np
import torch

from benchmarks.interpreter import speed_up_interpreter
from gpuload import transforms as T
from gpuload.stage import RaggedImages, compile_stage
from gpuload.transforms.program.draws import image_table
from gpuload.rng.philox import epoch_key

speed_up_interpreter()

PAGE = mmap.PAGESIZE
memory = mmap.mmap(-1, 6 * PAGE)
start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
protect = ctypes.CDLL(None, use_errno=True).mprotect
protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
for page in (0, 5):
    assert protect(start + page * PAGE, PAGE, 0) == 0
accessible = np.frombuffer(memory, np.uint8)[PAGE : 5 * PAGE]
accessible[:] = np.random.default_rng(0).integers(0, 256, len(accessible), np.uint8)
pixels = torch.from_numpy(accessible)

CHAINS = (
    [T.Resize((13, 9)), T.GaussianBlur(5, 1.0)],
    [T.Resize((5, 40), "bicubic"), T.RandomAdjustSharpness(2, 1.0)],
    [T.RandomVerticalFlip(1.0), T.RandomHorizontalFlip(1.0), T.Resize((30, 2))],
    [T.GaussianBlur(9, 2.0), T.RandomAffine(30, interpolation="bicubic", fill=3)],
    [T.RandomPerspective(0.6, 1.0), T.RandomAutocontrast(1.0), T.RandomEqualize(1.0)],
    [T.Pad(3, padding_mode="reflect"), T.RandomCrop(5), T.RandomInvert(1.0)],
)
for height, width, channels in ((19, 37, 3), (4, 3, 1)):
    size = height * width * channels
    # The first image is at the beginning of the accessible memory, and the second at its end.
    offsets = np.array([0, len(accessible) - size])
    shapes, sizes = np.tile([[height, width, channels]], (2, 1)), np.tile([[height, width]], (2, 1))
    regions = np.tile([[0, 0, height, width]], (2, 1))
    images = RaggedImages(pixels, image_table(offsets, shapes, sizes, regions), ["first", "last"])
    planes = [pixels[offset : offset + size].view(channels, height, width) for offset in offsets.tolist()]
    planar = RaggedImages.from_planes(planes, images.labels)
    for transforms, images in product(CHAINS, (images, planar)):
        chain = T.Chain(transforms)
        program = chain.draw(epoch_key(0, 0), np.arange(2), sizes)
        result, expected = (
            compile_stage(chain, device="cpu", backend=backend)(images, program) for backend in ("fused", "torch")
        )
        assert result.shape == expected.shape
        assert (result.int() - expected.int()).abs().float().mean() < 1
"""


@lacking.mark("no GPU", torch.cuda.is_available())  # kernels on a GPU do not read this memory
@pytest.mark.usefixtures("warm")
def test_kernels_read_no_byte_outside_an_image():
    run_python(PROGRAM, timeout=280)
