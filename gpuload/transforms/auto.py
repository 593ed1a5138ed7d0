"""Automatic augmentation as in torchvision: AutoAugment, RandAugment, TrivialAugment.

Each draws a list of operations for each sample; `gpuload.transforms.policies` says which there are and how strong they
are. Boxes, masks and keypoints are refused, as by torchvision: the published methods are for classification.
"""

from __future__ import annotations

import enum
from typing import Any, ClassVar, Final

import numpy as np

from gpuload.transforms.arguments import Interpolation, fill_values, interpolation_name, whole
from gpuload.transforms.base import Transform, Uniforms, declaration
from gpuload.transforms.policies import AUTO, POLICIES, RAND, SIGNED, WIDE, Space, operations, policy_table
from gpuload.transforms.program.ops import NOTHING, Ops, Outline, Record

__all__ = ["AutoAugment", "AutomaticAugment", "RandAugment", "TrivialAugmentWide", "chosen", "signed"]

BINS: Final = 10  # of AutoAugment's magnitudes


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
