"""Batches of images of all sizes, from arrays; and images of a batch that are changed in groups."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from gpuload.stage import RaggedImages
from gpuload.stage.ragged import Branches, changed_by_key


def test_images_lie_one_after_the_other():
    arrays = [np.full((2, 3, 3), 7, np.uint8), np.full((4, 1, 1), 9, np.uint8)[:, ::-1]]
    images = RaggedImages.from_arrays(arrays)
    assert len(images) == 2
    assert images.pixels.tolist() == [7] * 18 + [9] * 4
    assert images.offsets.tolist() == [0, 18]
    assert images.shapes.tolist() == [[2, 3, 3], [4, 1, 1]]
    assert images.sizes_hw.tolist() == [[2, 3], [4, 1]]
    assert images.regions_tlhw.tolist() == [[0, 0, 2, 3], [0, 0, 4, 1]]
    assert images.labels == ["image 0", "image 1"]


def test_no_images():
    images = RaggedImages.from_arrays([])
    assert len(images) == 0
    assert images.shapes.shape == (0, 3)


@pytest.mark.parametrize(
    ("array", "got"),
    [
        (np.zeros((4, 6), np.float32), "float32 of shape (4, 6)"),
        (np.zeros((4, 6), np.uint8), "uint8 of shape (4, 6)"),
        (np.zeros((4, 6, 3)), "float64 of shape (4, 6, 3)"),
        ([[[1, 2, 3]]], "list"),
    ],
)
def test_other_arrays_are_refused(array, got):
    with pytest.raises(TypeError, match=re.escape(f"image 1 must be a uint8 array H×W×C, got {got}")):
        RaggedImages.from_arrays([np.zeros((2, 2, 3), np.uint8), array])


@dataclass
class Letters:
    """Images that are letters."""

    text: str

    def take(self, rows: np.ndarray) -> Letters:
        return Letters("".join(self.text[row] for row in rows.tolist()))

    @classmethod
    def merged(cls, parts: Sequence[tuple[np.ndarray, Letters]]) -> Letters:
        placed = {row: letter for rows, own in parts for row, letter in zip(rows.tolist(), own.text, strict=True)}
        return cls("".join(placed[row] for row in range(len(placed))))


def upper(letters: Letters) -> Letters:
    return Letters(letters.text.upper())


def test_rows_of_a_branch_are_taken_out_changed_and_put_back():
    branches = Branches(Letters("abcdef"), 6)
    branches.change(np.array([1, 3, 5]), upper)
    branches.change(np.array([], np.int64), upper)
    branches.change(np.array([0, 1, 2]), lambda letters: Letters(letters.text[::-1]))  # of both groups
    branches.change(None, lambda letters: Letters(letters.text.replace("F", "x")))
    assert branches.whole().text == "cBaDex"


def test_a_branch_stays_apart_until_other_rows_are_asked_for(monkeypatch):
    merges, real = [], Letters.merged
    monkeypatch.setattr(Letters, "merged", staticmethod(lambda parts: merges.append(parts) or real(parts)))
    branches = Branches(Letters("abcd"), 4)
    for _ in range(3):
        branches.change(np.array([1, 2]), upper)
        branches.change(np.array([0, 3]), lambda letters: letters)
    assert not merges
    assert branches.whole().text == "aBCd"
    assert len(merges) == 1


def test_images_of_equal_keys_are_changed_together():
    seen = []

    def change(letters: Letters, rows: np.ndarray, key: int) -> Letters:
        seen.append((letters.text, rows.tolist(), key))
        return upper(letters) if key == 7 else letters

    assert changed_by_key(Letters("abcd"), np.array([7, 2, 7, 2]), change).text == "AbCd"
    assert seen == [("ac", [0, 2], 7), ("bd", [1, 3], 2)]
    assert changed_by_key(Letters("ab"), np.array([7, 7]), change).text == "AB"
