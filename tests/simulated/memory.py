"""Two models of memory: torch's caching allocator on the device, and page-locked memory of the host.

What is freed on the device is overwritten with garbage and used again at once, as far as CUDA and torch's allocator
allow it: on the stream that it was allocated on, in the order of that stream; and where it was used elsewhere, only
what `record_stream` noted keeps it. A block is a tensor of the CPU's own memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from simulated.machine import Event, Machine, Stream

__all__ = ["GARBAGE", "Block", "DeviceMemory", "Held", "HostMemory", "at_address"]

ROUND: Final = 512  # bytes, as torch's allocator rounds
GARBAGE: Final = 0xA5


@dataclass(eq=False)
class Block:
    """Memory, in use or free.

    Attributes:
        raw: its bytes, uint8 (n,).
        stream: that it was allocated on.
        users: other streams that were noted as users.
    """

    raw: torch.Tensor
    stream: Stream
    users: set[Stream] = field(default_factory=set)

    def spoil(self) -> None:
        with torch.inference_mode(False):
            self.raw.fill_(GARBAGE)


class Held:
    """Who holds one of these, holds the block; with the last, it is free."""

    def __init__(self, block: Block, free: Callable[[Block], None]) -> None:
        self.block = block
        self._free = free

    def __del__(self) -> None:
        self._free(self.block)


def new_garbage(nbytes: int) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.from_numpy(np.full(nbytes, GARBAGE, np.uint8))


class DeviceMemory:
    """torch's caching allocator: of a freed block's stream, the next allocation of about its size gets it.

    Attributes:
        reserved_bytes: of all blocks, in use, free or waiting to be free. It never shrinks.
        used_bytes: of those in use.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._free: dict[Stream, list[Block]] = {}
        self._waiting: list[tuple[Block, list[Event]]] = []  # freed, until other streams have used it
        self.reserved_bytes = self.used_bytes = 0

    def allocate(self, nbytes: int, stream: Stream) -> Held:
        with self._machine.lock:
            return self._allocate(nbytes, stream)

    def _allocate(self, nbytes: int, stream: Stream) -> Held:
        self._come_free()
        nbytes = -(-max(nbytes, 1) // ROUND) * ROUND
        free = self._free.setdefault(stream, [])
        fitting = [block for block in free if nbytes <= block.raw.nbytes <= 2 * nbytes]
        if fitting:
            block = min(reversed(fitting), key=lambda block: block.raw.nbytes)
            free.remove(block)
        else:
            block = Block(new_garbage(nbytes), stream)
            self.reserved_bytes += nbytes
        self.used_bytes += block.raw.nbytes
        return Held(block, self._release)

    def _release(self, block: Block) -> None:
        with self._machine.lock:
            self._give_up(block)

    def _give_up(self, block: Block) -> None:
        self.used_bytes -= block.raw.nbytes
        if block.users:
            events = [Event(self._machine, user) for user in block.users]
            block.users.clear()
            self._waiting.append((block, events))
        else:
            self._give_back(block)

    def _come_free(self) -> None:
        for block, events in self._waiting:
            if all(event.happened for event in events):
                self._give_back(block)
        self._waiting = [entry for entry in self._waiting if not all(event.happened for event in entry[1])]

    def _give_back(self, block: Block) -> None:
        block.stream.queue.append(block.spoil)  # after what the stream still does with it
        self._free.setdefault(block.stream, []).append(block)


class HostMemory:
    """The host's page-locked memory: torch's, and ranges that were locked in place. torch's own is never given again;
    on the fake CUDA runtime torch's real cache of it is tried.

    Attributes:
        locked: the bytes at each address locked in place.
        most_locks: how many ranges may be locked at once; further ones are refused.
    """

    def __init__(self, most_locks: int = 1 << 30) -> None:
        self.locked: dict[int, int] = {}
        self.most_locks = most_locks
        self._allocated: dict[int, torch.Tensor] = {}  # torch's, by address

    def lock(self, address: int, nbytes: int) -> int:
        """0, or the runtime's error code."""
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
        """Page-locked bytes, uint8 (n,)."""
        memory = new_garbage(max(nbytes, 1))
        self._allocated[memory.data_ptr()] = memory
        return memory[:nbytes]

    def is_locked(self, address: int, nbytes: int) -> bool:
        """Whether the device can copy from these bytes by itself."""
        ranges = dict(self.locked)
        ranges |= {start: memory.nbytes for start, memory in list(self._allocated.items())}  # other threads add to it
        return any(start <= address and address + nbytes <= start + n for start, n in ranges.items())


def at_address(address: int, nbytes: int) -> torch.Tensor:
    """A view of memory that keeps nothing alive, uint8 (n,)."""
    with torch.inference_mode(False):
        return torch.from_numpy(np.frombuffer((ctypes.c_char * nbytes).from_address(address), np.uint8))
