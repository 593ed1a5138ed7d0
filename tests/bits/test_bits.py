"""Batches are the same, to the last bit, as they were when they were recorded; see ``record.py``."""

from __future__ import annotations

from typing import Any

import pytest
from bits.cases import CASES, RUNS
from bits.running import difference, hash_of, recorded
from helpers import lacking

ANEW = "to record anew: python tests/bits/record.py"
PAIRS = [(name, run) for name, case in CASES.items() for run in case.runs]
WITH_WORKERS = {"user_collation", "blocks", "skipped", "streams_of_workers", "files"}
# The cases that run on every backend in `make test`. Other tests hold batches to Pillow and the reference, and Kornia
# and DALI to their libraries' functions, so `make test-all` runs the other cases.
EVERYWHERE = {"colours", "detection_masks", "mixup_or_cutmix", "nested", "ragged_pad", "several_images"}
SLOW = {"colours_of_floats", "dino", "masks_of_all_dtypes", "several_images", "targets_in_branches"}


def param(name: str, run: str) -> Any:
    marks = [pytest.mark.processes] if name in WITH_WORKERS else [pytest.mark.slow] if name in SLOW else []
    if run in ("batched", "kornia", "dali") and {"kornia", "dali"} & {*CASES[name].runs} and name not in EVERYWHERE:
        marks.append(pytest.mark.exhaustive)
    return pytest.param(name, run, marks=marks, id=f"{name}/{run}")


@pytest.mark.parametrize(("name", "run"), [param(name, run) for name, run in PAIRS])
def test_bits(name, run):
    if reason := difference(run):
        lacking.skip("the recorded versions", f"{reason}; {ANEW}")
    expected = recorded()["hashes"].get(f"{name}/{run}")
    assert expected, f"{name}/{run} was never recorded; {ANEW} --new"
    found = hash_of(CASES[name], run)
    assert found == expected, f"the batches of {name} on {run} have other bits than recorded; if they shall, {ANEW}"


def test_all_that_is_recorded_is_compared():
    names, in_file = {f"{name}/{run}" for name, run in PAIRS}, set(recorded()["hashes"])
    assert not names - in_file, f"no hashes in tests/bits/recorded.json; {ANEW} --new"
    assert not in_file - names, (
        f"tests/bits/recorded.json has hashes of cases that are not in tests/bits/cases.py; {ANEW}"
    )
    assert {run for _, run in PAIRS} == set(RUNS), "no case in tests/bits/cases.py uses these of its RUNS"
