"""`Loader(shuffle=Buckets(…))`: equal bits, resuming, replaying, and the options that it refuses."""

from __future__ import annotations

import json
import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

import gpuload as gl
from gpuload import transforms as T

SIZES = np.array([(24, 32)] * 17 + [(32, 24)] * 11 + [(28, 28)] * 5)
NOISE = [np.random.default_rng(i).integers(0, 256, (*size, 3), np.uint8) for i, size in enumerate(SIZES.tolist())]
SAMPLES = [(image, i) for i, image in enumerate(NOISE)]
BUCKETS = gl.Buckets(SIZES, shapes=[(24, 32), (32, 24), (28, 28)])
SHAPES = [(12, 16), (16, 12), (14, 14)]
SMALL = gl.Buckets(SIZES, shapes=SHAPES)
SIZED_CHAIN = [T.ResizeKeepRatio(T.bucket_size), T.RandomCrop(T.bucket_size), T.RandomHorizontalFlip()]
CHAIN = [T.RandomResizedCrop(8), T.RandomHorizontalFlip(), T.ColorJitter(0.4, 0.4, 0.4)]


def make_loader(batch_size: int | None = 4, **options: Any) -> gl.Loader:
    defaults = {
        "shuffle": BUCKETS, "transforms": CHAIN, "num_workers": 0, "device": "cpu", "info": True, "seed": 3,
    }  # fmt: skip
    return gl.Loader(SAMPLES, batch_size, **{**defaults, **options})


def take_batches(loader: gl.Loader, epochs: int = 1) -> list[Any]:
    """Return epoch, step, positions, labels, validity and the image bytes of each batch."""
    return [
        (info.epoch, info.step, info.positions.tolist(), labels.tolist(), info.valid.tolist(), images.numpy().tobytes())
        for _ in range(epochs)
        for (images, labels), info in loader
    ]


def images_by_position(batch_size: int, ranks: int, **options: Any) -> dict[int, Any]:
    """Return label and image bytes of each valid sample of the first epoch over all ranks, keyed by position."""
    samples = {}
    for rank in range(ranks):
        with make_loader(batch_size, rank=rank, world_size=ranks, uneven="exact", **options) as loader:
            for (images, labels), info in loader:
                for image, label, position, is_valid in zip(
                    images, labels.tolist(), info.positions.tolist(), info.valid.tolist(), strict=True
                ):
                    if is_valid:
                        assert position not in samples
                        samples[position] = label, image.numpy().tobytes()
    return samples


@pytest.mark.processes
def test_bits_do_not_depend_on_workers_or_on_ranks_with_the_same_global_batch_size():
    expected = images_by_position(6, 1)
    assert sorted(label for label, _ in expected.values()) == list(range(33))
    for batch_size, ranks, workers in [(6, 1, 1), (6, 1, 4), (3, 2, 0), (2, 3, 0), (3, 2, 2)]:
        assert images_by_position(batch_size, ranks, num_workers=workers, chunk_size=2) == expected


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_images_have_the_shape_of_their_bucket_with_any_number_of_workers_and_ranks(ranks):
    shape_of = {
        index: shape for shape, members in zip(SHAPES, SMALL._members, strict=True) for index in members.tolist()
    }
    batches: dict[int, list[Any]] = {}
    for rank, workers in [(rank, workers) for rank in range(ranks) for workers in (0, 1, 4)]:
        options = {"shuffle": SMALL, "transforms": SIZED_CHAIN, "rank": rank, "world_size": ranks}
        with make_loader(2, num_workers=workers, chunk_size=1, **options) as loader:
            for step, ((images, labels), _) in enumerate(loader):
                assert {shape_of[label] for label in labels.tolist()} == {tuple(images.shape[2:])}
                batches.setdefault(step, []).append((rank, labels.tolist(), images.numpy().tobytes(), images.shape))
    for step in batches.values():
        assert len({shape for *_, shape in step}) == 1, "all ranks have one shape in a step"
        for rank in range(ranks):
            assert len({str(entry[1:]) for entry in step if entry[0] == rank}) == 1, "workers change a batch"


def test_resuming_and_replaying_give_images_of_the_shape_of_their_bucket():
    options = {"shuffle": SMALL, "transforms": SIZED_CHAIN}
    with make_loader(**options) as loader:
        expected = take_batches(loader)
        (images, _), info = next(iter(loader))
        for image, position in zip(images, info.positions.tolist(), strict=True):
            assert torch.equal(loader.replay(1, position).sample[0], image)
    for stop in range(len(expected)):
        with make_loader(**options) as interrupted, make_loader(**options) as resumed:
            iterator = iter(interrupted)
            for _ in range(stop):
                next(iterator)
            resumed.load_state_dict(interrupted.state_dict())
            assert take_batches(resumed) == expected[stop:]


@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"rank": 1, "world_size": 2}])
def test_resuming_after_every_batch_gives_the_remaining_batches(options):
    with make_loader(**options) as loader:
        expected = take_batches(loader, 2)
        length = len(loader)
    assert len(expected) == 2 * length
    for stop in range(length + 1):
        with make_loader(**options) as interrupted, make_loader(**options) as resumed:
            iterator = iter(interrupted)
            for _ in range(stop):
                next(iterator)
            resumed.load_state_dict(json.loads(json.dumps(interrupted.state_dict())))
            assert take_batches(resumed, 2)[: 2 * length - stop] == expected[stop:]
            assert len(resumed) == length


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch_size": 2}, "batch_size=2, 1 rank, drop_last=False, uneven='pad'"),
        ({"rank": 0, "world_size": 2}, "batch_size=4, 2 ranks, drop_last=False, uneven='pad'"),
        ({"drop_last": True}, "batch_size=4, 1 rank, drop_last=True, uneven='pad'"),
    ],
)
def test_state_of_another_batch_size_world_size_or_drop_last_resumes_between_epochs_only(options, text):
    with make_loader() as loader:
        iterator = iter(loader)
        next(iterator)
        in_epoch = loader.state_dict()
        list(iterator)
        after_epoch = loader.state_dict()
    with make_loader(**options) as other:
        other.load_state_dict(in_epoch)
        expected = f"middle of epoch 0, with batch_size=4, 1 rank, .* but this loader has {text}.*end of an epoch"
        with pytest.raises(ValueError, match=expected):
            iter(other)
        other.load_state_dict(after_epoch)
        batches = take_batches(other)
        assert len(batches) == len(other)
        assert {batch[0] for batch in batches} == {1}


def test_states_of_other_buckets_and_of_other_orders_are_refused():
    with make_loader() as loader:
        next(iter(loader))
        state = loader.state_dict()
    for shuffle in (True, gl.Buckets(SIZES, shapes=[(24, 32), (32, 24)])):
        with make_loader(shuffle=shuffle) as other, pytest.raises(ValueError, match="order was 'buckets-"):
            other.load_state_dict(state)
    with make_loader(shuffle=True) as other:
        with pytest.warns(RuntimeWarning, match="order was 'buckets-"):
            other.load_state_dict(state, strict=False)
        with pytest.raises(ValueError, match="but this loader has an order without Buckets"):
            iter(other)


def test_a_state_whose_positions_exceed_the_number_of_samples_is_accepted():
    with make_loader(16) as loader:
        *_, last = list(loader)
        assert last[1].positions.max() > len(SAMPLES)
        iterator = iter(loader)
        states = [loader.state_dict() for _ in iterator]
    assert states[-2]["position"] > len(SAMPLES)
    with make_loader(16) as loader:
        loader.load_state_dict(states[-2])
        assert len(list(loader)) == 1


@pytest.mark.parametrize("options", [{}, {"rank": 1, "world_size": 2}])
def test_replay_gives_each_sample_of_an_epoch(options):
    with make_loader(**options) as loader:
        for (images, labels), info in loader:
            for image, label, position in zip(images, labels.tolist(), info.positions.tolist(), strict=True):
                replayed = loader.replay(0, position)
                assert replayed.index == replayed.sample[1] == label
                assert torch.equal(replayed.sample[0], image)


def test_replay_refuses_the_positions_after_a_short_batch():
    with make_loader(16) as loader:
        used = {position for _, info in loader for position in info.positions.tolist()}
        unused = next(position for position in range(64) if position not in used)
        with pytest.raises(ValueError, match=f"epoch 0 has no sample at position {unused}, since the batch of step"):
            loader.replay(0, unused)


def test_mixup_mixes_within_a_batch_and_replays():
    chain = [T.CenterCrop(8), T.ToDtype("float32", scale=True), T.MixUp(num_classes=33)]
    with make_loader(transforms=chain) as loader:
        (images, labels), info = next(iter(loader))
        assert (labels > 0).sum(dim=1).max() == 2
        for image, position in zip(images, info.positions.tolist(), strict=True):
            assert torch.equal(loader.replay(0, position).sample[0], image)


def test_the_sampler_lists_the_samples_of_an_epoch():
    with make_loader(rank=1, world_size=2) as loader:
        expected = list(loader.sampler)
        assert [index for _, info in loader for index in info.indices.tolist()] == expected
        assert len(loader.sampler) == len(expected)


def test_buckets_without_a_batch_size_yield_each_sample_once():
    with make_loader(None, transforms=()) as loader:
        assert sorted(label for (_, label), _ in loader) == list(range(33))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(SAMPLES)


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (SAMPLES[:-1], {}, r"shuffle=Buckets\(…\) has 33 sizes, but the dataset has 32 samples; pass the size of each"),
        (SAMPLES, {"weights": np.ones(33)}, "weights already draw samples at random; leave shuffle out"),
        (SAMPLES, {"repeats": 2}, r"repeats=2 needs shuffle=True or weights: .*, and Buckets have each sample once"),
        (SAMPLES, {"sampler": range(33)}, r"shuffle=Buckets\(33 sizes in 3 shapes\) cannot be combined with a sampler"),
        (SAMPLES, {"batch_sampler": [[0]], "batch_size": 1}, r"cannot be combined with a batch_sampler"),
        (gl.Mix([SAMPLES[:17], SAMPLES[17:]], [1, 1]), {}, r"shuffle=Buckets\(…\) cannot be combined with a Mix"),
        (Stream(), {}, "shuffle=Buckets.* does not apply to an iterable dataset"),
    ],
)
def test_buckets_refuse_what_defines_another_order(dataset, options, message):
    with pytest.raises(ValueError, match=message):
        gl.Loader(dataset, **{"batch_size": 4, "shuffle": BUCKETS, "num_workers": 0, "device": "cpu", **options})


def test_a_dataset_that_has_grown_is_refused_at_the_next_epoch():
    dataset = list(SAMPLES)
    with gl.Loader(dataset, 4, BUCKETS, num_workers=0, device="cpu") as loader:
        dataset.append(SAMPLES[0])
        with pytest.raises(ValueError, match="33 sizes, but the dataset has 34 samples"):
            iter(loader)


def test_samples_that_are_in_no_epoch_are_warned_of_once():
    message = (
        "16 of 33 samples are in no batch of any epoch, since drop_last=True drops the only batch of their bucket; use "
        "fewer shapes, or leave drop_last=True out"
    )
    with make_loader(12, drop_last=True) as loader:
        with pytest.warns(RuntimeWarning, match=message):
            assert len(list(loader)) == 1
        assert len(list(loader)) == 1


def test_buckets_without_a_full_batch_are_refused():
    message = "drop_last=True leaves no batch: the dataset has 33 samples in 3 buckets for 2 ranks, but batch_size"
    with pytest.raises(ValueError, match=message):
        make_loader(9, drop_last=True, rank=0, world_size=2)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"drop_last": True}, "7 batches in 3 buckets; an epoch leaves out 5 of 33 samples, and has 0"),
        (
            {"rank": 0, "world_size": 2},
            "6 batches in 3 buckets; an epoch leaves out 0 of 33 samples, and has 3",
        ),
    ],
)
def test_the_log_says_what_an_epoch_leaves_out_or_repeats(options, line, caplog):
    with caplog.at_level(logging.INFO, "gpuload.loader"), make_loader(**options) as loader:
        next(iter(loader))
    assert line in caplog.text
