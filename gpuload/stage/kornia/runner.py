"""Kornia's runner on levels: the reference's runner for batches, with Kornia's operators in place of its own.

Crops and padding stay the reference's, since they copy pixels and compute nothing. Images of one size go together, so
each of Kornia's functions is called once for all images that it is drawn for; if sizes differ between two transforms,
images are taken one by one. Runs on any device, in the process of the stage; nothing is kept from call to call.

Levels are uint8 N×C×H×W where they are moved, and float32 in operations. Results of operations are rounded to levels.
If several functions of Kornia have the name of an operation, the one that means the same as Pillow's is used, such as
`adjust_brightness_accumulative`, which multiplies, where `adjust_brightness` adds.

A map is given to `remap` as points. `warp_affine` and `warp_perspective` would take a matrix and invert it, and find
the nearest pixel in floats, where Pillow uses 16.16 fixed point: 7 pixels of 10,000 would differ. And they blend the
fill with the image along its border, up to 124 levels from Pillow, which does not.
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

from gpuload.stage.device import Accelerator, upload, upload_together
from gpuload.stage.finish import Finish, Outputs
from gpuload.stage.ragged import RaggedImages
from gpuload.stage.reference.batched import BatchRunner
from gpuload.stage.reference.blur import mirrored
from gpuload.stage.reference.color import LUMA
from gpuload.stage.reference.gather import Source
from gpuload.stage.reference.operations import Operation
from gpuload.stage.reference.warp import mapped_points, nearest_pixels
from gpuload.transforms.program.draws import Program
from gpuload.transforms.program.ops import Erase, Flip
from gpuload.transforms.program.windows import boxes_within

__all__ = ["OPERATIONS", "KorniaRunner", "images_at_once"]

# What a level of an image needs while the image goes through Kornia, in bytes: 42 were counted in a blur, which works
# in float64, and 39 in a bilinear map.
BYTES_PER_LEVEL: Final = 64
# For a piece on the CPU: 10 images of 224×224. Kornia makes a new tensor at each step; these fit into memory that the
# process has, where 64 images get new memory from the system each time, and take 1.2 to 3.3 times as long.
CPU_BYTES: Final = 100_000_000
GPU_SHARE: Final = 0.5  # for a piece, of what torch may still take: training takes from it at the same time

WHITE: Final = 255.0
GUARD: Final = 1e-9  # a sum of products in float64 may be below the whole number that it should be
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
    """Invert levels from a threshold on, which is moved between two levels, where rounding does not matter."""
    thresholds = (np.ceil(values[:, 0]) - 0.5) / WHITE
    return kornia_solarize(levels / WHITE, upload(thresholds, levels.device).to(levels.dtype)) * WHITE


def posterize(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    return kornia_posterize(levels / WHITE, upload(values[:, 0].astype(np.int64), levels.device)) * WHITE


def equalize(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    return kornia_equalize(levels / WHITE) * WHITE


def blur(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Blur with kernels of one size and mirrored borders, in float64, so that TF32 with its 10 bits is never used.

    These are the two steps of Kornia's `gaussian_blur2d`, which would wait for a device, and whose way on the CPU
    depends on how many images there are.
    """
    numbers = levels.to(torch.float64)
    [[width, height]] = np.unique(values[:, :2].astype(np.int64), axis=0).tolist()
    sigmas_xy = torch.from_numpy(values[:, 2:4].copy())
    kernels = [get_gaussian_kernel1d(size, sigmas_xy[:, [axis]]) for axis, size in enumerate((width, height))]
    across, down = upload_together([kernel.numpy() for kernel in kernels], levels.device)
    rows, columns = numbers.shape[2:]
    if height // 2 < rows and width // 2 < columns:
        return filter2d_separable(numbers, across, down, "reflect")
    # An image smaller than its kernel is mirrored more than once, which torch's padding does not do.
    numbers = numbers.index_select(2, upload(mirrored(rows, height // 2), levels.device))
    numbers = numbers.index_select(3, upload(mirrored(columns, width // 2), levels.device))
    return filter2d_separable(numbers, across, down, padding="valid")


def _to_levels(function: Operation, rounded: Callable[[torch.Tensor], torch.Tensor]) -> Operation:
    def operation(levels: torch.Tensor, values: np.ndarray) -> torch.Tensor:
        return rounded(function(levels, values)).clamp(0, 255).to(levels.dtype)

    return operation


OPERATIONS: Final[dict[str, Operation]] = {
    "brightness": _to_levels(brightness, torch.floor),  # Pillow truncates its blends
    "grayscale": _to_levels(grayscale, torch.floor),
    "invert": _to_levels(invert, torch.round),
    "solarize": _to_levels(solarize, torch.round),
    "posterize": _to_levels(posterize, torch.round),
    "equalize": _to_levels(equalize, torch.round),
    "blur": _to_levels(blur, torch.round),
}


class KorniaRunner(BatchRunner):
    """Applies the records that `KorniaBackend.lacks` does not leave to the reference.

    Images go in pieces: on the CPU of the size that is fastest, on a GPU of as many as memory allows. Results do not
    depend on it.
    """

    operations: ClassVar[Mapping[str, Operation]] = OPERATIONS

    def __init__(self, finish: Finish, device: torch.device) -> None:
        super().__init__(finish, device)
        self._gpu = None if device.type == "cpu" else Accelerator(device)
        # y = a · level + b as Kornia has it: (level - mean) / std.
        scale, bias = np.array(finish.scale), np.array(finish.bias)
        self._mean = torch.tensor(-bias / scale, dtype=torch.float32, device=device)
        self._std = torch.tensor(1 / scale, dtype=torch.float32, device=device)

    def __call__(
        self,
        images: RaggedImages,
        program: Program,
        windows_tlhw: tuple[np.ndarray, ...],
        outputs: Outputs,
        on_finished: Program | None = None,
    ) -> Program | None:
        free_bytes = None if self._gpu is None else self._gpu.free_bytes()
        if self._gpu is None:
            self.piece = images_at_once(windows_tlhw, images.shapes, CPU_BYTES)
        elif free_bytes is not None:
            self.piece = images_at_once(windows_tlhw, images.shapes, int(free_bytes * GPU_SHARE))
        return super().__call__(images, program, windows_tlhw, outputs, on_finished)

    def _finished(self, levels: torch.Tensor) -> torch.Tensor:
        numbers = levels.to(torch.float32)
        return numbers if self._finish.is_identity else normalize(numbers, self._mean, self._std)

    def _flip(self, source: Source, record: Flip) -> Source:
        if not record.flipped.any():
            return source
        levels, flip = source.dense(), FLIPS[record.axis]
        if record.flipped.all():
            return Source.of_dense(flip(levels))
        index = upload(np.flatnonzero(record.flipped), levels.device)
        return Source.of_dense(levels.index_copy(0, index, flip(levels[index])))

    def _erase(self, levels: torch.Tensor, record: Erase, windows_tlhw: np.ndarray) -> torch.Tensor:
        constant = upload(np.array(record.numbers, np.uint8)[:, None, None], levels.device)
        for boxes_tlhw in boxes_within(record.boxes_tlhw, windows_tlhw).swapaxes(0, 1):
            top, left, height, width = boxes_tlhw.T
            bottom, right = top + height - 1, left + width - 1
            corners_xy = np.stack([left, top, right, top, right, bottom, left, bottom], axis=1).reshape(-1, 4, 2)
            # A box of height 0 has no pixels.
            mask = bbox_to_mask(upload(corners_xy.astype(np.float32), levels.device), levels.shape[3], levels.shape[2])
            levels = torch.where(mask[:, None] > 0, constant, levels)
        return levels

    def _warped(
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
            # In float32 points are off by some 3e-5 of a pixel, which puts one number in 100 to the level below.
            dtype, shift = torch.float64, 0.5
        inside = [(axis >= 0) & (axis < length) for axis, length in zip(points, lengths, strict=True)]
        inside = inside[0] & inside[1]
        # Points outside may be infinite or NaN. The others are scaled to -1 … 1 here, since Kornia would copy two
        # numbers to the device for that, and wait for it.
        y, x = (
            torch.where(inside, axis - shift, 0).to(dtype).view(n, *size) * (2 / max(1, length - 1)) - 1
            for axis, length in zip(points, lengths, strict=True)
        )
        sampled = remap(
            levels.to(dtype), x, y, interpolation, "border", align_corners=True, normalized_coordinates=True
        )
        outside = upload(np.asarray(fill, np.uint8).reshape(-1, 1, 1), levels.device)
        return torch.where(inside.view(n, 1, *size), torch.floor(sampled + GUARD).to(torch.uint8), outside)


def images_at_once(windows_tlhw: Sequence[np.ndarray], shapes: np.ndarray, nbytes: int) -> int:
    """Return how many images with these windows on their way, and shapes int64 (n, 3), go through Kornia together in
    so much memory."""
    channels = max(3, int(shapes[:, 2].max()))  # what a map has for each pixel is in the figure for three
    levels = channels * max(int(windows[:, 2:].prod(axis=1).max()) for windows in windows_tlhw)
    return max(1, nbytes // max(1, levels * BYTES_PER_LEVEL))
