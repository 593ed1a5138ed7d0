"""Mosaic and CopyPaste through loaders, compared with plain numpy sample by sample, and their errors."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from bits.running import in_batches
from helpers.map_datasets import MapDataset
from PIL import Image as PILImage

import gpuload as gl
from gpuload import transforms as T
from gpuload.rng.philox import Key, epoch_key, uniforms

SEED = 5
FILL = {gl.Image: (9, 99, 199), gl.Mask: 77}


@dataclass
class Scene:
    """A picture with instances as numpy arrays."""

    image: np.ndarray  # H×W×3
    boxes: np.ndarray  # n×4, float64
    masks: np.ndarray  # n×H×W, bool
    labels: np.ndarray
    area: np.ndarray
    points: np.ndarray  # n×2×2
    semantic: np.ndarray  # H×W


def make_scene(index: int, *, size: tuple[int, int] | None = None) -> Scene:
    random = np.random.default_rng(index)
    height, width = size or (24 + int(random.integers(20)), 28 + int(random.integers(20)))
    instance_count = (3, 0, 2, 5, 1)[index % 5]
    image = random.integers(0, 256, (height, width, 3)).astype(np.uint8)
    lefts, tops = random.uniform(0, width * 0.6, instance_count), random.uniform(0, height * 0.6, instance_count)
    rights = lefts + random.uniform(3, width * 0.4, instance_count)
    bottoms = tops + random.uniform(3, height * 0.4, instance_count)
    boxes = np.stack([lefts, tops, rights, bottoms], 1).astype(np.float32)
    masks = np.zeros((instance_count, height, width), bool)
    for mask, (left, top, right, bottom) in zip(masks, boxes.astype(int).tolist(), strict=True):
        mask[top : bottom + 1, left : right + 1] = random.uniform(size=(bottom + 1 - top, right + 1 - left)) < 0.8
    if instance_count == 5:  # the first instance hides everything
        boxes[0], masks[0] = [0, 0, width, height], True
    labels = 100 * index + np.arange(instance_count)
    points = random.uniform(0, 24, (instance_count, 2, 2)).astype(np.float32)
    semantic = random.integers(0, 60, (height, width)).astype(np.int64)
    return Scene(image, boxes.astype(np.float64), masks, labels, masks.sum((1, 2)).astype(float), points, semantic)


def scene_sample(index: int, size: tuple[int, int] | None = None) -> Any:
    """Return ``(image, target, semantic mask)`` of a scene."""
    scene = make_scene(index, size=size)
    target = {
        "boxes": gl.Boxes(scene.boxes.astype(np.float32)),
        "labels": torch.from_numpy(scene.labels),
        "masks": gl.Mask(scene.masks),
        "area": scene.area,
        "points": gl.Keypoints(scene.points),
        "image_id": index,
    }
    return gl.Image(scene.image), target, gl.Mask(scene.semantic)


def scenes_dataset(length: int = 14, size: tuple[int, int] | None = None) -> MapDataset:
    return MapDataset(lambda index: scene_sample(index, size), length)


def make_loader(transforms: list[Any], dataset: Any = None, batch_size: int | None = 4, **options: Any) -> gl.Loader:
    defaults = {"num_workers": 0, "device": "cpu", "seed": SEED, "backend": "torch", "ragged": "list", **options}
    return gl.Loader(scenes_dataset() if dataset is None else dataset, batch_size, transforms=transforms, **defaults)


def load_rows(*arguments: Any, **options: Any) -> list[tuple[Any, dict[str, Any], Any]]:
    return rows_of(make_loader(*arguments, **options))


def rows_of(loader: gl.Loader) -> list[tuple[Any, dict[str, Any], Any]]:
    with loader:
        return [row for images, targets, masks in loader for row in zip(images, targets, masks, strict=True)]


def draw_chain(transforms: list[Any], scenes: list[Scene]) -> Any:
    sizes = np.array([scene.image.shape[:2] for scene in scenes])
    return T.Chain(transforms).draw(epoch_key(SEED, 0), np.arange(len(scenes)), sizes)


def neighbor(row: int, place: int, count: int) -> int:
    """Return the row at this place of the group of `row`, or `row` itself if the batch of `count` rows ends before."""
    return row ^ place if row ^ place < count else row


def assert_row_equals(row: Any, expected: Scene, index: int) -> None:
    image, target, semantic = row
    np.testing.assert_array_equal(image.numpy(), expected.image.transpose(2, 0, 1))
    np.testing.assert_array_equal(target["labels"].numpy(), expected.labels)
    np.testing.assert_array_equal(target["masks"].numpy(), expected.masks)
    np.testing.assert_allclose(target["boxes"].numpy(), expected.boxes, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(target["area"].numpy(), expected.area)
    np.testing.assert_allclose(target["points"].numpy(), expected.points, rtol=0, atol=1e-4)
    np.testing.assert_array_equal(semantic.numpy(), expected.semantic)
    assert target["image_id"] == index
    assert target["boxes"].dtype == torch.float32
    assert target["masks"].dtype == torch.bool


# Whether images are combined one by one, or many in one call.
with_each_runner = pytest.mark.parametrize("runner", [contextlib.nullcontext, in_batches], ids=["single", "batched"])


# -- Mosaic -----------------------------------------------------------------------------------------------------------


def mosaic_of(scenes: list[Scene], center: tuple[int, int], size: tuple[int, int]) -> Scene:
    """Place four scenes around a center, on a canvas larger than all of them, and cut out the mosaic."""
    (center_y, center_x), (height, width), border = center, size, 200
    canvas = np.full((height + 2 * border, width + 2 * border, 3), FILL[gl.Image], np.uint8)
    semantic = np.full(canvas.shape[:2], FILL[gl.Mask], np.int64)
    inside = slice(border, border + height), slice(border, border + width)
    parts = []
    for number, scene in enumerate(scenes):
        h, w = scene.image.shape[:2]
        top = border + center_y - (h if number < 2 else 0)
        left = border + center_x - (w if number % 2 == 0 else 0)
        canvas[top : top + h, left : left + w] = scene.image
        semantic[top : top + h, left : left + w] = scene.semantic
        x, y = left - border, top - border
        boxes = scene.boxes + np.array([x, y, x, y])
        boxes = np.clip(boxes, 0, [width, height, width, height])
        boxes = np.clip(boxes, [x, y, x, y], [x + w, y + h, x + w, y + h])  # boxes may extend beyond their own image
        visible = [n for n, box in enumerate(boxes.tolist()) if box[2] > box[0] and box[3] > box[1]]
        masks = np.zeros((len(visible), *canvas.shape[:2]), bool)
        masks[:, top : top + h, left : left + w] = scene.masks[visible]
        labels, area, points = (values[visible] for values in (scene.labels, scene.area, scene.points))
        parts.append((boxes[visible], masks[:, *inside], labels, area, points + np.array([x, y])))
    joined = [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]
    return Scene(canvas[inside], *joined, semantic[inside])


def mosaic_at(row: int, record: Any, scenes: list[Scene], size: tuple[int, int]) -> Scene:
    scenes_of_group = [scenes[neighbor(row, number, len(scenes))] for number in record.order[row].tolist()]
    return mosaic_of(scenes_of_group, tuple(record.centre_yx[row].tolist()), size)


@with_each_runner
@pytest.mark.parametrize("size", [(40, 52), (100, 90), 17])
def test_mosaic_equals_plain_numpy(runner, size):
    chain = [T.Mosaic(size, center_range=(0.1, 0.9), fill=FILL)]
    scenes = [make_scene(index) for index in range(14)]  # the last group has only two
    [record] = draw_chain(chain, scenes).records
    with runner():
        rows = load_rows(chain, ragged="error")
    for row, loaded_row in enumerate(rows):
        pair = size if isinstance(size, tuple) else (size, size)
        assert_row_equals(loaded_row, mosaic_at(row, record, scenes, pair), row)


def mirror(scene: Scene, *, axis: int) -> Scene:
    """Mirror left to right (axis 1) or upside down (axis 0)."""
    length = scene.image.shape[axis]
    boxes, points = scene.boxes.copy(), scene.points.copy()
    start, end = 1 - axis, 3 - axis  # the columns of a box's two borders: 0 and 2 for x, 1 and 3 for y
    boxes[:, [start, end]] = length - scene.boxes[:, [end, start]]
    points[..., start] = length - 1 - scene.points[..., start]
    return replace(
        scene,
        image=np.flip(scene.image, axis),
        boxes=boxes,
        masks=np.flip(scene.masks, 1 + axis),
        points=points,
        semantic=np.flip(scene.semantic, axis),
    )


@with_each_runner
def test_mosaic_between_flips_equals_plain_numpy(runner):
    chain = [T.RandomHorizontalFlip(0.5), T.Mosaic((40, 52), fill=FILL), T.RandomVerticalFlip(0.5)]
    before = [make_scene(index) for index in range(14)]
    horizontal, mosaic, vertical = draw_chain(chain, before).records
    flipped = [mirror(scene, axis=1) if horizontal.flipped[row] else scene for row, scene in enumerate(before)]
    with runner():
        rows = load_rows(chain, batch_size=8)
    assert 0 < horizontal.flipped.sum() < 14
    for row, loaded_row in enumerate(rows):
        expected = mosaic_at(row, mosaic, flipped, (40, 52))
        assert_row_equals(loaded_row, mirror(expected, axis=0) if vertical.flipped[row] else expected, row)


@with_each_runner
def test_mosaic_with_a_crop_after_it_equals_the_cropped_mosaic(runner):
    """With the crop, only a part of the mosaic is made."""
    crop = T.CenterCrop((20, 30))
    with runner():
        mosaics = load_rows([T.Mosaic((40, 50), fill=FILL)])
        crops = load_rows([T.Mosaic((40, 50), fill=FILL), crop])
    for (image, _, mask), (crop_image, _, crop_mask) in zip(mosaics, crops, strict=True):
        assert torch.equal(image[:, 10:30, 10:40], crop_image)
        assert torch.equal(mask[10:30, 10:40], crop_mask)


def test_mosaic_does_not_change_samples_that_it_does_not_combine():
    chain = [T.Mosaic(40, p=0.5)]
    scenes = [make_scene(index) for index in range(14)]
    [record] = draw_chain(chain, scenes).records
    rows = load_rows(chain)
    assert 0 < record.gathered.sum() < 14
    for row in np.flatnonzero(~record.gathered).tolist():
        assert_row_equals(rows[row], scenes[row], row)


def test_mosaic_of_semantic_masks_is_the_same_with_and_without_boxes():
    dataset = [(gl.Image(make_scene(n).image), gl.Mask(make_scene(n).semantic)) for n in range(8)]
    rows = load_rows([T.Mosaic(50)], scenes_dataset(8))
    with make_loader([T.Mosaic(50)], dataset) as loader:
        masks_alone = torch.cat([torch.stack(list(masks)) for _, masks in loader])
    assert torch.equal(masks_alone, torch.stack([semantic for *_, semantic in rows]))


def test_mosaic_after_a_crop_drops_boxes_with_their_fields():
    chain = [T.RandomIoUCrop(sampler_options=[0.0], max_scale=0.6), T.Mosaic(300), T.SanitizeBoundingBoxes()]
    for _, target, _ in load_rows(chain):
        count = len(target["boxes"])
        assert {len(target[name]) for name in ("labels", "masks", "area", "points")} == {count}
        for box, mask in zip(target["boxes"].tolist(), target["masks"], strict=True):
            rows, columns = torch.nonzero(mask, as_tuple=True)
            if len(rows):  # a box that the crop cuts still contains its pixels
                assert box[0] - 1 < columns.min()
                assert columns.max() < box[2] + 1
                assert box[1] - 1 < rows.min()
                assert rows.max() < box[3] + 1


# -- CopyPaste --------------------------------------------------------------------------------------------------------


def resize(scene: Scene, size_hw: tuple[int, int]) -> Scene:
    height, width = scene.image.shape[:2]
    if (height, width) == size_hw:
        return scene
    nearest, bilinear = PILImage.Resampling.NEAREST, PILImage.Resampling.BILINEAR
    image, semantic = PILImage.fromarray(scene.image), PILImage.fromarray(scene.semantic.astype(np.uint8))
    size_wh = (size_hw[1], size_hw[0])
    ratio = np.array([size_hw[1] / width, size_hw[0] / height])
    masks = [np.asarray(PILImage.fromarray(mask.astype(np.uint8)).resize(size_wh, nearest)) > 0 for mask in scene.masks]
    return replace(
        scene,
        # Resize rows first, since Pillow 13 would begin with the cheaper axis, and rounds in between.
        image=np.asarray(image.resize((size_wh[0], height), bilinear).resize(size_wh, bilinear)),
        boxes=scene.boxes * np.tile(ratio, 2),
        masks=np.array(masks, bool).reshape(-1, *size_hw),
        points=scene.points * ratio,
        semantic=np.asarray(semantic.resize(size_wh, nearest)).astype(np.int64),
    )


def paste(background: Scene, other: Scene, chosen: list[int]) -> Scene:
    """Paste instances of a scene over another scene."""
    other = resize(other, background.image.shape[:2])
    image, semantic, masks = background.image.copy(), background.semantic.copy(), background.masks.copy()
    for number in chosen:
        pasted_mask = other.masks[number]
        image[pasted_mask], semantic[pasted_mask] = other.image[pasted_mask], other.semantic[pasted_mask]
        masks[:, pasted_mask] = False
    visible, boxes = [], []
    for number, mask in enumerate(masks):
        ys, xs = np.nonzero(mask)
        if len(ys):
            visible.append(number)
            is_smaller = mask.sum() < background.masks[number].sum()
            box = [xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]
            boxes.append(box if is_smaller else background.boxes[number])
    return Scene(
        image,
        np.concatenate([np.array(boxes, float).reshape(-1, 4), other.boxes[chosen]]),
        np.concatenate([masks[visible], other.masks[chosen]]),
        np.concatenate([background.labels[visible], other.labels[chosen]]),
        np.concatenate([background.area[visible], other.area[chosen]]),
        np.concatenate([background.points[visible], other.points[chosen]]),
        semantic,
    )


def chosen_instances(record: Any, row: int, count: int) -> list[int]:
    """Return which of `count` instances are pasted: those chosen by `count` draws, without repetition."""
    numbers = uniforms(Key(*record.keys[row].tolist()), np.zeros(1, np.int64), 0, count)[0]
    return sorted({int(number * count) for number in numbers})


@with_each_runner
@pytest.mark.parametrize("size", [(40, 50), None], ids=["equal", "different"])
def test_copy_paste_equals_plain_numpy(runner, size):
    chain = [T.CopyPaste(p=0.8)]
    scenes = [make_scene(index, size=size) for index in range(25)]  # the last scene has no partner
    [record] = draw_chain(chain, scenes).records
    with runner():
        rows = load_rows(chain, scenes_dataset(25, size), batch_size=6)
    hidden_count = 0
    for row, loaded_row in enumerate(rows):
        partner, expected = neighbor(row, 1, 25), scenes[row]
        if record.gathered[row] and partner != row:
            expected = paste(expected, scenes[partner], chosen_instances(record, row, len(scenes[partner].boxes)))
        hidden_count += len(set(scenes[row].labels) - set(expected.labels))
        assert_row_equals(loaded_row, expected, row)
    assert 0 < record.gathered.sum() < 25
    assert hidden_count > 0, "no instance was hidden entirely, so hiding was not tested"


@with_each_runner
def test_copy_paste_of_mosaics_equals_plain_numpy(runner):
    chain = [T.Mosaic((40, 52), fill=FILL), T.CopyPaste(), T.RandomHorizontalFlip(1.0), T.CenterCrop((40, 52))]
    scenes = [make_scene(index) for index in range(16)]
    tiled, pasting, *_ = draw_chain(chain, scenes).records
    mosaics = [mosaic_at(row, tiled, scenes, (40, 52)) for row in range(16)]
    with runner():
        rows = load_rows(chain, scenes_dataset(16), batch_size=8)
    for row, loaded_row in enumerate(rows):
        other = mosaics[row ^ 1]
        expected = paste(mosaics[row], other, chosen_instances(pasting, row, len(other.boxes)))
        assert_row_equals(loaded_row, mirror(expected, axis=1), row)


# -- workers, batches, ranks and resuming -----------------------------------------------------------------------------

CHAIN = [
    T.RandomResizedCrop(48),
    T.Mosaic(64, p=0.8),
    T.CopyPaste(p=0.7),
    T.RandomAffine(20, scale=(0.5, 1.5)),
    T.CenterCrop(48),
    T.ColorJitter(0.4),
    T.SanitizeBoundingBoxes(),
    T.ToDtype("float32", scale=True),
]


def assert_rows_equal(rows: list[Any], expected: list[Any]) -> None:
    assert len(rows) == len(expected)
    for (image, target, mask), (expected_image, expected_target, expected_mask) in zip(rows, expected, strict=True):
        assert torch.equal(image, expected_image)
        assert torch.equal(mask, expected_mask)
        for name in target:
            assert torch.equal(torch.as_tensor(target[name]), torch.as_tensor(expected_target[name])), name


@pytest.mark.processes
def test_combined_samples_are_equal_with_any_workers_and_batch_sizes():
    options = {"dataset": scenes_dataset(26), "shuffle": True, "ragged": "error"}
    expected = load_rows(CHAIN, batch_size=4, **options)
    for workers, size in ((0, 28), (1, 12), (2, 8)):  # 28: all samples, rounded up to groups of four
        assert_rows_equal(expected, load_rows(CHAIN, batch_size=size, num_workers=workers, chunk_size=3, **options))


@pytest.mark.slow
def test_combined_samples_are_equal_after_resuming():
    options = {"dataset": scenes_dataset(26), "batch_size": 8, "shuffle": True, "ragged": "error"}
    expected = load_rows(CHAIN, **options)
    with make_loader(CHAIN, **options) as loader:
        next(iter(loader))
        state = loader.state_dict()
    resumed = make_loader(CHAIN, **options)
    resumed.load_state_dict(state)
    assert_rows_equal(expected[8:], rows_of(resumed))


def test_combined_samples_are_equal_on_ranks():
    """Each rank has complete groups, even at the end, where the last group repeats its own samples."""
    expected = load_rows(CHAIN, scenes_dataset(16), batch_size=16)
    rows_by_rank = [load_rows(CHAIN, scenes_dataset(16), batch_size=4, rank=rank, world_size=2) for rank in (0, 1)]
    assert_rows_equal(
        expected, [*rows_by_rank[0][:4], *rows_by_rank[1][:4], *rows_by_rank[0][4:], *rows_by_rank[1][4:]]
    )
    padded = [load_rows([T.Mosaic(40)], scenes_dataset(6), batch_size=8, rank=rank, world_size=2) for rank in (0, 1)]
    assert [target["image_id"] for part in padded for _, target, _ in part] == [0, 1, 2, 3, 4, 5, 4, 5]
    assert_rows_equal(load_rows([T.Mosaic(40)], scenes_dataset(6), batch_size=8)[:6], [*padded[0], *padded[1]][:6])


def test_replay_returns_a_combined_sample():
    rows = load_rows(CHAIN, scenes_dataset(14), shuffle=True, ragged="error")
    with make_loader(CHAIN, scenes_dataset(14), shuffle=True, ragged="error") as loader:
        for position in (2, 13):
            replayed = loader.replay(0, position)
            assert_rows_equal([replayed.sample], [rows[position]])
            assert {"Mosaic", "CopyPaste"} <= {name for name, _ in replayed.draws}


def test_collate_fn_receives_the_combined_samples():
    rows = load_rows(CHAIN, ragged="error")
    with make_loader(CHAIN, ragged="error", collate_fn=list) as loader:
        assert_rows_equal(rows, [sample for batch in loader for sample in batch])


def test_mosaic_with_a_failed_sample_uses_the_remaining_samples_of_its_group():
    def sample(index: int) -> Any:
        if index == 2:
            raise OSError("gone")
        return scene_sample(index)

    with pytest.warns(RuntimeWarning, match="gone"):
        rows = load_rows([T.Mosaic(40)], MapDataset(sample, 8), faults=gl.Faults(on_error="skip", max_error_rate=1.0))
    assert [target["image_id"] for _, target, _ in rows] == [0, 1, 3, 4, 5, 6, 7]
    scenes = [make_scene(n) for n in range(8)]
    [record] = draw_chain([T.Mosaic(40)], scenes).records
    scenes[2] = scenes[0]  # row 0 combines the rows 0 ^ place, and takes row 0 itself in place of the failed row
    _, target, _ = rows[0]
    np.testing.assert_array_equal(target["labels"].numpy(), mosaic_at(0, record, scenes, (40, 40)).labels)


def test_mosaic_with_a_sampler_combines_the_rows_of_a_batch():
    keys = [3, 9, 0, 5, 7, 1]
    rows = load_rows([T.Mosaic(40)], batch_size=4, sampler=keys)
    scenes = [make_scene(key) for key in keys]
    [record] = draw_chain([T.Mosaic(40)], scenes).records
    for row, (_, target, _) in enumerate(rows):
        expected = mosaic_at(row, record, scenes, (40, 40))
        np.testing.assert_array_equal(target["labels"].numpy(), expected.labels)


# -- errors -----------------------------------------------------------------------------------------------------------


def make_target(**fields: Any) -> dict[str, Any]:
    scene = make_scene(0)
    return {"boxes": gl.Boxes(scene.boxes), "labels": scene.labels, **fields}


IMAGE = make_scene(0).image
MASKS = gl.Mask(make_scene(0).masks)


@pytest.mark.parametrize(("transform", "sample", "text"), [
    (T.Mosaic(40), (IMAGE, 7),
     r"Mosaic combines images of several samples and their boxes or masks, but this sample has no boxes"),
    (T.CopyPaste(), (IMAGE, make_target()), r"CopyPaste needs samples with one N×H×W gpuload.Mask.*3 boxes.*has 0"),
    (T.CopyPaste(), (IMAGE, gl.Mask(IMAGE[..., 0])), r"CopyPaste needs samples with one set of boxes"),
    (T.Mosaic(40), (IMAGE, make_target(scores=np.ones(3))),
     r"unclear whether 'scores', with 3 entries for 3 boxes, belongs to them; give Mosaic a labels_getter="),
    (T.CopyPaste(), (IMAGE, make_target(masks=MASKS, names=["a", "b", "c"])),
     r"CopyPaste moves boxes to other samples, .*'names', with 3 entries"),
])  # fmt: skip
def test_combining_samples_without_suitable_targets_raises(transform, sample, text):
    with pytest.raises(gl.SampleError, match=text), make_loader([transform], [sample] * 4) as loader:
        next(iter(loader))


def test_labels_getter_of_mosaic_names_the_fields_that_move_with_boxes():
    getter = lambda sample: (sample[1]["labels"], sample[1]["scores"])  # noqa: E731
    sample = (IMAGE, make_target(scores=np.array([7.0, 8.0, 9.0]), names=np.array([1, 2, 3])))
    with make_loader([T.Mosaic(120, labels_getter=getter)], [sample] * 4) as loader:
        _, targets = next(iter(loader))
    for target in targets:
        assert len(target["boxes"]) == len(target["labels"]) == len(target["scores"]) == 12
        assert target["scores"].tolist() == [7.0, 8.0, 9.0] * 4
        assert target["names"].tolist() == [1, 2, 3]


@pytest.mark.parametrize(("first", "second", "text"), [
    (make_target(), make_target(more=1), r"Mosaic combines the samples of a batch, but sample 0 and sample 1 have"),
    (make_target(area=np.ones(3)),
     {"boxes": gl.Boxes(make_scene(2).boxes), "labels": make_scene(2).labels, "area": 1.0},
     r'different entries that belong to their boxes: sample\[1\]\["area"\], sample\[1\]\["boxes"\], '
     r'sample\[1\]\["labels"\] in the first, sample\[1\]\["boxes"\], sample\[1\]\["labels"\] in the second; '
     r"pass Mosaic"),
    (gl.Mask(IMAGE[..., 0]), gl.Mask(IMAGE[..., 0].astype(np.int32)),
     "Mosaic combines masks, but sample 0 of the batch has torch.uint8"),
])  # fmt: skip
def test_mosaic_of_samples_with_different_entries_raises(first, second, text):
    samples = [(IMAGE, first), (IMAGE, second)] * 2
    with pytest.raises(gl.CollateError, match=text), make_loader([T.Mosaic(40)], samples) as loader:
        next(iter(loader))


@pytest.mark.parametrize(("options", "transform", "message"), [
    ({"batch_size": 6}, T.Mosaic(40),
     r"batch_size must be a multiple of 4 with Mosaic, which combines the samples of a batch in "),
    ({"batch_size": 3}, T.Mosaic(40), r"in fours, got 3; use batch_size=4$"),
    ({"batch_size": 5}, T.CopyPaste(),
     r"batch_size must be even with CopyPaste, which combines the.*in pairs, got 5; use batch_s"),
    ({"batch_size": None}, T.Mosaic(40), r"so Mosaic has no neighbour.*pass a batch_size that is a multiple of 4"),
    ({"repeats": 2, "shuffle": True}, T.Mosaic(40),
     "repeats=2 cannot be combined with Mosaic, which combines the samples at neighbouring positions: with"),
])  # fmt: skip
def test_options_that_separate_the_samples_of_a_group_raise(options, transform, message):
    with pytest.raises(ValueError, match=message):
        make_loader([transform], ragged="error", **options)
