"""Pictures for the page: what they show."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from inspected import folder
from PIL import Image

import gpuload as gl
from gpuload import transforms as T
from gpuload.inspection.gather import Gathered, gather, gather_pixels
from gpuload.inspection.sheet import Strip, chosen, contact_sheet, thumbnails

GREY = np.full((40, 60, 3), (200, 100, 50), np.uint8)


def gathered(dataset: Any) -> Gathered:
    found = gather([dataset], ["x"], workers=0)
    gather_pixels(found, most=None, workers=0)
    return found


def sheet(dataset: Any, recipe: list[Any], *, draws: int = 2, images: int = 8) -> list[Strip]:
    found = gathered(dataset)
    rows = chosen(found, images)
    before = thumbnails(found, dict.fromkeys(rows, 32), workers=0)
    return contact_sheet(found, rows, recipe, before, draws=draws, seed=0, workers=0)


def shown(uri: str | None) -> np.ndarray:
    assert uri is not None
    kind, _, data = uri.partition(",")
    assert kind == "data:image/jpeg;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))


@pytest.mark.parametrize(
    "recipe",
    [
        [],
        [T.Normalize((0.4, 0.5, 0.6), (0.2, 0.3, 0.4))],
        [T.ToDtype("float32", scale=True)],
        [T.ToDtype("float32")],
        [T.ToDtype("bfloat16", scale=True), T.Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))],
    ],
)
def test_pictures_look_like_images_whatever_their_numbers_are(recipe: list[Any]) -> None:
    (strip,) = sheet([gl.Image(GREY)], recipe)
    assert strip.size == (60, 40)
    assert shown(strip.before).shape == (21, 32, 3)
    assert len(strip.after) == 2
    for picture in map(shown, strip.after):
        assert picture.shape == (40, 60, 3)
        assert np.abs(picture.astype(int) - GREY[0, 0]).max() <= 6  # JPEG, bfloat16


def test_each_draw_is_another_and_the_seed_makes_them_again(tmp_path: Path) -> None:
    dataset = gl.ImageFolder(folder(tmp_path, {"a": 2, "b": 1, "c": 1}))
    recipe = [T.RandomResizedCrop(24), T.RandomHorizontalFlip()]
    strips = sheet(dataset, recipe, draws=3)
    assert [strip.label for strip in strips] == ["a", "a", "b", "c"]
    assert strips[0].name == "a/0.jpg"
    for strip in strips:
        assert len(set(strip.after)) == 3
    assert sheet(dataset, recipe, draws=3) == strips


def test_images_are_of_as_many_classes_as_there_can_be(tmp_path: Path) -> None:
    found = gathered(gl.ImageFolder(folder(tmp_path, {"a": 9, "b": 1, "c": 3, "d": 1})))
    assert {found.classes[found.rows["label"][row]] for row in chosen(found, 4)} == set("abcd")
    assert len(chosen(found, 3)) == 3
    assert len(chosen(found, 100)) == 14
    assert chosen(found, 0) == []


@pytest.mark.parametrize(
    ("recipe", "pictures"),
    [
        ([T.MultiView([[T.CenterCrop(16)], [T.CenterCrop(16)], [T.CenterCrop(24)]])], 3),
        ([T.Resize((16, 16)), T.ToDtype("float32", scale=True), T.MixUp(num_classes=2)], 1),
        ([T.RandomShortestSize(16)], 1),
        ([T.CenterCrop(16), T.Normalize((0.5,) * 3, (0.5,) * 3), torch.nn.Identity()], 1),
    ],
)
def test_recipes_of_any_kind_are_shown(tmp_path: Path, recipe: list[Any], pictures: int) -> None:
    strips = sheet(gl.ImageFolder(folder(tmp_path, {"a": 2, "b": 2})), recipe, draws=1)
    assert [len(strip.after) for strip in strips] == [pictures] * 4


def test_deep_and_grey_images_are_shown() -> None:
    ramp = np.arange(40 * 60, dtype=np.uint16).reshape(40, 60) * 27
    file = io.BytesIO()
    Image.fromarray(ramp).save(file, "PNG")
    (strip,) = sheet([gl.Encoded(file.getvalue())], [T.CenterCrop(40)])
    before = shown(strip.before)
    assert before.shape[2] == 3
    assert before[0].max() < 20
    assert before[-1].min() > 230


def test_what_cannot_be_shown_is_left_out(tmp_path: Path) -> None:
    dataset = gl.ImageFolder(folder(tmp_path, {"a": 3}))
    found = gathered(dataset)
    (tmp_path / "a" / "1.jpg").write_bytes(b"nothing")  # meanwhile
    found.rows["state"][2] = 2
    assert list(thumbnails(found, {0: 32, 1: 32, 2: 32}, workers=0)) == [0]


def test_a_recipe_that_cannot_be_applied_says_why(tmp_path: Path) -> None:
    with pytest.raises(gl.SampleError, match=r"a/0\.jpg"):
        sheet(gl.ImageFolder(folder(tmp_path, {"a": 1})), [T.RandomCrop(100)])
