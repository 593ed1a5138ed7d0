"""`Mix`: its weights, its errors, and its batches with workers, ranks, faults and states."""

from __future__ import annotations

import json
import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from helpers.both_loaders import alike
from helpers.map_datasets import MapDataset
from helpers.matrix import matrix
from helpers.patterns import exactly
from helpers.picture_folders import folder

import gpuload as gl
from gpuload import transforms as T
from gpuload.datasets.mix import MAX_WEIGHT_SUM
from gpuload.order.mixture import BLOCK


class Numbered:
    """`count` images of 4×4 with one level each, whose labels count up from `first_label`."""

    def __init__(self, count: int, first_label: int = 0, bad_indices: tuple[int, ...] = ()) -> None:
        self.count, self.first_label, self.bad_indices = count, first_label, bad_indices

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index):
        if index in self.bad_indices:
            raise ValueError(f"{index} is bad")
        return gl.Image(np.full((4, 4, 3), index % 256, np.uint8)), self.first_label + index


def make_mix(**options) -> gl.Mix:
    return gl.Mix([Numbered(300), Numbered(50, 1000)], weights=[0.7, 0.3], **options)


def make_loader(mix: object, batch_size: int = 32, **options) -> gl.Loader:
    options = {"shuffle": True, "num_workers": 0, "device": "cpu", **options}
    return gl.Loader(mix, batch_size, transforms=[T.RandomCrop(2)], **options)


def labels_of(batches) -> list[int]:
    return [label for batch in batches for label in batch[1].tolist()]


def indices_by_dataset(labels: list[int]) -> tuple[list[int], list[int]]:
    """Return the indices of the samples of each dataset of `make_mix`."""
    return [label for label in labels if label < 1000], [label - 1000 for label in labels if label >= 1000]


def test_mix_has_the_samples_of_its_datasets_in_order():
    mix = make_mix(length=500)
    assert (len(mix), mix.length, mix.sizes, mix.parts) == (350, 500, (300, 50), (7, 3))
    assert [mix[index][1] for index in (0, 299, 300, -1)] == [0, 299, 1000, 1049]
    assert [sample[1] for sample in mix.__getitems__([349, 0])] == [1049, 0]
    assert make_mix().length == 350


@pytest.mark.parametrize(
    ("weights", "parts"),
    [
        ([0.7, 0.3], (7, 3)),
        ([7, 3], (7, 3)),
        ([1 / 3, 2 / 3], (1, 2)),
        ([0.1 + 0.2, 0.7], (3, 7)),
        ([1_281_167, 50_000], (1_281_167, 50_000)),
        (np.array([2.0, 2.0]), (1, 1)),
    ],
)
def test_mix_weights_become_integers_in_the_same_proportions(weights, parts):
    assert gl.Mix([[1], [2]], weights=weights).parts == parts


@pytest.mark.parametrize("weights", [[np.pi, np.e], [1, 1e-12], [1e300, 1e280], [2.0**40, 2.0**40 - 1]])
def test_mix_weights_without_small_integers_become_nearly_proportional(weights):
    parts = gl.Mix([[1], [2]], weights=weights).parts
    assert min(parts) >= 1
    assert sum(parts) <= MAX_WEIGHT_SUM + 1
    assert abs(Fraction(parts[0], sum(parts)) - Fraction(weights[0]) / sum(map(Fraction, weights))) < 1e-9


STRUCTURE_ERROR = "datasets whose samples have the same structure, but datasets[0] (list) yields"


@pytest.mark.parametrize(
    ("datasets", "weights", "error", "text"),
    [
        ("ab", [1], TypeError, "() takes a list of datasets, got str"),
        ([], [], ValueError, "() takes at least one dataset, got an empty list"),
        (
            [[1], iter([])],
            [1, 1],
            TypeError,
            "() takes map-style datasets, but datasets[1] is of type list_iterator, which is iterable and defines its "
            "own order; mix inside its __iter__",
        ),
        (
            [3],
            [1],
            TypeError,
            "() takes map-style datasets, which have __len__ and __getitem__, but datasets[0] is of type int",
        ),
        (
            [[1], []],
            [1, 1],
            ValueError,
            "() takes datasets with samples, but datasets[1], of type list, has length 0; remove it",
        ),
        ([[1], [2]], [1], ValueError, "(weights=…) must be one number for each of the 2 datasets, got 1"),
        ([[1]], ["a"], TypeError, "(weights=…) must be a number, got 'a' (str)"),
        (
            [[(1, 2)], [{"a": 1}]],
            [1, 1],
            TypeError,
            f"() takes {STRUCTURE_ERROR} (int, int), and datasets[1] (list) yields {{'a': int}}; convert them with "
            ".map(fn)",
        ),
        (
            [[(gl.Encoded(b"a"), 2)], [(gl.Encoded(b"a"), gl.Boxes([]))]],
            [1, 1],
            TypeError,
            f"() takes {STRUCTURE_ERROR} (Encoded, int), and datasets[1] (list) yields (Encoded, Boxes); convert them "
            "with .map(fn)",
        ),
    ],
)
def test_mix_refuses_invalid_datasets_and_weights(datasets, weights, error, text):
    with pytest.raises(error, match=exactly(f"Mix{text}")):
        gl.Mix(datasets, weights)


def test_mix_ignores_a_first_sample_that_cannot_be_read(tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"")
    files = gl.ImageFiles(tmp_path)
    (tmp_path / "a.jpg").unlink()
    assert gl.Mix([files, [(1, 2)]], [1, 1]).length == 2


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((gl.Encoded(b"a"), 1), (gl.Image(np.zeros((2, 2), np.uint8)), 2.5)),
        ((1, [1, 2]), (1, [1, 2, 3])),
        (({"b": 1, "a": "x"},), ({"a": "y", "b": 2},)),
        ((np.zeros(3), None), (np.zeros(4), 1)),
    ],
)
def test_mix_takes_samples_that_batch_together(first, second):
    assert gl.Mix([[first], [second]], [1, 1]).length == 2


def test_mix_does_not_read_samples_of_a_users_dataset():
    indices = []
    gl.Mix([MapDataset(indices.append, 4), [1, 2]], [1, 1])
    assert indices == []


ORDER_ERROR = (
    " cannot be combined with a Mix, whose weights determine how often each dataset is used, and which reads each "
    "dataset in its own order; leave it out, or read the datasets without Mix"
)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"sampler": [1, 2], "shuffle": False}, "sampler"),
        ({"batch_sampler": [[1, 2]], "batch_size": 1, "shuffle": False}, "batch_sampler"),
        ({"weights": [1] * 350, "shuffle": False}, "weights"),
        ({"uneven": "exact", "info": True}, "uneven='exact'"),
    ],
)
def test_loader_of_a_mix_refuses_options_that_determine_the_order(options, name):
    with pytest.raises(ValueError, match=f"^{re.escape(name + ORDER_ERROR)}$"):
        make_loader(make_mix(), **options)


@pytest.mark.parametrize(
    ("wrap", "name"),
    [
        (lambda mix: torch.utils.data.Subset(mix, [1, 2]), "Subset"),
        (lambda mix: gl.Cached(mix, 1 << 20), "Cached"),
        (lambda mix: mix + [1], "Joined"),  # noqa: RUF005
        (lambda mix: gl.Mix([mix, mix], [1, 2]), "Mix"),
    ],
)
def test_loader_refuses_a_mix_inside_another_dataset(wrap, name):
    remedy = (
        "replace the inner Mix by its datasets, each with its share of the inner Mix's weight"
        if name == "Mix"
        else f"put Mix([…]) outermost, with {name} around its datasets"
    )
    text = f"there is a Mix inside {name}, where its weights would have no effect; {remedy}"
    with pytest.raises(ValueError, match=exactly(text)):
        make_loader(wrap(make_mix()))


def test_mix_epoch_has_its_length_and_the_shares_in_each_block():
    loader = make_loader(make_mix(length=10 * BLOCK), 64)
    assert len(loader) == 10 * BLOCK // 64
    labels = np.array(labels_of(loader))
    assert (labels >= 1000).sum() == 0.3 * 10 * BLOCK
    for begin in range(0, len(labels), BLOCK):
        assert abs((labels[begin : begin + BLOCK] >= 1000).sum() - 0.3 * BLOCK) <= 1


def test_mix_datasets_continue_in_the_next_epoch():
    loader = make_loader(make_mix(length=256))
    epoch_labels = [label for _ in range(6) for label in labels_of(loader)]
    for labels, size in zip(indices_by_dataset(epoch_labels), (300, 50), strict=True):
        assert len(labels) > size
        for begin in range(0, len(labels), size):
            pass_labels = labels[begin : begin + size]
            assert len(set(pass_labels)) == len(pass_labels)


def test_mix_without_shuffle_reads_each_dataset_in_order():
    epoch_labels = labels_of(make_loader(make_mix(length=BLOCK), shuffle=False))
    for labels, size in zip(indices_by_dataset(epoch_labels), (300, 50), strict=True):
        assert labels == [number % size for number in range(len(labels))]


@matrix(num_workers=[0, 2], stop=[0, 3, 11, 14], shuffle=[True, False, gl.BlockShuffle(block=8, window=4)])
def test_mix_state_resumes_in_another_loader(num_workers, stop, shuffle):
    undisturbed_loader, first_loader, second_loader = (
        make_loader(make_mix(), shuffle=shuffle, num_workers=workers) for workers in (0, num_workers, 2 - num_workers)
    )
    with first_loader, second_loader:
        expected = [*undisturbed_loader, *undisturbed_loader]
        assert len(expected) == 2 * 11  # epochs × batches
        batches = []
        while len(batches) < stop:
            for batch in first_loader:
                batches.append(batch)
                if len(batches) == stop:
                    break
        second_loader.load_state_dict(json.loads(json.dumps(first_loader.state_dict())))
        while len(batches) < len(expected):
            batches += list(second_loader)
    assert alike(batches, expected)


def test_mix_ranks_divide_the_batches_of_one_process():
    batches_of_ranks = [list(make_loader(make_mix(length=320), 16, rank=rank, world_size=2)) for rank in range(2)]
    joined = [[*map(torch.cat, zip(*batches, strict=True))] for batches in zip(*batches_of_ranks, strict=True)]
    assert alike(joined, list(make_loader(make_mix(length=320), 32)))


@pytest.mark.filterwarnings("ignore:sample .* is bad:RuntimeWarning")
def test_mix_replaces_a_bad_sample_by_a_sample_of_the_same_dataset():
    mix = gl.Mix([Numbered(200), Numbered(40, 1000, bad_indices=tuple(range(5)))], [1, 1], length=512)
    faults = gl.Faults(on_error="replace", max_error_rate=1)
    with make_loader(mix, faults=faults) as loader, make_loader(mix, faults=faults, num_workers=2) as parallel_loader:
        labels = labels_of(loader)
        assert labels == labels_of(parallel_loader)
        replaced = [(error.index, error.replaced_by) for error in loader.errors]
    assert len(replaced) > 10
    assert {index for index, _ in replaced} <= {*range(200, 205)}
    assert {substitute for _, substitute in replaced} <= {*range(200, 240)}
    assert not {*range(1000, 1005)} & {*labels}
    without_faults = labels_of(make_loader(gl.Mix([Numbered(200), Numbered(40, 1000)], [1, 1], length=512)))
    assert [label < 1000 for label in sorted(labels)] == [label < 1000 for label in sorted(without_faults)]


def test_mix_replay_returns_the_sample_at_a_position():
    loader = make_loader(make_mix(length=700), info=True)
    *_, ((images, numbers), info) = loader
    replayed = loader.replay(int(info.epoch), int(info.positions[3]))
    assert (replayed.index, replayed.sample[1]) == (int(info.indices[3]), int(numbers[3]))
    assert torch.equal(replayed.sample[0], images[3])
    with pytest.raises(ValueError, match="position must be at least 0 and at most 699, got 700"):
        loader.replay(0, 700)


def test_mix_with_block_shuffle_reads_two_blocks_of_a_dataset_at_a_time():
    shuffle = gl.BlockShuffle(block=10, window=2)
    labels, _ = indices_by_dataset(labels_of(make_loader(make_mix(length=BLOCK), shuffle=shuffle)))
    assert sorted(labels[:300]) == list(range(300))
    for begin in range(0, 300, 20):
        assert len({label // 10 for label in labels[begin : begin + 20]}) == 2
    state = make_loader(make_mix(), shuffle=shuffle).state_dict()
    with pytest.raises(ValueError, match="order was 'mixed-"):
        make_loader(make_mix()).load_state_dict(state)


@pytest.mark.parametrize(
    "make_changed_mix",
    [
        lambda: make_mix(length=351),
        lambda: gl.Mix([Numbered(300), Numbered(50, 1000)], [0.6, 0.4]),
        lambda: gl.Mix([Numbered(299), Numbered(51, 1000)], [0.7, 0.3]),
    ],
)
def test_mix_refuses_a_state_of_another_mix(make_changed_mix):
    state = make_loader(make_mix()).state_dict()
    with pytest.raises(ValueError, match=r"order was 'mixed-[0-9a-f]{8}-shuffled' and is 'mixed-"):
        make_loader(make_changed_mix()).load_state_dict(state)


def test_mix_of_folders_with_different_class_numbers_warns(tmp_path):
    first, second = (gl.ImageFolder(folder(tmp_path / names, dict.fromkeys(names, 1))) for names in ("ab", "b"))
    with pytest.warns(UserWarning, match="label 0 is 'a' in the first and 'b' in the second") as caught:
        gl.Mix([first, second], [1, 1])
    assert caught[0].filename == __file__


def test_mix_loaders_sampler_has_the_indices_of_the_epoch():
    loader = make_loader(make_mix(length=500), info=True)
    indices = list(loader.sampler)
    assert len(loader.sampler) == len(indices) == 500
    assert indices == [index for _, info in loader for index in info.indices.tolist()]


@pytest.mark.parametrize(("uneven", "length"), [("pad", 166), ("drop", 165)])  # of 331
def test_mix_last_batch_is_padded_or_dropped_on_each_rank(uneven, length):
    for rank in range(2):
        loader = make_loader(make_mix(length=331), 16, rank=rank, world_size=2, uneven=uneven)
        assert len(labels_of(loader)) == length
