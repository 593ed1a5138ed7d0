"""`DeviceCached`: what it takes, what it passes on, and where a loader finds it."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import ConcatDataset, IterableDataset, Subset

import gpuload as gl
from gpuload.datasets.kinds import is_deterministic
from gpuload.datasets.resident import cached_indices, find_device_cached


class Stateful(list[int]):
    def state_dict(self) -> dict[str, Any]:
        return {}


class Changing(list[int]):
    def set_epoch(self, epoch: int) -> None: ...


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(())


@pytest.mark.parametrize(
    ("dataset", "told"),
    [
        (Stream(), "takes a map-style dataset, which has __len__ and __getitem__, got Stream"),
        (iter([1]), "got list_iterator"),
        (Stateful(), "Stateful has state_dict(), so its samples change while it is used, but cached samples would not"),
        (Changing(), "Changing has set_epoch(), so its samples change while it is used, but cached samples would not"),
    ],
)
def test_what_cannot_be_kept_is_refused(dataset, told):
    with pytest.raises(TypeError) as error:
        gl.DeviceCached(dataset)
    assert told in str(error.value)


def test_a_limit_is_a_number_of_bytes():
    with pytest.raises(TypeError, match=r"bytes_limit must be a number of bytes, such as 8 << 30, or None, got '8 GB'"):
        gl.DeviceCached([1], bytes_limit="8 GB")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="bytes_limit must be at least 1 byte, got 0"):
        gl.DeviceCached([1], bytes_limit=0)


def test_it_is_its_dataset_for_all_others(jpeg_folder):
    folder = gl.ImageFolder(jpeg_folder)
    cached = gl.DeviceCached(folder, bytes_limit=1 << 30)
    assert (len(cached), cached.classes, cached[3]) == (len(folder), folder.classes, folder[3])
    assert repr(cached) == f"DeviceCached({folder!r}, bytes_limit={1 << 30})"
    assert is_deterministic(cached)
    assert not is_deterministic(gl.DeviceCached([1]))
    with pytest.raises(AttributeError, match="'DeviceCached' object has no attribute '_nothing'"):
        _ = cached._nothing


def test_what_is_kept_does_not_travel():
    cached = gl.DeviceCached([1, 2])
    cached.cached_data["key"] = object()
    assert pickle.loads(pickle.dumps(cached)).cached_data == {}
    cached.clear()
    assert cached.cached_data == {}


def test_a_loader_finds_it_outermost_or_in_subsets():
    cached = gl.DeviceCached(list(range(10)))
    nested = Subset(Subset(cached, [9, 7, 5, 3]), [3, 0])
    assert find_device_cached(cached) is find_device_cached(nested) is cached
    assert find_device_cached([1, 2]) is None
    assert cached_indices(nested).tolist() == [3, 9]
    with pytest.raises(IndexError, match="index 10 of a Subset is out of range: DeviceCached has 10 samples"):
        cached_indices(Subset(cached, [10]))


@pytest.mark.parametrize("depth", [0, 1])
def test_elsewhere_it_would_do_nothing_and_is_refused(depth):
    dataset: Any = ConcatDataset([gl.DeviceCached([1]), gl.DeviceCached([2])])
    for _ in range(depth):
        dataset = gl.DeviceCached(dataset)
    with pytest.raises(ValueError, match=r"a DeviceCached inside ConcatDataset, where a Loader cannot use its cache"):
        gl.Loader(dataset, num_workers=0)
