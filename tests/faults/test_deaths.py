"""Workers of a Loader that die or hang: every good sample arrives once, and the bad one is reported."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import time
from collections.abc import Container
from pathlib import Path

import numpy as np
import pytest
from helpers.processes import wait_until

import gpuload as gl
from gpuload import transforms as T
from gpuload.ring.ring import GRANULE_BYTES
from gpuload.workers import pool as pool_module

pytestmark = pytest.mark.filterwarnings("ignore:sample .* Further failures are only recorded:RuntimeWarning")


class DeadlySample:
    """Images with their numbers. The samples in `bad` call `act`, at most `times` times in all processes."""

    def __init__(self, samples: int, folder: Path, bad: Container[int], act, times: int = 10**9) -> None:
        self.samples, self.folder, self.bad, self.act, self.times = samples, str(folder), bad, act, times

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index):
        if index in self.bad:
            calls = len(os.listdir(self.folder))
            if calls < self.times:
                Path(self.folder, f"{calls}-{os.getpid()}").touch()
                self.act()
        return np.full((4, 4, 3), index % 251, np.uint8), index

    @property
    def calls(self) -> int:
        return len(os.listdir(self.folder))


def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)


def exit_with_7():
    os._exit(7)


def read_null():
    ctypes.string_at(0)


def abort():
    os.abort()


def hang():
    time.sleep(1000)


def hang_in_c():
    ctypes.CDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)


def loaded_numbers(batches):
    return [number for _, labels in batches for number in labels.tolist()]


def make_loader(dataset, workers=2, batch_size=8, **options):
    return gl.Loader(dataset, batch_size, num_workers=workers, device="cpu", **options)


class DeadlyStream:
    """The numbers 0 … 7. The n-th process that iterates over them exits at the number `exit_numbers[n]`."""

    def __init__(self, folder: Path, exit_numbers: list[int]) -> None:
        self.folder, self.exit_numbers = str(folder), exit_numbers

    def __iter__(self):
        process_number = len(os.listdir(self.folder))
        Path(self.folder, str(os.getpid())).touch()
        exit_number = self.exit_numbers[process_number] if process_number < len(self.exit_numbers) else None
        for number in range(8):
            if number == exit_number:
                exit_with_7()
            yield number


@pytest.mark.parametrize("batch_size", [1, 4])
def test_deaths_on_the_way_to_a_sample_of_an_iterable_dataset_do_not_count_against_it(tmp_path, batch_size):
    dataset = DeadlyStream(tmp_path, [6, 1, 2, 3])
    with make_loader(dataset, 1, batch_size) as loader:
        assert [number for batch in loader for number in batch.tolist()] == list(range(8))
        assert len(loader.errors) == 0
    assert len(os.listdir(tmp_path)) == 5  # processes, of which the last reached the end


class DeadlyState(DeadlyStream):
    """A `DeadlyStream` with a state. A process exits while it resumes if its exit number is before the state."""

    def __init__(self, folder: Path, exit_numbers: list[int]) -> None:
        super().__init__(folder, exit_numbers)
        self.number = 0

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        process_number = len(os.listdir(self.folder))
        if process_number < len(self.exit_numbers) and self.exit_numbers[process_number] < state["number"]:
            Path(self.folder, str(os.getpid())).touch()
            exit_with_7()
        self.number = state["number"]

    def __iter__(self):
        start = self.number
        for number in super().__iter__():
            if number >= start:
                self.number = number + 1
                yield number


def test_deaths_while_an_iterable_dataset_resumes_do_not_count_against_a_sample(tmp_path):
    with make_loader(DeadlyState(tmp_path, [6, 1, 2, 3]), 1, 1) as loader:
        assert [number for batch in loader for number in batch.tolist()] == list(range(8))
    assert len(os.listdir(tmp_path)) == 5


def test_a_sample_of_an_iterable_dataset_that_kills_two_workers_is_bad(tmp_path):
    dataset = DeadlyStream(tmp_path, [6, 1, 6])
    with make_loader(dataset, 1, 1) as loader, pytest.raises(gl.SampleError) as caught:
        list(loader)
    assert caught.value.position == 6
    assert caught.value.cause == "WorkerError: 2 workers died while processing only this sample: exited with status 7"


def test_too_many_deaths_name_the_sample_that_the_workers_were_on_the_way_to(tmp_path):
    dataset = DeadlyStream(tmp_path, [6, 1, 1])
    with (
        make_loader(dataset, 1, 1, faults=gl.Faults(max_restarts=2)) as loader,
        pytest.raises(gl.WorkerError, match=r"exited with status 7 on the way to sample 6 \(position 6\)"),
    ):
        list(loader)


@pytest.mark.parametrize("act", [kill_self, exit_with_7, read_null, abort])
@pytest.mark.parametrize("workers", [1, 2])
def test_after_one_death_every_sample_arrives_once(tmp_path, act, workers):
    dataset = DeadlySample(80, tmp_path, [13], act, times=1)
    with make_loader(dataset, workers) as loader:
        assert loaded_numbers(loader) == list(range(80))
        assert len(loader.errors) == 0
    assert dataset.calls == 1


@pytest.mark.parametrize(("act", "deaths", "cause"), [
    (read_null, 3, "2 workers died while processing only this sample: killed by SIGSEGV"),
    (exit_with_7, 3, "2 workers died while processing only this sample: exited with status 7"),
    (kill_self, 4, "3 workers died while processing only this sample: killed by SIGKILL"),
])  # fmt: skip
@pytest.mark.parametrize("on_error", ["raise", "skip", "replace"])
def test_a_sample_that_kills_its_workers_alone_is_a_bad_sample(tmp_path, act, deaths, cause, on_error):
    dataset = DeadlySample(80, tmp_path, [13], act)
    with make_loader(dataset, on_error=on_error) as loader:
        batches = iter(loader)
        next(batches)
        if on_error == "raise":
            with pytest.raises(gl.SampleError, match=r"sample 13, at position 13 .*" + cause):
                next(batches)
        seen = loaded_numbers(batches)
        [entry] = loader.errors
        assert (entry.index, entry.position, entry.cause) == (13, 13, f"WorkerError: {cause}")
        assert ("in read_null" in entry.traceback) == (act is read_null)
    expected = [number for number in range(8, 80) if number != 13]
    if on_error == "raise":
        assert seen == list(range(16, 80))
    elif on_error == "skip":
        assert seen == expected
    else:
        assert seen == [entry.replaced_by if number == 13 else number for number in range(8, 80)]
    # The sample is loaded with others and then alone. It is loaded once more if a worker had taken the chunk but could
    # not note it before the chunk was declared lost, since the machine was busy.
    assert deaths <= dataset.calls <= deaths + 1


def test_a_sample_may_be_killed_from_outside_once_more_than_it_may_crash(tmp_path):
    dataset = DeadlySample(80, tmp_path, [13], kill_self, times=3)
    with make_loader(dataset) as loader:
        assert loaded_numbers(loader) == list(range(80))
    assert dataset.calls == 3


@pytest.mark.parametrize("act", [hang_in_c, hang])
def test_a_sample_that_hangs_is_ended_by_the_timeout_and_listed_with_its_stack(tmp_path, act):
    dataset = DeadlySample(40, tmp_path, [13], act)
    with make_loader(dataset, timeout=0.4, on_error="skip") as loader:
        assert loaded_numbers(loader) == [number for number in range(40) if number != 13]
        [entry] = loader.errors
    assert entry.cause == (
        "WorkerError: 2 workers died while processing only this sample: no progress for timeout=0.4 seconds"
    )
    assert "in __getitem__" in entry.traceback


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_dataset_that_hangs_costs_each_worker_at_most_three_kills_before_the_error(tmp_path, workers):
    with make_loader(DeadlySample(80, tmp_path, range(80), hang), workers, 64, timeout=0.2) as loader:
        with pytest.raises(
            gl.SampleError, match=r"WorkerError: 2 workers died .*: no progress for timeout=0.2 seconds"
        ):
            next(iter(loader))
        assert len(loader._session.engine.deaths.causes) <= 3 * workers


def test_timeout_does_not_count_while_workers_wait_for_a_slow_consumer(tmp_path, monkeypatch):
    class OneHourLater:
        monotonic = staticmethod(lambda: time.monotonic() + 3600)
        monotonic_ns = staticmethod(lambda: time.monotonic_ns() + 3600 * 10**9)
        perf_counter = staticmethod(time.perf_counter)

    dataset = DeadlySample(64, tmp_path, [], exit_with_7)
    with make_loader(dataset, timeout=60, batch_size=4) as loader:
        seen = []
        for _, labels in loader:
            seen += labels.tolist()
            feed, pool = loader._session.feed, loader._session.engine
            feed.await_engine()  # the time that workers take to start is not tested here
            wait_until(lambda feed=feed, pool=pool: feed.pump(0.01) or not pool._in_flight, "workers wait for chunks")
            with monkeypatch.context() as patch:
                patch.setattr(pool_module, "time", OneHourLater)
                checked_at = pool._checked_at
                pool.collect_events(0.0)
                assert pool._checked_at > checked_at + 3500  # about an hour later
                pool._checked_at = checked_at
        assert seen == list(range(64))
        assert not loader._session.engine.deaths.causes


def test_more_deaths_than_max_restarts_end_the_epoch_with_their_cause_and_sample(tmp_path):
    with make_loader(DeadlySample(80, tmp_path, range(80), exit_with_7), 1, faults=gl.Faults(max_restarts=2)) as loader:
        expected = (
            r"died 3 times in this epoch, more than max_restarts=2 allows: exited with status 7 at sample 0 "
            r"\(position 0\) \(3 times\)\. .*num_workers=0.*Faults\(max_restarts=…\)"
        )
        iterator = iter(loader)
        for text in (expected, "this epoch has failed"):
            with pytest.raises(gl.WorkerError, match=text):
                next(iterator)
        # The next epoch starts with new workers and a new count.
        with pytest.raises(gl.WorkerError, match="died 3 times"):
            next(iter(loader))


def test_workers_killed_at_random_cost_no_sample_and_repeat_none(jpeg_folder):
    dataset = gl.ImageFolder(jpeg_folder)
    generator = random.Random(0)
    faults = gl.Faults(max_restarts=10**6)
    options = {"transforms": [T.CenterCrop(32)], "faults": faults, "info": True, "chunk_size": 2}
    with gl.Loader(dataset, 5, True, num_workers=2, device="cpu", **options) as loader:
        kills = 0
        for _ in range(6):
            seen = []
            for step, (_, info) in enumerate(loader):
                seen += info.indices.tolist()
                if step % 3 == 1:
                    pids = loader._session.engine.pids
                    kills += 1
                    with contextlib.suppress(ProcessLookupError):  # the worker is dead already and not replaced yet
                        os.kill(generator.choice(pids), signal.SIGKILL)
            assert sorted(seen) == list(range(len(dataset)))
        assert len(loader.errors) == 0
    assert kills >= 18  # three in each of six epochs


KILLS = 100


class DiesBeforeNoting(DeadlySample):
    """A dataset whose workers die at their second chunk, before they note it, until `KILLS` workers have died."""

    def __getitem__(self, index):
        return np.full((4, 4, 3), index % 251, np.uint8), index

    def __setstate__(self, state):
        from gpuload.workers import main

        self.__dict__.update(state)
        process_request, taken_chunks = main._process_request, []

        def die_or_process(request, *arguments):
            taken_chunks.append(request.chunk)
            if len(taken_chunks) == 2 and self.calls < KILLS:
                Path(self.folder, str(os.getpid())).touch()
                kill_self()
            return process_request(request, *arguments)

        main._process_request = die_or_process


@pytest.mark.slow
def test_workers_killed_between_taking_a_chunk_and_noting_it_cost_no_slot_of_two(tmp_path):
    dataset = DiesBeforeNoting(48, tmp_path, [], exit_with_7)
    options = {"ring_bytes": 2 * GRANULE_BYTES, "chunk_size": 4, "faults": gl.Faults(max_restarts=10**6)}
    with make_loader(dataset, **options) as loader:
        while dataset.calls < KILLS:
            assert loaded_numbers(loader) == list(range(48))
        assert loaded_numbers(loader) == list(range(48))
        assert len(loader.errors) == 0
        pool, ring = loader._session.engine, loader._session.ring
        wait_until(lambda: pool.collect_events(0.01) or not pool.recover_slots(), "no slot is written off")
        assert ring.used_bytes == 0
        slots = [ring.acquire(GRANULE_BYTES) for _ in range(3)]
        assert [slot is None for slot in slots] == [False, False, True]


class DrawsTogether:
    """Random numbers that are read together. The first worker that reads sample 13 dies if there is a `marker`."""

    def __init__(self, marker):
        self.marker = marker

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return self.__getitems__([index])[0]

    def __getitems__(self, indices):
        if 13 in indices and self.marker and not os.path.exists(self.marker):
            open(self.marker, "x").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return np.random.random(len(indices)).tolist()


def test_samples_that_are_read_together_have_the_same_random_numbers_after_a_workers_death(tmp_path):
    epochs = []
    for marker in ("", str(tmp_path / "died")):
        with gl.Loader(DrawsTogether(marker), 10, num_workers=2, device="cpu", seed=3, chunk_size=5) as loader:
            epochs.append([batch.tolist() for batch in loader])
            assert loader.stats().faults.restarts == bool(marker)
    assert epochs[0] == epochs[1]
