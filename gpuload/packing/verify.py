"""`verify`: whether a packed set is what was packed. Reads all of it, with the hashes of its manifest."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
SHOWN: Final = 5  # samples that are named, of one part
OURS: Final = (".tar", ".parquet", ".npy", ".mdb")


def verify(folder: str | os.PathLike[str], *, progress: Callable[[int, int], None] | None = None) -> list[str]:
    """Compare a packed set with its manifest.

    Args:
        folder: where it is.
        progress: called with how many parts are read, of how many.

    Returns:
        What is damaged, missing or too much, in words that name the file, and the samples in it where they can be told
        apart. Empty if all is well.

    Raises:
        FileNotFoundError: there is no finished set.
        GpuloadError: its manifest is damaged.
    """
    full, progress = full_path(folder), progress or (lambda done, total: None)
    return [visible(problem) for problem in _problems(full, read_manifest(full), progress)]


def _problems(full: str, manifest: dict[str, Any], progress: Callable[[int, int], None]) -> list[str]:
    problems, parts = [], manifest["parts"]
    files = dict.fromkeys(part["file"] for part in parts)
    expected = {*files, *manifest["files"]}
    present = {name for name in expected if os.path.isfile(os.path.join(full, name))}
    header = _header_bytes(full) if ARRAY in present else 0
    damaged: set[str] = set()
    for name, digest in manifest["files"].items():
        span = (0, header) if name == ARRAY else ()
        if name in present and hash_of(os.path.join(full, name), *span) != digest:
            damaged.add(name)
            problems.append(f"{name} is damaged: its hash is not that in {MANIFEST}")
    problems += [f"{name} is missing" for name in {**manifest["files"], **files} if name not in present]
    for name in sorted(os.listdir(full)):
        if name not in expected and name.endswith(OURS):
            problems.append(f"{name} is too much: the manifest does not name it, but a pattern may read it")
    starts = np.cumsum([0, *(part["samples"] for part in parts)]).tolist()
    sums = np.zeros(0, np.uint32) if SUMS in damaged else _sums(full, manifest)

    def check(number: int) -> str:
        part = parts[number]
        path = os.path.join(full, part["file"])
        if part["file"] not in present:
            return ""
        if manifest["to"] == "array":
            before = sum(other["bytes"] for other in parts[:number])
            intact = hash_of(path, header + before, part["bytes"]) == part["sha256"]
        elif (size := os.path.getsize(path)) != part["bytes"]:
            return f"{part['file']} has {size:,} bytes instead of {part['bytes']:,}{_where(manifest, number)}"
        else:
            intact = hash_of(path) == part["sha256"]
        if intact:
            return ""
        which = _damaged_samples(full, manifest, part, sums[starts[number] : starts[number + 1]], starts[number])
        return f"{part['file']} is damaged{which}{_where(manifest, number)}"

    if manifest["to"] == "lmdb":  # its parts are in no order in the file, so it has one hash
        if DATABASE not in manifest["files"]:
            problems.append(f"{DATABASE} has no hash in {MANIFEST}: it was packed by an earlier gpuload; pack it again")
        parts = []
    with ThreadPoolExecutor(THREADS) as pool:
        for done, problem in enumerate(pool.map(check, range(len(parts))), 1):
            problems += [problem] if problem else []
            progress(done, len(parts))
    return problems


def _sums(folder: str, manifest: dict[str, Any]) -> np.ndarray:
    """Return the CRC-32 of each sample; of none where their file is no help."""
    try:
        sums = np.load(os.path.join(folder, SUMS), mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, SyntaxError):
        return np.zeros(0, np.uint32)
    fits = isinstance(sums, np.ndarray) and sums.dtype == "<u4" and sums.shape == (manifest["samples"],)
    return sums if fits else np.zeros(0, np.uint32)


def _where(manifest: dict[str, Any], number: int) -> str:
    """Say which samples of the source a part was made of."""
    parts = manifest["parts"]
    first = parts[number]["first"]
    after = parts[number + 1]["first"] if number + 1 < len(parts) else manifest["plan"]["dataset"]["samples"]
    return f" (samples {first:,} to {after - 1:,} of what was packed)"


def _damaged_samples(folder: str, manifest: dict[str, Any], part: dict[str, Any], sums: np.ndarray, first: int) -> str:
    """Say which samples of a damaged part differ, as far as the part can be read at all."""
    if not len(sums):
        return ""
    read = {"tar": _tar_sums, "parquet": _parquet_sums, "array": _array_sums}[manifest["to"]]
    try:
        totals = read(os.path.join(folder, part["file"]), manifest, first, len(sums))
    except Exception as error:  # whatever a damaged file makes its library say
        return f": {error}"
    if len(totals) != len(sums):
        return f": it has {len(totals):,} samples instead of {len(sums):,}"
    wrong = [name for (name, total), expected in zip(totals, sums.tolist(), strict=True) if total != expected]
    if not wrong:
        return ", but in none of its images: in labels, names or what lies between"
    more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
    return f" in {len(wrong)} of its {len(sums):,} samples: {', '.join(wrong[:SHOWN])}{more}"


def _tar_sums(path: str, manifest: dict[str, Any], first: int, count: int) -> list[tuple[str, int | None]]:
    shard, file = build(path), open_file(path)
    columns, found = shard.columns, []
    for number in range(shard.samples):
        total = 0
        for member in range(int(columns.first[number]), int(columns.first[number + 1])):
            total = zlib.crc32(file.read_at(int(columns.blocks[member]) * BLOCK, int(columns.sizes[member])), total)
        found.append((f"key {shard.key(number)!r}", total))
    return found


def _parquet_sums(path: str, manifest: dict[str, Any], first: int, count: int) -> list[tuple[str, int | None]]:
    parquet = import_optional("pyarrow.parquet", "Parquet", "parquet")
    image, found = manifest["read"]["options"]["image"].removesuffix(".bytes"), []
    with parquet.ParquetFile(path, page_checksum_verification=True) as file:
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            try:
                images = file.read_row_group(group, columns=[image]).column(image).to_pylist()
                totals: list[int | None] = [zlib.crc32(one["bytes"]) for one in images]
            except (OSError, ValueError):
                totals = [None] * rows
            found += [(f"row {len(found) + row}", total) for row, total in enumerate(totals)]
    return found


def _array_sums(path: str, manifest: dict[str, Any], first: int, count: int) -> list[tuple[str, int | None]]:
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    rows = range(first, first + count)
    return [(f"entry {row}", zlib.crc32(array[row].tobytes())) for row in rows]


def _header_bytes(folder: str) -> int:
    """Return how many bytes of the array's file precede its numbers."""
    with open(os.path.join(folder, ARRAY), "rb") as file:
        return 10 + int.from_bytes(file.read(10)[8:], "little")
