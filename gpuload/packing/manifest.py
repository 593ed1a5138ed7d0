"""What lies beside a packed set: ``manifest.json``, by which `verify` knows what has to be there, and how to read it.

It has the SHA-256 of each part (a shard; of an LMDB or an array, a span of samples) and of the other files (of
``images.npy`` what precedes the numbers), the samples that were left out with their causes, and how the set is read.
``manifest-crc32.npy`` has a CRC-32 of each sample, which says where in a damaged part the damage is. All of these
depend on the samples alone. ``manifest-sources.json`` says by which sizes and times the sources of each part are
recognized.

A set may come from anybody, and the hash of a manifest shows damage, not who wrote it. So a manifest is compared with
what `pack` writes, entry by entry, before any of it is used: the dataset that reads a set and the names of its files
are the constants below, and anything else is refused.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from typing import Any, Final

from gpuload.errors import GpuloadError
from gpuload.packing.durable import read_json, sha256
from gpuload.packing.expected import DIGEST, TEXT, differences, shortened

__all__ = [
    "ARRAY", "CLASSES", "DATABASE", "FORMAT", "LABELS", "MANIFEST", "SOURCES", "SUMS", "how_to_read",
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
SOURCE_STAMP: Final = re.compile("[0-9a-f]{8}")
LAYOUTS: Final = {2: "HW", 3: "HWC", 4: "DHWC"}
BAD: Final = [{"index": int, "source": (str, None), "cause": str}]  # as `gpuload.packing.expected` describes it


def sealed(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest with a hash of itself."""
    return {**manifest, "sha256": _own_hash(manifest)}


def _own_hash(manifest: dict[str, Any]) -> str:
    hashed = {name: value for name, value in manifest.items() if name != "sha256"}
    return sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: str) -> dict[str, Any]:
    """Return the manifest of a packed set.

    Raises:
        FileNotFoundError: there is no set, or it is not finished.
        GpuloadError: it is damaged, of another version, or has something in it that `pack` does not write.
    """
    path = os.path.join(folder, MANIFEST)
    if not os.path.exists(path):
        unfinished = os.path.isdir(os.path.join(folder, ".gpuload-pack"))
        what = "is not finished: run the same gpuload pack again" if unfinished else "is no packed set"
        raise FileNotFoundError(f"{folder!r} {what}; it has no {MANIFEST}")
    manifest = read_json(path)
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if type(version) is int and version != FORMAT:
        raise GpuloadError(
            f"{path!r} is of version {version}, this gpuload reads {FORMAT}: pack again, or name the set's files to "
            "gpuload.TarShards, Parquet, LMDB or ArrayFile, which need no manifest"
        )
    if type(version) is not int or manifest.get("sha256") != _own_hash(manifest):
        raise GpuloadError(
            f"{path!r} is damaged, so nothing can be said of the rest: take it from a copy, or pack again"
        )
    for difference in _differences(manifest):
        raise GpuloadError(
            f"{path!r} is not a manifest of gpuload: {difference}. None of it is used; take the set from where it was "
            "packed, or pack again"
        )
    return manifest


def _differences(manifest: dict[str, Any]) -> Iterator[str]:
    """Yield how a manifest differs from what `pack` writes."""
    to = manifest.get("to")
    if not isinstance(to, str) or to not in READERS:
        yield f"to is {shortened(to)}, expected one of {', '.join(READERS)}"
        return
    yield from differences(manifest, _manifest_like(to, manifest.get("form")))


def _manifest_like(to: str, form: Any) -> dict[str, Any]:
    dataset, path, _ = READERS[to]
    return {
        "format": FORMAT,
        "to": to,
        "form": ("alone", "pair", "dict"),
        "digits": int,
        "samples": int,
        "read": {"dataset": dataset, "path": path, "options": _options(to, form)},
        "parts": [_part_like(to)],
        "files": {re.compile("|".join(map(re.escape, (SUMS, CLASSES, LABELS, DATABASE, ARRAY)))): DIGEST},
        "left_out": BAD,
        "kept": {TEXT: int},
        "plan": plan_like(to),
        "sha256": DIGEST,
    }


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
    more = {"tar": {"fields": [[str]]}, "lmdb": {"label": ("int", "text", None)}, "array": {"labels": list}}
    return {
        "part": number,
        "crc32": re.compile("([0-9a-f]{8})*"),
        "bad": BAD,
        "kept": {TEXT: int},
        "sources": (SOURCE_STAMP, None),
        **_part_like(to),
        **more.get(to, {}),
    }


def _part_like(to: str) -> dict[str, Any]:
    return {"file": READERS[to][2], "first": int, "samples": int, "bytes": int, "sha256": DIGEST}


def _options(to: str, form: Any) -> dict[str, Any]:
    """Describe the arguments that `how_to_read` gives."""
    match to, form:
        case "tar", "dict":
            return {}
        case "tar", _:
            return {"fields": str if form == "alone" else [str]}
        case "parquet", _:
            target = {"target": "label" if form == "pair" else None}
            return (
                {"image": re.compile(r".*\.bytes", re.DOTALL)} | target | ({"columns": [str]} if form == "dict" else {})
            )
        case "lmdb", "pair":
            return {"image": "{}.image", "target": "{}.label", "target_type": ("int", "text")}
        case "lmdb", _:
            return {"image": "{}.image"}
    return {"layout": ("data", *LAYOUTS.values())} | ({"labels": LABELS} if form == "pair" else {})


def source_stamps(folder: str, parts: int) -> list[str | None]:
    """Return the stamps of the sources that a set was made of, one for each part; None where nothing is known."""
    stamps = read_json(os.path.join(folder, SOURCES))
    known = not any(differences(stamps, [(SOURCE_STAMP, None)])) and len(stamps) == parts
    return stamps if known else [None] * parts


def how_to_read(to: str, form: str, records: list[dict[str, Any]], like: Any) -> dict[str, Any]:
    """Return the dataset's name, the path in the set's folder, and the arguments that give the samples back."""
    if to == "tar":
        places: list[list[str]] = []
        for record in records:
            for place, names in enumerate(record["fields"]):
                if place == len(places):
                    places.append([])
                places[place] += [name for name in names if name not in places[place]]
        fields = [";".join(names) for names in places]
        options: dict[str, Any] = {} if form == "dict" else {"fields": fields[0] if form == "alone" else fields}
        return _read(to, options)
    if to == "parquet":
        image = next(name for name in like.names if str(like.field(name).type).startswith("struct<bytes"))
        others = [name for name in like.names if name != image]
        target = {"target": "label" if form == "pair" else None}
        more = {"columns": others} if form == "dict" else {}
        return _read(to, {"image": f"{image}.bytes", **target, **more})
    if to == "lmdb":
        options = {"image": "{}.image"}
        if form == "pair":
            kinds = {record["label"] for record in records if record["label"]}
            options |= {"target": "{}.label", "target_type": "int" if kinds == {"int"} else "text"}
        return _read(to, options)
    shape, raw = like[1], like[2]
    options = {"layout": "data" if raw else LAYOUTS[len(shape)]}
    return _read(to, options | ({"labels": LABELS} if form == "pair" else {}))


def _read(to: str, options: dict[str, Any]) -> dict[str, Any]:
    dataset, path, _ = READERS[to]
    return {"dataset": dataset, "path": path, "options": options}


def reading_line(folder: str, read: dict[str, Any]) -> str:
    """Return the line of Python that reads the set."""
    options = "".join(f", {name}={value!r}" for name, value in _arguments(folder, read).items())
    return f"gpuload.{read['dataset']}({_path(folder, read)!r}{options})"


def open_packed(folder: str) -> Any:
    """Return the dataset that reads a packed set; its `classes` are the names of labels, or None.

    Raises:
        FileNotFoundError, GpuloadError: as `read_manifest`; or a link leads out of the folder.
    """
    from gpuload.datasets.stores.array import ArrayFile
    from gpuload.datasets.stores.lmdb import LMDB
    from gpuload.datasets.stores.parquet import Parquet
    from gpuload.datasets.stores.tar.dataset import TarShards

    kinds: dict[str, Any] = {"tar": TarShards, "parquet": Parquet, "lmdb": LMDB, "array": ArrayFile}
    manifest = read_manifest(folder)
    _refuse_links(folder)
    read = manifest["read"]
    dataset = kinds[manifest["to"]](_path(folder, read), **_arguments(folder, read))
    path = os.path.join(folder, CLASSES)
    dataset.classes = classes = read_json(path)
    if classes is not None and not (isinstance(classes, list) and all(isinstance(name, str) for name in classes)):
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


def _path(folder: str, read: dict[str, Any]) -> str:
    return folder if read["path"] == "." else os.path.join(folder, read["path"])


def _arguments(folder: str, read: dict[str, Any]) -> dict[str, Any]:
    options = read["options"]
    arguments: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in options.items()}
    if "labels" in arguments:
        arguments["labels"] = os.path.join(folder, arguments["labels"])
    return arguments
