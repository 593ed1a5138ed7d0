"""Automatic augmentation as in torchvision: AutoAugment, RandAugment, TrivialAugment and AugMix.

A *kind* is an operation as the papers name it, by its index in `KINDS`; `operations` turns kinds and magnitudes into
codes and values of `program.ops.OPS`. Magnitudes come in bins from none to the greatest, as float32, like
torchvision's: they are cut to whole pixels, so a last bit can be a pixel. Boxes, masks and keypoints are refused, as by
torchvision: the published methods are for classification.

Sources of the policies: Cubuk et al., "AutoAugment: Learning Augmentation Strategies from Data", CVPR 2019; of the
spaces: "RandAugment", NeurIPS 2020; Müller, Hutter, "TrivialAugment", ICCV 2021; Hendrycks et al., "AugMix", ICLR 2020;
with the ranges of torchvision 0.28.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Final

import numpy as np

from gpuload.rng.distributions import beta, beta_count, dirichlet, dirichlet_count
from gpuload.transforms.arguments import Interpolation, fill_values, finite, interpolation_name, whole
from gpuload.transforms.base import Transform, Uniforms, declaration
from gpuload.transforms.program.ops import NOTHING, OPS, VALUES, Mixture, Ops, Outline, Record, code
from gpuload.transforms.warps import IDENTITY, rotation_coefficients

__all__ = [
    "AUTO",
    "KINDS",
    "MIX",
    "POLICIES",
    "RAND",
    "WIDE",
    "AugMix",
    "AutoAugment",
    "AutomaticAugment",
    "RandAugment",
    "Space",
    "TrivialAugmentWide",
    "affine",
    "chosen",
    "operations",
    "policy_table",
    "signed",
]

KINDS: Final = (
    "Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Color", "Contrast",
    "Sharpness", "Posterize", "Solarize", "AutoContrast", "Equalize", "Invert",
)  # fmt: skip
SHEAR_X, SHEAR_Y, TRANSLATE_X, TRANSLATE_Y, ROTATE = range(1, 6)
AMOUNT_AT: Final = np.array([0, 1, 3, 2, 5, 0])  # by kind, up to ROTATE, whose coefficients are all its own

# By kind: the code; whether the magnitude has a sign; the operation's first value is `FIRST` + `TIMES` * magnitude.
_NAMES: Final = (
    "identity warp warp warp warp warp brightness saturation contrast sharpness posterize solarize "
    "autocontrast equalize invert"
)
CODES: Final = np.array([code(name) for name in _NAMES.split()], np.int64)
SIGNED: Final = np.array([1 <= kind <= 9 for kind in range(len(KINDS))])
FIRST: Final = np.array([1.0 if 6 <= kind <= 9 else 0.0 for kind in range(len(KINDS))])
TIMES: Final = np.array([{10: 1.0, 11: 255.0}.get(kind, FIRST[kind]) for kind in range(len(KINDS))])


@dataclass(frozen=True)
class Space:
    """The operations that one method chooses from, and their greatest magnitudes.

    `shear` is a tangent, `rotate` an angle in degrees, `enhance` is added to a factor of 1; `translate` is a share of
    the image's side, or a number of pixels if `pixels`. `bits` are those that posterize keeps in the first bin and in
    the last.
    """

    kinds: tuple[str, ...]
    shear: float
    translate: float
    rotate: float
    enhance: float
    bits: tuple[int, int]
    pixels: bool = False

    @cached_property
    def numbers(self) -> np.ndarray:
        """The kinds, as indices in `KINDS`."""
        return np.array([KINDS.index(kind) for kind in self.kinds], np.int64)

    @property
    def operations(self) -> tuple[str, ...]:
        """The names in `OPS` of the kinds, sorted."""
        return tuple(sorted({OPS[number] for number in CODES[self.numbers].tolist()}))

    def magnitudes(self, kinds: np.ndarray, count: int, bins: np.ndarray, sizes_hw: np.ndarray) -> np.ndarray:
        """Float64 (B, n), without a sign, of the kinds (B, n) in these of the `count` bins."""
        found = _magnitudes(self, count)[kinds, bins]
        if not self.pixels:
            shifted = (kinds == TRANSLATE_X) | (kinds == TRANSLATE_Y)
            if shifted.any():
                rows, columns = shifted.nonzero()
                sides = sizes_hw[rows, (kinds[rows, columns] == TRANSLATE_X).astype(np.int64)]
                found[rows, columns] = _ramp(self.translate * sides, count, bins[rows, columns])
        return found


def _ramp(ends: np.ndarray | float, count: int, bins: np.ndarray, *, down: bool = False) -> np.ndarray:
    """Numbers of ramps from 0 to the ends, or back, as torch's linspace computes them: from the nearer end, by a step
    that is a float32, and rounded to one once."""
    tops = np.asarray(ends, np.float64).astype(np.float32)
    step = (tops / np.float32(count - 1)).astype(np.float64)
    rest = count - 1 - bins
    below, above = (rest, bins) if down else (bins, rest)
    low, high = step * below, tops - step * above
    return np.where((bins < count // 2) != down, low, high).astype(np.float32).astype(np.float64)


@lru_cache(maxsize=32)
def _magnitudes(space: Space, count: int) -> np.ndarray:
    """By kind and bin; shifts by shares of the image are left at 0."""
    bins = np.arange(count)
    table = np.zeros((len(KINDS), count))
    table[SHEAR_X] = table[SHEAR_Y] = _ramp(space.shear, count, bins)
    if space.pixels:
        table[TRANSLATE_X] = table[TRANSLATE_Y] = _ramp(space.translate, count, bins)
    table[ROTATE] = _ramp(space.rotate, count, bins)
    table[6:10] = _ramp(space.enhance, count, bins)
    first, last = space.bits
    fewer = bins.astype(np.float32) / np.float32((count - 1) / (first - last))
    table[KINDS.index("Posterize")] = np.round(np.float32(first) - fewer)
    table[KINDS.index("Solarize")] = _ramp(1.0, count, bins, down=True)
    return table


AUTO: Final = Space(KINDS[1:], 0.3, 150 / 331, 30.0, 0.9, (8, 4))
RAND: Final = Space(KINDS[:-1], 0.3, 150 / 331, 30.0, 0.9, (8, 4))
WIDE: Final = Space(KINDS[:-1], 0.99, 32.0, 135.0, 0.99, (8, 2), pixels=True)
# By `all_ops`: all operations, or only those that are not part of robustness benchmarks.
MIX: Final = {
    everything: Space((*KINDS[1:6], *KINDS[10:14], *(KINDS[6:10] if everything else ())), 0.3, 1 / 3, 30.0, 0.9, (4, 0))
    for everything in (True, False)
}


def operations(kinds: np.ndarray, magnitudes: np.ndarray, sizes_hw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes int64 (B, n) and values float64 (B, n, `VALUES`) of kinds (B, n) and magnitudes with their signs (B, n)."""
    values = np.zeros((*kinds.shape, VALUES))
    values[..., 0] = FIRST[kinds] + TIMES[kinds] * magnitudes
    rows, columns = ((kinds >= SHEAR_X) & (kinds <= ROTATE)).nonzero()
    if len(rows):
        which, amounts = kinds[rows, columns], magnitudes[rows, columns]
        # A positive magnitude moves the image right, by whole pixels; coefficients lead back to the input.
        amounts = np.where((which == TRANSLATE_X) | (which == TRANSLATE_Y), -np.trunc(amounts), amounts)
        values[rows, columns] = affine(which, amounts, sizes_hw[rows])
    return CODES[kinds], values


def affine(kinds: np.ndarray, amounts: np.ndarray, sizes_hw: np.ndarray) -> np.ndarray:
    """Pillow's coefficients, float64 (n, 8), of shears about the top left corner, by tangents; of shifts, by what is
    added to a coordinate in the output; of rotations about the centre, counterclockwise in degrees."""
    found = np.empty((len(kinds), len(IDENTITY)))
    found[:] = IDENTITY
    found[np.arange(len(kinds)), AMOUNT_AT[kinds]] = amounts
    turned = (kinds == ROTATE).nonzero()[0]
    if len(turned):
        found[turned] = rotation_coefficients(amounts[turned], None, sizes_hw[turned])[0]
    return found


# Pairs of operations: name, probability, and the bin of 10 if the operation has a magnitude.
POLICIES: Final = {
    "imagenet": """
        Posterize .4 8, Rotate .6 9; Solarize .6 5, AutoContrast .6; Equalize .8, Equalize .6;
        Posterize .6 7, Posterize .6 6; Equalize .4, Solarize .2 4; Equalize .4, Rotate .8 8;
        Solarize .6 3, Equalize .6; Posterize .8 5, Equalize 1; Rotate .2 3, Solarize .6 8;
        Equalize .6, Posterize .4 6; Rotate .8 8, Color .4 0; Rotate .4 9, Equalize .6; Equalize 0, Equalize .8;
        Invert .6, Equalize 1; Color .6 4, Contrast 1 8; Rotate .8 8, Color 1 2; Color .8 8, Solarize .8 7;
        Sharpness .4 7, Invert .6; ShearX .6 5, Equalize 1; Color .4 0, Equalize .6; Equalize .4, Solarize .2 4;
        Solarize .6 5, AutoContrast .6; Invert .6, Equalize 1; Color .6 4, Contrast 1 8; Equalize .8, Equalize .6
    """,
    "cifar10": """
        Invert .1, Contrast .2 6; Rotate .7 2, TranslateX .3 9; Sharpness .8 1, Sharpness .9 3;
        ShearY .5 8, TranslateY .7 9; AutoContrast .5, Equalize .9; ShearY .2 7, Posterize .3 7;
        Color .4 3, Brightness .6 7; Sharpness .3 9, Brightness .7 9; Equalize .6, Equalize .5;
        Contrast .6 7, Sharpness .6 5; Color .7 7, TranslateX .5 8; Equalize .3, AutoContrast .4;
        TranslateY .4 3, Sharpness .2 6; Brightness .9 6, Color .2 8; Solarize .5 2, Invert 0;
        Equalize .2, AutoContrast .6; Equalize .2, Equalize .6; Color .9 9, Equalize .6;
        AutoContrast .8, Solarize .2 8; Brightness .1 3, Color .7 0; Solarize .4 5, AutoContrast .9;
        TranslateY .9 9, TranslateY .7 9; AutoContrast .9, Solarize .8 3; Equalize .8, Invert .1;
        TranslateY .7 9, AutoContrast .9
    """,
    "svhn": """
        ShearX .9 4, Invert .2; ShearY .9 8, Invert .7; Equalize .6, Solarize .6 6; Invert .9, Equalize .6;
        Equalize .6, Rotate .9 3; ShearX .9 4, AutoContrast .8; ShearY .9 8, Invert .4; ShearY .9 5, Solarize .2 6;
        Invert .9, AutoContrast .8; Equalize .6, Rotate .9 3; ShearX .9 4, Solarize .3 3; ShearY .8 8, Invert .7;
        Equalize .9, TranslateY .6 6; Invert .9, Equalize .6; Contrast .3 3, Rotate .8 4; Invert .8, TranslateY 0 2;
        ShearY .7 6, Solarize .4 8; Invert .6, Rotate .8 4; ShearY .3 7, TranslateX .9 3; ShearX .1 6, Invert .6;
        Solarize .7 2, TranslateY .6 7; ShearY .8 4, Invert .8; ShearX .7 9, TranslateY .8 3;
        ShearY .8 5, AutoContrast .7; ShearX .7 2, Invert .1
    """,
}


@lru_cache(maxsize=4)
def policy_table(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A policy as arrays of its 25 pairs: kinds int64 (25, 2), probabilities float64 (25, 2), bins int64 (25, 2)."""
    pairs = [[entry.split() for entry in pair.split(",")] for pair in POLICIES[name].split(";")]
    kinds = np.array([[KINDS.index(entry[0]) for entry in pair] for pair in pairs], np.int64)
    probabilities = np.array([[float(entry[1]) for entry in pair] for pair in pairs])
    bins = np.array([[int(entry[2]) if len(entry) > 2 else 0 for entry in pair] for pair in pairs], np.int64)
    return kinds, probabilities, bins


BINS: Final = 10  # of magnitudes, of AutoAugment and AugMix; AugMix draws from the first `severity` of them


class AutomaticAugment(Transform):
    """Base of these transforms; not a dataclass, so that `interpolation` and `fill` come last, as in torchvision."""

    image_only: ClassVar[bool] = True
    needs_whole: ClassVar[bool] = True  # histograms, means, rotations
    record: ClassVar[type[Record]] = Ops

    space: ClassVar[Space]  # the operations that it chooses from
    interpolation: Interpolation
    fill: Any

    def __post_init__(self) -> None:
        own = type(self).__name__
        object.__setattr__(self, "interpolation", interpolation_name(f"{own}(interpolation=…)", self.interpolation))
        if self.fill is not None:
            object.__setattr__(self, "fill", fill_values(f"{own}(fill=…)", self.fill, uint8=True))

    def outside(self, *, masks: bool) -> tuple[float, ...]:
        return (0,) if self.fill is None else super().outside(masks=masks)

    @property
    def outline(self) -> tuple[Outline, ...]:
        name, operations = type(self).__name__, self.space.operations
        return (Outline(kind=self.record, name=name, operations=operations, filters=(self.interpolation,)),)

    def ops(self, codes: np.ndarray, values: np.ndarray) -> Ops:
        return Ops(codes, values, self.interpolation, self.outside(masks=False))


@declaration
class AutoAugment(AutomaticAugment):
    """One of 25 pairs of operations, each with a probability: a policy that was found by search on a data set.

    Args:
        policy: ``"imagenet"``, ``"cifar10"`` or ``"svhn"``; torchvision's `AutoAugmentPolicy` too.
        interpolation: of shears, shifts and rotations: ``"nearest"``, ``"bilinear"`` or ``"bicubic"``.
        fill: the level outside the image, or one for each channel; None: black.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Example:
        >>> AutoAugment("cifar10")
        AutoAugment(policy='cifar10')
    """

    space: ClassVar[Space] = AUTO

    policy: str = "imagenet"
    interpolation: Interpolation = "nearest"
    fill: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        policy = self.policy.value if isinstance(self.policy, enum.Enum) else self.policy
        if not isinstance(policy, str) or policy not in POLICIES:
            raise ValueError(
                f"AutoAugment(policy=…) must be one of {', '.join(map(repr, POLICIES))}, got {self.policy!r}"
            )
        object.__setattr__(self, "policy", policy)

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Ops:
        numbers = uniforms(5)
        kinds, probabilities, bins = policy_table(self.policy)
        pairs = (numbers[:, 0] * len(kinds)).astype(np.int64)
        kinds = kinds[pairs]
        magnitudes = signed(kinds, AUTO.magnitudes(kinds, BINS, bins[pairs], sizes_hw), numbers[:, 3:])
        codes, values = operations(kinds, magnitudes, sizes_hw)
        codes[numbers[:, 1:3] >= probabilities[pairs]] = NOTHING
        return self.ops(codes, values)


@declaration
class RandAugment(AutomaticAugment):
    """Some operations, one after the other, each drawn from 14, all of the same strength.

    Args:
        num_ops: the number of operations.
        magnitude: the strength, as the number of a bin, from 0.
        num_magnitude_bins: the number of bins from no effect to the greatest, at least 2.
        interpolation: of shears, shifts and rotations: ``"nearest"``, ``"bilinear"`` or ``"bicubic"``.
        fill: the level outside the image, or one for each channel; None: black.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Example:
        >>> RandAugment(magnitude=5)
        RandAugment(magnitude=5)
    """

    space: ClassVar[Space] = RAND

    num_ops: int = 2
    magnitude: int = 9
    num_magnitude_bins: int = 31
    interpolation: Interpolation = "nearest"
    fill: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "num_ops", whole("RandAugment(num_ops=…)", self.num_ops, least=0))
        bins = whole("RandAugment(num_magnitude_bins=…)", self.num_magnitude_bins, least=2)
        magnitude = whole("RandAugment(magnitude=…)", self.magnitude, least=0)
        if magnitude >= bins:
            raise ValueError(
                f"RandAugment(magnitude=…) is one of the {bins} bins of num_magnitude_bins, 0 … {bins - 1}, "
                f"got {magnitude}"
            )
        object.__setattr__(self, "num_magnitude_bins", bins)
        object.__setattr__(self, "magnitude", magnitude)

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Ops:
        numbers = uniforms(2 * self.num_ops)
        kinds = chosen(RAND.numbers, numbers[:, : self.num_ops])
        bins = np.full(kinds.shape, self.magnitude, np.int64)
        magnitudes = RAND.magnitudes(kinds, self.num_magnitude_bins, bins, sizes_hw)
        return self.ops(*operations(kinds, signed(kinds, magnitudes, numbers[:, self.num_ops :]), sizes_hw))


@declaration
class TrivialAugmentWide(AutomaticAugment):
    """One operation, drawn from 14, with a random strength, up to very strong.

    Args:
        num_magnitude_bins: the number of bins from no effect to the greatest, at least 2.
        interpolation: of shears, shifts and rotations: ``"nearest"``, ``"bilinear"`` or ``"bicubic"``.
        fill: the level outside the image, or one for each channel; None: black.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Example:
        >>> TrivialAugmentWide(interpolation="bilinear")
        TrivialAugmentWide(interpolation='bilinear')
    """

    space: ClassVar[Space] = WIDE

    num_magnitude_bins: int = 31
    interpolation: Interpolation = "nearest"
    fill: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        bins = whole("TrivialAugmentWide(num_magnitude_bins=…)", self.num_magnitude_bins, least=2)
        object.__setattr__(self, "num_magnitude_bins", bins)

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Ops:
        numbers = uniforms(3)
        kinds = chosen(WIDE.numbers, numbers[:, :1])
        bins = (numbers[:, 1:2] * self.num_magnitude_bins).astype(np.int64)
        magnitudes = WIDE.magnitudes(kinds, self.num_magnitude_bins, bins, sizes_hw)
        return self.ops(*operations(kinds, signed(kinds, magnitudes, numbers[:, 2:]), sizes_hw))


def chosen(kinds: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """One of the kinds for each uniform number."""
    return kinds[(numbers * len(kinds)).astype(np.int64)]


def signed(kinds: np.ndarray, magnitudes: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """The magnitudes, with a random sign for the kinds that have one."""
    return np.where(SIGNED[kinds] & (numbers < 0.5), -magnitudes, magnitudes)


DEEPEST: Final = 3  # the most operations in a chain whose depth is drawn


@declaration
class AugMix(AutomaticAugment):
    """Mix an image with the results of several chains of random operations on it.

    The share of the image itself has a beta distribution; how the chains share the rest, a Dirichlet distribution.

    Args:
        severity: how many of the 10 magnitudes, from the least up, are drawn from: 1 … 10.
        mixture_width: the number of chains.
        chain_depth: the number of operations in each; 0 or less: 1 … 3, drawn for each chain.
        alpha: the parameter of both distributions, greater than 0.
        all_ops: whether brightness, colour, contrast and sharpness are among the operations.
        interpolation: of shears, shifts and rotations: ``"nearest"``, ``"bilinear"`` or ``"bicubic"``.
        fill: the level outside the image, or one for each channel; None: black.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Example:
        >>> AugMix(severity=5, all_ops=False)
        AugMix(severity=5, all_ops=False)
    """

    record: ClassVar[type[Record]] = Mixture

    severity: int = 3
    mixture_width: int = 3
    chain_depth: int = -1
    alpha: float = 1.0
    all_ops: bool = True
    interpolation: Interpolation = "bilinear"
    fill: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        severity = whole("AugMix(severity=…)", self.severity, least=1)
        if severity > BINS:
            raise ValueError(f"AugMix(severity=…) must lie in 1 … {BINS}, got {severity}")
        alpha = finite("AugMix(alpha=…)", self.alpha)
        if alpha <= 0:
            raise ValueError(f"AugMix(alpha=…) must be greater than 0, got {alpha:g}")
        if not isinstance(self.all_ops, bool | np.bool_):
            raise TypeError(f"AugMix(all_ops=…) must be True or False, got {self.all_ops!r}")
        width = whole("AugMix(mixture_width=…)", self.mixture_width, least=1)
        depth = whole("AugMix(chain_depth=…)", self.chain_depth, least=-(2**31))
        for name, value in (("severity", severity), ("mixture_width", width), ("chain_depth", depth), ("alpha", alpha)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "all_ops", bool(self.all_ops))

    @property
    def space(self) -> Space:  # pyright: ignore[reportIncompatibleVariableOverride]
        return MIX[self.all_ops]

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Mixture:
        width, depth = self.mixture_width, max(self.chain_depth, 0) or DEEPEST
        steps, shapes = width * depth, [self.alpha] * width
        counts = [steps, steps, steps, width, beta_count(self.alpha, self.alpha), dirichlet_count(shapes)]
        which, strength, sign, depths, own, shares = np.split(uniforms(sum(counts)), np.cumsum(counts[:-1]), axis=1)
        kinds = chosen(self.space.numbers, which)
        bins = (strength * self.severity).astype(np.int64)
        magnitudes = signed(kinds, self.space.magnitudes(kinds, BINS, bins, sizes_hw), sign)
        codes, values = operations(kinds, magnitudes, sizes_hw)
        codes = codes.reshape(-1, width, depth)
        if self.chain_depth <= 0:
            codes[np.arange(depth) > (depths * DEEPEST).astype(np.int64)[:, :, None]] = NOTHING
        first = beta(own, self.alpha, self.alpha)[:, None]
        weights = np.concatenate([first, (1 - first) * dirichlet(shares, shapes)], axis=1)
        values = values.reshape(-1, width, depth, VALUES)
        return Mixture(codes, values, weights, self.interpolation, self.outside(masks=False))
