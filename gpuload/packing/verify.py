"""`verify`: whether a packed set is what was packed. Reads all of it, with the hashes of its manifest."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np

from gpuload.datasets.scan import full_path
from gpuload.datasets.stores.opening import open_file
from gpuload.datasets.stores.tar.headers import BLOCK
from gpuload.datasets.stores.tar.index import build
from gpuload.errors import DecodeError, import_optional, visible
from gpuload.packing.durable import hash_of
from gpuload.packing.manifest import HASHES, MANIFEST, SUMS, open_packed, read_manifest

__all__ = ["verify"]

THREADS: Final = 8
SHOWN: Final = 5  # samples that are named, of one part
OURS: Final = (".tar", ".parquet", ".npy", ".mdb")
SUFFIX: Final = ".gpuload-index"


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
    problems = list(_small_files(full, manifest))
    parts, files = manifest["parts"], dict.fromkeys(part["file"] for part in manifest["parts"])
    there = {name for name in files if os.path.isfile(os.path.join(full, name))}
    problems += [f"{name} is missing" for name in files if name not in there]
    expected = {*files, *manifest["files"]}
    for name in sorted(os.listdir(full)):
        if name not in expected and name.endswith(OURS):
            problems.append(f"{name} is too much: the manifest does not name it, but a pattern may read it")
    starts = np.cumsum([0, *(part["samples"] for part in parts)]).tolist()
    sums = _sums(full, manifest)
    if manifest["to"] == "lmdb":
        return problems + (list(_lmdb(full, manifest, sums, progress)) if there else [])
    name = HASHES[manifest["format"]]
    header = 0 if manifest["to"] != "array" or not there else _header_bytes(os.path.join(full, "images.npy"))

    def check(number: int) -> list[str]:
        part = parts[number]
        path = os.path.join(full, part["file"])
        if part["file"] not in there:
            return []
        if manifest["to"] == "array":
            before = sum(other["bytes"] for other in parts[:number])
            whole = hash_of(path, name, header + before, part["bytes"]) == part[name]
        else:
            size = os.path.getsize(path)
            if size != part["bytes"]:
                return [f"{part['file']} has {size:,} bytes instead of {part['bytes']:,}{_where(manifest, number)}"]
            whole = hash_of(path, name) == part[name]
        if whole:
            return []
        found = _damaged_samples(full, manifest, part, sums[starts[number] : starts[number + 1]], starts[number])
        return [f"{part['file']} is damaged{found}{_where(manifest, number)}"]

    with ThreadPoolExecutor(THREADS) as pool:
        for done, told in enumerate(pool.map(check, range(len(parts))), 1):
            problems += told
            progress(done, len(parts))
    return problems


def _small_files(folder: str, manifest: dict[str, Any]) -> Iterator[str]:
    for name, digest in manifest["files"].items():
        path = os.path.join(folder, name)
        if not os.path.isfile(path):
            yield f"{name} is missing"
        elif hash_of(path, HASHES[manifest["format"]]) != digest:
            yield f"{name} is damaged: its hash is not that in {MANIFEST}"


def _sums(folder: str, manifest: dict[str, Any]) -> np.ndarray:
    """The CRC-32 of each sample; of none where that file is no help."""
    try:
        sums = np.load(os.path.join(folder, SUMS), mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError):
        return np.zeros(0, np.uint32)
    fits = isinstance(sums, np.ndarray) and sums.dtype == "<u4" and sums.shape == (manifest["samples"],)
    return sums if fits else np.zeros(0, np.uint32)


def _where(manifest: dict[str, Any], number: int) -> str:
    """Which samples of the source a part was made of."""
    parts = manifest["parts"]
    first = parts[number]["first"]
    after = parts[number + 1]["first"] if number + 1 < len(parts) else manifest["plan"]["dataset"]["samples"]
    return f" (samples {first:,} to {after - 1:,} of what was packed)"


def _damaged_samples(folder: str, manifest: dict[str, Any], part: dict[str, Any], sums: np.ndarray, first: int) -> str:
    """Which samples of a damaged part differ, as far as the part can be read at all."""
    if not len(sums):
        return ""
    read = {"tar": _tar_sums, "parquet": _parquet_sums, "array": _array_sums}[manifest["to"]]
    try:
        found = read(os.path.join(folder, part["file"]), manifest, first, len(sums))
    except Exception as error:  # whatever a damaged file makes its library say
        return f": {error}"
    if len(found) != len(sums):
        return f": it has {len(found)} samples instead of {len(sums)}"
    wrong = [name for (name, total), expected in zip(found, sums.tolist(), strict=True) if total != expected]
    if not wrong:
        return ", but in none of its images: in labels, names or what lies between"
    more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
    return f" in {len(wrong)} of its {len(sums)} samples: {', '.join(wrong[:SHOWN])}{more}"


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


def _header_bytes(path: str) -> int:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False).offset  # type: ignore[attr-defined]
    except (OSError, ValueError):
        return 0


def _lmdb(
    folder: str, manifest: dict[str, Any], sums: np.ndarray, progress: Callable[[int, int], None]
) -> Iterator[str]:
    """Its pages lie in no order, so samples are read one by one."""
    try:
        dataset = open_packed(folder)
    except (ValueError, OSError) as error:
        yield f"data.mdb is damaged: {error}"
        return
    keys, wrong = dataset.keys, []
    if len(keys) != manifest["samples"]:
        yield f"data.mdb has {len(keys):,} samples instead of {manifest['samples']:,}"
        return
    for number, (key, expected) in enumerate(zip(keys, sums.tolist(), strict=True)):
        try:
            sample = dataset[number]
            image, *target = sample if isinstance(sample, tuple) else (sample,)
            total = zlib.crc32(image.data)
            for value in target:
                total = zlib.crc32(str(value).encode(), total)
        except DecodeError as error:
            total, key = None, f"{key} ({error})"
        if total != expected:
            wrong.append(key)
        if number % 1000 == 999:
            progress(number, len(keys))
    if wrong:
        more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        yield f"data.mdb is damaged in {len(wrong)} of its {len(keys):,} samples: {', '.join(wrong[:SHOWN])}{more}"
