"""timm's AutoAugment and AugMix: their strings and their draws against timm's own."""

from __future__ import annotations

import re

import numpy as np
import originals
import pytest
from drawn import alike, described
from scipy import stats
from timms import HEIGHT, WIDTH, simulated

from gpuload import transforms as T
from gpuload.rng.philox import epoch_key
from gpuload.stage import RaggedImages, compile_stage
from gpuload.transforms.program.ops import FILTERS, NOTHING, OPS, Mixture, Ops

POLICIES = ("original", "originalr", "v0", "v0r", "3a")


@pytest.fixture(scope="module")
def published():
    originals.timm()
    from timm.data import auto_augment

    return auto_augment


def draw(transform, n: int):
    chain = T.Chain([transform])
    return chain.draw(epoch_key(8, 0), np.arange(n), np.tile([[HEIGHT, WIDTH]], (n, 1))).records[0]


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES[:-1])
def test_policies_are_timms(published, policy):
    """Which operations, in which order, with which numbers; left out or not."""
    original = published.auto_augment_transform(policy)
    n = 8000
    theirs, filters, counts = simulated(published, original, [op for entry in original.policy for op in entry], n)
    record = draw(T.TimmAutoAugment(policy), n)
    ours = described(record)
    assert alike(ours, theirs) > 0.005
    assert alike([len(sample) for sample in ours], counts) > 0.01
    done = record.codes != NOTHING
    assert alike([FILTERS[code] for code in record.filters[done]], [entry.name.lower() for entry in filters]) > 0.01


def test_three_augment(published):
    """A threshold of 128, grey, or a blur whose radius is uniform in 0.1 … 2: one of them for each image."""
    record = draw(T.TimmAutoAugment("3a"), 6000)
    assert (record.codes[:, 1] == NOTHING).all()
    names = [OPS[code] for code in record.codes[:, 0]]
    assert {name: names.count(name) for name in set(names)} == pytest.approx(
        {"solarize": 2000, "saturation": 2000, "pillow_blur": 2000}, rel=0.1
    )
    by_name = {name: record.values[np.array(names) == name, 0, 0] for name in set(names)}
    assert set(by_name["solarize"]) == {128.0}
    assert set(by_name["saturation"]) == {0.0}
    assert stats.kstest((by_name["pillow_blur"] - 0.1) / 1.9, "uniform").pvalue > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("hparams", [None, {"magnitude_std": 1.5, "magnitude_max": 8}])
def test_magnitudes_vary(published, hparams):
    config = "original" if hparams else "original-mstd0.5"
    original = published.auto_augment_transform(config, dict(hparams) if hparams else None)
    n = 8000
    theirs, _, _ = simulated(published, original, [op for entry in original.policy for op in entry], n)
    ours = described(draw(T.TimmAutoAugment(config, hparams), n))
    for operation in ("saturation", "contrast", "sharpness"):
        one, other = (
            [entry[1] for sample in samples for entry in sample if entry[0] == operation] for samples in (ours, theirs)
        )
        assert len(one) > 100
        assert stats.ks_2samp(one, other, method="asymp").pvalue > 0.001, operation


@pytest.mark.slow
@pytest.mark.parametrize("config", ["augmix", "augmix-m5-w4-d2", "augmix-m9-w2-mstd0-a0.5"])
def test_chains_of_augmix_are_timms(published, config):
    original = published.augment_and_mix_transform(config)
    n = 3000
    theirs, _, counts = simulated(published, original, original.ops, n)
    record = draw(T.TimmAugMix(config), n)
    assert isinstance(record, Mixture)
    width = record.codes.shape[1]
    assert width == original.width
    chains = [described(record.chain(number)) for number in range(width)]
    ours = [tuple(entry for chain in sample for entry in chain) for sample in zip(*chains, strict=True)]
    found = [len(sample) for sample in ours]
    assert set(found) == set(counts) if len(set(counts)) == 1 else alike(found, counts) > 0.01
    assert alike([entry[0] for one in ours for entry in one], [entry[0] for one in theirs for entry in one]) > 0.01
    factors = [[entry[1] for one in both for entry in one if entry[0] == "contrast"] for both in (ours, theirs)]
    assert stats.ks_2samp(*factors, method="asymp").pvalue > 0.001
    # The shares: timm's mixture has a beta-distributed share, which its chains divide.
    alpha = original.alpha
    assert stats.kstest(record.weights[:, 0], stats.beta(alpha, alpha).cdf).pvalue > 0.001
    assert np.allclose(record.weights.sum(axis=1), 1)
    inner = record.weights[:, 1:] / record.weights[:, 1:].sum(axis=1, keepdims=True)
    assert stats.kstest(inner[:, 0], stats.beta(alpha, alpha * (width - 1)).cdf).pvalue > 0.001


@pytest.mark.parametrize("transform", [T.TimmAutoAugment("v0r-mstd0.5"), T.TimmAugMix("augmix-m9-mstd1")])
def test_both_runners_agree_and_draws_depend_on_the_position_alone(transform):
    images = [np.random.default_rng(n).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8) for n in range(12)]
    chain = T.Chain([transform])
    program = chain.draw(epoch_key(8, 0), np.arange(12), np.tile([[HEIGHT, WIDTH]], (12, 1)))
    single, batched = (
        compile_stage(chain, device="cpu", runner=runner)(RaggedImages.from_arrays(images), program)
        for runner in ("single", "batched")
    )
    assert (single.int() - batched.int()).abs().max() <= 1
    assert (single != RaggedImages.from_arrays(images).pixels.view(12, HEIGHT, WIDTH, 3).permute(0, 3, 1, 2)).any()
    one = chain.draw(epoch_key(8, 0), np.array([7]), np.array([[HEIGHT, WIDTH]])).records[0]
    assert np.array_equal(one.codes[0], program.records[0].codes[7])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: T.TimmAutoAugment("v1"),
            "must begin with one of 'original', 'originalr', 'v0', 'v0r', '3a', got",
        ),
        (lambda: T.TimmAutoAugment("v0-m9"), "has a part that is not understood, 'm9'; known are mstd, with a number"),
        (lambda: T.TimmAutoAugment(3), "TimmAutoAugment(config=…) must be a string such as 'original-mstd0.5', got 3"),
        (lambda: T.TimmAutoAugment("v0", {"x": 1}), "TimmAutoAugment(hparams=…) takes img_mean, interpolation"),
        (lambda: T.TimmAugMix("rand-m9"), "TimmAugMix(config=…) must begin with 'augmix', such as 'augmix-m5-w4-d2'"),
        (lambda: T.TimmAugMix("augmix-m1.5"), "TimmAugMix(config='augmix-m1.5'): m must be a whole number, got 1.5"),
        (lambda: T.TimmAugMix("augmix-w0"), "TimmAugMix(config='augmix-w0'): w must be greater than 0"),
        (lambda: T.TimmAugMix("augmix-b1"), "TimmAugMix(config='augmix-b1'): b1 blends with other shares; leave it"),
    ],
)
def test_wrong_arguments(make, text):
    with pytest.raises((TypeError, ValueError), match=re.escape(text)):
        make()


def test_shown():
    assert repr(T.TimmAugMix("augmix-m5", {"translate_pct": 0.3})) == "TimmAugMix('augmix-m5', {'translate_pct': 0.3})"
    assert isinstance(draw(T.TimmAutoAugment(), 3), Ops)


def test_from_timm(published):
    jitter = T.ColorJitter(0.4, 0.4, 0.4)
    hparams = {"img_mean": (124, 116, 104), "translate_const": 100, "interpolation": "bilinear"}
    for text, kind, more in (
        ("original-mstd0.5", T.TimmAutoAugment, {}),
        ("augmix-m5-w4-d2", T.TimmAugMix, {"translate_pct": 0.3}),
        ("rand-m9-t3a", T.TimmRandAugment, {}),
    ):
        chain = T.from_timm({"interpolation": "bilinear"}, True, auto_augment=text)
        assert kind(text, {**hparams, **more}) in chain
        assert (jitter in chain) == ("3a" in text)  # as in timm, which leaves it out beside the others
