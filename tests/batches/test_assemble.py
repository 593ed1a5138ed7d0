"""What a batch is made of: its columns, every leaf under the number that it has in its sample, whatever the others look
like; and slots of the ring, lent for as long as the user keeps the arrays."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest
import torch
from helpers.map_datasets import MapDataset

import gpuload as gl
from gpuload import transforms as T
from gpuload.batches.collate import FinishedColumns
from gpuload.decode import Decode
from gpuload.order.spec import BatchSpec
from gpuload.ring.ring import LENT_SHARE, Ring
from gpuload.stage.transfer import CpuTransfer
from gpuload.transforms import Chain
from gpuload.workers.feed import Feed
from gpuload.workers.inline import InProcessEngine
from gpuload.workers.job import Job

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
    return len(ring._lent_slots)


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


def test_a_batch_larger_than_the_ring_is_copied_from_where_its_chunks_were_moved(monkeypatch):
    """Without a memory for the whole batch in between, which `load` makes."""
    monkeypatch.setattr(CpuTransfer, "load", None)
    with loader(16, ring_bytes=4 * ROW, chunk_size=2) as loader_:
        for rows, indices in loader_:
            assert rows.shape == (8, ROW)
            assert (rows == indices[:, None] % 251).all()
        assert loader_._session.ring.slots_moved_out


@pytest.mark.parametrize("on_error", ["skip", "replace"])
@pytest.mark.parametrize("dtype", [torch.uint16, torch.float32, torch.bfloat16])
def test_arrays_stay_in_order_whatever_fails(on_error, dtype):
    def row(index: int) -> torch.Tensor:
        if index in (0, 5, 6):
            raise ValueError("bad")
        return torch.full((3000,), index, dtype=dtype)

    options = {"faults": gl.Faults(on_error=on_error, max_error_rate=1), "chunk_size": 2}
    with (
        gl.Loader(
            MapDataset(lambda index: (row(index), index), 100), 8, num_workers=0, device="cpu", **options
        ) as loader_,
        pytest.warns(RuntimeWarning, match="bad"),
    ):
        rows, indices = next(iter(loader_))
    assert rows.dtype == dtype
    assert rows.shape == (8 if on_error == "replace" else 5, 3000)
    assert (rows.float() == indices[:, None]).all()


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
        assert sum(slot.capacity_bytes for slot in ring._lent_slots.values()) <= ring.ring_bytes // LENT_SHARE
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


# -- columns -----------------------------------------------------------------------------------------------------------


def image(level: int, height: int = 6, width: int = 8) -> gl.Image:
    return gl.Image(np.full((height, width, 3), level, np.uint8))


def columns(make, count: int = 6, *, chunk: int = 2, transforms=(), spread: bool = False):
    """The columns of a batch of this dataset, done here in chunks of so many."""
    ring = Ring(1 << 22)
    job = Job(MapDataset(make, 100), Chain(transforms), Decode(), 0)
    feed = Feed(InProcessEngine(job, ring), ring, chunk_size=chunk, ahead=1)
    feed.begin(iter([BatchSpec(0, 0, np.arange(count), np.arange(count))]))
    batch = feed.pop_batch()
    assert batch is not None
    return batch.join_columns([0] * len(batch.parts), splits_blocks=spread)


def test_leaves_are_numbered_once_depth_first():
    big = np.arange(1024, dtype=np.float32)
    make = lambda i: {"b": (i, image(i), big + i), "a": f"name {i}", "c": [image(i), None]}  # noqa: E731
    found = columns(make)
    assert [images.leaf for images in found.images] == [2, 4]
    assert found.values[0].values == [f"name {i}" for i in range(6)]
    assert found.values[1].values == list(range(6))
    assert found.values[5].values == [None] * 6
    assert list(found.blocks) == [3]
    assert sorted(found.values) == [0, 1, 5]
    found = columns(make, spread=True)
    assert not found.blocks
    assert [value[0] for _, value in found.values[3].items()] == list(range(6))


def test_columns_are_over_the_rows_that_have_them():
    def make(index):
        sample = {"image": image(index), "label": index}
        return sample if index % 3 else {"also": -index, **sample, "second": image(index)}

    found = columns(make)
    first, second = found.images
    assert list(first.rows_and_leaves()) == list(enumerate([1, 0, 0, 1, 0, 0]))
    assert first.leaf is None
    assert list(second.rows_and_leaves()) == [(0, 3), (3, 3)]
    assert dict(found.values[0].items()) == {0: 0, 3: -3}
    assert dict(found.values[1].items()) == {1: 1, 2: 2, 4: 4, 5: 5}
    assert dict(found.values[2].items()) == {0: 0, 3: 3}
    finished = FinishedColumns(found)
    for column in found.images:
        for row, leaf in column.rows_and_leaves():
            finished.cells[leaf][row] = "image"
    samples = finished.samples(int)
    assert samples[3] == {"also": -3, "image": "image", "label": 3, "second": "image"}
    assert samples[4] == {"image": "image", "label": 4}


def test_targets_are_columns_too():
    def make(index):
        boxes = gl.Boxes(np.array([[1.0, 1, 4, 4]] * (index + 1), np.float32), "xyxy")
        mask = gl.Mask(np.full((6, 8), index, np.int16 if index % 2 else np.uint8))
        return image(index), {"boxes": boxes, "labels": np.arange(index + 1), "mask": mask}

    found = columns(make, 4, transforms=[T.SanitizeBoundingBoxes()])
    assert found.has_targets
    [masks] = found.masks
    assert masks.leaf == 3
    assert masks.kinds == [("uint8", 2), ("int16", 2)] * 2
    assert masks.table["shape"][:, 2].tolist() == [1, 2, 1, 2]  # bytes as channels
    assert [len(boxes.array) for _, boxes in found.points[1].items()] == [1, 2, 3, 4]
    assert found.fields == [(1, 2)]  # of all
    assert [len(boxes) for boxes in found.boxes([3, 0])] == [4, 1]


def test_rows_stand_in_their_order_after_faults():
    def make(index):
        if index in (1, 4):
            raise ValueError("bad")
        return {"image": image(index), **({"x": 1} if index == 2 else {}), "z": index}

    found = columns(make)
    assert found.positions.tolist() == [0, 2, 3, 5]
    assert found.indices == [0, 2, 3, 5]
    assert found.images[0].rows is None
    assert dict(found.values[1].items()) == {0: 0, 1: 1, 2: 3, 3: 5}
    assert dict(found.values[2].items()) == {1: 2}
    assert isinstance(found.structures, list)
    assert len(found.structures) == 4


@pytest.mark.usefixtures("warm")
@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1])
def test_samples_of_different_structure_come_to_a_collate_fn_as_they_were(workers):
    def make(index):
        sample = {"image": image(index, 6 + index), "label": index}
        return sample if index % 2 else {"a": (np.full(1000, index), index), **sample, "z": torch.full((700,), index)}

    with gl.Loader(MapDataset(make, 100), 4, num_workers=workers, device="cpu", collate_fn=list) as loader:
        for step, samples in zip(range(2), loader, strict=False):
            for index, sample in enumerate(samples, 4 * step):
                assert list(sample) == (["image", "label"] if index % 2 else ["a", "image", "label", "z"])
                assert sample["image"].shape == (3, 6 + index, 8)
                assert (sample["image"] == index).all()
                assert sample["label"] == index
                if index % 2 == 0:
                    assert (sample["a"][0] == index).all()
                    assert sample["a"][1] == index
                    assert (sample["z"] == index).all()


def test_a_failed_sample_is_no_row():
    found = columns(lambda i: image(i) if i else {}["missing"])
    assert found.name(0) == "sample 1"
