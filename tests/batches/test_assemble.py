"""Batches of plain arrays that are a slot of the ring: right for as long as the user keeps them, then used again."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest
import torch

import gpuload as gl
from gpuload.ring.ring import LENT_SHARE, Ring

ROW = 1 << 18  # four samples are enough to be lent


class Rows:
    """Sample i is `ROW` times i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index):
        return np.full(ROW, index % 251, np.uint8), index


def loader(length=64, **options):
    return gl.Loader(Rows(length), 8, **{"num_workers": 0, "device": "cpu", **options})


def lent(loader_) -> int:
    """How many slots the user has."""
    ring = loader_._session.ring
    ring.collect()
    return len(ring._lent)


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_stays_what_it_is_and_its_slot_comes_back(workers):
    with loader(num_workers=workers) as loader_:
        for _ in range(2):
            kept = []
            for number, (rows, indices) in enumerate(loader_):
                assert rows.shape == (8, ROW)
                assert rows.dtype == torch.uint8
                assert (rows == indices[:, None] % 251).all()
                if number % 3 == 0:
                    kept.append((rows[2:5, :100], indices[2:5]))  # a view keeps the memory too
        assert lent(loader_) >= 2
        for rows, indices in kept:
            assert (rows == indices[:, None] % 251).all()
        del rows, indices, kept
        gc.collect()
        assert lent(loader_) == 0


def test_a_batch_is_not_copied():
    with loader() as loader_:
        batches = iter(loader_)
        next(batches)
        rows, _ = next(batches)  # from the first one on it is known what the samples are
        memory = loader_._session.ring.bytes
        first = memory.__array_interface__["data"][0]
        assert first <= rows.data_ptr() < first + len(memory)


def test_all_batches_can_be_kept_beyond_what_is_lent():
    ring_bytes = 16 * 8 * ROW
    with loader(30 * 8, ring_bytes=ring_bytes) as loader_:
        kept = list(loader_)
        assert 1 <= lent(loader_) <= 16 // LENT_SHARE
        for rows, indices in kept:
            assert (rows == indices[:, None] % 251).all()


@pytest.mark.slow
def test_a_batch_outlives_its_loader():
    with loader() as loader_:
        kept = list(loader_)
    del loader_
    gc.collect()
    for rows, indices in kept:
        assert (rows == indices[:, None] % 251).all()
        rows.zero_()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_keeps_what_it_was_forked_with():
    with loader(40 * 8) as loader_:
        batches = iter(loader_)
        next(batches)
        rows, indices = next(batches)
        reads, writes = os.pipe()
        answers, answer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(writes)
            os.read(reads, 1)  # until the parent has let go of the batch and taken many more
            whole = (rows.numpy() == indices.numpy()[:, None] % 251).all()  # torch's threads do not survive a fork
            os.write(answer, b"1" if whole else b"0")
            os._exit(0)
        del rows, indices
        right = all(bool((rows == indices[:, None] % 251).all()) for rows, indices in batches)
        os.close(writes)
        assert right
        assert os.read(answers, 1) == b"1"
        assert os.waitpid(child, 0)[1] == 0
        for fd in (reads, answers, answer):
            os.close(fd)


def test_a_slot_comes_back_when_the_last_of_its_arrays_is_gone():
    ring = Ring(1 << 20)
    slot = ring.acquire(1 << 16)
    assert slot is not None
    first, second = ring.view(slot)[:100], ring.view(slot)[100:200]
    assert ring.lend(slot, [first, second])
    del first
    assert not ring.collect()
    del second
    assert ring.collect()
    assert ring.acquire(1 << 16) is slot
    ring.close()


def test_no_more_than_a_part_of_the_ring_is_lent():
    ring = Ring(1 << 20)
    slot = ring.acquire((1 << 20) // LENT_SHARE)
    other = ring.acquire(1 << 16)
    assert slot is not None
    assert other is not None
    array, another = ring.view(slot)[:1], ring.view(other)[:1]
    assert ring.lend(slot, [array])
    assert not ring.lend(other, [another])
    ring.close()


class Pictures:
    """Sample i: an image whose size and levels depend on i, as large as a photograph."""

    def __init__(self, length: int, *, bad: tuple[int, ...] = ()) -> None:
        self.length = length
        self.bad = bad

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index):
        if index in self.bad:
            raise ValueError("bad")
        return gl.Image(picture(index)), index


def picture(index: int) -> np.ndarray:
    pixels = np.empty((250 + index % 7, 300 + index % 5, 3), np.uint8)
    pixels[...] = np.arange(pixels.shape[1])[None, :, None] % 256
    pixels += np.uint8(index % 251)
    return pixels


def album(length=64, *, bad=(), **options):
    options = {"num_workers": 0, "device": "cpu", "ragged": "list", "chunk_size": 8, **options}
    return gl.Loader(Pictures(length, bad=bad), 16, **options)


def check(images, indices):
    assert len(images) == len(indices)
    for image, index in zip(images, indices.tolist(), strict=True):
        assert image.dtype == torch.uint8
        assert np.array_equal(image.permute(1, 2, 0).numpy(), picture(index))


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_whole_images_stay_what_they_are_and_their_slots_come_back(workers):
    with album(num_workers=workers) as loader_:
        for _ in range(2):
            kept = []
            for images, indices in loader_:
                check(images, indices)
                kept.append(([images[0], images[-1][:, :, 5:9]], indices))  # a view keeps the memory too
                del images
        assert lent(loader_) == 8
        for (first, other), indices in kept:
            check([first], indices[:1])
            assert other.shape[-1] == 4
        del first, other, kept, indices
        gc.collect()
        assert lent(loader_) == 0


def test_whole_images_are_not_copied_and_lie_as_they_were_decoded():
    with album() as loader_:
        images, _ = next(iter(loader_))
        memory = loader_._session.ring.bytes
        first = memory.__array_interface__["data"][0]
        for image in images:
            assert first <= image.data_ptr() < first + len(memory)
            assert image.permute(1, 2, 0).is_contiguous()


@pytest.mark.processes
def test_all_batches_of_whole_images_can_be_kept_beyond_what_is_lent():
    with album(480, ring_bytes=24 << 20) as loader_:
        kept = list(loader_)
        ring = loader_._session.ring
        assert lent(loader_) >= 1
        assert sum(slot.capacity_bytes for slot in ring._lent.values()) <= ring.ring_bytes // LENT_SHARE
    del loader_, ring
    for images, indices in kept:
        check(images, indices)
        assert all(image.permute(1, 2, 0).is_contiguous() for image in images)
        images[0].zero_()


@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_whole_images_stay_in_order_whatever_fails(on_error):
    faults = gl.Faults(on_error=on_error, max_error_rate=1)
    with (
        album(bad=(0, 20, 21, 40), faults=faults) as loader_,
        pytest.warns(RuntimeWarning, match="bad"),
    ):
        batches = list(loader_)
    assert sum(len(indices) for _, indices in batches) == (60 if on_error == "skip" else 64)
    for images, indices in batches:
        check(images, indices)


def test_whole_images_of_different_channels_are_refused_as_ever():
    class Mixed(Pictures):
        def __getitem__(self, index):
            return gl.Image(picture(index)[:, :, : 1 if index == 3 else 3])

    with (
        gl.Loader(Mixed(8), 8, num_workers=0, device="cpu", ragged="list") as loader_,
        pytest.raises(ValueError, match="same number of channels"),
    ):
        next(iter(loader_))


def test_a_transform_makes_tensors_of_their_own():
    with album(transforms=[gl.transforms.RandomHorizontalFlip(0.0)]) as loader_:
        for images, indices in loader_:
            check(images, indices)
            assert all(image.is_contiguous() for image in images)
        assert lent(loader_) == 0
