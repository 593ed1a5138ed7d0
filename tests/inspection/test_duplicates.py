"""Which rows are alike: held against trying every pair."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from gpuload.inspection import duplicates
from gpuload.inspection.duplicates import APART, Groups, equal, looking_alike


def as_sets(groups: Groups) -> set[frozenset[int]]:
    return {frozenset(rows.tolist()) for rows in groups}


def test_equal_rows_are_in_one_group() -> None:
    rng = np.random.default_rng(0)
    keys, rows = rng.integers(-3, 3, (60, 2)), rng.permutation(1000)[:60]
    expected: dict[tuple[int, ...], set[int]] = {}
    for key, row in zip(keys.tolist(), rows.tolist(), strict=True):
        expected.setdefault(tuple(key), set()).add(row)
    found = equal(keys, rows)
    assert as_sets(found) == {frozenset(group) for group in expected.values() if len(group) > 1}
    assert found.surplus == sum(len(group) - 1 for group in expected.values())
    assert len(equal(np.arange(5)[:, None], np.arange(5))) == 0
    assert list(equal(np.zeros((0, 2), np.int64), np.zeros(0, np.int64))) == []


def test_groups_say_what_differs_in_them() -> None:
    groups = Groups(np.array([0, 1, 2, 3, 4, 5, 6]), np.array([0, 2, 5]))
    values = np.array([7, 7, 1, -1, 2, -1, 3])
    assert groups.differ(values).tolist() == [False, True, False]  # -1 stands for none
    assert as_sets(groups.keep(groups.differ(values))) == {frozenset({2, 3, 4})}
    assert groups.surplus == 4


def test_no_pair_that_looks_alike_is_missed() -> None:
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 2, (40, 128)).astype(bool)
    copies = []
    for number in range(40):
        for flips in (0, APART, APART + 1):
            copy = bits[number].copy()
            copy[rng.permutation(128)[:flips]] ^= True
            copies.append(copy)
    every = np.concatenate([bits, copies])
    looks = np.packbits(every, axis=1).view(np.int64)
    rows = rng.permutation(10_000)[: len(every)]
    root = list(range(len(every)))

    def top(one: int) -> int:
        return one if root[one] == one else top(root[one])

    for i, j in itertools.combinations(range(len(every)), 2):
        if (every[i] ^ every[j]).sum() <= APART:
            root[top(i)] = top(j)
    expected: dict[int, set[int]] = {}
    for i in range(len(every)):
        expected.setdefault(top(i), set()).add(int(rows[i]))
    found = looking_alike(looks, rows)
    assert as_sets(found) == {frozenset(group) for group in expected.values() if len(group) > 1}
    assert len(found) == 40
    assert len(looking_alike(np.zeros((0, 2), np.int64), np.zeros(0, np.int64))) == 0


def test_many_that_share_a_part_are_held_against_each_other_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """All have the same first half, so they are one band of 700."""
    monkeypatch.setattr(duplicates, "BLOCK", 300)
    rng = np.random.default_rng(2)
    looks = np.stack([np.zeros(700, np.int64), rng.integers(0, 1 << 62, 700)], axis=1)
    looks[680] = looks[5] ^ np.array([0, 0x2000_0001_0001_0001])  # no part of the second half is equal
    assert as_sets(looking_alike(looks, np.arange(700))) == {frozenset({5, 680})}


@pytest.mark.parametrize("same", range(8))
def test_one_equal_part_of_eight_is_enough(same: int) -> None:
    looks = np.random.default_rng(3).integers(0, 1 << 62, (2, 2))
    parts = looks.view(np.uint16)
    parts[1] = parts[0] ^ (np.arange(8) != same)
    assert as_sets(looking_alike(looks, np.arange(2))) == {frozenset({0, 1})}
