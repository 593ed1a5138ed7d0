"""Opens the dataset and loads the transforms that a command line names: a path, and ``--recipe FILE.py:name``.

A recipe's file runs once, in this process, as with ``python FILE.py``, but its ``__name__`` is not ``__main__``. The
file can import modules from its folder, which comes last in the search path, so that they cannot shadow a library.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Mapping
from typing import Any, Final

import gpuload as gl
from gpuload.datasets.files import EXTENSIONS
from gpuload.datasets.litter import is_litter
from gpuload.datasets.stores.opening import without_query
from gpuload.errors import one_line
from gpuload.packing.manifest import MANIFEST, open_packed
from gpuload.transforms import Chain, Compose, Normalize, RandomHorizontalFlip, RandomResizedCrop

__all__ = ["MEAN", "OPTIONS_OF", "SIZE", "STD", "default_recipe", "load_recipe", "open_source"]

OPTIONS_OF: Final = {  # the classes of datasets to which each command line option applies
    "fields": ("TarShards",),
    "image": ("LMDB", "Parquet", "HDF5"),
    "target": ("LMDB", "Parquet", "HDF5"),
    "extensions": ("ImageFolder", "ImageFiles"),
    "classes": ("ImageFolder", "FileList"),
}


def open_source(source: str, store: Mapping[str, str | None]) -> Any:
    """Open the dataset that a command line names. Its kind is recognised by the content of a folder, or by the ending
    of a file name.

    Args:
        source: a path, a pattern of paths, or a URL.
        store: the values of the command line options in `OPTIONS_OF`; None if an option is not used.

    Raises:
        FileNotFoundError: the source does not exist.
        ValueError: its kind is unknown, an option does not apply to its kind, or it has no samples.
    """
    dataset = _open(source, {name: value for name, value in store.items() if value is not None})
    if not len(dataset):
        raise ValueError(f"{dataset!r} has no samples")
    return dataset


def _open(source: str, store: dict[str, str]) -> Any:
    name = _class_name_of(source)
    for option in store:
        if name not in OPTIONS_OF[option]:
            raise ValueError(f"--{option} applies to {', '.join(OPTIONS_OF[option])}, but {source!r} is read by {name}")
    if name == "packed":
        return open_packed(os.path.abspath(source))
    options: dict[str, Any] = dict(store)
    for list_option in ("fields", "extensions"):
        if list_option in options:
            options[list_option] = tuple(options[list_option].split(","))
    if "classes" in options:
        options["classes"] = _open(options["classes"], {})
    if options.get("target") == "":
        options["target"] = None
    return getattr(gl, name)(source, **options)


def _class_name_of(source: str) -> str:
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
        is_flat = any(name.lower().endswith(EXTENSIONS) for name in names)
        has_folders = any(os.path.isdir(os.path.join(source, name)) for name in names)
        return "ImageFolder" if has_folders and not is_flat else "ImageFiles"
    for ending, name in endings.items():
        if without_query(source).lower().endswith(ending):
            return name
    if not os.path.exists(source) and not any(character in source for character in "*?{"):
        raise FileNotFoundError(f"{source!r} does not exist; expected a folder of images, shards, or a file of a store")
    raise ValueError(
        f"the kind of {source!r} is unknown: expected a folder of images, or a name that ends in "
        f"{', '.join(endings)}. In Python, gpuload takes any dataset"
    )


# -- recipes ----------------------------------------------------------------------------------------------------------

MEAN: Final = (0.485, 0.456, 0.406)
STD: Final = (0.229, 0.224, 0.225)
SIZE: Final = 224


def default_recipe() -> list[Any]:
    """Return the usual transforms for image classifiers: a random crop to 224×224, a flip, and normalization with
    ImageNet's mean and std."""
    return [RandomResizedCrop(SIZE), RandomHorizontalFlip(), Normalize(MEAN, STD)]


def load_recipe(spec: str) -> list[Any]:
    """Return the transforms that ``FILE.py:name`` names, which are a list, tuple or `Chain` in a Python file. The last
    one may be a module.

    Raises:
        ValueError: the file or the name does not exist, the file raises an error, or the value is not a chain.
    """
    path, colon, name = spec.rpartition(":")
    if not colon or not path or not name.isidentifier():
        raise ValueError(
            f"--recipe expects FILE.py:name, where `name` is a list of transforms in that file, got {spec!r}"
        )
    if not os.path.isfile(path):
        raise ValueError(f"--recipe {spec}: the file {path!r} does not exist")
    folder = os.path.dirname(os.path.abspath(path))
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        names = runpy.run_path(path, run_name="gpuload_recipe")
    except (Exception, SystemExit) as error:
        raise ValueError(f"--recipe {spec}: the file cannot be run: {_describe(error, path)}") from error
    if name not in names:
        chains = [other_name for other_name, value in names.items() if isinstance(value, list | tuple | Chain)]
        alternatives = f"it has {', '.join(chains)}" if chains else "it has no list or Chain"
        raise ValueError(f"--recipe {spec}: {path} has no {name!r}; {alternatives}")
    value = names[name]
    if isinstance(value, Compose):
        value = list(value.transforms)
    if not isinstance(value, list | tuple | Chain):
        kind = type(value)
        library = "" if kind.__module__ == "builtins" else f" from {kind.__module__.partition('.')[0]}"
        raise ValueError(
            f"--recipe {spec}: {name} must be a list of gpuload's transforms or a Chain, got type {kind.__name__}"
            f"{library}"
            + ("; convert it with gpuload.transforms.from_torchvision" if library == " from torchvision" else "")
        )
    try:
        chain = value if isinstance(value, Chain) else Chain(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"--recipe {spec}: {error}") from error
    return chain.entries


def _describe(error: BaseException, path: str) -> str:
    """Describe an error, with the line of the recipe's file that raised it."""
    if isinstance(error, SyntaxError):
        return one_line(f"SyntaxError in line {error.lineno}: {error.msg}")
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    where = f" in line {lines[-1]}" if lines else ""
    return one_line(f"{type(error).__name__}{where}: {error}")
