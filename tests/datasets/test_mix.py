"""`Mix`: its weights, its errors, and its batches with workers, ranks, faults and states; also with `per`, whose shares
`tests/order/test_mixture.py` tests."""

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
    return gl.Mix([Numbered(300), Numbered(50, 1000)], **{"weights": [0.7, 0.3], **options})


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
            [[1], [2]],
            T.by_epoch({0: [1, 2], 3: [1]}),
            ValueError,
            "(weights=by_epoch({0: [1, 2], 3: [1]})) in epoch 3 must be one number for each of the 2 datasets, got 1",
        ),
        (
            [[1], [2]],
            T.by_epoch({0: [0, 0]}),
            ValueError,
            "(weights=by_epoch({0: [0, 0]})) in epoch 0 must have a weight above 0, got [0.0, 0.0]",
        ),
        (
            [[1], [2]],
            T.by_epoch({0: T.by_batch([1, 2])}),
            TypeError,
            "(weights=by_epoch({0: by_batch([1, 2])})) in epoch 0 must be a list of numbers, got by_batch([1, 2]) "
            "(ByBatch)",
        ),
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
    assert sorted(label < 1000 for label in labels) == sorted(label < 1000 for label in without_faults)


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


# -- per="batch" and per="dataset" -------------------------------------------------------------------------------------

PER = ("batch", "dataset")
LOADER_OPTIONS = {"seed": 3, "info": True}


def take_batches(loader: gl.Loader, epochs: int = 1) -> list[tuple[object, ...]]:
    """Return epoch, step, positions, labels and the image bytes of each batch."""
    return [
        (info.epoch, info.step, info.positions.tolist(), labels.tolist(), images.numpy().tobytes())
        for _ in range(epochs)
        for (images, labels), info in loader
    ]


@pytest.mark.processes
@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_batches_with_shares_do_not_depend_on_workers_and_ranks_have_different_samples(per, ranks):
    all_labels: list[int] = []
    for rank in range(ranks):
        options = {"rank": rank, "world_size": ranks, **LOADER_OPTIONS}
        batches_by_workers = []
        for num_workers in (0, 1, 4):
            mix = gl.Mix([Numbered(300), Numbered(100, 1000)], [0.7, 0.3], length=250, per=per)
            with make_loader(mix, 8, num_workers=num_workers, chunk_size=3, **options) as loader:
                batches_by_workers.append(take_batches(loader))
        assert batches_by_workers[1:] == batches_by_workers[:1] * 2
        all_labels += [label for *_, labels, _ in batches_by_workers[0] for label in labels]
    assert len(set(all_labels)) == len(all_labels) == 250 + -250 % ranks


@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"rank": 1, "world_size": 2}])
def test_resuming_after_every_batch_with_shares_gives_the_remaining_batches(per, options):
    mix = make_mix(length=150, weights=T.by_epoch({0: [0.7, 0.3], 1: [0.2, 0.8]}), per=per)
    options = options | LOADER_OPTIONS
    expected = take_batches(make_loader(mix, 8, **options), 2)
    length = len(expected) // 2
    for stop in range(length + 1):
        first, second = make_loader(mix, 8, **options), make_loader(mix, 8, **options)
        iterator = iter(first)
        for _ in range(stop):
            next(iterator)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert take_batches(second, 2)[: 2 * length - stop] == expected[stop:]
        assert len(second) == length


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch_size": 4}, "batch_size=4, 1 rank, drop_last=False, uneven='pad'"),
        ({"rank": 0, "world_size": 2}, "batch_size=8, 2 ranks, drop_last=False, uneven='pad'"),
        ({"drop_last": True}, "batch_size=8, 1 rank, drop_last=True, uneven='pad'"),
    ],
)
def test_mix_with_shares_of_batches_resumes_with_another_division_between_epochs_only(options, text):
    mix = make_mix(length=50, per="batch")
    loader, other = make_loader(mix, 8), make_loader(mix, **{"batch_size": 8, **options})
    iterator = iter(loader)
    next(iterator)
    other.load_state_dict(loader.state_dict())
    expected = (
        "the state was saved in the middle of epoch 0, with batch_size=8, 1 rank, drop_last=False, uneven='pad', but "
        f"this loader has {text}. The batches of an epoch with Buckets or Mix(per=…) depend on these; resume with the "
        "same, or from a state that was saved at the end of an epoch"
    )
    with pytest.raises(ValueError, match=exactly(expected)):
        iter(other)
    list(iterator)
    other.load_state_dict(loader.state_dict())
    assert len(list(other)) == len(other)
    assert other.epoch == 1


def test_mix_refuses_a_state_of_a_mix_with_another_per():
    states = [make_loader(make_mix(per=per)).state_dict() for per in ("sample", *PER)]
    for state, per in zip(states, (*PER, "sample"), strict=True):
        with pytest.raises(ValueError, match=r"order was 'mixed-[0-9a-f]{8}-shuffled' and is 'mixed-"):
            make_loader(make_mix(per=per)).load_state_dict(state)


@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("ranks", [1, 2])
def test_replay_and_sampler_of_a_mix_with_shares_have_the_samples_of_its_batches(per, ranks):
    loader = make_loader(make_mix(length=45, per=per), 8, rank=ranks - 1, world_size=ranks, **LOADER_OPTIONS)
    indices = list(loader.sampler)
    assert len(loader.sampler) == len(indices)
    assert indices == [index for _, info in loader for index in info.indices.tolist()]
    loader.set_epoch(1)
    for (images, labels), info in loader:
        replayed = loader.replay(1, int(info.positions[-1]))
        assert (replayed.index, replayed.sample[1]) == (int(info.indices[-1]), int(labels[-1]))
        assert torch.equal(replayed.sample[0], images[-1])
    with pytest.raises(ValueError, match=f"position must be at least 0 and at most {44 if ranks == 1 else 45}, got 90"):
        loader.replay(0, 90)


def test_mixup_mixes_the_datasets_of_a_batch_with_shares_and_replays():
    chain = [T.CenterCrop(4), T.ToDtype("float32", scale=True), T.MixUp(num_classes=350)]
    samples = [(gl.Image(np.full((4, 4, 3), index % 256, np.uint8)), index) for index in range(350)]
    mix = gl.Mix([samples[:300], samples[300:]], [1, 1], length=64, per="batch")
    with gl.Loader(mix, 16, shuffle=True, transforms=chain, num_workers=0, device="cpu", info=True) as loader:
        (images, labels), info = next(iter(loader))
        mixes_datasets = ((labels[:, :300] > 0).any(dim=1) & (labels[:, 300:] > 0).any(dim=1)).tolist()
        assert set(mixes_datasets) == {True, False}
        for image, position in zip(images, info.positions.tolist(), strict=True):
            assert torch.equal(loader.replay(0, position).sample[0], image)


def test_mix_with_shares_reads_datasets_in_blocks():
    shuffle = gl.BlockShuffle(block=10, window=2)
    loader = make_loader(make_mix(length=BLOCK, per="batch"), shuffle=shuffle)
    labels, _ = indices_by_dataset(labels_of(loader))
    for begin in range(0, 300, 20):
        assert len({label // 10 for label in labels[begin : begin + 20]}) == 2


def test_source_of_returns_the_dataset_of_each_index():
    mix = gl.Mix([[0] * 3, [1] * 2, [2]], [1, 1, 1], length=60, per="batch")
    for labels, info in gl.Loader(mix, 6, shuffle=True, num_workers=0, device="cpu", info=True):
        assert mix.source_of(info.indices).tolist() == labels.tolist()
        assert sorted(labels.tolist()) == [0, 0, 1, 1, 2, 2]
    assert mix.source_of(np.array([[0, 2], [3, 5]])).tolist() == [[0, 0], [1, 2]]
    for indices, error, text in [
        ([0, 6], IndexError, "Mix.source_of() takes indices in 0 … 5, got 6"),
        ([-1], IndexError, "Mix.source_of() takes indices in 0 … 5, got -1"),
        ([0.5], TypeError, "Mix.source_of() takes integers, as from BatchInfo.indices, got float64"),
    ]:
        with pytest.raises(error, match=exactly(text)):
            mix.source_of(indices)


def test_map_of_a_mix_keeps_its_shares():
    mix = make_mix(length=60, per="dataset").map(lambda sample: sample)
    assert (mix.per, mix.length, mix.parts) == ("dataset", 60, (7, 3))
    assert repr(mix).endswith("weights=[0.7, 0.3], length=60, per='dataset')")


@pytest.mark.parametrize(
    ("datasets", "per", "error", "text"),
    [
        ([[1], [2]], "step", ValueError, "(per=…) must be one of 'sample', 'batch', 'dataset', got 'step'"),
        (
            [[1], iter([])],
            "batch",
            TypeError,
            "() takes map-style datasets, but datasets[1] is of type list_iterator, which is iterable and defines its "
            "own order, and whose batches depend on its workers; mix inside its __iter__",
        ),
    ],
)
def test_mix_refuses_an_unknown_per_and_iterable_datasets(datasets, per, error, text):
    with pytest.raises(error, match=exactly(f"Mix{text}")):
        gl.Mix(datasets, [1, 1], per=per)


def test_mix_with_shares_refuses_repeats_and_epochs_without_a_batch():
    text = (
        "repeats=2 cannot be combined with Mix(per='batch'), which chooses the samples of each rank's batch, while "
        "repeats go to different ranks; leave one of the two out"
    )
    with pytest.raises(ValueError, match=exactly(text)):
        make_loader(make_mix(per="batch"), repeats=2)
    with pytest.raises(ValueError, match="drop_last=True leaves no batch: the dataset has 9 samples for 2 ranks, but"):
        make_loader(make_mix(length=9, per="batch"), 8, drop_last=True, rank=0, world_size=2)


def test_a_function_of_the_epoch_that_returns_invalid_weights_is_refused_when_its_epoch_begins():
    def weights(epoch: int) -> list[float]:
        return [1, 1 - epoch]

    loader = make_loader(make_mix(length=8, weights=T.by_epoch(weights)), 8)
    for _ in range(2):
        list(loader)
    with pytest.raises(
        ValueError, match=r"^Mix\(weights=by_epoch\(.*weights\)\) in epoch 2 must be at least 0, got -1"
    ):
        list(loader)
