"""timm's resize and crops, compared with Pillow (other tests compare the random parameters with timm's)."""

from __future__ import annotations

from dataclasses import replace

from parity.case import Case
from parity.cases_geometry import FILL, MIRROR, cubic, moved, resized

from gpuload import transforms as T

__all__ = ["CASES"]

CASES: list[Case] = [
    replace(resized("ResizeKeepRatio", T.ResizeKeepRatio((50, 70))), mean=0.1),  # of black and white noise
    cubic("ResizeKeepRatio(longest, bicubic)", T.ResizeKeepRatio(80, longest=1.0, interpolation="bicubic")),
    cubic(
        "ResizeKeepRatio(random)",
        T.ResizeKeepRatio(
            60, interpolation="random", random_scale_prob=0.7, random_scale_area=True, random_aspect_prob=0.7
        ),
    ),
    moved("CenterCropOrPad", T.CenterCropOrPad((120, 60), fill=FILL)),
    moved("CenterCropOrPad(reflect)", T.CenterCropOrPad((61, 110), padding_mode="reflect"), against=MIRROR),
    moved("RandomCropOrPad", T.RandomCropOrPad((60, 120), fill=FILL)),
    moved("RandomCropOrPad(reflect)", T.RandomCropOrPad((100, 61), padding_mode="reflect"), against=MIRROR),
    moved("TrimBorder", T.TrimBorder(9)),
]
