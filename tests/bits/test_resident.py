"""Batches of a `DeviceCached` have the bits that were recorded without it, in every case."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from bits.cases import CASES
from bits.running import difference, hash_of, recorded
from bits.samples import Samples

import gpuload as gl

# Those of streams, which cannot be kept, and those whose drive makes the dataset.
WITHOUT = {"stream", "streams_of_workers", "files"}
SLOW = {"colours_of_floats", "dino", "masks_of_all_dtypes", "several_images", "targets_in_branches"}
NAMES = [
    pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
    for name, case in CASES.items()
    if "torch" in case.runs and name not in WITHOUT
]


@pytest.mark.parametrize("name", NAMES)
def test_bits_are_those_without_it(name):
    case, made = CASES[name], []

    def make(samples: Samples) -> dict[str, Any]:
        options = case.make(samples)
        made.append(gl.DeviceCached(options["dataset"]))
        return options | {"dataset": made[0], "num_workers": 0}

    found = hash_of(replace(case, make=make), "torch")
    (cached_data,) = made[0].cached_data.values()  # it was in use
    assert cached_data.count == len(made[0])
    expected = recorded()["hashes"][f"{name}/torch"] if difference("torch") is None else hash_of(case, "torch")
    assert found == expected
