"""Savings and pixel differences of `Decode(scale="fast")` on photographs of several megapixels, and its cost model.

    python -m benchmarks.scaled --photos DIR [--json FILE]

Each photograph is enlarged and written as a JPEG, every other one with 4:2:0. In every round, regions drawn by
RandomResizedCrop and the full picture are brought to 224×224 in two ways, one after the other: "exact", decoded at full
size, and "fast", decoded at a smaller size and resized. The time of the exact way excludes the resize, which the stage
does. The model's choice is compared with the cheaper way, and the pixels of both ways with each other after the resize,
which Pillow does for both here. Then a loader in this process runs over the files in both ways, once per round. It
begins cold in each round, so its times include the start of both ways.

On a shared machine, a thread's CPU times change by half within seconds, and one lucky round is enough to make the
minimum of many times misleading. The two times of one round change alike. So the ways are compared by the median of the
rounds' ratios (`estimate_costs`), and rounds are added until that median is known well enough, whatever the model chose
(`is_settled`).

Finally, the constants of `gpuload/decode/scaled.py` are fitted to the ratios (`fit_constants`), over all photographs.
Cross-validation (`count_cross_validated`) fits constants to each half of the photographs and lets them choose for the
other half. `count_robust` shows how sensitive the choices are to errors in the constants.
"""

from __future__ import annotations

import io
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

import gpuload as gl
from benchmarks.machine import versions
from benchmarks.peers.decoder_alone import draw_region
from benchmarks.photos import find_photos, list_jpegs
from benchmarks.running import describe_machine, format_table, make_parser, write_results
from gpuload import transforms as T
from gpuload.decode import Decoder
from gpuload.decode import scaled as model
from gpuload.decode.header import mcu_layout
from gpuload.decode.scaled import EIGHTHS, SUPPORT, Scaled, resample

SIZE, FILTER, NEAR = (224, 224), "bilinear", 1.05
ABSOLUTE_WEIGHT = 0.1  # weight of absolute costs in the fit, relative to comparisons of two costs
FITTED = ("byte", "REGION_SAMPLE_NS", "REGION_PIXEL_NS", "WHOLE_SAMPLE_NS", "WHOLE_PIXEL_NS")
RESIZE = ("TAP_NS", "SCALED_NS")
SCALED_FITTED = (*(f"SCALED_SAMPLE_NS[{n}]" for n in EIGHTHS), *RESIZE)
NAMES = (*FITTED, *SCALED_FITTED)


class RegionMeasurement(NamedTuple):
    """The measurements of one region: CPU ms of both ways and of the fast way's resize, whether the ratio of
    these times is settled, whether the model chooses the fast way, differences in pixel values (0–255), and the factors
    of the cost model's constants."""

    exact_ms: float
    fast_ms: float
    resize_ms: float
    settled: bool
    fast: bool
    mean_difference: float
    max_difference: int
    mean_squared_difference: float
    exact_terms: tuple[float, ...]
    fast_terms: tuple[float, ...]


def encode_resized(path: Path, megapixels: float, subsampling: int) -> bytes:
    """Encode a photograph, resized to a number of megapixels, as a JPEG."""
    with Image.open(path) as opened:
        photo = opened.convert("RGB")
    factor = (megapixels * 1e6 / (photo.width * photo.height)) ** 0.5
    size = round(photo.width * factor), round(photo.height * factor)
    file = io.BytesIO()
    photo.resize(size, Image.Resampling.BICUBIC).save(file, "JPEG", quality=90, subsampling=subsampling)
    return file.getvalue()


def measure_in_turn(calls: Sequence[Callable[[], object]], backwards: bool) -> tuple[float, ...]:
    """Make the calls one after the other. Return the CPU ms of each."""
    cpu_ms = [0.0] * len(calls)
    order = range(len(calls))
    for i in reversed(order) if backwards else order:
        started_ns = time.thread_time_ns()
        calls[i]()
        cpu_ms[i] = (time.thread_time_ns() - started_ns) / 1e6
    return tuple(cpu_ms)


def is_settled(rounds: Sequence[tuple[float, ...]]) -> bool:
    """Return whether the rounds show if the first way costs less by 5%, about the same, or more by 5%: whether the 95%
    confidence interval of the median ratio is within one of these three ranges."""
    ratios = sorted(times_ms[0] / times_ms[1] for times_ms in rounds)
    outside = max(0, int(len(ratios) / 2 - 0.98 * len(ratios) ** 0.5))  # ratios on each side of the interval
    low, high = ratios[outside], ratios[-1 - outside]
    return high <= 1 / NEAR or (low >= 1 / NEAR and high <= NEAR) or low >= NEAR


def estimate_costs(rounds: Sequence[tuple[float, ...]]) -> tuple[float, float]:
    """Estimate the costs of the first and the second way. Their sum is the minimum over the rounds, their ratio the
    median over the rounds."""
    total_ms = min(times_ms[0] + times_ms[1] for times_ms in rounds)
    ratio = median(times_ms[0] / times_ms[1] for times_ms in rounds)
    return total_ms * ratio / (1 + ratio), total_ms / (1 + ratio)


def measure_region(
    decoder: Decoder, file: gl.Encoded, region: tuple[int, int, int, int], min_rounds: int, max_rounds: int
) -> RegionMeasurement | None:
    """Measure one region in `least` to `most` rounds; None if the region is too small for the fast
    way."""
    header = decoder.header(file)
    jpeg = header.jpeg
    assert jpeg is not None
    top, _, height, width = region
    eighths = next((n for n in EIGHTHS if height * n >= 8 * SIZE[0] and width * n >= 8 * SIZE[1]), 0)
    if not eighths:
        return None
    pixels, out = np.empty((height, width, 3), np.uint8), np.empty((*SIZE, 3), np.uint8)
    rows, columns = height * eighths / 8, width * eighths / 8
    small = Scaled(np.zeros((math.ceil(rows), math.ceil(columns), 3), np.uint8), (0, 0, rows, columns))
    calls = (
        lambda: decoder.decode(file, header, region, pixels),
        lambda: decoder.decode_resized(file, header, region, eighths, FILTER, out),
        lambda: resample(small, SIZE, FILTER),
    )
    rounds: list[tuple[float, ...]] = []
    while len(rounds) < min_rounds or (len(rounds) < max_rounds and not is_settled(rounds)):
        rounds.append(measure_in_turn(calls, backwards=len(rounds) % 2 == 1))
    exact_ms, fast_ms = estimate_costs(rounds)
    exact = resample(Scaled(pixels, (0, 0, height, width)), SIZE, FILTER)
    difference = np.abs(exact.astype(np.int64) - out)
    mcu, _ = mcu_layout(file.data, jpeg)
    samples = 1 + 2 * 64 / (mcu[0] * mcu[1])
    read_bytes = len(file.data) * (top + height) / jpeg.height
    pixel_count, is_whole = height * width, (height, width) == (jpeg.height, jpeg.width)
    factors = (pixel_count * samples, pixel_count)
    decoded = (top + height) * jpeg.width * samples
    return RegionMeasurement(
        exact_ms,
        fast_ms,
        fast_ms * median(times_ms[2] / times_ms[1] for times_ms in rounds),
        is_settled(rounds),
        decoder.eighths(file, header, region, SIZE, FILTER) > 0,
        float(difference.mean()),
        int(difference.max()),
        float((difference**2).mean()),
        (read_bytes, *((0, 0, *factors) if is_whole else (*factors, 0, 0)), *(0,) * len(SCALED_FITTED)),
        (
            read_bytes, 0, 0, 0, 0, *(decoded * (n == eighths) for n in EIGHTHS),
            2 * SUPPORT[FILTER] * rows * (columns + SIZE[1]), 1,
        ),
    )  # fmt: skip


def fit_constants(seen: Sequence[RegionMeasurement]) -> dict[str, float]:
    """Return the best-fitting constants in ns, by least squares with large errors down-weighted.

    The ratio of a modelled cost to the measured cost is the speed of the machine at that time. The speed was the same
    for both ways and for the resize, so the differences of these ratios should be 0. It changes from one region to the
    next, and is 1 only on average. So finally all constants are scaled by one factor, which does not change any choice.
    """
    exact, fast = (
        np.array([getattr(region, terms) for region in seen], float) for terms in ("exact_terms", "fast_terms")
    )
    resize = np.where(np.isin(NAMES, RESIZE), fast, 0)
    for terms, measured_ms in ((exact, "exact_ms"), (fast, "fast_ms"), (resize, "resize_ms")):
        terms /= np.array([[getattr(region, measured_ms) * 1e6] for region in seen])
    terms = np.concatenate([exact - fast, fast - resize, ABSOLUTE_WEIGHT / 2 * (exact + fast)])
    targets = np.repeat([0, 0, ABSOLUTE_WEIGHT], len(seen))
    scale = np.abs(terms).max(axis=0)
    scale[scale == 0] = 1
    constants, weights = np.zeros(terms.shape[1]), np.ones(len(targets))
    for _ in range(10):
        constants = np.linalg.lstsq(terms / scale * weights[:, None], targets * weights, rcond=None)[0] / scale
        weights = 1 / np.sqrt(np.maximum(np.abs(terms @ constants - targets), 0.03))
    constants /= np.median((exact + fast) @ constants / 2)
    return dict(zip(NAMES, constants.tolist(), strict=True))


def apply_constants(constants: dict[str, float], photo: list[RegionMeasurement]) -> list[RegionMeasurement]:
    """Return a photograph's regions with the choices of a model that has these constants."""
    weights = np.array([constants[name] for name in NAMES])
    return [
        region._replace(fast=bool(np.dot(region.fast_terms, weights) < np.dot(region.exact_terms, weights)))
        for region in photo
    ]


def count_cross_validated(sizes: Sequence[list[list[RegionMeasurement]]]) -> list[int]:
    """Count the photographs of each size with near-best choices when the model is fitted to the other half of the
    photographs."""
    counts = [0] * len(sizes)
    halves = [[[photo for n, photo in enumerate(photos) if n // 2 % 2 == half] for photos in sizes] for half in (0, 1)]
    for tested, fitting in (halves, reversed(halves)):  # both halves have equally many 4:2:0 photographs
        constants = fit_constants([region for photos in fitting for photo in photos for region in photo])
        for size, photos in enumerate(tested):
            counts[size] += sum(is_near_best(apply_constants(constants, photo)) for photo in photos)
    return counts


def read_constants() -> dict[str, float]:
    """Return the constants of `gpuload/decode/scaled.py`."""
    scaled = (*(model.SCALED_SAMPLE_NS[n] for n in EIGHTHS), *(getattr(model, name) for name in RESIZE))
    return dict(zip(NAMES, (0.0, *(getattr(model, name) for name in FITTED[1:]), *scaled), strict=True))


def count_robust(photos: list[list[RegionMeasurement]]) -> int:
    """Count the photographs that keep near-best choices under the worst change of one constant by a factor of 0.8 or
    1.25, as could occur on another machine."""
    constants = read_constants()
    variants = [constants | {name: constants[name] * factor} for name in NAMES[1:] for factor in (0.8, 1.25)]
    return min(sum(is_near_best(apply_constants(variant, photo)) for photo in photos) for variant in variants)


def measure_loader(files: list[gl.Encoded], scale: Any) -> float:
    """Return the CPU ms per image of a loader without worker processes, everything included."""
    crops = [T.RandomResizedCrop(SIZE), T.RandomHorizontalFlip(), T.Normalize((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))]
    decode = gl.Decode(scale=scale)
    loader = gl.Loader(files, batch_size=16, transforms=crops, num_workers=0, device="cpu", decode=decode)
    started_s = time.process_time()
    count = sum(len(images) for images in loader)
    return 1000 * (time.process_time() - started_s) / count


def chosen_cost_ms(region: RegionMeasurement) -> float:
    """Return the CPU ms of the way that the model chooses for a region."""
    return region.fast_ms if region.fast else region.exact_ms


def is_near_best(regions: list[RegionMeasurement]) -> bool:
    """Return whether the model's choices for the regions cost at most 5% more than the cheaper ways."""
    return sum(map(chosen_cost_ms, regions)) <= NEAR * sum(min(region.exact_ms, region.fast_ms) for region in regions)


def summarize(photos: list[list[RegionMeasurement]], loaders: list[tuple[float, float]]) -> dict[str, Any]:
    """Summarize the measurements of the photographs of one size."""
    seen = [region for photo in photos for region in photo]
    fast = [region for region in seen if region.fast]
    if not fast:
        raise SystemExit("no region is cheaper when decoded at a smaller size; increase --megapixels")
    exact_loader, fast_loader = estimate_costs(loaders)
    return {
        "photographs": len(photos),
        "regions": len(seen),
        "regions_settled": sum(region.settled for region in seen),
        "fast": len(fast),
        "photographs_near": sum(map(is_near_best, photos)),
        "photographs_near_shifted": count_robust(photos),
        "regions_near": sum(is_near_best([region]) for region in seen),
        "exact_ms": float(np.mean([region.exact_ms for region in seen])),
        "chosen_ms": float(np.mean(list(map(chosen_cost_ms, seen)))),
        "better_ms": float(np.mean([min(region.exact_ms, region.fast_ms) for region in seen])),
        "loader_exact_ms": exact_loader,
        "loader_fast_ms": fast_loader,
        "mean_levels": float(np.mean([region.mean_difference for region in fast])),
        "most_levels": max(region.max_difference for region in fast),
        "psnr_db": float(10 * np.log10(255**2 / np.mean([region.mean_squared_difference for region in fast]))),
        "least_psnr_db": float(10 * np.log10(255**2 / max(region.mean_squared_difference for region in fast))),
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure and report."""
    parser = make_parser("scaled", __doc__, "photos", "cache", "json", files=100, rounds=5)
    parser.add_argument("--megapixels", type=float, nargs="+", default=[3, 12], help="sizes (default 3 and 12)")
    parser.add_argument("--regions", type=int, default=3, help="crops per file (default 3); the full image is added")
    parser.add_argument("--most", type=int, default=60, help="maximum rounds where the ways are close (default 60)")
    options = parser.parse_args(arguments)
    source, _ = find_photos(options.cache, options.photos)
    paths = list_jpegs(source)[: options.files]

    decoder, rng = Decoder(gl.Decode()), np.random.default_rng(0)
    summaries: dict[str, Any] = {}
    missed: dict[str, Any] = {}
    everything: list[list[list[RegionMeasurement]]] = []
    for megapixels in options.megapixels:
        photos, files = [], []
        for number, path in enumerate(paths):
            file = gl.Encoded(encode_resized(path, megapixels, 2 if number % 2 == 0 else 0))
            height, width = decoder.size_hw(decoder.header(file))
            corners = [draw_region(rng, height, width) for _ in range(options.regions)]
            regions = [(top, left, bottom - top, right - left) for top, left, bottom, right in corners]
            seen = [
                measure_region(decoder, file, region, options.rounds, options.most)
                for region in (*regions, (0, 0, height, width))
            ]
            photos.append([region for region in seen if region is not None])
            files.append(file)
        loaders = [(measure_loader(files, "exact"), measure_loader(files, "fast")) for _ in range(options.rounds)]
        everything.append(photos)
        name = f"{megapixels:g}"
        summaries[name] = summarize(photos, loaders)
        missed[name] = {
            path.name: [[round(region.exact_ms, 2), round(region.fast_ms, 2), region.fast] for region in photo]
            for path, photo in zip(paths, photos, strict=True)
            if not is_near_best(photo)
        }

    if len(paths) > 2:  # otherwise one of the halves is empty
        for row, number in zip(summaries.values(), count_cross_validated(everything), strict=True):
            row["photographs_near_crossed"] = number
    rows = []
    for key in next(iter(summaries.values())):
        values = [row[key] for row in summaries.values()]
        rows.append([key, *(f"{value:.2f}" if isinstance(value, float) else str(value) for value in values)])
    print(f"{len(paths)} files in {source}; {describe_machine()['cpu']}")
    print(format_table(["", *(f"{name} megapixels" for name in summaries)], rows))
    constants = fit_constants([region for photos in everything for photo in photos for region in photo])
    print("fitted constants, in ns: " + ", ".join(f"{name} {value:.3g}" for name, value in constants.items()))
    figures = {"versions": versions(), "results": summaries, "missed": missed, "fitted_ns": constants}
    write_results(options.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
