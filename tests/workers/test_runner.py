"""Chunks of an `ArrayFile`, copied by a row copier, compared with the three steps of `gpuload.workers.runner`."""

from __future__ import annotations

import errno
import os
from typing import Any

import numpy as np
import pytest
from helpers.file_descriptors import descriptors

import gpuload as gl
from gpuload import transforms as T
from gpuload.decode import Decode
from gpuload.errors import LimitError
from gpuload.ring.packing import read_content
from gpuload.transforms import Chain
from gpuload.workers import runner as runner_module
from gpuload.workers.job import Job
from gpuload.workers.protocol import Reply, Request, Status
from gpuload.workers.runner import ChunkRunner

COUNT = 12
SHUFFLED = [7, 0, 11, 3, 3]
IN_ORDER = [4, 5, 6, 7]


def array_file(folder, shape=(9, 10, 3), dtype="uint8", labels: Any = tuple(range(COUNT)), **options) -> gl.ArrayFile:
    path = folder / "images.npy"
    numbers = np.random.default_rng(3).integers(0, 256, (COUNT, *shape))
    np.save(path, numbers.astype(dtype))
    return gl.ArrayFile(path, labels=labels, **options)


def make_runners(dataset, *transforms, **options) -> tuple[ChunkRunner, ChunkRunner]:
    """Return a runner with a row copier and one without, which takes the three steps."""
    options = {"plain": not transforms, "moves_pixels": False, **options}
    job = Job(dataset, Chain(list(transforms)), Decode(), seed=5, **options)
    with_copier, without_copier = (ChunkRunner(job, guard_generators=False) for _ in range(2))
    with_copier._reader._searches_left = without_copier._reader._searches_left = 0  # no search for targets
    without_copier._row_copier = None
    return with_copier, without_copier


def run_chunk(runner: ChunkRunner, indices: Any, *, room=1 << 16, spare=0, wanted=lambda: True, populate: Any = None):
    """Return a chunk's reply, its slot of `room` bytes, and the rows that were noted."""
    slot, noted = np.full(room, 255, np.uint8), []
    positions = np.arange(20, 20 + len(indices))
    indices = np.asarray(indices) if all(isinstance(index, int) for index in indices) else indices
    request = Request(3, 2, 0, room, positions, indices, spare_bytes=spare)  # chunk 3, epoch 2, slot at offset 0
    populate = populate or (lambda nbytes, slot: None)
    return runner.run(request, slot, noted.append, wanted, lambda nbytes: populate(nbytes, slot)), slot, noted


def comparable_content(reply: Reply, slot: np.ndarray) -> list[Any]:
    """Return a reply, and the bytes of its images and blocks in the slot, as values that compare with `==`."""
    content = read_content(slot, reply.meta, reply.meta_at)
    images = [(column.table.tobytes(), column.leaves, column.rows, column.kinds) for column in content.images]
    pixels = [
        slot[offset : offset + height * width * channels].tobytes()
        for column in content.images
        for offset, (height, width, channels), *_ in column.table.tolist()
    ]
    blocks = [(leaf, block, block.array(slot).tobytes()) for leaf, block in content.blocks.items()]
    values = [
        (leaf, [np.asarray(value).tolist() for value in column.values], list(map(type, column.values)))
        for leaf, column in content.values.items()
    ]
    errors = [(row, error.index, error.cause) for row, error in content.errors]
    sources = list(content.source_list)
    return [content.rows, content.structures, images, pixels, blocks, values, sources, errors, reply.status]


def load_content(runner: ChunkRunner, indices: Any) -> list[Any]:
    return comparable_content(*run_chunk(runner, indices)[:2])


# Options of the array file, and transforms.
ARRAY_FILES: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "complete images": ({}, []),
    "crops": ({}, [T.RandomResizedCrop(8)]),
    "bands": ({}, [T.CenterCrop((9, 4))]),
    "two views": ({}, [T.MultiView([[T.RandomCrop(4)], [T.CenterCrop(3)]])]),
    "no labels": ({"labels": None}, [T.CenterCrop(4)]),
    "names": ({"labels": [f"class {number}" for number in range(COUNT)]}, []),
    "vectors": ({"labels": np.arange(4.0 * COUNT).reshape(COUNT, 4)}, []),
    "blocks": ({"labels": np.arange(512.0 * COUNT).reshape(COUNT, 512)}, []),
    "uint16": ({"dtype": "uint16"}, [T.RandomCrop(5)]),
    "float32, complete": ({"dtype": "float32"}, []),
    "one channel": ({"shape": (9, 10)}, [T.CenterCrop(4)]),
    "rows of 64 bytes": ({"shape": (8, 8, 4)}, []),
}


@pytest.mark.parametrize("name", ARRAY_FILES)
@pytest.mark.parametrize("indices", [SHUFFLED, IN_ORDER], ids=["shuffled", "in order"])
def test_row_copier_returns_the_same_chunk_as_the_three_steps(tmp_path, name, indices):
    settings, transforms = ARRAY_FILES[name]
    copying_runner, three_step_runner = make_runners(array_file(tmp_path, **settings), *transforms)
    assert copying_runner._row_copier is not None
    replies = []
    fill = copying_runner._row_copier.fill

    def fill_and_record(*arguments):
        replies.append(fill(*arguments))
        return replies[-1]

    copying_runner._row_copier.fill = fill_and_record  # pyright: ignore[reportAttributeAccessIssue]
    reply, slot, noted = run_chunk(copying_runner, indices)
    expected, expected_slot, _ = run_chunk(three_step_runner, indices)
    assert replies[0].status is Status.DONE
    assert comparable_content(reply, slot) == comparable_content(expected, expected_slot)
    assert noted == list(range(len(indices)))
    for counter in ("chunks", "samples", "bytes_read", "bytes_decoded"):
        assert getattr(copying_runner.counters, counter) == getattr(three_step_runner.counters, counter) > 0


@pytest.mark.parametrize(
    ("indices", "transforms"),
    [([3, COUNT], []), ([3, -1], []), ([3, -COUNT - 1], []), (["3", 4], []), ([3, 4], [T.RandomCrop(32)])],
    ids=["too large", "from the end", "before the first", "a string", "too small to crop"],
)
def test_row_copier_returns_the_same_errors_as_the_three_steps(tmp_path, indices, transforms):
    copying_runner, three_step_runner = make_runners(array_file(tmp_path), *transforms)
    content = load_content(copying_runner, indices)
    assert content == load_content(three_step_runner, indices)
    assert content[-1] is Status.DONE
    # The next chunk has valid indices, but a slot that is too small.
    assert run_chunk(copying_runner, [1, 2], room=64)[0] == run_chunk(three_step_runner, [1, 2], room=64)[0]


def test_row_copier_returns_the_status_of_the_three_steps_if_a_chunk_is_too_large_or_unwanted(tmp_path):
    copying_runner, three_step_runner = make_runners(array_file(tmp_path))
    for options, status in (({"room": 1000}, Status.TOO_LARGE), ({"wanted": lambda: False}, Status.UNWANTED)):
        reply = run_chunk(copying_runner, IN_ORDER, **options)[0]
        assert reply == run_chunk(three_step_runner, IN_ORDER, **options)[0]
        assert reply.status is status


@pytest.mark.parametrize("kind", ["row copier", "three steps", "plain samples"])
def test_a_slot_is_populated_up_to_the_chunks_size_before_it_is_written(tmp_path, kind):
    if kind == "plain samples":
        runner, _ = make_runners([np.full(300, number) for number in range(COUNT)])
    else:  # a block follows the pixels
        labels = np.arange(512.0 * COUNT).reshape(COUNT, 512)
        runner = make_runners(array_file(tmp_path, labels=labels), T.CenterCrop(4))[kind == "three steps"]
    populated = [0]

    def populate(nbytes: int, slot: np.ndarray) -> None:
        assert (slot[max(populated) :] == 255).all()
        populated.append(nbytes)

    reply, slot, _ = run_chunk(runner, IN_ORDER, populate=populate)
    assert reply.status is Status.DONE
    assert max(populated) == reply.nbytes > 0
    assert (slot[reply.nbytes :] == 255).all()


def test_a_slot_that_is_too_small_for_a_chunk_is_not_populated_beyond_its_end(tmp_path):
    for runner in make_runners(array_file(tmp_path, labels=np.arange(512.0 * COUNT).reshape(COUNT, 512))):
        for room in (1000, 4000):  # too small for the pixels, and for the block after them
            sizes: list[int] = []
            populate = lambda nbytes, slot, sizes=sizes: sizes.append(nbytes)  # noqa: E731
            reply, _, _ = run_chunk(runner, IN_ORDER, room=room, spare=1 << 18, populate=populate)
            assert reply.file is not None
            assert max(sizes, default=0) <= room
            reply.file.close()


def count_chunk_files() -> int:
    """Return the number of open files that are separate memory of a chunk."""
    return sum("gpuload-chunk" in name for _, name in descriptors())


@pytest.mark.parametrize("takes_three_steps", [False, True], ids=["row copier", "three steps"])
@pytest.mark.parametrize(
    ("labels", "room"),
    [
        (range(COUNT), 1000),
        (np.arange(512.0 * COUNT).reshape(COUNT, 512), 1000),
        (np.arange(512.0 * COUNT).reshape(COUNT, 512), 4000),
        ([f"{number}" * 20_000 for number in range(COUNT)], 4000),
    ],
    ids=["pixels", "pixels and a block", "only the block", "only the long description"],  # that do not fit
)
def test_a_chunk_too_large_for_its_slot_is_written_to_separate_memory(tmp_path, labels, room, takes_three_steps):
    runner = make_runners(array_file(tmp_path, labels=labels))[takes_three_steps]
    expected, large_slot, _ = run_chunk(runner, IN_ORDER, room=1 << 18)
    reply, _, noted = run_chunk(runner, IN_ORDER, room=room, spare=expected.nbytes)
    assert reply.file is not None
    reply.map(reply.file)
    assert comparable_content(reply, reply.data) == comparable_content(expected, large_slot)
    assert len(reply.data) == reply.nbytes == expected.nbytes > room
    assert noted == list(range(4)) * (1 + takes_three_steps)  # the three steps read all rows, then decode all rows
    refused = run_chunk(runner, IN_ORDER, room=room, spare=expected.nbytes - 1)[0]
    assert refused.status is Status.TOO_LARGE
    assert refused.nbytes <= expected.nbytes
    del reply
    assert count_chunk_files() == 0


@pytest.mark.parametrize(("name", "error"), [
    ("memory_file", LimitError("a sandbox has no memfd")),
    ("memory_file", OSError(errno.EMFILE, "too many open files")),
    ("os.posix_fallocate", OSError(errno.ENOMEM, "no memory")),
    ("map_file", OSError(errno.ENOMEM, "no addresses")),
])  # fmt: skip
def test_a_chunk_is_reported_too_large_if_separate_memory_is_unavailable(tmp_path, monkeypatch, name, error):
    def refuse(*args):
        raise error

    runner, _ = make_runners(array_file(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(f"{runner_module.__name__}.{name}", refuse)
        reply = run_chunk(runner, IN_ORDER, room=1000, spare=1 << 20)[0]
    assert reply == Reply(3, Status.TOO_LARGE, 4 * 320, b"")  # images of 270 bytes, rounded up to multiples of 64
    assert count_chunk_files() == 0


def test_separate_memory_of_an_unwanted_chunk_is_freed(tmp_path):
    copying_runner, three_step_runner = make_runners(array_file(tmp_path))
    # The chunk becomes unwanted after the memory is allocated: the three steps ask for each row that they read before.
    for runner, answers in ((copying_runner, []), (three_step_runner, [True] * (len(IN_ORDER) + 1))):
        wanted = iter(answers)
        reply = run_chunk(runner, IN_ORDER, room=1000, spare=1 << 20, wanted=lambda left=wanted: next(left, False))[0]
        assert reply.status is Status.UNWANTED
        assert count_chunk_files() == 0


def test_a_truncated_array_file_is_reported_as_an_error_of_each_sample(tmp_path):
    dataset = array_file(tmp_path)
    os.truncate(dataset.path, 500)
    copying_runner, three_step_runner = make_runners(dataset)
    assert load_content(copying_runner, IN_ORDER) == load_content(three_step_runner, IN_ORDER)
    reply, slot, _ = run_chunk(copying_runner, IN_ORDER)
    errors = read_content(slot, reply.meta, reply.meta_at).errors
    assert ["was changed after the dataset" in error.cause for _, error in errors] == [True] * len(IN_ORDER)


class NegativeLabels(gl.ArrayFile):
    def __getitem__(self, index: Any) -> Any:
        image, label = super().__getitem__(index)
        return image, -label


def test_row_copier_is_not_used_if_samples_cannot_be_copied_as_rows(tmp_path):
    assert make_runners(array_file(tmp_path), collate_fn=list)[0]._row_copier is None
    assert make_runners(array_file(tmp_path), T.Resize(8), T.SanitizeBoundingBoxes())[0]._row_copier is None
    assert make_runners(NegativeLabels(array_file(tmp_path).path, labels=range(COUNT)))[0]._row_copier is None
    assert make_runners([0, 1])[0]._row_copier is None
    for options in ({"layout": "CHW", "shape": (3, 9, 10)}, {"as_dtype": "float32"}, {"layout": "data"}):
        assert make_runners(array_file(tmp_path, **options))[0]._row_copier is None


def test_a_loader_returns_the_same_batches_from_an_array_file_and_a_list(tmp_path):
    dataset = array_file(tmp_path)
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "num_workers": 0, "device": "cpu", "seed": 3}
    chain = [T.RandomCrop(6), T.RandomHorizontalFlip()]
    with gl.Loader(dataset, transforms=chain, **options) as array_loader:
        batches = [batch for _ in range(3) for batch in array_loader]  # the search for targets ends after 16 samples
        assert array_loader._session.engine._runner._reader.is_search_over
    with gl.Loader([dataset[number] for number in range(COUNT)], transforms=chain, **options) as list_loader:
        expected = [batch for _ in range(3) for batch in list_loader]
    for (images, labels), (expected_images, expected_labels) in zip(batches, expected, strict=True):
        assert images.equal(expected_images)
        assert labels.tolist() == expected_labels.tolist()
