"""`headspace`: how much faster a training loop could be with a loader that takes no time.

The loop first gets batches from its own loader, then copies of one batch, which are available immediately. Its rate
with the copies bounds the benefit of a faster loader. This module runs in the thread that iterates. The loader's epoch
ends between the two measurements, so that its workers use no CPUs during the second.

The host runs ahead of a GPU, so the device is synchronized at the beginning and end of each measurement, but not within
it. For the same reason, the copies are made before the second measurement: if they were made between the steps, the
device would work meanwhile, and the time to make them could be neither counted nor subtracted. Only a copy that was
changed by its step is rewritten before its next turn. Without an accelerator, nothing runs meanwhile, and the time to
rewrite a copy is subtracted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final, NoReturn

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from gpuload.checks import integer
from gpuload.stage import device as devices

__all__ = ["Headspace", "HeadspaceRates", "headspace"]

WARM_UP: Final = 3  # batches before the first measurement, while workers start and the first steps compile and allocate
COPIES: Final = 3  # a device may still use the batches of two steps while the host issues a third
NOISE: Final = 1.05  # a smaller gain is measurement noise


@dataclass(frozen=True)
class HeadspaceRates:
    """The two rates of a training loop.

    Attributes:
        loader: batches/s with the loader's own batches.
        copies: batches/s with copies of one batch, the maximum with any loader.
    """

    loader: float
    copies: float

    @property
    def gain(self) -> float:
        """The factor by which a loader that takes no time would speed up the loop; about 1 if loading takes no time
        already."""
        return self.copies / self.loader

    def __str__(self) -> str:
        lines = [
            f"headspace: {_rate(self.loader)} with the loader,",
            f"           {_rate(self.copies)} with copies of one batch",
        ]
        if self.gain < NOISE:
            lines.append("The loop does not wait for its loader: a faster loader would not help.")
        else:
            lines.append(f"A faster loader could make this loop at most {self.gain:.2f} times as fast.")
        return "\n".join(lines)


def _rate(batches_per_s: float) -> str:
    return f"{batches_per_s:,.2f} batches/s ({1000 / batches_per_s:,.1f} ms a step)"


def headspace(loader: Iterable[object], steps: int = 50) -> Headspace:
    """Measure how much any loader could speed up a training loop: iterate over the result instead of the loader.

    The loop gets three batches to warm up, while workers start and the first steps compile, then `steps` batches from
    the loader, then the same number of copies of the loader's first batch. Three copies are made in advance and used in
    turn, in page-locked memory if the batch is. A step may modify its batch: tensors that it has changed, and values
    that are not tensors, are copied again before the next turn. At the end, both rates are printed. If an epoch is too
    short, the next epoch follows. A smaller last batch counts as a full one, so use a loader with ``drop_last=True``.

    All steps train the model, including those on copies, so discard the model afterwards. The loader's epoch has
    advanced by the batches used.

    Args:
        loader: a `Loader`, torch's ``DataLoader``, or any other iterable of batches.
        steps: the number of steps in each measurement, at least 1.

    Returns:
        A `Headspace`, an iterator. After the last batch, its ``rates`` has ``loader`` and ``copies`` (batches/s) and
        ``gain``, their ratio.

    Raises:
        TypeError, ValueError: `steps` is not an integer of at least 1, or `loader` is not iterable.
        ValueError: while iterating, if the loader yields too few batches.

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
        raise TypeError(f"headspace() needs an iterable loader, got {type(loader).__name__}")
    return Headspace(loader, integer("steps", steps, minimum=1))


class Headspace(Iterator[Any]):
    """An iterator over the batches of `headspace`, which ends with the rates.

    Attributes:
        rates: both rates; None until the loop has requested another batch after the last one.
    """

    def __init__(self, loader: Iterable[Any], steps: int) -> None:
        self.rates: HeadspaceRates | None = None
        self._loader, self._steps = loader, steps
        self._batches: Iterator[Any] | None = None
        self._delivered = 0
        self._first_batch: object = None  # a copy of the first batch, made before the loop received it
        self._copies: list[_Copy] = []  # of the first batch
        self._devices: set[torch.device] = set()  # the devices of the batch's tensors, except the CPU
        self._began_s = self._loader_s = 0.0

    def __len__(self) -> int:
        """Return the total number of batches."""
        return WARM_UP + 2 * self._steps

    def __next__(self) -> Any:
        loader_batches = WARM_UP + self._steps
        if self._delivered == WARM_UP:
            self._began_s = self._synchronized_time()
        elif self._delivered == loader_batches:
            self._loader_s = self._synchronized_time() - self._began_s
            self._batches = None  # ends the epoch, so that its workers stop
            self._copies = [_Copy(self._first_batch) for _ in range(COPIES)]
            self._began_s = self._synchronized_time()
        elif self._delivered == len(self):
            self._end()
        batch = self._load_batch() if self._delivered < loader_batches else self._next_copy()
        self._delivered += 1
        return batch

    def _end(self) -> NoReturn:
        if self.rates is None:
            self.rates = HeadspaceRates(
                self._steps / self._loader_s, self._steps / (self._synchronized_time() - self._began_s)
            )
            self._first_batch, self._copies = None, []
            print(self.rates)
        raise StopIteration(self.rates)

    def _load_batch(self) -> Any:
        for batches in (self._batches, self._loader):  # the rest of the epoch, then the next epoch
            if batches is not None:
                self._batches = iter(batches)
                for batch in self._batches:
                    if self._delivered == 0:
                        self._first_batch = tree_map(_copy_leaf, batch)
                        tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
                        self._devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
                    return batch
        min_batches = WARM_UP + 1
        remedy = f"steps={self._delivered - WARM_UP}, or " if self._delivered >= min_batches else ""
        raise ValueError(
            f"headspace(steps={self._steps}) needs {WARM_UP + self._steps} batches, including {WARM_UP} to warm up, "
            f"but the loader ended after {self._delivered}; use {remedy}a loader that can be iterated over repeatedly"
        )

    def _next_copy(self) -> Any:
        """Return the next copy of the first batch. Without an accelerator, the time that this takes is not counted."""
        began_s = perf_counter()
        batch = self._copies[self._delivered % COPIES].restore()
        if not devices.is_available():
            self._began_s += perf_counter() - began_s
        return batch

    def _synchronized_time(self) -> float:
        """Wait until the current device and the batch's devices are idle, and return the time."""
        if devices.is_available():
            for device in {devices.current_device(), *self._devices}:
                torch.accelerator.synchronize(device)
        return perf_counter()


class _Copy:
    """A copy of a batch that the loop gets several times, including its lists and dicts."""

    def __init__(self, batch: Any) -> None:
        self._originals, self._structure = tree_flatten(batch)
        self._leaves = [_copy_leaf(leaf) for leaf in self._originals]
        self._versions = [_version(leaf) for leaf in self._leaves]

    def restore(self) -> Any:
        """Return the batch as it was, whatever the last step has done to it."""
        for index, (original, leaf) in enumerate(zip(self._originals, self._leaves, strict=True)):
            if not isinstance(leaf, torch.Tensor):
                self._leaves[index] = _copy_leaf(original)
            elif _version(leaf) != self._versions[index]:
                leaf.copy_(original)
                self._versions[index] = _version(leaf)
        # A view: `requires_grad_` of the last step has no effect on it, but it has the version counter of its tensor.
        return tree_unflatten(map(_detach, self._leaves), self._structure)


def _copy_leaf(leaf: object) -> Any:
    if isinstance(leaf, torch.Tensor):
        with torch.inference_mode(False):  # tensors that are made in inference mode have no version
            copy = leaf.detach().clone()
            return copy.pin_memory() if leaf.is_pinned() else copy
    return leaf.copy() if isinstance(leaf, np.ndarray) else deepcopy(leaf)


def _version(leaf: Any) -> int:
    """Return how often a tensor has been changed in place."""
    return leaf._version if isinstance(leaf, torch.Tensor) else 0


def _detach(leaf: object) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
