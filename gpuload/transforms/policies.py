"""Automatic augmentation: one implementation for all methods, and torchvision's four methods.

A method has an `OperationTable` of the operations named in the papers; a *kind* is an index into this table. The
method's `Recipe` defines how many kinds are drawn, and whether they are drawn with replacement, without replacement, or
as an entry of a policy. The method's `strengths` maps magnitudes to strengths. torchvision's magnitudes are bins from
no effect to the maximum. They are computed in float32, as in torchvision, because shifts are truncated to whole pixels:
a difference in the last bit could become a difference of one pixel. timm's methods are in
`gpuload.transforms.timm_policies`. Samples with boxes, masks or keypoints are refused, as in torchvision, because the
published methods are for classification.

The policies are from Cubuk et al., "AutoAugment: Learning Augmentation Strategies from Data", CVPR 2019. The spaces of
operations are from "RandAugment", NeurIPS 2020; Müller, Hutter, "TrivialAugment", ICCV 2021; and Hendrycks et al.,
"AugMix", ICLR 2020. The ranges are those of torchvision 0.28.
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

from gpuload.checks import argument, finite_number, flag, integer, one_of
from gpuload.rng.distributions import beta, beta_count, dirichlet, dirichlet_count
from gpuload.transforms.arguments import Interpolation, fill_values, interpolation_name
from gpuload.transforms.base import Transform, Uniforms, declaration
from gpuload.transforms.program.ops import NOTHING, OPS, VALUES, ChainMixture, Ops, Record, code
from gpuload.transforms.program.windows import FILTERS
from gpuload.transforms.warps import IDENTITY, rotation_coefficients

__all__ = [
    "IMAGENET",
    "MAX_DEPTH",
    "AugMix",
    "AutoAugment",
    "AutomaticAugment",
    "Kind",
    "OperationTable",
    "RandAugment",
    "Recipe",
    "TrivialAugmentWide",
    "policy",
]  # fmt: skip

WARP, SOLARIZE_ADD = code("warp"), code("solarize_add")
ROTATE: Final = 0  # a rotation sets all coefficients of a warp; other operations set one
COEFFICIENTS: Final = {"Rotate": ROTATE, "ShearX": 1, "TranslateX": 2, "ShearY": 3, "TranslateY": 5}
SOLARIZE_ADD_BELOW: Final = 128.0  # the operation adds to pixel values below this
MAX_DEPTH: Final = 3  # the maximum depth of a chain whose depth is drawn


class Kind(NamedTuple):
    """An operation whose value is `offset` + `scale` · strength, clipped to `bounds`. If `signed`, the strength gets a
    random sign; if `is_integer`, the product is truncated to an integer."""

    operation: str
    offset: float = 0.0
    scale: float = 0.0
    bounds: tuple[float, float] = (-math.inf, math.inf)
    signed: bool = False
    is_integer: bool = False


class OperationTable:
    """The operations of a library. All attributes except `names` and `has_integers` are arrays indexed by kind."""

    def __init__(self, kinds: Mapping[str, Kind]) -> None:
        self.names = tuple(kinds)
        operations, self.offsets, self.scales, bounds, self.signed, self.is_integer = map(
            np.array, zip(*kinds.values(), strict=True)
        )
        self.codes = np.array([code(name) for name in operations], np.int64)
        self.minimum, self.maximum = bounds.T
        self.has_integers = bool(self.is_integer.any())
        self.coefficients = np.array([COEFFICIENTS.get(name, -1) for name in kinds])
        self.shifts = np.array([name.startswith("Translate") for name in kinds])
        self.sides = np.array([int(name == "TranslateX") for name in kinds])  # the index of the side in (height, width)

    def find_kinds(self, names: Iterable[str]) -> np.ndarray:
        """Return the kinds of the operations with these names, int64 (n,)."""
        return np.array([self.names.index(name) for name in names], np.int64)

    def find_shifts(self, kinds: np.ndarray, sizes_hw: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the indices (rows, columns) of the shifts among kinds (B, n), and the image's length along each."""
        rows, columns = self.shifts[kinds].nonzero()
        return rows, columns, sizes_hw[rows, self.sides[kinds[rows, columns]]]

    def encode_operations(self, kinds: np.ndarray, strengths: np.ndarray, sizes_hw: np.ndarray) -> tuple[Any, Any]:
        """Return the codes, int64 (B, n), and values, float64 (B, n, `VALUES`), for kinds and signed strengths (B, n).

        The values of a warp are Pillow's coefficients. The strength of a shear, about the top left corner, is the
        tangent of its angle; the strength of a shift is the offset added to an output coordinate; the strength of a
        rotation, about the centre, is its angle in degrees, counterclockwise.
        """
        amounts, codes = strengths * self.scales[kinds], self.codes[kinds]
        values = np.zeros((*kinds.shape, VALUES))
        if self.has_integers:
            amounts = self.offsets[kinds] + np.where(self.is_integer[kinds], np.trunc(amounts), amounts)
            amounts = np.clip(amounts, self.minimum[kinds], self.maximum[kinds])
            is_solarize_add = codes == SOLARIZE_ADD
            values[is_solarize_add, 1] = amounts[is_solarize_add]
            amounts[is_solarize_add] = SOLARIZE_ADD_BELOW
        else:
            amounts += self.offsets[kinds]
        values[..., 0] = amounts
        is_warp = codes == WARP
        if is_warp.any():
            amounts, columns, sizes_hw = (
                amounts[is_warp],
                self.coefficients[kinds[is_warp]],
                sizes_hw[is_warp.nonzero()[0]],
            )
            coefficients = np.empty((len(columns), VALUES))
            coefficients[:] = IDENTITY
            coefficients[np.arange(len(columns)), columns] = amounts
            is_rotation = columns == ROTATE
            if is_rotation.any():
                coefficients[is_rotation] = rotation_coefficients(amounts[is_rotation], None, sizes_hw[is_rotation])[0]
            values[is_warp] = coefficients
        return codes, values


class Recipe(NamedTuple):
    """The distribution from which a method draws the operations for each image.

    Attributes:
        kinds: int64 (n,), the kinds to draw from; or (n, `depth`), the entries of a policy, one of which is drawn.
        magnitudes: one magnitude for all operations, or float64 with the shape of a policy's `kinds`.
        probabilities: the probability of each operation, a number or an array like `magnitudes`; None means 1.
        depth: the number of consecutive operations.
        bins: if not 0, `magnitudes` is ignored, and magnitudes are drawn as integers in 0 … `bins` - 1.
        weights: float64 (n,), the weights for drawing kinds without replacement; None means that kinds are drawn
            uniformly with replacement.
        width: the number of chains of `depth` operations to mix with the image; 0 means no mixing.
        alpha: the parameter of the beta and Dirichlet distributions of the weights in the mixture.
        random_depth: whether the depth of each chain is drawn from 1 … `depth`.
    """

    kinds: np.ndarray
    magnitudes: Any = 0
    probabilities: Any = None
    depth: int = 1
    bins: int = 0
    weights: np.ndarray | None = None
    width: int = 0
    alpha: float = 1.0
    random_depth: bool = False


class AutomaticAugment(Transform):
    """Base class of all methods. It is not a dataclass, so that arguments can follow each library's order."""

    image_only: ClassVar[bool] = True
    needs_full_image: ClassVar[bool] = True  # for histograms, means and rotations
    record: ClassVar[type[Record]] = Ops

    table: ClassVar[OperationTable]
    # timm draws a filter and a deviation for each operation. A sign is negative if the drawn number is at least 0.5
    # (in torchvision: below 0.5), and the weight drawn for a mixture is that of the chains, not that of the image.
    is_timm: ClassVar[bool] = False

    @property
    def recipe(self) -> Recipe:
        raise NotImplementedError

    def strengths(
        self, kinds: np.ndarray, magnitudes: Any, signs: np.ndarray, spread: np.ndarray, sizes_hw: np.ndarray
    ) -> np.ndarray:
        """Return the unsigned strengths (B, n) of kinds (B, n), from magnitudes and uniform numbers."""
        raise NotImplementedError

    @property
    def operations(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return tuple(sorted({OPS[operation] for operation in self.table.codes[self.recipe.kinds].ravel().tolist()}))

    @property
    def depth(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.recipe.depth

    @property
    def is_optional(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.recipe.probabilities is not None

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Ops | ChainMixture:
        recipe = self.recipe
        width, alpha = recipe.width, recipe.alpha
        steps, is_policy = recipe.depth * max(width, 1), recipe.kinds.ndim == 2
        counts = [
            1 if is_policy else steps if recipe.weights is None else len(recipe.kinds),
            0 if recipe.probabilities is None else steps,
            steps if recipe.bins else 0,
            steps,
            *((steps, steps + steps % 2) if self.is_timm else (0, 0)),
        ]
        if width:
            counts += [width, beta_count(alpha, alpha), dirichlet_count([alpha] * width)]
        numbers, ends = uniforms(sum(counts)), list(accumulate(counts))
        choices, coins, bins, signs, filters, spread, *mixture = (
            numbers[:, end - count : end] for end, count in zip(ends, counts, strict=True)
        )
        if recipe.weights is None:
            indices = (choices * len(recipe.kinds)).astype(np.int64)
        else:
            # Sorting exponential waiting times with these rates is equivalent to drawing without replacement.
            indices = np.argsort(-np.log(choices) / recipe.weights, axis=1)[:, : recipe.depth]
        magnitudes: Any = recipe.magnitudes
        probabilities: Any = recipe.probabilities
        if is_policy:
            indices = indices[:, 0]
            magnitudes, probabilities = magnitudes[indices], probabilities[indices]
        kinds = recipe.kinds[indices]
        if recipe.bins:
            magnitudes = (bins * recipe.bins).astype(np.int64)
        strengths = self.strengths(kinds, magnitudes, signs, spread, sizes_hw)
        negative = self.table.signed[kinds] & ((signs < 0.5) != self.is_timm)
        codes, values = self.table.encode_operations(kinds, np.where(negative, -strengths, strengths), sizes_hw)
        if probabilities is not None:
            codes[coins >= probabilities] = NOTHING
        names, fill = self.filter_names, self.outside.image
        shape = (len(kinds), width, recipe.depth) if width else kinds.shape
        codes, values, drawn_filters = codes.reshape(shape), values.reshape(*shape, VALUES), names[0]
        if self.is_timm:
            filters = (filters * len(names)).astype(np.int64).reshape(shape)
            drawn_filters = np.array([FILTERS.index(name) for name in names])[filters]
        if not width:
            return Ops(codes, values, drawn_filters, fill)
        depth_numbers, beta_numbers, dirichlet_numbers = mixture
        if recipe.random_depth:
            codes[np.arange(recipe.depth) > (depth_numbers * recipe.depth).astype(np.int64)[:, :, None]] = NOTHING
        share = beta(beta_numbers, alpha, alpha)[:, None]
        image_share, chains_share = (1 - share, share) if self.is_timm else (share, 1 - share)
        weights = np.concatenate([image_share, chains_share * dirichlet(dirichlet_numbers, [alpha] * width)], axis=1)
        return ChainMixture(codes, values, weights, drawn_filters, fill)


@lru_cache(maxsize=16)
def policy(table: OperationTable, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the kinds (int64), magnitudes and probabilities (float64) of a policy, each of shape (entries, 2).

    The text consists of entries separated by semicolons. An entry has one or two operations separated by a comma. An
    operation is its name, its probability and, if it has a magnitude, the magnitude.
    """
    entries = [[part.split() for part in entry.split(",")] for entry in text.split(";")]
    for entry in entries:
        entry.extend([[entry[0][0], "0"]] * (2 - len(entry)))  # padding with probability 0
    kinds = np.array([table.find_kinds(part[0] for part in entry) for entry in entries])
    magnitudes, probabilities = (
        np.array([[float((*part, "0")[column]) for part in entry] for entry in entries]) for column in (2, 1)
    )
    return kinds, magnitudes, probabilities


# -- torchvision ------------------------------------------------------------------------------------------------------

TORCHVISION: Final = OperationTable(
    {
        "Identity": Kind("identity"),
        "ShearX": Kind("warp", scale=1.0, signed=True),
        "ShearY": Kind("warp", scale=1.0, signed=True),
        # A positive magnitude moves the image right. The scale is negative because warps map results to inputs.
        "TranslateX": Kind("warp", scale=-1.0, signed=True),
        "TranslateY": Kind("warp", scale=-1.0, signed=True),
        "Rotate": Kind("warp", scale=1.0, signed=True),
        "Brightness": Kind("brightness", 1.0, 1.0, signed=True),
        "Color": Kind("saturation", 1.0, 1.0, signed=True),
        "Contrast": Kind("contrast", 1.0, 1.0, signed=True),
        "Sharpness": Kind("sharpness", 1.0, 1.0, signed=True),
        "Posterize": Kind("posterize", scale=1.0),
        "Solarize": Kind("solarize", scale=255.0),
        "AutoContrast": Kind("autocontrast"),
        "Equalize": Kind("equalize"),
        "Invert": Kind("invert"),
    }
)


@dataclass(frozen=True, eq=False)
class Space:
    """The operations that one method draws from, and their maximum magnitudes.

    `shear` is a tangent, `rotate` an angle in degrees; `enhance` is added to a factor of 1; `translate` is a fraction
    of the image's side, or a number of pixels if `pixels`. `bits` are the numbers of bits that posterize keeps at the
    first and at the last bin.
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
        return TORCHVISION.find_kinds(self.names)

    def magnitudes(self, kinds: np.ndarray, count: int, bins: np.ndarray, sizes_hw: np.ndarray) -> np.ndarray:
        """Return the unsigned magnitudes, float64 (B, n), of kinds (B, n) at these bins. Shifts are in whole pixels."""
        magnitudes = _magnitude_table(self, count)[kinds, bins]
        if not self.pixels:
            rows, columns, sides = TORCHVISION.find_shifts(kinds, sizes_hw)
            if len(rows):
                magnitudes[rows, columns] = np.trunc(_ramp_values(self.translate * sides, count, bins[rows, columns]))
        return magnitudes


@lru_cache(maxsize=32)
def _magnitude_table(space: Space, count: int) -> np.ndarray:
    """Return a table of magnitudes, indexed by kind and bin. Callers replace shifts that are fractions of a side."""
    bins, (first, last) = np.arange(count), space.bits
    shear, shift, enhance = (_ramp_values(end, count, bins) for end in (space.shear, space.translate, space.enhance))
    bits = np.round(np.float32(first) - bins.astype(np.float32) / np.float32((count - 1) / (first - last)))
    zeros, solarize = np.zeros(count), _ramp_values(1.0, count, bins, down=True)
    rotate, shift = _ramp_values(space.rotate, count, bins), np.trunc(shift)
    return np.array([zeros, shear, shear, shift, shift, rotate, *[enhance] * 4, bits, solarize, zeros, zeros, zeros])


def _ramp_values(ends: np.ndarray | float, count: int, bins: np.ndarray, *, down: bool = False) -> np.ndarray:
    """Return the values of ramps from 0 to `ends`, or from `ends` to 0 if `down`, as torch's linspace computes them:
    starting at the nearer end, with a float32 step, and rounded to float32 once."""
    tops = np.asarray(ends, np.float64).astype(np.float32)
    step = (tops / np.float32(count - 1)).astype(np.float64)
    descending = count - 1 - bins
    below, above = (descending, bins) if down else (bins, descending)
    low, high = step * below, tops - step * above
    return np.where((bins < count // 2) != down, low, high).astype(np.float32).astype(np.float64)


KINDS: Final = TORCHVISION.names
AUTO_SPACE: Final = Space(KINDS[1:], 0.3, 150 / 331, 30.0, 0.9, (8, 4))
RAND_SPACE: Final = Space(KINDS[:-1], 0.3, 150 / 331, 30.0, 0.9, (8, 4))
WIDE_SPACE: Final = Space(KINDS[:-1], 0.99, 32.0, 135.0, 0.99, (8, 2), pixels=True)
# Keyed by `all_ops`; False leaves out the operations that are part of robustness benchmarks.
MIX_SPACES: Final = {
    all_ops: Space((*KINDS[1:6], *KINDS[10:14], *(KINDS[6:10] if all_ops else ())), 0.3, 1 / 3, 30.0, 0.9, (4, 0))
    for all_ops in (True, False)
}

# Pairs of operations: the name, the probability and, if the operation has a magnitude, its bin out of 10.
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

BINS: Final = 10  # magnitude bins of AutoAugment and AugMix


class TorchvisionAugment(AutomaticAugment):
    table: ClassVar[OperationTable] = TORCHVISION
    space: ClassVar[Space]
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


def _check_policy(name: str, value: Any) -> str:
    return one_of(name, value.value if isinstance(value, enum.Enum) else value, tuple(POLICIES))


@declaration
class AutoAugment(TorchvisionAugment):
    """Apply one of 25 pairs of operations, each with a probability. The pairs were found by a search on a dataset.

    Args:
        policy: ``"imagenet"``, ``"cifar10"`` or ``"svhn"``, or torchvision's `AutoAugmentPolicy`.
        interpolation: for shears, shifts and rotations: ``"nearest"``, ``"bilinear"`` or ``"bicubic"``.
        fill: the pixel value outside the image, 0 … 255, or one per channel; None means black.

    Example:
        >>> AutoAugment("cifar10")
        AutoAugment(policy='cifar10')
    """

    space: ClassVar[Space] = AUTO_SPACE

    policy: str = argument(_check_policy, default="imagenet")
    interpolation: Interpolation = argument(interpolation_name, default="nearest")
    fill: Any = argument(fill_values, default=None, uint8=True)

    @property
    def recipe(self) -> Recipe:
        return Recipe(*policy(TORCHVISION, POLICIES[self.policy]), depth=2)


@declaration
class RandAugment(TorchvisionAugment):
    """Apply `num_ops` operations with the same magnitude, each drawn from 14 operations.

    Args:
        num_ops: the number of operations.
        magnitude: the magnitude, as the index of a bin, starting from 0.
        num_magnitude_bins: the number of bins from no effect to the maximum, at least 2.
        interpolation: for shears, shifts and rotations: ``"nearest"``, ``"bilinear"`` or ``"bicubic"``.
        fill: the pixel value outside the image, 0 … 255, or one per channel; None means black.

    Example:
        >>> RandAugment(magnitude=5)
        RandAugment(magnitude=5)
    """

    space: ClassVar[Space] = RAND_SPACE

    num_ops: int = argument(integer, default=2, minimum=0)
    magnitude: int = argument(integer, default=9, by_epoch=True, minimum=0)
    num_magnitude_bins: int = argument(integer, default=31, minimum=2)
    interpolation: Interpolation = argument(interpolation_name, default="nearest")
    fill: Any = argument(fill_values, default=None, uint8=True)

    def check_arguments(self) -> None:
        bins = self.num_magnitude_bins
        if self.magnitude >= bins:
            raise ValueError(
                f"RandAugment(magnitude=…) must be the index of one of the num_magnitude_bins={bins} bins, "
                f"0 … {bins - 1}, got {self.magnitude}"
            )

    @property
    def recipe(self) -> Recipe:
        return Recipe(RAND_SPACE.kinds, self.magnitude, depth=self.num_ops)


@declaration
class TrivialAugmentWide(TorchvisionAugment):
    """Apply one operation, drawn from 14 operations, with a random magnitude from a wide range.

    Args:
        num_magnitude_bins: the number of bins from no effect to the maximum, at least 2.
        interpolation: for shears, shifts and rotations: ``"nearest"``, ``"bilinear"`` or ``"bicubic"``.
        fill: the pixel value outside the image, 0 … 255, or one per channel; None means black.

    Example:
        >>> TrivialAugmentWide(interpolation="bilinear")
        TrivialAugmentWide(interpolation='bilinear')
    """

    space: ClassVar[Space] = WIDE_SPACE

    num_magnitude_bins: int = argument(integer, default=31, minimum=2)
    interpolation: Interpolation = argument(interpolation_name, default="nearest")
    fill: Any = argument(fill_values, default=None, uint8=True)

    @property
    def recipe(self) -> Recipe:
        return Recipe(WIDE_SPACE.kinds, bins=self.num_magnitude_bins)


@declaration
class AugMix(TorchvisionAugment):
    """Mix an image with the results of several chains of random operations on it.

    The weight of the image itself has a beta distribution; the chains' shares of the remainder have a Dirichlet
    distribution.

    Args:
        severity: magnitudes are drawn from this number of bins, starting with the smallest; 1 … 10.
        mixture_width: the number of chains.
        chain_depth: the number of operations in each chain; if it is 0 or less, the number is drawn from 1 … 3.
        alpha: the parameter of both distributions, greater than 0.
        all_ops: whether to include brightness, colour, contrast and sharpness.
        interpolation: for shears, shifts and rotations: ``"nearest"``, ``"bilinear"`` or ``"bicubic"``.
        fill: the pixel value outside the image, 0 … 255, or one per channel; None means black.

    Example:
        >>> AugMix(severity=5, all_ops=False)
        AugMix(severity=5, all_ops=False)
    """

    record: ClassVar[type[Record]] = ChainMixture

    severity: int = argument(integer, default=3, by_epoch=True, minimum=1, maximum=BINS)
    mixture_width: int = argument(integer, default=3, minimum=1)
    chain_depth: int = argument(integer, default=-1)
    alpha: float = argument(finite_number, default=1.0, by_epoch=True, above=0)
    all_ops: bool = argument(flag, default=True)
    interpolation: Interpolation = argument(interpolation_name, default="bilinear")
    fill: Any = argument(fill_values, default=None, uint8=True)

    @property
    def space(self) -> Space:  # pyright: ignore[reportIncompatibleVariableOverride]
        return MIX_SPACES[self.all_ops]

    @property
    def recipe(self) -> Recipe:
        depth = self.chain_depth if self.chain_depth > 0 else MAX_DEPTH
        random_depth, width, alpha = self.chain_depth <= 0, self.mixture_width, self.alpha
        return Recipe(
            self.space.kinds, depth=depth, bins=self.severity, width=width, alpha=alpha, random_depth=random_depth
        )
