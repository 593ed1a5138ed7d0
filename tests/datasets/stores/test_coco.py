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
    assert len(made(without_the_last)) == len(IDS) - 1, "the file is another one"


def without_the_last(found: dict) -> None:
    image = found["images"].pop()
    found["annotations"] = [one for one in found["annotations"] if one["image_id"] != image["id"]]


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


def change_of(kind: str, number: int | None, **fields: Any) -> Callable[[dict], None]:
    """Sets fields of one entry of a kind, or of all; those of functions to what these make of the entry's own."""

    def change(found: dict) -> None:
        for one in found[kind] if number is None else [found[kind][number]]:
            for name, value in fields.items():
                one[name] = value(one[name]) if callable(value) else value

    return change


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("image_id", str, "annotation 100 has the image_id '7', but the ids of images are 2, 3, 4, …. Write the id of"),
        ("image_id", lambda key: f"{key}.jpg", "annotation 100 has the image_id '7.jpg', but the ids of images are 2"),
        ("image_id", None, "annotation 100 has the image_id None, but the ids of images are 2, 3, 4, …"),
        ("category_id", lambda key: key + 10, "annotation 105 has the category_id 11, but the ids of categories are 0"),
    ],
)
def test_annotations_none_of_which_belongs_to_anything_are_refused(
    made: Callable[..., Coco], tmp_path: Path, field: str, value: Any, told: str
) -> None:
    kinds = {"image_id": "images", "category_id": "categories"}[field]
    text = f"none of the 22 annotations of '{tmp_path}/annotations.json' belongs to one of its {kinds}: {told}"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        made(change_of("annotations", None, **{field: value}))


@pytest.mark.parametrize("targets", [None, "raw"])
def test_annotations_of_no_image_are_counted(
    made: Callable[..., Coco], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, targets: Any
) -> None:
    monkeypatch.setenv("GPULOAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cached_module, "LEAST_BYTES", 10)

    def change(found: dict) -> None:
        found["annotations"][0]["image_id"] = "7"
        found["annotations"][3]["image_id"] = [3]

    text = (
        f"2 of the 22 annotations of '{tmp_path}/annotations.json' belong to none of its images, and are left out: "
        "annotation 100 has the image_id '7', but the ids of images are 2, 3, 4, …. Write the id of one of the images "
        "there, or leave such annotations out of the file"
    )
    with pytest.warns(UserWarning, match=exactly(text)) as caught:
        dataset = made(change, targets=targets)
    assert len(caught) == 1
    with pytest.warns(UserWarning, match=exactly(text)) as caught:
        again = Coco(tmp_path, tmp_path / "annotations.json", targets=targets)
    assert caught[0].filename == __file__
    assert len(again) == len(dataset) == len(IDS)
    lengths = [len(target if targets else target["labels"]) for _, target in dataset]
    assert sum(lengths) == 20


def test_joined_files_whose_categories_differ_are_warned_of(made: Callable[..., Coco]) -> None:
    one, two = made(targets=()), made(change_of("categories", 2, name="dog"), targets=())
    with pytest.warns(UserWarning, match=r"the label 2 is 'c2' in the first and 'dog' in the second\. Give both"):
        _ = one + two
    fewer = made(lambda found: found["categories"].insert(0, {"id": 9, "name": "cow"}), targets=())
    assert len(one + fewer) == 2 * len(IDS), "an id more is no contradiction"


def test_annotations_of_no_category_are_counted(made: Callable[..., Coco]) -> None:
    text = (
        r"^1 of the 22 annotations of .* belong to none of its categories: annotation 101 has the category_id 9, but "
        r"the ids of categories are 0, 1, 2, …\. Write the id"
    )
    with pytest.warns(UserWarning, match=text):
        dataset = made(change_of("annotations", 1, category_id=9))
    assert dataset[1][1]["labels"].tolist() == [9, 1]
    assert len(made(lambda found: found.pop("categories"))) == len(IDS), "without categories, ids are all there is"
    assert made(change_of("annotations", None, category_id=str))[1][1]["labels"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            change_of("annotations", 1, category_id=2**70),
            "the COCO annotation 101 has the category_id 1180591620717411303424, expected a whole number that fits "
            f"into 64 bits; {RAW}",
        ),
        (change_of("annotations", 1, category_id=1.5), "the COCO annotation 101 has the category_id 1.5, expected a"),
        (change_of("annotations", 1, category_id="cat"), "the COCO annotation 101 has the category_id 'cat', expected"),
        (change_of("annotations", 1, iscrowd=2**70), "the COCO annotation 101 has the iscrowd 118059162071741130342"),
        (change_of("annotations", 1, area="large"), f"annotation 101 has the area 'large', expected a number; {RAW}"),
        (change_of("annotations", 1, bbox=["1", "2", "3", "4"]), "101 of image 3 has the box ['1', '2', '3', '4'], e"),
        (change_of("annotations", 1, bbox=5), "the COCO annotation 101 of image 3 has the box 5, expected left, top"),
        (change_of("annotations", 1, bbox=[float("nan"), 1, 2, 3]), "annotation 101 of image 3 has the box [nan, 1, 2"),
        (change_of("annotations", 1, bbox=[1e300, 1, 2, 3]), "annotation 101 of image 3 has the box [1e+300, 1, 2"),
        (change_of("annotations", 1, keypoints=["a"] * 6), "the COCO annotation 101 has the keypoints ['a', 'a', 'a',"),
        (
            change_of("annotations", 1, keypoints=5),
            "the COCO annotation 101 has the keypoints 5, expected a list of nu",
        ),
        (change_of("images", 1, id=2**70), "lacks an integer id or a file_name: {'id': 1180591620717411303424"),
        (change_of("images", 1, file_name="a\0.jpg"), "image 3 has the file name 'a\\x00.jpg', which no file can have"),
        (change_of("images", 1, file_name="\ud800.jpg"), "image 3 has the file name '\\ud800.jpg', which no file can"),
        (change_of("categories", 1, id=[1]), "one of the categories of"),
        (change_of("categories", 1, id=0), "has two categories with the id 0, 'c0' and 'c1'; an id names one category"),
    ],
)
def test_entries_that_hold_something_else_are_named(made: Callable[..., Coco], change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        made(change)


@pytest.mark.parametrize(
    ("segmentation", "message"),
    [
        ({"x": 1}, "has the segmentation {'x': 1}, expected polygons, or run lengths as counts and size: 'counts'"),
        (5, "has the segmentation 5, expected polygons, or run lengths as counts and size: "),
        (
            {"counts": ["a"], "size": [24, 32]},
            "has the segmentation {'counts': ['a'], 'size': [24, 32]}, expected poly",
        ),
        ({"counts": 5, "size": [24, 32]}, "has the segmentation {'counts': 5, 'size': [24, 32]}, expected polygons"),
        ([1, 2, 3, 4, 5, 6], "has the polygon 1, expected a list of numbers below 1048576, in a list of such polygons"),
        ([["a"] * 6], "has the polygon ['a', 'a', 'a', 'a', 'a', 'a'], expected a list of numbers"),
        ([[10**400] * 6], "has a polygon that reaches beyond 1048576 pixels, or holds NaN"),
    ],
)
def test_masks_of_something_else_are_named(made: Callable[..., Coco], segmentation: Any, message: str) -> None:
    dataset = made(change_of("annotations", 1, segmentation=segmentation))
    with pytest.raises(ValueError, match=f"^{re.escape(f'the COCO annotation 101 {message}')}"):
        dataset[1]


def test_null_is_as_if_the_field_were_not_there(made: Callable[..., Coco]) -> None:
    target = made(change_of("annotations", 1, area=None, iscrowd=None))[0][1]
    assert target.keys() == {"image_id", "boxes", "labels", "masks", "keypoints", "visibility"}


def test_boxes_know_the_size_that_the_file_says(made: Callable[..., Coco]) -> None:
    assert made()[1][1]["boxes"].canvas_hw == (32, 32)
    assert made(change_of("images", None, height="24"), targets=())[1][1]["boxes"].canvas_hw is None
