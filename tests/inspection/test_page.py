"""The page: well formed, whole in itself, and safe whatever files are called."""

from __future__ import annotations

import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import lacking
import pytest
from inspected import folder, picture

import gpuload as gl
from gpuload import transforms as T
from gpuload.inspection.advice import advise
from gpuload.inspection.gather import gather, gather_pixels
from gpuload.inspection.page import render, visible
from gpuload.inspection.sheet import chosen, contact_sheet, thumbnails
from gpuload.inspection.summary import summarise

VOID = {"meta", "link", "img", "br", "hr", "input"}
HOSTILE = (
    "<script>alert(1)<",
    '"><img src=x onerror="alert(1)',
    "{{ 7*7 }}",
    "a\nb",
    "\x1b[31m",
    "\u202egnp",
    "&amp;lt;",
)


class Page(HTMLParser):
    """What a page consists of; elements have to be closed in order."""

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
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self._open or self._open[-1] != "style":
            self.text += data


def page_of(*datasets: Any, names: tuple[str, ...] = ("train", "val"), most: int | None = None) -> str:
    found = gather(datasets, names[: len(datasets)], workers=0)
    gather_pixels(found, most=most, workers=0)
    summary = summarise(found, ignored=[{".<b>": 1}] * len(datasets))
    rows = chosen(found, 4)
    listed = [image["row"] for group in summary["duplicates"]["files"]["listed"] for image in group["images"]]
    pictures = thumbnails(found, dict.fromkeys([*rows, *listed], 32), workers=0)
    recipe = [T.RandomResizedCrop(16)]
    sheet = contact_sheet(found, rows, recipe, pictures, draws=2, seed=0, workers=0)
    return render(summary, advise(summary), sheet, pictures, recipe=repr(recipe[0]), seed=0, version="1.2")


def check_alone(page: Page) -> None:
    """It refers to nothing outside of itself, and runs nothing."""
    for tag, attributes in page.elements:
        assert tag not in ("script", "iframe", "object", "embed", "form", "base")
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href", "srcset", "action", "data", "xlink:href"):
                assert str(value).startswith(("data:image/jpeg;base64,", "data:,", "#")), (tag, name, value)
            assert "url(" not in str(value)


def hostile_folder(root: Path) -> Path:
    for number, name in enumerate([*HOSTILE, "caf\udce9"]):
        (root / name).mkdir(parents=True)
        (root / name / f"{name}.jpg").write_bytes(picture(number % 3))  # some in several classes
        (root / name / f"bad {name}.jpg").write_bytes(b"<script>alert(2)</script>")
    return root


def test_names_of_files_are_text_and_nothing_else(tmp_path: Path) -> None:
    names = ("<script>x</script>", "</title><b>")
    text = page_of(
        gl.ImageFolder(hostile_folder(tmp_path / "1")), gl.ImageFolder(hostile_folder(tmp_path / "2")), names=names
    )
    page = Page(text)
    check_alone(page)
    assert not any(tag in ("b", "img") and attributes.get("onerror") for tag, attributes in page.elements)
    for name in HOSTILE:
        assert visible(name) in page.text
    assert "caf\\xe9" in page.text
    assert "\u202e" not in text
    assert "\x1b" not in text
    assert "49.jpg" not in page.text
    text.encode("utf-8")


def test_the_page_has_all_that_was_found(tmp_path: Path) -> None:
    first = gl.ImageFolder(folder(tmp_path / "1", {"cat": 30, "dog": 2}))
    second = gl.ImageFolder(folder(tmp_path / "2", {"cat": 1, "dog": 1}))
    text = page_of(first, second)
    page = Page(text)
    check_alone(page)
    sections = [attributes["id"] for tag, attributes in page.elements if tag == "section"]
    assert sections == ["advice", "sheet", "classes", "sizes", "formats", "pixels", "duplicates"]
    images = [attributes for tag, attributes in page.elements if tag == "img"]
    assert all(image["alt"] for image in images)
    assert {"cat, as it is stored", "cat, draw 1", "dog, draw 2"} <= {image["alt"] for image in images}
    assert "T.Normalize(mean=(" in page.text
    assert "in several data sets" in page.text
    for tag, attributes in page.elements:
        if tag == "svg":
            assert attributes["role"] == "img"
            assert attributes["aria-label"]
    assert 'lang="en"' in text
    assert "prefers-color-scheme: dark" in text


@pytest.mark.parametrize(
    "samples",
    [[gl.Encoded(b"nothing")], [gl.Encoded(picture(0))], [(gl.Encoded(picture(n)), n) for n in range(40)]],
    ids=["all damaged", "one image", "forty classes"],
)
def test_odd_data_makes_a_page(samples: list[Any]) -> None:
    check_alone(Page(page_of(samples)))


def test_a_page_without_pictures_says_so() -> None:
    page = Page(page_of([gl.Encoded(picture(0)), gl.Encoded(picture(0))], most=0))
    check_alone(page)
    assert "T.Normalize" not in page.text


def test_what_cannot_be_seen_is_written_out() -> None:
    assert visible("plain ünï") == "plain ünï"
    assert visible("a\tb\r\n\x00\u200b\udcff\ud800") == "a\\tb\\r\\n\\x00\\u200b\\xff\\ud800"


@pytest.mark.processes
def test_a_browser_opens_it_without_complaint(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
    if browser is None:
        lacking.skip("chromium")
    path = tmp_path / "page.html"
    path.write_text(page_of(gl.ImageFolder(hostile_folder(tmp_path / "data"))), encoding="utf-8")
    command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    done = subprocess.run(
        [*command, f"--user-data-dir={tmp_path}/profile", path.as_uri()], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr
    check_alone(Page(done.stdout))
    assert done.stdout.count("<img") > 4
