"""`class_names`: the argument `classes` of datasets, and errors about other values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.patterns import exactly

from gpuload.datasets.classes import class_names

CLASSES_ERROR = (
    "classes must be the names of the classes in the order of their labels, as a list, a class_to_idx, or a dataset "
    "that has classes, such as the train split, got "
)


class Split:
    def __init__(self, classes: Any) -> None:
        self.classes = classes

    def __repr__(self) -> str:
        return "Split()"


class Subset:
    dataset = Split(["ant"])

    def __repr__(self) -> str:
        return "Subset()"


@pytest.mark.parametrize(
    "classes",
    [["b", "a"], ("b", "a"), np.array(["b", "a"]), iter(["b", "a"]), Split(["b", "a"]), {"a": 1, "b": np.int64(0)}],
)
def test_class_names_keep_the_order_of_labels(classes: Any) -> None:
    assert class_names(classes) == ["b", "a"]


def test_class_names_copies_the_list_of_a_dataset() -> None:
    split = Split(["b", "a"])
    class_names(split).append("c")  # type: ignore[union-attr]
    assert split.classes == ["b", "a"]


@pytest.mark.parametrize(
    ("classes", "error", "message"),
    [
        ("ant", TypeError, f"{CLASSES_ERROR}'ant'"),
        ({"ant"}, TypeError, f"{CLASSES_ERROR}{{'ant'}}"),
        ({}, ValueError, f"{CLASSES_ERROR}no names"),
        (
            {"ant": 1, "bee": 2},
            ValueError,
            "classes={'ant': 1, 'bee': 2} must have the labels 0 … 1, each once, as a class_to_idx of torchvision has; "
            "for other labels, pass a list of names, and change the labels with .map()",
        ),
        (10, TypeError, f"{CLASSES_ERROR}10"),
        (["ant", 3], TypeError, f"{CLASSES_ERROR}a list that contains 3"),
        (Split([("tench", "Tinca")]), TypeError, f"{CLASSES_ERROR}a list that contains ('tench', 'Tinca')"),
        (Subset(), TypeError, f"{CLASSES_ERROR}Subset(); pass the dataset inside it"),
        ([], ValueError, f"{CLASSES_ERROR}no names"),
        (["ant", "bee", "ant"], ValueError, "classes contains 'ant' twice; names must be unique"),
        (
            Split(None),
            ValueError,
            "classes=Split() has no class names (its targets are numbers, or it has no targets); remove classes=, "
            "or pass a list of names",
        ),
    ],
)
def test_class_names_refuses_invalid_values(classes: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=exactly(message)):
        class_names(classes)
