"""The operations of automatic augmentation, how strong they are, and the policies that were found by search.

A *kind* is an operation as the papers name it, by its index in `KINDS`; `operations` turns kinds and magnitudes into
codes and values of `program.ops.OPS`. Magnitudes come in bins from none to the greatest, as float32, like
torchvision's: they are cut to whole pixels, so a last bit can be a pixel.

Sources of the policies: Cubuk et al., "AutoAugment: Learning Augmentation Strategies from Data", CVPR 2019; of the
spaces: "RandAugment", NeurIPS 2020; Müller, Hutter, "TrivialAugment", ICCV 2021; Hendrycks et al., "AugMix", ICLR 2020;
with the ranges of torchvision 0.28.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final

import numpy as np

from gpuload.transforms.matrices import IDENTITY, rotation_coefficients
from gpuload.transforms.program.ops import OPS, VALUES, code

__all__ = ["AUTO", "KINDS", "MIX", "POLICIES", "RAND", "WIDE", "Space", "affine", "operations", "policy_table"]

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
