"""MixUp and CutMix beyond the images: choosing partners in a batch, and finding and mixing labels.

A sample's partner is the sample at its position XOR 1, if both are in the batch. With a sampler or an iterable dataset,
rows 2k and 2k + 1 of the requested batch are partners. With repeated samples, where neighbours can be the same sample,
the partner is half a batch away. This module runs in the main process on complete batches, after collation and before
the copy to the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gpuload.datasets.tree import flatten, unflatten
from gpuload.errors import CollateError
from gpuload.ring.columns import Columns
from gpuload.stage.device import upload
from gpuload.transforms import CutMix, MixUp, Program

__all__ = ["Pairing", "find_labels", "half_batch_numbers", "partners_of", "soften"]


@dataclass(slots=True, eq=False)
class Pairing:
    """The mixing of one batch's samples.

    Attributes:
        mixing: the transform, which knows where the labels are.
        partners: int64 (N,), the row of each sample's partner, or the sample's own row if it has none.
        share: float64 (N,), each sample's share in its own mixed label.
    """

    mixing: MixUp | CutMix
    partners: np.ndarray
    share: np.ndarray

    @classmethod
    def of(cls, mixing: MixUp | CutMix, partners: np.ndarray, columns: Columns, programs: Sequence[Program]) -> Pairing:
        """Return the pairing of a batch, with the shares drawn for its images; `programs` has one program for each of
        `Columns.images`.

        Raises:
            CollateError: a sample lacks an image, or the images of a sample have different shares.
        """
        name, share = type(mixing).__name__, np.empty(0)
        for images, program in zip(columns.images, programs, strict=True):
            if images.rows is not None:
                row_without = int(np.setdiff1d(np.arange(len(columns)), images.rows)[0])
                raise CollateError(
                    f"{name} mixes the images of all samples of a batch, but {columns.name(row_without)} has fewer "
                    f"images than {columns.name(int(images.rows[0]))}; give all samples the same number of images"
                )
            assert program.mix is not None
            first_share, share = share, np.where(partners == np.arange(len(partners)), 1.0, program.mix.share)
            if len(first_share) and not np.array_equal(share, first_share):
                row = int((share != first_share).argmax())
                raise CollateError(
                    f"the images of {columns.name(row)} have different sizes, so {name} would mix them in different "
                    f"proportions ({first_share[row]:.3f} and {share[row]:.3f}), but there is only one label for both; "
                    "crop or resize both images to one size"
                )
        return cls(mixing, partners, share)


def partners_of(numbers: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """Return the row of each sample's partner, int64 (N,). The partner has the sample's number XOR 1. A sample without
    such a partner, or whose partner would be a repeat of itself (the same number in `samples`), gets its own row.

    If a number appears twice, as in a padded batch, only its first row has a partner.

    Example:
        >>> partners_of(np.array([6, 7, 8, 0, 1, 1]), np.array([6, 7, 8, 0, 1, 1])).tolist()
        [1, 0, 2, 4, 3, 5]
    """
    partners = np.arange(len(numbers), dtype=np.int64)
    unpaired_rows: dict[int, int] = {}
    for row, number in enumerate(numbers.tolist()):
        partner = unpaired_rows.pop(number ^ 1, None)
        if partner is None:
            unpaired_rows.setdefault(number, row)
        elif samples[row] != samples[partner]:
            partners[row], partners[partner] = partner, row
    return partners


def half_batch_numbers(rows: np.ndarray, count: int) -> np.ndarray:
    """Return numbers for `partners_of` that make row k + count/2 the partner of row k in a batch of `count`.

    With repeated samples, a rank has every `world_size`-th position of a global batch, so partners are half a global
    batch apart. Partners are always on the same rank, and depend on the number of ranks only if a rank has an odd
    number of rows, or in a shorter last batch. Repeats of a sample are adjacent, so they do not become partners unless
    `repeats` is more than half of the global batch.

    Example:
        >>> half_batch_numbers(np.arange(5), 5).tolist()
        [0, 2, 4, 1, 3]
    """
    half = (count + 1) // 2
    return 2 * (rows % half) + rows // half


def find_labels(batch: object, getter: Callable[[Any], Any] | str) -> Any:
    """Return the labels in a batch, found by a function or at the default locations of torchvision's `labels_getter`.

    The default is the second entry of a tuple or list, if it is a tensor. In a mapping (the batch, or its second
    entry), it is the value of the key "labels", or else of the first key that contains "label" in upper or lower case.

    Raises:
        CollateError: no labels were found.
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
        f"no labels were found in the batch, {_describe(batch)}: labels are expected as its second entry, a tensor, or "
        "in a dict under a key that contains 'label'; pass a function that returns the labels as labels_getter=…, or "
        "labels_getter=None if there are no labels"
    )


def soften(batch: object, pairing: Pairing, name_of: Callable[[int], str]) -> Any:
    """Return the batch with mixed labels, float (N, num_classes).

    Args:
        batch: the collated batch; its labels are (N,) integers or (N, classes) numbers.
        pairing: the partners and shares of its samples.
        name_of: returns the name of a row's sample, for errors.

    Raises:
        CollateError: the labels are missing, or have the wrong type or shape.
    """
    mixing = pairing.mixing
    if mixing.labels_getter is None:
        return batch
    labels = find_labels(batch, mixing.labels_getter)
    name = type(mixing).__name__
    if not isinstance(labels, torch.Tensor):
        raise CollateError(
            f"{name}: the labels must be a tensor, got {_describe(labels)}; have the dataset return a number, or pass "
            "a function that returns the tensor in a batch as labels_getter=…"
        )
    mixed = mix_labels(labels, pairing, name_of)
    leaves: list[Any] = []
    structure = flatten(batch, leaves)
    if not any(leaf is labels for leaf in leaves):
        raise CollateError(
            f"{name}(labels_getter=…) returned a tensor of shape {tuple(labels.shape)} that is not in the batch; "
            "return one of the batch's tensors itself, so that it can be replaced"
        )
    return unflatten(structure, [mixed if leaf is labels else leaf for leaf in leaves])


def mix_labels(labels: torch.Tensor, pairing: Pairing, name_of: Callable[[int], str]) -> torch.Tensor:
    """Return (N, classes) soft labels: the sum of each sample's label and its partner's label, weighted by their
    shares."""
    rows, name, classes = len(pairing.partners), type(pairing.mixing).__name__, pairing.mixing.num_classes
    if labels.dim() not in (1, 2) or (labels.dim() == 1 and (labels.is_floating_point() or labels.dtype == torch.bool)):
        raise CollateError(
            f"{name}: labels must be integers of shape (N,), or numbers of shape (N, classes), got {labels.dtype} of "
            f"shape {tuple(labels.shape)}"
        )
    if len(labels) != rows:
        raise CollateError(
            f"{name} mixed {rows} images, but the batch has {len(labels)} labels; make the collate_fn keep one label "
            "per image, in the same order"
        )
    if labels.dim() == 1:
        labels = _to_one_hot(labels, classes, name, name_of)
    elif classes is not None and labels.shape[1] != classes:
        raise CollateError(
            f"{name}(num_classes={classes}) got labels of shape {tuple(labels.shape)}, which have {labels.shape[1]} "
            "classes; leave num_classes out, or pass this number"
        )
    dtype = labels.dtype if labels.is_floating_point() else torch.float32
    if smoothing := pairing.mixing.label_smoothing:
        labels = labels.to(torch.float32).mul(1 - smoothing).add_(smoothing / labels.shape[1])
    if (pairing.share == 1).all():
        return labels.to(dtype)
    share, partners = upload(pairing.share, labels.device)[:, None], upload(pairing.partners, labels.device)
    soft = labels.to(torch.float32)
    return (soft[partners].mul_((1 - share).float()).add_(soft * share.float())).to(dtype)


def _to_one_hot(labels: torch.Tensor, classes: int | None, name: str, name_of: Callable[[int], str]) -> torch.Tensor:
    """Convert (N,) labels to float32 (N, classes)."""
    if classes is None:
        raise CollateError(
            f"{name} got integer labels of shape {tuple(labels.shape)}; pass num_classes=… to make them soft labels"
        )
    is_invalid = (labels < 0) | (labels >= classes)
    if labels.is_cpu and is_invalid.any():  # checking labels on a device would wait for the device
        row = int(is_invalid.int().argmax())
        raise CollateError(
            f"{name}(num_classes={classes}): {name_of(row)} has the label {int(labels[row])}, which is not in "
            f"0 … {classes - 1}; increase num_classes, or correct the labels"
        )
    soft = torch.zeros(len(labels), classes, dtype=torch.float32, device=labels.device)
    return soft.scatter_(1, labels.to(torch.int64)[:, None], 1.0)


def _describe(value: Any) -> str:
    """Describe a value for an error message."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {', '.join(map(repr, value)) or 'none'}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
