"""Datasets one after the other (`Joined`), which is what ``+`` makes; and indices that may count from the end.

Made in the main process, copied to workers. No torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Any, SupportsIndex

import numpy as np

from gpuload.datasets.classes import warn_of_other_classes
from gpuload.datasets.kinds import fetched, forget, natural_blocks

__all__ = ["Joined", "from_start", "has_samples"]


class Joined:
    """Datasets one after the other, as torch's ConcatDataset has them: what ``+`` makes. Workers need no torch for it.

    Attributes:
        datasets: the datasets.
        cumulative_sizes: where each ends.
    """

    def __init__(self, datasets: Iterable[Any]) -> None:
        self.datasets = list(datasets)
        warn_of_other_classes(self.datasets)
        self.cumulative_sizes: list[int] = np.cumsum([len(dataset) for dataset in self.datasets]).tolist()

    def __len__(self) -> int:
        return self.cumulative_sizes[-1]

    def __getitem__(self, index: SupportsIndex) -> Any:
        which, number = self._place(index)
        return self.datasets[which][number]

    def __getitems__(self, indices: Iterable[SupportsIndex]) -> list[Any]:
        """Several samples; those of one dataset are asked for together."""
        places = [self._place(index) for index in indices]
        samples: list[Any] = [None] * len(places)
        for which in sorted({which for which, _ in places}):
            rows = [row for row, (its, _) in enumerate(places) if its == which]
            for row, sample in zip(rows, fetched(self.datasets[which], [places[row][1] for row in rows]), strict=True):
                samples[row] = sample
        return samples

    def will_need(self, indices: Iterable[SupportsIndex]) -> None:
        """Let each dataset that can have the kernel read these samples, which are asked for soon."""
        for which, number in map(self._place, indices):
            if (will_need := getattr(self.datasets[which], "will_need", None)) is not None:
                will_need([number])

    def _forget(self, index: int) -> list[str]:
        """See `gpuload.datasets.kinds.forget`."""
        which, number = self._place(index)
        return forget(self.datasets[which], number)

    def blocks(self) -> np.ndarray | None:
        """Where the blocks of each dataset begin, and the length; single samples of one that has none. None if none
        has any."""
        own = [natural_blocks(dataset) for dataset in self.datasets]
        if all(bounds is None for bounds in own):
            return None
        sizes = np.diff([0, *self.cumulative_sizes])
        whole = [np.arange(size + 1) if bounds is None else bounds for bounds, size in zip(own, sizes, strict=True)]
        starts = [0, *self.cumulative_sizes[:-1]]
        return np.concatenate([bounds + start for bounds, start in zip(whole, starts, strict=True)])

    def _place(self, index: SupportsIndex) -> tuple[int, int]:
        """The number of its dataset, and its number in there."""
        number = from_start(index, len(self), f"the joined datasets have {len(self)} samples")
        which = bisect_right(self.cumulative_sizes, number)
        return which, number - (self.cumulative_sizes[which - 1] if which else 0)

    def __add__(self, other: Any) -> Joined:
        return Joined([*self.datasets, other]) if has_samples(other) else NotImplemented

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.datasets))


def from_start(index: SupportsIndex, count: int, text: str) -> int:
    """An index that may count from the end, as one from 0."""
    try:
        number = index.__index__()
    except AttributeError:
        raise TypeError(f"an index must be an integer, got {index!r} ({type(index).__name__})") from None
    if not -count <= number < count:
        raise IndexError(f"index {number} is out of range: {text}")
    return number % count


def has_samples(other: Any) -> bool:
    return hasattr(other, "__getitem__") and hasattr(other, "__len__") and not isinstance(other, str | dict)
