"""Masks, boxes and keypoints of a batch whose transforms put several samples together: Mosaic and CopyPaste.

Runs in the main process, within the transfer's stream, before the images: what is pasted where depends on masks. All
samples of the batch are taken from one such transform to the next, each with the geometry between them; there each gets
parts of the others. Boxes and keypoints are moved by numpy, masks on the device; CopyPaste waits once for the device,
to learn which instances are left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gpuload.batches.collate import Finished, unwrapped
from gpuload.batches.targets import moved_results, taken, trail_of
from gpuload.datasets.sample import Keypoints
from gpuload.errors import CollateError
from gpuload.ring.columns import Column, Columns, ImageColumn, entry
from gpuload.rng import philox
from gpuload.stage import RaggedImages
from gpuload.stage.device import upload_together
from gpuload.stage.gathering import Gathered, gather_records, groups_of, tile
from gpuload.stage.masks import MaskStage, check_fill
from gpuload.transforms import Chain
from gpuload.transforms.program.draws import image_table
from gpuload.transforms.program.gathers import Paste, Tile
from gpuload.transforms.program.targets import Trail, follow
from gpuload.transforms.program.windows import full_windows, nearest_indices

__all__ = ["GatheredTargets"]


@dataclass(slots=True)
class Scene:
    """The targets of one sample on their way: boxes and points (see `Trail`), masks and what else belongs to boxes, by
    leaf."""

    trail: Trail
    masks: dict[int, torch.Tensor]
    values: dict[int, Any]


class GatheredTargets:
    """Moves the targets of batches, and puts them together.

    Args:
        chain: the transforms.
        device: where masks are.
    """

    def __init__(self, chain: Chain, device: torch.device) -> None:
        self._name, _ = chain.group
        self._stage = MaskStage(device)

    def __call__(
        self,
        columns: Columns,
        finished: Finished,
        numbers: np.ndarray,
        pixels_of: Callable[[ImageColumn], RaggedImages],
    ) -> list[Gathered]:
        """Move the targets of a batch, into the cells of `finished`; returns what the images need for each record that
        puts them together.

        Args:
            columns: the batch, without blocks.
            finished: has what was drawn, and takes the results.
            numbers: int64 (N,), which samples are neighbours: number XOR 1, 2, 3.
            pixels_of: gives the pixels of masks.

        Raises:
            CollateError: samples that are put together do not have the same targets.
        """
        self._check(columns)
        fields = set(columns.fields[0]) if columns.fields else set()
        points = {leaf: column.values for leaf, column in sorted(columns.points.items())}
        scenes = []
        for row in range(len(columns)):
            values = {leaf: unwrapped(columns.values[leaf].get(row)) for leaf in fields & columns.values.keys()}
            scenes.append(Scene(trail_of([own[row] for own in points.values()]), {}, values))
        dots = [leaf for leaf, values in points.items() if isinstance(values[0], Keypoints)]
        owned = [leaf in fields for leaf in dots]  # which keypoints belong to boxes
        program = finished.drawn[0]
        first, found = 0, []
        pixels = {masks.leaves[0]: (pixels_of(masks), masks.each_kind) for masks in columns.masks}
        for number, record in [*gather_records(program), (len(program.records), None)]:
            part = program.part(first, number)
            if first:
                pixels = {leaf: _ragged([scene.masks[leaf] for scene in scenes]) for leaf in scenes[0].masks}
            for leaf, (ragged, kinds) in pixels.items() if part.records or not first else ():
                for scene, mask in zip(scenes, self._stage(ragged, part, kinds)[0], strict=True):
                    scene.masks[leaf] = mask
            follow(part, [scene.trail for scene in scenes])
            _settle(scenes, fields, owned)
            first = number + 1
            if isinstance(record, Tile):
                rows = groups_of(numbers, 4)
                scenes = _tiled(record, rows, scenes, fields, owned)
                found.append(Gathered(rows))
            elif isinstance(record, Paste):
                rows = groups_of(numbers, 2)
                scenes, covered = _pasted(record, rows, scenes, fields, owned)
                found.append(Gathered(rows, covered))
        for row, scene in enumerate(scenes):
            own = {leaf: values[row] for leaf, values in points.items()}
            finished.cells[row] |= moved_results(own, scene.trail) | scene.masks | scene.values
        for leaf in fields:
            finished.whole.pop(leaf, None)
        return found

    def _check(self, columns: Columns) -> None:
        """Refuse samples that cannot be put together."""
        rows = range(len(columns))
        other = next((row for row in rows if columns.structure(row) != columns.structure(0)), None)
        if other is not None:
            self._refuse(columns, other, "have different structures")
        for images in columns.images:
            if images.rows is not None:
                self._refuse(columns, _lacking(images, rows), "have different numbers of images")
        for masks in columns.masks:
            if masks.leaf is None:
                self._refuse(columns, _lacking(masks, rows), "have their masks at different leaves")
        for column in columns.points.values():
            if column.rows is not None or len(set(map(type, column.values))) > 1:
                self._refuse(columns, _lacking(column, rows), "have other targets")
        other = next((row for row, own in enumerate(columns.fields) if own != columns.fields[0]), None)
        if other is not None:
            one, two = (", ".join(map(str, entry(columns.fields, row))) or "none" for row in (0, other))
            self._refuse(
                columns,
                other,
                f"have other leaves that belong to their boxes (numbers {one} and {two}); give {self._name} a "
                "labels_getter= that names them",
            )

    def _refuse(self, columns: Columns, other: int, what: str) -> None:
        first = 0 if other else min(1, len(columns) - 1)
        raise CollateError(
            f"{self._name} puts the samples of a batch together, but {columns.name(first)} and {columns.name(other)} "
            f"{what}; let the dataset return one form, with empty arrays where there is nothing"
        )


def _lacking(column: Column, rows: range) -> int:
    """Return the first of these rows that has no entry in a column; 1 if all have one."""
    return next(iter(np.setdiff1d(rows, column.row_numbers).tolist()), 1)


def _settle(scenes: Sequence[Scene], fields: set[int], owned: Sequence[bool]) -> None:
    """Leave out what belongs to boxes that were left out."""
    places: list[tuple[dict[int, Any], int, np.ndarray]] = []
    for scene in scenes:
        left, scene.trail.left = scene.trail.left, None
        if left is not None:
            places += [(scene.masks, leaf, left) for leaf in scene.masks.keys() & fields]
            places += [(scene.values, leaf, left) for leaf in scene.values]
            scene.trail.points = [
                points[left] if own else points for points, own in zip(scene.trail.points, owned, strict=True)
            ]
    found = taken((own[leaf], left) for own, leaf, left in places)
    for (own, leaf, _), value in zip(places, found, strict=True):
        own[leaf] = value


def _joined(parts: Sequence[Any]) -> Any:
    """Join rows one after the other. An array without rows says nothing of their dtype and shape."""
    full = [part for part in parts if len(part)] or list(parts[:1])
    if isinstance(full[0], torch.Tensor):
        return torch.cat(full)
    return np.concatenate(full)


# -- Mosaic -----------------------------------------------------------------------------------------------------------


def _tiled(
    record: Tile, groups: np.ndarray, scenes: Sequence[Scene], fields: set[int], owned: Sequence[bool]
) -> list[Scene]:
    """Return the scenes, each with those of its group."""
    rows = np.take_along_axis(groups, record.order, axis=1)
    corners, shown = record.places(rows)
    found: list[Scene] = []
    kept_of: list[list[np.ndarray]] = []  # which boxes of each of the four are left
    for row, own in enumerate(scenes):
        if not record.tiled[row]:
            found.append(own)
            kept_of.append([])
            continue
        four = [scenes[other] for other in rows[row].tolist()]
        parts = [_quadrant(*part, owned) for part in zip(four, corners[row], shown[row].tolist(), strict=True)]
        kept, boxes, points = map(list, zip(*parts, strict=True))
        trail = Trail(
            [_joined(parts) for parts in zip(*boxes, strict=True)],
            [_joined(parts) for parts in zip(*points, strict=True)],
            own.trail.format,
        )
        values = {
            leaf: _joined(list(taken((scene.values[leaf], rest) for scene, rest in zip(four, kept, strict=True))))
            for leaf in own.values
        }
        found.append(Scene(trail, {}, values))
        kept_of.append(kept)
    for leaf in scenes[0].masks:
        masks = [scene.masks[leaf] for scene in scenes]
        if leaf in fields:
            made = _instances(record, rows, corners, shown, masks, kept_of)
        else:
            made = _semantic(record, groups, masks)
        for scene, mask in zip(found, made, strict=True):
            scene.masks[leaf] = mask
    return found


def _quadrant(
    scene: Scene, corner: np.ndarray, shown_tlhw: Sequence[int], owned: Sequence[bool]
) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
    """Return which boxes of a scene are left in the part that is shown of it, these boxes, and the points."""
    (top, left, height, width), shift = shown_tlhw, corner[::-1]
    moved = [boxes + np.tile(shift, 2) for boxes in scene.trail.boxes]
    moved = [np.clip(boxes, [left, top] * 2, [left + width, top + height] * 2) for boxes in moved]
    seen = [np.flatnonzero((boxes[:, 2:] > boxes[:, :2]).all(axis=1)) for boxes in moved]
    kept = seen[0] if seen else np.arange(0)
    points = [(dots[kept] if goes else dots) + shift for dots, goes in zip(scene.trail.points, owned, strict=True)]
    return kept, [boxes[rest] for boxes, rest in zip(moved, seen, strict=True)], points


def _instances(
    record: Tile,
    rows: np.ndarray,
    corners: np.ndarray,
    shown: np.ndarray,
    masks: Sequence[torch.Tensor],
    kept_of: Sequence[Sequence[np.ndarray]],
) -> list[torch.Tensor]:
    """Return masks of instances: each on a plane of its own, 0 outside its image."""
    found = []
    shown_masks = (
        (masks[other], rest)
        for row, kept in enumerate(kept_of)
        for other, rest in zip(rows[row], kept, strict=False)  # none of an image that stays as it is
    )
    parts = taken(shown_masks)
    for row, kept in enumerate(kept_of):
        if not record.tiled[row]:
            found.append(masks[row])
            continue
        size = record.size_hw[row].tolist()
        dtype = next((masks[other].dtype for other, rest in zip(rows[row], kept, strict=True) if len(rest)), None)
        result = masks[row].new_zeros((sum(map(len, kept)), *size), dtype=dtype or masks[row].dtype)
        first = 0
        for rest, corner, box in zip(kept, corners[row], shown[row].tolist(), strict=True):
            (top, left), (down, across, height, width) = (-corner).tolist(), box
            part = next(parts)[:, top + down :, left + across :][:, :height, :width]
            result[first : first + len(rest), down : down + height, across : across + width] = part
            first += len(rest)
        found.append(result)
    return found


def _semantic(record: Tile, groups: np.ndarray, masks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return masks of whole images, put together as these are."""
    for row, (mask, group) in enumerate(zip(masks, groups.tolist(), strict=True)):
        for other in group:
            if (masks[other].dtype, masks[other].shape[:-2]) != (mask.dtype, mask.shape[:-2]):
                raise CollateError(
                    f"{record.name} puts masks together that differ: row {row} of the batch has {mask.dtype} of shape "
                    f"{tuple(mask.shape)}, row {other} has {masks[other].dtype} of shape {tuple(masks[other].shape)}; "
                    "give masks of whole images one dtype and number, and those of instances beside their boxes"
                )
    check_fill(record.name, record.mask_fill, np.dtype(str(masks[0].dtype).removeprefix("torch.")))
    found = [
        mask.new_empty((*mask.shape[:-2], *size)) for mask, size in zip(masks, record.size_hw.tolist(), strict=True)
    ]
    tile(record, groups, masks, full_windows(record.size_hw), found, (record.mask_fill,))
    return found


# -- CopyPaste --------------------------------------------------------------------------------------------------------


def _pasted(
    record: Paste, groups: np.ndarray, scenes: Sequence[Scene], fields: set[int], owned: Sequence[bool]
) -> tuple[list[Scene], list[torch.Tensor | None]]:
    """Return the scenes, each with instances of its partner, and where these are, bool H×W."""
    [leaf] = [leaf for leaf in scenes[0].masks if leaf in fields]
    covered: list[torch.Tensor | None] = [None] * len(scenes)
    chosen = _chosen(record, groups[:, 1], scenes)
    pasted = taken((scenes[groups[row, 1]].masks[leaf], some) for row, some in chosen.items())
    coming: dict[int, torch.Tensor] = {}  # the masks that are pasted, in the size of the image
    for row, masks in zip(chosen, pasted, strict=True):
        coming[row] = _nearest(masks, record.sizes_hw[row])
        covered[row] = coming[row].ne(0).any(dim=0)
    remains = _remains({row: scenes[row].masks[leaf] for row in chosen}, covered)
    found = list(scenes)
    kept_of = [np.flatnonzero(left) for _, left, _ in remains.values()]
    rest_of = taken((scenes[row].masks[leaf], kept) for row, kept in zip(chosen, kept_of, strict=True))
    for (row, some), kept, staying in zip(chosen.items(), kept_of, rest_of, strict=True):
        own, partner = scenes[row], scenes[int(groups[row, 1])]
        under, (lost, _, boxes) = covered[row], remains[row]
        assert under is not None
        ratio = record.sizes_hw[row, ::-1] / record.sizes_hw[int(groups[row, 1]), ::-1]
        rest = np.where(lost[:, None], boxes, own.trail.boxes[0])[kept]
        trail = Trail(
            [np.concatenate([rest, partner.trail.boxes[0][some] * np.tile(ratio, 2)])],
            [
                _joined([mine[kept], theirs[some] * ratio]) if goes else mine
                for mine, theirs, goes in zip(own.trail.points, partner.trail.points, owned, strict=True)
            ],
            own.trail.format,
        )
        masks = {}
        for other, mask in own.masks.items():
            if other == leaf:
                mine = torch.where(under, torch.zeros((), dtype=mask.dtype, device=mask.device), staying)
                masks[other] = _joined([mine, coming[row].to(mask.dtype)])
            else:
                masks[other] = torch.where(under, _nearest(partner.masks[other], record.sizes_hw[row]), mask)
        values = {
            other: _joined(list(taken([(value, kept), (partner.values[other], some)])))
            for other, value in own.values.items()
        }
        found[row] = Scene(trail, masks, values)
    return found, covered


def _chosen(record: Paste, partners: np.ndarray, scenes: Sequence[Scene]) -> dict[int, np.ndarray]:
    """Choose, for each image that something is pasted onto, instances of its partner that have an area."""
    found = {}
    for row, partner in enumerate(partners.tolist()):
        boxes = scenes[partner].trail.boxes[0]
        if partner == row or not record.pasted[row] or not len(boxes):
            continue
        key = philox.Key(*record.keys[row].tolist())
        drawn = philox.uniforms(key, np.zeros(1, np.int64), 0, len(boxes))[0]
        some = np.unique((drawn * len(boxes)).astype(np.int64))
        some = some[(boxes[some, 2:] > boxes[some, :2]).all(axis=1)]
        if len(some):
            found[row] = some
    return found


def _remains(
    masks: dict[int, torch.Tensor], covered: Sequence[torch.Tensor | None]
) -> dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return for each of these images which of its instances lose pixels, which have some left, and the smallest boxes
    around these, int64 (n, 4). One copy from the device for all of them."""
    found = []
    for row, mask in masks.items():
        under = covered[row]
        assert under is not None
        there = mask.ne(0)
        rest = there & ~under
        down, across = rest.any(dim=2).to(torch.uint8), rest.any(dim=1).to(torch.uint8)
        height, width = mask.shape[1:]
        found.append(
            torch.stack(
                [
                    (there & under).flatten(1).any(dim=1).long(),
                    down.any(dim=1).long(),
                    across.argmax(dim=1),
                    down.argmax(dim=1),
                    width - across.flip(1).argmax(dim=1),
                    height - down.flip(1).argmax(dim=1),
                ],
                dim=1,
            )
        )
    if not found:
        return {}
    numbers = torch.cat(found).cpu().numpy()
    ends = np.cumsum([len(mask) for mask in masks.values()])[:-1]
    return {
        row: (part[:, 0] != 0, part[:, 1] != 0, part[:, 2:])
        for row, part in zip(masks, np.split(numbers, ends), strict=True)
    }


def _nearest(masks: torch.Tensor, size_hw: np.ndarray) -> torch.Tensor:
    """Return masks …×H×W in a size, by Pillow's nearest pixel."""
    if list(masks.shape[-2:]) == size_hw.tolist():
        return masks
    places = [
        nearest_indices(length, size, 0, size) for length, size in zip(masks.shape[-2:], size_hw.tolist(), strict=True)
    ]
    rows, columns = upload_together(places, masks.device)
    return masks.index_select(-2, rows).index_select(-1, columns)


def _ragged(masks: Sequence[torch.Tensor]) -> tuple[RaggedImages, list[tuple[str, int]]]:
    """Return masks as images whose channels are their bytes, as they come from workers; and their kinds."""
    flat, shapes = [], []
    for mask in masks:
        planes = mask if mask.dim() == 3 else mask[None]
        flat.append(planes.permute(1, 2, 0).contiguous().reshape(-1).view(torch.uint8))
        shapes.append([*planes.shape[1:], len(planes) * planes.element_size()])
    shapes = np.array(shapes, np.int64)
    ends = np.cumsum(shapes.prod(axis=1))
    regions = np.concatenate([np.zeros_like(shapes[:, :2]), shapes[:, :2]], axis=1)
    names = [f"mask {number}" for number in range(len(masks))]
    kinds = [(str(mask.dtype).removeprefix("torch."), mask.dim()) for mask in masks]
    table = image_table(ends - shapes.prod(axis=1), shapes, shapes[:, :2], regions)
    return RaggedImages(torch.cat(flat), table, names), kinds
