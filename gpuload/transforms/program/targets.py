"""Moves boxes and keypoints together with their image.

A point is (x, y) in pixels, measured from the top left corner of the image; the centre of pixel (0, 0) is at (½, ½).
Boxes are (left, top, right, bottom). A warp moves a box's four corners and returns their bounding box. As in
torchvision, boxes are clipped to the image after crops, padding and warps, but not after a flip or a plain resize.
Keypoints are never clipped; a flip treats them as pixel indices (x becomes width − 1 − x), as in torchvision.

All computations are in float64. Integer coordinates are truncated to integers after each transform, as in torchvision.

Each formula takes the parameters of a record as arrays that broadcast against the points (`Motion`), and works on NumPy
arrays and on tensors. The host applies it to the boxes and keypoints of all samples, one behind the other
(`apply_records`), and `gpuload.batches.padded_targets` to those that are padded on a device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gpuload.datasets.arrays import cast, namespace
from gpuload.transforms.program.fields import displace
from gpuload.transforms.program.ops import (
    Box,
    Call,
    Clamp,
    ClampPoints,
    Elastic,
    Flip,
    Record,
    Reformat,
    Tidy,
    TidyPoints,
    Turn,
    Warp,
    map_params,
)

__all__ = [
    "TARGET_RECORDS",
    "Motion",
    "SampleTargets",
    "apply_records",
    "final_format",
    "motion_of",
    "move_boxes",
    "move_points",
    "move_spans",
    "valid_boxes",
    "valid_points",
]  # fmt: skip

TARGET_RECORDS = (Box, Call, Clamp, ClampPoints, Elastic, Flip, Reformat, Tidy, TidyPoints, Turn, Warp)
UNLIMITED = 2**62  # a bound for coordinates that are not clipped


@dataclass(slots=True, eq=False)
class SampleTargets:
    """The current boxes and keypoints of one sample while the records of a chain are applied.

    Attributes:
        boxes: one array per `Boxes` of the sample, float64 or int64 (n, 4).
        points: one array per `Keypoints` of the sample, float64 or int64 (…, 2).
        format: the box format set by `ConvertBoundingBoxFormat`; None means unchanged.
        kept_indices: int64 (n,), the indices of the original boxes that remain; None means all.
        valid: bool (n,), whether each keypoint, or group of keypoints, remains; None means that all remain.
        is_mirrored: whether the records that were applied mirror the image, all together.
    """

    boxes: list[np.ndarray]
    points: list[np.ndarray] = field(default_factory=list)
    format: str | None = None
    kept_indices: np.ndarray | None = None
    valid: np.ndarray | None = None
    is_mirrored: bool = False

    def filter_boxes(self, mask: np.ndarray) -> None:
        """Drop the boxes where `mask`, bool (n,), is False."""
        if not mask.all():
            self.kept_indices = np.flatnonzero(mask) if self.kept_indices is None else self.kept_indices[mask]
            self.boxes = [boxes[mask] for boxes in self.boxes]


@dataclass(slots=True, eq=False)
class Motion:
    """The parameters of a record, as arrays for the formulas.

    Attributes:
        record: the record.
        arrays: the parameters, keyed by name: (n, k), one row for each image of the record. A formula gets each of them
            with axes between these two, so that it broadcasts against the points of its image.
        changes: bool (n,), whether the record changes the targets of each image.
        mirrors: bool (n,), whether it mirrors each image.
        displace: moves points by an `Elastic` record, see `gpuload.transforms.program.fields.displace`.
    """

    record: Record
    arrays: dict[str, Any]
    changes: np.ndarray
    mirrors: np.ndarray
    displace: Callable[..., Any] = displace

    def at(self, entries: np.ndarray) -> Motion:
        """Return the parameters for points (n, axes, 2), given the index of each in the arrays, int64 (n,)."""
        return replace(self, arrays={name: array[entries, None] for name, array in self.arrays.items()})


def motion_of(record: Record) -> Motion:
    """Return the parameters of a record for its images."""
    count = len(record.sizes_hw)
    changes, mirrors = np.ones(count, np.bool_), np.zeros(count, np.bool_)
    arrays = {"size_xy": record.output_hw[:, ::-1]}
    match record:
        case Flip() | Turn():
            flipped = record.flipped
            if isinstance(record, Flip):
                flipped = np.zeros((count, 2), np.bool_)
                flipped[:, record.axis] = record.flipped
            transposed = record.transposed if isinstance(record, Turn) else np.zeros(count, np.bool_)
            arrays |= {"flipped": flipped[:, ::-1], "transposed": transposed[:, None]}
            changes, mirrors = transposed | flipped.any(axis=1), transposed ^ (flipped.sum(axis=1) == 1)
        case Box():
            box, old_size, new_size = record.box_tlhw, record.box_tlhw[:, 2:], record.size_hw
            is_entire = (box == np.concatenate([np.zeros_like(old_size), record.sizes_hw], axis=1)).all(axis=1)
            changes = ~(is_entire & (new_size == record.sizes_hw).all(axis=1))
            is_clipped = (~is_entire | record.clips_boxes)[:, None]
            is_scaled = (old_size != new_size).any(axis=1, keepdims=True)
            arrays = {
                "shift_xy": box[:, 1::-1],
                "low_xy": np.where(is_clipped, 0, -UNLIMITED),
                "high_xy": np.where(is_clipped, old_size[:, ::-1], UNLIMITED),
                "factor_xy": np.where(is_scaled, new_size[:, ::-1], 1),
                "divisor_xy": np.where(is_scaled, old_size[:, ::-1], 1).astype(np.float64),
            }
        case Elastic():
            arrays["keys"] = record.keys.astype(np.int64)
        case Warp():
            a, b, c, d, e, f, g, h = record.coefficients.T
            # The adjugate of the warp's matrix is its inverse up to a factor, which the division cancels.
            # `np.linalg.inv` and `@` are not used, because their rounding depends on the processor's BLAS kernel, which
            # made boxes differ between CPUs.
            terms = [e - f * h, c * h - b, b * f - c * e, f * g - d, a - c * g, c * d - a * f]
            terms += [d * h - e * g, b * g - a * h, a * e - b * d]
            arrays["terms"] = np.stack(terms, axis=1)
            changes = record.warped
            mirrors = changes & (a * terms[0] + b * terms[3] + c * terms[6] < 0)
    return Motion(record, arrays, changes, mirrors)


def final_format(records: Iterable[Record]) -> str | None:
    """Return the format to which the records convert all boxes; None if they do not convert them."""
    formats = [record.format for record in records if isinstance(record, Reformat)]
    return formats[-1] if formats else None


def move_boxes(records: Iterable[Record], boxes: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return each sample's boxes after applying the records."""
    samples = [SampleTargets([array]) for array in boxes]
    apply_records(records, samples)
    return [sample.boxes[0] for sample in samples]


def apply_records(records: Iterable[Record], samples: Sequence[SampleTargets]) -> None:
    """Apply the records to each sample's boxes and keypoints, in place."""
    for record in records:
        if isinstance(record, TARGET_RECORDS):
            rows = range(len(samples)) if record.rows is None else record.rows.tolist()
            _apply_record(record, [samples[row] for row in rows])


def _apply_record(record: Record, samples: Sequence[SampleTargets]) -> None:
    """Apply a record to the targets of its samples."""
    motion = motion_of(record)
    if isinstance(record, Box) and record.kept_boxes is not None:
        for sample, is_kept in zip(samples, record.kept_boxes, strict=True):
            if sample.boxes:
                sample.filter_boxes(is_kept[: len(sample.boxes[0])])
    changed = [(i, samples[i]) for i in np.flatnonzero(motion.changes).tolist()]
    boxes = [(i, array.reshape(-1, 2, 2)) for i, sample in changed for array in sample.boxes]
    points = [(i, array.reshape(-1, 1, 2)) for i, sample in changed for array in sample.points]
    match record:
        case Reformat():
            for _, sample in changed:
                sample.format = record.format
        case Call():
            for i, sample in changed:
                size_hw = record.sizes_hw[i]
                sample.boxes = [_apply_call(record, "apply_boxes", i, array, size_hw) for array in sample.boxes]
                sample.points = [_apply_call(record, "apply_keypoints", i, array, size_hw) for array in sample.points]
        case Tidy():
            for (i, _), is_valid in zip(boxes, _evaluate(valid_boxes, motion, boxes), strict=True):
                samples[i].filter_boxes(is_valid)
        case TidyPoints():
            is_valid = _evaluate(valid_points, motion, points)
            for _, sample in changed:
                for array in sample.points:
                    mask = next(is_valid).reshape(array.shape[:-1]).all(axis=tuple(range(1, array.ndim - 1)))
                    sample.valid = mask if sample.valid is None else sample.valid & mask
        case _:
            moved_boxes, moved_points = _evaluate(move_spans, motion, boxes), _evaluate(move_points, motion, points)
            for i, sample in changed:
                sample.boxes = [next(moved_boxes).reshape(array.shape) for array in sample.boxes]
                sample.points = [next(moved_points).reshape(array.shape) for array in sample.points]
                sample.is_mirrored ^= bool(motion.mirrors[i])


def _evaluate(
    formula: Callable[[Motion, Any], Any], motion: Motion, parts: Sequence[tuple[int, np.ndarray]]
) -> Iterator[Any]:
    """Apply a formula to arrays, (n, axes, 2), each with its image's index in the motion, and return an iterator over
    the results. Arrays of a dtype are joined, because a call for each image took twice as long as all other work."""
    results: list[Any] = [None] * len(parts)
    groups: dict[Any, list[int]] = {}
    for number, (i, array) in enumerate(parts):
        # The noise of an elastic deformation is computed for one image at a time, since it takes much memory.
        groups.setdefault((array.dtype, i if isinstance(motion.record, Elastic) else None), []).append(number)
    for numbers in groups.values():
        images, arrays = zip(*(parts[number] for number in numbers), strict=True)
        counts = list(map(len, arrays))
        values = formula(motion.at(np.repeat(images, counts)), np.concatenate(arrays))
        for number, count, end in zip(numbers, counts, itertools.accumulate(counts), strict=True):
            results[number] = values[end - count : end]
    return iter(results)


def _apply_call(record: Call, method: str, i: int, points: np.ndarray, size_hw: np.ndarray) -> np.ndarray:
    """Move boxes or keypoints with a user-defined transform."""
    if not record.transform.has(method):
        return points
    height, width = size_hw.tolist()
    result = getattr(record.transform, method)(
        points.copy(), map_params(record.params, lambda array: array[i]), (height, width)
    )
    if not isinstance(result, np.ndarray) or result.shape != points.shape:
        actual = f"an array of shape {result.shape}" if isinstance(result, np.ndarray) else type(result).__name__
        raise ValueError(
            f"{record.name}.{method} must return a numpy array with the shape of its input, {points.shape}; "
            f"got {actual}"
        )
    return result.astype(points.dtype)


def valid_boxes(motion: Motion, spans: Any) -> Any:
    """Return whether each box, (…, 2, 2), is large enough and within the image."""
    record: Any = motion.record
    extent = spans[..., 1, :] - spans[..., 0, :]
    is_large = (extent >= record.min_size).all(-1) & (extent[..., 0] * extent[..., 1] >= record.min_area)
    return is_large & ((spans >= 0) & (spans <= motion.arrays["size_xy"])).all(-1).all(-1)


def valid_points(motion: Motion, points: Any) -> Any:
    """Return whether each keypoint, (…, 2), is within the image."""
    return ((points >= 0) & (points < motion.arrays["size_xy"])).all(-1)


def move_spans(motion: Motion, spans: Any) -> Any:
    """Return boxes as spans, (…, 2, 2): the top left and the bottom right corner, after a record."""
    match motion.record:
        case Clamp():
            return _clip(spans, motion.arrays["size_xy"])
        case Flip() | Turn():
            moved, mirrored = _turn(motion, spans, 0)
            return namespace(spans).where(motion.arrays["flipped"], namespace(spans).flip(mirrored, (-2,)), moved)
        case Box():
            moved = spans - motion.arrays["shift_xy"]
            moved = namespace(spans).clip(moved, motion.arrays["low_xy"], motion.arrays["high_xy"])
            return _scale(motion, moved)
        case Elastic() | Warp():
            xp = namespace(spans)
            left, top, right, bottom = (spans[..., i, k] for i, k in ((0, 0), (0, 1), (1, 0), (1, 1)))
            corners = [xp.stack(corner, -1) for corner in ((left, top), (right, top), (right, bottom), (left, bottom))]
            corners = _move_freely(motion, xp.stack(corners, -2), xp.ceil)
            moved = xp.stack([xp.amin(corners, -2), xp.amax(corners, -2)], -2)
            return cast(_clip(moved, motion.arrays["size_xy"]), spans.dtype)
    return spans


def move_points(motion: Motion, points: Any) -> Any:
    """Return keypoints (…, 2) after a record."""
    match motion.record:
        case ClampPoints():
            last_xy = namespace(points).clip(motion.arrays["size_xy"] - 1, 0, None)
            return cast(_clip(points, last_xy), points.dtype)
        case Flip() | Turn():
            moved, mirrored = _turn(motion, points, 1)
            return namespace(points).where(motion.arrays["flipped"], mirrored, moved)
        case Box():
            return _scale(motion, points - motion.arrays["shift_xy"])
        case Elastic() | Warp():
            return cast(_move_freely(motion, points, namespace(points).trunc), points.dtype)
    return points


def _clip(points: Any, end_xy: Any) -> Any:
    return namespace(points).clip(points, namespace(points).zeros_like(end_xy), end_xy)


def _turn(motion: Motion, points: Any, inset: int) -> tuple[Any, Any]:
    """Return transposed points, and these points mirrored along both axes; `inset` is 1 for pixel indices."""
    xp = namespace(points)
    moved = xp.where(motion.arrays["transposed"], xp.flip(points, (-1,)), points)
    return moved, motion.arrays["size_xy"] - inset - moved


def _scale(motion: Motion, points: Any) -> Any:
    """Scale points from the box to the result. Multiply before dividing, so that results that are integers are
    exact."""
    return cast(points * motion.arrays["factor_xy"] / motion.arrays["divisor_xy"], points.dtype)


def _move_freely(motion: Motion, points: Any, to_pixels: Any) -> Any:
    """Move points (…, 2) by a warp, whose coefficients map output coordinates to input coordinates, or by an elastic
    deformation. Every operation here is rounded as IEEE 754 specifies."""
    if isinstance(motion.record, Elastic):
        return motion.displace(motion.record, points, motion.arrays["keys"], motion.arrays["size_xy"], to_pixels)
    terms = motion.arrays["terms"]
    x, y = (cast(points[..., axis], "float64") for axis in (0, 1))
    across, down, scale = (terms[..., k] * x + terms[..., k + 1] * y + terms[..., k + 2] for k in (0, 3, 6))
    return namespace(points).stack([across / scale, down / scale], -1)
