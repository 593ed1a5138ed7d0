"""Resizing transforms draw the sizes and filters of torchvision and timm."""

from __future__ import annotations

import re

import numpy as np
import pytest
from helpers import peers
from PIL import Image
from scipy import stats
from transforms.drawing import KEY, SAMPLES, draw

from gpuload import transforms as T
from gpuload.transforms.base import DrawError
from gpuload.transforms.program.ops import FILTERS


def test_random_sizes_keep_the_aspect_ratio_and_are_at_least_one_pixel():
    landscape = draw(T.RandomShortestSize(40), size_hw=(77, 128), count=5).results_hw
    np.testing.assert_array_equal(landscape, [[int(77 * (40 / 77)), int(128 * (40 / 77))]] * 5)
    portrait = draw(T.RandomResize(20, 21), size_hw=(128, 77), count=5).results_hw
    np.testing.assert_array_equal(portrait, [[int(20 * 128 / 77), 20]] * 5)
    assert draw(T.ScaleJitter((2, 2), (0.1, 0.2)), size_hw=(100, 90), count=10).results_hw.min() == 1


@pytest.mark.parametrize(("size", "max_size"), [(40, None), (40, 50), (97, 200), (None, 61)])
def test_resize_draws_torchvisions_sizes(size, max_size):
    torchvision_size = peers.torchvision().transforms.functional._compute_resized_output_size
    sizes = np.random.default_rng(0).integers(1, 400, (2000, 2))
    results_hw = T.Chain([T.Resize(size, max_size=max_size)]).draw(KEY, np.arange(2000), sizes).results_hw
    for size_hw, result_hw in zip(sizes.tolist(), results_hw.tolist(), strict=True):
        expected = torchvision_size(tuple(size_hw), None if size is None else [size], max_size, allow_size_none=True)
        assert result_hw == [max(1, length) for length in expected]


@pytest.mark.parametrize(
    "transform",
    [
        T.Resize(40, "random"),
        T.RandomResizedCrop(40, interpolation="random"),
        T.RandomResize(40, 50, "random"),
        T.RandomShortestSize(40, interpolation="random"),
        T.ScaleJitter((40, 40), interpolation="random"),
        T.ResizeKeepRatio(40, interpolation="random"),
    ],
    ids=lambda transform: type(transform).__name__,
)
def test_interpolation_random_draws_bilinear_or_bicubic(transform):
    program = draw(transform)
    bilinear, bicubic = ((program.records[0].filters == FILTERS.index(name)).sum() for name in ("bilinear", "bicubic"))
    assert bilinear + bicubic == SAMPLES
    assert stats.binomtest(int(bicubic), SAMPLES).pvalue > 0.01
    if np.ptp(program.results_hw[:, 0]):
        # Filters and sizes are independent.
        assert stats.spearmanr(program.records[0].filters, program.results_hw[:, 0]).pvalue > 0.01


def test_interpolation_random_draws_the_same_boxes_as_a_fixed_filter():
    fixed, random = (draw(T.RandomResizedCrop(40, interpolation=name)).records[0] for name in ("bilinear", "random"))
    np.testing.assert_array_equal(fixed.box_tlhw, random.box_tlhw)
    assert fixed.filters == "bilinear"


def test_regions_of_interpolation_random_are_as_wide_as_the_drawn_filter_needs():
    sizes = np.tile([[500, 500]], (40, 1))
    chains = [T.Chain([T.Resize((50, 50), name), T.CenterCrop(10)]) for name in ("bilinear", "bicubic", "random")]
    bilinear, bicubic, random = (chain.regions(KEY, np.arange(40), sizes) for chain in chains)
    is_bicubic = chains[2].draw(KEY, np.arange(40), sizes).records[0].filters == FILTERS.index("bicubic")
    assert 0 < is_bicubic.sum() < 40
    np.testing.assert_array_equal(random, np.where(is_bicubic[:, None], bicubic, bilinear))
    assert bilinear[0, 2] < bicubic[0, 2] < 150  # the crop shows 100 rows of the image


@pytest.mark.parametrize("longest", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("size", [224, (192, 256), (33, 17)], ids=str)
def test_resize_keep_ratio_draws_timms_sizes(size, longest):
    peers.timm()
    from timm.data.transforms import ResizeKeepRatio

    transform = T.ResizeKeepRatio(size, longest)
    target_hw = (size, size) if isinstance(size, int) else size
    for size_hw in ((375, 500), (500, 333), (224, 224), (97, 1001), (31, 47), (640, 480)):
        image = Image.new("RGB", size_hw[::-1])
        expected = ResizeKeepRatio.get_params(image, target_hw, longest)
        assert draw(transform, size_hw=size_hw, count=1).results_hw[0].tolist() == expected
        assert list(transform.output_size(size_hw)) == expected


def test_trim_border_refuses_to_remove_an_entire_image():
    with pytest.raises(DrawError, match=re.escape("TrimBorder(7) would remove an entire image of 14×40")) as caught:
        draw(T.TrimBorder(7), size_hw=(14, 40), count=1)
    assert caught.value.row == 0
