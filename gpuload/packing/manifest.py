"""What lies beside a packed set: ``manifest.json``, by which `verify` knows what has to be there, and how to read it.

It has the SHA-256 of each part (a shard; of an array, a span of samples) and of the other files (of ``images.npy`` what
precedes the numbers), the samples that were left out with their causes, and how the set is read.
``manifest-crc32.npy`` has a CRC-32 of each sample, which says where in a damaged part the damage is. All of these
depend on the samples alone. ``manifest-sources.json`` says by which sizes and times the sources of each part are
recognized.

A set may come from anybody, and the hash of a manifest shows damage, not who wrote it. So a manifest is compared with
what `pack` writes, entry by entry, before any of it is used: the dataset that reads a set and the names of its files
are the constants below, and anything else is refused. What is expected is described by a value of the same form:

- a dict: exactly these names; a dict whose one name is a pattern: any names that match it;
- a list with one entry: any number of entries like it;
- a tuple: one of several;
- a type: a value of exactly this type, and if it is a number, 0 or more; `list`: whatever is in it;
- a pattern: a text that it matches from beginning to end;
- anything else: that value.
"""

from __future__ import annotations

import json
import os
import re
from hashlib import sha256
from itertools import chain, zip_longest
from typing import Any, Final

from gpuload.errors import GpuloadError
from gpuload.packing.durable import WORK, read_json

__all__ = [
    "ARRAY", "CLASSES", "DATABASE", "FORMAT", "LABELS", "MANIFEST", "SOURCES", "SUMS", "difference", "how_to_read",
    "open_packed", "plan_like", "read_manifest", "reading_line", "record_like", "sealed", "source_stamps",
]  # fmt: skip

FORMAT: Final = 2
MANIFEST: Final = "manifest.json"
SUMS: Final = "manifest-crc32.npy"
SOURCES: Final = "manifest-sources.json"
CLASSES: Final = "classes.json"
LABELS: Final = "labels.npy"
DATABASE: Final = "data.mdb"
ARRAY: Final = "images.npy"
# Of each store the dataset that reads it, its path in the set's folder, and the names of its parts.
READERS: Final = {
    "tar": ("TarShards", "shard-*.tar", re.compile(r"shard-[0-9]{5,18}\.tar")),
    "parquet": ("Parquet", ".", re.compile(r"shard-[0-9]{5,18}\.parquet")),
    "lmdb": ("LMDB", ".", DATABASE),
    "array": ("ArrayFile", ARRAY, ARRAY),
}
LAYOUTS: Final = {2: "HW", 3: "HWC", 4: "DHWC"}
LARGEST: Final = 1 << 62
SHOWN: Final = 100  # characters of a value

DIGEST: Final = re.compile("[0-9a-f]{64}")
TEXT: Final = re.compile(".*", re.DOTALL)
IMAGE: Final = re.compile(r".*\.bytes", re.DOTALL)
SOURCE_STAMP: Final = re.compile("[0-9a-f]{8}")
BAD: Final = [{"index": int, "source": (str, None), "cause": str}]


def difference(value: Any, expected: Any, where: str = "") -> str | None:
    """Return where a value first differs from what is expected, and what is there, in a few words; None if nowhere."""
    place = where or "its content"
    if isinstance(expected, dict | list) and type(value) is not type(expected):
        return f"{place} is {shortened(value)}, expected a {type(expected).__name__}"
    entries: list[tuple[Any, Any, str]]
    if isinstance(expected, list):
        entries = [(entry, expected[0], f"{where}[{number}]") for number, entry in enumerate(value)]
    elif isinstance(expected, dict):
        pattern = next((name for name in expected if isinstance(name, re.Pattern)), None)
        for name in value:
            if name not in expected and (pattern is None or not pattern.fullmatch(name)):
                return f"{place} has an entry {shortened(name)}, which gpuload does not write"
        for name in expected:
            if name is not pattern and name not in value:
                return f"{place} has no entry {name!r}"
        entries = [(value[name], expected[pattern or name], f"{where}.{name}".lstrip(".")) for name in value]
    else:
        return None if _fits(value, expected) else f"{place} is {shortened(value)}, expected {_described(expected)}"
    return next(filter(None, (difference(*entry) for entry in entries)), None)


def _fits(value: Any, expected: Any) -> bool:
    if isinstance(expected, tuple):
        return any(_fits(value, alternative) for alternative in expected)
    if isinstance(expected, re.Pattern):
        return isinstance(value, str) and expected.fullmatch(value) is not None
    if isinstance(expected, type):
        return type(value) is expected and (expected is not int or 0 <= value < LARGEST)
    return type(value) is type(expected) and value == expected


def _described(expected: Any) -> str:
    if isinstance(expected, tuple):
        return " or ".join(map(_described, expected))
    if isinstance(expected, re.Pattern):
        return f"text like {expected.pattern}"
    if isinstance(expected, type):
        return {int: "a number", str: "text", bool: "true or false", list: "a list"}[expected]
    return repr(expected)


def shortened(value: Any) -> str:
    """Return a value as a message shows it."""
    shown = repr(value)
    return shown if len(shown) <= SHOWN else shown[: SHOWN - 1] + "…"


def sealed(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest with a hash of itself."""
    hashed = {name: value for name, value in manifest.items() if name != "sha256"}
    return {**hashed, "sha256": sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()}


def read_manifest(folder: str) -> dict[str, Any]:
    """Return the manifest of a packed set.

    Raises:
        FileNotFoundError: there is no set, or it is not finished.
        GpuloadError: it is damaged, of another version, or has something in it that `pack` does not write.
    """
    path = os.path.join(folder, MANIFEST)
    if not os.path.exists(path):
        unfinished = os.path.isdir(os.path.join(folder, WORK))
        what = "is not finished: run the same gpuload pack again" if unfinished else "is no packed set"
        raise FileNotFoundError(f"{folder!r} {what}; it has no {MANIFEST}")
    manifest = read_json(path)
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if type(version) is int and version != FORMAT:
        raise GpuloadError(
            f"{path!r} is of version {version}, this gpuload reads {FORMAT}: pack again, or name the set's files to "
            "gpuload.TarShards, Parquet, LMDB or ArrayFile, which need no manifest"
        )
    if type(version) is not int or manifest != sealed(manifest):
        raise GpuloadError(
            f"{path!r} is damaged, so nothing can be said of the rest: take it from a copy, or pack again"
        )
    if wrong := _first_difference(manifest):
        raise GpuloadError(
            f"{path!r} is not a manifest of gpuload: {wrong}. None of it is used; take the set from where it was "
            "packed, or pack again"
        )
    return manifest


def _first_difference(manifest: dict[str, Any]) -> str | None:
    to = manifest.get("to")
    if not isinstance(to, str) or to not in READERS:
        return f"to is {shortened(to)}, expected one of {', '.join(READERS)}"
    like = {
        "format": FORMAT,
        "to": to,
        "form": ("alone", "pair", "dict"),
        "digits": int,
        "samples": int,
        "read": _read(to, manifest.get("form"), [str], IMAGE, [str], ("int", "text"), ("data", *LAYOUTS.values())),
        "parts": [_part_like(to)],
        "files": {re.compile("|".join(map(re.escape, (SUMS, CLASSES, LABELS, DATABASE, ARRAY)))): DIGEST},
        "left_out": BAD,
        "kept": {TEXT: int},
        "plan": plan_like(to),
        "sha256": DIGEST,
    }
    return difference(manifest, like)


def plan_like(to: str | tuple[str, ...]) -> dict[str, Any]:
    """Describe what is noted of a job: its arguments, and how its dataset is recognized."""
    return {
        "format": FORMAT,
        "to": to,
        "options": {"short_side": (int, None), "quality": int, "cuttable": bool, "check": bool, "exif": bool},
        "shard_bytes": int,
        "dataset": {"kind": str, "samples": int, "digest": DIGEST},
    }


def record_like(to: str, number: int) -> dict[str, Any]:
    """Describe what is noted of a part when it is written."""
    of_store = {"parquet": {}, "array": {"labels": list}}.get(to, {"fields": [[str]]})
    return {
        "part": number,
        "crc32": re.compile("([0-9a-f]{8})*"),
        "bad": BAD,
        "kept": {TEXT: int},
        "sources": (SOURCE_STAMP, None),
        **_part_like(to),
        **of_store,
    }


def _part_like(to: str) -> dict[str, Any]:
    return {"file": READERS[to][2], "first": int, "samples": int, "bytes": int, "sha256": DIGEST}


def how_to_read(to: str, form: str, records: list[dict[str, Any]], like: Any) -> dict[str, Any]:
    """Return the dataset's name, the path in the set's folder, and the arguments that give the samples back."""
    rows = zip_longest(*(record.get("fields", []) for record in records), fillvalue=[])
    fields = [";".join(dict.fromkeys(chain(*row))) for row in rows]
    image, columns, layout = "", [], ""
    if to == "parquet":
        image = next(name for name in like.names if str(like.field(name).type).startswith("struct<bytes"))
        columns = [name for name in like.names if name != image]
    elif to == "array":
        _, shape, is_data = like
        layout = "data" if is_data else LAYOUTS[len(shape)]
    return _read(to, form, fields, f"{image}.bytes", columns, "int" if fields[1:] == ["int"] else "text", layout)


def _read(to: str, form: Any, fields: Any, image: Any, columns: Any, label: Any, layout: Any) -> dict[str, Any]:
    """Return how a set is read; and where values are descriptions of what is expected, what is expected of that."""
    dataset, path, _ = READERS[to]
    options: dict[str, Any]
    match to:
        case "tar":
            options = {} if form == "dict" else {"fields": fields if form == "pair" else fields[0]}
        case "parquet":
            options = {"image": image, "target": "label" if form == "pair" else None}
            options |= {"columns": columns} if form == "dict" else {}
        case "lmdb":
            options = {"image": "{}.image"}
            options |= {"target": "{}.label", "target_type": label} if form == "pair" else {}
        case _:
            options = {"layout": layout}
            options |= {"labels": LABELS} if form == "pair" else {}
    return {"dataset": dataset, "path": path, "options": options}


def source_stamps(folder: str, parts: int) -> list[str | None]:
    """Return the stamps of the sources that a set was made of, one for each part; None where nothing is known."""
    stamps = read_json(os.path.join(folder, SOURCES))
    known = difference(stamps, [(SOURCE_STAMP, None)]) is None and len(stamps) == parts
    return stamps if known else [None] * parts


def reading_line(folder: str, read: dict[str, Any]) -> str:
    """Return the line of Python that reads the set."""
    path, arguments = _call(folder, read)
    return f"gpuload.{read['dataset']}({path!r}{''.join(f', {name}={value!r}' for name, value in arguments.items())})"


def _call(folder: str, read: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the path and the options that the set's dataset is made with."""
    options: dict[str, Any] = dict(read["options"])
    options |= {name: tuple(value) for name, value in options.items() if isinstance(value, list)}
    if "labels" in options:
        options["labels"] = os.path.join(folder, options["labels"])
    return folder if read["path"] == "." else os.path.join(folder, read["path"]), options


def open_packed(folder: str) -> Any:
    """Return the dataset that reads a packed set; its `classes` are the names of labels, or None.

    Raises:
        FileNotFoundError, GpuloadError: as `read_manifest`; or a link leads out of the folder.
    """
    from gpuload.datasets.stores.array import ArrayFile
    from gpuload.datasets.stores.lmdb import LMDB
    from gpuload.datasets.stores.parquet import Parquet
    from gpuload.datasets.stores.tar.dataset import TarShards

    read = read_manifest(folder)["read"]
    _refuse_links(folder)
    path, options = _call(folder, read)
    kinds: dict[str, Any] = {kind.__name__: kind for kind in (ArrayFile, LMDB, Parquet, TarShards)}
    dataset = kinds[read["dataset"]](path, **options)
    path = os.path.join(folder, CLASSES)
    dataset.classes = classes = read_json(path)
    if difference(classes, [str]) and classes is not None:
        raise GpuloadError(f"{path!r} holds {shortened(classes)}, expected a list of the classes' names")
    return dataset


def _refuse_links(folder: str) -> None:
    """Refuse a set that has files elsewhere: what is read from there may not be the set's."""
    root = os.path.join(os.path.realpath(folder), "")
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink() and not (target := os.path.realpath(entry.path)).startswith(root):
                raise GpuloadError(
                    f"{entry.path!r} is a link that leaves {folder!r}: it leads to {target!r}. Copy the file to its "
                    "place; or name the files themselves, as in 'packed/shard-*.tar', if you trust them"
                )
