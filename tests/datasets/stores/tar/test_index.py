"""`build` and `read`: the index of one shard, its samples and size, and errors about archives and index files."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.tar_files import archive

from gpuload.datasets.stores import opening
from gpuload.datasets.stores.store import stamp
from gpuload.datasets.stores.tar import index as index_module
from gpuload.datasets.stores.tar.headers import Damage
from gpuload.datasets.stores.tar.index import Shard, UnusableIndex, build, make_table, read, split_name


def read_samples(shard: Shard) -> dict[str, dict[str, bytes]]:
    """Read all samples at the offsets in the index."""
    data, columns = Path(shard.path).read_bytes(), shard.columns
    samples = {}
    for number in range(shard.samples):
        members = range(int(columns.first[number]), int(columns.first[number + 1]))
        begins = [512 * int(columns.blocks[member]) for member in members]
        samples[shard.key(number)] = {
            columns.names[columns.fields[member]]: data[begin : begin + int(columns.sizes[member])]
            for member, begin in zip(members, begins, strict=True)
        }
    return samples


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("a.jpg", ("a", "jpg")),
        ("d.1/e/a.SEG.png", ("d.1/e/a", "seg.png")),
        ("./a.cls", ("./a", "cls")),
        ("../a.cls", ("../a", "cls")),
        ("/a.cls", ("/a", "cls")),
        ("README", None),
        (".hidden", None),
        ("d/.a.jpg", None),
        ("d.x/README", None),
        ("a.", None),
        ("__info__/a.jpg", None),
        ("__note__", None),
    ],
)
def test_split_name_splits_at_the_first_dot_of_the_last_component(name: str, split: tuple[str, str] | None) -> None:
    assert split_name(name.encode()) == (split and tuple(part.encode() for part in split))


def test_build_indexes_each_field(tmp_path: Path) -> None:
    files = {"d/a.jpg": b"x" * 5000, "d/a.cls": b"1", "notes": b"?", "ö.jpg": b"", "ö.seg.png": b"y" * 700}
    shard = build(str(archive(tmp_path / "x.tar", files)))
    assert read_samples(shard) == {"d/a": {"jpg": b"x" * 5000, "cls": b"1"}, "ö": {"jpg": b"", "seg.png": b"y" * 700}}
    assert (shard.samples, shard.members) == (2, 4)
    empty = build(str(archive(tmp_path / "empty.tar", {})))
    assert (empty.samples, empty.columns.names) == (0, ())
    copy = pickle.loads(pickle.dumps(shard, 5))
    assert read_samples(copy) == read_samples(shard)


def test_build_reads_headers_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = archive(tmp_path / "x.tar", {f"{number}.jpg": bytes(200_000) for number in range(10)})
    reads = []

    class RecordingFile(io.FileIO):
        def readinto(self, buffer) -> int:
            reads.append(len(buffer))
            return super().readinto(buffer)

    def open_and_record(fd: int, mode: str, nbytes: int, **options: Any) -> io.BufferedReader:
        return io.BufferedReader(RecordingFile(fd, **options), nbytes)

    monkeypatch.setattr(opening, "open", open_and_record, raising=False)
    build(str(path))
    assert 10 <= len(reads) <= 16  # including the blocks that close the archive
    assert max(reads) <= 4096


def test_index_of_two_fields_takes_under_13_bytes_and_the_key_per_sample(tmp_path: Path) -> None:
    files = {f"folder/{n:012d}.{field}": bytes(40) for n in range(400) for field in ("jpg", "cls")}
    shard = build(str(archive(tmp_path / "x.tar", files)))
    assert shard.table.nbytes / shard.samples < 19 + 13  # a key takes 19 bytes


def test_build_indexes_members_of_several_gib(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    info, size = tarfile.TarInfo("a.bin"), 6 << 30  # a hole in the file
    info.size = size
    with open(path, "wb") as file:
        file.write(info.tobuf(tarfile.GNU_FORMAT))
        file.seek(size, os.SEEK_CUR)
        info.name, info.size = "b.bin", 3
        file.write(info.tobuf(tarfile.GNU_FORMAT) + b"abc" + bytes(509 + 1024))
    shard = build(str(path))
    assert shard.columns.sizes.tolist() == [size, 3]
    assert [512 * block for block in shard.columns.blocks.tolist()] == [512, 512 + size + 512]


def test_build_of_a_truncated_archive_states_the_number_of_complete_samples(tmp_path: Path) -> None:
    files = {f"{number}.{field}": bytes(600) for number in range(5) for field in ("jpg", "png")}
    path = archive(tmp_path / "x.tar", files)
    os.truncate(path, 1536 * 7 + 700)  # each member takes 1536 bytes: a header of 512, and two blocks
    with pytest.raises(Damage, match=r"^'.*x.tar' is truncated at 11,452 bytes: the member '3.png' at offset 10,75.*\. "
                       r"3 complete samples precede the damage; repair the shard, or remove it from the"):  # fmt: skip
        build(str(path))
    os.truncate(path, 1536 * 6 + 700)
    with pytest.raises(Damage, match=r"the member '3.jpg' .* 3 complete samples"):
        build(str(path))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda data: data[:2048],
            "ends at 2,048 bytes without the empty blocks that close an archive: it may have been truncated between "
            "two members; it has 2 samples",
        ),
        (
            lambda data: data + b"a signature",
            "has 11 bytes after the end of the archive, at offset 10,240, that are not part of an archive; they are "
            "ignored",
        ),
    ],
)
def test_build_remarks_on_missing_closing_blocks_and_bytes_after_the_end(tmp_path: Path, change, text: str) -> None:
    path, remarks = archive(tmp_path / "x.tar", {"a.jpg": b"1", "b.jpg": b"2"}), []
    path.write_bytes(change(path.read_bytes()))
    assert build(str(path), remarks.append).samples == 2
    assert remarks == [f"{str(path)!r} {text}"]


@pytest.mark.parametrize("names", [("a.jpg", "a.cls", "a.jpg"), ("a.jpg", "b.jpg", "a.jpg"), ("a.jpg", "b.jpg", "a.x")])
def test_build_refuses_two_samples_with_one_key(tmp_path: Path, names: tuple[str, ...]) -> None:
    path = archive(tmp_path / "x.tar", [(name, b"1") for name in names])
    text = r"has two samples with the key 'a': one at offset 0, one at 2,048.* the members of a sample must be adj"
    with pytest.raises(Damage, match=text):
        build(str(path))


def test_build_refuses_a_compressed_archive(tmp_path: Path) -> None:
    path = archive(tmp_path / "x.tar.gz", {"a.jpg": b"1"}, mode="w:gz")
    with pytest.raises(Damage, match=r"is compressed \(gzip\), .* Unpack it to a plain tar, or .*stream=True"):
        build(str(path))


def test_build_refuses_an_archive_that_changes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = archive(tmp_path / "x.tar", {"a.jpg": b"1"})
    split_name = index_module.split_name

    def touch_and_split(name: bytes) -> object:
        os.utime(path, ns=(1, 1))
        return split_name(name)

    monkeypatch.setattr(index_module, "split_name", touch_and_split)
    with pytest.raises(Damage, match="changed while it was being indexed"):
        build(str(path))


def test_read_refuses_damaged_index_files_and_other_formats(tmp_path: Path) -> None:
    path = archive(tmp_path / "x.tar", {"a.jpg": b"1", "b.jpg": b"2"})
    table, file, status = build(str(path)).table, tmp_path / "index", stamp(str(path))
    file.write_bytes(table)
    assert read(str(path), str(file), status).samples == 2
    assert read(str(path), str(tmp_path / "none"), status) is None
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))
    assert read(str(path), str(file), path.stat()) is None, "an index older than its archive must not be used"
    for length in range(0, len(table), 24):
        file.write_bytes(table[:length])
        with pytest.raises(UnusableIndex, match=r"it is truncated|its header states"):
            read(str(path), str(file), status)
    for offset in range(0, len(table), 5):
        damaged = np.array(table)
        damaged[offset] ^= 1
        file.write_bytes(damaged)
        with pytest.raises(UnusableIndex):
            read(str(path), str(file), status)
    file.write_bytes(b"not an index, but long enough to be one" * 8)
    with pytest.raises(UnusableIndex, match=r"not an index file \(312 bytes\)"):
        read(str(path), str(file), status)


def test_read_refuses_an_index_with_swapped_parts(tmp_path: Path) -> None:
    """A crash of the machine may leave such a file, since its pages are written in any order."""
    path = archive(tmp_path / "x.tar", {f"{number:04d}.jpg": b"%d" % number for number in range(600)})
    table, file, status = build(str(path)).table, tmp_path / "index", stamp(str(path))
    words = table.view("<u8")
    for first, second in ((20, 60), (100, 400), (12, len(words) - 20)):
        swapped = words.copy()
        swapped[first : first + 16], swapped[second : second + 16] = words[second:][:16], words[first:][:16]
        assert (swapped != words).any()
        file.write_bytes(swapped)
        with pytest.raises(UnusableIndex, match="its checksum is wrong"):
            read(str(path), str(file), status)


@pytest.mark.parametrize(
    ("column", "values"),  # of the columns first, key_ends, blocks, sizes and fields
    [
        (0, [0, 9, 4]),
        (0, [0, 3, 3]),
        (0, [1, 2, 4]),
        (1, [0, 9, 2]),
        (1, [0, 2, 1]),
        (2, [1, 3, 5, 1 << 40]),
        (2, [1, 3, 5, 20]),
        (3, [1, 1, 1, 1 << 62]),
        (3, [1, 1, 1, 9000]),
        (4, [0, 1, 0, 2]),
    ],
)
def test_read_refuses_an_index_that_points_outside_its_archive(tmp_path: Path, column: int, values: list[int]) -> None:
    """An index with a valid checksum may come from elsewhere, with its archive."""
    files = {f"{key}.{field}": b"1" for key in "ab" for field in ("jpg", "cls")}
    path, file = archive(tmp_path / "x.tar", files), tmp_path / "index"
    columns = [[0, 2, 4], [0, 1, 2], [1, 3, 5, 7], [1, 1, 1, 1], [0, 1, 0, 1]]
    for table_columns, is_valid in ((columns, True), ([*columns[:column], values, *columns[column + 1 :]], False)):
        table = make_table(stamp(str(path)), [array("Q", column) for column in table_columns], b"ab", b"jpg\0cls")
        file.write_bytes(table)
        if is_valid:
            assert bytes(table) == bytes(build(str(path)).table)
            assert read(str(path), str(file), stamp(str(path))) is not None
        else:
            with pytest.raises(UnusableIndex, match="it points to offsets outside the archive"):
                read(str(path), str(file), stamp(str(path)))
