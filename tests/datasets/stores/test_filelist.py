"""Lists of image files: manifests and generated names, and which entries are refused."""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stored import COUNT, LABELS, check_loader, jpegs

import gpuload as gl
from gpuload.datasets.stores import cached as cached_module
from gpuload.datasets.stores.filelist import FileList, NumberedPaths


def exactly(text: str) -> str:
    return f"^{re.escape(text)}$"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, data in enumerate(jpegs()):
        (tmp_path / f"img_{number:03d}.jpg").write_bytes(data)
    rows = [f"{label},img_{number:03d}.jpg\n" for number, label in enumerate(LABELS)]
    (tmp_path / "list.csv").write_text("label,path\n" + "".join(rows))
    return tmp_path


def listed(folder: Path, text: str, name: str = "list.csv", **options: Any) -> FileList:
    (folder / name).write_text(text)
    return FileList(folder / name, **options)


@pytest.mark.processes
def test_batches_are_those_of_the_images(folder: Path) -> None:
    check_loader(FileList(folder / "list.csv"))


def test_a_csv_file(folder: Path) -> None:
    dataset = FileList(folder / "list.csv", mode="L")
    assert dataset[-1] == (gl.Encoded(jpegs()[11], "L", f"{folder}/img_011.jpg"), 2)
    assert (len(dataset), dataset.labels.tolist(), dataset.classes) == (COUNT, LABELS, None)
    assert dataset.labels.dtype == np.uint8
    assert repr(dataset) == f"FileList('{folder}': 12 images)"
    assert FileList(folder / "list.csv", target=None)[2] == gl.Encoded(jpegs()[2], "RGB", f"{folder}/img_002.jpg")
    assert len(dataset + dataset) == 2 * COUNT


def test_columns_by_number_and_other_separators(folder: Path) -> None:
    dataset = listed(folder, "x\ta b.jpg\t-1\n\nx\tsub/c.jpg\t300\n", "list.tsv", path=1, target=2)
    assert list(dataset.paths) == [f"{folder}/a b.jpg", f"{folder}/sub/c.jpg"]
    assert (dataset.targets.tolist(), dataset.targets.dtype) == ([-1, 300], np.dtype("int32"))
    assert listed(folder, 'path;label\n"a;b.jpg";1\n', delimiter=";").paths[0] == f"{folder}/a;b.jpg"
    assert listed(folder, "\ufeffpath,label\nä.jpg,1\n").paths[0] == f"{folder}/ä.jpg"


@pytest.mark.parametrize(
    ("texts", "labels", "classes"),
    [
        (["1", "0"], [1, 0], None),
        (["1", "0.5"], [1.0, 0.5], None),
        (["1", "dog", "1"], [0, 1, 0], ["1", "dog"]),
    ],
)
def test_targets(folder: Path, texts: list[str], labels: list[Any], classes: list[str] | None) -> None:
    dataset = listed(folder, "path,label\n" + "".join(f"a.jpg,{text}\n" for text in texts))
    assert (dataset.labels.tolist(), dataset.classes) == (labels, classes)


def test_a_parquet_file(folder: Path) -> None:
    import pyarrow as arrow
    from pyarrow import parquet

    paths = [f"img_{number:03d}.jpg" for number in range(COUNT)]
    manifest = folder / "list.parquet"
    parquet.write_table(arrow.table({"file": paths, "label": LABELS, "width": [0.5] * COUNT}), manifest)
    dataset = FileList(manifest, path="file")
    assert [label for _, label in dataset] == LABELS
    assert [image.data for image, _ in dataset] == jpegs()
    assert FileList(manifest, path="file", target="width").labels.dtype == np.float64
    with pytest.raises(ValueError, match=re.escape("no column 'path'; its columns are 'file', 'label', 'width'. Name")):
        FileList(manifest)
    parquet.write_table(arrow.table({"path": ["a.jpg", None], "label": [1, 2]}), manifest)
    with pytest.raises(ValueError, match=exactly(f"row 1 of {str(manifest)!r} has no path, but None")):
        FileList(manifest)
    manifest.write_bytes(b"none")
    with pytest.raises(ValueError, match=r"list.parquet' is no Parquet file, or is cut off: "):
        FileList(manifest)


def test_generated_names_take_no_memory(folder: Path) -> None:
    dataset = FileList("img_{index:03d}.jpg", root=folder, count=COUNT, labels=LABELS)
    assert dataset[-1] == (gl.Encoded(jpegs()[11], "RGB", f"{folder}/img_011.jpg"), 2)
    assert FileList("img_{index:03d}.jpg", root=folder, count=2, start=5)[1].data == jpegs()[6]
    many = FileList("{index}.jpg", count=10_000_000)
    assert many.paths[-1] == os.path.abspath("9999999.jpg")
    assert many.paths[3:5] == [os.path.abspath("3.jpg"), os.path.abspath("4.jpg")]
    assert len(pickle.dumps(many)) < 1000
    assert many.paths == NumberedPaths(many.root, "{index}.jpg", 10_000_000, 0)
    with pytest.raises(IndexError, match="index 10000000 is out of range: there are 10000000 paths"):
        many.paths[10_000_000]


def test_a_long_manifest_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPULOAD_CACHE", str(folder / "cache"))
    monkeypatch.setattr(cached_module, "LEAST_BYTES", 10)
    text = "path,label\na.jpg,dog\nb.jpg,cat\n"
    first = listed(folder, text)
    with monkeypatch.context() as patch:
        patch.setattr("gpuload.datasets.stores.filelist._packed", None)
        again = FileList(folder / "list.csv")
    assert again.paths == first.paths
    assert (again.labels.tolist(), again.classes) == ([1, 0], ["cat", "dog"])
    assert FileList(folder / "list.csv", target=None).labels is None, "of other columns is another index"
    assert len(listed(folder, text + "c.jpg,cow\n")) == 3, "it was written to"


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (
            "file,label\na,1\n",
            {},
            "has no column 'path'; its first line says ['file', 'label']. Name columns with path=",
        ),
        ("path,label\na.jpg,1\nb.jpg\n", {}, "line 3 of {} has 1 fields, but column 1 (from 0) is needed: ['b.jpg']"),
        ("path,label\na.jpg,\n", {}, "line 2 of {} has no target; leave such rows out, or read none with target=None"),
        ("path,label\n,1\n", {}, "line 2 of {} has no path, but ''"),
        ("path,label\n", {}, "{} names no images"),
        ("", {}, "{} has no column 'path'; its first line says []"),
        ('path,label\n"a.jpg"x,1\n', {}, "{} cannot be read as CSV in UTF-8, near line 2: "),
        ("path,label\n", {"path": 0}, "path and target must both be names of columns, or both numbers"),
        ("path,label\n", {"count": 3}, "count=, start= and labels= are for generated names, as in 'img_"),
        ("path,label\n", {"labels": [3]}, "count=, start= and labels= are for generated names"),
    ],
)
def test_manifests_that_lack_something(folder: Path, text: str, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message.replace("{}", repr(f"{folder}/list.csv")))):
        listed(folder, text, **options)


@pytest.mark.parametrize("path", ["../secret.jpg", "sub/../../secret.jpg", "/etc/passwd"])
def test_no_path_leads_out_of_the_root(folder: Path, path: str) -> None:
    message = (
        f"line 2 of '{folder}/list.csv' has the path {path!r}, which leads out of {str(folder)!r}; give a root= that "
        "holds all images"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        listed(folder, f"path,label\n{path},1\n")


def test_paths_within_the_root_may_take_any_form(folder: Path) -> None:
    dataset = listed(folder, f"path,label\nsub/../a.jpg,1\n{folder}/b..jpg,1\n")
    assert list(dataset.paths) == [f"{folder}/a.jpg", f"{folder}/b..jpg"]
    assert FileList(folder / "list.csv", root=folder.parent).root == str(folder.parent)


@pytest.mark.parametrize(
    ("pattern", "options", "message"),
    [
        ("{index}.jpg", {}, "generated names need count=, how many there are, got None"),
        ("{index}.jpg", {"count": 0}, "generated names need count=, how many there are, got 0"),
        ("{index:x.jpg", {"count": 3}, "'{index:x.jpg' cannot be filled in: "),
        ("{index}{name}.jpg", {"count": 3}, "cannot be filled in: 'name'; expected a name such as 'img_{index:07d}"),
        ("{index}.jpg", {"count": 3, "start": 0.5}, "start must be a whole number, the first index, got 0.5"),
        (
            "{index}.jpg",
            {"count": 3, "labels": [1]},
            "labels has the shape (1,), but there must be one for each of the 3",
        ),
    ],
)
def test_patterns_that_cannot_be_filled_in(pattern: str, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        FileList(pattern, **options)


def test_no_manifest_and_a_missing_image(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none.csv' does not exist; expected a manifest, .csv or .parquet, or"):
        FileList(folder / "none.csv")
    with pytest.raises(FileNotFoundError) as caught:
        _ = listed(folder, "path,label\ngone.jpg,1\n")[0]
    assert caught.value.filename == f"{folder}/gone.jpg"
