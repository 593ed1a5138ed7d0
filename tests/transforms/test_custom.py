"""Transforms of the user's own are drawn like all others, stay out of workers, and move boxes and keypoints."""

from __future__ import annotations

import pickle
import re
import threading
from collections import namedtuple
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from gpuload import transforms as T
from gpuload.rng.philox import epoch_key
from gpuload.transforms.program.ops import Call
from gpuload.transforms.program.targets import SampleTargets, apply_records

KEY = epoch_key(3, 1)
SIZES = np.random.default_rng(0).integers(40, 90, (12, 2))
POSITIONS = np.arange(100, 112)
FLOAT = T.ToDtype("float32", scale=True)
NORMALIZE = T.Normalize((0.4, 0.5, 0.6), (0.2, 0.2, 0.2))

Drawn = namedtuple("Drawn", "gain shift")


@dataclass(frozen=True)
class Several(T.Custom):
    """Draws a structure of arrays."""

    strength: float = 0.5
    lock: Any = field(default_factory=threading.Lock, compare=False)  # workers must never need it

    def draw(self, uniforms, sizes_hw):
        u = uniforms(3)
        return {"one": u[:, 0] * self.strength, "both": Drawn(u[:, 1], (u * sizes_hw[:, :1], sizes_hw))}


@dataclass(frozen=True)
class Flip(T.Custom):
    """Flips half of the images from left to right."""

    moves_pixels = True

    def draw(self, uniforms, sizes_hw):
        return uniforms(1)[:, 0] < 0.5

    def apply(self, images, params):
        return torch.where(params[:, None, None, None], images.flip(-1), images)

    apply_masks = apply

    def apply_boxes(self, boxes, params, size_hw):
        return boxes if not params else np.stack([size_hw[1] - boxes[:, 2], boxes[:, 1], size_hw[1] - boxes[:, 0],
                                                  boxes[:, 3]], axis=1)  # fmt: skip

    def apply_keypoints(self, points, params, size_hw):
        return points if not params else np.stack([size_hw[1] - 1 - points[..., 0], points[..., 1]], axis=-1)


def call_of(chain: T.Chain, rows: np.ndarray) -> Call:
    [record] = [record for record in chain.draw(KEY, POSITIONS[rows], SIZES[rows]).records if isinstance(record, Call)]
    return record


def test_a_sample_draws_the_same_in_any_batch():
    chain, rows = T.Chain([T.RandomHorizontalFlip(), Several(), T.Resize(9)]), np.array([7, 2, 5])
    together, alone = call_of(chain, np.arange(12)), call_of(chain, rows)
    some = together.take(rows, None)
    assert type(some.params["both"]) is Drawn
    np.testing.assert_array_equal(some.params["one"], alone.params["one"])
    np.testing.assert_array_equal(some.params["both"].shift[0], alone.params["both"].shift[0])
    np.testing.assert_array_equal(some.seeds, alone.seeds)
    assert len(set(together.seeds.tolist())) == 12
    assert len(np.unique(together.params["one"])) == 12
    assert not np.isin(together.seeds, (together.params["both"].gain * 2.0**32).astype(np.int64)).any()


def test_two_of_a_kind_draw_other_numbers():
    one, two = T.Chain([Several(), Several()]).draw(KEY, POSITIONS, SIZES).records
    assert not np.isin(one.params["one"], two.params["one"]).any()
    assert not np.isin(one.seeds, two.seeds).any()


@pytest.mark.parametrize(
    ("drawn", "got"),
    [
        (lambda u, s: u(1)[:3], "got an array of shape (3, 1)"),
        (lambda u, s: {"a": (u(1), 0.5)}, "got float"),
        (lambda u, s: u(2).tolist(), "got list"),
        (lambda u, s: np.float64(3), "got float64"),
    ],
)
def test_what_draw_returns_is_checked(drawn, got):
    class Own(T.Custom):
        def draw(self, uniforms, sizes_hw):
            return drawn(uniforms, sizes_hw)

    text = "Own.draw must return numpy arrays with one entry for each sample, of shape (12, …), or tuples and dicts of "
    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        T.Chain([Own()]).draw(KEY, POSITIONS, SIZES)
    assert str(caught.value).endswith(got)


@pytest.mark.parametrize(
    "transforms",
    [
        [T.RandomCrop(20), Several()],
        [Several(), T.RandomCrop(20)],
        [T.RandomApply([Several()]), T.RandomResizedCrop(20), T.RandomCrop(10)],
        [T.MultiView([[Several(), T.CenterCrop(9)], [T.RandomOrder([Several(), T.RandomInvert()])]])],
        [FLOAT, T.RandomErasing(), Several(), NORMALIZE],
        [FLOAT, Several(), T.RandomErasing(value="random"), NORMALIZE, torch.nn.Identity()],
        [T.Lambda(lambda images: images, per="image"), T.Lambda(torch.nn.Identity()), T.CenterCrop(9)],
    ],
)
def test_workers_get_neither_it_nor_other_regions(transforms):
    chain = T.Chain(transforms)
    data = pickle.dumps(chain)  # locks and lambdas cannot be pickled
    assert b"test_custom" not in data  # the class
    assert b"strength" not in data
    there = pickle.loads(data)
    np.testing.assert_array_equal(there.regions(KEY, POSITIONS, SIZES), chain.regions(KEY, POSITIONS, SIZES))


def test_what_a_worker_gets_cannot_be_applied():
    there = pickle.loads(pickle.dumps(T.Chain([Several(), NORMALIZE])))
    with pytest.raises(RuntimeError, match="Several was removed when its chain was pickled"):
        T.apply(there.transforms, np.zeros((4, 4, 3), np.uint8))


def test_a_fingerprint_has_the_arguments_and_no_address():
    def of(*transforms):
        return T.Chain(transforms).fingerprint()

    def named(images):
        return images

    @dataclass(frozen=True)
    class Held(T.Custom):
        what: Any = None

    class Plain(T.Custom):
        def __init__(self, number):
            self.number = number

    assert of(Several(0.5)) == of(Several(0.5)) != of(Several(0.6))
    assert of(Plain(1)) == of(Plain(1)) != of(Plain(2))
    assert of(T.Lambda(lambda x: x), NORMALIZE) == of(T.Lambda(lambda x: x + 1), NORMALIZE)
    assert of(T.Lambda(named), NORMALIZE) != of(T.Lambda(lambda x: x), NORMALIZE)
    assert of(T.Lambda(named), NORMALIZE) != of(T.Lambda(named, per="image"), NORMALIZE)
    assert of(NORMALIZE, T.Lambda(named)) == of(NORMALIZE) + "-named"
    assert of(Held(object())) == of(Held(object())) != of(Held(torch.nn.ReLU()))
    assert of(Held(np.arange(3))) == of(Held([0, 1, 2])) != of(Held(np.arange(4)))


def test_how_they_are_shown():
    chain = T.Chain([Flip(), T.Lambda(abs, per="image"), T.Lambda(torch.nn.ReLU()), T.CenterCrop(8), T.Lambda(abs)])
    assert repr(chain) == (
        "Chain([Flip(), Lambda(abs, per='image'), Lambda(torch's ReLU), CenterCrop(size=(8, 8)), Lambda(abs)])"
    )


def test_beside_what_needs_levels_it_may_not_get_floats():
    held = T.RandomApply([Several(), T.ColorJitter(0.5)])
    T.Chain([held, NORMALIZE])
    text = (
        "RandomApply (number 2) holds ColorJitter, which needs pixel values in 0 … 255, together with your own "
        "transform, which gets the floats of ToDtype; put RandomApply before ToDtype, or move ColorJitter or "
        "your transform out of it"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        T.Chain([FLOAT, held, NORMALIZE])


def test_boxes_and_keypoints_move_as_with_the_one_that_is_built_in():
    boxes, points = np.array([[1, 2, 9, 12], [0, 0, 5, 5]]), np.array([[[3.5, 4.0]], [[0.0, 1.0]]])
    program = T.Chain([Flip(), T.CenterCrop(30)]).draw(KEY, POSITIONS, SIZES)
    samples = [SampleTargets([boxes, boxes.astype(float)], [points]) for _ in range(12)]
    apply_records(program.records, samples)
    flipped = program.records[0].params
    assert 0 < flipped.sum() < 12
    for row, sample in enumerate(samples):
        built_in = T.Chain([T.RandomHorizontalFlip(float(flipped[row])), T.CenterCrop(30)])
        expected = SampleTargets([boxes, boxes.astype(float)], [points])
        apply_records(built_in.draw(KEY, POSITIONS[row : row + 1], SIZES[row : row + 1]).records, [expected])
        for found, other in zip((*sample.boxes, *sample.points), (*expected.boxes, *expected.points), strict=True):
            np.testing.assert_array_equal(found, other)
            assert found.dtype == other.dtype


def test_boxes_that_do_not_come_back_are_an_error():
    class Loses(T.Custom):
        def apply_boxes(self, boxes, params, size_hw):
            return boxes[:1]

    program = T.Chain([Loses()]).draw(KEY, POSITIONS[:1], SIZES[:1])
    text = (
        "Loses.apply_boxes must return a numpy array with the shape of its input, (2, 4); got an array of shape (1, 4)"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        apply_records(program.records, [SampleTargets([np.zeros((2, 4))])])
