"""Mosaic and CopyPaste: arguments, draws, and valid places in a chain."""

from __future__ import annotations

import re

import numpy as np
import pytest
from scipy import stats
from transforms.drawing import KEY, SAMPLES, draw

from gpuload import transforms as T

SIZES = np.tile([[40, 60]], (SAMPLES, 1))


@pytest.mark.parametrize(
    ("transforms", "text"),
    [
        ([T.Mosaic(40), T.RandomIoUCrop()],
         "RandomIoUCrop needs the boxes of each sample, which are no longer known after Mosaic has "
         "combined several samples; put RandomIoUCrop before Mosaic"),
        ([T.MultiView([[T.Mosaic(40)], [T.CopyPaste()]])], "Mosaic cannot be combined with MultiView: a sample has"),
        ([T.MultiView([[T.Resize(40)], [T.CopyPaste()]])], "CopyPaste cannot be combined with MultiView: a sample"),
        ([T.Mosaic(40), T.CopyPaste(), T.Compose([T.Mosaic(40)])],
         "a chain can have at most one Mosaic, but this chain has 2; keep only one"),
        ([T.CopyPaste(), T.CopyPaste(0.5)], "a chain can have at most one CopyPaste, but this chain has 2"),
    ],
)  # fmt: skip
def test_chain_refuses_mosaic_and_copy_paste_in_invalid_places(transforms, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        T.Chain(transforms)


@pytest.mark.parametrize("container", [T.RandomApply, T.RandomChoice, T.RandomOrder])
def test_containers_refuse_mosaic(container):
    text = f"{container.__name__} cannot hold Mosaic, which combines images of several samples.*set its probability"
    with pytest.raises(ValueError, match=text):
        container([T.Compose([T.Mosaic(40)])])


def test_chain_group_is_the_largest_number_of_samples_that_a_transform_combines():
    mixup = [T.ToDtype("float32"), T.MixUp(labels_getter=None)]
    assert T.Chain([T.Resize(9)]).group == ("", 1)
    assert T.Chain([T.CopyPaste(), T.Mosaic(40)]).group == ("Mosaic", 4)
    assert T.Chain([T.CopyPaste(), *mixup]).group == ("CopyPaste", 2)
    assert T.Chain([T.Mosaic(9), *mixup]).group == ("Mosaic", 4)


def test_mosaic_decides_the_output_size_unless_p_is_below_1():
    assert T.Chain([T.Resize(100), T.Mosaic((30, 40)), T.CopyPaste()]).output_size_hw == (30, 40)
    assert T.Mosaic(30, p=0.5).output_size((9, 9)) is None


def test_mosaic_draws_uniform_centers_and_orders():
    [record] = draw(T.Mosaic((1000, 2000), center_range=(0.2, 0.7), p=0.6)).records
    assert stats.binomtest(int(record.gathered.sum()), SAMPLES, 0.6).pvalue > 1e-4
    for axis, length in enumerate((1000, 2000)):
        relative_centers = (record.centre_yx[:, axis] + 0.5) / length
        assert stats.kstest(relative_centers, stats.uniform(0.2, 0.5).cdf).pvalue > 1e-4
    _, counts = np.unique(record.order, axis=0, return_counts=True)
    assert len(counts) == 24  # all orders of four samples
    assert stats.chisquare(counts).pvalue > 1e-4
    assert (record.size_hw == np.where(record.gathered[:, None], [1000, 2000], SIZES)).all()


def test_copy_paste_draws_different_keys_for_each_sample():
    [record] = draw(T.CopyPaste(0.3)).records
    assert stats.binomtest(int(record.gathered.sum()), SAMPLES, 0.3).pvalue > 1e-4
    assert len(np.unique(record.keys, axis=0)) == SAMPLES


def test_regions_before_mosaic_are_complete_images_or_the_boxes_of_an_earlier_crop():
    chain = T.Chain([T.RandomCrop(20), T.Mosaic(50), T.CenterCrop(10)])
    regions = chain.regions(KEY, np.arange(50), SIZES[:50])
    assert (regions[:, 2:] == 20).all()
    assert (T.Chain([T.Mosaic(50), T.CenterCrop(10)]).regions(KEY, np.arange(3), SIZES[:3])[:, 2:] == [40, 60]).all()
