"""Transforms that hold others: what is drawn for which sample, sizes, windows, where they may be; and several views."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
import torch
from scipy import stats

import gpuload as gl
from gpuload import transforms as T
from gpuload.rng.philox import epoch_key
from gpuload.stage import RaggedImages, compile_stage

N = 6000
KEY = epoch_key(3, 1)
NORMALIZE = T.Normalize((0.5,) * 3, (0.5,) * 3)


def draw(transform, n: int = N, height: int = 40, width: int = 60, first: int = 0):
    return T.Chain([transform]).draw(KEY, np.arange(first, first + n), np.tile([[height, width]], (n, 1)))


def test_random_apply_applies_all_or_none():
    first, second = draw(T.RandomApply([T.RandomHorizontalFlip(1), T.RandomVerticalFlip(1)], p=0.3)).records
    assert first.rows.tolist() == second.rows.tolist() == sorted(set(first.rows.tolist()))
    assert [first.name, second.name] == ["RandomHorizontalFlip", "RandomVerticalFlip"]
    assert (first.step, second.step) == (0, 0)
    assert len(draw(T.RandomApply([T.RandomInvert()], p=0)).records) == 0
    assert len(draw(T.RandomApply([T.RandomInvert()], p=1)).records[0].rows) == N


def test_random_choice_takes_one_and_by_default_each_as_often():
    choices = [T.RandomCrop(8), T.CenterCrop(8), T.TrimBorder(2)]
    even = draw(T.RandomChoice(choices)).records
    assert sorted(np.concatenate([record.rows for record in even]).tolist()) == list(range(N))
    assert stats.chisquare([len(record.rows) for record in even]).pvalue > 0.01
    assert [len(record.rows) for record in draw(T.RandomChoice(choices, p=[0, 1, 0])).records] == [N]
    assert len(draw(T.RandomChoice([T.RandomInvert(), T.Identity()])).records) == 1


def test_random_order_takes_every_order_equally_often():
    three = [T.RandomHorizontalFlip(), T.RandomVerticalFlip(), T.ColorJitter(0.4)]
    names = [type(transform).__name__ for transform in three]
    drawn = draw(T.RandomOrder(three)).records
    ways = [drawn[start : start + 3] for start in range(0, len(drawn), 3)]
    assert {tuple(record.name for record in way) for way in ways} == set(itertools.permutations(names))
    assert all(record.rows.tolist() == way[0].rows.tolist() for way in ways for record in way)
    assert stats.chisquare([len(way[0].rows) for way in ways]).pvalue > 0.01


def test_what_a_sample_draws_does_not_hang_on_its_batch_nor_on_its_way():
    order = T.RandomOrder([T.RandomCrop(20), T.RandomApply([T.ColorJitter(0.4), T.RandomHorizontalFlip()])])
    chain = T.Chain([T.RandomResizedCrop(32), T.RandomChoice([order, T.Identity()]), T.RandomVerticalFlip()])
    positions = np.random.default_rng(0).permutation(200)
    sizes = np.random.default_rng(1).integers(30, 90, (200, 2))
    whole = chain.draw(KEY, positions, sizes)
    for row in (0, 7, 199):
        one = chain.draw(KEY, positions[row : row + 1], sizes[row : row + 1])
        taken = whole.take(np.array([row]))
        # Records of other ways keep their places, for no rows.
        places = [place for place, own in enumerate(taken.records) if own.rows is None or len(own.rows)]
        assert [record.name for record in one.records] == [taken.records[place].name for place in places]
        for ours, place in zip(one.windows_tlhw, [*places, -1], strict=True):
            np.testing.assert_array_equal(ours, taken.windows_tlhw[place])
        np.testing.assert_array_equal(one.results_hw, taken.results_hw)


def test_compose_is_the_same_as_writing_its_transforms_in_the_chain():
    plain = [T.RandomResizedCrop(32), T.ColorJitter(0.4), NORMALIZE]
    chain = T.Chain([T.Compose([T.Compose(plain[:1]), plain[1]]), NORMALIZE])
    assert chain == T.Chain(plain)
    assert chain.fingerprint() == T.Chain(plain).fingerprint()
    assert chain.lines[0].lanes == (0, 1, 2)


FLAT = torch.nn.Flatten()
PLAIN = [T.RandomResizedCrop(32), T.ColorJitter(0.4), NORMALIZE]
COMPOSED = {
    "alone": (T.Compose(PLAIN), PLAIN),
    "nested": (T.Compose([T.Compose(T.Compose(PLAIN[:1])), *PLAIN[1:]]), PLAIN),
    "held": (
        [T.RandomApply(T.Compose(PLAIN[:2]), 0.3), T.Resize((8, 8))],
        [T.RandomApply(PLAIN[:2], 0.3), T.Resize((8, 8))],
    ),
    "chosen": (T.Compose([T.RandomChoice(T.Compose(PLAIN[:2]), [1, 2])]), [T.RandomChoice(PLAIN[:2], [1, 2])]),
    "ordered": ([T.RandomOrder(T.Compose(PLAIN[:2]))], [T.RandomOrder(PLAIN[:2])]),
    "views": (
        T.Compose([T.Resize(40), T.MultiView([T.Compose(PLAIN[:2]), PLAIN[0]]), NORMALIZE]),
        [T.Resize(40), T.MultiView([PLAIN[:2], PLAIN[0]]), NORMALIZE],
    ),
    "a module at the end": (T.Compose([PLAIN[0], T.Compose([PLAIN[1], FLAT])]), [*PLAIN[:2], FLAT]),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_compose_is_taken_as_the_list_that_it_holds(name):
    composed, plain = COMPOSED[name]
    options = {"batch_size": 4, "num_workers": 0, "device": "cpu", "seed": 3}
    images = [gl.Image(np.random.default_rng(number).integers(0, 256, (50, 60, 3), np.uint8)) for number in range(4)]
    found = []
    for transforms in (composed, plain):
        with gl.Loader(images, transforms=transforms, **options) as loader:
            batch = next(iter(loader))
            found.append((T.Chain(transforms), repr(loader), str(loader.plan()), loader.state_dict(), batch))
    ours, theirs = found
    assert ours[:4] == theirs[:4]
    for one, other in zip(ours[4], theirs[4], strict=True):
        assert torch.equal(one, other)


def test_transforms_inside_draw_from_lanes_of_their_own():
    chain = T.Chain([T.RandomApply([T.RandomHorizontalFlip(), T.Compose([T.RandomVerticalFlip()])], p=1), NORMALIZE])
    assert chain.lines[0].lanes == (0, 4)
    drawn = chain.draw(KEY, np.arange(N), np.tile([[8, 8]], (N, 1))).records
    assert abs(np.corrcoef(drawn[0].flipped, drawn[1].flipped)[0, 1]) < 0.05
    assert not np.array_equal(drawn[0].flipped, draw(T.RandomHorizontalFlip()).records[0].flipped)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: T.RandomApply(T.Identity()), TypeError, "RandomApply(transforms=…) must be a list of transforms"),
        (lambda: T.RandomApply([]), ValueError, "RandomApply(transforms=…) is empty; pass at least one transform"),
        (
            lambda: T.RandomOrder([len]),
            TypeError,
            "RandomOrder(transforms=…)[0] is not a gpuload transform: got",
        ),
        (lambda: T.RandomChoice([T.Identity()], p=[1, 2]), ValueError, "must have one number for each of the 1 transf"),
        (
            lambda: T.RandomApply([NORMALIZE]),
            ValueError,
            "RandomApply cannot hold Normalize, which would convert only some images",
        ),
        (
            lambda: T.RandomChoice([T.Compose([T.ToDtype("float32")])]),
            ValueError,
            "RandomChoice cannot hold Compose, which would convert only some images",
        ),
        (lambda: T.RandomApply([T.MultiView([[T.Identity()]])]), ValueError, "RandomApply cannot hold a MultiView"),
        (
            lambda: T.RandomApply([T.Compose([T.MultiView([[T.Identity()]])])]),
            ValueError,
            "RandomApply cannot hold a MultiView",
        ),
        (
            lambda: T.Chain(T.Compose([3])),
            TypeError,
            "Compose(transforms=…)[0] is not a gpuload transform: got 3 (int)",
        ),
        (
            lambda: T.Chain([NORMALIZE, T.RandomApply([T.RandomHorizontalFlip(), T.ColorJitter(0.4)])]),
            ValueError,
            "RandomApply (number 2) cannot come after Normalize (number 1)",
        ),
    ],
)
def test_refused(make, error, text):
    with pytest.raises(error, match=re.escape(text)):
        make()


def test_flips_in_a_choice_may_stand_behind_normalize():
    T.Chain([NORMALIZE, T.RandomChoice([T.RandomHorizontalFlip(), T.Identity()])])


def test_an_image_that_a_transform_inside_refuses_is_named_by_its_row():
    chain = T.Chain([T.RandomChoice([T.RandomCrop(50), T.RandomCrop(50)])])
    assert chain.lines[0].prefix_length == 1
    with pytest.raises(T.base.DrawError, match=r"image of 40×60 .* is smaller than the crop") as caught:
        chain.draw(KEY, np.arange(5), np.array([[60, 60], [70, 60], [60, 80], [40, 60], [60, 60]]))
    assert caught.value.row == 3


INSIDE = [
    T.RandomResizedCrop(24), T.CenterCrop(30), T.Pad(3), T.Resize((31, 25)), T.RandomResize(20, 40, "random"),
    T.RandomHorizontalFlip(), T.RandomVerticalFlip(), T.ColorJitter(0.4), T.GaussianBlur(3),
    T.RandomRotation(20, expand=True), T.Identity(),
]  # fmt: skip


def nested(random: np.random.Generator, depth: int) -> T.Transform:
    if depth == 0 or random.random() < 0.4:
        return INSIDE[random.integers(len(INSIDE))]
    inside = [nested(random, depth - 1) for _ in range(random.integers(1, 4))]
    return [T.RandomApply, T.RandomChoice, T.RandomOrder, T.Compose][random.integers(4)](inside)


@pytest.mark.parametrize("seed", range(25))
def test_windows_and_sizes_are_those_of_each_sample_going_its_way_alone(seed):
    random = np.random.default_rng(seed)
    sizes = random.integers(40, 90, (9, 2))
    program = T.Chain([nested(random, 3) for _ in range(4)]).draw(KEY, np.arange(9), sizes)
    for row in range(9):
        way, size = [], sizes[row : row + 1]
        for place, record in enumerate(program.records):
            at = np.flatnonzero(np.arange(9) == row if record.rows is None else record.rows == row)
            if len(at):
                one = record.take(at, None)
                np.testing.assert_array_equal(one.sizes_hw, size)
                size = one.output_hw
                way.append((place, one))
        np.testing.assert_array_equal(program.results_hw[row : row + 1], size)
        window = np.concatenate([np.zeros((1, 2), np.int64), size], axis=1)
        for place, one in reversed(way):
            np.testing.assert_array_equal(program.windows_tlhw[place + 1][row : row + 1], window)
            window = one.input_windows(window)
            np.testing.assert_array_equal(program.windows_tlhw[place][row : row + 1], window)
        np.testing.assert_array_equal(program.windows_tlhw[0][row : row + 1], window)


GLOBAL = [T.RandomResizedCrop(24, scale=(0.4, 1)), T.RandomHorizontalFlip(), T.ColorJitter(0.4)]
LOCAL = [T.RandomResizedCrop(12, scale=(0.05, 0.4)), T.RandomHorizontalFlip()]


class Pictures:
    """Image i, of a size of its own, and i."""

    def __len__(self):
        return 20

    def __getitem__(self, i):
        rng = np.random.default_rng(i)
        return gl.Image(rng.integers(0, 256, (*rng.integers(30, 70, 2), 3), np.uint8)), i


def load(transforms, **options):
    loader = gl.Loader(Pictures(), 8, transforms=transforms, device="cpu", seed=4, **options)
    with loader:
        return list(loader)


def test_views_come_in_their_order_each_with_draws_of_its_own():
    (views, labels), *_ = load([T.MultiView([GLOBAL, GLOBAL, *[LOCAL] * 3]), NORMALIZE], num_workers=0)
    assert isinstance(views, list)
    assert [tuple(view.shape) for view in views] == [(8, 3, 24, 24)] * 2 + [(8, 3, 12, 12)] * 3
    assert all(view.dtype == torch.float32 for view in views)
    assert labels.tolist() == list(range(8))
    for one in range(5):
        for other in range(one):
            assert views[one].shape != views[other].shape or not torch.equal(views[one], views[other])


def test_each_view_is_what_its_chain_gives_of_the_whole_image():
    chain = T.Chain([T.RandomHorizontalFlip(), T.MultiView([GLOBAL, LOCAL]), NORMALIZE])
    (views, _), *_ = load([*chain.transforms], num_workers=0)
    arrays = [Pictures()[i][0].hwc for i in range(8)]
    images, stage = RaggedImages.from_arrays(arrays), compile_stage(chain, device="cpu")
    for view in (0, 1):
        drawn = chain.draw(epoch_key(4, 0), np.arange(8), images.sizes_hw, view=view)
        torch.testing.assert_close(stage(images, drawn, view=view), views[view], rtol=0, atol=0)


def test_what_stands_before_is_drawn_once_and_what_stands_behind_for_each_view():
    chain = T.Chain([T.RandomCrop(20), T.MultiView([[T.Identity()], [T.Identity()]]), T.RandomHorizontalFlip()])
    sizes = np.tile([[60, 60]], (500, 1))
    first, second = (chain.draw(KEY, np.arange(500), sizes, view=view) for view in (0, 1))
    np.testing.assert_array_equal(first.records[0].box_tlhw, second.records[0].box_tlhw)
    assert 180 < (first.records[1].flipped != second.records[1].flipped).sum() < 320
    assert chain.lines[0].lanes == (0, 1, 2)
    assert chain.lines[1].lanes == (0, 3, 4)


def test_the_region_is_what_any_view_needs_and_no_more():
    chain = T.Chain([T.MultiView([[T.RandomCrop(10)], [T.RandomCrop((6, 20))]])])
    sizes = np.random.default_rng(0).integers(30, 90, (50, 2))
    regions = chain.regions(KEY, np.arange(50), sizes)
    boxes = [chain.draw(KEY, np.arange(50), sizes, view=view).records[0].box_tlhw for view in (0, 1)]
    for row, (top, left, height, width) in enumerate(regions.tolist()):
        assert top == min(box[row, 0] for box in boxes)
        assert left == min(box[row, 1] for box in boxes)
        assert top + height == max(box[row, 0] + box[row, 2] for box in boxes)
        assert left + width == max(box[row, 1] + box[row, 3] for box in boxes)


@pytest.mark.processes
def test_equal_bits_with_any_workers_and_one_sample_made_again():
    transforms = [T.MultiView([GLOBAL, *[LOCAL] * 2]), NORMALIZE]
    at_home, by_two = load(transforms, num_workers=0), load(transforms, num_workers=2)
    for (ours, _), (theirs, _) in zip(at_home, by_two, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    loader = gl.Loader(Pictures(), 8, transforms=transforms, device="cpu", seed=4, num_workers=0)
    again = loader.replay(0, 11)
    assert all(torch.equal(a, b[3]) for a, b in zip(again.sample[0], at_home[1][0], strict=True))


def test_a_file_is_read_once_whatever_the_views(tmp_path):
    from PIL import Image

    (tmp_path / "a").mkdir()
    for i in range(4):
        Image.fromarray(Pictures()[i][0].hwc).save(tmp_path / "a" / f"{i}.png")
    reads = []

    class Counted(gl.ImageFolder):
        def __getitem__(self, i):
            reads.append(i)
            return super().__getitem__(i)

    with gl.Loader(Counted(tmp_path), 4, transforms=[T.MultiView([LOCAL] * 4)], device="cpu", num_workers=0) as loader:
        ((views, _),) = loader
    assert len(views) == 4
    assert reads == [0, 1, 2, 3]


def test_a_collate_fn_gets_each_sample_with_its_list_of_views():
    def collate(samples):
        assert all(isinstance(image, list) and len(image) == 2 for image, _ in samples)
        return torch.stack([image[1] for image, _ in samples]), [number for _, number in samples]

    transforms = [T.MultiView([GLOBAL, LOCAL])]
    plain, own = load(transforms, num_workers=0), load(transforms, num_workers=0, collate_fn=collate)
    assert all(torch.equal(a[0][1], b[0]) for a, b in zip(plain, own, strict=True))


def test_ragged_views_come_as_lists():
    (views, _), *_ = load([T.MultiView([[T.Identity()], LOCAL])], num_workers=0, ragged="list")
    assert [tuple(image.shape[1:]) for image in views[0]] == [Pictures()[i][0].hwc.shape[:2] for i in range(8)]


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda: T.MultiView(T.Identity()),
            TypeError,
            "MultiView(chains=…) must be a list with one entry per view",
        ),
        (lambda: T.MultiView([[len]]), TypeError, "MultiView(chains=…)[0](transforms=…)[0] is not a gpuload transform"),
        (
            lambda: T.Chain([T.MultiView([LOCAL]), T.MultiView([LOCAL])]),
            ValueError,
            "there are two MultiViews (numbers 1 and 2); put all views into one",
        ),
        (
            lambda: T.Chain([T.MultiView([LOCAL, [NORMALIZE]]), NORMALIZE]),
            ValueError,
            "Normalize (number 2) cannot come after Normalize (number 1)",
        ),
    ],
)
def test_refused_by_multi_view(make, error, text):
    with pytest.raises(error, match=re.escape(text)):
        make()


def test_a_compose_in_a_view_is_the_list_that_it_holds():
    inner = T.Compose([T.Resize((4, 4))])
    assert T.MultiView([[inner], [T.Resize(8)]]) == T.MultiView([[T.Resize((4, 4))], [T.Resize(8)]])
    with pytest.raises(ValueError, match="MultiView cannot hold UniformTemporalSubsample: frames are selected once"):
        T.MultiView([[T.Compose([T.UniformTemporalSubsample(2)]), T.Resize((4, 4))]])
