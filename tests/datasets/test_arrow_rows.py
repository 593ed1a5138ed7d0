"""`WrappedRows` in workers: read with pyarrow alone, with the samples that Hugging Face's datasets gives."""

from __future__ import annotations

import copy
import datetime
import decimal
import pickle
import re
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from helpers import lacking
from helpers.arrow_threads import threads_of_arrow
from helpers.both_loaders import gpuload_batches
from helpers.generated_images import jpeg_bytes, smooth_image
from helpers.map_datasets import MapDataset
from helpers.patterns import exactly
from helpers.programs import run_python

import gpuload as gl
from gpuload import transforms as T

IMAGE = {"bytes": jpeg_bytes(smooth_image(20, 30, 1)), "path": None}
MOMENT = datetime.datetime(2024, 2, 29, 12, 30, 15, 123456)

# Values for each dtype of datasets.Value.
VALUES: dict[str, list[Any]] = {
    "null": [None, None],
    "bool": [True, False],
    **{f"int{bits}": [-(2 ** (bits - 1)), 2 ** (bits - 1) - 1] for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": [0, 2 ** min(bits, 63) - 1] for bits in (8, 16, 32, 64)},  # datasets cannot write larger uint64s
    "float16": [0.1, float("inf")],
    "float32": [0.1, -0.0],
    "float64": [0.1, 1e300],
    "time32[s]": [datetime.time(1, 2, 3), datetime.time(0)],
    "time32[ms]": [datetime.time(1, 2, 3, 4000), datetime.time(0)],
    "time64[us]": [datetime.time(1, 2, 3, 4), datetime.time(0)],
    "timestamp[s]": [MOMENT.replace(microsecond=0), datetime.datetime(1969, 1, 1)],
    "timestamp[ms]": [MOMENT.replace(microsecond=123000), datetime.datetime(1969, 1, 1)],
    "timestamp[us]": [MOMENT, datetime.datetime(1969, 1, 1)],
    "date32": [datetime.date(2024, 2, 29), datetime.date(1, 1, 1)],
    "date64": [datetime.date(2024, 2, 29), datetime.date(1969, 1, 1)],
    "duration[s]": [datetime.timedelta(days=-1), datetime.timedelta(seconds=5)],
    "duration[ms]": [datetime.timedelta(milliseconds=7), datetime.timedelta(seconds=5)],
    "duration[us]": [datetime.timedelta(microseconds=7), datetime.timedelta(seconds=5)],
    "decimal128(10, 3)": [decimal.Decimal("1.250"), decimal.Decimal("-0.001")],
    "decimal256(50, 3)": [decimal.Decimal("1.250"), decimal.Decimal("-0.001")],
    "binary": [b"", b"\0\xff"],
    "large_binary": [b"", b"\0\xff"],
    "binary_view": [b"", b"\0\xff" * 20],
    "string": ["", "pícture"],
    "large_string": ["", "pícture"],
    "string_view": ["", "pícture" * 20],
}
READ_BY_PANDAS = {  # pyarrow imports pandas for these
    "timestamp[us, tz=Europe/Berlin]": MOMENT.replace(tzinfo=datetime.UTC),
    "timestamp[s, tz=+01:00]": MOMENT.replace(tzinfo=datetime.UTC, microsecond=0),
    "time64[ns]": datetime.time(1, 2, 3, 4),
    "timestamp[ns]": MOMENT,
    "timestamp[ns, tz=UTC]": MOMENT.replace(tzinfo=datetime.UTC),
    "duration[ns]": datetime.timedelta(microseconds=7),
}
NEED_DATASETS = "workers import datasets to read a datasets.Dataset: "


def is_read_by_datasets(copied: Any) -> bool:
    return "dataset" in vars(copied)  # set once the dataset itself is unpickled


def pickled(wrapped: Any) -> tuple[bytes, list[pickle.PickleBuffer]]:
    buffers: list[pickle.PickleBuffer] = []
    return pickle.dumps(wrapped, 5, buffer_callback=buffers.append), buffers


def pickle_and_unpickle(wrapped: Any) -> Any:
    """Return the copy that a worker receives."""
    stream, buffers = pickled(wrapped)
    return pickle.loads(stream, buffers=buffers)


def with_types(value: Any) -> Any:
    """Pair a value and its parts with their types, as text, so that NaNs are equal."""
    if isinstance(value, dict):
        return dict, [(key, with_types(part)) for key, part in value.items()]
    if isinstance(value, list):
        return list, [with_types(part) for part in value]
    if isinstance(value, gl.Encoded):
        return gl.Encoded, value.data, value.mode, value.source
    return type(value), repr(value)


def assert_equal_copy(rows: Any, *, with_pyarrow_alone: bool = True) -> Any:
    """Check that a worker's copy has the samples that `datasets` reads in this process, and return the copy."""
    wrapped = gl.wrap(rows)
    copied = pickle_and_unpickle(wrapped)
    assert is_read_by_datasets(copied) is not with_pyarrow_alone
    assert len(copied) == len(wrapped) == len(rows)
    for index in range(-len(rows), len(rows)):
        assert with_types(copied[index]) == with_types(wrapped[index])
    assert is_read_by_datasets(copied) is not with_pyarrow_alone
    return copied


def make_rows(hf: ModuleType, count: int = 12, **columns: Any) -> Any:
    """Make rows of an image, a label, a caption or None, any number of corners, and further columns."""
    features = hf.Features(
        {
            "image": hf.Image(),
            "label": hf.ClassLabel(names=["ant", "bee"]),
            "caption": hf.Value("string"),
            "corners": hf.List(hf.List(hf.Value("float32"), 4)),
            **{name: feature for name, (feature, _) in columns.items()},
        }
    )
    rows = [
        {
            "image": IMAGE | {"path": f"{number}.jpg"},
            "label": number % 2,
            "caption": None if number % 5 == 1 else f"picture {number}",
            "corners": [[0.1, number, 2, 3]] * (number % 3),
            **{name: value for name, (_, value) in columns.items()},
        }
        for number in range(count)
    ]
    return hf.Dataset.from_list(rows, features=features)


def write_rows(rows: Any, path: Path, batch: int = 3) -> Any:
    """Write the rows to a file of small record batches, and return them mapped from it."""
    options = {"load_from_cache_file": False, "keep_in_memory": False}
    return rows.map(lambda row: row, cache_file_name=str(path), writer_batch_size=batch, **options)


@pytest.mark.parametrize("dtype", VALUES)
def test_rows_have_values_of_the_types_that_datasets_gives(hf: ModuleType, dtype: str) -> None:
    values = VALUES[dtype]
    features = hf.Features(
        {
            "x": hf.Value(dtype),
            "list": hf.List(hf.Value(dtype)),
            "large": hf.LargeList(hf.Value(dtype)),
            "fixed": hf.List(hf.Value(dtype), 2),
            "image": hf.Image(),
        }
    )
    nested = {"list": [values[0], None], "large": values, "fixed": values, "image": IMAGE}
    copied = assert_equal_copy(hf.Dataset.from_list([{"x": x, **nested} for x in (*values, None)], features=features))
    assert [copied[row]["x"] is None for row in range(3)] == [dtype == "null", dtype == "null", True]


def test_rows_of_lists_and_structures_equal_rows_of_datasets(hf: ModuleType, tmp_path: Path) -> None:
    image = tmp_path / "1.jpg"
    image.write_bytes(IMAGE["bytes"])
    deep = hf.Features({"z": hf.Value("int8"), "a": hf.Image(mode="L"), "names": hf.List(hf.Value("string"))})
    copied = assert_equal_copy(
        make_rows(
            hf,
            views=(hf.List(hf.Image()), [IMAGE, {"bytes": None, "path": str(image)}]),
            none=(hf.List(hf.Image()), None),
            empty=(hf.List(hf.List(hf.Value("int32"))), [[], [1], None]),
            kinds=(hf.List(hf.ClassLabel(3)), [2, 0]),
            deep=(deep, {"z": 1, "a": IMAGE, "names": ["x", None]}),
            parts=(hf.List(dict(deep)), [{"z": 1, "a": None, "names": []}]),
        )
    )
    assert copied[0]["views"][1] == replace(gl.read(image), exif=True)  # turned upright, as by datasets
    assert list(copied[0]["deep"]) == ["z", "a", "names"]


SELECTIONS: dict[str, Callable[[Any], Any]] = {
    "all": lambda rows: rows,
    "indices": lambda rows: rows.select([7, 2, 2, 11]),
    "range": lambda rows: rows.select(range(4, 9)),
    "shuffled": lambda rows: rows.shuffle(seed=3).select(range(5)),
    "filtered": lambda rows: rows.filter(lambda row: row["label"] == 1),
    "none": lambda rows: rows.filter(lambda row: False),
    "split": lambda rows: rows.train_test_split(0.4, seed=1)["test"],
    "shard": lambda rows: rows.shard(3, 1),
    "sorted": lambda rows: rows.filter(lambda row: row["caption"] is not None).sort("caption"),
    "flat indices": lambda rows: rows.select([7, 2]).flatten_indices(),
    "columns": lambda rows: rows.select_columns(["label", "image"]),
    "renamed": lambda rows: rows.rename_column("image", "picture").remove_columns("corners"),
    "cast": lambda rows: rows.cast_column("image", type(rows.features["image"])(mode="L")),
    "format columns": lambda rows: rows.with_format(None, columns=["label", "image"]),
    "format columns, then all": lambda rows: rows.with_format(None, columns=["label"], output_all_columns=True),
    "added column": lambda rows: rows.add_column("added", list(range(len(rows)))),
}


@pytest.mark.filterwarnings("ignore:Specifying null_placement:FutureWarning")  # raised by sort() of `datasets`
@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("selection", SELECTIONS)
def test_rows_of_selections_equal_rows_of_datasets(hf: ModuleType, tmp_path: Path, where: str, selection: str) -> None:
    rows = make_rows(hf)
    assert_equal_copy(SELECTIONS[selection](rows if where == "memory" else write_rows(rows, tmp_path / "rows.arrow")))


def test_rows_of_concatenated_tables_equal_rows_of_datasets(hf: ModuleType, tmp_path: Path) -> None:
    memory, disk = make_rows(hf), write_rows(make_rows(hf, 7), tmp_path / "rows.arrow")
    concatenated = hf.concatenate_datasets([disk.select(range(2, 6)), memory, disk])
    assert_equal_copy(concatenated)
    assert_equal_copy(concatenated.shuffle(seed=1).select(range(20)))
    numbers = hf.Dataset.from_dict({"number": list(range(7))})
    assert_equal_copy(hf.concatenate_datasets([disk, numbers], axis=1))


def test_rows_refuse_wrong_indices_like_datasets(hf: ModuleType, tmp_path: Path) -> None:
    wrapped = gl.wrap(write_rows(make_rows(hf, 5), tmp_path / "rows.arrow").select([1, 3]))
    copied = pickle_and_unpickle(wrapped)
    assert copied[np.int64(1)] == copied[-1] == wrapped[1]
    for index, kind, message in (
        (2, IndexError, "Invalid key: 2 is out of bounds for size 2"),
        (-3, IndexError, "Invalid key: -3 is out of bounds for size 2"),
        ("x", TypeError, "an index must be an integer, got 'x' (str)"),
        (1.0, TypeError, "an index must be an integer, got 1.0 (float)"),
    ):
        for rows in (wrapped, copied):
            with pytest.raises(kind, match=exactly(message)):
                rows[index]


def test_rows_name_an_image_that_is_not_on_this_machine(hf: ModuleType, tmp_path: Path) -> None:
    paths = [str(tmp_path / "gone.jpg"), "zip://1.jpg::/data/x.zip", "hf://datasets/x/1.jpg", "https://localhost/1.jpg"]
    rows = hf.Dataset.from_dict({"x": [{"bytes": None, "path": path} for path in paths]})
    wrapped = gl.wrap(rows.cast_column("x", hf.Image()))
    copied = pickle_and_unpickle(wrapped)
    for index, path in enumerate(paths):
        message = re.escape(f"file on this machine; download it beforehand: '{path}" if "://" in path else path)
        for dataset in (wrapped, copied):
            with pytest.raises(FileNotFoundError, match=message):
                dataset[index]


def test_pickled_rows_of_a_mapped_table_do_not_grow_with_their_number(hf: ModuleType, tmp_path: Path) -> None:
    stream_bytes = []
    for count in (10, 2000):
        rows = write_rows(make_rows(hf, count), tmp_path / f"{count:04}.arrow", batch=5).select(range(3, count - 3))
        stream, buffers = pickled(gl.wrap(rows))
        stream_bytes.append(len(stream))
        assert buffers == []
    few_rows, many_rows = stream_bytes
    assert many_rows - few_rows < 20  # only its numbers are longer
    assert many_rows < 6000  # without rows, each of which has an image of 800 bytes


def test_pickled_rows_in_memory_contain_only_the_selected_rows(hf: ModuleType) -> None:
    rows = make_rows(hf, 1000)
    for selection in (rows, rows.select(range(500, 510))):
        stream, buffers = pickled(gl.wrap(selection))
        assert len(stream) < 8000  # without the rows, which are in the buffers
        buffer_bytes = sum(buffer.raw().nbytes for buffer in buffers)
        assert buffer_bytes < len(selection) * 2200  # less than three images of 800 bytes
        assert with_types(pickle.loads(stream, buffers=buffers)[3]) == with_types(gl.wrap(selection)[3])


@pytest.mark.processes
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_unpickled_rows_are_read_with_only_pyarrow(hf: ModuleType, tmp_path: Path, where: str) -> None:
    rows = make_rows(hf, **{dtype: (hf.Value(dtype), values[0]) for dtype, values in VALUES.items()})
    rows = rows if where == "memory" else write_rows(rows, tmp_path / "rows.arrow")
    (tmp_path / "wrapped").write_bytes(pickle.dumps(gl.wrap(rows.shuffle(seed=1))))
    code = f"""
        import pickle, sys
        with open({str(tmp_path / "wrapped")!r}, "rb") as file:
            rows = pickle.load(file)
        samples = [rows[index] for index in range(len(rows))]
        print(len(samples), len(repr(rows)), {{"datasets", "fsspec", "pandas", "pyarrow", "torch"}} & set(sys.modules))
        print(rows.features["label"].names, "datasets" in sys.modules)
    """
    assert run_python(textwrap.dedent(code))[0] == f"12 {len(repr(gl.wrap(rows)))} {{'pyarrow'}}\n['ant', 'bee'] True\n"


@pytest.mark.processes
@lacking.needs("pyarrow")
def test_mapped_table_opens_a_compressed_file_without_threads(tmp_path: Path) -> None:
    """Workers are forked from the process that opens the file, and threads do not survive a fork."""
    code = f"""
from gpuload.datasets.arrow_rows import MappedTable
from gpuload.datasets.file_id import FileId
path = {str(tmp_path / "rows.arrow")!r}
rows = pyarrow.table({{f"c{{number}}": range(1000) for number in range(8)}})
options = pyarrow.ipc.IpcWriteOptions(compression="zstd", use_threads=False)
with pyarrow.ipc.new_stream(path, rows.schema, options=options) as writer:
    writer.write_table(rows)
print(threads())
assert MappedTable(path, FileId.of(path), []).open() == rows
print(threads())
"""
    assert threads_of_arrow(code) == 0


@pytest.mark.fresh
@pytest.mark.processes
def test_loader_workers_read_rows_with_only_pyarrow(hf: ModuleType, tmp_path: Path) -> None:
    rows = gl.wrap(write_rows(make_rows(hf), tmp_path / "rows.arrow").remove_columns(["corners", "caption"]))

    def add_imports(index: int) -> dict[str, Any]:
        return rows[index] | {name: name in sys.modules for name in ("pyarrow", "datasets", "torch", "pandas")}

    options: dict[str, Any] = {"batch_size": 6, "transforms": [T.CenterCrop(16)]}
    batches = gpuload_batches(MapDataset(add_imports, len(rows)), num_workers=2, **options)
    for batch, expected in zip(batches, gpuload_batches(rows, **options), strict=True):
        assert batch["image"].equal(expected["image"])
        assert batch["label"].equal(expected["label"])
        assert batch["pyarrow"].all()
        assert not (batch["datasets"] | batch["torch"] | batch["pandas"]).any()


FILE_CHANGES: dict[str, Callable[[Any, Path], Any]] = {
    "replaced": lambda rows, path: write_rows(rows.map(lambda row: {"label": 1 - row["label"]}), path),
    "deleted": lambda rows, path: path.unlink(),
}


@pytest.mark.parametrize("change", FILE_CHANGES)
def test_rows_of_a_replaced_or_deleted_file_are_pickled_entirely(hf: ModuleType, tmp_path: Path, change: str) -> None:
    path = tmp_path / "rows.arrow"
    disk = write_rows(make_rows(hf), path)
    concatenated = hf.concatenate_datasets([disk.select(range(2, 6)), make_rows(hf, 3)])
    FILE_CHANGES[change](make_rows(hf), path)
    for rows in (disk, disk.shuffle(seed=1), concatenated):
        copied = assert_equal_copy(rows)
        assert with_types(copied.dataset[3]) == with_types(gl.wrap(rows).dataset[3])


@pytest.mark.parametrize("change", FILE_CHANGES)
@pytest.mark.processes
def test_loader_workers_read_rows_of_a_replaced_or_deleted_file(hf: ModuleType, tmp_path: Path, change: str) -> None:
    path = tmp_path / "rows.arrow"
    rows = write_rows(make_rows(hf), path)
    FILE_CHANGES[change](make_rows(hf), path)
    for dataset in (gl.wrap(rows), rows.select_columns(["label"]).with_format("numpy")):
        loaders = [gl.Loader(dataset, 4, num_workers=workers, device="cpu", collate_fn=list) for workers in (0, 2)]
        here, in_workers = ([int(row["label"]) for batch in loader for row in batch] for loader in loaders)
        assert here == in_workers == [number % 2 for number in range(12)]


def test_unpickling_rows_whose_file_was_replaced_is_refused(hf: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "rows.arrow"
    stream = pickle.dumps(gl.wrap(write_rows(make_rows(hf), path)))
    FILE_CHANGES["replaced"](make_rows(hf), path)
    with pytest.raises(gl.DecodeError, match=r"rows.arrow': it was replaced by another file after the dataset was"):
        pickle.loads(stream)


def test_unpickled_rows_have_their_dataset_on_access(hf: ModuleType, tmp_path: Path) -> None:
    memory, disk = make_rows(hf), write_rows(make_rows(hf), tmp_path / "rows.arrow")
    for rows in (memory, disk.shuffle(seed=1), hf.concatenate_datasets([disk, memory])):
        wrapped = gl.wrap(rows)
        copied = pickle_and_unpickle(pickle_and_unpickle(wrapped))
        assert copied.column_names == wrapped.column_names
        assert not is_read_by_datasets(copied)
        assert copied.features == wrapped.features
        assert copied.dataset._fingerprint == wrapped.dataset._fingerprint
        assert copied.dataset[3] == wrapped.dataset[3]
        assert with_types(copied[3]) == with_types(wrapped[3])
    with pytest.raises(AttributeError, match="'WrappedRows' object has no attribute 'names'"):
        _ = copied.names


def test_unpickled_rows_apply_changes_of_their_dataset(hf: ModuleType) -> None:
    copied = pickle_and_unpickle(gl.wrap(make_rows(hf)))
    vars(copied.dataset)["_format_columns"] = ["label"]
    assert copied[3] == {"label": 1}


def test_copied_rows_share_the_table(hf: ModuleType) -> None:
    wrapped = gl.wrap(make_rows(hf))
    for copied in (copy.copy(wrapped), copy.deepcopy(wrapped)):
        assert copied.dataset.data.table is wrapped.dataset.data.table
        assert copied[3] == wrapped[3]
    assert copied.dataset is not wrapped.dataset  # of the deep copy


@pytest.mark.parametrize("dtype", READ_BY_PANDAS)
def test_rows_with_nanoseconds_or_time_zones_need_datasets(
    hf: ModuleType, logged: Callable[[], list[str]], dtype: str
) -> None:
    assert_equal_copy(make_rows(hf, when=(hf.Value(dtype), READ_BY_PANDAS[dtype])), with_pyarrow_alone=False)
    assert logged() == [f"{NEED_DATASETS}column 'when' is Value({dtype!r})"]


def test_rows_with_special_types_need_datasets(hf: ModuleType, tmp_path: Path, logged: Callable[[], list[str]]) -> None:
    matrix = np.zeros((2, 2), np.float32).tolist()
    rows = make_rows(hf, depth=(hf.Array2D((2, 2), "float32"), matrix), words=(hf.Translation(["de"]), {"de": "Bild"}))
    assert_equal_copy(rows, with_pyarrow_alone=False)
    assert_equal_copy(rows.remove_columns("depth"), with_pyarrow_alone=False)
    disk = write_rows(rows, tmp_path / "rows.arrow")
    assert_equal_copy(disk.with_format(None, columns=["image", "label"]))
    assert_equal_copy(rows.with_format(None, columns=["image", "label"]), with_pyarrow_alone=False)
    reasons = "column 'depth' is ", "column 'words' is Translation(", "column 'depth' is stored as extension<"
    for message, reason in zip(logged(), reasons, strict=True):
        assert message.startswith(NEED_DATASETS + reason)


def test_rows_that_were_cast_or_flattened_need_datasets(
    hf: ModuleType, tmp_path: Path, logged: Callable[[], list[str]]
) -> None:
    image = tmp_path / "1.jpg"
    image.write_bytes(IMAGE["bytes"])
    columns = {"path": (hf.Value("string"), str(image)), "deep": ({"x": hf.Value("int8")}, {"x": 1})}
    rows = write_rows(make_rows(hf, **columns), tmp_path / "rows.arrow")
    assert_equal_copy(rows.cast_column("path", hf.Image()), with_pyarrow_alone=False)
    assert rows.flatten().column_names == ["image", "label", "caption", "corners", "path", "deep.x"]
    assert_equal_copy(rows.flatten(), with_pyarrow_alone=False)
    reasons = ["column 'path' is string in its file, but was cast", "its table was changed by flatten()"]
    assert logged() == [NEED_DATASETS + reason for reason in reasons]


def test_rows_with_a_format_set_later_need_datasets(hf: ModuleType, logged: Callable[[], list[str]]) -> None:
    wrapped = gl.wrap(make_rows(hf))
    wrapped.dataset.set_format("numpy", columns=["label"])
    assert is_read_by_datasets(pickle_and_unpickle(wrapped))
    assert logged() == [f"{NEED_DATASETS}it has the format 'numpy'"]
