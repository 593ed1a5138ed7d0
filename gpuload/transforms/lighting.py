"""Changes of exposure, colour temperature, light and shadow, drawn for each sample, as robots and cars see them.

Names, arguments, defaults and distributions are those of Albumentations 2.0.8. Levels are truncated after each
transform, as there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

import numpy as np

from gpuload.checks import argument, integer, interval, numbers, one_of, probability
from gpuload.rng.distributions import normal
from gpuload.transforms.arguments import size_pair
from gpuload.transforms.base import Transform, Uniforms, declaration, scale_to_range
from gpuload.transforms.colour import OneOperation
from gpuload.transforms.program.ops import NOTHING, VALUES, Ops, Record, code

__all__ = ["CLAHE", "GaussianIllumination", "PlanckianJitter", "RandomGamma", "RandomShadow"]

# Red, green and blue of illuminants from 3,000 K (CIE D: 4,000 K) to 15,000 K in steps of 500 K, in units of 0.0001,
# from https://github.com/TheZino/PlanckianJitter (Zini et al., "Planckian jitter: countering the color-crippling
# effects of color jitter on self-supervised training", ICLR 2023), as in Albumentations and Kornia.
ILLUMINANTS: Final = {
    "blackbody": (
        (6743, 6281, 5919, 5623, 5376, 5163, 4979, 4816, 4672, 4542, 4426, 4320, 4223, 4135, 4054, 3980, 3911, 3847,
         3787, 3732, 3680, 3632, 3586, 3544, 3503),
        (4029, 4241, 4372, 4457, 4515, 4555, 4584, 4604, 4619, 4630, 4638, 4644, 4648, 4651, 4653, 4654, 4655, 4656,
         4656, 4656, 4655, 4655, 4655, 4654, 4653),
        (13, 1665, 2513, 3154, 3672, 4103, 4468, 4782, 5053, 5289, 5497, 5681, 5844, 5990, 6121, 6239, 6346, 6444,
         6532, 6613, 6688, 6756, 6820, 6878, 6933),
    ),
    "cied": (
        (5829, 5510, 5246, 5021, 4826, 4654, 4502, 4364, 4240, 4127, 4023, 3928, 3839, 3757, 3681, 3609, 3543, 3480,
         3421, 3365, 3313, 3263, 3217),
        (4421, 4514, 4576, 4618, 4646, 4667, 4681, 4692, 4700, 4705, 4709, 4713, 4715, 4716, 4717, 4718, 4719, 4719,
         4719, 4719, 4719, 4719, 4719),
        (2288, 2948, 3488, 3941, 4325, 4654, 4938, 5186, 5403, 5594, 5763, 5914, 6049, 6171, 6281, 6380, 6472, 6555,
         6631, 6702, 6766, 6826, 6882),
    ),
}  # fmt: skip
HOTTEST, STEP, WHITE = 15_000, 500, 6_000  # kelvin
WARM_SHARE: Final = 0.4  # the probability of a temperature below `WHITE`


@declaration
class RandomGamma(OneOperation):
    """Raise pixel values to a random power, as if the exposure had been different, with probability `p`.

    As in Albumentations 2.0.8, a pixel value v in 0 … 1 becomes v to the power of gamma: above 100% the image becomes
    darker, below 100% brighter.

    Args:
        gamma_limit: the minimum and maximum gamma, in percent; a number x means 1 … x.
        p: the probability.

    Example:
        >>> RandomGamma((50, 200))
        RandomGamma(gamma_limit=(50.0, 200.0))
    """

    operations: ClassVar[tuple[str, ...]] = ("gamma",)

    gamma_limit: float | tuple[float, float] = argument(
        interval, default=(80.0, 120.0), by_epoch=True, start=1, above=0
    )
    p: float = argument(probability, default=0.5, by_epoch=True)

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Ops:
        drawn = uniforms(2)
        return self.ops_record(drawn[:, 0] < self.p, scale_to_range(self.gamma_limit, drawn[:, 1:]) / 100)


@declaration
class PlanckianJitter(OneOperation):
    """Change the colour temperature of the light to a random one, with probability `p`; grey images do not change.

    Red and blue are multiplied by the illuminant's red / green and blue / green. The temperature is below 6,000 K with
    a probability of 0.4. Zini et al., "Planckian jitter", ICLR 2023.

    Args:
        mode: ``"blackbody"``, or ``"cied"`` for the CIE's standard illuminants D (daylight).
        temperature_limit: the minimum and maximum temperature in kelvin, which contain 6,000; None means 3,000 …
            15,000, or 4,000 … 15,000 for ``"cied"``, which are also the bounds.
        sampling_method: ``"uniform"``, or ``"gaussian"``: normal on both sides of 6,000 K, with a third of the distance
            to the limit as standard deviation.
        p: the probability.

    Example:
        >>> PlanckianJitter("cied").temperature_limit
        (4000, 15000)
    """

    operations: ClassVar[tuple[str, ...]] = ("white_balance",)

    mode: str = argument(one_of, default="blackbody", choices=tuple(ILLUMINANTS))
    temperature_limit: tuple[int, int] | None = argument(interval, default=None, by_epoch=True, entry=integer)
    sampling_method: str = argument(one_of, default="uniform", choices=("uniform", "gaussian"))
    p: float = argument(probability, default=0.5, by_epoch=True)

    def check_arguments(self) -> None:
        coldest = HOTTEST - STEP * (len(ILLUMINANTS[self.mode][0]) - 1)
        lowest, highest = limit = self.temperature_limit or (coldest, HOTTEST)
        if not coldest <= lowest <= WHITE <= highest:
            raise ValueError(
                f"PlanckianJitter(temperature_limit=…) must contain {WHITE} and lie within {coldest} … {HOTTEST} for "
                f"mode={self.mode!r}, got {limit}"
            )
        object.__setattr__(self, "temperature_limit", limit)

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Ops:
        drawn, (lowest, highest) = uniforms(4), self.temperature_limit or (0, 0)
        reach = np.where(drawn[:, 1] < WARM_SHARE, lowest - WHITE, highest - WHITE)
        shares = drawn[:, 2]
        if self.sampling_method == "gaussian":
            shares = np.minimum(abs(normal(drawn[:, 2:])[:, 0]) / 3, 1)
        temperatures = np.floor(WHITE + shares * reach)
        table = np.array(ILLUMINANTS[self.mode], np.float64)
        steps = HOTTEST - STEP * np.arange(table.shape[1])[::-1]
        red, green, blue = (np.interp(temperatures, steps, channel) for channel in table)
        return self.ops_record(drawn[:, 0] < self.p, np.stack([red / green, blue / green], axis=1))


@declaration
class GaussianIllumination(OneOperation):
    """Brighten or darken a random round patch of the image, as a lamp does, with probability `p`.

    Pixel values are multiplied by 1 + i · exp(-d² / 2σ²), where d is the distance from the centre of the patch. This
    is ``Illumination(mode="gaussian")`` of Albumentations 2.0.8, with wider bounds.

    Args:
        intensity_range: the minimum and maximum of \\|i\\|, within 0 … 1.
        effect_type: ``"brighten"`` (i > 0), ``"darken"`` (i < 0), or ``"both"`` with equal probabilities.
        center_range: the bounds of the centre, as fractions of the width and of the height.
        sigma_range: the bounds of σ, as fractions of the longer side, greater than 0.
        p: the probability.
    """

    operations: ClassVar[tuple[str, ...]] = ("illumination",)
    needs_full_image: ClassVar[bool] = True

    intensity_range: tuple[float, float] = argument(interval, default=(0.01, 0.2), by_epoch=True, minimum=0, maximum=1)
    effect_type: str = argument(one_of, default="both", choices=("brighten", "darken", "both"))
    center_range: tuple[float, float] = argument(interval, default=(0.1, 0.9), by_epoch=True, minimum=0, maximum=1)
    sigma_range: tuple[float, float] = argument(interval, default=(0.2, 1.0), by_epoch=True, above=0)
    p: float = argument(probability, default=0.5, by_epoch=True)

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Ops:
        drawn = uniforms(6)
        is_bright = {"brighten": True, "darken": False, "both": drawn[:, 1] < 0.5}[self.effect_type]
        intensity = np.where(is_bright, 1, -1) * scale_to_range(self.intensity_range, drawn[:, 2])
        centers_yx = scale_to_range(self.center_range, drawn[:, 3:5]) * sizes_hw
        sigma = scale_to_range(self.sigma_range, drawn[:, 5]) * sizes_hw.max(axis=1)
        return self.ops_record(drawn[:, 0] < self.p, np.column_stack([intensity, centers_yx, sigma]))


def _check_region(name: str, value: object) -> tuple[float, ...]:
    form = "a box (left, top, right, bottom)"
    left, top, right, bottom = numbers(name, value, form=form, counts=(4,), minimum=0, maximum=1)
    if left >= right or top >= bottom:
        raise ValueError(f"{name} must be {form} with left < right and top < bottom, got {value}")
    return left, top, right, bottom


@declaration
class RandomShadow(Transform):
    """Darken one or more random polygons of the image, with probability `p`.

    As in Albumentations 2.0.8, the vertices of a polygon are drawn in no order, so that its sides cross each other, and
    what they enclose an even number of times is not in the shadow.

    Args:
        shadow_roi: the region of the vertices as fractions of the sides, (left, top, right, bottom).
        num_shadows_limit: the minimum and maximum number of shadows.
        shadow_dimension: the number of vertices of each shadow, at least 3.
        shadow_intensity_range: the range of the share of the light that a shadow takes away, within 0 … 1.
        p: the probability.
    """

    record: ClassVar[type[Record]] = Ops
    operations: ClassVar[tuple[str, ...]] = ("shadow",)
    is_optional: ClassVar[bool] = True  # an image can get fewer shadows than the most
    needs_full_image: ClassVar[bool] = True

    shadow_roi: Sequence[float] = argument(_check_region, default=(0.0, 0.5, 1.0, 1.0))
    num_shadows_limit: tuple[int, int] = argument(interval, default=(1, 2), entry=integer, minimum=1)
    shadow_dimension: int = argument(integer, default=5, minimum=3)
    shadow_intensity_range: tuple[float, float] = argument(
        interval, default=(0.5, 0.5), by_epoch=True, minimum=0, maximum=1
    )
    p: float = argument(probability, default=0.5, by_epoch=True)

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Ops:
        fewest, most = self.num_shadows_limit
        drawn = uniforms(2 + 3 * most)
        counts = np.where(drawn[:, 0] < self.p, fewest + np.floor(drawn[:, 1] * (most - fewest + 1)), 0)
        values = np.zeros((len(drawn), most, VALUES))
        values[:, :, 0] = 1 - scale_to_range(self.shadow_intensity_range, drawn[:, 2 : 2 + most])
        values[:, :, 1:5] = np.floor(np.array(self.shadow_roi) * sizes_hw[:, [1, 0, 1, 0]])[:, None]
        values[:, :, 5] = self.shadow_dimension
        values[:, :, 6:] = np.floor(drawn[:, 2 + most :].reshape(-1, most, 2) * 2.0**32)  # as in `GaussianNoise`
        codes = np.where(np.arange(most) < counts[:, None], code("shadow"), NOTHING)
        return Ops(codes.astype(np.int64), values, needs_full_image=True)


@declaration
class CLAHE(OneOperation):
    """Equalize the lightness of each part of the image, but limit its contrast, with probability `p`.

    CLAHE means contrast limited adaptive histogram equalization (Zuiderveld, "Graphics gems IV", 1994). As in
    Albumentations 2.0.8, it is OpenCV's ``createCLAHE``, applied to L of an image in CIELAB.

    Args:
        clip_limit: the minimum and maximum of the limit for the slope of a tile's mapping; a number x means 1 … x.
        tile_grid_size: the number of tiles, (along x, along y), as in OpenCV; a number means a square.
        p: the probability.

    Images must have 1 or 3 channels.
    """

    operations: ClassVar[tuple[str, ...]] = ("clahe",)
    needs_full_image: ClassVar[bool] = True

    clip_limit: float | tuple[float, float] = argument(interval, default=(1.0, 4.0), by_epoch=True, start=1, minimum=1)
    tile_grid_size: int | tuple[int, int] = argument(size_pair, default=(8, 8), by_epoch=True)
    p: float = argument(probability, default=0.5, by_epoch=True)

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> Ops:
        drawn = uniforms(2)
        grid = np.broadcast_to(np.array(self.tile_grid_size, np.float64), (len(drawn), 2))
        limits = scale_to_range(self.clip_limit, drawn[:, 1:])
        return self.ops_record(drawn[:, 0] < self.p, np.hstack([grid, limits]))
