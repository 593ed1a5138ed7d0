"""An import of torchvision that also works with a torch build that its compiled operators were not built for.

torchvision's wheels are built for one torch build (on PyPI, the CUDA build). With any other, its library of operators
does not load, and the import fails where it registers shape functions for `nms` and `qnms`. The transforms are Python
and need neither operator, so this module declares both, without an implementation, before the import.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

__all__ = ["Cropped", "Folder", "torchvision", "v2"]


def _operators_load() -> bool:
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        raise SystemExit("torchvision is not installed: run `make bench`, or pip install --group bench")
    library = next(Path(spec.origin).parent.glob("_C*.so"), None)
    if library is None:
        return False
    try:
        torch.ops.load_library(library)
    except OSError:
        return False
    return True


if not _operators_load():
    OPERATORS = torch.library.Library("torchvision", "DEF")
    OPERATORS.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    OPERATORS.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import torchvision  # noqa: E402
from torchvision.transforms import v2  # noqa: E402


class Folder(torchvision.datasets.ImageFolder):
    """Photographs in class folders, cropped to `size`, as in training scripts."""

    def __init__(self, root: str, size: int) -> None:
        super().__init__(root, transform=v2.Compose([v2.RandomResizedCrop(size), v2.ToImage()]))


class Cropped:
    """A Hugging Face dataset whose images are cropped to `size`."""

    def __init__(self, rows: Any, size: int) -> None:
        self.rows = rows
        self.crop = v2.Compose([v2.RGB(), v2.RandomResizedCrop(size), v2.ToImage()])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        row = self.rows[index]
        return self.crop(row["image"]), row["label"]
