"""The HTML page: well formed, self-contained and safe for any file name; and its pictures."""

from __future__ import annotations

import base64
import io
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import lacking
from helpers.chromium import dump_dom, find_chromium
from helpers.picture_folders import folder, picture
from PIL import Image

import gpuload as gl
from gpuload import transforms as T
from gpuload.inspection import page as page_module
from gpuload.inspection.files import REFUSED
from gpuload.inspection.measure import Measurements, measure_files, measure_pixels
from gpuload.inspection.page import choose_rows, duplicate_rows, make_contact_sheet, make_pictures, render, visible
from gpuload.inspection.summary import advise, summarise

VOID_TAGS = {"meta", "link", "img", "br", "hr", "input"}
HOSTILE_NAMES = (
    "<script>alert(1)<",
    '"><img src=x onerror="alert(1)',
    "{{ 7*7 }}",
    "a\nb",
    "\x1b[31m",
    "\u202egnp",
    "&amp;lt;",
)


class Page(HTMLParser):
    """The elements and the text of a page, whose elements must be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID_TAGS:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self._open or self._open[-1] != "style":
            self.text += data


def render_page(*datasets: Any, names: tuple[str, ...] = ("train", "val"), max_images: int | None = None) -> str:
    measured = measure_files(datasets, names[: len(datasets)], workers=0)
    measure_pixels(measured, max_images=max_images, workers=0)
    summary = summarise(measured, ignored=[{".<b>": 1}] * len(datasets))
    rows = choose_rows(measured, 4)
    originals = make_pictures(measured, dict.fromkeys([*rows, *duplicate_rows(summary)], 32), workers=0)
    recipe = [T.RandomResizedCrop(16)]
    strips = make_contact_sheet(measured, rows, recipe, draws=2, seed=0, workers=0)
    return render(summary, advise(summary), strips, originals, recipe=repr(recipe[0]), seed=0, version="1.2")


def check_self_contained(page: Page) -> None:
    """Check that a page refers to nothing outside and runs no script."""
    for tag, attributes in page.elements:
        assert tag not in ("script", "iframe", "object", "embed", "form", "base")
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href", "srcset", "action", "data", "xlink:href"):
                assert str(value).startswith(("data:image/jpeg;base64,", "data:,", "#")), (tag, name, value)
            assert "url(" not in str(value)


def write_hostile_folder(root: Path) -> Path:
    for number, name in enumerate([*HOSTILE_NAMES, "caf\udce9"]):
        (root / name).mkdir(parents=True)
        (root / name / f"{name}.jpg").write_bytes(picture(number % 3))  # duplicates across classes
        (root / name / f"bad {name}.jpg").write_bytes(b"<script>alert(2)</script>")
    return root


def test_hostile_file_and_class_names_are_escaped(tmp_path: Path) -> None:
    names = ("<script>x</script>", "</title><b>")
    folders = [write_hostile_folder(tmp_path / number) for number in "12"]
    html = render_page(*map(gl.ImageFolder, folders), names=names)
    page = Page(html)
    check_self_contained(page)
    for name in HOSTILE_NAMES:
        assert visible(name) in page.text
    assert "caf\\xe9" in page.text
    assert "\u202e" not in html
    assert "\x1b" not in html
    assert "49.jpg" not in page.text, "{{ 7*7 }} in a name was evaluated"
    html.encode("utf-8")


def test_page_has_every_section_and_describes_its_images(tmp_path: Path) -> None:
    train = gl.ImageFolder(folder(tmp_path / "1", {"cat": 30, "dog": 2}))
    val = gl.ImageFolder(folder(tmp_path / "2", {"cat": 1, "dog": 1}))
    html = render_page(train, val)
    page = Page(html)
    check_self_contained(page)
    sections = [attributes["id"] for tag, attributes in page.elements if tag == "section"]
    assert sections == ["advice", "sheet", "classes", "sizes", "formats", "pixels", "duplicates"]
    images = [attributes for tag, attributes in page.elements if tag == "img"]
    assert "" not in {image["alt"] or "" for image in images}
    assert {"cat, original", "cat, draw 1", "dog, draw 2"} <= {image["alt"] for image in images}
    assert "T.Normalize(mean=(" in page.text
    assert "in several datasets" in page.text
    charts = [attributes for tag, attributes in page.elements if tag == "svg"]
    assert charts
    assert all(chart["role"] == "img" and chart["aria-label"] for chart in charts), charts
    assert 'lang="en"' in html
    assert "prefers-color-scheme: dark" in html


@pytest.mark.parametrize(
    ("samples", "max_images", "normalizes"),
    [
        ([gl.Encoded(b"nothing")], None, False),
        ([gl.Encoded(picture(0))], None, True),
        ([(gl.Encoded(picture(n)), n) for n in range(40)], None, True),
        ([gl.Encoded(picture(0))] * 2, 0, False),
    ],
    ids=["all damaged", "one image", "forty classes", "no pixels"],
)
def test_page_suggests_normalize_if_pixels_were_measured(samples: list[Any], max_images: int, normalizes: bool) -> None:
    page = Page(render_page(samples, max_images=max_images))
    check_self_contained(page)
    assert ("T.Normalize" in page.text) == normalizes


def test_visible_escapes_control_and_surrogate_characters() -> None:
    assert visible("plain ünï") == "plain ünï"
    assert visible("a\tb\r\n\x00\u200b\udcff\ud800") == "a\\tb\\r\\n\\x00\\u200b\\xff\\ud800"


@pytest.mark.processes
def test_chromium_opens_the_page_without_console_messages(tmp_path: Path) -> None:
    if find_chromium() is None:
        lacking.skip("chromium")
    path = tmp_path / "page.html"
    path.write_text(render_page(gl.ImageFolder(write_hostile_folder(tmp_path / "data"))), encoding="utf-8")
    dom, console = dump_dom(path.as_uri(), f"--user-data-dir={tmp_path}/profile")
    assert console == []
    check_self_contained(Page(dom))
    assert dom.count("<img") > 4


# -- pictures ----------------------------------------------------------------------------------------------------------


COLOR = (200, 100, 50)
PLAIN = np.full((40, 60, 3), COLOR, np.uint8)


def measure(dataset: Any) -> Measurements:
    measured = measure_files([dataset], ["x"], workers=0)
    measure_pixels(measured, max_images=None, workers=0)
    return measured


def make_strips(dataset: Any, recipe: list[Any], *, draws: int = 2, images: int = 8) -> list[dict[str, Any]]:
    """Return the strips of a contact sheet, with each image ``before`` the recipe."""
    measured = measure(dataset)
    rows = choose_rows(measured, images)
    before = make_pictures(measured, dict.fromkeys(rows, 32), workers=0)
    strips = make_contact_sheet(measured, rows, recipe, draws=draws, seed=0, workers=0)
    return [{**strip, "before": before[strip["row"]][0]} for strip in strips]


def decode_data_uri(uri: str | None) -> np.ndarray:
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
def test_contact_sheet_restores_the_colors_of_normalized_and_float_images(recipe: list[Any]) -> None:
    (strip,) = make_strips([gl.Image(PLAIN)], recipe)
    assert strip["size"] == (60, 40)
    assert decode_data_uri(strip["before"]).shape == (21, 32, 3)
    assert len(strip["after"]) == 2
    for image in map(decode_data_uri, strip["after"]):
        assert image.shape == (40, 60, 3)
        assert np.abs(image.astype(int) - COLOR).max() <= 6  # levels, from the rounding of JPEG and bfloat16


def test_make_pictures_loads_originals_singly_and_a_recipes_images_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Originals loaded one by one lose only a damaged image itself. An empty recipe is still a recipe."""
    sizes: list[int] = []

    def loader(dataset: Any, batch_size: int, **options: Any) -> gl.Loader:
        sizes.append(batch_size)
        return gl.Loader(dataset, batch_size, **options)

    monkeypatch.setattr(page_module, "Loader", loader)
    measured = measure([gl.Image(PLAIN)] * 3)
    make_pictures(measured, dict.fromkeys(range(3), 32), workers=0)
    make_pictures(measured, dict.fromkeys(range(3), 32), [], workers=0)
    assert sizes == [1, 3]


def test_contact_sheet_draws_differ_and_repeat_with_the_seed(tmp_path: Path) -> None:
    dataset = gl.ImageFolder(folder(tmp_path, {"a": 2, "b": 1, "c": 1}))
    recipe = [T.RandomResizedCrop(24), T.RandomHorizontalFlip()]
    strips = make_strips(dataset, recipe, draws=3)
    assert [strip["label"] for strip in strips] == ["a", "a", "b", "c"]
    assert strips[0]["name"] == "a/0.jpg"
    for strip in strips:
        assert len(set(strip["after"])) == 3
    assert make_strips(dataset, recipe, draws=3) == strips


def test_choose_rows_covers_as_many_classes_as_possible(tmp_path: Path) -> None:
    measured = measure(gl.ImageFolder(folder(tmp_path, {"a": 9, "b": 1, "c": 3, "d": 1})))
    assert {measured.class_name(row) for row in choose_rows(measured, 4)} == set("abcd")
    assert len(choose_rows(measured, 3)) == 3
    assert len(choose_rows(measured, 100)) == 14
    assert choose_rows(measured, 0) == []


@pytest.mark.parametrize(
    ("recipe", "views"),
    [
        ([T.MultiView([[T.CenterCrop(16)], [T.CenterCrop(16)], [T.CenterCrop(24)]])], 3),
        ([T.Resize((16, 16)), T.ToDtype("float32", scale=True), T.MixUp(num_classes=2)], 1),
        ([T.RandomShortestSize(16)], 1),
        ([T.CenterCrop(16), T.Normalize((0.5,) * 3, (0.5,) * 3), torch.nn.Identity()], 1),
    ],
)
def test_contact_sheet_shows_each_view_of_a_recipe(tmp_path: Path, recipe: list[Any], views: int) -> None:
    strips = make_strips(gl.ImageFolder(folder(tmp_path, {"a": 2, "b": 2})), recipe, draws=1)
    assert [len(strip["after"]) for strip in strips] == [views] * 4


def test_contact_sheet_scales_16_bit_gray_images() -> None:
    ramp = np.arange(40 * 60, dtype=np.uint16).reshape(40, 60) * 27  # 0 to 64,773 of 65,535
    file = io.BytesIO()
    Image.fromarray(ramp).save(file, "PNG")
    (strip,) = make_strips([gl.Encoded(file.getvalue())], [T.CenterCrop(40)])
    before = decode_data_uri(strip["before"])
    assert before.shape[2] == 3
    assert before[0].max() < 20
    assert before[-1].min() > 230


def test_make_pictures_drops_damaged_and_refused_images(tmp_path: Path) -> None:
    dataset = gl.ImageFolder(folder(tmp_path, {"a": 3}))
    measured = measure(dataset)
    (tmp_path / "a" / "1.jpg").write_bytes(b"nothing")  # after it was measured
    measured.rows["state"][2] = REFUSED
    assert list(make_pictures(measured, {0: 32, 1: 32, 2: 32}, workers=0)) == [0]


def test_recipe_that_cannot_be_applied_raises_sample_error(tmp_path: Path) -> None:
    with pytest.raises(gl.SampleError, match=r"a/0\.jpg"):
        make_strips(gl.ImageFolder(folder(tmp_path, {"a": 1})), [T.RandomCrop(100)])
