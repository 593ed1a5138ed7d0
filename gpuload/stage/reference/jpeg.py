"""JPEG artefacts: compression at a given quality, with colour at half the resolution, and decompression.

A single image on the CPU goes through Pillow (libjpeg-turbo). For batches, tensor operations perform libjpeg's steps
with bit-identical results: YCbCr in 16.16 fixed point, colour averaged over 2×2 pixels, borders repeated to complete
the blocks, cosine transforms of 8×8 blocks in 13-bit fixed point, division by the quantization table, and the inverse
of these steps, with a triangle filter for the colour ("fancy upsampling"). Products are integers, which float64 holds
exactly.

Sources: ITU-T T.81 (the tables of its annex K); jccolor.c, jcsample.c, jfdctint.c, jidctint.c (Loeffler, Ligtenberg,
Moschytz, "Practical fast 1-D DCT algorithms with 11 multiplications", ICASSP 1989), jdsample.c and jdcolor.c of
libjpeg-turbo 3.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import pad

from gpuload.stage.device import upload
from gpuload.stage.reference.canvas import Canvas

__all__ = ["compress", "compress_image"]

BLOCK: Final = 8
HALF: Final = 1 << 15  # one half in the 16.16 fixed point of colours
BITS: Final = 13  # fractional bits of the cosine transform
EXTRA_BITS: Final = 2  # additional bits kept between the transform's two passes
LUMINANCE: Final = (
    *(16, 11, 10, 16, 24, 40, 51, 61), *(12, 12, 14, 19, 26, 58, 60, 55), *(14, 13, 16, 24, 40, 57, 69, 56),
    *(14, 17, 22, 29, 51, 87, 80, 62), *(18, 22, 37, 56, 68, 109, 103, 77), *(24, 35, 55, 64, 81, 104, 113, 92),
    *(49, 64, 78, 87, 103, 121, 120, 101), *(72, 92, 95, 98, 112, 100, 103, 99),
)  # fmt: skip
CHROMINANCE: Final = (
    *(17, 18, 24, 47, 99, 99, 99, 99), *(18, 21, 26, 66, 99, 99, 99, 99), *(24, 26, 56, 99, 99, 99, 99, 99),
    *(47, 66, 99, 99, 99, 99, 99, 99), *(99,) * 32,
)  # fmt: skip
# The cosine transform along one axis, √8 times the orthonormal transform, in fixed point with `BITS` bits. Some numbers
# differ by 1 from the nearest integer because libjpeg adds up constants that are rounded individually.
COSINES: Final = (
    (8192, 8192, 8192, 8192, 8192, 8192, 8192, 8192),
    (11363, 9633, 6437, 2260, -2260, -6437, -9633, -11363),
    (10703, 4433, -4433, -10703, -10703, -4433, 4433, 10703),
    (9633, -2259, -11362, -6436, 6436, 11362, 2259, -9633),
    (8192, -8192, -8192, 8192, 8192, -8192, -8192, 8192),
    (6437, -11362, 2261, 9633, -9633, -2261, 11362, -6437),
    (4433, -10704, 10704, -4433, -4433, 10704, -10704, 4433),
    (2260, -6436, 9633, -11363, 11363, -9633, 6436, -2260),
)  # fmt: skip
# The rows are Y, Cb and Cr: the weights of red, green and blue in units of 1/65536.
TO_YCC: Final = ((19595, 38470, 7471), (-11059, -21709, 32768), (32768, -27439, -5329))


def compress_image(canvas: Canvas, values: Sequence[float]) -> None:
    """Compress and decompress the image on a canvas at the quality `values[0]`."""
    image = canvas.image()
    file = io.BytesIO()
    Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image).save(file, "JPEG", quality=int(values[0]))
    canvas.set(np.array(Image.open(file)).reshape(image.shape))


def compress(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Compress and decompress N×C×H×W levels, each image at its own quality. `gpuload.stage.reference.operations`
    describes the arguments."""
    _, channels, height, width = levels.shape
    tables = [upload(_quantization_tables(base, values[:, 0]), levels.device) for base in (LUMINANCE, CHROMINANCE)]
    if channels == 1:
        return _transform_and_restore(levels.to(torch.int64), tables[0])[..., :height, :width].to(levels.dtype)
    y, cb, cr = _to_ycc(levels.to(torch.int64))
    luma = _transform_and_restore(y[:, None], tables[0])[:, 0, :height, :width]
    # libjpeg repeats border columns before it averages, and border rows afterwards.
    colour = pad(torch.stack([cb, cr], 1).double(), (0, -width % 16, 0, height % 2), mode="replicate").to(torch.int64)
    half_size = _transform_and_restore(_halve(colour), tables[1])[..., : -(-height // 2), : -(-width // 2)]
    cb_out, cr_out = (_double(half_size)[..., :height, :width] - 128).unbind(1)
    return _to_rgb(luma, cb_out, cr_out).to(levels.dtype)


def _quantization_tables(base: Sequence[int], qualities: np.ndarray) -> np.ndarray:
    """Return the quantization tables for these qualities, float64 (N, 1, 1, 1, 8, 8)."""
    quality = np.clip(qualities.astype(np.int64), 1, 100)[:, None]
    scale = np.where(quality < 50, 5000 // quality, 200 - 2 * quality)
    table = np.clip((np.array(base) * scale + 50) // 100, 1, 255)
    return table.reshape(-1, 1, 1, 1, BLOCK, BLOCK).astype(np.float64)


def _transform_and_restore(planes: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Transform and quantize N×C×H×W integers, and reverse both steps; H and W are rounded up to complete blocks."""
    height, width = planes.shape[2:]
    numbers = pad(planes.double() - 128, (0, -width % BLOCK, 0, -height % BLOCK), mode="replicate")
    n, channels, height, width = numbers.shape
    blocks = numbers.view(n, channels, height // BLOCK, BLOCK, width // BLOCK, BLOCK).transpose(3, 4)
    basis = upload(np.array(COSINES, np.float64), planes.device)
    rows = _divide_rounded(blocks @ basis.T, BITS - EXTRA_BITS)
    coefficients = _divide_rounded(basis @ rows, BITS + EXTRA_BITS)  # scaled by 8
    quantized = torch.copysign(((coefficients.abs() + 4 * table) / (8 * table)).floor(), coefficients)
    partial = _divide_rounded(basis.T @ (quantized * table), BITS - EXTRA_BITS)
    restored = _divide_rounded(partial @ basis, BITS + EXTRA_BITS + 3).add_(128).clamp_(0, 255)
    return restored.transpose(3, 4).reshape(n, channels, height, width).to(torch.int64)


def _divide_rounded(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Divide integers by a power of 2, rounding halves up."""
    return (numbers + 2 ** (bits - 1)).div_(2**bits).floor_()


def _to_ycc(rgb: torch.Tensor) -> tuple[torch.Tensor, ...]:
    red, green, blue = rgb.unbind(1)
    planes = []
    for row, (red_weight, green_weight, blue_weight) in enumerate(TO_YCC):
        offset = HALF if row == 0 else (128 << 16) + HALF - 1
        planes.append((red * red_weight + green * green_weight + blue * blue_weight + offset) >> 16)
    return tuple(planes)


def _to_rgb(luma: torch.Tensor, cb: torch.Tensor, cr: torch.Tensor) -> torch.Tensor:
    """Convert N×H×W integers to N×3×H×W RGB; `cb` and `cr` are centred at 0."""
    return torch.stack(
        [
            luma + ((91881 * cr + HALF) >> 16),
            luma + ((-22554 * cb - 46802 * cr + HALF) >> 16),
            luma + ((116130 * cb + HALF) >> 16),
        ],
        dim=1,
    ).clamp_(0, 255)


def _halve(planes: torch.Tensor) -> torch.Tensor:
    """Return the means of 2×2 pixels. Along a row, halves are alternately rounded down and up."""
    total = planes[..., ::2, ::2] + planes[..., ::2, 1::2] + planes[..., 1::2, ::2] + planes[..., 1::2, 1::2]
    return (total + 1 + torch.arange(total.shape[-1], device=planes.device) % 2) >> 2


def _double(planes: torch.Tensor) -> torch.Tensor:
    """Double the size along both axes: three quarters of the nearest pixel plus one quarter of the second nearest."""
    if planes.shape[-1] <= 2:  # too narrow for libjpeg's filter
        return planes.repeat_interleave(2, 2).repeat_interleave(2, 3)
    above = torch.cat([planes[:, :, :1], planes[:, :, :-1]], 2)
    below = torch.cat([planes[:, :, 1:], planes[:, :, -1:]], 2)
    rows = torch.stack([3 * planes + above, 3 * planes + below], 3).flatten(2, 3)
    left = torch.cat([rows[..., :1], rows[..., :-1]], 3)
    right = torch.cat([rows[..., 1:], rows[..., -1:]], 3)
    return torch.stack([(3 * rows + left + 8) >> 4, (3 * rows + right + 7) >> 4], 4).flatten(3, 4)
