"""Runs a loader on the simulated device as a training loop would, and on the CPU, for comparison.

The loop reads each batch by operations on its own stream, and lets go of it; what was read is looked at when all has
run. On the CPU the reference does whole batches at once, as it does on a device, so results are equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from bits.running import in_batches
from simulated.machine import HostWait, Stream
from simulated.runtime import SimulatedCuda, simulated
from torch.utils._pytree import tree_flatten, tree_map

import gpuload as gl
from gpuload.loader.session import Session

__all__ = ["LoopRun", "assert_equal", "epochs", "on_cpu", "on_device", "run_loop", "with_errors"]

OPTIONS: dict[str, Any] = {"batch_size": 4, "num_workers": 0, "backend": "torch", "seed": 11}
# Where the host may wait for an event, asleep: so that it does not run ahead for ever, and for slots of a full ring.
MAY_WAIT = ("hold_back", "reclaim")
ONCE = ("finish.py", "noise.py")  # constants are brought to the device when they are first needed
Drive = Callable[[dict[str, Any]], Iterator[Any]]


@dataclass
class LoopRun:
    """What a loop had.

    Attributes:
        values: the batches, on the host.
        waits: of the host within ``next()``; not those when a session begins or ends.
        hidden: those of them that may not be.
        locked_ranges: how many are page-locked when all is done.
    """

    values: list[Any] = field(default_factory=list)
    waits: list[HostWait] = field(default_factory=list)
    locked_ranges: int = 0

    @property
    def unexpected_waits(self) -> list[HostWait]:
        return [wait for wait in self.waits if not _is_allowed(wait)]


def run_loop(values: Iterable[Any], cuda: SimulatedCuda, stream: Stream | None = None) -> LoopRun:
    """Read each of the values on a stream, the default one if none is given."""
    run, clones = LoopRun(), []
    advance = Session.advance

    def watched(session: Session, info: bool) -> bool:
        wait_count = len(cuda.waits)
        try:
            return advance(session, info)
        finally:
            run.waits += cuda.waits[wait_count:]
            assert cuda.current_stream() == current, "next() has left another stream, or another device, behind"

    current = stream or cuda.current_stream()
    with pytest.MonkeyPatch.context() as patch, cuda.on(current):
        patch.setattr(Session, "advance", watched)
        for value in values:
            clones.append(tree_map(_read, value))
            del value
    run.values = [tree_map(cuda.on_host, value) for value in clones]
    run.locked_ranges = cuda.locked_ranges()
    return run


def epochs(options: dict[str, Any], count: int = 1) -> Iterator[Any]:
    """All batches of some epochs."""
    with gl.Loader(**OPTIONS | options) as loader:
        for _ in range(count):
            yield from loader


def with_errors(options: dict[str, Any]) -> Iterator[Any]:
    """All batches of an epoch, and in place of those that cannot be made what their errors say."""
    with gl.Loader(**options) as loader:
        iterator = iter(loader)
        while True:
            try:
                yield next(iterator)
            except StopIteration:
                return
            except (ValueError, gl.CollateError) as error:
                yield str(error)


def on_cpu(options: dict[str, Any], drive: Drive = epochs) -> list[Any]:
    """What the CPU gives."""
    with in_batches():
        return list(drive({**OPTIONS, **options, "device": "cpu"}))


def on_device(options: dict[str, Any], policy: str, drive: Drive = epochs, **machine: Any) -> LoopRun:
    """What the simulated device gives."""
    with simulated(policy, **machine) as cuda:
        return run_loop(drive({**OPTIONS, "device": "cuda", **options}), cuda)


def assert_equal(batches: list[Any], expected: list[Any], atol: float = 0) -> None:
    """Check that batches have the same structure, and that no number differs by more than `atol`."""
    assert len(batches) == len(expected)
    for batch, expected_batch in zip(batches, expected, strict=True):
        leaves, structure = tree_flatten(batch)
        expected_leaves, expected_structure = tree_flatten(expected_batch)
        assert structure == expected_structure
        for leaf, expected_leaf in zip(leaves, expected_leaves, strict=True):
            if isinstance(expected_leaf, torch.Tensor):
                assert leaf.dtype == expected_leaf.dtype
                torch.testing.assert_close(leaf, expected_leaf, rtol=0, atol=atol)
            else:
                assert leaf == expected_leaf


def _is_allowed(wait: HostWait) -> bool:
    return wait.where in ONCE or (wait.function in MAY_WAIT and wait.what == "blocking event")


def _read(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
