"""A backend runs the transforms of a case itself if docs/parity.md has figures for it, and `Loader.plan` says so."""

from __future__ import annotations

import pytest
from parity.case import BATCHES, RUNS
from parity.compare import all_cases, runs_natively
from parity.report import PAGE, row_start
from parity.usable import needs

import gpuload as gl
from gpuload import transforms as T

TO_FLOAT, NORMALIZE = T.ToDtype("float32", scale=True), T.Normalize([0.5] * 3, [0.5] * 3)


@pytest.mark.parametrize("run", [run for run in RUNS if run not in ("torch", BATCHES)])
def test_a_backend_runs_the_cases_for_which_the_document_has_figures(run):
    needs(run)
    lines = PAGE.read_text().splitlines()
    outdated = []
    for case in all_cases():
        cells = [line.removeprefix(row_start(case)).split(" | ") for line in lines if line.startswith(row_start(case))]
        if not cells or runs_natively(case, run) != (cells[0][RUNS.index(run)] != "–"):
            outdated.append(case.name)
    assert not outdated, f"docs/parity.md is out of date, run `python tests/parity/report.py`: {outdated}"


@pytest.mark.parametrize("backend", ["kornia", "dali", "fused"])
@pytest.mark.parametrize(
    "chain",
    [
        [T.RandomResizedCrop(32, interpolation="random"), T.RandomHorizontalFlip(), T.RandAugment(), NORMALIZE],
        [T.RandomApply([T.ColorJitter(0.4), T.RandomHorizontalFlip()], 0.8), TO_FLOAT, T.RandomErasing()],
    ],
)
def test_a_backend_runs_an_entire_chain(backend, chain):
    needs(backend)
    plan = gl.Loader(["a.jpg", "b.jpg"], 2, transforms=chain, backend=backend, device="cpu", num_workers=0).plan()
    assert plan.backend == backend
    assert [step.transform for step in plan.steps] == list(T.Chain(chain).lines[0].transforms)
    elsewhere = {repr(step.transform): step.reason for step in plan.steps if step.backend != backend}
    assert not elsewhere, f"{backend} does not run all transforms: {elsewhere}"


def test_a_transform_that_a_backend_lacks_runs_on_torch():
    needs("kornia")
    chain = [T.ColorJitter(0.4), T.JPEG(50), NORMALIZE]
    plan = gl.Loader(["a.jpg"], transforms=chain, backend="kornia", device="cpu", num_workers=0).plan()
    assert [step.backend for step in plan.steps] == ["kornia", "torch", "kornia"]
