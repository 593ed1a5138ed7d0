"""The folder of JPEGs generated from scikit-image's photographs."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path

import pytest
from helpers import lacking
from helpers.generated_images import smooth_image
from PIL import Image

from gpuload.cli.pictures import PhotographsMissing, make_folder, make_picture, photographs

needs_skimage = lacking.needs("skimage")


def test_make_picture_depends_only_on_the_number() -> None:
    photograph = Image.fromarray(smooth_image(480, 640, 0))
    picture, same_picture, next_picture = (make_picture(photograph, number) for number in (7, 7, 8))
    assert picture == same_picture
    assert picture != next_picture
    assert Image.open(io.BytesIO(picture)).size in {(500, 375), (500, 333), (375, 500), (400, 400)}


@pytest.mark.slow
@needs_skimage
def test_make_folder_keeps_a_complete_folder_and_rebuilds_an_interrupted_one(tmp_path: Path) -> None:
    root = tmp_path / "photographs"
    seen: list[int] = []
    assert make_folder(root, count=16, progress=seen.append) == root
    assert seen == list(range(1, 17))
    files = sorted(root.glob("*/*.jpg"))
    assert len(files) == 16
    assert {file.parent.name for file in files} == set(photographs())
    stamps = [file.stat().st_mtime_ns for file in files]
    make_folder(root, count=16)
    assert [file.stat().st_mtime_ns for file in files] == stamps

    def interrupt(count: int) -> None:
        if count == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_folder(root, count=20, progress=interrupt)
    make_folder(root, count=20)
    assert len(list(root.glob("*/*.jpg"))) == 20


@needs_skimage
def test_make_folder_refuses_a_folder_of_other_files(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("…")
    with pytest.raises(FileExistsError, match="and is not a demo folder: remove it, or choose another folder"):
        make_folder(tmp_path / "mine", count=8)
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_photographs_without_skimage_raise_photographs_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PhotographsMissing, match=r"pip install 'gpuload\[demo\]'"):
        photographs()
