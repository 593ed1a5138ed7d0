"""Chains of geometric transforms, and draws of them for images of a few sizes."""

from __future__ import annotations

import numpy as np
from transforms.specs import SPECS

from gpuload import transforms as T
from gpuload.rng.philox import epoch_key

SIZES = np.array([[60, 80], [75, 50], [64, 64], [33, 90], [120, 100], [51, 47]])
MOVING = {name: spec.parity[0] for name, spec in SPECS.items() if spec.parity and spec.parity[0].topic == "geometry"}
GEOMETRIC_CHAINS = {
    **{name: case.transforms for name, case in MOVING.items() if name not in ("RandomRotate90", "RandomTranspose")},
    "flips": [T.RandomHorizontalFlip(), T.RandomVerticalFlip()],
    "several": [T.RandomHorizontalFlip(), T.RandomResizedCrop(64), T.RandomRotation(20), T.Pad(4), T.RandomCrop(50)],
}
KEY = epoch_key(11, 2)


def draw(transforms):
    return T.Chain(transforms).draw(KEY, np.arange(len(SIZES)), SIZES)
