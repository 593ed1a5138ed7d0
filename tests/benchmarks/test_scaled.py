"""The benchmark of scaled decoding: what it makes of figures, and that it runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from pictures import jpeg_bytes, smooth_image

from benchmarks import scaled
from benchmarks.scaled import FITTED, SCALED_FITTED, Seen, fitted, near, summary


def seen(exact_ms: float, fast_ms: float, fast: bool, most: int = 4) -> Seen:
    return Seen(exact_ms, fast_ms, fast, 1.0, most, 255.0**2 / 10**most, (), ())


def test_choices_are_held_against_the_better_way():
    assert near([seen(10, 5, True)])
    assert near([seen(10, 9.6, False)])
    assert not near([seen(10, 9.4, False)])
    assert near([seen(10, 9.4, False), seen(20, 10, True)]), "the costs of a photograph's regions are added up"
    assert not near([seen(10, 9.4, False), seen(10, 9.4, False)])
    photos = [[seen(10, 5, True), seen(10, 12, False)], [seen(10, 12, True, most=3)]]
    found = summary(photos, [(30.0, 20.0), (29.0, 21.0)])
    assert (found["photographs"], found["regions"], found["fast"]) == (2, 3, 2)
    assert (found["photographs_near"], found["regions_near"]) == (1, 2)
    assert (found["exact_ms"], found["chosen_ms"], found["better_ms"]) == (10, 9, pytest.approx(25 / 3))
    assert (found["loader_exact_ms"], found["loader_fast_ms"]) == (29, 20)
    assert (found["most_levels"], found["least_psnr_db"]) == (4, pytest.approx(30))


def test_the_fit_finds_the_constants_that_made_the_figures():
    rng = np.random.default_rng(3)
    constants = rng.uniform(0.5, 2, 10)
    both = rng.uniform(1e6, 1e7, (40, 2, 10)) * ([1] * 5 + [0] * 5, [1] + [0] * 4 + [1] * 5)
    figures = [Seen(*(terms @ constants / 1e6), True, 0, 0, 0, *map(tuple, terms.tolist())) for terms in both]
    found = fitted(figures)
    assert list(found) == [*FITTED, *SCALED_FITTED]
    np.testing.assert_allclose(list(found.values()), constants, rtol=1e-6)


def test_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "a.jpg").write_bytes(jpeg_bytes(smooth_image(300, 400, 0)))
    written = tmp_path / "found.json"
    arguments = ["--photos", str(tmp_path), "--megapixels", "2", "--regions", "1", "--rounds", "1"]
    assert scaled.main([*arguments, "--json", str(written)]) == 0
    assert "2 megapixels" in capsys.readouterr().out
    results = json.loads(written.read_text())
    assert results["results"]["2"]["photographs"] == 1
    assert results["results"]["2"]["psnr_db"] > 30
    assert results["fitted_ns"].keys() == {*FITTED, *SCALED_FITTED}
