"""The code of new users: correct code gives correct batches, and the errors of mistakes say what to write instead."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import lacking
from helpers.both_loaders import cpu_loader, gpuload_batches
from helpers.map_datasets import MapDataset
from helpers.peers import torchvision
from PIL import Image

import gpuload as gl
from gpuload import transforms as T

HEIGHT, WIDTH = 48, 64
MOVE = [T.RandomCrop(40), T.RandomHorizontalFlip()]
NORMALIZE = T.Normalize((0.5,) * 3, (0.5,) * 3)
TO_FLOATS = T.ToDtype("float32", scale=True)


def scene(index: int, channels: int = 3) -> np.ndarray:
    """Return an image of a bright rectangle, whose position depends on the index."""
    levels = np.zeros((HEIGHT, WIDTH, channels), np.uint8)
    top, left = np.random.default_rng(index).integers(5, 20, 2)
    levels[top : top + 20, left : left + 24] = 200
    return levels


def mask(index: int) -> np.ndarray:
    return (scene(index)[:, :, 0] > 100).astype(np.uint8)


def box(index: int) -> np.ndarray:
    rows, columns = np.nonzero(mask(index))
    return np.array([[columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]], np.float32)


def picture(index: int) -> Image.Image:
    return Image.fromarray(scene(index))


def chw(index: int) -> torch.Tensor:
    return torch.from_numpy(scene(index)).permute(2, 0, 1)


def bands(index: int) -> np.ndarray:
    return np.repeat(scene(index)[:, :, :1], 13, axis=2).astype(np.float32) / 200


def png16(index: int, **options: Any) -> gl.Encoded:
    file = io.BytesIO()
    Image.fromarray(scene(index)[:, :, 0].astype(np.uint16) * 256).save(file, "PNG")
    return gl.Encoded(file.getvalue(), **options)


def detection(index: int) -> Any:
    return scene(index), {"boxes": gl.Boxes(box(index)), "labels": np.ones(1, int), "masks": gl.Mask(mask(index)[None])}


def load(data: Any, transforms: Any = MOVE, *, batch_size: int | None = 4, workers: int = 0, **options: Any) -> list:
    dataset = MapDataset(data, 8) if callable(data) else data
    return gpuload_batches(dataset, batch_size, transforms=transforms, num_workers=workers, **options)


def scenes_and_masks(index):
    return scene(index), gl.Mask(mask(index))


# -- correct code ------------------------------------------------------------------------------------------------------


def check_batches(batches: list, shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> None:
    """Check two batches of (images, indices), which have all eight samples in order."""
    for images, indices in batches:
        assert (tuple(images.shape), images.dtype) == ((4, *shape), dtype)
        assert indices.dtype == torch.int64
    assert torch.cat([indices for _, indices in batches]).tolist() == list(range(8))


def rectangles(images: torch.Tensor) -> torch.Tensor:
    """Return where the rectangles are: N×H×W."""
    return images[:, 0] > 100


def visible_boxes(images: torch.Tensor) -> list[list[int]]:
    """Return the boxes of the rectangles in the images."""
    boxes = []
    for is_inside in rectangles(images):
        rows, columns = torch.nonzero(is_inside, as_tuple=True)
        boxes.append([int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1])
    return boxes


def check_targets(images: torch.Tensor, targets: list) -> None:
    """Check that boxes and masks are those of the rectangles in the images."""
    assert [target["boxes"].tolist()[0] for target in targets] == visible_boxes(images)
    masks = torch.stack([target["masks"] for target in targets])
    assert torch.equal(masks == 1, rectangles(images)[:, None])


def write_folders(root: Path) -> None:
    paths = [root / part / name / f"{i}.jpg" for part in ("one", "two") for name in "ab" for i in range(2)]
    for number, path in enumerate(paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(number).save(path, quality=95)


with_and_without_workers = pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.processes)])


class TestUserCode:
    @with_and_without_workers
    def test_masks_as_arrays_and_palette_images_follow_their_image(self, workers):
        def palette(index):
            image = Image.fromarray(mask(index), "L")
            image.putpalette([*range(30)])
            return image

        for make in (mask, palette):
            for images, masks in load(lambda i, make=make: (scene(i), gl.Mask(make(i))), workers=workers):
                assert (images.shape, masks.shape, masks.dtype) == ((4, 3, 40, 40), (4, 40, 40), torch.uint8)
                assert torch.equal(rectangles(images), masks == 1)

    def test_mask_in_a_dict_follows_its_image(self):
        for batch in load(lambda i: {"image": picture(i), "mask": gl.Mask(mask(i).astype(np.int64))}):
            assert batch["mask"].dtype == torch.int64
            assert torch.equal(rectangles(batch["image"]), batch["mask"] == 1)

    @with_and_without_workers
    def test_boxes_and_masks_of_detection_dicts_follow_their_image(self, workers):
        for images, targets in load(detection, workers=workers):
            check_targets(images, targets)

    def test_mosaic_and_copy_paste_keep_boxes_and_masks_together(self):
        for images, targets in load(detection, [T.Resize((32, 32)), T.Mosaic(64), T.CopyPaste(p=1.0)]):
            assert images.shape == (4, 3, 64, 64)
            for target in targets:
                assert len(target["boxes"]) == len(target["labels"]) == len(target["masks"]) >= 4
                for box_xyxy, object_mask in zip(target["boxes"], target["masks"], strict=True):
                    left, top, right, bottom = box_xyxy.tolist()
                    rows, columns = torch.nonzero(object_mask, as_tuple=True)
                    assert left - 1 <= columns.min() <= columns.max() <= right
                    assert top - 1 <= rows.min() <= rows.max() <= bottom

    @with_and_without_workers
    def test_frames_in_a_list_get_the_same_transforms(self, workers):
        for frames, _ in load(lambda i: ([scene(i)] * 3, i), workers=workers):
            assert [frame.shape for frame in frames] == [(4, 3, 40, 40)] * 3
            for frame in frames:
                assert torch.equal(frame, frames[0])

    def test_clips_as_arrays_and_as_tensors_are_the_same(self):
        array_batches = load(lambda i: (np.stack([scene(i)] * 3), i))
        check_batches(array_batches, (3, 3, 40, 40))
        tensor_batches = load(lambda i: (torch.stack([chw(i)] * 3), i))
        for (clip, _), (tensor_clip, _) in zip(array_batches, tensor_batches, strict=True):
            assert torch.equal(clip, tensor_clip)
            assert torch.equal(clip[:, 0], clip[:, 2])

    def test_boxes_and_masks_of_tv_tensors_follow_their_image(self):
        torchvision()
        from torchvision import tv_tensors as tv

        def make(i):
            boxes = tv.BoundingBoxes(box(i), format="XYXY", canvas_size=(HEIGHT, WIDTH))  # pyright: ignore
            return tv.Image(chw(i)), {"boxes": boxes, "masks": tv.Mask(mask(i)[None])}

        for images, targets in load(make):
            check_targets(images, targets)
        for images, masks in load(lambda i: (tv.Image(chw(i) / 255), tv.Mask(mask(i)))):
            assert images.dtype == torch.float32
            assert torch.equal(images[:, 0] > 0.5, masks == 1)

    def test_dataset_with_v2_transforms_needs_no_transforms(self):
        torchvision()
        from torchvision.transforms import v2

        chain = v2.Compose([v2.ToImage(), v2.RandomCrop(32), v2.ToDtype(torch.float32, scale=True)])
        check_batches(load(lambda i: (chain(picture(i)), i), None), (3, 32, 32), torch.float32)

    @with_and_without_workers
    def test_float_images_of_13_channels_are_transformed(self, workers):
        chain = [T.RandomResizedCrop(32), T.RandomHorizontalFlip(), T.Normalize((0.5,) * 13, (0.25,) * 13)]
        batches = load(lambda i: (gl.Image(bands(i)), i), chain, workers=workers)
        check_batches(batches, (13, 32, 32), torch.float32)
        for images, _ in batches:
            assert torch.equal(images[:, 0], images[:, 12])
            assert (images.min(), images.max()) == (-2, 2)

    def test_float_tensors_with_channels_first_are_transformed(self):
        check_batches(load(lambda i: (gl.Image(chw(i) / 255, layout="CHW"), i)), (3, 40, 40), torch.float32)

    def test_16_bit_images_are_transformed(self):
        for make in (lambda i: gl.Image(scene(i, 1).astype(np.uint16) * 256), lambda i: png16(i, mode="unchanged")):
            check_batches(load(lambda i, make=make: (make(i), i)), (1, 40, 40), torch.uint16)
            for images, _ in load(lambda i, make=make: (make(i), i), [*MOVE, TO_FLOATS]):
                assert images.max() == pytest.approx(200 * 256 / 65535)

    @lacking.needs("pycocotools")
    def test_coco_dataset_gives_boxes_masks_and_labels(self, tmp_path):
        for i in range(4):
            picture(i).save(tmp_path / f"{i}.png")
        annotations = []
        for i in range(3):  # the last image has no annotation
            left, top, right, bottom = box(i)[0].tolist()
            outline = [left, top, right, top, right, bottom, left, bottom]
            shape = {"bbox": [left, top, 24, 20], "segmentation": [outline], "iscrowd": 0, "area": 480}
            annotations.append({"id": i, "image_id": i, "category_id": 5, **shape})
        images = [{"id": i, "file_name": f"{i}.png", "height": HEIGHT, "width": WIDTH} for i in range(4)]
        file = tmp_path / "instances.json"
        categories = [{"id": 5, "name": "x"}]
        file.write_text(json.dumps({"images": images, "annotations": annotations, "categories": categories}))
        [(images, targets)] = load(gl.wrap(torchvision().datasets.CocoDetection(tmp_path, str(file))))
        check_targets(images[:3], targets[:3])
        assert len(targets[3]["boxes"]) == 0
        assert [target["labels"].tolist() for target in targets] == [[5], [5], [5], []]

    def test_weights_and_weighted_sampler_choose_no_sample_of_weight_0(self):
        weights = [0.0] * 4 + [1.0] * 4
        sampler = torch.utils.data.WeightedRandomSampler(weights, 8)
        for options in ({"weights": weights}, {"sampler": sampler}):
            batches = load(lambda i: (scene(i), i), **options)
            assert [len(indices) for _, indices in batches] == [4, 4]
            assert min(int(indices.min()) for _, indices in batches) >= 4

    @with_and_without_workers
    def test_image_folders_can_be_concatenated(self, workers, tmp_path):
        write_folders(tmp_path)
        dataset = gl.ImageFolder(tmp_path / "one") + gl.ImageFolder(tmp_path / "two")
        assert len(dataset) == 8
        batches = load(dataset, workers=workers)
        assert torch.cat([labels for _, labels in batches]).tolist() == [0, 0, 1, 1] * 2
        assert gl.ImageFolder(tmp_path / "one").samples[3] == (str(tmp_path / "one/b/1.jpg"), 1)

    def test_by_epoch_changes_the_image_size(self):
        chain = [T.RandomResizedCrop(T.by_epoch({0: 16, 2: 32}))]
        with cpu_loader(MapDataset(scene, 8), 4, transforms=chain) as loader:
            assert [{images.shape[-1] for images in loader} for _ in range(3)] == [{16}, {16}, {32}]

    def test_elastic_transform_moves_masks_too(self):
        batches = load(scenes_and_masks, [T.ElasticTransform(alpha=40.0, sigma=4.0)])
        for first, (images, masks) in zip((0, 4), batches, strict=True):
            assert ((images[:, 0] > 100) == (masks == 1)).float().mean() > 0.999
            original_masks = torch.stack([torch.from_numpy(mask(i)) for i in range(first, first + 4)])
            assert not torch.equal(masks, original_masks), "no mask was moved"

    def test_jpeg_and_augmix_change_images(self):
        unchanged = torch.cat([images for images, _ in load(lambda i: (scene(i), i))])
        for transform in (T.JPEG((20, 60)), T.TimmAugMix("augmix-m5-w4-d2")):
            batches = load(lambda i: (scene(i), i), [*MOVE, transform])
            check_batches(batches, (3, 40, 40))
            assert not torch.equal(torch.cat([images for images, _ in batches]), unchanged)

    def test_transforms_can_be_applied_to_single_samples(self):
        image = picture(0)
        assert T.RandomRotation(30)(image, seed=3).shape == (3, HEIGHT, WIDTH)
        assert torch.equal(T.apply(MOVE, image, seed=3), T.Compose(MOVE)(image, seed=3))
        moved_image, moved_mask = T.apply(MOVE, (scene(0), gl.Mask(mask(0))))
        assert torch.equal(moved_image[0] > 100, moved_mask == 1)


# -- mistakes ----------------------------------------------------------------------------------------------------------


def load_on_two_ranks() -> list:
    """Load with the environment that `torchrun --nproc-per-node=2` sets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "0")
        patch.setenv("WORLD_SIZE", "2")
        return load(MapDataset(int, 10), None)


UNSCALED = [T.ToDtype("float32"), T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("mistake", "texts"),
    [
        (lambda: load(scene, [*MOVE, lambda x: x]), ("transforms[2]", "T.Lambda(<lambda>)")),
        (lambda: load(scene, lambda x: x), ("write [T.Lambda(<lambda>)]",)),
        (lambda: load(scene, T.RandomCrop(8)), ("must be a list", "write [RandomCrop(")),
        (lambda: load(int, None, sampler=range(8), shuffle=True), ("leave one of them out",)),
        (lambda: load(lambda i: scene(i)[i:], None), ("gpuload.Image(array)", "ragged='list'")),
        (lambda: load(scene, [*MOVE, *UNSCALED]), ("set scale=True, or remove the ToDtype",)),
        (lambda: load(torch.utils.data.ChainDataset([]), None, shuffle=True), ("iterable dataset", "leave it out")),
        (load_on_two_ranks, ("RANK=0", "rank=0, world_size=1", "evaluation")),
    ],
)
def test_error_of_a_mistake_has_one_line_that_names_the_remedy(mistake, texts):
    with pytest.raises((TypeError, ValueError, RuntimeError, RuntimeWarning)) as caught:
        mistake()
    lines = [*str(caught.value).splitlines(), *getattr(caught.value, "__notes__", ())]
    assert any(all(text in line for text in texts) for line in lines), f"no line has {texts}:\n" + "\n".join(lines)
