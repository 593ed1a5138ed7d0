"""MixUp and CutMix of finished images, in place: one kernel for all pairs of a batch.

Each of a pair needs the other as it was, so a program reads a piece of both before it writes either. What is done to
each is data: it is blended, pasted into, or left as it is. For pasting, only the boxes are read.

Runs in the process of the stage, on the current stream. Batches are N×C×H×W in any memory format.
"""

# Type checkers know neither how a kernel is launched nor that calls in kernels return.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Final

import numpy as np
import torch
import triton
import triton.language as tl

from gpuload.stage.device import device_of, upload
from gpuload.stage.finish import Outputs
from gpuload.stage.fused.pixels import round_to
from gpuload.transforms.program.fusing.plan import portions
from gpuload.transforms.program.ops import Mix

__all__ = ["BLOCK", "OPTIONS", "mix"]

# A pair: the two rows, and for each image the box that is pasted, and the bits of two float32, the shares of the image
# itself and of the other. Height `BLENDED`: it is blended; 0: it is left as it is.
SIDE: Final = np.dtype([("box_tlhw", "i8", 4), ("shares", "i8", 2)])
PAIR: Final = np.dtype([("rows", "i8", 2), ("sides", SIDE, 2)])
BLENDED: Final = -1

LANES: Final = 16  # numbers that a thread may read at once, if there is a multiple of them
OPTIONS: Final = {"enable_fp_fusion": False}
BLOCK: Final = 2048  # numbers of each image that a program works on

_SIDE: Final = tl.constexpr(SIDE.itemsize // 8)
_PAIR: Final = tl.constexpr(PAIR.itemsize // 8)
_LANES: Final = tl.constexpr(LANES)


def mix(outputs: Outputs, mix: Mix, partners: np.ndarray) -> None:
    """Mix finished images with each other, in place.

    Args:
        outputs: N×C×H×W, of float32, float16, bfloat16 or uint8.
        mix: what was drawn for each.
        partners: int64 (N,), the row of each image's partner, its own where it has none; two are each other's.
    """
    assert isinstance(outputs, torch.Tensor), "images are mixed in a batch of one size"
    pairs = _pairs(mix, partners)
    _, channels, height, width = outputs.shape
    count = channels * height * width
    if not len(pairs) or not count:
        return
    last = outputs.is_contiguous(memory_format=torch.channels_last)
    with device_of(outputs):
        programs = triton.cdiv(count, BLOCK)
        for portion in portions(len(pairs), programs=programs):
            _mix[programs, portion.stop - portion.start](
                outputs,
                upload(pairs[portion].view(np.int64), outputs.device),
                height,
                width,
                *outputs.stride(),
                CHANNELS=channels,
                DENSE=last or outputs.is_contiguous(),
                CHANNELS_LAST=last and not outputs.is_contiguous(),
                WHOLE=count % LANES == 0,
                BLOCK=BLOCK,
                **OPTIONS,
            )


def _pairs(mix: Mix, partners: np.ndarray) -> np.ndarray:
    """Return `PAIR` (pairs,), without those in which neither image changes."""
    sides = np.empty(len(partners), SIDE)
    sides["box_tlhw"] = mix.box_tlhw
    sides["shares"] = np.stack([mix.share, 1 - mix.share], axis=1).astype(np.float32).view(np.int32)
    heights = sides["box_tlhw"][:, 2]
    heights[heights <= 0] = np.where(mix.share == 1, 0, BLENDED)[heights <= 0]
    changes = heights != 0
    first = np.flatnonzero((np.arange(len(partners)) < partners) & (changes | changes[partners]))
    pairs = np.empty(len(first), PAIR)
    pairs["rows"] = np.stack([first, partners[first]], axis=1)
    pairs["sides"] = sides[pairs["rows"]]
    return pairs


# These depend on the size of the results, which may change from epoch to epoch; see `gpuload.stage.fused.erasing`.
@triton.jit(do_not_specialize=["height", "width", "image_stride", "channel_stride", "row_stride", "column_stride"])
def _mix(
    images_ptr,
    pairs_ptr,
    height,
    width,
    image_stride,
    channel_stride,
    row_stride,
    column_stride,
    CHANNELS: tl.constexpr,
    DENSE: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Mix a piece of a pair. Grid: pieces, pairs. If `DENSE`, numbers are counted in their order in memory; if `WHOLE`,
    there is a multiple of `LANES` of them."""
    pair_ptr = pairs_ptr + tl.program_id(1) * _PAIR
    one_ptr = pair_ptr + 2
    two_ptr = one_ptr + _SIDE
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    count = CHANNELS * height * width
    if WHOLE:
        count = tl.multiple_of(count, _LANES)
        # Images begin at multiples of it, too, if they are dense: so they are read in wide loads.
        image_stride = tl.multiple_of(image_stride, _LANES if DENSE else 1)
    there = places < count
    if CHANNELS_LAST:
        channel, x, y = places % CHANNELS, places // CHANNELS % width, places // CHANNELS // width
    else:
        x, y, channel = places % width, places // width % height, places // width // height
    if DENSE:
        offsets = places
    else:
        offsets = channel.to(tl.int64) * channel_stride + y.to(tl.int64) * row_stride + x.to(tl.int64) * column_stride
    one_places = images_ptr + tl.load(pair_ptr) * image_stride + offsets
    two_places = images_ptr + tl.load(pair_ptr + 1) * image_stride + offsets
    one_blends = tl.load(one_ptr + 2) < 0
    two_blends = tl.load(two_ptr + 2) < 0
    if one_blends & two_blends:  # all of both, in wide loads
        one = tl.load(one_places, there)
        two = tl.load(two_places, there)
        tl.store(one_places, _blend(one, two, one_ptr), there)
        tl.store(two_places, _blend(two, one, two_ptr), there)
    else:
        one_changes = there & (one_blends | _inside(y, x, one_ptr))
        two_changes = there & (two_blends | _inside(y, x, two_ptr))
        one = tl.load(one_places, one_changes | two_changes, 0)
        two = tl.load(two_places, one_changes | two_changes, 0)
        if one_blends:
            tl.store(one_places, _blend(one, two, one_ptr), there)
        else:
            tl.store(one_places, two, one_changes)
        if two_blends:
            tl.store(two_places, _blend(two, one, two_ptr), there)
        else:
            tl.store(two_places, one, two_changes)


@triton.jit
def _blend(image, other, side_ptr):
    """The sum of two products, each rounded by itself."""
    ours = tl.load(side_ptr + 4).to(tl.int32).to(tl.float32, bitcast=True)
    other_share = tl.load(side_ptr + 5).to(tl.int32).to(tl.float32, bitcast=True)
    return round_to(other.to(tl.float32) * other_share + image.to(tl.float32) * ours, image.dtype)


@triton.jit
def _inside(y, x, box_ptr):
    down = y - tl.load(box_ptr)
    across = x - tl.load(box_ptr + 1)
    return (down >= 0) & (down < tl.load(box_ptr + 2)) & (across >= 0) & (across < tl.load(box_ptr + 3))
