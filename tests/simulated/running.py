"""Runs a loader on the simulated device as a training loop would, and on the CPU, for comparison.

The loop copies each batch by operations on its own stream, and drops it. The copies are compared after all operations
have run. On the CPU the reference processes entire batches at once, as on a device, so that all bits are equal.
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

__all__ = [
    "LoopRun",
    "assert_equal",
    "assert_equal_on_device",
    "epochs",
    "on_cpu",
    "on_device",
    "run_loop",
    "with_errors",
]

OPTIONS: dict[str, Any] = {"batch_size": 4, "num_workers": 0, "backend": "torch", "seed": 11}
# Functions in which the host may sleep until an event, since it is too far ahead or needs a slot of a full ring.
MAY_WAIT = ("hold_back", "reclaim")
COPY_CONSTANTS = ("finish.py", "noise.py")  # files that copy constants to the device when they are first needed
Drive = Callable[[dict[str, Any]], Iterator[Any]]


@dataclass
class LoopRun:
    """The batches and waits of a loop.

    Attributes:
        values: the batches, on the host.
        waits: the waits of the host within ``next()``, except when a session begins or ends.
        unexpected_waits: the waits that gpuload should not need.
        locked_ranges: how many ranges are page-locked at the end.
    """

    values: list[Any] = field(default_factory=list)
    waits: list[HostWait] = field(default_factory=list)
    locked_ranges: int = 0

    @property
    def unexpected_waits(self) -> list[HostWait]:
        return [wait for wait in self.waits if not _is_allowed(wait)]


def run_loop(values: Iterable[Any], cuda: SimulatedCuda, stream: Stream | None = None) -> LoopRun:
    """Copy each value on a stream, by default the current one."""
    run, clones = LoopRun(), []
    advance = Session.advance

    def watched(session: Session, info: bool) -> bool:
        wait_count = len(cuda.waits)
        try:
            return advance(session, info)
        finally:
            run.waits += cuda.waits[wait_count:]
            assert cuda.current_stream() == current, "next() changed the current stream or device"

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
    """Yield all batches of some epochs."""
    with gl.Loader(**OPTIONS | options) as loader:
        for _ in range(count):
            yield from loader


def with_errors(options: dict[str, Any]) -> Iterator[Any]:
    """Yield all batches of an epoch, or the texts of their errors."""
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
    with in_batches():
        return list(drive({**OPTIONS, **options, "device": "cpu"}))


def on_device(options: dict[str, Any], policy: str, drive: Drive = epochs, **machine: Any) -> LoopRun:
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


def assert_equal_on_device(loop: Callable[[str], list[torch.Tensor]], cuda: SimulatedCuda) -> None:
    """Check that a loop, which takes the name of a device, gives equal batches on the simulated device and the CPU."""
    assert_equal([cuda.on_host(tensor) for tensor in loop("cuda:0")], loop("cpu"))


def _is_allowed(wait: HostWait) -> bool:
    return wait.where in COPY_CONSTANTS or (wait.function in MAY_WAIT and wait.what == "blocking event")


def _read(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
