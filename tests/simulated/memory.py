"""Two models of memory: torch's caching allocator on the device, and page-locked memory of the host.

What is freed is overwritten with garbage and used again at once, as far as CUDA and torch's allocators allow it: on the
stream that it was allocated on, in the order of that stream; and where it was used elsewhere, only what
`record_stream` (on the host: a copy that torch knows of) noted keeps it. A block is a tensor of the CPU's own memory.
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
        stream: that it was allocated on; None for the host's.
        users: other streams that were noted as users.
        uses: events after noted uses of the host's memory.
    """

    raw: torch.Tensor
    stream: Stream | None
    users: set[Stream] = field(default_factory=set)
    uses: list[Event] = field(default_factory=list)

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


def new_bytes(nbytes: int) -> torch.Tensor:
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
        self._come_free()
        nbytes = -(-max(nbytes, 1) // ROUND) * ROUND
        free = self._free.setdefault(stream, [])
        fitting = [block for block in free if nbytes <= block.raw.nbytes <= 2 * nbytes]
        if fitting:
            block = min(reversed(fitting), key=lambda block: block.raw.nbytes)
            free.remove(block)
        else:
            block = Block(new_bytes(nbytes), stream)
            self.reserved_bytes += nbytes
        self.used_bytes += block.raw.nbytes
        return Held(block, self._release)

    def spoil_freed(self) -> None:
        """Overwrite all free blocks at once, whatever streams still do with them."""
        for blocks in self._free.values():
            for block in blocks:
                block.spoil()

    def _release(self, block: Block) -> None:
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
        assert block.stream is not None
        block.stream.queue.append(block.spoil)  # after what the stream still does with it
        self._free.setdefault(block.stream, []).append(block)


class HostMemory:
    """The host's page-locked memory: torch's cache of it, which knows the copies that were issued from its blocks; and
    ranges that were locked in place.

    Attributes:
        locked: the bytes at each address locked in place.
        most_locks: how many ranges may be locked at once; further ones are refused.
    """

    def __init__(self, most_locks: int = 1 << 30) -> None:
        self.locked: dict[int, int] = {}
        self.most_locks = most_locks
        self._blocks: dict[int, Block] = {}  # in use, by address
        self._free: list[Block] = []
        self._waiting: list[Block] = []

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
        """Page-locked bytes, uint8 (n,), free again when nothing of the host views them and the copies have ended."""
        done = [block for block in self._waiting if all(event.happened for event in block.uses)]
        for block in done:
            self._waiting.remove(block)
            self._give_back(block)
        block = next((block for block in reversed(self._free) if nbytes <= block.raw.nbytes <= 2 * nbytes + 64), None)
        if block is None:
            block = Block(new_bytes(max(nbytes, 1)), None)
        else:
            self._free.remove(block)
        address = block.raw.data_ptr()
        self._blocks[address] = block
        view = np.asarray(_Owner(block, self._release))
        with torch.inference_mode(False):
            return torch.from_numpy(view)[:nbytes]

    def copied(self, address: int, event: Event) -> None:
        """Note that torch issued a copy from this address, which has ended with the event."""
        block = self._block_at(address)
        if block is not None:
            block.uses = [use for use in block.uses if not use.happened] + [event]

    def is_locked(self, address: int, nbytes: int) -> bool:
        """Whether the device can copy from these bytes by itself."""
        within = any(start <= address and address + nbytes <= start + size for start, size in self.locked.items())
        return within or self._block_at(address) is not None

    def is_own(self, address: int) -> bool:
        """Whether torch's cache has this address, in use or not."""
        return any(
            block.raw.data_ptr() <= address < block.raw.data_ptr() + block.raw.nbytes
            for block in (*self._blocks.values(), *self._free, *self._waiting)
        )

    def _block_at(self, address: int) -> Block | None:
        return next(
            (block for start, block in self._blocks.items() if start <= address < start + block.raw.nbytes), None
        )

    def _release(self, block: Block) -> None:
        self._blocks.pop(block.raw.data_ptr(), None)
        if all(event.happened for event in block.uses):
            self._give_back(block)
        else:
            self._waiting.append(block)

    def _give_back(self, block: Block) -> None:
        block.uses.clear()
        block.spoil()
        self._free.append(block)


class _Owner:
    """What an array over a block's bytes keeps: with it, the block is free."""

    def __init__(self, block: Block, free: Callable[[Block], None]) -> None:
        self._block = block
        self._free = free
        data = (block.raw.data_ptr(), False)
        self.__array_interface__ = {"data": data, "shape": (block.raw.nbytes,), "typestr": "|u1", "version": 3}

    def __del__(self) -> None:
        self._free(self._block)


def at_address(address: int, nbytes: int) -> torch.Tensor:
    """A view of memory that keeps nothing alive, uint8 (n,)."""
    with torch.inference_mode(False):
        return torch.from_numpy(np.frombuffer((ctypes.c_char * nbytes).from_address(address), np.uint8))
