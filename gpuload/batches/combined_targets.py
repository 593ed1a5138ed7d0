"""The targets of a batch whose transforms combine several samples: Mosaic and CopyPaste.

This module runs in the main process, on the transfer stream, before the images are transformed, because masks decide
what is pasted where. All samples of the batch advance together from one combining transform to the next, with the
geometric transforms in between; at each combining transform, samples receive parts of other samples. Boxes and
keypoints are transformed with numpy, masks on the device. CopyPaste waits for the device once, to learn which instances
remain visible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from gpuload.batches.collate import FinishedColumns, unwrap
from gpuload.batches.targets import exchange, restore_targets, sample_targets_of, select_rows, visibilities_of
from gpuload.datasets.sample import Keypoints
from gpuload.datasets.tree import key_paths_of
from gpuload.errors import CollateError
from gpuload.ring.columns import Columns, ImageColumn
from gpuload.rng import philox
from gpuload.stage import RaggedImages
from gpuload.stage.combined_images import tile
from gpuload.stage.device import upload_arrays
from gpuload.stage.masks import MaskStage, check_fill, pack_masks
from gpuload.transforms.program.ops import Combination, Paste, Tile
from gpuload.transforms.program.targets import SampleTargets, apply_records
from gpuload.transforms.program.windows import full_windows, nearest_indices

__all__ = ["combine_targets"]


@dataclass(slots=True)
class Scene:
    """The partly transformed targets of one sample: its boxes and points, its masks, and the other values that belong
    to its boxes. Masks and values are keyed by leaf."""

    targets: SampleTargets
    masks: dict[int, torch.Tensor]
    values: dict[int, Any]


def combine_targets(finished: FinishedColumns, stage: MaskStage, read: Callable[[ImageColumn], RaggedImages]) -> None:
    """Transform the targets of a batch whose samples are combined, and store them in the cells of `finished`. Also
    store the covered pixels in the records of `CopyPaste`, which the stage needs to combine the images. Arguments are
    as for `gpuload.batches.targets.transform_targets`.

    Raises:
        CollateError: samples that are combined do not have the same targets.
    """
    columns = finished.columns
    combinations = [
        [step for step in program.records if isinstance(step, Combination)] for program, *_ in finished.programs
    ]
    name = max(combinations[0], key=lambda record: record.group_size).name
    for row, difference in _find_differences(columns, name):
        first_row = 0 if row else min(1, len(columns) - 1)
        raise CollateError(
            f"{name} combines the samples of a batch, but {columns.name(first_row)} and {columns.name(row)} "
            f"{difference}; make the dataset return every sample with the same structure, using empty arrays for "
            "missing targets"
        )
    fields = set(columns.fields_of(0))
    points = {leaf: column.values for leaf, column in sorted(columns.points.items())}
    keypoints = {leaf: values[0] for leaf, values in points.items() if isinstance(values[0], Keypoints)}
    ownership = [leaf in fields for leaf in keypoints]  # whether keypoints belong to boxes
    visibilities = visibilities_of(columns.structure(0), keypoints)
    for leaf, target in [*keypoints.items(), *visibilities.items()]:
        if target.pairs is not None and leaf not in fields:
            raise CollateError(
                f"{name} combines the keypoints of several images, so that keypoints with pairs= must belong to boxes: "
                f"(n, K, 2) next to n boxes, with their visibility; they have shape {target.array.shape}"
            )
    scenes = []
    for row in range(len(columns)):
        values = {leaf: unwrap(columns.values[leaf].get(row)) for leaf in fields & columns.values.keys()}
        scenes.append(Scene(sample_targets_of([column[row] for column in points.values()]), {}, values))
    pixels = {masks.leaves[0]: (read(masks), masks.kinds_per_image) for masks in columns.masks}
    program, start = finished.first_programs[0], 0
    for record in [*combinations[0], None]:
        end = len(program.records) if record is None else program.records.index(record)
        part = program.part(start, end)
        if start:
            leaves = scenes[0].masks if part.records else ()
            pixels = {leaf: pack_masks([scene.masks[leaf] for scene in scenes]) for leaf in leaves}
        for leaf, (ragged, kinds) in pixels.items():
            for scene, mask in zip(scenes, stage(ragged, part, kinds)[0], strict=True):
                scene.masks[leaf] = mask
        apply_records(part.records, [scene.targets for scene in scenes])
        for scene in scenes:
            _exchange_pairs(scene, [*keypoints.values()], visibilities)
        _drop_entries(scenes, fields, ownership)
        start = end + 1
        if record is not None:
            combine: Any = _tile_scenes if isinstance(record, Tile) else _paste_instances
            scenes = combine(record, scenes, fields, ownership)
    for record, *other_records in zip(*combinations, strict=True):
        for other_record in other_records:  # the records of the samples' other images
            if isinstance(record, Paste):
                other_record.covered = record.covered
    for row, scene in enumerate(scenes):
        row_points = {leaf: values[row] for leaf, values in points.items()}
        results = restore_targets(row_points, scene.targets) | scene.masks | scene.values
        for leaf, value in results.items():
            finished.cells[leaf][row] = value
    for leaf in fields:
        finished.full_columns.pop(leaf, None)


def _exchange_pairs(scene: Scene, keypoints: Sequence[Keypoints], visibilities: Mapping[int, Keypoints]) -> None:
    """Exchange the points of the `pairs` of keypoints, and their visibility, if the records so far mirror the image."""
    is_mirrored, scene.targets.is_mirrored = scene.targets.is_mirrored, False
    pairs = zip(scene.targets.points, keypoints, strict=True)
    scene.targets.points = [exchange(points, target, is_mirrored) for points, target in pairs]
    for leaf, target in visibilities.items():
        scene.values[leaf] = exchange(scene.values[leaf], target, is_mirrored)


def _find_differences(columns: Columns, name: str) -> Iterator[tuple[int, str]]:
    """Yield rows that cannot be combined with other rows, and the reasons."""
    rows = range(len(columns))
    for row in rows:
        if columns.structure(row) != columns.structure(0):
            yield row, "have different structures"
    checks: list[tuple[Any, bool, str]]
    checks = [(images, images.rows is not None, "have different numbers of images") for images in columns.images]
    checks += [(masks, masks.leaf is None, "have masks at different paths") for masks in columns.masks]
    for points in columns.points.values():
        types = set(map(type, points.values))
        checks.append((points, points.rows is not None or len(types) > 1, "have different targets"))
    for column, _, difference in filter(itemgetter(1), checks):  # the first row without an entry, or row 1
        yield next(iter(np.setdiff1d(rows, column.row_indices).tolist()), 1), difference
    for row, row_fields in enumerate(columns.fields):
        if row_fields != columns.fields[0]:
            paths = key_paths_of(columns.structure(row))
            first_paths, row_paths = (
                ", ".join(paths[max(leaf, ~leaf)] for leaves in fields.values() for leaf in leaves) or "none"
                for fields in (columns.fields[0], row_fields)
            )
            difference = f"{first_paths} in the first, {row_paths} in the second"
            remedy = f"pass {name} a labels_getter= that returns all of these entries"
            yield row, f"have different entries that belong to their boxes: {difference}; {remedy}"


def _drop_entries(scenes: Sequence[Scene], fields: set[int], ownership: Sequence[bool]) -> None:
    """Remove entries that belong to dropped boxes."""
    locations: list[tuple[dict[int, Any], int, np.ndarray]] = []
    for scene in scenes:
        remaining, scene.targets.kept_indices = scene.targets.kept_indices, None
        if remaining is not None:
            for leaves in (scene.masks, scene.values):
                locations += [(leaves, leaf, remaining) for leaf in leaves.keys() & fields]
            pairs = zip(scene.targets.points, ownership, strict=True)
            scene.targets.points = [points[remaining] if is_owned else points for points, is_owned in pairs]
    values = select_rows((leaves[leaf], remaining) for leaves, leaf, remaining in locations)
    for (leaves, leaf, _), value in zip(locations, values, strict=True):
        leaves[leaf] = value


def _combine_scenes(
    sample: Scene,
    parts: Sequence[tuple[Scene, np.ndarray]],
    boxes: Iterable[Sequence[np.ndarray]],
    points: Iterable[Sequence[np.ndarray]],
) -> Scene:
    """Combine the parts of several scenes into a sample's new scene, without masks.

    Args:
        sample: the sample's scene before combining.
        parts: each part's scene, and the indices of the entries of its values to keep.
        boxes, points: the transformed boxes and points: for each leaf, one array per part.
    """
    values = {
        leaf: _concatenate([*select_rows((scene.values[leaf], rows) for scene, rows in parts)])
        for leaf in sample.values
    }
    return Scene(
        SampleTargets([*map(_concatenate, boxes)], [*map(_concatenate, points)], sample.targets.format), {}, values
    )


def _concatenate(parts: Sequence[Any]) -> Any:
    """Concatenate arrays or tensors. Empty ones are skipped, since their dtype and shape are meaningless."""
    non_empty = [part for part in parts if len(part)] or list(parts[:1])
    return torch.cat(non_empty) if isinstance(non_empty[0], torch.Tensor) else np.concatenate(non_empty)


# -- Mosaic -----------------------------------------------------------------------------------------------------------


def _tile_scenes(record: Tile, scenes: Sequence[Scene], fields: set[int], ownership: Sequence[bool]) -> list[Scene]:
    """Combine each scene with the scenes of its group into a mosaic."""
    rows, corners, shown_parts = record.quadrants(full_windows(record.output_hw))
    results, remaining_of = list(scenes), {}
    for row in np.flatnonzero(record.gathered).tolist():
        sources = [scenes[source] for source in rows[row].tolist()]
        parts = [
            _move_to_quadrant(*part, ownership)
            for part in zip(sources, corners[row], shown_parts[row].tolist(), strict=True)
        ]
        remaining_of[row], boxes, points = zip(*parts, strict=True)
        pairs = list(zip(sources, remaining_of[row], strict=True))
        results[row] = _combine_scenes(scenes[row], pairs, zip(*boxes, strict=True), zip(*points, strict=True))
    for leaf in scenes[0].masks:
        masks = [scene.masks[leaf] for scene in scenes]
        moved_masks = (
            _tile_instance_masks(record, masks, remaining_of) if leaf in fields else _tile_semantic_masks(record, masks)
        )
        for row, mask in moved_masks.items():
            results[row].masks[leaf] = mask
    return results


def _move_to_quadrant(
    scene: Scene, corner: np.ndarray, shown_tlhw: Sequence[int], ownership: Sequence[bool]
) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
    """Return the indices of the boxes that remain visible in a quadrant, these boxes clipped, and the points."""
    (top, left, height, width), shift = shown_tlhw, corner[::-1]
    moved_boxes = [boxes + np.tile(shift, 2) for boxes in scene.targets.boxes]
    moved_boxes = [np.clip(boxes, [left, top] * 2, [left + width, top + height] * 2) for boxes in moved_boxes]
    visible = [np.flatnonzero((boxes[:, 2:] > boxes[:, :2]).all(axis=1)) for boxes in moved_boxes]
    remaining = visible[0] if visible else np.arange(0)
    points = [
        (keypoints[remaining] if is_owned else keypoints) + shift
        for keypoints, is_owned in zip(scene.targets.points, ownership, strict=True)
    ]
    return remaining, [boxes[rows] for boxes, rows in zip(moved_boxes, visible, strict=True)], points


def _tile_instance_masks(
    record: Tile, masks: Sequence[torch.Tensor], remaining_of: dict[int, Sequence[np.ndarray]]
) -> dict[int, torch.Tensor]:
    """Return instance masks for the rows that become a mosaic, one plane per instance, 0 outside the instance's image.
    `remaining_of` has, for each quadrant of a row, the indices of the remaining instances."""
    rows, corners, shown_parts = record.quadrants(full_windows(record.output_hw))
    sources = {row: [masks[source] for source in rows[row].tolist()] for row in remaining_of}
    planes = select_rows(
        pair for row, indices in remaining_of.items() for pair in zip(sources[row], indices, strict=True)
    )
    results = {}
    for row, indices in remaining_of.items():
        counts = list(map(len, indices))
        dtype = next((mask.dtype for mask, n in zip(sources[row], counts, strict=True) if n), masks[row].dtype)
        results[row] = masks[row].new_zeros((sum(counts), *record.output_hw[row].tolist()), dtype=dtype)
        parts = zip(results[row].split(counts), corners[row].tolist(), shown_parts[row].tolist(), strict=True)
        for part, (y, x), (top, left, h, w) in parts:
            visible = next(planes)[:, top - y : top - y + h, left - x : left - x + w]
            part[:, top : top + h, left : left + w] = visible
    return results


def _tile_semantic_masks(record: Tile, masks: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return masks of entire images, tiled like the images."""
    for row, group in enumerate(record.groups.tolist()):
        for mask, other_row in ((masks[row], other_row) for other_row in group):
            if (masks[other_row].dtype, masks[other_row].shape[:-2]) != (mask.dtype, mask.shape[:-2]):
                raise CollateError(
                    f"{record.name} combines masks, but sample {row} of the batch has {mask.dtype} of shape "
                    f"{tuple(mask.shape)}, and sample {other_row} has {masks[other_row].dtype} of shape "
                    f"{tuple(masks[other_row].shape)}; give all samples the same number of whole-image masks, with the "
                    "same dtype, and put masks of instances next to their boxes"
                )
    check_fill(record.name, record.mask_fill, np.dtype(str(masks[0].dtype).removeprefix("torch.")))
    sizes = zip(masks, record.output_hw.tolist(), strict=True)
    results = [mask.new_empty((*mask.shape[:-2], *size)) for mask, size in sizes]
    tile(record, masks, full_windows(record.output_hw), results, (record.mask_fill,))
    return dict(enumerate(results))


# -- CopyPaste --------------------------------------------------------------------------------------------------------


def _paste_instances(
    record: Paste, scenes: Sequence[Scene], fields: set[int], ownership: Sequence[bool]
) -> list[Scene]:
    """Paste instances into each scene from its partner, and store the covered pixels in the record."""
    partners, sizes = record.groups[:, 1].tolist(), record.sizes_hw
    [leaf] = scenes[0].masks.keys() & fields
    entries_of = _choose_instances(record, partners, scenes)
    masks = select_rows((scenes[partners[row]].masks[leaf], entries) for row, entries in entries_of.items())
    pasted_masks = {row: _resize_nearest(next(masks), sizes[row]) for row in entries_of}
    covered = {row: mask.ne(0).any(dim=0) for row, mask in pasted_masks.items()}
    visible = _find_visible([(scenes[row].masks[leaf], cover) for row, cover in covered.items()]) if entries_of else []
    selections = select_rows(
        (scenes[row].masks[leaf], remaining) for row, (remaining, _, _) in zip(entries_of, visible, strict=True)
    )
    results = list(scenes)
    for (row, entries), (remaining, is_cut, bounds), remaining_masks in zip(
        entries_of.items(), visible, selections, strict=True
    ):
        scene, partner, cover = scenes[row], scenes[partners[row]], covered[row]
        ratio = sizes[row, ::-1] / sizes[partners[row], ::-1]
        boxes = np.where(is_cut[:, None], bounds, scene.targets.boxes[0])[remaining]
        pasted_boxes = partner.targets.boxes[0][entries] * np.tile(ratio, 2)
        point_pairs = zip(scene.targets.points, partner.targets.points, ownership, strict=True)
        points = [[old[remaining], new[entries] * ratio] if is_owned else [old] for old, new, is_owned in point_pairs]
        results[row] = _combine_scenes(scene, [(scene, remaining), (partner, entries)], [[boxes, pasted_boxes]], points)
        for mask_leaf, mask in scene.masks.items():
            if mask_leaf == leaf:
                uncovered = torch.where(cover, torch.zeros((), dtype=mask.dtype, device=mask.device), remaining_masks)
                results[row].masks[leaf] = _concatenate([uncovered, pasted_masks[row].to(mask.dtype)])
            else:
                results[row].masks[mask_leaf] = torch.where(
                    cover, _resize_nearest(partner.masks[mask_leaf], sizes[row]), mask
                )
    record.covered = [covered.get(row) for row in range(len(scenes))]
    return results


def _choose_instances(record: Paste, partners: Sequence[int], scenes: Sequence[Scene]) -> dict[int, np.ndarray]:
    """Choose instances of non-zero area from the partner of each image that receives pasted instances."""
    entries_of = {}
    for row in np.flatnonzero(record.gathered).tolist():
        boxes = scenes[partners[row]].targets.boxes[0]
        if partners[row] != row and len(boxes):
            key = philox.Key(*record.keys[row].tolist())
            random_numbers = philox.uniforms(key, np.zeros(1, np.int64), 0, len(boxes))[0]
            entries = np.unique((random_numbers * len(boxes)).astype(np.int64))
            entries_of[row] = entries[(boxes[entries, 2:] > boxes[entries, :2]).all(axis=1)]
    return {row: entries for row, entries in entries_of.items() if len(entries)}


def _find_visible(
    masks: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return, for each pair of masks and covered pixels, the instances with visible pixels, int64 (m,); whether each
    instance is partly covered, bool (n,); and the smallest boxes around the visible pixels, int64 (n, 4). All results
    are copied from the device together, so that the host waits only once."""
    tables: list[torch.Tensor] = []
    for instances, cover in masks:
        pixels = instances.ne(0)
        visible = pixels & ~cover
        has_row, has_column = visible.any(dim=2).to(torch.uint8), visible.any(dim=1).to(torch.uint8)
        height, width = instances.shape[1:]
        ends = width - has_column.flip(1).argmax(dim=1), height - has_row.flip(1).argmax(dim=1)
        flags = has_row.any(dim=1).long(), (pixels & cover).flatten(1).any(dim=1).long()
        tables.append(torch.stack([*flags, has_column.argmax(dim=1), has_row.argmax(dim=1), *ends], dim=1))
    table = torch.cat(tables).cpu().numpy()
    parts = np.split(table, np.cumsum([*map(len, tables)])[:-1])
    return [(np.flatnonzero(part[:, 0]), part[:, 1] != 0, part[:, 2:]) for part in parts]


def _resize_nearest(masks: torch.Tensor, size_hw: np.ndarray) -> torch.Tensor:
    """Resize …×H×W masks with Pillow's nearest-neighbour rule."""
    if list(masks.shape[-2:]) == size_hw.tolist():
        return masks
    sizes = zip(masks.shape[-2:], size_hw.tolist(), strict=True)
    indices = [nearest_indices(length, size, 0, size) for length, size in sizes]
    rows, columns = upload_arrays(indices, masks.device)
    return masks.index_select(-2, rows).index_select(-1, columns)
