"""Samples with torchvision's TVTensors give the same batches as in DataLoader."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import peers
from helpers.both_loaders import alike, gpuload_batches, torch_batches
from helpers.map_datasets import MapDataset
from torch.utils.data import BatchSampler, RandomSampler

import gpuload as gl
from gpuload import transforms as T

vision = peers.torchvision()
v2, tv_tensors = vision.transforms.v2, vision.tv_tensors

SIZE = 20, 30


def uint8_image(index: int, size: tuple[int, int] = SIZE):
    return tv_tensors.Image(torch.full((3, *size), index, dtype=torch.uint8))


def float_image(index: int, size: tuple[int, int] = SIZE):
    return tv_tensors.Image(torch.full((3, *size), index / 8))


def boxes(index: int, count: int = 2, **options):
    rows = [[index, 2, 10 + number, 12] for number in range(count)]
    return tv_tensors.BoundingBoxes(
        torch.tensor(rows, dtype=torch.float32).reshape(-1, 4), **{"format": "XYXY", "canvas_size": SIZE, **options}
    )


def rotated(index: int):
    return tv_tensors.BoundingBoxes(torch.tensor([[5.0, 6, 7, 8, index]]), format="CXCYWHR", canvas_size=SIZE)


def mask(index: int):
    return tv_tensors.Mask(torch.full((1, *SIZE), index, dtype=torch.uint8))


def points(index: int):
    return tv_tensors.KeyPoints(torch.tensor([[index, 2.0]]), canvas_size=SIZE)


def video(index: int, dtype=torch.uint8):
    return tv_tensors.Video(torch.full((4, 3, *SIZE), index, dtype=dtype))


KINDS = {
    "a float image": lambda i: (float_image(i), i),
    "a float image of half precision": lambda i: (tv_tensors.Image(float_image(i).half()), i),
    "a uint8 image": lambda i: (uint8_image(i), i),
    "an image of 13 channels": lambda i: (tv_tensors.Image(torch.full((13, *SIZE), i, dtype=torch.uint8)), i),
    "a float tensor with a mask": lambda i: (torch.full((3, 4, 5), i / 2), mask(i)),
    "a float image with boxes": lambda i: (float_image(i), {"boxes": boxes(i), "labels": torch.tensor([i, 1])}),
    "a float tensor with boxes": lambda i: {"image": torch.full((3, 4, 5), i / 2), "boxes": boxes(i)},
    "a float image with keypoints": lambda i: (float_image(i), points(i)),
    "a float image with all targets": lambda i: (float_image(i), {"b": boxes(i), "m": mask(i), "p": points(i)}),
    "rotated boxes with a float image": lambda i: (float_image(i), rotated(i)),
    "rotated boxes with a uint8 image": lambda i: (uint8_image(i), rotated(i)),
    "boxes that are not clamped": lambda i: (float_image(i), boxes(i, clamping_mode=None)),
    "boxes alone": lambda i: boxes(i),
    "a mask and keypoints alone": lambda i: {"mask": mask(i), "points": points(i)},
    "a video": lambda i: (video(i), i),
    "a float video": lambda i: (video(i, torch.float32), i),
}


def zipped(samples):
    return tuple(zip(*samples, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_tv_tensors_are_collated_as_in_dataloader(kind):
    dataset = MapDataset(KINDS[kind], 6)
    assert alike(gpuload_batches(dataset, 3), torch_batches(dataset, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_collate_fn_gets_tv_tensors_as_in_dataloader(kind):
    dataset, collate_fn = MapDataset(KINDS[kind], 6), list if "alone" in kind else zipped
    batches, expected = (load(dataset, 3, collate_fn=collate_fn) for load in (gpuload_batches, torch_batches))
    if "uint8 image" in kind:  # gpuload gives images as plain tensors
        batches, expected = ([[images, list(others)] for images, others in batches] for batches in (batches, expected))
        expected = [[[image.as_subclass(torch.Tensor) for image in images], others] for images, others in expected]
        batches = [[list(images), others] for images, others in batches]
    assert alike(batches, expected)


def detection(index: int):
    """Return a sample of torchvision's detection reference, without ToPureTensor."""
    size = SIZE[0] + index, SIZE[1]
    target = {
        "boxes": boxes(index, 1 + index % 3, canvas_size=size),
        "masks": tv_tensors.Mask(torch.zeros(1 + index % 3, *size, dtype=torch.uint8)),
        "labels": torch.arange(1 + index % 3),
        "image_id": index,
    }
    picture = tv_tensors.Image(torch.arange(3 * size[0] * size[1], dtype=torch.uint8).reshape(3, *size))
    return v2.Compose([v2.RandomHorizontalFlip(1.0), v2.ToDtype(torch.float32, scale=True)])(picture, target)


def test_torchvisions_detection_reference_trains_with_a_loader():
    dataset = MapDataset(detection, 8)

    def sampler():
        return BatchSampler(RandomSampler(dataset, generator=torch.Generator().manual_seed(3)), 2, drop_last=True)

    batches = gpuload_batches(dataset, batch_sampler=sampler(), collate_fn=zipped)
    assert alike(batches, torch_batches(dataset, batch_sampler=sampler(), collate_fn=zipped))
    batches_of_chunks = gpuload_batches(dataset, 4, collate_fn=zipped, chunk_size=1)  # collated in the main process
    assert alike(batches_of_chunks, torch_batches(dataset, 4, collate_fn=zipped))
    model = torch.nn.Conv2d(3, 4, 3, padding=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for images, targets in batches:  # the steps of its train_one_epoch
        images = [image.to("cpu") for image in images]
        targets = [{k: v.to("cpu") if isinstance(v, torch.Tensor) else v for k, v in t.items()} for t in targets]
        assert isinstance(targets[0]["boxes"], tv_tensors.BoundingBoxes)
        assert targets[0]["boxes"].canvas_size == tuple(images[0].shape[-2:])
        losses = [
            model(image[None]).mean((2, 3)).sub(target["boxes"].as_subclass(torch.Tensor).mean(0)).square().mean()
            for image, target in zip(images, targets, strict=True)
        ]
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()


def segmentation(index: int):
    size = SIZE[0] + index, SIZE[1] + 2 * index
    rng = np.random.default_rng(index)
    picture = tv_tensors.Image(torch.from_numpy(rng.integers(0, 256, (3, *size), np.uint8)))
    classes = tv_tensors.Mask(torch.from_numpy(rng.integers(0, 5, size, np.uint8)))
    chain = v2.Compose(
        [
            v2.RandomHorizontalFlip(1.0),
            v2.CenterCrop(16),
            v2.ToDtype({tv_tensors.Image: torch.float32, tv_tensors.Mask: torch.int64, "others": None}, scale=True),
            v2.Normalize((0.5, 0.5, 0.5), (0.2, 0.2, 0.2)),
        ]
    )
    return chain(picture, classes)


def padded(samples):
    """Collate like the reference: pad images and masks to the largest size, masks with 255."""
    images, targets = zip(*samples, strict=True)
    return stack_padded(images, 0), stack_padded(targets, 255)


def stack_padded(tensors, fill):
    shape = tuple(max(sizes) for sizes in zip(*(tensor.shape for tensor in tensors), strict=True))
    batch = tensors[0].new_full((len(tensors), *shape), fill)
    for tensor, slot in zip(tensors, batch, strict=True):
        slot[..., : tensor.shape[-2], : tensor.shape[-1]].copy_(tensor)
    return batch


@pytest.mark.parametrize("collate_fn", [None, padded])
def test_torchvisions_segmentation_reference_trains_with_a_loader(collate_fn):
    dataset, options = MapDataset(segmentation, 8), {"collate_fn": collate_fn, "drop_last": True}
    batches = gpuload_batches(dataset, 3, **options)
    assert alike(batches, torch_batches(dataset, 3, **options))
    model = torch.nn.Conv2d(3, 5, 3, padding=1)
    for image, target in batches:
        assert image.shape == (3, 3, 16, 16)
        torch.nn.functional.cross_entropy(model(image), target, ignore_index=255).backward()


LARGE = {
    "float images": lambda i: (float_image(i, (40, 50)), i),
    "float images of half precision": lambda i: (tv_tensors.Image(float_image(i, (40, 50)).bfloat16()), i),
    "float videos": lambda i: {"clip": tv_tensors.Video(torch.full((2, 3, 40, 50), i / 8)), "label": i},
    "images of 13 channels": lambda i: (tv_tensors.Image(torch.full((13, 40, 50), i, dtype=torch.uint8)), i),
    "masks with a float image": lambda i: (
        float_image(i, (40, 50)),
        {"masks": tv_tensors.Mask(torch.full((2, 40, 50), i, dtype=torch.uint8)), "size": (40, 50)},
    ),
    "many boxes": lambda i: (float_image(i, (40, 50)), boxes(i, 300)),
    "boxes on canvases that differ": lambda i: boxes(i, 300, canvas_size=(40 + i, 50)),
    "boxes of formats that differ": lambda i: boxes(i, 300, format="XYWH" if i == 1 else "XYXY"),
    "a TVTensor and a plain tensor alternately": lambda i: torch.ones(3, 40, 50) if i % 2 else float_image(i, (40, 50)),
    "a view": lambda i: tv_tensors.wrap(torch.full((40, 50, 3), i / 8).permute(2, 0, 1), like=float_image(0)),
    "a clip's frames in a list": lambda i: [tv_tensors.Image(torch.full((3, 40, 50), i / 8 + n)) for n in range(3)],
}


@pytest.mark.parametrize(
    "options",
    [{}, {"collate_fn": list}, {"chunk_size": 2}, {"collate_fn": list, "chunk_size": 2}, {"batch_size": None}],
)
@pytest.mark.parametrize("kind", LARGE)
def test_large_tv_tensors_keep_their_type_with_any_collate_fn_and_chunk_size(kind, options):
    options = {"batch_size": 3, **options}
    batches = gpuload_batches(MapDataset(LARGE[kind], 6), **options)
    options.pop("chunk_size", None)
    assert alike(batches, torch_batches(MapDataset(LARGE[kind], 6), **options))


def test_large_tv_tensors_are_not_pickled_by_torch(monkeypatch):
    """Torch pickles the storage of each tensor of a subclass separately, which took milliseconds per image."""

    def refuse(*arguments):
        raise AssertionError("torch pickled a tensor")

    monkeypatch.setattr(torch.storage.UntypedStorage, "__reduce__", refuse)
    monkeypatch.setattr(torch.storage.TypedStorage, "__reduce__", refuse)
    for options in ({}, {"collate_fn": list, "chunk_size": 2}, {"collate_fn": list}):
        for make in LARGE.values():
            gpuload_batches(MapDataset(make, 6), 3, **options)


def test_subclass_of_a_tv_tensor_keeps_its_type():
    class Heat(tv_tensors.Mask):
        pass

    dataset = MapDataset(lambda index: torch.full((3, 40, 50), index / 8).as_subclass(Heat), 4)
    batches = gpuload_batches(dataset, 2, collate_fn=list)
    assert {type(value).__name__ for batch in batches for value in batch} == {"Heat"}
    assert [value[0, 0, 0].item() for batch in batches for value in batch] == [0, 1 / 8, 2 / 8, 3 / 8]


def detection_in_worker(index: int):
    """Return a detection sample, with an import of torchvision that works with any version of torch."""
    from benchmarks.peers.torchvision_import import torchvision, v2

    picture = torchvision.tv_tensors.Image(torch.arange(3 * 20 * 30, dtype=torch.uint8).reshape(3, 20, 30))
    rows = torch.tensor([[index, 2.0, 10, 12]] * (index + 1))
    bounding_boxes = torchvision.tv_tensors.BoundingBoxes(rows, format="XYXY", canvas_size=(20, 30))
    chain = v2.Compose([v2.RandomHorizontalFlip(1.0), v2.ToDtype(torch.float32, scale=True)])
    return chain(picture, {"boxes": bounding_boxes, "labels": torch.arange(index + 1)})


@pytest.mark.processes
@pytest.mark.slow
def test_tv_tensors_from_workers_equal_dataloaders():
    dataset = MapDataset(detection_in_worker, 4)
    batches = gpuload_batches(dataset, 2, num_workers=1, collate_fn=zipped)
    assert alike(batches, torch_batches(dataset, 2, collate_fn=zipped))
    stacked = gpuload_batches(MapDataset(lambda i: detection_in_worker(0), 4), 2, num_workers=1)
    assert alike(stacked, torch_batches(MapDataset(lambda i: detection_in_worker(0), 4), 2))


def test_uint8_tv_images_and_their_boxes_are_transformed_by_gpuload():
    make = lambda i: (uint8_image(i), {"boxes": boxes(0), "labels": torch.tensor([1, 2])})  # noqa: E731
    [(images, targets)] = gpuload_batches(MapDataset(make, 2), 2, transforms=[T.RandomHorizontalFlip(1.0)])
    assert images.shape == (2, 3, *SIZE)
    assert targets[0]["boxes"].tolist() == [[20, 2, 30, 12], [19, 2, 30, 12]]
    with pytest.raises(gl.SampleError, match="rotated boxes are not supported"):
        gpuload_batches(MapDataset(lambda i: (uint8_image(i), rotated(i)), 2), transforms=[T.RandomHorizontalFlip(1.0)])
