"""``gpuload index``: what it makes, and what it says."""

from __future__ import annotations

import os
from pathlib import Path

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
        f"3 shards with {size:,} bytes: 6 samples of 12 files\n"
        f"3 indexes made, 0 fresh; they have {nbytes:,} bytes, {nbytes / 6:.0f} for a sample\n"
    )
    os.remove(tmp_path / "train-001.tar.gpuload-index")
    assert "\n1 indexes made, 2 fresh; " in index(f"{tmp_path}/*.tar")[1]
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
