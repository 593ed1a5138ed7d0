"""MixUp and CutMix of finished images, in place, with one kernel for all pairs of a batch.

Both images of a pair need the other's original pixels, so a program reads a piece of both images before it writes
to either. The data of a pair specifies, for each image, whether the image is blended, pasted into, or unchanged. For
pasting, only the boxes are read.

This module runs in the stage's process, on the current stream. Batches are N×C×H×W in any memory format.
"""

# Type checkers do not understand how kernels are launched, nor that calls inside kernels return values.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Final

import numpy as np
import torch
import triton
import triton.language as tl

from gpuload.stage.device import upload, use_device_of
from gpuload.stage.finish import Outputs
from gpuload.stage.fused.pixels import round_to
from gpuload.transforms.program.fusing.plan import portions
from gpuload.transforms.program.ops import PartnerMix

__all__ = ["BLOCK", "OPTIONS", "mix"]

# A pair has the batch indices of two images and, for each image, the box to paste, and the bits of two float32 values:
# the shares of the image itself and of the other image. A box of height `BLENDED` means that the image is blended, and
# height 0 means that it is unchanged.
SIDE: Final = np.dtype([("box_tlhw", "i8", 4), ("shares", "i8", 2)])
PAIR: Final = np.dtype([("rows", "i8", 2), ("sides", SIDE, 2)])
BLENDED: Final = -1

LANES: Final = 16  # a thread can load this many elements at once, if an image's size is a multiple of this number
OPTIONS: Final = {"enable_fp_fusion": False}
BLOCK: Final = 2048  # elements of each image that a program processes

_SIDE: Final = tl.constexpr(SIDE.itemsize // 8)
_PAIR: Final = tl.constexpr(PAIR.itemsize // 8)
_LANES: Final = tl.constexpr(LANES)


def mix(outputs: Outputs, record: PartnerMix, partners: np.ndarray) -> None:
    """Mix finished images with each other, in place.

    Args:
        outputs: N×C×H×W, float32, float16, bfloat16 or uint8; contiguous or channels-last.
        record: the record with the random shares and boxes.
        partners: int64 (N,), the index of each image's partner, or the image's own index if it has no partner; partners
            are mutual.
    """
    assert isinstance(outputs, torch.Tensor), "only images of one size can be mixed"
    pairs = _make_pairs(record, partners)
    _, channels, height, width = outputs.shape
    count = channels * height * width
    if not len(pairs) or not count:
        return
    is_contiguous = outputs.is_contiguous()
    assert is_contiguous or outputs.is_contiguous(memory_format=torch.channels_last)
    with use_device_of(outputs):
        programs = triton.cdiv(count, BLOCK)
        for portion in portions(len(pairs), programs=programs):
            _mix[programs, portion.stop - portion.start](
                outputs,
                upload(pairs[portion].view(np.int64), outputs.device),
                height,
                width,
                CHANNELS=channels,
                CHANNELS_LAST=not is_contiguous,
                ALIGNED=count % LANES == 0,
                BLOCK=BLOCK,
                **OPTIONS,
            )


def _make_pairs(mix: PartnerMix, partners: np.ndarray) -> np.ndarray:
    """Return the pairs in which at least one image changes, `PAIR` (pairs,)."""
    sides = np.empty(len(partners), SIDE)
    sides["box_tlhw"] = mix.box_tlhw
    sides["shares"] = np.stack([mix.share, 1 - mix.share], axis=1).astype(np.float32).view(np.int32)
    heights = sides["box_tlhw"][:, 2]
    heights[heights <= 0] = np.where(mix.share == 1, 0, BLENDED)[heights <= 0]
    changes = heights != 0
    first_rows = np.flatnonzero((np.arange(len(partners)) < partners) & (changes | changes[partners]))
    pairs = np.empty(len(first_rows), PAIR)
    pairs["rows"] = np.stack([first_rows, partners[first_rows]], axis=1)
    pairs["sides"] = sides[pairs["rows"]]
    return pairs


# These arguments depend on the size of the results, which can change from epoch to epoch; see
# `gpuload.stage.fused.erasing`.
@triton.jit(do_not_specialize=["height", "width"])
def _mix(
    images_ptr,
    pairs_ptr,
    height,
    width,
    CHANNELS: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Mix a piece of a pair. Grid: (pieces, pairs). Elements are indexed in memory order. With `ALIGNED`, the size of
    an image is a multiple of `LANES`."""
    pair_ptr = pairs_ptr + tl.program_id(1) * _PAIR
    side1_ptr = pair_ptr + 2
    side2_ptr = side1_ptr + _SIDE
    indices = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    count = CHANNELS * height * width
    if ALIGNED:  # images then also begin at multiples of `LANES`, which allows wide loads
        count = tl.multiple_of(count, _LANES)
    is_inside = indices < count
    if CHANNELS_LAST:
        x, y = indices // CHANNELS % width, indices // CHANNELS // width
    else:
        x, y = indices % width, indices // width % height
    image1_ptrs = images_ptr + tl.load(pair_ptr) * count + indices
    image2_ptrs = images_ptr + tl.load(pair_ptr + 1) * count + indices
    image1_blends = tl.load(side1_ptr + 2) < 0
    image2_blends = tl.load(side2_ptr + 2) < 0
    if image1_blends & image2_blends:  # read both images completely, in wide loads
        image1 = tl.load(image1_ptrs, is_inside)
        image2 = tl.load(image2_ptrs, is_inside)
        tl.store(image1_ptrs, _blend(image1, image2, side1_ptr), is_inside)
        tl.store(image2_ptrs, _blend(image2, image1, side2_ptr), is_inside)
    else:
        image1_changes = is_inside & (image1_blends | _is_inside_box(y, x, side1_ptr))
        image2_changes = is_inside & (image2_blends | _is_inside_box(y, x, side2_ptr))
        image1 = tl.load(image1_ptrs, image1_changes | image2_changes, 0)
        image2 = tl.load(image2_ptrs, image1_changes | image2_changes, 0)
        if image1_blends:
            tl.store(image1_ptrs, _blend(image1, image2, side1_ptr), is_inside)
        else:
            tl.store(image1_ptrs, image2, image1_changes)
        if image2_blends:
            tl.store(image2_ptrs, _blend(image2, image1, side2_ptr), is_inside)
        else:
            tl.store(image2_ptrs, image1, image2_changes)


@triton.jit
def _blend(image, other, side_ptr):
    """Blend an image with another; both products are rounded before they are added."""
    image_share = tl.load(side_ptr + 4).to(tl.int32).to(tl.float32, bitcast=True)
    other_share = tl.load(side_ptr + 5).to(tl.int32).to(tl.float32, bitcast=True)
    return round_to(other.to(tl.float32) * other_share + image.to(tl.float32) * image_share, image.dtype)


@triton.jit
def _is_inside_box(y, x, box_ptr):
    box_y = y - tl.load(box_ptr)
    box_x = x - tl.load(box_ptr + 1)
    return (box_y >= 0) & (box_y < tl.load(box_ptr + 2)) & (box_x >= 0) & (box_x < tl.load(box_ptr + 3))
