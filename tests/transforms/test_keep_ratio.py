"""timm's resize and crops: the sizes, places and distributions of timm's own functions."""

from __future__ import annotations

import random
import re
from collections import Counter

import numpy as np
import originals
import pytest
from PIL import Image
from scipy import stats

from gpuload import transforms as T
from gpuload.rng.philox import epoch_key
from gpuload.transforms.base import DrawError, Uniforms

SIZES = np.array([[375, 500], [500, 333], [224, 224], [97, 1001], [31, 47], [640, 480]])


def drawn(transform, size_hw, count: int, seed: int = 3):
    sizes = np.broadcast_to(np.array(size_hw, np.int64), (count, 2))
    return transform.draw(Uniforms(epoch_key(seed, 0), np.arange(count), 0), sizes)


@pytest.fixture(scope="module")
def theirs():
    originals.timm()
    from timm.data import transforms

    return transforms


@pytest.mark.parametrize("longest", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("size", [224, (192, 256), (33, 17)], ids=str)
def test_sizes_are_timms(theirs, size, longest):
    ours = T.ResizeKeepRatio(size, longest)
    pair = (size, size) if isinstance(size, int) else size
    for size_hw in SIZES.tolist():
        image = Image.new("RGB", size_hw[::-1])
        expected = theirs.ResizeKeepRatio.get_params(image, pair, longest)
        assert drawn(ours, size_hw, 1).size_hw[0].tolist() == expected
        assert list(ours.output_size(tuple(size_hw))) == expected


def test_random_sizes_are_distributed_as_timms(theirs):
    arguments = {
        "random_scale_prob": 0.4,
        "random_scale_range": (0.5, 1.2),
        "random_scale_area": True,
        "random_aspect_prob": 0.7,
        "random_aspect_range": (0.5, 1.5),
    }
    ours = drawn(T.ResizeKeepRatio(224, interpolation="random", **arguments), (375, 500), 20_000)
    image, state = Image.new("RGB", (500, 375)), random.getstate()
    random.seed(5)
    expected = np.array([theirs.ResizeKeepRatio.get_params(image, (224, 224), 0.0, **arguments) for _ in range(20_000)])
    random.setstate(state)
    for axis in (0, 1):
        assert stats.ks_2samp(ours.size_hw[:, axis], expected[:, axis]).pvalue > 1e-3
    ratios = [sizes[:, 0] / sizes[:, 1] for sizes in (ours.size_hw, expected)]
    assert stats.ks_2samp(*ratios).pvalue > 1e-3
    counts = np.unique(ours.filters, return_counts=True)[1]
    assert len(counts) == 2
    assert stats.binomtest(int(counts[0]), 20_000).pvalue > 1e-3


@pytest.mark.parametrize(("size_hw", "crop"), [((20, 30), (16, 16)), ((10, 30), (16, 16)), ((10, 12), (16, 16))])
def test_random_places_are_distributed_as_timms(theirs, size_hw, crop):
    ours = drawn(T.RandomCropOrPad(crop), size_hw, 20_000)
    image, state = Image.new("RGB", size_hw[::-1]), random.getstate()
    random.seed(5)
    expected = Counter(theirs.RandomCropOrPad.get_params(image, crop) for _ in range(20_000))
    random.setstate(state)
    found = Counter(map(tuple, ours.box_tlhw[:, :2].tolist()))
    assert set(found) == set(expected)
    places = sorted(expected)
    table = [[found[place] for place in places], [expected[place] for place in places]]
    assert stats.chi2_contingency(table).pvalue > 1e-3


def test_trim_border_refuses_what_it_would_leave_nothing_of():
    with pytest.raises(DrawError, match=re.escape("TrimBorder(7) leaves nothing of an image of 14×40")) as caught:
        drawn(T.TrimBorder(7), (14, 40), 1)
    assert caught.value.row == 0


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: T.ResizeKeepRatio(0), ValueError, "ResizeKeepRatio(size=…) must be at least 1, got 0"),
        (lambda: T.ResizeKeepRatio(8, 1.5), ValueError, "ResizeKeepRatio(longest=…) must lie in 0 … 1, got 1.5"),
        (lambda: T.ResizeKeepRatio(8, interpolation="box"), ValueError, "'bicubic', 'lanczos', 'random', got 'box'"),
        (lambda: T.ResizeKeepRatio(8, random_scale_prob=2), ValueError, "(random_scale_prob=…) is a probability"),
        (lambda: T.ResizeKeepRatio(8, random_aspect_range=(0, 1)), ValueError, "must be greater than 0, got (0.0,"),
        (lambda: T.ResizeKeepRatio(8, random_scale_area=1), TypeError, "(random_scale_area=…) must be True or False"),
        (lambda: T.CenterCropOrPad(8, fill="black"), TypeError, "CenterCropOrPad(fill=…) must be a number, got 'bl"),
        (lambda: T.RandomCropOrPad(8, padding_mode="wrap"), ValueError, "RandomCropOrPad(padding_mode=…) must be one"),
        (lambda: T.TrimBorder(-1), ValueError, "TrimBorder(border_size=…) must be at least 0, got -1"),
    ],
)  # fmt: skip
def test_refused(make, error, text):
    with pytest.raises(error, match=re.escape(text)):
        make()
