"""Hugging Face's datasets in `wrap`: rows and streams with undecoded images, EXIF, states, and errors."""

from __future__ import annotations

import importlib
import io
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from helpers.both_loaders import cpu_loader, gpuload_batches
from helpers.generated_images import jpeg_bytes, smooth_image
from helpers.patterns import exactly, starting
from PIL import Image as PILImage

import gpuload as gl
from gpuload import transforms as T


def jpeg(number: int) -> bytes:
    return jpeg_bytes(smooth_image(20 + number, 30, number))


@pytest.fixture
def rows(hf: ModuleType, tmp_path: Path) -> Any:
    """Six rows, each with an image (in the last row, by its path), a label, and further images in a list and a dict."""
    features = hf.Features(
        {
            "image": hf.Image(),
            "label": hf.ClassLabel(names=["ant", "bee"]),
            "views": hf.List(hf.Image(mode="L")),
            "deep": {"image": hf.Image(), "parts": hf.List({"image": hf.Image(), "name": hf.Value("string")})},
        }
    )
    path = tmp_path / "5.jpg"
    path.write_bytes(jpeg(5))
    return hf.Dataset.from_list(
        [
            {
                "image": {"bytes": None, "path": str(path)} if n == 5 else {"bytes": jpeg(n), "path": f"{n}.jpg"},
                "label": n % 2,
                "views": [{"bytes": jpeg(n + k), "path": None} for k in range(2)],
                "deep": {
                    "image": {"bytes": jpeg(n), "path": None},
                    "parts": [{"image": {"bytes": jpeg(n), "path": None}, "name": "leg"}],
                },
            }
            for n in range(6)
        ],
        features=features,
    )


@pytest.mark.slow
def test_wrap_rows_yield_bytes_for_each_image(rows: Any, tmp_path: Path) -> None:
    wrapped = gl.wrap(rows)
    assert len(wrapped) == len(rows) == 6
    assert wrapped[1] == {
        "image": gl.Encoded(jpeg(1), source="1.jpg", exif=True),
        "label": 1,
        "views": [gl.Encoded(jpeg(1), "L", exif=True), gl.Encoded(jpeg(2), "L", exif=True)],
        "deep": {
            "image": gl.Encoded(jpeg(1), exif=True),
            "parts": [{"image": gl.Encoded(jpeg(1), exif=True), "name": "leg"}],
        },
    }
    assert wrapped[-1]["image"].data == gl.read(tmp_path / "5.jpg").data
    assert list(wrapped[0]) == wrapped.column_names == list(wrapped.features) == ["image", "label", "views", "deep"]
    assert repr(wrapped) == "wrap(datasets.Dataset: 6 rows of 'image', 'label', 'views', 'deep')"
    assert isinstance(rows[0]["image"], PILImage.Image), "wrap() must not change its argument"


@pytest.mark.usefixtures("warm")
@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_wrap_rows_batches_equal_images(hf: ModuleType, rows: Any, tmp_path: Path, workers: int, where: str) -> None:
    if where == "disk":
        rows.save_to_disk(tmp_path / "saved")
        rows = hf.load_from_disk(tmp_path / "saved")
    rows = rows.select_columns(["label", "image"]).select([3, 1, 5, 0])
    batches = gpuload_batches(gl.wrap(rows), 2, num_workers=workers, transforms=[T.CenterCrop(16)])
    assert [list(batch) for batch in batches] == [["label", "image"]] * 2
    assert labels_of(batches) == [1, 1, 1, 0]
    [images] = gpuload_batches([gl.Encoded(jpeg(n)) for n in (3, 1, 5, 0)], 4, transforms=[T.CenterCrop(16)])
    assert torch.equal(torch.cat([batch["image"] for batch in batches]), images)


def make_rotated_rows(hf: ModuleType, **columns: Any) -> Any:
    """Make rows of an image with an EXIF rotation, and of further columns, each a pair of a feature and a value."""
    file, exif = io.BytesIO(), PILImage.Exif()
    exif[0x0112] = 6  # orientation: a quarter turn
    PILImage.fromarray(smooth_image(20, 30, 1)).save(file, "JPEG", exif=exif)
    columns = {"image": (hf.Image(), {"bytes": file.getvalue(), "path": None})} | columns
    features = hf.Features({name: feature for name, (feature, _) in columns.items()})
    return hf.Dataset.from_list([{name: value for name, (_, value) in columns.items()}] * 2, features=features)


def test_wrap_rows_images_are_turned_upright_as_by_datasets(hf: ModuleType) -> None:
    rows = make_rotated_rows(hf)
    upright = np.asarray(rows[0]["image"])
    assert upright.shape == (30, 20, 3)
    for dataset in (rows, rows.to_iterable_dataset()):
        for exif, expected in ((None, upright), (True, upright), (False, np.rot90(upright))):
            [batch] = gpuload_batches(gl.wrap(dataset), 2, decode=gl.Decode(exif=exif))
            np.testing.assert_array_equal(batch["image"][0].permute(1, 2, 0).numpy(), expected)


@pytest.mark.parametrize(
    ("make", "targets"),
    [
        (lambda hf: {"mask": (hf.Image(), None)}, "'mask'"),
        (lambda hf: {"annotation": (hf.Image(), None)}, "'annotation'"),
        (lambda hf: {"objects": ({"bbox": hf.List(hf.List(hf.Value("float32"), 4))}, {"bbox": []})}, "'bbox'"),
        (
            lambda hf: {"boxes": (hf.List(hf.Value("float32")), []), "keypoints": (hf.List(hf.Value("float32")), [])},
            "'boxes', 'keypoints'",
        ),
    ],
)
def test_wrap_rows_with_targets_warn_of_ignored_exif(hf: ModuleType, make: Callable[[Any], Any], targets: str) -> None:
    rows = make_rotated_rows(hf, **make(hf))
    message = (
        f"the images beside {targets} are decoded as they are stored, since these may have been made for the stored "
        "images; if they were made for upright images, pass decode=gpuload.Decode(exif=True) to the Loader"
    )
    with pytest.warns(RuntimeWarning, match=exactly(message)) as caught:
        wrapped = gl.wrap(rows)
    assert [warning.filename for warning in caught] == [__file__]
    assert wrapped[0]["image"].exif is None
    rows = make_rotated_rows(hf, label=(hf.Value("int64"), 1), annotation=(hf.Value("string"), "a"))
    assert gl.wrap(rows)[0]["image"].exif is True, "labels and texts are not targets that move with the image"


def test_wrap_rows_state_saved_without_exif_resumes_only_with_a_warning(hf: ModuleType) -> None:
    rows = gl.wrap(make_rotated_rows(hf))
    for dataset in (rows, torch.utils.data.Subset(rows, [0, 1]), gl.Cached(rows, 1 << 20)):
        state = cpu_loader(dataset, decode=gl.Decode(exif=False), transforms=[T.CenterCrop(8)]).state_dict()
        loader = cpu_loader(dataset, transforms=[T.CenterCrop(8)])
        with pytest.raises(ValueError, match=r"transforms was '[0-9a-f]{16}' and is '[0-9a-f]{16}-exif'"):
            loader.load_state_dict(state)
        with pytest.warns(RuntimeWarning, match="transforms was"):
            loader.load_state_dict(state, strict=False)


def test_wrap_rows_take_the_mode_of_the_feature_and_keep_missing_images(hf: ModuleType) -> None:
    def make_row(image: Any, **options: Any) -> Any:
        return hf.Dataset.from_dict({"x": [image]}, features=hf.Features({"x": hf.Image(**options)}))

    image = {"bytes": jpeg(1), "path": None}
    assert gl.wrap(make_row(image))[0]["x"].mode == "RGB"
    assert gl.wrap(make_row(image, mode="RGBA"))[0]["x"].mode == "RGBA"
    assert gl.wrap(make_row(image, mode="RGBA"), mode="L")[0]["x"].mode == "L"
    assert gl.wrap(make_row(image, mode="CMYK"), mode="L")[0]["x"].mode == "L"
    assert gl.wrap(make_row(image, decode=False))[0] == {"x": gl.Encoded(jpeg(1), exif=True)}
    assert gl.wrap(make_row(None))[0] == {"x": None}
    message = (
        "datasets.Image(mode='CMYK'): mode must be one of 'RGB', 'L', 'RGBA', 'unchanged', got 'CMYK'; pass "
        "mode= to wrap()"
    )
    with pytest.raises(TypeError, match=exactly(message)):
        gl.wrap(make_row(image, mode="CMYK"))


def test_wrap_rows_refuse_formats_and_tables_without_images(rows: Any) -> None:
    advice = (
        ", which is applied after decoding: pass dataset.with_format(None), and transform images with "
        "Loader(transforms=…); gpuload's batches are tensors"
    )
    beginning = "got a datasets.arrow_dataset.Dataset with "
    for formatted, formatting in (
        (rows.with_format("numpy"), "the format 'numpy'"),
        (rows.with_transform(lambda batch: batch), "a transform (set_transform, with_transform)"),
    ):
        with pytest.raises(TypeError, match=exactly(beginning + formatting + advice)):
            gl.wrap(formatted)
    message = (
        "got a datasets.arrow_dataset.Dataset without images: none of its columns is a datasets.Image ('label'); "
        "declare one with dataset.cast_column(name, datasets.Image()), or pass the dataset to gpuload.Loader unchanged"
    )
    for without_images in (rows.select_columns("label"), rows.with_format(None, columns=["label"])):
        with pytest.raises(TypeError, match=exactly(message)):
            gl.wrap(without_images)
    all_columns = rows.with_format(None, columns=["label"], output_all_columns=True)
    assert set(gl.wrap(all_columns)[0]) == set(rows.column_names)
    assert isinstance(gl.wrap(all_columns)[0]["image"], gl.Encoded)


def test_wrap_refuses_iterable_datasets_and_dataset_dicts(hf: ModuleType, rows: Any) -> None:
    class Stream:
        def __iter__(self) -> Any:
            return iter(())

    for dataset, message in (
        (
            Stream(),
            ", an iterable dataset, which does not need wrap(): pass it to gpuload.Loader unchanged. To leave decoding "
            "to gpuload, have it yield gpuload.Encoded(bytes) instead of images",
        ),
        (
            hf.DatasetDict(train=rows),
            "got a datasets.dataset_dict.DatasetDict, which contains several datasets; wrap one of them: "
            "gpuload.wrap(dataset['train'])",
        ),
    ):
        with pytest.raises(TypeError, match=f"{re.escape(message)}$"):
            gl.wrap(dataset)
    text = "the dataset is a DatasetDict, which contains several datasets; pass one: 'train', 'test'"
    with pytest.raises(TypeError, match=exactly(text)):
        gl.Loader(hf.DatasetDict(train=rows, test=rows), device="cpu")


def test_loader_reads_a_streaming_dataset_without_wrap(hf: ModuleType) -> None:
    images = [PILImage.open(io.BytesIO(jpeg(n))) for n in range(4)]
    with stream_loader(make_table(hf, images).to_iterable_dataset()) as loader:
        (batch,) = loader
    assert batch["image"].shape == (4, 3, 8, 8)
    assert batch["label"].tolist() == [0, 1, 2, 3]


STREAM_LENGTH = 24


def make_table(hf: ModuleType, images: list[Any]) -> Any:
    """Make a dataset of these images, whose labels are their indices."""
    features = hf.Features({"image": hf.Image(), "label": hf.Value("int64")})
    return hf.Dataset.from_dict({"image": images, "label": [*range(len(images))]}, features=features)


@pytest.fixture
def stream(hf: ModuleType) -> Any:
    """Six shards of four rows."""
    images = [{"bytes": jpeg(n), "path": f"{n}.jpg"} for n in range(STREAM_LENGTH)]
    return make_table(hf, images).to_iterable_dataset(num_shards=6)


def labels_of(batches: Iterable[dict[str, torch.Tensor]]) -> list[int]:
    return [label for batch in batches for label in batch["label"].tolist()]


def stream_loader(wrapped: Any, **options: Any) -> gl.Loader:
    return gl.Loader(wrapped, 4, device="cpu", transforms=[T.Resize((8, 8))], **options)


@pytest.mark.usefixtures("warm")
@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_wrap_stream_yields_undecoded_images_once(stream: Any, workers: int) -> None:
    wrapped = gl.wrap(stream, mode="L")
    sample = next(iter(wrapped))
    assert sample == {"image": gl.Encoded(jpeg(0), "L", "0.jpg", exif=True), "label": 0}
    assert repr(wrapped) == "wrap(datasets.IterableDataset: 'image', 'label')"
    with stream_loader(wrapped, num_workers=workers) as loader:
        batches = list(loader)
    assert sorted(labels_of(batches)) == [*range(STREAM_LENGTH)]
    assert {tuple(batch["image"].shape) for batch in batches} == {(4, 1, 8, 8)}


@pytest.mark.usefixtures("warm")
@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_wrap_stream_skips_bad_images(hf: ModuleType, workers: int) -> None:
    images = [{"bytes": jpeg(n) if n != 5 else b"no image", "path": f"{n}.jpg"} for n in range(12)]
    images[8] = {"bytes": None, "path": "/nowhere/8.jpg"}
    faults = gl.Faults(on_error="skip", max_error_rate=0.5)
    wrapped = gl.wrap(make_table(hf, images).to_iterable_dataset(num_shards=4))
    with stream_loader(wrapped, num_workers=workers, faults=faults) as loader:
        with pytest.warns(RuntimeWarning, match="it was skipped"):
            batches = list(loader)
        labels = sorted(labels_of(batches))
        assert labels == [n for n in range(12) if n not in (5, 8)]
        assert "5.jpg" in [error.source for error in loader.errors]


@pytest.mark.parametrize("world_size", [2, 4])  # 2 divides the six shards, 4 does not
def test_wrap_stream_is_divided_among_ranks(stream: Any, world_size: int) -> None:
    labels = []
    for rank in range(world_size):
        with stream_loader(gl.wrap(stream), num_workers=0, rank=rank, world_size=world_size) as loader:
            labels += labels_of(loader)
    assert sorted(labels) == [*range(STREAM_LENGTH)]


def test_wrap_stream_split_by_node_is_not_split_again(stream: Any) -> None:
    split = importlib.import_module("datasets.distributed").split_dataset_by_node(stream, 1, 2)
    with stream_loader(gl.wrap(split), num_workers=0, rank=1, world_size=2) as loader:
        labels = labels_of(loader)
    assert labels == [row["label"] for row in split]
    assert len(labels) == STREAM_LENGTH // 2


@pytest.mark.usefixtures("warm")
@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_wrap_stream_resumes_from_its_state(stream: Any, workers: int) -> None:
    with stream_loader(gl.wrap(stream), num_workers=workers) as loader:
        batches = iter(loader)
        loaded = [next(batches)["label"].tolist() for _ in range(2)]
        state = json.loads(json.dumps(loader.state_dict()))
        remaining = [batch["label"].tolist() for batch in batches]
    with stream_loader(gl.wrap(stream), num_workers=workers) as loader:
        loader.load_state_dict(state)
        assert [batch["label"].tolist() for batch in loader] == remaining
    assert len(loaded) + len(remaining) == STREAM_LENGTH // 4


def test_wrap_stream_shuffles_by_epoch(stream: Any) -> None:
    wrapped = gl.wrap(stream.shuffle(seed=1, buffer_size=8))
    with stream_loader(wrapped, num_workers=0) as loader:
        orders = []
        for epoch in (0, 1, 0):
            loader.set_epoch(epoch)
            orders.append(labels_of(loader))
    assert orders[0] == orders[2] != orders[1]
    assert sorted(orders[1]) == [*range(STREAM_LENGTH)]


def test_wrap_stream_reads_images_at_file_urls(hf: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "0.jpg").write_bytes(jpeg(0))
    paths = [f"file://{tmp_path}/0.jpg", str(tmp_path / "0.jpg")]
    table = make_table(hf, [{"bytes": None, "path": path} for path in paths])
    assert [row["image"].data for row in gl.wrap(table.to_iterable_dataset())] == [jpeg(0)] * 2


def test_wrap_stream_error_of_map_ends_the_epoch(stream: Any) -> None:
    def fail(row: dict[str, Any]) -> dict[str, Any]:
        if row["label"] == 6:
            raise RuntimeError("no more")
        return row

    wrapped = gl.wrap(stream.map(fail, features=stream.features))
    assert isinstance(next(iter(wrapped))["image"], PILImage.Image), "map() must have decoded the image"
    faults = gl.Faults(on_error="skip", max_error_rate=1)
    with stream_loader(wrapped, num_workers=0, faults=faults) as loader, pytest.raises(gl.SampleError, match="no more"):
        list(loader)


def test_wrap_stream_refuses_formats_tables_without_images_and_unknown_columns(stream: Any) -> None:
    for dataset, message in (
        (stream.with_format("numpy"), "with the format 'numpy', which is applied after decoding: pass dataset.with_"),
        (stream.select_columns("label"), "without images: none of its columns is a datasets.Image ('label'); declare"),
        (stream.map(lambda row: row), "whose columns are unknown before it is read, as after map(); declare them"),
    ):
        with pytest.raises(TypeError, match=starting(f"got a datasets.iterable_dataset.IterableDataset {message}")):
            gl.wrap(dataset)
