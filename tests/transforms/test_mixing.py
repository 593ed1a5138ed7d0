"""MixUp and CutMix: arguments, draws, and valid places in a chain."""

from __future__ import annotations

import re

import pytest
from scipy import stats
from transforms.drawing import NORMALIZE, SAMPLES, TO_FLOAT, draw

from gpuload import transforms as T


@pytest.mark.parametrize("kind", [T.MixUp, T.CutMix])
def test_mixup_and_cutmix_refuse_label_smoothing_without_labels(kind):
    text = "(label_smoothing=0.1) smooths labels, but labels_getter=None means that there are no labels; remove"
    with pytest.raises(ValueError, match=re.escape(kind.__name__ + text)):
        kind(label_smoothing=0.1, labels_getter=None)


@pytest.mark.parametrize(
    ("transforms", "text"),
    [
        ([T.CenterCrop(8), T.MixUp()],
         "transforms in an impossible order: MixUp (number 2) takes float or normalized images but gets uint8 "
         "images; put ToDtype('float32', scale=True) or Normalize before it"),
        ([TO_FLOAT, T.CutMix(), NORMALIZE],
         "Normalize (number 3) cannot come after CutMix (number 2), which works on images of the "
         "final type; put Normalize before CutMix"),
        ([TO_FLOAT, T.RandomApply([T.CutMix()]), T.CenterCrop(8)],
         "CenterCrop (number 3) cannot come after RandomApply"),
        ([NORMALIZE, T.MixUp(), T.CutMix()],
         "a chain can mix an image only once, but has MixUp and CutMix; put them into one RandomChoice, which "
         "applies one of them to each sample"),
        ([NORMALIZE, T.RandomOrder([T.MixUp(), T.CutMix()])],
         "RandomOrder can mix an image only once, but has MixUp and CutM"),
        ([NORMALIZE, T.RandomChoice([T.Compose([T.MixUp(), T.CutMix()])])],
         "RandomChoice can mix an image only once, but has MixUp and CutMix"),
        ([NORMALIZE, T.RandomApply([T.RandomHorizontalFlip(), T.MixUp()])],
         "RandomApply cannot hold RandomHorizontalFlip together with MixUp, which mixes images after all other "
         "transforms; put RandomHorizontalFlip into a separate RandomApply"),
        ([NORMALIZE, T.RandomChoice([T.MixUp(num_classes=3), T.CutMix(num_classes=4)])],
         "MixUp(num_classes=3) and CutMix(num_classes=4) apply to the labels of one batch; pass the same value"),
        ([NORMALIZE, T.RandomChoice([T.MixUp(), T.CutMix(labels_getter=None)])],
         "MixUp(labels_getter='default') and CutMix(labels_getter=None) apply to the labels of one batch"),
        ([NORMALIZE, T.RandomChoice([T.MixUp(label_smoothing=0.1), T.CutMix()])],
         "MixUp(label_smoothing=0.1) and CutMix(label_smoothing=0.0) apply to the labels of one batch; pass the"),
        ([T.MultiView([T.CenterCrop(8), T.CenterCrop(6)]), NORMALIZE, T.MixUp()],
         "MixUp cannot be combined with MultiView: a sample has one label, but its views would be mixed with "
         "different shares"),
        ([NORMALIZE, T.MultiView([[T.MixUp()], [T.Identity()]])], "MixUp cannot be combined with MultiView"),
    ],
)  # fmt: skip
def test_chain_refuses_mixup_and_cutmix_in_invalid_places(transforms, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        T.Chain(transforms)


def test_mixup_and_cutmix_are_compared_without_their_labels_getter():
    assert repr(T.MixUp(alpha=0.2, num_classes=10)) == "MixUp(alpha=0.2, num_classes=10)"
    # A function has no stable name, so it is not compared.
    chains = [T.Chain([NORMALIZE, T.MixUp(labels_getter=lambda batch, n=n: batch[n])]) for n in (1, 2)]
    fingerprints = {chain.fingerprint() for chain in chains}
    assert chains[0] == chains[1]
    assert len(fingerprints) == 1
    assert T.Chain([NORMALIZE, T.MixUp(alpha=2)]).fingerprint() not in fingerprints


def test_mixing_of_a_chain_is_its_mixup_or_cutmix_at_any_depth():
    assert T.Chain([NORMALIZE, T.MixUp(alpha=0.3)]).mixing == T.MixUp(alpha=0.3)
    assert T.Chain([NORMALIZE]).mixing is None
    assert T.Chain([TO_FLOAT, T.RandomApply([T.RandomChoice([T.Identity(), T.CutMix()])])]).mixing == T.CutMix()


def test_random_choice_of_mixup_and_cutmix_draws_one_for_each_sample():
    choice = T.RandomChoice([T.MixUp(), T.CutMix(), T.Identity()], p=[2, 1, 1])
    mix = draw(NORMALIZE, T.RandomApply([choice], p=0.8)).mix
    pasted = mix.box_tlhw[:, 2] > 0
    blended = ~pasted & (mix.share < 1)
    assert stats.binomtest(int(blended.sum()), SAMPLES, 0.8 * 2 / 4).pvalue > 0.01
    assert 0.17 < pasted.mean() < 0.21  # 0.8 × 1/4, less CutMix's boxes without area
    assert stats.kstest(mix.share[blended], "uniform").pvalue > 0.01
