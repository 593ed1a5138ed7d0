"""COCO's annotations read without pycocotools: order, targets, and which entries are refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lacking
import numpy as np
import pytest
from stored import check_loader, jpegs

import gpuload as gl
from gpuload.datasets.stores import cached as cached_module
from gpuload.datasets.stores.coco import Coco

IDS = [7, 3, 11, 5, 9, 2, 4, 6, 8, 10, 12, 14]  # of the images, in the file's order; image 5 has no annotation


def exactly(text: str) -> str:
    return f"^{re.escape(text)}$"


def content() -> dict[str, Any]:
    """Two objects in each image but one; runs as masks, which need no pycocotools."""
    images = [
        {"id": key, "file_name": f"{key}.jpg", "height": 24 + 8 * (number % 2), "width": 32}
        for number, key in enumerate(IDS)
    ]
    annotations = []
    for number, image in enumerate(images * 2):
        if image["id"] == 5:
            continue
        height, width = image["height"], image["width"]
        runs = {
            "counts": [height * (number % 5), 3 * height, height * (width - 3 - number % 5)],
            "size": [height, width],
        }
        annotations.append(
            {
                "id": 100 + number,
                "image_id": image["id"],
                "category_id": number % 4,
                "bbox": [number, 1, 5, 4.5],
                "area": 22.5,
                "iscrowd": int(number == 2),
                "segmentation": runs,
                "keypoints": [number, 2, 2, 0, 0, 0],
            }
        )
    return {"images": images, "annotations": annotations, "categories": [{"id": n, "name": f"c{n}"} for n in range(4)]}


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Coco]:
    """Makes a dataset of annotations, changed by a function."""
    for key, data in zip(IDS, jpegs(), strict=True):
        (tmp_path / f"{key}.jpg").write_bytes(data)

    def make(change: Callable[[dict], Any] = lambda found: None, **options: Any) -> Coco:
        found = content()
        change(found)
        (tmp_path / "annotations.json").write_text(json.dumps(found))
        return Coco(tmp_path, tmp_path / "annotations.json", **options)

    return make


def test_images_come_by_their_ids_with_or_without_annotations(made: Callable[..., Coco], tmp_path: Path) -> None:
    dataset = made()
    assert dataset.ids.tolist() == sorted(IDS)
    assert len(dataset) == len(IDS)
    assert dataset.categories == {0: "c0", 1: "c1", 2: "c2", 3: "c3"}
    image, target = dataset[1]
    assert image == gl.Encoded(jpegs()[IDS.index(3)], "RGB", f"{tmp_path}/3.jpg")
    assert target["image_id"] == 3
    assert target["boxes"].array.tolist() == [[1, 1, 6, 5.5], [13, 1, 18, 5.5]]
    assert target["labels"].tolist() == [1, 1]
    assert (target["masks"].array.shape, target["masks"].array[0].sum()) == ((2, 32, 32), 3 * 32)
    assert target["keypoints"].array.tolist() == [[[1, 2], [0, 0]], [[13, 2], [0, 0]]]
    empty = dataset[sorted(IDS).index(5)][1]
    assert (empty["boxes"].array.shape, empty["masks"].array.shape) == ((0, 4), (0, 32, 32))
    assert repr(dataset) == f"Coco('{tmp_path}': 12 images)"


def test_what_targets_are(made: Callable[..., Coco]) -> None:
    assert set(made(targets=())[0][1]) == {"image_id", "boxes", "labels", "area", "iscrowd"}
    raw = made(targets="raw")
    assert raw[1][1] == [one for one in content()["annotations"] if one["image_id"] == 3]
    place = sorted(IDS).index(11)
    assert [len(made(crowds=crowds)[place][1]["labels"]) for crowds in (True, False)] == [2, 1]
    with pytest.raises(
        ValueError, match=r"^targets must be None, 'raw', or some of 'masks' and 'keypoints', .*'boxes'"
    ):
        made(targets=("boxes",))
    with pytest.raises(TypeError, match=r"^crowds must be True or False, got 1$"):
        made(crowds=1)


@pytest.mark.slow
def test_the_samples_are_those_of_torchvisions_dataset(made: Callable[..., Coco], tmp_path: Path) -> None:
    lacking.require("pycocotools")
    from originals import torchvision

    dataset = made()
    wrapped = gl.wrap(torchvision().datasets.CocoDetection(tmp_path, str(tmp_path / "annotations.json")))
    assert len(dataset) == len(wrapped)
    for (image, target), (other, expected) in zip(dataset, wrapped, strict=True):
        assert image == other
        assert target.keys() == expected.keys()
        for name, value in target.items():
            mine, theirs = (getattr(one, "array", one) for one in (value, expected[name]))
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.processes
def test_batches_are_those_of_the_images(made: Callable[..., Coco]) -> None:
    dataset = made()

    class Plain:
        """Its images with a number for a target, as batches are compared here."""

        def __len__(self) -> int:
            return len(dataset)

        def __getitem__(self, index: int) -> Any:
            image, target = dataset[index]
            return image, target["boxes"].array.sum()

    images = [jpegs()[IDS.index(key)] for key in sorted(IDS)]
    check_loader(Plain(), images, [target["boxes"].array.sum() for _, target in dataset])
    boxes = [batch[1] for batch in gl.Loader(dataset, 5, num_workers=0, device="cpu", ragged="list")]
    assert [target["image_id"] for targets in boxes for target in targets] == sorted(IDS)


def test_annotations_are_kept_for_the_next_time(
    made: Callable[..., Coco], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def alike(one: Coco, other: Coco) -> bool:
        pairs = zip(one, other, strict=True)
        return all(a == b and json.dumps(told(c)) == json.dumps(told(d)) for (a, c), (b, d) in pairs)

    def told(target: Any) -> Any:
        return {name: getattr(value, "array", np.array(value)).tolist() for name, value in target.items()}

    monkeypatch.setenv("GPULOAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cached_module, "LEAST_BYTES", 10)
    for options in ({}, {"targets": ("masks",)}, {"crowds": False}):
        first = made(**options)
        with monkeypatch.context() as patch:
            patch.setattr("gpuload.datasets.stores.coco._parts", None)
            again = Coco(tmp_path, tmp_path / "annotations.json", **options)
        assert alike(first, again)
        assert (again.categories, list(again.paths)) == (first.categories, list(first.paths))
    raw = made(targets="raw").targets
    with monkeypatch.context() as patch:
        patch.setattr("gpuload.datasets.stores.coco._parts", None)
        assert list(Coco(tmp_path, tmp_path / "annotations.json", targets="raw").targets) == list(raw)
    assert len(made(lambda found: found["images"].pop())) == len(IDS) - 1, "the file is another one"


@pytest.mark.processes
def test_it_needs_neither_torchvision_nor_pycocotools(made: Callable[..., Coco], tmp_path: Path) -> None:
    made()
    program = (
        "import sys; sys.modules |= dict.fromkeys(['torch', 'torchvision', 'pycocotools'])\n"
        "from gpuload.datasets import Coco\n"
        "print(len(Coco(sys.argv[1], sys.argv[2])[0][1]['masks'].array))"
    )
    command = [sys.executable, "-c", program, str(tmp_path), str(tmp_path / "annotations.json")]
    assert subprocess.run(command, capture_output=True, check=True, text=True).stdout == "2\n"


def test_a_missing_image_is_named(made: Callable[..., Coco], tmp_path: Path) -> None:
    dataset = made()
    (tmp_path / "3.jpg").unlink()
    with pytest.raises(FileNotFoundError) as caught:
        dataset[1]
    assert str(caught.value) == (
        f"[Errno 2] image 3 of '{tmp_path}/annotations.json' is not in the folder; copy it there, or leave it out of "
        f"the file: '{tmp_path}/3.jpg'"
    )
    assert dataset[0][1]["image_id"] == 2


RAW = "keep the annotations as they are, with gpuload.Coco(…, targets='raw')"


@pytest.mark.parametrize("box", [[3, 4, -5, 6], [3, 4, 5, -0.5], [3, 4, float("nan"), 5], [3, 4, 5]])
def test_a_box_of_negative_size_is_named(made: Callable[..., Coco], box: list[float]) -> None:
    message = (
        f"the COCO annotation 101 of image 3 has the box {box}, expected left, top, width and height, neither of them "
        f"negative; mend the file, or {RAW}"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        made(lambda found: found["annotations"][1].update(bbox=box))


def test_a_polygon_of_two_points_is_named(made: Callable[..., Coco]) -> None:
    dataset = made(lambda found: found["annotations"][1].update(segmentation=[[1, 2, 3, 4]]))
    message = "the COCO annotation 101 has a polygon of 4 numbers, but one is x and y of at least three points"
    with pytest.raises(ValueError, match=exactly(message)):
        dataset[1]
    assert dataset[0][1]["image_id"] == 2


def twice(found: dict) -> None:
    found["images"][4]["id"] = found["images"][1]["id"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found["annotations"][1].pop("bbox"), f"the COCO annotation 101 has no bbox; {RAW}"),
        (
            lambda found: found["annotations"][1].pop("segmentation"),
            "the COCO annotation 101 has no segmentation; leave masks out, with gpuload.Coco(…, targets=('keypoints',",
        ),
        (twice, "lists two images with the id 3; an id names one image"),
        (
            lambda found: found.pop("annotations"),
            "has no lists of images and annotations; expected COCO's format, as in",
        ),
        (lambda found: found["images"][1].pop("file_name"), "lacks an integer id or a file_name: {'id': 3, 'height'"),
        (lambda found: found["annotations"].append(3), "one of the annotations of "),
        (lambda found: found["images"][1].update(file_name="../3.jpg"), "file name '../3.jpg', which leads out of"),
    ],
)
def test_files_that_are_not_cocos_format(made: Callable[..., Coco], change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        made(change)


def test_a_file_that_is_cut_off_or_missing(made: Callable[..., Coco], tmp_path: Path) -> None:
    made()
    path = tmp_path / "annotations.json"
    path.write_text(path.read_text()[:500])
    with pytest.raises(ValueError, match=r"annotations.json' is no JSON, or is cut off: "):
        Coco(tmp_path, path)
    with pytest.raises(FileNotFoundError, match=r"none.json' does not exist; expected COCO's annotations, a JSON file"):
        Coco(tmp_path, tmp_path / "none.json")
