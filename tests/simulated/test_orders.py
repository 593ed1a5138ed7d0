"""A loader on the simulated device, in every order that events allow: streams, threads, slots, workers and shutdown."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import lacking
from simulated.machine import DIRECTED, POLICIES
from simulated.running import OPTIONS, LoopRun, assert_equal, epochs, on_cpu, on_device, run_loop, with_errors
from simulated.runtime import SimulatedCuda, simulated
from simulated.samples import CHAIN, options, samples

import gpuload as gl
from gpuload import transforms as T
from gpuload.workers.feed import Feed


def stacked(samples: list[Any]) -> dict[str, Any]:
    images, labels = zip(*samples, strict=True)
    return {"images": torch.stack(images), "labels": torch.tensor(labels)}


class Arrays(torch.utils.data.Dataset):
    """Samples with arrays, one of them long, and without images."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, number: int) -> Any:
        return np.random.default_rng(number).integers(0, 99, 500), {"half": np.full((2, 3), number, np.float16)}


class KillsWorker:
    """A dataset that kills the first worker that reads sample 9."""

    def __init__(self, marker: Any) -> None:
        self.marker = str(marker)
        self.samples = samples()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> Any:
        import os
        import signal

        if number == 9 and not os.path.exists(self.marker):
            open(self.marker, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.samples[number]


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "images": options,
    "views": lambda: options(transforms=[T.MultiView([CHAIN, CHAIN[:1] + CHAIN[2:]])]),
    "mixed": lambda: options(transforms=[*CHAIN, T.MixUp(num_classes=30)]),
    "collated": lambda: options(collate_fn=stacked),
    "blocks": lambda: {"dataset": Arrays(), "transforms": []},
    "informed": lambda: options(info=True, drop_last=False, batch_size=5),
    "lists": lambda: options(dataset=samples(12), transforms=[T.RandomResize(8, 12)], ragged="list"),
    "padded": lambda: options(dataset=samples(12), transforms=[T.RandomResize(8, 12)], ragged="pad"),
    "padded to 16": lambda: options(dataset=samples(12), transforms=[T.RandomResize(8, 12)], ragged="pad", pad_to=16),
    "channels last": lambda: options(memory_format="channels_last", dtype="float16"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_every_kind_equal_those_of_the_cpu_under_every_policy(kind):
    loader_options = KINDS[kind]()
    expected = on_cpu(loader_options)
    for policy in POLICIES:
        run = on_device(loader_options, policy, seed=len(kind))
        assert_equal(run.values, expected)
        assert run.unexpected_waits == []


@pytest.mark.parametrize(("policy", "functions"), [("eager", set()), ("side first", {"hold_back"})])
def test_host_waits_for_a_slow_consumer_in_hold_back_only(policy, functions):
    assert {wait.function for wait in on_device(options(), policy).waits} == functions


def test_host_sleeps_while_it_waits_for_the_consumer_and_for_slots():
    """With an event of a generic stream the host would spin, which takes a CPU from the workers."""
    waits = on_device(options(ring_bytes=4096 * 2, chunk_size=1, batch_size=12), "lazy").waits
    kinds = {(wait.function, wait.what) for wait in waits if wait.function != "_fill"}  # _fill copies pageable memory
    assert kinds == {("hold_back", "blocking event"), ("reclaim", "blocking event")}


def test_host_sleeps_while_close_waits_for_the_device():
    with simulated("lazy") as cuda:
        loader = gl.Loader(**OPTIONS | options(device="cuda"))
        next(iter(loader))
        cuda.waits.clear()
        loader.close()
        assert {wait.what for wait in cuda.waits} == {"blocking event"}


# -- slots ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", DIRECTED)
def test_slots_that_grow_are_locked_again_and_all_are_unlocked(policy):
    """The images of the second half need larger slots, which replace the initial slots."""
    rng = np.random.default_rng(1)
    growing = [(rng.integers(0, 256, (14, 16 if n < 12 else 60, 3), np.uint8), n) for n in range(24)]
    loader_options = options(dataset=growing, chunk_size=2, ring_bytes=1 << 18)
    run = on_device(loader_options, policy)
    assert_equal(run.values, on_cpu(loader_options))
    assert run.unexpected_waits == []
    assert run.locked_ranges == 0


@pytest.mark.parametrize("policy", DIRECTED)
def test_chunks_larger_than_their_slots_are_copied_from_separate_memory(policy, monkeypatch):
    """The host waits for copies of separate memory, which is not page-locked."""
    is_separate, store = [], Feed._store_result
    monkeypatch.setattr(
        Feed, "_store_result", lambda *args: is_separate.append(args[-1].data is not None) or store(*args)
    )
    rng = np.random.default_rng(1)
    large = [(rng.integers(0, 256, (360, 340, 3), np.uint8), n) for n in range(24)]
    loader_options = options(dataset=large, transforms=CHAIN[1:])
    expected = on_cpu(loader_options)
    is_separate.clear()
    assert_equal(on_device(loader_options, policy).values, expected)
    assert 0 < sum(is_separate) < len(is_separate)


@pytest.mark.parametrize("policy", DIRECTED)
@pytest.mark.parametrize("locks", [0, 1])
def test_refused_page_locks_warn_and_give_the_same_batches(policy, locks):
    """The host waits for copies of memory that is not page-locked."""
    with pytest.warns(RuntimeWarning, match="refused to page-lock"):
        run = on_device(options(chunk_size=1), policy, most_locks=locks)
    assert_equal(run.values, on_cpu(options(chunk_size=1)))
    assert {wait.function for wait in run.unexpected_waits} <= {"_fill"}


# -- streams and threads ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", DIRECTED)
def test_batches_stay_intact_on_two_consumer_streams_in_turn(policy):
    with simulated(policy) as cuda, gl.Loader(**OPTIONS | options(device="cuda")) as loader:
        streams, clones = (cuda.stream(), cuda.stream()), []
        for number, batch in enumerate(iterate(loader, cuda, streams)):
            with cuda.on(streams[number % 2]):
                clones.append([tensor.clone() for tensor in batch])
            del batch
        on_host = [[cuda.on_host(tensor) for tensor in batch] for batch in clones]
    assert_equal(on_host, [list(batch) for batch in on_cpu(options())])


def iterate(loader: Any, cuda: SimulatedCuda, streams: Any) -> Any:
    """Call `next()` for each batch on the stream that reads it."""
    iterator, number = iter(loader), 0
    while True:
        with cuda.on(streams[number % 2]):
            try:
                batch = next(iterator)
            except StopIteration:
                return
        yield batch
        del batch
        number += 1


@pytest.mark.parametrize("policy", DIRECTED)
def test_next_in_another_thread_gives_the_same_batches(policy):
    """A thread has its own current stream, on which `next()` makes the batches available."""
    with simulated(policy) as cuda, gl.Loader(**OPTIONS | options(device="cuda")) as loader:
        stream, runs = cuda.stream(), []

        def fetch() -> None:
            with cuda.on(stream):
                runs.append(run_loop(loader, cuda, stream))

        thread = threading.Thread(target=fetch)
        thread.start()
        thread.join()
    assert_equal(runs[0].values, on_cpu(options()))
    assert runs[0].unexpected_waits == []


@pytest.mark.parametrize("policy", DIRECTED)
@pytest.mark.parametrize("device", [0, 1])
def test_loader_works_on_a_device_that_is_not_the_current_one(policy, device):
    with simulated(policy) as cuda:
        run = run_loop(epochs(options(device=f"cuda:{device}")), cuda, cuda.stream(1 - device))
    assert_equal(run.values, on_cpu(options()))


# -- workers ----------------------------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("policy", DIRECTED)
def test_workers_give_the_batches_of_the_cpu_also_after_one_dies(policy, tmp_path):
    loader_options = options(dataset=KillsWorker(tmp_path / "died"), num_workers=2, chunk_size=2)
    run = on_device(loader_options, policy)
    assert (tmp_path / "died").exists()
    assert_equal(run.values, on_cpu(options()))
    assert run.unexpected_waits == []


# -- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", DIRECTED)
def test_epoch_after_an_interrupted_one_gives_the_same_batches(policy):
    def drive(loader_options: dict[str, Any]) -> Any:
        with gl.Loader(**loader_options) as loader:
            for step, batch in enumerate(loader):
                yield batch
                if step == 2:
                    break
            loader.set_epoch(0)
            yield from loader

    assert_equal(on_device(options(), policy, drive).values, on_cpu(options(), drive))


@pytest.mark.parametrize("policy", DIRECTED)
def test_close_waits_for_copies_and_unlocks_all_slots(policy):
    with simulated(policy) as cuda:
        loader = gl.Loader(**OPTIONS | options(device="cuda", chunk_size=1))
        iterator = iter(loader)
        images, _ = next(iterator)
        assert cuda.locked_ranges() > 0
        loader.close()
        assert cuda.locked_ranges() == 0
        images_on_host = cuda.on_host(images)
    assert torch.equal(images_on_host, on_cpu(options())[0][0])


@pytest.mark.parametrize("policy", DIRECTED)
def test_failed_batch_returns_its_slots(policy):
    def broken(images: torch.Tensor) -> torch.Tensor:
        calls.append(len(images))
        if len(calls) % 3 == 2:
            raise ValueError("cannot transform")
        return images + 1

    calls: list[int] = []
    loader_options = options(transforms=[*CHAIN[:2], T.Lambda(broken)], ring_bytes=1 << 14, chunk_size=1)
    run = on_device(loader_options, policy, with_errors)
    calls.clear()
    expected = on_cpu(loader_options, with_errors)
    assert sum(isinstance(value, str) for value in expected) == 2  # the second and the fifth of six batches
    assert_equal(run.values, expected)


@lacking.skip_on_fake_cuda("the simulated device")
def test_error_of_the_device_is_raised_and_the_loader_closes():
    with simulated("lazy") as cuda:
        loader = gl.Loader(**OPTIONS | options(device="cuda", dataset=samples(96)))
        iterator = iter(loader)
        next(iterator)
        cuda.fail()
        with pytest.raises(RuntimeError, match="an operation on the device failed: integer division"):
            for _ in iterator:
                pass
        loader.close()
        assert cuda.locked_ranges() == 0


def test_closed_loader_and_its_iterator_keep_no_memory_of_the_device():
    noisy = [*CHAIN[:2], T.GaussianNoise(), CHAIN[2], T.RandomErasing(1.0, value="random")]
    with simulated("lazy") as cuda:
        used_before = cuda.used_bytes()
        loader = gl.Loader(**OPTIONS | options(transforms=noisy, device="cuda"))
        iterator = iter(loader)
        next(iterator)
        assert cuda.used_bytes() > used_before + 256 * 1024  # the batch, and constants such as noise
        loader.close()
        cuda.synchronize()
        assert cuda.used_bytes() <= used_before + 4096  # the constants of the stage that the iterator has
        del loader, iterator
        gc.collect()
        assert cuda.used_bytes() == used_before


def test_dropped_loader_unlocks_all_slots():
    with simulated("lazy") as cuda:
        run: LoopRun = run_loop(gl.Loader(**OPTIONS | options(device="cuda")), cuda)  # nothing closes this loader
        gc.collect()
        cuda.synchronize()
        assert run.locked_ranges > 0, "the loader unlocked its slots before it was dropped"
        assert cuda.locked_ranges() == 0
