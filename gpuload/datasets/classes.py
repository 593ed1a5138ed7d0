"""The names of classes that a user gives (`classes=`), so that all splits of a data set number their classes alike.

A dataset that numbers the names it finds gives the label 3 to another class as soon as a split lacks one. Runs in the
main process, when a dataset is made.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, Final

from gpuload.errors import one_line

__all__ = ["Classes", "check_known", "class_names", "shown", "warn_of_other_classes"]

Classes = Iterable[str] | Any  # names, or a dataset that has `classes`
SHOWN: Final = 3  # names that a message lists
TAKEN: Final = (
    "classes must be the names of the classes in the order of their labels, as a list, or a data set that has classes, "
    "such as the train split"
)


def class_names(classes: Classes | None) -> list[str] | None:
    """Return the names that the argument `classes` of a dataset gives, or None.

    Raises:
        TypeError: `classes` is neither a list of str nor a dataset that has one, or has no order (a set).
        ValueError: there are no names, or one comes twice.
    """
    if classes is None:
        return None
    argument = getattr(classes, "classes", classes)
    if argument is None:
        raise ValueError(
            f"classes={_what(classes)} has no names of classes (its targets are numbers, or it has none); leave "
            "classes out, or give a list of names"
        )
    # A set has another order in each process.
    if isinstance(argument, str | bytes | Mapping | Set) or not isinstance(argument, Iterable):
        inner = getattr(argument, "dataset", None)
        hint = "; give the data set inside it" if hasattr(inner, "classes") else ""
        raise TypeError(f"{TAKEN}, got {_what(argument)}{hint}")
    names = list(argument)
    if not names:
        raise ValueError(f"{TAKEN}, got none")
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"{TAKEN}, got {_what(name)} among them")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"classes has {twice!r} twice; a name stands for one label")
    return [str(name) for name in names]


def check_known(name: str, classes: Sequence[str] | Mapping[str, int], where: str) -> None:
    """Refuse a class that is not among `classes`.

    Raises:
        ValueError: it is not; the message begins with `where`, and names the class.
    """
    if name not in classes:
        raise ValueError(
            f"{where} has the class {name!r}, which is not among the {len(classes):,} of classes= "
            f"({shown(list(classes))}); add it to that list, at its end so that the other labels stay, or leave it out"
        )


def warn_of_other_classes(datasets: Sequence[Any]) -> None:
    """Warn where datasets that are joined have another class, or category of COCO, under the same label."""
    first: tuple[Any, dict[Any, Any]] | None = None
    for dataset in datasets:
        names = _names_of(dataset)
        if not names:
            continue
        first = first or (dataset, names)
        for label, name in names.items():
            expected = first[1].get(label, name)
            if name != expected:
                warnings.warn(
                    f"{_what(first[0])} and {_what(dataset)} are joined, but number their classes differently: the "
                    f"label {label} is {expected!r} in the first and {name!r} in the second. Give both the same "
                    "classes=, a list of all names; of COCO's files, make the ids of categories the same",
                    stacklevel=4,
                )
                return


def _names_of(dataset: Any) -> dict[Any, Any]:
    names, categories = (getattr(dataset, name, None) for name in ("classes", "categories"))
    if isinstance(names, list):
        return dict(enumerate(names))
    return categories if isinstance(categories, dict) else {}


def shown(names: Sequence[str]) -> str:
    """Return the first names, and the number of the others, for a message."""
    others = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
    return ", ".join(map(repr, names[:SHOWN])) + others


def _what(value: Any) -> str:
    return one_line(repr(value), 200)
