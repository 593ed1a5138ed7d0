"""timm's automatic augmentation has the config strings, draws and operations of timm."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import peers
from helpers.operation_draws import described, p_value, program
from helpers.timm_draws import HEIGHT, WIDTH, run_timm
from PIL import Image
from scipy import stats

from gpuload import transforms as T
from gpuload.rng.philox import epoch_key
from gpuload.stage import RaggedImages, compile_stage
from gpuload.transforms.program.ops import FILTERS, NOTHING, OPS, ChainMixture, Ops
from gpuload.transforms.timm_policies import SETS, TIMM


@pytest.fixture(scope="module")
def timm_module():
    peers.timm()
    from timm.data import auto_augment

    return auto_augment


def draw(transform, count: int):
    return (
        T.Chain([transform]).draw(epoch_key(8, 0), np.arange(count), np.tile([[HEIGHT, WIDTH]], (count, 1))).records[0]
    )


def simulate_policy(timm_module, config: str, hparams: dict | None, count: int):
    original = timm_module.auto_augment_transform(config, None if hparams is None else dict(hparams))
    return run_timm(timm_module, original, [operation for entry in original.policy for operation in entry], count)


def assert_same_counts(our_counts: list[int], their_counts: list[int]) -> None:
    """Compare the distributions of the numbers of operations, which can be constant."""
    if len(set(their_counts)) == 1:
        assert set(our_counts) == set(their_counts)
    else:
        assert p_value(our_counts, their_counts) > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["original", "originalr", "v0", "v0r"])
def test_timm_auto_augment_draws_the_operations_that_timm_draws(timm_module, policy):
    count = 8000
    theirs, filters, counts = simulate_policy(timm_module, policy, None, count)
    record = draw(T.TimmAutoAugment(policy), count)
    ours = described(record)
    assert p_value(ours, theirs) > 0.005
    assert p_value([len(sample) for sample in ours], counts) > 0.01
    applied = record.codes != NOTHING
    names = [FILTERS[code] for code in record.filters[applied]]
    assert p_value(names, [entry.name.lower() for entry in filters]) > 0.01


def test_timm_auto_augment_3a_draws_one_of_solarize_gray_and_blur():
    # Each image gets one of solarize with a threshold of 128, grayscale, and a blur with a radius in 0.1 … 2.
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
def test_timm_auto_augment_draws_magnitudes_with_a_deviation_like_timm(timm_module, hparams):
    config = "original" if hparams else "original-mstd0.5"
    count = 8000
    theirs, _, _ = simulate_policy(timm_module, config, hparams, count)
    ours = described(draw(T.TimmAutoAugment(config, hparams), count))
    for operation in ("saturation", "contrast", "sharpness"):
        our_magnitudes, their_magnitudes = (
            [value for sample in samples for name, value, *_ in sample if name == operation]
            for samples in (ours, theirs)
        )
        assert len(our_magnitudes) > 100
        assert stats.ks_2samp(our_magnitudes, their_magnitudes, method="asymp").pvalue > 0.001, operation


@pytest.mark.slow
@pytest.mark.parametrize("config", ["augmix", "augmix-m5-w4-d2", "augmix-m9-w2-mstd0-a0.5"])
def test_timm_aug_mix_draws_chains_and_weights_like_timm(timm_module, config):
    original = timm_module.augment_and_mix_transform(config)
    count = 3000
    theirs, _, their_counts = run_timm(timm_module, original, original.ops, count)
    record = draw(T.TimmAugMix(config), count)
    assert isinstance(record, ChainMixture)
    width = record.codes.shape[1]
    assert width == original.width
    chains = [described(record.chain(number)) for number in range(width)]
    ours = [tuple(entry for chain in sample for entry in chain) for sample in zip(*chains, strict=True)]
    our_counts = [len(sample) for sample in ours]
    assert_same_counts(our_counts, their_counts)
    our_names, their_names = ([name for sample in samples for name, *_ in sample] for samples in (ours, theirs))
    assert p_value(our_names, their_names) > 0.01
    factors = [
        [value for sample in samples for name, value, *_ in sample if name == "contrast"] for samples in (ours, theirs)
    ]
    assert stats.ks_2samp(*factors, method="asymp").pvalue > 0.001
    # timm's mixture has a beta-distributed weight, which is divided among its chains.
    alpha = original.alpha
    assert stats.kstest(record.weights[:, 0], stats.beta(alpha, alpha).cdf).pvalue > 0.001
    assert np.allclose(record.weights.sum(axis=1), 1)
    inner = record.weights[:, 1:] / record.weights[:, 1:].sum(axis=1, keepdims=True)
    assert stats.kstest(inner[:, 0], stats.beta(alpha, alpha * (width - 1)).cdf).pvalue > 0.001


@pytest.mark.parametrize("transform", [T.TimmAutoAugment("v0r-mstd0.5"), T.TimmAugMix("augmix-m9-mstd1")])
def test_timm_policies_give_the_same_results_in_both_runners(transform):
    images = [np.random.default_rng(count).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8) for count in range(12)]
    chain = T.Chain([transform])
    program = chain.draw(epoch_key(8, 0), np.arange(12), np.tile([[HEIGHT, WIDTH]], (12, 1)))
    single, batched = (
        compile_stage(chain, device="cpu", runner=runner)(RaggedImages.from_arrays(images), program)
        for runner in ("single", "batched")
    )
    assert (single.int() - batched.int()).abs().max() <= 1
    assert (single != RaggedImages.from_arrays(images).pixels.view(12, HEIGHT, WIDTH, 3).permute(0, 3, 1, 2)).any()


def test_from_timm_selects_the_policy_class_by_the_config_string():
    jitter = T.ColorJitter(0.4, 0.4, 0.4)
    hparams = {"img_mean": (124, 116, 104), "translate_const": 100, "interpolation": "bilinear"}
    for config, policy, extra_hparams in (
        ("original-mstd0.5", T.TimmAutoAugment, {}),
        ("augmix-m5-w4-d2", T.TimmAugMix, {"translate_pct": 0.3}),
        ("rand-m9-t3a", T.TimmRandAugment, {}),
    ):
        chain = T.from_timm({"interpolation": "bilinear"}, True, auto_augment=config)
        assert policy(config, {**hparams, **extra_hparams}) in chain
        assert (jitter in chain) == ("3a" in config)  # timm drops ColorJitter unless the policy is a "3a"


MIN_P_VALUE = 0.0005  # in 66 comparisons of magnitudes, one p-value below 0.01 is expected
CODE_NAMES = {name.replace("TranslateX", "TranslateXRel").replace("TranslateY", "TranslateYRel") for name in TIMM.names}
CODE_NAMES.remove("GaussianBlurRand")  # has a random radius


def simulate_layers(timm_module, config: str, hparams: dict | None, count: int):
    original = timm_module.rand_augment_transform(config, None if hparams is None else dict(hparams))
    return run_timm(timm_module, original, original.ops, count)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "hparams", "count"),
    [
        ("rand", None, 6000),
        ("rand-m9", None, 6000),
        ("rand-m7-inc1", {"translate_pct": 0.3, "img_mean": (1, 2, 3)}, 6000),
        ("rand-m15-n1-p1-mmax20", None, 3000),
        ("rand-m12-n1-p1-inc1", None, 3000),
        ("rand-m4-n1-p0.3-tweights", None, 12000),
        ("rand-m6-n2-p1-tweights", None, 4000),
        ("rand-m6-n3-p1-t3aw", None, 4000),
        ("rand-m9-n2-t3a", None, 3000),
        ("rand-m9-n5-p0.9", {"magnitude_max": 8}, 2000),
    ],
)
def test_timm_rand_augment_draws_the_operations_that_timm_draws(timm_module, config, hparams, count):
    theirs, _, their_counts = simulate_layers(timm_module, config, hparams, count)
    ours = described(draw(T.TimmRandAugment(config, hparams), count))
    assert len(set(ours)) > 3
    assert p_value(ours, theirs) > 0.005
    our_counts = [len(sample) for sample in ours]
    assert_same_counts(our_counts, their_counts)
    our_entries, their_entries = ([entry for sample in samples for entry in sample] for samples in (ours, theirs))
    assert p_value(our_entries, their_entries) > 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "hparams"),
    [
        ("rand-m9-mstd0.5-inc1-n1-p1", None),
        ("rand-m9-mstd0.5-n1-p1", None),
        ("rand-m4-mstd3-n1-p1", None),
        ("rand-m9-mstd101-n1-p1-inc1", None),
        ("rand-m8-n1-p1", {"magnitude_std": float("inf")}),
        ("rand-m25-mstd2-mmax27-inc1-n1-p1", None),
    ],
)
def test_timm_rand_augment_draws_magnitudes_with_a_deviation_like_timm(timm_module, config, hparams):
    count = 9000
    theirs, _, _ = simulate_layers(timm_module, config, hparams, count)
    ours = described(draw(T.TimmRandAugment(config, hparams), count))
    for operation in ("saturation", "sharpness", "solarize", "posterize", "solarize_add"):
        column = 2 if operation == "solarize_add" else 1
        our_values, their_values = (
            [sample[0][column] for sample in samples if sample[0][0] == operation] for samples in (ours, theirs)
        )
        assert len(our_values) > 400
        assert stats.ks_2samp(our_values, their_values, method="asymp").pvalue > MIN_P_VALUE, operation
    # Shears, shifts and rotations are compared by their coefficients.
    our_values, their_values = (
        np.array([sample[0][1:7] for sample in samples if sample[0][0] == "warp"]) for samples in (ours, theirs)
    )
    for column, values in enumerate(zip(our_values.T, their_values.T, strict=True)):
        assert stats.ks_2samp(*values, method="asymp").pvalue > MIN_P_VALUE, column


def test_infinite_mstd_draws_uniform_magnitudes():
    for config in ("rand-m8-mstdinf-n1-p1", "rand-m8-mstd101-n1-p1"):
        params = draw(T.TimmRandAugment(config), 20_000)
        factors = params.values[params.codes == OPS.index("brightness")][:, 0]
        assert stats.kstest((factors - 0.1) / 1.8 / 0.8, "uniform").pvalue > 0.01  # 0.1 + 1.8 × (0 … 8) / 10


def test_timm_rand_augment_draws_a_filter_for_each_operation(timm_module):
    params = draw(T.TimmRandAugment("rand-n3"), 3000)
    _, their_filters, _ = simulate_layers(timm_module, "rand-n3", None, 3000)
    assert isinstance(params.filters, np.ndarray)
    applied = params.codes != NOTHING
    filters = [FILTERS[number] for number in params.filters[applied].tolist()]
    assert set(filters) == {"bilinear", "bicubic"}
    assert p_value(filters, [entry.name.lower() for entry in their_filters]) > 0.01
    # Filters are drawn for each operation, not for each image.
    assert abs((params.filters[:, 0] == params.filters[:, 1]).mean() - 0.5) < 0.05
    fixed = draw(T.TimmRandAugment("rand", {"interpolation": Image.Resampling.BILINEAR}), 50)
    assert fixed.filters is not None
    assert (fixed.filters == FILTERS.index("bilinear")).all()
    assert T.TimmRandAugment("rand", {"interpolation": "random"}).hparams == (
        ("interpolation", ("bilinear", "bicubic")),
    )


@pytest.mark.parametrize("name", sorted(CODE_NAMES))
def test_each_operation_gives_timms_pixels(timm_module, name, monkeypatch):
    """The stage on the CPU applies each magnitude, with both signs and filters."""
    noise = np.random.default_rng(6).integers(0, 256, (6, 5, 3), np.uint8)
    picture = Image.fromarray(noise).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
    hparams = {"img_mean": (3, 90, 200), "translate_pct": 0.4}
    transform = T.TimmRandAugment("rand-mmax20", hparams)
    number = TIMM.names.index(name.replace("Rel", ""))
    levels = [0, 0.3, 1, 2.5, 3, 4, 5.5, 6, 7, 8, 9, 9.7, 10, 12, 20]
    rows = [(level, sign, filter_) for level in levels for sign in (1, -1) for filter_ in (1, 2)]
    magnitudes = np.array([[level] for level, _, _ in rows], np.float64)
    negative = np.array([[0.9 if sign < 0 else 0.1] for _, sign, _ in rows])
    kinds, sizes = np.full((len(rows), 1), number), np.tile([[HEIGHT, WIDTH]], (len(rows), 1))
    strengths = transform.strengths(kinds, magnitudes, negative, np.zeros((len(rows), 2)), sizes)
    strengths = np.where(TIMM.signed[kinds] & (negative > 0.5), -strengths, strengths)
    params = Ops(*TIMM.encode_operations(kinds, strengths, sizes), np.array([[filter_] for _, _, filter_ in rows]))
    images = RaggedImages.from_arrays([np.asarray(picture)] * len(rows))
    results = compile_stage(T.Chain([transform]), device="cpu")(images, program(transform, params, sizes))
    operation = timm_module.AugmentOp(name, hparams=hparams)
    for row, (level, sign, filter_) in enumerate(rows):
        monkeypatch.setattr(timm_module, "_randomly_negate", lambda value, sign=sign: sign * value)
        arguments: tuple[Any, ...] = operation.level_fn(level, hparams) if operation.level_fn else ()
        resample = (Image.Resampling.BILINEAR, Image.Resampling.BICUBIC)[filter_ - 1]
        if operation.aug_fn is timm_module.posterize and arguments[0] < 1:  # Pillow 13 raises an error
            expected = Image.new("RGB", picture.size)
        else:
            expected = operation.aug_fn(picture, *arguments, fillcolor=(3, 90, 200), resample=resample)
        difference = abs(results[row].permute(1, 2, 0).numpy().astype(int) - np.asarray(expected))
        assert difference.max() <= 1, (level, sign)
        assert "Contrast" in name or difference.mean() < 0.01, (level, sign)


def test_weighted_operations_are_drawn_without_replacement():
    codes = draw(T.TimmRandAugment("rand-n15-p1-tweights"), 200).codes
    assert (np.sort(codes, axis=1) == np.sort(TIMM.codes[SETS["weights"][0]])).all()
    assert len(set(map(tuple, codes.tolist()))) > 150


def test_timm_rand_augment_without_operations_draws_none():
    assert draw(T.TimmRandAugment("rand-n0"), 3).codes.shape == (3, 0)
    assert (draw(T.TimmRandAugment("rand-p0"), 300).codes == NOTHING).all()


def test_timm_rand_augment_takes_its_fill_from_img_mean_and_shows_its_hparams():
    assert T.TimmRandAugment("rand").outside.image == (128, 128, 128)
    transform = T.TimmRandAugment("rand-m9-mstd0.5-inc1", {"img_mean": (124, 116, 104), "translate_const": 100})
    assert transform.outside.image == (124, 116, 104)
    text = "TimmRandAugment('rand-m9-mstd0.5-inc1', {'img_mean': (124, 116, 104), 'translate_const': 100.0})"
    assert repr(transform) == text
    assert repr(T.TimmAugMix("augmix-m5", {"translate_pct": 0.3})) == "TimmAugMix('augmix-m5', {'translate_pct': 0.3})"
    assert hash(transform) == hash(T.TimmRandAugment(transform.config, dict(transform.hparams)))
    assert transform.image_only


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("augmix-m5",), "TimmRandAugment(config=…) must begin with 'rand', as in 'rand-m9-n2', got 'augmix-m5'"),
        (("rand-m9-w0",), "has an unknown part, 'w0'; valid parts are m, n, p, mstd, mmax and inc"),
        (("rand-m",), "has an unknown part, 'm'"),
        (("rand-m-3",), "has an unknown part, 'm'"),
        (("rand-m9.5",), "TimmRandAugment(config='rand-m9.5'): m must be a whole number, got 9.5"),
        (("rand-p1.5",), "p must be at least 0 and at most 1, got 1.5"),
        (("rand-t9",), "names an unknown set of operations, 't9'; valid sets are tweights, t3a, t3aw"),
        (("rand-n16-tweights",), "requests 16 operations, but tweights draws without replacement from 15; use n15"),
        (("rand", [1]), "TimmRandAugment(hparams=…) must be a dict, got [1] (list)"),
        (("rand", {"mean": 1}), "TimmRandAugment(hparams=…) takes img_mean, interpolation, magnitude_max"),
        (("rand", {"magnitude_std": -1}), "TimmRandAugment(hparams['magnitude_std']) must be at least 0, got -1"),
        (("rand", {"translate_pct": "x"}), "TimmRandAugment(hparams['translate_pct']) must be a number, got 'x'"),
        (("rand", {"interpolation": "box"}), "TimmRandAugment(hparams['interpolation']) must be one of 'nearest'"),
        (("rand", {"img_mean": (1, 2, 300)}), "TimmRandAugment(hparams['img_mean']) must be integers"),
    ],
)
def test_timm_rand_augment_refuses_invalid_arguments(arguments, text):
    with pytest.raises((TypeError, ValueError)) as caught:
        T.TimmRandAugment(*arguments)
    assert text in str(caught.value)
