"""What a column of targets holds: whole numbers, numbers, or names of classes. Read from text, or from typed values.

Python's own `int` and `float` take more for a number than a table means by one: ``007`` is a code, ``nan`` and ``inf``
are words, ``1_000`` has no place in a CSV file.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection
from decimal import Decimal
from typing import Any, Final

import numpy as np

__all__ = ["encode_targets", "stray_cells"]

WHOLE: Final = re.compile(r"\s*[+-]?(0|[1-9][0-9]*)\s*")
NUMBER: Final = re.compile(r"\s*[+-]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?\s*")
PADDED: Final = re.compile(r"0[0-9]+")
WIDEST: Final = 1 << 63
STRAYS: Final = 10  # at most one of so many cells is a stray
DIGITS: Final = 20  # of the longest int64, with its sign
FEWEST: Final = 4  # cells, of which one is a stray


def encode_targets(values: list[Any]) -> tuple[np.ndarray, list[str] | None]:
    """Return targets as int64 or float64; or as the places among the sorted names, and these names."""
    texts = {value for value in values if isinstance(value, str)}
    kinds = set(map(type, values)) - {str}
    if not _not_numbers(texts) and kinds <= {int, bool, float, Decimal}:
        if kinds <= {int, bool} and all(map(WHOLE.fullmatch, texts)):
            if all(-WIDEST <= value < WIDEST for value in values if not isinstance(value, str)):
                return np.fromiter(map(int, values), np.int64, len(values)), None
        else:
            return np.fromiter(map(float, values), np.float64, len(values)), None
    names = sorted(set(map(str, values)))
    places = {name: place for place, name in enumerate(names)}
    return np.fromiter((places[str(value)] for value in values), np.int64, len(values)), names


def stray_cells(values: list[Any]) -> list[int]:
    """Return which of the values are no numbers, if these are few: one of four or more, or one of ten. Codes that are
    padded with zeros to one length (``08``, ``09``, ``10``) are no strays.
    """
    texts = Counter(value for value in values if isinstance(value, str))
    strays = _not_numbers(texts)
    if len(values) < FEWEST or sum(texts[text] for text in strays) > max(1, len(values) // STRAYS):
        return []
    if all(map(PADDED.fullmatch, strays)) and len(set(map(len, texts))) == 1:
        return []
    return [number for number, value in enumerate(values) if value in strays]


def _not_numbers(texts: Collection[str]) -> set[str]:
    """Return the texts that are no numbers; where all are whole numbers, those that int64 does not hold."""
    others = {text for text in texts if NUMBER.fullmatch(text) is None or not math.isfinite(float(text))}
    if others or not all(map(WHOLE.fullmatch, texts)):
        return others
    return {text for text in texts if len(text.strip()) > DIGITS or not -WIDEST <= int(text) < WIDEST}
