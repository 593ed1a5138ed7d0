"""`summarise` and `advise`: the summary of the measured rows, and the advice that follows from it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from helpers.generated_images import jpeg_bytes, smooth_image
from helpers.picture_folders import folder, picture
from PIL import Image

import gpuload as gl
from gpuload import transforms as T
from gpuload.inspection.measure import measure_files, measure_pixels
from gpuload.inspection.summary import IN_ROOT, advise, count_ignored_files, group_equal_rows, is_bad, summarise


def make_summary(
    *datasets: Any, ignored: dict[str, int] | None = None, max_images: int | None = None
) -> dict[str, Any]:
    measured = measure_files(datasets, ["train", "val", "test"][: len(datasets)], workers=0)
    measure_pixels(measured, max_images=max_images, workers=0)
    summary = summarise(measured, ignored=[ignored or {} for _ in datasets])
    assert json.loads(json.dumps(summary)) == summary
    return summary


def levels_by_title(summary: dict[str, Any]) -> dict[str, str]:
    return {advice.title: advice.level for advice in advise(summary)}


def encode(image: Image.Image, form: str = "PNG", **options: Any) -> gl.Encoded:
    file = io.BytesIO()
    image.save(file, form, **options)
    return gl.Encoded(file.getvalue())


def write_pictures(root: Path, seeds: dict[str, int]) -> None:
    """Write a picture to each path, with its seed."""
    for name, seed in seeds.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(seed))


def test_good_data_gets_no_advice(tmp_path: Path) -> None:
    dataset = gl.ImageFolder(folder(tmp_path, {"a": 11, "b": 12}))
    summary = make_summary(dataset)
    assert levels_by_title(summary) == {}
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


def test_mean_std_and_normalize_come_from_all_pixels() -> None:
    arrays = [smooth_image(30, 40, 0), smooth_image(20, 20, 1)]
    summary = make_summary([encode(Image.fromarray(array)) for array in arrays])
    pixels = np.concatenate([array.reshape(-1, 3) for array in arrays]) / 255
    (pixel_kind,) = summary["pixels"]["kinds"]
    np.testing.assert_allclose(pixel_kind["mean"], pixels.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(pixel_kind["std"], pixels.std(axis=0), rtol=1e-12)
    normalize = eval(pixel_kind["normalize"], {"T": T})
    np.testing.assert_allclose(normalize.mean, pixels.mean(axis=0), atol=1e-4)


def test_mean_and_std_of_16_bit_images_are_fractions_of_65535() -> None:
    array = np.arange(1600, dtype=np.uint16).reshape(40, 40) * 40
    (kind,) = make_summary([encode(Image.fromarray(array))])["pixels"]["kinds"]
    assert (kind["bits"], kind["channels"]) == (16, 1)
    np.testing.assert_allclose(kind["mean"], array.mean() / 65535, rtol=1e-12)
    np.testing.assert_allclose(kind["std"], array.std() / 65535, rtol=1e-12)


def test_blank_images_are_not_duplicates_by_their_pixels() -> None:
    white = Image.new("RGB", (40, 40), "white")
    summary = make_summary([encode(white), encode(white, "BMP"), encode(white, "TIFF")])
    assert (summary["duplicates"]["flat"], summary["duplicates"]["pixels"]["groups"]) == (3, 0)


def test_constant_channel_gives_no_normalize() -> None:
    array = smooth_image(20, 20, 0)
    array[..., 1] = 7
    (kind,) = make_summary([encode(Image.fromarray(array))])["pixels"]["kinds"]
    assert kind["std"][1] == 0
    assert kind["normalize"] is None


def test_size_histograms_count_every_image() -> None:
    sizes = [(16 + 3 * step, 40) for step in range(50)] + [(900, 40)]
    summary = make_summary([encode(Image.new("RGB", size), "BMP") for size in sizes], max_images=1)
    width = summary["sizes"]["width"]
    assert sum(width["counts"]) == 51
    assert (width["least"], width["median"], width["most"]) == (16, 91, 900)
    assert len(width["bounds"]) == len(width["counts"]) + 1
    assert summary["sizes"]["height"]["counts"] == [51]
    assert (summary["sizes"]["smallest"], summary["sizes"]["largest"]) == ([16, 40], [900, 40])
    assert summary["sizes"]["distinct"] == 51
    assert summary["images"]["drawn"]


def test_advice_names_each_unusual_property_worst_first() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    photo = Image.fromarray(smooth_image(40, 40, 0))
    deep = Image.fromarray(np.arange(1600, dtype=np.uint16).reshape(40, 40) * 40)
    samples = [
        encode(photo, "JPEG", exif=exif.tobytes()),
        encode(deep),
        encode(photo.convert("RGBA")),
        encode(photo.convert("L").resize((20, 30))),
        encode(photo.convert("CMYK"), "JPEG"),
        gl.Encoded(jpeg_bytes(np.asarray(photo), progressive=True, quality=50), source="x.png"),
        encode(Image.new("RGB", (50, 50), "red")),
        gl.Encoded(b"nothing"),
    ]
    summary = make_summary(samples, ignored={".heic": 5, "(no ending)": 1})
    levels = levels_by_title(summary)
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
        assert levels.pop(title) == level
    assert not levels
    assert [advice.level for advice in advise(summary)] == sorted(
        (advice.level for advice in advise(summary)), key=("bad", "odd", "note").index
    )
    assert is_bad(summary)
    assert "?" not in summary["formats"]["formats"], "a file without a header has no format"
    assert summary["damaged"]["listed"][0]["cause"].startswith("DecodeError: not an image")
    assert {(kind["channels"], kind["bits"]) for kind in summary["pixels"]["kinds"]} == {(3, 8), (1, 16)}


def test_advice_names_unbalanced_small_and_missing_classes(tmp_path: Path) -> None:
    train = gl.ImageFolder(folder(tmp_path / "train", {"a": 33, "b": 3}))
    val = gl.ImageFolder(folder(tmp_path / "val", {"a": 1}, first=100))
    summary = make_summary(train, val, max_images=0)
    assert levels_by_title(summary) == {
        "Classes differ greatly in size: the largest has 11 times as many": "odd",
        "1 class has no images in val": "odd",
        "Fewer than 10 images in 1 of 2 classes": "note",
    }
    assert summary["classes"]["missing"] == [{"data": "val", "classes": ["b"]}]
    assert "gl.ImageFolder(…, classes=train)" in [advice.code for advice in advise(summary)]


@pytest.mark.parametrize(
    ("options", "kind"), [({}, "files"), ({"comment": b"another file"}, "pixels"), ({"quality": 70}, None)]
)
def test_duplicates_across_datasets_are_found_by_file_or_else_by_pixels(
    tmp_path: Path, options: dict[str, Any], kind: str | None
) -> None:
    write_pictures(tmp_path, {"train/x/2.jpg": 1, "val/x/2.jpg": 2})
    for data, data_options in (("train", {}), ("val", options)):
        (tmp_path / data / "x" / "1.jpg").write_bytes(jpeg_bytes(smooth_image(120, 160, 50), **data_options))
    summary = make_summary(*(gl.ImageFolder(tmp_path / data) for data in ("train", "val")))
    no_groups = {"groups": 0, "surplus": 0, "several_data": 0, "several_classes": 0, "listed": []}
    expected = {"files": no_groups, "pixels": no_groups, "flat": 0}
    if kind is not None:
        expected[kind] = {"groups": 1, "surplus": 1, "several_data": 1, "several_classes": 0, "listed": mock.ANY}
        images = summary["duplicates"][kind]["listed"][0]["images"]
        assert [(image["data"], image["name"]) for image in images] == [("train", "x/1.jpg"), ("val", "x/1.jpg")]
    assert summary["duplicates"] == expected
    assert is_bad(summary) == (kind is not None)


def test_group_equal_rows_groups_rows_with_equal_keys() -> None:
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


def test_duplicates_are_counted_and_listed_across_datasets_first_then_across_classes(tmp_path: Path) -> None:
    write_pictures(tmp_path, {
        "train/a/0.jpg": 0, "train/a/1.jpg": 0, "train/a/2.jpg": 0,
        "train/a/3.jpg": 1, "train/b/0.jpg": 1,
        "train/a/4.jpg": 2, "val/a/0.jpg": 2,
        "train/b/1.jpg": 3, "val/b/0.jpg": 4,
    })  # fmt: skip
    duplicates = make_summary(*(gl.ImageFolder(tmp_path / data) for data in ("train", "val")))["duplicates"]["files"]
    assert (duplicates["groups"], duplicates["surplus"], duplicates["several_classes"]) == (3, 4, 1)
    groups = [(group["several_data"], group["several_classes"], group["count"]) for group in duplicates["listed"]]
    assert groups == [(True, False, 2), (False, True, 2), (False, False, 3)]
    assert [image["class"] for image in duplicates["listed"][1]["images"]] == ["a", "b"]


def test_count_ignored_files_counts_by_extension(tmp_path: Path) -> None:
    names = ("a/1.JPG", "a/2.heic", "a/.hidden", "b/deep/x.HEIC", "3.jpg", "b/long.abcdefghijklmnop")
    write_pictures(tmp_path, dict.fromkeys(names, 0))
    counts = count_ignored_files(str(tmp_path), (".jpg",), classes=True)
    assert counts == {".heic": 2, "(no ending)": 2, IN_ROOT: 1}
    assert IN_ROOT not in count_ignored_files(str(tmp_path), (".jpg",), classes=False)


@pytest.mark.parametrize("count", [0, 1])
def test_summary_of_only_damaged_images_has_no_sizes_classes_or_pixels(count: int) -> None:
    summary = make_summary([gl.Encoded(b"nothing")] * count + [gl.Encoded(b"x")])
    assert summary["damaged"]["count"] == count + 1
    assert (summary["sizes"], summary["classes"], summary["pixels"]) == ({}, {}, {"kinds": [], "levels": []})
    assert is_bad(summary)


def test_advice_titles_use_the_plural_for_several_images() -> None:
    photo = Image.fromarray(smooth_image(40, 40, 0))
    samples = [encode(photo.convert("LA").resize((20, 30))), encode(photo.convert("RGBA").resize((20, 31)))]
    samples += [gl.Encoded(b"nothing"), gl.Encoded(b"else"), *(encode(Image.new("RGB", (n, 50))) for n in (40, 41))]
    assert list(levels_by_title(make_summary(samples))) == [
        "2 images are damaged",
        "2 images of one colour",
        "2 images have transparency",
        "2 images have a side of fewer than 32 pixels",
    ]
