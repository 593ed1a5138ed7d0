"""The operations of timm's automatic augmentation, and the hyperparameters of all its methods.

Meaning and numbers are those of `timm.data.auto_augment`, timm 1.0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np

from gpuload.rng.distributions import normal
from gpuload.transforms.arguments import fill_values, finite, interpolation_name, is_sequence
from gpuload.transforms.base import Transform
from gpuload.transforms.policies import KINDS, affine
from gpuload.transforms.program.ops import OPS, VALUES, Ops, Outline, Record, code
from gpuload.transforms.program.windows import FILTERS, filter_names

__all__ = ["CODES", "MAGNITUDES", "NAMES", "TABLE", "UNIFORM_FROM", "Strength", "TimmAugment"]


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
