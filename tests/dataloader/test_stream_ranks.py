"""Iterable datasets on several ranks: worker info, seeds, and warnings if samples repeat."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from helpers.both_loaders import gpuload_batches
from helpers.map_datasets import MapDataset
from helpers.warm_interpreters import WARM_CHILDREN_VARIABLE
from torch.utils.data import IterableDataset
from torch.utils.data.datapipes.iter import IterableWrapper

import gpuload as gl

LIMIT_S = 300

pytestmark = pytest.mark.usefixtures("warm")

PROGRAM = '''
"""One of two ranks of a process group. Prints the samples, the warnings and the error of each case as JSON."""
import json, os, sys, warnings
from itertools import islice

import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

import gpuload as gl

cases, rank, store = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
for name in ("RANK", "WORLD_SIZE"):
    os.environ.pop(name, None)


class AsksTorch(IterableDataset):
    """A stream that divides itself as in torch's documentation."""

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        return islice(range(40), rank * workers + worker, None, ranks * workers)


class AsksGpuload:
    """A stream that is not a torch IterableDataset, because importing torch would dominate a worker's start-up time."""

    def __iter__(self):
        info = gl.get_worker_info()
        return islice(range(40), info.rank * info.num_workers + info.id, None, info.world_size * info.num_workers)


class AsksTheEnvironment(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        share = int(os.environ["RANK"]) * info.num_workers + info.id
        return islice(range(40), share, None, int(os.environ["WORLD_SIZE"]) * info.num_workers)


class IgnoresRank(IterableDataset):
    """A stream that is divided among workers only."""

    def __iter__(self):
        info = get_worker_info()
        return islice(range(40), 0 if info is None else info.id, None, 1 if info is None else info.num_workers)


class Communicates(IterableDataset):
    def __iter__(self):
        yield dist.get_backend()
        dist.barrier()


dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)


def run(case, workers):
    options = {"rank": 0, "world_size": 1} if case == "IgnoresRank, world_size=1" else {}
    stream = globals()[case.split(",")[0]]()
    numbers, error = [], ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with gl.Loader(stream, 2, num_workers=workers, device="cpu", **options) as loader:
            for _ in range(2):
                try:
                    for batch in loader:
                        numbers += batch if isinstance(batch, list) else batch.tolist()
                except gl.SampleError as failed:
                    error = failed.cause
    return {"numbers": numbers, "warnings": [str(warning.message) for warning in caught], "error": error}


results = [run(*case) for case in cases]
dist.barrier()  # since the process that owns the store must not end first
print(json.dumps(results))
dist.destroy_process_group()
'''


# Names of streams, of which the text before a comma is the class, and numbers of workers.
DIVIDED_CASES = [("AsksTorch", 1), ("AsksTorch", 0), ("AsksGpuload", 2), ("AsksGpuload", 0), ("AsksTheEnvironment", 1)]
CASES = [*DIVIDED_CASES, ("IgnoresRank", 0), ("IgnoresRank", 1), ("IgnoresRank, world_size=1", 0), ("Communicates", 1)]


@pytest.fixture(scope="module")
def results_by_case(tmp_path_factory, warm_popen):
    """Return what each of two ranks printed for each case. One process group runs all cases, since it starts slowly."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "program.py").write_text(PROGRAM)
    processes = [
        warm_popen(
            [sys.executable, str(folder / "program.py"), json.dumps(CASES), str(rank), str(folder / "store")],
            env={**os.environ, "OMP_NUM_THREADS": "1", WARM_CHILDREN_VARIABLE: "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ranks = [json.loads(process.communicate(timeout=LIMIT_S)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return dict(zip(CASES, zip(*ranks, strict=True), strict=True))


@pytest.mark.processes
@pytest.mark.parametrize("case", DIVIDED_CASES, ids=str)
def test_stream_that_asks_for_its_rank_is_divided_among_ranks(results_by_case, case):
    results = results_by_case[case]
    assert [result["warnings"] for result in results] == [[], []]
    for epoch in (slice(0, 20), slice(20, 40)):  # each rank gets 20 of the 40 samples in each of two epochs
        numbers = [number for result in results for number in result["numbers"][epoch]]
        assert sorted(numbers) == list(range(40))


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1])
def test_ranks_with_equal_samples_warn_once(results_by_case, workers):
    results = results_by_case["IgnoresRank", workers]
    assert sorted(results[0]["numbers"]) == sorted(results[1]["numbers"]) == sorted([*range(40)] * 2)
    [text] = [text for result in results for text in result["warnings"]]
    assert "of 2 yielded the same first 8 samples: each rank iterates over the entire dataset" in text
    assert "get `rank` and `world_size` from gpuload.get_worker_info()" in text


@pytest.mark.processes
def test_ranks_with_equal_samples_do_not_warn_if_world_size_is_1(results_by_case):
    assert [result["warnings"] for result in results_by_case["IgnoresRank, world_size=1", 0]] == [[], []]


@pytest.mark.processes
def test_worker_knows_its_process_group_but_cannot_communicate(results_by_case):
    for result in results_by_case["Communicates", 1]:
        assert result["numbers"] == []
        assert result["error"].startswith(
            "RuntimeError: torch.distributed.barrier was called in a gpuload worker process"
        )


# -- seeds ------------------------------------------------------------------------------------------------------------


class Seeds:
    """A stream of one sample: the worker's number, its seed, and a random number drawn with this seed."""

    def __iter__(self):
        from torch.utils.data import get_worker_info

        info, torch_info = gl.get_worker_info(), get_worker_info()
        seed = info.seed if torch_info is None else torch_info.seed
        assert seed == info.seed == torch.initial_seed()
        yield info.id, seed, float(np.random.default_rng(seed).random())


@pytest.mark.processes
def test_worker_seed_differs_between_epochs_ranks_workers_and_seeds():
    options = {"batch_size": None, "num_workers": 1, "epochs": 2, "seed": 5, "collate_fn": tuple}

    def seeds_of(**changes):
        return gpuload_batches(Seeds(), **{**options, "world_size": 2, **changes})

    other_rank = seeds_of(rank=1)
    seeds = [seed for _, seed, _ in other_rank + seeds_of(rank=0, num_workers=2) + seeds_of(rank=0, seed=6)]
    assert len(set(seeds)) == 2 * (1 + 2 + 1)  # epochs × (a worker of rank 1, two of rank 0, one with another seed)
    assert 0 <= min(seeds) <= max(seeds) < 2**32
    assert seeds_of(rank=1) == other_rank


def test_seed_without_workers_differs_between_epochs():
    samples = gpuload_batches(Seeds(), None, epochs=3, collate_fn=tuple)
    assert len({seed for _, seed, _ in samples}) == 3


@pytest.mark.processes
def test_worker_init_fn_and_dataset_see_the_seed_that_torch_has():
    def record_seed(worker):
        from torch.utils.data import get_worker_info

        info = get_worker_info()
        assert info.seed == torch.initial_seed()
        info.dataset.at_start = (worker, info.seed)

    class RecordsSeeds(torch.utils.data.Dataset):
        at_start = (-1, -1)

        def __len__(self):
            return 6

        def __getitem__(self, index):
            from torch.utils.data import get_worker_info

            return (*self.at_start, get_worker_info().seed)

    observed = []
    for rank in range(2):
        options = {"num_workers": 2, "rank": rank, "world_size": 2, "collate_fn": tuple, "chunk_size": 1}
        batches = gpuload_batches(RecordsSeeds(), None, worker_init_fn=record_seed, epochs=2, **options)
        observed += [(rank, number // 3, *batch) for number, batch in enumerate(batches)]  # three samples an epoch
    # Which worker reads which sample, and whether both read any, is left to chance.
    for rank, epoch, worker, seed_at_start, seed_now in observed:
        assert (seed_now == seed_at_start) == (epoch == 0), (rank, epoch, worker)
    assert len({seed_at_start for _, _, _, seed_at_start, _ in observed}) == len(
        {(rank, worker) for rank, _, worker, _, _ in observed}
    )
    assert len({seed_now for *_, seed_now in observed}) == len(
        {(rank, epoch, worker) for rank, epoch, worker, _, _ in observed}
    )


def test_get_worker_info_is_none_outside_of_a_dataset():
    class Nested:
        def __iter__(self):
            outer = gl.get_worker_info()
            inner = gpuload_batches(MapDataset(lambda index: gl.get_worker_info().rank, 1), rank=1, world_size=2)
            assert gl.get_worker_info() is outer
            yield outer.rank, outer.world_size, int(inner[0])

    assert gl.get_worker_info() is None
    with gl.Loader(Nested(), None, rank=2, world_size=4, device="cpu", collate_fn=tuple) as loader:
        for batch in loader:
            assert gl.get_worker_info() is None
            assert batch == (2, 4, 1)


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1])
def test_get_worker_info_shows_ranks_that_were_set_between_epochs(monkeypatch, workers):
    class Ranks:
        def __iter__(self):
            info = gl.get_worker_info()
            yield info.rank, info.world_size

    with gl.Loader(Ranks(), None, num_workers=workers, device="cpu", collate_fn=tuple) as loader:
        assert list(loader) == list(loader) == [(0, 1)]
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert list(loader) == list(loader) == [(1, 2)]


# -- warnings ---------------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_datapipe_with_sharding_filter_warns_that_samples_repeat():
    pipe = IterableWrapper(range(8)).shuffle().sharding_filter()
    with gl.Loader(pipe, 4, num_workers=2, device="cpu") as loader:
        message = r"sharding_filter\(\), which DataLoader configures .* appears 2 times"
        with pytest.warns(RuntimeWarning, match=message) as caught:
            batches = list(loader) + list(loader)
        assert len(caught) == 1
    assert sorted(torch.cat(batches).tolist()) == sorted([*range(8)] * 4)
    assert len(gpuload_batches(pipe, 4)) == 2  # does not warn in one process, which needs no division


class TestRanksFromTheEnvironment:
    @pytest.fixture(autouse=True)
    def environment(self, monkeypatch):
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")

    def test_epoch_divided_because_of_the_environment_warns_once(self):
        with gl.Loader(range(10), 5, device="cpu", num_workers=0) as loader:
            message = r"split among 2 ranks.*RANK=0 and WORLD_SIZE=2.* world_size=1 to get all"
            with pytest.warns(RuntimeWarning, match=message):
                assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3, 4]]
            assert len(list(loader)) == 1

    @pytest.mark.parametrize(
        ("options", "batches"),
        [({"rank": 0, "world_size": 1}, 2), ({"rank": 1, "world_size": 2}, 1), ({"sampler": range(10)}, 2)],
    )
    def test_epoch_divided_because_of_an_argument_does_not_warn(self, options, batches):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert len(gpuload_batches(range(10), 5, **options)) == batches

    def test_stream_does_not_warn(self):
        class Numbers(IterableDataset):
            def __iter__(self):
                return iter(range(3))

        assert len(gpuload_batches(Numbers(), None)) == 3
