"""A loader as notebooks show it."""

from __future__ import annotations

import html

import numpy as np
import torch
from stage.test_html import Cells

import gpuload as gl
from gpuload import transforms as T

PICTURES = [np.full((20, 24, 3), number, np.uint8) for number in range(1, 7)]


def rows(loader):
    return dict(Cells(loader._repr_html_()).rows)


def test_a_loader():
    loader = gl.Loader(PICTURES, 2, transforms=[T.CenterCrop(16)], num_workers=0, device="cpu", seed=7)
    found = rows(loader)
    assert found["samples"] == "6"
    assert found["shuffle, seed"] == "False, 7"
    assert found["transforms"] == "CenterCrop(size=(16, 16))"
    assert found["epoch"] == "0, not begun"
    with loader:
        next(iter(loader))
        assert rows(loader)["epoch"] == "0, begun"


def test_names_of_the_users_own_are_escaped_and_cut():
    class Named(list):
        def __repr__(self):
            return "<img src=x onerror=alert(1)>" + "x" * 100 + "the end"

    loader = gl.Loader(Named(PICTURES), num_workers=0, device="cpu")
    assert "<img" not in loader._repr_html_()
    assert rows(loader)["dataset"].startswith("<img src=x")
    assert rows(loader)["dataset"].endswith("the end")  # cut in the middle
    assert len(rows(loader)["dataset"]) == 100


def test_a_long_list_is_not_written_out():
    class Counted:
        calls = 0

        def __repr__(self):
            Counted.calls += 1
            return "one"

    loader = gl.Loader([Counted()] * 1000, num_workers=0, device="cpu")
    assert rows(loader)["dataset"] == "[one, one, one, one, one, one, ...]"
    assert Counted.calls == 6


def test_statistics_say_in_a_notebook_what_they_print():
    with gl.Loader(PICTURES, 2, transforms=[T.CenterCrop(16)], num_workers=0, device="cpu") as loader:
        assert Cells(loader.stats()._repr_html_()).rows == []
        for _ in loader:
            pass
        stats = loader.stats()
    found, printed = Cells(stats._repr_html_()), str(stats)
    assert found.rows[0] == ["part", "where", "share", "total", "each", "rate"]
    assert {row[0] for row in found.rows} >= {"read", "decode", "stage", "next()", "ring", "faults"}
    for row in found.rows:
        assert all(cell in printed for cell in row)
    assert stats.advice in html.unescape(stats._repr_html_())


def test_no_device_is_asked(monkeypatch):
    loader = gl.Loader(PICTURES, num_workers=0)

    def ask(*given):
        raise AssertionError("a device was asked")

    monkeypatch.setattr(torch.accelerator, "current_device_index", ask)
    monkeypatch.setattr(torch.cuda, "is_available", ask)
    assert rows(loader)["device"] == "the current GPU, or the CPU"
