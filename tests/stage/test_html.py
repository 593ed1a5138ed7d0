"""Tables for notebooks."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

import gpuload as gl
from gpuload import transforms as T
from gpuload.stage.html import shortened, table


class Cells(HTMLParser):
    """The text of each cell, by rows, and all tags; AssertionError if one is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self._open.append(tag)
        self.tags.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def test_everything_is_escaped():
    text = table("<b>", ("<i>", "n"), [("<script>alert('&')</script>", "12,345")])
    found = Cells(text)
    assert found.rows == [["<i>", "n"], ["<script>alert('&')</script>", "12,345"]]
    assert set(found.tags) == {"table", "caption", "thead", "tbody", "tr", "th", "td"}


def test_numbers_stand_on_the_right():
    assert '<td style="text-align: right">12 s</td>' in table("", ("a", "b"), [("x", "12 s")])
    assert "right" not in table("", (), [("x", "12 s")])


def test_without_heads_each_row_has_one():
    assert Cells(table("", (), [("a", "b")])).tags == ["table", "tbody", "tr", "th", "td"]


def test_long_texts_are_cut():
    assert shortened("a" * 100) == "a" * 100
    assert shortened("a" * 101) == "a" * 99 + "…"


@pytest.mark.parametrize("of", ["http", "src=", "url(", "<style", "<script", "color"])
def test_nothing_is_loaded_and_no_colour_is_chosen(of):
    assert of not in gl.Loader(["a.jpg"], transforms=[T.Resize(8)], device="cpu").plan()._repr_html_()


def test_a_plan_says_in_a_notebook_what_it_prints():
    def brighten(images):
        return images

    views = T.MultiView([[T.Resize((16, 16))], [T.CenterCrop(8), T.RandomInvert()]])
    plan = gl.Loader(["a.jpg"], transforms=[views, T.Lambda(brighten)], device="cpu").plan()
    found = Cells(plan._repr_html_())
    assert found.tags.count("table") == 2
    printed = str(plan)
    for row in found.rows:
        if row != ["transform", "backend", "why"]:
            assert all(cell in printed for cell in row)
    assert [row[:2] for row in found.rows].count(["Lambda(brighten)", "own"]) == 2
