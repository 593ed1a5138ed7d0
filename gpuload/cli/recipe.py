"""``--recipe FILE.py:name``: the user's own transforms, from a Python file.

The file is run once, in this process, as ``python FILE.py`` would run it, but under another name than ``__main__``.
Modules beside it can be imported; they come after all others, so that none of them takes the place of a library.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from typing import Any, Final

from gpuload.errors import one_line
from gpuload.transforms import Chain, Compose, Normalize, RandomHorizontalFlip, RandomResizedCrop

__all__ = ["MEAN", "SIZE", "STD", "RecipeError", "load_recipe", "usual_recipe"]

MEAN: Final = (0.485, 0.456, 0.406)
STD: Final = (0.229, 0.224, 0.225)
SIZE: Final = 224


def usual_recipe() -> list[Any]:
    """What most image classifiers are trained with: a random crop resized to 224×224, a flip, ImageNet's mean."""
    return [RandomResizedCrop(SIZE), RandomHorizontalFlip(), Normalize(MEAN, STD)]


class RecipeError(ValueError):
    """A recipe that cannot be used; the message says which, why, and what was expected."""


def load_recipe(spec: str) -> list[Any]:
    """The transforms that ``FILE.py:name`` names: a list, tuple or `Chain` in a Python file.

    Returns:
        The transforms in order; a module at the end too.

    Raises:
        RecipeError: there is no such file or name, the file raises an error, or what is there is no chain.
    """
    path, colon, name = spec.rpartition(":")
    if not colon or not path or not name.isidentifier():
        raise RecipeError(f"--recipe expects FILE.py:name, the list of transforms `name` in that file, got {spec!r}")
    if not os.path.isfile(path):
        raise RecipeError(f"--recipe {spec}: there is no file {path!r}")
    folder = os.path.dirname(os.path.abspath(path))
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        found = runpy.run_path(path, run_name="gpuload_recipe")
    except (Exception, SystemExit) as error:
        raise RecipeError(f"--recipe {spec}: the file cannot be run: {_said(error, path)}") from error
    if name not in found:
        chains = [other for other, value in found.items() if isinstance(value, list | tuple | Chain)]
        there = f"it has {', '.join(chains)}" if chains else "it has no list and no Chain at all"
        raise RecipeError(f"--recipe {spec}: {path} has no {name!r}; {there}")
    value = found[name]
    if isinstance(value, Compose):
        value = list(value.transforms)
    if not isinstance(value, list | tuple | Chain):
        kind = type(value)
        of = "" if kind.__module__ == "builtins" else f" of {kind.__module__.partition('.')[0]}"
        raise RecipeError(
            f"--recipe {spec}: {name} must be a list of gpuload's transforms or a Chain, got one {kind.__name__}{of}"
            + ("; gpuload.transforms.from_torchvision makes a list of it" if of == " of torchvision" else "")
        )
    if isinstance(value, Chain):
        return [*value.transforms, *([] if value.module is None else [value.module])]
    try:
        Chain(value)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"--recipe {spec}: {error}") from error
    return list(value)


def _said(error: BaseException, path: str) -> str:
    """What was raised, and in which line of the file."""
    if isinstance(error, SyntaxError):
        return one_line(f"SyntaxError in line {error.lineno}: {error.msg}")
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    where = f" in line {lines[-1]}" if lines else ""
    return one_line(f"{type(error).__name__}{where}: {error}")
