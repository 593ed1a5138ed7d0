"""Kornia's runner for pixel values before normalization (levels): the reference's runner for batches, with operators
from Kornia.

Crops and padding use the reference's code, because they only copy pixels. Images of the same size are processed
together, so each Kornia function is called once for all images to which it applies. Where the images have different
sizes, they are processed one by one. The runner runs on any device, in the stage's process, and keeps no state between
calls.

Levels are N×C×H×W uint8 when pixels are moved, and float32 within operations, whose results are rounded to levels. If
Kornia has more than one function for an operation, the function that agrees with Pillow is used, such as
`adjust_brightness_accumulative`, which multiplies, instead of `adjust_brightness`, which adds.

Geometric maps are passed to `remap` as points. `warp_affine` and `warp_perspective` would invert a matrix and find the
nearest pixel with floats, where Pillow uses 16.16 fixed point: 7 pixels in 10,000 would differ. They would also blend
the fill with the image along its border, which differs by up to 124 levels from Pillow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Final

import numpy as np
import torch
from kornia.color import rgb_to_grayscale
from kornia.enhance import adjust_brightness_accumulative, normalize
from kornia.enhance import equalize as kornia_equalize
from kornia.enhance import invert as kornia_invert
from kornia.enhance import posterize as kornia_posterize
from kornia.enhance import solarize as kornia_solarize
from kornia.filters import filter2d_separable, get_gaussian_kernel1d
from kornia.geometry.bbox import bbox_to_mask
from kornia.geometry.transform import hflip, remap, vflip

from gpuload.stage.device import Accelerator, upload, upload_arrays
from gpuload.stage.finish import Finish, Outputs
from gpuload.stage.ragged import RaggedImages
from gpuload.stage.reference.batched import BatchRunner
from gpuload.stage.reference.blur import mirrored_indices
from gpuload.stage.reference.color import LUMA
from gpuload.stage.reference.gather import Source
from gpuload.stage.reference.operations import Operation
from gpuload.stage.reference.warp import mapped_points, nearest_pixels
from gpuload.transforms.program.draws import Program
from gpuload.transforms.program.ops import Erase, Flip
from gpuload.transforms.program.windows import clip_to_windows

__all__ = ["OPERATIONS", "KorniaRunner", "images_per_piece"]

# Temporary memory per level of an image within Kornia, in bytes. 42 bytes were measured for a blur, which works in
# float64, and 39 for a bilinear map.
BYTES_PER_LEVEL: Final = 64
# Memory for a piece on the CPU, which is enough for 10 images of 224×224. Kornia allocates a tensor at each step. With
# pieces of this size, the process reuses its memory; pieces of 64 images get new memory from the system each time, and
# take 1.2 to 3.3 times as long.
CPU_BYTES: Final = 100_000_000
GPU_SHARE: Final = 0.5  # memory for a piece on a GPU, as a fraction of free memory; training needs the rest

WHITE: Final = 255.0
GUARD: Final = 1e-9  # a sum of products in float64 can be slightly below the exact integer
FLIPS: Final = (vflip, hflip)


def brightness(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    factors = upload(values[:, 0].astype(np.float32), levels.device)[:, None, None, None]
    return adjust_brightness_accumulative(levels, factors, clip_output=False)


def grayscale(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    if levels.shape[1] == 1:
        return levels
    return rgb_to_grayscale(levels, upload(np.array(LUMA), levels.device)).add(0.5).expand_as(levels)


def invert(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    return kornia_invert(levels, levels.new_full((), WHITE))


def solarize(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Invert the levels at or above a threshold. The threshold is moved to halfway between two levels, where rounding
    errors do not matter."""
    thresholds = (np.ceil(values[:, 0]) - 0.5) / WHITE
    return kornia_solarize(levels / WHITE, upload(thresholds, levels.device).to(levels.dtype)) * WHITE


def posterize(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    return kornia_posterize(levels / WHITE, upload(values[:, 0].astype(np.int64), levels.device)) * WHITE


def equalize(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    return kornia_equalize(levels / WHITE) * WHITE


def blur(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Blur with kernels of the same size and mirrored borders. Float64 is used, because float32 convolutions may use
    TF32, which has only 10 bits of precision.

    These are the two steps of Kornia's `gaussian_blur2d`. That function is not called, because it waits for the device,
    and on the CPU it chooses its algorithm by the number of images.
    """
    float_levels = levels.to(torch.float64)
    [[width, height]] = np.unique(values[:, :2].astype(np.int64), axis=0).tolist()
    sigmas_xy = torch.from_numpy(values[:, 2:4].copy())
    kernels = [get_gaussian_kernel1d(size, sigmas_xy[:, [axis]]) for axis, size in enumerate((width, height))]
    kernel_x, kernel_y = upload_arrays([kernel.numpy() for kernel in kernels], levels.device)
    rows, columns = float_levels.shape[2:]
    if height // 2 < rows and width // 2 < columns:
        return filter2d_separable(float_levels, kernel_x, kernel_y, "reflect")
    # An image smaller than its kernel is mirrored more than once, which torch's padding does not support.
    float_levels = float_levels.index_select(2, upload(mirrored_indices(rows, height // 2), levels.device))
    float_levels = float_levels.index_select(3, upload(mirrored_indices(columns, width // 2), levels.device))
    return filter2d_separable(float_levels, kernel_x, kernel_y, padding="valid")


def _round_to_levels(function: Operation, round_values: Callable[[torch.Tensor], torch.Tensor]) -> Operation:
    def operation(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
        return round_values(function(levels, values)).clamp(0, 255).to(levels.dtype)

    return operation


OPERATIONS: Final[dict[str, Operation]] = {
    "brightness": _round_to_levels(brightness, torch.floor),  # Pillow truncates its blends
    "grayscale": _round_to_levels(grayscale, torch.floor),
    "invert": _round_to_levels(invert, torch.round),
    "solarize": _round_to_levels(solarize, torch.round),
    "posterize": _round_to_levels(posterize, torch.round),
    "equalize": _round_to_levels(equalize, torch.round),
    "blur": _round_to_levels(blur, torch.round),
}


class KorniaRunner(BatchRunner):
    """A runner for the records that Kornia supports: those for which `KorniaBackend.why_unsupported` returns None.

    Batches are processed in pieces: on the CPU, in pieces of the fastest size; on a GPU, in pieces as large as memory
    allows. Results do not depend on the size of pieces.
    """

    operations: ClassVar[Mapping[str, Operation]] = OPERATIONS

    def __init__(self, finish: Finish, device: torch.device) -> None:
        super().__init__(finish, device)
        self._gpu = None if device.type == "cpu" else Accelerator(device)
        # Kornia computes y = a · level + b as (level - mean) / std.
        scale, bias = np.array(finish.scale), np.array(finish.bias)
        self._mean = torch.tensor(-bias / scale, dtype=torch.float32, device=device)
        self._std = torch.tensor(1 / scale, dtype=torch.float32, device=device)

    def __call__(
        self,
        images: RaggedImages,
        program: Program,
        windows_tlhw: tuple[np.ndarray, ...],
        outputs: Outputs,
        late_program: Program | None = None,
    ) -> Program | None:
        free_bytes = None if self._gpu is None else self._gpu.free_bytes()
        if self._gpu is None:
            self.piece_size = images_per_piece(windows_tlhw, images.shapes, CPU_BYTES)
        elif free_bytes is not None:
            self.piece_size = images_per_piece(windows_tlhw, images.shapes, int(free_bytes * GPU_SHARE))
        return super().__call__(images, program, windows_tlhw, outputs, late_program)

    def _finish_levels(self, levels: torch.Tensor) -> torch.Tensor:
        float_levels = levels.to(torch.float32)
        return float_levels if self._finish.is_identity else normalize(float_levels, self._mean, self._std)

    def _flip(self, source: Source, record: Flip) -> Source:
        if not record.flipped.any():
            return source
        levels, flip = source.to_dense(), FLIPS[record.axis]
        if record.flipped.all():
            return Source.from_dense(flip(levels))
        index = upload(np.flatnonzero(record.flipped), levels.device)
        return Source.from_dense(levels.index_copy(0, index, flip(levels[index])))

    def _erase(self, levels: torch.Tensor, record: Erase, windows_tlhw: np.ndarray) -> torch.Tensor:
        constant = upload(np.array(record.numbers, np.uint8)[:, None, None], levels.device)
        for boxes_tlhw in clip_to_windows(record.boxes_tlhw, windows_tlhw).swapaxes(0, 1):
            top, left, height, width = boxes_tlhw.T
            bottom, right = top + height - 1, left + width - 1
            corners_xy = np.stack([left, top, right, top, right, bottom, left, bottom], axis=1).reshape(-1, 4, 2)
            # A box of height 0 has no pixels.
            mask = bbox_to_mask(upload(corners_xy.astype(np.float32), levels.device), levels.shape[3], levels.shape[2])
            levels = torch.where(mask[:, None] > 0, constant, levels)
        return levels

    def _warp_levels(
        self,
        levels: torch.Tensor,
        coefficients: np.ndarray,
        size: tuple[int, int],
        interpolation: str,
        fill: Sequence[float],
        corners: np.ndarray | None = None,
    ) -> torch.Tensor:
        n, _, *lengths = levels.shape
        if corners is None:
            corners = np.zeros((n, 2), np.int64)
        if interpolation == "nearest":
            points = nearest_pixels(levels, coefficients, size, corners)
            dtype, shift = torch.float32, 0.0
        else:
            points = mapped_points(levels, coefficients, size, corners)
            # In float32, points are off by about 3e-5 of a pixel, which moves one value in 100 to the level below.
            dtype, shift = torch.float64, 0.5
        is_inside = [(coords >= 0) & (coords < length) for coords, length in zip(points, lengths, strict=True)]
        is_inside = is_inside[0] & is_inside[1]
        # Points outside the image can be infinite or NaN, so they are replaced. All points are scaled to -1 … 1 here,
        # because Kornia would copy two numbers to the device to scale them, and wait for the copy.
        y, x = (
            torch.where(is_inside, coords - shift, 0).to(dtype).view(n, *size) * (2 / max(1, length - 1)) - 1
            for coords, length in zip(points, lengths, strict=True)
        )
        sampled = remap(
            levels.to(dtype), x, y, interpolation, "border", align_corners=True, normalized_coordinates=True
        )
        fill_levels = upload(np.asarray(fill, np.uint8).reshape(-1, 1, 1), levels.device)
        return torch.where(is_inside.view(n, 1, *size), torch.floor(sampled + GUARD).to(torch.uint8), fill_levels)


def images_per_piece(windows_tlhw: Sequence[np.ndarray], shapes: np.ndarray, nbytes: int) -> int:
    """Return how many images Kornia can process at a time in `nbytes` of memory. `windows_tlhw` has the images' windows
    at each step; `shapes` is int64 (n, 3)."""
    channels = max(3, int(shapes[:, 2].max()))  # a map's memory per pixel was measured with three channels
    num_levels = channels * max(int(windows[:, 2:].prod(axis=1).max()) for windows in windows_tlhw)
    return max(1, nbytes // max(1, num_levels * BYTES_PER_LEVEL))
