"""What a `Loader` has in the place of a DataLoader's sampler, where gpuload itself decides the order. Main process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpuload.order.schedule import shares_of

__all__ = ["OwnSampler"]


class OwnSampler:
    """This rank's part of an epoch, as a `DistributedSampler` gives it.

    Iterating gives the indices of the whole epoch that the next `iter()` of the loader begins, in their order; its
    length is their number, the same on each rank. With ``drop_last=True`` those that are left out do not count; with
    ``uneven="exact"`` rows that only fill up do.

    Raises:
        TypeError: when it is asked for one of these, with an iterable dataset.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def set_epoch(self, epoch: int) -> None:
        """As `Loader.set_epoch`."""
        self._loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        batches = self._shares().batches(self._loader._cursor.following.epoch)
        return (index for rows in batches for index in rows.indices.tolist())

    def __len__(self) -> int:
        return self._shares().rows

    def _shares(self) -> Any:
        order = self._loader._options.order
        if order.iterable:
            raise TypeError("an iterable dataset says itself what comes next, so the Loader's sampler has no indices")
        return shares_of(order)

    def __repr__(self) -> str:
        return f"<sampler of {self._loader!r}>"
