"""COCO: targets of wrapped torchvision datasets and of `Coco`, and errors about annotation files."""

from __future__ import annotations

import json
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from helpers import lacking
from helpers.both_loaders import alike, gpuload_batches
from helpers.generated_images import smooth_image
from helpers.jpeg_dataset import check_loader, jpegs
from helpers.map_datasets import MapDataset
from helpers.patterns import exactly, starting
from helpers.peers import torchvision
from helpers.programs import run_python
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as PILImage
from torch.utils.data import Subset

import gpuload as gl
from gpuload import transforms as T
from gpuload.datasets.coco import Coco, JsonLists, _unpack_runs

IDS = [3, 5, 8, 11]  # of images; image 5 has no annotation
SIZES = {key: (20 + key % 10, 30) for key in IDS}


def square_polygon(left: float, top: float, side: float) -> list[float]:
    return [left, top, left + side, top, left + side, top + side, left, top + side]


def target_at(dataset: Any, index: int) -> Any:
    _, target = dataset[index]
    return target


def run_lengths(height: int, width: int) -> list[int]:
    """Return the uncompressed run lengths of columns 2 and 3."""
    return [2 * height, 2 * height, (width - 4) * height]


def make_annotations() -> list[dict]:
    """Make six objects, with one or two polygons, or run lengths as a list or a string; every second has keypoints."""
    from pycocotools import mask

    height, width = SIZES[8]
    packed_runs = mask.frPyObjects({"counts": run_lengths(height, width), "size": [height, width]}, height, width)
    segmentations: list[tuple[int, Any]] = [
        (3, [square_polygon(2.5, 3, 9)]),
        (3, [square_polygon(1, 1, 4), square_polygon(12.25, 8, 7)]),
        (8, {"counts": run_lengths(height, width), "size": [height, width]}),
        (8, {"counts": packed_runs["counts"].decode(), "size": [height, width]}),
        (8, [square_polygon(4, 4, 3.75)]),
        (11, [square_polygon(0, 0, 12)]),
    ]
    return [
        {
            "id": 100 + n,
            "image_id": key,
            "category_id": 1 + n % 3,
            "bbox": [1 + n, 0.1 * n, 7.3, 4],
            "area": 30.5 + n,
            "iscrowd": int(isinstance(segmentation, dict)),
            "caption": f"a pícture, {n}",
            "segmentation": segmentation,
            **({"keypoints": [n, 2, 2, n + 1, 3.5, 1, 0, 0, 0]} if n % 2 else {}),
        }
        for n, (key, segmentation) in enumerate(segmentations)
    ]


Make = Callable[..., Any]
MakeCoco = Callable[..., Coco]


@pytest.fixture
def make_detection(tmp_path: Path) -> Make:
    """A function that makes a CocoDetection, or a dataset of class `kind`, from an annotation file. `change` is called
    with the annotations before they are written; `images` replaces the images."""
    names = {key: f"sub/{key}.jpg" if key == 11 else f"{key}.jpg" for key in IDS}
    (tmp_path / "sub").mkdir()
    for key, size in SIZES.items():
        PILImage.fromarray(smooth_image(*size, key)).save(tmp_path / names[key])

    def make(
        change: Callable[[list[dict]], Any] = lambda annotations: None,
        kind: type | str = "CocoDetection",
        images: list[dict] | None = None,
        **options: Any,
    ) -> Any:
        annotations, file = make_annotations(), tmp_path / "annotations.json"
        change(annotations)
        images = images or [
            {"id": key, "file_name": names[key], "height": SIZES[key][0], "width": SIZES[key][1]} for key in IDS[::-1]
        ]
        categories = [{"id": number, "name": "abc"[number - 1]} for number in (1, 2, 3)]
        file.write_text(json.dumps({"images": images, "annotations": annotations, "categories": categories}))
        dataset_class = getattr(torchvision().datasets, kind) if isinstance(kind, str) else kind
        return dataset_class(tmp_path, str(file), **options)

    return make


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # pycocotools, in torchvision's
def test_wrap_coco_targets_equal_torchvisions(make_detection: Make) -> None:
    detection = make_detection()
    keys = ("image_id", "boxes", "labels", "area", "iscrowd", "masks")
    torchvision_samples = torchvision().datasets.wrap_dataset_for_transforms_v2(detection, target_keys=keys)
    wrapped = gl.wrap(detection)
    assert len(wrapped) == len(IDS)
    for index, key in enumerate(IDS):
        (image, target), (_, expected) = wrapped[index], torchvision_samples[index]
        assert image.data == Path(image.source).read_bytes()
        assert target["image_id"] == expected["image_id"] == key
        assert target["boxes"].format == "xyxy"
        if key == 5:  # without annotations, torchvision's target has neither boxes nor masks
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
        dtypes = [target[name].dtype.name for name in ("labels", "area", "iscrowd", "visibility")]
        assert dtypes == ["int64", "float32", "int64", "int64"]
    target = target_at(wrapped, 0)
    assert target["keypoints"].array.tolist() == [[[0, 0]] * 3, [[1, 2], [2, 3.5], [0, 0]]]
    assert target["visibility"].tolist() == [[0, 0, 0], [2, 1, 0]]


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_wrap_coco_batches_are_lists_of_dicts_without_a_collate_fn(make_detection: Make, workers: int) -> None:
    transforms = [T.Resize((40, 60)), T.RandomHorizontalFlip(1)]
    [(images, targets)] = gpuload_batches(gl.wrap(make_detection()), 4, num_workers=workers, transforms=transforms)
    assert images.shape == (4, 3, 40, 60)
    assert [target["image_id"] for target in targets] == IDS
    assert [len(target["boxes"]) for target in targets] == [2, 0, 3, 1]
    assert [tuple(target["masks"].shape) for target in targets] == [(n, 40, 60) for n in (2, 0, 3, 1)]
    assert [tuple(target["keypoints"].shape) for target in targets] == [(n, 3, 2) for n in (2, 0, 3, 1)]
    values = [value for target in targets for key, value in target.items() if key != "image_id"]
    assert {type(value) for value in values} == {torch.Tensor}
    # The last image's square covers the left 12 of 30 pixels: flipped and resized, the right 24 of 60.
    assert targets[3]["masks"][0].any(dim=0).tolist() == [False] * 36 + [True] * 24


@pytest.mark.fresh
@pytest.mark.processes
def test_wrap_coco_workers_import_no_torch_for_targets(make_detection: Make) -> None:
    wrapped = gl.wrap(Subset(make_detection(), range(4))).dataset

    def add_imports(index: int) -> Any:
        image, target = wrapped[index]
        return image, {**target, "loaded": [name in sys.modules for name in ("torch", "torchvision", "pycocotools")]}

    transforms = [T.Resize((8, 8))]
    [(_, targets)] = gpuload_batches(MapDataset(add_imports, 4), 4, num_workers=1, transforms=transforms)
    assert [target["loaded"] for target in targets] == [[False, False, True]] * 4


def test_wrap_coco_argument_annotations_selects_the_targets(make_detection: Make) -> None:
    detection = make_detection()
    targets = {name: set(target_at(gl.wrap(detection, annotations=names), 0)) for name, names in
             {"all": None, "none": (), "masks": ("masks",), "points": ["keypoints"]}.items()}  # fmt: skip
    default_fields = {"image_id", "boxes", "labels", "area", "iscrowd"}
    assert targets["none"] == default_fields
    assert targets["masks"] == default_fields | {"masks"}
    assert targets["points"] == default_fields | {"keypoints", "visibility"}
    assert targets["all"] == targets["masks"] | targets["points"]
    unsegmented = make_detection(
        lambda annotations: [annotation.pop(name) for annotation in annotations for name in ("segmentation", "area")]
    )
    assert set(target_at(gl.wrap(unsegmented), 1)) == targets["points"] - {"area"}


def test_wrap_coco_keeps_raw_annotations_on_request_but_not_with_masks(make_detection: Make) -> None:
    detection = make_detection()
    [(_, annotations)] = gpuload_batches(gl.wrap(detection, annotations="raw"), 4, transforms=[T.Resize((8, 8))])
    assert (annotations, type(annotations[0])) == ([detection._load_target(key) for key in IDS], list)
    message = (
        "annotations=('masks',) converts the annotations to targets, but the dataset's target_transform expects "
        "the raw annotations; remove one of the two"
    )
    with pytest.raises(TypeError, match=exactly(message)):
        gl.wrap(make_detection(target_transform=len), annotations=["masks"])


@pytest.mark.parametrize(
    ("area", "is_json"),
    [
        *((2.5, True), (float("nan"), True), (np.float64(2.5), False), (np.float32(1), False)),
        *(((1, 2), False), ({1: 2}, False), (b"RLE", False)),
    ],
)
def test_wrap_coco_stores_annotations_as_json_if_types_survive(make_detection: Make, area: Any, is_json: bool) -> None:
    detection = make_detection()
    detection.coco.anns[100]["area"] = area  # as a user's own code may have
    wrapped = gl.wrap(detection, annotations="raw")
    assert isinstance(wrapped.targets, JsonLists) == is_json
    stored_area = target_at(pickle.loads(pickle.dumps(wrapped)), 0)[0]["area"]
    assert (type(stored_area), repr(stored_area)) == (type(area), repr(area))


def test_wrap_coco_without_crowds_drops_crowd_annotations(make_detection: Make) -> None:
    detection = make_detection()
    assert target_at(gl.wrap(detection), 2)["iscrowd"].tolist() == [1, 1, 0]
    assert target_at(gl.wrap(detection, crowds=False), 2)["labels"].tolist() == [2]
    raw = gl.wrap(detection, annotations="raw", crowds=False)
    assert [len(annotations) for annotations in raw.targets] == [2, 0, 1, 1]


def test_wrap_coco_without_masks_pickles_no_run_lengths(make_detection: Make) -> None:
    wrapped = gl.wrap(make_detection(), annotations=())
    assert b"counts" not in pickle.dumps(wrapped)
    unpickled = pickle.loads(pickle.dumps(wrapped))
    assert target_at(unpickled, 2)["labels"].tolist() == target_at(wrapped, 2)["labels"].tolist()
    assert [target["image_id"] for target in wrapped.targets[1:3]] == IDS[1:3]


NO_MASKS_REMEDY = "omit masks, with gpuload.wrap(dataset, annotations=('keypoints',))"


def test_wrap_coco_warns_of_annotations_without_an_image(make_detection: Make, tmp_path: Path) -> None:
    detection = make_detection(lambda annotations: annotations[1].update(image_id="3"))
    text = (
        f"1 of the 6 annotations in CocoDetection('{tmp_path}') belong to none of its images, and are ignored: "
        "annotation 101 has image_id '3', but the ids of images are 11, 8, 5, …. Correct the image_id, or "
        "remove such annotations from the file"
    )
    for options in ({}, {"annotations": "raw"}):
        with pytest.warns(UserWarning, match=exactly(text)) as caught:
            wrapped = gl.wrap(detection, **options)
        assert caught[0].filename == __file__
        assert len(wrapped.targets[0] if options else wrapped.targets[0]["labels"]) == 1


def test_wrap_coco_of_a_subset_of_ids_does_not_warn(make_detection: Make) -> None:
    detection = make_detection()
    detection.ids = [8, 5]
    assert [len(target["labels"]) for _, target in gl.wrap(detection)] == [3, 0]


def test_wrap_refuses_a_detection_that_torchvision_wrapped(make_detection: Make) -> None:
    detection = torchvision().datasets.wrap_dataset_for_transforms_v2(make_detection())
    text = (
        "which comes from torchvision's wrap_dataset_for_transforms_v2() and decodes images; wrap the CocoDetection "
        "itself, as in gpuload.wrap(CocoDetection(…)), which has boxes, labels and masks in its targets too"
    )
    for dataset, names in ((detection, None), (detection, ("masks",)), (Subset(detection, [0]), None)):
        with pytest.raises(TypeError, match=f"{re.escape(text)}$"):
            gl.wrap(dataset, annotations=names)


def test_wrap_coco_names_an_image_without_a_size_for_its_masks(make_detection: Make) -> None:
    detection = make_detection()
    detection.coco.imgs[8].pop("width")
    message = f"the COCO image 8 has height {SIZES[8][0]} and width None, but its masks need both; {NO_MASKS_REMEDY}"
    with pytest.raises(ValueError, match=exactly(message)):
        gl.wrap(detection)
    assert "keypoints" in target_at(gl.wrap(detection, annotations=("keypoints",)), 2)


def test_wrap_coco_without_pycocotools_names_the_package(make_detection: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = gl.wrap(make_detection())
    monkeypatch.setitem(sys.modules, "pycocotools", None)
    message = (
        "building masks from COCO's polygons needs pycocotools, which is not installed: pip install pycocotools, or "
        "omit masks, with gpuload.wrap(dataset, annotations=())"
    )
    with pytest.raises(ModuleNotFoundError, match=exactly(message)):
        wrapped[0]


def test_wrap_coco_refuses_unknown_annotations(make_detection: Make) -> None:
    for names, error, message in (
        ("masks", TypeError, "annotations, unless it is 'raw', must be a list of strings, got 'masks' (str)"),
        (("boxes", "masks"), ValueError, "as in ('masks',), got 'boxes'; targets always have boxes and labels"),
    ):
        with pytest.raises(error, match=re.escape(message)):
            gl.wrap(make_detection(), annotations=names)


def test_wrap_coco_raw_targets_and_captions_equal_torchvisions(make_detection: Make, tmp_path: Path) -> None:
    for kind, options in (("CocoDetection", {"annotations": "raw"}), ("CocoCaptions", {})):
        detection = make_detection(kind=kind)
        wrapped = gl.wrap(detection, **options)
        assert len(wrapped) == len(detection) == 4
        assert wrapped.ids.tolist() == detection.ids == IDS
        assert list(wrapped.targets) == [detection[i][1] for i in range(4)]
        for index in (0, 1, 2, 3, -1):
            image, target = wrapped[index]
            assert target == detection[index][1]
            assert image.data == Path(image.source).read_bytes()
        assert list(wrapped.paths) == [f"{tmp_path}/{name}.jpg" for name in ("3", "5", "8", "sub/11")]
        assert repr(wrapped) == f"wrap({kind}({str(tmp_path)!r}): 4 images)"


@pytest.mark.fresh
@pytest.mark.processes
def test_wrap_coco_with_target_transform_needs_no_torch(make_detection: Make) -> None:
    def count(target: list[dict]) -> tuple[int, bool]:
        return len(target), bool({"torch", "torchvision", "pycocotools"} & set(sys.modules))

    wrapped = gl.wrap(make_detection(target_transform=count))
    [(_, (counts, is_imported))] = gpuload_batches(wrapped, 4, num_workers=1, transforms=[T.Resize((16, 16))])
    assert counts.tolist() == [2, 0, 3, 1]
    assert not is_imported.any()


def test_wrap_coco_raw_annotations_pickle_in_one_buffer(make_detection: Make) -> None:
    def replace_annotations(annotations: list[dict]) -> None:
        annotations[:] = [{"id": n, "image_id": n % 500, "category_id": 1, "bbox": [n, 1, 2, 3.5]} for n in range(5000)]

    detection = make_detection(replace_annotations, images=[{"id": n, "file_name": f"{n}.jpg"} for n in range(500)])
    buffers: list[pickle.PickleBuffer] = []
    pickled = cloudpickle.dumps(gl.wrap(detection, annotations="raw"), protocol=5, buffer_callback=buffers.append)
    assert len(pickled) < 2000
    unpickled = pickle.loads(pickled, buffers=buffers)
    assert unpickled.targets[499] == detection._load_target(499)
    assert unpickled.targets[-1:] == [detection._load_target(499)]
    with pytest.raises(IndexError, match=exactly("index 500 is out of range: there are 500 targets")):
        unpickled.targets[500]


@pytest.mark.parametrize("name", ["../annotations.json", "/etc/passwd", "sub/../../x.jpg", "../{root}-2/x.jpg", ""])
def test_wrap_coco_refuses_file_names_outside_the_root(make_detection: Make, tmp_path: Path, name: str) -> None:
    name = name.format(root=tmp_path.name)
    detection = make_detection(list.clear, images=[{"id": 1, "file_name": name}])
    message = (
        f"the COCO image 1 has the file name {name!r}, which points outside {str(tmp_path)!r}; pass a "
        "folder that contains all images"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        gl.wrap(detection)


def test_wrap_coco_takes_a_relative_root(make_detection: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_detection()
    for root in (".", ""):
        monkeypatch.chdir(tmp_path)
        detection = torchvision().datasets.CocoDetection(root, str(tmp_path / "annotations.json"))
        wrapped = gl.wrap(detection, annotations="raw")
        monkeypatch.chdir("/")
        assert wrapped[0][0].source == str(tmp_path / "3.jpg")


def test_wrap_coco_refuses_transforms_and_overridden_methods(make_detection: Make) -> None:
    class Overridden(torchvision().datasets.CocoDetection):
        def _load_target(self, id: int) -> list:
            return []

    with pytest.raises(TypeError, match=starting("got a torchvision.datasets.coco.CocoDetection with transform=")):
        gl.wrap(make_detection(transform=print))
    with pytest.raises(TypeError, match="Overridden, but its class overrides _load_target"):
        gl.wrap(make_detection(kind=Overridden))


@lacking.needs("pycocotools")
@given(st.lists(st.integers(0, 3000), min_size=1, max_size=40).filter(any))
def test_unpack_runs_inverts_the_packing_of_pycocotools(lengths: list[int]) -> None:
    from pycocotools import mask

    packed = mask.frPyObjects({"counts": lengths, "size": [1, sum(lengths)]}, 1, sum(lengths))
    assert _unpack_runs(packed["counts"]).tolist() == lengths


# Coco, which needs no torchvision

FILE_IDS = [7, 3, 11, 5, 9, 2, 4, 6, 8, 10, 12, 14]  # of the images, in the file's order; image 5 has no annotation


def annotation_file() -> dict[str, Any]:
    """Make two objects per image, except image 5, with run lengths as masks, which need no pycocotools."""
    images = [
        {"id": key, "file_name": f"{key}.jpg", "height": 24 + 8 * (number % 2), "width": 32}
        for number, key in enumerate(FILE_IDS)
    ]
    annotations = []
    for number, image in enumerate(images * 2):
        if image["id"] == 5:
            continue
        height, width = image["height"], image["width"]
        mask = {
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
                "segmentation": mask,
                "keypoints": [number, 2, 2, 0, 0, 0],
            }
        )
    return {"images": images, "annotations": annotations, "categories": [{"id": n, "name": f"c{n}"} for n in range(4)]}


@pytest.fixture
def make_coco(tmp_path: Path) -> MakeCoco:
    """A function that makes a Coco from an annotation file, whose content it passes to `change` before writing it."""
    for key, data in zip(FILE_IDS, jpegs(), strict=True):
        (tmp_path / f"{key}.jpg").write_bytes(data)

    def make(change: Callable[[dict], Any] = lambda content: None, **options: Any) -> Coco:
        content = annotation_file()
        change(content)
        (tmp_path / "annotations.json").write_text(json.dumps(content))
        return Coco(tmp_path, tmp_path / "annotations.json", **options)

    return make


def test_coco_samples_are_ordered_by_image_id_with_or_without_annotations(make_coco: MakeCoco, tmp_path: Path) -> None:
    dataset = make_coco()
    assert dataset.ids.tolist() == sorted(FILE_IDS)
    assert len(dataset) == len(FILE_IDS)
    assert dataset.categories == {0: "c0", 1: "c1", 2: "c2", 3: "c3"}
    image, target = dataset[1]
    assert image == gl.Encoded(jpegs()[FILE_IDS.index(3)], "RGB", f"{tmp_path}/3.jpg")
    assert target["image_id"] == 3
    assert target["boxes"].array.tolist() == [[1, 1, 6, 5.5], [13, 1, 18, 5.5]]
    assert target["labels"].tolist() == [1, 1]
    assert (target["masks"].array.shape, target["masks"].array[0].sum()) == ((2, 32, 32), 3 * 32)
    assert target["keypoints"].array.tolist() == [[[1, 2], [0, 0]], [[13, 2], [0, 0]]]
    empty = target_at(dataset, sorted(FILE_IDS).index(5))
    assert (empty["boxes"].array.shape, empty["masks"].array.shape) == ((0, 4), (0, 32, 32))
    assert repr(dataset) == f"Coco('{tmp_path}': 12 images)"


def test_coco_arguments_targets_and_crowds_select_the_targets(make_coco: MakeCoco) -> None:
    assert set(target_at(make_coco(targets=()), 0)) == {"image_id", "boxes", "labels", "area", "iscrowd"}
    raw = make_coco(targets="raw")
    annotations = annotation_file()["annotations"]
    assert target_at(raw, 1) == [annotation for annotation in annotations if annotation["image_id"] == 3]
    index_of_11 = sorted(FILE_IDS).index(11)
    assert [len(target_at(make_coco(crowds=crowds), index_of_11)["labels"]) for crowds in (True, False)] == [2, 1]
    with pytest.raises(ValueError, match=r"targets must be None, 'raw', or some of 'masks' and 'keypoints', .*'boxes'"):
        make_coco(targets=("boxes",))


@pytest.mark.slow
@lacking.needs("pycocotools")
def test_coco_samples_equal_wrapped_torchvisions(make_coco: MakeCoco, tmp_path: Path) -> None:
    dataset = make_coco()
    wrapped = gl.wrap(torchvision().datasets.CocoDetection(tmp_path, str(tmp_path / "annotations.json")))
    assert alike(list(dataset), list(wrapped))


@pytest.mark.processes
def test_coco_batches_equal_batches_of_the_images(make_coco: MakeCoco) -> None:
    dataset = make_coco()

    def with_sum_of_boxes(index: int) -> Any:
        image, target = dataset[index]
        return image, target["boxes"].array.sum()

    images = [jpegs()[FILE_IDS.index(key)] for key in sorted(FILE_IDS)]
    check_loader(MapDataset(with_sum_of_boxes, 12), images, [target["boxes"].array.sum() for _, target in dataset])
    batches = gpuload_batches(dataset, 5, ragged="list")
    assert [target["image_id"] for _, targets in batches for target in targets] == sorted(FILE_IDS)


@pytest.mark.usefixtures("index_cache")
def test_coco_annotations_are_cached_until_the_file_changes(
    make_coco: MakeCoco, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for options in ({}, {"targets": ("masks",)}, {"crowds": False}, {"targets": "raw"}):
        dataset = make_coco(**options)
        with monkeypatch.context() as patch:
            patch.setattr("gpuload.datasets.coco._read_annotations", None)
            cached = Coco(tmp_path, tmp_path / "annotations.json", **options)
        assert alike(list(dataset), list(cached))
        assert (cached.categories, list(cached.paths)) == (dataset.categories, list(dataset.paths))
    assert len(make_coco(remove_last_image)) == len(FILE_IDS) - 1, "a changed file must be read again"


def remove_last_image(content: dict) -> None:
    image = content["images"].pop()
    content["annotations"] = [
        annotation for annotation in content["annotations"] if annotation["image_id"] != image["id"]
    ]


@pytest.mark.processes
def test_coco_is_read_without_torchvision_and_pycocotools(make_coco: MakeCoco, tmp_path: Path) -> None:
    make_coco()
    program = (
        "import sys; sys.modules |= dict.fromkeys(['torch', 'torchvision', 'pycocotools'])\n"
        "from gpuload.datasets.coco import Coco\n"
        "print(len(Coco(sys.argv[1], sys.argv[2])[0][1]['masks'].array))"
    )
    assert run_python(program, tmp_path, tmp_path / "annotations.json")[0] == "2\n"


def test_coco_names_a_missing_image(make_coco: MakeCoco, tmp_path: Path) -> None:
    dataset = make_coco()
    (tmp_path / "3.jpg").unlink()
    with pytest.raises(FileNotFoundError) as caught:
        dataset[1]
    assert str(caught.value) == (
        f"[Errno 2] image 3 of '{tmp_path}/annotations.json' is not in the folder; copy it there, or remove "
        f"its entry from the annotation file: '{tmp_path}/3.jpg'"
    )
    assert target_at(dataset, 0)["image_id"] == 2


RAW_REMEDY = "keep the annotations unchanged, with gpuload.Coco(…, targets='raw')"


@pytest.mark.parametrize("polygons", [[[1, 2, 3, 4]], [[]], [], [[1, 2], [1, 2, 3, 4, 5]]])
def test_coco_warns_of_polygons_without_area(make_coco: MakeCoco, polygons: list[Any]) -> None:
    text = (
        r"^1 of the 22 annotations in .* have no polygons, or polygons of fewer than three points, which have no "
        r"area and are ignored; 1 of them have no other polygon, so their masks are empty\. The first is annotation "
        r"101\. Correct the polygons, or remove them from the file$"
    )
    with pytest.warns(UserWarning, match=text) as caught:
        dataset = make_coco(set_fields("annotations", 1, segmentation=polygons))
    assert caught[0].filename == __file__
    assert [bool(mask.any()) for mask in target_at(dataset, 1)["masks"].array] == [False, True]
    assert len(make_coco(set_fields("annotations", 1, segmentation=polygons), targets=())) == len(FILE_IDS)


@pytest.mark.parametrize(
    ("size", "count", "option", "message"),
    [
        (
            (40_000, 40_000),
            1,
            "max_pixels",
            "the COCO image 3, by the size in its annotation file, has 40,000×40,000 = 1,600,000,000 pixels, more "
            "than max_pixels=178,956,970",
        ),
        (
            (13_000, 12_000),
            7,
            "max_bytes",
            "the array of the 8 masks of the COCO image 3 takes 1,248,000,000 bytes of memory, more than "
            "max_bytes=1,073,741,824",
        ),
    ],
)
def test_coco_refuses_huge_masks_before_allocating_them(
    make_coco: MakeCoco, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], count: int, option: str, message: str
) -> None:
    def enlarge_masks(content: dict) -> None:
        content["images"][1].update(height=size[0], width=size[1])
        annotation = content["annotations"][1]
        annotation["segmentation"] = {"counts": [size[0] * size[1]], "size": list(size)}
        content["annotations"] += [{**annotation, "id": 1000 + number} for number in range(count - 1)]

    dataset = make_coco(enlarge_masks)
    monkeypatch.setattr(np, "zeros", lambda *_, **__: pytest.fail("memory was allocated"))
    remedy = (
        f": perhaps a decompression bomb; if it is not, pass Loader(decode=Decode({option}=…)), or omit masks, with "
        "gpuload.Coco(…, targets=('keypoints',))"
    )
    with pytest.raises(gl.DecodeError, match=exactly(message + remedy)):
        dataset[1]


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1])
def test_coco_masks_obey_max_pixels_of_the_loader(make_coco: MakeCoco, workers: int) -> None:
    message = r"by the size in its annotation file, has 32×(24 = 768|32 = 1,024) pixels, more than max_pixels=100"
    with pytest.raises(gl.SampleError, match=message):
        gpuload_batches(make_coco(), 4, num_workers=workers, decode=gl.Decode(max_pixels=100))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 200_000, "is truncated, or is not JSON: maximum recursion"),
        (json.dumps(annotation_file())[:500], "is truncated, or is not JSON: "),
        (None, "does not exist; expected COCO's annotations, a JSON file"),
        ('{"images": []}', "does not have lists of images and annotations; expected COCO's format, as in"),
        ('{"images": [], "annotations": [3]}', "is not in COCO's format: 3"),
    ],
)
def test_coco_refuses_missing_truncated_and_malformed_files(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "annotations.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises((ValueError, FileNotFoundError), match=f"{re.escape(repr(str(path)))} {message}"):
        Coco(tmp_path, path)


def set_fields(kind: str, number: int | None, **fields: Any) -> Callable[[dict], None]:
    """Return a function that sets fields of one entry of a kind, or of all entries if `number` is None. A callable
    value is applied to the field's previous value."""

    def change(content: dict) -> None:
        for entry in content[kind] if number is None else [content[kind][number]]:
            for name, value in fields.items():
                entry[name] = value(entry[name]) if callable(value) else value

    return change


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("image_id", str, "annotation 100 has image_id '7', but the ids of images are 2, 3, 4, …. Correct the"),
        ("image_id", lambda key: f"{key}.jpg", "annotation 100 has image_id '7.jpg', but the ids of images are 2"),
        ("image_id", None, "annotation 100 has image_id None, but the ids of images are 2, 3, 4, …"),
        ("category_id", lambda key: key + 10, "annotation 105 has category_id 11, but the ids of categories are 0"),
    ],
)
def test_coco_refuses_annotations_of_which_none_has_an_image_or_category(
    make_coco: MakeCoco, tmp_path: Path, field: str, value: Any, message: str
) -> None:
    kinds = {"image_id": "images", "category_id": "categories"}[field]
    text = f"none of the 22 annotations in '{tmp_path}/annotations.json' belongs to one of its {kinds}: {message}"
    with pytest.raises(ValueError, match=starting(text)):
        make_coco(set_fields("annotations", None, **{field: value}))


@pytest.mark.usefixtures("index_cache")
@pytest.mark.parametrize("targets", [None, "raw"])
def test_coco_warns_of_annotations_without_an_image(make_coco: MakeCoco, tmp_path: Path, targets: Any) -> None:
    def detach_two_annotations(content: dict) -> None:
        content["annotations"][0]["image_id"] = "7"
        content["annotations"][3]["image_id"] = [3]

    text = (
        f"2 of the 22 annotations in '{tmp_path}/annotations.json' belong to none of its images, and are ignored: "
        "annotation 100 has image_id '7', but the ids of images are 2, 3, 4, …. Correct the image_id, or "
        "remove such annotations from the file"
    )
    with pytest.warns(UserWarning, match=exactly(text)):
        make_coco(detach_two_annotations, targets=targets)
    with pytest.warns(UserWarning, match=exactly(text)) as caught:
        cached = Coco(tmp_path, tmp_path / "annotations.json", targets=targets)
    assert [warning.filename for warning in caught] == [__file__]
    assert sum(len(target if targets else target["labels"]) for _, target in cached) == 20


def test_joining_coco_files_with_different_categories_warns(make_coco: MakeCoco) -> None:
    first, second = make_coco(targets=()), make_coco(set_fields("categories", 2, name="dog"), targets=())
    with pytest.warns(UserWarning, match=r"label 2 is 'c2' in the first and 'dog' in the second\. Pass the same"):
        _ = first + second
    with_another_id = make_coco(lambda content: content["categories"].insert(0, {"id": 9, "name": "cow"}), targets=())
    assert len(first + with_another_id) == 2 * len(FILE_IDS), "an id of only one file must not warn"


def test_coco_warns_of_annotations_without_a_category(make_coco: MakeCoco) -> None:
    text = (
        r"^1 of the 22 annotations in .* belong to none of its categories: annotation 101 has category_id 9, but "
        r"the ids of categories are 0, 1, 2, …\. Correct the category_id"
    )
    with pytest.warns(UserWarning, match=text):
        dataset = make_coco(set_fields("annotations", 1, category_id=9))
    assert target_at(dataset, 1)["labels"].tolist() == [9, 1]
    make_coco(lambda content: content.pop("categories"))  # without categories, any id is valid
    assert target_at(make_coco(set_fields("annotations", None, category_id=str)), 1)["labels"].tolist() == [1, 1]


FIX_OR_RAW_REMEDY = f"; fix the file, or {RAW_REMEDY}"
BOX_EXPECTED = "expected left, top, width and height, with no negative size"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("bbox", None, f"no bbox{FIX_OR_RAW_REMEDY}"),
        ("segmentation", None, "no segmentation; omit masks, with gpuload.Coco(…, targets=("),
        *(
            ("bbox", box, f"bbox {box}, {BOX_EXPECTED}{FIX_OR_RAW_REMEDY}")
            for box in ([3, 4, -5, 6], [3, 4, 5, -0.5], [3, 4, float("nan"), 5], [3, 4, 5], ["1", "2", "3", "4"], 5)
        ),
        ("bbox", [1e300, 1, 2, 3], "bbox [1e+300, 1, 2"),
        ("category_id", 2**70, f"category_id {2**70}, expected an integer that fits into 64 bits; {RAW_REMEDY}"),
        ("category_id", 1.5, "category_id 1.5, expected an integer"),
        ("iscrowd", 2**70, f"iscrowd {2**70}, expected an integer"),
        ("area", "large", f"area 'large', expected a number; {RAW_REMEDY}"),
        ("keypoints", ["a"] * 6, "keypoints ['a', 'a', 'a',"),
        ("keypoints", 5, "keypoints 5, expected a list of numbers; omit keypoints, with gpuload.Coco("),
    ],
)
def test_coco_names_the_annotation_that_lacks_a_field_or_has_a_wrong_value(
    make_coco: MakeCoco, field: str, value: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=starting(f"the COCO annotation 101 of image 3 has {message}")):
        make_coco(set_fields("annotations", 1, **{field: value}))


def test_coco_names_two_annotations_with_different_numbers_of_keypoints(make_coco: MakeCoco) -> None:
    message = (
        "COCO keypoints must be x, y and visibility per point, with the same number of points for each object, got 6 "
        "numbers (annotation 123) and 3 numbers (annotation 101); omit keypoints, with gpuload.Coco(…, targets=("
        f"'masks',)), or {RAW_REMEDY}"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        make_coco(set_fields("annotations", 1, keypoints=[1, 2, 2]))


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("images", {"file_name": None}, "lacks an integer id or a file_name: {'id': 3, 'file_name': None"),
        ("images", {"id": 2**70}, "lacks an integer id or a file_name: {'id': 1180591620717411303424"),
        ("images", {"id": 11}, "lists two images with the id 11; ids must be unique"),
        ("images", {"file_name": "../3.jpg"}, "image 3 has the file name '../3.jpg', which points outside"),
        ("images", {"file_name": "a\0.jpg"}, "image 3 has the file name 'a\\x00.jpg', which no file can have"),
        ("images", {"file_name": "\ud800.jpg"}, "image 3 has the file name '\\ud800.jpg', which no file can"),
        ("categories", {"id": [1]}, "one of the categories in"),
        ("categories", {"id": 0}, "has two categories with the id 0, 'c0' and 'c1'; ids must be unique"),
    ],
)
def test_coco_names_wrong_images_and_categories(
    make_coco: MakeCoco, kind: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make_coco(set_fields(kind, 1, **fields))


POLYGONS_EXPECTED = "expected a list of polygons, each a list of numbers below 1048576"
BEYOND_LIMIT_ERROR = "has a polygon that extends beyond 1048576 pixels, or contains NaN"
SEGMENTATION_EXPECTED = "expected polygons, or run lengths with counts and size: "


@pytest.mark.parametrize(
    ("segmentation", "message"),
    [
        ([[1, 2, 3, 4, 5, 6, 7]], "has a polygon of 7 numbers; expected x and y of at least three points"),
        *(([[1, 2, number, 4, 5, 6]], BEYOND_LIMIT_ERROR) for number in (1e9, float("nan"), 10**400)),
        ([1, 2, 3, 4, 5, 6], f"has the polygon 1; {POLYGONS_EXPECTED}"),
        ([["a"] * 6], f"has the polygon ['a', 'a', 'a', 'a', 'a', 'a']; {POLYGONS_EXPECTED}"),
        (5, f"has the segmentation 5; {SEGMENTATION_EXPECTED}"),
        ({"x": 1}, f"has the segmentation {{'x': 1}}; {SEGMENTATION_EXPECTED}'counts'"),
        ({"counts": [768], "size": [32, 24]}, "has run lengths for 768 pixels and size [32, 24]"),
        *(
            ({"counts": counts, "size": [24, 32]}, message)
            for counts, message in (
                # For missing run lengths, pycocotools would use the contents of uninitialized memory.
                ([3, 4], "has run lengths for 7 pixels and size [24, 32], but its image has 24 × 32 = 768 pixels"),
                ([900], "has run lengths for 900 pixels and size [24, 32]"),
                ([778, -10], "has run lengths for 768 pixels and size [24, 32]"),
                ("11", "has run lengths for 2 pixels"),
                *((text, f"{SEGMENTATION_EXPECTED}COCO's packed run lengths are invalid") for text in ("zz~", "")),
                *((value, SEGMENTATION_EXPECTED) for value in (["a"], 5, [float("nan")])),
            )
        ),
    ],
)
def test_coco_names_damaged_segmentations_when_the_sample_is_read(
    make_coco: MakeCoco, segmentation: Any, message: str
) -> None:
    dataset = make_coco(set_fields("annotations", 0, segmentation=segmentation))
    assert target_at(dataset, 1)["masks"].array.any()
    with pytest.raises(ValueError, match=f"^the COCO annotation 100 .*{re.escape(message)}"):
        dataset[sorted(FILE_IDS).index(7)]


def test_coco_reads_nan_in_raw_targets(make_coco: MakeCoco) -> None:
    dataset = make_coco(set_fields("annotations", 1, area=float("nan")), targets="raw")
    assert np.isnan(target_at(dataset, 1)[0]["area"])


def test_coco_targets_omit_a_field_that_is_null_in_one_annotation(make_coco: MakeCoco) -> None:
    target = target_at(make_coco(set_fields("annotations", 1, area=None, iscrowd=None)), 0)  # of another image
    assert target.keys() == {"image_id", "boxes", "labels", "masks", "keypoints", "visibility"}


def test_coco_boxes_have_the_canvas_size_of_the_file(make_coco: MakeCoco) -> None:
    assert target_at(make_coco(), 1)["boxes"].canvas_hw == (32, 32)
    text_height = make_coco(set_fields("images", None, height="24"), targets=())
    assert target_at(text_height, 1)["boxes"].canvas_hw is None
