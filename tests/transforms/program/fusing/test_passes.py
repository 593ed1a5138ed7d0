"""How many passes images need, and what goes into each."""

from __future__ import annotations

import numpy as np
import pytest

from gpuload import transforms as T
from gpuload.rng.philox import epoch_key
from gpuload.stage import RaggedImages
from gpuload.transforms.program.fusing import jobs as R
from gpuload.transforms.program.fusing.passes import Passes
from gpuload.transforms.program.ops import code


def passes(transforms, count=8, channels=3, given=3) -> Passes:
    chain = T.Chain(transforms)
    images = RaggedImages.from_arrays([np.zeros((40, 50, given), np.uint8)] * count)
    levels, _ = chain.draw(epoch_key(0, 0), np.arange(count), images.sizes_hw).split()
    made = Passes(images.table, levels.windows_tlhw[0], channels)
    made.apply(levels, levels.windows_tlhw)
    return made


CROP = T.RandomResizedCrop(20)
TRANSPOSE = T.RandomTranspose(1.0)


@pytest.mark.parametrize(
    ("transforms", "count"),
    [
        ([], 1),
        ([CROP, T.RandomHorizontalFlip(1.0), T.Normalize([0.5], [0.5])], 1),
        ([T.RandomVerticalFlip(1.0), T.CenterCrop(30), T.Resize(20), T.RandomCrop(10), T.RandomHorizontalFlip()], 1),
        ([T.Pad(4), T.RandomHorizontalFlip(1.0)], 1),
        ([CROP, T.RandomRotate90(1.0)], 1),
        ([TRANSPOSE, T.CenterCrop(30), CROP, TRANSPOSE, T.RandomVerticalFlip(1.0), T.CenterCrop((9, 7)), TRANSPOSE], 1),
        ([CROP, T.RandomInvert(1.0), T.RandomSolarize(9, 1.0), T.RandomErasing(1.0), T.RandomGrayscale(1.0)], 1),
        ([CROP, T.RandomPosterize(3, 1.0), T.RandomHorizontalFlip(1.0), T.CenterCrop(10)], 1),
        # An image has to be whole before a statistic, a second resampling, a neighbourhood.
        ([CROP, T.RandomEqualize(1.0)], 2),
        ([CROP, TRANSPOSE, T.RandomEqualize(1.0), TRANSPOSE], 2),
        ([CROP, T.ColorJitter(0.4, 0.4, 0.4, 0.1)], 2),
        ([CROP, T.RandomEqualize(1.0), T.RandomAutocontrast(1.0)], 3),
        ([CROP, T.RandomRotation(9)], 2),
        ([CROP, T.GaussianBlur(3), T.RandomAdjustSharpness(2, 1.0)], 3),
        ([CROP, T.RandomInvert(1.0), T.Pad(3)], 2),
        ([CROP, T.RandomPerspective(0.3, 1.0), T.RandomInvert(1.0), T.Resize(9)], 3),
        # One that was decoded as it lies there is whole already.
        ([T.RandomEqualize(1.0)], 1),
        ([T.RandomEqualize(1.0), T.RandomInvert(1.0)], 1),
        ([T.RandomHorizontalFlip(1.0), T.RandomEqualize(1.0)], 2),
        ([T.RandomRotation(9)], 1),
        ([T.GaussianBlur(3)], 1),
    ],
)
def test_as_few_as_can_be(transforms, count):
    assert (passes(transforms).last + 1 == count).all()


def test_images_of_a_batch_have_as_many_as_each_needs():
    made = passes([CROP, T.RandomEqualize(0.5)], 64)
    assert set(made.last.tolist()) == {0, 1}


def test_operations_stand_in_the_order_in_which_they_are_done():
    made = passes([CROP, T.RandomPosterize(3, 0.5), T.RandomInvert(0.5), T.RandomSolarize(7, 0.5)], 64)
    codes, values = made.pack_operations()
    own = made.jobs[0]
    assert len(codes) == len(values) == own[R.OPERATIONS].sum()
    order = {code("posterize"): 0, code("invert"): 1, code("solarize"): 2}
    for start, count in zip(own[R.OPERATIONS_AT].tolist(), own[R.OPERATIONS].tolist(), strict=True):
        places = [order[number] for number in codes[start : start + count].tolist()]
        assert places == sorted(places)
        assert len(set(places)) == count


@pytest.mark.parametrize(
    "transforms",
    [
        [CROP, T.RandomHorizontalFlip(), T.ColorJitter(0.4, 0.4, 0.4)],
        [CROP, T.RandAugment(3), T.RandomVerticalFlip(), T.RandomErasing(0.5)],
        [T.RandomEqualize(0.5), T.RandomHorizontalFlip(), T.TrivialAugmentWide(), T.CenterCrop(30)],
        [
            T.RandomRotate90(),
            CROP,
            T.RandomTranspose(),
            T.RandomEqualize(0.5),
            T.RandomRotate90(),
            T.RandomErasing(0.5),
        ],
        [T.RandomResizedCrop(20, interpolation="random"), T.RandomApply([T.GaussianBlur(5), T.Pad(3, fill=2)], 0.5)],
        [
            T.RandomOrder([T.RandomAutocontrast(), T.RandomAffine(9, (0.1, 0.1)), T.RandomPosterize(3)]),
            T.Resize((9, 7)),
        ],
    ],
)
def test_jobs_of_an_image_are_the_same_whatever_the_others_need(transforms):
    """All images of a batch of one are treated alike."""
    chain, count = T.Chain(transforms), 32
    images = RaggedImages.from_arrays([np.zeros((40, 50, 3), np.uint8)] * count)
    program, _ = chain.draw(epoch_key(0, 0), np.arange(count), images.sizes_hw).split()
    together = Passes(images.table, program.windows_tlhw[0], 3)
    together.apply(program, program.windows_tlhw)
    operations, tables = together.pack_operations(), joined(together.tables)
    assert (len(set(together.last.tolist())) > 1) is ("Jitter" not in repr(chain))  # one path, and the other
    for row in range(count):
        image, own = images.take(np.array([row])), program.take(np.array([row]))
        alone = Passes(image.table, own.windows_tlhw[0], 3)
        alone.apply(own, own.windows_tlhw)
        assert alone.last[0] == together.last[row]
        alone_operations, alone_tables = alone.pack_operations(), joined(alone.tables)
        for number in range(alone.last[0] + 1):
            one, other = alone.jobs[number, :, 0].copy(), together.jobs[number, :, row].copy()
            np.testing.assert_array_equal(alone.floats[number, 0], together.floats[number, row])
            for found, expected in zip(operations, alone_operations, strict=True):
                np.testing.assert_array_equal(_of(found, other, R.OPERATIONS_AT), _of(expected, one, R.OPERATIONS_AT))
            if one[R.KIND] == R.TABLE:
                length = one[R.OUT_HEIGHT] + one[R.OUT_WIDTH]
                ends = [tables[other[R.TABLE_AT] :][:length], alone_tables[one[R.TABLE_AT] :][:length]]
                np.testing.assert_array_equal(*ends)
                one[R.TABLE_AT] = other[R.TABLE_AT] = 0
            one[R.OPERATIONS_AT] = other[R.OPERATIONS_AT] = 0
            np.testing.assert_array_equal(one, other)


def joined(tables: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, np.int32), *tables])


def _of(packed: np.ndarray, job: np.ndarray, at: int) -> np.ndarray:
    return packed[job[at] :][: job[R.OPERATIONS]]


def test_a_window_of_the_image_is_all_that_is_read():
    made = passes([T.CenterCrop((10, 20))])
    assert made.jobs[0, [R.HEIGHT, R.WIDTH], 0].tolist() == [10, 20]
    assert made.jobs[0, R.BASE, 0] == (15 * 50 + 15) * 3


def test_an_image_of_one_channel_is_read_as_three_where_it_is_to_have_three():
    made = passes([T.RandomEqualize(1.0), T.Grayscale(3)], channels=3, given=1)
    assert (made.jobs[0, R.CHANNEL_STEP] == 0).all()
    assert (made.last == 1).all()  # its bytes are not three of a pixel, which a statistic would count


def test_a_record_of_no_images_changes_nothing():
    inside = [CROP, T.Pad(3), T.RandomRotation(9), T.RandomVerticalFlip(1.0), T.ColorJitter(0.4), T.GaussianBlur(3)]
    chain = T.Chain([T.RandomApply([*inside, T.RandomErasing(1.0)], 0.5)])
    program = chain.draw(epoch_key(0, 0), np.arange(8), np.full((8, 2), 40))
    others = program.take(np.setdiff1d(np.arange(8), program.records[0].rows))
    assert len(others) > 1
    assert [len(record.rows) for record in others.records] == [0] * 7
    images = RaggedImages.from_arrays([np.zeros((40, 40, 3), np.uint8)] * len(others))
    made, expected = Passes(images.table, others.windows_tlhw[0], 3), Passes(images.table, others.windows_tlhw[0], 3)
    made.apply(others, others.windows_tlhw)
    np.testing.assert_array_equal(made.jobs, expected.jobs)
    assert (made.last == 0).all()


def test_the_fused_passes_refuse_a_record_of_an_unknown_kind():
    with pytest.raises(TypeError, match="the fused kernels do not support the record ChainMixture"):
        passes([T.AugMix()])
