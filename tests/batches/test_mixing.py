"""Labels in a batch: how they are found, how they become soft, and errors for unsuitable labels."""

from __future__ import annotations

import re
from collections import UserDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from helpers.peers import timm, torchvision

import gpuload as gl
from gpuload import transforms as T
from gpuload.batches.mixing import Pairing, find_labels, mix_labels, partners_of, soften
from gpuload.errors import CollateError

LABELS = torch.tensor([0, 2, 1])
SOFT_LABELS = torch.tensor([[0.75, 0, 0.25], [0.5, 0, 0.5], [0, 1, 0]])


def make_pairing(**arguments) -> Pairing:
    return Pairing(T.MixUp(**arguments), np.array([1, 0, 2]), np.array([0.75, 0.5, 1.0]))


def sample_name(row: int) -> str:
    return f"sample {10 + row}"


@pytest.mark.parametrize(
    ("numbers", "partners"),
    [
        ([4, 5, 6, 7], [1, 0, 3, 2]),
        ([7, 4, 6, 5], [2, 3, 0, 1]),
        ([5, 6, 8], [0, 1, 2]),
        ([0, 1, 0, 1], [1, 0, 3, 2]),
        ([2, 0, 0, 1], [0, 3, 2, 1]),  # the first two samples of each number
        ([2, 2, 2], [0, 1, 2]),
        ([], []),
    ],
)
def test_partners_of_pairs_samples_with_neighboring_numbers(numbers, partners):
    rows = partners_of(np.array(numbers, np.int64), np.array(numbers, np.int64))
    assert rows.tolist() == partners
    assert rows[rows].tolist() == list(range(len(numbers)))


Named = namedtuple("Named", ["pixels", "target"])

BATCHES = [
    [torch.zeros(3), LABELS],
    (torch.zeros(3), LABELS, torch.ones(3)),
    Named(torch.zeros(3), LABELS),
    {"image": torch.zeros(3), "labels": LABELS},
    {"my_label": torch.ones(3), "LABELS": LABELS},
    {"label_id": LABELS, "other_label": torch.zeros(3)},
    [torch.zeros(3), {"FooLabelBar": LABELS}],
    UserDict({1: torch.ones(3), "labels": LABELS}),
]


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: type(batch).__name__)
def test_soften_replaces_only_the_labels(batch):
    assert find_labels(batch, "default") is LABELS
    softened = soften(batch, make_pairing(num_classes=3), sample_name)
    assert type(softened) is type(batch)
    softened_labels = find_labels(softened, "default")
    torch.testing.assert_close(softened_labels, SOFT_LABELS)
    assert softened_labels.dtype == torch.float32
    before, after = (list(b.values()) if hasattr(b, "values") else list(b) for b in (batch, softened))
    is_same = [entry is softened_entry for entry, softened_entry in zip(before, after, strict=True)]
    assert is_same.count(False) == 1, "an entry other than the labels was replaced"


@pytest.mark.parametrize("batch", [batch for batch in BATCHES if not isinstance(batch, UserDict)])
def test_find_labels_agrees_with_torchvision(batch):
    torchvision()
    from torchvision.transforms.v2 import _utils

    assert find_labels(batch, "default") is _utils._find_labels_default_heuristic(batch)


@dataclass
class Record:
    pixels: torch.Tensor
    target: torch.Tensor


def test_soften_uses_the_labels_getter():
    record = soften(
        Record(torch.zeros(3), LABELS), make_pairing(num_classes=3, labels_getter=lambda r: r.target), sample_name
    )
    torch.testing.assert_close(record.target, SOFT_LABELS)
    batch = [torch.zeros(3), LABELS]
    assert soften(batch, make_pairing(labels_getter=None), sample_name) is batch


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_mix_labels_accepts_integers_of_any_dtype(dtype):
    torch.testing.assert_close(mix_labels(LABELS.to(dtype), make_pairing(num_classes=3), sample_name), SOFT_LABELS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int64])
def test_mix_labels_mixes_one_hot_and_soft_labels(dtype):
    hard = torch.eye(3)[LABELS].to(dtype)
    mixed = mix_labels(hard, make_pairing(), sample_name)
    assert mixed.dtype == (dtype if dtype.is_floating_point else torch.float32)
    torch.testing.assert_close(mixed, SOFT_LABELS.to(mixed.dtype))
    soft = torch.tensor([[0.1, 0.9, 0], [0.5, 0.25, 0.25], [0, 0, 1]])
    expected = torch.stack([0.75 * soft[0] + 0.25 * soft[1], 0.5 * soft[0] + 0.5 * soft[1], soft[2]])
    torch.testing.assert_close(mix_labels(soft, make_pairing(num_classes=3), sample_name), expected)


def test_label_smoothing_agrees_with_timm():
    timm()
    from timm.data.mixup import mixup_target

    labels_by_timm = mixup_target(LABELS, 3, lam=0.3, smoothing=0.1)  # timm's partners are the batch reversed
    pairing = Pairing(T.MixUp(num_classes=3, label_smoothing=0.1), np.array([2, 1, 0]), np.full(3, 0.3))
    torch.testing.assert_close(mix_labels(LABELS, pairing, sample_name), labels_by_timm, rtol=0, atol=1e-6)


@pytest.mark.parametrize("weights", [[0.75, 0.5, 1.0], [1.0, 1.0, 1.0]], ids=["some mixed", "none mixed"])
@pytest.mark.parametrize("labels", [LABELS, torch.eye(3, dtype=torch.float64)[LABELS]], ids=["integers", "soft"])
def test_label_smoothing_applies_to_samples_that_are_not_mixed(labels, weights):
    cutmixes = (T.CutMix(num_classes=3, label_smoothing=smoothing) for smoothing in (0, 0.3))
    pairings = [Pairing(cutmix, np.array([1, 0, 2]), np.array(weights)) for cutmix in cutmixes]
    unsmoothed, smoothed = (mix_labels(labels, pairing, sample_name) for pairing in pairings)
    torch.testing.assert_close(smoothed, (1 - 0.3) * unsmoothed + 0.3 / 3, check_dtype=True)
    torch.testing.assert_close(smoothed[2].float(), torch.tensor([0.1, 0.8, 0.1]))


@pytest.mark.parametrize(("batch", "arguments", "text"), [
    ([torch.zeros(3)], {},
     "no labels were found in the batch, a list of 1: labels are expected as its second entry, a tensor, or "
     "in a dict under a key that contains 'label'; pass a function that returns the labels as labels_getter=…, "
     "or labels_getter=None if there are no labels"),
    (torch.zeros(3), {}, "no labels were found in the batch, a tensor of shape (3,): labels"),
    ({"image": 1, "target": LABELS}, {}, "no labels were found in the batch, a dict with the keys 'image', 'target'"),
    ([torch.zeros(3), ["a", "b"]], {}, "no labels were found in the batch, a list of 2"),
    ({"image": 1, "labels": ["cat", "dog", "cat"]}, {},
     "MixUp: the labels must be a tensor, got a list of 3; have the dataset return a number, or pass a"),
    ([1, LABELS], {}, "MixUp got integer labels of shape (3,); pass num_classes=… to make them soft labels"),
    ([1, LABELS], {"num_classes": 2},
     "MixUp(num_classes=2): sample 11 has the label 2, which is not in 0 … 1; increase num_classes, or"),
    ([1, torch.tensor([0, 0, -1])], {"num_classes": 2}, "MixUp(num_classes=2): sample 12 has the label -1, which"),
    ([1, torch.zeros(3)], {},
     "MixUp: labels must be integers of shape (N,), or numbers of shape (N, classes), got torch.float32 of "
     "shape (3,)"),
    ([1, torch.zeros(3, 2, 2)], {}, "got torch.float32 of shape (3, 2, 2)"),
    ([1, torch.zeros(3, dtype=torch.bool)], {}, "got torch.bool of shape (3,)"),
    ([1, torch.zeros(3, 4)], {"num_classes": 3},
     "MixUp(num_classes=3) got labels of shape (3, 4), which have 4 classes; leave num_classes out, or pass"),
    ([1, torch.zeros(2, 3)], {},
     "MixUp mixed 3 images, but the batch has 2 labels; make the collate_fn keep one label per "
     "image, in the same order"),
    ([1, LABELS], {"labels_getter": lambda batch: batch[1] + 0, "num_classes": 3},
     "MixUp(labels_getter=…) returned a tensor of shape (3,) that is not in the batch; return"),
])  # fmt: skip
def test_soften_of_unusable_labels_raises(batch, arguments, text):
    with pytest.raises(CollateError, match=re.escape(text)):
        soften(batch, make_pairing(**arguments), sample_name)


def image_samples(labels) -> list:
    return [(np.zeros((8, 8, 3), np.uint8), label) for label in labels]


@pytest.mark.processes
@pytest.mark.parametrize(("samples", "text"), [
    (image_samples([0, 1, 5, 2]), "MixUp(num_classes=5): sample 2 has the label 5, which is not in 0 … 4"),
    ([(image,) for image, _ in image_samples(range(4))], "no labels were found in the batch, a list of 1"),
    ([image for image, _ in image_samples(range(4))], "no labels were found in the batch, a tensor of shape (4, 3, 8,"),
])  # fmt: skip
@pytest.mark.parametrize("workers", [0, 1])
def test_loader_with_unusable_labels_raises(samples, text, workers):
    transforms = [T.ToDtype("float32", scale=True), T.MixUp(num_classes=5)]
    loader = gl.Loader(samples, 4, transforms=transforms, num_workers=workers, device="cpu")
    with loader, pytest.raises(CollateError, match=re.escape(text)):
        next(iter(loader))


@pytest.mark.parametrize("label", [3, np.int64(3), np.array(3), torch.tensor(3), np.eye(5)[3], torch.eye(5)[3]])
def test_loader_with_mixup_accepts_labels_of_any_kind(label):
    transforms = [T.ToDtype("float32", scale=True), T.MixUp(num_classes=5)]
    _, labels = next(iter(gl.Loader(image_samples([label] * 4), 4, transforms=transforms, num_workers=0, device="cpu")))
    torch.testing.assert_close(labels.float(), torch.eye(5)[[3] * 4])


def test_loader_with_labels_getter_none_mixes_only_images():
    transforms = [T.ToDtype("float32", scale=True), T.MixUp(labels_getter=None)]
    samples = [np.full((8, 8, 3), 60 * number, np.uint8) for number in range(4)]
    images = next(iter(gl.Loader(samples, 4, transforms=transforms, num_workers=0, device="cpu")))
    assert not torch.equal(images[0], torch.zeros(3, 8, 8)), "image 0, which is black, is not mixed with its partner"
