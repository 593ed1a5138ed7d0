"""Warnings of targets that were made for another image size (COCO's JSON, `Boxes(canvas_hw=…)`, torchvision's boxes) or
are in another unit than pixels."""

from __future__ import annotations

import io
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.generated_images import smooth_image
from helpers.patterns import exactly, starting
from helpers.peers import torchvision
from PIL import Image as PILImage

import gpuload as gl

HEIGHT, WIDTH = 24, 40  # of the stored images
SWAPPED = "40×24 (height × width), but it is decoded to 24×40"
EXIF_HINT = "its EXIF tag rotates it; use Loader(decode=gpuload.Decode(exif=True))"


def encode_image(orientation: int = 1, kind: str = "JPEG") -> bytes:
    file, exif = io.BytesIO(), PILImage.Exif()
    exif[0x0112] = orientation  # 1 is upright, 3 is rotated by 180°, 6 and 8 by 90°
    PILImage.fromarray(smooth_image(HEIGHT, WIDTH, 3)).save(file, kind, exif=exif)
    return file.getvalue()


class FunctionList(list[Callable[[], Any]]):
    """A dataset whose samples are the results of functions."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index)()


def load_targets(dataset: Any, **options: Any) -> list[Any]:
    options = {"num_workers": 0, "device": "cpu", "transforms": [gl.transforms.Resize((8, 8))], **options}
    with gl.Loader(dataset, 1, ragged="list", **options) as loader:
        return [target for _, targets in loader for target in targets]


def sample_with_boxes(canvas_hw: Any, data: bytes, source: str | None = "a.jpg") -> Callable[[], Any]:
    return lambda: (gl.Encoded(data, source=source), {"boxes": gl.Boxes([[2, 3, 10, 20]], canvas_hw=canvas_hw)})


def torchvision_boxes() -> Any:
    return torchvision().tv_tensors.BoundingBoxes([[1, 2, 3, 4]], format="XYXY", canvas_size=(WIDTH, HEIGHT))


@pytest.fixture
def make_coco(tmp_path: Path) -> Callable[..., gl.Coco]:
    """Return a function that creates a dataset of thirty images, of which EXIF rotates the last."""

    def make(size_hw: tuple[int, int], **options: Any) -> gl.Coco:
        images, annotations = [], []
        for number in range(30):
            is_last = number == 29
            (tmp_path / f"{number}.jpg").write_bytes(encode_image(6 if is_last else 1))
            height, width = size_hw if is_last else (HEIGHT, WIDTH)
            mask_rle = {"counts": [height * width], "size": [height, width]}
            images.append({"id": number, "file_name": f"{number}.jpg", "height": height, "width": width})
            annotations.append(
                {"id": number, "image_id": number, "category_id": 1, "bbox": [1, 2, 3, 4], "segmentation": mask_rle}
            )
        contents = {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "cat"}]}
        (tmp_path / "annotations.json").write_text(json.dumps(contents))
        return gl.Coco(tmp_path, tmp_path / "annotations.json", **options)

    return make


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_boxes_for_the_exif_rotated_size_of_an_image_are_warned_of_once(
    make_coco: Callable[..., gl.Coco], tmp_path: Path, workers: int
) -> None:
    dataset = make_coco((WIDTH, HEIGHT), targets=())
    text = f"the boxes of '{tmp_path}/29.jpg' are for an image of {SWAPPED}: {EXIF_HINT}"
    with pytest.warns(RuntimeWarning, match=exactly(text)) as caught:
        assert len(load_targets(dataset, num_workers=workers)) == 30
    assert len(caught) == 1
    assert len(load_targets(dataset, num_workers=workers, decode=gl.Decode(exif=True))) == 30
    stored = make_coco((HEIGHT, WIDTH), targets=())
    assert len(load_targets(stored)) == 30
    with pytest.warns(RuntimeWarning, match="the targets are for the image as it is stored; use Loader"):
        load_targets(stored, decode=gl.Decode(exif=True))


def test_boxes_for_a_wrong_image_size_are_warned_of_for_the_first_image_only() -> None:
    data = FunctionList([sample_with_boxes((5, 5), encode_image(), name) for name in ("a.jpg", "b.jpg", "c.jpg")])
    with gl.Loader(data, 2, num_workers=0, device="cpu", ragged="list") as loader:
        with pytest.warns(RuntimeWarning, match=r"^the boxes of 'a.jpg' are for an image of 5×5 ") as caught:
            list(loader)
        assert len(caught) == 1
        list(loader)  # does not warn again


def test_boxes_for_a_wrong_image_size_are_warned_of_next_to_unrecognized_targets() -> None:
    def make_sample() -> Any:
        image, target = sample_with_boxes((WIDTH, HEIGHT), encode_image(6))()
        return image, {**target, "keypoints": np.zeros((1, 2, 3), np.float32)}

    with pytest.warns(RuntimeWarning) as caught:
        load_targets(FunctionList([make_sample] * 3), transforms=[gl.transforms.RandomHorizontalFlip(1)])
    texts = [str(warning.message) for warning in caught]
    assert [text.split()[0] for text in texts] == ['sample[1]["keypoints"],', "the"]
    assert texts[1].endswith(EXIF_HINT)


@pytest.mark.parametrize(("make", "remark"), [
    (sample_with_boxes((WIDTH, HEIGHT), encode_image(8, "PNG")), f"an image of {SWAPPED}: {EXIF_HINT}"),
    (sample_with_boxes((WIDTH, HEIGHT), encode_image(3)), f"{SWAPPED}: height and width are swapped; rotate the"),
    (lambda: (gl.Encoded(encode_image(6)), {"boxes": torchvision_boxes()}), EXIF_HINT),
    (sample_with_boxes((WIDTH, HEIGHT), encode_image(), None), f"boxes of a sample are for an image of {SWAPPED}"),
    (sample_with_boxes((48, 80), encode_image()), "scale the targets as the image was scaled, or return the image"),
    (
        lambda: (np.zeros((20, 30, 3), np.uint8), {"boxes": gl.Boxes([[1, 2, 3, 4]], canvas_hw=(30, 20))}),
        "is decoded to 20×30: height and width are swapped; rotate the image or the targets",
    ),
])  # fmt: skip
def test_the_warning_of_boxes_for_a_wrong_image_size_names_the_remedy(make: Callable[[], Any], remark: str) -> None:
    with pytest.warns(RuntimeWarning, match=re.escape(remark)):
        load_targets(FunctionList([make]))


def test_a_mask_for_the_exif_rotated_size_of_an_image_is_refused_with_the_remedy(
    make_coco: Callable[..., gl.Coco],
) -> None:
    dataset = make_coco((WIDTH, HEIGHT))
    text = (
        'a mask must have the size of its image, 24×40 (height × width), but the mask sample[1]["masks"] has 40×24; '
        "its EXIF tag rotates it; use Loader(decode=gpuload.Decode(exif=True))"
    )
    with pytest.raises(gl.SampleError, match=re.escape(text)):
        load_targets(dataset)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(load_targets(dataset, decode=gl.Decode(exif=True))) == 30


def test_cached_boxes_keep_their_canvas_hw(make_coco: Callable[..., gl.Coco]) -> None:
    cached = gl.Cached(make_coco((WIDTH, HEIGHT), targets=()), 1 << 20)
    for _ in range(2):  # the sample is read from the file, and then from the cache
        _, target = cached[29]
        assert target["boxes"].canvas_hw == (WIDTH, HEIGHT)


FLIP = [gl.transforms.RandomHorizontalFlip()]
NORMALIZED = [[0.1, 0.2, 0.3, 0.4]]


def sample_with_target(target: Any) -> Callable[[], Any]:
    return lambda: (gl.Image(np.zeros((HEIGHT, WIDTH, 3), np.uint8)), {"target": target})


@pytest.mark.parametrize(("target", "warning"), [
    (
        gl.Boxes(NORMALIZED),
        'all boxes of sample[1]["target"] lie in 0 … 1 (0.1 … 0.4), but boxes are in pixels, and the image has '
        "24×40 (height × width): multiply by (width, height, width, height)",
    ),
    (gl.Boxes([[0.5, 0.5, 1, 1]], "cxcywh"), 'all boxes of sample[1]["target"] lie in 0 … 1 (0.5 … 1)'),
    (
        gl.Keypoints([[[0.5, 0.25], [np.nan, np.nan]]]),
        'all keypoints of sample[1]["target"] lie in 0 … 1 (0.25 … 0.5), but keypoints are in pixels, and the '
        "image has 24×40 (height × width): multiply by (width, height)",
    ),
    (
        gl.Boxes([[10, 10, 20, 20], [50, 10, 70, 20], [10, 40, 20, 80]], "xyxy"),
        '2 of 3 boxes of sample[1]["target"] lie outside their image, which has 24×40 (height × width), such as '
        "[50, 10, 70, 20] (left, top, right, bottom): if the image was resized, resize the boxes too; if not, "
        "check the format, which is 'xyxy'",
    ),
])  # fmt: skip
def test_targets_that_are_not_in_pixels_are_warned_of_once(target: Any, warning: str) -> None:
    data = FunctionList(map(sample_with_target, (gl.Boxes([[1, 2, 3, 4]]), target, target)))
    for transforms in (FLIP, [gl.transforms.Resize((8, 8))]):
        with pytest.warns(RuntimeWarning, match=starting(warning)) as caught:
            load_targets(data, transforms=transforms)
        assert len(caught) == 1


@pytest.mark.parametrize("target", [
    gl.Boxes([]),
    gl.Boxes([[0, 0, 1, 1]]),  # one pixel
    gl.Boxes([[0.5, 0.5, 1.5, 1.5]]),
    gl.Boxes([[25, 10, 50, 20], [10, 10, 20, 20], [50, 10, 70, 20]]),  # clipped to the image
    gl.Keypoints([[0, 0], [1, 0]]),
    gl.Keypoints([[100, 100], [200, 200]]),  # may leave the image
])  # fmt: skip
def test_targets_in_pixels_are_not_warned_of(target: Any) -> None:
    load_targets(FunctionList([sample_with_target(target)]), transforms=FLIP)


def test_targets_that_no_transform_reads_may_have_any_unit() -> None:
    data = FunctionList([sample_with_target(gl.Boxes(NORMALIZED))])
    load_targets(data, transforms=None)
    load_targets(data, transforms=[gl.transforms.ToDtype("float32", scale=True)])
    with pytest.warns(RuntimeWarning, match="lie in 0 … 1"):  # drops boxes of less than a pixel
        load_targets(data, transforms=[gl.transforms.SanitizeBoundingBoxes(labels_getter=None)])


def test_augment_warns_of_targets_that_are_not_in_pixels() -> None:
    augment = gl.Augment(FLIP)
    images = torch.zeros(2, 3, HEIGHT, WIDTH, dtype=torch.uint8)
    with pytest.warns(RuntimeWarning, match="lie in 0 … 1") as caught:
        augment(images, [gl.Boxes(NORMALIZED), gl.Boxes(NORMALIZED)])
    assert len(caught) == 1
    augment(images, [gl.Boxes(NORMALIZED), gl.Boxes(NORMALIZED)])
