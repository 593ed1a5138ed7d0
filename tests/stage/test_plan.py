"""Which backend runs which transform, and how that is shown, in notebooks too."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
import torch

import gpuload as gl
from gpuload import transforms as T
from gpuload.stage.backend import Backend
from gpuload.stage.plan import make_plan, shorten, table
from gpuload.transforms.program.ops import (
    CHANGES_PIXELS,
    Box,
    ChainMixture,
    Clamp,
    Erase,
    Flip,
    Numbers,
    Ops,
    PartnerMix,
    Warp,
)


class Picky(Backend):
    """Has what moves no pixels, and of finished images nothing."""

    name = "picky"

    def why_unsupported(self, outline, *, is_late=False, follows_own=True):
        if is_late and issubclass(outline.kind, CHANGES_PIXELS):
            return "it is late"
        return "it moves pixels" if issubclass(outline.kind, Box | Flip | Warp) else None

    def level_runner(self, finish):
        raise NotImplementedError


def plan(*transforms):
    return make_plan(T.Chain(transforms), Picky(torch.device("cpu")))


NORMALIZE = T.Normalize([0.5] * 3, [0.5] * 3)


@pytest.mark.parametrize(
    ("transform", "kind"),
    [
        (T.RandomCrop(9999), Box),
        (T.RandomIoUCrop(), Box),
        (T.RandomZoomOut(), Box),
        (T.RandomVerticalFlip(), Flip),
        (T.RandomRotation(3), Warp),
        (T.RandAugment(), Ops),
        (T.AugMix(), ChainMixture),
        (T.RandomErasing(), Erase),
        (T.CutMix(num_classes=2), PartnerMix),
        (T.RandomOrder([T.RandomInvert()]), Ops),
        (NORMALIZE, Numbers),
        (T.Identity(), None),
        (T.ClampBoundingBoxes(), Clamp),
    ],
)
def test_kinds(transform, kind):
    assert [outline.kind for outline in transform.outline] == ([] if kind is None else [kind])


def test_each_transform_runs_where_it_can():
    found = plan(T.Resize(9), T.RandomInvert(), T.RandomHorizontalFlip(), T.RandomSolarize(9), NORMALIZE)
    assert [step.backend for step in found.steps] == ["torch", "picky", "torch", "picky", "picky"]
    assert found.steps[0].reason == "it moves pixels"
    assert found.steps[1].reason is None
    assert found.backend_of("RandomSolarize") == "picky"


def test_a_name_that_is_not_there():
    with pytest.raises(KeyError, match="the chain has no transform called 'Resize'; its transforms: RandomInvert"):
        plan(T.RandomInvert()).backend_of("Resize")


def test_one_that_holds_others_runs_where_all_of_them_can():
    found = plan(
        T.RandomApply([T.RandomInvert(), T.RandomGrayscale()]), T.RandomChoice([T.RandomInvert(), T.Resize(9)])
    )
    assert [step.backend for step in found.steps] == ["picky", "torch"]
    assert found.steps[1].reason == "Resize: it moves pixels"


def test_images_are_finished_where_they_are_written():
    found = plan(T.RandomInvert(), NORMALIZE, T.RandomHorizontalFlip())
    assert [step.backend for step in found.steps] == ["picky", "torch", "torch"]
    assert found.steps[1].reason == "combined with RandomHorizontalFlip after it"


def test_finished_images():
    found = plan(NORMALIZE, T.RandomErasing(), T.MixUp(num_classes=2))
    assert [(step.backend, step.reason) for step in found.steps] == [
        ("picky", None),
        ("torch", "it is late"),
        ("torch", "it is late"),
    ]


def test_levels_that_go_on_elsewhere_after_the_conversion():
    found = plan(T.ToDtype("float32", scale=True), T.RandomHorizontalFlip(), T.RandomInvert())
    assert [step.backend for step in found.steps] == ["picky", "torch", "picky"]


def test_what_does_nothing_to_images_runs_anywhere():
    found = plan(NORMALIZE, T.RandomErasing(), T.Identity(), T.ClampBoundingBoxes())
    assert [step.backend for step in found.steps] == ["picky", "torch", "picky", "picky"]


def test_views_and_modules():
    views = T.MultiView([[T.RandomInvert()], [T.Resize(9)]])
    found = make_plan(T.Chain([views, NORMALIZE, torch.nn.Identity()]), Picky(torch.device("cpu")), note="so be it")
    assert str(found) == (
        "backend picky on cpu (so be it)\n"
        "view 1\n"
        "  RandomInvert()                                        picky\n"
        "  Normalize(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))  picky\n"
        "view 2\n"
        "  Resize(size=9)                                        torch   it moves pixels\n"
        "  Normalize(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))  picky\n"
        "  Identity                                              module  "
        "applied to the finished batch; gets only the images"
    )


def test_an_empty_chain():
    assert str(plan()) == "backend picky on cpu"


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
    assert shorten("a" * 100) == "a" * 100
    assert shorten("a" * 101) == "a" * 99 + "…"


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
