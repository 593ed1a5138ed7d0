"""torchvision's reference for ImageNet classification: its presets for training and evaluation."""

from __future__ import annotations

import pytest
import torch
from helpers import peers
from recipes.comparison import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Pictures,
    check_replay,
    check_runners,
    draws_of,
    gpuload_batch,
    images_after,
    levels_apart,
    resized_within,
    shape_of,
    side,
    torch_batch,
)
from recipes.replay import replay_records
from torch.utils.data import DataLoader, default_collate

import gpuload as gl
from gpuload import transforms as T

v2 = peers.torchvision().transforms.v2
CLASSES = 10
MAX_MEAN = 0.3  # the greatest mean difference of an image after all transforms of a recipe, in levels


def torchvision_train(automatic=None, erasing: float = 0.0, size: int = 176):
    steps = [v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip(0.5)]
    if automatic is not None:
        steps.append(automatic)
    steps += [v2.PILToTensor(), v2.ToDtype(torch.float, scale=True), v2.Normalize(IMAGENET_MEAN, IMAGENET_STD)]
    if erasing:
        steps.append(v2.RandomErasing(p=erasing))
    return v2.Compose([*steps, v2.ToPureTensor()])


def gpuload_train(automatic=None, erasing: float = 0.0, size: int = 176):
    return [
        T.RandomResizedCrop(size),
        T.RandomHorizontalFlip(),
        *([] if automatic is None else [automatic]),
        T.ToDtype("float32", scale=True),
        T.Normalize(IMAGENET_MEAN, IMAGENET_STD),
        *([T.RandomErasing(p=erasing)] if erasing else []),
    ]


def torchvision_eval(interpolation, resized: int = 232, size: int = 224):
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


def gpuload_eval(interpolation, resized: int = 232, size: int = 224):
    return [
        T.Resize(resized, interpolation=interpolation),
        T.CenterCrop(size),
        T.ToDtype("float32", scale=True),
        T.Normalize(IMAGENET_MEAN, IMAGENET_STD),
    ]


# The automatic augmentations of the reference: torchvision's, gpuload's.
AUTOMATIC = {
    "none": (None, None),
    "ra": (v2.RandAugment(magnitude=9), T.RandAugment(magnitude=9)),
    "ta_wide": (v2.TrivialAugmentWide(), T.TrivialAugmentWide()),
    "augmix": (v2.AugMix(), T.AugMix()),
    "imagenet": (v2.AutoAugment(), T.AutoAugment()),
}


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_classification_evaluation_equals_torchvisions(pictures, backend, interpolation):
    sides = side(backend, 232), side(backend, 224)
    original, chain = torchvision_eval(v2.InterpolationMode(interpolation), *sides), gpuload_eval(interpolation, *sides)
    assert T.from_torchvision(original) == chain
    expected, expected_labels = torch_batch(pictures, original, len(pictures))
    batch, labels = gpuload_batch(pictures, chain, len(pictures), backend=backend)
    assert levels_apart(batch, expected).max() <= resized_within(backend, interpolation)
    assert torch.equal(labels, expected_labels)
    assert shape_of([batch, labels]) == shape_of([expected, expected_labels])


@pytest.mark.parametrize("automatic", AUTOMATIC)
def test_classification_training_equals_torchvisions_for_the_same_draws(pictures, backend, automatic):
    original, augmentation = AUTOMATIC[automatic]
    size = side(backend, 176)
    chain = gpuload_train(augmentation, 0.5, size)
    assert T.from_torchvision(torchvision_train(original, 0.5, size)) == chain
    if augmentation is not None:
        # Sums near an integer may round differently in float32 and float64, in AugMix by up to two levels. The blends
        # of other policies do so at fewer pixels, but a second operation may enlarge such a difference.
        max_mean, max_level = (0.15, 2) if automatic == "augmix" else (0.02, 40)
        check_replay(chain, pictures, max_mean=max_mean, max_level=max_level, after=1, backend=backend)
    if backend == "torch":
        check_runners(chain, pictures, after=1)
    # Resampled images may differ by one level, which operations with steps may enlarge.
    max_level = resized_within(backend) if augmentation is None else 255
    check_replay(chain, pictures, max_mean=MAX_MEAN, max_level=max_level, backend=backend)
    count = len(pictures) // 2
    expected = torch_batch(pictures, torchvision_train(original, 0.5, size), count)
    assert shape_of(gpuload_batch(pictures, chain, count, backend=backend)) == shape_of(expected)


def test_mixup_or_cutmix_equals_its_formula_for_the_same_draws(images, small_images, backend):
    """The reference draws one MixUp or CutMix for a collated batch, gpuload one for each sample."""
    pictures = small_images if backend == "fused" else images
    original = v2.RandomChoice([v2.MixUp(alpha=0.2, num_classes=CLASSES), v2.CutMix(alpha=1.0, num_classes=CLASSES)])
    mixing = T.RandomChoice([T.MixUp(alpha=0.2, num_classes=CLASSES), T.CutMix(alpha=1.0, num_classes=CLASSES)])
    size = side(backend, 176)
    unmixed_chain, original_chain = gpuload_train(size=size), torchvision_train(size=size)
    chain = [*unmixed_chain, mixing]
    assert T.from_torchvision([*original_chain.transforms, original]) == chain
    mixed, labels = gpuload_batch(pictures, chain, len(pictures), backend=backend)
    _, draws = draws_of(chain, pictures)
    records = draws.part(draws.place_of(1), draws.place_of(len(unmixed_chain))).records
    unmixed = [
        replay_records(records, row, image)[0]
        for row, image in enumerate(images_after(chain, pictures, 1, backend=backend))
    ]
    _check_mixed(draws.mix, unmixed, mixed, labels)
    loader = DataLoader(
        Pictures(pictures, original_chain), len(pictures), collate_fn=lambda rows: original(*default_collate(rows))
    )
    expected = next(iter(loader))
    assert shape_of([mixed, labels]) == shape_of(list(expected))


def _check_mixed(mix, unmixed, mixed, labels) -> None:
    """Check λ · image + (1 − λ) · partner for MixUp, and a box pasted from the partner for CutMix."""
    kinds = set()
    for row, weight in enumerate(mix.share.tolist()):
        partner = row ^ 1
        top, left, height, width = mix.box_tlhw[row].tolist()
        expected = unmixed[row].clone()
        if height:
            box = (slice(None), slice(top, top + height), slice(left, left + width))
            expected[box] = unmixed[partner][box]
            kinds.add("CutMix")
        else:
            expected = weight * unmixed[row] + (1 - weight) * unmixed[partner]
            kinds.add("MixUp")
        assert levels_apart(mixed[row], expected).max() <= 1.1  # resampled images may differ by one level
        expected_labels = torch.zeros(CLASSES)
        expected_labels[row % 5] += weight  # Pictures gives image i the class i % 5
        expected_labels[partner % 5] += 1 - weight
        torch.testing.assert_close(labels[row], expected_labels)
    assert kinds == {"CutMix", "MixUp"}


def test_classification_evaluation_of_a_jpeg_folder_equals_dataloaders(jpeg_folder):
    vision = peers.torchvision()
    dataset = vision.datasets.ImageFolder(jpeg_folder, transform=torchvision_eval("bilinear"))
    expected = list(DataLoader(dataset, 16))
    with gl.Loader(
        gl.ImageFolder(jpeg_folder), 16, transforms=gpuload_eval("bilinear"), num_workers=2, device="cpu"
    ) as loader:
        batches = list(loader)
    assert len(batches) == len(expected)
    for batch, expected_batch in zip(batches, expected, strict=True):
        assert shape_of(batch) == shape_of(expected_batch)
        assert torch.equal(batch[1], expected_batch[1])
        # JPEG decoders differ by a few levels, mostly in colors.
        assert levels_apart(batch[0], expected_batch[0]).mean() <= 1.5
