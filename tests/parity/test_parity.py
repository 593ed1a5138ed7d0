"""Every transform does to real photographs and to random images what its oracle does, within the table's tolerance."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from parity.case import Case
from parity.compare import all_cases, measure, photographs, random_images

from gpuload import transforms as T
from gpuload.transforms.base import Transform

CASES = all_cases()


@pytest.fixture(scope="module")
def pictures() -> list[np.ndarray]:
    """Real photographs: scikit-image's, and those of the folder of photographs where there is one."""
    from conftest import SHARED

    found = photographs(sorted((SHARED / "photos").glob("*.jpg")))
    if not found:
        pytest.skip("no photographs: install scikit-image, or set GPULOAD_SHARED to the folder that holds photos/")
    return found


def check(case: Case, images: list[np.ndarray], key_epoch: int) -> None:
    found = measure(case, images, key_epoch=key_epoch)
    assert found.max <= case.max, f"{case.name}: {found}"
    assert found.mean <= case.mean, f"{case.name}: {found}"
    assert found.between <= case.between, f"{case.name}: {found}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_photographs(case, pictures):
    check(case, pictures, 0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_random_images(case):
    for epoch in range(4):
        check(case, random_images(), epoch)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_batch_of_one(case):
    check(case, random_images()[:1], 9)


# What is not in the table: they hold other transforms, or move no pixels of their own choosing; and the crop that hangs
# on boxes: tests/targets.
ELSEWHERE = {
    *("Compose", "Identity", "MultiView", "RandomApply", "RandomChoice", "RandomOrder"),
    *("ClampBoundingBoxes", "ConvertBoundingBoxFormat", "SanitizeBoundingBoxes", "RandomIoUCrop"),
}


def test_every_transform_has_a_case():
    found = {type(inner).__name__ for case in CASES for inner in case.transforms}
    kinds = {name: getattr(T, name) for name in T.__all__}
    names = {name for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Transform)}
    assert names - found == ELSEWHERE


def test_names_are_unique():
    names = [case.name for case in CASES]
    assert len(names) == len(set(names))


def test_the_document_lists_every_case():
    from parity.report import row_start

    text = (Path(__file__).parents[2] / "docs" / "parity.md").read_text()
    missing = [case.name for case in CASES if row_start(case) not in text]
    assert not missing, f"docs/parity.md is out of date, run `python tests/parity/report.py`: {missing}"
    assert text.count("\n| ") - 2 == len(CASES), "docs/parity.md lists cases that are gone"
