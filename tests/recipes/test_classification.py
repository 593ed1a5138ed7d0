"""torchvision's reference for ImageNet classification: its presets for training and evaluation."""

from __future__ import annotations

import originals
import pytest
import torch
from recipes.common import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Pictures,
    check_replay,
    check_runners,
    draws_of,
    levels_apart,
    ours,
    shape_of,
    theirs,
)
from recipes.replay import replayed
from torch.utils.data import DataLoader, default_collate

import gpuload as gl
from gpuload import transforms as T

v2 = originals.torchvision().transforms.v2
CLASSES = 10


def original_train(automatic=None, erasing: float = 0.0):
    steps = [v2.RandomResizedCrop(176, antialias=True), v2.RandomHorizontalFlip(0.5)]
    if automatic is not None:
        steps.append(automatic)
    steps += [v2.PILToTensor(), v2.ToDtype(torch.float, scale=True), v2.Normalize(IMAGENET_MEAN, IMAGENET_STD)]
    if erasing:
        steps.append(v2.RandomErasing(p=erasing))
    return v2.Compose([*steps, v2.ToPureTensor()])


def our_train(automatic=None, erasing: float = 0.0):
    return [
        T.RandomResizedCrop(176),
        T.RandomHorizontalFlip(),
        *([] if automatic is None else [automatic]),
        T.ToDtype("float32", scale=True),
        T.Normalize(IMAGENET_MEAN, IMAGENET_STD),
        *([T.RandomErasing(p=erasing)] if erasing else []),
    ]


def original_eval(interpolation):
    return v2.Compose(
        [
            v2.Resize(232, interpolation=interpolation, antialias=True),
            v2.CenterCrop(224),
            v2.PILToTensor(),
            v2.ToDtype(torch.float, scale=True),
            v2.Normalize(IMAGENET_MEAN, IMAGENET_STD),
            v2.ToPureTensor(),
        ]
    )


def our_eval(interpolation):
    return [
        T.Resize(232, interpolation=interpolation),
        T.CenterCrop(224),
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
def test_evaluation(images, interpolation):
    original, chain = original_eval(v2.InterpolationMode(interpolation)), our_eval(interpolation)
    assert T.from_torchvision(original) == chain
    expected, labels = theirs(images, original, len(images))
    found = ours(images, chain, len(images))
    assert levels_apart(found[0], expected).max() <= 2
    assert torch.equal(found[1], labels)
    assert shape_of(found) == shape_of([expected, labels])


@pytest.mark.parametrize("automatic", AUTOMATIC)
def test_training(images, automatic):
    original, own = AUTOMATIC[automatic]
    chain = our_train(own, 0.5)
    assert T.from_torchvision(original_train(original, 0.5)) == chain
    if own is not None:
        # AugMix: a sum in float32 and one in float64 may lie on different sides of a whole number. Elsewhere a
        # blend may, and a second operation behind it makes more of it.
        augmix = automatic == "augmix"
        check_replay(chain, images, mean=0.15 if augmix else 0.02, most=2 if augmix else 40, after=1)
    check_runners(chain, images, after=1)
    # A resampling may differ by one level, of which operations with steps may make many.
    check_replay(chain, images, mean=0.3, most=1.001 if own is None else 255)
    assert shape_of(ours(images, chain, 8)) == shape_of(theirs(images, original_train(original, 0.5), 8))


def test_mixing(images):
    """MixUp or CutMix, which the reference applies to the collated batch; here each sample has its own."""
    original = v2.RandomChoice([v2.MixUp(alpha=0.2, num_classes=CLASSES), v2.CutMix(alpha=1.0, num_classes=CLASSES)])
    own = T.RandomChoice([T.MixUp(alpha=0.2, num_classes=CLASSES), T.CutMix(alpha=1.0, num_classes=CLASSES)])
    chain = [*our_train(), own]
    assert T.from_torchvision([*original_train().transforms, original]) == chain
    found, labels = ours(images, chain, len(images))
    plain = our_train()
    line, draws = draws_of(chain, images)
    finished = [
        replayed(line.transforms[: len(plain)], draws.params[: len(plain)], row, image)[0]
        for row, image in enumerate(images)
    ]
    _check_mixed(draws[len(plain)], finished, found, labels)
    loader = DataLoader(
        Pictures(images, original_train()), len(images), collate_fn=lambda rows: original(*default_collate(rows))
    )
    expected = next(iter(loader))
    assert shape_of([found, labels])[1] == shape_of(list(expected))[1]


def _check_mixed(params, finished, found, labels) -> None:
    """Both are formulas of a line: λ · image + (1 - λ) · neighbour's, and a box that is pasted."""
    seen = set()
    for rows, drawn in zip(params.rows, params.draws, strict=True):
        for place, row in enumerate(rows.tolist()):
            mix, partner = drawn[0], row ^ 1
            share = float(mix.share[place])
            top, left, height, width = mix.box_tlhw[place].tolist()
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
    vision = originals.torchvision()
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
