"""The small part of Ray that `RayPool` uses, for events that are rare or slow on a real cluster. Actors run in a thread
of this process, and their workers are real processes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from types import SimpleNamespace
from typing import Any

from gpuload.workers.ray import Host


class RayError(Exception):
    pass


class RayActorError(RayError):
    pass


class RayTaskError(RayError):
    pass


class Actor:
    """An actor on the machine `node`. It stops answering when `hangs` is set."""

    def __init__(self, cluster: Cluster, node: str, arguments: tuple[Any, ...]) -> None:
        self.cluster, self.node = cluster, node
        self.alive, self.hangs = True, False
        self.host = cluster.do(_make(node, arguments)).result(60)

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: self.call(name, *arguments))

    def call(self, name: str, *arguments: Any) -> concurrent.futures.Future[Any]:
        if not self.alive:
            future: concurrent.futures.Future[Any] = concurrent.futures.Future()
            future.set_exception(RayActorError("The actor died"))
            return future
        return self.cluster.do(self._answer(name, arguments))

    async def _answer(self, name: str, arguments: tuple[Any, ...]) -> Any:
        work = asyncio.ensure_future(getattr(self.host, name)(*arguments))
        while not work.done() or self.hangs:
            if not self.alive:
                work.cancel()
                raise RayActorError("The actor died")
            await asyncio.sleep(0.002)
        return work.result()

    def die(self) -> None:
        self.alive = False
        with contextlib.suppress(Exception):
            self.cluster.do(self.host.close()).result(10)


async def _make(node: str, arguments: tuple[Any, ...]) -> Host:
    host = Host(*arguments)
    host._node = lambda: node
    return host


async def _end_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class Cluster:
    """A stand-in for the module `ray`. Actors start on `nodes_in_turn`: None means that no machine is free, "dead" that
    the machine has died."""

    def __init__(self) -> None:
        self.nodes_in_turn: list[str | None] = ["a", "b"]
        self.exceptions = SimpleNamespace(RayError=RayError, RayActorError=RayActorError, RayTaskError=RayTaskError)
        self.actors: list[Actor] = []
        self.up = True
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def do(self, work: Any) -> concurrent.futures.Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        for actor in self.actors:
            actor.die()
        self.do(_end_all()).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    # -- the functions of Ray -------------------------------------------------------------------------------------

    def is_initialized(self) -> bool:
        return self.up

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_job_id=lambda: "01")

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": 2.0}}]

    def available_resources(self) -> dict[str, float]:
        return {"CPU": 1.0}

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 4.0}

    def put(self, value: Any) -> Any:
        return value

    def remote(self, kind: type) -> Any:
        assert kind is Host
        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=self._start))

    def _start(self, *arguments: Any) -> Any:
        node = self.nodes_in_turn.pop(0)
        if node == "dead":
            failed: concurrent.futures.Future[Any] = concurrent.futures.Future()
            failed.set_exception(RayActorError("The actor died because its node has died. The actor never ran"))
            return SimpleNamespace(report=SimpleNamespace(remote=lambda *_: failed))
        if node is None:
            never: concurrent.futures.Future[Any] = concurrent.futures.Future()
            return SimpleNamespace(report=SimpleNamespace(remote=lambda *_: never))
        self.nodes_in_turn.append(node)
        self.actors.append(Actor(self, node, arguments))
        return self.actors[-1]

    def kill(self, actor: Any) -> None:
        if isinstance(actor, Actor):
            actor.die()

    def wait(self, calls: list[Any], *, num_returns: int = 1, timeout: float) -> tuple[list[Any], list[Any]]:
        assert len(set(map(id, calls))) == len(calls) >= num_returns
        concurrent.futures.wait(calls, timeout, concurrent.futures.FIRST_COMPLETED)
        ready = [call for call in calls if call.done()][:num_returns]
        return ready, [call for call in calls if call not in ready]

    def get(self, call: Any) -> Any:
        return call.result(0)
