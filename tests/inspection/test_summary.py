"""What all rows come to, and what is advised."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.generated_images import jpeg_bytes, smooth_image
from helpers.picture_folders import folder, picture
from PIL import Image

import gpuload as gl
from gpuload.inspection.measure import measure_files, measure_pixels
from gpuload.inspection.summary import IN_ROOT, advise, count_ignored_files, group_equal_rows, is_bad, summarise


def summary_of(*datasets: Any, ignored: dict[str, int] | None = None, most: int | None = None) -> dict[str, Any]:
    found = measure_files(datasets, ["train", "val", "test"][: len(datasets)], workers=0)
    measure_pixels(found, max_images=most, workers=0)
    summary = summarise(found, ignored=[ignored or {} for _ in datasets])
    assert json.loads(json.dumps(summary)) == summary
    return summary


def advice_of(summary: dict[str, Any]) -> dict[str, str]:
    return {one.title: one.level for one in advise(summary)}


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> gl.Encoded:
    file = io.BytesIO()
    image.save(file, form, **options)
    return gl.Encoded(file.getvalue())


def test_nothing_wrong_is_nothing_to_do(tmp_path: Path) -> None:
    dataset = gl.ImageFolder(folder(tmp_path, {"a": 11, "b": 12}))
    summary = summary_of(dataset)
    assert advice_of(summary) == {}
    assert not is_bad(summary)
    assert summary["images"] == {
        "samples": 23, "looked_at": 23, "decoded": 23, "drawn": False,
        "bytes": sum(Path(path).stat().st_size for path in dataset.paths),
    }  # fmt: skip
    assert summary["formats"]["formats"] == {"JPEG": 23}
    assert summary["classes"]["listed"] == [
        {"name": "b", "count": 12, "each": [12]},
        {"name": "a", "count": 11, "each": [11]},
    ]
    assert summary["classes"]["imbalance"] == 12 / 11


def test_mean_and_std_are_those_of_the_pixels() -> None:
    arrays = [smooth_image(30, 40, 0), smooth_image(20, 20, 1)]
    summary = summary_of([encoded(Image.fromarray(array)) for array in arrays])
    every = np.concatenate([array.reshape(-1, 3) for array in arrays]) / 255
    (kind,) = summary["pixels"]["kinds"]
    np.testing.assert_allclose(kind["mean"], every.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(kind["std"], every.std(axis=0), rtol=1e-12)
    from gpuload import transforms as T

    pasted = eval(kind["normalize"], {"T": T})
    np.testing.assert_allclose(pasted.mean, every.mean(axis=0), atol=1e-4)


def test_mean_and_std_of_16_bits_are_fractions_of_the_largest_level() -> None:
    array = np.arange(1600, dtype=np.uint16).reshape(40, 40) * 40
    (kind,) = summary_of([encoded(Image.fromarray(array))])["pixels"]["kinds"]
    assert (kind["bits"], kind["channels"]) == (16, 1)
    np.testing.assert_allclose(kind["mean"], array.mean() / 65535, rtol=1e-12)
    np.testing.assert_allclose(kind["std"], array.std() / 65535, rtol=1e-12)


def test_blank_images_are_not_duplicates_by_their_pixels() -> None:
    white = Image.new("RGB", (40, 40), "white")
    summary = summary_of([encoded(white), encoded(white, "BMP"), encoded(white, "TIFF")])
    assert (summary["duplicates"]["flat"], summary["duplicates"]["pixels"]["groups"]) == (3, 0)


def test_a_channel_that_is_the_same_everywhere_cannot_be_normalized() -> None:
    array = smooth_image(20, 20, 0)
    array[..., 1] = 7
    (kind,) = summary_of([encoded(Image.fromarray(array))])["pixels"]["kinds"]
    assert kind["std"][1] == 0
    assert kind["normalize"] is None


def test_a_histogram_counts_every_image() -> None:
    sizes = [(16 + 3 * at, 40) for at in range(50)] + [(900, 40)]
    summary = summary_of([encoded(Image.new("RGB", size), "BMP") for size in sizes], most=1)
    width = summary["sizes"]["width"]
    assert sum(width["counts"]) == 51
    assert (width["least"], width["median"], width["most"]) == (16, 91, 900)
    assert len(width["bounds"]) == len(width["counts"]) + 1
    assert summary["sizes"]["height"]["counts"] == [51]
    assert (summary["sizes"]["smallest"], summary["sizes"]["largest"]) == ([16, 40], [900, 40])
    assert summary["sizes"]["distinct"] == 51
    assert summary["images"]["drawn"]


def test_whatever_is_odd_is_told() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    photo = Image.fromarray(smooth_image(40, 40, 0))
    deep = Image.fromarray(np.arange(1600, dtype=np.uint16).reshape(40, 40) * 40)
    samples = [
        encoded(photo, "JPEG", exif=exif.tobytes()),
        encoded(deep),
        encoded(photo.convert("RGBA")),
        encoded(photo.convert("L").resize((20, 30))),
        encoded(photo.convert("CMYK"), "JPEG"),
        gl.Encoded(jpeg_bytes(np.asarray(photo), progressive=True, quality=50), source="x.png"),
        encoded(Image.new("RGB", (50, 50), "red")),
        gl.Encoded(b"nothing"),
    ]
    summary = summary_of(samples, ignored={".heic": 5, "(no ending)": 1})
    found = advice_of(summary)
    for title, level in {
        "1 image is damaged": "bad",
        "1 image is stored rotated or mirrored, by EXIF orientation": "odd",
        "1 image has more than 8 bits per channel": "odd",
        "1 image of one colour": "odd",
        "1 image has transparency": "note",
        "1 image is grey": "note",
        "1 image is in CMYK, for print": "note",
        "1 image is stored as progressive JPEG": "note",
        "1 image has a format that differs from the file name": "note",
        "6 files are skipped in train": "note",
        "1 image has a side of fewer than 32 pixels": "note",
    }.items():
        assert found.pop(title) == level
    assert not found
    assert [one.level for one in advise(summary)] == sorted(
        (one.level for one in advise(summary)), key=("bad", "odd", "note").index
    )
    assert is_bad(summary)
    assert "?" not in summary["formats"]["formats"], "what has no header has no format"
    assert summary["damaged"]["listed"][0]["cause"].startswith("DecodeError: not an image")
    assert {(kind["channels"], kind["bits"]) for kind in summary["pixels"]["kinds"]} == {(3, 8), (1, 16)}


def test_classes_that_differ_in_size_and_that_are_missing(tmp_path: Path) -> None:
    train = gl.ImageFolder(folder(tmp_path / "train", {"a": 33, "b": 3}))
    val = gl.ImageFolder(folder(tmp_path / "val", {"a": 1}, first=100))
    summary = summary_of(train, val, most=0)
    assert advice_of(summary) == {
        "Classes differ greatly in size: the largest has 11 times as many": "odd",
        "1 class has no images in val": "odd",
        "Fewer than 10 images in 1 of 2 classes": "note",
    }
    assert summary["classes"]["missing"] == [{"data": "val", "classes": ["b"]}]
    assert "gl.ImageFolder(…, classes=train)" in [one.code for one in advise(summary)]


def test_images_in_both_data_sets_are_found_however_they_are_stored(tmp_path: Path) -> None:
    array = smooth_image(120, 160, 50)
    for name, options in (("file", {}), ("pixels", {"comment": b"another file"}), ("other", {"quality": 70})):
        for data in ("train", "val"):
            path = tmp_path / name / data / "x" / "1.jpg"
            path.parent.mkdir(parents=True)
            path.write_bytes(jpeg_bytes(array, **(options if data == "val" else {})))
            (path.parent / "2.jpg").write_bytes(picture(len(name) + len(data)))
    for kind, name in (("files", "file"), ("pixels", "pixels")):
        summary = summary_of(*(gl.ImageFolder(tmp_path / name / data) for data in ("train", "val")))
        told = summary["duplicates"][kind]
        assert (told["groups"], told["surplus"], told["several_data"], told["several_classes"]) == (1, 1, 1, 0), name
        assert [(image["data"], image["name"]) for image in told["listed"][0]["images"]] == [
            ("train", "x/1.jpg"),
            ("val", "x/1.jpg"),
        ]
        assert is_bad(summary)
        other = "pixels" if kind == "files" else "files"
        assert summary["duplicates"][other]["groups"] == 0, "what is found by its bytes is not told again by its pixels"
    summary = summary_of(*(gl.ImageFolder(tmp_path / "other" / data) for data in ("train", "val")))
    assert summary["duplicates"] == {
        "files": {"groups": 0, "surplus": 0, "several_data": 0, "several_classes": 0, "listed": []},
        "pixels": {"groups": 0, "surplus": 0, "several_data": 0, "several_classes": 0, "listed": []},
        "flat": 0,
    }
    assert not is_bad(summary)


def test_equal_rows_are_in_one_group() -> None:
    rng = np.random.default_rng(0)
    keys, rows = rng.integers(-3, 3, (1000, 2)), rng.permutation(1000)[:60]
    expected: dict[tuple[int, ...], set[int]] = {}
    for key, row in zip(keys[rows].tolist(), rows.tolist(), strict=True):
        expected.setdefault(tuple(key), set()).add(row)
    groups = {frozenset(group.tolist()) for group in group_equal_rows(keys, rows)}
    assert groups == {frozenset(group) for group in expected.values() if len(group) > 1}
    assert group_equal_rows(np.arange(5)[:, None], np.arange(5)) == []
    assert group_equal_rows(np.zeros((0, 2), np.int64), np.zeros(0, np.int64)) == []
    assert [group.tolist() for group in group_equal_rows(np.zeros((3, 2), np.int64), np.arange(3))] == [[0, 1, 2]]


def test_groups_in_several_data_sets_come_first_then_those_in_several_classes(tmp_path: Path) -> None:
    def put(name: str, seed: int) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(seed))

    for name, seed in {
        "train/a/0": 0, "train/a/1": 0, "train/a/2": 0,
        "train/a/3": 1, "train/b/0": 1,
        "train/a/4": 2, "val/a/0": 2,
        "train/b/1": 3, "val/b/0": 4,
    }.items():  # fmt: skip
        put(f"{name}.jpg", seed)
    listed = summary_of(*(gl.ImageFolder(tmp_path / data) for data in ("train", "val")))["duplicates"]["files"][
        "listed"
    ]
    assert [(one["several_data"], one["several_classes"], one["count"]) for one in listed] == [
        (True, False, 2), (False, True, 2), (False, False, 3),
    ]  # fmt: skip


def test_one_image_in_two_classes(tmp_path: Path) -> None:
    for name in ("a/1.jpg", "b/1.jpg", "b/2.jpg"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(picture(0))
    told = summary_of(gl.ImageFolder(tmp_path))["duplicates"]["files"]
    assert (told["groups"], told["surplus"], told["several_classes"]) == (1, 2, 1)
    assert [image["class"] for image in told["listed"][0]["images"]] == ["a", "b", "b"]


def test_files_that_are_not_read(tmp_path: Path) -> None:
    for name in ("a/1.JPG", "a/2.heic", "a/.hidden", "b/deep/x.HEIC", "3.jpg", "b/long.abcdefghijklmnop"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    found = count_ignored_files(str(tmp_path), (".jpg",), classes=True)
    assert found == {".heic": 2, "(no ending)": 2, IN_ROOT: 1}
    assert IN_ROOT not in count_ignored_files(str(tmp_path), (".jpg",), classes=False)


@pytest.mark.parametrize("count", [0, 1])
def test_data_with_nothing_to_measure(count: int) -> None:
    summary = summary_of([gl.Encoded(b"nothing")] * count + [gl.Encoded(b"x")])
    assert summary["damaged"]["count"] == count + 1
    assert (summary["sizes"], summary["classes"], summary["pixels"]) == ({}, {}, {"kinds": [], "levels": []})
    assert is_bad(summary)


def test_several_of_a_kind_are_told_in_the_plural() -> None:
    photo = Image.fromarray(smooth_image(40, 40, 0))
    samples = [encoded(photo.convert("LA").resize((20, 30))), encoded(photo.convert("RGBA").resize((20, 31)))]
    samples += [gl.Encoded(b"nothing"), gl.Encoded(b"else"), *(encoded(Image.new("RGB", (n, 50))) for n in (40, 41))]
    assert list(advice_of(summary_of(samples))) == [
        "2 images are damaged",
        "2 images of one colour",
        "2 images have transparency",
        "2 images have a side of fewer than 32 pixels",
    ]
