"""Torchdata's tests, run with `Loader` in place of its `StatefulDataLoader`, and the reasons why some of them fail.

The files are not part of this repository: set GPULOAD_TORCHDATA_TESTS to the folder ``test/stateful_dataloader`` of a
checkout of pytorch/data at v0.11; they need parameterized and expecttest. They take half an hour.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from dataloader.torchdata_suites import FOLDER, outcomes
from helpers import lacking

NEXT_EPOCH = "after the last batch of an epoch, the state is the beginning of the next epoch"
IN_ORDER = "in_order=False has no effect for a map dataset: batches come in order"
NO_STATE_BEFORE_BATCH = "in workers the dataset has no state before the first batch"
OTHER_TEXT = "warnings and errors have a different text"
NO_WORKERS_ATTRIBUTE = "the iterator has no attribute _workers, a list of processes"
DATAPIPE = "shuffle=True is refused for a datapipe, which shuffles itself"
ANY_WORKER = "any worker takes the next chunk"

# Differences that both classes of test_dataloader.py show, with and without persistent workers.
DIFFERENCES_OF_BOTH_CLASSES = {
    "test_excessive_thread_creation_warning": OTHER_TEXT,
    "test_get_worker_info": NO_WORKERS_ATTRIBUTE,
    "test_invalid_ctor_args_combinations": OTHER_TEXT,
    "test_iterable_style_dataset": NO_WORKERS_ATTRIBUTE,
    "test_multiprocessing_iterdatapipe": DATAPIPE,
    "test_multiprocessing_iterdatapipe_with_dill": DATAPIPE,
    "test_partial_workers": NO_WORKERS_ATTRIBUTE,
    "test_worker_init_fn": "generators are seeded for each sample",
}

# For each file and each test that fails, the difference that causes the failure.
DIFFERENCES = {
    "test_state_dict.py": {
        "TestEndOfEpochBehavior_shard0.test_end_of_epoch_behavior_0": NEXT_EPOCH,
        "TestEndOfEpochBehavior_shard0.test_end_of_epoch_behavior_1": NEXT_EPOCH,
        "TestEndOfEpochBehavior_shard0.test_end_of_epoch_behavior_2": NEXT_EPOCH,
        "TestEndOfEpochBehavior_shard0.test_end_of_epoch_behavior_3": NEXT_EPOCH,
        "TestInitialState_shard0.test_load_then_state": "persistent_workers is a tuple there, which is refused",
        "TestNumWorkersMismatch_shard3.test_num_workers_mismatch": "a map dataset resumes with any number of workers",
        "TestOutOfOrderWithCheckpointing.test_out_of_order_index_ds": IN_ORDER,
        "TestSingleIterCalled_shard0.test_mp": NO_STATE_BEFORE_BATCH,
        "TestSingleIterCalled_shard0.test_mp_iter": NO_STATE_BEFORE_BATCH,
    },
    "test_dataloader.py": {
        **{f"TestDataLoader.{test}": why for test, why in DIFFERENCES_OF_BOTH_CLASSES.items()},
        **{f"TestDataLoaderPersistentWorkers.{test}": why for test, why in DIFFERENCES_OF_BOTH_CLASSES.items()},
        "IntegrationTestDataLoaderDataPipe.test_shuffler_iterdatapipe": DATAPIPE,
        "TestIndividualWorkerQueue.test_ind_worker_queue": ANY_WORKER,
        "TestOutOfOrderDataLoader.test_in_order_index_ds": ANY_WORKER,
        "TestOutOfOrderDataLoader.test_out_of_order_index_ds": IN_ORDER,
    },
}


@pytest.mark.processes
@pytest.mark.timeout(2 * 3600)
@lacking.needs("torchdata", "parameterized", "expecttest")
@pytest.mark.parametrize("name", DIFFERENCES)
def test_torchdata_tests_fail_only_where_a_difference_is_listed(name):
    folder = os.environ.get(FOLDER)
    if not folder:
        lacking.skip("torchdata's tests", f"set {FOLDER} to their folder")
    failed = {
        test: outcome for test, outcome in outcomes(Path(folder, name)).items() if outcome not in ("passed", "skipped")
    }
    unlisted = {test: outcome for test, outcome in failed.items() if test not in DIFFERENCES[name]}
    assert unlisted == {}, "fix these failures, or explain them in DIFFERENCES of this file"
    not_failed = DIFFERENCES[name].keys() - failed.keys()
    assert not_failed == set(), "these tests did not fail: remove them from DIFFERENCES of this file"
