"""Several views of one image: draws, regions, batches, and the real loader."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

import gpuload as gl
from gpuload import transforms as T
from gpuload.rng.philox import epoch_key
from gpuload.stage import RaggedImages, compile_stage

KEY = epoch_key(3, 1)
NORMALIZE = T.Normalize((0.5,) * 3, (0.25,) * 3)
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
            "MultiView(chains=…) must be a list with the transforms",
        ),
        (
            lambda: T.MultiView([]),
            TypeError,
            "MultiView(chains=…) must be a list with the transforms",
        ),
        (lambda: T.MultiView([[len]]), TypeError, "MultiView(chains=…)[0](transforms=…)[0] is no transform"),
        (
            lambda: T.Chain([T.MultiView([LOCAL]), T.MultiView([LOCAL])]),
            ValueError,
            "there are two MultiViews (numbers 1 and 2); write all views in one",
        ),
        (
            lambda: T.Chain([T.MultiView([LOCAL, [NORMALIZE]]), NORMALIZE]),
            ValueError,
            "Normalize (number 2) cannot come after Normalize (number 1)",
        ),
    ],
)
def test_refused(make, error, text):
    with pytest.raises(error, match=re.escape(text)):
        make()
