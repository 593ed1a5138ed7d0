"""Kept samples: what was put in comes out as the same chunk, whichever samples are asked for."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuload.datasets.sample import Boxes, Image, Mask
from gpuload.decode import Decode
from gpuload.ring.packing import read_content
from gpuload.transforms import Chain
from gpuload.workers.device_cache import CachedSamples, cut_regions
from gpuload.workers.job import Job
from gpuload.workers.protocol import Request
from gpuload.workers.runner import ChunkRunner


class HostMemory:
    """One after the other, in ordinary memory."""

    def __init__(self) -> None:
        self.bytes = np.zeros(0, np.uint8)

    @property
    def nbytes(self) -> int:
        return len(self.bytes)

    def add(self, data: np.ndarray) -> int:
        start = len(self.bytes)
        self.bytes = np.concatenate([self.bytes, data, np.zeros(-len(data) % 64, np.uint8)])
        return start


def sample(number: int) -> Any:
    """Of three structures: with a mask and a box, with a second image, with neither."""
    image = Image(np.full((4 + number, 6, 3), number, np.uint8))
    if number % 3 == 0:
        boxes = Boxes(np.array([[0, 0, 2, 2 + number]], np.float32))
        return {"image": image, "mask": Mask(np.full((4 + number, 6), number, np.uint8)), "boxes": boxes}
    return (
        {"image": image, "more": Image(image.array[:2]), "name": str(number)} if number % 3 == 1 else {"image": image}
    )


def kept(count: int) -> CachedSamples:
    samples = CachedSamples(count, HostMemory())
    job = Job([sample(number) for number in range(count)], Chain([]), Decode(), 0, plain=True, decodes_full_images=True)
    runner, slot = ChunkRunner(job, guard_generators=False), np.zeros(1 << 16, np.uint8)
    for start in range(0, count, 4):
        numbers = np.arange(start, min(start + 4, count))
        reply = runner.run(Request(1, 0, 0, len(slot), numbers, numbers), slot, lambda row: None, lambda: True)
        samples.add(read_content(slot, reply.meta, reply.meta_at), numbers.tolist(), slot[: reply.nbytes])
    samples.finish()
    return samples


def test_samples_of_several_structures_come_out_as_they_went_in():
    samples = kept(10)
    numbers = np.array([7, 0, 2, 4])
    content = samples.take(numbers)
    sizes = [column.table["size_hw"] for column in content.images]
    cut_regions(content, [np.concatenate([np.ones_like(own), own - 1], axis=1) for own in sizes])
    out = np.zeros(1 << 12, np.uint8)
    for start, rows, row_bytes, step, at in content.windows.tolist():  # pyright: ignore[reportOptionalMemberAccess]
        for row in range(rows):
            begin = start + row * step
            out[at + row * row_bytes :][:row_bytes] = samples.memory.bytes[begin : begin + row_bytes]
    first, second = content.images
    (masks,) = content.masks
    assert (first.rows, second.row_indices.tolist(), masks.row_indices.tolist()) == (None, [0, 3], [1])
    assert len(content.structures) == 4
    for column, own in ((first, numbers), (second, numbers[[0, 3]]), (masks, numbers[[1]])):
        for number, (at, (height, width, channels), size, region) in zip(own.tolist(), column.table, strict=True):
            given = sample(number)["more" if column is second else "image"].array
            assert size.tolist() == list(given.shape[:2])
            assert region.tolist() == [1, 1, given.shape[0] - 1, given.shape[1] - 1]
            assert (out[at : at + height * width * channels] == number).all()
    (names,), (boxes,) = content.values.values(), content.points.values()
    assert dict(names.items()) == {0: "7", 3: "4"}
    assert dict(boxes.items()).keys() == {1}
    assert boxes.values[0].array.tolist() == [[0, 0, 2, 2]]


def test_what_is_given_may_be_changed():
    samples = kept(4)
    for _ in range(2):
        (boxes,) = samples.take(np.array([0])).points.values()
        assert boxes.values[0].array.tolist() == [[0, 0, 2, 2]]
        boxes.values[0].array[...] = 9
