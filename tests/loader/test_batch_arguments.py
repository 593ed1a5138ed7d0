"""Arguments by batch: each batch has the bits of the same batch in a loader that gives all batches its arguments."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers import lacking
from helpers.both_loaders import alike
from helpers.generated_images import encode
from helpers.map_datasets import MapDataset
from torch.utils.data import IterableDataset

import gpuload as gl
from gpuload import transforms as T

SIZES = [16, (20, 28), 24]
RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (22, 40, 50, 3)).astype(np.uint8)
FILES = [encode(image, "JPEG") for image in IMAGES]
MASKS = RNG.integers(0, 5, (22, 40, 50)).astype(np.uint8)
ENCODED = MapDataset(lambda index: (gl.Encoded(FILES[index]), index), len(FILES))
NORMALIZE = T.Normalize([0.5] * 3, [0.5] * 3)


def make_target(index: int) -> dict[str, Any]:
    boxes = np.array([[5.0 + index, 5, 30, 30], [1, 2, 12 + index, 39]])
    masks = np.stack([MASKS[index] > 2, MASKS[index] <= 2]).astype(np.uint8)
    return {
        "boxes": gl.Boxes(boxes, "xyxy"),
        "labels": np.array([index, 1]),
        "masks": gl.Mask(masks),
        "semantic": gl.Mask(MASKS[index]),
    }


DETECTION = MapDataset(lambda index: (gl.Encoded(FILES[index]), make_target(index)), len(FILES))

CHAINS: dict[str, Callable[[Any], list[Any]]] = {
    "crop": lambda size: [T.RandomResizedCrop(size), T.RandomHorizontalFlip(), NORMALIZE],
    "resize": lambda size: [T.ColorJitter(0.4), T.Resize(size), T.CenterCrop(size), NORMALIZE],
    "mixup": lambda size: [T.RandomCrop(size), T.RandomErasing(1), NORMALIZE, T.MixUp(num_classes=22)],
    "views": lambda size: [T.MultiView([[T.RandomResizedCrop(size)], [T.CenterCrop(size), T.RandomInvert()]])],
}
TARGET_CHAINS: dict[str, Callable[[Any], list[Any]]] = {
    "crop": lambda size: [T.RandomIoUCrop(), T.RandomResizedCrop(size), T.SanitizeBoundingBoxes()],
    "mosaic": lambda size: [T.Mosaic(size), T.RandomHorizontalFlip()],
    "copy and paste": lambda size: [T.Resize(size), T.CenterCrop(size), T.CopyPaste(), T.RandomRotation(20)],
}


def make_loader(dataset: Any = ENCODED, batch_size: int = 4, *, size: Any, chain: Any = CHAINS["crop"], **options: Any):
    defaults = {"shuffle": True, "num_workers": 0, "device": "cpu", "info": True, "seed": 3}
    return gl.Loader(dataset, batch_size, transforms=chain(size), **{**defaults, **options})


def load(epochs: int = 1, **options: Any) -> list[Any]:
    with make_loader(**options) as loader:
        return [batch for _ in range(epochs) for batch in loader]


def size_of(step: int, epoch: int = 0, seed: int = 3) -> Any:
    """Return the entry of SIZES that a batch gets."""
    size = T.Chain([T.CenterCrop(T.by_batch(SIZES))]).at(epoch, step, seed=seed).output_size_hw
    return next(each for each in SIZES if size in (each, (each, each)))


def expected_batches(epochs: int = 1, **options: Any) -> list[Any]:
    """Return each batch from a loader that gives all batches the size of this batch."""
    fixed = [load(epochs, size=size, **options) for size in SIZES]
    return [fixed[SIZES.index(size_of(info.step, info.epoch))][number] for number, (_, info) in enumerate(fixed[0])]


def test_batches_of_an_epoch_have_all_sizes():
    assert {str(size_of(step)) for step in range(6)} == {str(size_of(step, 1)) for step in range(6)}
    assert len({str(size_of(step)) for step in range(6)}) == len(SIZES)


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("workers", [0, *(pytest.param(count, marks=pytest.mark.processes) for count in (1, 4))])
def test_batches_have_the_bits_of_a_loader_with_their_size_with_any_number_of_workers(name, workers):
    expected = expected_batches(2, chain=CHAINS[name])
    assert alike(load(2, size=T.by_batch(SIZES), chain=CHAINS[name], num_workers=workers, chunk_size=3), expected)
    assert len(expected) == 12


@pytest.mark.parametrize("name", TARGET_CHAINS)
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.processes)])
def test_boxes_and_masks_follow_the_size_of_their_batch(name, workers):
    options = {"dataset": DETECTION, "chain": TARGET_CHAINS[name], "ragged": "list"}
    expected = expected_batches(**options)
    assert alike(load(size=T.by_batch(SIZES), num_workers=workers, **options), expected)
    shapes = {tuple(image.shape[1:]) for (images, _), _ in expected for image in images}
    assert len(shapes) == len(SIZES)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.processes)])
def test_all_ranks_give_a_batch_the_same_size_also_where_the_last_batch_wraps(world_size, workers):
    shapes = []
    for rank in range(world_size):
        options = {"rank": rank, "world_size": world_size}
        batches = load(size=T.by_batch(SIZES), num_workers=workers, **options)
        assert alike(batches, expected_batches(**options))
        shapes.append([images.shape[1:] for (images, _), _ in batches])
    assert shapes == [shapes[0]] * world_size
    last_positions = batches[-1][1].positions.tolist()
    assert (0 in last_positions) == (world_size == 3)  # 22 samples divide evenly among 2 ranks


@pytest.mark.parametrize("backend", ["torch", "fused"])
def test_batches_have_the_bits_of_a_loader_with_their_size_on_each_backend(backend):
    lacking.require(*(["triton"] if backend == "fused" else []))
    for name in CHAINS if backend == "torch" else ["crop"]:  # Triton's interpreter takes seconds for each chain
        chain = CHAINS[name]
        expected = expected_batches(chain=chain, backend=backend, num_workers=2)
        assert alike(load(size=T.by_batch(SIZES), chain=chain, backend=backend, num_workers=2), expected)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.processes)])
def test_resume_at_every_batch_yields_the_remaining_batches(workers):
    expected = load(2, size=T.by_batch(SIZES))
    for stop in range(7):  # an epoch has 6 batches
        with make_loader(size=T.by_batch(SIZES), num_workers=workers) as loader:
            iterator = iter(loader)
            batches = [next(iterator) for _ in range(stop)]
            state = loader.state_dict()
        with make_loader(size=T.by_batch(SIZES)) as resumed:
            resumed.load_state_dict(state)
            batches += [batch for _ in range(2 if stop < 6 else 1) for batch in resumed]
        assert alike(batches, expected)


def test_resume_with_another_batch_size_gives_each_batch_the_size_of_its_step():
    with make_loader(batch_size=6, size=T.by_batch(SIZES)) as loader:
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
    with make_loader(batch_size=3, size=T.by_batch(SIZES)) as resumed:
        resumed.load_state_dict(state)
        batches = list(resumed)
    assert [info.step for _, info in batches] == [2, 3, 4, 5, 6, 7]
    fixed = {str(size): load(batch_size=3, size=size) for size in SIZES}
    assert alike(batches, [fixed[str(size_of(step))][step] for step in range(2, 8)])


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("name", ["crop", "mixup"])
def test_replay_returns_the_image_of_the_batch(world_size, name):
    options = {"size": T.by_batch(SIZES), "chain": CHAINS[name], "rank": world_size - 1, "world_size": world_size}
    with make_loader(**options) as loader:
        for (images, _), info in loader:
            for row, position in enumerate(info.positions.tolist()):
                is_padding = position < info.step * 4 * world_size
                if not is_padding:
                    assert torch.equal(loader.replay(0, position).sample[0], images[row])


def test_replay_with_a_sampler_returns_the_image_of_the_batch():
    chain = [T.RandomResizedCrop(T.by_batch(SIZES))]
    options = {"transforms": chain, "num_workers": 0, "device": "cpu", "info": True}
    with gl.Loader(ENCODED, 4, sampler=range(5, 19), rank=1, world_size=2, **options) as loader:
        for (images, _), info in loader:
            for row, (position, index) in enumerate(zip(info.positions.tolist(), info.indices.tolist(), strict=True)):
                assert torch.equal(loader.replay(0, position, index).sample[0], images[row])
    loader = gl.Loader(ENCODED, batch_sampler=[[1, 2], [3]], **options)
    message = "RandomResizedCrop(size=…) depends on the batch, but only the batch_sampler knows the batch of position 2"
    with pytest.raises(ValueError, match=re.escape(message)):
        loader.replay(0, 2, 3)


def test_apply_gives_an_image_the_size_of_the_first_batch():
    chain = T.Chain([T.CenterCrop(T.by_batch(SIZES))])
    assert T.apply(list(chain), IMAGES[0]).shape[1:] == chain.at(0, 0).output_size_hw


# -- sizes from a batch_sampler ---------------------------------------------------------------------------------------


class SizedList(list):
    def __init__(self, keys: Any, size_hw: Any = None) -> None:
        super().__init__(keys)
        self.size_hw = size_hw


class SizedBatches:
    """A batch_sampler whose batches have sizes."""

    def __init__(self, rank: int = 0, world_size: int = 1, sizes: Any = ((16, 24), (24, 16), (30, 30))) -> None:
        self._rank, self._world_size, self._sizes = rank, world_size, sizes

    def __len__(self) -> int:
        return math.ceil(22 / (4 * self._world_size))

    def __iter__(self) -> Iterator[SizedList]:
        order = torch.randperm(22).tolist()
        for step in range(len(self)):
            keys = order[step * 4 * self._world_size :][: 4 * self._world_size][self._rank :: self._world_size]
            yield SizedList(keys, self._sizes[step % len(self._sizes)])


def make_sized_loader(rank: int = 0, world_size: int = 1, size: Any = T.bucket_size, **options: Any) -> gl.Loader:
    sampler = options.pop("batch_sampler", None) or SizedBatches(rank, world_size)
    defaults = {"num_workers": 0, "device": "cpu", "info": True, "rank": rank, "world_size": world_size}
    return gl.Loader(ENCODED, batch_sampler=sampler, transforms=[T.RandomCrop(size)], **{**defaults, **options})


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.processes)])
def test_bucket_size_is_the_size_that_the_batch_sampler_gives_each_batch(world_size, workers):
    sizes = [(16, 24), (24, 16), (30, 30)]
    for rank in range(world_size):
        fixed = [list(make_sized_loader(rank, world_size, size)) for size in sizes]
        with make_sized_loader(rank, world_size, num_workers=workers) as loader:
            batches = list(loader)
        assert alike(batches, [fixed[step % 3][step] for step in range(len(batches))])
        assert len(batches) == len(SizedBatches(rank, world_size))


def test_resumed_batch_sampler_gives_the_remaining_batches_their_sizes():
    expected = list(make_sized_loader())
    for stop in range(6):
        with make_sized_loader() as loader:
            iterator = iter(loader)
            batches = [next(iterator) for _ in range(stop)]
            state = loader.state_dict()
        with make_sized_loader() as resumed:
            resumed.load_state_dict(state)
            assert alike([*batches, *resumed], expected)


def test_size_of_a_batch_can_be_a_numpy_pair():
    sampler = SizedBatches(sizes=[np.array([18, 12])])
    assert {images.shape for (images, _), _ in make_sized_loader(batch_sampler=sampler)} >= {(4, 3, 18, 12)}


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: make_sized_loader(batch_sampler=[[1, 2]]), ValueError,
         "batch 0 of the batch_sampler, a list, has no size_hw, but RandomCrop(size=…) is bucket_size; yield an "
         "instance of a subclass of list with an attribute size_hw"),
        (lambda: make_sized_loader(batch_sampler=SizedBatches(sizes=[(8, 8), (8, 0)])), ValueError,
         "the size_hw of batch 1 of the batch_sampler, a SizedBatches, must be at least 1, got 0"),
        (lambda: make_sized_loader(batch_sampler=SizedBatches(sizes=[8]), size=8), TypeError,
         "the size_hw of batch 0 of the batch_sampler, a SizedBatches, must be a pair (height, width), got 8"),
        (lambda: make_loader(size=T.bucket_size), ValueError,
         "RandomResizedCrop(size=…) is bucket_size, but the batches of this order have no size; pass "
         "shuffle=gpuload.Buckets(…) or a batch_sampler whose lists have an attribute size_hw, or a fixed size"),
        (lambda: make_loader(size=T.by_epoch({0: 8, 1: T.bucket_size}), sampler=[1], shuffle=False), ValueError,
         "RandomResizedCrop(size=…) is bucket_size, but the batches of this order have no size"),
    ],
)  # fmt: skip
def test_batches_without_a_valid_size_are_refused(make, error, text):
    with pytest.raises(error, match=re.escape(text)):
        list(make())


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter(IMAGES)


@pytest.mark.parametrize("size", [T.by_batch(SIZES), T.bucket_size, T.by_epoch({0: 8, 5: T.by_batch(SIZES)})])
def test_sizes_by_batch_of_an_iterable_dataset_are_refused(size):
    message = "RandomResizedCrop(size=…) depends on the batch, which does not apply to an iterable dataset"
    with pytest.raises(ValueError, match=re.escape(message)):
        make_loader(Stream(), size=size, shuffle=False)
    make_loader(Stream(), size=T.by_epoch({0: 8, 5: 9}), shuffle=False)


def test_invalid_combination_for_some_batches_raises_when_the_epoch_begins():
    chain = [T.Resize(T.by_batch([30, 8]), max_size=T.by_batch([40, 20, 20]))]
    with (
        gl.Loader(ENCODED, 4, transforms=chain, num_workers=0, device="cpu", ragged="list") as loader,
        pytest.raises(ValueError, match=re.escape("Resize(max_size=20) must be greater than size=30")),
    ):
        iter(loader)


def test_memory_for_the_largest_size_is_checked(monkeypatch):
    checked: list[int] = []
    monkeypatch.setattr(
        "gpuload.loader.options.check_memory", lambda workers, output_bytes: checked.append(output_bytes)
    )
    for size in (T.by_batch([8, 64, 16]), 64, T.by_epoch({0: T.by_batch([8, 64])})):
        list(make_loader(size=size))
    assert checked == [4 * 64 * 64 * 6] * 3  # 4 images, 6 bytes a pixel: three floats of 16 bits
    list(make_loader(PHOTOS, size=T.bucket_size, shuffle=BUCKETS))
    assert checked[3] == 4 * 20 * 20 * 6


# -- sizes of buckets -------------------------------------------------------------------------------------------------


SHAPES = [(16, 24), (24, 16), (20, 20)]
IMAGE_SIZES = RNG.permutation([(32, 48)] * 9 + [(48, 32)] * 8 + [(40, 40)] * 5)
BUCKETS = gl.Buckets(IMAGE_SIZES, shapes=SHAPES)
PHOTOS = [RNG.integers(0, 256, (*size, 3)).astype(np.uint8) for size in IMAGE_SIZES.tolist()]


def with_targets(index: int) -> Any:
    height, width = IMAGE_SIZES[index].tolist()
    boxes = np.array([[1.0, 2, width - 3, height - 1]])
    mask = np.arange(height * width).reshape(height, width) % 7
    return gl.Image(PHOTOS[index]), {"boxes": gl.Boxes(boxes, "xyxy"), "mask": gl.Mask(mask.astype(np.uint8))}


BUCKETED: dict[str, Any] = {
    "dataset": MapDataset(with_targets, len(PHOTOS)),
    "shuffle": BUCKETS,
    "chain": lambda size: [T.RandomHorizontalFlip(), T.RandomCrop(size), T.ColorJitter(0.3), NORMALIZE],
}


def expected_of_buckets(**options: Any) -> list[Any]:
    """Return each batch from a loader that gives all batches the shape of the bucket of this batch."""
    fixed = [load(size=shape, **{**BUCKETED, **options}) for shape in SHAPES]
    buckets = [
        next(bucket for bucket, members in enumerate(BUCKETS._members) if int(info.indices[0]) in members)
        for _, info in fixed[0]
    ]
    return [fixed[bucket][number] for number, bucket in enumerate(buckets)]


@pytest.mark.parametrize("workers", [0, *(pytest.param(count, marks=pytest.mark.processes) for count in (1, 4))])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_bucket_size_is_the_shape_of_the_bucket_of_a_batch(world_size, workers):
    shapes = []
    for rank in range(world_size):
        options = {"rank": rank, "world_size": world_size}
        batches = load(size=T.bucket_size, num_workers=workers, **BUCKETED, **options)
        assert alike(batches, expected_of_buckets(**options))
        shapes.append([images.shape[2:] for (images, _), _ in batches])
        for (images, targets), _ in batches:
            assert {target["mask"].shape[-2:] for target in targets} == {images.shape[2:]}
    assert shapes == [shapes[0]] * world_size
    assert {*map(tuple, shapes[0])} == {*SHAPES}


def test_mixed_samples_of_a_bucket_have_its_shape():
    options = {
        "dataset": list(zip(PHOTOS, range(len(PHOTOS)), strict=True)),
        "chain": lambda size: [T.RandomResizedCrop(size), NORMALIZE, T.CutMix(num_classes=22)],
    }
    assert alike(load(size=T.bucket_size, **{**BUCKETED, **options}), expected_of_buckets(**options))


def test_resume_and_replay_of_buckets_give_each_sample_the_shape_of_its_bucket():
    expected = load(size=T.bucket_size, **BUCKETED)
    for stop in range(len(expected)):
        with make_loader(size=T.bucket_size, **BUCKETED) as loader:
            iterator = iter(loader)
            batches = [next(iterator) for _ in range(stop)]
            state = loader.state_dict()
        with make_loader(size=T.bucket_size, **BUCKETED) as resumed:
            resumed.load_state_dict(state)
            assert alike([*batches, *resumed], expected)
            (images, _), info = expected[stop]
            for row, position in enumerate(info.positions.tolist()):
                assert torch.equal(resumed.replay(0, position).sample[0], images[row])


def test_arguments_by_batch_can_change_together_with_sizes_of_buckets():
    chain = [T.Resize(T.bucket_size), T.RandomInvert(T.by_batch([0, 1]))]
    options = {"num_workers": 0, "device": "cpu", "info": True, "seed": 3}
    with gl.Loader(PHOTOS, 4, shuffle=BUCKETS, transforms=chain, **options) as loader:
        batches = list(loader)
    with gl.Loader(PHOTOS, 4, shuffle=BUCKETS, transforms=chain[:1], **options) as loader:
        plain = list(loader)
    resolved = [T.Chain(chain).at(0, info.step, (8, 8), seed=3) for _, info in batches]
    probabilities = [transforms.transforms[1].p for transforms in resolved]
    assert {*probabilities} == {0, 1}
    for (images, _), (plain_images, _), p in zip(batches, plain, probabilities, strict=True):
        assert torch.equal(images, 255 - plain_images if p else plain_images)


def test_batches_of_buckets_without_bucket_size_are_stacked_only_if_their_sizes_are_equal():
    options = {"shuffle": BUCKETS, "num_workers": 0, "device": "cpu"}
    chain = [T.Resize(20)]
    with gl.Loader(PHOTOS, 4, transforms=chain, **options) as loader:
        assert {images.shape[2:] for images in loader} == {(20, 30), (30, 20), (20, 20)}
    buckets = gl.Buckets(IMAGE_SIZES, shapes=[(16, 24)])
    with (
        gl.Loader(PHOTOS, 4, transforms=chain, **{**options, "shuffle": buckets}) as loader,
        pytest.raises(ValueError, match=re.escape("or (with shuffle=Buckets) a Resize(T.bucket_size), or use")),
    ):
        list(loader)


# -- Augment ----------------------------------------------------------------------------------------------------------


BATCH = torch.from_numpy(IMAGES[:4]).permute(0, 3, 1, 2).contiguous()


def make_augment(size: Any = None) -> gl.Augment:
    return gl.Augment(CHAINS["crop"](T.by_batch(SIZES) if size is None else size), seed=3)


def test_augment_gives_its_batches_the_sizes_of_a_loader():
    augment = make_augment()
    for epoch in range(2):
        augment.set_epoch(epoch)
        for step in range(5):
            images = augment(BATCH)
            fixed = make_augment(size_of(step, epoch))
            expected = fixed(BATCH, positions=range(4 * step, 4 * step + 4), epoch=epoch)
            assert torch.equal(images, expected)


def test_augment_counts_batches_of_any_length_and_resumes_its_count():
    augment = make_augment()
    expected = [augment(BATCH[:count]) for count in (4, 1, 3, 4)]
    for stop in range(4):
        saved = make_augment()
        for count in (4, 1, 3)[:stop]:
            saved(BATCH[:count])
        resumed = make_augment()
        resumed.load_state_dict(saved.state_dict())
        resumed.set_epoch(0)  # the epoch of the state, so the count stays
        assert torch.equal(resumed(BATCH[: (4, 1, 3, 4)[stop]]), expected[stop])


def test_augment_of_the_batches_of_a_loader_gives_each_the_size_of_its_step():
    options = {"transforms": [T.CenterCrop((40, 50))], "num_workers": 0, "device": "cpu", "info": True}
    with gl.Loader(IMAGES, 4, shuffle=True, **options) as loader:
        augment = make_augment()
        for images, info in loader:
            result = augment(images, positions=info.positions, epoch=info.epoch, step=info.step)
            expected = make_augment(size_of(info.step))(images, positions=info.positions)
            assert torch.equal(result, expected)
    assert torch.equal(augment(BATCH), make_augment()(BATCH))  # batches with positions do not count


def test_augment_needs_the_step_of_explicit_positions():
    text = "depends on the batch, whose number in the epoch cannot be derived from positions=…; also pass step=…"
    with pytest.raises(ValueError, match=re.escape(f"RandomResizedCrop(size=…) {text}, such as BatchInfo.step")):
        make_augment()(BATCH, positions=range(4))
    with pytest.raises(ValueError, match=r"step must be at least 0 and .*, got -1"):
        make_augment()(BATCH, positions=range(4), step=-1)
    with pytest.raises(ValueError, match=re.escape("RandomResizedCrop(size=…) is bucket_size, but batches that are")):
        make_augment(T.bucket_size)
