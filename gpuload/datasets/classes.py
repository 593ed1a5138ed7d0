"""The class names that a user passes as `classes=`, so that all splits of a dataset have the same labels.

If a dataset numbers the class names that it finds, and a split lacks a class, the labels of that split are shifted:
label 3 then means another class. This module runs in the main process when a dataset is created.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, Final

from gpuload.errors import list_some, one_line

__all__ = ["Classes", "check_known_class", "class_names", "format_names", "warn_of_class_conflicts"]

Classes = Iterable[str] | Any  # names, or a dataset that has `classes`
MAX_SHOWN: Final = 3  # maximum number of names in a message
EXPECTED: Final = (
    "classes must be the names of the classes in the order of their labels, as a list, a class_to_idx, or a dataset "
    "that has classes, such as the train split"
)


def class_names(classes: Classes | None) -> list[str] | None:
    """Return the names in the argument `classes` of a dataset, or None if the argument is None.

    Raises:
        TypeError: `classes` is neither a list of str, a dict of labels by name, nor a dataset with `classes`.
        ValueError: there are no names, a name occurs twice, the labels of a dict are not 0, 1, 2, …, or the dataset has
            no class names.
    """
    if classes is None:
        return None
    argument = getattr(classes, "classes", classes)
    if argument is None:
        raise ValueError(
            f"classes={_shorten(classes)} has no class names (its targets are numbers, or it has no targets); remove "
            "classes=, or pass a list of names"
        )
    if isinstance(argument, Mapping):
        argument = _names_by_label(argument)
    # The order of a set differs between processes.
    if isinstance(argument, str | bytes | Set) or not isinstance(argument, Iterable):
        inner_dataset = getattr(argument, "dataset", None)
        hint = "; pass the dataset inside it" if hasattr(inner_dataset, "classes") else ""
        raise TypeError(f"{EXPECTED}, got {_shorten(argument)}{hint}")
    names = list(argument)
    if not names:
        raise ValueError(f"{EXPECTED}, got no names")
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"{EXPECTED}, got a list that contains {_shorten(name)}")
    if len(set(names)) < len(names):
        duplicate = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"classes contains {duplicate!r} twice; names must be unique")
    return [str(name) for name in names]


def _names_by_label(class_to_idx: Mapping[Any, object]) -> list[Any]:
    """Return the names of torchvision's `class_to_idx` in the order of their labels."""
    names_by_label = {label: name for name, label in class_to_idx.items()}
    if set(names_by_label) != set(range(len(class_to_idx))):
        raise ValueError(
            f"classes={_shorten(class_to_idx)} must have the labels 0 … {len(class_to_idx) - 1}, each once, as a "
            "class_to_idx of torchvision has; for other labels, pass a list of names, and change the labels with .map()"
        )
    return [names_by_label[label] for label in range(len(class_to_idx))]


def check_known_class(name: str, classes: Sequence[str] | Mapping[str, int], where: str) -> None:
    """Refuse a class that is not among `classes`.

    Raises:
        ValueError: the class is unknown. The message starts with `where` and names the class.
    """
    if name not in classes:
        raise ValueError(
            f"{where} has the class {name!r}, which is not among the {len(classes):,} names in classes= "
            f"({format_names(list(classes))}); append it to that list, so that the other labels stay the same, or "
            "remove it"
        )


def warn_of_class_conflicts(datasets: Sequence[Any]) -> None:
    """Warn if joined datasets use the same label for different classes or COCO categories."""
    reference: tuple[Any, dict[Any, Any]] | None = None
    for dataset in datasets:
        names = _class_names_of(dataset)
        if not names:
            continue
        reference = reference or (dataset, names)
        for label, name in names.items():
            expected = reference[1].get(label, name)
            if name != expected:
                warnings.warn(
                    f"{_shorten(reference[0])} and {_shorten(dataset)} are joined, but number their classes "
                    f"differently: label {label} is {expected!r} in the first and {name!r} in the second. Pass the "
                    "same classes=, a list of all names, to both; in COCO files, use the same category ids",
                    stacklevel=4,
                )
                return


def _class_names_of(dataset: object) -> dict[Any, Any]:
    names, categories = (getattr(dataset, name, None) for name in ("classes", "categories"))
    if isinstance(names, list):
        return dict(enumerate(names))
    return categories if isinstance(categories, dict) else {}


def format_names(names: Sequence[str]) -> str:
    """Format the first few names and the number of the remaining names, for a message."""
    return list_some(names, MAX_SHOWN, describe=repr)


def _shorten(value: Any) -> str:
    return one_line(repr(value), 200)
