"""from_albumentations converts transforms with all arguments, or raises an error that names the problem; and results of
random transforms have the distributions of Albumentations' results."""

from __future__ import annotations

import re
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from parity.lighting import CONVERTED, library

import gpuload as gl
from gpuload import transforms as T
from gpuload.transforms.interop_albumentations import RULES

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of Albumentations

A = library()
SAMPLE_SIZE = 1500
# The critical value of the Kolmogorov–Smirnov test: two samples of one distribution exceed it in 1 of 10,000 tests.
MAX_DISTANCE = 2.23 * (2 / SAMPLE_SIZE) ** 0.5


@pytest.mark.parametrize(("make", "case"), CONVERTED, ids=[case.name for _, case in CONVERTED])
def test_from_albumentations_gives_the_transforms_of_the_parity_table(make, case):
    """tests/parity compares the pixels."""
    assert T.from_albumentations(make(A)) == case.transforms


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (A.HorizontalFlip(p=0.3), [T.RandomHorizontalFlip(0.3)]),
        (A.ChannelShuffle(p=0.3), [T.RandomApply([T.RandomChannelPermutation()], 0.3)]),
        (A.ToGray(1, p=1), [T.Grayscale(1)]),
        (A.SmallestMaxSize(20), [T.Resize(20, antialias=False)]),
        (A.SmallestMaxSize([20, 30]), [T.RandomShortestSize((20, 30), antialias=False)]),
        (A.LongestMaxSize(20), [T.Resize(None, max_size=20, antialias=False)]),
        (A.Resize(8, 9, interpolation=cv2.INTER_NEAREST_EXACT), [T.Resize((8, 9), "nearest", antialias=False)]),
        (A.D4(p=1), [T.RandomRotate90(1.0), T.RandomTranspose(0.5)]),
        (A.GaussNoise((0.1, 0.1), p=1), [T.GaussianNoise(0.0, 0.1)]),
        (A.GaussianBlur((5, 5), (0.5, 2), p=1), [T.GaussianBlur(5, (0.5, 2.0))]),
        (A.MotionBlur((5, 9), False, (0, 90), (0, 1), p=0.2), [T.MotionBlur((5, 9), False, (0, 90), (0, 1), 0.2)]),
        (A.PlanckianJitter("cied", p=0.2), [T.PlanckianJitter("cied", p=0.2)]),
        (A.Illumination("gaussian", (0.1, 0.2), "darken", p=1), [T.GaussianIllumination((0.1, 0.2), "darken", p=1)]),
        (
            A.RandomShadow((0, 0, 1, 1), (2, 3), 4, (0.1, 0.3), 0.9),
            [T.RandomShadow((0, 0, 1, 1), (2, 3), 4, (0.1, 0.3), 0.9)],
        ),
        (A.ToFloat(), [T.ToDtype("float32", scale=True)]),
        (A.NoOp(), []),
        (
            A.Compose([A.OneOf([A.InvertImg(p=0.2), A.NoOp(p=0.6)], p=0.5), A.ToTensorV2()]),
            [T.RandomApply([T.RandomChoice([T.RandomInvert(1.0), T.Identity()], p=[0.25, 0.75])], 0.5)],
        ),
        (
            A.OneOrOther(A.InvertImg(), A.Sequential([A.Transpose(p=0.4), A.VerticalFlip(p=0.3)]), p=0.7),
            [
                T.RandomChoice(
                    [T.RandomInvert(1.0), T.Compose([T.RandomTranspose(0.4), T.RandomVerticalFlip(0.3)])],
                    p=[0.7, 0.3],
                )
            ],
        ),
        (
            [A.Sequential([A.InvertImg(p=0.2)], p=0.4), T.Resize(9)],
            [T.RandomApply([T.RandomInvert(0.2)], 0.4), T.Resize(9)],
        ),
        (
            A.Compose([A.VerticalFlip()], bbox_params=A.BboxParams("coco", min_area=9, min_width=2, min_height=2)),
            [T.RandomVerticalFlip(), T.ClampBoundingBoxes(), T.SanitizeBoundingBoxes(2.0, 9.0)],
        ),
        (
            A.Compose([A.VerticalFlip()], keypoint_params=A.KeypointParams("xy")),
            [T.RandomVerticalFlip(), T.SanitizeKeyPoints()],
        ),
    ],
    ids=lambda value: None if isinstance(value, list) and not value else str(value).split("(")[0][:30],
)
def test_from_albumentations_converts_probabilities_choices_and_containers(entry, expected):
    assert repr(T.from_albumentations(entry)) == repr(expected)  # `repr` rounds probabilities, whose last bits differ


@pytest.mark.parametrize(
    ("entry", "error", "text"),
    [
        (
            A.RandomFog(),
            ValueError,
            "transforms is RandomFog, and RandomFog has no equal in gpuload; call albumentations in the dataset's "
            "__getitem__ and return gpuload.Image(transform(image=array)['image'])",
        ),
        (A.Equalize(), ValueError, "Equalize has no equal in gpuload; write RandomEqualize(p), or call albumentations"),
        (
            A.RandomBrightnessContrast(),
            ValueError,
            "no equal in gpuload; write ColorJitter(brightness=…, contrast=…); ",
        ),
        (A.Perspective(), ValueError, "no equal in gpuload; write RandomPerspective(distortion_scale, p), or"),
        (A.SomeOf([A.NoOp()], 1), ValueError, "no equal in gpuload; write RandomApply([…], p=…) for each, or"),
        (
            A.Resize(8, 9, interpolation=0),
            ValueError,
            "Resize(interpolation=0) has no equal in gpuload; write gpuload.t",
        ),
        (
            A.Resize(8, 9, mask_interpolation=1),
            ValueError,
            "and Resize(mask_interpolation=1), unlike Resize(mask_",
        ),
        (A.Rotate(border_mode=1), ValueError, "and Rotate(border_mode=1), unlike Rotate(border_mode=0), has no equal"),
        (
            A.Rotate(interpolation=2),
            ValueError,
            "and Rotate(interpolation=2) has no equal in gpuload; write Random",
        ),
        (A.Affine(scale=(0.8, 1.2)), ValueError, "and Affine(scale={'x': (0.8, 1.2), 'y': (0.8, 1.2)}, keep_ratio=Fal"),
        (A.ToFloat(1000), ValueError, "and ToFloat(max_value=1000.0) has no equal in gpuload; write ToDtype("),
        (A.Affine(shear=5), ValueError, "and Affine(shear={'x': "),
        (A.Affine(translate_percent=0.1), ValueError, "and Affine(translate_percent={'x': "),
        (A.GaussNoise(), ValueError, "and GaussNoise(std_range=(0.2, 0.44)), where the number is drawn, has no equal"),
        (A.Posterize((2, 4)), ValueError, "and Posterize(num_bits=(2, 4)), where the number is drawn, has no equal"),
        (
            A.Normalize(normalization="image"),
            ValueError,
            "Normalize(normalization='image'), unlike Normalize(",
        ),
        (A.Illumination(), ValueError, "and Illumination(mode='linear'), unlike Illumination(mode='gaussian'), has no"),
        (
            A.LongestMaxSize([8, 9]),
            TypeError,
            "transforms, LongestMaxSize: Resize(max_size=…) must be an integer, got [8, 9]",
        ),
        (
            A.RandomCrop(9, 9, pad_if_needed=True),
            ValueError,
            "and RandomCrop(pad_if_needed=True), unlike RandomCrop(",
        ),
        (A.GaussianBlur(0, (0, 2), p=1), ValueError, "transforms, GaussianBlur: GaussianBlur(sigma=…) must be greater"),
        (
            A.Compose([A.NoOp()], bbox_params=A.BboxParams("coco", min_visibility=0.1)),
            ValueError,
            "and Compose(bbox_params=BboxParams(min_visibility=0.1)) has no equal in gpuload",
        ),
        (
            A.Compose([A.HorizontalFlip(), A.OneOf([A.NoOp(), A.RandomRain()])]),
            ValueError,
            "from_albumentations: transforms[1].transforms[1] is RandomRain, and RandomRain has no equal in gpuload;",
        ),
        (
            A.HorizontalFlip,
            TypeError,
            "transforms is not a transform of albumentations: got the class HorizontalFlip",
        ),
        (
            [len],
            TypeError,
            "from_albumentations: transforms[0] is not a transform of albumentations: got <built",
        ),
    ],
    ids=str,
)
def test_from_albumentations_refuses_what_has_no_equal_and_names_it(entry, error, text):
    with pytest.raises(error, match=re.escape(text)):
        T.from_albumentations(entry)


def test_from_albumentations_refuses_a_users_own_subclass():
    class UserFlip(A.HorizontalFlip):
        pass

    with pytest.raises(TypeError, match=r"transforms is not a transform of albumentations: got .*UserFlip"):
        T.from_albumentations(UserFlip())


def test_from_albumentations_has_rules_for_at_least_twenty_existing_transforms():
    names = set(RULES)
    assert len(names) >= 20
    assert not {name for name in names if not hasattr(A, name)}


def test_center_crop_begins_at_most_one_pixel_after_albumentations():
    image = np.random.default_rng(0).integers(0, 256, (21, 24, 3), np.uint8)
    for height, width in ((11, 10), (10, 9), (12, 13)):
        theirs = A.CenterCrop(height, width)(image=image)["image"]
        ours = T.apply(T.from_albumentations(A.CenterCrop(height, width)), image).permute(1, 2, 0).numpy()
        y_margin, x_margin = (side - length for side, length in zip(image.shape, (height, width), strict=False))
        starts = [(y_margin // 2 + y, x_margin // 2 + x) for y in (0, y_margin % 2) for x in (0, x_margin % 2)]
        assert any(np.array_equal(ours, image[y : y + height, x : x + width]) for y, x in starts)
        assert np.array_equal(theirs, image[y_margin // 2 :, x_margin // 2 :][:height, :width])


def test_smallest_max_size_gives_sides_at_most_one_pixel_shorter_than_albumentations():
    for height, width in ((241, 256), (375, 500), (427, 640), (480, 641)):
        entry = A.SmallestMaxSize(224)
        theirs = entry(image=np.zeros((height, width, 3), np.uint8))["image"].shape[:2]
        [ours] = T.from_albumentations(entry)
        shortfalls = np.subtract(theirs, ours.output_size((height, width)))
        assert set(shortfalls.tolist()) <= {0, 1}


def picture() -> np.ndarray:
    """A smooth image without symmetries, so that each transform changes what `features` measures."""
    rng = np.random.default_rng(2)
    return cv2.resize(rng.integers(20, 236, (5, 5, 3), np.uint8), (32, 32), interpolation=cv2.INTER_CUBIC)


def features(images: np.ndarray) -> np.ndarray:
    """Return the means of four parts of each channel, and the roughness, float64 (n, 13)."""
    levels = images.astype(np.float64)
    height, width = levels.shape[1] // 2, levels.shape[2] // 2
    parts = [levels[:, y : y + height, x : x + width].mean(axis=(1, 2)) for y in (0, height) for x in (0, width)]
    roughness = 4 * np.abs(np.diff(levels, axis=1)).mean(axis=(1, 2, 3))
    return np.column_stack([*parts, roughness])


def distance(first: np.ndarray, second: np.ndarray, slack: float) -> float:
    """Return the largest F(x) − G(x + slack) or G(x) − F(x + slack), where F and G are the samples' distribution
    functions: the Kolmogorov–Smirnov distance, except that numbers may differ by `slack`, as in Lévy's metric."""
    x = np.concatenate([first, second, first - slack, second - slack])
    f, g_shifted, g, f_shifted = (
        np.searchsorted(np.sort(sample), x + shift, "right") / len(sample)
        for sample, shift in ((first, 0), (second, slack), (second, 0), (first, slack))
    )
    return float(max((f - g_shifted).max(), (g - f_shifted).max()))


# Random transforms of Albumentations, and by how much a feature may differ (`slack`) because gpuload's pixels differ.
RANDOM: list[tuple[Any, float]] = [
    (A.HorizontalFlip(p=0.3), 0.1),
    (A.VerticalFlip(p=0.6), 0.1),
    (A.Transpose(p=0.4), 0.1),
    (A.RandomRotate90(p=0.7), 0.1),
    (A.D4(p=0.8), 0.1),
    (A.InvertImg(p=0.3), 0.1),
    (A.ChannelShuffle(p=0.6), 0.1),
    (A.Posterize(3, p=0.4), 0.1),
    (A.Solarize((0.4, 0.4), p=0.4), 0.1),
    (A.ToGray(p=0.4), 0.5),
    (A.RandomCrop(20, 22), 0.1),
    (A.RandomResizedCrop((20, 20)), 1.0),
    (A.Rotate((-20, 70), p=0.8), 1.5),
    (A.Affine(scale=(0.6, 1.3), rotate=(-40, 10), keep_ratio=True, p=1), 1.5),
    (A.ColorJitter((0.6, 1.3), (0.5, 1.2), (0.2, 1.8), (-0.2, 0.1), p=0.8), 2.5),
    (A.GaussianBlur(0, (0.5, 3.0), p=0.8), 0.5),
    (A.MotionBlur((5, 11), True, (20, 100), (-0.5, 1.0), p=0.8), 0.5),
    (A.RandomGamma((50, 160), p=0.8), 0.5),
    (A.PlanckianJitter("blackbody", p=0.8), 0.5),
    (A.PlanckianJitter("cied", sampling_method="gaussian", p=1), 0.5),
    (A.Illumination("gaussian", (0.05, 0.2), "both", p=0.8), 0.5),
    (A.RandomShadow((0, 0.3, 1, 1), (1, 3), 4, (0.2, 0.8), p=0.8), 0.5),
    (A.CLAHE((1, 8), (3, 4), p=0.8), 1.0),
    (A.GaussNoise((0.1, 0.1), (0.05, 0.05), p=0.8), 1.0),
    (A.OneOf([A.RandomGamma((50, 100), p=0.2), A.Transpose(p=0.6)], p=0.7), 0.5),
    (A.Compose([A.RandomCrop(20, 20), A.HorizontalFlip(), A.RandomGamma((80, 160), p=0.5)], seed=3), 0.5),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("entry", "slack"), RANDOM, ids=[type(entry).__name__ for entry, _ in RANDOM])
def test_results_are_distributed_as_in_albumentations(entry, slack):
    image = picture()
    if hasattr(entry, "set_random_seed"):
        entry.set_random_seed(7)
    theirs = [entry(image=image)["image"] for _ in range(SAMPLE_SIZE)]
    chain = T.from_albumentations(entry)
    images = [torch.from_numpy(image.transpose(2, 0, 1).copy())] * SAMPLE_SIZE
    ours = [result.permute(1, 2, 0).numpy() for result in gl.Augment(chain, device="cpu", seed=5)(images)]
    assert sorted({result.shape for result in ours}) == sorted({result.shape for result in theirs})
    for our_images, their_images in zip(_stacked(ours), _stacked(theirs), strict=True):
        scale = (SAMPLE_SIZE / min(len(our_images), len(their_images))) ** 0.5
        for first, second in zip(features(our_images).T, features(their_images).T, strict=True):
            assert distance(first, second, slack) < MAX_DISTANCE * scale


def _stacked(results: list[np.ndarray]) -> list[np.ndarray]:
    """Return one array of results per size."""
    sizes = sorted({result.shape for result in results})
    return [np.stack([result for result in results if result.shape == size]) for size in sizes]


def test_distance_exceeds_its_limit_for_a_wrong_range_or_probability():
    rng = np.random.default_rng(0)
    first, second = rng.uniform(50, 150, (2, SAMPLE_SIZE))
    assert distance(first, second, 0.5) < MAX_DISTANCE < distance(first, rng.uniform(50, 170, SAMPLE_SIZE), 0.5)
    coins = (rng.uniform(size=(2, SAMPLE_SIZE)) < [[0.5], [0.6]]).astype(float) * 30
    assert distance(*coins, 0.5) > MAX_DISTANCE > distance(coins[0], coins[0] + 0.4, 0.5)
