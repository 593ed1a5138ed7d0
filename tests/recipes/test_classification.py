"""torchvision's reference for ImageNet classification: its presets for training and evaluation."""

from __future__ import annotations

import pytest
import torch
from helpers import peers
from recipes.common import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Pictures,
    begun,
    check_replay,
    check_runners,
    draws_of,
    levels_apart,
    ours,
    resized_within,
    shape_of,
    side,
    theirs,
)
from recipes.replay import replayed
from torch.utils.data import DataLoader, default_collate

import gpuload as gl
from gpuload import transforms as T

v2 = peers.torchvision().transforms.v2
CLASSES = 10
# The greatest mean difference of an image after all transforms of a recipe, in levels.
MEANS = {"torch": 0.3, "fused": 0.3}


def original_train(automatic=None, erasing: float = 0.0, size: int = 176):
    steps = [v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip(0.5)]
    if automatic is not None:
        steps.append(automatic)
    steps += [v2.PILToTensor(), v2.ToDtype(torch.float, scale=True), v2.Normalize(IMAGENET_MEAN, IMAGENET_STD)]
    if erasing:
        steps.append(v2.RandomErasing(p=erasing))
    return v2.Compose([*steps, v2.ToPureTensor()])


def our_train(automatic=None, erasing: float = 0.0, size: int = 176):
    return [
        T.RandomResizedCrop(size),
        T.RandomHorizontalFlip(),
        *([] if automatic is None else [automatic]),
        T.ToDtype("float32", scale=True),
        T.Normalize(IMAGENET_MEAN, IMAGENET_STD),
        *([T.RandomErasing(p=erasing)] if erasing else []),
    ]


def original_eval(interpolation, resized: int = 232, size: int = 224):
    return v2.Compose(
        [
            v2.Resize(resized, interpolation=interpolation, antialias=True),
            v2.CenterCrop(size),
            v2.PILToTensor(),
            v2.ToDtype(torch.float, scale=True),
            v2.Normalize(IMAGENET_MEAN, IMAGENET_STD),
            v2.ToPureTensor(),
        ]
    )


def our_eval(interpolation, resized: int = 232, size: int = 224):
    return [
        T.Resize(resized, interpolation=interpolation),
        T.CenterCrop(size),
        T.ToDtype("float32", scale=True),
        T.Normalize(IMAGENET_MEAN, IMAGENET_STD),
    ]


# What the reference offers, ours beside theirs.
AUTOMATIC = {
    "none": (None, None),
    "ra": (v2.RandAugment(magnitude=9), T.RandAugment(magnitude=9)),
    "ta_wide": (v2.TrivialAugmentWide(), T.TrivialAugmentWide()),
    "augmix": (v2.AugMix(), T.AugMix()),
    "imagenet": (v2.AutoAugment(), T.AutoAugment()),
}


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_evaluation(pictures, backend, interpolation):
    sides = side(backend, 232), side(backend, 224)
    original, chain = original_eval(v2.InterpolationMode(interpolation), *sides), our_eval(interpolation, *sides)
    assert T.from_torchvision(original) == chain
    expected, labels = theirs(pictures, original, len(pictures))
    found = ours(pictures, chain, len(pictures), backend=backend)
    assert levels_apart(found[0], expected).max() <= resized_within(backend, interpolation)
    assert torch.equal(found[1], labels)
    assert shape_of(found) == shape_of([expected, labels])


@pytest.mark.parametrize("automatic", AUTOMATIC)
def test_training(pictures, backend, automatic):
    original, own = AUTOMATIC[automatic]
    size = side(backend, 176)
    chain = our_train(own, 0.5, size)
    assert T.from_torchvision(original_train(original, 0.5, size)) == chain
    if own is not None:
        # AugMix: a sum in float32 and one in float64 may lie on different sides of a whole number. Elsewhere a
        # blend may, and a second operation behind it makes more of it.
        augmix = automatic == "augmix"
        most = 2 if augmix else 40
        check_replay(chain, pictures, mean=0.15 if augmix else 0.02, most=most, after=1, backend=backend)
    if backend == "torch":
        check_runners(chain, pictures, after=1)
    # A resampling may differ by one level, of which operations with steps may make many.
    most = resized_within(backend) if own is None else 255
    check_replay(chain, pictures, mean=MEANS[backend], most=most, backend=backend)
    count = len(pictures) // 2
    expected = theirs(pictures, original_train(original, 0.5, size), count)
    assert shape_of(ours(pictures, chain, count, backend=backend)) == shape_of(expected)


def test_mixing(images, few, backend):
    """MixUp or CutMix, which the reference applies to the collated batch; here each sample has its own."""
    pictures = few if backend == "fused" else images
    original = v2.RandomChoice([v2.MixUp(alpha=0.2, num_classes=CLASSES), v2.CutMix(alpha=1.0, num_classes=CLASSES)])
    own = T.RandomChoice([T.MixUp(alpha=0.2, num_classes=CLASSES), T.CutMix(alpha=1.0, num_classes=CLASSES)])
    plain, their_plain = our_train(size=side(backend, 176)), original_train(size=side(backend, 176))
    chain = [*plain, own]
    assert T.from_torchvision([*their_plain.transforms, original]) == chain
    found, labels = ours(pictures, chain, len(pictures), backend=backend)
    _, draws = draws_of(chain, pictures)
    records = draws.part(draws.place_of(1), draws.place_of(len(plain))).records
    finished = [
        replayed(records, row, image)[0] for row, image in enumerate(begun(chain, pictures, 1, backend=backend))
    ]
    _check_mixed(draws.mix, finished, found, labels)
    loader = DataLoader(
        Pictures(pictures, their_plain), len(pictures), collate_fn=lambda rows: original(*default_collate(rows))
    )
    expected = next(iter(loader))
    assert shape_of([found, labels])[1] == shape_of(list(expected))[1]


def _check_mixed(mix, finished, found, labels) -> None:
    """Both are formulas of a line: λ · image + (1 - λ) · neighbour's, and a box that is pasted."""
    seen = set()
    for row, share in enumerate(mix.share.tolist()):
        partner = row ^ 1
        top, left, height, width = mix.box_tlhw[row].tolist()
        expected = finished[row].clone()
        if height:
            box = (slice(None), slice(top, top + height), slice(left, left + width))
            expected[box] = finished[partner][box]
            seen.add("CutMix")
        else:
            expected = share * finished[row] + (1 - share) * finished[partner]
            seen.add("MixUp")
        assert levels_apart(found[row], expected).max() <= 1.1
        soft = torch.zeros(CLASSES)
        soft[row % 5] += share
        soft[partner % 5] += 1 - share
        torch.testing.assert_close(labels[row], soft)
    assert seen == {"CutMix", "MixUp"}


def test_a_folder_of_jpegs(jpeg_folder):
    """The whole way: files, workers, batches as torch's DataLoader gives them."""
    vision = peers.torchvision()
    dataset = vision.datasets.ImageFolder(jpeg_folder, transform=original_eval("bilinear"))
    expected = list(DataLoader(dataset, 16))
    with gl.Loader(
        gl.ImageFolder(jpeg_folder), 16, transforms=our_eval("bilinear"), num_workers=2, device="cpu"
    ) as loader:
        batches = list(loader)
    assert len(batches) == len(expected)
    for found, batch in zip(batches, expected, strict=True):
        assert shape_of(found) == shape_of(batch)
        assert torch.equal(found[1], batch[1])
        # Decoders of JPEG differ by a few levels, in colours most.
        assert levels_apart(found[0], batch[0]).mean() <= 1.5
