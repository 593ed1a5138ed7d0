"""Summarises all rows as plain values, with advice. ``--json``, the terminal's output and the page are based on this
summary. docs/inspecting.md explains each entry. Texts can contain any character that can occur in a file name.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from gpuload.datasets.litter import is_litter
from gpuload.decode.options import Decode
from gpuload.inspection.files import DAMAGED, FORMATS, GOOD, KINDS, MODES, REFUSED, SAMPLINGS
from gpuload.inspection.measure import Measurements

__all__ = [
    "IN_ROOT",
    "LITTER",
    "MAX_LISTED",
    "Advice",
    "advise",
    "count_ignored_files",
    "group_equal_rows",
    "is_bad",
    "summarise",
]

MAX_LISTED: Final = 1000  # the maximum number of images or groups in a list; counts include all
BINS: Final = 32
SMALL_CLASS: Final = 10  # a class with fewer images is reported as small
SMALL_SIDE: Final = 32  # an image with a shorter side, in pixels, is reported as small
LARGE_PIXELS: Final = 1_500_000  # a higher median of the images' pixels is reported
MAX_IMBALANCE: Final = 10  # a higher ratio of the largest to the smallest class is reported
MAX_ENDING: Final = 12  # a longer ending, in characters, is not counted separately
IN_ROOT: Final = "(images outside of class folders)"
LITTER: Final = "(images of other programs, as in .ipynb_checkpoints)"


def summarise(measurements: Measurements, *, ignored: list[dict[str, int]]) -> dict[str, Any]:
    """Return the summary, without advice. `ignored` has a dict for each dataset: the number of skipped files, keyed by
    ending."""
    rows = measurements.rows
    return {
        "data": [
            {
                "name": name,
                "kind": repr(dataset) if hasattr(dataset, "__len__") and not isinstance(dataset, list) else "",
                "samples": len(dataset),
                "looked_at": int((rows["which"] == dataset_index).sum()),
                "ignored": ignored[dataset_index],
            }
            for dataset_index, (name, dataset) in enumerate(zip(measurements.names, measurements.datasets, strict=True))
        ],
        "images": {
            "samples": sum(len(dataset) for dataset in measurements.datasets),
            "looked_at": len(rows),
            "decoded": int(rows["measured"].sum()),
            "drawn": measurements.is_sampled,
            "bytes": int(rows["nbytes"].sum()),
        },
        "damaged": _images_in_state(measurements, DAMAGED),
        "refused": _images_in_state(measurements, REFUSED),
        "sizes": _sizes(rows[rows["state"] == GOOD]),
        "formats": _formats(rows[rows["width"] > 0]),
        "classes": _classes(measurements),
        "duplicates": _duplicates(measurements),
        "pixels": _pixels(measurements),
    }


def count_ignored_files(root: str, extensions: Sequence[str], *, classes: bool) -> dict[str, int]:
    """Count the files in a folder that an image dataset skips, keyed by ending, most frequent first.

    Args:
        root: a folder; links to folders are not followed.
        extensions: the endings of images, lower case, with the dot.
        classes: whether images must be in class folders, so that images directly in the root are also skipped.
    """
    counts: Counter[str] = Counter()
    endings = tuple(extensions)
    for folder, _, names in os.walk(root):
        in_litter = is_litter(os.fsencode(folder.removeprefix(root)))
        for name in names:
            if name.lower().endswith(endings) and (in_litter or is_litter(os.fsencode(name))):
                counts[LITTER] += 1
            elif not name.lower().endswith(endings):
                ending = os.path.splitext(name)[1].lower()
                counts[ending if 1 < len(ending) <= MAX_ENDING else "(no ending)"] += 1
            elif classes and folder == root:
                counts[IN_ROOT] += 1
    return dict(counts.most_common())


def _images_in_state(measurements: Measurements, state: int) -> dict[str, Any]:
    """Return the images with this state, damaged or refused."""
    rows = np.flatnonzero(measurements.rows["state"] == state).tolist()
    listed = [
        {**_image_reference(measurements, row), "cause": measurements.causes.get(row, "")} for row in rows[:MAX_LISTED]
    ]
    return {"count": len(rows), "listed": listed}


def _image_reference(measurements: Measurements, row: int) -> dict[str, Any]:
    return {
        "data": measurements.names[measurements.rows["which"][row]],
        "index": int(measurements.rows["index"][row]),
        "name": measurements.name_of(row),
        "path": measurements.name_of(row, full=True),
        "row": row,
    }


def _sizes(rows: np.ndarray) -> dict[str, Any]:
    if not len(rows):
        return {}
    width, height = rows["width"].astype(np.int64), rows["height"].astype(np.int64)
    pixels = width * height
    return {
        "width": _distribution(width),
        "height": _distribution(height),
        "bytes": _distribution(rows["nbytes"]),
        "aspect": _distribution(width / height, log=True),
        "pixels": _distribution(pixels),
        "distinct": len(np.unique(width << 32 | height)),
        "small": int((np.minimum(width, height) < SMALL_SIDE).sum()),
        "smallest": _size_at(rows, int(pixels.argmin())),
        "largest": _size_at(rows, int(pixels.argmax())),
    }


def _size_at(rows: np.ndarray, i: int) -> list[int]:
    return [int(rows["width"][i]), int(rows["height"][i])]


def _distribution(values: np.ndarray, *, log: bool = False) -> dict[str, Any]:
    """Return the range of values, and a histogram from the 0.5th to the 99.5th percentile. The first and last bins
    include the values beyond."""
    low, median, high = np.percentile(values, (0.5, 50, 99.5)).tolist()
    if low == high:
        bounds = np.array([low, high])
    elif log:
        bounds = np.geomspace(low, high, BINS + 1)
    elif values.dtype.kind in "iu" and high - low < BINS:
        bounds = np.arange(math.floor(low), math.floor(high) + 2)
    else:
        bounds = np.linspace(low, high, BINS + 1)
    bin_indices = np.clip(np.searchsorted(bounds, values, "right") - 1, 0, max(0, len(bounds) - 2))
    return {
        "least": values.min().item(),
        "median": median,
        "mean": float(values.mean()),
        "most": values.max().item(),
        "bounds": bounds.tolist(),
        "counts": np.bincount(bin_indices, minlength=max(1, len(bounds) - 1)).tolist(),
    }


def _formats(rows: np.ndarray) -> dict[str, Any]:
    is_jpeg, mode = rows["format"] == FORMATS.index("JPEG"), np.array(MODES)[rows["mode"]]
    return {
        "formats": _counts(rows["format"], FORMATS),
        "modes": _counts(rows["mode"], MODES),
        "sampling": _counts(rows["sampling"][is_jpeg & (rows["sampling"] > 0)], SAMPLINGS),
        "jpeg": int(is_jpeg.sum()),
        "cmyk": int((mode == "CMYK").sum()),
        "turned": int((rows["orientation"] > 1).sum()),
        "grey": int(np.isin(mode, ("1", "L")).sum()),
        **{kind: int(rows[kind].sum()) for kind in KINDS},
    }


def _counts(codes: np.ndarray, names: tuple[str, ...]) -> dict[str, int]:
    counts = np.bincount(codes, minlength=len(names))
    return {names[code]: int(counts[code]) for code in np.argsort(-counts, kind="stable").tolist() if counts[code]}


def _classes(measurements: Measurements) -> dict[str, Any]:
    """Return the classes, sorted by size in descending order; an empty dict if there are no labels."""
    labels = measurements.rows["label"]
    if not measurements.classes or not (labels >= 0).any():
        return {}
    counts_by_dataset = np.stack(
        [
            np.bincount(
                labels[(labels >= 0) & (measurements.rows["which"] == dataset_index)],
                minlength=len(measurements.classes),
            )
            for dataset_index in range(len(measurements.names))
        ]
    )
    counts = counts_by_dataset.sum(axis=0)
    order = np.argsort(-counts, kind="stable").tolist()
    listed = [
        {"name": measurements.classes[i], "count": int(counts[i]), "each": counts_by_dataset[:, i].tolist()}
        for i in order
    ]
    smallest = listed[-1]["count"]
    return {
        "count": len(listed),
        "unlabelled": int((labels < 0).sum()),
        "imbalance": listed[0]["count"] / smallest if smallest else None,
        "few": sum(row["count"] < SMALL_CLASS for row in listed),
        "missing": [
            {
                "data": name,
                "classes": [
                    measurements.classes[i]
                    for i in np.flatnonzero(counts_by_dataset[dataset_index] == 0)[:MAX_LISTED].tolist()
                ],
            }
            for dataset_index, name in enumerate(measurements.names)
            if (counts_by_dataset[dataset_index] == 0).any()
        ],
        "listed": listed[:MAX_LISTED] if len(listed) <= 2 * MAX_LISTED else listed[:MAX_LISTED] + listed[-MAX_LISTED:],
        "counts": sorted(counts.tolist(), reverse=True),
    }


def _duplicates(measurements: Measurements) -> dict[str, Any]:
    """Return groups of identical files among all rows, and groups of different files with identical pixels among the
    measured rows."""
    rows = measurements.rows
    files = group_equal_rows(rows["digest"], np.flatnonzero(np.isin(rows["state"], (GOOD, REFUSED))))
    pixels = group_equal_rows(rows["pixels"], np.flatnonzero(rows["measured"] & ~rows["flat"]))
    pixels = [group for group in pixels if (rows["digest"][group] != rows["digest"][group[0]]).any()]
    return {
        "files": _describe_groups(measurements, files),
        "pixels": _describe_groups(measurements, pixels),
        "flat": int(rows["flat"].sum()),
    }


def group_equal_rows(keys: np.ndarray, rows: np.ndarray) -> list[np.ndarray]:
    """Group rows with equal keys (n × k integers), and return the groups of two or more."""
    order = rows[np.lexsort(keys[rows].T)]
    starts = np.flatnonzero(np.r_[True, np.diff(keys[order], axis=0).any(axis=1)])
    sizes = np.diff(starts, append=len(order))
    is_group = sizes > 1
    return [order[start : start + size] for start, size in zip(starts[is_group], sizes[is_group], strict=True)]


def _describe_groups(measurements: Measurements, groups: list[np.ndarray]) -> dict[str, Any]:
    """Describe groups of images: first groups in several datasets, then groups in several classes, then all others."""
    dataset_indices, labels = measurements.rows["which"], measurements.rows["label"]
    described_groups = [
        (_has_distinct(dataset_indices[group]), _has_distinct(labels[group]), group) for group in groups
    ]
    described_groups.sort(key=lambda item: (not item[0], not item[1], -len(item[2])))
    listed = [
        {
            "several_data": several_data,
            "several_classes": several_classes,
            "count": len(group),
            "images": [
                {**_image_reference(measurements, row), "class": measurements.class_name(row)}
                for row in np.sort(group)[:MAX_LISTED].tolist()
            ],
        }
        for several_data, several_classes, group in described_groups[:MAX_LISTED]
    ]
    return {
        "groups": len(groups),
        "surplus": sum(len(group) - 1 for group in groups),
        "several_data": sum(several_data for several_data, _, _ in described_groups),
        "several_classes": sum(several_classes for _, several_classes, _ in described_groups),
        "listed": listed,
    }


def _has_distinct(values: np.ndarray) -> bool:
    """Return whether there are distinct values, ignoring negative values."""
    return len(np.unique(values[values >= 0])) > 1


def _pixels(measurements: Measurements) -> dict[str, Any]:
    """Return the mean and std of each channel for each kind of image, and a histogram of each channel for the most
    frequent kind."""
    kinds, levels = [], []
    for (channels, bits), group in sorted(measurements.groups.items(), key=lambda item: -item[1].images):
        max_level, count = (1 << bits) - 1, group.pixels
        mean = [total / count / max_level for total in group.sums]
        # Use integers up to the square root: with floats, the subtraction would lose all digits.
        std = [math.sqrt(variance) / count / max_level for variance in count * group.squares - group.sums**2]
        kind = {"channels": channels, "bits": bits, "images": group.images, "pixels": count, "mean": mean, "std": std}
        kinds.append({**kind, "normalize": _normalize(mean, std)})
        levels = levels or group.levels[:channels].tolist()
    return {"kinds": kinds, "levels": levels}


def _normalize(mean: list[float], std: list[float]) -> str | None:
    """Return the code for a `Normalize`; None if a channel is constant, because its std of 0 cannot be a divisor."""
    if not all(round(value, 4) > 0 for value in std):
        return None
    means, stds = (", ".join(f"{value:.4f}" for value in values) for values in (mean, std))
    comma = "," if len(mean) == 1 else ""
    return f"T.Normalize(mean=({means}{comma}), std=({stds}{comma}))"


# -- advice -----------------------------------------------------------------------------------------------------------


Level = Literal["bad", "odd", "note"]


class Advice(NamedTuple):
    """A finding about datasets: its level, a title, an explanation with the remedy, and code for the remedy.

    `level`: "bad" harms training or its evaluation; "odd" is probably unintended; "note" is for information.
    """

    level: Level
    title: str
    text: str
    code: str = ""


LEAK_TEXT: Final = (
    "The model is evaluated on its training images, and seems better than it is. Remove them from one dataset."
)
LABEL_CONFLICT_TEXT: Final = "At least one of the labels is wrong, or the classes overlap."
DUPLICATE_TEXT: Final = "Duplicates count more than once in training."
# The advice for each nonzero count in the summary: the level, the path of the count, the title for a count of 1, the
# explanation, and code.
COUNT_ADVICE: Final[tuple[tuple[Level, str, str, str, str], ...]] = (
    ("bad", "damaged count", "image is damaged",
     "Training stops at the first damaged image. Fix or remove the files, or let the Loader skip them.",
     'gl.Loader(…, on_error="skip")'),
    ("odd", "refused count", "image is over a Decode limit",
     f"By default, max_pixels is {Decode().max_pixels:,}. Larger files are decompression bombs, or very large "
     "pictures. If you trust these files, raise the limit that the list states.",
     "gl.Loader(…, decode=gl.Decode(max_pixels=…))"),
    ("bad", "duplicates files several_data", "picture is in several datasets (the same file)", LEAK_TEXT, ""),
    ("odd", "duplicates files several_classes", "picture is in several classes (the same file)", LABEL_CONFLICT_TEXT,
     ""),
    ("note", "duplicates files surplus", "image is duplicated (the same file)", DUPLICATE_TEXT, ""),
    ("bad", "duplicates pixels several_data", "picture is in several datasets (the same pixels in another file)",
     LEAK_TEXT, ""),
    ("odd", "duplicates pixels several_classes", "picture is in several classes (the same pixels in another file)",
     LABEL_CONFLICT_TEXT, ""),
    ("note", "duplicates pixels surplus", "image is duplicated (the same pixels in another file)", DUPLICATE_TEXT, ""),
    ("odd", "duplicates flat", "image of one colour", "Blank images are often a mistake; check them.", ""),
    ("odd", "formats turned", "image is stored rotated or mirrored, by EXIF orientation",
     "Viewers turn such images upright; a loader does so only with this option.",
     "gl.Loader(…, decode=gl.Decode(exif=True))"),
    ("odd", "formats deep", "image has more than 8 bits per channel",
     "Conversion to 8 bits loses precision, and grey images are refused.", 'gl.ImageFolder(…, mode="unchanged")'),
    ("note", "formats alpha", "image has transparency",
     'mode="RGB", the default, drops the alpha channel, which exposes the colours of transparent pixels.',
     'gl.ImageFolder(…, mode="RGBA")'),
    ("note", "formats grey", "image is grey", "Grey images are converted to RGB.", ""),
    ("note", "formats cmyk", "image is in CMYK, for print",
     "Pillow converts CMYK to RGB without the colour profile: colours are off, and decoding takes longer.", ""),
    ("note", "formats progressive", "image is stored as progressive JPEG",
     "Progressive JPEGs need more memory to decode, and crops cannot be cut out before decoding. jpegtran converts "
     "them to sequential JPEGs without loss.", ""),
    ("note", "formats misnamed", "image has a format that differs from the file name",
     "gpuload recognises formats by content; other programs may not.", ""),
)  # fmt: skip


def is_bad(summary: dict[str, Any]) -> bool:
    """Return whether there are damaged images, or images in several datasets; this determines the exit status."""
    return any(advice.level == "bad" for advice in _count_advice(summary))


def advise(summary: dict[str, Any]) -> list[Advice]:
    """Return all advice, worst first."""
    sources = (_count_advice, _class_advice, _ignored_advice, _size_advice)
    advice = [item for source in sources for item in source(summary)]
    return sorted(advice, key=lambda item: ("bad", "odd", "note").index(item.level))


def _count_advice(summary: dict[str, Any]) -> Iterator[Advice]:
    formats = summary["formats"]
    for level, path, title, text, code in COUNT_ADVICE:
        count: Any = summary
        for name in path.split():
            count = count[name]
        if path == "formats grey" and 0 < count == sum(formats["formats"].values()):
            text = "As RGB, they have three equal channels, which take three times the memory and copying."
            yield Advice("note", "All images are grey", text, 'gl.ImageFolder(…, mode="L")')
        elif count:
            yield Advice(level, _title_with_count(count, title), text, code)


def _title_with_count(count: int, title: str) -> str:
    """Return a title with its count: ``1 image is grey``, ``2 images are grey``."""
    noun, verb, predicate = title.split(" ", 2)
    return (
        f"1 {title}"
        if count == 1
        else f"{count:,} {noun}s {({'is': 'are', 'has': 'have'}).get(verb, verb)} {predicate}"
    )


def _class_advice(summary: dict[str, Any]) -> Iterator[Advice]:
    if not (classes := summary["classes"]):
        return
    if classes["imbalance"] is None or classes["imbalance"] > MAX_IMBALANCE:
        ratio = "" if classes["imbalance"] is None else f": the largest has {classes['imbalance']:.0f} times as many"
        text = "If small classes matter as much as large classes, draw samples with weights, or weight the loss."
        code = "counts = np.bincount(dataset.labels)\ngl.Loader(dataset, weights=1 / counts[dataset.labels], …)"
        yield Advice("odd", f"Classes differ greatly in size{ratio}", text, code)
    if count := classes["few"]:
        title = f"Fewer than {SMALL_CLASS} images in {count:,} of {classes['count']:,} classes"
        yield Advice("note", title, "That is too few to learn much, or to evaluate reliably.")
    for dataset in classes["missing"] if len(summary["data"]) > 1 else ():
        count = len(dataset["classes"])
        title = f"{count:,} {'class has' if count == 1 else 'classes have'} no images in {dataset['data']}"
        text = (
            "Labels number the classes of a dataset, so they have the same meaning in all datasets only if you pass "
            "the same classes."
        )
        yield Advice("odd", title, text, "gl.ImageFolder(…, classes=train)")


def _ignored_advice(summary: dict[str, Any]) -> Iterator[Advice]:
    for dataset in summary["data"]:
        if count := sum(dataset["ignored"].values()):
            frequent = ", ".join(f"{count:,} × {ending}" for ending, count in list(dataset["ignored"].items())[:5])
            text = f"{frequent}. If some of them are images, pass their endings."
            code = 'gl.ImageFolder(…, extensions=(".jpg", …))'
            yield Advice("note", _title_with_count(count, f"file is skipped in {dataset['name']}"), text, code)


def _size_advice(summary: dict[str, Any]) -> Iterator[Advice]:
    if not (sizes := summary["sizes"]):
        return
    if count := sizes["small"]:
        title = _title_with_count(count, f"image has a side of fewer than {SMALL_SIDE} pixels")
        text = f"The smallest has {sizes['smallest'][0]}×{sizes['smallest'][1]}. A crop to 224 enlarges small images."
        yield Advice("note", title, text)
    if (median := sizes["pixels"]["median"]) > LARGE_PIXELS:
        title = f"Images are large: half of them have more than {median / 1e6:.1f} megapixels"
        text = "Most pixels are decoded only to be scaled down. Packed with a short side of 512, images load faster."
        yield Advice("note", title, text, "gpuload pack DATA FOLDER --to tar --short-side 512")
