"""`headspace`: how much faster a training loop could be with a loader that costs nothing.

The loop first gets batches of its own loader, then copies of one of them, which are there at once. The second rate is
what the loop does without a loader, so it bounds what a faster one could bring. Runs in the thread that iterates;
between the two measurements the loader's epoch is ended, so that its workers do not take CPUs from the second one.

The host runs ahead of a GPU, so each measurement begins and ends with the device synchronized, and nothing within it
waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final, NoReturn

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from gpuload.order.options import check_integer
from gpuload.stage import device as devices

__all__ = ["Headspace", "HeadspaceRates", "headspace"]

WARM_UP: Final = 3  # batches before the first measurement: workers start, the first steps compile and allocate
SAME: Final = 1.05  # a smaller gain is noise of the measurement


@dataclass(frozen=True)
class HeadspaceRates:
    """The two rates of a training loop.

    Attributes:
        loader: batches/s with the loader's own batches.
        copies: batches/s with copies of one batch: no loader could bring more.
    """

    loader: float
    copies: float

    @property
    def gain(self) -> float:
        """How many times as fast the loop would be with a loader that costs nothing; about 1: loading costs nothing
        now."""
        return self.copies / self.loader

    def __str__(self) -> str:
        lines = [
            f"headspace: {_rate(self.loader)} with the loader,",
            f"           {_rate(self.copies)} with copies of one batch",
        ]
        if self.gain < SAME:
            lines.append("The loop does not wait for its loader: a faster one would bring nothing.")
        else:
            lines.append(f"A faster loader could make this loop at most {self.gain:.2f} times as fast.")
        return "\n".join(lines)


def _rate(batches_per_s: float) -> str:
    return f"{batches_per_s:,.2f} batches/s ({1000 / batches_per_s:,.1f} ms a step)"


def headspace(loader: Iterable[Any], steps: int = 50) -> Headspace:
    """Measure the most that any loader could bring to a training loop: iterate over this in place of the loader.

    The loop gets `steps` batches of the loader, then as many copies of its first batch, each made just before its step,
    since a step may write into its batch. At the end it prints both rates. Three more batches come before, while
    workers start and the first steps compile; they do not count. If an epoch is shorter, the next one follows; then
    its smaller last batch counts like the others, unless the loader has ``drop_last=True``.

    The steps train the model, also with the copies: do not keep it. What the loader gave is gone from its epoch.

    Args:
        loader: a `Loader`, torch's ``DataLoader``, or anything else that can be iterated over.
        steps: of each measurement, at least 1.

    Returns:
        A `Headspace`, an iterator. Once it is through, its ``rates`` has ``loader`` and ``copies`` (batches/s) and
        ``gain``, their ratio.

    Raises:
        TypeError, ValueError: `steps` is not an integer of at least 1, or `loader` cannot be iterated over.
        ValueError: while iterating, if the loader gives too few batches.

    Example:
        >>> loop = headspace([torch.zeros(32, 3, 8, 8) for _ in range(4)], steps=10)
        >>> sum(len(images) for images in loop) // 32  # doctest: +ELLIPSIS
        headspace: ... batches/s (... ms a step) with the loader,
                   ... batches/s (... ms a step) with copies of one batch
        ...
        23
        >>> loop.rates.gain > 0
        True
    """
    if not isinstance(loader, Iterable):
        raise TypeError(f"headspace takes a loader, which can be iterated over; got a {type(loader).__name__}")
    return Headspace(loader, check_integer("steps", steps, 1))


class Headspace(Iterator[Any]):
    """The batches of `headspace`, and then their rates.

    Attributes:
        rates: both rates; None until the last batch was taken and the loop asked for another one.
    """

    def __init__(self, loader: Iterable[Any], steps: int) -> None:
        self.rates: HeadspaceRates | None = None
        self._loader, self._steps = loader, steps
        self._batches: Iterator[Any] | None = None
        self._delivered = 0
        self._first: Any = None  # a copy of the first batch, made before the loop saw it
        self._devices: set[torch.device] = set()  # of its tensors, without the CPU
        self._began_s = self._loader_s = 0.0

    def __len__(self) -> int:
        """Return the number of batches in all."""
        return WARM_UP + 2 * self._steps

    def __next__(self) -> Any:
        of_loader = WARM_UP + self._steps
        if self._delivered == WARM_UP:
            self._began_s = self._now()
        elif self._delivered == of_loader:
            self._loader_s = self._now() - self._began_s
            self._batches = None  # ends the epoch, and the work of its workers
            self._began_s = self._now()
        elif self._delivered == len(self):
            self._end()
        batch = self._from_loader() if self._delivered < of_loader else self._copy()
        self._delivered += 1
        return batch

    def _end(self) -> NoReturn:
        if self.rates is None:
            self.rates = HeadspaceRates(self._steps / self._loader_s, self._steps / (self._now() - self._began_s))
            self._first = None
            print(self.rates)
        raise StopIteration(self.rates)

    def _from_loader(self) -> Any:
        for batches in (self._batches, self._loader):  # what is left of an epoch, then the next one
            if batches is not None:
                self._batches = iter(batches)
                for batch in self._batches:
                    if self._delivered == 0:
                        self._first = _copied(batch)
                        tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
                        self._devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
                    return batch
        least = WARM_UP + 1
        remedy = f"steps={self._delivered - WARM_UP}, or " if self._delivered >= least else ""
        raise ValueError(
            f"headspace(steps={self._steps}) needs {WARM_UP + self._steps} batches of its loader, of which the first "
            f"{WARM_UP} do not count, but it ended after {self._delivered}; expected {remedy}a loader that can be "
            "iterated over again"
        )

    def _copy(self) -> Any:
        """Return a new copy. Making it does not count on the CPU; a GPU copies a batch in microseconds."""
        began_s = perf_counter()
        batch = _copied(self._first)
        if not self._devices:
            self._began_s += perf_counter() - began_s
        return batch

    def _now(self) -> float:
        """Return the time once the current device, and those of the batch, have done all that they were given."""
        if devices.is_available():
            for device in {devices.current_device(), *self._devices}:
                torch.accelerator.synchronize(device)
        return perf_counter()


def _copied(batch: Any) -> Any:
    """Return a batch in new memory and in new lists and dicts."""

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().clone()
        return leaf.copy() if isinstance(leaf, np.ndarray) else deepcopy(leaf)

    return tree_map(copied, batch)
