"""No kernel is compiled on a GPU after a session has started."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from helpers import lacking

import gpuload as gl
from gpuload import transforms as T

pytestmark = [pytest.mark.cuda, lacking.mark_missing("compiled kernels", os.environ.get("TRITON_INTERPRET") == "1")]

NORMALIZE = T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CHAINS = {
    "colour": [T.RandomResizedCrop(64), T.RandomHorizontalFlip(), T.ColorJitter(0.4, 0.4, 0.4, 0.1), NORMALIZE],
    "randaugment": [T.RandomResizedCrop(64), T.RandAugment(), NORMALIZE, T.RandomErasing(0.3)],
    "branches": [T.RandomChoice([T.TrivialAugmentWide(), T.RandomRotation(9)]), T.RandomCrop(48, padding=4), NORMALIZE],
    "mixed": [T.RandomResizedCrop(64), NORMALIZE, T.MixUp(num_classes=7), T.RandomErasing(0.3)],
}


class Images:
    """Arrays of many sizes, with labels."""

    def __len__(self) -> int:
        return 8 * 12

    def __getitem__(self, number: int):
        height, width = 60 + 7 * (number % 9), 80 + 5 * (number % 11)
        y, x = np.mgrid[:height, :width]
        return gl.Image(np.stack([x * 3, y * 2, x + y + number], -1).astype(np.uint8)), number % 7


@pytest.mark.parametrize("layout", ["contiguous_format", "channels_last"])
@pytest.mark.parametrize("chain", list(CHAINS))
def test_no_kernel_is_compiled_after_the_first_epoch_begins(chain, layout):
    import triton

    compiled = []
    options = {"transforms": CHAINS[chain], "dtype": "float16", "memory_format": layout, "backend": "fused"}
    with gl.Loader(Images(), 8, num_workers=0, device="cuda", shuffle=True, **options) as loader:
        batches = iter(loader)
        original_hook = triton.knobs.runtime.jit_post_compile_hook
        triton.knobs.runtime.jit_post_compile_hook = lambda **details: compiled.append(details["repr"])
        try:
            for _ in range(3):
                for images, _ in batches:
                    assert torch.isfinite(images).all()
                batches = iter(loader)
        finally:
            triton.knobs.runtime.jit_post_compile_hook = original_hook
    assert compiled == []
