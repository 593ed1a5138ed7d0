"""Litter: files of other programs in folders of images, which are neither samples nor classes, and are logged."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import lacking
from helpers.generated_images import jpeg_bytes, smooth_image
from helpers.tar_files import archive

import gpuload as gl
from gpuload.datasets.litter import is_litter

IMAGE = jpeg_bytes(smooth_image(24, 24, 1))
SAMPLE_NAMES = ("cat/1.jpg", "cat/2.jpg", "dog/_3.jpg", "dog/@4/.5.jpg")
LITTER_NAMES = (
    ".ipynb_checkpoints/1-checkpoint.jpg", "cat/.ipynb_checkpoints/1-checkpoint.jpg", "cat/@eaDir/1.jpg/THUMB_M.jpg",
    "__MACOSX/cat/._1.jpg", "cat/._2.jpg", "dog/._3.jpg", ".Trash-1000/files/9.jpg", "#recycle/8.jpg",
)  # fmt: skip


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in (*SAMPLE_NAMES, *LITTER_NAMES, "cat/@eaDir/notes.txt", "cat/._notes.txt"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_bytes(IMAGE)
    return tmp_path / "data"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([*LITTER_NAMES, "a/.Trash/b.jpg", "@eaDir", "._a", "a/$RECYCLE.BIN/b.jpg", ".Trashes"], True),
        ([*SAMPLE_NAMES, "a_.b", "MACOSX/a", ".a.jpg", "x@eaDir/a.jpg", ".Trash-/a", ".Trash-can/a", ""], False),
    ],
)
def test_is_litter_recognizes_files_of_other_programs(names: list[str], expected: bool) -> None:
    assert {name: is_litter(name.encode()) for name in names} == dict.fromkeys(names, expected)


@pytest.mark.parametrize("is_cached", [False, True])
def test_folders_skip_litter_and_log_one_line(
    root: Path, logged: Callable[[], list[str]], index_cache: Path, is_cached: bool
) -> None:
    if is_cached:  # a scan of folders that did not change recently
        for folder, _, _ in os.walk(root):
            os.utime(folder, (1e9, 1e9))
    for _ in range(1 + is_cached):
        dataset = gl.ImageFolder(root)
        assert dataset.classes == ["cat", "dog"]
        assert sorted(os.path.relpath(path, root) for path in dataset.paths) == sorted(SAMPLE_NAMES)
        (line,) = logged()
        assert line.startswith(f"{str(root)!r}: skipped files of other programs: 6 folders and 2 files ('")
        assert line.endswith(", …)")
        assert sorted(os.path.relpath(path, root) for path in gl.ImageFiles(root).paths) == sorted(SAMPLE_NAMES)
        assert len(logged()) == 1
    assert len(list(index_cache.rglob("*.index"))) == is_cached


def test_clean_folder_logs_nothing_and_links_in_litter_are_ignored(root: Path, logged: Callable[[], list[str]]) -> None:
    (root / "cat" / "._9.jpg").symlink_to("/etc/passwd")
    (root / ".Trashes").symlink_to("/")
    assert gl.ImageFolder(root).classes == ["cat", "dog"]
    assert len(logged()) == 1
    assert len(gl.ImageFiles(root / "dog" / "@4")) == 1
    assert logged() == []


def test_image_files_reads_a_litter_folder_passed_as_root(root: Path) -> None:
    assert len(gl.ImageFiles(root / "cat" / "@eaDir")) == 1


def test_image_folder_at_a_url_skips_litter(root: Path, logged: Callable[[], list[str]]) -> None:
    dataset = gl.ImageFolder(f"file://{root}")
    assert (dataset.classes, len(dataset)) == (["cat", "dog"], 4)
    assert [line.partition(" (")[0] for line in logged()] == [
        f"'file://{root}': skipped files of other programs: 8 files"
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_tar_shards_skip_litter_and_log_one_line(tmp_path: Path, logged: Callable[[], list[str]], stream: bool) -> None:
    path = archive(tmp_path / "x.tar", dict.fromkeys((*SAMPLE_NAMES, *LITTER_NAMES, "cat/.DS_Store"), IMAGE))
    dataset = gl.TarShards(path, fields="jpg", stream=stream)
    assert len(list(dataset)) == 3  # a name that begins with a dot has no key
    messages = logged()
    assert len(messages) == 1
    assert f"{str(path)!r}" in messages[0]
    assert "skipped files of other programs: 8 files" in messages[0]
    reopened: Any = gl.TarShards(path, fields="jpg", stream=stream)  # by the index that was saved
    assert len(list(reopened)) == 3
    assert logged() == messages


def test_shard_patterns_skip_litter(tmp_path: Path, logged: Callable[[], list[str]]) -> None:
    for name in ("a/x.tar", "@eaDir/x.tar", "a/__MACOSX/x.tar"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        archive(tmp_path / name, {"1.jpg": IMAGE})
    assert gl.TarShards(tmp_path / "**" / "*.tar").shards == [str(tmp_path / "a" / "x.tar")]
    assert [line.partition(" (")[0] for line in logged()] == [
        f"{str(tmp_path / '**' / '*.tar')!r}: skipped files of other programs: 2 files"
    ]
    assert len(gl.TarShards(tmp_path / "@eaDir" / "*.tar").shards) == 1


@lacking.needs("typer")
def test_inspect_counts_litter_and_recognizes_the_folder(root: Path) -> None:
    from typer.testing import CliRunner

    from gpuload.cli.app import app

    (root / "._1.jpg").write_bytes(IMAGE)
    result = CliRunner().invoke(app, ["inspect", str(root), "--html", "", "--workers", "0", "--json", "-"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["data"][0]["kind"].startswith("ImageFolder(")
    assert report["data"][0]["ignored"] == {
        "(images of other programs, as in .ipynb_checkpoints)": 9, ".txt": 2
    }  # fmt: skip
