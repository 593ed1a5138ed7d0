"""timm's RandAugment, from the strings that its recipes are written with, such as ``"rand-m9-mstd0.5-inc1"``.

Unlike the published one, it skips each operation with a probability, may vary magnitudes, and shifts by fractions of
pixels. Meaning and numbers are those of `timm.data.auto_augment`, timm 1.0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np

from gpuload.rng.distributions import normal
from gpuload.transforms.arguments import fill_values, finite, interpolation_name, is_sequence
from gpuload.transforms.base import Transform, Uniforms
from gpuload.transforms.policies import KINDS, affine
from gpuload.transforms.program.ops import NOTHING, OPS, VALUES, Ops, Outline, code
from gpuload.transforms.program.windows import FILTERS

__all__ = ["TimmRandAugment"]


class _Kind(NamedTuple):
    """An operation: its value is `first` + `times` · L within `bounds`, where L is a tenth of the magnitude. `signed`:
    the product gets a random sign; `whole`: it is cut to a whole number; `at`: the index of the value."""

    operation: str
    first: float = 0.0
    times: float = 0.0
    bounds: tuple[float, float] = (-math.inf, math.inf)
    signed: bool = False
    whole: bool = False
    at: int = 0


def _increasing(operation: str) -> _Kind:
    return _Kind(operation, 1.0, 0.9, (0.1, math.inf), signed=True)


# The greatest shift, a share of the side, depends on the hyperparameters; `times` is 1 for it.
TABLE: Final = {
    "AutoContrast": _Kind("autocontrast"),
    "Equalize": _Kind("equalize"),
    "Invert": _Kind("invert"),
    "Rotate": _Kind("warp", times=30.0, signed=True),
    "ShearX": _Kind("warp", times=0.3, signed=True),
    "ShearY": _Kind("warp", times=0.3, signed=True),
    "TranslateX": _Kind("warp", times=1.0, signed=True),
    "TranslateY": _Kind("warp", times=1.0, signed=True),
    "Posterize": _Kind("posterize", times=4.0, bounds=(0, 8), whole=True),
    "PosterizeIncreasing": _Kind("posterize", 4.0, -4.0, (0, 8), whole=True),
    "Solarize": _Kind("solarize", times=256.0, bounds=(0, 256), whole=True),
    "SolarizeIncreasing": _Kind("solarize", 256.0, -256.0, (0, 256), whole=True),
    "SolarizeAdd": _Kind("solarize_add", times=110.0, bounds=(0, 128), whole=True, at=1),
    "Color": _Kind("saturation", 0.1, 1.8),
    "Contrast": _Kind("contrast", 0.1, 1.8),
    "Brightness": _Kind("brightness", 0.1, 1.8),
    "Sharpness": _Kind("sharpness", 0.1, 1.8),
    "ColorIncreasing": _increasing("saturation"),
    "ContrastIncreasing": _increasing("contrast"),
    "BrightnessIncreasing": _increasing("brightness"),
    "SharpnessIncreasing": _increasing("sharpness"),
    "Desaturate": _Kind("saturation", 0.5, -0.5, (0, 0.5)),
    "GaussianBlur": _Kind("pillow_blur", 0.1, 1.9, (0.1, 2.0)),
}
NAMES: Final = tuple(TABLE)
SOLARIZE_ADD_BELOW: Final = 128.0  # levels below it are raised

# By kind, as arrays.
CODES: Final = np.array([code(kind.operation) for kind in TABLE.values()], np.int64)
FIRST: Final = np.array([kind.first for kind in TABLE.values()])
TIMES: Final = np.array([kind.times for kind in TABLE.values()])
LEAST: Final = np.array([kind.bounds[0] for kind in TABLE.values()], np.float64)
GREATEST: Final = np.array([kind.bounds[1] for kind in TABLE.values()], np.float64)
SIGNED: Final = np.array([kind.signed for kind in TABLE.values()])
WHOLE: Final = np.array([kind.whole for kind in TABLE.values()])
AT: Final = np.array([kind.at for kind in TABLE.values()])
WARPS: Final = np.array([KINDS.index(name) if TABLE[name].operation == "warp" else 0 for name in NAMES], np.int64)
SHIFTS: Final = np.array([name.startswith("Translate") for name in NAMES])
SIDES: Final = np.array([1 if name == "TranslateX" else 0 for name in NAMES])  # in a size (height, width)

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

HPARAMS: Final = ("img_mean", "interpolation", "magnitude_max", "magnitude_std", "translate_const", "translate_pct")
MAGNITUDES: Final = 10.0  # a magnitude of 1 is a tenth of an operation's strength; the default upper bound
UNIFORM_FROM: Final = 100.0  # a standard deviation above it means infinity


class _Recipe(NamedTuple):
    """What a string and its hyperparameters mean. `weights` is None if operations are drawn with replacement."""

    kinds: np.ndarray
    weights: np.ndarray | None
    layers: int
    magnitude: float
    probability: float
    deviation: float
    greatest: float
    shift: float
    filters: np.ndarray


@dataclass(frozen=True, repr=False)
class TimmRandAugment(Transform):
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

    image_only: ClassVar[bool] = True
    needs_whole: ClassVar[bool] = True
    fill_argument: ClassVar[str] = "hparams['img_mean']"

    config: str
    hparams: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.config, str):
            raise TypeError(f"TimmRandAugment(config=…) must be a string such as 'rand-m9-n2', got {self.config!r}")
        object.__setattr__(self, "hparams", _checked(self.hparams))
        _recipe(self.config, self.hparams)

    @property
    def fill(self) -> Any:
        """The fill outside an image."""
        return dict(self.hparams).get("img_mean", (128, 128, 128))

    @property
    def outline(self) -> tuple[Outline, ...]:
        recipe = _recipe(self.config, self.hparams)
        operations = tuple(sorted({OPS[number] for number in CODES[recipe.kinds].tolist()}))
        filters = tuple(FILTERS[number] for number in recipe.filters.tolist())
        return (Outline(kind=Ops, name=type(self).__name__, operations=operations, filters=filters),)

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
        magnitudes = _magnitudes(recipe, kinds.shape, spread)
        values = _values(recipe, kinds, magnitudes, signs, sizes_hw)
        codes = np.where(done <= recipe.probability, CODES[kinds], NOTHING)
        filters = recipe.filters[(filters * len(recipe.filters)).astype(np.int64)]
        return Ops(codes, values, filters, self.outside(masks=False))

    def __repr__(self) -> str:
        return f"TimmRandAugment({self.config!r}{f', {dict(self.hparams)!r}' if self.hparams else ''})"


def _magnitudes(recipe: _Recipe, shape: tuple[int, ...], spread: np.ndarray) -> np.ndarray:
    if recipe.deviation == 0:
        found = np.full(shape, recipe.magnitude)
    elif recipe.deviation == math.inf:
        found = recipe.magnitude * spread[:, : shape[1]]
    else:
        found = recipe.magnitude + recipe.deviation * normal(spread)[:, : shape[1]]
    return np.clip(found, 0.0, recipe.greatest)


def _values(
    recipe: _Recipe, kinds: np.ndarray, magnitudes: np.ndarray, signs: np.ndarray, sizes_hw: np.ndarray
) -> np.ndarray:
    terms = magnitudes / MAGNITUDES * TIMES[kinds]
    terms = np.where(SIGNED[kinds] & (signs > 0.5), -terms, terms)
    terms = np.where(WHOLE[kinds], np.trunc(terms), terms)
    amounts = np.clip(FIRST[kinds] + terms, LEAST[kinds], GREATEST[kinds])
    values = np.zeros((*kinds.shape, VALUES))
    rows, columns = np.indices(kinds.shape)
    values[rows, columns, AT[kinds]] = amounts
    values[..., 0][AT[kinds] == 1] = SOLARIZE_ADD_BELOW
    rows, columns = np.nonzero(WARPS[kinds])
    if len(rows):
        which, amounts = kinds[rows, columns], amounts[rows, columns]
        shifts = amounts * recipe.shift * sizes_hw[rows, SIDES[which]]
        amounts = np.where(SHIFTS[which], shifts, amounts)
        values[rows, columns] = affine(WARPS[which], amounts, sizes_hw[rows])
    return values


def _checked(hparams: Any) -> tuple[tuple[str, Any], ...]:
    """The hyperparameters, checked, as pairs, since a dict is not hashable."""
    if hparams is None:
        return ()
    if not isinstance(hparams, Mapping | tuple):
        raise TypeError(f"TimmRandAugment(hparams=…) must be a dict, got {hparams!r} ({type(hparams).__name__})")
    given, found = dict(hparams), {}
    for name, value in sorted(given.items()):
        shown = f"TimmRandAugment(hparams[{name!r}])"
        if name not in HPARAMS:
            raise ValueError(f"TimmRandAugment(hparams=…) takes {', '.join(HPARAMS)}, got {name!r}")
        if name == "img_mean":
            found[name] = fill_values(shown, value, uint8=True)
        elif name == "interpolation":
            several = ("bilinear", "bicubic") if value == "random" else value
            several = several if is_sequence(several) else (several,)
            found[name] = tuple(interpolation_name(shown, entry) for entry in several)
        elif name == "magnitude_max" and value is None:
            continue  # timm's word for its default
        else:
            number = math.inf if name == "magnitude_std" and value == math.inf else finite(shown, value)
            if number < 0:
                raise ValueError(f"{shown} must not be negative, got {number:g}")
            found[name] = number
    return tuple(found.items())


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
    given = dict(hparams)
    deviation = given.get("magnitude_std", math.inf if found["mstd"] > UNIFORM_FROM else found["mstd"])
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
        magnitude=found["m"],
        probability=found["p"],
        deviation=deviation,
        greatest=given.get("magnitude_max", found["mmax"]) or MAGNITUDES,
        shift=given.get("translate_pct", 0.45),
        filters=np.array([FILTERS.index(name) for name in given.get("interpolation", FILTERS[1:])], np.int64),
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
