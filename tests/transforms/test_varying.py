"""Arguments by epoch, by batch and of the size of a bucket: valid values, and the chains that they resolve to."""

from __future__ import annotations

import pickle
import re
from collections import Counter

import pytest
import torch

from gpuload import transforms as T
from gpuload.transforms.chain import variants_of

SIZES = [16, 24, (32, 20)]


def sizes_of(chain: T.Chain, steps: int = 300, **options) -> list[tuple[int, int] | None]:
    return [chain.at(0, step, **options).output_size_hw for step in range(steps)]


@pytest.mark.parametrize("kind", [T.Resize, T.RandomResizedCrop, T.CenterCrop, T.RandomCrop, T.Mosaic])
@pytest.mark.parametrize("sizes", [SIZES, tuple(SIZES), range(16, 64, 16)])
def test_chain_at_a_batch_has_one_of_the_values(kind, sizes):
    chain = T.Chain([T.RandomHorizontalFlip(), kind(T.by_batch(sizes))])
    expected = [T.Chain([T.RandomHorizontalFlip(), kind(size)]) for size in sizes]
    if kind is not T.Resize:
        assert len({*sizes_of(chain, 40)}) == len(sizes)
    assert {chain.at(2, step) for step in range(40)} == {*expected}
    assert chain.output_size_hw is None


def test_by_batch_draws_all_values_equally_often():
    chain = T.Chain([T.CenterCrop(T.by_batch(range(1, 11)))])
    counts = Counter(sizes_of(chain, 10_000))
    assert len(counts) == 10
    assert all(900 < count < 1100 for count in counts.values())  # 3.3 standard deviations


def test_by_batch_depends_on_seed_epoch_and_step():
    chain = T.Chain([T.CenterCrop(T.by_batch([8, 9]))])
    expected = sizes_of(chain)
    assert sizes_of(T.Chain([T.RandomInvert(), T.CenterCrop(T.by_batch([8, 9]))])) == expected
    assert sizes_of(chain, seed=1) != expected != [chain.at(1, step).output_size_hw for step in range(300)]


def test_results_of_by_batch_change_together():
    chain = T.Chain([T.Resize(T.by_batch([(9, 9), (12, 12)])), T.RandomHorizontalFlip(T.by_batch([0.25, 0.75]))])
    resolved = {tuple(chain.at(0, step)) for step in range(40)}
    assert resolved == {
        (T.Resize((9, 9)), T.RandomHorizontalFlip(0.25)),
        (T.Resize((12, 12)), T.RandomHorizontalFlip(0.75)),
    }


def test_chains_are_built_once_for_each_value():
    chain = T.Chain([T.CenterCrop(T.by_batch(SIZES)), T.RandomInvert(T.by_batch([0, 0.5]))])
    assert len({id(chain.at(epoch, step)) for epoch in range(3) for step in range(100)}) == 4
    assert len({id(variant) for variant in variants_of(chain, 0)}) == 4
    sized = T.Chain([T.CenterCrop(T.bucket_size)])
    assert sized.at(0, 1, (8, 9)) is sized.at(2, 5, (8, 9))
    plain = T.Chain([T.CenterCrop(8)])
    assert plain.at(1, 2, (3, 4)) is plain
    assert variants_of(plain, 0) == [plain]


def test_built_chains_are_limited():
    chain = T.Chain([T.CenterCrop(T.bucket_size)])
    first = chain.at(0, 0, (1, 1))
    for side in range(2, 600):
        chain.at(0, 0, (side, 1))
    assert len(chain._resolved_chains) <= 256
    assert chain.at(0, 0, (1, 1)) is not first


@pytest.mark.parametrize("kind", [T.Resize, T.RandomResizedCrop, T.CenterCrop, T.RandomCrop, T.ResizeKeepRatio])
def test_chain_at_a_batch_with_a_size_has_this_size(kind):
    chain = T.Chain([kind(T.bucket_size), T.RandomInvert()])
    assert chain.at(3, 4, (20, 30)) == T.Chain([kind((20, 30)), T.RandomInvert()])
    assert chain.output_size_hw is None
    assert [variant.transforms[0] for variant in variants_of(chain, 0, [(8, 9), (7, 7)])] == [
        kind((8, 9)),
        kind((7, 7)),
    ]


def test_arguments_of_contained_transforms_and_modules_are_resolved():
    inner = T.RandomApply([T.Resize(T.by_batch([9]), max_size=40)])
    chain = T.Chain([T.MultiView([[T.CenterCrop(T.bucket_size)], [T.RandomCrop(7), inner]]), T.Lambda(torch.neg)])
    expected = [[T.CenterCrop((5, 6))], [T.RandomCrop(7), T.RandomApply([T.Resize(9, max_size=40)])]]
    assert chain.at(1, 1, (5, 6)) == T.Chain([T.MultiView(expected), T.Lambda(torch.neg)])


def test_by_epoch_can_contain_by_batch_and_bucket_size():
    size = T.by_epoch({0: T.by_batch(SIZES), 3: T.bucket_size, 5: 64})
    chain = T.Chain([T.CenterCrop(size)])
    assert {chain.at(2, step).output_size_hw for step in range(40)} == {(16, 16), (24, 24), (32, 20)}
    assert [chain.at(epoch, 0, (8, 9)).output_size_hw for epoch in (3, 4, 5)] == [(8, 9), (8, 9), (64, 64)]
    assert [len({*variants_of(chain, epoch)}) for epoch in (0, 3, 5)] == [3, 1, 1]
    assert repr(size) == "by_epoch({0: by_batch([16, 24, (32, 20)]), 3: bucket_size, 5: 64})"
    keep_ratio = T.ResizeKeepRatio(T.bucket_size, longest=T.by_epoch({0: 0, 1: 1}))
    assert T.Chain([keep_ratio]).at(1, 0, (8, 9)) == T.Chain([T.ResizeKeepRatio((8, 9), longest=1)])


@pytest.mark.parametrize("kind", [T.RandomZoomOut, lambda p: T.Mosaic(8, p=p)])
def test_output_size_is_unknown_where_a_probability_by_batch_decides_it(kind):
    chain = T.Chain([T.Resize((8, 8)), kind(p=T.by_batch([0, 1]))])
    assert chain.output_size_hw is None
    assert chain.transforms[1].outline[0].min_hw == (1, 1)


def test_fingerprint_repr_and_pickles_contain_the_values():
    chains = [T.Chain([T.CenterCrop(size)]) for size in (8, T.by_batch([8]), T.by_batch([8, 9]), T.bucket_size)]
    assert len({chain.fingerprint() for chain in chains}) == 4
    assert [repr(chain.transforms[0]) for chain in chains[2:]] == [
        "CenterCrop(size=by_batch([(8, 8), (9, 9)]))",
        "CenterCrop(size=bucket_size)",
    ]
    for chain in chains:
        copied = pickle.loads(pickle.dumps(chain))
        assert copied == chain
        assert copied.at(0, 3, (4, 5)) == chain.at(0, 3, (4, 5))


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: T.by_epoch(224), TypeError,
         "by_epoch() takes a dict of values keyed by their first epoch, such as {0: 128"),
        (lambda: T.by_epoch({}), ValueError, "by_epoch() needs a value for epoch 0, got {}; write {0: …, …}"),
        (lambda: T.by_epoch({3: 5}), ValueError, "by_epoch() needs a value for epoch 0, got {3: 5}"),
        (lambda: T.by_epoch({0: 5, -1: 5}), ValueError, "by_epoch({epoch: value}) must be at least 0, got -1"),
        (lambda: T.Resize(T.by_epoch({0: 5, 2: 9}), max_size=8), ValueError,
         "Resize(max_size=8) must be greater than size=9"),
        (lambda: T.Chain([T.RandomResizedCrop(T.by_epoch(lambda epoch: 8 - epoch))]).at(8), ValueError,
         "an argument in epoch 8 is invalid: RandomResizedCrop(size=…) must be at least 1, got 0"),
        (lambda: T.RandomHorizontalFlip(T.by_epoch({0: 0.5, 5: 2})), ValueError,
         "the value from by_epoch() for epoch 5 is invalid: RandomHorizontalFlip(p=…) must be at least 0 "
         "and at most 1, got 2"),
        (lambda: T.Chain([T.RandomHorizontalFlip(T.by_epoch(str))]).at(3), TypeError,
         "an argument in epoch 3 is invalid: RandomHorizontalFlip(p=…) must be a number, got '3'"),
        (lambda: T.RandomChoice([T.Identity(), T.Grayscale(3)], p=T.by_epoch({0: [1, 1], 2: [1]})), ValueError,
         "for epoch 2 is invalid: RandomChoice(p=…) must have one number for each of the 2 transforms, got (1.0,)"),
        (lambda: T.RandomIoUCrop(T.by_epoch({0: 0.3, 5: 0.9}), T.by_epoch({0: 1, 3: 0.8})), ValueError,
         "for epoch 5 is invalid: RandomIoUCrop needs 0 < min_scale ≤ max_scale, got 0.9 and 0.8"),
        (lambda: T.Chain([T.RandomSolarize(T.by_epoch({0: 128, 2: 0.5}))]), ValueError,
         "for epoch 2 is invalid: RandomSolarize(threshold=0.5) is used where pixel values are in 0 … 255"),
        (lambda: T.RandAugment(T.by_epoch({0: 1, 5: 2})), TypeError,
         "RandAugment(num_ops=…) cannot be by_epoch({0: 1, 5: 2}); pass one value for all"),
        (lambda: T.Resize(8, T.by_epoch({0: "nearest"})), TypeError,
         "Resize(interpolation=…) cannot be by_epoch({0: 'nearest'})"),
        (lambda: T.RandomResizedCrop(8, (T.by_epoch({0: 0.5}), 1)), TypeError,
         "RandomResizedCrop(scale=…) contains by_epoch({0: 0.5}); pass entire values, as in by_batch([(…), (…)]) or "
         "by_epoch({0: (…), 10: (…)})"),
        (lambda: T.by_batch(224), TypeError,
         "by_batch() takes a list of values, one of which is drawn for each batch, such as [320, 480, 640], got int: "
         "224"),
        (lambda: T.by_batch({0: 5}), TypeError, "such as [320, 480, 640], got dict: {0: 5}"),
        (lambda: T.by_batch([]), ValueError, "by_batch() needs at least one value, got []"),
        (lambda: T.by_batch([T.bucket_size, 8]), TypeError,
         "by_batch() contains bucket_size; its values must not change. For a list that changes from epoch to epoch, "
         "write by_epoch({0: by_batch([…]), …})"),
        (lambda: T.Resize(T.by_batch([5, 9]), max_size=8), ValueError,
         "the value 9 from by_batch() is invalid: Resize(max_size=8) must be greater than size=9"),
        (lambda: T.RandomHorizontalFlip(T.by_epoch({0: 0.5, 5: T.by_batch([0, 2])})), ValueError,
         "the value from by_epoch() for epoch 5 is invalid: the value 2 from by_batch() is invalid: "
         "RandomHorizontalFlip(p=…) must be at least 0 and at most 1, got 2"),
        (lambda: T.Chain([T.RandomSolarize(T.by_batch([128, 0.5]))]), ValueError,
         "the value 0.5 from by_batch() is invalid: RandomSolarize(threshold=0.5) is used where pixel values are in"),
        (lambda: T.RandAugment(T.by_batch([1, 2])), TypeError,
         "RandAugment(num_ops=…) cannot be by_batch([1, 2]); pass one value for all batches"),
        (lambda: T.RandomResizedCrop(8, (T.by_batch([0.5]), 1)), TypeError,
         "RandomResizedCrop(scale=…) contains by_batch([0.5]); pass entire values, as in by_batch([(…), (…)]) or "
         "by_epoch({0: (…), 10: (…)})"),
        (lambda: T.CenterCrop((T.bucket_size, 8)), TypeError,
         "CenterCrop(size=…) contains bucket_size; pass entire values"),
        (lambda: T.RandomResizedCrop(8, T.bucket_size), TypeError,
         "RandomResizedCrop(scale=…) cannot be bucket_size, which is only for the size of Resize and of crops"),
        (lambda: T.Resize(T.bucket_size, max_size=8), ValueError,
         "Resize(max_size=8) needs a single integer as size, the length of the shorter side"),
        (lambda: T.Chain([T.Resize(T.bucket_size)]).at(0), ValueError, "bucket_size needs a batch with a size"),
        (lambda: T.Chain([T.Resize(T.by_epoch(lambda epoch: T.bucket_size))]).at(4), TypeError,
         "an argument in epoch 4 is invalid: a function of the epoch must return plain values, got "
         "bucket_size; pass by_epoch() a dict"),
    ],
)  # fmt: skip
def test_invalid_values_are_refused(make, error, text):
    with pytest.raises(error, match=re.escape(text)):
        make()
