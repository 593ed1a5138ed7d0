"""Iterable datasets on several ranks: what they can ask, what they draw, and what is noticed if they do not ask."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from dataloader.common import Made, gpuload_batches
from helpers.warm_interpreters import TOO
from torch.utils.data import IterableDataset
from torch.utils.data.datapipes.iter import IterableWrapper

import gpuload as gl

LIMIT_S = 300

pytestmark = pytest.mark.usefixtures("warm")

PROGRAM = '''
"""One of two ranks of a process group; prints for each case what a stream gave, and what was warned of."""
import json, os, sys, warnings
from itertools import islice

import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

import gpuload as gl

cases, rank, store = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
for name in ("RANK", "WORLD_SIZE"):
    os.environ.pop(name, None)


class Asks(IterableDataset):
    """Shares itself out as torch's documentation has it."""

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        return islice(range(40), rank * workers + worker, None, ranks * workers)


class AsksUs:
    """Not torch's: importing that takes a worker longer than all else."""

    def __iter__(self):
        info = gl.get_worker_info()
        return islice(range(40), info.rank * info.num_workers + info.id, None, info.world_size * info.num_workers)


class AsksTheEnvironment(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        share = int(os.environ["RANK"]) * info.num_workers + info.id
        return islice(range(40), share, None, int(os.environ["WORLD_SIZE"]) * info.num_workers)


class AsksNobody(IterableDataset):
    """Not for its rank."""

    def __iter__(self):
        info = get_worker_info()
        return islice(range(40), 0 if info is None else info.id, None, 1 if info is None else info.num_workers)


class Talks(IterableDataset):
    def __iter__(self):
        yield dist.get_backend()
        dist.barrier()


dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)


def told(case, workers):
    options = {"rank": 0, "world_size": 1} if case == "AsksNobody, on purpose" else {}
    stream = globals()[case.split(",")[0]]()
    numbers, error = [], ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with gl.Loader(stream, 2, num_workers=workers, device="cpu", **options) as loader:
            for epoch in range(2):
                try:
                    for batch in loader:
                        numbers += batch if isinstance(batch, list) else batch.tolist()
                except gl.SampleError as failed:
                    error = failed.cause
    return {"numbers": numbers, "warnings": [str(one.message) for one in caught], "error": error}


found = [told(*case) for case in cases]
dist.barrier()  # the store is one of them's
print(json.dumps(found))
dist.destroy_process_group()
'''


SHARED = [("Asks", 1), ("Asks", 0), ("AsksUs", 2), ("AsksUs", 0), ("AsksTheEnvironment", 1)]
CASES = [*SHARED, ("AsksNobody", 0), ("AsksNobody", 1), ("AsksNobody, on purpose", 0), ("Talks", 1)]


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory, warm_popen):
    """What each of two ranks printed, for each case: of all in one process group, which takes long to come up."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "program.py").write_text(PROGRAM)
    processes = [
        warm_popen(
            [sys.executable, str(folder / "program.py"), json.dumps(CASES), str(rank), str(folder / "store")],
            env={**os.environ, "OMP_NUM_THREADS": "1", TOO: "1"},
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
@pytest.mark.parametrize("case", SHARED, ids=str)
def test_each_rank_gets_its_share(on_two_ranks, case):
    ranks = on_two_ranks[case]
    assert [one["warnings"] for one in ranks] == [[], []]
    for half in (slice(20), slice(20, 40)):
        first, second = (one["numbers"][half] for one in ranks)
        assert sorted(first + second) == list(range(40))


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1])
def test_ranks_that_give_the_same_samples_are_told_of_it_once(on_two_ranks, workers):
    ranks = on_two_ranks["AsksNobody", workers]
    assert sorted(ranks[0]["numbers"]) == sorted(ranks[1]["numbers"]) == sorted([*range(40)] * 2)
    [text] = ranks[0]["warnings"] + ranks[1]["warnings"]
    assert "of 2 yielded the same first 8 samples: each rank iterates over the entire dataset" in text
    assert "get `rank` and `world_size` from gpuload.get_worker_info()" in text


@pytest.mark.processes
def test_ranks_that_are_to_give_the_same_say_so(on_two_ranks):
    assert [one["warnings"] for one in on_two_ranks["AsksNobody, on purpose", 0]] == [[], []]


@pytest.mark.processes
def test_a_worker_knows_its_group_and_cannot_talk_to_it(on_two_ranks):
    for one in on_two_ranks["Talks", 1]:
        assert one["numbers"] == []
        assert one["error"].startswith("RuntimeError: torch.distributed.barrier was called in a gpuload worker process")


# -- seeds ------------------------------------------------------------------------------------------------------------


class Seeds:
    """Which worker this is, its seed as gpuload and torch tell it, and what a generator of it draws."""

    def __iter__(self):
        import torch
        from torch.utils.data import get_worker_info

        import gpuload as gl

        info, theirs = gl.get_worker_info(), get_worker_info()
        seed = info.seed if theirs is None else theirs.seed
        assert seed == info.seed == torch.initial_seed()
        yield info.id, seed, float(np.random.default_rng(seed).random())


@pytest.mark.processes
def test_a_workers_seed_is_its_own_in_each_epoch_rank_and_run():
    options = {"batch_size": None, "num_workers": 1, "epochs": 2, "seed": 5, "collate_fn": tuple}

    def drawn(**changes):
        return gpuload_batches(Seeds(), **{**options, "world_size": 2, **changes})

    other_rank = drawn(rank=1)
    seeds = [seed for _, seed, _ in other_rank + drawn(rank=0, num_workers=2) + drawn(rank=0, seed=6)]
    assert len(set(seeds)) == 8
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert drawn(rank=1) == other_rank


def test_without_workers_too():
    first = gpuload_batches(Seeds(), None, epochs=3, collate_fn=tuple)
    assert len({seed for _, seed, _ in first}) == 3


@pytest.mark.processes
def test_worker_init_fn_is_given_the_seed_that_torch_has():
    def check(worker):
        import torch
        from torch.utils.data import get_worker_info

        info = get_worker_info()
        assert info.seed == torch.initial_seed()
        info.dataset.found = (worker, info.seed)

    class Found(torch.utils.data.Dataset):
        found = (-1, -1)

        def __len__(self):
            return 6

        def __getitem__(self, index):
            from torch.utils.data import get_worker_info

            return (*self.found, get_worker_info().seed)

    found = []
    for rank in range(2):
        options = {"num_workers": 2, "rank": rank, "world_size": 2, "collate_fn": tuple, "chunk_size": 1}
        batches = gpuload_batches(Found(), None, worker_init_fn=check, epochs=2, **options)
        found += [(rank, number // 3, *batch) for number, batch in enumerate(batches)]  # three samples an epoch
    # Which worker gives which sample, and whether both give some, is left to chance.
    assert all((now == begun) == (epoch == 0) for _, epoch, _, begun, now in found)
    assert len({begun for _, _, _, begun, _ in found}) == len({(rank, worker) for rank, _, worker, _, _ in found})
    assert len({now for *_, now in found}) == len({(rank, epoch, worker) for rank, epoch, worker, _, _ in found})


def test_nobody_is_told_outside_of_a_dataset():
    class Nested:
        def __iter__(self):
            outer = gl.get_worker_info()
            inner = gpuload_batches(Made(lambda index: gl.get_worker_info().rank, 1), rank=1, world_size=2)
            assert gl.get_worker_info() is outer
            yield outer.rank, outer.world_size, int(inner[0])

    assert gl.get_worker_info() is None
    with gl.Loader(Nested(), None, rank=2, world_size=4, device="cpu", collate_fn=tuple) as loader:
        for found in loader:
            assert gl.get_worker_info() is None
            assert found == (2, 4, 1)


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1])
def test_ranks_that_come_up_between_two_epochs_are_told(monkeypatch, workers):
    class Told:
        def __iter__(self):
            info = gl.get_worker_info()
            yield info.rank, info.world_size

    with gl.Loader(Told(), None, num_workers=workers, device="cpu", collate_fn=tuple) as loader:
        assert list(loader) == list(loader) == [(0, 1)]
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert list(loader) == list(loader) == [(1, 2)]


# -- what is noticed --------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_a_datapipe_that_waits_to_be_shared_out_is_told():
    pipe = IterableWrapper(range(8)).shuffle().sharding_filter()
    with gl.Loader(pipe, 4, num_workers=2, device="cpu") as loader:
        with pytest.warns(
            RuntimeWarning, match=r"sharding_filter\(\), which DataLoader configures .* appears 2 times"
        ) as caught:
            batches = list(loader) + list(loader)
        assert len(caught) == 1
    assert sorted(torch.cat(batches).tolist()) == sorted([*range(8)] * 4)
    assert len(gpuload_batches(pipe, 4)) == 2  # in one process there is nothing to divide


class TestTheEnvironment:
    @pytest.fixture(autouse=True)
    def environment(self, monkeypatch):
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")

    def test_an_epoch_shared_out_because_of_it_alone_is_told_once(self):
        with gl.Loader(range(10), 5, device="cpu", num_workers=0) as loader:
            with pytest.warns(
                RuntimeWarning, match=r"split among 2 ranks.*RANK=0 and WORLD_SIZE=2.* world_size=1 to get all"
            ):
                assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3, 4]]
            assert len(list(loader)) == 1

    @pytest.mark.parametrize(
        "options", [{"rank": 0, "world_size": 1}, {"rank": 1, "world_size": 2}, {"sampler": range(10)}]
    )
    def test_not_where_the_loader_was_told(self, options):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            gpuload_batches(range(10), 5, **options)

    def test_nor_for_a_stream_which_shares_itself_out(self):
        class Numbers(IterableDataset):
            def __iter__(self):
                return iter(range(3))

        assert len(gpuload_batches(Numbers(), None)) == 3
