"""``gpuload pack``, ``verify`` and ``index``: what they take, what they say, how they end."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers import lacking
from helpers.generated_images import jpeg_bytes, smooth_image
from helpers.jpeg_dataset import COUNT, LABELS, jpegs
from helpers.tar_files import archive, shards_of_pictures
from typer.testing import CliRunner

import gpuload as gl
from gpuload.cli.app import app
from gpuload.cli.pack import parse_bytes
from gpuload.cli.source import open_source
from gpuload.packing.manifest import open_packed


def run(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return done.exit_code, done.output


def images(root: Path) -> Path:
    for data, label in zip(jpegs(), LABELS, strict=True):
        path = root / f"class {label}" / f"{len(list(root.glob('*/*')))}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


def test_a_folder_is_packed_and_verified(tmp_path: Path) -> None:
    source, target = images(tmp_path / "images"), tmp_path / "[bold]set"
    status, text = run("pack", source, target, "--to", "tar", "--workers", "0", "--shard-bytes", "15KB")
    shards = sorted(target.glob("*.tar"))
    nbytes = sum(path.stat().st_size for path in shards)
    assert status == 0, text
    lines = text.splitlines()
    assert lines[0] == f"ImageFolder({str(source)!r}: 12 images in 3 classes)"
    assert lines[-3:] == [
        "12 of 12 samples",
        f"12 samples, {nbytes:,} bytes in {len(shards)} files in {target}",
        f"Read it with gpuload.TarShards('{target}/shard-*.tar', fields=('jpg', 'cls'))",
    ]
    assert run("verify", target)[1].splitlines()[-1] == f"{target}: intact"
    shards[1].unlink()
    status, text = run("verify", target)
    assert status == 1
    assert f"{shards[1].name} is missing" in text
    assert text.splitlines()[-1].startswith("1 problem in ")


def test_damage_is_an_error_and_says_what_to_do(tmp_path: Path) -> None:
    source, target = images(tmp_path / "images"), tmp_path / "set"
    bad = source / "class 1" / "bad.jpg"
    bad.write_bytes(b"nothing")
    status, text = run("pack", source, target, "--to", "tar", "--workers", "0")
    assert status == 1
    assert f"{bad}: DecodeError: not an image" in text
    assert "skip them with --on-error skip" in text
    status, text = run("pack", source, target, "--to", "tar", "--workers", "0", "--on-error", "skip")
    assert status == 0
    assert f"skipped: {bad}: DecodeError" in text
    assert "12 samples" in text


def test_what_is_kept_is_told(tmp_path: Path) -> None:
    source = tmp_path / "images"
    source.mkdir()
    (source / "a.jpg").write_bytes(jpeg_bytes(smooth_image(64, 64, 0)))
    from PIL import Image

    Image.fromarray(smooth_image(64, 64, 0)).save(source / "b.webp")
    status, text = run("pack", source, tmp_path / "set", "--to", "tar", "--short-side", "32", "--workers", "0")
    assert status == 0
    assert text.splitlines()[0] == f"ImageFiles({str(source)!r}: 2 images)"
    assert "1 image kept unchanged, not resized: WEBP of mode RGB" in text


def test_all_that_can_be_named_is_read(tmp_path: Path) -> None:
    folder = images(tmp_path / "images")
    pattern = shards_of_pictures(tmp_path, 2, 3)
    (tmp_path / "list.csv").write_text("path,label\nimages/class 0/0.jpg,1\n")
    np.save(tmp_path / "array.npy", np.zeros((3, 8, 8, 3), np.uint8))
    assert isinstance(open_source(str(folder), {}), gl.ImageFolder)
    assert isinstance(open_source(str(folder / "class 0"), {}), gl.ImageFiles)
    assert open_source(pattern, {"fields": "jpg,cls"})[4][1] == 4
    assert len(open_source(str(tmp_path / "list.csv"), {})) == 1
    assert len(open_source(str(tmp_path / "array.npy"), {})) == 3
    status, text = run("pack", folder, tmp_path / "set", "--to", "tar", "--workers", "0")
    assert status == 0, text
    assert isinstance(open_source(str(tmp_path / "set"), {}), gl.TarShards)


def test_stores_are_read_with_their_columns(tmp_path: Path) -> None:
    lacking.require("pyarrow", "lmdb")
    folder = images(tmp_path / "images")
    for to in ("parquet", "lmdb"):
        assert run("pack", folder, tmp_path / to, "--to", to, "--workers", "0")[0] == 0
        (tmp_path / to / "manifest.json").unlink()
    assert open_source(str(tmp_path / "parquet"), {"target": ""})[0] == open_source(str(tmp_path / "parquet"), {})[0][0]
    back = open_source(str(tmp_path / "lmdb"), {"image": "{}.image", "target": "{}.label"})
    assert [label for _, label in back] == gl.ImageFolder(folder).labels.tolist()
    assert len(back) == COUNT


def test_what_is_no_source_is_told(tmp_path: Path) -> None:
    (tmp_path / "x.zip").write_bytes(b"PK")
    none, zipped = str(tmp_path / "none"), str(tmp_path / "x.zip")
    assert run("pack", none, tmp_path / "set", "--to", "tar")[1].startswith(
        f"{none!r} does not exist; expected a folder"
    )
    status, text = run("pack", zipped, tmp_path / "set", "--to", "tar")
    assert status == 1
    assert text.startswith(
        f"the kind of {zipped!r} is unknown: expected a folder of images, or a name that ends in .tar"
    )
    images(tmp_path / "images")
    status, text = run("pack", tmp_path / "images", tmp_path / "set", "--to", "tar", "--fields", "jpg")
    assert (status, text) == (1, f"--fields applies to TarShards, but '{tmp_path}/images' is read by ImageFolder\n")
    assert run("pack", tmp_path / "images", tmp_path / "set", "--to", "tar", "--shard-bytes", "many")[0] == 2
    assert run("verify", tmp_path)[0] == 1


def test_sizes() -> None:
    assert [parse_bytes(text) for text in ("256MB", "1GiB", "1.25GiB", "1.5 k", "7", "3mb")] == [
        256_000_000,
        1 << 30,
        1_342_177_280,
        1500,
        7,
        3_000_000,
    ]
    for text in ("", "MB", "1XB", "-1"):
        with pytest.raises(ValueError, match="expected a number of bytes"):
            parse_bytes(text)


@pytest.mark.parametrize("train", ["folder", "packed"])
def test_a_split_that_lacks_a_class_is_packed_with_the_labels_of_another(tmp_path: Path, train: str) -> None:
    folder = images(tmp_path / "train")
    if train == "packed":
        run("pack", folder, tmp_path / "packed", "--to", "tar", "--workers", "0")
    images(tmp_path / "val")
    shutil.rmtree(tmp_path / "val" / "class 1")
    others = {"folder": folder, "packed": tmp_path / "packed"}[train]
    run("pack", tmp_path / "val", tmp_path / "set", "--to", "tar", "--workers", "0", "--classes", others)
    made = open_packed(str(tmp_path / "set"))
    assert made.classes == ["class 0", "class 1", "class 2"]
    assert {label for _, label in made} == {0, 2}
    status, text = run("pack", tmp_path / "val", tmp_path / "set", "--to", "tar", "--workers", "0")
    assert (status, "different data" in text) == (1, True)


def test_classes_are_kept(tmp_path: Path) -> None:
    run("pack", images(tmp_path / "images"), tmp_path / "set", "--to", "tar", "--workers", "0")
    assert json.loads((tmp_path / "set" / "classes.json").read_text()) == ["class 0", "class 1", "class 2"]
    assert open_packed(str(tmp_path / "set"))[11][1] == 2


# -- indexes of tar archives ------------------------------------------------------------------------------------------


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
        f"3 shards ({size:,} bytes in total): 6 samples in 12 files\n"
        f"3 indexes built, 0 up to date: {nbytes:,} bytes in total, {nbytes / 6:.0f} per sample\n"
    )
    os.remove(tmp_path / "train-001.tar.gpuload-index")
    assert "\n1 index built, 2 up to date: " in index(f"{tmp_path}/*.tar")[1]
    assert "\n3 indexes built, 0 up to date: " in index(f"{tmp_path}/*.tar", "--again", "--workers", "2")[1]


def test_damaged_and_missing_shards_are_told(tmp_path: Path) -> None:
    path = archive(tmp_path / "[bold]x.tar", {"a.jpg": bytes(600)})
    os.truncate(path, 700)
    status, text = index(str(path))
    assert status == 1
    assert text.endswith("\n")
    assert text.splitlines()[-1].startswith(f"'{path}' is truncated at 700 bytes: the member 'a.jpg'")
    assert index(f"{tmp_path}/none-*.tar") == (1, f"no shards match '{tmp_path}/none-*.tar' (searched for "
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
    assert "2 shards (" in text
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
        assert "0 indexes built, 1 up to date: " in text
