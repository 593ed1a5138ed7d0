"""Each argument of a Loader belongs to one group of options, which checks itself when it is built."""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
from collections import Counter
from typing import Any

import pytest

import gpuload as gl
from gpuload.batches.options import BatchOptions
from gpuload.loader.options import Options, WorkerOptions
from gpuload.order.options import OrderOptions
from gpuload.stage.options import StageOptions

# What groups hold of each other; it is no argument of a Loader.
DERIVED = {"mixes", "group", "chain", "single", "planned"}


def given(**changes) -> dict[str, Any]:
    """The arguments of a Loader, with its defaults."""
    parameters = list(inspect.signature(gl.Loader).parameters.values())[1:]
    return {"dataset": list(range(100)), **{one.name: one.default for one in parameters}, **changes}


def test_each_argument_stands_in_one_group():
    groups = (OrderOptions, StageOptions, BatchOptions, WorkerOptions)
    names = Counter(field.name for group in groups for field in dataclasses.fields(group) if field.init)
    names["seed"] -= 1  # batches draw by the order's
    assert dict.fromkeys(given(), 1) == {name: count for name, count in names.items() if name not in DERIVED}


def test_each_group_is_frozen():
    options = Options.of(given(num_workers=0))
    for group in (options, options.order, options.stage, options.batches, options.workers):
        name = dataclasses.fields(group)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(group, name, None)


@pytest.mark.parametrize(
    ("group", "changes", "text"),
    [
        ("order", {"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ("order", {"seed": -1}, "seed must be at least 0, got -1"),
        ("stage", {"device": "tpu"}, "device must be 'cpu', 'cuda'"),
        ("batches", {"ragged": "yes"}, "ragged must be one of 'error', 'list', 'pad', got 'yes'"),
        ("workers", {"timeout": -1}, "timeout must be seconds, 0 for none, got -1"),
        ("workers", {"prefetch_factor": 0}, "prefetch_factor must be at least 1, got 0"),
    ],
)
def test_a_group_that_is_changed_checks_itself_again(group, changes, text):
    options = Options.of(given(num_workers=0))
    with pytest.raises(ValueError, match=text):
        dataclasses.replace(getattr(options, group), **changes)


@pytest.mark.parametrize(
    ("changes", "chunk", "plain"),
    [
        ({"batch_size": 256, "num_workers": 4}, 32, 256),
        ({"batch_size": 256, "num_workers": 3}, 43, 256),
        ({"batch_size": 256, "num_workers": 2}, 64, 256),
        ({"batch_size": 1024, "num_workers": 2}, 64, 1024),
        ({"batch_size": 64, "num_workers": 4}, 16, 64),
        ({"batch_size": 4, "num_workers": 4}, 4, 4),
        ({"batch_size": 64, "num_workers": 4, "chunk_size": 100}, 64, 1),
        ({"batch_size": 64, "num_workers": 4, "chunk_size": 5}, 5, 1),
        ({"batch_size": 64, "num_workers": 4, "collate_fn": list}, 64, 64),
        ({"batch_size": 64, "num_workers": 4, "dataset": iter}, 64, 64),
    ],
)
def test_chunks_are_a_workers_share_of_the_batch(changes, chunk, plain):
    if changes.get("dataset") is iter:
        changes = {**changes, "dataset": {1, 2, 3}}
    options = Options.of(given(**changes))
    assert (options.chunk_size, options.plain_chunk_size) == (chunk, plain)


@pytest.mark.parametrize(("cpus", "most"), [(1, 8), (2, 8), (16, 16)])
def test_more_workers_than_the_cpus_can_run_are_warned_of(cpus, most, monkeypatch):
    monkeypatch.setattr("gpuload.loader.options.usable_cpus", lambda: cpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    gl.Loader([1, 2], num_workers=most)  # a warning would be an error
    suggested = max(1, cpus - 1)
    text = rf"num_workers={most + 1}, but this process may use {cpus} CPUs?: .* The default is {suggested};"
    with pytest.warns(RuntimeWarning, match=text):
        gl.Loader([1, 2], num_workers=most + 1)


def test_the_warning_says_what_so_many_workers_cost(monkeypatch):
    monkeypatch.setattr("gpuload.loader.options.usable_cpus", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.warns(RuntimeWarning) as warned:
        gl.Loader([1, 2], num_workers=40)
    assert str(warned[0].message) == (
        "num_workers=40, but this process may use 2 CPUs: until the first batch, starting so many takes about 6 s of "
        "all CPUs (many times that if the dataset imports torch: 40 on two CPUs took 23 s), and then they take about "
        "1.8 GB of memory. The default is 1; more than there are CPUs help only where reading is slow, and "
        "num_workers='auto' finds out"
    )


# -- "auto" -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cpus", "ranks", "count", "most", "chunk"),
    [
        (1, 1, 1, 16, 16),
        (2, 1, 1, 32, 16),
        (8, 1, 7, 64, 8),
        (64, 1, 8, 64, 8),
        (128, 1, 8, 128, 8),
        (8, 4, 1, 32, 16),
    ],
)
def test_auto_begins_with_few_and_may_have_many_only_if_they_wait(cpus, ranks, count, most, chunk, monkeypatch):
    monkeypatch.setattr("gpuload.loader.options.usable_cpus", lambda: cpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    options = Options.of(given(batch_size=64, num_workers="auto"))
    assert (options.workers.count, options.workers.most, options.chunk_size) == (count, most, chunk)


def test_with_auto_there_is_work_ahead_for_each_worker(monkeypatch):
    monkeypatch.setattr("gpuload.loader.options.usable_cpus", lambda: 2)
    options = Options.of(given(batch_size=64, num_workers="auto", prefetch_factor=3))
    assert [options.ahead_for(count, 3) for count in (1, 2, 4, 8, 32)] == [3, 3, 3, 5, 17]  # chunks of 16
    assert Options.of(given(batch_size=64, num_workers=32, prefetch_factor=3, chunk_size=16)).ahead == 3


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"num_workers": "auto", "dataset": {1, 2}},
            "num_workers='auto' needs a map-style dataset: each worker of an iterable one reads a share of its own, so "
            "another number would change the data; give a number",
        ),
        ({"num_workers": "many"}, "num_workers must be an integer of at least 0 or 'auto', got 'many'"),
        ({"prefetch_factor": "x"}, "prefetch_factor must be an integer of at least 1 or 'auto', got 'x'"),
        (
            {"prefetch_factor": "auto", "workers": gl.RayWorkers(count=2)},
            "prefetch_factor='auto' needs workers on this machine",
        ),
        ({"num_workers": "auto", "workers": gl.RayWorkers(count=2)}, "num_workers='auto' and workers=.* both given"),
    ],
)
def test_where_auto_has_no_meaning_it_is_refused(changes, text):
    with pytest.raises(ValueError, match=text):
        Options.of(given(**changes))


def test_where_there_are_no_worker_processes_auto_means_none(monkeypatch):
    monkeypatch.setattr("sys.platform", "win32")
    assert Options.of(given(num_workers="auto")).workers.count == 0


@pytest.mark.parametrize(
    ("shape", "batch_size", "workers", "chunk"),
    [
        ((256, 256, 3), 256, 2, 64),
        ((256, 256, 3), 256, 15, 64),
        ((256, 256, 3), 256, "auto", 64),
        ((256, 256, 3), 1024, 2, 64),
        ((256, 256, 3), 64, 8, 16),
        ((256, 256, 3), 4, 2, 4),
        ((1024, 1024, 3), 256, 15, 18),  # 3 MB each: five would be enough
        ((4, 256, 256, 3), 256, 15, 18),  # clips are no rows
    ],
)
def test_decoded_images_of_a_file_come_in_larger_chunks(tmp_path, shape, batch_size, workers, chunk):
    path = tmp_path / "images.bin"
    path.touch()
    os.truncate(path, 300 * math.prod(shape))  # a hole
    dataset = gl.ArrayFile(path, dtype="uint8", shape=(300, *shape))
    assert Options.of(given(dataset=dataset, batch_size=batch_size, num_workers=workers)).chunk_size == chunk
    usual = Options.of(given(dataset=range(300), batch_size=batch_size, num_workers=4)).chunk_size
    assert usual == min(max(batch_size // 4, 8), 64 if batch_size == 1024 else 32, batch_size)
