"""``gpuload pack``, ``verify`` and ``index``: their input, output and exit status."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers import lacking
from helpers.generated_images import encode, jpeg_bytes, smooth_image
from helpers.jpeg_dataset import COUNT, LABELS, jpegs
from helpers.tar_files import archive, shards_of_pictures
from typer.testing import CliRunner

import gpuload as gl
from gpuload.cli.app import app
from gpuload.cli.pack import parse_bytes
from gpuload.cli.source import open_source
from gpuload.packing.manifest import open_packed


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


def pack(source: Path, target: Path, *arguments: str, to: str = "tar") -> tuple[int, str]:
    return run("pack", source, target, "--to", to, "--workers", "0", *arguments)


def write_images(root: Path) -> Path:
    for data, label in zip(jpegs(), LABELS, strict=True):
        path = root / f"class {label}" / f"{len(list(root.glob('*/*')))}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


def test_pack_of_a_folder_is_intact_until_a_shard_is_missing(tmp_path: Path) -> None:
    source, target = write_images(tmp_path / "images"), tmp_path / "[bold]set"
    status, text = pack(source, target, "--shard-bytes", "15KB")
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


def test_pack_of_a_damaged_file_fails_unless_on_error_is_skip(tmp_path: Path) -> None:
    source, target = write_images(tmp_path / "images"), tmp_path / "set"
    damaged = source / "class 1" / "bad.jpg"
    damaged.write_bytes(b"nothing")
    status, text = pack(source, target)
    assert status == 1
    assert f"{damaged}: DecodeError: not an image" in text
    assert "skip them with --on-error skip" in text
    status, text = pack(source, target, "--on-error", "skip")
    assert status == 0
    assert f"skipped: {damaged}: DecodeError" in text
    assert "12 samples" in text


def test_pack_reports_images_that_are_not_resized(tmp_path: Path) -> None:
    source = tmp_path / "images"
    source.mkdir()
    (source / "a.jpg").write_bytes(jpeg_bytes(smooth_image(64, 64, 0)))
    (source / "b.webp").write_bytes(encode(smooth_image(64, 64, 0), "WEBP"))
    status, text = pack(source, tmp_path / "set", "--short-side", "32")
    assert status == 0
    assert text.splitlines()[0] == f"ImageFiles({str(source)!r}: 2 images)"
    assert "1 image kept unchanged, not resized: WEBP of mode RGB" in text


def test_open_source_reads_each_kind_of_source(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images")
    pattern = shards_of_pictures(tmp_path, 2, 3)
    (tmp_path / "list.csv").write_text("path,label\nimages/class 0/0.jpg,1\n")
    np.save(tmp_path / "array.npy", np.zeros((3, 8, 8, 3), np.uint8))
    assert isinstance(open_source(str(folder), {}), gl.ImageFolder)
    assert isinstance(open_source(str(folder / "class 0"), {}), gl.ImageFiles)
    _, label = open_source(pattern, {"fields": "jpg,cls"})[4]
    assert label == 4
    assert len(open_source(str(tmp_path / "list.csv"), {})) == 1
    assert len(open_source(str(tmp_path / "array.npy"), {})) == 3
    status, text = pack(folder, tmp_path / "set")
    assert status == 0, text
    assert isinstance(open_source(str(tmp_path / "set"), {}), gl.TarShards)


def test_open_source_reads_stores_by_their_columns(tmp_path: Path) -> None:
    lacking.require("pyarrow", "lmdb")
    folder = write_images(tmp_path / "images")
    for store in ("parquet", "lmdb"):
        assert pack(folder, tmp_path / store, to=store)[0] == 0
        (tmp_path / store / "manifest.json").unlink()
    image, _label = open_source(str(tmp_path / "parquet"), {})[0]
    assert open_source(str(tmp_path / "parquet"), {"target": ""})[0] == image
    dataset = open_source(str(tmp_path / "lmdb"), {"image": "{}.image", "target": "{}.label"})
    assert [label for _, label in dataset] == gl.ImageFolder(folder).labels.tolist()
    assert len(dataset) == COUNT


def test_pack_of_a_missing_or_unknown_source_or_with_wrong_options_fails(tmp_path: Path) -> None:
    (tmp_path / "x.zip").write_bytes(b"PK")
    missing, archive_path = str(tmp_path / "none"), str(tmp_path / "x.zip")
    assert run("pack", missing, tmp_path / "set", "--to", "tar")[1].startswith(
        f"{missing!r} does not exist; expected a folder"
    )
    status, text = run("pack", archive_path, tmp_path / "set", "--to", "tar")
    assert status == 1
    assert text.startswith(
        f"the kind of {archive_path!r} is unknown: expected a folder of images, or a name that ends in .tar"
    )
    write_images(tmp_path / "images")
    status, text = run("pack", tmp_path / "images", tmp_path / "set", "--to", "tar", "--fields", "jpg")
    assert (status, text) == (1, f"--fields applies to TarShards, but '{tmp_path}/images' is read by ImageFolder\n")
    assert run("pack", tmp_path / "images", tmp_path / "set", "--to", "tar", "--shard-bytes", "many")[0] == 2
    assert run("verify", tmp_path)[0] == 1


def test_parse_bytes_accepts_decimal_and_binary_units() -> None:
    texts = {"256MB": 256_000_000, "1GiB": 1 << 30, "1.25GiB": 1_342_177_280, "1.5 k": 1500, "7": 7, "3mb": 3_000_000}
    assert {text: parse_bytes(text) for text in texts} == texts
    for text in ("", "MB", "1XB", "-1"):
        with pytest.raises(ValueError, match="expected a number of bytes"):
            parse_bytes(text)


@pytest.mark.parametrize("train", ["folder", "packed"])
def test_pack_classes_gives_a_split_the_labels_of_another(tmp_path: Path, train: str) -> None:
    folder = write_images(tmp_path / "train")
    if train == "packed":
        pack(folder, tmp_path / "packed")
    write_images(tmp_path / "val")
    shutil.rmtree(tmp_path / "val" / "class 1")
    classes = {"folder": folder, "packed": tmp_path / "packed"}[train]
    pack(tmp_path / "val", tmp_path / "set", "--classes", classes)
    packed = open_packed(str(tmp_path / "set"))
    assert packed.classes == ["class 0", "class 1", "class 2"]
    assert {label for _, label in packed} == {0, 2}
    status, text = pack(tmp_path / "val", tmp_path / "set")
    assert status == 1
    assert "different data" in text


def test_pack_stores_class_names_and_labels(tmp_path: Path) -> None:
    pack(write_images(tmp_path / "images"), tmp_path / "set")
    assert json.loads((tmp_path / "set" / "classes.json").read_text()) == ["class 0", "class 1", "class 2"]
    assert open_packed(str(tmp_path / "set"))[11][1] == 2


# -- indexes of tar archives ------------------------------------------------------------------------------------------


def test_index_builds_missing_indexes_and_counts_them(tmp_path: Path) -> None:
    pattern = shards_of_pictures(tmp_path, 3, 2)
    size = sum(path.stat().st_size for path in tmp_path.glob("*.tar"))
    status, text = run("index", pattern)
    nbytes = sum(path.stat().st_size for path in tmp_path.glob("*.gpuload-index"))
    assert status == 0
    assert text == (
        "1 of 3 shards\n2 of 3 shards\n3 of 3 shards\n"
        f"3 shards ({size:,} bytes in total): 6 samples in 12 files\n"
        f"3 indexes built, 0 up to date: {nbytes:,} bytes in total, {nbytes / 6:.0f} per sample\n"
    )
    os.remove(tmp_path / "train-001.tar.gpuload-index")
    assert "\n1 index built, 2 up to date: " in run("index", f"{tmp_path}/*.tar")[1]
    assert "\n3 indexes built, 0 up to date: " in run("index", f"{tmp_path}/*.tar", "--again", "--workers", "2")[1]


def test_index_of_damaged_or_missing_shards_fails(tmp_path: Path) -> None:
    path = archive(tmp_path / "[bold]x.tar", {"a.jpg": bytes(600)})
    os.truncate(path, 700)
    status, text = run("index", path)
    assert status == 1
    assert text.endswith("\n")
    assert text.splitlines()[-1].startswith(f"'{path}' is truncated at 700 bytes: the member 'a.jpg'")
    assert run("index", f"{tmp_path}/none-*.tar") == (1, f"no shards match '{tmp_path}/none-*.tar' (searched for "
                                                  f"'{tmp_path}/none-*.tar')\n")  # fmt: skip


def test_index_notes_an_archive_without_closing_blocks(tmp_path: Path) -> None:
    path = archive(tmp_path / "x.tar", {"a.jpg": b"1"})
    os.truncate(path, 1024)
    status, text = run("index", path)
    assert status == 0
    assert "without the empty blocks that close an archive" in text


def test_index_of_a_folder_covers_its_shards(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    shards_of_pictures(tmp_path / "a", 2, 1)
    (tmp_path / "a" / "._train-000.tar").write_bytes(b"of another program")
    status, text = run("index", tmp_path / "a", "--workers", "1")
    assert status == 0
    assert "2 shards (" in text
    (tmp_path / "none").mkdir()
    assert run("index", tmp_path / "none") == (
        1, f"the folder '{tmp_path}/none' has no shards; expected files whose names end in .tar\n",
    )  # fmt: skip


def test_index_accepts_what_pack_wrote_and_printed(tmp_path: Path) -> None:
    _, output = pack(write_images(tmp_path / "images"), tmp_path / "set")
    pattern = output.split("gpuload.TarShards('")[1].split("'")[0]
    for source in (f"{tmp_path}/set", pattern):
        status, text = run("index", source)
        assert status == 0
        assert "0 indexes built, 1 up to date: " in text
