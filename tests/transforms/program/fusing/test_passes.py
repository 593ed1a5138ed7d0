"""The passes over each image that a chain needs, and the jobs of each pass."""

from __future__ import annotations

import numpy as np
import pytest

from gpuload import transforms as T
from gpuload.rng.philox import epoch_key
from gpuload.stage import RaggedImages
from gpuload.transforms.program.fusing import jobs
from gpuload.transforms.program.fusing.passes import Passes
from gpuload.transforms.program.ops import code


def make_passes(transforms, count=8, channels=3, image_channels=3) -> Passes:
    chain = T.Chain(transforms)
    images = RaggedImages.from_arrays([np.zeros((40, 50, image_channels), np.uint8)] * count)
    levels, _ = chain.draw(epoch_key(0, 0), np.arange(count), images.sizes_hw).split()
    batch = Passes(images.table, levels.windows_tlhw[0], channels)
    batch.apply(levels, levels.windows_tlhw)
    return batch


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
        # Statistics, a second resampling and neighborhoods need the complete image first.
        ([CROP, T.RandomEqualize(1.0)], 2),
        ([CROP, TRANSPOSE, T.RandomEqualize(1.0), TRANSPOSE], 2),
        ([CROP, T.ColorJitter(0.4, 0.4, 0.4, 0.1)], 2),
        ([CROP, T.RandomEqualize(1.0), T.RandomAutocontrast(1.0)], 3),
        ([CROP, T.RandomRotation(9)], 2),
        ([CROP, T.GaussianBlur(3), T.RandomAdjustSharpness(2, 1.0)], 3),
        ([CROP, T.RandomInvert(1.0), T.Pad(3)], 2),
        ([CROP, T.RandomPerspective(0.3, 1.0), T.RandomInvert(1.0), T.Resize(9)], 3),
        # A decoded image is already complete.
        ([T.RandomEqualize(1.0)], 1),
        ([T.RandomEqualize(1.0), T.RandomInvert(1.0)], 1),
        ([T.RandomHorizontalFlip(1.0), T.RandomEqualize(1.0)], 2),
        ([T.RandomRotation(9)], 1),
        ([T.GaussianBlur(3)], 1),
    ],
)
def test_passes_of_a_chain_are_as_few_as_possible(transforms, count):
    assert (make_passes(transforms).last + 1 == count).all()


def test_each_image_of_a_batch_has_as_many_passes_as_it_needs():
    batch = make_passes([CROP, T.RandomEqualize(0.5)], 64)
    assert set(batch.last.tolist()) == {0, 1}


def test_pack_operations_keeps_the_order_of_the_chain():
    batch = make_passes([CROP, T.RandomPosterize(3, 0.5), T.RandomInvert(0.5), T.RandomSolarize(7, 0.5)], 64)
    codes, values = batch.pack_operations()
    first_jobs = batch.jobs[0]
    assert len(codes) == len(values) == first_jobs[jobs.OPERATIONS].sum()
    order = {code("posterize"): 0, code("invert"): 1, code("solarize"): 2}
    for start, count in zip(first_jobs[jobs.OPERATIONS_AT].tolist(), first_jobs[jobs.OPERATIONS].tolist(), strict=True):
        places = [order[number] for number in codes[start : start + count].tolist()]
        assert places == sorted(places)
        assert len(set(places)) == count


@pytest.mark.parametrize(
    "transforms",
    [
        [CROP, T.RandomHorizontalFlip(), T.ColorJitter(0.4, 0.4, 0.4)],
        [CROP, T.RandAugment(3), T.RandomVerticalFlip(), T.RandomErasing(0.5)],
        [T.RandomEqualize(0.5), T.RandomHorizontalFlip(), T.TrivialAugmentWide(), T.CenterCrop(30)],
        [T.RandomRotate90(), CROP, T.RandomTranspose(), T.RandomEqualize(0.5), T.RandomRotate90(), T.RandomErasing()],
        [T.RandomResizedCrop(20, interpolation="random"), T.RandomApply([T.GaussianBlur(5), T.Pad(3, fill=2)], 0.5)],
        [
            T.RandomOrder([T.RandomAutocontrast(), T.RandomAffine(9, (0.1, 0.1)), T.RandomPosterize(3)]),
            T.Resize((9, 7)),
        ],
    ],
)
def test_jobs_of_an_image_do_not_depend_on_its_batch(transforms):
    chain, count = T.Chain(transforms), 32
    images = RaggedImages.from_arrays([np.zeros((40, 50, 3), np.uint8)] * count)
    program, _ = chain.draw(epoch_key(0, 0), np.arange(count), images.sizes_hw).split()
    batch = Passes(images.table, program.windows_tlhw[0], 3)
    batch.apply(program, program.windows_tlhw)
    operations, tables = batch.pack_operations(), join_tables(batch.tables)
    assert (len(set(batch.last.tolist())) > 1) is ("Jitter" not in repr(chain))  # ColorJitter changes every image
    for row in range(count):
        image, image_program = images.take(np.array([row])), program.take(np.array([row]))
        alone = Passes(image.table, image_program.windows_tlhw[0], 3)
        alone.apply(image_program, image_program.windows_tlhw)
        assert alone.last[0] == batch.last[row]
        alone_operations, alone_tables = alone.pack_operations(), join_tables(alone.tables)
        for pass_index in range(alone.last[0] + 1):
            alone_job, job = alone.jobs[pass_index, :, 0].copy(), batch.jobs[pass_index, :, row].copy()
            np.testing.assert_array_equal(alone.floats[pass_index, 0], batch.floats[pass_index, row])
            for packed, alone_packed in zip(operations, alone_operations, strict=True):
                np.testing.assert_array_equal(operations_of(packed, job), operations_of(alone_packed, alone_job))
            if alone_job[jobs.KIND] == jobs.TABLE:
                length = alone_job[jobs.OUT_HEIGHT] + alone_job[jobs.OUT_WIDTH]
                both_tables = [tables[job[jobs.TABLE_AT] :][:length], alone_tables[alone_job[jobs.TABLE_AT] :][:length]]
                np.testing.assert_array_equal(*both_tables)
                alone_job[jobs.TABLE_AT] = job[jobs.TABLE_AT] = 0
            alone_job[jobs.OPERATIONS_AT] = job[jobs.OPERATIONS_AT] = 0
            np.testing.assert_array_equal(alone_job, job)


def join_tables(tables: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, np.int32), *tables])


def operations_of(packed: np.ndarray, job: np.ndarray) -> np.ndarray:
    return packed[job[jobs.OPERATIONS_AT] :][: job[jobs.OPERATIONS]]


def test_first_pass_reads_only_the_window_of_the_image():
    batch = make_passes([T.CenterCrop((10, 20))])
    assert batch.jobs[0, [jobs.HEIGHT, jobs.WIDTH], 0].tolist() == [10, 20]
    assert batch.jobs[0, jobs.BASE, 0] == (15 * 50 + 15) * 3  # row 15 and column 15 of an image of 40×50


def test_gray_image_is_read_as_three_channels_if_three_are_needed():
    batch = make_passes([T.RandomEqualize(1.0), T.Grayscale(3)], channels=3, image_channels=1)
    assert (batch.jobs[0, jobs.CHANNEL_STEP] == 0).all()
    assert (batch.last == 1).all()  # a statistic needs three bytes per pixel


def test_records_without_rows_change_no_jobs():
    contained = [CROP, T.Pad(3), T.RandomRotation(9), T.RandomVerticalFlip(1.0), T.ColorJitter(0.4), T.GaussianBlur(3)]
    chain = T.Chain([T.RandomApply([*contained, T.RandomErasing(1.0)], 0.5)])
    program = chain.draw(epoch_key(0, 0), np.arange(8), np.full((8, 2), 40))
    program_of_unchanged = program.take(np.setdiff1d(np.arange(8), program.records[0].rows))
    assert len(program_of_unchanged) > 1
    assert [len(record.rows) for record in program_of_unchanged.records] == [0] * 7
    images = RaggedImages.from_arrays([np.zeros((40, 40, 3), np.uint8)] * len(program_of_unchanged))
    applied, expected = (Passes(images.table, program_of_unchanged.windows_tlhw[0], 3) for _ in range(2))
    applied.apply(program_of_unchanged, program_of_unchanged.windows_tlhw)
    np.testing.assert_array_equal(applied.jobs, expected.jobs)
    assert (applied.last == 0).all()


def test_the_fused_passes_refuse_a_record_of_an_unknown_kind():
    with pytest.raises(TypeError, match="the fused kernels do not support the record ChainMixture"):
        make_passes([T.AugMix()])
