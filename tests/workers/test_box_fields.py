"""Images of another size than their targets were made for (COCO's JSON, `Boxes(canvas_hw=…)`, torchvision's boxes),
and targets in another unit than pixels."""

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
from helpers.peers import torchvision
from PIL import Image as PILImage

import gpuload as gl

HEIGHT, WIDTH = 24, 40  # of images as they are stored
TURNED = "its EXIF tag rotates it; use Loader(decode=gpuload.Decode(exif=True))"


def exactly(text: str) -> str:
    return f"^{re.escape(text)}$"


def jpeg(orientation: int = 1, kind: str = "JPEG") -> bytes:
    file, exif = io.BytesIO(), PILImage.Exif()
    exif[0x0112] = orientation
    PILImage.fromarray(smooth_image(HEIGHT, WIDTH, 3)).save(file, kind, exif=exif)
    return file.getvalue()


class Items(list[Callable[[], Any]]):
    """A dataset of what these functions return."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index)()


def boxes_of(dataset: Any, **options: Any) -> list[Any]:
    options = {"num_workers": 0, "device": "cpu", "transforms": [gl.transforms.Resize((8, 8))], **options}
    with gl.Loader(dataset, 1, ragged="list", **options) as loader:
        return [target for _, targets in loader for target in targets]


def sample(canvas_hw: Any, data: bytes, source: str | None = "a.jpg") -> Callable[[], Any]:
    return lambda: (gl.Encoded(data, source=source), {"boxes": gl.Boxes([[2, 3, 10, 20]], canvas_hw=canvas_hw)})


@pytest.fixture
def coco(tmp_path: Path) -> Callable[..., gl.Coco]:
    """Makes a dataset of thirty images of which one, the last, says that EXIF turns it."""

    def make(size_hw: tuple[int, int], **options: Any) -> gl.Coco:
        images, annotations = [], []
        for number in range(30):
            last = number == 29
            (tmp_path / f"{number}.jpg").write_bytes(jpeg(6 if last else 1))
            height, width = size_hw if last else (HEIGHT, WIDTH)
            runs = {"counts": [height * width], "size": [height, width]}
            images.append({"id": number, "file_name": f"{number}.jpg", "height": height, "width": width})
            annotations.append(
                {"id": number, "image_id": number, "category_id": 1, "bbox": [1, 2, 3, 4], "segmentation": runs}
            )
        found = {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "cat"}]}
        (tmp_path / "annotations.json").write_text(json.dumps(found))
        return gl.Coco(tmp_path, tmp_path / "annotations.json", **options)

    return make


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_boxes_for_the_exif_rotated_size_of_an_image_are_warned_of_once(
    coco: Callable[..., gl.Coco], tmp_path: Path, workers: int
) -> None:
    dataset = coco((WIDTH, HEIGHT), targets=())
    text = (
        f"the boxes of '{tmp_path}/29.jpg' are for an image of 40×24 (height × width), but it is decoded to 24×40: "
        f"{TURNED}"
    )
    with pytest.warns(RuntimeWarning, match=exactly(text)) as caught:
        assert len(boxes_of(dataset, num_workers=workers)) == 30
    assert len(caught) == 1
    assert len(boxes_of(dataset, num_workers=workers, decode=gl.Decode(exif=True))) == 30
    stored = coco((HEIGHT, WIDTH), targets=())
    assert len(boxes_of(stored)) == 30
    with pytest.warns(RuntimeWarning, match="the targets are for the image as it is stored; use Loader"):
        boxes_of(stored, decode=gl.Decode(exif=True))


def test_boxes_of_another_size_are_warned_of_for_the_first_image_only() -> None:
    data = Items([sample((5, 5), jpeg(), name) for name in ("a.jpg", "b.jpg", "c.jpg")])
    with gl.Loader(data, 2, num_workers=0, device="cpu", ragged="list") as loader:
        with pytest.warns(RuntimeWarning, match=r"^the boxes of 'a.jpg' are for an image of 5×5 ") as caught:
            list(loader)
        assert len(caught) == 1
        list(loader)  # once is enough


def test_boxes_of_another_size_are_warned_of_next_to_unrecognized_targets() -> None:
    def both() -> Any:
        image, target = sample((WIDTH, HEIGHT), jpeg(6))()
        return image, {**target, "keypoints": np.zeros((1, 2, 3), np.float32)}

    with pytest.warns(RuntimeWarning) as caught:
        boxes_of(Items([both, both, both]), transforms=[gl.transforms.RandomHorizontalFlip(1)])
    texts = [str(one.message) for one in caught]
    assert [text.split()[0] for text in texts] == ['sample[1]["keypoints"],', "the"]
    assert texts[1].endswith(TURNED)


@pytest.mark.parametrize(
    ("make", "remark"),
    [
        (
            sample((WIDTH, HEIGHT), jpeg(8, "PNG")),
            f"the boxes of 'a.jpg' are for an image of 40×24 (height × width), but it is decoded to 24×40: {TURNED}",
        ),
        (sample((WIDTH, HEIGHT), jpeg(3)), "decoded to 24×40: height and width are swapped; rotate the image or the"),
        (sample((WIDTH, HEIGHT), jpeg(), None), "the boxes of a sample are for an image of 40×24 (height × width)"),
        (sample((48, 80), jpeg()), "scale the targets as the image was scaled, or return the image that they were"),
        (
            lambda: (np.zeros((20, 30, 3), np.uint8), {"boxes": gl.Boxes([[1, 2, 3, 4]], canvas_hw=(30, 20))}),
            "is decoded to 20×30: height and width are swapped; rotate the image or the targets",
        ),
    ],
)
def test_the_warning_of_boxes_of_another_size_names_the_remedy(make: Callable[[], Any], remark: str) -> None:
    with pytest.warns(RuntimeWarning, match=re.escape(remark)):
        boxes_of(Items([make]))


def test_torchvision_boxes_of_another_size_are_warned_of() -> None:
    boxes = torchvision().tv_tensors.BoundingBoxes([[1, 2, 3, 4]], format="XYXY", canvas_size=(WIDTH, HEIGHT))
    with pytest.warns(RuntimeWarning, match=f"{re.escape(TURNED)}$"):
        boxes_of(Items([lambda: (gl.Encoded(jpeg(6)), {"boxes": boxes})]))


def test_a_mask_for_the_exif_rotated_size_of_an_image_is_refused_with_the_remedy(coco: Callable[..., gl.Coco]) -> None:
    dataset = coco((WIDTH, HEIGHT))
    text = (
        'a mask must have the size of its image, 24×40 (height × width), but the mask sample[1]["masks"] has 40×24; '
        "its EXIF tag rotates it; use Loader(decode=gpuload.Decode(exif=True))"
    )
    with pytest.raises(gl.SampleError, match=re.escape(text)):
        boxes_of(dataset)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(boxes_of(dataset, decode=gl.Decode(exif=True))) == 30


def test_cached_boxes_keep_their_canvas_hw(coco: Callable[..., gl.Coco]) -> None:
    cached = gl.Cached(coco((WIDTH, HEIGHT), targets=()), 1 << 20)
    assert [cached[29][1]["boxes"].canvas_hw for _ in range(2)] == [(WIDTH, HEIGHT)] * 2


FLIP = [gl.transforms.RandomHorizontalFlip()]
NORMALIZED = [[0.1, 0.2, 0.3, 0.4]]


def sample_with(target: Any) -> Callable[[], Any]:
    return lambda: (gl.Image(np.zeros((HEIGHT, WIDTH, 3), np.uint8)), {"target": target})


@pytest.mark.parametrize(
    ("target", "warning"),
    [
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
    ],
)
def test_targets_in_another_unit_than_pixels_are_warned_of_once(target: Any, warning: str) -> None:
    data = Items([sample_with(gl.Boxes([[1, 2, 3, 4]])), sample_with(target), sample_with(target)])
    for transforms in (FLIP, [gl.transforms.Resize((8, 8))]):
        with pytest.warns(RuntimeWarning, match=f"^{re.escape(warning)}") as caught:
            boxes_of(data, transforms=transforms)
        assert len(caught) == 1


@pytest.mark.parametrize(
    "target",
    [
        gl.Boxes([]),
        gl.Boxes([[0, 0, 1, 1]]),  # one pixel
        gl.Boxes([[0.5, 0.5, 1.5, 1.5]]),
        gl.Boxes([[25, 10, 50, 20], [10, 10, 20, 20], [50, 10, 70, 20]]),  # clipped to the image
        gl.Keypoints([[0, 0], [1, 0]]),
        gl.Keypoints([[100, 100], [200, 200]]),  # may leave the image
    ],
)
def test_targets_in_pixels_are_not_warned_of(target: Any) -> None:
    boxes_of(Items([sample_with(target)]), transforms=FLIP)


def test_targets_that_no_transform_reads_may_have_any_unit() -> None:
    data = Items([sample_with(gl.Boxes(NORMALIZED))])
    boxes_of(data, transforms=None)
    boxes_of(data, transforms=[gl.transforms.ToDtype("float32", scale=True)])
    with pytest.warns(RuntimeWarning, match="lie in 0 … 1"):  # drops boxes of less than a pixel
        boxes_of(data, transforms=[gl.transforms.SanitizeBoundingBoxes(labels_getter=None)])


def test_augment_warns_of_targets_in_another_unit_than_pixels() -> None:
    augment = gl.Augment(FLIP)
    images = torch.zeros(2, 3, HEIGHT, WIDTH, dtype=torch.uint8)
    with pytest.warns(RuntimeWarning, match="lie in 0 … 1") as caught:
        augment(images, [gl.Boxes(NORMALIZED), gl.Boxes(NORMALIZED)])
    assert len(caught) == 1
    augment(images, [gl.Boxes(NORMALIZED), gl.Boxes(NORMALIZED)])
