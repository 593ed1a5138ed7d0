"""Targets of COCO's annotations: torchvision's own, as its wrapper for transforms makes them; and what is refused."""

from __future__ import annotations

import json
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lacking
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from originals import torchvision
from pictures import smooth_image
from PIL import Image as PILImage
from torch.utils.data import Subset

import gpuload as gl
from gpuload import transforms as T
from gpuload.datasets.coco import _unpacked


def exactly(text: str) -> str:
    return f"^{re.escape(text)}$"


IDS = [3, 5, 8, 11]  # the images' ids; the second has no annotation
SIZES = {key: (20 + key % 10, 30) for key in IDS}


def square(left: float, top: float, side: float) -> list[float]:
    return [left, top, left + side, top, left + side, top + side, left, top + side]


def runs(height: int, width: int) -> list[int]:
    """Uncompressed run lengths: columns 2 and 3."""
    return [2 * height, 2 * height, (width - 4) * height]


def objects() -> list[dict]:
    """Six objects: polygons, several of them, run lengths as a list and as text; keypoints for some."""
    from pycocotools import mask

    height, width = SIZES[8]
    text = mask.frPyObjects({"counts": runs(height, width), "size": [height, width]}, height, width)
    segmentations: list[tuple[int, Any]] = [
        (3, [square(2.5, 3, 9)]),
        (3, [square(1, 1, 4), square(12.25, 8, 7)]),
        (8, {"counts": runs(height, width), "size": [height, width]}),
        (8, {"counts": text["counts"].decode(), "size": [height, width]}),
        (8, [square(4, 4, 3.75)]),
        (11, [square(0, 0, 12)]),
    ]
    return [
        {
            "id": 100 + n,
            "image_id": key,
            "category_id": 1 + n % 3,
            "bbox": [1 + n, 0.1 * n, 7.3, 4],
            "area": 30.5 + n,
            "iscrowd": int(isinstance(segmentation, dict)),
            "segmentation": segmentation,
            **({"keypoints": [n, 2, 2, n + 1, 3.5, 1, 0, 0, 0]} if n % 2 else {}),
        }
        for n, (key, segmentation) in enumerate(segmentations)
    ]


Make = Callable[..., Any]


@pytest.fixture
def made(tmp_path: Path) -> Make:
    """Makes a CocoDetection of annotations, changed by a function."""
    lacking.require("pycocotools")
    vision = torchvision()
    for key, size in SIZES.items():
        PILImage.fromarray(smooth_image(*size, key)).save(tmp_path / f"{key}.jpg")

    def make(change: Callable[[list[dict]], Any] = lambda found: None, **more: Any) -> Any:
        found, file = objects(), tmp_path / "annotations.json"
        change(found)
        images = [
            {"id": key, "file_name": f"{key}.jpg", "height": SIZES[key][0], "width": SIZES[key][1]} for key in IDS
        ]
        categories = [{"id": number, "name": "abc"[number - 1]} for number in (1, 2, 3)]
        file.write_text(json.dumps({"images": images, "annotations": found, "categories": categories}))
        return vision.datasets.CocoDetection(tmp_path, str(file), **more)

    return make


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # pycocotools, in torchvision's
def test_targets_are_those_that_torchvision_makes(made: Make) -> None:
    theirs = made()
    keys = ("image_id", "boxes", "labels", "area", "iscrowd", "masks")
    oracle = torchvision().datasets.wrap_dataset_for_transforms_v2(theirs, target_keys=keys)
    wrapped = gl.wrap(theirs)
    assert len(wrapped) == len(IDS)
    for index, key in enumerate(IDS):
        (image, target), (_, expected) = wrapped[index], oracle[index]
        assert image.data == Path(image.source).read_bytes()
        assert target["image_id"] == expected["image_id"] == key
        assert target["boxes"].format == "xyxy"
        if key == 5:  # torchvision gives this one neither boxes nor masks
            assert target["boxes"].array.shape == (0, 4)
            assert target["masks"].array.shape == (0, *SIZES[5])
            assert target["keypoints"].array.shape == (0, 3, 2)
            assert [target[name].shape for name in ("labels", "area", "iscrowd")] == [(0,)] * 3
            continue
        np.testing.assert_array_equal(target["boxes"].array, expected["boxes"].numpy())
        np.testing.assert_array_equal(target["masks"].array, expected["masks"].numpy())
        np.testing.assert_array_equal(target["labels"], expected["labels"].numpy())
        assert target["area"].tolist() == expected["area"]
        assert target["iscrowd"].tolist() == expected["iscrowd"]
        assert {name: target[name].dtype.name for name in ("labels", "area", "iscrowd", "visibility")} == {
            "labels": "int64",
            "area": "float32",
            "iscrowd": "int64",
            "visibility": "int64",
        }
    assert wrapped[0][1]["keypoints"].array.tolist() == [[[0, 0]] * 3, [[1, 2], [2, 3.5], [0, 0]]]
    assert wrapped[0][1]["visibility"].tolist() == [[0, 0, 0], [2, 1, 0]]


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_a_list_of_dicts_without_a_collate_fn(made: Make, workers: int) -> None:
    transforms = [T.Resize((40, 60)), T.RandomHorizontalFlip(1)]
    with gl.Loader(gl.wrap(made()), 4, num_workers=workers, device="cpu", transforms=transforms) as loader:
        ((images, targets),) = loader
    assert images.shape == (4, 3, 40, 60)
    assert [target["image_id"] for target in targets] == IDS
    assert [len(target["boxes"]) for target in targets] == [2, 0, 3, 1]
    assert [tuple(target["masks"].shape) for target in targets] == [(n, 40, 60) for n in (2, 0, 3, 1)]
    assert [tuple(target["keypoints"].shape) for target in targets] == [(n, 3, 2) for n in (2, 0, 3, 1)]
    assert all(isinstance(value, torch.Tensor) for own in targets for key, value in own.items() if key != "image_id")
    # The square of the last image, 12 of 30 pixels wide, from the left border to the right one.
    assert targets[3]["masks"][0].any(dim=0).tolist() == [False] * 36 + [True] * 24


@pytest.mark.processes
def test_workers_import_no_torch_for_targets(made: Make) -> None:
    theirs = Subset(made(), range(4))
    wrapped = gl.wrap(theirs).dataset

    class Looked:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            image, target = wrapped[index]
            return image, {
                **target,
                "loaded": [name in sys.modules for name in ("torch", "torchvision", "pycocotools")],
            }

    with gl.Loader(Looked(), 4, num_workers=1, device="cpu", transforms=[T.Resize((8, 8))]) as loader:
        ((_, targets),) = loader
    assert [target["loaded"] for target in targets] == [[False, False, True]] * 4


def test_what_is_made_can_be_chosen(made: Make) -> None:
    theirs = made()
    names = {name: set(gl.wrap(theirs, annotations=chosen)[0][1]) for name, chosen in
             {"all": None, "none": (), "masks": ("masks",), "points": ["keypoints"]}.items()}  # fmt: skip
    always = {"image_id", "boxes", "labels", "area", "iscrowd"}
    assert names["none"] == always
    assert names["masks"] == always | {"masks"}
    assert names["points"] == always | {"keypoints", "visibility"}
    assert names["all"] == names["masks"] | names["points"]
    bare = made(lambda found: [one.pop(name) for one in found for name in ("segmentation", "area")])
    assert set(gl.wrap(bare)[1][1]) == {"image_id", "boxes", "labels", "iscrowd", "keypoints", "visibility"}
    lacking = made(lambda found: found[0].pop("area"))
    assert "area" not in gl.wrap(lacking)[2][1]


def test_raw_annotations_are_kept_where_asked_for_or_where_a_target_transform_takes_them(made: Make) -> None:
    theirs = made()
    assert list(gl.wrap(theirs, annotations="raw").targets) == [theirs._load_target(key) for key in IDS]
    theirs = made(target_transform=len)
    assert [gl.wrap(theirs)[i][1] for i in range(4)] == [2, 0, 3, 1]
    message = (
        "annotations=('masks',) makes targets of the annotations, but the dataset's target_transform takes them as "
        "they are; leave one of the two out"
    )
    with pytest.raises(TypeError, match=exactly(message)):
        gl.wrap(theirs, annotations=["masks"])


def test_crowds_can_be_left_out(made: Make) -> None:
    theirs = made()
    assert gl.wrap(theirs)[2][1]["iscrowd"].tolist() == [1, 1, 0]
    assert gl.wrap(theirs, crowds=False)[2][1]["labels"].tolist() == [2]
    assert [len(own) for own in gl.wrap(theirs, annotations="raw", crowds=False).targets] == [2, 0, 1, 1]
    with pytest.raises(TypeError, match=exactly("crowds must be True or False, got 0")):
        gl.wrap(theirs, crowds=0)


def test_targets_are_small_when_they_travel(made: Make) -> None:
    wrapped = gl.wrap(made(), annotations=())
    assert b"counts" not in pickle.dumps(wrapped)
    assert pickle.loads(pickle.dumps(wrapped))[2][1]["labels"].tolist() == wrapped[2][1]["labels"].tolist()
    assert [target["image_id"] for target in wrapped.targets[1:3]] == IDS[1:3]


RAW = "keep the annotations as they are, with gpuload.wrap(dataset, annotations='raw')"
NO_MASKS = "leave masks out, with gpuload.wrap(dataset, annotations=('keypoints',))"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found[3].pop("bbox"), f"the COCO annotation 103 has no bbox; {RAW}"),
        (lambda found: found[1].update(segmentation=[]), f"the COCO annotation 101 has no segmentation; {NO_MASKS}"),
        (
            lambda found: found[3].update(keypoints=[1, 2, 2]),
            "keypoints of COCO must be x, y and visibility of as many points for each object, got 9 numbers "
            "(annotation 105) and 3 numbers (annotation 103); leave keypoints out, with gpuload.wrap(dataset, "
            f"annotations=('masks',)), or {RAW}",
        ),
    ],
)
def test_annotations_that_lack_something_are_named(made: Make, change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=exactly(message)):
        gl.wrap(made(change))


def test_annotations_that_belong_to_nothing_are_counted(made: Make, tmp_path: Path) -> None:
    theirs = made(lambda found: found[1].update(image_id="3"))
    text = (
        f"1 of the 6 annotations of CocoDetection('{tmp_path}') belong to none of its images, and are left out: "
        "annotation 101 has the image_id '3', but the ids of images are 3, 5, 8, …. Write the id of one of the images "
        "there, or leave such annotations out of the file"
    )
    for options in ({}, {"annotations": "raw"}):
        with pytest.warns(UserWarning, match=exactly(text)) as caught:
            wrapped = gl.wrap(theirs, **options)
        assert caught[0].filename == __file__
        assert len(wrapped.targets[0] if options else wrapped.targets[0]["labels"]) == 1
    theirs = made(lambda found: found[1].update(category_id=7))
    with pytest.warns(UserWarning, match=r"^1 of the 6 annotations of .* belong to none of its categories: annotation"):
        gl.wrap(theirs)
    theirs = made(lambda found: [one.update(image_id=str(one["image_id"])) for one in found])
    with pytest.raises(
        ValueError, match=r"^none of the 6 annotations of .* belongs to one of its images: annotation 100"
    ):
        gl.wrap(theirs)


def test_a_subset_of_the_images_is_no_mistake(made: Make) -> None:
    theirs = made()
    theirs.ids = [8, 5]
    assert [len(target["labels"]) for _, target in gl.wrap(theirs)] == [3, 0]


def test_what_torchvision_wrapped_already_is_refused_with_what_to_wrap(made: Make) -> None:
    theirs = torchvision().datasets.wrap_dataset_for_transforms_v2(made())
    text = (
        "which torchvision's wrap_dataset_for_transforms_v2() made, and which decodes images; wrap the CocoDetection "
        "itself, as in gpuload.wrap(CocoDetection(…)), which has boxes, labels and masks in its targets too"
    )
    for dataset in (theirs, Subset(theirs, [0])):
        with pytest.raises(TypeError, match=f"{re.escape(text)}$"):
            gl.wrap(dataset)
    with pytest.raises(TypeError, match=f"{re.escape(text)}$"):
        gl.wrap(theirs, annotations=("masks",))


def test_images_without_a_size_are_named(made: Make) -> None:
    theirs = made()
    theirs.coco.imgs[8].pop("width")
    message = f"the COCO image 8 has the height {SIZES[8][0]} and the width None, but its masks need both; {NO_MASKS}"
    with pytest.raises(ValueError, match=exactly(message)):
        gl.wrap(theirs)
    assert "keypoints" in gl.wrap(theirs, annotations=("keypoints",))[2][1]


@pytest.mark.parametrize(
    ("segmentation", "message"),
    [
        ([[1, 2, 3, 4]], "the COCO annotation 102 has a polygon of 4 numbers, but one is x and y of at least three"),
        ([[1, 2, 3, 4, 5, 6, 7]], "the COCO annotation 102 has a polygon of 7 numbers"),
        (
            [[1, 2, 1e9, 4, 5, 6]],
            "the COCO annotation 102 has a polygon that reaches beyond 1048576 pixels, or holds NaN",
        ),
        ([[1, 2, float("nan"), 4, 5, 6]], "the COCO annotation 102 has a polygon that reaches beyond"),
        # Of run lengths that are too few, pycocotools fills the rest with whatever lay in memory.
        (
            {"counts": [3, 4], "size": [28, 30]},
            "the COCO annotation 102 has run lengths of 7 pixels with the size [28, 30], but its image has 28 × 30 = "
            "840",
        ),
        ({"counts": [900], "size": [28, 30]}, "has run lengths of 900 pixels with the size [28, 30]"),
        ({"counts": [850, -10], "size": [28, 30]}, "has run lengths of 840 pixels with the size [28, 30]"),
        ({"counts": [840], "size": [30, 28]}, "has run lengths of 840 pixels with the size [30, 28]"),
        ({"counts": "11", "size": [28, 30]}, "has run lengths of 2 pixels"),
        ({"counts": "zz~", "size": [28, 30]}, "run lengths of COCO are packed in a way that is not valid"),
        ({"counts": "", "size": [28, 30]}, "run lengths of COCO are packed in a way that is not valid"),
    ],
)
def test_masks_that_are_not_whole_are_refused(made: Make, segmentation: Any, message: str) -> None:
    wrapped = gl.wrap(made(lambda found: found[2].update(segmentation=segmentation)))
    with pytest.raises(ValueError, match=re.escape(message)):
        wrapped[2]


def test_without_pycocotools_the_error_says_what_to_do(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = gl.wrap(made())
    monkeypatch.setitem(sys.modules, "pycocotools", None)
    message = (
        "masks of COCO's polygons need pycocotools, which is not installed: pip install pycocotools, or leave masks "
        "out, with gpuload.wrap(dataset, annotations=())"
    )
    with pytest.raises(ModuleNotFoundError, match=exactly(message)):
        wrapped[0]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("masks", TypeError, "'raw', or some of 'masks' and 'keypoints', as in ('masks',), got 'masks'"),
        (("boxes", "masks"), ValueError, "as in ('masks',), got 'boxes'; boxes and labels are always there"),
    ],
)
def test_wrong_choices_are_refused(made: Make, given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        gl.wrap(made(), annotations=given)


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=40).filter(any))
def test_packed_run_lengths_are_read_as_pycocotools_packs_them(lengths: list[int]) -> None:
    from pycocotools import mask

    packed = mask.frPyObjects({"counts": lengths, "size": [1, sum(lengths)]}, 1, sum(lengths))
    assert _unpacked(packed["counts"]).tolist() == lengths
