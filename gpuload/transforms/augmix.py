"""AugMix: several short chains of operations, mixed with the image itself; drawn as a `Mixture`."""

from __future__ import annotations

from typing import Any, ClassVar, Final

import numpy as np

from gpuload.rng.distributions import beta, beta_count, dirichlet, dirichlet_count
from gpuload.transforms.arguments import Interpolation, finite, whole
from gpuload.transforms.auto import AutomaticAugment, chosen, signed
from gpuload.transforms.base import Uniforms, declaration
from gpuload.transforms.policies import MIX, Space, operations
from gpuload.transforms.program.ops import NOTHING, VALUES, Mixture, Record

__all__ = ["AugMix"]

BINS: Final = 10  # of magnitudes; the first `severity` of them are drawn from
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
