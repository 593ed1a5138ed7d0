"""timm's AutoAugment and AugMix, from the strings that its recipes are written with.

The policies are those of `timm.data.auto_augment`, timm 1.0: ``original`` is published in Cubuk et al., "AutoAugment:
Learning Augmentation Strategies from Data", CVPR 2019; ``v0`` comes from the TPU implementation of EfficientNet; ``3a``
from Touvron et al., "DeiT III", 2022. An ``r`` stands for a posterize whose strength grows with the magnitude.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import Any, ClassVar, Final

import numpy as np

from gpuload.rng.distributions import beta, beta_count, dirichlet, dirichlet_count
from gpuload.transforms.base import Uniforms, declaration
from gpuload.transforms.program.ops import NOTHING, VALUES, Mixture, Ops, Record
from gpuload.transforms.timm_operations import CODES, MAGNITUDES, NAMES, UNIFORM_FROM, Strength, TimmAugment

__all__ = ["TimmAugMix", "TimmAutoAugment"]

# Pairs of operations: name, probability, magnitude.
_V0: Final = """
    Equalize .8 1, ShearY .8 4; Color .4 9, Equalize .6 3; Color .4 1, Rotate .6 8; Solarize .8 3, Equalize .4 7;
    Solarize .4 2, Solarize .6 2; Color .2 0, Equalize .8 8; Equalize .4 8, SolarizeAdd .8 3; ShearX .2 9, Rotate .6 8;
    Color .6 1, Equalize 1 2; Invert .4 9, Rotate .6 0; Equalize 1 9, ShearY .6 3; Color .4 7, Equalize .6 0;
    Posterize .4 6, AutoContrast .4 7; Solarize .6 8, Color .6 9; Solarize .2 4, Rotate .8 9;
    Rotate 1 7, TranslateY .8 9; ShearX 0 0, Solarize .8 4; ShearY .8 0, Color .6 4; Color 1 0, Rotate .6 2;
    Equalize .8 4, Equalize 0 8; Equalize 1 4, AutoContrast .6 2; ShearY .4 7, SolarizeAdd .6 7;
    Posterize .8 2, Solarize .6 10; Solarize .6 8, Equalize .6 1; Color .8 6, Rotate .4 5
"""
_ORIGINAL: Final = """
    Posterize .4 8, Rotate .6 9; Solarize .6 5, AutoContrast .6 5; Equalize .8 8, Equalize .6 3;
    Posterize .6 7, Posterize .6 6; Equalize .4 7, Solarize .2 4; Equalize .4 4, Rotate .8 8;
    Solarize .6 3, Equalize .6 7; Posterize .8 5, Equalize 1 2; Rotate .2 3, Solarize .6 8;
    Equalize .6 8, Posterize .4 6; Rotate .8 8, Color .4 0; Rotate .4 9, Equalize .6 2; Equalize 0 7, Equalize .8 8;
    Invert .6 4, Equalize 1 8; Color .6 4, Contrast 1 8; Rotate .8 8, Color 1 2; Color .8 8, Solarize .8 7;
    Sharpness .4 7, Invert .6 8; ShearX .6 5, Equalize 1 9; Color .4 0, Equalize .6 3; Equalize .4 7, Solarize .2 4;
    Solarize .6 5, AutoContrast .6 5; Invert .6 4, Equalize 1 8; Color .6 4, Contrast 1 8; Equalize .8 8, Equalize .6 3
"""
POLICIES: Final = {
    "original": _ORIGINAL.replace("Posterize", "PosterizeOriginal"),
    "originalr": _ORIGINAL.replace("Posterize", "PosterizeIncreasing"),
    "v0": _V0,
    "v0r": _V0.replace("Posterize", "PosterizeIncreasing"),
    "3a": "Solarize 1 5; Desaturate 1 10; GaussianBlurRand 1 10",
}
LENGTH: Final = 2  # of the longest entry of a policy
MIXED: Final = (
    "AutoContrast", "ColorIncreasing", "ContrastIncreasing", "BrightnessIncreasing", "SharpnessIncreasing", "Equalize",
    "Rotate", "PosterizeIncreasing", "SolarizeIncreasing", "ShearX", "ShearY", "TranslateX", "TranslateY",
)  # fmt: skip
DEEPEST: Final = 3  # the most operations in a chain of AugMix whose depth is drawn


@declaration
class TimmAutoAugment(TimmAugment):
    """timm's AutoAugment: `timm.data.auto_augment.auto_augment_transform(config, hparams)`.

    Args:
        config: a policy, ``"original"``, ``"originalr"``, ``"v0"``, ``"v0r"`` or ``"3a"``, of which one entry is drawn
            for each image; then, after a dash, ``mstd`` with the standard deviation of magnitudes (0).
        hparams: as for `TimmRandAugment`.

    Raises:
        TypeError, ValueError: the string has a part that is not one of these, or a hyperparameter is wrong.

    Example:
        >>> TimmAutoAugment("original-mstd0.5")
        TimmAutoAugment('original-mstd0.5')
    """

    example: ClassVar[str] = "original-mstd0.5"

    config: str = "v0"
    hparams: Any = None

    def kinds(self) -> np.ndarray:
        return np.unique(_policy(self._read()[0])[0])

    def _read(self) -> tuple[str, float]:
        """The policy and the deviation."""
        name, *parts = self.config.split("-")
        if name not in POLICIES:
            raise ValueError(
                f"TimmAutoAugment(config=…) must begin with one of {', '.join(map(repr, POLICIES))}, got "
                f"{self.config!r}"
            )
        return name, _numbers(self, parts, {"mstd": 0.0})["mstd"]

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Ops:
        name, deviation = self._read()
        kinds, probabilities, magnitudes = _policy(name)
        numbers = uniforms(1 + 4 * LENGTH)
        entries = (numbers[:, 0] * len(kinds)).astype(np.int64)
        done, signs, filters, spread = np.split(numbers[:, 1:], 4, axis=1)
        kinds = kinds[entries]
        strength = Strength.of(self.hparams, magnitudes[entries], deviation, MAGNITUDES)
        values = strength.values(kinds, strength.magnitudes(kinds.shape, spread), signs, sizes_hw)
        codes = np.where(done <= probabilities[entries], CODES[kinds], NOTHING)
        return Ops(codes, values, self.filters(filters), self.outside(masks=False))


@declaration
class TimmAugMix(TimmAugment):
    """timm's AugMix: `timm.data.auto_augment.augment_and_mix_transform(config, hparams)`.

    Args:
        config: ``"augmix"``, then parts separated by dashes: ``m`` magnitude, a whole number (3); ``w`` the number of
            chains (3); ``d`` the operations in each (drawn from 1 … 3); ``a`` the parameter of the beta and the
            Dirichlet distribution of the shares (1); ``mstd`` the standard deviation of the magnitude (uniform in
            0 … m). ``b1``, timm's quicker blending, is refused.
        hparams: as for `TimmRandAugment`.

    Raises:
        TypeError, ValueError: the string has a part that is not one of these, or a hyperparameter is wrong.

    Example:
        >>> TimmAugMix("augmix-m5-w4-d2")
        TimmAugMix('augmix-m5-w4-d2')
    """

    record: ClassVar[type[Record]] = Mixture
    example: ClassVar[str] = "augmix-m5-w4-d2"

    config: str = "augmix"
    hparams: Any = None

    def kinds(self) -> np.ndarray:
        self._read()
        return np.array([NAMES.index(name) for name in MIXED], np.int64)

    def _read(self) -> dict[str, float]:
        first, *parts = self.config.split("-")
        if first != "augmix":
            raise ValueError(
                f"TimmAugMix(config=…) must begin with 'augmix', such as {self.example!r}, got {self.config!r}"
            )
        found = _numbers(self, parts, {"m": 3.0, "w": 3.0, "d": 0.0, "a": 1.0, "b": 0.0, "mstd": math.inf})
        if found["b"]:
            raise ValueError(f"TimmAugMix(config={self.config!r}): b1 blends with other shares; leave it out")
        for key in ("w", "a"):
            if not found[key]:
                raise ValueError(f"TimmAugMix(config={self.config!r}): {key} must be greater than 0")
        return found

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Mixture:
        found = self._read()
        width, fixed, alpha = int(found["w"]), int(found["d"]), found["a"]
        depth = fixed or DEEPEST
        steps, shapes = width * depth, [alpha] * width
        counts = [*[steps] * 3, steps + steps % 2, width, beta_count(alpha, alpha), dirichlet_count(shapes)]
        numbers = np.split(uniforms(sum(counts)), np.cumsum(counts[:-1]), axis=1)
        which, signs, filters, spread, depths, own, shares = numbers
        known = self.kinds()
        kinds = known[(which * len(known)).astype(np.int64)]
        strength = Strength.of(self.hparams, found["m"], found["mstd"], MAGNITUDES)
        values = strength.values(kinds, strength.magnitudes(kinds.shape, spread), signs, sizes_hw)
        codes = CODES[kinds].reshape(-1, width, depth)
        if not fixed:
            codes[np.arange(depth) > (depths * DEEPEST).astype(np.int64)[:, :, None]] = NOTHING
        mixed = beta(own, alpha, alpha)[:, None]  # the share of all chains together
        weights = np.concatenate([1 - mixed, mixed * dirichlet(shares, shapes)], axis=1)
        filters = self.filters(filters).reshape(-1, width, depth)
        values = values.reshape(-1, width, depth, VALUES)
        return Mixture(codes, values, weights, filters, self.outside(masks=False))


@lru_cache(maxsize=8)
def _policy(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A policy's kinds int64, probabilities and magnitudes float64, each (entries, `LENGTH`)."""
    entries = [[part.split() for part in entry.split(",")] for entry in POLICIES[name].split(";")]
    for entry in entries:
        entry.extend([[entry[0][0], "-1", "0"]] * (LENGTH - len(entry)))  # never done
    kinds = np.array([[NAMES.index(part[0]) for part in entry] for entry in entries], np.int64)
    probabilities, magnitudes = (np.array([[float(part[at]) for part in entry] for entry in entries]) for at in (1, 2))
    return kinds, probabilities, magnitudes


def _numbers(transform: TimmAugment, parts: list[str], found: dict[str, float]) -> dict[str, float]:
    """The numbers that parts of a string give, over these defaults."""
    shown = f"{type(transform).__name__}(config={transform.config!r})"
    for part in parts:
        match = re.fullmatch(r"([a-z]+)(\d+\.?\d*|inf)", part)
        if match is None or match[1] not in found:
            known = ", ".join(found)
            raise ValueError(f"{shown} has a part that is not understood, {part!r}; known are {known}, with a number")
        key, number = match[1], float(match[2])
        if key in ("m", "w", "d", "b") and not number.is_integer():
            raise ValueError(f"{shown}: {key} must be a whole number, got {match[2]}")
        found[key] = math.inf if key == "mstd" and number > UNIFORM_FROM else number
    return found
