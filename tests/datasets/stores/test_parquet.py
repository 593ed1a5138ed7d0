"""`Parquet`: both layouts of images, row groups, columns, and errors about damage."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as pq
import pytest
from helpers.arrow_threads import threads_of_arrow
from helpers.both_loaders import cpu_loader, gpuload_batches
from helpers.file_descriptors import open_below
from helpers.jpeg_dataset import COUNT, LABELS, check_loader, jpegs
from helpers.patterns import exactly

import gpuload as gl
from gpuload import transforms as T
from gpuload.datasets.files import size_limits
from gpuload.datasets.stores import parquet as parquet_module
from gpuload.datasets.stores.parquet import Parquet


def make_table(**columns: Any) -> Any:
    """Make a table of Hugging Face's layout with a caption and further columns."""
    structs = [{"bytes": data, "path": f"{number}.jpg"} for number, data in enumerate(jpegs())]
    columns = {"image": structs, "label": LABELS, "caption": [f"image {n}" for n in range(COUNT)], **columns}
    return arrow.table({name: column for name, column in columns.items() if column is not None})


def write_parquet(path: Path, content: Any = None, rows: int = 4, **options: Any) -> Path:
    pq.write_table(make_table() if content is None else content, path, row_group_size=rows, **options)
    return path


def test_parquet_blocks_are_row_groups(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", rows=5)
    write_parquet(tmp_path / "b.parquet", rows=8)
    assert Parquet(tmp_path).blocks().tolist() == [0, 5, 10, 12, 20, 24]


@pytest.mark.slow
def test_parquet_with_block_shuffle_reads_each_row_group_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache holds the row groups of a window. A full shuffle reads a row group for almost every sample."""
    table = make_table()
    path = write_parquet(tmp_path / "a.parquet", arrow.concat_tables([table] * 10), rows=6)  # 20 groups
    groups: list[int] = []
    read = Parquet._read_columns
    monkeypatch.setattr(Parquet, "_read_columns", lambda self, *args: groups.append(args[-1]) or read(self, *args))
    cache_bytes = 4 * sum(len(data) for data in jpegs()[:6])
    for shuffle, min_reads, max_reads in ((gl.BlockShuffle(block=6, window=3), 20, 20), (True, 61, 120)):
        groups.clear()
        dataset = Parquet(path, cache_bytes=cache_bytes)
        labels = [label for _, label in gl.Loader(dataset, 1, shuffle=shuffle, num_workers=0, device="cpu")]
        assert len(labels) == 120
        assert min_reads <= len(groups) <= max_reads


@pytest.mark.processes
def test_parquet_batches_equal_batches_of_the_images(tmp_path: Path) -> None:
    table = make_table()
    for number in range(2):
        write_parquet(tmp_path / f"train-{number}.parquet", table.slice(7 * number, 7))
    check_loader(Parquet(tmp_path / "train-*.parquet"))


def test_parquet_reads_hugging_faces_layout_and_a_binary_column(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet")
    dataset = Parquet(path)
    image, label = dataset[-1]
    assert image == gl.Encoded(jpegs()[11], "RGB", f"{path}: row group 2, row 3")
    assert (label, type(label)) == (2, int)
    assert len(dataset) == COUNT
    assert repr(dataset) == f"Parquet('{path}': 12 rows in 1 files)"
    assert [label for _, label in dataset.__getitems__([7, 2, 7, 11])] == [1, 2, 1, 2]
    path = write_parquet(tmp_path / "b.parquet", arrow.table({"jpg": jpegs()}))
    binary = Parquet(path, image="jpg", target=None, mode="L")
    assert binary[3] == gl.Encoded(jpegs()[3], "L", f"{path}: row group 0, row 3")


def test_parquet_with_columns_yields_dicts(tmp_path: Path) -> None:
    numbers = arrow.array([[0.5, n] for n in range(COUNT - 1)] + [[]], arrow.list_(arrow.float32()))
    nested = [{"kind": str(n)} for n in range(COUNT)]
    path = write_parquet(tmp_path / "a.parquet", make_table(numbers=numbers, nested=nested))
    sample = Parquet(path, columns=("caption", "numbers", "nested.kind"))[5]
    assert list(sample) == ["image", "label", "caption", "numbers", "nested.kind"]
    assert (sample["image"].data, sample["caption"], sample["nested.kind"]) == (jpegs()[5], "image 5", "5")
    assert sample["numbers"].dtype == np.float32
    assert sample["numbers"].tolist() == [0.5, 5]
    assert Parquet(path, columns=["numbers"])[11]["numbers"].dtype == np.float32, "an empty list has the dtype too"


def test_parquet_reads_the_selected_columns_once_per_row_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = Parquet(write_parquet(tmp_path / "a.parquet"))
    groups: list[Any] = []
    read_group = Parquet._read_group

    def read_and_record(self: Any, file: Any, path: str, group: int) -> Any:
        group_table = read_group(self, file, path, group)
        groups.append((group, group_table.schema.to_string(show_schema_metadata=False, show_field_metadata=False)))
        return group_table

    monkeypatch.setattr(Parquet, "_read_group", read_and_record)
    dataset.__getitems__([5, 0, 6, 1, 7])
    selected_columns = "image: struct<bytes: binary>\n  child 0, bytes: binary\nlabel: int64"
    assert groups == [(0, selected_columns), (1, selected_columns)], "each row group must be read once"


def test_parquet_caches_row_groups_up_to_cache_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "a.parquet")
    groups: list[int] = []
    read_group = Parquet._read_group
    monkeypatch.setattr(Parquet, "_read_group", lambda self, *args: groups.append(args[-1]) or read_group(self, *args))
    bytes_for_two_groups = int(2.5 * 4 * sum(map(len, jpegs())) / COUNT)
    for limit, expected in ((1 << 30, [0, 1, 2]), (bytes_for_two_groups, [0, 1, 2, 1]), (0, [0, 1, 0, 2, 0, 1])):
        groups.clear()
        dataset = Parquet(path, cache_bytes=limit)
        for number in (0, 1, 4, 3, 8, 0, 5):
            assert dataset[number][0].data == jpegs()[number]
        assert groups == expected


def test_parquet_has_at_most_two_files_open_if_two_are_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_module, "OPEN_FILES", 2)
    for number in range(COUNT):
        write_parquet(tmp_path / f"{number:02d}.parquet", make_table().slice(number, 1))
    dataset = Parquet(tmp_path)
    assert open_below(tmp_path) == 0
    assert [image.data for image, _ in dataset] == jpegs()
    assert open_below(tmp_path) == 2
    copy = pickle.loads(pickle.dumps(dataset))
    assert open_below(tmp_path) == 2
    dataset.close()
    assert open_below(tmp_path) == 0
    assert copy[3][0].data == jpegs()[3]


def test_parquet_pickle_takes_under_20_bytes_per_row_group(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", arrow.table({"jpg": [b""] * 4000}), 1)
    assert len(pickle.dumps(Parquet(path, image="jpg", target=None))) < 4000 * 20


def test_parquet_refuses_files_with_different_schemas(tmp_path: Path) -> None:
    first_path = write_parquet(tmp_path / "1.parquet")
    second_path = write_parquet(tmp_path / "2.parquet", make_table(label=[str(label) for label in LABELS]))
    message = (
        f"{str(second_path)!r} and {str(first_path)!r} have different schemas: column 'label' is string in the former, "
        "int64 in the latter; read them as two datasets, or rewrite one of the files"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        Parquet([first_path, second_path])
    assert len(Parquet([first_path, second_path], target="caption")) == 2 * COUNT, "unread columns may differ"


def test_parquet_names_a_null(tmp_path: Path) -> None:
    images = [{"bytes": data, "path": "x"} for data in jpegs()]
    images[6]["bytes"], images[7] = None, None
    labels = [None if n == 9 else n for n in range(COUNT)]
    path = write_parquet(tmp_path / "a.parquet", make_table(image=images, label=labels))
    dataset = Parquet(path)
    remedy = "; if the row has only the path of its image, rewrite the file with the bytes"
    for index, message in (
        (6, f"row 2 of row group 1 has no 'image.bytes' (null){remedy}"),
        (7, f"row 3 of row group 1 has no 'image.bytes' (null){remedy}"),
        (9, "row 1 of row group 2 has no 'label' (null)"),
    ):
        with pytest.raises(gl.DecodeError, match=exactly(f"{str(path)!r}: {message}")):
            dataset[index]
    assert dataset[5][1] == 5


def test_parquet_names_a_corrupt_page_and_reads_the_intact_row_groups(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", make_table(), compression="none", write_page_checksum=True)
    data = bytearray(path.read_bytes())
    position = data.index(jpegs()[6]) + 300
    data[position] ^= 0xFF
    path.write_bytes(data)
    dataset = Parquet(path)
    with pytest.raises(gl.DecodeError, match=f"^{re.escape(repr(str(path)))}: row group 1 cannot be read: ") as caught:
        dataset[6]
    assert caught.value.filename == str(path)
    loader = cpu_loader(dataset, 12, transforms=[T.CenterCrop(16)], faults=gl.Faults(on_error="skip"))
    with pytest.warns(RuntimeWarning, match=r"^sample 4 \(.*a.parquet\), at position 4 .*: row group 1 cannot be read"):
        _, labels = next(iter(loader))
    assert labels.tolist() == [0, 1, 2, 0, 2, 0, 1, 2]


@pytest.mark.parametrize("rows", [400, 2])
def test_parquet_refuses_a_row_group_that_decompresses_beyond_max_bytes(tmp_path: Path, rows: int) -> None:
    path = tmp_path / "a.parquet"
    value = {"bytes": bytes(100_000), "path": None}
    table = arrow.table({"image": arrow.array([value] * rows), "label": [0] * rows})
    pq.write_table(table, path, compression="zstd")
    del table
    assert path.stat().st_size < 5000
    dataset, bytes_before = Parquet(path), arrow.total_allocated_bytes()
    message = f"^{re.escape(repr(str(path)))}: row group 0 takes .* bytes of memory, more than max_bytes="
    with size_limits(max_bytes=10 * 100_000 if rows > 2 else 99_000), pytest.raises(gl.DecodeError, match=message):
        dataset[0]
    assert arrow.total_allocated_bytes() - bytes_before < 3_000_000
    with size_limits(max_bytes=None):
        assert len(dataset[rows - 1][0].data) == 100_000


def test_parquet_names_a_value_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    texts = arrow.Array.from_buffers(
        arrow.string(), 1, [None, arrow.py_buffer(b"\0\0\0\0\2\0\0\0"), arrow.py_buffer(b"\xff\xfe")]
    )
    table = arrow.table({"image": arrow.array([{"bytes": jpegs()[0], "path": None}]), "label": texts})
    pq.write_table(table, path)
    message = f"^{re.escape(repr(str(path)))}: row 0 of row group 0 cannot be read: .*utf-8"
    with pytest.raises(gl.DecodeError, match=message) as caught:
        Parquet(path)[0]
    assert caught.value.filename == str(path)


def test_parquet_refuses_rewritten_and_truncated_files_and_other_formats(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet")
    dataset = Parquet(path)
    write_parquet(path, make_table().slice(0, 6))
    with pytest.raises(gl.DecodeError, match=r"it was changed after the dataset was created \(it had"):
        dataset[0]
    for content in (path.read_bytes()[:-100], b"", b"no parquet"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"a.parquet' is not a Parquet file, or is truncated: "):
            Parquet(path)


@pytest.mark.parametrize(
    ("has_bytes", "options", "error", "message"),
    [
        (False, {}, ValueError, "no column 'image.bytes'; its columns are 'image': string, 'label': int64, 'caption':"),
        (True, {"target": "class"}, ValueError, "no column 'class'; its columns are 'image': struct<bytes: binary, "),
        (True, {"columns": ["id"]}, ValueError, "has no column 'id'"),
        (False, {"image": "image"}, TypeError, "is string; expected the bytes of encoded images, of type binary"),
        (True, {"image": "image"}, TypeError, "of type binary; did you mean image='image.bytes'?"),
        (True, {"columns": "caption"}, TypeError, "columns must be a list of strings, got 'caption' (str)"),
    ],
)
def test_parquet_refuses_wrong_columns(
    tmp_path: Path, has_bytes: bool, options: dict, error: type[Exception], message: str
) -> None:
    paths = {} if has_bytes else {"image": [f"{number}.jpg" for number in range(COUNT)]}
    path = write_parquet(tmp_path / "a.parquet", make_table(**paths))
    with pytest.raises(error, match=re.escape(message)):
        Parquet(path, **options)


def test_parquet_refuses_paths_without_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=exactly(f"the folder {str(tmp_path)!r} contains no *.parquet files")):
        Parquet(tmp_path)
    with pytest.raises(FileNotFoundError, match=exactly(f"no files match '{tmp_path}/train-*.parquet'")):
        Parquet(tmp_path / "train-*.parquet")
    with pytest.raises(FileNotFoundError, match=r"none.parquet' does not exist; expected a Parquet file, a folder of"):
        Parquet([tmp_path / "none.parquet"])
    with pytest.raises(FileNotFoundError, match=r"^paths is empty; expected at least one Parquet file$"):
        Parquet([])


@pytest.mark.usefixtures("index_cache")
def test_parquet_index_is_cached_until_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_module, "LEAST_BYTES", 0)
    for number in range(2):
        write_parquet(tmp_path / f"{number}.parquet")
    dataset = Parquet(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Parquet, "_read_footers", lambda *_: pytest.fail("unchanged files were read again"))
        cached = Parquet(tmp_path)
        assert [cached[number] for number in range(-2 * COUNT, 2 * COUNT)] == 2 * [*dataset]
    with pytest.raises(ValueError, match="no column 'class'"):
        Parquet(tmp_path, target="class")
    write_parquet(tmp_path / "0.parquet", make_table().slice(3), 2)
    assert len(Parquet(tmp_path)) == 2 * COUNT - 3


@pytest.mark.processes
def test_parquet_reads_rows_with_at_most_one_thread(tmp_path: Path) -> None:
    columns = {f"c{number}": ["x"] * COUNT for number in range(8)}
    path = write_parquet(tmp_path / "a.parquet", make_table(**columns), rows=2)
    code = f"""
import gpuload as gl
dataset = gl.Parquet({str(path)!r}, columns={tuple(columns)})
print(threads())
list(dataset)
print(threads())
"""
    assert threads_of_arrow(code) <= 1  # the thread that reads files


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_parquet_nested_columns_batch_as_lists_of_objects(tmp_path: Path, workers: int) -> None:
    structs = [None if n == 3 else {"who": "Ann" if n % 2 else None, "n": n} for n in range(COUNT)]
    texts = [["x"] * (n % 3) for n in range(COUNT)]
    pairs = [[("k", n)] for n in range(COUNT)]
    table = make_table(struct=structs, texts=texts, map=arrow.array(pairs, arrow.map_(arrow.string(), arrow.int64())))
    dataset = Parquet(write_parquet(tmp_path / "a.parquet", table), columns=("struct", "texts", "map"))
    batches = gpuload_batches(dataset, 4, num_workers=workers, transforms=[T.Resize((8, 8))])
    for name, expected in (("struct", structs), ("texts", texts), ("map", pairs)):
        assert [value for batch in batches for value in batch[name]] == expected
    assert {type(value) for batch in batches for value in batch["struct"]} == {dict, type(None)}
