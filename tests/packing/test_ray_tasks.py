"""Parts as tasks of a Ray cluster: of a real one, and of one that misbehaves."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lacking
import pytest

import gpuload as gl

from .conftest import COUNT, content

Packing = Callable[..., Path]

PROGRAM = """
import logging, sys
import gpuload as gl
import ray
ray.init("local", num_cpus=1, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False,
         logging_level=logging.ERROR)  # not the cluster that another test has on this machine
for to in ("tar", "lmdb"):
    gl.pack(gl.ImageFolder(sys.argv[1]), f"{sys.argv[2]}/{to}", to=to, shard_bytes=12_500, ray="auto")
"""


@pytest.mark.processes
@pytest.mark.slow
def test_a_cluster_makes_the_same_bytes(folder: Path, packed: Packing, tmp_path: Path) -> None:
    lacking.require("ray", "lmdb")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), str(tmp_path / "there")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    for to in ("tar", "lmdb"):
        assert content(tmp_path / "there" / to) == content(packed(to, f"here {to}"))


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: Exception) -> None:
        super().__init__("the traceback of the task")
        self.cause = cause


class Cluster:
    """The small part of Ray that is used; tasks are done when they are waited for, the last one first."""

    def __init__(self) -> None:
        self.exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)
        self.most = 0
        self.cancelled: list[Any] = []
        self.dies: int | None = None
        self.elsewhere = False

    def is_initialized(self) -> bool:
        return True

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 3.0}

    def put(self, value: Any) -> Any:
        return value

    def remote(self, function: Any) -> Any:
        class Task:
            def __init__(self, *arguments: Any) -> None:
                self.call = function, arguments

        task = SimpleNamespace(remote=Task)
        return SimpleNamespace(options=lambda name: task)

    def wait(self, tasks: list[Any]) -> tuple[list[Any], list[Any]]:
        self.most = max(self.most, len(tasks))
        return tasks[-1:], tasks[:-1]

    def get(self, task: Any) -> Any:
        function, arguments = task.call
        if arguments[1] == self.dies:
            raise RayError("the node died")
        if self.elsewhere:
            arguments = replace(arguments[0], folder="/nowhere"), arguments[1]
        try:
            return function(*arguments)
        except Exception as error:
            raise RayTaskError(error) from error

    def cancel(self, task: Any, force: bool) -> None:
        self.cancelled.append(task)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster()
    monkeypatch.setitem(sys.modules, "ray", made)
    monkeypatch.setitem(sys.modules, "ray.exceptions", made.exceptions)
    return made


@pytest.mark.parametrize("to", ["tar", "lmdb"])
def test_parts_that_come_in_another_order_give_the_same_bytes(cluster: Cluster, packed: Packing, to: str) -> None:
    if to == "lmdb":
        lacking.require("lmdb")
    told: list[int] = []
    there = packed(to, "there", ray="auto", workers=None, progress=lambda done, total, nbytes: told.append(done))
    assert content(there) == content(packed(to, "here"))
    assert (cluster.most, told[0], told[-1]) == (3, 0, COUNT)
    packed(to, "two", ray="auto", workers=2)
    assert cluster.most == 3


def test_errors_of_tasks_are_told_and_the_others_cancelled(cluster: Cluster, packed: Packing) -> None:
    cluster.dies = 2
    with pytest.raises(gl.WorkerError, match=r"part 2, samples \d+ to \d+, could not be made on the cluster: the node"):
        packed("tar", ray="auto", workers=None)
    assert len(cluster.cancelled) == 2
    cluster.elsewhere, cluster.dies = True, None
    with pytest.raises(gl.GpuloadError, match=r"FileNotFoundError: '/nowhere' is not on the machine"):
        packed("tar", ray="auto", workers=None)


def test_a_cluster_that_is_not_there_is_told(
    cluster: Cluster, packed: Packing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**options: Any) -> None:
        raise ConnectionError(f"nothing\nat {options['address']}")

    monkeypatch.setattr(cluster, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster, "init", init, raising=False)
    with pytest.raises(
        gl.WorkerError, match=r"no Ray cluster at '1.2.3.4:5' \(nothing at .*\)\. Start one with `ray start"
    ):
        packed("tar", ray="1.2.3.4:5")
