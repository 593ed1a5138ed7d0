"""Custom transforms draw the same for a sample in any batch, are not sent to workers, and move boxes and keypoints."""

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
from transforms.drawing import KEY, NORMALIZE, TO_FLOAT

from gpuload import transforms as T
from gpuload.transforms.program.ops import Call
from gpuload.transforms.program.targets import SampleTargets, apply_records

SIZES = np.random.default_rng(0).integers(40, 90, (12, 2))
POSITIONS = np.arange(100, 112)

Drawn = namedtuple("Drawn", "gain shift")


@dataclass(frozen=True)
class Structured(T.Custom):
    """A custom transform that draws a structure of arrays."""

    strength: float = 0.5
    lock: Any = field(default_factory=threading.Lock, compare=False)  # cannot be sent to workers

    def draw(self, uniforms, sizes_hw):
        u = uniforms(3)
        return {"factor": u[:, 0] * self.strength, "pair": Drawn(u[:, 1], (u * sizes_hw[:, :1], sizes_hw))}


@dataclass(frozen=True)
class Flip(T.Custom):
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


def test_custom_transforms_draw_the_same_for_a_sample_in_any_batch():
    chain, rows = T.Chain([T.RandomHorizontalFlip(), Structured(), T.Resize(9)]), np.array([7, 2, 5])
    call, call_of_rows = call_of(chain, np.arange(12)), call_of(chain, rows)
    rows_of_call = call.take(rows, None)
    assert type(rows_of_call.params["pair"]) is Drawn
    np.testing.assert_array_equal(rows_of_call.params["factor"], call_of_rows.params["factor"])
    np.testing.assert_array_equal(rows_of_call.params["pair"].shift[0], call_of_rows.params["pair"].shift[0])
    np.testing.assert_array_equal(rows_of_call.seeds, call_of_rows.seeds)
    assert len(set(call.seeds.tolist())) == 12
    assert len(np.unique(call.params["factor"])) == 12
    assert not np.isin(call.seeds, (call.params["pair"].gain * 2.0**32).astype(np.int64)).any()


def test_two_custom_transforms_of_one_class_draw_different_numbers():
    first, second = T.Chain([Structured(), Structured()]).draw(KEY, POSITIONS, SIZES).records
    assert not np.isin(first.params["factor"], second.params["factor"]).any()
    assert not np.isin(first.seeds, second.seeds).any()


@pytest.mark.parametrize(
    ("draw", "got"),
    [
        (lambda u, s: u(1)[:3], "got an array of shape (3, 1)"),
        (lambda u, s: {"a": (u(1), 0.5)}, "got float"),
        (lambda u, s: u(2).tolist(), "got list"),
        (lambda u, s: np.float64(3), "got float64"),
    ],
)
def test_draw_refuses_a_result_without_an_entry_per_sample(draw, got):
    class Wrong(T.Custom):
        def draw(self, uniforms, sizes_hw):
            return draw(uniforms, sizes_hw)

    text = (
        "Wrong.draw must return numpy arrays with one entry for each sample, of shape (12, …), or tuples and dicts of "
    )
    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        T.Chain([Wrong()]).draw(KEY, POSITIONS, SIZES)
    assert str(caught.value).endswith(got)


@pytest.mark.parametrize(
    "transforms",
    [
        [T.RandomCrop(20), Structured()],
        [Structured(), T.RandomCrop(20)],
        [T.RandomApply([Structured()]), T.RandomResizedCrop(20), T.RandomCrop(10)],
        [T.MultiView([[Structured(), T.CenterCrop(9)], [T.RandomOrder([Structured(), T.RandomInvert()])]])],
        [TO_FLOAT, T.RandomErasing(), Structured(), NORMALIZE],
        [TO_FLOAT, Structured(), T.RandomErasing(value="random"), NORMALIZE, torch.nn.Identity()],
        [T.Lambda(lambda images: images, per="image"), T.Lambda(torch.nn.Identity()), T.CenterCrop(9)],
    ],
)
def test_pickled_chains_contain_no_custom_transforms_and_draw_equal_regions(transforms):
    chain = T.Chain(transforms)
    pickled = pickle.dumps(chain)  # locks and lambdas cannot be pickled
    assert b"test_custom" not in pickled  # the class
    assert b"strength" not in pickled
    unpickled = pickle.loads(pickled)
    np.testing.assert_array_equal(unpickled.regions(KEY, POSITIONS, SIZES), chain.regions(KEY, POSITIONS, SIZES))


def test_apply_refuses_a_chain_whose_custom_transforms_were_removed_by_pickling():
    unpickled = pickle.loads(pickle.dumps(T.Chain([Structured(), NORMALIZE])))
    with pytest.raises(RuntimeError, match="Structured was removed when its chain was pickled"):
        T.apply(unpickled.transforms, np.zeros((4, 4, 3), np.uint8))


def test_fingerprint_depends_on_arguments_but_not_on_addresses():
    def fingerprint(*transforms):
        return T.Chain(transforms).fingerprint()

    def function(images):
        return images

    @dataclass(frozen=True)
    class WithField(T.Custom):
        value: Any = None

    class WithAttribute(T.Custom):
        def __init__(self, number):
            self.number = number

    assert fingerprint(Structured(0.5)) == fingerprint(Structured(0.5)) != fingerprint(Structured(0.6))
    assert fingerprint(WithAttribute(1)) == fingerprint(WithAttribute(1)) != fingerprint(WithAttribute(2))
    assert fingerprint(T.Lambda(lambda x: x), NORMALIZE) == fingerprint(T.Lambda(lambda x: x + 1), NORMALIZE)
    assert fingerprint(T.Lambda(function), NORMALIZE) != fingerprint(T.Lambda(lambda x: x), NORMALIZE)
    assert fingerprint(T.Lambda(function), NORMALIZE) != fingerprint(T.Lambda(function, per="image"), NORMALIZE)
    assert fingerprint(NORMALIZE, T.Lambda(function)) == fingerprint(NORMALIZE) + "-function"
    unknown, array = fingerprint(WithField(object())), fingerprint(WithField(np.arange(3)))
    assert unknown == fingerprint(WithField(object())) != fingerprint(WithField(torch.nn.ReLU()))
    assert array == fingerprint(WithField([0, 1, 2])) != fingerprint(WithField(np.arange(4)))


def test_repr_of_a_chain_names_custom_transforms_functions_and_modules():
    chain = T.Chain([Flip(), T.Lambda(abs, per="image"), T.Lambda(torch.nn.ReLU()), T.CenterCrop(8), T.Lambda(abs)])
    assert repr(chain) == (
        "Chain([Flip(), Lambda(abs, per='image'), Lambda(torch's ReLU), CenterCrop(size=(8, 8)), Lambda(abs)])"
    )


def test_chain_refuses_a_container_of_a_custom_and_a_level_transform_after_to_dtype():
    container = T.RandomApply([Structured(), T.ColorJitter(0.5)])
    T.Chain([container, NORMALIZE])
    text = (
        "RandomApply (number 2) holds ColorJitter, which needs pixel values in 0 … 255, together with your own "
        "transform, which gets the floats of ToDtype; put RandomApply before ToDtype, or move ColorJitter or "
        "your transform out of it"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        T.Chain([TO_FLOAT, container, NORMALIZE])


def test_custom_flip_moves_boxes_and_keypoints_like_random_horizontal_flip():
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
        for array, expected_array in zip(
            (*sample.boxes, *sample.points), (*expected.boxes, *expected.points), strict=True
        ):
            np.testing.assert_array_equal(array, expected_array)
            assert array.dtype == expected_array.dtype


def test_apply_boxes_that_returns_fewer_boxes_is_refused():
    class Drops(T.Custom):
        def apply_boxes(self, boxes, params, size_hw):
            return boxes[:1]

    program = T.Chain([Drops()]).draw(KEY, POSITIONS[:1], SIZES[:1])
    text = (
        "Drops.apply_boxes must return a numpy array with the shape of its input, (2, 4); got an array of shape (1, 4)"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        apply_records(program.records, [SampleTargets([np.zeros((2, 4))])])
