"""Tables of new pixel values for contrast, equalize and autocontrast, which depend on statistics of the entire image.

Two kernels run, whatever the number of images: one counts how many pixels of each channel have each level; the other
turns these counts into a table with the new level for each level (contrast's mean and autocontrast's limits are also
computed from the counts). Counts are integers, so they do not depend on the order of summation, and the tables are
exactly the reference's.

This module runs in the stage's process, on the current stream. The counts, 3 KB per image, live as long as the call.
"""

# Type checkers do not understand how kernels are launched, nor that calls inside kernels return values.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from gpuload.stage.device import use_device_of
from gpuload.stage.fused.launching import batch_kernel
from gpuload.stage.reference.color import GUARD, LUMA
from gpuload.transforms.program.fusing.jobs import COUNTED
from gpuload.transforms.program.fusing.plan import portions
from gpuload.transforms.program.ops import code as code_of

__all__ = ["BLOCK", "JOB_LENGTH", "OPTIONS", "make_level_tables"]

_CONTRAST: Final = tl.constexpr(code_of("contrast"))
_EQUALIZE: Final = tl.constexpr(code_of("equalize"))
JOB_LENGTH: Final = COUNTED.itemsize // 8  # int64 numbers per job
_JOB: Final = tl.constexpr(JOB_LENGTH)
_RED, _GREEN, _BLUE = map(tl.constexpr, LUMA)
_GUARD: Final = tl.constexpr(GUARD)

BLOCK: Final = 2048  # pixels that a program counts at a time
OPTIONS: Final = {"num_warps": 2, "enable_fp_fusion": False}  # for the kernel that makes tables
ROUNDS: Final = 4  # blocks that a program counts in the largest image before it adds its 256 sums to memory


def make_level_tables(
    pixels: torch.Tensor, jobs: torch.Tensor, factors: torch.Tensor, max_pixels: int, channels: int
) -> torch.Tensor:
    """Compute the tables, which have the new level for each level of each channel.

    Args:
        pixels: uint8, one-dimensional; the images' offsets are relative to its first byte.
        jobs: `COUNTED` (n,) as int64, n > 0, on the same device; sizes must not be 0, and codes must be in `STATISTICS`
            (`gpuload.transforms.program.fusing.passes`).
        factors: float64 (n,), the factors of contrast; not read for other operations.
        max_pixels: the number of pixels of the largest image.
        channels: the number of channels of all images, 1 or 3.

    Returns:
        The tables, uint8 (n, 3, 256), on the device of `pixels`; with one channel, the same table three times.
    """
    n, device = len(factors), pixels.device
    result = torch.empty(n, 3, 256, dtype=torch.uint8, device=device)
    counts = torch.zeros(n, 3, 256, dtype=torch.int32, device=device)
    pieces = triton.cdiv(max_pixels, BLOCK * ROUNDS)
    with use_device_of(pixels):
        for portion in portions(n, programs=pieces):  # the largest image determines the number of pieces of all images
            portion_jobs = jobs[portion.start * JOB_LENGTH : portion.stop * JOB_LENGTH]
            _count[portion.stop - portion.start, pieces](
                pixels, portion_jobs, counts[portion], CHANNELS=channels, BLOCK=BLOCK
            )
        _tabulate[n, 3](counts, jobs, factors, result, CHANNELS=channels, **OPTIONS)
    return result


@batch_kernel(do_not_specialize_on_alignment=["pixels_ptr"])  # this can point to a user's memory
def _count(pixels_ptr, jobs_ptr, counts_ptr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    """Count the levels in one piece of an image, and add the counts to the image's counts. Grid: (jobs, pieces)."""
    job_ptr = jobs_ptr + tl.program_id(0) * _JOB
    image_ptr = pixels_ptr + tl.load(job_ptr)
    height, width = tl.load(job_ptr + 1).to(tl.int32), tl.load(job_ptr + 2).to(tl.int32)
    row_step, column_step, channel_step = tl.load(job_ptr + 4), tl.load(job_ptr + 5), tl.load(job_ptr + 6)
    levels = tl.arange(0, 256)
    if (channel_step == 1) & (column_step == CHANNELS) & (row_step == width * CHANNELS):
        reds, greens, blues = _count_levels(image_ptr, height, width, 0, CHANNELS, 1, CHANNELS, BLOCK, True)
    else:
        reds, greens, blues = _count_levels(
            image_ptr, height, width, row_step, column_step, channel_step, CHANNELS, BLOCK, False
        )
    sums_ptr = counts_ptr + tl.program_id(0) * 768 + levels
    tl.atomic_add(sums_ptr, reds, reds > 0, sem="relaxed")
    if CHANNELS == 3:
        tl.atomic_add(sums_ptr + 256, greens, greens > 0, sem="relaxed")
        tl.atomic_add(sums_ptr + 512, blues, blues > 0, sem="relaxed")


@triton.jit
def _count_levels(
    image_ptr,
    height,
    width,
    row_step,
    column_step,
    channel_step,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    DENSE: tl.constexpr,
):
    """Count the levels in this program's part of an image, int32 (256,) per channel. DENSE means that there are no gaps
    between rows."""
    size = height * width
    reds = tl.zeros((256,), tl.int32)
    greens, blues = reds, reds
    start = tl.program_id(1) * BLOCK
    while start < size:
        indices = start + tl.arange(0, BLOCK)
        is_inside = indices < size
        if DENSE:
            pixel_ptr = image_ptr + indices.to(tl.int64) * column_step
        else:
            pixel_ptr = image_ptr + (indices // width).to(tl.int64) * row_step + (indices % width) * column_step
        reds += tl.histogram(tl.load(pixel_ptr, is_inside, 0).to(tl.int32), 256, is_inside)
        if CHANNELS == 3:
            greens += tl.histogram(tl.load(pixel_ptr + channel_step, is_inside, 0).to(tl.int32), 256, is_inside)
            blues += tl.histogram(tl.load(pixel_ptr + 2 * channel_step, is_inside, 0).to(tl.int32), 256, is_inside)
        start += tl.num_programs(1) * BLOCK
    return reds, greens, blues


@batch_kernel(do_not_specialize_on_alignment=["factors_ptr"])  # on the CPU, factors are not copied to aligned memory
def _tabulate(counts_ptr, jobs_ptr, factors_ptr, tables_ptr, CHANNELS: tl.constexpr):
    """Compute the table of one channel. Grid: (jobs, 3)."""
    job = tl.program_id(0)
    channel = tl.program_id(1)
    code = tl.load(jobs_ptr + job * _JOB + 3)
    levels = tl.arange(0, 256)
    job_counts_ptr = counts_ptr + job * 768 + levels
    counts = tl.load(job_counts_ptr + (channel * 256 if CHANNELS == 3 else 0))
    if code == _CONTRAST:
        size = tl.load(jobs_ptr + job * _JOB + 1) * tl.load(jobs_ptr + job * _JOB + 2)
        table = _contrast(job_counts_ptr, levels, size, tl.load(factors_ptr + job), CHANNELS)
    elif code == _EQUALIZE:
        table = _equalize(counts, levels)
    else:
        table = _stretch(counts, levels)
    tl.store(tables_ptr + (job * 3 + channel) * 256 + levels, table.to(tl.uint8))


@triton.jit
def _contrast(counts_ptr, levels, size, factor, CHANNELS: tl.constexpr):
    """Compute the table for `color.contrast`, a blend with the rounded grey level of the mean colour."""
    total = _total(tl.load(counts_ptr), levels)
    if CHANNELS == 3:
        greens = _total(tl.load(counts_ptr + 256), levels)
        blues = _total(tl.load(counts_ptr + 512), levels)
        total = total * _RED + greens * _GREEN + blues * _BLUE
    mean = tl.floor(total / size.to(tl.float64) + 0.5)
    factor = factor.to(tl.float32)
    mean_share = 1.0 - factor.to(tl.float64)
    # A plain constant would be a float32.
    summand = (mean * mean_share + tl.full((), _GUARD, tl.float64)).to(tl.float32)
    blend = levels.to(tl.float32) * factor + summand
    return tl.minimum(tl.maximum(blend, 0.0), 255.0).to(tl.int32)


@triton.jit
def _total(counts, levels):
    return tl.sum(counts.to(tl.int64) * levels.to(tl.int64)).to(tl.float64)


@triton.jit
def _equalize(counts, levels):
    """Compute the table of `color.equalize_table`."""
    last_level = tl.max(tl.where(counts > 0, levels, 0))
    total = tl.sum(tl.where(levels == last_level, 0, counts))
    step = total // 255
    lower_counts = tl.cumsum(counts) - counts
    table = tl.minimum((lower_counts + step // 2) // tl.maximum(step, 1), 255)
    return tl.where(step > 0, table, levels)


@triton.jit
def _stretch(counts, levels):
    """Compute the table of `color.stretch_table`."""
    lowest = tl.min(tl.where(counts > 0, levels, 255)).to(tl.float64)
    span = tl.max(tl.where(counts > 0, levels, 0)).to(tl.float64) - lowest
    scale = tl.full((), 255.0, tl.float64) / tl.maximum(span, 1.0)
    stretched = levels.to(tl.float64) * scale + -lowest * scale
    table = tl.minimum(tl.maximum(stretched, 0.0), 255.0).to(tl.int32)  # truncated
    return tl.where(span > 0, table, levels)
