"""timm's RandAugment, AutoAugment and AugMix, configured by the strings of timm's recipes.

Semantics and constants are those of `timm.data.auto_augment` in timm 1.0. The policy ``original`` is from Cubuk et al.,
"AutoAugment: Learning Augmentation Strategies from Data", CVPR 2019; ``v0`` from the TPU implementation of
EfficientNet; ``3a`` from Touvron et al., "DeiT III", 2022. The suffix ``r`` selects a posterize operation whose
strength grows with the magnitude. Unlike the published RandAugment, timm's version skips operations at random, can vary
magnitudes, and can shift by fractions of a pixel.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, ClassVar, Final

import numpy as np

from gpuload.checks import finite_number, is_sequence, probability, string
from gpuload.rng.distributions import normal
from gpuload.transforms.arguments import fill_values, interpolation_name
from gpuload.transforms.base import declaration
from gpuload.transforms.policies import IMAGENET, MAX_DEPTH, AutomaticAugment, Kind, OperationTable, Recipe, policy
from gpuload.transforms.program.ops import ChainMixture, Record
from gpuload.transforms.program.windows import filter_names

__all__ = ["TimmAugMix", "TimmAutoAugment", "TimmRandAugment"]

TIMM: Final = OperationTable(
    {
        "AutoContrast": Kind("autocontrast"),
        "Equalize": Kind("equalize"),
        "Invert": Kind("invert"),
        "Rotate": Kind("warp", scale=30.0, signed=True),
        "ShearX": Kind("warp", scale=0.3, signed=True),
        "ShearY": Kind("warp", scale=0.3, signed=True),
        "TranslateX": Kind("warp", scale=1.0, signed=True),
        "TranslateY": Kind("warp", scale=1.0, signed=True),
        "Posterize": Kind("posterize", scale=4.0, bounds=(0, 8), is_integer=True),
        "PosterizeIncreasing": Kind("posterize", 4.0, -4.0, (0, 8), is_integer=True),
        "Solarize": Kind("solarize", scale=256.0, bounds=(0, 256), is_integer=True),
        "SolarizeIncreasing": Kind("solarize", 256.0, -256.0, (0, 256), is_integer=True),
        "SolarizeAdd": Kind("solarize_add", scale=110.0, bounds=(0, 128), is_integer=True),
        "Color": Kind("saturation", 0.1, 1.8),
        "Contrast": Kind("contrast", 0.1, 1.8),
        "Brightness": Kind("brightness", 0.1, 1.8),
        "Sharpness": Kind("sharpness", 0.1, 1.8),
        "ColorIncreasing": Kind("saturation", 1.0, 0.9, (0.1, math.inf), signed=True),
        "ContrastIncreasing": Kind("contrast", 1.0, 0.9, (0.1, math.inf), signed=True),
        "BrightnessIncreasing": Kind("brightness", 1.0, 0.9, (0.1, math.inf), signed=True),
        "SharpnessIncreasing": Kind("sharpness", 1.0, 0.9, (0.1, math.inf), signed=True),
        "Desaturate": Kind("saturation", 0.5, -0.5, (0, 0.5)),
        "GaussianBlur": Kind("pillow_blur", 0.1, 1.9, (0.1, 2.0)),
        "PosterizeOriginal": Kind("posterize", 4.0, 4.0, (0, 8), is_integer=True),
        "GaussianBlurRand": Kind("pillow_blur", 0.1, 1.0),  # with a random strength
    }
)
RANDOM_BLUR: Final = TIMM.names.index("GaussianBlurRand")

HPARAMS: Final = ("img_mean", "interpolation", "magnitude_max", "magnitude_std", "translate_const", "translate_pct")
FULL_MAGNITUDE: Final = 10.0  # the magnitude that means full strength, and the default maximum
UNIFORM_ABOVE: Final = 100.0  # a larger standard deviation means "inf": magnitudes are drawn uniformly


def _parse_choices(text: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the kinds with these comma-separated names, and the weights that follow the names, or None."""
    entries = [entry.split() for entry in text.split(",")]
    weights = np.array([float(entry[1]) for entry in entries]) if len(entries[0]) > 1 else None
    return TIMM.find_kinds(entry[0] for entry in entries), weights


# RandAugment draws operations from one of these sets: the default, the set for "inc1", and the sets for "t…".
_DEFAULT_NAMES: Final = (
    "AutoContrast, Equalize, Invert, Rotate, Posterize, Solarize, SolarizeAdd, Color, Contrast, Brightness, Sharpness, "
    "ShearX, ShearY, TranslateX, TranslateY"
)
DEFAULT_SET: Final = _parse_choices(_DEFAULT_NAMES)
INCREASING_SET: Final = _parse_choices(
    re.sub(r"\b(Posterize|Solarize|Color|Contrast|Brightness|Sharpness)\b", r"\1Increasing", _DEFAULT_NAMES)
)
SETS: Final = {
    "weights": _parse_choices(
        "Rotate 3, ShearX 2, ShearY 2, TranslateX 1, TranslateY 1, ColorIncreasing .25, SharpnessIncreasing .25, "
        "AutoContrast .25, SolarizeIncreasing .05, SolarizeAdd .05, ContrastIncreasing .05, BrightnessIncreasing .05, "
        "Equalize .05, PosterizeIncreasing .05, Invert .05"
    ),
    "3a": _parse_choices("SolarizeIncreasing, Desaturate, GaussianBlur"),
    "3aw": _parse_choices(
        "SolarizeIncreasing 6, Desaturate 6, GaussianBlur 6, Rotate 3, ShearX 2, ShearY 2, PosterizeIncreasing 1, "
        "AutoContrast 1, ColorIncreasing 1, SharpnessIncreasing 1, ContrastIncreasing 1, BrightnessIncreasing 1, "
        "Equalize 1, Invert 1"
    ),
}
AUGMIX_KINDS, _ = _parse_choices(
    "AutoContrast, ColorIncreasing, ContrastIncreasing, BrightnessIncreasing, SharpnessIncreasing, Equalize, Rotate, "
    "PosterizeIncreasing, SolarizeIncreasing, ShearX, ShearY, TranslateX, TranslateY"
)
_V0: Final = """
    Equalize .8 1, ShearY .8 4; Color .4 9, Equalize .6 3; Color .4 1, Rotate .6 8; Solarize .8 3, Equalize .4 7;
    Solarize .4 2, Solarize .6 2; Color .2 0, Equalize .8 8; Equalize .4 8, SolarizeAdd .8 3; ShearX .2 9, Rotate .6 8;
    Color .6 1, Equalize 1 2; Invert .4 9, Rotate .6 0; Equalize 1 9, ShearY .6 3; Color .4 7, Equalize .6 0;
    Posterize .4 6, AutoContrast .4 7; Solarize .6 8, Color .6 9; Solarize .2 4, Rotate .8 9;
    Rotate 1 7, TranslateY .8 9; ShearX 0 0, Solarize .8 4; ShearY .8 0, Color .6 4; Color 1 0, Rotate .6 2;
    Equalize .8 4, Equalize 0 8; Equalize 1 4, AutoContrast .6 2; ShearY .4 7, SolarizeAdd .6 7;
    Posterize .8 2, Solarize .6 10; Solarize .6 8, Equalize .6 1; Color .8 6, Rotate .4 5
"""
POLICIES: Final = {
    "original": IMAGENET.replace("Posterize", "PosterizeOriginal"),
    "originalr": IMAGENET.replace("Posterize", "PosterizeIncreasing"),
    "v0": _V0,
    "v0r": _V0.replace("Posterize", "PosterizeIncreasing"),
    "3a": "Solarize 1 5; Desaturate 1 10; GaussianBlurRand 1 10",
}


class TimmAugment(AutomaticAugment):
    """Base class of timm's methods, which have a `config` and `hparams`."""

    table: ClassVar[OperationTable] = TIMM
    is_timm: ClassVar[bool] = True
    fill_argument: ClassVar[str] = "hparams['img_mean']"
    example: ClassVar[str]  # a config, for messages
    heads: ClassVar[tuple[str, ...]]  # the allowed first parts of a config
    defaults: ClassVar[dict[str, Any]]  # the values of the parts that a config omits

    config: str
    hparams: Any

    def __post_init__(self) -> None:
        name = type(self).__name__
        string(f"{name}(config=…)", self.config)
        object.__setattr__(self, "hparams", _check_hparams(name, self.hparams))
        self.recipe  # noqa: B018  # raises a ValueError if the config is invalid

    @property
    def parts(self) -> dict[str, Any]:
        """The parsed config: the number of each part, keyed by its name (``m``, ``mstd`` …); ``"t"`` has the name of
        the set, and ``""`` the first part."""
        return _parse_config(type(self), self.config)

    @property
    def fill(self) -> Any:
        """The pixel values outside an image."""
        return dict(self.hparams).get("img_mean", (128, 128, 128))

    @property
    def filter_names(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return dict(self.hparams).get("interpolation", filter_names("random"))

    def strengths(
        self, kinds: np.ndarray, magnitudes: Any, signs: np.ndarray, spread: np.ndarray, sizes_hw: np.ndarray
    ) -> np.ndarray:
        parts, hparams = self.parts, dict(self.hparams)
        deviation = hparams.get("magnitude_std", parts["mstd"])
        if deviation == math.inf:
            magnitudes = magnitudes * spread[:, : kinds.shape[1]]
        elif deviation:
            magnitudes = magnitudes + deviation * normal(spread)[:, : kinds.shape[1]]
        max_magnitude = hparams.get("magnitude_max", parts.get("mmax")) or FULL_MAGNITUDE
        strengths = np.clip(magnitudes, 0.0, max_magnitude) / FULL_MAGNITUDE
        # The maximum radius of a random blur is 2 · strength. A blur has no sign, so the random number that is
        # meant for the sign determines the radius, from 0.1 to the maximum.
        strengths = np.where(kinds == RANDOM_BLUR, signs * (np.clip(strengths * 2.0, 0.0, 2.0) - 0.1), strengths)
        rows, columns, sides = TIMM.find_shifts(kinds, sizes_hw)
        strengths[rows, columns] *= hparams.get("translate_pct", 0.45)
        strengths[rows, columns] *= sides
        return strengths

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.config!r}{f', {dict(self.hparams)!r}' if self.hparams else ''})"


def _check_hparams(class_name: str, hparams: object) -> tuple[tuple[str, Any], ...]:
    """Check the hyperparameters and return them as pairs, since a dict is not hashable."""
    if hparams is None:
        return ()
    if not isinstance(hparams, Mapping | tuple):
        raise TypeError(f"{class_name}(hparams=…) must be a dict, got {hparams!r} ({type(hparams).__name__})")
    checked: dict[str, Any] = {}
    for name, value in sorted(dict(hparams).items()):
        label = f"{class_name}(hparams[{name!r}])"
        if name not in HPARAMS:
            raise ValueError(f"{class_name}(hparams=…) takes {', '.join(HPARAMS)} as keys, got {name!r}")
        if name == "img_mean":
            checked[name] = fill_values(label, value, uint8=True)
        elif name == "interpolation":
            filters = filter_names("random") if value == "random" else value if is_sequence(value) else (value,)
            checked[name] = tuple(interpolation_name(label, entry) for entry in filters)
        elif name == "magnitude_max" and value is None:
            continue  # timm's default maximum
        else:
            is_uniform = name == "magnitude_std" and value == math.inf
            checked[name] = math.inf if is_uniform else finite_number(label, value, minimum=0)
    return tuple(checked.items())


@lru_cache(maxsize=32)
def _parse_config(cls: type[TimmAugment], config: str) -> dict[str, Any]:
    """Parse a config; see `TimmAugment.parts`."""
    class_name, (head, *parts), values = cls.__name__, config.split("-"), dict(cls.defaults)
    label = f"{class_name}(config={config!r})"
    if head not in cls.heads:
        heads = ", ".join(map(repr, cls.heads))
        heads = f"one of {heads}" if len(cls.heads) > 1 else f"{heads}, as in {cls.example!r}"
        raise ValueError(f"{class_name}(config=…) must begin with {heads}, got {config!r}")
    values[""] = head
    for part in parts:
        if "t" in values and part.startswith("t"):
            values["t"] = part[1:]
            if part[1:] not in SETS:
                set_names = ", ".join("t" + name for name in SETS)
                raise ValueError(f"{label} names an unknown set of operations, {part!r}; valid sets are {set_names}")
            continue
        match = re.fullmatch(r"([a-z]+)(\d+\.?\d*|inf)", part)
        if match is None or match[1] not in cls.defaults:
            remedy = "each part must be one of " + ", ".join(cls.defaults) + ", with a number"
            if "t" in values:
                remedy = "valid parts are m, n, p, mstd, mmax and inc, each with a number, and t with a name"
            raise ValueError(f"{label} has an unknown part, {part!r}; {remedy}")
        key, number = match[1], float(match[2])
        if key == "p":
            probability(f"{label}: p", number)
        if key not in ("p", "a", "mstd") and not number.is_integer():
            raise ValueError(f"{label}: {key} must be a whole number, got {match[2]}")
        values[key] = math.inf if key == "mstd" and number > UNIFORM_ABOVE else number
    return values


@declaration
class TimmRandAugment(TimmAugment):
    """timm's RandAugment: `timm.data.auto_augment.rand_augment_transform(config, hparams)`.

    Args:
        config: ``"rand"``, then parts separated by dashes, in any order (defaults in parentheses): ``m``, the
            magnitude, an integer (10); ``n``, the number of operations (2); ``p``, the probability of each operation
            (0.5); ``mstd``, the standard deviation of the magnitude (0), where ``inf`` or more than 100 means uniform
            in 0 … m; ``mmax``, the maximum magnitude (10); ``inc1``, which selects operations whose strength grows with
            the magnitude; ``t``, which selects another set of operations: ``tweights``, ``t3a`` or ``t3aw``. ``w``,
            which older strings contain, is an error, as in timm.
        hparams: a dict with any of these keys: ``img_mean``, the pixel values outside the image ((128, 128, 128));
            ``interpolation``, a filter, or several filters from which one is drawn for each operation ("random", the
            default, means bilinear and bicubic); ``translate_pct``, the maximum shift as a fraction of the side (0.45);
            ``magnitude_std`` and ``magnitude_max``, which override the string; ``translate_const``, which timm's
            RandAugment accepts but does not use.

    Example:
        >>> TimmRandAugment("rand-m9-mstd0.5-inc1", {"img_mean": (124, 116, 104)})
        TimmRandAugment('rand-m9-mstd0.5-inc1', {'img_mean': (124, 116, 104)})
    """

    example: ClassVar[str] = "rand-m9-n2"
    heads: ClassVar[tuple[str, ...]] = ("rand",)
    defaults: ClassVar[dict[str, Any]] = {"m": 10.0, "n": 2, "p": 0.5, "mstd": 0.0, "mmax": 10.0, "inc": 0, "t": None}

    config: str
    hparams: Any = None

    @property
    def recipe(self) -> Recipe:
        parts = self.parts
        count, set_name = int(parts["n"]), parts["t"]
        kinds, weights = SETS[set_name] if set_name is not None else INCREASING_SET if parts["inc"] else DEFAULT_SET
        if weights is not None and count > len(weights):
            raise ValueError(
                f"TimmRandAugment(config={self.config!r}) requests {count} operations, but t{set_name} draws "
                f"without replacement from {len(weights)}; use n{len(weights)} or less"
            )
        return Recipe(kinds, parts["m"], parts["p"], depth=count, weights=weights)


@declaration
class TimmAutoAugment(TimmAugment):
    """timm's AutoAugment: `timm.data.auto_augment.auto_augment_transform(config, hparams)`.

    Args:
        config: a policy, ``"original"``, ``"originalr"``, ``"v0"``, ``"v0r"`` or ``"3a"``, from which one entry is
            drawn for each image; optionally followed by a dash and ``mstd``, the standard deviation of magnitudes (0).
        hparams: as for `TimmRandAugment`.

    Example:
        >>> TimmAutoAugment("original-mstd0.5")
        TimmAutoAugment('original-mstd0.5')
    """

    example: ClassVar[str] = "original-mstd0.5"
    heads: ClassVar[tuple[str, ...]] = tuple(POLICIES)
    defaults: ClassVar[dict[str, Any]] = {"mstd": 0.0}

    config: str = "v0"
    hparams: Any = None

    @property
    def recipe(self) -> Recipe:
        return Recipe(*policy(TIMM, POLICIES[self.parts[""]]), depth=2)


@declaration
class TimmAugMix(TimmAugment):
    """timm's AugMix: `timm.data.auto_augment.augment_and_mix_transform(config, hparams)`.

    Args:
        config: ``"augmix"``, then parts separated by dashes (defaults in parentheses): ``m``, the magnitude, an integer
            (3); ``w``, the number of chains (3); ``d``, the number of operations in each chain (drawn from 1 … 3);
            ``a``, the parameter of the beta and Dirichlet distributions of the shares (1); ``mstd``, the standard
            deviation of the magnitude (uniform in 0 … m). ``b1``, timm's faster blending, is an error.
        hparams: as for `TimmRandAugment`.

    Example:
        >>> TimmAugMix("augmix-m5-w4-d2")
        TimmAugMix('augmix-m5-w4-d2')
    """

    record: ClassVar[type[Record]] = ChainMixture
    example: ClassVar[str] = "augmix-m5-w4-d2"
    heads: ClassVar[tuple[str, ...]] = ("augmix",)
    defaults: ClassVar[dict[str, Any]] = {"m": 3.0, "w": 3, "d": 0, "a": 1.0, "b": 0, "mstd": math.inf}

    config: str = "augmix"
    hparams: Any = None

    @property
    def recipe(self) -> Recipe:
        parts = self.parts
        if parts["b"]:
            raise ValueError(
                f"TimmAugMix(config={self.config!r}): b1, timm's faster blending, is not supported; remove -b1"
            )
        for key in ("w", "a"):
            if not parts[key]:
                raise ValueError(f"TimmAugMix(config={self.config!r}): {key} must be greater than 0")
        width, depth = int(parts["w"]), int(parts["d"])
        return Recipe(
            AUGMIX_KINDS, parts["m"], depth=depth or MAX_DEPTH, width=width, alpha=parts["a"], random_depth=not depth
        )
