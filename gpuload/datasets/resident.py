"""`DeviceCached`: a dataset that a `Loader` decodes once, and keeps where its batches are made.

Here is only what the user holds: which dataset, how much memory. What is kept is made by `gpuload.loader.device_cache`
and is in `on_device` as long as this object lives, in the main process alone: it does not travel to workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, SupportsIndex

import numpy as np

from gpuload.datasets.joined import View
from gpuload.datasets.kinds import check_map_style

__all__ = ["DeviceCached", "datasets_in", "find_resident", "numbers_of"]

DEPTH: Final = 8  # how deep is looked into datasets of datasets


class DeviceCached(View):
    """A map-style dataset that stays, decoded, in the memory of the device where a `Loader` makes its batches.

    The first `iter()` of a `Loader` reads and decodes every sample once; from the first batch on no file is read and no
    worker runs. Images and masks are kept whole; labels, boxes and all other leaves in the main process's memory, as
    all is with ``device="cpu"``. Batches have the same bits as without, and a state of the one resumes in the other.

    What a dataset draws at random is kept as it was drawn first: augment in ``Loader(transforms=…)``. Each rank keeps
    the whole dataset; loaders that read samples alike share what is kept. Torch's `Subset` and `random_split` may stand
    between this and the `Loader`; other datasets of datasets go inside. See docs/reading.md.

    Args:
        dataset: what to keep.
        bytes_limit: the most bytes for it, of device and main memory together. Default: half of what is free in each
            when it is read; the rest is for training.

    Raises:
        TypeError: it is no map-style dataset; it has ``set_epoch()`` or ``state_dict()``, so its samples change.
        ValueError: `bytes_limit` is not positive.
        LimitError: from `iter()`, it does not fit; the message has the figures.

    Example:
        >>> import gpuload as gl, numpy as np
        >>> pictures = [(gl.Image(np.full((32, 32, 3), i, np.uint8)), i) for i in range(10)]
        >>> loader = gl.Loader(gl.DeviceCached(pictures), batch_size=5, shuffle=True, num_workers=0, device="cpu")
        >>> for images, labels in loader:
        ...     print(tuple(images.shape), labels.tolist())
        (5, 3, 32, 32) [3, 2, 4, 1, 8]
        (5, 3, 32, 32) [9, 5, 0, 6, 7]
        >>> loader.stats().resident_bytes
        30720
    """

    def __init__(self, dataset: Any, *, bytes_limit: int | None = None) -> None:
        check_map_style(dataset, "DeviceCached", ("set_epoch", "state_dict"))
        if bytes_limit is not None:
            if isinstance(bytes_limit, bool) or not isinstance(bytes_limit, int):
                raise TypeError(f"bytes_limit must be a number of bytes, such as 8 << 30, or None, got {bytes_limit!r}")
            if bytes_limit < 1:
                raise ValueError(f"bytes_limit must be at least 1 byte, got {bytes_limit}")
        super().__init__(dataset)
        self.bytes_limit = bytes_limit
        self.on_device: dict[Any, Any] = {}

    def clear(self) -> None:
        """Let go of what is kept. Loaders that use it keep it until they are closed; the next ones read again."""
        self.on_device.clear()

    def __getitem__(self, index: SupportsIndex) -> Any:
        return self.dataset[index]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "on_device": {}}

    def __repr__(self) -> str:
        limit = "" if self.bytes_limit is None else f", bytes_limit={self.bytes_limit}"
        return f"DeviceCached({self.dataset!r}{limit})"


def find_resident(dataset: Any) -> DeviceCached | None:
    """The `DeviceCached` that a loader's dataset is, or is a torch `Subset` of; None if there is none.

    Raises:
        ValueError: there is one that a loader cannot use, inside of another dataset.
    """
    outer = dataset
    while _is_subset(outer):
        outer = outer.dataset
    inner = outer.dataset if isinstance(outer, DeviceCached) else outer
    if any(isinstance(part, DeviceCached) for part in datasets_in(inner)):
        raise ValueError(
            f"there is a DeviceCached inside of {type(inner).__name__}, where a Loader cannot use what it keeps; put "
            f"it outermost: DeviceCached({type(inner).__name__}(…)), or only a torch Subset around it"
        )
    return outer if isinstance(outer, DeviceCached) else None


def numbers_of(dataset: Any) -> np.ndarray:
    """Return the number that each sample of a dataset has in the `DeviceCached`, int64.

    Raises:
        IndexError: there is no such sample.
    """
    if isinstance(dataset, DeviceCached):
        return np.arange(len(dataset))
    numbers, indices = numbers_of(dataset.dataset), np.asarray(dataset.indices, np.int64)
    outside = indices[(indices < -len(numbers)) | (indices >= len(numbers))]
    if len(outside):
        name = type(dataset.dataset).__name__
        raise IndexError(f"there is no sample {outside[0]} among the {len(numbers)} of {name}")
    return numbers[indices]


def _is_subset(dataset: Any) -> bool:
    return type(dataset).__module__ == "torch.utils.data.dataset" and type(dataset).__name__ == "Subset"


def datasets_in(dataset: Any, depth: int = DEPTH) -> Iterator[Any]:
    """Yield a dataset, and the datasets that it is made of."""
    yield dataset
    inner = vars(dataset) if depth and hasattr(dataset, "__dict__") else {}
    several = inner.get("datasets")
    for part in (inner.get("dataset"), *(several if isinstance(several, list | tuple) else ())):
        if part is not None:
            yield from datasets_in(part, depth - 1)
