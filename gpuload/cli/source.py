"""The dataset that a command line names: ``gpuload pack``, ``bench``, ``compare`` and others take the same."""

from __future__ import annotations

import os
from typing import Any, Final

from gpuload import datasets
from gpuload.datasets.files import EXTENSIONS
from gpuload.datasets.litter import is_litter
from gpuload.packing.manifest import MANIFEST, open_packed

__all__ = ["source_of"]

OPTIONS_OF: Final = {
    "fields": ("TarShards",),
    "image": ("LMDB", "Parquet", "HDF5"),
    "target": ("LMDB", "Parquet", "HDF5"),
    "extensions": ("ImageFolder", "ImageFiles"),
    "classes": ("ImageFolder", "FileList"),
}


def source_of(source: str, given: dict[str, str]) -> Any:
    """The dataset that a command line names: by what is there, else by the end of the name.

    Raises:
        FileNotFoundError: there is nothing.
        ValueError: it is of no known kind, or options do not go with it.
    """
    name = _kind_of(source)
    for option in given:
        if name not in OPTIONS_OF[option]:
            raise ValueError(f"--{option} is for {', '.join(OPTIONS_OF[option])}, and {source!r} is read by {name}")
    if name == "packed":
        return open_packed(os.path.abspath(source))
    options: dict[str, Any] = dict(given)
    for several in ("fields", "extensions"):
        if several in options:
            options[several] = tuple(options[several].split(","))
    if "classes" in options:
        options["classes"] = source_of(options["classes"], {})
    if options.get("target") == "":
        options["target"] = None
    return getattr(datasets, name)(source, **options)


def _kind_of(source: str) -> str:
    endings: dict[str, str] = {
        ".tar": "TarShards", ".parquet": "Parquet", ".mdb": "LMDB", ".lmdb": "LMDB", ".npy": "ArrayFile",
        ".h5": "HDF5", ".hdf5": "HDF5", ".csv": "FileList", ".tsv": "FileList",
    }  # fmt: skip
    if os.path.isdir(source):
        names = [name for name in os.listdir(source) if not is_litter(os.fsencode(name))]
        if MANIFEST in names:
            return "packed"
        if "data.mdb" in names:
            return "LMDB"
        if any(name.endswith(".parquet") for name in names):
            return "Parquet"
        flat = any(name.lower().endswith(EXTENSIONS) for name in names)
        return (
            "ImageFiles"
            if flat or not any(os.path.isdir(os.path.join(source, name)) for name in names)
            else "ImageFolder"
        )
    for ending, name in endings.items():
        if source.lower().endswith(ending):
            return name
    if not os.path.exists(source) and not any(character in source for character in "*?{"):
        raise FileNotFoundError(f"{source!r} does not exist; expected a folder of images, shards, or a file of a store")
    raise ValueError(
        f"{source!r} is of no kind that is known: expected a folder of images, or a name that ends in "
        f"{', '.join(endings)}. In Python, gpuload takes any dataset"
    )
