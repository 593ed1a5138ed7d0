"""What a command line names: a dataset, by its path, and the user's own transforms, ``--recipe FILE.py:name``.

A recipe's file is run once, in this process, as ``python FILE.py`` would run it, but under another name than
``__main__``. Modules beside it can be imported; they come after all others, so that none of them takes the place of a
library.
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
from gpuload.errors import one_line
from gpuload.packing.manifest import MANIFEST, open_packed
from gpuload.transforms import Chain, Compose, Normalize, RandomHorizontalFlip, RandomResizedCrop

__all__ = ["MEAN", "OPTIONS_OF", "SIZE", "STD", "load_recipe", "source_of", "usual_recipe"]

OPTIONS_OF: Final = {
    "fields": ("TarShards",),
    "image": ("LMDB", "Parquet", "HDF5"),
    "target": ("LMDB", "Parquet", "HDF5"),
    "extensions": ("ImageFolder", "ImageFiles"),
    "classes": ("ImageFolder", "FileList"),
}


def source_of(source: str, store: Mapping[str, str | None]) -> Any:
    """Return the dataset that a command line names: by what is there, else by the end of the name.

    Args:
        source: a path, a pattern of paths, or a URL.
        store: the options of `OPTIONS_OF`, as the command line has them; None where there is none.

    Raises:
        FileNotFoundError: there is nothing.
        ValueError: it is of no known kind, options do not go with it, or it has no samples.
    """
    dataset = _open(source, {name: value for name, value in store.items() if value is not None})
    if not len(dataset):
        raise ValueError(f"{dataset!r} has no samples")
    return dataset


def _open(source: str, store: dict[str, str]) -> Any:
    name = _kind_of(source)
    for option in store:
        if name not in OPTIONS_OF[option]:
            raise ValueError(f"--{option} is for {', '.join(OPTIONS_OF[option])}, and {source!r} is read by {name}")
    if name == "packed":
        return open_packed(os.path.abspath(source))
    options: dict[str, Any] = dict(store)
    for several in ("fields", "extensions"):
        if several in options:
            options[several] = tuple(options[several].split(","))
    if "classes" in options:
        options["classes"] = _open(options["classes"], {})
    if options.get("target") == "":
        options["target"] = None
    return getattr(gl, name)(source, **options)


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
        is_flat = any(name.lower().endswith(EXTENSIONS) for name in names)
        has_folders = any(os.path.isdir(os.path.join(source, name)) for name in names)
        return "ImageFolder" if has_folders and not is_flat else "ImageFiles"
    for ending, name in endings.items():
        if source.lower().endswith(ending):
            return name
    if not os.path.exists(source) and not any(character in source for character in "*?{"):
        raise FileNotFoundError(f"{source!r} does not exist; expected a folder of images, shards, or a file of a store")
    raise ValueError(
        f"{source!r} is of no kind that is known: expected a folder of images, or a name that ends in "
        f"{', '.join(endings)}. In Python, gpuload takes any dataset"
    )


# -- recipes ----------------------------------------------------------------------------------------------------------

MEAN: Final = (0.485, 0.456, 0.406)
STD: Final = (0.229, 0.224, 0.225)
SIZE: Final = 224


def usual_recipe() -> list[Any]:
    """Return what most image classifiers are trained with: a random crop to 224×224, a flip, ImageNet's mean."""
    return [RandomResizedCrop(SIZE), RandomHorizontalFlip(), Normalize(MEAN, STD)]


def load_recipe(spec: str) -> list[Any]:
    """Return the transforms that ``FILE.py:name`` names: a list, tuple or `Chain` in a Python file.

    Returns:
        The transforms in order; a module at the end too.

    Raises:
        ValueError: there is no such file or name, the file raises an error, or what is there is no chain.
    """
    path, colon, name = spec.rpartition(":")
    if not colon or not path or not name.isidentifier():
        raise ValueError(f"--recipe expects FILE.py:name, the list of transforms `name` in that file, got {spec!r}")
    if not os.path.isfile(path):
        raise ValueError(f"--recipe {spec}: there is no file {path!r}")
    folder = os.path.dirname(os.path.abspath(path))
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        names = runpy.run_path(path, run_name="gpuload_recipe")
    except (Exception, SystemExit) as error:
        raise ValueError(f"--recipe {spec}: the file cannot be run: {_describe(error, path)}") from error
    if name not in names:
        chains = [other for other, value in names.items() if isinstance(value, list | tuple | Chain)]
        there = f"it has {', '.join(chains)}" if chains else "it has no list and no Chain at all"
        raise ValueError(f"--recipe {spec}: {path} has no {name!r}; {there}")
    value = names[name]
    if isinstance(value, Compose):
        value = list(value.transforms)
    if not isinstance(value, list | tuple | Chain):
        kind = type(value)
        of = "" if kind.__module__ == "builtins" else f" of {kind.__module__.partition('.')[0]}"
        raise ValueError(
            f"--recipe {spec}: {name} must be a list of gpuload's transforms or a Chain, got one {kind.__name__}{of}"
            + ("; gpuload.transforms.from_torchvision makes a list of it" if of == " of torchvision" else "")
        )
    try:
        chain = value if isinstance(value, Chain) else Chain(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"--recipe {spec}: {error}") from error
    return chain.entries


def _describe(error: BaseException, path: str) -> str:
    """Say what was raised, and in which line of the file."""
    if isinstance(error, SyntaxError):
        return one_line(f"SyntaxError in line {error.lineno}: {error.msg}")
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    where = f" in line {lines[-1]}" if lines else ""
    return one_line(f"{type(error).__name__}{where}: {error}")
