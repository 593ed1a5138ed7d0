"""The columns of a batch: every leaf under the number that it has in its sample, whatever the others look like."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gpuload as gl
from gpuload import transforms as T
from gpuload.batches.collate import samples_of
from gpuload.batches.columns import columns_of
from gpuload.decode import Decode
from gpuload.order.spec import BatchSpec
from gpuload.ring.ring import Ring
from gpuload.transforms import Chain
from gpuload.workers.feed import Feed
from gpuload.workers.inline import InProcessEngine
from gpuload.workers.job import Job


def image(level: int, height: int = 6, width: int = 8) -> gl.Image:
    return gl.Image(np.full((height, width, 3), level, np.uint8))


class Made:
    def __init__(self, make) -> None:
        self.make = make

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index):
        return self.make(index)


def columns(make, count: int = 6, *, chunk: int = 2, transforms=(), spread: bool = False):
    """The columns of a batch of this dataset, done here in chunks of so many."""
    ring = Ring(1 << 22)
    job = Job(Made(make), Chain(transforms), Decode(), 0)
    feed = Feed(InProcessEngine(job, ring), ring, chunk_size=chunk, ahead=1)
    feed.begin(iter([BatchSpec(0, 0, np.arange(count), np.arange(count))]))
    batch = feed.take()
    assert batch is not None
    return columns_of(batch, [0] * len(batch.parts), spread=spread)


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
    assert list(first.places()) == list(enumerate([1, 0, 0, 1, 0, 0]))
    assert first.leaf is None
    assert list(second.places()) == [(0, 3), (3, 3)]
    assert dict(found.values[0].items()) == {0: 0, 3: -3}
    assert dict(found.values[1].items()) == {1: 1, 2: 2, 4: 4, 5: 5}
    assert dict(found.values[2].items()) == {0: 0, 3: 3}
    samples = samples_of(found, [dict.fromkeys((1, 3), "image") if i % 3 == 0 else {0: "image"} for i in range(6)], int)
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

    with gl.Loader(Made(make), 4, num_workers=workers, device="cpu", collate_fn=list) as loader:
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
