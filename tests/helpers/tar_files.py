"""Generated tar archives for tests."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from helpers.generated_images import jpeg_bytes, smooth_image

__all__ = ["archive", "pictures_in", "sealed", "shards_of_pictures"]


def archive(path: Path, members: Mapping[str, bytes] | Iterable[tuple[str, bytes]], **options: object) -> Path:
    """Write a tar archive of these files, in this order."""
    pairs = members.items() if isinstance(members, Mapping) else members
    with tarfile.open(path, **{"mode": "w", **options}) as tar:
        for name, data in pairs:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def pictures_in(count: int, first: int = 0) -> dict[str, bytes]:
    """Make the members of `count` samples, each a small JPEG and its class."""
    members: dict[str, bytes] = {}
    for number in range(first, first + count):
        members[f"{number:05d}.jpg"] = jpeg_bytes(smooth_image(20 + number % 3, 24, number))
        members[f"{number:05d}.cls"] = b"%d" % number
    return members


def shards_of_pictures(root: Path, shards: int, each: int) -> str:
    """Write shards of pictures, and return the pattern that matches the shards."""
    for shard in range(shards):
        archive(root / f"train-{shard:03d}.tar", pictures_in(each, shard * each))
    return f"{root}/train-{{000..{shards - 1:03d}}}.tar"


def sealed(header: bytearray) -> bytes:
    """Return a header of 512 bytes with the correct checksum."""
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)
