"""The columns of a batch, one for each leaf of a sample; and slots of the ring that are lent to the user."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest
import torch
from helpers.both_loaders import cpu_loader
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

ROW_BYTES = 1 << 18  # large enough that slots of such samples are lent


def make_loader(length=64, **options):
    rows = MapDataset(lambda index: (np.full(ROW_BYTES, index % 251, np.uint8), index), length)
    return gl.Loader(rows, 8, **{"num_workers": 0, "device": "cpu", **options})


def count_lent_slots(loader) -> int:
    ring = loader._session.ring
    ring.collect()
    return len(ring._lent_slots)


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_batch_keeps_its_values_and_its_slot_returns_when_it_is_collected(workers):
    with make_loader(num_workers=workers) as loader:
        for _ in range(2):
            batches_kept = []
            for number, (rows, indices) in enumerate(loader):
                assert rows.shape == (8, ROW_BYTES)
                assert rows.dtype == torch.uint8
                assert (rows == indices[:, None] % 251).all()
                if number % 3 == 0:
                    batches_kept.append((rows[2:5, :100], indices[2:5]))  # views keep the memory
        assert count_lent_slots(loader) >= 2
        for rows, indices in batches_kept:
            assert (rows == indices[:, None] % 251).all()
        del rows, indices, batches_kept
        gc.collect()
        assert count_lent_slots(loader) == 0


def test_batch_of_arrays_is_a_view_of_the_ring():
    with make_loader() as loader:
        batches = iter(loader)
        next(batches)
        rows, _ = next(batches)  # not the first batch, which shows that samples are arrays
        memory = loader._session.ring.bytes
        ring_start = memory.__array_interface__["data"][0]
        assert ring_start <= rows.data_ptr() < ring_start + len(memory)


def test_batches_beyond_the_lent_share_are_copied_and_can_all_be_kept():
    ring_bytes = 16 * 8 * ROW_BYTES
    with make_loader(30 * 8, ring_bytes=ring_bytes) as loader:
        batches_kept = list(loader)
        assert 1 <= count_lent_slots(loader) <= 16 // LENT_SHARE
        for rows, indices in batches_kept:
            assert (rows == indices[:, None] % 251).all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_batch_in_a_forked_child_keeps_its_values():
    with make_loader(40 * 8) as loader:
        batches = iter(loader)
        next(batches)
        rows, indices = next(batches)
        release_reader, release_writer = os.pipe()
        answer_reader, answer_writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(release_writer)
            os.read(release_reader, 1)  # until the parent has dropped the batch and loaded more
            # numpy, since torch's threads do not survive a fork
            is_intact = (rows.numpy() == indices.numpy()[:, None] % 251).all()
            os.write(answer_writer, b"1" if is_intact else b"0")
            os._exit(0)
        del rows, indices
        later_intact = all(bool((rows == indices[:, None] % 251).all()) for rows, indices in batches)
        os.close(release_writer)
        assert later_intact
        assert os.read(answer_reader, 1) == b"1"
        assert os.waitpid(child, 0)[1] == 0
        for fd in (release_reader, answer_reader, answer_writer):
            os.close(fd)


def test_batch_larger_than_the_ring_is_copied_without_an_intermediate_copy(monkeypatch):
    monkeypatch.setattr(CpuTransfer, "load", None)  # which would make memory for the entire batch
    with make_loader(16, ring_bytes=4 * ROW_BYTES, chunk_size=2) as loader:
        for rows, indices in loader:
            assert rows.shape == (8, ROW_BYTES)
            assert (rows == indices[:, None] % 251).all()
        assert loader._session.ring.slots_moved_out


@pytest.mark.parametrize("on_error", ["skip", "replace"])
@pytest.mark.parametrize("dtype", [torch.uint16, torch.float32, torch.bfloat16])
def test_arrays_stay_with_their_indices_after_faults(on_error, dtype):
    def row(index: int) -> torch.Tensor:
        if index in (0, 5, 6):
            raise ValueError("bad")
        return torch.full((3000,), index, dtype=dtype)

    options = {"faults": gl.Faults(on_error=on_error, max_error_rate=1), "chunk_size": 2}
    dataset = MapDataset(lambda index: (row(index), index), 100)
    with cpu_loader(dataset, 8, **options) as loader, pytest.warns(RuntimeWarning, match="bad"):
        rows, indices = next(iter(loader))
    assert rows.dtype == dtype
    assert rows.shape == (8 if on_error == "replace" else 5, 3000)
    assert (rows.float() == indices[:, None]).all()


def test_lent_slot_returns_with_the_last_of_its_arrays():
    ring = Ring(1 << 20)
    slot = ring.acquire(1 << 16)
    assert slot is not None
    first_array, second_array = ring.view(slot)[:100], ring.view(slot)[100:200]
    assert ring.lend(slot, [first_array, second_array])
    del first_array
    assert not ring.collect()
    del second_array
    assert ring.collect()
    assert ring.acquire(1 << 16) is slot
    ring.close()


def test_lend_refuses_more_than_its_share_of_the_ring():
    ring = Ring(1 << 20)
    slot = ring.acquire((1 << 20) // LENT_SHARE)
    second_slot = ring.acquire(1 << 16)
    assert slot is not None
    assert second_slot is not None
    array, second_array = ring.view(slot)[:1], ring.view(second_slot)[:1]
    assert ring.lend(slot, [array])
    assert not ring.lend(second_slot, [second_array])
    ring.close()


def make_pixels(index: int) -> np.ndarray:
    pixels = np.empty((250 + index % 7, 300 + index % 5, 3), np.uint8)
    pixels[...] = np.arange(pixels.shape[1])[None, :, None] % 256
    pixels += np.uint8(index % 251)
    return pixels


def make_image_loader(length=64, *, bad=(), **options):
    """Return a loader of images whose sizes and levels depend on their index."""

    def sample(index):
        if index in bad:
            raise ValueError("bad")
        return gl.Image(make_pixels(index)), index

    options = {"num_workers": 0, "device": "cpu", "ragged": "list", "chunk_size": 8, **options}
    return gl.Loader(MapDataset(sample, length), 16, **options)


def assert_images(images, indices):
    assert len(images) == len(indices)
    for image, index in zip(images, indices.tolist(), strict=True):
        assert image.dtype == torch.uint8
        assert np.array_equal(image.permute(1, 2, 0).numpy(), make_pixels(index))


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_images_keep_their_values_and_their_slots_return(workers):
    with make_image_loader(num_workers=workers) as loader:
        for _ in range(2):
            batches_kept = []
            for images, indices in loader:
                assert_images(images, indices)
                batches_kept.append(([images[0], images[-1][:, :, 5:9]], indices))  # views keep the memory
                del images
        assert count_lent_slots(loader) == 8  # chunks of eight of the 64 samples
        for (image, columns), indices in batches_kept:
            assert_images([image], indices[:1])
            assert columns.shape[-1] == 4
        del image, columns, batches_kept, indices
        gc.collect()
        assert count_lent_slots(loader) == 0


def test_images_without_transforms_are_views_of_the_ring():
    with make_image_loader() as loader:
        images, _ = next(iter(loader))
        memory = loader._session.ring.bytes
        ring_start = memory.__array_interface__["data"][0]
        for image in images:
            assert ring_start <= image.data_ptr() < ring_start + len(memory)
            assert image.permute(1, 2, 0).is_contiguous()


@pytest.mark.processes
def test_batches_of_images_beyond_the_lent_share_can_all_be_kept():
    with make_image_loader(480, ring_bytes=24 << 20) as loader:
        batches_kept = list(loader)
        ring = loader._session.ring
        assert count_lent_slots(loader) >= 1
        assert sum(slot.capacity_bytes for slot in ring._lent_slots.values()) <= ring.ring_bytes // LENT_SHARE
    del loader, ring
    for images, indices in batches_kept:
        assert_images(images, indices)
        for image in images:
            assert image.permute(1, 2, 0).is_contiguous()
        images[0].zero_()


@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_images_stay_with_their_indices_after_faults(on_error):
    faults = gl.Faults(on_error=on_error, max_error_rate=1)
    with make_image_loader(bad=(0, 20, 21, 40), faults=faults) as loader, pytest.warns(RuntimeWarning, match="bad"):
        batches = list(loader)
    assert sum(len(indices) for _, indices in batches) == (60 if on_error == "skip" else 64)
    for images, indices in batches:
        assert_images(images, indices)


def test_images_with_different_numbers_of_channels_raise():
    mixed = MapDataset(lambda index: gl.Image(make_pixels(index)[:, :, : 1 if index == 3 else 3]), 8)
    with cpu_loader(mixed, 8, ragged="list") as loader, pytest.raises(ValueError, match="same number of channels"):
        next(iter(loader))


def test_transformed_images_lend_no_slot():
    with make_image_loader(transforms=[gl.transforms.RandomHorizontalFlip(0.0)]) as loader:
        for images, indices in loader:
            assert_images(images, indices)
            for image in images:
                assert image.is_contiguous()
        assert count_lent_slots(loader) == 0


def make_image(level: int, height: int = 6, width: int = 8) -> gl.Image:
    return gl.Image(np.full((height, width, 3), level, np.uint8))


def join_columns(make, count: int = 6, *, chunk: int = 2, transforms=(), splits_blocks: bool = False):
    """Load a batch of this dataset in this process, in chunks of this size, and return its columns."""
    ring = Ring(1 << 22)
    job = Job(MapDataset(make, 100), Chain(transforms), Decode(), 0)
    feed = Feed(InProcessEngine(job, ring), ring, chunk_size=chunk, ahead=1)
    feed.begin(iter([BatchSpec(0, 0, np.arange(count), np.arange(count))]))
    batch = feed.pop_batch()
    assert batch is not None
    return batch.join_columns([0] * len(batch.parts), splits_blocks=splits_blocks)


def test_columns_number_leaves_depth_first():
    big = np.arange(1024, dtype=np.float32)
    make = lambda i: {"b": (i, make_image(i), big + i), "a": f"name {i}", "c": [make_image(i), None]}  # noqa: E731
    columns = join_columns(make)
    assert [images.leaf for images in columns.images] == [2, 4]
    assert columns.values[0].values == [f"name {i}" for i in range(6)]
    assert columns.values[1].values == list(range(6))
    assert columns.values[5].values == [None] * 6
    assert list(columns.blocks) == [3]
    assert sorted(columns.values) == [0, 1, 5]
    columns = join_columns(make, splits_blocks=True)
    assert not columns.blocks
    assert [value[0] for _, value in columns.values[3].items()] == list(range(6))


def test_columns_contain_only_the_rows_that_have_their_leaf():
    def make(index):
        sample = {"image": make_image(index), "label": index}
        return sample if index % 3 else {"also": -index, **sample, "second": make_image(index)}

    columns = join_columns(make)
    first, second = columns.images
    assert list(first.rows_and_leaves()) == list(enumerate([1, 0, 0, 1, 0, 0]))
    assert first.leaf is None
    assert list(second.rows_and_leaves()) == [(0, 3), (3, 3)]
    assert dict(columns.values[0].items()) == {0: 0, 3: -3}
    assert dict(columns.values[1].items()) == {1: 1, 2: 2, 4: 4, 5: 5}
    assert dict(columns.values[2].items()) == {0: 0, 3: 3}
    finished = FinishedColumns(columns)
    for column in columns.images:
        for row, leaf in column.rows_and_leaves():
            finished.cells[leaf][row] = "image"
    samples = finished.samples(int)
    assert samples[3] == {"also": -3, "image": "image", "label": 3, "second": "image"}
    assert samples[4] == {"image": "image", "label": 4}


def test_columns_of_targets_hold_masks_boxes_and_their_fields():
    def make(index):
        boxes = gl.Boxes(np.array([[1.0, 1, 4, 4]] * (index + 1), np.float32), "xyxy")
        mask = gl.Mask(np.full((6, 8), index, np.int16 if index % 2 else np.uint8))
        return make_image(index), {"boxes": boxes, "labels": np.arange(index + 1), "mask": mask}

    columns = join_columns(make, 4, transforms=[T.SanitizeBoundingBoxes()])
    assert columns.has_targets
    [masks] = columns.masks
    assert masks.leaf == 3
    assert masks.kinds == [("uint8", 2), ("int16", 2)] * 2
    assert masks.table["shape"][:, 2].tolist() == [1, 2, 1, 2]  # the bytes of a pixel count as channels
    assert [len(boxes.array) for _, boxes in columns.points[1].items()] == [1, 2, 3, 4]
    assert columns.fields == [{0: (1, 2)}]  # in all rows
    assert [len(boxes) for boxes in columns.boxes([3, 0])] == [4, 1]


def test_columns_keep_the_order_of_rows_after_faults():
    def make(index):
        if index in (1, 4):
            raise ValueError("bad")
        return {"image": make_image(index), **({"x": 1} if index == 2 else {}), "z": index}

    columns = join_columns(make)
    assert columns.positions.tolist() == [0, 2, 3, 5]
    assert columns.indices == [0, 2, 3, 5]
    assert columns.images[0].rows is None
    assert dict(columns.values[1].items()) == {0: 0, 1: 1, 2: 3, 3: 5}
    assert dict(columns.values[2].items()) == {1: 2}
    assert isinstance(columns.structures, list)
    assert len(columns.structures) == 4


@pytest.mark.usefixtures("warm")
@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1])
def test_collate_fn_receives_samples_of_different_structure_unchanged(workers):
    def make(index):
        sample = {"image": make_image(index, 6 + index), "label": index}
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


def test_columns_drop_a_failed_sample():
    columns = join_columns(lambda i: make_image(i) if i else {}["missing"])
    assert columns.name(0) == "sample 1"
