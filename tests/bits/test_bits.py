"""Batches are the same, to the last bit, as when they were recorded by ``record.py``. Hashes of batches are compared if
torch and the other libraries have the recorded versions; the order of the samples, the decoded pixels and the random
parameters are compared with any version of torch and on any CPU."""

from __future__ import annotations

from typing import Any

import pytest
from bits.cases import CASES, RUNS
from bits.running import INPUTS, batch_hash, decoders_differ, environment_difference, input_hashes, recorded
from helpers import lacking

RECORD_AGAIN = "to record again: python tests/bits/record.py"
CASES_AND_RUNS = [(name, run) for name, case in CASES.items() for run in case.runs]
WITH_WORKERS = {"user_collation", "blocks", "skipped", "streams_of_workers", "files"}
# The cases that run on every backend in `make test`; `make test-all` runs all cases on every backend. Results are also
# compared with Pillow's and the reference's, and on Kornia and DALI with their libraries' functions, by other tests.
ON_ALL_BACKENDS = {"colours", "detection_masks", "mixup_or_cutmix", "nested", "ragged_pad", "several_images"}
SLOW = {"colours_of_floats", "dino", "masks_of_all_dtypes", "several_images", "targets_in_branches"}


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.processes] * (name in WITH_WORKERS) + [pytest.mark.slow] * (name in SLOW)


def case_param(name: str, run: str) -> Any:
    marks = marks_of(name)
    runs_on_libraries = {"kornia", "dali"} & {*CASES[name].runs}
    if run in ("batched", "kornia", "dali") and runs_on_libraries and name not in ON_ALL_BACKENDS:
        marks.append(pytest.mark.exhaustive)
    return pytest.param(name, run, marks=marks, id=f"{name}/{run}")


@pytest.mark.parametrize(("name", "run"), [case_param(name, run) for name, run in CASES_AND_RUNS])
def test_batches_have_the_recorded_bits(name, run):
    if reason := environment_difference(run):
        lacking.skip("the recorded versions", f"{reason}; {RECORD_AGAIN}")
    expected = recorded()["hashes"].get(f"{name}/{run}")
    assert expected, f"{name}/{run} was never recorded; {RECORD_AGAIN} --new"
    assert batch_hash(CASES[name], run) == expected, f"the batches have changed; if this is intended, {RECORD_AGAIN}"


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(name)) for name in CASES])
def test_order_regions_and_draws_have_the_recorded_hashes(name):
    for kind, value in input_hashes(CASES[name]).items():
        if kind != "regions" or not decoders_differ():
            expected = recorded()["inputs"].get(f"{name}/{kind}")
            assert value == expected, f"the {kind} of the batches changed; if this is intended, {RECORD_AGAIN}"


def test_recorded_json_has_the_hashes_of_all_cases_and_no_others():
    message = f"tests/bits/cases.py and recorded.json name different cases; {RECORD_AGAIN}"
    assert set(recorded()["hashes"]) == {f"{name}/{run}" for name, run in CASES_AND_RUNS}, message
    assert set(recorded()["inputs"]) == {f"{name}/{kind}" for name in CASES for kind in INPUTS}, message
    assert {run for _, run in CASES_AND_RUNS} == set(RUNS)
