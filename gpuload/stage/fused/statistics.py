"""What contrast, equalize and autocontrast need to know of a whole image, made into tables of levels.

Two kernels, whatever the number of images: one counts how many pixels of each channel have each level; the other turns
these counts into the new level of each level (contrast's mean and autocontrast's ends come from them, too). Counts are
whole numbers, so they do not depend on the order of summation, and the tables are exactly those of the reference.

Runs in the process of the stage, on the current stream. The counts, 3 KB an image, live as long as the call.
"""

# Type checkers know neither how a kernel is launched nor that calls in kernels return.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from gpuload.stage.device import device_of
from gpuload.stage.reference.color import GUARD, LUMA
from gpuload.transforms.program.fusing.jobs import COUNTED
from gpuload.transforms.program.fusing.plan import portions
from gpuload.transforms.program.ops import code as code_of

__all__ = ["BLOCK", "JOB", "OPTIONS", "tables"]

_CONTRAST: Final = tl.constexpr(code_of("contrast"))
_EQUALIZE: Final = tl.constexpr(code_of("equalize"))
JOB: Final = COUNTED.itemsize // 8  # int64 numbers of a job
_JOB: Final = tl.constexpr(JOB)
_RED, _GREEN, _BLUE = map(tl.constexpr, LUMA)
_GUARD: Final = tl.constexpr(GUARD)

BLOCK: Final = 2048  # pixels that a program counts at once
OPTIONS: Final = {"num_warps": 2, "enable_fp_fusion": False}  # of the kernel that makes tables
ROUNDS: Final = 4  # how often it does so in the largest image, before it adds its 256 sums to memory


def tables(pixels: torch.Tensor, jobs: torch.Tensor, factors: torch.Tensor, most: int, channels: int) -> torch.Tensor:
    """The new level of each level of each channel.

    Args:
        pixels: uint8, one-dimensional, from which the first bytes of all images are counted.
        jobs: `COUNTED` (n,) as int64, n > 0, on the same device: sizes are not 0, codes those of `STATISTICS`
            (`gpuload.transforms.program.fusing.passes`).
        factors: float64 (n,), of contrast; not read for others.
        most: pixels of the largest image.
        channels: of all images, 1 or 3.

    Returns:
        uint8 (n, 3, 256), on the device of `pixels`; of one channel, its table three times.
    """
    n, device = len(factors), pixels.device
    result = torch.empty(n, 3, 256, dtype=torch.uint8, device=device)
    counts = torch.zeros(n, 3, 256, dtype=torch.int32, device=device)
    pieces = triton.cdiv(most, BLOCK * ROUNDS)
    with device_of(pixels):
        for portion in portions(n, programs=pieces):  # one large image among many small ones has many pieces for all
            portion_jobs = jobs[portion.start * JOB : portion.stop * JOB]
            _count[portion.stop - portion.start, pieces](
                pixels, portion_jobs, counts[portion], CHANNELS=channels, BLOCK=BLOCK
            )
        _tabulate[n, 3](counts, jobs, factors, result, CHANNELS=channels, **OPTIONS)
    return result


@triton.jit(do_not_specialize_on_alignment=["pixels_ptr"])  # which may be a user's own
def _count(pixels_ptr, jobs_ptr, counts_ptr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    """Add the counts of one part of an image to those of the image. Grid: jobs, parts."""
    job_ptr = jobs_ptr + tl.program_id(0) * _JOB
    image_ptr = pixels_ptr + tl.load(job_ptr)
    height, width = tl.load(job_ptr + 1).to(tl.int32), tl.load(job_ptr + 2).to(tl.int32)
    row_step, column_step, channel_step = tl.load(job_ptr + 4), tl.load(job_ptr + 5), tl.load(job_ptr + 6)
    levels = tl.arange(0, 256)
    if (channel_step == 1) & (column_step == CHANNELS) & (row_step == width * CHANNELS):
        reds, greens, blues = _counts(image_ptr, height, width, 0, CHANNELS, 1, CHANNELS, BLOCK, True)
    else:
        reds, greens, blues = _counts(
            image_ptr, height, width, row_step, column_step, channel_step, CHANNELS, BLOCK, False
        )
    sums_ptr = counts_ptr + tl.program_id(0) * 768 + levels
    tl.atomic_add(sums_ptr, reds, reds > 0, sem="relaxed")
    if CHANNELS == 3:
        tl.atomic_add(sums_ptr + 256, greens, greens > 0, sem="relaxed")
        tl.atomic_add(sums_ptr + 512, blues, blues > 0, sem="relaxed")


@triton.jit
def _counts(
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
    """The counts of this program's part of an image, int32 (256,) of each channel. DENSE: rows follow each other."""
    size = height * width
    reds = tl.zeros((256,), tl.int32)
    greens, blues = reds, reds
    at = tl.program_id(1) * BLOCK
    while at < size:
        places = at + tl.arange(0, BLOCK)
        there = places < size
        if DENSE:
            pixel_ptr = image_ptr + places.to(tl.int64) * column_step
        else:
            pixel_ptr = image_ptr + (places // width).to(tl.int64) * row_step + (places % width) * column_step
        reds += tl.histogram(tl.load(pixel_ptr, there, 0).to(tl.int32), 256, there)
        if CHANNELS == 3:
            greens += tl.histogram(tl.load(pixel_ptr + channel_step, there, 0).to(tl.int32), 256, there)
            blues += tl.histogram(tl.load(pixel_ptr + 2 * channel_step, there, 0).to(tl.int32), 256, there)
        at += tl.num_programs(1) * BLOCK
    return reds, greens, blues


@triton.jit(do_not_specialize_on_alignment=["factors_ptr"])  # on the CPU they are where they were made
def _tabulate(counts_ptr, jobs_ptr, factors_ptr, tables_ptr, CHANNELS: tl.constexpr):
    """Make one row of a table. Grid: jobs, 3."""
    job = tl.program_id(0)
    row = tl.program_id(1)
    code = tl.load(jobs_ptr + job * _JOB + 3)
    levels = tl.arange(0, 256)
    own_ptr = counts_ptr + job * 768 + levels
    counts = tl.load(own_ptr + (row * 256 if CHANNELS == 3 else 0))
    if code == _CONTRAST:
        size = tl.load(jobs_ptr + job * _JOB + 1) * tl.load(jobs_ptr + job * _JOB + 2)
        table = _contrast(own_ptr, levels, size, tl.load(factors_ptr + job), CHANNELS)
    elif code == _EQUALIZE:
        table = _equalize(counts, levels)
    else:
        table = _stretch(counts, levels)
    tl.store(tables_ptr + (job * 3 + row) * 256 + levels, table.to(tl.uint8))


@triton.jit
def _contrast(counts_ptr, levels, size, factor, CHANNELS: tl.constexpr):
    """`color.contrast`: a blend with the grey level of the mean colour, rounded."""
    total = _total(tl.load(counts_ptr), levels)
    if CHANNELS == 3:
        greens = _total(tl.load(counts_ptr + 256), levels)
        blues = _total(tl.load(counts_ptr + 512), levels)
        total = total * _RED + greens * _GREEN + blues * _BLUE
    mean = tl.floor(total / size.to(tl.float64) + 0.5)
    factor = factor.to(tl.float32)
    mean_share = 1.0 - factor.to(tl.float64)
    added = (mean * mean_share + tl.full((), _GUARD, tl.float64)).to(tl.float32)  # a plain constant would be a float32
    blend = levels.to(tl.float32) * factor + added
    return tl.minimum(tl.maximum(blend, 0.0), 255.0).to(tl.int32)


@triton.jit
def _total(counts, levels):
    return tl.sum(counts.to(tl.int64) * levels.to(tl.int64)).to(tl.float64)


@triton.jit
def _equalize(counts, levels):
    """`points.equalize_table`."""
    last = tl.max(tl.where(counts > 0, levels, 0))
    counted = tl.sum(tl.where(levels == last, 0, counts))
    step = counted // 255
    before = tl.cumsum(counts) - counts
    table = tl.minimum((before + step // 2) // tl.maximum(step, 1), 255)
    return tl.where(step > 0, table, levels)


@triton.jit
def _stretch(counts, levels):
    """`points.stretch_table`."""
    lowest = tl.min(tl.where(counts > 0, levels, 255)).to(tl.float64)
    span = tl.max(tl.where(counts > 0, levels, 0)).to(tl.float64) - lowest
    scale = tl.full((), 255.0, tl.float64) / tl.maximum(span, 1.0)
    stretched = levels.to(tl.float64) * scale + -lowest * scale
    table = tl.minimum(tl.maximum(stretched, 0.0), 255.0).to(tl.int32)  # truncated
    return tl.where(span > 0, table, levels)
