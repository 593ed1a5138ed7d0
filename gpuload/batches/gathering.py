"""Masks, boxes and keypoints of a batch whose transforms put several samples together: Mosaic and CopyPaste.

Runs in the main process, within the transfer's stream, before the images: what is pasted where depends on masks. All
samples of the batch are taken from one such transform to the next, each with the geometry between them; there each gets
parts of the others. Boxes and keypoints are moved by numpy, masks on the device; CopyPaste waits once for the device,
to learn which instances are left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from gpuload.batches.collate import Finished, unwrapped
from gpuload.batches.targets import TargetStage, moved_results, selected, trail_of
from gpuload.datasets.sample import Keypoints
from gpuload.errors import CollateError
from gpuload.ring.columns import Columns, ImageColumn
from gpuload.rng import philox
from gpuload.stage import RaggedImages
from gpuload.stage.device import upload_together
from gpuload.stage.gathering import groups_of, tile
from gpuload.stage.masks import check_fill, ragged_masks
from gpuload.transforms import Chain
from gpuload.transforms.program.ops import Gather
from gpuload.transforms.program.targets import Trail, follow
from gpuload.transforms.program.windows import full_windows, nearest_indices

__all__ = ["target_stage"]


@dataclass(slots=True)
class Scene:
    """The targets of one sample on their way: boxes and points, and by leaf masks and what else belongs to boxes."""

    trail: Trail
    masks: dict[int, torch.Tensor]
    values: dict[int, Any]


def target_stage(chain: Chain, device: torch.device) -> TargetStage:
    """Return what moves the targets of a chain's batches."""
    return GatheredTargets(chain, device) if chain.gathers else TargetStage(chain, device)


class GatheredTargets(TargetStage):
    """Moves the targets of batches, and puts them together."""

    def __init__(self, chain: Chain, device: torch.device) -> None:
        super().__init__(chain, device)
        self._name, _ = chain.group

    def __call__(self, columns: Columns, finished: Finished, pixels_of: Callable[[ImageColumn], RaggedImages]) -> None:
        """Move the targets of a batch, into the cells of `finished`, and set in the records that put images together
        what the stage needs for the images.

        Raises:
            CollateError: samples that are put together do not have the same targets.
        """
        for row, what in self._unlike(columns):
            first = 0 if row else min(1, len(columns) - 1)
            raise CollateError(
                f"{self._name} puts the samples of a batch together, but {columns.name(first)} and {columns.name(row)} "
                f"{what}; let the dataset return one form, with empty arrays where there is nothing"
            )
        fields = set(columns.fields[0]) if columns.fields else set()
        points = {leaf: column.values for leaf, column in sorted(columns.points.items())}
        # Which keypoints belong to boxes.
        owned = [leaf in fields for leaf, values in points.items() if isinstance(values[0], Keypoints)]
        scenes = []
        for row in range(len(columns)):
            values = {leaf: unwrapped(columns.values[leaf].get(row)) for leaf in fields & columns.values.keys()}
            scenes.append(Scene(trail_of([column[row] for column in points.values()]), {}, values))
        pixels = {masks.leaves[0]: (pixels_of(masks), masks.each_kind) for masks in columns.masks}
        gathers = [[one for one in each.records if isinstance(one, Gather)] for each, *_ in finished.programs]
        program, first = finished.drawn[0], 0
        for record in [*gathers[0], None]:
            number = len(program.records) if record is None else program.records.index(record)
            part = program.part(first, number)
            if first:
                leaves = scenes[0].masks if part.records else ()
                pixels = {leaf: ragged_masks([scene.masks[leaf] for scene in scenes]) for leaf in leaves}
            for leaf, (ragged, kinds) in pixels.items():
                for scene, mask in zip(scenes, self._masks(ragged, part, kinds)[0], strict=True):
                    scene.masks[leaf] = mask
            follow(part.records, [scene.trail for scene in scenes])
            _settle(scenes, fields, owned)
            first = number + 1
            if record is not None:
                record.groups = groups_of(finished.numbers, 4 if record.keys is None else 2)
                scenes = (_tiled if record.keys is None else _pasted)(record, scenes, fields, owned)
        for record, *others in zip(*gathers, strict=True):
            for other in others:  # of the second, … images of each sample
                other.groups, other.covered = record.groups, record.covered
        for row, scene in enumerate(scenes):
            row_points = {leaf: values[row] for leaf, values in points.items()}
            finished.cells[row] |= moved_results(row_points, scene.trail) | scene.masks | scene.values
        for leaf in fields:
            finished.whole.pop(leaf, None)

    def _unlike(self, columns: Columns) -> Iterator[tuple[int, str]]:
        """Give rows that cannot be put together with others, and why."""
        rows = range(len(columns))
        for row in rows:
            if columns.structure(row) != columns.structure(0):
                yield row, "have different structures"
        unlike: list[tuple[Any, bool, str]]
        unlike = [(images, images.rows is not None, "have different numbers of images") for images in columns.images]
        unlike += [(masks, masks.leaf is None, "have their masks at different leaves") for masks in columns.masks]
        for points in columns.points.values():
            kinds = set(map(type, points.values))
            unlike.append((points, points.rows is not None or len(kinds) > 1, "have other targets"))
        for column, _, what in filter(itemgetter(1), unlike):  # the first row without an entry; 1 if all have one
            yield next(iter(np.setdiff1d(rows, column.row_numbers).tolist()), 1), what
        for row, row_fields in enumerate(columns.fields):
            if row_fields != columns.fields[0]:
                one, two = (", ".join(map(str, fields)) or "none" for fields in (columns.fields[0], row_fields))
                what = f"(numbers {one} and {two}); give {self._name} a labels_getter= that names them"
                yield row, f"have other leaves that belong to their boxes {what}"


def _settle(scenes: Sequence[Scene], fields: set[int], owned: Sequence[bool]) -> None:
    """Leave out what belongs to boxes that were left out."""
    places: list[tuple[dict[int, Any], int, np.ndarray]] = []
    for scene in scenes:
        left, scene.trail.left = scene.trail.left, None
        if left is not None:
            for leaves in (scene.masks, scene.values):
                places += [(leaves, leaf, left) for leaf in leaves.keys() & fields]
            pairs = zip(scene.trail.points, owned, strict=True)
            scene.trail.points = [points[left] if goes else points for points, goes in pairs]
    values = selected((leaves[leaf], left) for leaves, leaf, left in places)
    for (leaves, leaf, _), value in zip(places, values, strict=True):
        leaves[leaf] = value


def _of_parts(
    sample: Scene,
    parts: Sequence[tuple[Scene, np.ndarray]],
    boxes: Iterable[Sequence[np.ndarray]],
    points: Iterable[Sequence[np.ndarray]],
) -> Scene:
    """Return a sample's scene, but for its masks: some entries of what belongs to the boxes of each of its parts, and
    these boxes and points, moved, by leaf."""
    values = {leaf: _joined([*selected((scene.values[leaf], rows) for scene, rows in parts)]) for leaf in sample.values}
    return Scene(Trail([*map(_joined, boxes)], [*map(_joined, points)], sample.trail.format), {}, values)


def _joined(parts: Sequence[Any]) -> Any:
    """Join rows one after the other. An array without rows says nothing of their dtype and shape."""
    full = [part for part in parts if len(part)] or list(parts[:1])
    return torch.cat(full) if isinstance(full[0], torch.Tensor) else np.concatenate(full)


# -- Mosaic -----------------------------------------------------------------------------------------------------------


def _tiled(record: Gather, scenes: Sequence[Scene], fields: set[int], owned: Sequence[bool]) -> list[Scene]:
    """Return the scenes, each with those of its group."""
    rows, corners, shown = record.quadrants(full_windows(record.after_hw))
    results, left_of = list(scenes), {}
    for row in np.flatnonzero(record.gathered).tolist():
        four = [scenes[other] for other in rows[row].tolist()]
        parts = [_quadrant(*part, owned) for part in zip(four, corners[row], shown[row].tolist(), strict=True)]
        left_of[row], boxes, points = zip(*parts, strict=True)
        pairs = list(zip(four, left_of[row], strict=True))
        results[row] = _of_parts(scenes[row], pairs, zip(*boxes, strict=True), zip(*points, strict=True))
    for leaf in scenes[0].masks:
        masks = [scene.masks[leaf] for scene in scenes]
        moved = _instances(record, masks, left_of) if leaf in fields else _semantic(record, masks)
        for row, mask in moved.items():
            results[row].masks[leaf] = mask
    return results


def _quadrant(
    scene: Scene, corner: np.ndarray, shown_tlhw: Sequence[int], owned: Sequence[bool]
) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
    """Return which boxes of a scene are left in the part that is shown of it, these boxes, and the points."""
    (top, left, height, width), shift = shown_tlhw, corner[::-1]
    moved = [boxes + np.tile(shift, 2) for boxes in scene.trail.boxes]
    moved = [np.clip(boxes, [left, top] * 2, [left + width, top + height] * 2) for boxes in moved]
    seen = [np.flatnonzero((boxes[:, 2:] > boxes[:, :2]).all(axis=1)) for boxes in moved]
    remaining = seen[0] if seen else np.arange(0)
    points = [(dots[remaining] if goes else dots) + shift for dots, goes in zip(scene.trail.points, owned, strict=True)]
    return remaining, [boxes[rows] for boxes, rows in zip(moved, seen, strict=True)], points


def _instances(
    record: Gather, masks: Sequence[torch.Tensor], left_of: dict[int, Sequence[np.ndarray]]
) -> dict[int, torch.Tensor]:
    """Return masks of instances, each on a plane of its own, 0 outside its image, for the rows that become a mosaic;
    `left_of` says which ones of each quadrant's image are left."""
    rows, corners, shown = record.quadrants(full_windows(record.after_hw))
    sources = {row: [masks[other] for other in rows[row].tolist()] for row in left_of}
    planes = selected(pair for row, left in left_of.items() for pair in zip(sources[row], left, strict=True))
    results = {}
    for row, left in left_of.items():
        counts = list(map(len, left))
        dtype = next((mask.dtype for mask, n in zip(sources[row], counts, strict=True) if n), masks[row].dtype)
        results[row] = masks[row].new_zeros((sum(counts), *record.after_hw[row].tolist()), dtype=dtype)
        parts = zip(results[row].split(counts), corners[row].tolist(), shown[row].tolist(), strict=True)
        for part, (y, x), (down, across, h, w) in parts:
            seen = next(planes)[:, down - y : down - y + h, across - x : across - x + w]
            part[:, down : down + h, across : across + w] = seen
    return results


def _semantic(record: Gather, masks: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return masks of whole images, put together as these are."""
    for row, group in enumerate(record.groups.tolist()):
        for mask, other in ((masks[row], other) for other in group):
            if (masks[other].dtype, masks[other].shape[:-2]) != (mask.dtype, mask.shape[:-2]):
                raise CollateError(
                    f"{record.name} puts masks together that differ: row {row} of the batch has {mask.dtype} of shape "
                    f"{tuple(mask.shape)}, row {other} has {masks[other].dtype} of shape {tuple(masks[other].shape)}; "
                    "give masks of whole images one dtype and number, and those of instances beside their boxes"
                )
    check_fill(record.name, record.mask_fill, np.dtype(str(masks[0].dtype).removeprefix("torch.")))
    sizes = zip(masks, record.after_hw.tolist(), strict=True)
    results = [mask.new_empty((*mask.shape[:-2], *size)) for mask, size in sizes]
    tile(record, masks, full_windows(record.after_hw), results, (record.mask_fill,))
    return dict(enumerate(results))


# -- CopyPaste --------------------------------------------------------------------------------------------------------


def _pasted(record: Gather, scenes: Sequence[Scene], fields: set[int], owned: Sequence[bool]) -> list[Scene]:
    """Return the scenes, each with instances of its partner; sets where these are in the record."""
    partners, sizes = record.groups[:, 1].tolist(), record.sizes_hw
    [leaf] = scenes[0].masks.keys() & fields
    chosen = _chosen(record, partners, scenes)
    masks = selected((scenes[partners[row]].masks[leaf], entries) for row, entries in chosen.items())
    coming = {row: _nearest(next(masks), sizes[row]) for row in chosen}  # the masks that are pasted
    covered = {row: mask.ne(0).any(dim=0) for row, mask in coming.items()}
    remains = _remains([(scenes[row].masks[leaf], under) for row, under in covered.items()]) if chosen else []
    staying = selected((scenes[row].masks[leaf], left) for row, (left, _, _) in zip(chosen, remains, strict=True))
    results = list(scenes)
    for (row, entries), (left, cut, around), remaining in zip(chosen.items(), remains, staying, strict=True):
        scene, partner, under = scenes[row], scenes[partners[row]], covered[row]
        ratio = sizes[row, ::-1] / sizes[partners[row], ::-1]
        boxes = np.where(cut[:, None], around, scene.trail.boxes[0])[left]
        pasted = partner.trail.boxes[0][entries] * np.tile(ratio, 2)
        dots = zip(scene.trail.points, partner.trail.points, owned, strict=True)
        points = [[mine[left], theirs[entries] * ratio] if goes else [mine] for mine, theirs, goes in dots]
        results[row] = _of_parts(scene, [(scene, left), (partner, entries)], [[boxes, pasted]], points)
        for other, mask in scene.masks.items():
            if other == leaf:
                seen = torch.where(under, torch.zeros((), dtype=mask.dtype, device=mask.device), remaining)
                results[row].masks[leaf] = _joined([seen, coming[row].to(mask.dtype)])
            else:
                results[row].masks[other] = torch.where(under, _nearest(partner.masks[other], sizes[row]), mask)
    record.covered = [covered.get(row) for row in range(len(scenes))]
    return results


def _chosen(record: Gather, partners: Sequence[int], scenes: Sequence[Scene]) -> dict[int, np.ndarray]:
    """Choose, for each image that something is pasted onto, instances of its partner that have an area."""
    assert record.keys is not None
    chosen = {}
    for row in np.flatnonzero(record.gathered).tolist():
        boxes = scenes[partners[row]].trail.boxes[0]
        if partners[row] != row and len(boxes):
            key = philox.Key(*record.keys[row].tolist())
            numbers = philox.uniforms(key, np.zeros(1, np.int64), 0, len(boxes))[0]
            entries = np.unique((numbers * len(boxes)).astype(np.int64))
            chosen[row] = entries[(boxes[entries, 2:] > boxes[entries, :2]).all(axis=1)]
    return {row: entries for row, entries in chosen.items() if len(entries)}


def _remains(masks: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return, for masks and where they are covered, which instances have pixels left, int64 (m,); of all of them which
    lose some, bool (n,); and the smallest boxes around those left, int64 (n, 4). One copy from the device."""
    numbers: list[torch.Tensor] = []
    for instances, under in masks:
        there = instances.ne(0)
        seen = there & ~under
        down, across = seen.any(dim=2).to(torch.uint8), seen.any(dim=1).to(torch.uint8)
        height, width = instances.shape[1:]
        ends = width - across.flip(1).argmax(dim=1), height - down.flip(1).argmax(dim=1)
        marks = down.any(dim=1).long(), (there & under).flatten(1).any(dim=1).long()
        numbers.append(torch.stack([*marks, across.argmax(dim=1), down.argmax(dim=1), *ends], dim=1))
    table = torch.cat(numbers).cpu().numpy()
    parts = np.split(table, np.cumsum([*map(len, numbers)])[:-1])
    return [(np.flatnonzero(part[:, 0]), part[:, 1] != 0, part[:, 2:]) for part in parts]


def _nearest(masks: torch.Tensor, size_hw: np.ndarray) -> torch.Tensor:
    """Return masks …×H×W in a size, by Pillow's nearest pixel."""
    if list(masks.shape[-2:]) == size_hw.tolist():
        return masks
    sizes = zip(masks.shape[-2:], size_hw.tolist(), strict=True)
    places = [nearest_indices(length, size, 0, size) for length, size in sizes]
    rows, columns = upload_together(places, masks.device)
    return masks.index_select(-2, rows).index_select(-1, columns)
