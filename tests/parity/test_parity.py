"""Results of the backends that promise Pillow's levels are within the tolerances of the oracle and of each other."""

from __future__ import annotations

import pytest
from helpers import lacking
from parity.case import BOUNDED, RUNS, Case
from parity.compare import all_cases, bounded_runs_of, first_cases, is_named, measure, pairs_of, runs_natively, sets_of
from parity.images import image_set
from parity.usable import needs
from transforms.specs import SPECS

from gpuload import transforms as T

CASES = all_cases()
FIRST_CASES = first_cases()


@pytest.mark.parametrize("run", RUNS)
def test_backend_can_be_used_on_this_machine(run):
    """The tests below measure only backends that can be used."""
    needs(run)


def test_image_set_has_photographs():
    """Without photographs, the tests below measure only generated images."""
    if not image_set("photographs", 3):
        lacking.skip("photographs")


@pytest.mark.slow
@pytest.mark.interpreter
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_results_are_within_the_tolerance_of_the_oracle(case: Case):
    failures = failures_against_the_oracle(case) + (failures_between_backends(case) if case in FIRST_CASES else [])
    assert not failures, case.name


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.interpreter
@pytest.mark.parametrize("case", [case for case in CASES if case not in FIRST_CASES], ids=lambda case: case.name)
def test_results_of_backends_are_within_the_tolerance_of_each_other(case: Case):
    assert not failures_between_backends(case), case.name


def failures_against_the_oracle(case: Case) -> list[str]:
    """Describe the results that differ more from the oracle than the table allows."""
    failures = []
    for run in bounded_runs_of(case):
        tolerance = case.tolerance(run)
        for set_name in sets_of(run):
            measured = measure(case, run, set_name, compared_with=())
            is_within = measured.max <= tolerance.max and measured.mean <= tolerance.mean
            if not is_within:  # NaN is not within the tolerance
                failures.append(f"{run}, {set_name}: {measured}, where {tolerance} is allowed")
    return failures


def failures_between_backends(case: Case) -> list[str]:
    """Describe the backends that differ more from each other than the table allows."""
    failures = []
    for run, other, set_name in pairs_of(case):
        spread = measure(case, run, set_name, compared_with=(other,)).apart
        allowed = case.tolerance(run).apart + (case.tolerance(other).apart if other != "torch" else 0.0)
        if not spread <= allowed:
            failures.append(f"{run} from {other}, {set_name}: {spread}, where {allowed} is allowed")
    return failures


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec.parity])
def test_parity_cases_of_a_spec_apply_its_transform(name):
    for case in SPECS[name].parity:
        assert name in {type(inner).__name__ for inner in case.transforms}, case.name


def test_name_of_a_case_contains_the_transforms_it_tests():
    """`runs_natively` and the report need these names."""
    for case in CASES:
        unnamed = [inner for inner in case.transforms if not is_named(case, inner)]
        assert len(unnamed) < len(case.transforms), case.name
        preparing = T.CenterCrop | T.ToDtype | T.Normalize | T.RandomHorizontalFlip | T.RandomVerticalFlip
        assert not [inner for inner in unnamed if not isinstance(inner, preparing)], case.name


@pytest.mark.parametrize(
    ("name", "run", "expected"),
    [
        ("RandomRotation(bilinear)", "kornia", True),
        ("MixUp(num_classes=10), of floats", "kornia", False),  # Kornia runs only the crop before it
        ("JPEG", "kornia", False),
        ("CenterCrop", "kornia", True),
        ("Resize", "kornia", True),
    ],
)
def test_runs_natively_only_if_the_backend_runs_a_transform_in_the_name(name, run, expected):
    needs(run)
    assert runs_natively(next(case for case in CASES if case.name == name), run) == expected


def test_names_of_cases_are_unique():
    names = [case.name for case in CASES]
    assert len(names) == len(set(names))


def test_tolerances_of_a_case_name_known_backends_and_reasons():
    for case in CASES:
        assert set(case.backends) <= set(BOUNDED[1:]), case.name
        for tolerance in case.backends.values():
            assert tolerance.reason, case.name
            assert tolerance != case.tolerance("torch"), case.name


def test_document_lists_every_case():
    from parity.report import PAGE, row_start

    lines = PAGE.read_text().splitlines()
    missing = [case.name for case in CASES if not any(line.startswith(row_start(case)) for line in lines)]
    assert not missing, f"docs/parity.md is out of date, run `python tests/parity/report.py`: {missing}"
    rows = [line for line in lines if line.startswith("| ") and not line.startswith(("| transform |", "| :-- |"))]
    assert len(rows) == len(CASES), "docs/parity.md lists removed cases, run `python tests/parity/report.py`"
