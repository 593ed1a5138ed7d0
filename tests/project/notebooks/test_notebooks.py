"""The committed notebooks were run from top to bottom, have outputs, and are small. nbmake tests that they run."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

FOLDER = Path(__file__).parents[3] / "notebooks"
NAMES = ("cpu_vs_gpu_augmentation", "detection_and_segmentation", "first_steps", "your_own_dataset")
REMEDY = "run `make notebooks`, and look at the pictures"

NOTEBOOK_BYTES = 2 << 20
PICTURE_BYTES = 300 << 10
MACHINE_PATH = re.compile(r"(/home/|/root/|/Users/|/work/|site-packages)")


@pytest.fixture(params=NAMES)
def path(request: pytest.FixtureRequest) -> Path:
    return FOLDER / f"{request.param}.ipynb"


def code_cells(path: Path) -> list[Any]:
    return [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]


def outputs(path: Path) -> Iterator[Any]:
    for cell in code_cells(path):
        yield from cell.outputs


def test_each_notebook_is_tested_and_listed_in_the_readme() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == sorted(NAMES)
    readme = (FOLDER / "README.md").read_text()
    assert [name for name in NAMES if f"({name}.ipynb)" not in readme] == []


def test_notebook_cells_were_run_in_order(path: Path) -> None:
    counts = [cell.execution_count for cell in code_cells(path)]
    assert counts == list(range(1, len(counts) + 1)), REMEDY


def test_notebook_outputs_have_no_errors_or_warnings(path: Path) -> None:
    assert [output for output in outputs(path) if output.output_type == "error" or output.get("name") == "stderr"] == []


def test_notebook_has_pictures_and_is_small(path: Path) -> None:
    pictures = [
        base64.b64decode(value)
        for output in outputs(path)
        for kind, value in output.get("data", {}).items()
        if kind.startswith("image/")
    ]
    assert pictures, REMEDY
    assert max(map(len, pictures)) <= PICTURE_BYTES
    assert path.stat().st_size <= NOTEBOOK_BYTES


def test_notebook_outputs_name_no_path_of_a_machine(path: Path) -> None:
    texts = [output.get("text", "") + str(output.get("data", {}).get("text/plain", "")) for output in outputs(path)]
    assert [text for text in texts if MACHINE_PATH.search(text)] == []
