"""What it costs to have workers on another machine: CPU time of this process, and of all that Ray runs, for each chunk.

Two nodes of a Ray cluster on this machine, each with an object store of its own: chunks go from one to the other over
the loopback interface. Beside them processes of this machine, which do the same work. CPU times are counted, not the
clock: the machine has to do the work of both sides.

    python -m benchmarks.ray_link [--photos DIR]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import gpuload as gl
from benchmarks.machine import cpu_model
from gpuload import transforms as T
from gpuload.cli.processes import tree
from gpuload.decode import Decode
from gpuload.ring.ring import Ring
from gpuload.transforms import Chain
from gpuload.workers.job import Job
from gpuload.workers.pool import WorkerPool
from gpuload.workers.protocol import Reply, Request
from gpuload.workers.ray import RayPool, RayWorkers

ROWS = 32
SIDES = (64, 224, 512)
WORKERS = 2


class Grey:
    """Images that cost nothing to make."""

    def __init__(self, side: int) -> None:
        self.image = np.full((side, side, 3), 128, np.uint8)

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> gl.Image:
        return gl.Image(self.image)


class Meter:
    """CPU seconds by part: this process, Ray's daemons on each node, the actors, the workers."""

    def __init__(self, cluster: Any, far: Any) -> None:
        self.daemons = {"raylet here": cluster.head_node, "raylet there": far}

    def read(self) -> dict[str, float]:
        seconds = {"this process": time.process_time()}
        for name, node in self.daemons.items():
            seconds[name] = _own_seconds(node.all_processes["raylet"][0].process.pid)
        seconds["actors"] = seconds["workers"] = 0.0
        for pid in tree(os.getpid()):
            command = _command(pid)
            if "Host" in command:
                seconds["actors"] += _own_seconds(pid)
            elif "bootstrap.py" in command:
                seconds["workers"] += _own_seconds(pid)
        return seconds


def _own_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def chunks(engine: Any, ring: Ring, slot_bytes: int) -> Iterator[None]:
    """Have chunks done, as many at a time as the engine takes or 2 for each worker; one for each `next`."""
    number, flying = 0, {}
    while True:
        while len(flying) < 2 * WORKERS:
            slot = ring.acquire(slot_bytes)
            assert slot is not None
            rows = np.arange(number * ROWS, (number + 1) * ROWS)
            if not engine.submit(Request(number, 0, slot.offset, slot.capacity_bytes, rows, rows)):
                break
            flying[number] = slot
            number += 1
        for event in engine.gather(1.0):
            assert isinstance(event, Reply), event
            ring.release(flying.pop(event.chunk))
            yield


def measure(make: Callable[[Job, Ring], Any], side: int, meter: Meter, count: int, repeats: int) -> dict[str, float]:
    """CPU milliseconds for a chunk, by part: the least of several repeats."""
    ring = Ring(1 << 30)
    engine = make(Job(Grey(side), Chain([]), Decode(), 0), ring)
    done = chunks(engine, ring, ROWS * (3 * side * side + 64) + 4096)
    best: dict[str, float] = {}
    try:
        for _ in range(4 * WORKERS):
            next(done)
        for _ in range(repeats):
            before = meter.read()
            for _ in range(count):
                next(done)
            spent = {part: 1e3 * (after - before[part]) / count for part, after in meter.read().items()}
            best = {part: min(value, best.get(part, value)) for part, value in spent.items()}
    finally:
        engine.close()
        ring.close()
    return {part: round(value, 3) for part, value in best.items()}


def photographs(folder: str, meter: Meter, **workers: Any) -> dict[str, float]:
    """CPU microseconds for an image of the usual recipe, by part."""
    chain = [
        T.RandomResizedCrop(224),
        T.RandomHorizontalFlip(),
        T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ]
    best: dict[str, float] = {}
    options: Any = {
        "batch_size": 64,
        "shuffle": True,
        "transforms": chain,
        "device": "cpu",
        "chunk_size": ROWS,
        **workers,
    }
    with gl.Loader(gl.ImageFiles(folder), **options) as loader:
        for _ in range(4):
            before, images = meter.read(), 0
            for _ in range(8):
                images += sum(len(batch) for batch in loader)
            spent = {part: 1e6 * (after - before[part]) / images for part, after in meter.read().items()}
            best = {part: min(value, best.get(part, value)) for part, value in spent.items()}
    return {part: round(value) for part, value in best.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", help="a folder of JPEGs: measure the usual recipe too")
    parser.add_argument("--chunks", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=4)
    options = parser.parse_args()

    import ray
    from ray.cluster_utils import Cluster

    store = {"object_store_memory": 1 << 30}
    cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **store})
    far = cluster.add_node(num_cpus=WORKERS, **store)
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    meter = Meter(cluster, far)
    there = RayWorkers(count=WORKERS, workers_per_actor=WORKERS)
    engines: dict[str, Callable[[Job, Ring], Any]] = {
        "here": lambda job, ring: WorkerPool(job, WORKERS, ring),
        "there": lambda job, ring: RayPool(job, there, ring),
    }
    found: dict[str, Any] = {
        "machine": cpu_model(),
        "ray": ray.__version__,
        "rows": ROWS,
        "chunks": {},
        "photographs": {},
    }
    for side in SIDES:
        for name, make in engines.items():
            megabytes = ROWS * 3 * side * side / 1e6
            spent = measure(make, side, meter, options.chunks, options.repeats)
            found["chunks"][f"{name}, {megabytes:.2f} MB"] = spent
            print(f"{name:5} {megabytes:6.2f} MB a chunk, CPU ms:", spent, flush=True)
    if options.photos:
        for name, workers in (("here", {"num_workers": WORKERS}), ("there", {"workers": there})):
            found["photographs"][name] = spent = photographs(options.photos, meter, **workers)
            print(f"{name:5} photographs, CPU µs an image:", spent, flush=True)
    ray.shutdown()
    cluster.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
