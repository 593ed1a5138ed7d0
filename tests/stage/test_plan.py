"""Plans assign a backend to each transform, and are printed and shown in notebooks."""

from __future__ import annotations

import pytest
import torch
from helpers.html_cells import Cells

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


class PixelOnlyBackend(Backend):
    """A backend that supports only transforms of levels that do not move pixels."""

    name = "picky"

    def why_unsupported(self, outline, *, is_late=False, follows_own=True):
        if is_late and issubclass(outline.kind, CHANGES_PIXELS):
            return "it changes finished images"
        return "it moves pixels" if issubclass(outline.kind, Box | Flip | Warp) else None

    def level_runner(self, finish):
        raise NotImplementedError


def make_plan_of(*transforms):
    return make_plan(T.Chain(transforms), PixelOnlyBackend(torch.device("cpu")))


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
def test_outline_of_a_transform_has_the_kind_of_its_record(transform, kind):
    assert [outline.kind for outline in transform.outline] == ([] if kind is None else [kind])


def test_plan_runs_a_transform_on_torch_if_the_backend_does_not_support_it():
    plan = make_plan_of(T.Resize(9), T.RandomInvert(), T.RandomHorizontalFlip(), T.RandomSolarize(9), NORMALIZE)
    assert [step.backend for step in plan.steps] == ["torch", "picky", "torch", "picky", "picky"]
    assert plan.steps[0].reason == "it moves pixels"
    assert plan.steps[1].reason is None
    assert plan.backend_of("RandomSolarize") == "picky"


def test_backend_of_an_absent_transform_raises_key_error():
    with pytest.raises(KeyError, match="the chain has no transform called 'Resize'; its transforms: RandomInvert"):
        make_plan_of(T.RandomInvert()).backend_of("Resize")


def test_plan_runs_a_container_on_the_backend_only_if_all_its_transforms_can():
    apply = T.RandomApply([T.RandomInvert(), T.RandomGrayscale()])
    plan = make_plan_of(apply, T.RandomChoice([T.RandomInvert(), T.Resize(9)]))
    assert [step.backend for step in plan.steps] == ["picky", "torch"]
    assert plan.steps[1].reason == "Resize: it moves pixels"


@pytest.mark.parametrize(
    ("transforms", "backends", "reasons"),
    [
        ([T.RandomInvert(), NORMALIZE, T.RandomHorizontalFlip()], ["picky", "torch", "torch"],
         [None, "combined with RandomHorizontalFlip after it", "it moves pixels"]),
        ([NORMALIZE, T.RandomErasing(), T.MixUp(num_classes=2)], ["picky", "torch", "torch"],
         [None, "it changes finished images", "it changes finished images"]),
        ([T.ToDtype("float32", scale=True), T.RandomHorizontalFlip(), T.RandomInvert()], ["picky", "torch", "picky"],
         [None, "it moves pixels", None]),
        ([NORMALIZE, T.RandomErasing(), T.Identity(), T.ClampBoundingBoxes()], ["picky", "torch", "picky", "picky"],
         [None, "it changes finished images", None, None]),
    ],
    ids=["Normalize with the flip after it", "finished images", "levels after a conversion", "no pixels"],
)  # fmt: skip
def test_plan_gives_each_step_a_backend_and_a_reason(transforms, backends, reasons):
    plan = make_plan_of(*transforms)
    assert [step.backend for step in plan.steps] == backends
    assert [step.reason for step in plan.steps] == reasons


def test_plan_prints_each_view_and_module():
    views = T.MultiView([[T.RandomInvert()], [T.Resize(9)]])
    plan = make_plan(
        T.Chain([views, NORMALIZE, torch.nn.Identity()]), PixelOnlyBackend(torch.device("cpu")), note="so be it"
    )
    assert str(plan) == (
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


def test_plan_of_an_empty_chain_prints_only_the_backend():
    assert str(make_plan_of()) == "backend picky on cpu"


def test_table_escapes_all_text():
    cells = Cells(table("<b>", ("<i>", "n"), [("<script>alert('&')</script>", "12,345")]))
    assert cells.rows == [["<i>", "n"], ["<script>alert('&')</script>", "12,345"]]
    assert set(cells.tags) == {"table", "caption", "thead", "tbody", "tr", "th", "td"}


def test_table_aligns_numbers_right():
    assert '<td style="text-align: right">12 s</td>' in table("", ("a", "b"), [("x", "12 s")])
    assert "right" not in table("", (), [("x", "12 s")])


def test_table_without_column_heads_begins_each_row_with_a_head():
    assert Cells(table("", (), [("a", "b")])).tags == ["table", "tbody", "tr", "th", "td"]


def test_shorten_cuts_texts_above_100_characters():
    assert shorten("a" * 100) == "a" * 100
    assert shorten("a" * 101) == "a" * 99 + "…"


@pytest.mark.parametrize("text", ["http", "src=", "url(", "<style", "<script", "color"])
def test_html_of_a_plan_loads_nothing_and_sets_no_color(text):
    assert text not in gl.Loader(["a.jpg"], transforms=[T.Resize(8)], device="cpu").plan()._repr_html_()


def test_html_of_a_plan_has_the_text_of_its_printed_form():
    def brighten(images):
        return images

    views = T.MultiView([[T.Resize((16, 16))], [T.CenterCrop(8), T.RandomInvert()]])
    plan = gl.Loader(["a.jpg"], transforms=[views, T.Lambda(brighten)], device="cpu").plan()
    cells = Cells(plan._repr_html_())
    assert cells.tags.count("table") == 2
    printed = str(plan)
    for row in cells.rows:
        assert row == ["transform", "backend", "why"] or not [cell for cell in row if cell not in printed]
    assert [row[:2] for row in cells.rows].count(["Lambda(brighten)", "own"]) == 2
