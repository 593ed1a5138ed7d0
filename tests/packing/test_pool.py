"""Workers that pack parts: killed, failing and interrupted workers, programs without a main guard, and Ray."""

from __future__ import annotations

import os
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import lacking
from helpers.fake_ray import Cluster
from helpers.map_datasets import MapDataset
from helpers.processes import wait_until
from helpers.programs import run_python

import gpuload as gl
from gpuload.packing import pool
from gpuload.workers import ray

from .packed_sets import COUNT, Packing, Samples, content, small_jpeg

pytestmark = pytest.mark.processes


def wait_for(path: Path) -> None:
    wait_until(path.exists, f"there is {path}")


def in_workers(action: Callable[[int], Any], samples: int) -> MapDataset:
    """Return a dataset of JPEGs that calls a function first if it is in a worker; a true result replaces the JPEG."""
    main_process = os.getpid()

    def make(index: int) -> Any:
        return (os.getpid() != main_process and action(index)) or small_jpeg(index)

    return MapDataset(make, samples)


def test_killed_or_failing_worker_raises_with_its_cause(tmp_path: Path) -> None:
    def kill(index: int) -> None:
        if index == 5:
            os.kill(os.getpid(), 9)

    def fail(index: int) -> None:
        if index == 5:
            raise RuntimeError("the user's own mistake")

    message = (
        r"^a worker process was killed by SIGKILL while it made part 5, samples 5 to 5\. Run the same command "
        r"again, with fewer workers if memory was short \(finished parts are kept\)$"
    )
    with pytest.raises(gl.WorkerError, match=message):
        gl.pack(in_workers(kill, 8), tmp_path / "set", to="tar", workers=1, shard_bytes=1)
    with pytest.raises(gl.GpuloadError, match=r"(?s)^RuntimeError: the user's own mistake\n\nWhere it happened.*Trace"):
        gl.pack(in_workers(fail, 8), tmp_path / "set", to="tar", workers=1, shard_bytes=1)


def test_sample_that_no_store_can_hold_raises_without_a_traceback(tmp_path: Path) -> None:
    with pytest.raises(gl.GpuloadError, match=r"^sample 0 of .* cannot be packed: a tar takes .* got a str$"):
        gl.pack(in_workers(lambda index: "text", 1), tmp_path / "set", to="tar", workers=1)


def test_full_disk_in_a_worker_raises_without_a_traceback(tmp_path: Path) -> None:
    def limit_file_size(index: int) -> None:  # stands for a full disk
        sys.dont_write_bytecode = True  # else Python leaves truncated files of compiled modules
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))

    message = r"^there is no room for the set in '.*set' \(.*File too large\); raise the limit on the size of files"
    with pytest.raises(gl.GpuloadError, match=message):
        gl.pack(in_workers(limit_file_size, 1), tmp_path / "set", to="tar", workers=1)


def test_idle_worker_that_is_killed_raises_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid_file, part_0_done, part_1_begun = tmp_path / "pid", tmp_path / "done", tmp_path / "begun"
    record_of = pool._record

    def record_and_touch(*arguments: Any) -> Any:
        record = record_of(*arguments)
        if record["part"] == 0:
            part_0_done.touch()
        return record

    def kill_other_worker(index: int) -> None:
        if index == 0:
            pid_file.write_text(str(os.getpid()))
            wait_for(part_1_begun)  # otherwise this worker might also take part 1, and no worker would be killed
            return
        part_1_begun.touch()
        wait_for(part_0_done)  # the other worker is idle
        os.kill(int(pid_file.read_text()), 9)

    monkeypatch.setattr(pool, "_record", record_and_touch)
    result = gl.pack(in_workers(kill_other_worker, 2), tmp_path / "set", to="tar", workers=2, shard_bytes=1)
    assert (result.samples, pid_file.exists()) == (2, True)


@pytest.mark.parametrize("failing_index", [0, 3])
def test_error_at_the_end_of_a_part_is_raised(tmp_path: Path, failing_index: int) -> None:
    """Sample 3 is in the last part, after which the worker gets no other request."""

    class Paths:
        def __getitem__(self, index: int) -> str:
            if index == failing_index:  # read at the end of a part, to check whether its files have changed
                raise RuntimeError("no such path")
            return "none"

    class WithPaths(Samples):
        @property
        def paths(self) -> Paths | None:
            return None if os.getpid() == main_process else Paths()

    main_process = os.getpid()
    with pytest.raises(gl.GpuloadError, match=r"(?s)RuntimeError: no such path.*Where it happened"):
        gl.pack(WithPaths(*map(small_jpeg, range(4))), tmp_path / "set", to="tar", workers=1, shard_bytes=1)


@pytest.mark.parametrize(("shard_bytes", "is_single"), [(1 << 20, True), (1, False)])
def test_single_shard_is_packed_in_the_main_process(tmp_path: Path, shard_bytes: int, is_single: bool) -> None:
    dataset = MapDataset(lambda index: (small_jpeg(index), os.getpid()), 3)
    gl.pack(dataset, tmp_path / "set", to="tar", shard_bytes=shard_bytes)
    pids = {label for _, label in gl.TarShards(tmp_path / "set" / "*.tar", fields=("jpg", "cls"))}
    assert (pids == {os.getpid()}) == is_single


PACK_WITHOUT_A_MAIN_GUARD = """
import os, sys, time
import gpuload as gl

main_process = os.getpid()

class Slow:  # defined in the program itself, which has no main guard
    def __len__(self):
        return 6

    def __getitem__(self, index):
        if index == 4 and len(sys.argv) > 3 and os.getpid() != main_process:
            open(sys.argv[3] + "~", "w").write(str(os.getpid()))
            os.rename(sys.argv[3] + "~", sys.argv[3])
            time.sleep(300)
        return gl.Encoded(open(sys.argv[1], "rb").read())

result = gl.pack(Slow(), sys.argv[2], to="tar", workers=2, shard_bytes=1)
print(result.samples, result.taken_up)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """A function that starts `PACK_WITHOUT_A_MAIN_GUARD` with an image and further arguments."""
    script, image, processes = tmp_path / "program.py", tmp_path / "image.jpg", []
    script.write_text(PACK_WITHOUT_A_MAIN_GUARD)
    image.write_bytes(small_jpeg().data)

    def start_program(*arguments: Path) -> subprocess.Popen[str]:
        command = [sys.executable, *map(str, (script, image, *arguments))]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        processes.append(subprocess.Popen(command, env=environment, text=True, **pipes))
        return processes[-1]

    yield start_program
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_a_program_without_a_main_guard_and_finished_parts_are_reused(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path, signal_number: int
) -> None:
    process = start(tmp_path / "set", tmp_path / "worker-pid")
    wait_for(tmp_path / "worker-pid")
    for part in (0, 1, 2, 3, 5):  # the other worker packs these, while the first one is in part 4
        wait_for(tmp_path / "set" / ".gpuload-pack" / f"{part:05d}.json")
    worker = os.pidfd_open(int((tmp_path / "worker-pid").read_text()))
    process.send_signal(signal_number)
    _, error = process.communicate(timeout=120)  # before the sample's 300 s are over
    assert process.returncode == -signal_number, error
    assert ("KeyboardInterrupt" in error) == (signal_number == signal.SIGINT)
    assert select.select([worker], [], [], 60)[0], "the worker did not end"
    os.close(worker)
    assert start(tmp_path / "set").communicate(timeout=100) == ("6 5\n", "")  # five of six were packed before
    assert start(tmp_path / "other").communicate(timeout=100) == ("6 0\n", "")
    assert content(tmp_path / "set") == content(tmp_path / "other")


PACK_ON_RAY = """
import logging, sys
import gpuload as gl
import ray
ray.init("local", num_cpus=1, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False,
         logging_level=logging.ERROR)  # a cluster of its own, not one that another test has on this machine
for to in ("tar", "lmdb"):  # in parts of the same size as by the fixture `packed`
    gl.pack(gl.ImageFolder(sys.argv[1]), f"{sys.argv[2]}/{to}", to=to, shard_bytes=12_500, ray="auto")
"""


@pytest.mark.slow
@lacking.needs("ray", "lmdb")
def test_packing_on_ray_writes_the_same_bytes_as_in_this_process(folder: Path, packed: Packing, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "RAY_USAGE_STATS_ENABLED": "0"}
    run_python(PACK_ON_RAY, folder, tmp_path / "ray", env=environment, timeout=200)
    for to in ("tar", "lmdb"):
        assert content(tmp_path / "ray" / to) == content(packed(to, f"local {to}"))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    fake_cluster = Cluster()
    for module in (pool, ray):
        monkeypatch.setattr(module, "connect_ray", lambda address, called: fake_cluster)
    yield fake_cluster
    fake_cluster.close()


def test_ray_workers_report_progress_and_are_by_default_one_per_cpu(cluster: Cluster, packed: Packing) -> None:
    samples: list[int] = []
    on_ray = packed("tar", "ray", ray="auto", workers=None, progress=lambda done, total, nbytes: samples.append(done))
    assert (samples[0], samples[-1], len(cluster.actors)) == (0, COUNT, 2)  # 4 CPUs, 2 workers per actor
    assert content(on_ray) == content(packed("tar", "local"))
    packed("tar", "one", ray="auto", workers=1)
    assert len(cluster.actors) == 2 + 1


def test_ray_actor_that_dies_is_replaced_and_its_parts_are_repeated(
    cluster: Cluster, packed: Packing, caplog: pytest.LogCaptureFixture
) -> None:
    def die(done: int, total: int, nbytes: int) -> None:
        if done and len(cluster.actors) == 1:
            cluster.actors[0].die()

    on_ray = packed("tar", "ray", ray="auto", workers=1, progress=die)
    assert content(on_ray) == content(packed("tar", "local"))
    assert "a worker died" in caplog.text


def test_ray_machine_without_the_folder_is_named(
    cluster: Cluster, packed: Packing, monkeypatch: pytest.MonkeyPatch
) -> None:
    original_parts = pool.Parts

    def parts_elsewhere(job: Any, *, is_local: bool) -> Any:
        return original_parts(replace(job, folder="/nowhere"), is_local=is_local)

    monkeypatch.setattr(pool, "Parts", parts_elsewhere)
    message = r"^'/nowhere' does not exist on the machine '.*' of the cluster; put the set"
    with pytest.raises(gl.GpuloadError, match=message):
        packed("tar", ray="auto", workers=1)


def test_missing_ray_cluster_raises(packed: Packing, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: Any) -> None:
        raise ConnectionError(f"nothing\nat {options['address']}")

    module = SimpleNamespace(is_initialized=lambda: False, init=init)
    for name in ("ray", "ray.exceptions"):
        monkeypatch.setitem(sys.modules, name, module)  # pyright: ignore[reportArgumentType]
    message = r"no Ray cluster at '1.2.3.4:5' \(nothing at .*\)\. Start a cluster with `ray s"
    with pytest.raises(gl.WorkerError, match=message):
        packed("tar", ray="1.2.3.4:5")
