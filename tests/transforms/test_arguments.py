"""Invalid arguments of transforms raise errors with a remedy, and equivalent arguments give equal transforms."""

from __future__ import annotations

import enum
import math
import re

import numpy as np
import pytest
import torch

from gpuload import transforms as T
from gpuload.transforms.arguments import format_argument


class InterpolationMode(enum.Enum):  # as in torchvision
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: T.Resize(None), ValueError, "Resize(size=None) needs max_size=…"),
        (lambda: T.Resize((10, 20), max_size=30), ValueError, "Resize(max_size=30) needs a single integer as size"),
        (lambda: T.Resize(40, max_size=30), ValueError, "Resize(max_size=30) must be greater than size=40"),
        (lambda: T.Resize(8, "box"), ValueError, "'nearest', 'bilinear', 'bicubic', 'lanczos', 'random', got 'box'"),
        (lambda: T.RandomCrop(8, fill={"Boxes": 1}), TypeError, "RandomCrop(fill=…) is a dict, so its keys must be"),
        (lambda: T.ToDtype("int32"), ValueError, "'uint8', 'float16', 'bfloat16', 'float32', got 'int32'"),
        (lambda: T.ToDtype({}), TypeError, "ToDtype(dtype={}) converts neither images nor masks; pass"),
        (lambda: T.ToDtype({"Boxes": "float32"}), TypeError, "or 'others', got Boxes"),
        (lambda: T.ToDtype(None), TypeError, "ToDtype(dtype=None) does not convert images, so it needs mask_dtype=…"),
        (lambda: T.ToDtype("float32", mask_dtype="int4"), ValueError, "for masks must be one of 'uint8', 'int16'"),
        (lambda: T.ToDtype({"Mask": "int64"}, mask_dtype="int64"), ValueError, "in a dict, use the key Mask"),
        (lambda: T.Normalize((0.5,), (0.5, 0.5)), ValueError, "got 1 and 2: mean=(0.5,), std=(0.5, 0.5)"),
        (lambda: T.ScaleJitter((64, 64), interpolation="lanczos", antialias=False), ValueError,
         "ScaleJitter(antialias=…) must be True for interpolation='lanczos'"),
        (lambda: T.RandomResize(8, 8), ValueError, "RandomResize(max_size=8) must be greater than min_size=8: the max"),
        (lambda: T.RandomAffine(5, shear=(1, 2, 4, 3)), ValueError, "(shear=…) along y must be (low, high)"),
        (lambda: T.Lambda(T.Resize(8)), TypeError, "which is already a transform; remove the Lambda"),
        (lambda: T.Grayscale(2), ValueError, "Grayscale(num_output_channels=…) must be 1 or 3, got 2"),
        (lambda: T.RandomApply([T.Grayscale()]), ValueError,
         "RandomApply cannot hold Grayscale(), which would reduce three channels to one for only some"),
        (lambda: T.Chain([T.RandomSolarize(0.5)]), ValueError,
         "RandomSolarize(threshold=0.5) is used where pixel values are in 0 … 255; write threshold=127.5, or put it"),
        (lambda: T.GaussianBlur(4), ValueError, "GaussianBlur(kernel_size=…) must be odd, so that the kernel has"),
        (lambda: T.ElasticTransform(sigma=(0, 2)), ValueError,
         "ElasticTransform(sigma=…) must be 0 along both axes or along neither, got (0.0, 2.0)"),
        (lambda: T.JPEG((1, 2, 3)), ValueError, "JPEG(quality=…) must"),
        (lambda: T.AutoAugment(fill=300), ValueError, "AutoAugment(fill=…) must be integers in 0 … 255"),
        (lambda: T.RandAugment(2, 31), ValueError,
         "RandAugment(magnitude=…) must be the index of one of the num_magnitude_bins=31 bins, 0 … 30, got 31"),
        (lambda: T.AugMix(fill=-1), ValueError, "AugMix(fill=…) must be integers in 0 … 255"),
        (lambda: T.TimmAutoAugment("v1"), ValueError, "begin with one of 'original', 'originalr', 'v0', 'v0r', '3a'"),
        (lambda: T.TimmAutoAugment("v0-m9"), ValueError, "unknown part, 'm9'; each part must be one of mstd, with a"),
        (lambda: T.TimmAutoAugment("v0", {"x": 1}), ValueError, "(hparams=…) takes img_mean, interpolation"),
        (lambda: T.TimmAugMix("rand-m9"), ValueError, "must begin with 'augmix', as in 'augmix-m5-w4-d2'"),
        (lambda: T.TimmAugMix("augmix-m1.5"), ValueError, "(config='augmix-m1.5'): m must be a whole number, got 1.5"),
        (lambda: T.TimmAugMix("augmix-w0"), ValueError, "TimmAugMix(config='augmix-w0'): w must be greater than 0"),
        (lambda: T.TimmAugMix("augmix-b1"), ValueError, "b1, timm's faster blending, is not supported; remove -b1"),
        (lambda: T.RandomIoUCrop(min_scale=0), ValueError, "needs 0 < min_scale ≤ max_scale, got 0 and 1"),
        (lambda: T.RandomIoUCrop(min_scale=2), ValueError, "needs 0 < min_scale ≤ max_scale, got 2 and 1"),
        (lambda: T.RandomIoUCrop(max_aspect_ratio=0.2), ValueError, "min_aspect_ratio ≤ max_aspect_ratio"),
        (lambda: T.ConvertBoundingBoxFormat("XYWHR"), ValueError, "rotated boxes are not supported"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_refused_with_a_remedy(make, error, text):
    with pytest.raises(error, match=re.escape(text)):
        make()


def test_enums_and_dtypes_of_torchvision_pillow_torch_and_numpy_become_strings():
    assert T.Resize(8, InterpolationMode.BICUBIC).interpolation == "bicubic"
    assert T.Resize(8, 2).interpolation == "bilinear"  # Pillow's constants
    assert T.Resize(8, 0).interpolation == "nearest"
    assert T.Resize(8, "nearest-exact") == T.Resize(8, "nearest")
    assert T.ToDtype(torch.bfloat16) == T.ToDtype("bfloat16")
    assert T.ToDtype(np.float16) == T.ToDtype(np.dtype("float16")) == T.ToDtype("torch.float16")


def test_equivalent_arguments_give_equal_transforms():
    assert T.CenterCrop(5) == T.CenterCrop([5]) == T.CenterCrop((5, 5))
    assert T.Resize([5]) == T.Resize(5) != T.Resize((5, 5))
    assert T.RandomCrop(5, 2) == T.RandomCrop(5, [2, 2]) == T.RandomCrop(5, (2, 2, 2, 2))
    assert T.RandomCrop(5, (1, 2)).padding == (1, 2, 1, 2)
    assert T.ColorJitter(0.4) == T.ColorJitter((0.6, 1.4))
    assert T.ColorJitter(3).brightness == (0, 4)
    assert T.ColorJitter(0, (1, 1), 0, 0).adjustments == ()
    assert hash(T.Normalize([0.5], np.array([0.5]))) == hash(T.Normalize((0.5,), (0.5,)))


def test_repr_shows_only_arguments_that_differ_from_the_default():
    assert repr(T.RandomResizedCrop(224)) == "RandomResizedCrop(size=(224, 224))"
    assert repr(T.Resize(256, "bicubic")) == "Resize(size=256, interpolation='bicubic')"
    assert repr(T.RandomHorizontalFlip()) == "RandomHorizontalFlip()"


def test_repr_rounds_numbers_to_six_digits():
    assert repr(T.ColorJitter(0.8)) == "ColorJitter(brightness=(0.2, 1.8))"
    assert repr(T.RandomApply([T.GaussianBlur(3, 1 / 3)], 2 / 3)) == (
        "RandomApply(transforms=(GaussianBlur(kernel_size=(3, 3), sigma=(0.333333, 0.333333)),), p=0.666667)"
    )
    assert [format_argument(value) for value in (1.0, 0.1, 1e-7, 1234567.0, math.nan, 3, (), "bilinear")] == [
        "1.0", "0.1", "1e-07", "1234567.0", "nan", "3", "()", "'bilinear'"
    ]  # fmt: skip
