"""`PixelSource` reads levels in place or gathers them, and `Branches` changes the images of a batch in groups."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpuload.stage import RaggedImages
from gpuload.stage.reference.batched import Branches, change_by_key
from gpuload.stage.reference.gather import PixelSource


@pytest.mark.parametrize("channels", [1, 3])
def test_to_dense_of_contiguous_rows_copies_nothing(channels):
    levels = torch.randint(0, 256, (5, channels, 6, 7), dtype=torch.uint8)
    source = PixelSource.from_dense(levels)
    assert source.to_dense().data_ptr() == levels.data_ptr()
    assert torch.equal(source.to_dense(), levels)
    rows = source.take(np.array([2, 3])).to_dense()
    assert rows.data_ptr() == levels[2].data_ptr()
    assert torch.equal(rows, levels[2:4])


@pytest.mark.parametrize("channels", [1, 3])
def test_to_dense_gathers_selected_flipped_cut_and_ragged_images(channels):
    levels = torch.randint(0, 256, (5, channels, 6, 7), dtype=torch.uint8)
    source = PixelSource.from_dense(levels)
    assert torch.equal(source.take(np.array([3, 2, 4])).to_dense(), levels[[3, 2, 4]])
    flipped = source.flip(np.array([False, True, False, True, True]), horizontally=True)
    assert torch.equal(flipped.to_dense()[[0, 1]], torch.stack([levels[0], levels[1].flip(2)]))
    corners = np.array([[1, 2, 3, 4], [0, 0, 3, 4], [3, 3, 3, 4], [2, 1, 3, 4], [1, 1, 3, 4]])
    for row, (top, left, height, width) in enumerate(corners.tolist()):
        expected = levels[row, :, top : top + height, left : left + width]
        assert torch.equal(source.cut(corners).to_dense()[row], expected)
    images = [image.permute(1, 2, 0).contiguous().numpy() for image in levels]
    ragged = PixelSource.from_ragged(RaggedImages.from_arrays(images), np.arange(5), np.tile([0, 0, 6, 7], (5, 1)))
    assert torch.equal(ragged.to_dense(), levels)


def images_of_letters(text: str) -> PixelSource:
    return PixelSource.from_dense(torch.tensor([*text.encode()], dtype=torch.uint8).view(-1, 1, 1, 1))


def text_of(images: PixelSource) -> str:
    return bytes(images.to_dense().flatten().tolist()).decode()


def to_upper(images: PixelSource) -> PixelSource:
    return images_of_letters(text_of(images).upper())


def test_branches_change_their_rows_and_restore_the_order():
    branches = Branches(images_of_letters("abcdef"))
    branches.change(np.array([1, 3, 5]), to_upper)
    branches.change(np.array([], np.int64), to_upper)
    # Some of these rows are in the group changed above, and some are not.
    branches.change(np.array([0, 1, 2]), lambda images: images_of_letters(text_of(images)[::-1]))
    branches.change(None, lambda images: images_of_letters(text_of(images).replace("F", "x")))
    assert text_of(branches.take_all()) == "cBaDex"


def test_branches_merge_only_when_other_rows_are_needed(monkeypatch):
    merged, merge = [], PixelSource.merge
    monkeypatch.setattr(PixelSource, "merge", staticmethod(lambda parts: merged.append(parts) or merge(parts)))
    branches = Branches(images_of_letters("abcd"))
    for _ in range(3):
        branches.change(np.array([1, 2]), to_upper)
        branches.change(np.array([0, 3]), lambda images: images)
    assert not merged
    assert text_of(branches.take_all()) == "aBCd"
    assert len(merged) == 1


def test_change_by_key_changes_images_of_equal_keys_together():
    calls = []

    def change(images: PixelSource, rows: np.ndarray, key: int) -> PixelSource:
        calls.append((text_of(images), rows.tolist(), key))
        return to_upper(images) if key == 7 else images

    assert text_of(change_by_key(images_of_letters("abcd"), np.array([7, 2, 7, 2]), change)) == "AbCd"
    assert calls == [("ac", [0, 2], 7), ("bd", [1, 3], 2)]
    assert text_of(change_by_key(images_of_letters("ab"), np.array([7, 7]), change)) == "AB"
