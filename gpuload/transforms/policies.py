"""Automatic augmentation: one engine for all methods, and torchvision's AutoAugment, RandAugment, TrivialAugment, …

A method has a `Table` of operations as the papers name them; a *kind* is an index there. Its `Recipe` says how many
kinds are drawn, with or without replacement, or that an entry of a policy is drawn; its `strengths` say how magnitudes
are drawn. torchvision's come in bins from none to the greatest, as float32: they are cut to whole pixels, so a last bit
can be a pixel. timm's methods are in `gpuload.transforms.timm_policies`. Boxes, masks and keypoints are refused, as by
torchvision: the published methods are for classification.

Sources of the policies: Cubuk et al., "AutoAugment: Learning Augmentation Strategies from Data", CVPR 2019; of the
spaces: "RandAugment", NeurIPS 2020; Müller, Hutter, "TrivialAugment", ICCV 2021; Hendrycks et al., "AugMix", ICLR 2020;
with the ranges of torchvision 0.28.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np

from gpuload.rng.distributions import beta, beta_count, dirichlet, dirichlet_count
from gpuload.transforms.arguments import Interpolation, fill_values, finite, flag, interpolation_name, whole
from gpuload.transforms.base import Transform, Uniforms, argument, declaration
from gpuload.transforms.program.ops import NOTHING, OPS, VALUES, Mixture, Ops, Record, code
from gpuload.transforms.program.windows import FILTERS
from gpuload.transforms.warps import IDENTITY, rotation_coefficients

__all__ = [
    "DEEPEST", "IMAGENET", "AugMix", "AutoAugment", "AutomaticAugment", "Kind", "RandAugment", "Recipe", "Table",
    "TrivialAugmentWide", "policy",
]  # fmt: skip

WARP, SOLARIZE_ADD = code("warp"), code("solarize_add")
ROTATE: Final = 0  # sets all coefficients of a warp, the others one
COEFFICIENTS: Final = {"Rotate": ROTATE, "ShearX": 1, "TranslateX": 2, "ShearY": 3, "TranslateY": 5}
SOLARIZE_ADD_BELOW: Final = 128.0  # levels below it are raised
DEEPEST: Final = 3  # the most operations in a chain whose depth is drawn


class Kind(NamedTuple):
    """An operation: its value is `first` + `times` · strength within `bounds`. `signed`: the strength gets a random
    sign; `whole`: the product is cut to a whole number."""

    operation: str
    first: float = 0.0
    times: float = 0.0
    bounds: tuple[float, float] = (-math.inf, math.inf)
    signed: bool = False
    whole: bool = False


class Table:
    """The operations that a library names; all attributes but `names` are arrays by kind."""

    def __init__(self, kinds: Mapping[str, Kind]) -> None:
        self.names = tuple(kinds)
        operations, self.first, self.times, bounds, self.signed, self.whole = map(
            np.array, zip(*kinds.values(), strict=True)
        )
        self.codes = np.array([code(name) for name in operations], np.int64)
        self.minimum, self.maximum = bounds.T
        self.limited = bool(self.whole.any())
        self.coefficients = np.array([COEFFICIENTS.get(name, -1) for name in kinds])
        self.shifts = np.array([name.startswith("Translate") for name in kinds])
        self.sides = np.array([int(name == "TranslateX") for name in kinds])  # in a size (height, width)

    def numbers(self, names: Iterable[str]) -> np.ndarray:
        return np.array([self.names.index(name) for name in names], np.int64)

    def shifted(self, kinds: np.ndarray, sizes_hw: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The rows and columns of the shifts among kinds (B, n), and the side of the image along which each is."""
        rows, columns = self.shifts[kinds].nonzero()
        return rows, columns, sizes_hw[rows, self.sides[kinds[rows, columns]]]

    def operations(self, kinds: np.ndarray, strengths: np.ndarray, sizes_hw: np.ndarray) -> tuple[Any, Any]:
        """Codes int64 (B, n) and values float64 (B, n, `VALUES`) of kinds (B, n) and strengths with their signs (B, n).

        Of warps these are Pillow's coefficients: of shears about the top left corner, by tangents; of shifts, by what
        is added to a coordinate in the output; of rotations about the centre, counterclockwise in degrees.
        """
        amounts, codes = strengths * self.times[kinds], self.codes[kinds]
        values = np.zeros((*kinds.shape, VALUES))
        if self.limited:
            amounts = self.first[kinds] + np.where(self.whole[kinds], np.trunc(amounts), amounts)
            amounts = np.clip(amounts, self.minimum[kinds], self.maximum[kinds])
            added = codes == SOLARIZE_ADD
            values[added, 1] = amounts[added]
            amounts[added] = SOLARIZE_ADD_BELOW
        else:
            amounts += self.first[kinds]
        values[..., 0] = amounts
        warps = codes == WARP
        if warps.any():
            amounts, at, sizes_hw = amounts[warps], self.coefficients[kinds[warps]], sizes_hw[warps.nonzero()[0]]
            coefficients = np.empty((len(at), VALUES))
            coefficients[:] = IDENTITY
            coefficients[np.arange(len(at)), at] = amounts
            turned = at == ROTATE
            if turned.any():
                coefficients[turned] = rotation_coefficients(amounts[turned], None, sizes_hw[turned])[0]
            values[warps] = coefficients
        return codes, values


class Recipe(NamedTuple):
    """The counts and ranges that a method draws for each image.

    Attributes:
        kinds: int64 (n,), those it draws from; or (n, `count`), the entries of a policy, of which one is drawn.
        magnitudes: of each operation: a number for all, or float64 by entry as `kinds`.
        probabilities: that an operation is done, a number for all or by entry; None means 1.
        count: the number of operations, one after the other.
        below: magnitudes are drawn instead, whole numbers from 0 on below this; 0: they are not.
        weights: float64 (n,): kinds are drawn without replacement, as likely as these say; None means with replacement.
        width: the number of chains that are mixed with the image, of `count` operations each; 0: none.
        alpha: the parameter of the distributions of their shares.
        shortened: whether the depth of each chain is drawn, 1 … `count`.
    """

    kinds: np.ndarray
    magnitudes: Any = 0
    probabilities: Any = None
    count: int = 1
    below: int = 0
    weights: np.ndarray | None = None
    width: int = 0
    alpha: float = 1.0
    shortened: bool = False


class AutomaticAugment(Transform):
    """Base of all methods; not a dataclass, so that arguments come in each library's order."""

    image_only: ClassVar[bool] = True
    needs_whole: ClassVar[bool] = True  # histograms, means, rotations
    record: ClassVar[type[Record]] = Ops

    table: ClassVar[Table]
    # timm draws a filter and a deviation for each operation; with it a sign is negative if its number is the greater,
    # and the drawn share of a mixture is that of the chains.
    of_timm: ClassVar[bool] = False

    @property
    def recipe(self) -> Recipe:
        raise NotImplementedError

    def strengths(
        self, kinds: np.ndarray, magnitudes: Any, signs: np.ndarray, spread: np.ndarray, sizes_hw: np.ndarray
    ) -> np.ndarray:
        """The strengths (B, n) of kinds (B, n) without their sign, from magnitudes and uniform numbers."""
        raise NotImplementedError

    @property
    def operations(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return tuple(sorted({OPS[number] for number in self.table.codes[self.recipe.kinds].ravel().tolist()}))

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Ops | Mixture:
        recipe = self.recipe
        width, alpha = recipe.width, recipe.alpha
        steps, entry_drawn = recipe.count * max(width, 1), recipe.kinds.ndim == 2
        counts = [
            1 if entry_drawn else steps if recipe.weights is None else len(recipe.kinds),
            0 if recipe.probabilities is None else steps,
            steps if recipe.below else 0,
            steps,
            *((steps, steps + steps % 2) if self.of_timm else (0, 0)),
        ]
        if width:
            counts += [width, beta_count(alpha, alpha), dirichlet_count([alpha] * width)]
        numbers, ends = uniforms(sum(counts)), list(accumulate(counts))
        which, done, bins, signs, filters, spread, *mixture = (
            numbers[:, end - count : end] for end, count in zip(ends, counts, strict=True)
        )
        if recipe.weights is None:
            drawn = (which * len(recipe.kinds)).astype(np.int64)
        else:
            # The order of exponential times at these rates is that of draws without replacement.
            drawn = np.argsort(-np.log(which) / recipe.weights, axis=1)[:, : recipe.count]
        magnitudes: Any = recipe.magnitudes
        probabilities: Any = recipe.probabilities
        if entry_drawn:
            drawn = drawn[:, 0]
            magnitudes, probabilities = magnitudes[drawn], probabilities[drawn]
        kinds = recipe.kinds[drawn]
        if recipe.below:
            magnitudes = (bins * recipe.below).astype(np.int64)
        strengths = self.strengths(kinds, magnitudes, signs, spread, sizes_hw)
        negative = self.table.signed[kinds] & ((signs < 0.5) != self.of_timm)
        codes, values = self.table.operations(kinds, np.where(negative, -strengths, strengths), sizes_hw)
        if probabilities is not None:
            codes[done >= probabilities] = NOTHING
        names, fill = self.filter_names, self.outside.image
        shape = (len(kinds), width, recipe.count) if width else kinds.shape
        codes, values, drawn_filters = codes.reshape(shape), values.reshape(*shape, VALUES), names[0]
        if self.of_timm:
            filters = (filters * len(names)).astype(np.int64).reshape(shape)
            drawn_filters = np.array([FILTERS.index(name) for name in names])[filters]
        if not width:
            return Ops(codes, values, drawn_filters, fill)
        depths, originals, shares = mixture
        if recipe.shortened:
            codes[np.arange(recipe.count) > (depths * recipe.count).astype(np.int64)[:, :, None]] = NOTHING
        share = beta(originals, alpha, alpha)[:, None]
        first, others = (1 - share, share) if self.of_timm else (share, 1 - share)
        weights = np.concatenate([first, others * dirichlet(shares, [alpha] * width)], axis=1)
        return Mixture(codes, values, weights, drawn_filters, fill)


@lru_cache(maxsize=16)
def policy(table: Table, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The kinds int64, magnitudes and probabilities float64 of a policy, each (entries, 2).

    Its text has entries, with semicolons between them, of one operation or two: name, probability, and magnitude if the
    operation has one.
    """
    entries = [[part.split() for part in entry.split(",")] for entry in text.split(";")]
    for entry in entries:
        entry.extend([[entry[0][0], "0"]] * (2 - len(entry)))  # never done
    kinds = np.array([table.numbers(part[0] for part in entry) for entry in entries])
    magnitudes, probabilities = (
        np.array([[float((*part, "0")[at]) for part in entry] for entry in entries]) for at in (2, 1)
    )
    return kinds, magnitudes, probabilities


# -- torchvision's ----------------------------------------------------------------------------------------------------

TORCHVISION: Final = Table(
    {
        "Identity": Kind("identity"),
        "ShearX": Kind("warp", times=1.0, signed=True),
        "ShearY": Kind("warp", times=1.0, signed=True),
        # A positive magnitude moves the image right; coefficients lead back to the input.
        "TranslateX": Kind("warp", times=-1.0, signed=True),
        "TranslateY": Kind("warp", times=-1.0, signed=True),
        "Rotate": Kind("warp", times=1.0, signed=True),
        "Brightness": Kind("brightness", 1.0, 1.0, signed=True),
        "Color": Kind("saturation", 1.0, 1.0, signed=True),
        "Contrast": Kind("contrast", 1.0, 1.0, signed=True),
        "Sharpness": Kind("sharpness", 1.0, 1.0, signed=True),
        "Posterize": Kind("posterize", times=1.0),
        "Solarize": Kind("solarize", times=255.0),
        "AutoContrast": Kind("autocontrast"),
        "Equalize": Kind("equalize"),
        "Invert": Kind("invert"),
    }
)


@dataclass(frozen=True, eq=False)
class Space:
    """The operations that one method chooses from, and their greatest magnitudes.

    `shear` is a tangent, `rotate` an angle in degrees, `enhance` is added to a factor of 1; `translate` is a share of
    the image's side, or a number of pixels if `pixels`. `bits` are those that posterize keeps in the first bin and in
    the last.
    """

    names: tuple[str, ...]
    shear: float
    translate: float
    rotate: float
    enhance: float
    bits: tuple[int, int]
    pixels: bool = False

    @cached_property
    def kinds(self) -> np.ndarray:
        return TORCHVISION.numbers(self.names)

    def magnitudes(self, kinds: np.ndarray, count: int, bins: np.ndarray, sizes_hw: np.ndarray) -> np.ndarray:
        """Float64 (B, n), without a sign, of the kinds (B, n) in these of the `count` bins; shifts in whole pixels."""
        magnitudes = _magnitudes(self, count)[kinds, bins]
        if not self.pixels:
            rows, columns, sides = TORCHVISION.shifted(kinds, sizes_hw)
            if len(rows):
                magnitudes[rows, columns] = np.trunc(_ramp(self.translate * sides, count, bins[rows, columns]))
        return magnitudes


@lru_cache(maxsize=32)
def _magnitudes(space: Space, count: int) -> np.ndarray:
    """Return magnitudes by kind and bin; shifts by shares of the image depend on its size, and are wrong here."""
    bins, (first, last) = np.arange(count), space.bits
    shear, shift, enhance = (_ramp(end, count, bins) for end in (space.shear, space.translate, space.enhance))
    bits = np.round(np.float32(first) - bins.astype(np.float32) / np.float32((count - 1) / (first - last)))
    none, solarize = np.zeros(count), _ramp(1.0, count, bins, down=True)
    turn, shift = _ramp(space.rotate, count, bins), np.trunc(shift)
    return np.array([none, shear, shear, shift, shift, turn, *[enhance] * 4, bits, solarize, none, none, none])


def _ramp(ends: np.ndarray | float, count: int, bins: np.ndarray, *, down: bool = False) -> np.ndarray:
    """Numbers of ramps from 0 to the ends, or back, as torch's linspace computes them: from the nearer end, by a step
    that is a float32, and rounded to one once."""
    tops = np.asarray(ends, np.float64).astype(np.float32)
    step = (tops / np.float32(count - 1)).astype(np.float64)
    descending = count - 1 - bins
    below, above = (descending, bins) if down else (bins, descending)
    low, high = step * below, tops - step * above
    return np.where((bins < count // 2) != down, low, high).astype(np.float32).astype(np.float64)


KINDS: Final = TORCHVISION.names
AUTO: Final = Space(KINDS[1:], 0.3, 150 / 331, 30.0, 0.9, (8, 4))
RAND: Final = Space(KINDS[:-1], 0.3, 150 / 331, 30.0, 0.9, (8, 4))
WIDE: Final = Space(KINDS[:-1], 0.99, 32.0, 135.0, 0.99, (8, 2), pixels=True)
# By `all_ops`: all operations, or only those that are not part of robustness benchmarks.
MIX: Final = {
    everything: Space((*KINDS[1:6], *KINDS[10:14], *(KINDS[6:10] if everything else ())), 0.3, 1 / 3, 30.0, 0.9, (4, 0))
    for everything in (True, False)
}

# Pairs of operations: name, probability, and the bin of 10 if the operation has a magnitude.
IMAGENET: Final = """
    Posterize .4 8, Rotate .6 9; Solarize .6 5, AutoContrast .6; Equalize .8, Equalize .6;
    Posterize .6 7, Posterize .6 6; Equalize .4, Solarize .2 4; Equalize .4, Rotate .8 8;
    Solarize .6 3, Equalize .6; Posterize .8 5, Equalize 1; Rotate .2 3, Solarize .6 8;
    Equalize .6, Posterize .4 6; Rotate .8 8, Color .4 0; Rotate .4 9, Equalize .6; Equalize 0, Equalize .8;
    Invert .6, Equalize 1; Color .6 4, Contrast 1 8; Rotate .8 8, Color 1 2; Color .8 8, Solarize .8 7;
    Sharpness .4 7, Invert .6; ShearX .6 5, Equalize 1; Color .4 0, Equalize .6; Equalize .4, Solarize .2 4;
    Solarize .6 5, AutoContrast .6; Invert .6, Equalize 1; Color .6 4, Contrast 1 8; Equalize .8, Equalize .6
"""
POLICIES: Final = {
    "imagenet": IMAGENET,
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

BINS: Final = 10  # of magnitudes, of AutoAugment and AugMix


class TorchvisionAugment(AutomaticAugment):
    table: ClassVar[Table] = TORCHVISION
    space: Space  # the operations that it chooses from
    num_magnitude_bins: int = BINS
    interpolation: Interpolation
    fill: Any

    @property
    def filter_names(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return (self.interpolation,)

    def strengths(
        self, kinds: np.ndarray, magnitudes: Any, signs: np.ndarray, spread: np.ndarray, sizes_hw: np.ndarray
    ) -> np.ndarray:
        bins = np.empty(kinds.shape, np.int64)
        bins[:] = magnitudes
        return self.space.magnitudes(kinds, self.num_magnitude_bins, bins, sizes_hw)


def _policy_name(name: str, value: Any) -> str:
    policy = value.value if isinstance(value, enum.Enum) else value
    if not isinstance(policy, str) or policy not in POLICIES:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, POLICIES))}, got {value!r}")
    return policy


@declaration
class AutoAugment(TorchvisionAugment):
    """Apply one of 25 pairs of operations, each with a probability: a policy that was found by search on a data set.

    Args:
        policy: ``"imagenet"``, ``"cifar10"`` or ``"svhn"``; torchvision's `AutoAugmentPolicy` too.
        interpolation: of shears, shifts and rotations: ``"nearest"``, ``"bilinear"`` or ``"bicubic"``.
        fill: the level outside the image, or one for each channel; None means black.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Example:
        >>> AutoAugment("cifar10")
        AutoAugment(policy='cifar10')
    """

    space: ClassVar[Space] = AUTO

    policy: str = argument(_policy_name, default="imagenet")
    interpolation: Interpolation = argument(interpolation_name, default="nearest")
    fill: Any = argument(fill_values, default=None, uint8=True)

    @property
    def recipe(self) -> Recipe:
        return Recipe(*policy(TORCHVISION, POLICIES[self.policy]), count=2)


@declaration
class RandAugment(TorchvisionAugment):
    """Apply several operations, one after the other, each drawn from 14, all of the same strength.

    Args:
        num_ops: the number of operations.
        magnitude: the strength, as the number of a bin, from 0.
        num_magnitude_bins: the number of bins from no effect to the greatest, at least 2.
        interpolation: of shears, shifts and rotations: ``"nearest"``, ``"bilinear"`` or ``"bicubic"``.
        fill: the level outside the image, or one for each channel; None means black.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Example:
        >>> RandAugment(magnitude=5)
        RandAugment(magnitude=5)
    """

    space: ClassVar[Space] = RAND

    num_ops: int = argument(whole, default=2, minimum=0)
    magnitude: int = argument(whole, default=9, minimum=0)
    num_magnitude_bins: int = argument(whole, default=31, minimum=2)
    interpolation: Interpolation = argument(interpolation_name, default="nearest")
    fill: Any = argument(fill_values, default=None, uint8=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        bins = self.num_magnitude_bins
        if self.magnitude >= bins:
            raise ValueError(
                f"RandAugment(magnitude=…) is one of the {bins} bins of num_magnitude_bins, 0 … {bins - 1}, "
                f"got {self.magnitude}"
            )

    @property
    def recipe(self) -> Recipe:
        return Recipe(RAND.kinds, self.magnitude, count=self.num_ops)


@declaration
class TrivialAugmentWide(TorchvisionAugment):
    """Apply one operation, drawn from 14, with a random strength, up to very strong.

    Args:
        num_magnitude_bins: the number of bins from no effect to the greatest, at least 2.
        interpolation: of shears, shifts and rotations: ``"nearest"``, ``"bilinear"`` or ``"bicubic"``.
        fill: the level outside the image, or one for each channel; None means black.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Example:
        >>> TrivialAugmentWide(interpolation="bilinear")
        TrivialAugmentWide(interpolation='bilinear')
    """

    space: ClassVar[Space] = WIDE

    num_magnitude_bins: int = argument(whole, default=31, minimum=2)
    interpolation: Interpolation = argument(interpolation_name, default="nearest")
    fill: Any = argument(fill_values, default=None, uint8=True)

    @property
    def recipe(self) -> Recipe:
        return Recipe(WIDE.kinds, below=self.num_magnitude_bins)


@declaration
class AugMix(TorchvisionAugment):
    """Mix an image with the results of several chains of random operations on it.

    The share of the image itself has a beta distribution; how the chains share the rest, a Dirichlet distribution.

    Args:
        severity: how many of the 10 magnitudes, from the least up, are drawn from: 1 … 10.
        mixture_width: the number of chains.
        chain_depth: the number of operations in each; 0 or less: 1 … 3, drawn for each chain.
        alpha: the parameter of both distributions, greater than 0.
        all_ops: whether brightness, colour, contrast and sharpness are among the operations.
        interpolation: of shears, shifts and rotations: ``"nearest"``, ``"bilinear"`` or ``"bicubic"``.
        fill: the level outside the image, or one for each channel; None means black.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Example:
        >>> AugMix(severity=5, all_ops=False)
        AugMix(severity=5, all_ops=False)
    """

    record: ClassVar[type[Record]] = Mixture

    severity: int = argument(whole, default=3, minimum=1)
    mixture_width: int = argument(whole, default=3, minimum=1)
    chain_depth: int = argument(whole, default=-1, minimum=None)
    alpha: float = argument(finite, default=1.0)
    all_ops: bool = argument(flag, default=True)
    interpolation: Interpolation = argument(interpolation_name, default="bilinear")
    fill: Any = argument(fill_values, default=None, uint8=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.severity > BINS:
            raise ValueError(f"AugMix(severity=…) must lie in 1 … {BINS}, got {self.severity}")
        if self.alpha <= 0:
            raise ValueError(f"AugMix(alpha=…) must be greater than 0, got {self.alpha:g}")

    @property
    def space(self) -> Space:  # pyright: ignore[reportIncompatibleVariableOverride]
        return MIX[self.all_ops]

    @property
    def recipe(self) -> Recipe:
        depth = self.chain_depth if self.chain_depth > 0 else DEEPEST
        shortened, width, alpha = self.chain_depth <= 0, self.mixture_width, self.alpha
        return Recipe(self.space.kinds, count=depth, below=self.severity, width=width, alpha=alpha, shortened=shortened)
