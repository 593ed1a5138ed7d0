"""`torch.distributed` in a worker: it answers which rank this is, and refuses to communicate. Runs only in workers.

A worker is a fresh interpreter, so it has no process group. It gets one that knows its rank and its size: torch's own
``is_initialized()``, ``get_rank()``, ``get_world_size()`` and ``get_backend()`` ask it. A collective would wait for
workers of other ranks, which have other things to do: it raises an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["answer_as"]

ANSWERED = frozenset({"rank", "size", "name", "group_name", "group_desc", "bound_device_id", "boxed", "unbox"})


def answer_as(backend: str, rank: int, world_size: int) -> None:
    """Let `torch.distributed` say this, if it has no group yet."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    if dist.is_initialized():
        return
    names = [name for name in dir(dist.ProcessGroup) if not name.startswith("_") and name not in ANSWERED]
    refusals = {name: _refusal(name) for name in names if callable(getattr(dist.ProcessGroup, name))}
    group = type("WorkersGroup", (dist.ProcessGroup,), refusals)(rank, world_size)  # pyright: ignore[reportCallIssue]
    c10d._world.pg_map[group] = (backend, None)  # pyright: ignore[reportArgumentType]
    c10d._world.pg_names[group] = "gpuload"  # pyright: ignore[reportArgumentType]
    c10d._world.pg_group_ranks[group] = {number: number for number in range(world_size)}
    c10d.GroupMember.WORLD = group


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **options: Any) -> Any:
        raise RuntimeError(
            f"torch.distributed.{name} was called in a worker process of gpuload: it knows its rank and the number of "
            "ranks, but cannot communicate with others; do that in the main process, or use num_workers=0"
        )

    return refuse
