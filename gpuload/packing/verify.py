"""`verify`: read an entire packed set, and compare it with the hashes in its manifest."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, Final

import numpy as np

from gpuload.datasets.scan import full_path
from gpuload.datasets.stores.opening import open_file
from gpuload.datasets.stores.tar.headers import BLOCK
from gpuload.datasets.stores.tar.index import build
from gpuload.errors import import_optional, visible
from gpuload.packing.durable import hash_of
from gpuload.packing.manifest import ARRAY, DATABASE, MANIFEST, SUMS, read_manifest

__all__ = ["verify"]

THREADS: Final = 8
MAX_LISTED: Final = 5  # samples per part in messages
EXTENSIONS: Final = (".tar", ".parquet", ".npy", ".mdb")
Sums = Iterator[tuple[str, int | None]]  # the name and CRC-32 of each sample (None if unreadable)


def verify(folder: str | os.PathLike[str], *, progress: Callable[[int, int], None] | None = None) -> list[str]:
    """Compare a packed set with its manifest.

    Args:
        folder: the folder of the set.
        progress: called with the number of parts checked so far, and the total number of parts.

    Returns:
        A message for each file that is damaged, missing or unexpected, which names the damaged samples if they can be
        determined. The list is empty if the set is intact.

    Raises:
        FileNotFoundError: there is no finished set.
        GpuloadError: the manifest is damaged.
    """
    full = full_path(folder)
    manifest = read_manifest(full)
    hashes = manifest["files"]
    # The parts of an LMDB are not contiguous in its file, so the file has a single hash.
    parts = [] if manifest["to"] == "lmdb" else manifest["parts"]
    expected = dict.fromkeys([*hashes, *(part["file"] for part in manifest["parts"])])
    present = {name for name in expected if os.path.isfile(os.path.join(full, name))}
    header_bytes = _header_bytes(full) if ARRAY in present else 0
    hashed = {ARRAY: header_bytes}  # the manifest hashes only the header of this file, and each part separately
    damaged = [n for n in hashes if n in present and hash_of(os.path.join(full, n), 0, hashed.get(n)) != hashes[n]]
    problems = [f"{name} is damaged: its hash differs from that in {MANIFEST}" for name in damaged]
    problems += [f"{name} is missing" for name in expected if name not in present]
    problems += [
        f"{name} is unexpected: the manifest does not list it, but a wildcard would include it; remove it"
        for name in sorted(os.listdir(full))
        if name not in expected and name.endswith(EXTENSIONS)
    ]
    if manifest["to"] == "lmdb" and DATABASE not in hashes:
        problems.append(f"{DATABASE} has no hash in {MANIFEST}: it was packed by an earlier gpuload; pack it again")
    sums = np.zeros(0, np.uint32)  # the CRC-32 of each sample; empty if the file of checksums is unusable
    if SUMS in present and SUMS not in damaged:
        with contextlib.suppress(OSError, ValueError, SyntaxError, EOFError):
            loaded = np.load(os.path.join(full, SUMS), mmap_mode="r", allow_pickle=False)
            if isinstance(loaded, np.ndarray) and loaded.dtype == np.uint32 and loaded.ndim == 1:
                sums = loaded
    sample_bounds = list(pairwise(np.cumsum([0, *(part["samples"] for part in parts)]).tolist()))
    byte_starts = np.cumsum([header_bytes, *(part["bytes"] for part in parts)]).tolist()
    sample_ends = [*(part["first"] for part in parts[1:]), manifest["plan"]["dataset"]["samples"]]

    def check(number: int) -> str:
        part = parts[number]
        name, path = part["file"], os.path.join(full, part["file"])
        if name not in present:
            return ""
        where = f"(samples {part['first']:,} to {sample_ends[number] - 1:,} of the packed dataset)"
        if name != ARRAY and (size := os.path.getsize(path)) != part["bytes"]:
            return f"{name} has {size:,} bytes instead of {part['bytes']:,} {where}"
        if hash_of(path, byte_starts[number] if name == ARRAY else 0, part["bytes"]) == part["sha256"]:
            return ""
        first, end = sample_bounds[number]
        return f"{name} is damaged{_damaged_samples(path, manifest, sums[first:end], first)} {where}"

    with ThreadPoolExecutor(THREADS) as pool:
        for done, problem in enumerate(pool.map(check, range(len(parts))), 1):
            problems += [problem] if problem else []
            if progress is not None:
                progress(done, len(parts))
    return [visible(problem) for problem in problems]


def _header_bytes(folder: str) -> int:
    """Return the size of the header of the array's file, in bytes."""
    with open(os.path.join(folder, ARRAY), "rb") as file:
        return 10 + int.from_bytes(file.read(10)[8:], "little")


def _damaged_samples(path: str, manifest: dict[str, Any], expected: np.ndarray, first: int) -> str:
    """Describe which samples of a damaged part differ, as far as the part can be read."""
    if not len(expected):
        return ""
    try:
        match manifest["to"]:
            case "tar":
                sums = list(_tar_sums(path))
            case "parquet":
                sums = list(_parquet_sums(path, manifest["read"]["options"]["image"].removesuffix(".bytes")))
            case _:
                array, rows = np.load(path, mmap_mode="r", allow_pickle=False), range(first, first + len(expected))
                sums = [(f"entry {row}", zlib.crc32(array[row].tobytes())) for row in rows]
    except Exception as error:  # libraries raise many types for a damaged file
        return f": {error}"
    if len(sums) != len(expected):
        return f": it has {len(sums):,} samples instead of {len(expected):,}"
    damaged = [name for (name, found), stored in zip(sums, expected.tolist(), strict=True) if found != stored]
    if not damaged:
        return ", but its images are intact; the damage is in labels, names or padding"
    suffix = f" and {len(damaged) - MAX_LISTED} more" if len(damaged) > MAX_LISTED else ""
    return f" in {len(damaged)} of its {len(sums):,} samples: {', '.join(damaged[:MAX_LISTED])}{suffix}"


def _tar_sums(path: str) -> Sums:
    shard, file = build(path), open_file(path)
    columns = shard.columns
    for number, (member, stop) in enumerate(pairwise(columns.first)):
        checksum = 0
        for at in range(member, stop):
            checksum = zlib.crc32(file.read_at(columns.blocks[at] * BLOCK, columns.sizes[at]), checksum)
        yield f"key {shard.key(number)!r}", checksum


def _parquet_sums(path: str, image: str) -> Sums:
    parquet = import_optional("pyarrow.parquet", "Parquet", "parquet")
    with parquet.ParquetFile(path, page_checksum_verification=True) as file:
        row = 0
        for group in range(file.num_row_groups):
            try:
                images = file.read_row_group(group, columns=[image]).column(image).to_pylist()
                sums: list[int | None] = [zlib.crc32(value["bytes"]) for value in images]
            except (OSError, ValueError):
                sums = [None] * file.metadata.row_group(group).num_rows
            for checksum in sums:
                yield f"row {row}", checksum
                row += 1
