"""torchdata's own tests, run with `Loader` in place of its `StatefulDataLoader`: which of them fail, and why.

The files are not part of this repository: set GPULOAD_TORCHDATA_TESTS to the folder ``test/stateful_dataloader`` of a
checkout of pytorch/data at v0.11; they need parameterized and expecttest. They take half an hour.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from dataloader.suites import FOLDER, outcomes

NEXT_EPOCH = "with its last batch an epoch is over, and the state names the next one"
IN_ORDER = "in_order=False is without effect: batches come in order"
NO_BATCH = "in workers the dataset has a state only with the first batch"

# For each file, and each test that fails, the difference that makes it fail.
DIFFERENCES = {
    "test_state_dict.py": {
        "TestEndOfEpochBehavior_shard0.test_end_of_epoch_behavior_0": NEXT_EPOCH,
        "TestEndOfEpochBehavior_shard0.test_end_of_epoch_behavior_1": NEXT_EPOCH,
        "TestEndOfEpochBehavior_shard0.test_end_of_epoch_behavior_2": NEXT_EPOCH,
        "TestEndOfEpochBehavior_shard0.test_end_of_epoch_behavior_3": NEXT_EPOCH,
        "TestInitialState_shard0.test_init_error": "an error of worker_init_fn comes with the first batch",
        "TestInitialState_shard0.test_iteration_error": "an error of a sample is a SampleError",
        "TestNumWorkersMismatch_shard3.test_num_workers_mismatch": "a map dataset goes on with any number of workers",
        "TestOutOfOrderWithCheckpointing.test_out_of_order_index_ds": IN_ORDER,
        "TestOutOfOrderWithCheckpointing.test_out_of_order_iterable_ds_no_completed_workers": IN_ORDER,
        "TestOutOfOrderWithCheckpointing.test_out_of_order_iterable_ds_one_completed_worker": IN_ORDER,
        "TestSingleIterCalled_shard0.test_mp": NO_BATCH,
        "TestSingleIterCalled_shard0.test_mp_iter": NO_BATCH,
    },
}


@pytest.mark.processes
@pytest.mark.timeout(2 * 3600)
@pytest.mark.parametrize("name", DIFFERENCES)
def test_those_fail_that_differ_and_no_others(name):
    folder = os.environ.get(FOLDER)
    if not folder:
        pytest.skip(f"{FOLDER} does not say where torchdata's tests are")
    for package in ("torchdata", "parameterized", "expecttest"):
        pytest.importorskip(package, reason=f"{package} is not installed, which torchdata's tests need")
    found = outcomes(Path(folder, name))
    failed = {test: outcome for test, outcome in found.items() if outcome not in ("passed", "skipped")}
    expected = DIFFERENCES[name]
    assert {test: outcome for test, outcome in failed.items() if test not in expected} == {}, "not known to differ"
    assert expected.keys() - failed.keys() == set(), "known to differ, but passed"
