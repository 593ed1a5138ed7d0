"""The benchmark of scaled decoding: its statistics, the fit of its constants, and a short run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from helpers.generated_images import jpeg_bytes, smooth_image

import gpuload as gl
from benchmarks import scaled
from benchmarks.scaled import (
    FITTED,
    SCALED_FITTED,
    RegionMeasurement,
    apply_constants,
    count_cross_validated,
    count_robust,
    estimate_costs,
    fit_constants,
    is_near_best,
    is_settled,
    measure_region,
    read_constants,
    summarize,
)
from gpuload.decode import Decoder


def make_measurement(exact_ms: float, fast_ms: float, fast: bool, max_difference: int = 4) -> RegionMeasurement:
    return RegionMeasurement(
        exact_ms=exact_ms,
        fast_ms=fast_ms,
        resize_ms=1.0,
        settled=max_difference == 4,
        fast=fast,
        mean_difference=1.0,
        max_difference=max_difference,
        mean_squared_difference=255.0**2 / 10**max_difference,  # a PSNR of 10 dB times max_difference
        exact_terms=(0.0,) * 10,
        fast_terms=(0.0,) * 10,
    )


def test_is_near_best_and_summarize_compare_with_the_faster_method():
    assert is_near_best([make_measurement(10, 5, True)])
    assert is_near_best([make_measurement(10, 9.6, False)])
    assert not is_near_best([make_measurement(10, 9.4, False)])
    # the costs of a photograph's regions add up
    assert is_near_best([make_measurement(10, 9.4, False), make_measurement(20, 10, True)])
    assert not is_near_best([make_measurement(10, 9.4, False), make_measurement(10, 9.4, False)])
    photos = [
        [make_measurement(10, 5, True), make_measurement(10, 12, False)],
        [make_measurement(10, 12, True, max_difference=3)],
    ]
    summary = summarize(photos, [(30.0, 20.0), (33.0, 22.0), (29.0, 29.0)])
    assert (summary["photographs"], summary["regions"], summary["fast"]) == (2, 3, 2)
    assert (summary["photographs_near"], summary["regions_near"], summary["regions_settled"]) == (1, 2, 2)
    assert (summary["exact_ms"], summary["chosen_ms"], summary["better_ms"]) == (10, 9, pytest.approx(25 / 3))
    assert (summary["loader_exact_ms"], summary["loader_fast_ms"]) == pytest.approx((30, 20))
    assert (summary["most_levels"], summary["least_psnr_db"]) == (4, pytest.approx(30))


def test_estimate_costs_ignores_outliers():
    assert estimate_costs([(10, 20), (20, 40), (6, 20)]) == pytest.approx((26 / 3, 52 / 3))
    assert estimate_costs([(20, 10), (40, 20), (20, 10), (20, 3)]) == pytest.approx((46 / 3, 23 / 3))


def test_is_settled_once_the_ratio_is_known():
    assert is_settled([(10, 5)] * 5)
    assert is_settled([(5, 10)] * 5)
    assert is_settled([(10, 10.2), (10.2, 10)] * 3)
    assert not is_settled([(10, 5)] * 4 + [(10, 10)])
    assert is_settled([(10, 5)] * 8 + [(10, 10)])  # one outlier of nine
    assert not is_settled([(10, 9.4), (10, 9.6)] * 10)  # on both sides of the 5% that count as faster


def measurements_by_model(constants: np.ndarray, rng: np.random.Generator, count: int = 40) -> list[RegionMeasurement]:
    """Return regions whose costs follow a model with these constants, each measured at a different speed."""
    terms = rng.uniform(1e6, 1e7, (count, 2, 10)) * ([1] * 5 + [0] * 5, [1] + [0] * 4 + [1] * 5)  # exact, fast
    measurements = []
    for exact, fast in terms:
        speed = rng.uniform(0.5, 2) / 1e6
        costs = exact @ constants, fast @ constants, fast[-2:] @ constants[-2:]
        chosen = bool(rng.integers(2))
        measurements.append(
            RegionMeasurement(*(speed * cost for cost in costs), True, chosen, 0, 0, 0, tuple(exact), tuple(fast))
        )
    return measurements


def test_fit_constants_recovers_the_constants_of_a_model():
    rng = np.random.default_rng(3)
    constants = rng.uniform(0.5, 2, 10)
    fitted = fit_constants(measurements_by_model(constants, rng))
    assert list(fitted) == [*FITTED, *SCALED_FITTED]
    ratios = np.array(list(fitted.values())) / constants
    np.testing.assert_allclose(ratios, ratios[0], rtol=0.01)
    assert 0.5 < ratios[0] < 2  # the range of the speeds


def test_apply_constants_with_the_current_constants_repeats_the_measured_choices():
    photo = gl.Encoded(jpeg_bytes(smooth_image(900, 1400, 0), subsampling=0))
    regions = [(0, 0, 900, 1400), (0, 0, 700, 600), (300, 100, 600, 1300), (600, 200, 250, 400), (400, 0, 500, 470)]
    optional_measurements = [measure_region(Decoder(gl.Decode()), photo, region, 1, 1) for region in regions]
    measurements = [measurement for measurement in optional_measurements if measurement is not None]
    assert {measurement.fast for measurement in measurements} == {False, True}
    assert apply_constants(read_constants(), measurements) == measurements


def test_count_robust_requires_the_best_choice_with_shifted_constants():
    constants = list(read_constants().values())
    exact, fast = [0.0] * 10, [0.0] * 10
    exact[1], fast[8] = 1.1 / constants[1], 1 / constants[8]
    close_call = make_measurement(11, 10, True)._replace(exact_terms=tuple(exact), fast_terms=tuple(fast))
    assert apply_constants(read_constants(), [close_call])[0].fast
    assert count_robust([[close_call]]) == 0  # with a shifted constant, the method that costs 10% more is chosen
    clear_case = close_call._replace(exact_terms=tuple(2 * term for term in exact))
    assert count_robust([[clear_case]]) == 1


def test_count_cross_validated_fits_on_the_other_photographs():
    rng = np.random.default_rng(4)
    constants = rng.uniform(0.5, 2, 10)
    photos = [measurements_by_model(constants, rng, 4) for _ in range(40)]
    assert sum(map(is_near_best, photos)) < 30
    assert count_cross_validated([photos[:20], photos[20:]]) == [20, 20]


def test_scaled_benchmark_writes_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "a.jpg").write_bytes(jpeg_bytes(smooth_image(300, 400, 0)))
    report_path = tmp_path / "report.json"
    arguments = ["--photos", str(tmp_path), "--megapixels", "2", "--regions", "1", "--rounds", "1", "--most", "2"]
    assert scaled.main([*arguments, "--json", str(report_path)]) == 0
    assert "megapixels" in capsys.readouterr().out
    results = json.loads(report_path.read_text())
    assert results["results"]["2"]["photographs"] == 1
    assert results["results"]["2"]["psnr_db"] > 30
    assert results["fitted_ns"].keys() == {*FITTED, *SCALED_FITTED}
