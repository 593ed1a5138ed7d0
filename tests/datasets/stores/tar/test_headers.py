"""`members`: the members of a tar, compared with the standard library, and errors about damage."""

from __future__ import annotations

import io
import re
import tarfile
from pathlib import Path

import pytest
from helpers.tar_files import archive, sealed

from gpuload.datasets.stores.opening import open_file
from gpuload.datasets.stores.tar.headers import Damage, members

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def read_members(path: Path) -> list[tuple[str, int, int]]:
    file = open_file(str(path))
    return [(name.decode(), data, size) for name, _, data, size in members(file.read_at, "x.tar", file.size)]


def tarfile_members(path: Path) -> list[tuple[str, int, int]]:
    with tarfile.open(path) as tar:
        return [(member.name, member.offset_data, member.size) for member in tar if member.isreg()]


def header(name: str = "a.jpg", size: int = 3, kind: bytes = tarfile.REGTYPE, link: str = "") -> bytearray:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = size, kind, link
    return bytearray(info.tobuf(tarfile.USTAR_FORMAT))


def refusal(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(Damage) as caught:
        read_members(path)
    return str(caught.value)


@pytest.mark.parametrize("format", FORMATS)
def test_members_equal_the_members_in_tarfile(tmp_path: Path, format: str) -> None:
    # 185 characters, which take a prefix in ustar, a long name in gnu, and a record in pax.
    long_name = "/".join(["folder" * 5] * 4) + "/" + "n" * 60 + ".jpg"
    names = ["a.jpg", "ä.jpg", long_name, "x" * 100, "d/e.f.png", "empty.txt"]
    if format != "ustar":
        names.append("y" * 300)
    path = archive(tmp_path / "x.tar", [(name, name.encode() * 31) for name in names], format=FORMATS[format])
    assert read_members(path) == tarfile_members(path)
    assert [name for name, _, _ in read_members(path)] == names


def test_members_have_sizes_in_base_256_and_in_pax_records(tmp_path: Path) -> None:
    large = header(size=0)
    large[124:136] = b"\x80" + (700).to_bytes(11, "big")  # the size, in base 256
    (tmp_path / "large.tar").write_bytes(sealed(large) + bytes(1024 + 1024))
    assert read_members(tmp_path / "large.tar") == [("a.jpg", 512, 700)]
    info = tarfile.TarInfo("b.jpg")
    info.pax_headers = {"size": "700", "comment": "for all"}
    with tarfile.open(tmp_path / "pax.tar", "w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "global"}) as tar:
        info.size = 700
        tar.addfile(info, io.BytesIO(bytes(700)))
    assert read_members(tmp_path / "pax.tar") == tarfile_members(tmp_path / "pax.tar")


def test_members_skip_folders(tmp_path: Path) -> None:
    folder = header("d/", 0, tarfile.DIRTYPE)
    old_format = header("e/", 0, tarfile.AREGTYPE)
    data = sealed(folder) + sealed(old_format) + sealed(header("d/a.jpg")) + b"abc" + bytes(509)
    (tmp_path / "x.tar").write_bytes(data + bytes(1024))
    assert read_members(tmp_path / "x.tar") == tarfile_members(tmp_path / "x.tar") == [("d/a.jpg", 1536, 3)]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("empty_blocks", [1, 2, 20, 10_000])
def test_members_of_concatenated_archives_follow_each_other(tmp_path: Path, format: str, empty_blocks: int) -> None:
    """Any number of empty blocks between the archives is skipped, as by ``tar -i``."""
    long_name = "n" * 130 + ".jpg" if format != "ustar" else "n.jpg"
    parts = [
        archive(tmp_path / name, {f"{name}/{long_name}": name.encode(), f"{name}.cls": b"1"}, format=FORMATS[format])
        for name in "abc"
    ]
    path = tmp_path / "x.tar"
    members_alone = [part.read_bytes()[: tarfile_members(part)[-1][1] + 512] for part in parts]
    path.write_bytes(bytes(512 * empty_blocks).join(members_alone) + bytes(1024))
    with tarfile.open(path, ignore_zeros=True) as tar:
        expected = [(member.name, member.offset_data, member.size) for member in tar if member.isreg()]
    assert read_members(path) == expected
    assert [name for name, *_ in expected] == [f"{name}{end}" for name in "abc" for end in (f"/{long_name}", ".cls")]


def test_members_warn_of_bytes_after_the_end_but_refuse_a_damaged_second_archive(tmp_path: Path) -> None:
    data = archive(tmp_path / "x.tar", {"a.jpg": b"1"}).read_bytes()  # tarfile pads it to 10,240 bytes
    for trailer, offsets in (
        (b"a signature", [10_240]),
        (b"x" * 600, [10_240]),
        (bytes(100), []),
        (bytes(512) + b"x", [10_752]),
    ):
        (tmp_path / "x.tar").write_bytes(data + trailer)
        file, warnings = open_file(str(tmp_path / "x.tar")), []
        names = [name for name, *_ in members(file.read_at, "x.tar", file.size, warn=warnings.append)]
        assert names == [b"a.jpg"]
        assert [int(re.search("at offset ([0-9,]+),", text)[1].replace(",", "")) for text in warnings] == offsets
    damaged = bytearray(data)
    damaged[0] ^= 1
    text = r"'x.tar': at offset 10,240 a member's header was expected, but its checksum is wrong"
    assert re.match(text, refusal(tmp_path / "x.tar", data + damaged))
    assert re.match(r"'x.tar' is truncated at 10,752 bytes: the member", refusal(tmp_path / "x.tar", data + data[:512]))


def test_members_accept_a_checksum_of_signed_bytes(tmp_path: Path) -> None:
    block = header("ä.jpg")
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(byte - 256 if byte > 127 else byte for byte in block)
    (tmp_path / "x.tar").write_bytes(bytes(block) + bytes(512 + 1024))
    assert read_members(tmp_path / "x.tar") == [("ä.jpg", 512, 3)]


@pytest.mark.parametrize(
    ("kind", "kind_name"),
    [
        (tarfile.LNKTYPE, "a hard link"),
        (tarfile.SYMTYPE, "a symbolic link"),
        (tarfile.FIFOTYPE, "a FIFO"),
        (tarfile.CHRTYPE, "a character device"),
        (tarfile.GNUTYPE_SPARSE, "a sparse file"),
    ],
)
def test_members_refuse_links_and_special_files(tmp_path: Path, kind: bytes, kind_name: str) -> None:
    block = sealed(header("d/link.jpg", 0, kind, "/etc/passwd"))
    assert refusal(tmp_path / "x.tar", block + bytes(1024)) == (
        f"'x.tar': the member 'd/link.jpg' at offset 0 is {kind_name}; expected regular files only. Recreate the "
        "archive with links followed (tar --dereference, and without --sparse)"
    )
    info = tarfile.TarInfo("s.jpg")
    info.pax_headers = {"GNU.sparse.major": "1"}
    data = info.tobuf(tarfile.PAX_FORMAT) + bytes(1024)
    assert "the member 's.jpg' at offset 1,024 is a sparse file" in refusal(tmp_path / "x.tar", data)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        ((-5).to_bytes(12, "big", signed=True), "-5 bytes, which is negative; the archive is damaged, so recreate it"),
        (
            b"\x80" + (1 << 60).to_bytes(11, "big"),
            "1,152,921,504,606,846,976 bytes, more than the entire archive (2,048): the archive is truncated, or the "
            "header is damaged; copy or download the archive again",
        ),
    ],
    ids=["negative", "huge"],
)
def test_members_refuse_a_negative_or_huge_size(tmp_path: Path, size: bytes, text: str) -> None:
    block = header()
    block[124:136] = size
    message = refusal(tmp_path / "x.tar", sealed(block) + bytes(1536))
    assert message == f"'x.tar': the member 'a.jpg' at offset 0 has a size of {text}"


def test_members_refuse_truncated_members_and_headers(tmp_path: Path) -> None:
    path = archive(tmp_path / "x.tar", {"a.jpg": bytes(600), "b.jpg": bytes(600)}, format=tarfile.PAX_FORMAT)
    data = path.read_bytes()
    assert refusal(path, data[:2500]) == (
        "'x.tar' is truncated at 2,500 bytes: the member 'b.jpg' at offset 1,536 has 600 bytes starting at 2,048, of "
        "which 452 are present; copy or download the archive again"
    )
    assert refusal(path, data[:1700]) == (
        "'x.tar' is truncated at 1,700 bytes, in the headers of a member at offset 1,536; copy or download the archive "
        "again"
    )


def test_members_refuse_a_wrong_checksum(tmp_path: Path) -> None:
    data = bytearray(archive(tmp_path / "x.tar", {"a.jpg": b"1", "b.jpg": b"2"}).read_bytes())
    data[1024] ^= 1
    assert refusal(tmp_path / "x.tar", data) == (
        "'x.tar': at offset 1,024 a member's header was expected, but its checksum is wrong (it begins with "
        "b'c.jpg\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00'); the archive is damaged, so recreate it"
    )


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "has 0 bytes; an empty archive has two blocks of zeros"),
        (b"\xff\xd8\xff" + bytes(99), "has 102 bytes that begin with b'\\xff\\xd8\\xff"),
        (b"\xff\xd8\xff" + bytes(9999), "begins with b'\\xff\\xd8\\xff"),
    ],
)
def test_members_refuse_files_that_are_not_tar(tmp_path: Path, data: bytes, text: str) -> None:
    message = refusal(tmp_path / "x.tar", data)
    assert re.match(r"'x.tar' is not a tar archive: ", message)
    assert text in message


def test_members_refuse_damaged_pax_records_and_huge_names(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    for content in (b"99 path=x\n", b"path=x\n", b"0 path=x\n", b"-1 path=x\n"):
        data = sealed(header("p", len(content), tarfile.XHDTYPE)) + content + bytes(512 - len(content) + 1024)
        assert refusal(path, data) == "'x.tar': the pax records at offset 0 are damaged; recreate the archive"
    data = sealed(header("p", 2 << 20, tarfile.GNUTYPE_LONGNAME)) + bytes(3 << 20)
    assert refusal(path, data) == (
        "'x.tar': the long name or pax records at offset 0 take 2,097,152 bytes; expected at most 1,048,576. The "
        "archive is damaged, so recreate it"
    )


@pytest.mark.parametrize("size", [b"9" * 5000, b"--5", b"1_0", b"many", b""])
def test_members_refuse_a_pax_size_that_is_not_a_number(tmp_path: Path, size: bytes) -> None:
    text = b" size=" + size + b"\n"
    [record] = [candidate for n in range(5100) if len(candidate := b"%d" % n + text) == n]
    data = sealed(header("p", len(record), tarfile.XHDTYPE)) + record + bytes(-len(record) % 512 + 1024)
    message = refusal(tmp_path / "x.tar", data)
    quoted = size if len(size) < 40 else size[:40] + b"..."
    assert message == (
        f"'x.tar': the pax records at offset 0 give the next member a size of {quoted!r}, which is not a number of "
        "bytes; the archive is damaged, so recreate it"
    )
