"""`measure_files` and `measure_pixels`: a row for each image of several datasets, and sums over the pixels."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.picture_folders import folder, picture
from helpers.tar_files import shards_of_pictures

import gpuload as gl
from gpuload.decode import Decode, Decoder
from gpuload.inspection import measure as measure_module
from gpuload.inspection.files import DAMAGED, GOOD
from gpuload.inspection.measure import Measurements, measure_files, measure_pixels


def measure(*datasets: Any, workers: int = 0, max_images: int | None = None, **options: Any) -> Measurements:
    result = measure_files(datasets, [f"data {number}" for number in range(len(datasets))], workers=workers, **options)
    measure_pixels(result, max_images=max_images, workers=workers)
    return result


def measured_rows(result: Measurements) -> list[int]:
    return np.flatnonzero(result.rows["measured"]).tolist()


def test_measure_files_has_a_row_for_each_image_and_reports_progress(tmp_path: Path) -> None:
    dataset = gl.ImageFolder(folder(tmp_path, {"a": 3, "b": 2}))
    (tmp_path / "a" / "1.jpg").write_bytes(b"nothing")
    progress: list[tuple[int, int]] = []
    result = measure_files(
        [dataset], ["x"], workers=0, update_progress=lambda done, total: progress.append((done, total))
    )
    assert result.rows["state"].tolist() == [GOOD, DAMAGED, GOOD, GOOD, GOOD]
    assert result.rows["width"].tolist() == [56, 0, 56, 56, 64]
    assert result.rows["nbytes"].tolist() == [os.path.getsize(path) for path in dataset.paths]
    assert [result.classes[label] for label in result.rows["label"]] == ["a", "a", "a", "b", "b"]
    assert list(result.causes) == [1]
    assert "not an image" in result.causes[1]
    assert progress == [(0, 5), (5, 5)]
    assert (result.name_of(3), result.name_of(3, full=True)) == ("b/0.jpg", str(tmp_path / "b" / "0.jpg"))


def test_measure_pixels_sums_all_pixels(tmp_path: Path) -> None:
    dataset = gl.ImageFolder(folder(tmp_path, {"a": 4}))
    result = measure(dataset)
    decoder = Decoder(Decode())
    images = [decoder.decode(image, decoder.header(image)) for image, _ in dataset]
    pixels = np.concatenate([image.reshape(-1, 3) for image in images]).astype(np.int64)
    group = result.groups[3, 8]
    assert (group.images, group.pixels) == (4, len(pixels))
    assert group.sums.tolist() == pixels.sum(axis=0).tolist()
    assert group.squares.tolist() == (pixels**2).sum(axis=0).tolist()
    assert group.levels[0].tolist() == np.bincount(pixels[:, 0], minlength=256).tolist()
    assert measured_rows(result) == [0, 1, 2, 3]


@pytest.mark.processes
def test_measurements_with_workers_equal_those_without(tmp_path: Path) -> None:
    dataset = gl.ImageFolder(folder(tmp_path, {"a": 20, "b": 20}))
    in_process, in_workers = measure(dataset), measure(dataset, workers=2)
    assert in_process.rows.tobytes() == in_workers.rows.tobytes()
    assert in_process.groups[3, 8].squares.tolist() == in_workers.groups[3, 8].squares.tolist()


class ExitsAt:
    """A dataset of which one sample ends the process that reads it, once a file exists."""

    def __init__(self, index: int, length: int, path: Path) -> None:
        self.index, self.length, self.path = index, length, path

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> gl.Encoded:
        if index == self.index and self.path.exists():
            os._exit(9)
        return gl.Encoded(picture(index))


def test_all_images_are_measured_where_the_environment_has_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = measure(gl.ImageFolder(folder(tmp_path, {"a": 4})))
    assert result.rows["state"].tolist() == [GOOD] * 4
    assert measured_rows(result) == [0, 1, 2, 3]


@pytest.mark.processes
def test_sample_that_kills_its_worker_is_damaged(tmp_path: Path) -> None:
    result = measure_files([ExitsAt(7, 20, tmp_path)], ["x"], workers=1)
    assert result.rows["state"].tolist() == [GOOD] * 7 + [DAMAGED] + [GOOD] * 12
    assert "worker" in result.causes[7]


@pytest.mark.processes
def test_measure_pixels_counts_an_image_that_fills_a_batch_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that would be empty is filled with a sample of an earlier batch."""
    monkeypatch.setattr(measure_module, "BATCH_SIZE", 2)
    result = measure_files([ExitsAt(2, 3, tmp_path / "file")], ["x"], workers=1)
    (tmp_path / "file").touch()
    measure_pixels(result, max_images=None, workers=1)
    assert result.rows["state"].tolist() == [GOOD, GOOD, DAMAGED]
    assert measured_rows(result) == [0, 1]
    assert result.groups[3, 8].images == 2


def test_sample_whose_dataset_raises_is_damaged() -> None:
    class Broken(list):
        def __getitem__(self, index: int) -> Any:
            if index == 1:
                raise RuntimeError("no such row")
            return super().__getitem__(index)

    result = measure_files([Broken([gl.Encoded(picture(0)), None, 3])], ["x"], workers=0)
    assert result.rows["state"].tolist() == [GOOD, DAMAGED, DAMAGED]
    assert result.causes == {1: "RuntimeError: no such row", 2: "TypeError: the sample has no image, only int"}


def test_image_that_fails_only_when_decoded_is_damaged(tmp_path: Path) -> None:
    dataset = gl.ImageFolder(folder(tmp_path, {"a": 3}))
    data = bytearray(picture(1, 200, 200))
    data[-200:-100] = b"\xff\xda" * 50  # markers of scans, within the data of a scan
    (tmp_path / "a" / "1.jpg").write_bytes(data)
    result = measure_files([dataset], ["x"], workers=0)
    assert result.rows["state"].tolist() == [GOOD] * 3
    measure_pixels(result, max_images=None, workers=0)
    assert result.rows["state"].tolist() == [GOOD, DAMAGED, GOOD]
    assert measured_rows(result) == [0, 2]
    assert "cannot be decoded" in result.causes[1]


def test_file_deleted_after_measure_files_is_damaged(tmp_path: Path) -> None:
    result = measure_files([gl.ImageFolder(folder(tmp_path, {"a": 3}))], ["x"], workers=0)
    (tmp_path / "a" / "1.jpg").unlink()
    measure_pixels(result, max_images=None, workers=0)
    assert result.rows["state"].tolist() == [GOOD, DAMAGED, GOOD]
    assert measured_rows(result) == [0, 2]


def test_limit_draws_samples_from_each_dataset_by_seed() -> None:
    datasets = [[gl.Encoded(picture(0), source=str(number)) for number in range(count)] for count in (30, 4, 50)]
    result = measure(*datasets, limit=10, seed=3, max_images=6)
    assert np.bincount(result.rows["which"]).tolist() == [10, 4, 10]
    for dataset in range(3):
        indices = result.rows["index"][result.rows["which"] == dataset].tolist()
        assert indices == sorted(set(indices))
        assert max(indices) < len(datasets[dataset])
    assert result.is_sampled
    assert len(measured_rows(result)) == 6
    other_seed = measure(*datasets, limit=10, seed=4, max_images=6)
    assert other_seed.rows["index"].tolist() != result.rows["index"].tolist()
    assert measured_rows(measure(*datasets, limit=10, seed=3, max_images=6)) == measured_rows(result)
    assert result.name_of(0) == str(result.rows["index"][0])


def test_classes_of_several_datasets_are_matched_by_name(tmp_path: Path) -> None:
    """Two folders number their classes differently; shards have only numbers."""
    train = gl.ImageFolder(folder(tmp_path / "train", {"cat": 1, "dog": 1}))
    val = gl.ImageFolder(folder(tmp_path / "val", {"bird": 1, "cat": 1}))
    shards = gl.TarShards(shards_of_pictures(tmp_path, 1, 3), fields=("jpg", "cls"))
    result = measure(train, val, shards)
    names = [result.classes[label] for label in result.rows["label"]]
    assert names == ["cat", "dog", "bird", "cat", *(str(label) for _, label in shards)]
    assert result.name_of(4) == shards.keys[0]


def test_more_labels_than_max_classes_are_not_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_module, "MAX_CLASSES", 3)
    result = measure([(gl.Encoded(picture(number)), f"a text {number}") for number in range(6)])
    assert result.classes == []
    assert (result.rows["label"] == -1).all()
