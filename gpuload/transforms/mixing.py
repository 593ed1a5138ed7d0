"""MixUp and CutMix, which mix each image with its neighbour's image, and its label with the neighbour's label.

torchvision pairs a batch's samples by rolling the batch, and draws one share for the entire batch. Here the image at
position p of the epoch's order is mixed with the image at position p XOR 1, each with its own random parameters, so the
result does not depend on the number of ranks. The main process pairs the images (`gpuload.batches.mixing`). If samples
are repeated, it uses other pairs (see `MixUp`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from gpuload.checks import argument, finite_number, integer
from gpuload.rng.distributions import beta, beta_count
from gpuload.transforms.arguments import label_getter
from gpuload.transforms.base import Transform, Uniforms, declaration
from gpuload.transforms.program.ops import PartnerMix, Record

__all__ = ["CutMix", "MixUp"]


@declaration
class _Mixing(Transform):
    works_on: ClassVar[tuple[str, ...]] = ("float", "normalized")
    is_mixing: ClassVar[bool] = True
    works_on_finished: ClassVar[bool] = True
    record: ClassVar[type[Record]] = PartnerMix

    alpha: float = argument(finite_number, default=1.0, kw_only=True, by_epoch=True, above=0)
    num_classes: int | None = argument(integer, default=None, kw_only=True, minimum=1)
    labels_getter: Callable[[Any], Any] | str | None = argument(
        label_getter, default="default", optional=True, kw_only=True, compare=False
    )
    label_smoothing: float = argument(finite_number, default=0.0, kw_only=True, minimum=0, below=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.label_smoothing and self.labels_getter is None:
            raise ValueError(
                f"{type(self).__name__}(label_smoothing={self.label_smoothing}) smooths labels, but labels_getter=None "
                "means that there are no labels; remove label_smoothing, or set labels_getter"
            )

    def draw_shares(self, uniforms: Uniforms, count: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Draw the share of each image in its mixture, (B,). Also return `count` more uniform numbers, (B, count)."""
        numbers = uniforms(count + beta_count(self.alpha, self.alpha))
        return beta(numbers[:, count:], self.alpha, self.alpha), numbers[:, :count]


@declaration
class MixUp(_Mixing):
    """Blend each image with its neighbour's image, and each label with the neighbour's label.

    The share λ is drawn from Beta(α, α) for each sample: image = λ · image + (1 - λ) · neighbour's image, and likewise
    for the label. Neighbours are the samples at positions 2k and 2k + 1 of the epoch's order (with a sampler or an
    iterable dataset: at indices 2k and 2k + 1 of a batch), so `batch_size` must be even. A sample without a neighbour,
    at the end of an epoch or next to a skipped sample, is unchanged. Must come after `ToDtype` or `Normalize`.

    With ``Loader(repeats=…)`` neighbours are at indices k and k + N/2 of a rank's N samples, half a global batch apart,
    so that no sample is mixed with a repeat of itself. If a batch is too small for this, its samples are unchanged.

    Zhang et al., "mixup: Beyond empirical risk minimization", ICLR 2018; torchvision draws one λ for an entire batch.

    Args:
        alpha: α, greater than 0.
        num_classes: the number of classes; required if labels are integers (N,), which become soft labels, float32
            (N, num_classes).
        labels_getter: the location of the labels in a batch. ``"default"`` means the second entry, if it is a tensor.
            If the batch or its second entry is a dict, ``"default"`` means its key "labels", or else a key that
            contains "label", in upper or lower case. A function takes the batch and returns the tensor. None means that
            there are no labels.
        label_smoothing: s in 0 ≤ s < 1. Labels y of K classes become (1 - s) · y + s / K, even for samples that are not
            mixed. So the class of an integer label gets 1 - s + s / K and all other classes s / K, as in timm's `Mixup`
            (timm/data/mixup.py, `mixup_target`). Labels (N, K) are treated as probabilities of K classes. Do not smooth
            the labels again in the loss.

    Example:
        >>> MixUp(num_classes=1000)
        MixUp(num_classes=1000)
    """

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> PartnerMix:
        share, _ = self.draw_shares(uniforms)
        return PartnerMix(share, np.zeros((len(share), 4), np.int64))


@declaration
class CutMix(_Mixing):
    """Paste a box of the neighbour's image into each image, and mix the labels in proportion to the box's area.

    With λ from Beta(α, α), the box covers about 1 - λ of the image's area and has the image's aspect ratio. Its centre
    is drawn uniformly, and the box is clipped to the image. The weight of the image's own label is the fraction of its
    pixels that remain. Everything else is as for `MixUp`.

    Yun et al., "CutMix: Regularization strategy to train strong classifiers with localizable features", ICCV 2019.

    Args:
        alpha, num_classes, labels_getter, label_smoothing: as for `MixUp`.

    Example:
        >>> CutMix(alpha=0.5)
        CutMix(alpha=0.5)
    """

    def draw(self, uniforms: Uniforms, sizes_hw: np.ndarray) -> PartnerMix:
        share, centres = self.draw_shares(uniforms, 2)
        middle = (centres * sizes_hw).astype(np.int64)
        half = (0.5 * np.sqrt(1 - share)[:, None] * sizes_hw).astype(np.int64)
        start, end = np.maximum(middle - half, 0), np.minimum(middle + half, sizes_hw)
        boxes = np.concatenate([start, end - start], axis=1)
        return PartnerMix(1 - boxes[:, 2:].prod(axis=1) / sizes_hw.prod(axis=1), boxes)
