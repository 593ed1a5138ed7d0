"""`image_sizes`: the size of every image of a dataset, read from the images' headers by the workers of a `Loader`.

The result of a dataset that gpuload can recognise later is kept next to its index (`gpuload.datasets.stores.cached`).
This module runs in the main process.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any, Final

import numpy as np

from gpuload.checks import instance, integer, optional
from gpuload.datasets.base import ImageFileDataset
from gpuload.datasets.cached import identity_of
from gpuload.datasets.joined import is_map_style, walk_datasets
from gpuload.datasets.kinds import check_dataset, is_deterministic, is_iterable
from gpuload.datasets.scan import SETTLED_NS
from gpuload.datasets.stores.cached import load_or_build
from gpuload.datasets.stores.opening import is_url
from gpuload.decode import Decode
from gpuload.inspection.files import ImageSizes
from gpuload.loader.loader import Loader

__all__ = ["image_sizes"]

BATCH_SIZE: Final = 256
QUIET_S: Final = 1.0  # show progress only if reading takes longer


def image_sizes(dataset: Any, *, num_workers: int | None = None, decode: Decode | None = None) -> np.ndarray:
    """Return the height and width of the image of each sample, without decoding it.

    If a sample has several images, the first one counts. Of local files, files at URLs and the members of tar archives,
    only the beginning is read, unless the image's header is longer. In a terminal, the progress is shown on stderr.

    The result for gpuload's datasets is kept on disk, next to their indexes, until a file of a store changes, or until
    files are added to a folder, removed or renamed. It is not kept for a dataset with functions of yours, as from
    ``map(fn)``, and for your own datasets: gpuload cannot tell when they change.

    Args:
        dataset: a map-style dataset, whose samples have an `Encoded`, an `Image` or an H×W×C array each. The indices of
            a `Mix` are those of its concatenated datasets.
        num_workers: the number of processes that read; 0 means this process. Default: as for a `Loader`.
        decode: the `Decode` of the loader, which may turn images upright, and then exchange height and width.

    Returns:
        The heights and widths, int32 (N, 2), in the order of the dataset.

    Raises:
        SampleError: an image cannot be read; the message has its index and path.
        TypeError: the dataset is not map-style.

    Example:
        >>> pictures = [(np.zeros((40, 60, 3), np.uint8), "a"), (np.zeros((50, 20, 3), np.uint8), "b")]
        >>> image_sizes(pictures, num_workers=0)
        array([[40, 60],
               [50, 20]], dtype=int32)
    """
    options = optional(instance, "decode", decode, cls=Decode) or Decode()
    optional(integer, "num_workers", num_workers, minimum=0)
    check_dataset(dataset)
    if is_iterable(dataset) or not is_map_style(dataset):
        raise TypeError(
            f"image_sizes() takes a map-style dataset, which has __len__ and __getitem__, got {type(dataset).__name__}"
        )

    if not is_deterministic(dataset):
        return _read_sizes(dataset, num_workers, options)
    start_ns, folder_times = time.time_ns(), _folder_times(dataset)
    is_settled = max(folder_times, default=0) < start_ns - SETTLED_NS
    arrays = load_or_build(
        f"sizes 1 {identity_of(dataset).hex()} {options!r}",
        folder_times,
        lambda: {"sizes": _read_sizes(dataset, num_workers, options)},
        is_cacheable=lambda arrays: is_settled,
        min_bytes=0,
    )
    return arrays["sizes"]


def _folder_times(dataset: Any) -> list[int]:
    """Return the modification times of all folders of local image files, which change if a file is added or removed."""
    folders: dict[str, None] = {}
    for part in walk_datasets(dataset):
        if isinstance(part, ImageFileDataset) and not is_url(part.root):
            folders |= dict.fromkeys(map(os.path.dirname, part.paths))
    return [os.stat(folder).st_mtime_ns if os.path.isdir(folder) else 0 for folder in folders]


def _read_sizes(dataset: Any, num_workers: int | None, decode: Decode) -> np.ndarray:
    sizes_hw, start_s, done = np.zeros((len(dataset), 2), np.int32), time.monotonic(), 0
    if not len(dataset):
        return sizes_hw
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    options: Any = {"num_workers": num_workers, "device": "cpu", "decode": decode, "rank": 0, "world_size": 1}
    with Loader(ImageSizes(dataset, decode), BATCH_SIZE, **options) as loader:
        for batch in loader:
            sizes_hw[done : done + len(batch)] = batch
            done += len(batch)
            if is_terminal and time.monotonic() - start_s > QUIET_S:
                text = f"\rgpuload: reading image sizes, {done:,} of {len(dataset):,}"
                print(text, end="" if done < len(dataset) else "\n", file=sys.stderr, flush=True)
    return sizes_hw
