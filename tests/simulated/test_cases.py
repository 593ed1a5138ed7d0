"""Every transform, every kind of sample and the usual recipes give the same batches on the device as on the CPU, and do
not make the host wait."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
from bits.cases import CASES
from bits.samples import Samples
from simulated.running import assert_equal, epochs, on_cpu, on_device

WITH_WORKERS = {"user_collation", "blocks", "skipped", "streams_of_workers", "files"}
WAITING = {"pasted_instances"}  # CopyPaste asks the device which instances are left
CPU_ONLY = {"module"}  # it adds a tensor of the CPU; test_modules.py has others


def param(name: str) -> Any:
    return pytest.param(name, marks=[pytest.mark.slow] + [pytest.mark.processes] * (name in WITH_WORKERS))


@pytest.mark.parametrize("name", [param(name) for name in CASES if name not in CPU_ONLY])
def test_batches_of_each_case_on_the_device_equal_those_of_the_cpu(name):
    """The policy is one of the two that reveal most; `test_orders.py` uses all of them."""
    case = CASES[name]
    options, drive = case.make(Samples(small="fused" in case.runs)), case.drive or partial(epochs, count=case.epochs)
    with warnings.catch_warnings():
        if case.warns:
            warnings.simplefilter("ignore", RuntimeWarning)
        expected = on_cpu(options, drive)
        run = on_device(options, ("lazy", "side first")[list(CASES).index(name) % 2], drive)
        assert_equal(run.values, expected)
        assert name in WAITING or run.unexpected_waits == []
