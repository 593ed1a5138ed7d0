"""What all rows come to, as plain values: what ``--json`` prints, the terminal shows, and the page is made of.

docs/inspecting.md says what each entry means. A text may hold any character that a file's name may.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from gpuload.inspection.duplicates import Groups, equal, looking_alike
from gpuload.inspection.files import (
    ALPHA,
    DAMAGED,
    DEEP,
    FORMATS,
    GOOD,
    MISNAMED,
    MODES,
    PROFILE,
    PROGRESSIVE_JPEG,
    REFUSED,
    RESTARTS,
    SAMPLINGS,
)
from gpuload.inspection.gather import Gathered, name_of

__all__ = ["LISTED", "summarise"]

LISTED: Final = 1000  # images, or groups of them, that are named; all are counted
BINS: Final = 32
FEW: Final = 10  # a class with fewer images is said to have few
SMALL: Final = 32  # pixels


def summarise(found: Gathered, *, ignored: list[dict[str, int]]) -> dict[str, Any]:
    """The summary, without advice.

    Args:
        found: what was gathered.
        ignored: for each data set, how many files of which endings it leaves out.
    """
    rows = found.rows
    known = rows[rows["width"] > 0]
    return {
        "data": [
            {
                "name": name,
                "kind": repr(dataset) if hasattr(dataset, "__len__") and not isinstance(dataset, list) else "",
                "samples": len(dataset),
                "looked_at": int((rows["which"] == which).sum()),
                "ignored": ignored[which],
            }
            for which, (name, dataset) in enumerate(zip(found.names, found.datasets, strict=True))
        ],
        "images": {
            "samples": sum(len(dataset) for dataset in found.datasets),
            "looked_at": len(rows),
            "decoded": len(found.measured),
            "drawn": found.drawn,
            "bytes": int(rows["nbytes"].sum()),
        },
        "damaged": _states(found, DAMAGED),
        "refused": _states(found, REFUSED),
        "sizes": _sizes(rows[rows["state"] == GOOD]),
        "formats": _formats(known),
        "classes": _classes(found),
        "duplicates": _duplicates(found),
        "pixels": _pixels(found),
    }


def _states(found: Gathered, state: int) -> dict[str, Any]:
    """The damaged images, or those that a limit refuses."""
    rows = np.flatnonzero(found.rows["state"] == state).tolist()
    listed = [{**_named(found, row), "cause": found.notes.get(row, "")} for row in rows[:LISTED]]
    return {"count": len(rows), "listed": listed}


def _named(found: Gathered, row: int) -> dict[str, Any]:
    return {
        "data": found.names[found.rows["which"][row]],
        "index": int(found.indices[row]),
        "name": name_of(found, row),
        "path": name_of(found, row, full=True),
        "row": row,
    }


def _sizes(known: np.ndarray) -> dict[str, Any]:
    if not len(known):
        return {}
    width, height = known["width"].astype(np.int64), known["height"].astype(np.int64)
    pixels = width * height
    return {
        "width": _spread(width),
        "height": _spread(height),
        "bytes": _spread(known["nbytes"]),
        "aspect": _spread(width / height, log=True),
        "pixels": _spread(pixels),
        "distinct": len(np.unique(width << 32 | height)),
        "small": int((np.minimum(width, height) < SMALL).sum()),
        "smallest": _size_at(known, int(pixels.argmin())),
        "largest": _size_at(known, int(pixels.argmax())),
    }


def _size_at(known: np.ndarray, at: int) -> list[int]:
    return [int(known["width"][at]), int(known["height"][at])]


def _spread(values: np.ndarray, *, log: bool = False) -> dict[str, Any]:
    """Where values lie, and a histogram from the 0.5th to the 99.5th percentile, whose ends take in the rest."""
    low, median, high = np.percentile(values, (0.5, 50, 99.5)).tolist()
    if low == high:
        bounds = np.array([low, high])
    elif log:
        bounds = np.geomspace(low, high, BINS + 1)
    elif values.dtype.kind in "iu" and high - low < BINS:
        bounds = np.arange(math.floor(low), math.floor(high) + 2)
    else:
        bounds = np.linspace(low, high, BINS + 1)
    places = np.clip(np.searchsorted(bounds, values, "right") - 1, 0, max(0, len(bounds) - 2))
    return {
        "least": values.min().item(),
        "median": median,
        "mean": float(values.mean()),
        "most": values.max().item(),
        "bounds": bounds.tolist(),
        "counts": np.bincount(places, minlength=max(1, len(bounds) - 1)).tolist(),
    }


def _formats(known: np.ndarray) -> dict[str, Any]:
    flags, jpeg = known["flags"], known["format"] == FORMATS.index("JPEG")
    return {
        "formats": _counts(known["format"], FORMATS),
        "modes": _counts(known["mode"], MODES),
        "sampling": _counts(known["sampling"][jpeg & (known["sampling"] > 0)], SAMPLINGS),
        "jpeg": int(jpeg.sum()),
        "progressive": int((flags & PROGRESSIVE_JPEG > 0).sum()),
        "restart_markers": int((flags & RESTARTS > 0).sum()),
        "cmyk": int((known["mode"] == MODES.index("CMYK")).sum()),
        "turned": int((known["orientation"] > 1).sum()),
        "profile": int((flags & PROFILE > 0).sum()),
        "alpha": int((flags & ALPHA > 0).sum()),
        "deep": int((flags & DEEP > 0).sum()),
        "grey": int(np.isin(known["mode"], [MODES.index(mode) for mode in ("1", "L")]).sum()),
        "misnamed": int((flags & MISNAMED > 0).sum()),
    }


def _counts(codes: np.ndarray, names: tuple[str, ...]) -> dict[str, int]:
    counts = np.bincount(codes, minlength=len(names))
    return {names[code]: int(counts[code]) for code in np.argsort(-counts, kind="stable").tolist() if counts[code]}


def _classes(found: Gathered) -> dict[str, Any]:
    """Classes, the largest first; empty if there are no labels."""
    labels = found.rows["label"]
    if not found.classes or not (labels >= 0).any():
        return {}
    each = np.stack(
        [
            np.bincount(labels[(labels >= 0) & (found.rows["which"] == which)], minlength=len(found.classes))
            for which in range(len(found.names))
        ]
    )
    counts = each.sum(axis=0)
    order = np.argsort(-counts, kind="stable").tolist()
    listed = [{"name": found.classes[at], "count": int(counts[at]), "each": each[:, at].tolist()} for at in order]
    least = listed[-1]["count"]
    return {
        "count": len(listed),
        "unlabelled": int((labels < 0).sum()),
        "imbalance": listed[0]["count"] / least if least else None,
        "few": sum(one["count"] < FEW for one in listed),
        "missing": [
            {"data": name, "classes": [found.classes[at] for at in np.flatnonzero(each[which] == 0)[:LISTED].tolist()]}
            for which, name in enumerate(found.names)
            if (each[which] == 0).any()
        ],
        "listed": listed[:LISTED] if len(listed) <= 2 * LISTED else listed[:LISTED] + listed[-LISTED:],
        "counts": sorted(counts.tolist(), reverse=True),
    }


def _duplicates(found: Gathered) -> dict[str, Any]:
    """Equal files among all rows; among the measured ones equal pixels, and equal looks, in files that differ."""
    rows = found.rows
    there = np.flatnonzero((rows["state"] == GOOD) | ((rows["state"] == REFUSED) & (rows["nbytes"] > 0)))
    files = equal(rows["digest"][there], there)
    shown = ~found.pixels["flat"]
    measured, own = found.measured[shown], found.pixels[shown]
    pixels = equal(own["digest"], measured)
    pixels = pixels.keep(pixels.differ(_ranks(rows["digest"])) if len(pixels) else np.zeros(0, bool))
    digests = np.full(len(rows), -1, np.int64)
    digests[measured] = _ranks(own["digest"])
    alike = looking_alike(own["looks"], measured)
    alike = alike.keep(alike.differ(digests))
    told = {name: _groups(found, groups) for name, groups in (("files", files), ("pixels", pixels), ("looks", alike))}
    return {**told, "flat": int(found.pixels["flat"].sum())}


def _ranks(digests: np.ndarray) -> np.ndarray:
    """A number for each distinct digest (n × 2), from 0 on."""
    return np.unique(digests, axis=0, return_inverse=True)[1].reshape(-1) if len(digests) else np.zeros(0, np.int64)


def _groups(found: Gathered, groups: Groups) -> dict[str, Any]:
    """Groups of images, those first that are in several data sets, then those in several classes."""
    across, mixed = groups.differ(found.rows["which"]), groups.differ(found.rows["label"])
    order = np.lexsort((-np.diff([*groups.starts, len(groups.rows)]), ~mixed, ~across)).tolist()
    members = list(groups) if len(groups) <= LISTED else None
    ends = [*groups.starts[1:].tolist(), len(groups.rows)]
    listed = []
    for at in order[:LISTED]:
        rows = members[at] if members is not None else groups.rows[groups.starts[at] : ends[at]]
        label = found.rows["label"]
        listed.append(
            {
                "several_data": bool(across[at]),
                "several_classes": bool(mixed[at]),
                "count": len(rows),
                "images": [
                    {**_named(found, row), "class": found.classes[label[row]] if label[row] >= 0 else None}
                    for row in np.sort(rows)[:LISTED].tolist()
                ],
            }
        )
    return {
        "groups": len(groups),
        "surplus": groups.surplus,
        "several_data": int(across.sum()),
        "several_classes": int(mixed.sum()),
        "listed": listed,
    }


def _pixels(found: Gathered) -> dict[str, Any]:
    """Mean and std of each channel, for each kind of image; and how often each level is there."""
    kinds = []
    for (channels, bits), group in sorted(found.groups.items(), key=lambda item: -item[1].images):
        most, count = (1 << bits) - 1, group.pixels
        mean = [total / count / most for total in group.sums]
        # In whole numbers up to the root: what cancels here would cost a float all its digits.
        variance = [count * square - total**2 for total, square in zip(group.sums, group.squares, strict=True)]
        std = [math.sqrt(value) / count / most for value in variance]
        kinds.append(
            {
                "channels": channels,
                "bits": bits,
                "images": group.images,
                "pixels": count,
                "mean": mean,
                "std": std,
                "normalize": _normalize(mean, std),
            }
        )
    levels = None if found.main is None else found.groups[found.main].levels
    told = [] if levels is None or found.main is None else levels[: min(4, found.main[0])].tolist()
    return {"kinds": kinds, "levels": told}


def _normalize(mean: list[float], std: list[float]) -> str | None:
    """The line to paste; None where a channel is the same everywhere, which cannot be divided by."""
    numbers: Callable[[list[float]], str] = lambda values: ", ".join(f"{value:.4f}" for value in values)  # noqa: E731
    if not all(round(value, 4) > 0 for value in std):
        return None
    comma = "," if len(mean) == 1 else ""
    return f"T.Normalize(mean=({numbers(mean)}{comma}), std=({numbers(std)}{comma}))"
