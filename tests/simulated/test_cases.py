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

POLICIES = ("lazy", "side first")
WITH_WORKERS = {"user_collation", "blocks", "skipped", "streams_of_workers", "files"}
WAITING = {"pasted_instances"}  # CopyPaste asks the device which instances are left
CPU_ONLY = {"module"}  # its module adds a CPU tensor; test_modules.py tests modules on the device


def param(name: str) -> Any:
    return pytest.param(name, marks=[pytest.mark.slow] + [pytest.mark.processes] * (name in WITH_WORKERS))


@pytest.mark.parametrize("name", [param(name) for name in CASES if name not in CPU_ONLY])
def test_batches_of_each_case_on_the_device_equal_those_of_the_cpu(name):
    """Each case runs under one of the two policies that find the most errors; `test_orders.py` runs all policies."""
    case = CASES[name]
    options, drive = case.make(Samples(small="fused" in case.runs)), case.drive or partial(epochs, count=case.epochs)
    with warnings.catch_warnings():
        if case.warns:
            warnings.simplefilter("ignore", RuntimeWarning)
        expected = on_cpu(options, drive)
        run = on_device(options, POLICIES[list(CASES).index(name) % 2], drive)
        assert_equal(run.values, expected)
        if name not in WAITING:
            assert run.unexpected_waits == []
