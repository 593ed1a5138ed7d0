"""A small dataset that workers can import without torch, so that they start quickly."""

from __future__ import annotations

from typing import Any

import numpy as np


class Numbered:
    """A dataset whose sample i is a dict of an image of value i, the label i and a text."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": np.full((4, 5, 3), index, np.uint8), "label": index, "name": f"number {index}"}
