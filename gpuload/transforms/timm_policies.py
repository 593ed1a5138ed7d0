"""timm's RandAugment, AutoAugment and AugMix, from the strings that its recipes are written with.

Meaning and numbers are those of `timm.data.auto_augment`, timm 1.0. Of its policies ``original`` is published in Cubuk
et al., "AutoAugment: Learning Augmentation Strategies from Data", CVPR 2019; ``v0`` comes from the TPU implementation
of EfficientNet; ``3a`` from Touvron et al., "DeiT III", 2022. An ``r`` stands for a posterize whose strength grows with
the magnitude. Unlike the published one, its RandAugment skips each operation with a probability, may vary magnitudes,
and shifts by fractions of pixels.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np

from gpuload.rng.distributions import beta, beta_count, dirichlet, dirichlet_count, normal
from gpuload.transforms.arguments import fill_values, finite, interpolation_name, is_sequence
from gpuload.transforms.base import Transform, Uniforms, declaration
from gpuload.transforms.policies import KINDS, affine
from gpuload.transforms.program.ops import NOTHING, OPS, VALUES, Mixture, Ops, Outline, Record, code
from gpuload.transforms.program.windows import FILTERS, filter_names

__all__ = [
    "CODES",
    "MAGNITUDES",
    "NAMES",
    "TABLE",
    "UNIFORM_FROM",
    "Strength",
    "TimmAugMix",
    "TimmAugment",
    "TimmAutoAugment",
    "TimmRandAugment",
]


class Kind(NamedTuple):
    """An operation: its value is `first` + `times` · L within `bounds`, where L is a tenth of the magnitude. `signed`:
    the product gets a random sign; `whole`: it is cut to a whole number; `at`: the index of the value."""

    operation: str
    first: float = 0.0
    times: float = 0.0
    bounds: tuple[float, float] = (-math.inf, math.inf)
    signed: bool = False
    whole: bool = False
    at: int = 0


def _increasing(operation: str) -> Kind:
    return Kind(operation, 1.0, 0.9, (0.1, math.inf), signed=True)


# The greatest shift, a share of the side, depends on the hyperparameters; `times` is 1 for it.
TABLE: Final = {
    "AutoContrast": Kind("autocontrast"),
    "Equalize": Kind("equalize"),
    "Invert": Kind("invert"),
    "Rotate": Kind("warp", times=30.0, signed=True),
    "ShearX": Kind("warp", times=0.3, signed=True),
    "ShearY": Kind("warp", times=0.3, signed=True),
    "TranslateX": Kind("warp", times=1.0, signed=True),
    "TranslateY": Kind("warp", times=1.0, signed=True),
    "Posterize": Kind("posterize", times=4.0, bounds=(0, 8), whole=True),
    "PosterizeIncreasing": Kind("posterize", 4.0, -4.0, (0, 8), whole=True),
    "Solarize": Kind("solarize", times=256.0, bounds=(0, 256), whole=True),
    "SolarizeIncreasing": Kind("solarize", 256.0, -256.0, (0, 256), whole=True),
    "SolarizeAdd": Kind("solarize_add", times=110.0, bounds=(0, 128), whole=True, at=1),
    "Color": Kind("saturation", 0.1, 1.8),
    "Contrast": Kind("contrast", 0.1, 1.8),
    "Brightness": Kind("brightness", 0.1, 1.8),
    "Sharpness": Kind("sharpness", 0.1, 1.8),
    "ColorIncreasing": _increasing("saturation"),
    "ContrastIncreasing": _increasing("contrast"),
    "BrightnessIncreasing": _increasing("brightness"),
    "SharpnessIncreasing": _increasing("sharpness"),
    "Desaturate": Kind("saturation", 0.5, -0.5, (0, 0.5)),
    "GaussianBlur": Kind("pillow_blur", 0.1, 1.9, (0.1, 2.0)),
    "PosterizeOriginal": Kind("posterize", 4.0, 4.0, (0, 8), whole=True),
    "GaussianBlurRand": Kind("pillow_blur", times=2.0, bounds=(0.0, 2.0)),  # the greatest radius; one is drawn below it
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
BLURS: Final = np.array([name == "GaussianBlurRand" for name in NAMES])
LEAST_RADIUS: Final = 0.1  # of these
SIDES: Final = np.array([1 if name == "TranslateX" else 0 for name in NAMES])  # in a size (height, width)

HPARAMS: Final = ("img_mean", "interpolation", "magnitude_max", "magnitude_std", "translate_const", "translate_pct")
MAGNITUDES: Final = 10.0  # a magnitude of 1 is a tenth of an operation's strength; the default upper bound
UNIFORM_FROM: Final = 100.0  # a standard deviation above it means infinity


class Strength(NamedTuple):
    """How magnitudes are drawn: around `magnitude` with a standard `deviation` (infinite: uniform from 0), up to
    `greatest`; `shift` is the greatest shift, a share of the side."""

    magnitude: float | np.ndarray
    deviation: float
    greatest: float
    shift: float

    @classmethod
    def of(
        cls, hparams: tuple[tuple[str, Any], ...], magnitude: float | np.ndarray, deviation: float, greatest: float
    ) -> Strength:
        """With these hyperparameters, which override the rest."""
        given = dict(hparams)
        return cls(
            magnitude,
            given.get("magnitude_std", deviation),
            given.get("magnitude_max", greatest) or MAGNITUDES,
            given.get("translate_pct", 0.45),
        )

    def magnitudes(self, shape: tuple[int, ...], spread: np.ndarray) -> np.ndarray:
        """Magnitudes of this shape, (n, count), from an even number of uniform numbers, (n, count or one more)."""
        if self.deviation == 0:
            found = np.broadcast_to(np.asarray(self.magnitude, np.float64), shape)
        elif self.deviation == math.inf:
            found = self.magnitude * spread[:, : shape[1]]
        else:
            found = self.magnitude + self.deviation * normal(spread)[:, : shape[1]]
        return np.clip(found, 0.0, self.greatest)

    def values(self, kinds: np.ndarray, magnitudes: np.ndarray, signs: np.ndarray, sizes_hw: np.ndarray) -> np.ndarray:
        """The values, float64 (n, count, `VALUES`), of kinds with these magnitudes; `signs` are uniform numbers."""
        terms = magnitudes / MAGNITUDES * TIMES[kinds]
        terms = np.where(SIGNED[kinds] & (signs > 0.5), -terms, terms)
        terms = np.where(WHOLE[kinds], np.trunc(terms), terms)
        amounts = np.clip(FIRST[kinds] + terms, LEAST[kinds], GREATEST[kinds])
        radii = LEAST_RADIUS + signs * (amounts - LEAST_RADIUS)  # in this order, also where the greatest is less
        amounts = np.where(BLURS[kinds], radii, amounts)
        values = np.zeros((*kinds.shape, VALUES))
        rows, columns = np.indices(kinds.shape)
        values[rows, columns, AT[kinds]] = amounts
        values[..., 0][AT[kinds] == 1] = SOLARIZE_ADD_BELOW
        rows, columns = np.nonzero(WARPS[kinds])
        if len(rows):
            which, amounts = kinds[rows, columns], amounts[rows, columns]
            shifts = amounts * self.shift * sizes_hw[rows, SIDES[which]]
            amounts = np.where(SHIFTS[which], shifts, amounts)
            values[rows, columns] = affine(WARPS[which], amounts, sizes_hw[rows])
        return values


class TimmAugment(Transform):
    """Base of timm's methods, which have a `config` and `hparams`; not a dataclass, so that each has its own."""

    image_only: ClassVar[bool] = True
    needs_whole: ClassVar[bool] = True
    fill_argument: ClassVar[str] = "hparams['img_mean']"
    record: ClassVar[type[Record]] = Ops
    example: ClassVar[str]  # a config, for messages

    config: str
    hparams: Any

    def __post_init__(self) -> None:
        own = type(self).__name__
        if not isinstance(self.config, str):
            raise TypeError(f"{own}(config=…) must be a string such as {self.example!r}, got {self.config!r}")
        object.__setattr__(self, "hparams", _checked(own, self.hparams))
        self.kinds()

    def kinds(self) -> np.ndarray:
        """Those that it chooses from, indices of `NAMES`; reads the string."""
        raise NotImplementedError

    @property
    def fill(self) -> Any:
        """The fill outside an image."""
        return dict(self.hparams).get("img_mean", (128, 128, 128))

    @property
    def filter_codes(self) -> np.ndarray:
        """Those of which one is drawn for each operation, int64 codes of `FILTERS`."""
        names = dict(self.hparams).get("interpolation", filter_names("random"))
        return np.array([FILTERS.index(name) for name in names], np.int64)

    @property
    def outline(self) -> tuple[Outline, ...]:
        operations = tuple(sorted({OPS[number] for number in CODES[self.kinds()].tolist()}))
        filters = tuple(FILTERS[number] for number in self.filter_codes.tolist())
        return (Outline(kind=self.record, name=type(self).__name__, operations=operations, filters=filters),)

    def filters(self, numbers: np.ndarray) -> np.ndarray:
        """The filters of operations, from a uniform number for each."""
        codes = self.filter_codes
        return codes[(numbers * len(codes)).astype(np.int64)]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.config!r}{f', {dict(self.hparams)!r}' if self.hparams else ''})"


def _checked(own: str, hparams: Any) -> tuple[tuple[str, Any], ...]:
    """The hyperparameters, checked, as pairs, since a dict is not hashable."""
    if hparams is None:
        return ()
    if not isinstance(hparams, Mapping | tuple):
        raise TypeError(f"{own}(hparams=…) must be a dict, got {hparams!r} ({type(hparams).__name__})")
    given, found = dict(hparams), {}
    for name, value in sorted(given.items()):
        shown = f"{own}(hparams[{name!r}])"
        if name not in HPARAMS:
            raise ValueError(f"{own}(hparams=…) takes {', '.join(HPARAMS)}, got {name!r}")
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
