"""Dense levels are read where they lie, and are gathered where they lie otherwise."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpuload.stage import RaggedImages
from gpuload.stage.reference.gather import Source


@pytest.mark.parametrize("channels", [1, 3])
def test_what_lies_as_it_is_wanted_is_not_copied(channels):
    levels = torch.randint(0, 256, (5, channels, 6, 7), dtype=torch.uint8)
    source = Source.of_dense(levels)
    assert source.dense().data_ptr() == levels.data_ptr()
    assert torch.equal(source.dense(), levels)
    some = source.take(np.array([2, 3])).dense()
    assert some.data_ptr() == levels[2].data_ptr()
    assert torch.equal(some, levels[2:4])


@pytest.mark.parametrize("channels", [1, 3])
def test_all_else_is_gathered(channels):
    levels = torch.randint(0, 256, (5, channels, 6, 7), dtype=torch.uint8)
    source = Source.of_dense(levels)
    assert torch.equal(source.take(np.array([3, 2, 4])).dense(), levels[[3, 2, 4]])
    flipped = source.flip(np.array([False, True, False, True, True]), horizontally=True)
    assert torch.equal(flipped.dense()[[0, 1]], torch.stack([levels[0], levels[1].flip(2)]))
    corners = np.array([[1, 2, 3, 4], [0, 0, 3, 4], [3, 3, 3, 4], [2, 1, 3, 4], [1, 1, 3, 4]])
    for row, (top, left, height, width) in enumerate(corners.tolist()):
        wanted = levels[row, :, top : top + height, left : left + width]
        assert torch.equal(source.cut(corners).dense()[row], wanted)
    images = [image.permute(1, 2, 0).contiguous().numpy() for image in levels]
    ragged = Source.of_ragged(RaggedImages.from_arrays(images), np.arange(5), np.tile([0, 0, 6, 7], (5, 1)))
    assert torch.equal(ragged.dense(), levels)
