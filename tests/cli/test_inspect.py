"""``gpuload inspect``: its input, its output, the page that it writes, and its exit status."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path

import pytest
from helpers.picture_folders import folder
from helpers.tar_files import shards_of_pictures
from rich.console import Console
from typer.testing import CliRunner

from gpuload.cli import inspect
from gpuload.cli.app import app
from gpuload.cli.inspect import BAD


def inspect_data(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments), "--workers", "0"])
    return result.exit_code, result.stdout, result.stderr


def test_inspect_of_a_folder_prints_a_summary_and_writes_the_page(tmp_path: Path) -> None:
    data, page = folder(tmp_path / "data", {"a": 3, "b": 1}), tmp_path / "page.html"
    status, text, _ = inspect_data(data, "--html", page)
    lines = text.splitlines()
    assert status == 0, text
    assert lines[:3] == [
        "4 of 4 files checked",
        "4 of 4 images decoded",
        f"data: ImageFolder({str(data)!r}: 4 images in 2 classes)",
    ]
    assert "sizes: median 56×40, smallest 56×40, largest 64×40; 2 sizes" in lines
    assert "classes: 2; the largest is a with 3, the smallest b with 1" in lines
    assert "damaged: 0; over a Decode limit: 0" in lines
    assert "\nT.Normalize(mean=(0." in text
    assert lines[-1].startswith(f"{page}: ")
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert sorted(os.listdir(tmp_path)) == ["data", "page.html"]


def test_inspect_of_damaged_files_exits_with_status_3(tmp_path: Path) -> None:
    data = folder(tmp_path / "data", {"a": 12})
    for number in range(11):
        (data / "a" / f"{number}.jpg").write_bytes(b"nothing")
    status, text, _ = inspect_data(data, "--html", "")
    assert status == BAD == 3
    assert f"damaged: {data}/a/0.jpg: DecodeError: not an image" in text
    assert "damaged: 1 more" in text
    assert 'fix: 11 images are damaged\n    gl.Loader(…, on_error="skip")' in text
    assert os.listdir(tmp_path) == ["data"]


def test_inspect_of_an_image_in_two_datasets_exits_with_status_3(tmp_path: Path) -> None:
    train, val = folder(tmp_path / "train", {"a": 3}), folder(tmp_path / "val", {"a": 2}, first=10)
    assert inspect_data(train, val, "--html", "")[0] == 0
    shutil.copy(train / "a" / "0.jpg", val / "a" / "9.jpg")
    status, text, _ = inspect_data(train, val, "--html", "")
    assert status == BAD
    assert "fix: 1 picture is in several datasets (the same file)" in text
    assert "same file: train: a/0.jpg, val: a/9.jpg\n" in text


def test_inspect_json_to_stdout_moves_the_report_to_stderr(tmp_path: Path) -> None:
    data = folder(tmp_path / "caf\udce9", {"a": 2})
    (data / "a" / "1.jpg").write_bytes(b"")
    status, stdout, stderr = inspect_data(data, "--json", "-", "--html", tmp_path / "page.html")
    summary = json.loads(stdout)
    assert status == BAD
    assert summary["images"]["looked_at"] == 2
    assert summary["damaged"]["listed"][0]["path"] == f"{data}/a/1.jpg"
    assert summary["advice"][0] == {
        "level": "bad",
        "title": "1 image is damaged",
        "text": "Training stops at the first damaged image. Fix or remove the files, or let the Loader skip them.",
        "code": 'gl.Loader(…, on_error="skip")',
    }
    assert "2 of 2 files checked" in stderr
    assert "fix: 1 image is damaged" in stderr
    status, stdout, _ = inspect_data(data, "--json", tmp_path / "found.json", "--html", "")
    assert json.loads((tmp_path / "found.json").read_text())["sizes"] == summary["sizes"]
    assert "fix: 1 image is damaged" in stdout


def test_inspect_accepts_shards_single_images_and_further_extensions(tmp_path: Path) -> None:
    status, text, _ = inspect_data(
        shards_of_pictures(tmp_path, 1, 3), "--fields", "jpg,cls", "--html", "", "--pixels", "0"
    )
    assert status == 0
    assert "images: 3" in text
    assert "classes: 3" in text
    data = folder(tmp_path / "data", {"a": 1})
    assert "data: 0.jpg" in inspect_data(data / "a" / "0.jpg", "--html", "")[1]
    (data / "a" / "1.qoi").write_bytes(b"qoif")
    assert "images: 1," in inspect_data(data, "--html", "", "--extensions", ".QOI")[1]


def test_inspect_recipe_is_shown_on_the_page_and_its_failure_leaves_the_old_page(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text("from gpuload import transforms as T\ntrain = [T.CenterCrop(16), T.RandomInvert(0.25)]\n")
    data, page = folder(tmp_path / "data", {"a": 2}), tmp_path / "page.html"
    assert inspect_data(data, "--html", page, "--recipe", f"{recipe}:train", "--draws", "3", "--images", "1")[0] == 0
    text = page.read_text()
    assert "CenterCrop(size=(16, 16))\nRandomInvert(p=0.25)" in text
    assert text.count(", draw ") == 3
    recipe.write_text("from gpuload import transforms as T\ntrain = [T.RandomCrop(1000)]\n")
    status, _, stderr = inspect_data(data, "--html", page, "--recipe", f"{recipe}:train")
    assert status == 1
    assert "RandomCrop" in stderr
    assert page.read_text() == text  # an existing page stays if the new one fails


def test_inspect_of_missing_data_or_with_wrong_options_fails(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name, message in (("empty", "has no images in it"), ("none", "does not exist; expected a folder of images")):
        status, text, stderr = inspect_data(tmp_path / name)
        assert (status, text) == (1, "")
        assert message in stderr
    assert inspect_data(tmp_path, "--pixels", "some")[0] == 2
    assert inspect_data(tmp_path, "--recipe", "nothing")[0] == 1


@pytest.mark.parametrize("width", [80, 140])
def test_inspect_in_a_terminal_prints_escaped_tables(tmp_path: Path, width: int) -> None:
    data = folder(tmp_path / "data", {"[bold]a": 1, "\x1b[31mb": 1})
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, color_system="truecolor")
    assert inspect.run([str(data)], workers=0, console=console) == 0
    text = file.getvalue()
    assert "[bold]a" in text
    assert "\\x1b[31mb" in text
    assert "\x1b[31mb" not in text
    assert "classes" in text


def test_inspect_names_at_most_ten_groups_of_duplicates(tmp_path: Path) -> None:
    data = folder(tmp_path / "data", {"a": 11})
    for number in range(11):
        shutil.copy(data / "a" / f"{number}.jpg", data / "a" / f"copy-{number}.jpg")
    status, text, _ = inspect_data(data, "--html", "")
    assert status == 0
    assert text.count("same file: a/") == 10
    assert "same file: a/0.jpg, a/copy-0.jpg\n" in text
    assert "same file: 1 more\n" in text
