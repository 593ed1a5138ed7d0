"""The tables and pictures of pages equal the recorded results, and the output of transforms."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from helpers import lacking
from PIL import Image

from benchmarks import plot_augmented, plot_rates


@pytest.fixture(scope="module")
def recorded():
    return json.loads(plot_rates.RECORDED.read_text())


@pytest.mark.parametrize("page", plot_rates.PAGES, ids=lambda page: page.name)
def test_tables_of_a_page_equal_the_recorded_results(recorded, page):
    text = page.read_text()
    assert plot_rates.fill_page(text, plot_rates.format_tables(recorded)) == text, (
        "run `python -m benchmarks.plot_rates`"
    )


def test_each_table_has_a_place_on_a_page(recorded):
    places = re.findall(r"<!-- measured: (.+) -->", "".join(page.read_text() for page in plot_rates.PAGES))
    assert sorted(places) == sorted(plot_rates.format_tables(recorded))


def test_fill_page_replaces_tables():
    page = "a\n\n<!-- measured: one -->\n| old |\n| 1 |\n\n<!-- measured: two -->\n\nz\n"
    assert plot_rates.fill_page(page, {"one": "| new |\n", "two": "- 2\n"}) == (
        "a\n\n<!-- measured: one -->\n| new |\n\n<!-- measured: two -->\n- 2\n\nz\n"
    )
    with pytest.raises(ValueError, match="measured: one --> is none of two"):
        plot_rates.fill_page(page, {"two": ""})


def test_format_tables_lists_measured_loaders_by_rate():
    costs = {"cpu_s_per_1000": [2.0], "worker_mb": 0.0}
    results = {
        "torch_pillow": [{"images_per_s": [50], **costs, "worker_mb": 160}] * 2,
        "turboloader": [{"images_per_s": [80], **costs}] * 2,
        "gpuload": [{"images_per_s": [70], **costs, "first_batch_s": 0.25, "worker_mb": 35, "worker_share_mb": 18}] * 2,
    }
    assert plot_rates.sort_by_rate(results) == ["gpuload", "turboloader", "torch_pillow"]
    recorded = {
        "results": results,
        "photos": {"files": 2000, "mean_kb": 129.6},
        "recipe": {"workers": 2},
        "machine": {"cpu": "A CPU", "cpus": 2},
        "versions": {"torch": "2.13"},
    }
    texts = plot_rates.format_tables(recorded)
    assert texts["about"] == "2 rounds over 2,000 files of 130 KB, 2 workers on 2 CPUs (A CPU);\ntorch 2.13.\n"
    assert texts["whole"] == ""
    assert texts["readme"].splitlines()[2:] == [
        "| gpuload | 70 |  | 2.00 | 35 |",
        "| TurboLoader (CPU), decoding at a reduced size | 80 | 0.88 × | 2.00 | – |",
        "| torch DataLoader + torchvision v2, Pillow | 50 | 1.40 × | 2.00 | 160 |",
    ]
    assert texts["loaders"].splitlines()[2:] == [
        "| gpuload | 70 |  | 2 | 0.25 | 35 |",
        "| TurboLoader, decoding at a reduced size | 80 | 0.88 × (0.88 … 0.88) | 2 | – | – |",
        "| DataLoader, Pillow | 50 | 1.40 × (1.40 … 1.40) | 2 | – | 160 |",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", plot_rates.PICTURE_COLOURS)
def test_plot_equals_the_committed_one(recorded, name, tmp_path):
    lacking.require("matplotlib")
    plot_rates.draw(recorded, tmp_path / name)
    drawn, committed = ((folder / name).read_text() for folder in (tmp_path, plot_rates.FOLDER))
    without_version = [re.sub(r"Matplotlib v[\d.]+", "", text) for text in (drawn, committed)]
    assert without_version[0] == without_version[1], "run `python -m benchmarks.plot_rates`"


@pytest.mark.slow
def test_sheet_of_augmented_photographs_equals_the_committed_one():
    lacking.require("skimage")
    with Image.open(plot_augmented.PICTURE) as committed:
        difference = np.abs(np.asarray(committed, np.int16) - np.asarray(plot_augmented.draw_sheet(), np.int16))
    assert difference.mean() < 4, "run `python -m benchmarks.plot_augmented`"  # the difference of a JPEG
    assert plot_augmented.PICTURE.stat().st_size < 200_000
