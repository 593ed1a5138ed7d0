"""Containers and MultiView: draws, sizes and windows of each sample, and valid arguments."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
import torch
from helpers.both_loaders import cpu_loader, gpuload_batches
from helpers.map_datasets import MapDataset
from scipy import stats
from transforms.drawing import KEY, NORMALIZE, SAMPLES, draw

import gpuload as gl
from gpuload import transforms as T
from gpuload.rng.philox import epoch_key
from gpuload.stage import RaggedImages, compile_stage


def test_random_apply_applies_all_of_its_transforms_or_none():
    first, second = draw(T.RandomApply([T.RandomHorizontalFlip(1), T.RandomVerticalFlip(1)], p=0.3)).records
    assert first.rows.tolist() == second.rows.tolist() == sorted(set(first.rows.tolist()))
    assert [first.name, second.name] == ["RandomHorizontalFlip", "RandomVerticalFlip"]
    assert (first.step, second.step) == (0, 0)
    assert len(draw(T.RandomApply([T.RandomInvert()], p=0)).records) == 0
    assert len(draw(T.RandomApply([T.RandomInvert()], p=1)).records[0].rows) == SAMPLES


def test_random_choice_applies_one_transform_to_each_sample_and_each_equally_often():
    choices = [T.RandomCrop(8), T.CenterCrop(8), T.TrimBorder(2)]
    records = draw(T.RandomChoice(choices)).records
    assert sorted(np.concatenate([record.rows for record in records]).tolist()) == list(range(SAMPLES))
    assert stats.chisquare([len(record.rows) for record in records]).pvalue > 0.01
    assert [len(record.rows) for record in draw(T.RandomChoice(choices, p=[0, 1, 0])).records] == [SAMPLES]
    assert len(draw(T.RandomChoice([T.RandomInvert(), T.Identity()])).records) == 1


def test_random_order_draws_every_order_equally_often():
    transforms = [T.RandomHorizontalFlip(), T.RandomVerticalFlip(), T.ColorJitter(0.4)]
    names = [type(transform).__name__ for transform in transforms]
    records = draw(T.RandomOrder(transforms)).records
    orders = [records[start : start + 3] for start in range(0, len(records), 3)]
    assert {tuple(record.name for record in order) for order in orders} == set(itertools.permutations(names))
    for order in orders:
        for record in order:
            assert record.rows.tolist() == order[0].rows.tolist(), record.name
    assert stats.chisquare([len(order[0].rows) for order in orders]).pvalue > 0.01


def test_sample_draws_the_same_in_any_batch_and_in_any_branch():
    order = T.RandomOrder([T.RandomCrop(20), T.RandomApply([T.ColorJitter(0.4), T.RandomHorizontalFlip()])])
    chain = T.Chain([T.RandomResizedCrop(32), T.RandomChoice([order, T.Identity()]), T.RandomVerticalFlip()])
    positions = np.random.default_rng(0).permutation(200)
    sizes = np.random.default_rng(1).integers(30, 90, (200, 2))
    program = chain.draw(KEY, positions, sizes)
    for row in (0, 7, 199):
        alone = chain.draw(KEY, positions[row : row + 1], sizes[row : row + 1])
        row_of_program = program.take(np.array([row]))
        # `take` keeps the records of branches that the row does not take, but without rows.
        indices = [
            index for index, record in enumerate(row_of_program.records) if record.rows is None or len(record.rows)
        ]
        assert [record.name for record in alone.records] == [row_of_program.records[index].name for index in indices]
        for window, index in zip(alone.windows_tlhw, [*indices, -1], strict=True):
            np.testing.assert_array_equal(window, row_of_program.windows_tlhw[index])
        np.testing.assert_array_equal(alone.results_hw, row_of_program.results_hw)


FLATTEN = torch.nn.Flatten()
CHAIN = [T.RandomResizedCrop(32), T.ColorJitter(0.4), NORMALIZE]
COMPOSED_AND_LIST = {
    "alone": (T.Compose(CHAIN), CHAIN),
    "nested": (T.Compose([T.Compose(T.Compose(CHAIN[:1])), *CHAIN[1:]]), CHAIN),
    "in RandomApply": (
        [T.RandomApply(T.Compose(CHAIN[:2]), 0.3), T.Resize((8, 8))],
        [T.RandomApply(CHAIN[:2], 0.3), T.Resize((8, 8))],
    ),
    "in RandomChoice": (T.Compose([T.RandomChoice(T.Compose(CHAIN[:2]), [1, 2])]), [T.RandomChoice(CHAIN[:2], [1, 2])]),
    "in RandomOrder": ([T.RandomOrder(T.Compose(CHAIN[:2]))], [T.RandomOrder(CHAIN[:2])]),
    "in MultiView": (
        T.Compose([T.Resize(40), T.MultiView([T.Compose(CHAIN[:2]), CHAIN[0]]), NORMALIZE]),
        [T.Resize(40), T.MultiView([CHAIN[:2], CHAIN[0]]), NORMALIZE],
    ),
    "a module at the end": (T.Compose([CHAIN[0], T.Compose([CHAIN[1], FLATTEN])]), [*CHAIN[:2], FLATTEN]),
}


@pytest.mark.parametrize("name", COMPOSED_AND_LIST)
def test_loaders_treat_compose_as_the_list_of_its_transforms(name):
    composed, transform_list = COMPOSED_AND_LIST[name]
    options = {"batch_size": 4, "num_workers": 0, "device": "cpu", "seed": 3}
    images = [gl.Image(np.random.default_rng(number).integers(0, 256, (50, 60, 3), np.uint8)) for number in range(4)]
    results = []
    for transforms in (composed, transform_list):
        with gl.Loader(images, transforms=transforms, **options) as loader:
            batch = next(iter(loader))
            results.append((T.Chain(transforms), repr(loader), str(loader.plan()), loader.state_dict(), list(batch)))
    *composed_properties, images = results[0]
    *list_properties, expected = results[1]
    assert composed_properties == list_properties
    assert T.Chain(composed).fingerprint() == T.Chain(transform_list).fingerprint()
    torch.testing.assert_close(images, expected, rtol=0, atol=0)


def test_contained_transforms_draw_from_different_lanes():
    chain = T.Chain([T.RandomApply([T.RandomHorizontalFlip(), T.Compose([T.RandomVerticalFlip()])], p=1), NORMALIZE])
    assert chain.lines[0].lanes == (0, 4)
    records = draw(*chain).records
    assert abs(np.corrcoef(records[0].flipped, records[1].flipped)[0, 1]) < 0.05
    assert not np.array_equal(records[0].flipped, draw(T.RandomHorizontalFlip()).records[0].flipped)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: T.RandomApply(T.Identity()), TypeError, "RandomApply(transforms=…) must be a list of transforms"),
        (lambda: T.RandomApply([]), ValueError, "RandomApply(transforms=…) is empty; pass at least one transform"),
        (lambda: T.RandomOrder([len]), TypeError, "RandomOrder(transforms=…)[0] is not a gpuload transform: got"),
        (lambda: T.RandomChoice([T.Identity()], p=[1, 2]), ValueError, "must have one number for each of the 1 transf"),
        (lambda: T.RandomApply([NORMALIZE]), ValueError,
         "RandomApply cannot hold Normalize, which would convert only some images"),
        (lambda: T.RandomChoice([T.Compose([T.ToDtype("float32")])]), ValueError,
         "RandomChoice cannot hold Compose, which would convert only some images"),
        (lambda: T.RandomApply([T.MultiView([[T.Identity()]])]), ValueError, "RandomApply cannot hold a MultiView"),
        (lambda: T.RandomApply([T.Compose([T.MultiView([[T.Identity()]])])]), ValueError,
         "RandomApply cannot hold a MultiView"),
        (lambda: T.Chain(T.Compose([3])), TypeError,
         "Compose(transforms=…)[0] is not a gpuload transform: got 3 (int)"),
        (lambda: T.Chain([NORMALIZE, T.RandomApply([T.RandomHorizontalFlip(), T.ColorJitter(0.4)])]), ValueError,
         "RandomApply (number 2) cannot come after Normalize (number 1)"),
        (lambda: T.MultiView(T.Identity()), TypeError, "MultiView(chains=…) must be a list with one entry per view"),
        (lambda: T.MultiView([[len]]), TypeError, "MultiView(chains=…)[0](transforms=…)[0] is not a gpuload transform"),
        (lambda: T.Chain([T.MultiView([LOCAL_VIEW]), T.MultiView([LOCAL_VIEW])]), ValueError,
         "there are two MultiViews (numbers 1 and 2); put all views into one"),
        (lambda: T.Chain([T.MultiView([LOCAL_VIEW, [NORMALIZE]]), NORMALIZE]), ValueError,
         "Normalize (number 2) cannot come after Normalize (number 1)"),
        (lambda: T.MultiView([[T.Compose([T.UniformTemporalSubsample(2)]), T.Resize((4, 4))]]), ValueError,
         "MultiView cannot hold UniformTemporalSubsample: frames are selected once"),
    ],
)  # fmt: skip
def test_containers_and_chains_refuse_invalid_transforms(make, error, text):
    with pytest.raises(error, match=re.escape(text)):
        make()


def test_error_of_a_contained_transform_has_the_row_of_the_image():
    chain = T.Chain([T.RandomChoice([T.RandomCrop(50), T.RandomCrop(50)])])
    assert chain.lines[0].prefix_length == 1
    with pytest.raises(T.base.DrawError, match=r"image of 40×60 .* is smaller than the crop") as caught:
        chain.draw(KEY, np.arange(5), np.array([[60, 60], [70, 60], [60, 80], [40, 60], [60, 60]]))
    assert caught.value.row == 3


CONTAINED = [
    T.RandomResizedCrop(24), T.CenterCrop(30), T.Pad(3), T.Resize((31, 25)), T.RandomResize(20, 40, "random"),
    T.RandomHorizontalFlip(), T.RandomVerticalFlip(), T.ColorJitter(0.4), T.GaussianBlur(3),
    T.RandomRotation(20, expand=True), T.Identity(),
]  # fmt: skip


def random_transform(rng: np.random.Generator, depth: int) -> T.Transform:
    if depth == 0 or rng.random() < 0.4:
        return CONTAINED[rng.integers(len(CONTAINED))]
    transforms = [random_transform(rng, depth - 1) for _ in range(rng.integers(1, 4))]
    return [T.RandomApply, T.RandomChoice, T.RandomOrder, T.Compose][rng.integers(4)](transforms)


@pytest.mark.parametrize("seed", range(25))
def test_windows_and_sizes_of_nested_chains_follow_the_branch_of_each_sample(seed):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(40, 90, (9, 2))
    program = T.Chain([random_transform(rng, 3) for _ in range(4)]).draw(KEY, np.arange(9), sizes)
    for row in range(9):
        branch, size = [], sizes[row : row + 1]
        for index, record in enumerate(program.records):
            rows = np.flatnonzero(np.arange(9) == row if record.rows is None else record.rows == row)
            if len(rows):
                record_of_row = record.take(rows, None)
                np.testing.assert_array_equal(record_of_row.sizes_hw, size)
                size = record_of_row.output_hw
                branch.append((index, record_of_row))
        np.testing.assert_array_equal(program.results_hw[row : row + 1], size)
        window = np.concatenate([np.zeros((1, 2), np.int64), size], axis=1)
        for index, record_of_row in reversed(branch):
            np.testing.assert_array_equal(program.windows_tlhw[index + 1][row : row + 1], window)
            window = record_of_row.input_windows(window)
            np.testing.assert_array_equal(program.windows_tlhw[index][row : row + 1], window)
        np.testing.assert_array_equal(program.windows_tlhw[0][row : row + 1], window)


GLOBAL_VIEW = [T.RandomResizedCrop(24, scale=(0.4, 1)), T.RandomHorizontalFlip(), T.ColorJitter(0.4)]
LOCAL_VIEW = [T.RandomResizedCrop(12, scale=(0.05, 0.4)), T.RandomHorizontalFlip()]


def make_sample(index: int):
    rng = np.random.default_rng(index)
    return gl.Image(rng.integers(0, 256, (*rng.integers(30, 70, 2), 3), np.uint8)), index


PICTURES = MapDataset(make_sample, 20)


def load_batches(transforms, dataset=PICTURES, **options):
    return gpuload_batches(dataset, 8, transforms=transforms, seed=4, **options)


def test_multi_view_gives_different_views_in_order():
    (views, labels), *_ = load_batches([T.MultiView([GLOBAL_VIEW, GLOBAL_VIEW, *[LOCAL_VIEW] * 3]), NORMALIZE])
    assert isinstance(views, list)
    assert [tuple(view.shape) for view in views] == [(8, 3, 24, 24)] * 2 + [(8, 3, 12, 12)] * 3
    assert [view.dtype for view in views] == [torch.float32] * 5
    assert labels.tolist() == list(range(8))
    for index in range(5):
        for other_index in range(index):
            assert views[index].shape != views[other_index].shape or not torch.equal(views[index], views[other_index])


def test_loader_gives_the_views_of_the_stage():
    chain = T.Chain([T.RandomHorizontalFlip(), T.MultiView([GLOBAL_VIEW, LOCAL_VIEW]), NORMALIZE])
    (views, _), *_ = load_batches([*chain.transforms])
    arrays = [make_sample(i)[0].hwc for i in range(8)]
    images, stage = RaggedImages.from_arrays(arrays), compile_stage(chain, device="cpu")
    for view in (0, 1):
        program = chain.draw(epoch_key(4, 0), np.arange(8), images.sizes_hw, view=view)
        torch.testing.assert_close(stage(images, program, view=view), views[view], rtol=0, atol=0)


def test_transforms_before_multi_view_draw_once_and_transforms_after_it_per_view():
    chain = T.Chain([T.RandomCrop(20), T.MultiView([[T.Identity()], [T.Identity()]]), T.RandomHorizontalFlip()])
    sizes = np.tile([[60, 60]], (500, 1))
    first, second = (chain.draw(KEY, np.arange(500), sizes, view=view) for view in (0, 1))
    np.testing.assert_array_equal(first.records[0].box_tlhw, second.records[0].box_tlhw)
    assert 180 < (first.records[1].flipped != second.records[1].flipped).sum() < 320  # about half of 500
    assert chain.lines[0].lanes == (0, 1, 2)
    assert chain.lines[1].lanes == (0, 3, 4)


def test_regions_of_multi_view_enclose_the_crops_of_all_views():
    chain = T.Chain([T.MultiView([[T.RandomCrop(10)], [T.RandomCrop((6, 20))]])])
    sizes = np.random.default_rng(0).integers(30, 90, (50, 2))
    regions = chain.regions(KEY, np.arange(50), sizes)
    boxes = [chain.draw(KEY, np.arange(50), sizes, view=view).records[0].box_tlhw for view in (0, 1)]
    for row, (top, left, height, width) in enumerate(regions.tolist()):
        corners = np.array([box[row, :2] for box in boxes])
        ends = corners + [box[row, 2:] for box in boxes]
        assert [top, left] == corners.min(axis=0).tolist()
        assert [top + height, left + width] == ends.max(axis=0).tolist()


@pytest.mark.processes
def test_multi_view_is_bit_identical_with_workers_and_in_replay():
    transforms = [T.MultiView([GLOBAL_VIEW, *[LOCAL_VIEW] * 2]), NORMALIZE]
    in_process, with_workers = load_batches(transforms), load_batches(transforms, num_workers=2)
    for (views, _), (expected_views, _) in zip(in_process, with_workers, strict=True):
        torch.testing.assert_close(views, expected_views, rtol=0, atol=0)
    with cpu_loader(PICTURES, 8, transforms=transforms, seed=4) as loader:
        replayed = loader.replay(0, 11)
    views, _ = in_process[1]  # position 11 is row 3 of the second batch
    torch.testing.assert_close(replayed.sample[0], [view[3] for view in views], rtol=0, atol=0)


def test_multi_view_reads_each_sample_once():
    indices = []
    dataset = MapDataset(lambda index: indices.append(index) or make_sample(index), 4)
    [(views, _)] = load_batches([T.MultiView([LOCAL_VIEW] * 4)], dataset)
    assert len(views) == 4
    assert indices == [0, 1, 2, 3]


def test_collate_fn_receives_samples_with_a_list_of_views():
    def collate(samples):
        assert {type(views) for views, _ in samples} == {list}
        return torch.stack([local_view for [_, local_view], _ in samples]), [number for _, number in samples]

    transforms = [T.MultiView([GLOBAL_VIEW, LOCAL_VIEW])]
    batches, collated_batches = load_batches(transforms), load_batches(transforms, collate_fn=collate)
    for ((_, local_views), _), (collated_views, _) in zip(batches, collated_batches, strict=True):
        assert torch.equal(collated_views, local_views)


def test_views_of_different_sizes_are_lists_with_ragged_list():
    (views, _), *_ = load_batches([T.MultiView([[T.Identity()], LOCAL_VIEW])], num_workers=0, ragged="list")
    assert [tuple(image.shape[1:]) for image in views[0]] == [make_sample(i)[0].hwc.shape[:2] for i in range(8)]
