"""What lies beside a packed set: ``manifest.json``, by which `verify` knows what has to be there, and how to read it.

It has a hash of each part (a shard; of an LMDB or an array, a span of samples) and of small files, the
samples that were left out with their causes, and how the set is read. ``manifest-crc32.npy`` has a CRC-32 of each
sample, which says where in a damaged part the damage is.
"""

from __future__ import annotations

import json
import os
from typing import Any, Final

import numpy as np

from gpuload.errors import GpuloadError
from gpuload.packing.durable import HashName, new_hash, read_json

__all__ = [
    "CLASSES",
    "FORMAT",
    "HASHES",
    "LABELS",
    "MANIFEST",
    "SUMS",
    "how_to_read",
    "open_packed",
    "read_manifest",
    "sealed",
    "told",
]

FORMAT: Final = 2
HASHES: Final[dict[int, HashName]] = {1: "blake2b", 2: "sha256"}  # of each format, the one it has, under its name
MANIFEST: Final = "manifest.json"
SUMS: Final = "manifest-crc32.npy"
CLASSES: Final = "classes.json"
LABELS: Final = "labels.npy"


def sealed(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest with a hash of itself."""
    return {**manifest, HASHES[manifest["format"]]: _own_hash(manifest)}


def _own_hash(manifest: dict[str, Any]) -> str:
    own = HASHES[manifest["format"]]
    rest = {name: value for name, value in manifest.items() if name != own}
    return new_hash(own, json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: str) -> dict[str, Any]:
    """The manifest of a packed set.

    Raises:
        FileNotFoundError: there is none: no set, or one that is not finished.
        GpuloadError: it is damaged, or of another version.
    """
    path = os.path.join(folder, MANIFEST)
    if not os.path.exists(path):
        unfinished = os.path.isdir(os.path.join(folder, ".gpuload-pack"))
        what = "is not finished: run the same gpuload pack again" if unfinished else "is no packed set"
        raise FileNotFoundError(f"{folder!r} {what}; it has no {MANIFEST}")
    manifest = read_json(path)
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if type(version) is int and version not in HASHES:
        raise GpuloadError(f"{path!r} is of version {version}, this gpuload reads {', '.join(map(str, HASHES))}")
    if type(version) is not int or manifest.get(HASHES[version]) != _own_hash(manifest):
        raise GpuloadError(
            f"{path!r} is damaged, so nothing can be said of the rest: take it from a copy, or pack again"
        )
    return manifest


def how_to_read(to: str, form: str, records: list[dict[str, Any]], like: Any) -> dict[str, Any]:
    """The dataset's name, the path in the set's folder, and the arguments with which it gives the samples back."""
    if to == "tar":
        places: list[list[str]] = []
        for record in records:
            for place, names in enumerate(record["fields"]):
                if place == len(places):
                    places.append([])
                places[place] += [name for name in names if name not in places[place]]
        fields = [";".join(names) for names in places]
        options: dict[str, Any] = {} if form == "dict" else {"fields": fields[0] if form == "alone" else fields}
        return {"dataset": "TarShards", "path": "shard-*.tar", "options": options}
    if to == "parquet":
        image = next(name for name in like.names if str(like.field(name).type).startswith("struct<bytes"))
        others = [name for name in like.names if name != image]
        target = {"target": "label" if form == "pair" else None}
        more = {"columns": others} if form == "dict" else {}
        return {"dataset": "Parquet", "path": ".", "options": {"image": f"{image}.bytes", **target, **more}}
    if to == "lmdb":
        options = {"image": "{}.image"}
        if form == "pair":
            kinds = {record["label"] for record in records if record["label"]}
            options |= {"target": "{}.label", "target_type": "int" if kinds == {"int"} else "text"}
        return {"dataset": "LMDB", "path": ".", "options": options}
    shape, raw = like[1], like[2]
    layouts = {2: "HW", 3: "HWC", 4: "DHWC"}
    options = {"layout": "data" if raw else layouts[len(shape)]}
    return {
        "dataset": "ArrayFile",
        "path": "images.npy",
        "options": options | ({"labels": LABELS} if form == "pair" else {}),
    }


def told(folder: str, read: dict[str, Any]) -> str:
    """How the set is read, as a line of Python."""
    options = "".join(f", {name}={value!r}" for name, value in _arguments(folder, read).items())
    return f"gpuload.{read['dataset']}({_path(folder, read)!r}{options})"


def open_packed(folder: str, **others: Any) -> Any:
    """The dataset that reads a packed set; its `classes` are the names of labels, or None."""
    import gpuload.datasets

    read = read_manifest(folder)["read"]
    dataset = getattr(gpuload.datasets, read["dataset"])(_path(folder, read), **_arguments(folder, read), **others)
    dataset.classes = read_json(os.path.join(folder, CLASSES))
    return dataset


def _path(folder: str, read: dict[str, Any]) -> str:
    return folder if read["path"] == "." else os.path.join(folder, read["path"])


def _arguments(folder: str, read: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in read["options"].items()
    }
    if "labels" in found:
        found["labels"] = os.path.join(folder, found["labels"])
    return found


def sums_of(records: list[dict[str, Any]]) -> np.ndarray:
    """The CRC-32 of each sample, in order."""
    return np.frombuffer(bytes.fromhex("".join(record["crc32"] for record in records)), "<u4")
