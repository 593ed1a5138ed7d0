"""The formats of boxes, and conversions between them.

A box is four numbers in pixels, measured from the top left corner of the image: ``"xyxy"`` left, top, right, bottom;
``"xywh"`` left, top, width, height; ``"cxcywh"`` centre, width, height. Imported by workers; pure functions, no torch.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import numpy as np

__all__ = ["FORMATS", "BoxFormat", "format_name", "from_xyxy", "to_xyxy"]

BoxFormat = Literal["xyxy", "xywh", "cxcywh"]
FORMATS: Final = ("xyxy", "xywh", "cxcywh")


def format_name(name: str, value: Any) -> BoxFormat:
    """A format's name, from a string of any case or torchvision's BoundingBoxFormat; ValueError if there is none."""
    found = value if isinstance(value, str) else getattr(value, "value", value)
    found = found.lower() if isinstance(found, str) else found
    if found in ("xywhr", "cxcywhr", "xyxyxyxy"):
        raise ValueError(
            f"{name} is {value!r}, but rotated boxes are not supported; give one of {', '.join(map(repr, FORMATS))}"
        )
    if found not in FORMATS:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, FORMATS))}, got {value!r}")
    return found  # pyright: ignore[reportReturnType]


def to_xyxy(boxes: np.ndarray, box_format: str) -> np.ndarray:
    """Boxes (n, 4) as left, top, right, bottom: int64 if boxes and edges are integers (half a width may not be), else
    float64. Edges of float32 boxes are rounded to float32, as torchvision's are: with more digits, a box that ends at
    the image's border would reach beyond it."""
    whole = np.issubdtype(boxes.dtype, np.integer) and box_format != "cxcywh"
    boxes = boxes.astype(np.int64 if whole else boxes.dtype if boxes.dtype == np.float32 else np.float64)
    if box_format == "cxcywh":
        boxes[:, :2] -= boxes[:, 2:] / 2
    if box_format != "xyxy":
        boxes[:, 2:] += boxes[:, :2]
    return boxes if whole else boxes.astype(np.float64)


def from_xyxy(boxes: np.ndarray, box_format: str, dtype: np.dtype[Any]) -> np.ndarray:
    """Boxes of left, top, right, bottom as `box_format`, in `dtype`."""
    boxes = boxes.copy()
    if box_format != "xyxy":
        boxes[:, 2:] -= boxes[:, :2]
    if box_format == "cxcywh":
        whole = np.issubdtype(boxes.dtype, np.integer)
        boxes[:, :2] += boxes[:, 2:] // 2 if whole else boxes[:, 2:] / 2
    return boxes.astype(dtype)
