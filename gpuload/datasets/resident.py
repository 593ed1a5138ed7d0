"""`DeviceCached`: a dataset that a `Loader` decodes once and keeps in the memory of the device that produces its
batches.

This module only defines the object that a user creates, which holds the dataset and the memory limit.
`gpuload.loader.device_cache` creates the cached data and stores it in `cached_data`, where it lives as long as this
object. The data exists in the main process only, and is not sent to workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, SupportsIndex

import numpy as np

from gpuload.datasets.joined import View
from gpuload.datasets.kinds import check_map_style

__all__ = ["DeviceCached", "cached_indices", "find_device_cached", "walk_datasets"]

MAX_DEPTH: Final = 8  # maximum depth of the search in nested datasets


class DeviceCached(View):
    """A map-style dataset that is cached, decoded, in the memory of the device where a `Loader` produces its batches.

    The first `iter()` of a `Loader` reads and decodes every sample once; after that, no file is read and no worker
    runs. Images and masks are cached at full size on the device; labels, boxes and all other values stay in main
    memory. With ``device="cpu"``, everything is in main memory. Batches are bit-identical to those of the uncached
    dataset, and a loader's state can be resumed with or without the cache.

    If the dataset draws random numbers, the first results are cached, so augment in ``Loader(transforms=…)`` instead.
    Each rank caches the entire dataset; loaders that read samples in the same way share the cached data. A torch
    `Subset`, such as one from `random_split`, may wrap a `DeviceCached`; all other wrappers must be inside the
    `DeviceCached`. See docs/reading.md.

    Args:
        dataset: the dataset to cache.
        bytes_limit: the maximum number of bytes, in device and main memory combined. Default: half of the memory that
            is free in each when the dataset is read; the other half is left for training.

    Raises:
        TypeError: the dataset is not map-style, or its samples change, because it has ``set_epoch()`` or
            ``state_dict()``.
        ValueError: `bytes_limit` is not positive.
        LimitError: from `iter()`: the dataset does not fit; the message states its size and the limit.

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
        self.cached_data: dict[Any, Any] = {}

    def clear(self) -> None:
        """Release the cached data. Loaders in use keep it until they are closed; new loaders read the dataset again."""
        self.cached_data.clear()

    def __getitem__(self, index: SupportsIndex) -> Any:
        return self.dataset[index]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "cached_data": {}}

    def __repr__(self) -> str:
        limit = "" if self.bytes_limit is None else f", bytes_limit={self.bytes_limit}"
        return f"DeviceCached({self.dataset!r}{limit})"


def find_device_cached(dataset: Any) -> DeviceCached | None:
    """Return the loader's dataset if it is a `DeviceCached`, or the `DeviceCached` in a torch `Subset`; otherwise None.

    Raises:
        ValueError: a `DeviceCached` is inside another dataset, where a loader cannot use it.
    """
    outer = dataset
    while _is_subset(outer):
        outer = outer.dataset
    inner = outer.dataset if isinstance(outer, DeviceCached) else outer
    if any(isinstance(part, DeviceCached) for part in walk_datasets(inner)):
        raise ValueError(
            f"there is a DeviceCached inside {type(inner).__name__}, where a Loader cannot use its cache; put it "
            f"outermost: DeviceCached({type(inner).__name__}(…)); only a torch Subset can contain a DeviceCached"
        )
    return outer if isinstance(outer, DeviceCached) else None


def cached_indices(dataset: Any) -> np.ndarray:
    """Return, for each sample of a dataset, its index in the `DeviceCached`, as int64.

    Raises:
        IndexError: an index of a `Subset` is out of range.
    """
    if isinstance(dataset, DeviceCached):
        return np.arange(len(dataset))
    inner_indices, indices = cached_indices(dataset.dataset), np.asarray(dataset.indices, np.int64)
    invalid_indices = indices[(indices < -len(inner_indices)) | (indices >= len(inner_indices))]
    if len(invalid_indices):
        name = type(dataset.dataset).__name__
        raise IndexError(
            f"index {invalid_indices[0]} of a Subset is out of range: {name} has {len(inner_indices)} samples"
        )
    return inner_indices[indices]


def _is_subset(dataset: Any) -> bool:
    return type(dataset).__module__ == "torch.utils.data.dataset" and type(dataset).__name__ == "Subset"


def walk_datasets(dataset: Any, depth: int = MAX_DEPTH) -> Iterator[Any]:
    """Yield a dataset and all datasets inside it, down to `depth` levels."""
    yield dataset
    attributes = vars(dataset) if depth and hasattr(dataset, "__dict__") else {}
    datasets = attributes.get("datasets")
    for part in (attributes.get("dataset"), *(datasets if isinstance(datasets, list | tuple) else ())):
        if part is not None:
            yield from walk_datasets(part, depth - 1)
