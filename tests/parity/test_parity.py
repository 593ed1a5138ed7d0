"""On the backends that promise Pillow's levels, every transform gives the results of its oracle and of the others for
photographs and random images, within the table's tolerance."""

from __future__ import annotations

import pytest
from helpers import lacking
from parity.case import BOUNDED, RUNS, Case
from parity.compare import all_cases, bounded_runs_of, here, measure, named, operations, pairs_of, sets_of
from parity.images import image_set
from parity.usable import needs
from transforms.specs import SPECS

from gpuload import transforms as T

CASES = all_cases()
OPERATIONS = operations()


@pytest.mark.parametrize("run", RUNS)
def test_every_backend_can_be_used_here(run):
    """The tests below measure those that can."""
    needs(run)


def test_there_are_photographs():
    """The tests below measure images that they make up too."""
    if not image_set("photographs", 3):
        lacking.skip("photographs")


@pytest.mark.slow
@pytest.mark.interpreter
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parity(case: Case):
    too_far = from_the_oracle(case) + (from_each_other(case) if case in OPERATIONS else [])
    assert not too_far, case.name


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.interpreter
@pytest.mark.parametrize("case", [case for case in CASES if case not in OPERATIONS], ids=lambda case: case.name)
def test_backends_do_alike(case: Case):
    assert not from_each_other(case), case.name


def from_the_oracle(case: Case) -> list[str]:
    """What lies farther from the oracle than the table allows."""
    too_far = []
    for run in bounded_runs_of(case):
        tolerance = case.tolerance(run)
        for images in sets_of(run):
            found = measure(case, run, images, beside=())
            within = found.max <= tolerance.max and found.mean <= tolerance.mean
            if not within:  # NaN is not, either
                too_far.append(f"{run}, {images}: {found}, where {tolerance} is allowed")
    return too_far


def from_each_other(case: Case) -> list[str]:
    """Which backends lie farther apart than the table allows."""
    too_far = []
    for run, other, images in pairs_of(case):
        found = measure(case, run, images, beside=(other,)).apart
        allowed = case.tolerance(run).apart + (case.tolerance(other).apart if other != "torch" else 0.0)
        if not found <= allowed:
            too_far.append(f"{run} from {other}, {images}: {found}, where {allowed} is allowed")
    return too_far


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec.parity])
def test_the_cases_of_a_transform_are_about_it(name):
    assert all(name in {type(inner).__name__ for inner in case.transforms} for case in SPECS[name].parity)


def test_each_case_names_what_it_tests():
    """`here` asks for these."""
    for case in CASES:
        kinds = [inner for inner in case.transforms if not named(case, inner)]
        assert len(kinds) < len(case.transforms), case.name
        prepares = T.CenterCrop | T.ToDtype | T.Normalize | T.RandomHorizontalFlip | T.RandomVerticalFlip
        assert all(isinstance(inner, prepares) for inner in kinds), case.name


@pytest.mark.parametrize(
    ("name", "run", "expected"),
    [
        ("RandomRotation(bilinear)", "kornia", True),
        ("MixUp(num_classes=10), of floats", "kornia", False),  # of its chain, Kornia has the crop before it
        ("JPEG", "kornia", False),
        ("CenterCrop", "kornia", True),
        ("Resize", "kornia", True),
    ],
)
def test_a_case_is_of_a_backend_that_has_what_it_names(name, run, expected):
    needs(run)
    assert here(next(case for case in CASES if case.name == name), run) == expected


def test_names_are_unique():
    names = [case.name for case in CASES]
    assert len(names) == len(set(names))


def test_a_tolerance_is_of_a_backend_that_there_is_and_has_a_reason():
    for case in CASES:
        assert set(case.backends) <= set(BOUNDED[1:]), case.name
        assert all(tolerance.reason for tolerance in case.backends.values()), case.name
        assert all(other != case.tolerance("torch") for other in case.backends.values()), case.name


def test_the_document_lists_every_case():
    from parity.report import PAGE, row_start

    lines = PAGE.read_text().splitlines()
    missing = [case.name for case in CASES if not any(line.startswith(row_start(case)) for line in lines)]
    assert not missing, f"docs/parity.md is out of date, run `python tests/parity/report.py`: {missing}"
    rows = [line for line in lines if line.startswith("| ") and not line.startswith(("| transform |", "| :-- |"))]
    assert len(rows) == len(CASES), "docs/parity.md lists cases that are gone, run `python tests/parity/report.py`"
