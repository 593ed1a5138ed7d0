"""Runs a loader on the simulated device as a training loop would, and on the CPU, for comparison.

The loop reads each batch by operations on its own stream, and lets go of it; what was read is looked at when all has
run. On the CPU the reference does whole batches at once, as it does on a device, so results are equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from bits.running import in_batches
from simulated.machine import HostWait, Stream
from simulated.runtime import SimulatedCuda, simulated
from simulated.tensors import DeviceTensor
from torch.utils._pytree import tree_flatten, tree_map

import gpuload as gl

__all__ = ["Taken", "assert_equal", "epochs", "on_cpu", "on_device", "take"]

OPTIONS: dict[str, Any] = {"batch_size": 4, "num_workers": 0, "backend": "torch", "seed": 11}
Drive = Callable[[dict[str, Any]], Iterator[Any]]


@dataclass
class Taken:
    """What a loop had.

    Attributes:
        values: the batches, on the host.
        waits: of the host within ``next()``, once the session was there.
        cuda: the device.
    """

    values: list[Any] = field(default_factory=list)
    waits: list[HostWait] = field(default_factory=list)
    cuda: SimulatedCuda | None = None


def take(values: Iterable[Any], cuda: SimulatedCuda, stream: Stream | None = None) -> Taken:
    """Read each of the values on a stream, the default one if none is given."""
    found, read = Taken(cuda=cuda), []
    with cuda.machine.on(stream or cuda.machine.current_stream(cuda.machine.current_device)):
        iterator = iter(values)
        while True:
            before = len(cuda.waits)
            try:
                value = next(iterator)
            except StopIteration:
                break
            finally:
                found.waits += cuda.waits[before:]
            read.append(tree_map(_read, value))
            del value
    found.values = [tree_map(cuda.on_host, value) if _has_tensors(value) else value for value in read]
    return found


def epochs(options: dict[str, Any], count: int = 1) -> Iterator[Any]:
    """All batches of some epochs."""
    with gl.Loader(**OPTIONS | options) as loader:
        for _ in range(count):
            yield from loader


def on_cpu(options: dict[str, Any], drive: Drive = epochs) -> list[Any]:
    """What the CPU gives."""
    with in_batches():
        return list(drive({**OPTIONS, **options, "device": "cpu"}))


def on_device(options: dict[str, Any], policy: str, drive: Drive = epochs, **machine: Any) -> Taken:
    """What the simulated device gives."""
    with simulated(policy, **machine) as cuda:
        return take(drive({**OPTIONS, "device": "cuda", **options}), cuda)


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    """The same trees of the same numbers."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        (leaves, tree), (others, other_tree) = tree_flatten(one), tree_flatten(other)
        assert tree == other_tree
        for leaf, expected_leaf in zip(leaves, others, strict=True):
            if isinstance(expected_leaf, torch.Tensor):
                assert leaf.dtype == expected_leaf.dtype
                assert torch.equal(leaf, expected_leaf), f"{leaf} is not {expected_leaf}"
            else:
                assert leaf == expected_leaf


def _read(leaf: Any) -> Any:
    if isinstance(leaf, DeviceTensor):
        return leaf.clone()
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in tree_flatten(value)[0])
