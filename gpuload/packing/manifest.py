"""The manifest of a packed set, ``manifest.json``: it lists the set's files for `verify`, and says how to read the set.

The manifest contains the SHA-256 of each part (a shard, or for an array, a range of samples) and of each other file
(for ``images.npy``, only of its header), the skipped samples with their causes, and the arguments of the dataset that
reads the set. ``manifest-crc32.npy`` contains a CRC-32 of each sample, to locate damage within a part. These files
depend only on the samples. ``manifest-sources.json`` contains a checksum of the sizes and modification times of each
part's source files.

A set may come from an untrusted source, and the hash in a manifest detects damage, but does not authenticate the
author. So before a manifest is used, it is compared with the schema of the manifests that `pack` writes: the dataset
class and the names of files must be among the constants below, and anything else is refused. A schema is a value with
the same structure as the data:

- a dict means exactly these keys; a dict whose only key is a pattern, any keys that match the pattern;
- a list with one entry means any number of entries that match it;
- a tuple means any one of its alternatives;
- a type means a value of exactly this type; an int must be 0 or more; a `list` may contain anything;
- a pattern means a str that matches it completely;
- any other value means exactly this value.
"""

from __future__ import annotations

import json
import os
import re
from hashlib import sha256
from itertools import chain, zip_longest
from typing import Any, Final

from gpuload.errors import GpuloadError, short_repr
from gpuload.packing.durable import WORK_FOLDER, read_json

__all__ = [
    "ARRAY", "CLASSES", "DATABASE", "FORMAT", "LABELS", "MANIFEST", "SOURCES", "SUMS", "add_hash",
    "describe_reader", "find_difference", "format_open_call", "open_packed", "plan_schema", "read_manifest",
    "record_schema", "source_stamps",
]  # fmt: skip

FORMAT: Final = 2
MANIFEST: Final = "manifest.json"
SUMS: Final = "manifest-crc32.npy"
SOURCES: Final = "manifest-sources.json"
CLASSES: Final = "classes.json"
LABELS: Final = "labels.npy"
DATABASE: Final = "data.mdb"
ARRAY: Final = "images.npy"
# For each store: the dataset class that reads it, the path to pass to the class, and the names of the parts' files.
READERS: Final = {
    "tar": ("TarShards", "shard-*.tar", re.compile(r"shard-[0-9]{5,18}\.tar")),
    "parquet": ("Parquet", ".", re.compile(r"shard-[0-9]{5,18}\.parquet")),
    "lmdb": ("LMDB", ".", DATABASE),
    "array": ("ArrayFile", ARRAY, ARRAY),
}
LAYOUTS: Final = {2: "HW", 3: "HWC", 4: "DHWC"}
NUMBER_LIMIT: Final = 1 << 62

DIGEST: Final = re.compile("[0-9a-f]{64}")
TEXT: Final = re.compile(".*", re.DOTALL)
IMAGE: Final = re.compile(r".*\.bytes", re.DOTALL)
SOURCE_STAMP: Final = re.compile("[0-9a-f]{8}")
SKIPPED_SCHEMA: Final = [{"index": int, "source": (str, None), "cause": str}]


def find_difference(value: Any, schema: Any, where: str = "") -> str | None:
    """Describe the first difference between a value and a schema. Return None if the value matches."""
    subject = where or "its content"
    if isinstance(schema, dict | list) and type(value) is not type(schema):
        return f"{subject} is {short_repr(value)}; expected a {type(schema).__name__}"
    entries: list[tuple[Any, Any, str]]
    if isinstance(schema, list):
        entries = [(entry, schema[0], f"{where}[{index}]") for index, entry in enumerate(value)]
    elif isinstance(schema, dict):
        pattern = next((name for name in schema if isinstance(name, re.Pattern)), None)
        for name in value:
            if name not in schema and (pattern is None or not pattern.fullmatch(name)):
                return f"{subject} has an entry {short_repr(name)}, which gpuload does not write"
        for name in schema:
            if name is not pattern and name not in value:
                return f"{subject} lacks the entry {name!r}"
        entries = [(value[name], schema[pattern or name], f"{where}.{name}".lstrip(".")) for name in value]
    else:
        return None if _matches(value, schema) else f"{subject} is {short_repr(value)}; expected {_describe(schema)}"
    return next(filter(None, (find_difference(*entry) for entry in entries)), None)


def _matches(value: Any, schema: Any) -> bool:
    if isinstance(schema, tuple):
        return any(_matches(value, alternative) for alternative in schema)
    if isinstance(schema, re.Pattern):
        return isinstance(value, str) and schema.fullmatch(value) is not None
    if isinstance(schema, type):
        return type(value) is schema and (schema is not int or 0 <= value < NUMBER_LIMIT)
    return type(value) is type(schema) and value == schema


def _describe(schema: Any) -> str:
    if isinstance(schema, tuple):
        return " or ".join(map(_describe, schema))
    if isinstance(schema, re.Pattern):
        return f"text that matches {schema.pattern}"
    if isinstance(schema, type):
        return {int: "a number", str: "text", bool: "true or false", list: "a list"}[schema]
    return repr(schema)


def add_hash(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest with a hash of its content added."""
    hashed_entries = {name: value for name, value in manifest.items() if name != "sha256"}
    return {**hashed_entries, "sha256": sha256(json.dumps(hashed_entries, sort_keys=True).encode()).hexdigest()}


def read_manifest(folder: str) -> dict[str, Any]:
    """Return the manifest of a packed set.

    Raises:
        FileNotFoundError: there is no set, or it is not finished.
        GpuloadError: the manifest is damaged, has another version, or contains something that `pack` does not write.
    """
    path = os.path.join(folder, MANIFEST)
    if not os.path.exists(path):
        is_unfinished = os.path.isdir(os.path.join(folder, WORK_FOLDER))
        state = "is not finished: run the same `gpuload pack` command again" if is_unfinished else "is not a packed set"
        raise FileNotFoundError(f"{folder!r} {state}; it has no {MANIFEST}")
    manifest = read_json(path)
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if type(version) is int and version != FORMAT:
        raise GpuloadError(
            f"{path!r} has version {version}, but this gpuload reads version {FORMAT}: pack again, or pass the set's "
            "files to gpuload.TarShards, Parquet, LMDB or ArrayFile, which need no manifest"
        )
    if type(version) is not int or manifest != add_hash(manifest):
        raise GpuloadError(f"{path!r} is damaged, so the set cannot be checked: restore it from a copy, or pack again")
    if problem := _find_problem(manifest):
        raise GpuloadError(
            f"{path!r} is not a gpuload manifest: {problem}. It was not used; copy the set again from where it was "
            "packed, or pack again"
        )
    return manifest


def _find_problem(manifest: dict[str, Any]) -> str | None:
    """Describe the first entry that `pack` would not write. Return None if there is no such entry."""
    to = manifest.get("to")
    if not isinstance(to, str) or to not in READERS:
        return f"'to' is {short_repr(to)}; expected one of {', '.join(READERS)}"
    read: Any = manifest.get("read")
    is_upright = isinstance(read, dict) and isinstance(read.get("options"), dict) and "exif" in read["options"]
    schema = {
        "format": FORMAT,
        "to": to,
        "form": ("alone", "pair", "dict"),
        "digits": int,
        "samples": int,
        "read": _reader_description(
            to, manifest.get("form"), [str], IMAGE, [str], ("int", "text"), ("data", *LAYOUTS.values()), is_upright
        ),
        "parts": [_part_schema(to)],
        "files": {re.compile("|".join(map(re.escape, (SUMS, CLASSES, LABELS, DATABASE, ARRAY)))): DIGEST},
        "left_out": SKIPPED_SCHEMA,
        "kept": {TEXT: int},
        "plan": plan_schema(to),
        "sha256": DIGEST,
    }
    return find_difference(manifest, schema)


def plan_schema(to: str | tuple[str, ...]) -> dict[str, Any]:
    """Return the schema of a plan: the arguments of a job, and the identity of its dataset."""
    return {
        "format": FORMAT,
        "to": to,
        "options": {"short_side": (int, None), "quality": int, "cuttable": bool, "check": bool, "exif": bool},
        "shard_bytes": int,
        "dataset": {"kind": str, "samples": int, "digest": DIGEST},
    }


def record_schema(to: str, part_number: int) -> dict[str, Any]:
    """Return the schema of a part's record."""
    store_fields = {"parquet": {}, "array": {"labels": list}}.get(to, {"fields": [[str]]})
    return {
        "part": part_number,
        "crc32": re.compile("([0-9a-f]{8})*"),
        "bad": SKIPPED_SCHEMA,
        "kept": {TEXT: int},
        "sources": (SOURCE_STAMP, None),
        **_part_schema(to),
        **store_fields,
    }


def _part_schema(to: str) -> dict[str, Any]:
    return {"file": READERS[to][2], "first": int, "samples": int, "bytes": int, "sha256": DIGEST}


def describe_reader(
    to: str, form: str, records: list[dict[str, Any]], entry_type: Any, *, exif: bool
) -> dict[str, Any]:
    """Describe the dataset that reads the set: its class, and the path and arguments to pass to the class."""
    fields_by_position = zip_longest(*(record.get("fields", []) for record in records), fillvalue=[])
    fields = [";".join(dict.fromkeys(chain(*extensions))) for extensions in fields_by_position]
    image, columns, layout = "", [], ""
    if to == "parquet":
        image = next(name for name in entry_type.names if str(entry_type.field(name).type).startswith("struct<bytes"))
        columns = [name for name in entry_type.names if name != image]
    elif to == "array":
        _, shape, is_data = entry_type
        layout = "data" if is_data else LAYOUTS[len(shape)]
    return _reader_description(
        to, form, fields, f"{image}.bytes", columns, "int" if fields[1:] == ["int"] else "text", layout, exif
    )


def _reader_description(
    to: str, form: Any, fields: Any, image: Any, columns: Any, label: Any, layout: Any, exif: bool
) -> dict[str, Any]:
    """Describe the dataset that reads a set. Given schemas instead of values, return the schema of the description."""
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
    options |= {"exif": True} if exif and to != "array" else {}
    return {"dataset": dataset, "path": path, "options": options}


def source_stamps(folder: str, part_count: int) -> list[str | None]:
    """Return one stamp per part, of its source files; None for every part if the stamps are unknown."""
    stamps = read_json(os.path.join(folder, SOURCES))
    is_valid = find_difference(stamps, [(SOURCE_STAMP, None)]) is None and len(stamps) == part_count
    return stamps if is_valid else [None] * part_count


def format_open_call(folder: str, read: dict[str, Any]) -> str:
    """Return a line of Python code that opens the set."""
    path, arguments = _dataset_arguments(folder, read)
    return f"gpuload.{read['dataset']}({path!r}{''.join(f', {name}={value!r}' for name, value in arguments.items())})"


def _dataset_arguments(folder: str, read: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the path and the keyword arguments with which to create the dataset."""
    options: dict[str, Any] = dict(read["options"])
    options |= {name: tuple(value) for name, value in options.items() if isinstance(value, list)}
    if "labels" in options:
        options["labels"] = os.path.join(folder, options["labels"])
    return folder if read["path"] == "." else os.path.join(folder, read["path"]), options


def open_packed(folder: str) -> Any:
    """Return the dataset that reads a packed set. Its `classes` attribute holds the class names, or None.

    Raises:
        FileNotFoundError: as in `read_manifest`.
        GpuloadError: as in `read_manifest`; or a link points outside the folder; or the class names are damaged.
    """
    from gpuload.datasets.stores.array import ArrayFile
    from gpuload.datasets.stores.lmdb import LMDB
    from gpuload.datasets.stores.parquet import Parquet
    from gpuload.datasets.stores.tar.dataset import TarShards

    read = read_manifest(folder)["read"]
    _refuse_links(folder)
    path, options = _dataset_arguments(folder, read)
    dataset_types: dict[str, Any] = {cls.__name__: cls for cls in (ArrayFile, LMDB, Parquet, TarShards)}
    dataset = dataset_types[read["dataset"]](path, **options)
    classes_path = os.path.join(folder, CLASSES)
    dataset.classes = classes = read_json(classes_path)
    if find_difference(classes, [str]) and classes is not None:
        raise GpuloadError(
            f"{classes_path!r} holds {short_repr(classes)}; expected a list of class names. Copy the file again, or "
            "pack again"
        )
    return dataset


def _refuse_links(folder: str) -> None:
    """Refuse a set with links that point outside its folder, since they could expose any file on the user's machine."""
    root = os.path.join(os.path.realpath(folder), "")
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink() and not (target := os.path.realpath(entry.path)).startswith(root):
                raise GpuloadError(
                    f"{entry.path!r} is a link to {target!r}, outside {folder!r}. Replace the link with a copy of "
                    "the file; or if you trust the files, open them directly, as in 'packed/shard-*.tar'"
                )
