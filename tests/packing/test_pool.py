"""Workers that make parts: killed, failing, interrupted, of programs of every kind, and on other machines."""

from __future__ import annotations

import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import lacking
from helpers.fake_ray import Cluster
from helpers.generated_images import jpeg_bytes, smooth_image

import gpuload as gl
from gpuload.packing import pool
from gpuload.workers import ray

from .conftest import COUNT, content
from .test_pack import Samples, image

Packing = Callable[..., Path]

pytestmark = pytest.mark.processes


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.01)


def test_a_worker_that_is_killed_or_fails_is_told(tmp_path: Path) -> None:
    here = os.getpid()

    class Kills(Samples):
        def __getitem__(self, index: int) -> Any:
            if index == 5 and os.getpid() != here:
                if self.samples[0] == "kill":
                    os.kill(os.getpid(), 9)
                raise RuntimeError("the user's own mistake")
            return image(index), index

    message = (
        r"^a worker process was killed by SIGKILL while it made part 5, samples 5 to 5\. Run the same command "
        r"again, with fewer workers if memory was short \(finished parts are kept\)$"
    )
    with pytest.raises(gl.WorkerError, match=message):
        gl.pack(Kills("kill", *range(7)), tmp_path / "set", to="tar", workers=1, shard_bytes=1)
    with pytest.raises(gl.GpuloadError, match=r"(?s)^RuntimeError: the user's own mistake\n\nWhere it happened.*Trace"):
        gl.pack(Kills("fail", *range(7)), tmp_path / "set", to="tar", workers=1, shard_bytes=1)
    made = gl.pack(Samples(*((image(n), n) for n in range(8))), tmp_path / "other", to="tar", workers=2, shard_bytes=1)
    assert (made.samples, made.taken_up) == (8, 0)


def test_what_no_store_has_a_form_for_is_told_without_a_traceback(tmp_path: Path) -> None:
    here = os.getpid()

    class Other(Samples):
        def __getitem__(self, index: int) -> Any:
            return image(index) if os.getpid() == here else "text"

    with pytest.raises(gl.GpuloadError, match=r"^sample 0 of .* cannot be packed: a tar takes .* got a str$"):
        gl.pack(Other(0), tmp_path / "set", to="tar", workers=1)


def test_a_full_disk_is_told_without_a_traceback(tmp_path: Path) -> None:
    here = os.getpid()

    class Limits(Samples):
        def __getitem__(self, index: int) -> Any:
            if os.getpid() != here:  # the kernel refuses a larger file as it refuses a full disk
                sys.dont_write_bytecode = True  # else Python leaves cut files of compiled modules behind
                resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
            return image(index)

    said = r"^there is no room for the set in '.*set' \(.*File too large\); raise the limit on the size of files"
    with pytest.raises(gl.GpuloadError, match=said):
        gl.pack(Limits(0), tmp_path / "set", to="tar", workers=1)


def test_a_worker_that_ends_when_it_has_nothing_to_do_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, done, here, record_of = tmp_path / "pid", tmp_path / "done", os.getpid(), pool._record

    def record_and_say(*arguments: Any) -> Any:
        record = record_of(*arguments)
        if record["part"] == 0:
            done.touch()
        return record

    monkeypatch.setattr(pool, "_record", record_and_say)

    class KillsTheOther(Samples):
        def __getitem__(self, index: int) -> Any:
            if os.getpid() != here and index == 0:
                number.write_text(str(os.getpid()))
            elif os.getpid() != here:
                wait_for(number)
                if int(number.read_text()) != os.getpid():
                    wait_for(done)  # the other one has nothing more to do
                    os.kill(int(number.read_text()), 9)
            return image(index)

    packed = gl.pack(KillsTheOther(0, 1), tmp_path / "set", to="tar", workers=2, shard_bytes=1)
    assert (packed.samples, number.exists()) == (2, True)


@pytest.mark.parametrize("wrong", [0, 3])
def test_an_error_at_the_end_of_a_part_is_told(tmp_path: Path, wrong: int) -> None:
    """Also where it is the last one, and nothing is asked for behind it."""

    class Paths:
        def __getitem__(self, index: int) -> str:
            if index == wrong:  # as it looks whether the file has changed
                raise RuntimeError("no such path")
            return "none"

    class WithPaths(Samples):
        @property
        def paths(self) -> Paths | None:
            return None if os.getpid() == here else Paths()

    here = os.getpid()
    with pytest.raises(gl.GpuloadError, match=r"(?s)RuntimeError: no such path.*Where it happened"):
        gl.pack(WithPaths(*map(image, range(4))), tmp_path / "set", to="tar", workers=1, shard_bytes=1)


@pytest.mark.parametrize(("shard_bytes", "in_process"), [(1 << 20, True), (1, False)])
def test_a_single_shard_is_packed_by_the_process_itself(tmp_path: Path, shard_bytes: int, in_process: bool) -> None:
    class ByProcess(Samples):
        def __getitem__(self, index: int) -> Any:
            return image(index), os.getpid()

    gl.pack(ByProcess(*range(3)), tmp_path / "set", to="tar", shard_bytes=shard_bytes)
    by = {label for _, label in gl.TarShards(tmp_path / "set" / "*.tar", fields=("jpg", "cls"))}
    assert (by == {os.getpid()}) == in_process


PROGRAM = """
import os, sys, time
import gpuload as gl

here = os.getpid()

class Slow:  # of the program itself, and without a main guard
    def __len__(self):
        return 6

    def __getitem__(self, index):
        if index == 4 and len(sys.argv) > 3 and os.getpid() != here:
            open(sys.argv[3] + "~", "w").write(str(os.getpid()))
            os.rename(sys.argv[3] + "~", sys.argv[3])
            time.sleep(300)
        return gl.Encoded(open(sys.argv[1], "rb").read())

made = gl.pack(Slow(), sys.argv[2], to="tar", workers=2, shard_bytes=1)
print(made.samples, made.taken_up)
"""


class Program:
    """Starts `PROGRAM` on an image."""

    def __init__(self, folder: Path) -> None:
        self.script, self.image = folder / "program.py", folder / "image.jpg"
        self.script.write_text(PROGRAM)
        self.image.write_bytes(jpeg_bytes(smooth_image(16, 24, 1)))
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: Path) -> subprocess.Popen[str]:
        command = [sys.executable, *map(str, (self.script, self.image, *arguments))]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.started.append(subprocess.Popen(command, env=environment, text=True, **pipes))
        return self.started[-1]


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    made = Program(tmp_path)
    yield made
    for process in made.started:
        process.kill()
        process.communicate()


def test_a_program_without_a_main_guard(program: Program, tmp_path: Path) -> None:
    process = program.start(tmp_path / "set")
    assert process.communicate(timeout=100) == ("6 0\n", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_the_program_and_what_is_done_is_taken_up(
    program: Program, tmp_path: Path, number: int
) -> None:
    """As by ctrl-C, which goes to the whole group, or by a kill of the program alone."""
    process = program.start(tmp_path / "set", tmp_path / "at")
    wait_for(tmp_path / "at")
    wait_for(tmp_path / "set" / ".gpuload-pack" / "00000.json")
    worker = os.pidfd_open(int((tmp_path / "at").read_text()))
    process.send_signal(number)
    _, error = process.communicate(timeout=120)  # before the 300 s are over
    assert process.returncode == -number, error
    assert ("KeyboardInterrupt" in error) == (number == signal.SIGINT)
    assert select.select([worker], [], [], 60)[0], "the worker lives on"
    os.close(worker)
    text, error = program.start(tmp_path / "set").communicate(timeout=100)
    samples, taken_up = map(int, text.split())
    assert (samples, 1 <= taken_up <= 5, error) == (6, True, "")
    program.start(tmp_path / "other").communicate(timeout=100)
    assert content(tmp_path / "set") == content(tmp_path / "other")


ON_RAY = """
import logging, sys
import gpuload as gl
import ray
ray.init("local", num_cpus=1, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False,
         logging_level=logging.ERROR)  # not the cluster that another test has on this machine
for to in ("tar", "lmdb"):
    gl.pack(gl.ImageFolder(sys.argv[1]), f"{sys.argv[2]}/{to}", to=to, shard_bytes=12_500, ray="auto")
"""


@pytest.mark.slow
def test_a_cluster_makes_the_same_bytes(folder: Path, packed: Packing, tmp_path: Path) -> None:
    lacking.require("ray", "lmdb")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, "-c", ON_RAY, str(folder), str(tmp_path / "there")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    for to in ("tar", "lmdb"):
        assert content(tmp_path / "there" / to) == content(packed(to, f"here {to}"))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    made = Cluster()
    for module in (pool, ray):
        monkeypatch.setattr(module, "connect_ray", lambda address, called: made)
    yield made
    made.close()


def test_the_workers_of_a_cluster_say_how_far_they_are(cluster: Cluster, packed: Packing) -> None:
    """As many as it has CPUs, or as were asked for."""
    samples: list[int] = []
    there = packed("tar", "there", ray="auto", workers=None, progress=lambda done, total, nbytes: samples.append(done))
    assert (samples[0], samples[-1], len(cluster.actors)) == (0, COUNT, 2)  # for two workers each
    assert content(there) == content(packed("tar", "here"))
    packed("tar", "one", ray="auto", workers=1)
    assert len(cluster.actors) == 3


def test_an_actor_that_dies_is_replaced_and_its_parts_are_made_again(
    cluster: Cluster, packed: Packing, caplog: pytest.LogCaptureFixture
) -> None:
    def die(done: int, total: int, nbytes: int) -> None:
        if done and len(cluster.actors) == 1:
            cluster.actors[0].die()

    there = packed("tar", "there", ray="auto", workers=1, progress=die)
    assert content(there) == content(packed("tar", "here"))
    assert "a worker died" in caplog.text


def test_a_machine_without_the_folder_is_named(
    cluster: Cluster, packed: Packing, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = pool.Parts

    def elsewhere(job: Any, *, is_local: bool) -> Any:
        return made(replace(job, folder="/nowhere"), is_local=is_local)

    monkeypatch.setattr(pool, "Parts", elsewhere)
    with pytest.raises(
        gl.GpuloadError, match=r"^'/nowhere' does not exist on the machine '.*' of the cluster; put the set"
    ):
        packed("tar", ray="auto", workers=1)


def test_a_cluster_that_is_not_there_is_told(packed: Packing, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: Any) -> None:
        raise ConnectionError(f"nothing\nat {options['address']}")

    module = SimpleNamespace(is_initialized=lambda: False, init=init)
    for name in ("ray", "ray.exceptions"):
        monkeypatch.setitem(sys.modules, name, module)  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        gl.WorkerError, match=r"no Ray cluster at '1.2.3.4:5' \(nothing at .*\)\. Start a cluster with `ray s"
    ):
        packed("tar", ray="1.2.3.4:5")
