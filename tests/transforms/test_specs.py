"""Every transform has a `Spec`, draws the same for a sample in any batch, and draws what its outline lists."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import numpy as np
import pytest
from transforms.drawing import KEY, TO_FLOAT
from transforms.specs import SPECS

from gpuload import transforms as T
from gpuload.transforms.base import Transform
from gpuload.transforms.program.ops import NOTHING, OPS, ChainMixture, Ops

SAMPLES = 40
POSITIONS = np.arange(SAMPLES)
SIZES = np.random.default_rng(1).integers(170, 300, (SAMPLES, 2))
BOXES = [np.array([[1.0, 2.0, 30.0, 31.0], [20.0, 9.0, 80.0, 90.0]])] * SAMPLES
CODES = {name: spec.code for name, spec in SPECS.items() if spec.code}


def make_transform(name: str) -> Any:
    """Make the transform whose effect the gallery shows."""
    return eval(CODES[name])


def parameter_names(name: str) -> set[str]:
    return set(inspect.signature(getattr(T, name)).parameters)


def draw(transform: Any, rows: slice = slice(None)) -> T.Program:
    conversion = [] if "uint8" in transform.works_on else [TO_FLOAT]
    return T.Chain([*conversion, transform]).draw(KEY, POSITIONS[rows], SIZES[rows], BOXES[rows])


def records_with_rows(program: T.Program) -> list[dict[str, Any]]:
    """Return the records that have rows, as dicts."""
    used = [record for record in program.records if record.rows is None or len(record.rows)]
    return [{field.name: getattr(record, field.name) for field in dataclasses.fields(record)} for record in used]


def test_every_transform_has_a_spec():
    public_names = {name: getattr(T, name) for name in T.__all__}
    names = {name for name, kind in public_names.items() if isinstance(kind, type) and issubclass(kind, Transform)}
    missing = sorted(names - set(SPECS))
    assert not missing, f"add a Spec to tests/transforms/specs.py for {', '.join(missing)}; see docs/architecture.md"
    assert set(SPECS) == names, "tests/transforms/specs.py has a Spec of a transform that does not exist"


@pytest.mark.parametrize("name", [name for name in CODES if name not in ("CopyPaste", "Mosaic")])
def test_sample_draws_the_same_in_any_batch(name):
    transform = make_transform(name)
    program = draw(transform)
    for row in (0, 7, SAMPLES - 1):
        alone, row_of_batch = (
            records_with_rows(part) for part in (draw(transform, slice(row, row + 1)), program.take(np.array([row])))
        )
        np.testing.assert_equal(alone, row_of_batch)


@pytest.mark.parametrize("name", [name for name in CODES if not SPECS[name].draws and SPECS[name].chains is not None])
def test_transform_without_a_distribution_draws_nothing(name):
    program = T.Chain([make_transform(name)]).draw(KEY, POSITIONS, np.tile([[200, 300]], (SAMPLES, 1)))
    for row in range(1, SAMPLES):
        records, other_records = (records_with_rows(program.take(np.array([number]))) for number in (0, row))
        np.testing.assert_equal(records, other_records)


@pytest.mark.parametrize("name", [name for name in CODES if not {"transforms", "chains"} & parameter_names(name)])
def test_transform_draws_records_and_operations_of_its_outline(name):
    transform = make_transform(name)
    [outline] = transform.outline
    record = draw(transform).records[-1]
    assert type(record) is outline.kind
    codes = getattr(record, "codes", np.empty(0, np.int64))
    unlisted = {OPS[code] for code in codes[codes != NOTHING].tolist()} - set(outline.operations)
    assert not unlisted, f"add {unlisted} to the outline of {name}"
    assert outline.operations or not isinstance(record, Ops | ChainMixture)
