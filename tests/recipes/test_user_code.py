"""Code of new users: what it gives, if they have read the README, and what to write instead, if they have not."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import lacking
from helpers.both_loaders import alike, cpu_loader, gpuload_batches
from helpers.map_datasets import MapDataset
from helpers.peers import torchvision
from PIL import Image

import gpuload as gl
from gpuload import transforms as T

HEIGHT, WIDTH = 48, 64
MOVE = [T.RandomCrop(40), T.RandomHorizontalFlip()]
HALF = T.Normalize((0.5,) * 3, (0.5,) * 3)
FLOATS = T.ToDtype("float32", scale=True)


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


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, shared: bool) -> None:
        self.shared = shared

    def __iter__(self):
        info = gl.get_worker_info()
        for i in range(16):
            if not self.shared or i % info.num_workers == info.id:
                yield i


# -- correct code ------------------------------------------------------------------------------------------------------


def check_batches(batches: list, shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> None:
    """Check two batches of (images, index)."""
    for images, numbers in batches:
        assert (tuple(images.shape), images.dtype) == ((4, *shape), dtype)
        assert numbers.dtype == torch.int64
    assert torch.cat([numbers for _, numbers in batches]).tolist() == list(range(8))


def rectangles(images: torch.Tensor) -> torch.Tensor:
    """Return where the rectangles are: N×H×W."""
    return images[:, 0] > 100


def visible_boxes(images: torch.Tensor) -> list[list[int]]:
    """Return the boxes of the rectangles in the images."""
    places = [torch.nonzero(image) for image in rectangles(images)]
    return [[*place.min(0).values.flip(0).tolist(), *(place.max(0).values.flip(0) + 1).tolist()] for place in places]


def check_targets(images: torch.Tensor, targets: list) -> None:
    """Check that boxes and masks are those of the rectangles in the images."""
    assert [target["boxes"].tolist()[0] for target in targets] == visible_boxes(images)
    masks = torch.stack([target["masks"] for target in targets])
    assert torch.equal(masks == 1, rectangles(images)[:, None])


@dataclass(frozen=True)
class Roll(T.Custom):
    """A transform that rolls columns to the right by a random distance per image."""

    max_distance: int = 16

    def draw(self, uniforms, sizes_hw):
        return np.floor(uniforms(1)[:, 0] * self.max_distance)

    def apply(self, images, params):
        pairs = zip(images, params.tolist(), strict=True)
        return torch.stack([image.roll(int(columns), -1) for image, columns in pairs])

    apply_masks = apply


class Halve(torch.nn.Module):
    def forward(self, images):
        return images / 2


def write_folders(root: Path) -> list[Path]:
    paths = [root / part / name / f"{i}.jpg" for part in ("one", "two") for name in "ab" for i in range(2)]
    for number, path in enumerate(paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(number).save(path, quality=95)
    return paths


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
            assert all(torch.equal(frame, frames[0]) for frame in frames)

    def test_clips_as_arrays_and_as_tensors_are_the_same(self):
        of_arrays = load(lambda i: (np.stack([scene(i)] * 3), i))
        check_batches(of_arrays, (3, 3, 40, 40))
        of_tensors = load(lambda i: (torch.stack([chw(i)] * 3), i))
        for (clip, _), (tensor_clip, _) in zip(of_arrays, of_tensors, strict=True):
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
            for images, _ in load(lambda i, make=make: (make(i), i), [*MOVE, FLOATS]):
                assert images.max() == pytest.approx(200 * 256 / 65535)

    def test_lambda_gets_a_batch_or_an_image(self):
        plain = load(lambda i: (scene(i), i), [*MOVE, FLOATS])
        for function in (T.Lambda(lambda batch: batch * 2), T.Lambda(lambda image: image * 2, per="image")):
            for (images, _), (doubled, _) in zip(
                plain, load(lambda i: (scene(i), i), [*MOVE, FLOATS, function]), strict=True
            ):
                assert torch.equal(images * 2, doubled)

    @with_and_without_workers
    def test_custom_transform_moves_masks_too(self, workers):
        plain, rolled = [
            torch.cat([images for images, _ in load(scenes_and_masks, c)]) for c in (MOVE, [*MOVE, Roll()])
        ]
        assert not torch.equal(plain, rolled)
        for images, masks in load(scenes_and_masks, [*MOVE, Roll()], workers=workers):
            assert torch.equal(rectangles(images), masks == 1)

    @with_and_without_workers
    def test_resume_with_a_custom_transform_continues_identically(self, workers):
        def loader():
            dataset = MapDataset(lambda i: (scene(i), i), 12)
            return cpu_loader(dataset, 4, shuffle=True, transforms=[*MOVE, Roll()], num_workers=workers)

        with loader() as first, loader() as second:
            batches = iter(first)
            next(batches)
            file = io.BytesIO()
            torch.save(first.state_dict(), file)
            file.seek(0)
            second.load_state_dict(torch.load(file))
            resumed = list(second)
            assert len(resumed) == 2
            assert alike(list(batches), resumed)

    def test_kornia_module_runs_between_transforms(self):
        from kornia import augmentation

        chain = [*MOVE, FLOATS, augmentation.RandomGaussianBlur((3, 3), (0.5, 2.0), p=1.0), HALF]
        check_batches(load(lambda i: (scene(i), i), chain), (3, 40, 40), torch.float32)

    def test_mixup_after_a_module_mixes_labels(self):
        for images, labels in load(lambda i: (scene(i), i % 3), [*MOVE, FLOATS, Halve(), T.MixUp(num_classes=3)]):
            assert (labels.shape, labels.dtype) == ((4, 3), torch.float32)
            assert torch.allclose(labels.sum(1), torch.ones(4))
            assert 0.1 < images.max() <= 200 / 255 / 2 + 1e-6

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

    @with_and_without_workers
    def test_pad_pads_captions_and_tokens(self, workers):
        def make(i):
            return {"image": scene(i), "caption": np.arange(i % 3 + 1), "tokens": [7] * (i % 3 + 1)}

        batch = load(make, collate_fn=gl.pad("caption", "tokens"), workers=workers)[0]
        assert batch["caption"].data.tolist() == [[0, 0, 0], [0, 1, 0], [0, 1, 2], [0, 0, 0]]
        assert batch["tokens"].sizes.flatten().tolist() == [1, 2, 3, 1]
        assert batch["image"].shape == (4, 3, 40, 40)

    def test_weights_and_weighted_sampler_choose_the_same_samples(self):
        weights = [0.0] * 4 + [1.0] * 4
        sampler = torch.utils.data.WeightedRandomSampler(weights, 8)
        for options in ({"weights": weights}, {"sampler": sampler}):
            batches = load(lambda i: (scene(i), i), **options)
            assert [len(numbers) for _, numbers in batches] == [4, 4]
            assert all((numbers >= 4).all() for _, numbers in batches)

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
        for images, masks in load(scenes_and_masks, [T.ElasticTransform(alpha=40.0, sigma=4.0)]):
            assert ((images[:, 0] > 100) == (masks == 1)).float().mean() > 0.999
            assert not all(torch.equal(moved, torch.from_numpy(mask(i))) for i, moved in enumerate(masks))

    def test_jpeg_and_augmix_change_images(self):
        plain = torch.cat([images for images, _ in load(lambda i: (scene(i), i))])
        for transform in (T.JPEG((20, 60)), T.TimmAugMix("augmix-m5-w4-d2")):
            batches = load(lambda i: (scene(i), i), [*MOVE, transform])
            check_batches(batches, (3, 40, 40))
            assert not torch.equal(torch.cat([images for images, _ in batches]), plain)

    def test_transforms_can_be_applied_to_single_samples(self):
        image = picture(0)
        assert T.RandomRotation(30)(image, seed=3).shape == (3, HEIGHT, WIDTH)
        assert torch.equal(T.apply(MOVE, image, seed=3), T.Compose(MOVE)(image, seed=3))
        seen, moved = T.apply(MOVE, (scene(0), gl.Mask(mask(0))))
        assert torch.equal(seen[0] > 100, moved == 1)

    @lacking.needs("datasets")
    def test_hugging_face_iterable_dataset_is_read(self):
        import datasets

        stream = datasets.Dataset.from_dict({"a": [*range(8)]}).to_iterable_dataset()
        assert torch.cat([batch["a"] for batch in load(stream, None)]).tolist() == list(range(8))
        with pytest.raises(TypeError, match=r"without images: .* or pass the dataset to gpuload.Loader unchanged"):
            gl.wrap(stream)


# -- mistakes ----------------------------------------------------------------------------------------------------------


def load_on_two_ranks(**options: Any) -> list:
    """Load with the environment that `torchrun --nproc-per-node=2` sets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "0")
        patch.setenv("WORLD_SIZE", "2")
        return load(MapDataset(int, 10), None, **options)


def nested_loops() -> None:
    with cpu_loader(MapDataset(int, 8), 4) as loader:
        for _ in loader:
            list(loader)


def zip_loader_with_itself() -> None:
    with cpu_loader(MapDataset(int, 8), 4) as loader:
        list(zip(loader, loader, strict=True))


class FloatsOnly(torch.nn.Module):
    """A module that refuses integers, like those of Kornia."""

    def forward(self, images):
        raise TypeError(f"Expected floats, got {images.dtype}")


class ReturnsNone(torch.nn.Module):
    def forward(self, images):
        images.mul(2)


@dataclass(frozen=True)
class WithoutApplyMasks(T.Custom):
    """A custom transform that does not handle masks."""

    def apply(self, images, params):
        return images


NORMALIZE = T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
MISTAKES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "a plain mask": (lambda: load(lambda i: (scene(i), mask(i))), ("sample[1]", "gpuload.Mask(array)")),
    "a dict with a plain mask": (
        lambda: load(lambda i: {"image": scene(i), "mask": mask(i)}),
        ('sample["mask"]', "gpuload.Mask(array)"),
    ),
    "a Pillow mask": (
        lambda: load(lambda i: (picture(i), Image.fromarray(mask(i)).convert("P"))),
        ("mode 'P'", "gpuload.Mask(picture)"),
    ),
    "plain boxes": (
        lambda: load(lambda i: (scene(i), {"boxes": box(i)})),
        ('sample[1]["boxes"]', "gpuload.Boxes(array, format='xyxy')"),
    ),
    "plain boxes of varying number": (
        lambda: load(lambda i: (scene(i), {"boxes": np.ones((i + 1, 4))})),
        ("'1.boxes'", "gpuload.Boxes(array, format)"),
    ),
    "plain keypoints": (
        lambda: load(lambda i: (scene(i), {"keypoints": np.ones((5, 2))})),
        ('sample[1]["keypoints"]', "gpuload.Keypoints(array)"),
    ),
    "clips of two lengths": (
        lambda: load(lambda i: np.stack([scene(i)] * (i + 1))),
        ("cut clips to one length", "pass a collate_fn"),
    ),
    "a float array": (lambda: load(bands), ("float32 array 48×64×13", "gpuload.Image(array)")),
    "ToTensor in the dataset": (
        lambda: load(lambda i: chw(i) / 255),
        ("gpuload.Image(tensor, layout='CHW')", "remove ToTensor or other scaling from the dataset"),
    ),
    "channels first without a layout": (lambda: load(lambda i: gl.Image(chw(i))), ("pass layout='CHW'",)),
    "uint8 arrays of thirteen channels": (
        lambda: load(lambda i: scene(i, 13)),
        ("sample, uint8 array", "gpuload.Image(array)"),
    ),
    "three means for thirteen channels": (
        lambda: load(lambda i: gl.Image(bands(i)), [*MOVE, HALF]),
        ("Normalize has 3 means", "give a mean and a std for each channel"),
    ),
    "ColorJitter of thirteen channels": (
        lambda: load(lambda i: gl.Image(bands(i)), [T.ColorJitter(0.4)]),
        ("ColorJitter takes uint8 images", "remove it"),
    ),
    "uint16": (lambda: load(lambda i: scene(i).astype(np.uint16)), ("uint16 array", "gpuload.Image(array)")),
    "a 16-bit PNG": (lambda: load(png16), ("gpuload.Encoded(data, mode='unchanged')",)),
    "grey for a Normalize of three": (
        lambda: load(lambda i: Image.fromarray(mask(i)), [*MOVE, HALF]),
        ("3 means and stds", "1 channel", "another mode"),
    ),
    "a bare lambda": (lambda: load(scene, [*MOVE, lambda x: x]), ("transforms[2]", "T.Lambda(<lambda>)")),
    "a function as transforms": (lambda: load(scene, lambda x: x), ("write [T.Lambda(<lambda>)]",)),
    "a transform without a list": (lambda: load(scene, T.RandomCrop(8)), ("must be a list", "write [RandomCrop(")),
    "a function with masks": (
        lambda: load(scenes_and_masks, [*MOVE, T.Lambda(torch.fliplr)]),
        ("gets only the images", "gpuload's transforms"),
    ),
    "an own transform with masks": (
        lambda: load(scenes_and_masks, [*MOVE, WithoutApplyMasks()]),
        ("WithoutApplyMasks has no apply_masks", "moves_pixels = False"),
    ),
    "a policy with masks": (lambda: load(scenes_and_masks, [T.RandAugment()]), ("RandAugment", "remove RandAugment")),
    "a float module on uint8 images": (
        lambda: load(scene, [*MOVE, FloatsOnly()]),
        ("FloatsOnly was called with uint8", "put ToDtype('float32', scale=True)"),
    ),
    "a float module on uint8 images in mid-chain": (
        lambda: load(scene, [*MOVE, FloatsOnly(), HALF]),
        ("FloatsOnly (transform number 3", "put ToDtype('float32', scale=True)"),
    ),
    "a module that returns None": (
        lambda: load(scene, [*MOVE, ReturnsNone()]),
        ("ReturnsNone", "returned None", "must return a tensor"),
    ),
    "MixUp of uint8 images": (
        lambda: load(scene, [*MOVE, T.MixUp()]),
        ("MixUp", "put ToDtype('float32', scale=True) or Normalize before it"),
    ),
    "captions": (
        lambda: load(lambda i: {"caption": np.ones(i + 1)}, None),
        ("collate_fn=gpuload.pad('caption') pads",),
    ),
    "tokens": (lambda: load(lambda i: {"tokens": [1] * (i + 1)}, None), ("collate_fn=gpuload.pad('tokens') pads",)),
    "padding a leaf that is deeper": (
        lambda: load(lambda i: (i, {"c": np.ones(i + 1)}), None, collate_fn=gl.pad("c")),
        ("pad() names", "'1.c'"),
    ),
    "dicts of different keys": (
        lambda: load(lambda i: {"a": i, **({"flag": 1} if i % 2 else {})}, None),
        ("'flag'", "return every sample with the same structure"),
    ),
    "a sampler and shuffle": (lambda: load(int, None, sampler=range(8), shuffle=True), ("leave one of them out",)),
    "shuffle='yes'": (
        lambda: load(int, None, shuffle="yes"),
        ("shuffle, unless it is 'block' or a gpuload.BlockShuffle, must be True or False",),
    ),
    "paths as a dataset": (lambda: load(["a.jpg", "b.jpg"] * 4), ("gpuload.read(path)", "gpuload.ImageFiles")),
    "a folder as a dataset": (
        lambda: load("data/train"),
        ("gpuload.ImageFolder('data/train')", "gpuload.ImageFiles('data/train')"),
    ),
    "a path in a sample": (
        lambda: load(lambda i: ("a.jpg", i)),
        ("sample[0] is the path 'a.jpg'", "gpuload.read(path)"),
    ),
    "an Image of a path": (lambda: load(lambda i: gl.Image("a.jpg")), ("return gpuload.read(path)",)),  # pyright: ignore
    "a Mask of a path": (lambda: load(lambda i: (scene(i), gl.Mask("a.png"))), ("Mask(gpuload.read(path))",)),
    "bytes of a file": (lambda: load(lambda i: (b"\xff\xd8", i)), ("return gpuload.Encoded(bytes)",)),
    "images of two sizes": (
        lambda: load(lambda i: gl.Image(scene(i)[i:]), None),
        ("Resize((height, width))", "ragged='list'"),
    ),
    "arrays of two sizes": (lambda: load(lambda i: scene(i)[i:], None), ("gpuload.Image(array)", "ragged='list'")),
    "two images": (
        lambda: load(lambda i: (scene(i), scene(i))),
        ("sample[0], uint8 array", "so may sample[1], uint8 array", "gpuload.Image(array)", "gpuload.Mask(…)"),
    ),
    "zip(loader, loader)": (zip_loader_with_itself, ("create a second Loader",)),
    "nested loops": (nested_loops, ("create a second Loader",)),
    "T.ToTensor": (lambda: T.ToTensor, ("write ToDtype('float32', scale=True)",)),  # pyright: ignore
    "gl.DataLoader": (lambda: gl.DataLoader, ("write gpuload.Loader",)),  # pyright: ignore
    "means of uint8 levels": (
        lambda: load(scene, [*MOVE, T.Normalize((123.7, 116.3, 103.5), (58.4, 57.1, 57.4))]),
        ("by 255", "ToDtype('float32')"),
    ),
    "ToDtype without scale": (
        lambda: load(scene, [*MOVE, T.ToDtype("float32"), NORMALIZE]),
        ("set scale=True, or remove the ToDtype",),
    ),
    "Mosaic of an odd batch": (lambda: load(detection, [T.Mosaic(64)], batch_size=3), ("use batch_size=4",)),
    "an evaluation on the first rank": (load_on_two_ranks, ("RANK=0", "rank=0, world_size=1", "evaluation")),
    "a stream not divided among workers": (
        lambda: load(Stream(False), None, workers=2),
        ("the same first", "get_worker_info()", "yield only the worker's share"),
    ),
    "a stream that is shuffled": (lambda: load(Stream(True), None, shuffle=True), ("iterable dataset", "leave it out")),
    "None for a sample": (lambda: load(lambda i: None), ("the dataset returned None", "return a sample")),
}


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("recipe", MISTAKES)
def test_mistake_has_one_line_of_message_that_names_the_remedy(recipe):
    write, words = MISTAKES[recipe]
    lines: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            write()
        except Exception as error:
            lines += [*str(error).splitlines(), *getattr(error, "__notes__", ())]
    lines += [str(warning.message) for warning in caught]
    assert any(all(word in line for word in words) for line in lines), f"no line has {words}:\n" + "\n".join(lines)
