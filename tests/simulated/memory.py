"""Models of torch's caching allocator on the device, and of page-locked memory of the host.

Freed memory of the device is overwritten with garbage and reused as soon as CUDA and torch's allocator allow it: on the
stream that it was allocated on, in the order of that stream. If other streams used it, only `record_stream` delays
this. A block is a tensor in the CPU's memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from simulated.machine import Event, Machine, Stream

__all__ = ["GARBAGE", "Block", "BlockReference", "DeviceMemory", "HostMemory", "at_address"]

ROUNDING_BYTES: Final = 512  # torch's allocator rounds sizes up to multiples
GARBAGE: Final = 0xA5


@dataclass(eq=False)
class Block:
    """Memory, in use or free.

    Attributes:
        raw: the bytes, uint8 (N,).
        stream: the stream that it was allocated on.
        users: other streams, from `record_stream`.
    """

    raw: torch.Tensor
    stream: Stream
    users: set[Stream] = field(default_factory=set)

    def spoil(self) -> None:
        with torch.inference_mode(False):
            self.raw.fill_(GARBAGE)


class BlockReference:
    """A reference to a block, which is freed with this object."""

    def __init__(self, block: Block, free: Callable[[Block], None]) -> None:
        self.block = block
        self._free = free

    def __del__(self) -> None:
        self._free(self.block)


def new_garbage(nbytes: int) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.from_numpy(np.full(nbytes, GARBAGE, np.uint8))


class DeviceMemory:
    """torch's caching allocator, which gives a freed block to the next allocation of similar size on its stream.

    Attributes:
        reserved_bytes: the bytes of all blocks, used or free; these never shrink.
        used_bytes: the bytes of the blocks in use.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._free: dict[Stream, list[Block]] = {}
        self._waiting: list[tuple[Block, list[Event]]] = []  # freed, but other streams may still use them
        self.reserved_bytes = self.used_bytes = 0

    def allocate(self, nbytes: int, stream: Stream) -> BlockReference:
        with self._machine.lock:
            return self._allocate(nbytes, stream)

    def _allocate(self, nbytes: int, stream: Stream) -> BlockReference:
        self._release_waiting()
        nbytes = -(-max(nbytes, 1) // ROUNDING_BYTES) * ROUNDING_BYTES
        free = self._free.setdefault(stream, [])
        fitting = [block for block in free if nbytes <= block.raw.nbytes <= 2 * nbytes]
        if fitting:
            block = min(reversed(fitting), key=lambda block: block.raw.nbytes)
            free.remove(block)
        else:
            block = Block(new_garbage(nbytes), stream)
            self.reserved_bytes += nbytes
        self.used_bytes += block.raw.nbytes
        return BlockReference(block, self._release)

    def _release(self, block: Block) -> None:
        with self._machine.lock:
            self._free_block(block)

    def _free_block(self, block: Block) -> None:
        self.used_bytes -= block.raw.nbytes
        if block.users:
            events = [Event(self._machine, user) for user in block.users]
            block.users.clear()
            self._waiting.append((block, events))
        else:
            self._return_to_stream(block)

    def _release_waiting(self) -> None:
        for block, events in self._waiting:
            if all(event.happened for event in events):
                self._return_to_stream(block)
        self._waiting = [entry for entry in self._waiting if not all(event.happened for event in entry[1])]

    def _return_to_stream(self, block: Block) -> None:
        block.stream.queue.append(block.spoil)  # after the stream's last use
        self._free.setdefault(block.stream, []).append(block)


class HostMemory:
    """The host's page-locked memory: ranges that torch allocated, and ranges that were locked in place. torch's ranges
    are never reused; the fake CUDA runtime covers torch's cache of them.

    Attributes:
        locked: the bytes at each address locked in place.
        most_locks: how many ranges can be locked at once.
    """

    def __init__(self, most_locks: int = 1 << 30) -> None:
        self.locked: dict[int, int] = {}
        self.most_locks = most_locks
        self._allocated: dict[int, torch.Tensor] = {}  # torch's ranges, by address

    def lock(self, address: int, nbytes: int) -> int:
        """Lock a range; return 0 or the runtime's error code."""
        if len(self.locked) >= self.most_locks:
            return 2
        assert address not in self.locked, "memory was locked twice"
        self.locked[address] = nbytes
        return 0

    def unlock(self, address: int) -> int:
        assert address in self.locked, "memory that is not locked was unlocked"
        del self.locked[address]
        return 0

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Allocate page-locked bytes, uint8 (N,)."""
        memory = new_garbage(max(nbytes, 1))
        self._allocated[memory.data_ptr()] = memory
        return memory[:nbytes]

    def is_locked(self, address: int, nbytes: int) -> bool:
        """Return whether the device can copy from these bytes asynchronously."""
        ranges = dict(self.locked)
        ranges |= {start: memory.nbytes for start, memory in list(self._allocated.items())}  # other threads add to it
        return any(start <= address and address + nbytes <= start + n for start, n in ranges.items())


def at_address(address: int, nbytes: int) -> torch.Tensor:
    """Return a view of memory, uint8 (N,), which does not keep the memory alive."""
    with torch.inference_mode(False):
        return torch.from_numpy(np.frombuffer((ctypes.c_char * nbytes).from_address(address), np.uint8))
