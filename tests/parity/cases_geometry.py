"""Geometric transforms, compared with Pillow's resize, rotate, transform, expand and crop, and NumPy's pad.

What is drawn is a box, a coin or a map; the oracle does to the whole image what that says, one transform after the
other, whatever transform drew it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from originals import torchvision
from parity.case import BATCHES, Case, Oracle, Tolerance
from PIL import Image, ImageOps

from gpuload import transforms as T
from gpuload.transforms.program.ops import FILTERS, Box, Flip, Turn, Warp

__all__ = ["CASES", "geometry"]

PILLOW = {
    "nearest": Image.NEAREST,
    "bilinear": Image.BILINEAR,
    "bicubic": Image.BICUBIC,
    "lanczos": Image.LANCZOS,
}
WARPING = ("nearest", "bilinear", "bicubic")


def as_pillow(levels: np.ndarray) -> Image.Image:
    return Image.fromarray(levels[:, :, 0] if levels.shape[2] == 1 else levels)


def as_levels(image: Image.Image) -> np.ndarray:
    levels = np.asarray(image)
    return levels[:, :, None] if levels.ndim == 2 else levels


def filter_of(transform: Any, params: Any, row: int) -> str:
    return params.filters if isinstance(params.filters, str) else FILTERS[params.filters[row]]


def color(transform: Any, image: Image.Image) -> Any:
    fill = transform.outside.image
    return fill[0] if image.mode == "L" else tuple(fill) * (3 // len(fill))


def padded_crop(transform: Any, params: Box, row: int, image: Image.Image) -> Image.Image:
    top, left, height, width = params.box_tlhw[row].tolist()
    around = max(0, -top, -left, top + height - image.height, left + width - image.width)
    if transform.padding_mode == "constant":
        image = ImageOps.expand(image, around, color(transform, image))
    else:
        widths = ((around, around), (around, around), (0, 0))
        image = as_pillow(np.pad(as_levels(image), widths, mode=transform.padding_mode))
    return image.crop((left + around, top + around, left + around + width, top + around + height))


def resized_crop(transform: Any, params: Box, row: int, image: Image.Image) -> Image.Image:
    top, left, height, width = params.box_tlhw[row].tolist()
    new_height, new_width = params.size_hw[row].tolist()
    interpolation = filter_of(transform, params, row)
    image = image.crop((left, top, left + width, top + height))
    if interpolation.startswith("plain"):
        batch = torch.tensor(as_levels(image)).permute(2, 0, 1)[None].float()
        found = torch.nn.functional.interpolate(batch, (new_height, new_width), mode=interpolation.split()[1])
        return as_pillow(found.round().clamp(0, 255)[0].permute(1, 2, 0).to(torch.uint8).numpy())
    if interpolation != "nearest":  # two calls: one begins with the cheaper axis, since Pillow 13
        image = image.resize((new_width, height), PILLOW[interpolation])
    return image.resize((new_width, new_height), PILLOW[interpolation])


def called_once(image: np.ndarray, drawn: list[tuple[Any, Any]], row: int) -> np.ndarray:
    """What `Image.resize` makes of a crop, as whoever has Pillow images calls it."""
    ((transform, params),) = drawn
    top, left, height, width = params.box_tlhw[row].tolist()
    new_height, new_width = params.size_hw[row].tolist()
    filter_ = PILLOW[filter_of(transform, params, row)]
    return np.asarray(
        Image.fromarray(image).crop((left, top, left + width, top + height)).resize((new_width, new_height), filter_)
    )


def of_tensors(image: np.ndarray, drawn: list[tuple[Any, Any]], row: int) -> np.ndarray:
    """torchvision's `resized_crop` of a uint8 tensor."""
    ((transform, params),) = drawn
    functional = torchvision().transforms.v2.functional
    interpolation = functional.InterpolationMode(filter_of(transform, params, row))
    box, size = params.box_tlhw[row].tolist(), params.size_hw[row].tolist()
    found = functional.resized_crop(torch.tensor(image).permute(2, 0, 1), *box, size, interpolation, antialias=True)
    return found.permute(1, 2, 0).numpy()


def mapped(transform: Any, params: Warp, row: int, image: Image.Image) -> Image.Image:
    if not params.warped[row]:
        return image
    height, width = params.size_hw[row].tolist()
    coefficients = params.coefficients[row].tolist()
    affine = not isinstance(transform, T.RandomPerspective)
    method = Image.Transform.AFFINE if affine else Image.Transform.PERSPECTIVE
    filter_ = PILLOW[filter_of(transform, params, row)]
    fill = color(transform, image)
    return image.transform((width, height), method, coefficients[: 6 if affine else 8], filter_, fillcolor=fill)


def rotated(transform: Any, params: Warp, row: int, image: Image.Image) -> Image.Image:
    """`Image.rotate` by the drawn angle."""
    cosine, sine = params.coefficients[row, 0], params.coefficients[row, 3]
    filter_, fill = PILLOW[filter_of(transform, params, row)], color(transform, image)
    angle = math.degrees(math.atan2(sine, cosine))
    return image.rotate(angle, filter_, transform.expand, transform.center, fillcolor=fill)


def turned_by_quarters(params: Turn, row: int, image: Image.Image) -> Image.Image:
    if params.transposed[row]:
        image = image.transpose(Image.Transpose.TRANSPOSE)
    upside_down, mirrored = params.flipped[row]
    image = ImageOps.flip(image) if upside_down else image
    return ImageOps.mirror(image) if mirrored else image


def geometry(image: np.ndarray, drawn: list[tuple[Any, Any]], row: int) -> np.ndarray:
    """All transforms, one after the other."""
    result = as_pillow(image)
    for transform, params in drawn:
        match params:
            case Box(padding_mode=str()):
                result = padded_crop(transform, params, row, result)
            case Box():
                result = resized_crop(transform, params, row, result)
            case Flip() if params.flipped[row]:
                result = ImageOps.mirror(result) if params.axis else ImageOps.flip(result)
            case Turn():
                result = turned_by_quarters(params, row, result)
            case Warp() if isinstance(transform, T.RandomRotation):
                result = rotated(transform, params, row, result)
            case Warp():
                result = mapped(transform, params, row, result)
    return as_levels(result)


_: Oracle = geometry

EXACT = "pixels are only moved, or are computed in Pillow's integer arithmetic"
PLAIN = "gpuload computes with 22-bit integers and rounds between columns and rows; torch sums floats"
RESIZE = "the reference resizes with torch's kernel, whose weights have 16 bits; Pillow's weights have 22 bits"
AXES = (
    "Pillow 13 resizes along the cheaper axis first, and gpuload along rows first; the results differ most where "
    "bicubic overshoots 0 … 255 between the two passes"
)
SAME = "the oracle uses the same torch kernel as the reference"
OF_TENSORS = "the backend's weights have 22 bits; those of the oracle's torch kernel have 16 bits"
PILLOWS = (
    "the backend uses Pillow's integer arithmetic, and so equals the oracle, but not the reference, whose weights have "
    "16 bits"
)
WARP = "gpuload uses Pillow's float64 arithmetic; single images are processed by Pillow itself"
ROTATE = "the oracle computes the angle from the recorded parameters, so a coordinate may differ in its last bit"

CROP, MIRROR, RESIZED, CALL, TRANSFORM = (
    "Pillow ImageOps.expand, Image.crop",
    "numpy.pad, Pillow Image.crop",
    "Pillow Image.resize along rows, then along columns",
    "Pillow Image.resize",
    "Pillow Image.transform",
)
FILL = (9, 99, 199)
MIDDLE = T.CenterCrop((140, 171))  # so that batches on the CPU do not take minutes


def moved(name: str, *transforms: Any, against: str = CROP, channels: int = 3) -> Case:
    return Case(name, list(transforms), geometry, 0, 0, against, EXACT, channels=channels)


def resized(name: str, *transforms: Any, against: str = RESIZED, channels: int = 3, apart: int = 1) -> Case:
    own = dict.fromkeys((BATCHES, "fused"), Tolerance(0, 0, apart, PILLOWS))
    return Case(name, list(transforms), geometry, 0.03, 1, against, RESIZE, between=1, backends=own, channels=channels)


def cubic(name: str, *transforms: Any) -> Case:
    """With four taps along each axis, some negative, the weights' last bits come to more."""
    own = dict.fromkeys((BATCHES, "fused"), Tolerance(0, 0, 2, PILLOWS))
    return Case(name, list(transforms), geometry, 0.1, 2, RESIZED, RESIZE, between=2, backends=own)


def real(name: str, transform: Any, mean: float, max: float) -> Case:
    """Beside the call that users of Pillow images make."""
    return Case(name, [transform], called_once, mean, max, CALL, AXES, between=2)


def tensors(name: str, transform: Any, apart: int) -> Case:
    own = dict.fromkeys((BATCHES, "fused"), Tolerance(0.3, apart, apart, OF_TENSORS))
    return Case(
        name, [transform], of_tensors, 0, 0, "torchvision v2.functional.resized_crop of tensors", SAME, backends=own
    )


def plain(name: str, *transforms: Any) -> Case:
    """Without antialiasing."""
    against = "torch.nn.functional.interpolate"
    return Case(name, list(transforms), geometry, 0.3, 1, against, PLAIN)


def warped(name: str, *transforms: Any, channels: int = 3) -> Case:
    return Case(name, [MIDDLE, *transforms], geometry, 0, 0, TRANSFORM, WARP, channels=channels)


def turned(name: str, transform: Any, *, channels: int = 3) -> Case:
    against = "Pillow Image.rotate"
    return Case(name, [MIDDLE, transform], geometry, 1e-4, 1, against, ROTATE, channels=channels)


CASES: list[Case] = [
    moved("RandomHorizontalFlip", T.RandomHorizontalFlip(), against="Pillow ImageOps.mirror"),
    moved("RandomVerticalFlip", T.RandomVerticalFlip(), against="Pillow ImageOps.flip"),
    moved("RandomRotate90", T.RandomRotate90(0.9), against="Pillow Image.transpose"),
    moved("RandomTranspose", T.RandomTranspose(), against="Pillow Image.transpose", channels=1),
    moved("CenterCrop", T.CenterCrop((60, 80))),
    moved("CenterCrop(even, odd)", T.CenterCrop((51, 30)), channels=1),
    moved("RandomCrop(padding)", T.RandomCrop(48, padding=(3, 30, 20, 1), pad_if_needed=True, fill=FILL)),
    *(
        moved(
            f"RandomCrop(padding_mode={mode})",
            T.RandomCrop((90, 48), padding=30, pad_if_needed=True, padding_mode=mode),
            against=MIRROR,
        )
        for mode in ("edge", "reflect", "symmetric")
    ),
    moved("Pad(fill)", T.Pad((5, 0, 17, 40), fill=FILL)),
    moved("Pad(negative)", T.Pad((-5, 3, 4, -12), fill=77), channels=1),
    *(
        moved(f"Pad(padding_mode={mode})", T.Pad((70, 20, 3, 111), padding_mode=mode), against=MIRROR)
        for mode in ("edge", "reflect", "symmetric")
    ),
    moved("RandomZoomOut", T.RandomZoomOut(FILL, side_range=(1.0, 2.5), p=0.8)),
    moved("Resize(nearest)", T.Resize((61, 47), "nearest"), against=CALL),
    resized("Resize", T.Resize(56)),
    cubic("Resize(bicubic)", T.Resize((90, 130), "bicubic")),
    resized("Resize(max_size)", T.Resize(100, max_size=120), channels=1),
    cubic("Resize(random)", T.Resize(70, "random")),
    moved("Resize(lanczos)", T.Resize((91, 130), "lanczos"), against=RESIZED),
    moved("RandomResizedCrop(lanczos)", T.RandomResizedCrop(64, interpolation="lanczos"), against=RESIZED),
    plain("Resize(antialias=False)", T.Resize((90, 130), antialias=False)),
    plain("Resize(bicubic, antialias=False)", T.Resize(70, "bicubic", antialias=False)),
    plain("RandomResizedCrop(antialias=False)", T.RandomResizedCrop(64, interpolation="random", antialias=False)),
    moved("RandomResizedCrop(nearest)", T.RandomResizedCrop(48, interpolation="nearest"), against=CALL),
    resized("RandomResizedCrop", T.RandomResizedCrop(64)),
    cubic("RandomResizedCrop(bicubic)", T.RandomResizedCrop((50, 70), interpolation="bicubic")),
    cubic("RandomResizedCrop(random)", T.RandomResizedCrop(64, interpolation="random")),
    real("RandomResizedCrop of Pillow images", T.RandomResizedCrop((64, 90)), 0.3, 1),
    real(
        "RandomResizedCrop(bicubic) of Pillow images", T.RandomResizedCrop((50, 70), interpolation="bicubic"), 0.5, 25
    ),
    tensors("RandomResizedCrop of tensors", T.RandomResizedCrop((64, 90)), 1),
    tensors("RandomResizedCrop(bicubic) of tensors", T.RandomResizedCrop((50, 70), interpolation="bicubic"), 2),
    resized("ScaleJitter", T.ScaleJitter((60, 90)), apart=2),
    cubic("ScaleJitter(bicubic)", T.ScaleJitter((60, 90), (0.5, 1.5), "bicubic")),
    resized("RandomShortestSize", T.RandomShortestSize([40, 50, 60, 70], max_size=90), apart=2),
    resized("RandomResize", T.RandomResize(40, 100)),
    cubic("RandomResize(random)", T.RandomResize(40, 100, "random")),
    *(turned(f"RandomRotation({name})", T.RandomRotation(180, name, fill=FILL)) for name in WARPING),
    turned("RandomRotation(expand)", T.RandomRotation((10, 80), "bilinear", expand=True, fill=44), channels=1),
    turned("RandomRotation(center)", T.RandomRotation(45, "bicubic", center=(3.5, 20), fill=FILL)),
    turned("RandomRotation(right angle)", T.RandomRotation((270, 270), "nearest", expand=True)),
    *(
        warped(
            f"RandomAffine({name})",
            T.RandomAffine(30, (0.2, 0.3), (0.5, 1.7), (-20, 20, -10, 10), interpolation=name, fill=FILL),
        )
        for name in WARPING
    ),
    warped("RandomAffine(scale only)", T.RandomAffine(0, (0.2, 0.1), (0.3, 2.0), fill=FILL)),
    *(
        warped(f"RandomPerspective({name})", T.RandomPerspective(0.7, 0.9, interpolation=name, fill=FILL))
        for name in WARPING
    ),
    warped("RandomPerspective(grey)", T.RandomPerspective(p=1.0, fill=77), channels=1),
    resized(
        "Resize, RandomRotation, RandomCrop",
        T.Resize(80),
        T.RandomRotation(30, "nearest", expand=True, fill=FILL),
        T.RandomCrop(48),
        against=f"{RESIZED}, Image.transform, Image.crop",
    ),
    resized(
        "Resize, RandomRotate90, RandomCrop, RandomTranspose",
        T.Resize(56),
        T.RandomRotate90(0.9),
        T.RandomCrop((40, 48)),
        T.RandomTranspose(),
    ),
    warped("RandomPerspective, Pad, RandomHorizontalFlip", T.RandomPerspective(), T.Pad(9), T.RandomHorizontalFlip()),
]
