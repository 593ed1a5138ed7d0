"""MixUp and CutMix through loaders: rows do not depend on ranks, workers or a resume."""

from __future__ import annotations

import re
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from helpers.labelled_images import CLASSES, Pictures
from torch.utils.data import IterableDataset

import gpuload as gl
from gpuload import transforms as T
from gpuload.errors import CollateError, SampleError
from gpuload.rng.philox import epoch_key

NORMALIZE = T.Normalize((0.5,) * 3, (0.25,) * 3)
UNMIXED = [T.RandomCrop(12), NORMALIZE, T.RandomErasing(0.5, value="random")]
MIXING = T.RandomChoice([T.MixUp(num_classes=CLASSES), T.CutMix(num_classes=CLASSES), T.Identity()], p=[3, 3, 1])


class Stream(IterableDataset):
    def __init__(self, samples: int) -> None:
        self.pictures = Pictures(samples)

    def __iter__(self):
        return map(self.pictures.__getitem__, range(len(self.pictures)))


def make_loader(dataset=None, batch_size: int | None = 4, transforms=None, **options) -> gl.Loader:
    options = {"num_workers": 0, "device": "cpu", "info": True, **options}
    transforms = [*UNMIXED, MIXING] if transforms is None else transforms
    return gl.Loader(Pictures(22) if dataset is None else dataset, batch_size, transforms=transforms, **options)


def rows_by_position(batches) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Return the image and the label at each position, from the first batch that has it."""
    rows = {}
    for (images, labels), info in batches:
        assert len(images) == len(labels)
        for row, position in enumerate(info.positions.tolist()):
            rows.setdefault(position, (images[row], labels[row]))
    return rows


def assert_same_rows(rows: dict, expected: dict) -> None:
    assert rows.keys() == expected.keys()
    for position in rows:
        for ours, theirs in zip(rows[position], expected[position], strict=True):
            assert torch.equal(ours, theirs), position


def expected_rows(dataset) -> dict:
    """Mix the images and labels of unmixed batches by the formulas of MixUp and CutMix, and return them by position."""
    unmixed_rows = rows_by_position(make_loader(dataset, 2, [*UNMIXED, T.Identity()], shuffle=True))
    positions, results = np.array(sorted(unmixed_rows)), {}
    sizes_hw = np.tile([[16, 20]], (len(positions), 1))  # the size of Pictures
    mix = T.Chain([*UNMIXED, MIXING]).draw(epoch_key(0, 0), positions, sizes_hw).mix
    for row, position in enumerate(positions.tolist()):
        image, label = unmixed_rows[position]
        partner_image, partner_label = unmixed_rows.get(position ^ 1, unmixed_rows[position])
        label, partner_label = (
            torch.eye(CLASSES, dtype=torch.float64)[int(label_index)] for label_index in (label, partner_label)
        )
        share = mix.share[row] if position ^ 1 in unmixed_rows else 1.0
        top, left, height, width = mix.box_tlhw[row].tolist()
        mixed = image.double() if height else share * image.double() + (1 - share) * partner_image.double()
        box = np.s_[:, top : top + height, left : left + width]
        mixed[box] = partner_image[box].double()
        results[position] = mixed, share * label + (1 - share) * partner_label
    return results


@pytest.mark.parametrize("samples", [22, 21, 1])
def test_mixing_blends_each_image_and_label_with_its_neighbor(samples):
    dataset = Pictures(samples)
    rows, expected = rows_by_position(make_loader(dataset, shuffle=True)), expected_rows(dataset)
    assert rows.keys() == expected.keys() == set(range(samples))
    for position, (expected_image, expected_label) in expected.items():
        image, label = rows[position]
        torch.testing.assert_close(image.double(), expected_image, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(label.double(), expected_label, rtol=1e-6, atol=1e-6)
        assert label.dtype == torch.float32
    soft_labels = torch.stack([label for _, label in rows.values()])
    torch.testing.assert_close(soft_labels.sum(dim=1), torch.ones(samples))
    if samples % 2:  # the last row has no neighbor
        assert sorted(soft_labels[-1].tolist()) == [0.0] * (CLASSES - 1) + [1.0]
    else:
        assert ((soft_labels > 0) & (soft_labels < 1)).any()


@pytest.mark.usefixtures("warm")
@pytest.mark.processes
@pytest.mark.parametrize("samples", [24, 22, 21])
@pytest.mark.parametrize("uneven", ["pad", "exact"])
def test_mixing_gives_the_same_rows_on_any_number_of_ranks_and_workers(samples, uneven):
    options = {"dataset": Pictures(samples), "shuffle": True}
    expected = rows_by_position(make_loader(batch_size=8, **options))
    for ranks, workers in ((1, 2), (2, 0), (4, 0), (2, 1)):
        if workers and samples != 21:
            continue  # workers start slowly, so they run with only one length, an odd one
        rows, batch_lengths = {}, set()
        for rank in range(ranks):
            rank_options = {"rank": rank, "world_size": ranks, "uneven": uneven, "num_workers": workers}
            with make_loader(batch_size=8 // ranks, **options, **rank_options) as rank_loader:
                batches = list(rank_loader)
            batch_lengths.add(tuple(len(info.positions) for _, info in batches))
            rows = rows_by_position(batches) | rows
        [lengths] = batch_lengths  # ranks stay in step
        assert ranks == 1 or not any(np.array(lengths) % 2), f"a pair is split between ranks: {lengths}"
        assert_same_rows(rows, expected)


def rows_of_ranks(loader_factory, batch_size: int, ranks: int, state=None, **options) -> dict:
    """Load the rows of all ranks, from a saved state if given. The ranks share the batch size."""
    rows = {}
    for rank in range(ranks):
        rank_loader = loader_factory(batch_size=batch_size // ranks, rank=rank, world_size=ranks, **options)
        if state is not None:
            rank_loader.load_state_dict(state)
        rows |= rows_by_position(rank_loader)
    return rows


def test_mixing_with_uneven_drop_keeps_complete_pairs_on_each_rank():
    options = {"dataset": Pictures(23), "shuffle": True}
    expected = rows_by_position(make_loader(**options))
    rows = rows_of_ranks(make_loader, batch_size=8, ranks=2, uneven="drop", **options)
    # Of 23 samples, 3 do not fill a pair on each rank.
    assert_same_rows(rows, {position: expected[position] for position in range(20)})


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("repeats", [False, True])
def test_mixing_after_a_resume_gives_the_same_rows(ranks, repeats):
    loader_factory = make_repeating_loader if repeats else partial(make_loader, shuffle=True)
    loader = loader_factory(batch_size=12)
    loader.set_epoch(3)
    expected = rows_by_position(loader)
    loader.set_epoch(3)
    batches = iter(loader)
    rows = rows_by_position([next(batches)])
    rows = rows_of_ranks(loader_factory, 12, ranks, loader.state_dict()) | rows
    assert_same_rows(rows, expected)


class PicturesLabeledByIndex(Pictures):
    """Pictures whose label is their index, so that soft labels show which two samples were mixed."""

    def __getitem__(self, index):
        return super().__getitem__(index)[0], index


def make_repeating_loader(batch_size: int, samples: int = 36, **options) -> gl.Loader:
    mixing = {"transforms": [*UNMIXED, T.MixUp(num_classes=samples)], "repeats": 3, "shuffle": True}
    return make_loader(PicturesLabeledByIndex(samples), batch_size, **{**mixing, **options})


@pytest.mark.parametrize(("batch_size", "ranks"), [(12, 1), (6, 2), (4, 3), (8, 1), (2, 3), (6, 1), (2, 6)])
def test_mixing_with_repeats_never_pairs_a_sample_with_itself(batch_size, ranks):
    for rank in range(ranks):
        for (_, labels), info in make_repeating_loader(batch_size, world_size=ranks, rank=rank, drop_last=True):
            indices = info.indices.tolist()
            for row, (index, label) in enumerate(zip(indices, labels, strict=True)):
                partner = indices[(row + batch_size // 2) % batch_size]  # half a batch away
                assert partner != index
                assert set(label.nonzero().ravel().tolist()) == {index, partner}


def test_mixing_with_repeats_leaves_a_sample_unmixed_if_its_partner_would_be_itself():
    """A batch has fewer than twice as many rows as a sample has repeats."""
    unmixed_rows = rows_by_position(make_repeating_loader(2, transforms=[*UNMIXED, T.Identity()]))
    # Positions 0 … 2 are the repeats of one sample, 3 … 5 those of the next.
    for batch_size, unmixed_positions in ((2, [0, 1, 4, 5, 6, 7, 10, 11]), (4, [0, 2, 9, 11])):
        rows = rows_by_position(make_repeating_loader(batch_size))
        assert [n for n in range(12) if torch.equal(rows[n][0], unmixed_rows[n][0])] == unmixed_positions
        assert [n for n in range(12) if rows[n][1].max() == 1] == unmixed_positions


@pytest.mark.parametrize(
    ("batch_size", "ranks", "uneven"), [(8, 1, "pad"), (4, 3, "pad"), (4, 2, "drop"), (2, 1, "pad")]
)
def test_replay_of_a_mixed_repeat_gives_the_same_image(batch_size, ranks, uneven):
    """The last batch of an epoch is shorter, and may have an odd number of rows."""
    samples = 37
    for rank in range(ranks):
        loader = make_repeating_loader(batch_size, world_size=ranks, rank=rank, samples=samples, uneven=uneven)
        for position, (image, _) in rows_by_position(loader).items():
            if position % ranks == rank:  # other rows only pad the last batch
                assert torch.equal(loader.replay(0, position).sample[0], image), position


def test_mixing_leaves_a_sample_unmixed_if_its_neighbor_was_skipped():
    dataset = Pictures(22, bad=[5])
    transforms = [*UNMIXED, T.MixUp(num_classes=CLASSES)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        rows = rows_by_position(make_loader(dataset, transforms=transforms, on_error="skip"))
    expected = rows_by_position(make_loader(Pictures(22), transforms=transforms))
    assert 5 not in rows
    _, label = rows.pop(4)  # the neighbor of sample 5
    assert sorted(label.tolist()) == [0.0] * (CLASSES - 1) + [1.0]
    assert_same_rows(rows, {position: row for position, row in expected.items() if position not in (4, 5)})


def test_mixing_with_a_sampler_or_stream_pairs_the_rows_of_a_batch():
    transforms = [T.CenterCrop(12), NORMALIZE, T.MixUp(num_classes=CLASSES)]
    order = [3, 8, 15, 2, 11, 6, 9]
    index_lists = [[3, 8], [15], [2, 11, 6, 9]]
    for options, pairs in (
        ({"sampler": order}, {0: 1, 1: 0, 2: 3, 3: 2, 4: 5, 5: 4, 6: 6}),
        ({"sampler": order, "rank": 1, "world_size": 2}, {0: 1, 1: 0, 2: 3, 3: 2, 4: 5, 5: 4, 6: 6}),
        ({"batch_sampler": index_lists, "batch_size": 1}, {0: 1, 1: 0, 2: 2, 3: 4, 4: 3, 5: 6, 6: 5}),
        ({"dataset": Stream(7)}, {0: 1, 1: 0, 2: 3, 3: 2, 4: 5, 5: 4, 6: 6}),
    ):
        indices = range(7) if "dataset" in options else order
        labels = torch.cat([labels for (_, labels), _ in make_loader(transforms=transforms, **options)])
        for row, partner in pairs.items():
            classes = {indices[row] % CLASSES, indices[partner] % CLASSES}
            assert set(labels[row].nonzero().ravel().tolist()) == classes, (options, row)


def collate_to_dict(samples, dropped_labels: int = 0):
    images, labels = zip(*samples, strict=True)
    return {"pixels": torch.stack(images), "Labels": torch.tensor(labels[dropped_labels:])}


def test_mixing_with_a_collate_fn_mixes_the_labels_it_returns():
    expected = rows_by_position(make_loader(shuffle=True))
    batches = make_loader(shuffle=True, collate_fn=collate_to_dict)
    assert_same_rows(rows_by_position(((batch["pixels"], batch["Labels"]), info) for batch, info in batches), expected)
    text = "MixUp mixed 4 images, but the batch has 3 labels; make the collate_fn keep one label per image"
    with pytest.raises(CollateError, match=re.escape(text)):
        next(iter(make_loader(collate_fn=partial(collate_to_dict, dropped_labels=1))))


@pytest.mark.parametrize("on_error", [None, "skip", "replace"])
def test_replay_of_a_mixed_sample_gives_the_same_image(on_error):
    neighbor_fails = on_error is not None
    dataset = Pictures(21, bad=[5] if neighbor_fails else [])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        loader = make_loader(dataset, shuffle=not neighbor_fails, on_error=on_error or "raise")
        rows = rows_by_position(loader)
    for position in (0, 3, 4, 20):
        replayed = loader.replay(0, position)
        assert torch.equal(replayed.sample[0], rows[position][0])
        assert replayed.position == position
        assert torch.equal(loader.replay(0, position, replayed.index).sample[0], rows[position][0])


EVEN_BATCH_SIZE = "batch_size must be even with MixUp"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch_size": 5}, f"{EVEN_BATCH_SIZE}, which mixes the samples of a batch in pairs, got 5; use batch_size=6"),
        ({"batch_size": 1}, f"{EVEN_BATCH_SIZE}, which mixes the samples of a batch in pairs, got 1; use "),
        ({"batch_size": None}, "batch_size=None yields samples one by one, so MixUp has no neighbours to mix; pass "),
        ({"batch_size": 3, "sampler": [1, 2]}, EVEN_BATCH_SIZE),
        ({"dataset": Stream(4), "batch_size": 3}, EVEN_BATCH_SIZE),
        ({"ragged": "list"}, "ragged='list' cannot be combined with MixUp, which mixes images of one size; put a "),
        ({"ragged": "pad"}, "ragged='pad' cannot be combined with MixUp"),
    ],
)
def test_loader_that_cannot_mix_its_batches_raises(options, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        make_loader(**options)


class MaskedPictures(Pictures):
    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image, gl.Mask(image[:, :, 0]), label


@pytest.mark.parametrize("options", [{}, {"collate_fn": list}])
def test_mixing_of_masks_or_different_sizes_in_a_batch_raises(options):
    text = "MixUp mixes images, but masks, boxes and keypoints cannot be mixed; remove MixUp"
    with pytest.raises(SampleError, match=re.escape(text)):
        next(iter(make_loader(MaskedPictures(4), transforms=[T.CenterCrop(8), NORMALIZE, T.MixUp()], **options)))
    samples = [(np.zeros((8, 8 + 2 * i, 3), np.uint8), i) for i in range(4)]
    with pytest.raises(ValueError, match="the images of a batch have different sizes"):
        next(iter(make_loader(samples, transforms=[NORMALIZE, T.MixUp(num_classes=4)], **options)))


def test_images_of_different_sizes_in_a_sample_are_mixed_by_mixup_and_refused_by_cutmix():
    samples = [(gl.Image(np.zeros((8, 8, 3), np.uint8)), gl.Image(np.zeros((9, 30, 3), np.uint8)), i) for i in range(4)]
    text = "the images of sample 0 have different sizes, so CutMix would mix them in different proportions"
    with pytest.raises(CollateError, match=re.escape(text)):
        next(iter(make_loader(samples, transforms=[NORMALIZE, T.CutMix(num_classes=4)])))
    mixup = T.MixUp(labels_getter=lambda batch: batch[2], num_classes=4)
    (images, _, labels), _ = next(iter(make_loader(samples, transforms=[NORMALIZE, mixup])))
    assert images.shape == (4, 3, 8, 8)
    assert labels.shape == (4, 4)
