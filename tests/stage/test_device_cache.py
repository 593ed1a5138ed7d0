"""The pixels of a `DeviceCached`: windows come out of the memory as they went in, on the host and on a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gpuload.stage import device_cache
from gpuload.stage.device_cache import PixelMemory
from gpuload.workers.device_cache import WINDOW, total_pixel_bytes

ALIGN = 64


def filled(images: list[np.ndarray], segment_bytes: int | None) -> tuple[PixelMemory, list[int]]:
    memory = PixelMemory(torch.device("cpu"))
    if segment_bytes is not None:
        memory.reserve(segment_bytes)
    return memory, [memory.add(image.reshape(-1)) for image in images]


def windows_of(images: list[np.ndarray], starts: list[int], regions: list[tuple[int, int, int, int]]) -> np.ndarray:
    windows, at = [], 0
    for image, start, (top, left, height, width) in zip(images, starts, regions, strict=True):
        step, pixel = image.shape[1] * image.shape[2], image.shape[2]
        windows.append((start + top * step + left * pixel, height, width * pixel, step, at))
        at += -(-height * width * pixel // ALIGN) * ALIGN
    return np.array(windows, WINDOW)


@pytest.fixture
def images() -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    shapes = [(9, 7, 3), (30, 41, 3), (5, 5, 1), (16, 16, 4), (64, 50, 3), (1, 1, 3)]
    return [rng.integers(0, 256, shape, dtype=np.uint8) for shape in shapes]


REGIONS = [(0, 0, 9, 7), (3, 5, 20, 11), (1, 1, 4, 4), (0, 4, 16, 3), (60, 0, 4, 50), (0, 0, 1, 1)]


@pytest.mark.parametrize("segment_bytes", [None, 5000, 1 << 16])
@pytest.mark.parametrize("small", [True, False])
def test_windows_are_those_of_the_images(images, segment_bytes, small, monkeypatch):
    monkeypatch.setattr(device_cache, "MIN_SEGMENT_BYTES", ALIGN)
    monkeypatch.setattr(device_cache, "SMALL_BYTES", 1 << 20 if small else 0)
    monkeypatch.setattr(device_cache, "GATHER_BYTES", 600)
    memory, starts = filled(images, segment_bytes)
    assert (len(memory._segments) == 1) == (segment_bytes == 1 << 16)
    order = [4, 0, 5, 3, 1, 2]  # not that of the memory
    mixed: list[Any] = [[own[number] for number in order] for own in (images, starts, REGIONS)]
    windows = windows_of(*mixed)
    on_host = np.zeros(total_pixel_bytes(windows), np.uint8)
    memory.copy(windows, on_host)
    on_device = torch.zeros(total_pixel_bytes(windows), dtype=torch.uint8)
    memory.copy(windows, on_device)
    for image, (top, left, height, width), (_, _, _, _, at) in zip(mixed[0], mixed[2], windows.tolist(), strict=True):
        expected = image[top : top + height, left : left + width].tobytes()
        assert on_host[at : at + len(expected)].tobytes() == expected
        assert on_device[at : at + len(expected)].numpy().tobytes() == expected


def test_a_window_at_the_very_end_is_read_to_its_end_and_no_further():
    image = np.arange(1024, dtype=np.uint8).reshape(16, 16, 4)
    memory, starts = filled([image], image.nbytes)
    windows = windows_of([image], starts, [(13, 12, 3, 4)])  # 48 bytes, and up to the next window 16 more
    out = torch.zeros(64, dtype=torch.uint8)
    memory.copy(windows, out)
    assert out[:48].numpy().tobytes() == image[13:, 12:].tobytes()


def test_it_takes_what_was_reserved_and_counts_what_is_used(images):
    memory, starts = filled(images[:1], 1024)
    assert (memory.nbytes, memory.used_bytes, starts) == (1024, 192, [0])  # 9 × 7 × 3 = 189
    assert memory.add(images[2].reshape(-1)) == 192
