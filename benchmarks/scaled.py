"""What `Decode(scale="fast")` saves and changes, on photographs of several megapixels, and the model of its costs.

    python -m benchmarks.scaled --photos DIR [--json FILE]

Each photograph is enlarged and written as a JPEG, every other one with 4:2:0. Of each, regions of RandomResizedCrop and
the whole picture come to 224×224 in both ways, one after the other in every round: decoded as they are; decoded smaller
and resized. Decoding as it is does not count the resize, which the stage does. The model's choice is held against the
better way; pixels after the resize, by Pillow, against each other. Then a loader runs over the files, in this process,
in both ways, once a round.

CPU times of a thread change by half within seconds where others use the machine, and one lucky round is enough to make
the least time of many wrong. The two times of one round change alike. So the median of the rounds' ratios says how the
ways compare (`costs`), and rounds go on until it is known well enough, whatever the model chose (`settled`).

At last the constants of `gpuload/decode/scaled.py` are fitted to the ratios (`fitted`): for all photographs, and to see
what such constants are worth, for each half of them, to choose for the other half (`crossed`). `shifted` says how much
depends on their being right.
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
from benchmarks.photos import find_photos, jpegs_in
from benchmarks.running import machine, make_parser, table, write_results
from gpuload import transforms as T
from gpuload.decode import Decoder
from gpuload.decode import scaled as model
from gpuload.decode.header import mcu_layout
from gpuload.decode.scaled import EIGHTHS, SUPPORT, Scaled, resample

SIZE, FILTER, NEAR = (224, 224), "bilinear", 1.05
LEVEL = 0.1  # how much a cost counts in the fit, beside how two costs compare
FITTED = ("byte", "REGION_SAMPLE_NS", "REGION_PIXEL_NS", "WHOLE_SAMPLE_NS", "WHOLE_PIXEL_NS")
RESIZE = ("TAP_NS", "SCALED_NS")
SCALED_FITTED = (*(f"SCALED_SAMPLE_NS[{n}]" for n in EIGHTHS), *RESIZE)
NAMES = (*FITTED, *SCALED_FITTED)


class Seen(NamedTuple):
    """One region: CPU ms of both ways and of the fast one's resize, whether they are `settled`, whether the model takes
    the fast one, differences in levels, and what the constants are multiplied with."""

    exact_ms: float
    fast_ms: float
    resize_ms: float
    settled: bool
    fast: bool
    mean: float
    most: int
    squared: float
    exact_terms: tuple[float, ...]
    fast_terms: tuple[float, ...]


def enlarged(path: Path, megapixels: float, subsampling: int) -> bytes:
    """A photograph with so many pixels, as a JPEG."""
    with Image.open(path) as opened:
        photo = opened.convert("RGB")
    factor = (megapixels * 1e6 / (photo.width * photo.height)) ** 0.5
    size = round(photo.width * factor), round(photo.height * factor)
    file = io.BytesIO()
    photo.resize(size, Image.Resampling.BICUBIC).save(file, "JPEG", quality=90, subsampling=subsampling)
    return file.getvalue()


def in_turn(calls: Sequence[Callable[[], object]], backwards: bool) -> tuple[float, ...]:
    """CPU ms of each call, made one after the other."""
    taken = [0.0] * len(calls)
    order = range(len(calls))
    for number in reversed(order) if backwards else order:
        started = time.thread_time_ns()
        calls[number]()
        taken[number] = (time.thread_time_ns() - started) / 1e6
    return tuple(taken)


def settled(rounds: Sequence[tuple[float, ...]]) -> bool:
    """Whether rounds tell if the first way costs less by 5%, about the same, or more by 5%: the interval in which the
    median of their ratios is found, 19 times of 20, lies within one of the three."""
    ratios = sorted(one[0] / one[1] for one in rounds)
    beside = max(0, int(len(ratios) / 2 - 0.98 * len(ratios) ** 0.5))
    low, high = ratios[beside], ratios[-1 - beside]
    return high <= 1 / NEAR or (low >= 1 / NEAR and high <= NEAR) or low >= NEAR


def costs(rounds: Sequence[tuple[float, ...]]) -> tuple[float, float]:
    """What the first and the second way cost: together the least of all rounds, in the median of the rounds' ratios."""
    together = min(one[0] + one[1] for one in rounds)
    ratio = median(one[0] / one[1] for one in rounds)
    return together * ratio / (1 + ratio), together / (1 + ratio)


def look(decoder: Decoder, file: gl.Encoded, region: tuple[int, int, int, int], least: int, most: int) -> Seen | None:
    """Measure one region, in so many rounds; None if it is too small to be decoded smaller."""
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
    while len(rounds) < least or (len(rounds) < most and not settled(rounds)):
        rounds.append(in_turn(calls, backwards=len(rounds) % 2 == 1))
    exact_ms, fast_ms = costs(rounds)
    there = resample(Scaled(pixels, (0, 0, height, width)), SIZE, FILTER)
    difference = np.abs(there.astype(np.int64) - out)
    block, _ = mcu_layout(file.data, jpeg)
    samples = 1 + 2 * 64 / (block[0] * block[1])
    read = len(file.data) * (top + height) / jpeg.height
    area, whole = height * width, (height, width) == (jpeg.height, jpeg.width)
    pair = (area * samples, area)
    decoded = (top + height) * jpeg.width * samples
    return Seen(
        exact_ms,
        fast_ms,
        fast_ms * median(one[2] / one[1] for one in rounds),
        settled(rounds),
        decoder.eighths(file, header, region, SIZE, FILTER) > 0,
        float(difference.mean()),
        int(difference.max()),
        float((difference**2).mean()),
        (read, *((0, 0, *pair) if whole else (*pair, 0, 0)), *(0,) * len(SCALED_FITTED)),
        (
            read, 0, 0, 0, 0, *(decoded * (n == eighths) for n in EIGHTHS),
            2 * SUPPORT[FILTER] * rows * (columns + SIZE[1]), 1,
        ),
    )  # fmt: skip


def fitted(seen: Sequence[Seen]) -> dict[str, float]:
    """The constants that fit best, in ns: least squares, large errors counting less.

    A cost as modelled, divided by the measured one, says how fast the machine was. That was equal for both ways and for
    the resize, so these quotients' differences are to be 0. From one region to the next it changes, and is 1 only by
    and large: at last all constants are multiplied with one number, which changes no choice.
    """
    exact, fast = (np.array([getattr(one, terms) for one in seen], float) for terms in ("exact_terms", "fast_terms"))
    resize = np.where(np.isin(NAMES, RESIZE), fast, 0)
    for terms, taken in ((exact, "exact_ms"), (fast, "fast_ms"), (resize, "resize_ms")):
        terms /= np.array([[getattr(one, taken) * 1e6] for one in seen])
    terms = np.concatenate([exact - fast, fast - resize, LEVEL / 2 * (exact + fast)])
    wanted = np.repeat([0, 0, LEVEL], len(seen))
    scale = np.abs(terms).max(axis=0)
    scale[scale == 0] = 1
    found, weights = np.zeros(terms.shape[1]), np.ones(len(wanted))
    for _ in range(10):
        found = np.linalg.lstsq(terms / scale * weights[:, None], wanted * weights, rcond=None)[0] / scale
        weights = 1 / np.sqrt(np.maximum(np.abs(terms @ found - wanted), 0.03))
    found /= np.median((exact + fast) @ found / 2)
    return dict(zip(NAMES, found.tolist(), strict=True))


def chosen_with(constants: dict[str, float], photo: list[Seen]) -> list[Seen]:
    """A photograph's regions, as a model with these constants would choose."""
    found = np.array([constants[name] for name in NAMES])
    return [one._replace(fast=bool(np.dot(one.fast_terms, found) < np.dot(one.exact_terms, found))) for one in photo]


def crossed(sizes: Sequence[list[list[Seen]]]) -> list[int]:
    """Of each size's photographs, how many are `near` where the model is fitted to the other half of them."""
    found = [0] * len(sizes)
    halves = [[[photo for n, photo in enumerate(photos) if n // 2 % 2 == half] for photos in sizes] for half in (0, 1)]
    for mine, others in (halves, reversed(halves)):  # each with as much 4:2:0
        constants = fitted([one for photos in others for photo in photos for one in photo])
        for size, photos in enumerate(mine):
            found[size] += sum(near(chosen_with(constants, photo)) for photo in photos)
    return found


def in_use() -> dict[str, float]:
    """The constants of `gpuload/decode/scaled.py`."""
    scaled = (*(model.SCALED_SAMPLE_NS[n] for n in EIGHTHS), *(getattr(model, name) for name in RESIZE))
    return dict(zip(NAMES, (0.0, *(getattr(model, name) for name in FITTED[1:]), *scaled), strict=True))


def shifted(photos: list[list[Seen]]) -> int:
    """How many of some photographs are `near` where one of the constants is a fifth less or a quarter more, whichever
    is worst: as it might be on another machine."""
    constants = in_use()
    others = [constants | {name: constants[name] * by} for name in NAMES[1:] for by in (0.8, 1.25)]
    return min(sum(near(chosen_with(other, photo)) for photo in photos) for other in others)


def loader_ms(files: list[gl.Encoded], scale: Any) -> float:
    """CPU ms of an image in a loader without worker processes: decoding, resize and all."""
    crops = [T.RandomResizedCrop(SIZE), T.RandomHorizontalFlip(), T.Normalize((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))]
    decode = gl.Decode(scale=scale)
    loader = gl.Loader(files, batch_size=16, transforms=crops, num_workers=0, device="cpu", decode=decode)
    started = time.process_time()
    count = sum(len(images) for images in loader)
    return 1000 * (time.process_time() - started) / count


def chosen(one: Seen) -> float:
    """What a region costs as the model chooses."""
    return one.fast_ms if one.fast else one.exact_ms


def near(some: list[Seen]) -> bool:
    """Whether the model's choices for some regions cost about what the better ones do."""
    return sum(map(chosen, some)) <= NEAR * sum(min(one.exact_ms, one.fast_ms) for one in some)


def summary(photos: list[list[Seen]], loaders: list[tuple[float, float]]) -> dict[str, Any]:
    """What was seen of the photographs of one size."""
    seen = [one for photo in photos for one in photo]
    fast = [one for one in seen if one.fast]
    if not fast:
        raise SystemExit("no region costs less if it is decoded smaller; give more --megapixels")
    exact_loader, fast_loader = costs(loaders)
    return {
        "photographs": len(photos),
        "regions": len(seen),
        "regions_settled": sum(one.settled for one in seen),
        "fast": len(fast),
        "photographs_near": sum(map(near, photos)),
        "photographs_near_shifted": shifted(photos),
        "regions_near": sum(near([one]) for one in seen),
        "exact_ms": float(np.mean([one.exact_ms for one in seen])),
        "chosen_ms": float(np.mean(list(map(chosen, seen)))),
        "better_ms": float(np.mean([min(one.exact_ms, one.fast_ms) for one in seen])),
        "loader_exact_ms": exact_loader,
        "loader_fast_ms": fast_loader,
        "mean_levels": float(np.mean([one.mean for one in fast])),
        "most_levels": max(one.most for one in fast),
        "psnr_db": float(10 * np.log10(255**2 / np.mean([one.squared for one in fast]))),
        "least_psnr_db": float(10 * np.log10(255**2 / max(one.squared for one in fast))),
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure and report."""
    parser = make_parser("scaled", __doc__, "photos", "cache", "json", files=100, rounds=5)
    parser.add_argument("--megapixels", type=float, nargs="+", default=[3, 12], help="default 3 and 12")
    parser.add_argument("--regions", type=int, default=3, help="of each file, beside the whole (default 3)")
    parser.add_argument("--most", type=int, default=60, help="rounds at most, where it is close (default 60)")
    options = parser.parse_args(arguments)
    source, _ = find_photos(options.cache, options.photos)
    paths = jpegs_in(source)[: options.files]

    decoder, rng = Decoder(gl.Decode()), np.random.default_rng(0)
    found: dict[str, Any] = {}
    missed: dict[str, Any] = {}
    everything: list[list[list[Seen]]] = []
    for megapixels in options.megapixels:
        photos, files = [], []
        for number, path in enumerate(paths):
            file = gl.Encoded(enlarged(path, megapixels, 2 if number % 2 == 0 else 0))
            height, width = decoder.size_hw(decoder.header(file))
            corners = [draw_region(rng, height, width) for _ in range(options.regions)]
            regions = [(top, left, bottom - top, right - left) for top, left, bottom, right in corners]
            seen = [
                look(decoder, file, region, options.rounds, options.most)
                for region in (*regions, (0, 0, height, width))
            ]
            photos.append([one for one in seen if one is not None])
            files.append(file)
        loaders = [(loader_ms(files, "exact"), loader_ms(files, "fast")) for _ in range(options.rounds)]
        everything.append(photos)
        name = f"{megapixels:g}"
        found[name] = summary(photos, loaders)
        missed[name] = {
            path.name: [[round(one.exact_ms, 2), round(one.fast_ms, 2), one.fast] for one in photo]
            for path, photo in zip(paths, photos, strict=True)
            if not near(photo)
        }

    if len(paths) > 2:  # else there is no other half
        for row, number in zip(found.values(), crossed(everything), strict=True):
            row["photographs_near_crossed"] = number
    rows = []
    for key in next(iter(found.values())):
        values = [row[key] for row in found.values()]
        rows.append([key, *(f"{value:.2f}" if isinstance(value, float) else str(value) for value in values)])
    print(f"{len(paths)} files in {source}; {machine()['cpu']}")
    print(table(["", *(f"{name} megapixels" for name in found)], rows))
    constants = fitted([one for photos in everything for photo in photos for one in photo])
    print("fitted, in ns: " + ", ".join(f"{name} {value:.3g}" for name, value in constants.items()))
    figures = {"versions": versions(), "results": found, "missed": missed, "fitted_ns": constants}
    write_results(options.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
