"""Files of many kinds, mostly JPEGs, and the batches of a loader that decodes them."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from helpers.generated_images import jpeg_bytes, smooth_image
from PIL import Image

import gpuload as gl
from gpuload import transforms as T

CROPS = [T.RandomResizedCrop(24), T.RandomHorizontalFlip()]


def photo(number: int, height: int = 50, width: int = 70, **options: Any) -> bytes:
    return jpeg_bytes(smooth_image(height + number, width - number, number), **options)


def patched(data: bytes, offset: int, *values: int) -> bytes:
    return data[:offset] + bytes(values) + data[offset + len(values) :]


def sof_offset(data: bytes) -> int:
    return data.index(b"\xff\xc0")


def damaged(data: bytes) -> bytes:
    """Return the file with wrong restart markers in the middle of its scan."""
    middle = (data.index(b"\xff\xda") + len(data)) // 2
    return patched(data, middle, *b"\xff\xd5\xff\xd6\xff\xd7")


def without_tables(data: bytes) -> bytes:
    """Return the file without quantization tables: no decoder accepts it, and its header does not show that."""
    while (offset := data.find(b"\xff\xdb")) >= 0:
        data = data[:offset] + data[offset + 2 + int.from_bytes(data[offset + 2 : offset + 4], "big") :]
    return data


def saved(number: int, mode: str, format: str = "JPEG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(smooth_image(50, 60, number)).convert(mode).save(file, format)
    return file.getvalue()


def gray(number: int) -> bytes:
    return saved(number, "L")


# Kinds of files, and where they are decoded: on the device, on the CPU if the device refuses, by a worker, or nowhere.
KINDS: dict[str, tuple[Callable[[int], bytes], str]] = {
    "plain": (photo, "device"),
    "4:4:4": (lambda number: photo(number, subsampling=0), "device"),
    "restart markers": (lambda number: photo(number, restart_marker_blocks=2), "device"),
    "gray": (gray, "device"),
    "many scans": (lambda number: photo(number, progressive=True), "worker"),
    "CMYK": (lambda number: saved(number, "CMYK"), "worker"),
    "PNG": (lambda number: saved(number, "RGB", "PNG"), "worker"),
    "arithmetic": (lambda number: patched(photo(number), sof_offset(photo(number)) + 1, 0xC9), "worker"),
    "12 bits": (lambda number: patched(photo(number), sof_offset(photo(number)) + 4, 12), "nobody"),
    "cut off": (lambda number: photo(number)[:-700], "nobody"),
    "damaged in the middle": (lambda number: damaged(photo(number)), "refused"),
    "wrong height in the header": (
        lambda number: patched(photo(number), sof_offset(photo(number)) + 5, 0, 200),
        "refused",
    ),
    "no tables": (lambda number: without_tables(photo(number)), "nobody after the device"),
    "no image": (lambda number: b"no image", "nobody"),
}


class Photos:
    """A dataset of encoded files, with their indices as labels."""

    def __init__(self, files: list[bytes], mode: Any = "RGB") -> None:
        self.files, self.mode = files, mode

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        return gl.Encoded(self.files[index], mode=self.mode, source=f"{index}.jpg"), index


def make_loader(dataset: Any, **overrides: Any) -> gl.Loader:
    options = {"batch_size": 5, "shuffle": True, "transforms": CROPS, "num_workers": 0, "device": "cpu", "info": True}
    return gl.Loader(dataset, **options | overrides)


def read_batches(dataset: Any, *, resumed: bool = False, **options: Any) -> tuple[list[Any], list[Any], gl.Loader]:
    """Read an epoch; return its batches, its failures by position, and the loader.

    If `resumed`, a second loader continues after two batches of the first.
    """
    batches, errors, state = [], [], None
    for is_second_part in (False, True)[: 1 + resumed]:
        with make_loader(dataset, **options) as loader:
            if state is not None:
                loader.load_state_dict(state)
            for (images, labels), info in loader:
                batches.append((images.clone(), labels.tolist(), info.positions.tolist()))
                state = loader.state_dict()
                if resumed and not is_second_part and len(batches) == 2:
                    break
        # the first loader has also read ahead, beyond its two batches of five
        errors += [error for error in loader.errors if is_second_part or not resumed or error.position < 2 * 5]
    failures = sorted(
        (error.position, error.index, error.source, error.cause, error.kinds, error.replaced_by or -1)
        for error in errors
    )
    return batches, failures, loader


def assert_same(decoded: Any, expected: Any) -> None:
    """Check that two results of `read_batches` have the same batches and failures."""
    (batches, failures, *_), (expected_batches, expected_failures, *_) = decoded, expected
    for (images, *columns), (expected_images, *expected_columns) in zip(batches, expected_batches, strict=True):
        assert columns == expected_columns
        assert torch.equal(images, expected_images)
    assert failures == expected_failures
