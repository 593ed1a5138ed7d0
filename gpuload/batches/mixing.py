"""MixUp and CutMix beyond the images: the partners in a batch, and the labels, found and made soft.

A sample's partner is the one at its position XOR 1, if both are in the batch; with a sampler or an iterable dataset it
is the neighbour in the batch as it was asked for: rows 2k and 2k + 1. With repeated samples, of which neighbours may be
the same, it is half a batch away. Runs in the main process, on whole batches, after they are collated and before they
go to the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gpuload.datasets.tree import flatten, unflatten
from gpuload.errors import CollateError
from gpuload.ring.columns import Columns, ImageColumn
from gpuload.stage.device import upload
from gpuload.transforms import CutMix, MixUp, Program

__all__ = ["Pairing", "find_labels", "half_apart", "partners_of", "soften"]


@dataclass(slots=True, eq=False)
class Pairing:
    """How the samples of one batch are mixed.

    Attributes:
        mixing: the transform, which says where the labels are.
        partners: int64 (N,), the row of each sample's partner; its own if it has none.
        share: float64 (N,), of each sample in its own label; None until images were mixed.
    """

    mixing: MixUp | CutMix
    partners: np.ndarray
    share: np.ndarray | None = None

    def take(self, program: Program, columns: Columns, images: ImageColumn) -> None:
        """Take the shares drawn for an image of each sample.

        Raises:
            CollateError: a sample lacks this image, or the images of a sample have different shares.
        """
        if images.rows is not None:
            missing = int(np.setdiff1d(np.arange(len(columns)), images.rows)[0])
            raise CollateError(
                f"{type(self.mixing).__name__} mixes the images of all samples of a batch, but "
                f"{columns.name(missing)} has fewer images than {columns.name(int(images.rows[0]))}; let all samples "
                "have the same number"
            )
        mix = program.mix
        assert mix is not None
        alone = self.partners == np.arange(len(self.partners))
        share = np.where(alone, 1.0, mix.share)
        if self.share is not None and not np.array_equal(share, self.share):
            row = int((share != self.share).argmax())
            raise CollateError(
                f"the images of {columns.name(row)} have different sizes, so {type(self.mixing).__name__} mixes them "
                f"with shares {self.share[row]:.3f} and {share[row]:.3f}, but there is one label; let both end with a "
                "crop or Resize of one size"
            )
        self.share = share


def partners_of(numbers: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """Return the row of each sample's partner, whose number is its own XOR 1, int64 (N,); its own row if it has none,
    or if its partner would be a repeat of the sample itself: the same number in `samples`.

    If a number appears twice, in a batch that is filled up, only the first has a partner.

    Example:
        >>> partners_of(np.array([6, 7, 8, 0, 1, 1]), np.array([6, 7, 8, 0, 1, 1])).tolist()
        [1, 0, 2, 4, 3, 5]
    """
    partners = np.arange(len(numbers), dtype=np.int64)
    waiting: dict[int, int] = {}
    for row, number in enumerate(numbers.tolist()):
        other = waiting.pop(number ^ 1, None)
        if other is None:
            waiting.setdefault(number, row)
        elif samples[row] != samples[other]:
            partners[row], partners[other] = other, row
    return partners


def half_apart(rows: np.ndarray, count: int) -> np.ndarray:
    """Return numbers by which the partner of row k in a batch of `count` is row k + count/2.

    With repeated samples a rank has every `world_size`-th position of a global batch, so partners are half a global
    batch apart: that is always the same rank, and the same partner on any number of ranks, as long as each rank has an
    even number of rows; in a shorter last batch it depends on the number of ranks. Repeats of a sample are next to each
    other, so they are no partners unless `repeats` is more than half of the global batch.

    Example:
        >>> half_apart(np.arange(5), 5).tolist()
        [0, 2, 4, 1, 3]
    """
    half = (count + 1) // 2
    return 2 * (rows % half) + rows // half


def find_labels(batch: Any, getter: Callable[[Any], Any] | str) -> Any:
    """Return the labels in a batch: by a function, or where torchvision's `labels_getter` looks by default.

    That is the second entry of a tuple or list, if it is a tensor. In a mapping (the batch, or its second entry) it is
    the key "labels", else the first key with "label" in it, in upper or lower case.

    Raises:
        CollateError: there are none.
    """
    if callable(getter):
        return getter(batch)
    holder = batch
    if isinstance(batch, tuple | list):
        holder = batch[1] if len(batch) > 1 else None
    if isinstance(holder, Mapping):
        if keys := [key for key in holder if isinstance(key, str) and "label" in key.lower()]:
            return holder[min(keys, key=lambda key: key.lower() != "labels")]
    elif isinstance(holder, torch.Tensor) and holder is not batch:
        return holder
    raise CollateError(
        f"no labels were found in the batch, {_shown(batch)}: they are looked for in its second entry, a tensor, or in "
        "a dict under a key with 'label' in it; give labels_getter=… a function that returns them, or "
        "labels_getter=None if there are none"
    )


def soften(batch: Any, pairing: Pairing, names: Callable[[int], str]) -> Any:
    """Return the batch with its labels mixed: float, (N, num_classes).

    Args:
        batch: collated; its labels are integers (N,), or numbers (N, classes).
        pairing: how its images were mixed.
        names: the name of a row's sample, for errors.

    Raises:
        CollateError: there are no labels, or they have the wrong type or shape.
    """
    mixing = pairing.mixing
    if mixing.labels_getter is None or pairing.share is None:
        return batch
    labels = find_labels(batch, mixing.labels_getter)
    name = type(mixing).__name__
    if not isinstance(labels, torch.Tensor):
        raise CollateError(
            f"{name}: the labels must be a tensor, got {_shown(labels)}; let the dataset return a number, or give "
            "labels_getter=… a function that returns the tensor in a batch"
        )
    mixed = mixed_labels(labels, pairing, names)
    leaves: list[Any] = []
    structure = flatten(batch, leaves)
    if not any(leaf is labels for leaf in leaves):
        raise CollateError(
            f"{name}(labels_getter=…) returned a tensor of shape {tuple(labels.shape)} that is not in the batch; it "
            "must return one of the batch's tensors itself, so that it can be replaced"
        )
    return unflatten(structure, [mixed if leaf is labels else leaf for leaf in leaves])


def mixed_labels(labels: torch.Tensor, pairing: Pairing, names: Callable[[int], str]) -> torch.Tensor:
    """Return soft labels (N, classes): sums of each sample's label and its partner's, weighted by their shares."""
    assert pairing.share is not None
    rows, name, classes = len(pairing.partners), type(pairing.mixing).__name__, pairing.mixing.num_classes
    if labels.dim() not in (1, 2) or (labels.dim() == 1 and (labels.is_floating_point() or labels.dtype == torch.bool)):
        raise CollateError(
            f"{name}: labels must be integers of shape (N,), or numbers of shape (N, classes), got {labels.dtype} of "
            f"shape {tuple(labels.shape)}"
        )
    if len(labels) != rows:
        raise CollateError(
            f"{name} mixed {rows} images, but there are {len(labels)} labels in the batch: the collate_fn left some "
            "out, or added some; labels must stay in the order of their images"
        )
    if labels.dim() == 1:
        labels = _one_hot(labels, classes, name, names)
    elif classes is not None and labels.shape[1] != classes:
        raise CollateError(
            f"{name}(num_classes={classes}) got labels of shape {tuple(labels.shape)}, of {labels.shape[1]} classes; "
            "leave num_classes out, or give this number"
        )
    dtype = labels.dtype if labels.is_floating_point() else torch.float32
    if smoothing := pairing.mixing.label_smoothing:
        labels = labels.to(torch.float32).mul(1 - smoothing).add_(smoothing / labels.shape[1])
    if (pairing.share == 1).all():
        return labels.to(dtype)
    share, partners = upload(pairing.share, labels.device)[:, None], upload(pairing.partners, labels.device)
    soft = labels.to(torch.float32)
    return (soft[partners].mul_((1 - share).float()).add_(soft * share.float())).to(dtype)


def _one_hot(labels: torch.Tensor, classes: int | None, name: str, names: Callable[[int], str]) -> torch.Tensor:
    """Return labels (N,) as float32 (N, classes)."""
    if classes is None:
        raise CollateError(
            f"{name} got integer labels of shape {tuple(labels.shape)}, which need num_classes=… to become soft ones"
        )
    wrong = (labels < 0) | (labels >= classes)
    if labels.is_cpu and wrong.any():  # those on a device are not looked at: that would wait for it
        row = int(wrong.int().argmax())
        raise CollateError(
            f"{name}(num_classes={classes}): {names(row)} has the label {int(labels[row])}, which is not in "
            f"0 … {classes - 1}; give the number of classes, or correct the labels"
        )
    soft = torch.zeros(len(labels), classes, dtype=torch.float32, device=labels.device)
    return soft.scatter_(1, labels.to(torch.int64)[:, None], 1.0)


def _shown(value: Any) -> str:
    """Return a short description, for errors."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {', '.join(map(repr, value)) or 'none'}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
