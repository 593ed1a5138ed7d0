"""A `Spec` of each transform: expected results and draws, random arguments, and notes for the documentation.

The suites of parity, distributions, random chains, recorded bits and conversions from torchvision loop over `SPECS`;
docs/transforms.md contains the notes, and docs/gallery.py makes the pictures. Building the documentation imports this
module, so oracles import Kornia and torchvision when they are called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from distributions import definitions as D
from distributions import published
from hypothesis import strategies as st
from parity import color
from parity import lighting as lit
from parity.auto import policy
from parity.case import Case
from parity.color import MEAN, STD, color_and_gray, recolored
from parity.erasing import FLOAT, NORMALIZE, denormalize, erasing
from parity.geometry import (
    FILL,
    NUMPY_PAD,
    ONE_CALL,
    TWO_PASSES,
    WARPING,
    aliased,
    bicubic,
    by_pillow_call,
    by_torchvision,
    moved,
    resized,
    rotated,
    timm_section,
    warped,
)
from parity.lighting import lighting
from parity.mixing import mixing

from gpuload import transforms as T
from gpuload.transforms.program.ops import OPS

__all__ = ["SPECS", "Spec", "any_filter", "chances", "pairs"]


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The properties of one transform that tests check.

    Attributes:
        picture: the call whose effect the gallery shows, or the reason that it shows none.
        parity: cases with the expected results. The cases of one topic are a table of docs/parity.md.
        draws: the distributions of the random parameters, or the file that tests them; empty if it draws nothing.
        chains: a strategy for its arguments in random chains; None if it does not work on levels.
        torchvision: each argument of torchvision's transform of the same name, with a value that is not the default;
            None if torchvision has no such transform.
        more: the arguments that torchvision's transform of the same name does not have.
        note: the differences from torchvision's transform, for docs/transforms.md; "" means none.
    """

    picture: str
    parity: Sequence[Case]
    chains: st.SearchStrategy[Any] | None
    draws: Sequence[D.Definition] | str = ()
    torchvision: dict[str, Any] | None = None
    more: Sequence[str] = ()
    note: str = ""

    @property
    def code(self) -> str | None:
        """The call whose effect the picture shows."""
        return self.picture if self.picture.startswith("T.") else None


# The spec of a transform that does not change levels itself: it contains transforms, moves boxes, or combines samples.
indirect = partial(Spec, parity=(), chains=None)


def second_entry(sample: Any) -> Any:
    return sample[1]


ANTIALIAS_NOTE = (
    "supports bilinear, bicubic, lanczos and nearest; with `antialias=False`, behaves like torch's `interpolate`"
)
FILL_NOTE = "`fill` is a pixel value before `ToDtype`, or a dict that maps types to fills: `{gl.Image: …, gl.Mask: …}`"
INTEGER_NOTE = "computes on integers even after `ToDtype`"
CLASSIFICATION_NOTE = "refuses samples with masks, boxes or keypoints, as in torchvision"
TIMM_NOTE = "not in torchvision; from timm"
MIXING_NOTE = (
    "mixes the sample with its neighbour in the epoch's order (or, with `Loader(repeats=…)`, with the sample half a "
    "batch away)"
)
FINISHED_NOTE = "comes after `ToDtype` or `Normalize`; `label_smoothing` is from timm"
ALBUMENTATIONS_ONLY_NOTE = "not in torchvision; from albumentations"
ALBUMENTATIONS_NOTE = "not in torchvision; from albumentations; swaps height and width"

shares = st.floats(0, 1)
chances = st.sampled_from([0.0, 0.3, 0.5, 0.8, 1.0])
sides = st.integers(1, 64)
pairs = st.tuples(sides, sides)
filters = st.sampled_from(["nearest", "bilinear", "bicubic"])
any_filter = st.sampled_from(["nearest", "bilinear", "bicubic", "random"])
fills = st.one_of(st.just(0), st.integers(0, 255))
padding_modes = st.sampled_from(["constant", "edge", "reflect", "symmetric"])
borders = st.integers(0, 20)
odd_sizes = st.integers(0, 5).map(lambda number: 2 * number + 1)
magnitude_bins = st.integers(2, 31)


def ranges(low: float, high: float) -> Any:
    """Make a strategy for (low, high) within bounds, rounded to two digits."""
    number = st.integers(round(low * 100), round(high * 100)).map(lambda hundredths: hundredths / 100)
    return st.tuples(number, number).map(sorted).map(tuple)


factors = st.one_of(st.none(), ranges(0, 2))

SPECS: dict[str, Spec] = {
    "Resize": Spec(
        picture="T.Resize((96, 96))",
        note=ANTIALIAS_NOTE,
        torchvision={"size": 20, "interpolation": "bicubic", "max_size": 50, "antialias": False},
        parity=[
            moved("Resize(nearest)", T.Resize((61, 47), "nearest"), against=ONE_CALL),
            resized("Resize", T.Resize(56)),
            bicubic("Resize(bicubic)", T.Resize((90, 130), "bicubic")),
            resized("Resize(max_size)", T.Resize(100, max_size=120), channels=1),
            bicubic("Resize(random)", T.Resize(70, "random")),
            moved("Resize(lanczos)", T.Resize((91, 130), "lanczos"), against=TWO_PASSES),
            aliased("Resize(antialias=False)", T.Resize((90, 130), antialias=False)),
            aliased("Resize(bicubic, antialias=False)", T.Resize(70, "bicubic", antialias=False)),
            resized(
                "Resize, RandomRotation, RandomCrop",
                T.Resize(80),
                T.RandomRotation(30, "nearest", expand=True, fill=FILL),
                T.RandomCrop(48),
                against=f"{TWO_PASSES}, Image.transform, Image.crop",
            ),
            resized(
                "Resize, RandomRotate90, RandomCrop, RandomTranspose",
                T.Resize(56),
                T.RandomRotate90(0.9),
                T.RandomCrop((40, 48)),
                T.RandomTranspose(),
            ),
        ],
        chains=st.one_of(
            st.builds(T.Resize, pairs, any_filter),
            st.builds(T.Resize, sides, any_filter),
            st.builds(T.Resize, st.integers(1, 40), any_filter, st.integers(41, 64)),
        ),
    ),
    "CenterCrop": Spec(
        picture="T.CenterCrop(112)",
        torchvision={"size": (20, 30)},
        parity=[
            moved("CenterCrop", T.CenterCrop((60, 80))),
            moved("CenterCrop(even, odd)", T.CenterCrop((51, 30)), channels=1),
        ],
        chains=st.builds(T.CenterCrop, pairs),
    ),
    "RandomCrop": Spec(
        picture="T.RandomCrop(112)",
        note=FILL_NOTE,
        torchvision={
            "size": (20, 30),
            "padding": (1, 2, 3, 4),
            "pad_if_needed": True,
            "fill": (5, 6, 7),
            "padding_mode": "edge",
        },
        parity=[
            moved("RandomCrop(padding)", T.RandomCrop(48, padding=(3, 30, 20, 1), pad_if_needed=True, fill=FILL)),
            *(
                moved(
                    f"RandomCrop(padding_mode={mode})",
                    T.RandomCrop((90, 48), padding=30, pad_if_needed=True, padding_mode=mode),
                    against=NUMPY_PAD,
                )
                for mode in ("edge", "reflect", "symmetric")
            ),
        ],
        draws=[
            D.Definition(
                T.RandomCrop((70, 30), padding=(1, 2, 3, 4), pad_if_needed=True),
                D.corner_columns,
                D.simulation(D.BOX[:2], published.crop, D.SIZE_HW, (70, 30), (1, 2, 3, 4)),
            )
        ],
        chains=st.builds(
            T.RandomCrop,
            pairs,
            st.one_of(st.none(), borders, st.tuples(borders, borders, borders, borders)),
            st.just(True),
            fills,
            padding_modes,
        ),
    ),
    "RandomResizedCrop": Spec(
        picture="T.RandomResizedCrop(128)",
        note=f'{ANTIALIAS_NOTE}; `interpolation="random"` is from timm',
        torchvision={
            "size": (20, 30),
            "scale": (0.2, 0.7),
            "ratio": (0.5, 1.5),
            "interpolation": "bicubic",
            "antialias": False,
        },
        parity=[
            moved("RandomResizedCrop(lanczos)", T.RandomResizedCrop(64, interpolation="lanczos"), against=TWO_PASSES),
            aliased(
                "RandomResizedCrop(antialias=False)", T.RandomResizedCrop(64, interpolation="random", antialias=False)
            ),
            moved("RandomResizedCrop(nearest)", T.RandomResizedCrop(48, interpolation="nearest"), against=ONE_CALL),
            resized("RandomResizedCrop", T.RandomResizedCrop(64)),
            bicubic("RandomResizedCrop(bicubic)", T.RandomResizedCrop((50, 70), interpolation="bicubic")),
            bicubic("RandomResizedCrop(random)", T.RandomResizedCrop(64, interpolation="random")),
            by_pillow_call("RandomResizedCrop of Pillow images", T.RandomResizedCrop((64, 90)), 0.3, 1),
            by_pillow_call(
                "RandomResizedCrop(bicubic) of Pillow images",
                T.RandomResizedCrop((50, 70), interpolation="bicubic"),
                0.5,
                25,
            ),
            by_torchvision("RandomResizedCrop of tensors", T.RandomResizedCrop((64, 90)), 1),
            by_torchvision(
                "RandomResizedCrop(bicubic) of tensors", T.RandomResizedCrop((50, 70), interpolation="bicubic"), 2
            ),
        ],
        draws=[
            D.resized_crop_definition((0.08, 1.0), (3 / 4, 4 / 3)),
            D.resized_crop_definition((0.8, 1.0), (1.5, 4.0)),  # such a box rarely fits into the image
        ],
        chains=st.builds(T.RandomResizedCrop, pairs, ranges(0.05, 1), ranges(0.3, 3), any_filter),
    ),
    "Pad": Spec(
        picture="T.Pad(20)",
        note=FILL_NOTE,
        torchvision={"padding": [1, 2, 3, 4], "fill": (1, 2, 3), "padding_mode": "reflect"},
        parity=[
            moved("Pad(fill)", T.Pad((5, 0, 17, 40), fill=FILL)),
            moved("Pad(negative)", T.Pad((-5, 3, 4, -12), fill=77), channels=1),
            *(
                moved(f"Pad(padding_mode={mode})", T.Pad((70, 20, 3, 111), padding_mode=mode), against=NUMPY_PAD)
                for mode in ("edge", "reflect", "symmetric")
            ),
        ],
        chains=st.builds(
            T.Pad, st.one_of(borders, st.tuples(*[st.integers(-8, 20)] * 4)), fill=fills, padding_mode=padding_modes
        ),
    ),
    "RandomHorizontalFlip": Spec(
        picture="T.RandomHorizontalFlip(p=0.5)",
        torchvision={"p": 0.3},
        parity=[moved("RandomHorizontalFlip", T.RandomHorizontalFlip(), against="Pillow ImageOps.mirror")],
        draws=[D.Definition(T.RandomHorizontalFlip(0.3), D.flip_column, D.coin_simulation("done", 0.3))],
        chains=st.builds(T.RandomHorizontalFlip, chances),
    ),
    "RandomVerticalFlip": Spec(
        picture="T.RandomVerticalFlip(p=0.5)",
        torchvision={"p": 0.3},
        parity=[moved("RandomVerticalFlip", T.RandomVerticalFlip(), against="Pillow ImageOps.flip")],
        draws=[D.Definition(T.RandomVerticalFlip(0.8), D.flip_column, D.coin_simulation("done", 0.8))],
        chains=st.builds(T.RandomVerticalFlip, chances),
    ),
    "RandomRotate90": Spec(
        picture="T.RandomRotate90(p=1.0)",
        note=ALBUMENTATIONS_NOTE,
        parity=[moved("RandomRotate90", T.RandomRotate90(0.9), against="Pillow Image.transpose")],
        draws=[D.Definition(T.RandomRotate90(0.7), D.quarter_turn_columns, D.simulate_quarter_turns)],
        chains=st.builds(T.RandomRotate90, chances),
    ),
    "RandomTranspose": Spec(
        picture="T.RandomTranspose(p=1.0)",
        note=ALBUMENTATIONS_NOTE,
        parity=[moved("RandomTranspose", T.RandomTranspose(), against="Pillow Image.transpose", channels=1)],
        draws=[
            D.Definition(
                T.RandomTranspose(0.3),
                lambda draws: {"done": draws.records[0].transposed.astype(float)},
                D.coin_simulation("done", 0.3),
            )
        ],
        chains=st.builds(T.RandomTranspose, chances),
    ),
    "RandomZoomOut": Spec(
        picture="T.RandomZoomOut(fill=114, side_range=(1.0, 2.0), p=1.0)",
        note=FILL_NOTE,
        torchvision={"fill": (1, 2, 3), "side_range": (1.5, 2.0), "p": 0.3},
        parity=[moved("RandomZoomOut", T.RandomZoomOut(FILL, side_range=(1.0, 2.5), p=0.8))],
        draws=[
            D.Definition(
                T.RandomZoomOut(0, (1.0, 3.0), 0.7),
                D.zoom_out_columns,
                D.simulation(D.BOX, published.zoom_out, D.SIZE_HW, (1.0, 3.0), 0.7),
            )
        ],
        chains=st.builds(T.RandomZoomOut, fills, ranges(1, 2), chances),
    ),
    "RandomIoUCrop": Spec(
        picture="T.RandomIoUCrop(sampler_options=[0.3])",
        note=(
            "drops boxes whose centres are outside the crop, with their labels and masks; in torchvision, "
            "`SanitizeBoundingBoxes` drops them"
        ),
        torchvision={
            "min_scale": 0.4,
            "max_scale": 0.9,
            "min_aspect_ratio": 0.6,
            "max_aspect_ratio": 1.5,
            "sampler_options": [0.0, 0.5],
            "trials": 12,
        },
        parity=[],
        draws="targets/test_boxes.py",
        chains=st.builds(T.RandomIoUCrop, st.just(0.3), st.just(1.0), trials=st.integers(1, 20)),
    ),
    "ScaleJitter": Spec(
        picture="T.ScaleJitter((160, 160), scale_range=(0.3, 1.2))",
        note=ANTIALIAS_NOTE,
        torchvision={
            "target_size": (20, 30),
            "scale_range": (0.5, 1.5),
            "interpolation": "bicubic",
            "antialias": False,
        },
        parity=[
            resized("ScaleJitter", T.ScaleJitter((60, 90)), apart=2),
            bicubic("ScaleJitter(bicubic)", T.ScaleJitter((60, 90), (0.5, 1.5), "bicubic")),
        ],
        draws=[D.Definition(T.ScaleJitter((90, 50), (0.2, 1.5)), D.size_columns, D.simulate_scale_jitter)],
        chains=st.builds(T.ScaleJitter, pairs, ranges(0.1, 2), any_filter),
    ),
    "RandomShortestSize": Spec(
        picture="T.RandomShortestSize([64, 96, 128, 160])",
        note=ANTIALIAS_NOTE,
        torchvision={"min_size": [20, 30], "max_size": 50, "interpolation": "bicubic", "antialias": False},
        parity=[resized("RandomShortestSize", T.RandomShortestSize([40, 50, 60, 70], max_size=90), apart=2)],
        draws=[D.Definition(T.RandomShortestSize([20, 31, 40, 55], 70), D.size_columns, D.simulate_shortest_size)],
        chains=st.builds(
            T.RandomShortestSize, st.lists(sides, min_size=1, max_size=4), st.one_of(st.none(), sides), any_filter
        ),
    ),
    "RandomResize": Spec(
        picture="T.RandomResize(64, 160)",
        note=ANTIALIAS_NOTE,
        torchvision={"min_size": 20, "max_size": 30, "interpolation": "bicubic", "antialias": False},
        parity=[
            resized("RandomResize", T.RandomResize(40, 100)),
            bicubic("RandomResize(random)", T.RandomResize(40, 100, "random")),
        ],
        draws=[D.Definition(T.RandomResize(20, 45), D.size_columns, D.simulate_resize_range)],
        chains=st.builds(T.RandomResize, st.integers(1, 40), st.integers(41, 64), any_filter),
    ),
    "ResizeKeepRatio": Spec(
        picture="T.ResizeKeepRatio((128, 128))",
        note=TIMM_NOTE,
        parity=timm_section(
            replace(resized("ResizeKeepRatio", T.ResizeKeepRatio((50, 70))), mean=0.1),  # some images are noise
            bicubic("ResizeKeepRatio(longest, bicubic)", T.ResizeKeepRatio(80, longest=1.0, interpolation="bicubic")),
            bicubic(
                "ResizeKeepRatio(random)",
                T.ResizeKeepRatio(
                    60, interpolation="random", random_scale_prob=0.7, random_scale_area=True, random_aspect_prob=0.7
                ),
            ),
        ),
        draws=[
            D.Definition(
                T.ResizeKeepRatio((90, 120), 0.3, "bilinear", 0.6, (0.5, 1.2), True, 0.7, (0.5, 1.5)),
                D.size_columns,
                D.simulation(
                    D.BOX[2:], published.keep_ratio, D.SIZE_HW, (90, 120), 0.3, (0.6, 0.5, 1.2), (0.7, 0.5, 1.5)
                ),
            )
        ],
        chains=st.builds(
            T.ResizeKeepRatio,
            pairs,
            shares,
            any_filter,
            chances,
            ranges(0.5, 1.5),
            st.booleans(),
            chances,
            ranges(0.5, 2),
        ),
    ),
    "CenterCropOrPad": Spec(
        picture="T.CenterCropOrPad((200, 112))",
        note=TIMM_NOTE,
        parity=timm_section(
            moved("CenterCropOrPad", T.CenterCropOrPad((120, 60), fill=FILL)),
            moved("CenterCropOrPad(reflect)", T.CenterCropOrPad((61, 110), padding_mode="reflect"), against=NUMPY_PAD),
        ),
        chains=st.builds(T.CenterCropOrPad, pairs, fills, padding_modes),
    ),
    "RandomCropOrPad": Spec(
        picture="T.RandomCropOrPad((200, 112))",
        note=TIMM_NOTE,
        parity=timm_section(
            moved("RandomCropOrPad", T.RandomCropOrPad((60, 120), fill=FILL)),
            moved("RandomCropOrPad(reflect)", T.RandomCropOrPad((100, 61), padding_mode="reflect"), against=NUMPY_PAD),
        ),
        draws=[
            D.Definition(
                T.RandomCropOrPad((70, 30)),
                D.corner_columns,
                # As in timm, an image that is smaller than the crop can be anywhere in the crop.
                lambda rng: D.columns(
                    D.BOX[:2], np.column_stack([-rng.integers(0, 10, D.SAMPLES), rng.integers(0, 54, D.SAMPLES)])
                ),
            )
        ],
        chains=st.builds(T.RandomCropOrPad, pairs, fills, padding_modes),
    ),
    "TrimBorder": Spec(
        picture="T.TrimBorder(24)",
        note=TIMM_NOTE,
        parity=timm_section(moved("TrimBorder", T.TrimBorder(9))),
        chains=st.builds(T.TrimBorder, st.integers(0, 6)),
    ),
    "RandomRotation": Spec(
        picture='T.RandomRotation(30, interpolation="bilinear")',
        note=FILL_NOTE,
        torchvision={
            "degrees": (-10, 20),
            "interpolation": "bilinear",
            "expand": True,
            "center": (3, 4),
            "fill": (1, 2, 3),
        },
        parity=[
            *(rotated(f"RandomRotation({name})", T.RandomRotation(180, name, fill=FILL)) for name in WARPING),
            rotated("RandomRotation(expand)", T.RandomRotation((10, 80), "bilinear", expand=True, fill=44), channels=1),
            rotated("RandomRotation(center)", T.RandomRotation(45, "bicubic", center=(3.5, 20), fill=FILL)),
            rotated("RandomRotation(right angle)", T.RandomRotation((270, 270), "nearest", expand=True)),
        ],
        draws=[
            D.Definition(
                # torchvision rotates counterclockwise here, and clockwise in RandomAffine.
                T.RandomRotation((-20, 50)),
                D.affine_columns,
                lambda rng: D.simulate_affine(rng, (-50, 20), (0, 0), (1, 1), (0, 0, 0, 0)),
            )
        ],
        chains=st.builds(
            T.RandomRotation, ranges(-180, 180), filters, st.booleans(), st.one_of(st.none(), pairs), fills
        ),
    ),
    "RandomAffine": Spec(
        picture='T.RandomAffine(25, translate=(0.1, 0.1), scale=(0.7, 1.2), interpolation="bilinear")',
        note=FILL_NOTE,
        torchvision={
            "degrees": (-10, 20),
            "translate": (0.1, 0.2),
            "scale": (0.8, 1.5),
            "shear": (1, 2, 3, 4),
            "interpolation": "bilinear",
            "fill": (3, 4, 5),
            "center": (7, 8),
        },
        parity=[
            *(
                warped(
                    f"RandomAffine({name})",
                    T.RandomAffine(30, (0.2, 0.3), (0.5, 1.7), (-20, 20, -10, 10), interpolation=name, fill=FILL),
                )
                for name in WARPING
            ),
            warped("RandomAffine(scale only)", T.RandomAffine(0, (0.2, 0.1), (0.3, 2.0), fill=FILL)),
        ],
        draws=[
            D.Definition(
                T.RandomAffine(*D.AFFINE_ARGUMENTS),
                D.affine_columns,
                lambda rng: D.simulate_affine(rng, *D.AFFINE_ARGUMENTS),
            )
        ],
        chains=st.builds(
            T.RandomAffine,
            ranges(-180, 180),
            st.one_of(st.none(), st.tuples(shares, shares)),
            st.one_of(st.none(), ranges(0.3, 2)),
            st.one_of(st.none(), ranges(-40, 40)),
            filters,
            fills,
        ),
    ),
    "RandomPerspective": Spec(
        picture='T.RandomPerspective(0.5, p=1.0, interpolation="bilinear")',
        note=FILL_NOTE,
        torchvision={"distortion_scale": 0.3, "p": 0.4, "interpolation": "nearest", "fill": (1, 2, 3)},
        parity=[
            *(
                warped(f"RandomPerspective({name})", T.RandomPerspective(0.7, 0.9, interpolation=name, fill=FILL))
                for name in WARPING
            ),
            warped("RandomPerspective(grey)", T.RandomPerspective(p=1.0, fill=77), channels=1),
            warped(
                "RandomPerspective, Pad, RandomHorizontalFlip",
                T.RandomPerspective(),
                T.Pad(9),
                T.RandomHorizontalFlip(),
            ),
        ],
        draws=[
            D.Definition(
                T.RandomPerspective(0.6, 0.7),
                D.perspective_columns,
                D.simulation(D.CORNERS, published.perspective, D.SIZE_HW, 0.6, 0.7),
            )
        ],
        chains=st.builds(T.RandomPerspective, shares, chances, filters, fills),
    ),
    "ColorJitter": Spec(
        picture="T.ColorJitter(0.4, 0.4, 0.4, 0.1)",
        note=f"the order of operations is also random for each sample; {INTEGER_NOTE}",
        torchvision={"brightness": 0.1, "contrast": (0.5, 2.0), "saturation": 0.3, "hue": (-0.1, 0.2)},
        parity=color_and_gray(
            recolored("ColorJitter(brightness)", T.ColorJitter(0.8), "Pillow ImageEnhance.Brightness", **color.FLOAT),
            recolored(
                "ColorJitter(contrast)", T.ColorJitter(contrast=0.8), "Pillow ImageEnhance.Contrast", **color.GRAY
            ),
            recolored("ColorJitter(saturation)", T.ColorJitter(saturation=0.8), "Pillow ImageEnhance.Color"),
            recolored("ColorJitter(saturation=1.7)", T.ColorJitter(saturation=(1.7, 1.7)), "Pillow ImageEnhance.Color"),
            recolored("ColorJitter(hue)", T.ColorJitter(hue=0.5), "Pillow convert('HSV')", **color.HUE),
            recolored(
                "ColorJitter", T.ColorJitter(0.4, 0.4, 0.4, 0.1), "the four Pillow operations above", **color.CONTRAST
            ),
        ),
        draws=[D.jitter_definition],
        chains=st.builds(T.ColorJitter, factors, factors, factors, st.one_of(st.none(), ranges(-0.5, 0.5))),
    ),
    "RandomPhotometricDistort": Spec(
        picture="T.RandomPhotometricDistort(p=1.0)",
        torchvision={
            "brightness": (0.5, 1.5),
            "contrast": (0.6, 1.4),
            "saturation": (0.7, 1.3),
            "hue": (-0.1, 0.1),
            "p": 0.3,
        },
        parity=color_and_gray(
            recolored(
                "RandomPhotometricDistort",
                T.RandomPhotometricDistort(),
                "the four Pillow operations above, and merge",
                **color.CONTRAST,
            )
        ),
        draws=[D.distortion_definition],
        chains=st.builds(
            T.RandomPhotometricDistort, ranges(0, 2), ranges(0, 2), ranges(0, 2), ranges(-0.5, 0.5), p=chances
        ),
    ),
    "Grayscale": Spec(
        picture="T.Grayscale(num_output_channels=3)",
        torchvision={"num_output_channels": 3},
        parity=[
            recolored(
                f"Grayscale({count}), {channels} channel{'s' if channels > 1 else ''}",
                T.Grayscale(count),
                "Pillow convert('L')",
                oracle=partial(color.grayscale_oracle, count=count),
                channels=channels,
            )
            for count in (1, 3)
            for channels in (3, 1)
        ],
        chains=st.builds(T.Grayscale, st.sampled_from([1, 3])),
    ),
    "RandomGrayscale": Spec(
        picture="T.RandomGrayscale(p=0.5)",
        torchvision={"p": 0.3},
        parity=color_and_gray(recolored("RandomGrayscale", T.RandomGrayscale(0.5), "Pillow convert('L')")),
        draws=[D.operation_definition(T.RandomGrayscale(0.3), 0.3, "grayscale")],
        chains=st.builds(T.RandomGrayscale, chances),
    ),
    "RandomInvert": Spec(
        picture="T.RandomInvert(p=1.0)",
        torchvision={"p": 0.3},
        parity=color_and_gray(recolored("RandomInvert", T.RandomInvert(), "Pillow ImageOps.invert")),
        draws=[D.operation_definition(T.RandomInvert(0.3), 0.3, "invert")],
        chains=st.builds(T.RandomInvert, chances),
    ),
    "RandomSolarize": Spec(
        picture="T.RandomSolarize(128, p=1.0)",
        note="`threshold` is on the scale 0 … 255, or 0 … 1 after `ToDtype(scale=True)`, as in torchvision",
        torchvision={"threshold": 100, "p": 0.3},
        parity=color_and_gray(
            recolored("RandomSolarize", T.RandomSolarize(128, 1), "Pillow ImageOps.solarize"),
            recolored("RandomSolarize(100.5)", T.RandomSolarize(100.5, 1), "Pillow ImageOps.solarize"),
            recolored("RandomSolarize(0)", T.RandomSolarize(0, 1), "Pillow ImageOps.solarize"),
        ),
        draws=[D.operation_definition(T.RandomSolarize(99, 0.3), 0.3, "solarize", 99)],
        chains=st.builds(T.RandomSolarize, st.integers(1, 255), chances),
    ),
    "RandomPosterize": Spec(
        picture="T.RandomPosterize(2, p=1.0)",
        torchvision={"bits": 3, "p": 0.3},
        parity=color_and_gray(
            recolored("RandomPosterize(3)", T.RandomPosterize(3, 1), "Pillow ImageOps.posterize"),
            recolored("RandomPosterize(0)", T.RandomPosterize(0, 1), "Pillow point"),
            recolored("RandomPosterize(8)", T.RandomPosterize(8, 1), "Pillow ImageOps.posterize"),
        ),
        draws=[D.operation_definition(T.RandomPosterize(3, 0.3), 0.3, "posterize", 3)],
        chains=st.builds(T.RandomPosterize, st.integers(0, 8), chances),
    ),
    "RandomEqualize": Spec(
        picture="T.RandomEqualize(p=1.0)",
        torchvision={"p": 0.3},
        parity=color_and_gray(recolored("RandomEqualize", T.RandomEqualize(1), "Pillow ImageOps.equalize")),
        draws=[D.operation_definition(T.RandomEqualize(0.3), 0.3, "equalize")],
        chains=st.builds(T.RandomEqualize, chances),
    ),
    "RandomAutocontrast": Spec(
        picture="T.RandomAutocontrast(p=1.0)",
        torchvision={"p": 0.3},
        parity=color_and_gray(recolored("RandomAutocontrast", T.RandomAutocontrast(1), "Pillow ImageOps.autocontrast")),
        draws=[D.operation_definition(T.RandomAutocontrast(0.3), 0.3, "autocontrast")],
        chains=st.builds(T.RandomAutocontrast, chances),
    ),
    "RandomChannelPermutation": Spec(
        picture="T.RandomChannelPermutation()",
        torchvision={},
        parity=color_and_gray(
            recolored("RandomChannelPermutation", T.RandomChannelPermutation(), "Pillow split and merge")
        ),
        draws=[
            D.Definition(
                T.RandomChannelPermutation(),
                D.permutation_columns,
                lambda rng: D.columns(D.CHANNEL_COLUMNS, rng.permuted(np.tile([0, 1, 2], (D.SAMPLES, 1)), axis=1)),
            )
        ],
        chains=st.just(T.RandomChannelPermutation()),
    ),
    "RandomAdjustSharpness": Spec(
        picture="T.RandomAdjustSharpness(6.0, p=1.0)",
        torchvision={"sharpness_factor": 2.0, "p": 0.3},
        parity=color_and_gray(
            recolored("RandomAdjustSharpness(2)", T.RandomAdjustSharpness(2, 1), "Pillow ImageEnhance.Sharpness"),
            recolored("RandomAdjustSharpness(0.3)", T.RandomAdjustSharpness(0.3, 0.7), "Pillow ImageEnhance.Sharpness"),
        ),
        draws=[D.operation_definition(T.RandomAdjustSharpness(1.7, 0.3), 0.3, "sharpness", 1.7)],
        chains=st.builds(T.RandomAdjustSharpness, st.integers(0, 30).map(lambda n: n / 10), chances),
    ),
    "GaussianBlur": Spec(
        picture="T.GaussianBlur(15, sigma=(0.5, 4.0))",
        note="σ is random for each sample; kernel weights are rounded to multiples of 2⁻¹⁶",
        torchvision={"kernel_size": (3, 5), "sigma": (0.5, 0.7)},
        parity=color_and_gray(
            *(
                recolored(name, transform, "Kornia gaussian_blur2d", **color.BLUR, fused=color.FUSED_BLUR)
                for name, transform in (
                    ("GaussianBlur(23)", T.GaussianBlur(23)),
                    ("GaussianBlur((5, 9))", T.GaussianBlur((5, 9), (0.5, 5))),
                )
            )
        ),
        draws=[
            D.Definition(
                T.GaussianBlur(5, (0.3, 1.7)),
                lambda draws: D.columns(("x", "y"), draws.records[0].values[:, 0, 2:4]),
                lambda rng: D.columns(("x", "y"), np.repeat(rng.uniform(0.3, 1.7, (D.SAMPLES, 1)), 2, axis=1)),
            )
        ],
        chains=st.builds(T.GaussianBlur, st.tuples(odd_sizes, odd_sizes), ranges(0.1, 4)),
    ),
    "MotionBlur": Spec(
        picture="T.MotionBlur((15, 21), direction_range=(0.0, 0.0), p=1.0)",
        note=ALBUMENTATIONS_ONLY_NOTE,
        parity=color_and_gray(
            lighting("MotionBlur", T.MotionBlur((3, 15), p=0.9), "convolve", 0.1, 1, lit.MEAN_ON_A_LINE)
        ),
        draws=[
            D.Definition(
                T.MotionBlur((4, 9), True, (10.0, 80.0), (-0.5, 1.0), 1.0),
                lambda draws: D.columns(D.BLUR_COLUMNS, draws.records[0].values[:, 0, [0, 2, 3, 4, 5]]),
                D.simulate_motion_blur,
            )
        ],
        chains=st.builds(T.MotionBlur, st.integers(3, 15), st.booleans(), p=chances),
    ),
    "RandomGamma": Spec(
        picture="T.RandomGamma((250, 250), p=1.0)",
        note=ALBUMENTATIONS_ONLY_NOTE,
        parity=color_and_gray(
            lighting("RandomGamma", T.RandomGamma((40, 250), 1), "gamma_transform", 0.1, 1, lit.GAMMA, lit.FUSED_POWER)
        ),
        draws=[D.uniform_operation_definition(T.RandomGamma((40, 250), 0.3), 0.3, "gamma", 0.4, 2.5)],
        chains=st.builds(T.RandomGamma, ranges(20, 300), chances),
    ),
    "PlanckianJitter": Spec(
        picture="T.PlanckianJitter(p=1.0)",
        note=ALBUMENTATIONS_ONLY_NOTE,
        parity=color_and_gray(
            lighting("PlanckianJitter", T.PlanckianJitter(p=1), "multiply_by_constant"),
            lighting(
                "PlanckianJitter(cied, gaussian)",
                T.PlanckianJitter("cied", sampling_method="gaussian", p=1),
                "multiply_by_constant",
            ),
        ),
        draws=[
            D.Definition(
                T.PlanckianJitter(mode, limits, method, 1.0),
                lambda draws: {"red": draws.records[0].values[:, 0, 0]},
                partial(D.simulate_red_factor, mode, limits, method),
            )
            for mode, limits, method in (
                ("blackbody", (3000, 15_000), "uniform"),
                ("cied", (4500, 9000), "uniform"),
                ("blackbody", (4000, 12_000), "gaussian"),
            )
        ],
        chains=st.builds(T.PlanckianJitter, st.sampled_from(["blackbody", "cied"]), p=chances),
    ),
    "GaussianIllumination": Spec(
        picture="T.GaussianIllumination((0.8, 0.8), 'brighten', sigma_range=(0.2, 0.2), p=1.0)",
        note='not in torchvision; `Illumination(mode="gaussian")` of albumentations',
        parity=color_and_gray(
            lighting(
                "GaussianIllumination",
                T.GaussianIllumination((0.1, 0.9), sigma_range=(0.05, 1.0), p=1),
                "apply_gaussian_illumination",
                0.01,
                1,
                lit.BELL,
            )
        ),
        draws=[
            D.Definition(
                T.GaussianIllumination((0.2, 0.7), "both", (0.1, 0.8), (0.3, 0.9), 1.0),
                lambda draws: D.columns(D.ILLUMINATION_COLUMNS, draws.records[0].values[:, 0, :4]),
                D.simulate_illumination,
            )
        ],
        chains=st.builds(T.GaussianIllumination, ranges(0, 1), p=chances),
    ),
    "RandomShadow": Spec(
        picture="T.RandomShadow((0, 0, 1, 1), p=1.0)",
        note=f"{ALBUMENTATIONS_ONLY_NOTE}; the record has the key of a shadow's vertices, not the vertices",
        parity=color_and_gray(
            lighting(
                "RandomShadow",
                T.RandomShadow((0, 0, 1, 1), (1, 3), 6, (0.2, 0.8), 1),
                "add_shadow",
                0.5,
                255,
                lit.SHADOW,
            )
        ),
        draws=[
            D.Definition(
                T.RandomShadow((0.1, 0.2, 0.7, 1.0), (1, 3), 3, (0.2, 0.7), 0.6), D.shadow_columns, D.simulate_shadow
            )
        ],
        chains=st.builds(T.RandomShadow, shadow_dimension=st.integers(3, 6), p=chances),
    ),
    "CLAHE": Spec(
        picture="T.CLAHE((8.0, 8.0), p=1.0)",
        note=f"{ALBUMENTATIONS_ONLY_NOTE}; computes OpenCV's `createCLAHE` on L of CIELAB",
        parity=color_and_gray(lighting("CLAHE", T.CLAHE((1, 6), (5, 3), 1), "clahe", 0.5, 4, lit.LAB)),
        draws=[D.uniform_operation_definition(T.CLAHE((1, 6), p=0.3), 0.3, "clahe", 1, 6, column=2)],
        chains=st.builds(T.CLAHE, st.integers(1, 40), st.tuples(st.integers(1, 9), st.integers(1, 9)), chances),
    ),
    "GaussianNoise": Spec(
        picture="T.GaussianNoise(sigma=0.15)",
        note=(
            "`mean` and `sigma` are on the scale 0 … 1, and the noise is truncated to integers; the noise is the "
            "same on every device"
        ),
        torchvision={"mean": 0.1, "sigma": 0.2, "clip": False},
        parity=color_and_gray(
            recolored(
                "GaussianNoise",
                T.GaussianNoise(0.05),
                "Pillow convert('I'), clipped",
                **color.NOISE,
                oracle=color.noise_oracle,
            ),
            recolored(
                "GaussianNoise(clip=False)",
                T.GaussianNoise(0.5, clip=False),
                "numpy",
                **color.WRAPPING,
                oracle=color.noise_oracle,
            ),
        ),
        draws="transforms/test_colour.py",
        chains=st.builds(T.GaussianNoise, ranges(-0.2, 0.2).map(min), ranges(0, 0.3).map(max)),
    ),
    "AutoAugment": Spec(
        picture='T.AutoAugment("imagenet")',
        note=f"also accepts a string as `policy`; {CLASSIFICATION_NOTE}",
        torchvision={"policy": "svhn", "interpolation": "bicubic", "fill": 7},
        parity=[
            policy("AutoAugment('imagenet')", T.AutoAugment()),
            policy("AutoAugment('cifar10', 'bilinear')", T.AutoAugment("cifar10", "bilinear", (9, 99, 199))),
            policy("AutoAugment('svhn', 'bicubic')", T.AutoAugment("svhn", "bicubic", 128)),
            policy("AutoAugment('imagenet'), greyscale", T.AutoAugment(), channels=1),
        ],
        draws="transforms/test_policies.py",
        chains=st.builds(T.AutoAugment, st.sampled_from(["imagenet", "cifar10", "svhn"]), filters, fills),
    ),
    "RandAugment": Spec(
        picture="T.RandAugment(num_ops=2, magnitude=12)",
        note=CLASSIFICATION_NOTE,
        torchvision={"num_ops": 3, "magnitude": 5, "num_magnitude_bins": 11, "interpolation": "bicubic", "fill": 3},
        parity=[
            policy("RandAugment()", T.RandAugment()),
            policy("RandAugment(5, 25, 'bilinear')", T.RandAugment(5, 25, interpolation="bilinear")),
        ],
        draws="transforms/test_policies.py",
        chains=st.builds(
            T.RandAugment, st.integers(0, 4), st.integers(0, 30), st.just(31), interpolation=filters, fill=fills
        ),
    ),
    "TrivialAugmentWide": Spec(
        picture="T.TrivialAugmentWide()",
        note=CLASSIFICATION_NOTE,
        torchvision={"num_magnitude_bins": 11, "interpolation": "bicubic", "fill": 3},
        parity=[
            policy("TrivialAugmentWide()", T.TrivialAugmentWide(), max=1),
            policy("TrivialAugmentWide(3, 'bicubic')", T.TrivialAugmentWide(3, "bicubic", 7), max=1),
            policy("TrivialAugmentWide(), greyscale", T.TrivialAugmentWide(fill=3), max=1, channels=1),
        ],
        draws="transforms/test_policies.py",
        chains=st.builds(T.TrivialAugmentWide, magnitude_bins, filters, fills),
    ),
    "AugMix": Spec(
        picture="T.AugMix(severity=6)",
        note=CLASSIFICATION_NOTE,
        torchvision={
            "severity": 4,
            "mixture_width": 2,
            "chain_depth": 2,
            "alpha": 0.5,
            "all_ops": False,
            "interpolation": "nearest",
            "fill": 9,
        },
        parity=[
            policy("AugMix()", T.AugMix()),
            policy("AugMix(10, 4, 2, 0.5)", T.AugMix(10, 4, 2, 0.5, interpolation="nearest")),
            policy("AugMix(all_ops=False), greyscale", T.AugMix(all_ops=False), channels=1),
        ],
        draws="transforms/test_policies.py",
        chains=st.builds(
            T.AugMix,
            st.integers(1, 10),
            st.integers(1, 3),
            st.sampled_from([-1, 1, 2]),
            st.sampled_from([0.5, 1.0, 3.0]),
            st.booleans(),
            filters,
            fills,
        ),
    ),
    "TimmRandAugment": Spec(
        picture='T.TimmRandAugment("rand-m9-mstd0.5-inc1")',
        note=(
            "not in torchvision; accepts timm's strings, such as `rand-m9-mstd0.5-inc1`; refuses samples with "
            "masks, boxes or keypoints"
        ),
        parity=[
            policy("TimmRandAugment('rand-m9-mstd0.5')", T.TimmRandAugment("rand-m9-mstd0.5")),
            policy(
                "TimmRandAugment('rand-m9-mstd0.5-inc1')",
                T.TimmRandAugment("rand-m9-mstd0.5-inc1", {"img_mean": (124, 116, 104)}),
            ),
            policy(
                "TimmRandAugment('rand-m15-n3-p1-mmax20-tweights')", T.TimmRandAugment("rand-m15-n3-p1-mmax20-tweights")
            ),
            policy("TimmRandAugment('rand-n4-p1-mstdinf-t3aw')", T.TimmRandAugment("rand-n4-p1-mstdinf-t3aw")),
        ],
        draws="transforms/test_timm_policies.py",
        chains=st.builds(
            T.TimmRandAugment,
            st.sampled_from(
                ["rand-m9-mstd0.5-inc1", "rand-n3-m7-p1", "rand-n2-p1-mstdinf-t3aw", "rand-n2-m5-tweights"]
            ),
            st.fixed_dictionaries(
                {"img_mean": fills}, optional={"interpolation": st.one_of(st.just("random"), filters)}
            ),
        ),
    ),
    "TimmAutoAugment": Spec(
        picture='T.TimmAutoAugment("original")',
        note=TIMM_NOTE,
        parity=[
            policy("TimmAutoAugment('v0-mstd0.5')", T.TimmAutoAugment("v0-mstd0.5")),
            policy("TimmAutoAugment('originalr')", T.TimmAutoAugment("originalr", {"img_mean": 7})),
            policy("TimmAutoAugment('3a')", T.TimmAutoAugment("3a")),
        ],
        draws="transforms/test_timm_policies.py",
        chains=st.builds(
            T.TimmAutoAugment,
            st.sampled_from(["original-mstd0.5", "v0r", "3a"]),
            st.fixed_dictionaries({"img_mean": fills}),
        ),
    ),
    "TimmAugMix": Spec(
        picture='T.TimmAugMix("augmix-m9-w3-d3")',
        note=TIMM_NOTE,
        parity=[policy("TimmAugMix('augmix-m5-w4-d2')", T.TimmAugMix("augmix-m5-w4-d2"))],
        draws="transforms/test_timm_policies.py",
        chains=st.builds(
            T.TimmAugMix,
            st.sampled_from(["augmix", "augmix-m5-w4-d2", "augmix-m9-w1-mstd1-a0.5"]),
            st.fixed_dictionaries({"img_mean": fills}),
        ),
    ),
    "JPEG": Spec(
        picture="T.JPEG((5, 20))",
        torchvision={"quality": (20, 80)},
        parity=color_and_gray(recolored("JPEG", T.JPEG((5, 98)), "Pillow Image.save", oracle=color.jpeg_oracle)),
        draws=[
            D.Definition(
                T.JPEG((30, 39)),
                D.operation_columns,
                lambda rng: {
                    "done": np.ones(D.SAMPLES),
                    "code": np.full(D.SAMPLES, OPS.index("jpeg")),
                    "number": rng.integers(30, 40, D.SAMPLES),
                },
            )
        ],
        chains=st.builds(T.JPEG, st.integers(1, 100)),
    ),
    "ElasticTransform": Spec(
        picture="T.ElasticTransform(alpha=80.0)",
        torchvision={"alpha": (30.0, 40.0), "sigma": (3.0, 4.0), "interpolation": "nearest", "fill": (1, 2, 3)},
        parity=[],
        draws="transforms/test_blur_noise.py",
        chains=st.builds(
            T.ElasticTransform,
            ranges(0, 200),
            st.sampled_from([0, 1.0, (3.0, 5.0)]),
            st.sampled_from(["nearest", "bilinear"]),
            fills,
        ),
    ),
    "RandomErasing": Spec(
        picture="T.RandomErasing(p=1.0, value=127)",
        note=("`mode`, `min_count` and `max_count` are from timm; before `ToDtype`, `value` is on the scale 0 … 255"),
        torchvision={"p": 0.3, "scale": (0.1, 0.2), "ratio": (0.5, 2.0), "value": (1.0, 2.0, 3.0), "inplace": True},
        more=["mode", "min_count", "max_count"],
        parity=[
            erasing("RandomErasing(levels)", [T.RandomErasing(0.9, value=[255, 7, 100], max_count=3)]),
            erasing(
                "RandomErasing(levels, flipped)",
                [T.RandomErasing(0.9, value=9), T.RandomHorizontalFlip(), NORMALIZE],
                denormalize,
            ),
            erasing(
                "RandomErasing(between ToDtype and Normalize)",
                [FLOAT, T.RandomErasing(0.9, value=0.5), NORMALIZE],
                denormalize,
            ),
            erasing("RandomErasing", [NORMALIZE, T.RandomErasing(0.9, value=(0.1, 0.7, -1))], denormalize),
            erasing(
                "RandomErasing(value='random')",
                [NORMALIZE, T.RandomErasing(0.9, value="random"), T.RandomHorizontalFlip(), T.RandomVerticalFlip()],
                denormalize,
            ),
            erasing(
                "RandomErasing(mode='rand')", [NORMALIZE, T.RandomErasing(0.9, mode="rand", max_count=4)], denormalize
            ),
            erasing(
                "RandomErasing(mode='pixel')", [NORMALIZE, T.RandomErasing(0.9, mode="pixel", max_count=4)], denormalize
            ),
            erasing(
                "RandomErasing(ToDtype)", [FLOAT, T.RandomErasing(0.9, value="random")], lambda numbers: numbers * 255
            ),
        ],
        draws=[
            D.erasing_definition(0.6, (0.02, 0.6), (0.3, 3.3), (1, 1)),
            D.erasing_definition(0.9, (0.7, 1.0), (0.1, 0.4), (1, 1)),  # such a box rarely fits into the image
            D.erasing_definition(1.0, (0.0, 0.001), (0.3, 3.3), (1, 1)),  # such a box often has no area
            D.erasing_definition(0.8, (0.02, 1 / 3), (0.3, 1 / 0.3), (2, 4)),  # several boxes, as in timm
        ],
        chains=st.builds(
            T.RandomErasing, chances, ranges(0, 0.5), ranges(0.3, 3), st.integers(0, 255), max_count=st.integers(1, 3)
        ),
    ),
    "Identity": Spec(picture="does not change images", torchvision={}, parity=[], chains=st.just(T.Identity())),
    "ClampBoundingBoxes": indirect(
        picture="changes boxes, not images",
        note="all clamping modes have the same result, because boxes are never rotated",
        torchvision={"clamping_mode": "hard"},
    ),
    "ClampKeyPoints": indirect(picture="changes keypoints, not images", torchvision={}),
    "Compose": indirect(
        picture="T.Compose([T.RandomCrop(128), T.RandomHorizontalFlip()])",
        note="equivalent to listing its transforms directly; accepted wherever a list of transforms is",
        torchvision={},
    ),
    "ConvertBoundingBoxFormat": indirect(
        picture="changes the format of boxes, not images", torchvision={"format": "CXCYWH"}
    ),
    "CopyPaste": indirect(
        picture="T.CopyPaste()",
        note=(
            "combines the sample with its neighbour in the epoch's order; part of torchvision's references, not "
            "of the package"
        ),
        draws="transforms/test_combining.py",
    ),
    "Custom": indirect(
        picture="the base class for your own transforms", note="not in torchvision; base class for your own transforms"
    ),
    "CutMix": Spec(
        picture="T.CutMix(num_classes=2)",
        note=f"{MIXING_NOTE}; the mixing ratio and the box are random for each sample; {FINISHED_NOTE}",
        torchvision={"alpha": 0.3, "num_classes": 7, "labels_getter": second_entry},
        more=["label_smoothing"],
        parity=[mixing(T.CutMix(num_classes=10)), mixing(T.CutMix(alpha=4.0, num_classes=10))],
        draws=[
            D.Definition(
                [FLOAT, T.CutMix(alpha=0.7)],
                D.mix_columns,
                D.simulation((*D.BOX, "share"), published.cutmix, D.SIZE_HW, 0.7),
            )
        ],
        chains=None,
    ),
    "Lambda": indirect(
        picture="calls your function",
        note="calls a function or module with a batch of images, or with each image; does not pass targets",
        torchvision={},
    ),
    "MixUp": Spec(
        picture="T.MixUp(alpha=4.0, num_classes=2)",
        note=f"{MIXING_NOTE}; the mixing ratio is random for each sample; {FINISHED_NOTE}",
        torchvision={"alpha": 0.3, "num_classes": 7, "labels_getter": None},
        more=["label_smoothing"],
        parity=[mixing(T.MixUp(num_classes=10)), mixing(T.MixUp(alpha=0.2, num_classes=10))],
        draws=[
            D.Definition(
                [FLOAT, T.MixUp(alpha=0.3)],
                lambda draws: {"share": draws.records[1].share},
                lambda rng: {"share": rng.beta(0.3, 0.3, D.SAMPLES)},
            )
        ],
        chains=None,
    ),
    "Mosaic": indirect(
        picture="T.Mosaic(160)",
        note=("not in torchvision; known from YOLO; combines the sample with three neighbours in the epoch's order"),
        draws="transforms/test_combining.py",
    ),
    "MultiView": indirect(
        picture="T.MultiView([[T.RandomResizedCrop(144)], [T.RandomResizedCrop(144)], [T.RandomResizedCrop(64)]])",
        note="not in torchvision; makes several views of an image, which is decoded once",
    ),
    "Normalize": Spec(
        picture="converts levels to numbers, which are not a picture",
        note=(
            "also accepts uint8 images, which it scales by 1/255; refuses a mean on the scale 0 … 255, unless "
            "`ToDtype('float32')` without `scale` comes before it; `inplace` has no effect"
        ),
        torchvision={"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "inplace": True},
        parity=[
            recolored(
                "Normalize",
                T.Normalize(MEAN, STD),
                "Kornia normalize",
                **color.AFFINE,
                oracle=color.normalize_oracle(MEAN, STD),
                to_levels=lambda numbers: (numbers * STD + MEAN) * 255,
            )
        ],
        chains=None,
    ),
    "RandomApply": indirect(
        picture="T.RandomApply([T.GaussianBlur(15, sigma=3.0)], p=0.5)",
        torchvision={},
        draws=[
            D.Definition(
                T.RandomApply([T.ColorJitter(0.4)], 0.3),
                D.applied_jitter_column,
                lambda rng: {
                    "factor": np.where(rng.uniform(size=D.SAMPLES) < 0.3, rng.uniform(0.6, 1.4, D.SAMPLES), 0)
                },
            )
        ],
    ),
    "RandomChoice": indirect(
        picture="T.RandomChoice([T.RandomInvert(p=1.0), T.RandomGrayscale(p=1.0), T.RandomRotation((90, 90))])",
        torchvision={},
        draws=[
            D.Definition(
                T.RandomChoice([T.ColorJitter(0.4), T.GaussianBlur(3, (0.5, 3)), T.Identity()], [5, 3, 2]),
                D.branch_columns,
                D.simulate_choice,
            )
        ],
    ),
    "RandomOrder": indirect(
        picture="T.RandomOrder([T.RandomPosterize(2, p=1.0), T.GaussianBlur(15, 3.0), T.RandomInvert(p=1.0)])",
        torchvision={},
        draws=[
            D.Definition(
                T.RandomOrder([T.RandomVerticalFlip(0.3), T.RandomHorizontalFlip(0.7)]),
                D.order_columns,
                D.simulate_order,
            )
        ],
    ),
    "SanitizeBoundingBoxes": indirect(
        picture="drops boxes, and does not change images",
        note="`labels_getter` receives the sample as the dataset returned it",
        torchvision={"min_size": 2.0, "min_area": 3.0, "labels_getter": None},
    ),
    "SanitizeKeyPoints": indirect(
        picture="drops keypoints, and does not change images",
        note="`labels_getter` receives the sample as the dataset returned it",
        torchvision={"labels_getter": second_entry},
    ),
    "ToDtype": Spec(
        picture="converts levels to numbers, which are not a picture",
        note=(
            "converts to float32, float16, bfloat16 or uint8; converts masks if `mask_dtype` is set, or if "
            "`dtype` is a dict that maps types to dtypes"
        ),
        torchvision={},
        more=["mask_dtype"],
        parity=[
            recolored(
                "ToDtype(float32, scale=True)",
                T.ToDtype("float32", scale=True),
                "Kornia normalize",
                **color.AFFINE,
                oracle=color.normalize_oracle((0.0,), (1.0,)),
                to_levels=lambda numbers: numbers * 255,
            ),
            recolored(
                "ToDtype, RandomSolarize(0.5), Normalize",
                [T.ToDtype("float32", scale=True), T.RandomSolarize(0.5, 1), T.Normalize(MEAN, STD)],
                "Pillow ImageOps.solarize, Kornia normalize",
                **color.AFFINE,
                oracle=lambda image, drawn, row: color.normalize_oracle(MEAN, STD)(
                    color.operations_oracle(image, drawn[1:2], row), drawn, row
                ),
                to_levels=lambda numbers: (numbers * STD + MEAN) * 255,
            ),
        ],
        chains=None,
    ),
    "UniformTemporalSubsample": indirect(
        picture="chooses the frames of a clip",
        note="accepts T×H×W×C clips and lists of frames; selects frames before they are decoded",
        torchvision={"num_samples": 3},
    ),
    "Window": indirect(
        picture="converts intensities, which are not a picture",
        note="not in torchvision; DICOM's window, for uint16 and float32 images; comes first in the chain",
    ),
}
