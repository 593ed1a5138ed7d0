"""On every backend every transform does to real photographs and to random images what its oracle does, and what the
other backends do, within the table's tolerance."""

from __future__ import annotations

import pytest
from parity.case import RUNS, Case
from parity.compare import all_cases, here, measure, named, sets_of
from parity.images import image_set
from parity.usable import needs, why_not

from gpuload import transforms as T
from gpuload.transforms.base import Transform

CASES = all_cases()


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parity(case: Case, run: str):
    needs(run)
    if not here(case, run):
        return  # torch in its place, which has a test of its own
    tolerance, before = case.tolerance(run), RUNS[: RUNS.index(run)]
    before = [other for other in before if why_not(other) is None and here(case, other)]
    for images in sets_of(run):
        if not image_set(images, case.channels):
            pytest.skip("no photographs: install scikit-image, or set GPULOAD_SHARED to the folder that holds photos/")
        found = measure(case, run, images, beside=())
        assert found.max <= tolerance.max, f"{case.name} on {run}, {images}: {found}"
        assert found.mean <= tolerance.mean, f"{case.name} on {run}, {images}: {found}"
        assert found.share <= tolerance.share, f"{case.name} on {run}, {images}: {found}"
        for other in before:
            apart = measure(case, run, images, beside=(other,)).apart
            allowed = tolerance.apart + (case.tolerance(other).apart if other != "torch" else 0.0)
            assert apart <= allowed, f"{case.name} on {run}, {images}: {apart} from {other}"


# What is not in the table: they hold other transforms, or move no pixels of their own choosing; and the crop that hangs
# on boxes: tests/targets.
ELSEWHERE = {
    *("CopyPaste", "Mosaic", "ClampKeyPoints", "SanitizeKeyPoints", "UniformTemporalSubsample"),
    *("Custom", "ElasticTransform", "Lambda"),
    *("Compose", "Identity", "MultiView", "RandomApply", "RandomChoice", "RandomOrder"),
    *("ClampBoundingBoxes", "ConvertBoundingBoxFormat", "SanitizeBoundingBoxes", "RandomIoUCrop"),
}


def test_every_transform_has_a_case():
    found = {type(inner).__name__ for case in CASES for inner in case.transforms}
    kinds = {name: getattr(T, name) for name in T.__all__}
    names = {name for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Transform)}
    assert names - found == ELSEWHERE


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
        ("RandomRotation(bilinear)", "dali", True),
        ("RandomRotation(bicubic)", "dali", False),  # of its chain, DALI has the crop before it
        ("RandomPerspective(nearest)", "dali", False),
        ("RandomPerspective, Pad, RandomHorizontalFlip", "dali", True),
        ("MixUp(num_classes=10), of floats", "dali", False),
        ("MixUp(num_classes=10), of floats", "kornia", True),
        ("CenterCrop", "kornia", True),
        ("Resize", "kornia", False),
    ],
)
def test_a_case_is_of_a_backend_that_has_what_it_names(name, run, expected):
    needs(run)
    assert here(next(case for case in CASES if case.name == name), run) == expected


def test_a_bound_that_any_difference_keeps_has_another_beside_it():
    for case in CASES:
        for run in RUNS:
            tolerance = case.tolerance(run)
            assert tolerance.max < 255 or tolerance.share < 1, f"{case.name} on {run}"


def test_names_are_unique():
    names = [case.name for case in CASES]
    assert len(names) == len(set(names))


def test_a_tolerance_is_of_a_backend_that_there_is_and_has_a_reason():
    for case in CASES:
        assert set(case.backends) <= set(RUNS[1:]), case.name
        assert all(tolerance.reason for tolerance in case.backends.values()), case.name
        assert all(other != case.tolerance("torch") for other in case.backends.values()), case.name


def test_the_document_lists_every_case():
    from parity.report import PAGE, row_start

    lines = PAGE.read_text().splitlines()
    missing = [case.name for case in CASES if not any(line.startswith(row_start(case)) for line in lines)]
    assert not missing, f"docs/parity.md is out of date, run `python tests/parity/report.py`: {missing}"
    rows = [line for line in lines if line.startswith("| ") and not line.startswith(("| transform |", "| :-- |"))]
    assert len(rows) == len(CASES), "docs/parity.md lists cases that are gone, run `python tests/parity/report.py`"
