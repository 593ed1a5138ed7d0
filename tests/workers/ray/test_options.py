"""What `RayWorkers` takes, and what a `Loader` makes of it."""

from __future__ import annotations

import re

import pytest

import gpuload as gl


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"count": 0}, ValueError, "RayWorkers(count=…) must be at least 1, got 0"),
        ({"count": "all"}, TypeError, "RayWorkers(count=…) must be an integer, got 'all'"),
        ({"count": True}, TypeError, "RayWorkers(count=…) must be an integer, got True"),
        ({"count": 1, "workers_per_actor": 0}, ValueError, "RayWorkers(workers_per_actor=…) must be at least 1, got 0"),
        ({"count": 1, "address": None}, TypeError, 'RayWorkers(address=…) must be a string such as "auto", got None'),
        (
            {"count": 1, "cpus_per_worker": -1},
            ValueError,
            "RayWorkers(cpus_per_worker=…) must be a number from 0 on, got -1",
        ),
        ({"count": 1, "address": "ray://a:1"}, ValueError, "RayWorkers(address='ray://a:1'): through Ray Client every"),
        ({"count": 1, "actor_options": 3}, TypeError, "RayWorkers(actor_options=…) must be a dict, got 3"),
        (
            {"count": 1, "actor_options": {"num_cpus": 2}},
            ValueError,
            "RayWorkers(actor_options=…) has 'num_cpus', which",
        ),
    ],
)
def test_wrong_arguments_are_refused(given, kind, text):
    with pytest.raises(kind, match=re.escape(text)):
        gl.RayWorkers(**given)


def test_a_loader_takes_them_in_the_place_of_processes():
    loader = gl.Loader(range(100), 10, workers=gl.RayWorkers(count=1000))  # many, and no warning
    assert loader.num_workers == 1000
    with pytest.raises(ValueError, match=r"num_workers=2 and workers=RayWorkers\(.*\) are both given"):
        gl.Loader(range(100), num_workers=2, workers=gl.RayWorkers(count=2))
    with pytest.raises(TypeError, match=r"workers must be a gpuload\.RayWorkers or None, got int: 4; num_workers"):
        gl.Loader(range(100), workers=4)


def test_so_many_batches_are_in_work_that_each_worker_has_two_chunks():
    options = gl.Loader(range(10000), 256, workers=gl.RayWorkers(count=64))._options
    assert (options.chunk_size, options.ahead_for(options.workers.count, 2)) == (32, 16)
    assert gl.Loader(range(10000), 256, workers=gl.RayWorkers(count=2), prefetch_factor=3)._options.ahead_for(2, 3) == 3
