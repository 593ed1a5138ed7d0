"""A device as a row needs it: marks on its stream, and its memory. On the CPU the host's clock serves, so that every
row can be run through without a GPU."""

from __future__ import annotations

import time
from typing import Any

import torch

__all__ = ["Runtime"]


class Runtime:
    """The device that rows are measured on.

    Args:
        device: the CPU, or a device with streams and events.
    """

    def __init__(self, device: str) -> None:
        self.device = torch.empty(0, device=device).device  # with its number, which decoders ask for
        self._module: Any = None if self.device.type == "cpu" else torch.get_device_module(self.device)
        self._used_before_mb = self._used_mb()

    def mark(self) -> Any:
        """A point on the caller's current stream, for `ms`."""
        if self._module is None:
            return time.perf_counter()
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, start: Any, end: Any) -> float:
        """The device's milliseconds from one mark to another, once it has come past both."""
        return 1000 * (end - start) if self._module is None else start.elapsed_time(end)

    def synchronize(self) -> None:
        """Wait for all that was issued."""
        if self._module is not None:
            self._module.synchronize(self.device)

    def memory(self) -> dict[str, float]:
        """MB of the device at most so far: of torch's allocator in this process, and of all that came with it. Empty
        on the CPU."""
        if self._module is None:
            return {}
        peak_mb = self._module.max_memory_allocated(self.device) / 1e6
        return {"peak_mb": peak_mb, "device_mb": (self._used_mb() or 0.0) - (self._used_before_mb or 0.0)}

    def _used_mb(self) -> float | None:
        if self._module is None:
            return None
        free, total = self._module.mem_get_info(self.device)
        return (total - free) / 1e6
