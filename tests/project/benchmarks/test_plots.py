"""The pictures and the table of README.md show what was recorded, and what transforms make."""

from __future__ import annotations

import json
import re
from pathlib import Path

import lacking
import numpy as np
import pytest
from PIL import Image

from benchmarks import plot_augmented, plot_rates

lacking.require("rich")

README = Path(__file__).parents[3] / "README.md"


@pytest.fixture(scope="module")
def recorded():
    return json.loads(plot_rates.RECORDED.read_text())


def test_the_table_of_the_readme_is_what_was_recorded(recorded):
    assert plot_rates.markdown_table(recorded["results"]) in README.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", plot_rates.PICTURES)
def test_the_plot_is_what_was_recorded(recorded, name, tmp_path):
    lacking.require("matplotlib")
    plot_rates.draw(recorded, tmp_path / name)
    drawn, kept = ((folder / name).read_text() for folder in (tmp_path, plot_rates.FOLDER))
    without_version = [re.sub(r"Matplotlib v[\d.]+", "", text) for text in (drawn, kept)]
    assert without_version[0] == without_version[1], "run `python -m benchmarks.plot_rates`"


@pytest.mark.slow
def test_the_photographs_are_what_transforms_make_of_them():
    lacking.require("skimage")
    with Image.open(plot_augmented.PICTURE) as kept:
        difference = np.abs(np.asarray(kept, np.int16) - np.asarray(plot_augmented.sheet(), np.int16))
    assert difference.mean() < 4, "run `python -m benchmarks.plot_augmented`"  # a JPEG's
    assert plot_augmented.PICTURE.stat().st_size < 200_000
