"""`FileList`: manifests, tables in memory, targets, and errors about entries."""

from __future__ import annotations

import re
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import lacking
from helpers.arrow_threads import threads_of_arrow
from helpers.both_loaders import gpuload_batches
from helpers.jpeg_dataset import COUNT, LABELS, check_loader, jpegs
from helpers.patterns import exactly
from hypothesis import given
from hypothesis import strategies as st

import gpuload as gl
from gpuload import transforms as T
from gpuload.datasets.stores.filelist import FileList, encode_targets


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, data in enumerate(jpegs()):
        (tmp_path / f"img_{number:03d}.jpg").write_bytes(data)
    rows = [f"{label},img_{number:03d}.jpg\n" for number, label in enumerate(LABELS)]
    (tmp_path / "list.csv").write_text("label,path\n" + "".join(rows))
    return tmp_path


def write_parquet(path: Path, columns: dict[str, Any]) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path)


def write_list(folder: Path, text: str, name: str = "list.csv", **options: Any) -> FileList:
    (folder / name).write_text(text)
    return FileList(folder / name, **options)


@pytest.mark.processes
def test_file_list_batches_equal_batches_of_the_images(folder: Path) -> None:
    check_loader(FileList(folder / "list.csv"))


def test_file_list_reads_a_csv_file(folder: Path) -> None:
    dataset = FileList(folder / "list.csv", mode="L")
    assert dataset[-1] == (gl.Encoded(jpegs()[11], "L", f"{folder}/img_011.jpg"), 2)
    assert (len(dataset), dataset.labels.tolist(), dataset.classes) == (COUNT, LABELS, None)
    assert dataset.labels.dtype == np.uint8
    assert repr(dataset) == f"FileList('{folder}': 12 images)"
    assert FileList(folder / "list.csv", target=None)[2] == gl.Encoded(jpegs()[2], "RGB", f"{folder}/img_002.jpg")
    assert len(dataset + dataset) == 2 * COUNT


def test_file_list_takes_column_numbers_and_any_delimiter(folder: Path) -> None:
    dataset = write_list(folder, "x\ta b.jpg\t-1\n\nx\tsub/c.jpg\t300\n", "list.tsv", path=1, target=2)
    assert list(dataset.paths) == [f"{folder}/a b.jpg", f"{folder}/sub/c.jpg"]
    assert (dataset.targets.tolist(), dataset.targets.dtype) == ([-1, 300], np.dtype("int32"))
    assert write_list(folder, 'path;label\n"a;b.jpg";1\n', delimiter=";").paths[0] == f"{folder}/a;b.jpg"
    assert write_list(folder, "\ufeffpath,label\nä.jpg,1\n").paths[0] == f"{folder}/ä.jpg"


@pytest.mark.filterwarnings("ignore:the targets in the column")
@pytest.mark.parametrize(
    ("texts", "labels", "classes"),
    [
        (["1", "0"], [1, 0], None),
        (["1", "0.5"], [1.0, 0.5], None),
        (["1", "dog", "1"], [0, 1, 0], ["1", "dog"]),
        (["007", "7", "10"], [0, 2, 1], ["007", "10", "7"]),
        (["nan", "inf"], [1, 0], ["inf", "nan"]),
        (["1_000", "2"], [0, 1], ["1_000", "2"]),
        (["1e999", "2"], [0, 1], ["1e999", "2"]),
        (["+5", " -0 ", "3"], [5, 0, 3], None),
        ([".5", "1.", "-2e3"], [0.5, 1.0, -2000.0], None),
        (["9223372036854775807", "-1"], [9223372036854775807, -1], None),
        (["9223372036854775809", "9223372036854775808"], [1, 0], ["9223372036854775808", "9223372036854775809"]),
        (["9" * 5000, "1"], [1, 0], ["1", "9" * 5000]),
    ],
)
def test_file_list_targets_are_numbers_or_indices_into_sorted_names(
    folder: Path, texts: list[str], labels: list[Any], classes: list[str] | None
) -> None:
    dataset = write_list(folder, "path,label\n" + "".join(f"a.jpg,{text}\n" for text in texts))
    assert (dataset.labels.tolist(), dataset.classes) == (labels, classes)


NUMBERED_ROWS = "".join(f"{n}.jpg,{n}\n" for n in range(20))


@pytest.mark.usefixtures("index_cache")
def test_file_list_warns_each_time_of_a_cell_that_is_not_a_number(folder: Path) -> None:
    text = (
        f"the targets in the column 'label' of '{folder}/list.csv' are treated as class names, because line 3 of "
        f"'{folder}/list.csv' has 'n/a', which is not a number; correct such cells, or list the names in classes="
    )
    with pytest.warns(UserWarning, match=exactly(text)) as caught:
        write_list(folder, f"path,label\n\na.jpg,n/a\n{NUMBERED_ROWS}")
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match=exactly(text)):
        dataset = FileList(folder / "list.csv")
    assert len(dataset.classes or ()) == 21  # n/a and 20 numbers
    FileList(folder / "list.csv", classes=dataset)


@pytest.mark.parametrize(
    ("cells", "warning"),
    [
        (["label", "3", "4", "5"], "line 1 of .* has 'label'"),
        ([*map(str, range(17)), "x", "y", "x"], "line 18 of .* has 'x'"),
        ([*map(str, range(20)), "007"], "line 21 of .* has '007'"),
        (["1.5", "2", "3", "nan"], "line 4 of .* has 'nan'"),
    ],
)
def test_file_list_warns_of_a_few_names_among_numbers(folder: Path, cells: list[str], warning: str) -> None:
    with pytest.warns(UserWarning, match=warning):
        write_list(folder, "".join(f"a.jpg,{cell}\n" for cell in cells), path=0, target=1)


@pytest.mark.parametrize("cells", [["cat", "dog", "1", "2"], ["n01440764"] * 20])
def test_file_list_does_not_warn_of_a_column_of_names(folder: Path, cells: list[str]) -> None:
    dataset = write_list(folder, "".join(f"a.jpg,{cell}\n" for cell in cells), path=0, target=1)
    assert dataset.classes == sorted(set(cells))


@pytest.mark.usefixtures("index_cache")
def test_file_list_with_classes_keeps_the_labels_of_a_split_that_lacks_one(folder: Path) -> None:
    train = write_list(folder, "path,label\na.jpg,ant\nb.jpg,bee\nc.jpg,cat\n")
    val = write_list(folder, "path,label\nx.jpg,cat\ny.jpg,bee\nz.jpg,cat\n", "val.csv")
    assert val.labels.tolist() == [1, 0, 1]
    for classes in (train, train.classes, ("ant", "bee", "cat"), ["cat", "bee"]):
        val = FileList(folder / "val.csv", classes=classes)  # other classes are not read from the cache
        assert val.classes == (train.classes if classes is train else list(classes))
        assert [val.classes[label] for label in val.labels] == ["cat", "bee", "cat"]
    numbers = write_list(folder, "path,label\na.jpg,2\nb.jpg,10\n", "numbers.csv", classes=["2", "10", "x"])
    assert numbers.labels.tolist() == [0, 1], "with classes=, numbers must be treated as names"
    text = (
        f"line 3 of '{folder}/val.csv' has the class 'bee', which is not among the 2 names in classes= ('ant', 'cat'); "
        "append it to that list, so that the other labels stay the same, or remove it"
    )
    with pytest.raises(ValueError, match=exactly(text)):
        FileList(folder / "val.csv", classes=["ant", "cat"])


@lacking.needs("pyarrow")
def test_file_list_reads_typed_targets_of_a_parquet_file(folder: Path) -> None:
    import pyarrow

    columns = {
        "price": [Decimal("1.75"), Decimal("2.50")],
        "large": pyarrow.array([1 << 63, (1 << 63) + 1], pyarrow.uint64()),
        "flag": [True, False],
        "nan": [float("nan"), 1.0],
    }
    manifest = folder / "list.parquet"
    write_parquet(manifest, {"path": ["a.jpg", "b.jpg"], **columns})
    datasets = {name: FileList(manifest, target=name) for name in columns}
    assert datasets["price"].labels.tolist() == [1.75, 2.5]
    assert datasets["large"].classes == ["9223372036854775808", "9223372036854775809"]
    assert datasets["flag"].labels.tolist() == [1, 0]
    assert np.isnan(datasets["nan"].labels[0])


@lacking.needs("pyarrow")
@pytest.mark.processes
def test_file_list_reads_parquet_with_at_most_one_thread(folder: Path) -> None:
    columns = [f"c{number}" for number in range(8)]
    write_parquet(folder / "list.parquet", {"path": ["a.jpg"] * COUNT, **dict.fromkeys(columns, LABELS)})
    code = f"""
import gpuload as gl
print(threads())
assert len(gl.FileList({str(folder / "list.parquet")!r}, target={columns})) == {COUNT}
print(threads())
"""
    assert threads_of_arrow(code) <= 1  # the thread that reads files


@lacking.needs("pyarrow")
def test_file_list_reads_a_parquet_file(folder: Path) -> None:
    paths = [f"img_{number:03d}.jpg" for number in range(COUNT)]
    manifest = folder / "list.parquet"
    write_parquet(manifest, {"file": paths, "label": LABELS, "width": [0.5] * COUNT})
    dataset = FileList(manifest, path="file")
    assert [label for _, label in dataset] == LABELS
    assert [image.data for image, _ in dataset] == jpegs()
    assert FileList(manifest, path="file", target="width").labels.dtype == np.float64
    with pytest.raises(ValueError, match=re.escape("no column 'path'; its columns are 'file', 'label', 'width'.")):
        FileList(manifest)
    write_parquet(manifest, {"path": ["a.jpg", None], "label": [1, 2]})
    with pytest.raises(ValueError, match=exactly(f"row 1 of {str(manifest)!r} must have a path, got None")):
        FileList(manifest)
    manifest.write_bytes(b"none")
    with pytest.raises(ValueError, match=r"list.parquet' is not a Parquet file, or is truncated: "):
        FileList(manifest)


@pytest.mark.usefixtures("index_cache")
def test_file_list_manifest_is_cached_until_the_file_changes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "path,label\na.jpg,dog\nb.jpg,cat\n"
    dataset = write_list(folder, text)
    with monkeypatch.context() as patch:
        patch.setattr("gpuload.datasets.stores.filelist._pack_rows", None)
        cached = FileList(folder / "list.csv")
    assert cached.paths == dataset.paths
    assert (cached.labels.tolist(), cached.classes) == ([1, 0], ["cat", "dog"])
    assert FileList(folder / "list.csv", target=None).labels is None, "cached targets were used"
    assert len(write_list(folder, text + "c.jpg,cow\n")) == 3, "a changed file must be read again"


NUL_ERROR = "has a NUL byte, so it is damaged or not in UTF-8"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("file,label\n", "{} has no column 'path'; its first line is ['file', 'label']. Select columns with path"),
        ("", "{} has no column 'path'; its first line is []"),
        ("path;label\n", "its first line is ['path;label']. Its columns are separated by ';': pass delimiter=';'"),
        ("path\tlabel\n", "Its columns are separated by '\\t': pass delimiter='\\t'"),
        ("path, label\n", "its first line is ['path', ' label']. If you mean ' label', pass target=' label'"),
        ("Path,label\n", "If you mean 'Path', pass path='Path'"),
        ("p\0a\0t\0h\0", f"first line of {{}} {NUL_ERROR} (UTF-16 text is full of NUL bytes); save the table as UTF-8"),
        ("path,label\n", "{} lists no images"),
        ("path,label\na,1\nb\n", "line 3 of {} has 1 fields, but column 1 (counted from 0) is needed: ['b']"),
        ("path,label\na.jpg,\n", "line 2 of {} has no target; remove such rows, or pass target=None to"),
        ("path,label\n,1\n", "line 2 of {} must have a path, got ''"),
        ('path,label\n"a.jpg"x,1\n', "{} cannot be read as CSV in UTF-8, near line 2: "),
        ("path,label\na.jpg,1\nb\0.jpg,1\n", f"line 3 of {{}} {NUL_ERROR}"),
        ("path,label\na.jpg,\x001\n", f"line 2 of {{}} {NUL_ERROR}"),
        ("path,label\n../secret.jpg,1\n", "line 2 of {} has the path '../secret.jpg', which points outside"),
        ("path,label\nsub/../../secret.jpg,1\n", "has the path 'sub/../../secret.jpg', which points outside"),
    ],
)
def test_file_list_names_the_fault_of_a_manifest(folder: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message.replace("{}", repr(f"{folder}/list.csv")))):
        write_list(folder, text)


CLASSES_ERROR = "several targets, classes= must be a dict {'a': names, …}"
COLUMNS_ERROR = "path and target must be either column names, or column indices"
DELIMITER_ERROR = "delimiter must be one character, such as ';' or '\\t', got"
TARGET_ERROR = "target must be a column, or a list of distinct columns, got"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": 0}, COLUMNS_ERROR),
        ({"target": ["label", 1]}, COLUMNS_ERROR),
        ({"delimiter": ";"}, "Its columns are separated by ',': pass delimiter=','"),
        ({"delimiter": ";;"}, f"{DELIMITER_ERROR} ';;'"),
        ({"delimiter": ""}, f"{DELIMITER_ERROR} ''"),
        ({"delimiter": "\t", "path": 0, "target": 1}, "if ',' separates the fields, pass delimiter=','"),
        ({"target": []}, f"{TARGET_ERROR} []"),
        ({"target": ["a", "a"]}, f"{TARGET_ERROR} ['a', 'a']"),
        ({"target": ["a"], "classes": ["x"]}, f"{CLASSES_ERROR}, got ['x']"),
        ({"target": ["a"], "classes": {"b": ["x"]}}, CLASSES_ERROR),
        ({"target": None, "classes": ["x"]}, "classes= names the targets, but target=None reads no targets; omit one"),
    ],
)
def test_file_list_refuses_wrong_arguments(folder: Path, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        FileList(folder / "list.csv", **options)


def test_file_list_refuses_csv_that_is_not_utf_8(folder: Path) -> None:
    (folder / "list.csv").write_bytes("path,label\na.jpg,café\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"list.csv' cannot be read as CSV in UTF-8, near line .*; save it as UTF-8$"):
        FileList(folder / "list.csv")


def test_file_list_absolute_paths_need_a_root(folder: Path) -> None:
    text = "path,label\n/data/train/a.jpg,1\n"
    message = (
        f"line 2 of '{folder}/list.csv' has the absolute path '/data/train/a.jpg', which is outside {str(folder)!r}, "
        "the default of root=; pass the folder that holds all images, as in root='/data/train'"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        write_list(folder, text)
    assert list(write_list(folder, text, root="/data").paths) == ["/data/train/a.jpg"]
    with pytest.raises(ValueError, match=r"'/data/train/a.jpg', which points outside '/other'; pass a root="):
        write_list(folder, text, root="/other")


def make_tables() -> dict[str, Any]:
    import pandas
    import pyarrow

    columns: dict[str, list[Any]] = {
        "file": [f"img_{number:03d}.jpg" for number in range(COUNT)],
        "label": LABELS,
        "kind": ["cat" if label else "dog" for label in LABELS],
        "age": [0.5 + number for number in range(COUNT)],
    }
    return {"pandas": pandas.DataFrame(columns), "pyarrow": pyarrow.table(columns)}


@lacking.needs("pandas", "pyarrow")
@pytest.mark.processes
@pytest.mark.parametrize(("library", "type_name"), [("pandas", "DataFrame"), ("pyarrow", "Table")])
def test_file_list_reads_a_table_in_memory(folder: Path, library: str, type_name: str) -> None:
    table = make_tables()[library]
    check_loader(FileList(table, path="file", root=folder))
    dataset = FileList(table, path="file", target="kind", root=folder)
    assert (dataset.classes, dataset.labels.tolist()) == (["cat", "dog"], [int(not label) for label in LABELS])
    assert dataset.labels.dtype == np.uint8
    message = f"the {type_name} has no column 'path'; its columns are 'file', 'label', 'kind', 'age'. Select columns"
    with pytest.raises(ValueError, match=re.escape(message)):
        FileList(table)
    assert FileList(table, path="kind").root == str(Path.cwd())


@lacking.needs("pandas", "pyarrow")
def test_file_list_refuses_a_single_column() -> None:
    import pandas
    import pyarrow

    message = r"^expected a path, a str or pathlib\.Path, got .*\((Series|StringArray)\)$"
    for column in (pandas.Series(["a.jpg"]), pyarrow.array(["a.jpg"])):
        with pytest.raises(TypeError, match=message):
            FileList(column)


@lacking.needs("pandas")
@pytest.mark.parametrize("missing", [None, float("nan"), "pandas.NA"])
def test_file_list_names_a_missing_cell_of_a_table(missing: Any) -> None:
    import pandas

    missing = pandas.NA if missing == "pandas.NA" else missing
    frame = pandas.DataFrame({"path": ["a.jpg", "b.jpg"], "label": pandas.Series([1, missing], dtype=object)})
    with pytest.raises(ValueError, match=r"^row 1 of the DataFrame has no target; remove such rows, or pass target="):
        FileList(frame)
    frame = pandas.DataFrame({"path": [Path("a.jpg"), missing], "label": [1, 2]})
    with pytest.raises(ValueError, match=r"^row 1 of the DataFrame must have a path, got "):
        FileList(frame)


@lacking.needs("pandas", "pyarrow")
@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_file_list_several_targets_are_a_dict(folder: Path, workers: int) -> None:
    frame = make_tables()["pandas"]
    frame.to_csv(folder / "more.csv", index=False)
    frame.to_parquet(folder / "more.parquet")
    for manifest in (frame, folder / "more.csv", folder / "more.parquet"):
        dataset = FileList(manifest, path="file", target=["kind", "age"], root=folder)
        _, targets = dataset[1]
        assert targets == {"kind": int(not LABELS[1]), "age": 1.5}
        assert dataset.classes == {"kind": ["cat", "dog"]}
        assert [dataset.labels[name].dtype.name for name in ("kind", "age")] == ["uint8", "float64"]
        [(_, targets)] = gpuload_batches(dataset, COUNT, num_workers=workers, transforms=[T.Resize((8, 8))])
        assert targets["age"].tolist() == [0.5 + number for number in range(COUNT)]
        assert targets["kind"].tolist() == [int(not label) for label in LABELS]
    assert FileList(folder / "more.csv", path="file", target=["age"]).labels.keys() == {"age"}
    classes = {"kind": ["dog", "cow", "cat"]}
    dataset = FileList(frame, path="file", target=["kind", "label"], classes=classes, root=folder)
    assert dataset.classes == classes
    assert dataset.labels["kind"].tolist() == [2 if label else 0 for label in LABELS]


def test_file_list_takes_any_form_of_paths_within_the_root(folder: Path) -> None:
    dataset = write_list(folder, f"path,label\nsub/../a.jpg,1\n{folder}/b..jpg,1\n")
    assert list(dataset.paths) == [f"{folder}/a.jpg", f"{folder}/b..jpg"]
    assert FileList(folder / "list.csv", root=folder.parent).root == str(folder.parent)


def test_file_list_refuses_a_pattern_of_names() -> None:
    message = (
        "'img_{index:03d}.jpg' is not a manifest, and FileList generates no names; pass a table of them, as in pandas"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        FileList("img_{index:03d}.jpg")


def test_file_list_names_a_missing_manifest_and_image(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none.csv' does not exist; expected a manifest \(.csv or .parquet\)"):
        FileList(folder / "none.csv")
    with pytest.raises(FileNotFoundError) as caught:
        _ = write_list(folder, "path,label\ngone.jpg,1\n")[0]
    assert caught.value.filename == f"{folder}/gone.jpg"


@pytest.mark.parametrize(
    ("values", "targets", "names"),
    [
        ([date(2026, 1, 2), date(2025, 1, 2)], [1, 0], ["2025-01-02", "2026-01-02"]),
        ([[1, 2], [1]], [0, 1], ["[1, 2]", "[1]"]),
        ([1, "2", 3.5], [1.0, 2.0, 3.5], None),
        ([Decimal("1.5"), "2"], [1.5, 2.0], None),
        ([1 << 64, 1], [1, 0], ["1", "18446744073709551616"]),
        ([1, "x"], [0, 1], ["1", "x"]),
    ],
)
def test_encode_targets_of_mixed_types_are_numbers_or_indices_into_sorted_names(
    values: list[Any], targets: list[Any], names: list[str] | None
) -> None:
    encoded, classes = encode_targets(values)
    assert (encoded.tolist(), classes) == (targets, names)
    assert encoded.dtype in (np.uint8, np.float64), "integers must have the smallest dtype"


@given(
    st.lists(
        st.one_of(st.integers(-(1 << 63), (1 << 63) - 1), st.floats(allow_nan=False, allow_infinity=False)), min_size=1
    )
)
def test_encode_targets_reads_numbers_written_as_text(values: list[Any]) -> None:
    encoded, names = encode_targets([repr(value) for value in values])
    assert names is None
    assert encoded.tolist() == values or encoded.tolist() == list(map(float, values))


@given(st.lists(st.text(min_size=1), min_size=1))
def test_encode_targets_of_text_are_indices_into_sorted_names(values: list[str]) -> None:
    encoded, names = encode_targets([*values, "name"])
    assert names == sorted({*values, "name"})
    assert [names[index] for index in encoded] == [*values, "name"]
