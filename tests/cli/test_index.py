"""``gpuload index``: what it makes, and what it says."""

from __future__ import annotations

import os
from pathlib import Path

from pictures import jpeg_bytes, smooth_image
from tars import archive, shards_of_pictures
from typer.testing import CliRunner

from gpuload.cli.app import app


def index(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["index", *arguments])
    return done.exit_code, done.output


def test_indexes_are_made_once_and_counted(tmp_path: Path) -> None:
    pattern = shards_of_pictures(tmp_path, 3, 2)
    size = sum(path.stat().st_size for path in tmp_path.glob("*.tar"))
    status, text = index(pattern)
    nbytes = sum(path.stat().st_size for path in tmp_path.glob("*.gpuload-index"))
    assert status == 0
    assert text == (
        "1 of 3 shards\n2 of 3 shards\n3 of 3 shards\n"
        f"3 shards of {size:,} bytes: 6 samples of 12 files\n"
        f"3 indexes made, 0 fresh; {nbytes:,} bytes, {nbytes / 6:.0f} for a sample\n"
    )
    os.remove(tmp_path / "train-001.tar.gpuload-index")
    assert "\n1 index made, 2 fresh; " in index(f"{tmp_path}/*.tar")[1]
    assert "\n3 indexes made, 0 fresh; " in index(f"{tmp_path}/*.tar", "--again", "--workers", "2")[1]


def test_damaged_and_missing_shards_are_told(tmp_path: Path) -> None:
    path = archive(tmp_path / "[bold]x.tar", {"a.jpg": bytes(600)})
    os.truncate(path, 700)
    status, text = index(str(path))
    assert status == 1
    assert text.endswith("\n")
    assert text.splitlines()[-1].startswith(f"'{path}' is cut off at 700 bytes: the member 'a.jpg'")
    assert index(f"{tmp_path}/none-*.tar") == (1, f"no shard is found for '{tmp_path}/none-*.tar' (looked for "
                                                  f"'{tmp_path}/none-*.tar')\n")  # fmt: skip


def test_odd_ones_are_remarked_on(tmp_path: Path) -> None:
    path = archive(tmp_path / "x.tar", {"a.jpg": b"1"})
    os.truncate(path, 1024)
    status, text = index(str(path))
    assert status == 0
    assert "without the empty blocks that close an archive" in text


def test_a_folder_is_all_of_its_shards(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    shards_of_pictures(tmp_path / "a", 2, 1)
    (tmp_path / "a" / "._train-000.tar").write_bytes(b"of another program")
    status, text = index(str(tmp_path / "a"), "--workers", "1")
    assert status == 0
    assert "2 shards of " in text
    (tmp_path / "none").mkdir()
    assert index(str(tmp_path / "none")) == (
        1, f"the folder '{tmp_path}/none' has no shards; expected files whose names end in .tar\n",
    )  # fmt: skip


def test_what_pack_wrote_and_printed_is_taken(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.jpg").write_bytes(jpeg_bytes(smooth_image(24, 24, 1)))
    done = CliRunner().invoke(app, ["pack", f"{tmp_path}/images", f"{tmp_path}/set", "--to", "tar", "--workers", "0"])
    pattern = done.output.split("gpuload.TarShards('")[1].split("'")[0]
    for named in (f"{tmp_path}/set", pattern):
        status, text = index(named)
        assert status == 0
        assert "0 indexes made, 1 fresh; " in text
