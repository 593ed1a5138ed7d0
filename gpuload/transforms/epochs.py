"""Sizes that depend on the epoch: progressive resizing.

A size is a function of the epoch's number alone, so an epoch that is gone on with has the sizes that it had, and each
batch has those of its own epoch, whenever it is made. A chain is made into that of an epoch before anything is drawn
(`Chain.at`), in workers as in the main process.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpuload.transforms.arguments import whole

__all__ = ["ByEpoch", "by_epoch"]


@dataclass(frozen=True, repr=False)
class ByEpoch:
    """A size for each epoch: (first epoch, size) in ascending order, or a function."""

    sizes: tuple[tuple[int, Any], ...] | Callable[[int], Any]

    def at_epoch(self, epoch: int) -> Any:
        """The size in an epoch."""
        if not isinstance(self.sizes, tuple):
            return self.sizes(epoch)
        return self.sizes[bisect_right(self.sizes, epoch, key=lambda entry: entry[0]) - 1][1]

    def checked(self, check: Callable[[Any], Any]) -> ByEpoch:
        """The same with sizes as `check` returns them; what a function gives is checked when it is used."""
        if not isinstance(self.sizes, tuple):
            return self
        return ByEpoch(tuple((epoch, check(size)) for epoch, size in self.sizes))

    def __repr__(self) -> str:
        if isinstance(self.sizes, tuple):
            return f"by_epoch({dict(self.sizes)!r})"
        return f"by_epoch({getattr(self.sizes, '__qualname__', type(self.sizes).__name__)})"


def by_epoch(sizes: Mapping[int, Any] | Callable[[int], Any]) -> Any:
    """A size that changes from epoch to epoch, as `size` of `Resize`, the crops and `Mosaic`.

    Args:
        sizes: by the first epoch that has them, from 0 on: ``{0: 128, 10: 176, 20: 224}``. Or a function of the epoch's
            number, which must depend on nothing else; workers get a copy of it. A state of the loader knows a function
            by its name only.

    Raises:
        TypeError, ValueError: it is neither, or does not begin at epoch 0.

    Example:
        >>> from gpuload import transforms as T
        >>> chain = T.Chain([T.RandomResizedCrop(by_epoch({0: 128, 10: 176}))])
        >>> chain.at(9).output_size_hw, chain.at(10).output_size_hw
        ((128, 128), (176, 176))
    """
    if callable(sizes):
        return ByEpoch(sizes)
    if not isinstance(sizes, Mapping):
        raise TypeError(
            "by_epoch() takes a dict of sizes by their first epoch, such as {0: 128, 10: 176}, or a function of the "
            f"epoch, got {type(sizes).__name__}: {sizes!r}"
        )
    found = [(whole("by_epoch({epoch: size})", epoch, least=0), size) for epoch, size in sizes.items()]
    found.sort(key=lambda entry: entry[0])
    if not found or found[0][0] != 0:
        raise ValueError(f"by_epoch() needs a size for epoch 0, got {dict(sizes)!r}; write {{0: …, …}}")
    return ByEpoch(tuple(found))
