"""Arguments by epoch, by batch and of the size of a bucket: valid values, the chains that they resolve to, and batches
of loaders with arguments by epoch."""

from __future__ import annotations

import pickle
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from helpers.both_loaders import alike, cpu_loader
from helpers.generated_images import encode
from helpers.map_datasets import MapDataset
from transforms.drawing import TO_FLOAT

import gpuload as gl
from gpuload import transforms as T
from gpuload.transforms.chain import CACHED_CHAINS, variants_of
from gpuload.transforms.varying import Moment

SIZES = [16, 24, (32, 20)]
SIZES_BY_EPOCH = {0: 16, 2: 24, 5: (32, 20)}


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
    assert {*expected} == {(8, 8), (9, 9)}
    assert sizes_of(T.Chain([T.RandomInvert(), T.CenterCrop(T.by_batch([8, 9]))])) == expected
    assert sizes_of(chain, seed=1) != expected != [chain.at(1, step).output_size_hw for step in range(300)]


def test_by_batch_arguments_of_a_chain_change_together():
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


def test_resolved_chains_beyond_cached_chains_are_dropped():
    chain = T.Chain([T.CenterCrop(T.bucket_size)])
    first = chain.at(0, 0, (1, 1))
    for side in range(2, CACHED_CHAINS + 2):
        chain.at(0, 0, (side, 1))
    assert len(chain._resolved_chains) == CACHED_CHAINS
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
def test_invalid_values_of_by_epoch_by_batch_and_bucket_size_are_refused(make, error, text):
    with pytest.raises(error, match=re.escape(text)):
        make()


def test_by_epoch_returns_the_value_of_the_last_epoch_listed():
    sizes = T.by_epoch({5: (32, 20), 0: 16, 2: 24})
    assert [sizes.at(Moment(epoch)) for epoch in (0, 1, 2, 4, 5, 99)] == [16, 16, 24, 24, (32, 20), (32, 20)]
    assert T.by_epoch(lambda epoch: 10 + epoch).at(Moment(7)) == 17


@pytest.mark.parametrize("kind", [T.Resize, T.RandomResizedCrop, T.CenterCrop, T.RandomCrop, T.Mosaic])
@pytest.mark.parametrize(
    "sizes", [SIZES_BY_EPOCH, lambda epoch: SIZES_BY_EPOCH[max(n for n in SIZES_BY_EPOCH if n <= epoch)]]
)
def test_chain_at_an_epoch_has_the_size_of_the_epoch(kind, sizes):
    chain = T.Chain([T.RandomHorizontalFlip(), kind(T.by_epoch(sizes))])
    for epoch, size in ((0, 16), (3, 24), (7, (32, 20))):
        assert chain.at(epoch) == T.Chain([T.RandomHorizontalFlip(), kind(size)])
    assert chain.output_size_hw is None
    constant_chain = T.Chain([kind(16)])
    assert constant_chain.at(3) is constant_chain


def test_chain_at_an_epoch_retains_its_modules():
    chain = T.Chain([T.Resize(T.by_epoch(SIZES_BY_EPOCH)), T.Lambda(torch.neg)])
    assert chain.at(2) == T.Chain([T.Resize(24), T.Lambda(torch.neg)])
    assert chain.at(2).modules == (torch.neg,)


def test_chain_at_an_epoch_replaces_arguments_of_contained_transforms():
    size, crop = T.by_epoch({0: 8, 1: 9}), T.RandomCrop(7)
    chain = T.Chain([T.MultiView([[T.CenterCrop(size)], [crop, T.RandomApply([T.Resize(size, max_size=40)])]])])
    expected = [[T.CenterCrop(9)], [crop, T.RandomApply([T.Resize(9, max_size=40)])]]
    assert chain.at(1) == T.Chain([T.MultiView(expected)])


def test_by_epoch_arguments_are_checked_together_for_each_epoch():
    crop = T.RandomIoUCrop(T.by_epoch({0: 0.1, 5: 0.8}), T.by_epoch({0: 0.5, 5: 1}))
    assert T.Chain([crop]).at(5) == T.Chain([T.RandomIoUCrop(0.8, 1)])


def test_by_epoch_calls_its_function_only_for_the_current_epoch():
    epochs = []

    def probability_of(epoch: int) -> float:
        epochs.append(epoch)
        return 0.5 if epoch == 3 else 2.0

    with cpu_loader(ENCODED_IMAGES, 4, transforms=[T.RandomHorizontalFlip(T.by_epoch(probability_of))]) as loader:
        loader.set_epoch(3)
        iter(loader)
    assert set(epochs) == {3}


def test_fingerprint_and_repr_contain_the_values_of_by_epoch():
    def fingerprint(sizes):
        return T.Chain([T.Resize(T.by_epoch(sizes))]).fingerprint()

    assert fingerprint({0: 8}) == fingerprint({0: 8}) != fingerprint({0: 9})
    assert fingerprint(len) == fingerprint(len) != fingerprint(abs)
    flips = [T.Chain([T.RandomHorizontalFlip(p)]).fingerprint() for p in (1, T.by_epoch({0: 1}), T.by_epoch({0: 0}))]
    assert len(set(flips)) == 3
    assert repr(T.CenterCrop(T.by_epoch({0: 8, 3: (9, 7)}))) == "CenterCrop(size=by_epoch({0: (8, 8), 3: (9, 7)}))"


@pytest.mark.parametrize("kind", [T.RandomZoomOut, lambda p: T.Mosaic(8, p=p)])
def test_output_size_is_unknown_where_a_probability_by_epoch_decides_it(kind):
    chain = T.Chain([T.Resize((8, 8)), kind(p=T.by_epoch({0: 0, 1: 1, 2: 0}))])
    assert chain.output_size_hw is None
    assert chain.transforms[1].outline[0].min_hw == (1, 1)
    size, size_with_p_1 = (T.Chain([T.Resize((8, 8)), kind(p=p)]).output_size_hw for p in (0, 1))
    assert [chain.at(epoch).output_size_hw for epoch in range(3)] == [size, size_with_p_1, size]
    flip = T.RandomHorizontalFlip(T.by_epoch({0: 0, 1: 1}))
    assert T.Chain([T.Resize((8, 8)), flip]).output_size_hw == (8, 8)


@pytest.mark.parametrize("kind", [T.Resize, T.ResizeKeepRatio, T.RandomResizedCrop, T.CenterCrop, T.Mosaic])
def test_output_size_by_epoch_is_unknown(kind):
    assert T.Chain([T.CenterCrop(30), kind(T.by_epoch({0: 8, 1: 9}))]).output_size_hw is None


# -- through loaders --------------------------------------------------------------------------------------------------


FILES = [
    encode(np.random.default_rng(number).integers(0, 256, (60, 70, 3)).astype(np.uint8), "JPEG") for number in range(10)
]


ENCODED_IMAGES = MapDataset(lambda index: (gl.Encoded(FILES[index]), index), len(FILES))


@dataclass(frozen=True)
class GainTransform(T.Custom):
    factor: float
    float_levels = True

    def apply(self, images, params):
        return images * self.factor


# Functions that make a chain, given a function `of` that converts the arguments that can depend on the epoch.
ConvertArgument = Callable[[Any], Any]
CHAINS: dict[str, Callable[[ConvertArgument], list[Any]]] = {
    "RandomHorizontalFlip": lambda of: [T.RandomHorizontalFlip(of(0.7))],
    "RandomApply": lambda of: [T.RandomApply([T.RandomVerticalFlip(of(0.9)), T.Lambda(torch.neg)], p=of(0.3))],
    "RandomChoice": lambda of: [
        T.RandomChoice([T.RandomInvert(1), T.Compose([T.RandomVerticalFlip(1)])], p=of([1, 3]))
    ],
    "ColorJitter": lambda of: [T.ColorJitter(of(0.4), of((0.5, 1)), of(None), hue=of(0.1))],
    "ColorJitter, disabled": lambda of: [T.ColorJitter(0.4, of(0), of((1, 1)))],
    "RandomSolarize": lambda of: [TO_FLOAT, T.RandomSolarize(of(0.5), of(0.5))],
    "RandomRotation": lambda of: [T.RandomRotation(of(30))],
    "RandomZoomOut": lambda of: [T.RandomZoomOut(0, of((1, 2)), of(0.5)), T.Resize((24, 24))],
    "Resize": lambda of: [T.Resize(None, max_size=of(20)), T.CenterCrop(of(24))],
    "RandomErasing": lambda of: [T.RandomErasing(of(0.8), of((0.1, 0.2)), of((0.5, 2))), TO_FLOAT],
    "RandAugment": lambda of: [T.RandAugment(2, of(20))],
    "AugMix": lambda of: [T.AugMix(of(5), alpha=of(0.5))],
    "ElasticTransform": lambda of: [T.ElasticTransform(of(30), of((2, 3)))],
    "MixUp": lambda of: [TO_FLOAT, T.RandomApply([T.MixUp(alpha=of(0.3), num_classes=10)], p=of(0.5))],
    "CutMix": lambda of: [TO_FLOAT, T.CutMix(alpha=of(0.3), num_classes=10)],
    "custom": lambda of: [GainTransform(of(0.5))],
}


def load(chain: Any, epoch: int = 0) -> list[torch.Tensor]:
    with cpu_loader(ENCODED_IMAGES, 4, transforms=[T.RandomCrop(40), *chain]) as loader:
        loader.set_epoch(epoch)
        return [tensor for batch in loader for tensor in batch]


@pytest.mark.parametrize("name", CHAINS)
def test_by_epoch_with_one_value_gives_bit_identical_batches_to_the_constant(name):
    chain = CHAINS[name]
    expected = load(chain(lambda value: value))
    for of in (lambda value: T.by_epoch({0: value}), lambda value: T.by_epoch(lambda epoch: value)):
        tensors = load(chain(of))
        assert [tensor.dtype for tensor in tensors] == [tensor.dtype for tensor in expected]
        torch.testing.assert_close(tensors, expected, rtol=0, atol=0)


def test_labels_are_one_hot_in_epochs_in_which_mixup_is_off():  # as with timm's --mixup-off-epoch
    images, *_ = load([TO_FLOAT], epoch=1)
    mixed, labels, *_ = load([TO_FLOAT, T.RandomApply([T.MixUp(num_classes=10)], p=T.by_epoch({0: 1, 1: 0}))], epoch=1)
    assert torch.equal(mixed, images)
    assert torch.equal(labels, torch.eye(10)[:4])
    _, labels, *_ = load([TO_FLOAT, T.RandomApply([T.MixUp(num_classes=10)], p=T.by_epoch({0: 1, 1: 0}))])
    assert (labels.max(dim=1).values < 1).all()


def test_augment_set_epoch_selects_the_arguments_of_the_epoch():
    images = torch.randint(0, 256, (8, 3, 20, 20), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    augment = gl.Augment([T.RandomHorizontalFlip(T.by_epoch(float)), T.ColorJitter(T.by_epoch({0: 0, 1: 0.5}))])
    for epoch in (0, 1):
        augment.set_epoch(epoch)
        constant_augment = gl.Augment([T.RandomHorizontalFlip(epoch), T.ColorJitter(0.5 * epoch)])
        constant_augment.set_epoch(epoch)
        assert torch.equal(augment(images), constant_augment(images))
    with pytest.raises(ValueError, match=r"argument in epoch 2 .*RandomHorizontalFlip\(p=…\) must be at least 0"):
        augment.set_epoch(2)
    assert augment.epoch == 1


def sizes_chain(argument: Callable[..., Any]) -> list[Any]:
    """Return transforms with sizes for three epochs; in workers, the size decides which part of a file is decoded."""
    return [T.RandomCrop(40), T.RandomResizedCrop(argument(16, (24, 20), 12)), T.RandomHorizontalFlip(), TO_FLOAT]


def curriculum_chain(argument: Callable[..., Any]) -> list[Any]:
    """Return transforms with probabilities and strengths for three epochs."""
    flip = T.RandomHorizontalFlip(argument(0, 0.5, 1))
    return [
        T.RandomResizedCrop(24, argument((0.9, 1), (0.1, 0.2), (0.5, 1))),
        T.RandomChoice([flip, T.RandomInvert(1)], p=argument([0, 1], [1, 1], [1, 0])),
        T.ColorJitter(argument(0, 0.4, 0.8), contrast=argument(0.4, 0, (0.5, 0.6))),
        TO_FLOAT,
        T.RandomApply([T.MixUp(alpha=argument(0.5, 1, 1), num_classes=10)], p=argument(1, 0.5, 0)),
    ]


@pytest.mark.parametrize("chain", [sizes_chain, curriculum_chain])
@pytest.mark.parametrize("workers", [0, *(pytest.param(count, marks=pytest.mark.processes) for count in (1, 2))])
def test_loader_gives_batches_the_arguments_of_their_epoch(workers, chain):
    options = {"shuffle": True, "num_workers": workers, "device": "cpu"} | ({"prefetch_factor": 4} if workers else {})

    def make(argument: Callable[..., Any]) -> gl.Loader:
        return cpu_loader(ENCODED_IMAGES, 4, transforms=chain(argument), **options)

    def by_epoch(*values: Any) -> Any:
        return T.by_epoch(dict(enumerate(values)))

    def tensors_of(loader: gl.Loader) -> list[torch.Tensor]:
        return [tensor for batch in loader for tensor in batch]

    with make(by_epoch) as loader:
        epochs = [tensors_of(loader) for _ in range(3)]
    for epoch in range(3):
        with make(lambda *values, epoch=epoch: values[epoch]) as constant_loader:
            constant_loader.set_epoch(epoch)
            expected = tensors_of(constant_loader)
        torch.testing.assert_close(epochs[epoch], expected, rtol=0, atol=0)
        assert len(expected) == 6  # images and labels of three batches
    with make(by_epoch) as interrupted:
        interrupted.set_epoch(1)
        next(iter(interrupted))
        state = interrupted.state_dict()
    with make(by_epoch) as resumed:
        resumed.load_state_dict(state)
        torch.testing.assert_close(tensors_of(resumed), epochs[1][2:], rtol=0, atol=0)
        torch.testing.assert_close(tensors_of(resumed), epochs[2], rtol=0, atol=0)
    with pytest.raises(ValueError, match="saved by a different loader: transforms was"):
        make(lambda *values: values[0]).load_state_dict(state)


@pytest.mark.parametrize("kind", [T.RandomZoomOut, lambda p: T.Mosaic((30, 40), p=p)])
def test_loader_gives_batches_the_sizes_that_a_probability_by_epoch_decides(kind):
    def make_sample(index: int) -> tuple[gl.Encoded, dict[str, Any]]:
        target = {"boxes": gl.Boxes(np.array([[5.0, 5, 20, 20]]), "xyxy"), "labels": np.array([index])}
        return gl.Encoded(FILES[index]), target

    def make(p: Any) -> gl.Loader:
        chain = [T.Resize((40, 40)), kind(p=p)]
        return cpu_loader(MapDataset(make_sample, len(FILES)), 4, transforms=chain, ragged="list")

    with make(T.by_epoch({0: 0, 1: 1, 2: 0.5})) as loader:
        for epoch, p in enumerate((0, 1, 0.5)):
            with make(p) as constant_loader:
                constant_loader.set_epoch(epoch)
                assert alike(list(loader), list(constant_loader))


def test_replay_gives_a_sample_the_size_of_its_epoch():
    chain = [T.RandomResizedCrop(T.by_epoch({0: 16, 1: 22}))]
    with cpu_loader(ENCODED_IMAGES, 4, transforms=chain) as loader:
        assert loader.replay(1, 3).sample[0].shape == (3, 22, 22)


def test_invalid_size_raises_when_its_epoch_begins():
    chain = [T.RandomResizedCrop(T.by_epoch(lambda epoch: 8 if epoch == 0 else 0))]
    with cpu_loader(ENCODED_IMAGES, 4, transforms=chain) as loader:
        assert len(list(loader)) == 3
        with pytest.raises(ValueError, match=r"argument in epoch 1 .*must be at least 1, got 0"):
            iter(loader)
