"""`RayWorkers`: which workers to take from a Ray cluster. Plain values; imports no Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = ["CHUNKS_PER_WORKER", "WORKERS_PER_ACTOR", "RayWorkers"]

WORKERS_PER_ACTOR: Final = 4  # they share a copy of the dataset, and the process that sends what they make
CHUNKS_PER_WORKER: Final = 2  # one in work, one that waits, so that the next begins without a message
OURS: Final = ("num_cpus", "max_concurrency", "max_restarts", "max_task_retries", "lifetime", "name")


@dataclass(frozen=True, slots=True, kw_only=True)
class RayWorkers:
    """Workers on the machines of a Ray cluster, in the place of processes on this one: ``Loader(…, workers=…)``.

    The machines need gpuload, the dataset's files under the same paths, and the same versions of Python and of the
    decoders (`gpuload.workers.ray.host` compares them). What workers make comes here through Ray's object store.

    Args:
        count: how many workers, on all machines together.
        address: of the cluster, as for ``ray.init``: ``"auto"`` is the one that this machine belongs to, ``"local"``
            starts one here. Without effect if this program has called ``ray.init`` already.
        workers_per_actor: how many workers share an actor, on one machine; default 4, or fewer if no machine has so
            many CPUs. Those of one actor share one copy of the dataset.
        cpus_per_worker: what Ray reserves for each.
        actor_options: further options of the actors, as for ``ray.remote``: ``{"resources": {"decoders": 1}}``,
            ``"label_selector"``, ``"runtime_env"``, ``"scheduling_strategy"`` (default ``"SPREAD"``).

    Raises:
        TypeError, ValueError: an argument is invalid.

    Example:
        >>> RayWorkers(count=64)
        RayWorkers(count=64, address='auto', workers_per_actor=None, cpus_per_worker=1, actor_options={})
    """

    count: int
    address: str = "auto"
    workers_per_actor: int | None = None
    cpus_per_worker: float = 1
    actor_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("count", "workers_per_actor"):
            value = getattr(self, name)
            if name == "workers_per_actor" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"RayWorkers({name}=…) must be an integer, got {value!r}")
            if value < 1:
                raise ValueError(f"RayWorkers({name}=…) must be at least 1, got {value}")
        if not isinstance(self.address, str) or not self.address:
            raise TypeError(f'RayWorkers(address=…) must be a string such as "auto", got {self.address!r}')
        if self.address.startswith("ray://"):
            raise ValueError(
                f"RayWorkers(address={self.address!r}): through Ray Client every chunk would pass a proxy; run the "
                'program on a machine that has joined the cluster by `ray start`, with address="auto"'
            )
        cpus: Any = self.cpus_per_worker
        if isinstance(cpus, bool) or not isinstance(cpus, int | float) or not 0 <= cpus < float("inf"):
            raise ValueError(f"RayWorkers(cpus_per_worker=…) must be a number from 0 on, got {cpus!r}")
        if not isinstance(self.actor_options, Mapping):
            raise TypeError(f"RayWorkers(actor_options=…) must be a dict, got {self.actor_options!r}")
        if taken := [name for name in self.actor_options if name in OURS]:
            raise ValueError(
                f"RayWorkers(actor_options=…) has {', '.join(map(repr, taken))}, which gpuload sets itself: the CPUs "
                "by cpus_per_worker and workers_per_actor, restarts by Faults(max_restarts=…)"
            )
