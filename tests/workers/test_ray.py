"""Options of `RayWorkers`, and workers of a fake cluster that die, hang or get no machine. tests/frameworks/test_ray.py
uses a real cluster."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from helpers.fake_ray import Cluster, RayError
from helpers.map_datasets import MapDataset
from helpers.processes import stop_processes

import gpuload as gl
from gpuload.ring.ring import GRANULE_BYTES
from gpuload.workers import ray as ray_module
from gpuload.workers.feed import Feed
from gpuload.workers.ray import Host

pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.mark.parametrize(("arguments", "error", "text"), [
    ({"count": 1, "address": "ray://a:1"}, ValueError, "RayWorkers(address='ray://a:1'): with Ray Client, each"),
    ({"count": 1, "actor_options": 3}, TypeError, "RayWorkers(actor_options=…) must be a dict, got 3"),
    ({"count": 1, "actor_options": {"num_cpus": 2}}, ValueError, "RayWorkers(actor_options=…) has 'num_cpus'"),
])  # fmt: skip
def test_ray_workers_with_wrong_arguments_are_refused(arguments, error, text):
    with pytest.raises(error, match=re.escape(text)):
        gl.RayWorkers(**arguments)


def test_a_loader_accepts_ray_workers_instead_of_num_workers():
    loader = gl.Loader(range(100), 10, workers=gl.RayWorkers(count=1000))  # many, and no warning
    assert loader.num_workers == 1000
    with pytest.raises(ValueError, match=r"num_workers=2 and workers=RayWorkers\(.*\) cannot be combined"):
        gl.Loader(range(100), num_workers=2, workers=gl.RayWorkers(count=2))
    with pytest.raises(TypeError, match=r"workers must be a gpuload\.RayWorkers, got 4 \(int\)"):
        gl.Loader(range(100), workers=4)


def test_batches_ahead_of_ray_workers_are_three_chunks_per_worker_and_at_least_the_requested_number():
    options = gl.Loader(range(10000), 256, workers=gl.RayWorkers(count=64))._options
    assert (options.chunk_size, options.batches_ahead(64, 2)) == (32, (2, 24))
    options = gl.Loader(range(10000), 256, workers=gl.RayWorkers(count=2), prefetch_factor=3)._options
    assert options.batches_ahead(2, 3) == (3, 3)


# -- a cluster --------------------------------------------------------------------------------------------------------


class Numbers(MapDataset):
    """Samples that are their indices. The sample `bad` calls `act` first."""

    def __init__(self, samples=64, bad=None, act=lambda: None):
        super().__init__(samples=samples)
        self.bad, self.act = bad, act

    def __getitem__(self, index):
        if index == self.bad:
            self.act()
        return index


def exit_with_7():
    os._exit(7)


def raise_lookup_error():
    raise LookupError("not available")


def hang():
    time.sleep(600)


def sleep_60_s():
    time.sleep(60)  # long enough to be warned of


@pytest.fixture
def cluster(monkeypatch) -> Iterator[Cluster]:
    cluster = Cluster()
    monkeypatch.setattr(ray_module, "connect_ray", lambda address, called: cluster)
    yield cluster
    cluster.close()


def make_loader(dataset=None, *, count=2, per_actor=1, **options):
    workers = gl.RayWorkers(count=count, workers_per_actor=per_actor)
    return gl.Loader(dataset or Numbers(), 8, workers=workers, chunk_size=4, **options)


def flatten(batches) -> list[int]:
    return [int(number) for batch in batches for number in batch]


def start_epoch(loader):
    """Return an iterator after its first batch, and the samples of this batch, once all workers are ready."""
    epoch = iter(loader)
    first_batch = flatten([next(epoch)])
    loader._session.feed.await_engine()
    return epoch, first_batch


def test_samples_that_fail_kill_or_hang_are_listed_with_the_causes_of_local_workers(cluster):
    died = "WorkerError: 2 workers died while processing only this sample: "
    for act, options, cause in (
        (raise_lookup_error, {}, "LookupError: not available"),
        (exit_with_7, {}, f"{died}exited with status 7"),
        (hang, {"timeout": 0.3}, f"{died}no progress for timeout=0.3 seconds"),
    ):
        with (
            make_loader(Numbers(24, 5, act), on_error="skip", **options) as loader,
            pytest.warns(RuntimeWarning, match="sample 5"),
        ):
            assert flatten(loader) == [number for number in range(24) if number != 5]
        [record] = loader.errors
        assert (record.index, record.cause) == (5, cause)
        assert (f"in {act.__name__}" in record.traceback) == (act is not exit_with_7)


def test_a_dead_actor_is_replaced_and_its_chunks_are_loaded_again(cluster):
    with make_loader(Numbers(400)) as loader:
        epoch, seen = start_epoch(loader)
        cluster.actors[0].die()
        seen += flatten(epoch)
        assert seen == list(range(400))
        assert [actor.node for actor in cluster.actors] == ["a", "b", "a"]
        stats = loader.stats()
        assert [worker.restarts for worker in stats.workers] == [1, 0]
        # The dead actor may not have reported all of its samples: it had at most four chunks of four.
        assert sum(worker.samples for worker in stats.workers) >= 384
        assert (stats.elsewhere, stats.cpu.workers_s > 0) == (True, True)
        [death] = loader._session.engine.deaths.causes
        assert death == f"the Ray actor of worker 0 on {os.uname().nodename} died: The actor died"
        assert flatten(loader) == list(range(400))


class Shifted(Numbers):
    def __init__(self, count):
        super().__init__(count)
        self.shift, self.table = 0, np.zeros(count, np.int64)

    def __getitem__(self, index):
        return index + self.shift + int(self.table[index])


def test_changes_to_the_dataset_reach_all_actors_and_their_replacements(cluster):
    data = Shifted(100)
    with make_loader(data) as loader:
        assert flatten(loader) == list(range(100))
        data.shift = 1000
        assert flatten(loader) == list(range(1000, 1100))
        assert len(cluster.actors) == 2
        cluster.actors[0].die()
        data.shift = 2000
        assert flatten(loader) == list(range(2000, 2100))
        data.table[:] = 7
        assert flatten(loader) == list(range(2007, 2107))
        assert len(cluster.actors) == 5  # two, a replacement, and two new actors for the changed data


def test_actors_of_a_dead_machine_count_as_one_death_and_the_remaining_actors_continue(cluster):
    with make_loader(Numbers(400), count=3, faults=gl.Faults(max_restarts=1)) as loader:
        cluster.nodes_in_turn = ["a", "a", "b"]
        epoch, seen = start_epoch(loader)
        cluster.nodes_in_turn = ["dead", None, None]  # no machine can replace them
        for actor in cluster.actors[:2]:
            actor.die()
        assert seen + flatten(epoch) == list(range(400))
        assert len(loader._session.engine.deaths.causes) == 1


def test_more_deaths_than_max_restarts_end_the_epoch(cluster):
    expected = r"died 2 times .*status 7 at sample 5 \(position 5\) on "
    dataset, faults = Numbers(64, 5, exit_with_7), gl.Faults(max_restarts=1)
    with make_loader(dataset, faults=faults) as loader, pytest.raises(gl.WorkerError, match=expected):
        list(loader)


def test_an_actor_that_hangs_is_replaced_after_the_timeout(cluster):
    with make_loader(Numbers(400), timeout=0.5) as loader:
        epoch, seen = start_epoch(loader)
        cluster.actors[1].hangs = True
        assert seen + flatten(epoch) == list(range(400))
        assert "no answer for 2 seconds" in loader._session.engine.deaths.causes[0]


def test_a_lost_object_is_loaded_again(cluster, monkeypatch):
    real_get, lost = cluster.get, []

    def get(call):
        if type(real_get(call)).__name__ == "Done" and not lost:
            lost.append(call)
            raise RayError("the machine of the object has died")
        return real_get(call)

    monkeypatch.setattr(cluster, "get", get)
    with make_loader() as loader:
        assert flatten(loader) == list(range(64))
        assert lost
        assert not loader._session.engine.deaths.causes


def test_an_error_of_worker_init_fn_keeps_its_type_and_names_the_machine(cluster):
    expected = r"(?s)worker_init_fn raised.*not available.*a machine of the Ray"
    with (
        make_loader(worker_init_fn=lambda worker: raise_lookup_error()) as loader,
        pytest.raises(LookupError, match=expected) as caught,
    ):
        iter(loader)
    assert isinstance(caught.value, gl.WorkerError)


def test_an_actor_that_waits_for_a_machine_is_warned_of(cluster, monkeypatch):
    monkeypatch.setattr(ray_module, "SLOW_S", 0.1)
    cluster.nodes_in_turn = [None]
    expected = "worker 0 is waiting for a machine with 1 free CPUs: 1 of the cluster's 4 CPUs"
    with make_loader(count=1) as loader, pytest.raises(RuntimeWarning, match=expected):
        next(iter(loader))


def test_a_different_version_of_pillow_is_warned_of_and_of_gpuload_is_refused(cluster, monkeypatch):
    def set_versions(**versions):
        def initialize_and_change(host, *arguments):
            initialize(host, *arguments)
            host._report.versions.update(versions)

        monkeypatch.setattr(Host, "__init__", initialize_and_change)

    initialize = Host.__init__
    set_versions(pillow="1.0")
    with make_loader() as loader, pytest.warns(RuntimeWarning, match=r"has pillow 1\.0 \(here .*its pixels may differ"):
        assert flatten(loader) == list(range(64))
    set_versions(gpuload="9")
    expected = r"has gpuload 9 \(here .*; install the same versions"
    with make_loader() as loader, pytest.raises(gl.WorkerError, match=expected):
        list(loader)


def test_a_shutdown_of_ray_in_mid_epoch_raises_worker_error(cluster):
    with make_loader() as loader:
        epoch = iter(loader)
        next(epoch)
        cluster.up = False
        with pytest.raises(gl.WorkerError, match="Ray was shut down while"):
            list(epoch)


def test_an_iterable_dataset_continues_with_a_new_actor_after_a_death(cluster):
    class Stream:
        def __iter__(self):
            info = gl.get_worker_info()
            yield from range(info.id, 48, info.num_workers)

    expected = [list(range(start + worker, start + 16, 2)) for start in (0, 16, 32) for worker in (0, 1)]
    with make_loader(Stream()) as loader:
        epoch = iter(loader)
        batches = [next(epoch).tolist()]
        cluster.actors[0].die()
        assert batches + [batch.tolist() for batch in epoch] == expected
        assert len(cluster.actors) == 3
    assert [actor for actor in cluster.actors if actor.alive] == []


def test_slots_of_an_actor_are_released_and_each_worker_has_at_most_three_chunks(cluster):
    pictures = [(np.full((64, 64, 3), number % 256, np.uint8), number) for number in range(200)]
    with make_loader(pictures, count=2, per_actor=2) as loader:
        for images, labels in loader:
            assert images[:, 0, 0, 0].tolist() == labels.tolist()
        [actor] = cluster.actors
        assert actor.host._ring.slots <= 6
        assert not actor.host._in_flight


def test_a_chunk_too_large_for_its_slot_is_sent_and_read_once(cluster, monkeypatch):
    monkeypatch.setattr(Feed, "_enlarge", lambda feed, part, need_bytes: pytest.fail(f"done again: {need_bytes} bytes"))
    pictures = [(np.full((600, 600, 3), number, np.uint8), number) for number in range(40)]
    real_get = cluster.get

    def get(call):
        result = real_get(call)
        assert getattr(getattr(result, "event", None), "data", None) is None  # the bytes would be sent twice
        return result

    monkeypatch.setattr(cluster, "get", get)
    with make_loader(pictures, count=2, per_actor=2) as loader:
        for _ in range(2):
            for images, labels in loader:
                assert images.amin((1, 2, 3)).tolist() == images.amax((1, 2, 3)).tolist() == labels.tolist()
        [actor] = cluster.actors
        assert not actor.host._in_flight
        actor.host._ring.collect()
        assert actor.host._ring.used_bytes == 0
        assert loader._session.ring.used_bytes == 0


def test_memory_and_locks_shared_with_local_processes_are_refused(cluster):
    spawn = multiprocessing.get_context("spawn")
    expected = r"dataset\.shared.* \(an? .*workers on other machines cannot"
    for shared in (torch.zeros(3).share_memory_(), spawn.Value("i"), spawn.Lock()):
        dataset = Numbers()
        dataset.shared = shared
        with make_loader(dataset) as loader, pytest.raises(TypeError, match=expected):
            next(iter(loader))


def test_a_slow_sample_is_warned_of_with_its_machine(cluster, monkeypatch):
    monkeypatch.setattr("gpuload.workers.pool.WATCH_INTERVAL_S", 0.05)
    expected = rf"(?s)has been at sample 50 .*set timeout=… to kill and .*in sleep_60_s.*\(on {os.uname().nodename}\)"
    with make_loader(Numbers(64, 50, sleep_60_s), count=1) as loader:
        epoch = iter(loader)
        next(epoch)
        monkeypatch.setattr("gpuload.workers.pool.SLOW_SAMPLE_S", 0.1)
        with pytest.raises(RuntimeWarning, match=expected):
            list(epoch)


def test_an_actor_recovers_both_slots_from_a_dead_worker_and_an_idle_one(cluster):
    with make_loader(Numbers(32), per_actor=2, ring_bytes=2 * GRANULE_BYTES) as loader:
        epoch = iter(loader)
        loader._session.feed.await_engine()
        seen = flatten([next(epoch)])  # uses both slots; the next chunks are requested with the next batch
        host = cluster.actors[0].host
        first_pid, second_pid = host._pool.pids
        stop_processes(first_pid, second_pid)

        async def lose_both_chunks() -> None:
            """Act as if the first worker had taken both chunks and died before it noted them."""
            while len(host._pool._in_flight) < 2:
                await asyncio.sleep(0.002)
            assert len(host._pool._queues[0].withdraw()) == 2
            os.kill(first_pid, signal.SIGKILL)
            os.kill(second_pid, signal.SIGCONT)

        future = cluster.do(lose_both_chunks())
        assert seen + flatten(epoch) == list(range(32))
        future.result(60)
        assert len(loader.errors) == 0
        assert len(loader._session.engine.deaths.causes) == 1
        assert second_pid not in host._pool.pids
