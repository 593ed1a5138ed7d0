"""The folder of JPEGs made from scikit-image's photographs, and the contact sheet."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path

import lacking
import numpy as np
import pytest
import torch
from PIL import Image

from gpuload.cli.pictures import PhotographsMissing, make_folder, make_picture, photographs
from gpuload.cli.sheet import ContactSheet, to_uint8

from_skimage = lacking.needs("skimage")


def gradient(width: int, height: int) -> Image.Image:
    y, x = np.mgrid[0:height, 0:width]
    return Image.fromarray(np.stack([x % 256, y % 256, (x + y) % 256], -1).astype(np.uint8))


def test_a_picture_is_a_function_of_its_number() -> None:
    photograph = gradient(640, 480)
    first, again, other = (make_picture(photograph, number) for number in (7, 7, 8))
    assert first == again
    assert first != other
    assert Image.open(io.BytesIO(first)).size in {(500, 375), (500, 333), (375, 500), (400, 400)}


@pytest.mark.slow
@from_skimage
def test_folder_is_made_once_and_finished_after_a_break(tmp_path: Path) -> None:
    root = tmp_path / "made"
    seen: list[int] = []
    assert make_folder(root, count=16, progress=seen.append) == root
    assert seen == list(range(1, 17))
    files = sorted(root.glob("*/*.jpg"))
    assert len(files) == 16
    assert {file.parent.name for file in files} == set(photographs())
    stamps = [file.stat().st_mtime_ns for file in files]
    make_folder(root, count=16)
    assert [file.stat().st_mtime_ns for file in files] == stamps

    def interrupt(made: int) -> None:
        if made == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_folder(root, count=20, progress=interrupt)
    make_folder(root, count=20)
    assert len(list(root.glob("*/*.jpg"))) == 20


@from_skimage
def test_a_folder_of_the_users_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("…")
    with pytest.raises(FileExistsError, match="was not made here: remove it, or choose another folder"):
        make_folder(tmp_path / "mine", count=8)
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_without_scikit_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PhotographsMissing, match=r"pip install 'gpuload\[demo\]'"):
        photographs()


def test_normalised_images_come_back_as_they_were() -> None:
    pixels = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).expand(2, 3, 16, 16)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    normalised = (pixels / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    assert (to_uint8(normalised, mean, std) == pixels.permute(0, 2, 3, 1).numpy()).all()


def test_sheet_has_a_row_for_each_class(tmp_path: Path) -> None:
    sheet = ContactSheet(["red", "green"], columns=3)
    red, green = np.zeros((2, 1, 8, 8, 3), np.uint8)
    red[..., 0] = green[..., 1] = 200
    sheet.add(np.concatenate([green, red, red, red, red]), [1, 0, 0, 0, 0])
    assert not sheet.full
    sheet.add(np.concatenate([green, green]), [1, 1])
    assert sheet.full
    sheet.write(tmp_path / "new" / "sheet.png")
    with Image.open(tmp_path / "new" / "sheet.png") as picture:
        assert picture.size == (6 + 3 * 134, 6 + 2 * 152)
        colours = [
            picture.getpixel((6 + 64 + 134 * column, 6 + 18 + 64 + 152 * row)) for row in (0, 1) for column in (0, 1, 2)
        ]
    assert colours == [(200, 0, 0)] * 3 + [(0, 200, 0)] * 3


def test_sheet_without_classes_fills_row_by_row(tmp_path: Path) -> None:
    sheet = ContactSheet([], rows=2, columns=2)
    sheet.add(np.zeros((3, 8, 8, 3), np.uint8), None)
    assert [len(row) for row in sheet.rows] == [2, 1]
    sheet.write(tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as picture:
        assert picture.size == (6 + 2 * 134, 6 + 2 * 134)
