"""timm's RandAugment: its strings, its draws and its operations against timm's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import originals
import pytest
from drawn import alike, described, program
from PIL import Image
from scipy import stats
from timms import HEIGHT, WIDTH
from timms import simulated as simulate

from gpuload import transforms as T
from gpuload.rng.philox import epoch_key
from gpuload.stage import RaggedImages, compile_stage
from gpuload.transforms.program.ops import FILTERS, NOTHING, OPS, Ops
from gpuload.transforms.timm_operations import CODES, NAMES, TABLE
from gpuload.transforms.timm_randaugment import SETS, _recipe

LEAST = 0.0005  # of 66 comparisons of magnitudes, one p-value below 0.01 is to be expected
CODE_NAMES = {name.replace("TranslateX", "TranslateXRel").replace("TranslateY", "TranslateYRel") for name in TABLE}
CODE_NAMES.remove("GaussianBlurRand")  # its radius is drawn


@pytest.fixture(scope="module")
def published():
    originals.timm()
    from timm.data import auto_augment

    return auto_augment


def draw(transform: T.TimmRandAugment, n: int) -> Any:
    return T.Chain([transform]).draw(epoch_key(8, 0), np.arange(n), np.tile([[HEIGHT, WIDTH]], (n, 1))).records[0]


def simulated(published, config: str, hparams: dict | None, n: int):
    original = published.rand_augment_transform(config, None if hparams is None else dict(hparams))
    return simulate(published, original, original.ops, n)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "hparams", "n"),
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
def test_draws_of_one_magnitude(published, config, hparams, n):
    """Which operations, in which order, with which numbers; left out or not."""
    theirs, _, counts = simulated(published, config, hparams, n)
    ours = described(draw(T.TimmRandAugment(config, hparams), n))
    assert len(set(ours)) > 3
    assert alike(ours, theirs) > 0.005
    found = [len(sample) for sample in ours]
    assert set(found) == set(counts) if len(set(counts)) == 1 else alike(found, counts) > 0.01
    assert alike([entry for sample in ours for entry in sample], [entry for one in theirs for entry in one]) > 0.01


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
def test_draws_of_magnitudes(published, config, hparams):
    n = 9000
    theirs, _, _ = simulated(published, config, hparams, n)
    ours = described(draw(T.TimmRandAugment(config, hparams), n))
    for operation in ("saturation", "sharpness", "solarize", "posterize", "solarize_add"):
        column = 2 if operation == "solarize_add" else 1
        one, other = (
            [sample[0][column] for sample in samples if sample[0][0] == operation] for samples in (ours, theirs)
        )
        assert len(one) > 400
        assert stats.ks_2samp(one, other, method="asymp").pvalue > LEAST, operation
    # Shears, shifts and rotations, by each of their coefficients, with their signs.
    one, other = (
        np.array([sample[0][1:7] for sample in samples if sample[0][0] == "warp"]) for samples in (ours, theirs)
    )
    for column in range(6):
        assert stats.ks_2samp(one[:, column], other[:, column], method="asymp").pvalue > LEAST, column


def test_infinite_deviations_are_uniform():
    for config in ("rand-m8-mstdinf-n1-p1", "rand-m8-mstd101-n1-p1"):
        params = draw(T.TimmRandAugment(config), 20_000)
        factors = params.values[params.codes == OPS.index("brightness")][:, 0]
        assert stats.kstest((factors - 0.1) / 1.8 / 0.8, "uniform").pvalue > 0.01


def test_filters(published):
    params = draw(T.TimmRandAugment("rand-n3"), 3000)
    _, resample, _ = simulated(published, "rand-n3", None, 3000)
    assert isinstance(params.filters, np.ndarray)
    done = params.codes != NOTHING
    ours = [FILTERS[number] for number in params.filters[done].tolist()]
    assert set(ours) == {"bilinear", "bicubic"}
    assert alike(ours, [entry.name.lower() for entry in resample]) > 0.01
    # Drawn for each operation, not for each image.
    assert abs((params.filters[:, 0] == params.filters[:, 1]).mean() - 0.5) < 0.05
    one = draw(T.TimmRandAugment("rand", {"interpolation": Image.Resampling.BILINEAR}), 50)
    assert one.filters is not None
    assert (one.filters == FILTERS.index("bilinear")).all()
    assert T.TimmRandAugment("rand", {"interpolation": "random"}).hparams == (
        ("interpolation", ("bilinear", "bicubic")),
    )


@pytest.mark.parametrize("name", sorted(CODE_NAMES))
def test_operations_are_timms(published, name, monkeypatch):
    """At each magnitude, of either sign, with both filters, through the stage on the CPU."""
    low = np.random.default_rng(6).integers(0, 256, (6, 5, 3), np.uint8)
    picture = Image.fromarray(low).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
    hparams = {"img_mean": (3, 90, 200), "translate_pct": 0.4}
    ours = T.TimmRandAugment("rand-mmax20", hparams)
    number = NAMES.index(name.replace("Rel", ""))
    strengths = [0, 0.3, 1, 2.5, 3, 4, 5.5, 6, 7, 8, 9, 9.7, 10, 12, 20]
    rows = [(strength, sign, filter_) for strength in strengths for sign in (1, -1) for filter_ in (1, 2)]
    magnitudes = np.array([[strength] for strength, _, _ in rows], np.float64)
    negative = np.array([[0.9 if sign < 0 else 0.1] for _, sign, _ in rows])
    kinds, sizes = np.full((len(rows), 1), number), np.tile([[HEIGHT, WIDTH]], (len(rows), 1))
    values = _recipe(ours.config, ours.hparams).strength.values(kinds, magnitudes, negative, sizes)
    params = Ops(CODES[kinds], values, np.array([[filter_] for _, _, filter_ in rows]))
    images = RaggedImages.from_arrays([np.asarray(picture)] * len(rows))
    results = compile_stage(T.Chain([ours]), device="cpu")(images, program(ours, params, sizes))
    operation = published.AugmentOp(name, hparams=hparams)
    for row, (strength, sign, filter_) in enumerate(rows):
        monkeypatch.setattr(published, "_randomly_negate", lambda value, sign=sign: sign * value)
        arguments: tuple[Any, ...] = operation.level_fn(strength, hparams) if operation.level_fn else ()
        resample = (Image.Resampling.BILINEAR, Image.Resampling.BICUBIC)[filter_ - 1]
        if operation.aug_fn is published.posterize and arguments[0] < 1:  # refused since Pillow 13, nothing before
            expected = Image.new("RGB", picture.size)
        else:
            expected = operation.aug_fn(picture, *arguments, fillcolor=(3, 90, 200), resample=resample)
        difference = abs(results[row].permute(1, 2, 0).numpy().astype(int) - np.asarray(expected))
        assert difference.max() <= 1, (strength, sign)
        assert "Contrast" in name or difference.mean() < 0.01, (strength, sign)


def test_draws_hang_on_the_position_alone():
    for config in ("rand-m9-mstd0.5-inc1", "rand-n3-tweights"):
        transform = T.TimmRandAugment(config)
        together = draw(transform, 40)
        one = T.Chain([transform]).draw(epoch_key(8, 0), np.array([33]), np.array([[HEIGHT, WIDTH]])).records[0]
        assert np.array_equal(one.codes[0], together.codes[33])
        assert np.array_equal(one.values[0], together.values[33])


def test_weighted_operations_are_drawn_without_replacement():
    codes = draw(T.TimmRandAugment("rand-n15-p1-tweights"), 200).codes
    assert (np.sort(codes, axis=1) == np.sort(CODES[[NAMES.index(name) for name in SETS["weights"]]])).all()
    assert len(set(map(tuple, codes.tolist()))) > 150


def test_no_operation():
    assert draw(T.TimmRandAugment("rand-n0"), 3).codes.shape == (3, 0)
    assert (draw(T.TimmRandAugment("rand-p0"), 300).codes == NOTHING).all()


def test_fill_and_repr():
    assert T.TimmRandAugment("rand").outside(masks=False) == (128, 128, 128)
    shown = T.TimmRandAugment("rand-m9-mstd0.5-inc1", {"img_mean": (124, 116, 104), "translate_const": 100})
    assert shown.outside(masks=False) == (124, 116, 104)
    assert (
        repr(shown)
        == "TimmRandAugment('rand-m9-mstd0.5-inc1', {'img_mean': (124, 116, 104), 'translate_const': 100.0})"
    )
    assert hash(shown) == hash(T.TimmRandAugment(shown.config, dict(shown.hparams)))
    assert shown.image_only


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("augmix-m5",), "TimmRandAugment(config=…) must begin with 'rand', such as 'rand-m9-n2', got 'augmix-m5'"),
        ((9,), "TimmRandAugment(config=…) must be a string such as 'rand-m9-n2', got 9"),
        (("rand-m9-w0",), "has a part that is not understood, 'w0'; parts are m, n, p, mstd, mmax and inc"),
        (("rand-m",), "has a part that is not understood, 'm'"),
        (("rand-m-3",), "has a part that is not understood, 'm'"),
        (("rand-m9.5",), "TimmRandAugment(config='rand-m9.5'): m must be a whole number, got 9.5"),
        (("rand-p1.5",), "p is a probability and must lie in 0 … 1, got 1.5"),
        (("rand-t9",), "names an unknown set of operations, 't9'; there are tweights, t3a, t3aw"),
        (("rand-n16-tweights",), "asks for 16 operations, but tweights draws from 15 without replacement"),
        (("rand", [1]), "TimmRandAugment(hparams=…) must be a dict, got [1] (list)"),
        (("rand", {"mean": 1}), "TimmRandAugment(hparams=…) takes img_mean, interpolation, magnitude_max"),
        (("rand", {"magnitude_std": -1}), "TimmRandAugment(hparams['magnitude_std']) must not be negative, got -1"),
        (("rand", {"translate_pct": "x"}), "TimmRandAugment(hparams['translate_pct']) must be a number, got 'x'"),
        (("rand", {"interpolation": "box"}), "TimmRandAugment(hparams['interpolation']) must be one of 'nearest'"),
        (("rand", {"img_mean": (1, 2, 300)}), "TimmRandAugment(hparams['img_mean']) is given in levels"),
    ],
)
def test_wrong_arguments(arguments, text):
    with pytest.raises((TypeError, ValueError)) as caught:
        T.TimmRandAugment(*arguments)
    assert text in str(caught.value)
