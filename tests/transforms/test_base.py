"""Sizes by epoch: what they are, and that each batch has those of its own epoch, wherever it is made."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
import torch
from PIL import Image

import gpuload as gl
from gpuload import transforms as T

SIZES = {0: 16, 2: 24, 5: (32, 20)}


def test_each_epoch_has_the_last_size_that_began():
    sizes = T.by_epoch({5: (32, 20), 0: 16, 2: 24})
    assert [sizes.at_epoch(epoch) for epoch in (0, 1, 2, 4, 5, 99)] == [16, 16, 24, 24, (32, 20), (32, 20)]
    assert T.by_epoch(lambda epoch: 10 + epoch).at_epoch(7) == 17


@pytest.mark.parametrize("kind", [T.Resize, T.RandomResizedCrop, T.CenterCrop, T.RandomCrop, T.Mosaic])
@pytest.mark.parametrize("given", [SIZES, lambda epoch: SIZES[max(n for n in SIZES if n <= epoch)]])
def test_a_chain_of_an_epoch_is_that_with_its_size(kind, given):
    chain = T.Chain([T.RandomHorizontalFlip(), kind(T.by_epoch(given))])
    for epoch, size in ((0, 16), (3, 24), (7, (32, 20))):
        assert chain.at(epoch) == T.Chain([T.RandomHorizontalFlip(), kind(size)])
    assert chain.output_size_hw is None
    plain = T.Chain([kind(16)])
    assert plain.at(3) is plain


def test_a_chain_of_an_epoch_keeps_what_is_called_with_the_finished_batch():
    chain = T.Chain([T.Resize(T.by_epoch(SIZES)), T.Lambda(torch.neg)])
    assert chain.at(2) == T.Chain([T.Resize(24), T.Lambda(torch.neg)])
    assert chain.at(2).module is torch.neg


def test_transforms_that_others_hold_change_too():
    size, crop = T.by_epoch({0: 8, 1: 9}), T.RandomCrop(7)
    chain = T.Chain([T.MultiView([[T.CenterCrop(size)], [crop, T.RandomApply([T.Resize(size, max_size=40)])]])])
    expected = [[T.CenterCrop(9)], [crop, T.RandomApply([T.Resize(9, max_size=40)])]]
    assert chain.at(1) == T.Chain([T.MultiView(expected)])


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda: T.by_epoch(224),
            TypeError,
            "by_epoch() takes a dict of sizes keyed by their first epoch, such as {0: 128",
        ),
        (lambda: T.by_epoch({}), ValueError, "by_epoch() needs a size for epoch 0, got {}; write {0: …, …}"),
        (lambda: T.by_epoch({3: 5}), ValueError, "by_epoch() needs a size for epoch 0, got {3: 5}"),
        (lambda: T.by_epoch({0: 5, -1: 5}), ValueError, "by_epoch({epoch: size}) must be at least 0, got -1"),
        (lambda: T.CenterCrop(T.by_epoch({0: 5, 2: 0})), ValueError, "CenterCrop(size=…) must be at least 1, got 0"),
        (
            lambda: T.Resize(T.by_epoch({0: 5, 2: 9}), max_size=8),
            ValueError,
            "Resize(max_size=8) must be greater than size=9",
        ),
        (
            lambda: T.Chain([T.RandomResizedCrop(T.by_epoch(lambda epoch: 8 - epoch))]).at(8),
            ValueError,
            "the size from by_epoch() for epoch 8 is invalid: RandomResizedCrop(size=…) must be at least 1, got 0",
        ),
    ],
)
def test_what_cannot_be(make, error, text):
    with pytest.raises(error, match=re.escape(text)):
        make()


def test_states_know_the_sizes():
    def digits(sizes):
        return T.Chain([T.Resize(T.by_epoch(sizes))]).fingerprint()

    assert digits({0: 8}) == digits({0: 8}) != digits({0: 9})
    assert digits(len) == digits(len) != digits(abs)
    assert repr(T.CenterCrop(T.by_epoch({0: 8, 3: (9, 7)}))) == "CenterCrop(size=by_epoch({0: (8, 8), 3: (9, 7)}))"


# -- through loaders --------------------------------------------------------------------------------------------------


def jpeg(number: int) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 256, (60, 70, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(file, "JPEG")
    return file.getvalue()


FILES = [jpeg(number) for number in range(10)]


class Files:
    def __len__(self) -> int:
        return len(FILES)

    def __getitem__(self, index: int):
        return gl.Encoded(FILES[index]), index


def loader(size, workers=0, **options) -> gl.Loader:
    chain = [T.RandomCrop(40), T.RandomResizedCrop(size), T.RandomHorizontalFlip(), T.ToDtype("float32", scale=True)]
    return gl.Loader(Files(), 4, shuffle=True, transforms=chain, num_workers=workers, device="cpu", **options)


def epochs(made: gl.Loader, count: int) -> list[list[torch.Tensor]]:
    with made:
        return [[images for images, _ in made] for _ in range(count)]


@pytest.mark.parametrize(
    "workers", [0, pytest.param(1, marks=pytest.mark.processes), pytest.param(2, marks=pytest.mark.processes)]
)
def test_batches_have_the_size_of_their_epoch(workers):
    """Workers too draw from the size: it decides which part of a file is decoded."""
    sizes = {0: 16, 1: (24, 20), 3: 12}
    found = epochs(loader(T.by_epoch(sizes), workers, prefetch_factor=4), 4)
    for epoch, size in enumerate((16, (24, 20), (24, 20), 12)):
        plain = loader(size)
        plain.set_epoch(epoch)
        [expected] = epochs(plain, 1)
        assert all(map(torch.equal, found[epoch], expected))
        assert len(found[epoch]) == len(expected) == 3


def test_an_epoch_goes_on_with_its_size():
    sizes = T.by_epoch(lambda epoch: 12 + 4 * epoch)
    whole = epochs(loader(sizes), 3)
    with loader(sizes) as made:
        made.set_epoch(2)
        next(iter(made))
        state = made.state_dict()
    again = loader(sizes)
    again.load_state_dict(state)
    [rest] = epochs(again, 1)
    assert [tuple(images.shape[2:]) for images in rest] == [(20, 20)] * 2
    assert all(map(torch.equal, rest, whole[2][1:]))
    with pytest.raises(ValueError, match="saved by a different loader: transforms was"):
        loader(T.by_epoch({0: 20})).load_state_dict(state)


def test_a_sample_is_made_again_in_its_size():
    with loader(T.by_epoch({0: 16, 1: 22})) as made:
        assert made.replay(1, 3).sample[0].shape == (3, 22, 22)


def test_a_size_that_cannot_be_is_an_error_when_its_epoch_begins():
    with loader(T.by_epoch(lambda epoch: 8 if epoch == 0 else 0)) as made:
        assert len(list(made)) == 3
        with pytest.raises(ValueError, match=r"by_epoch\(\) for epoch 1 .*must be at least 1, got 0"):
            iter(made)
