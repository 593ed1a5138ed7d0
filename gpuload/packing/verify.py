"""`verify`: reads an entire packed set, and compares it with the hashes in its manifest."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, Final

import numpy as np

from gpuload.checks import function, optional
from gpuload.datasets.scan import full_path
from gpuload.datasets.stores.opening import open_file
from gpuload.datasets.stores.tar.headers import BLOCK
from gpuload.datasets.stores.tar.index import build
from gpuload.errors import import_optional, list_some, visible
from gpuload.packing.durable import hash_of
from gpuload.packing.manifest import ARRAY, DATABASE, MANIFEST, SUMS, read_manifest

__all__ = ["verify"]

THREADS: Final = 8
MAX_LISTED: Final = 5  # damaged samples to name per part
EXTENSIONS: Final = (".tar", ".parquet", ".npy", ".mdb")
SampleChecksums = Iterator[tuple[str, int | None]]  # each sample's name, and its CRC-32 (None if it is unreadable)


def verify(folder: str | os.PathLike[str], *, progress: Callable[[int, int], None] | None = None) -> list[str]:
    """Compare a packed set with its manifest.

    Args:
        folder: the folder of the set.
        progress: called with the number of parts checked so far, and the total number of parts.

    Returns:
        One message for each file or part that is damaged, missing or unexpected. If the damaged samples can be
        determined, the message names them. The list is empty if the set is intact.

    Raises:
        FileNotFoundError: there is no finished set.
        GpuloadError: the manifest is damaged, has another version, or was not written by `pack`.
    """
    optional(function, "progress", progress)
    root = full_path(folder)
    manifest = read_manifest(root)
    hashes = manifest["files"]
    # The parts of an LMDB are not contiguous in its file, so the file has a single hash.
    parts = [] if manifest["to"] == "lmdb" else manifest["parts"]
    expected_names = dict.fromkeys([*hashes, *(part["file"] for part in manifest["parts"])])
    present_names = {name for name in expected_names if os.path.isfile(os.path.join(root, name))}
    header_bytes = _header_size(root) if ARRAY in present_names else 0
    hashed_bytes = {ARRAY: header_bytes}  # the parts of this file have their own hashes
    damaged_names = [
        name
        for name in hashes
        if name in present_names and hash_of(os.path.join(root, name), 0, hashed_bytes.get(name)) != hashes[name]
    ]
    problems = [f"{name} is damaged: its hash differs from that in {MANIFEST}" for name in damaged_names]
    problems += [f"{name} is missing" for name in expected_names if name not in present_names]
    problems += [
        f"{name} is unexpected: the manifest does not list it, but a pattern such as *.tar would load it; remove it"
        for name in sorted(os.listdir(root))
        if name not in expected_names and name.endswith(EXTENSIONS)
    ]
    if manifest["to"] == "lmdb" and DATABASE not in hashes:
        problems.append(f"{DATABASE} has no hash in {MANIFEST}: it was packed by an earlier gpuload; pack it again")
    checksums = np.zeros(0, np.uint32)  # one CRC-32 per sample; empty if the checksum file is unusable
    if SUMS in present_names and SUMS not in damaged_names:
        with contextlib.suppress(OSError, ValueError, SyntaxError, EOFError):
            array = np.load(os.path.join(root, SUMS), mmap_mode="r", allow_pickle=False)
            if isinstance(array, np.ndarray) and array.dtype == np.uint32 and array.ndim == 1:
                checksums = array
    checksum_bounds = list(pairwise(np.cumsum([0, *(part["samples"] for part in parts)]).tolist()))
    start_offsets = np.cumsum([header_bytes, *(part["bytes"] for part in parts)]).tolist()
    sample_stops = [*(part["first"] for part in parts[1:]), manifest["plan"]["dataset"]["samples"]]

    def check_part(index: int) -> str:
        part = parts[index]
        name, path = part["file"], os.path.join(root, part["file"])
        if name not in present_names:
            return ""
        where = f"(samples {part['first']:,} to {sample_stops[index] - 1:,} of the source dataset)"
        if name != ARRAY and (size := os.path.getsize(path)) != part["bytes"]:
            return f"{name} has {size:,} bytes instead of {part['bytes']:,} {where}"
        if hash_of(path, start_offsets[index] if name == ARRAY else 0, part["bytes"]) == part["sha256"]:
            return ""
        first, end = checksum_bounds[index]
        return f"{name} is damaged{_describe_damage(path, manifest, checksums[first:end], first)} {where}"

    with ThreadPoolExecutor(THREADS) as pool:
        for checked_count, problem in enumerate(pool.map(check_part, range(len(parts))), 1):
            problems += [problem] if problem else []
            if progress is not None:
                progress(checked_count, len(parts))
    return [visible(problem) for problem in problems]


def _header_size(folder: str) -> int:
    """Return the size of the array file's header, in bytes."""
    with open(os.path.join(folder, ARRAY), "rb") as file:
        return 10 + int.from_bytes(file.read(10)[8:], "little")


def _describe_damage(path: str, manifest: dict[str, Any], expected_checksums: np.ndarray, first: int) -> str:
    """Describe which samples of a damaged part differ from their checksums, as far as the part can be read."""
    if not len(expected_checksums):
        return ""
    try:
        match manifest["to"]:
            case "tar":
                checksums = list(_tar_checksums(path))
            case "parquet":
                checksums = list(_parquet_checksums(path, manifest["read"]["options"]["image"].removesuffix(".bytes")))
            case _:
                array, rows = (
                    np.load(path, mmap_mode="r", allow_pickle=False),
                    range(first, first + len(expected_checksums)),
                )
                checksums = [(f"entry {row}", zlib.crc32(array[row].tobytes())) for row in rows]
    except Exception as error:  # libraries raise many types of errors for a damaged file
        return f": {error}"
    if len(checksums) != len(expected_checksums):
        return f": it has {len(checksums):,} samples instead of {len(expected_checksums):,}"
    damaged_names = [
        name
        for (name, checksum), expected_checksum in zip(checksums, expected_checksums.tolist(), strict=True)
        if checksum != expected_checksum
    ]
    if not damaged_names:
        return ", but its images are intact; the damage is in labels, names or padding"
    return f" in {len(damaged_names)} of its {len(checksums):,} samples: {list_some(damaged_names, MAX_LISTED)}"


def _tar_checksums(path: str) -> SampleChecksums:
    shard, file = build(path), open_file(path)
    columns = shard.columns
    for sample, (first_member, stop) in enumerate(pairwise(columns.first)):
        checksum = 0
        for member in range(first_member, stop):
            checksum = zlib.crc32(file.read_at(columns.blocks[member] * BLOCK, columns.sizes[member]), checksum)
        yield f"key {shard.key(sample)!r}", checksum


def _parquet_checksums(path: str, image_column: str) -> SampleChecksums:
    parquet = import_optional("pyarrow.parquet", "Parquet", "parquet")
    with parquet.ParquetFile(path, page_checksum_verification=True) as file:
        row = 0
        for row_group in range(file.num_row_groups):
            try:
                images = file.read_row_group(row_group, columns=[image_column]).column(image_column).to_pylist()
                checksums: list[int | None] = [zlib.crc32(value["bytes"]) for value in images]
            except (OSError, ValueError):
                checksums = [None] * file.metadata.row_group(row_group).num_rows
            for checksum in checksums:
                yield f"row {row}", checksum
                row += 1
