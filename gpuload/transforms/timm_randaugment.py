"""timm's RandAugment, from the strings that its recipes are written with, such as ``"rand-m9-mstd0.5-inc1"``.

Unlike the published one, it skips each operation with a probability, may vary magnitudes, and shifts by fractions of
pixels.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np

from gpuload.transforms.base import Uniforms, declaration
from gpuload.transforms.program.ops import NOTHING, Ops
from gpuload.transforms.timm_operations import CODES, MAGNITUDES, NAMES, TABLE, UNIFORM_FROM, Strength, TimmAugment

__all__ = ["TimmRandAugment"]

PLAIN: Final = (
    *("AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize", "SolarizeAdd", "Color", "Contrast"),
    *("Brightness", "Sharpness", "ShearX", "ShearY", "TranslateX", "TranslateY"),
)
INCREASING: Final = tuple(name + "Increasing" if name + "Increasing" in TABLE else name for name in PLAIN)


def _weighted(text: str) -> dict[str, float]:
    return {name: float(weight) for name, weight in (entry.split() for entry in text.split(","))}


# The sets of operations that a string names after "t"; with weights, unless all are equally likely.
SETS: Final = {
    "weights": _weighted(
        "Rotate 3, ShearX 2, ShearY 2, TranslateX 1, TranslateY 1, ColorIncreasing .25, SharpnessIncreasing .25, "
        "AutoContrast .25, SolarizeIncreasing .05, SolarizeAdd .05, ContrastIncreasing .05, BrightnessIncreasing .05, "
        "Equalize .05, PosterizeIncreasing .05, Invert .05"
    ),
    "3a": ("SolarizeIncreasing", "Desaturate", "GaussianBlur"),
    "3aw": _weighted(
        "SolarizeIncreasing 6, Desaturate 6, GaussianBlur 6, Rotate 3, ShearX 2, ShearY 2, PosterizeIncreasing 1, "
        "AutoContrast 1, ColorIncreasing 1, SharpnessIncreasing 1, ContrastIncreasing 1, BrightnessIncreasing 1, "
        "Equalize 1, Invert 1"
    ),
}


class _Recipe(NamedTuple):
    """What a string and its hyperparameters mean. `weights` is None if operations are drawn with replacement."""

    kinds: np.ndarray
    weights: np.ndarray | None
    layers: int
    probability: float
    strength: Strength


@declaration
class TimmRandAugment(TimmAugment):
    """timm's RandAugment: `timm.data.auto_augment.rand_augment_transform(config, hparams)`.

    Args:
        config: ``"rand"``, then parts separated by dashes, in any order: ``m`` magnitude, a whole number (10); ``n``
            the number of operations (2); ``p`` the probability of each (0.5); ``mstd`` the standard deviation of the
            magnitude (0), where ``inf``, or more than 100, means uniform in 0 … m; ``mmax`` the greatest magnitude
            (10); ``inc1`` for operations whose strength grows with the magnitude; ``t`` another set of operations:
            ``tweights``, ``t3a`` or ``t3aw``. ``w``, of older strings, is refused, as by timm.
        hparams: a dict with any of: ``img_mean``, the fill outside the image, in levels ((128, 128, 128));
            ``interpolation``, a filter, or several, one of which is drawn for each operation ("random", the default:
            bilinear and bicubic); ``translate_pct``, the greatest shift, a share of the side (0.45); ``magnitude_std``
            and ``magnitude_max``, which override those of the string; ``translate_const``, which timm's RandAugment
            accepts but does not use.

    Raises:
        TypeError, ValueError: the string has a part that is not one of these, or a hyperparameter is wrong.

    Example:
        >>> TimmRandAugment("rand-m9-mstd0.5-inc1", {"img_mean": (124, 116, 104)})
        TimmRandAugment('rand-m9-mstd0.5-inc1', {'img_mean': (124, 116, 104)})
    """

    example: ClassVar[str] = "rand-m9-n2"

    config: str
    hparams: Any = None

    def kinds(self) -> np.ndarray:
        return _recipe(self.config, self.hparams).kinds

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Ops:
        recipe = _recipe(self.config, self.hparams)
        layers = recipe.layers
        choices = layers if recipe.weights is None else len(recipe.kinds)
        numbers = uniforms(choices + 4 * layers + layers % 2)
        which, done, signs, filters, spread = np.split(
            numbers, np.cumsum([choices, layers, layers, layers]).tolist(), axis=1
        )
        if recipe.weights is None:
            chosen = (which * len(recipe.kinds)).astype(np.int64)
        else:
            # The order of exponential times at these rates is that of draws without replacement.
            chosen = np.argsort(-np.log(which) / recipe.weights, axis=1)[:, :layers]
        kinds = recipe.kinds[chosen]
        values = recipe.strength.values(kinds, recipe.strength.magnitudes(kinds.shape, spread), signs, sizes_hw)
        codes = np.where(done <= recipe.probability, CODES[kinds], NOTHING)
        return Ops(codes, values, self.filters(filters), self.outside(masks=False))


@lru_cache(maxsize=32)
def _recipe(config: str, hparams: tuple[tuple[str, Any], ...]) -> _Recipe:
    first, *parts = config.split("-")
    if first != "rand":
        raise ValueError(f"TimmRandAugment(config=…) must begin with 'rand', such as 'rand-m9-n2', got {config!r}")
    found = {"m": MAGNITUDES, "n": 2.0, "p": 0.5, "mstd": 0.0, "mmax": MAGNITUDES, "inc": 0.0}
    chosen = None
    for part in parts:
        if part.startswith("t"):
            chosen = part[1:]
            if chosen not in SETS:
                raise ValueError(
                    f"TimmRandAugment(config={config!r}) names an unknown set of operations, {part!r}; there are "
                    f"{', '.join('t' + name for name in SETS)}"
                )
            continue
        key, number = _number(config, part)
        found[key] = number
    deviation = math.inf if found["mstd"] > UNIFORM_FROM else found["mstd"]
    operations = SETS[chosen] if chosen is not None else INCREASING if found["inc"] else PLAIN
    weights = None
    if isinstance(operations, dict):
        weights = np.array(list(operations.values()), np.float64)
        if found["n"] > len(weights):
            raise ValueError(
                f"TimmRandAugment(config={config!r}) asks for {found['n']:g} operations, but t{chosen} draws from "
                f"{len(weights)} without replacement"
            )
    return _Recipe(
        kinds=np.array([NAMES.index(name) for name in operations], np.int64),
        weights=weights,
        layers=int(found["n"]),
        probability=found["p"],
        strength=Strength.of(hparams, found["m"], deviation, found["mmax"]),
    )


def _number(config: str, part: str) -> tuple[str, float]:
    match = re.fullmatch(r"(m|n|p|mstd|mmax|inc)(\d+\.?\d*|inf)", part)
    if match is None:
        raise ValueError(
            f"TimmRandAugment(config={config!r}) has a part that is not understood, {part!r}; parts are m, n, p, mstd, "
            "mmax and inc, each with a number, and t with a name"
        )
    key, text = match.groups()
    number = float(text)
    if key == "p" and number > 1:
        raise ValueError(f"TimmRandAugment(config={config!r}): p is a probability and must lie in 0 … 1, got {text}")
    if key in ("m", "n", "mmax", "inc") and (number != int(number) if number < math.inf else True):
        raise ValueError(f"TimmRandAugment(config={config!r}): {key} must be a whole number, got {text}")
    return key, number
