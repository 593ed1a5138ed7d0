"""What a loader's workers gather of datasets."""

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
from gpuload.inspection.files import DAMAGED, GOOD
from gpuload.inspection.measure import Measurements, measure_files, measure_pixels


def measurements(*datasets: Any, workers: int = 0, most: int | None = None, **options: Any) -> Measurements:
    found = measure_files(datasets, [f"data {at}" for at in range(len(datasets))], workers=workers, **options)
    measure_pixels(found, max_images=most, workers=workers)
    return found


def measured(found: Measurements) -> list[int]:
    return np.flatnonzero(found.rows["measured"]).tolist()


def test_every_image_has_a_row(tmp_path: Path) -> None:
    dataset = gl.ImageFolder(folder(tmp_path, {"a": 3, "b": 2}))
    (tmp_path / "a" / "1.jpg").write_bytes(b"nothing")
    told: list[tuple[int, int]] = []
    found = measure_files([dataset], ["x"], workers=0, update_progress=lambda done, total: told.append((done, total)))
    assert found.rows["state"].tolist() == [GOOD, DAMAGED, GOOD, GOOD, GOOD]
    assert found.rows["width"].tolist() == [56, 0, 56, 56, 64]
    assert found.rows["nbytes"].tolist() == [os.path.getsize(path) for path in dataset.paths]
    assert [found.classes[label] for label in found.rows["label"]] == ["a", "a", "a", "b", "b"]
    assert list(found.causes) == [1]
    assert "not an image" in found.causes[1]
    assert told == [(0, 5), (5, 5)]
    assert (found.name_of(3), found.name_of(3, full=True)) == ("b/0.jpg", str(tmp_path / "b" / "0.jpg"))


def test_sums_are_those_of_all_pixels(tmp_path: Path) -> None:
    dataset = gl.ImageFolder(folder(tmp_path, {"a": 4}))
    found = measurements(dataset)
    decoder = Decoder(Decode())
    images = [decoder.decode(image, decoder.header(image)) for image, _ in dataset]
    every = np.concatenate([image.reshape(-1, 3) for image in images]).astype(np.int64)
    group = found.groups[3, 8]
    assert (group.images, group.pixels) == (4, len(every))
    assert (group.sums.tolist(), group.squares.tolist()) == (
        every.sum(axis=0).tolist(),
        (every**2).sum(axis=0).tolist(),
    )
    assert group.levels[0].tolist() == np.bincount(every[:, 0], minlength=256).tolist()
    assert measured(found) == [0, 1, 2, 3]


@pytest.mark.processes
def test_workers_gather_the_same(tmp_path: Path) -> None:
    dataset = gl.ImageFolder(folder(tmp_path, {"a": 20, "b": 20}))
    alone, shared = measurements(dataset), measurements(dataset, workers=2)
    assert alone.rows.tobytes() == shared.rows.tobytes()
    assert alone.groups[3, 8].squares.tolist() == shared.groups[3, 8].squares.tolist()


class Deadly:
    """A dataset with a sample that ends the process that reads it."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> gl.Encoded:
        if index == 7:
            os._exit(9)
        return gl.Encoded(picture(index))


@pytest.mark.processes
def test_a_file_that_kills_workers_is_a_damaged_one() -> None:
    found = measure_files([Deadly()], ["x"], workers=1)
    assert np.flatnonzero(found.rows["state"] == DAMAGED).tolist() == [7]
    assert "worker" in found.causes[7]
    assert (found.rows["state"] == GOOD).sum() == 19


class Changing:
    """Three samples; the last one ends the process that reads it, once there is a file."""

    def __init__(self, sign: Path) -> None:
        self.sign = sign

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> gl.Encoded:
        if index == 2 and self.sign.exists():
            os._exit(9)
        return gl.Encoded(picture(index))


@pytest.mark.processes
def test_no_image_is_counted_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that would be empty is filled with a sample that has come already."""
    from gpuload.inspection import measure as module

    monkeypatch.setattr(module, "BATCH_SIZE", 2)
    found = measure_files([Changing(tmp_path / "sign")], ["x"], workers=1)
    (tmp_path / "sign").touch()
    measure_pixels(found, max_images=None, workers=1)
    assert found.rows["state"].tolist() == [GOOD, GOOD, DAMAGED]
    assert measured(found) == [0, 1]
    assert found.groups[3, 8].images == 2


def test_what_a_dataset_raises_is_damage() -> None:
    class Broken(list):
        def __getitem__(self, index: int) -> Any:
            if index == 1:
                raise RuntimeError("no such row")
            return super().__getitem__(index)

    found = measure_files([Broken([gl.Encoded(picture(0)), None, 3])], ["x"], workers=0)
    assert found.rows["state"].tolist() == [GOOD, DAMAGED, DAMAGED]
    assert found.causes == {1: "RuntimeError: no such row", 2: "TypeError: the sample has no image, only int"}


def test_damage_that_only_decoding_finds(tmp_path: Path) -> None:
    dataset = gl.ImageFolder(folder(tmp_path, {"a": 3}))
    data = bytearray(picture(1, 200, 200))
    data[-200:-100] = b"\xff\xda" * 50
    (tmp_path / "a" / "1.jpg").write_bytes(data)
    found = measure_files([dataset], ["x"], workers=0)
    assert found.rows["state"].tolist() == [GOOD] * 3
    measure_pixels(found, max_images=None, workers=0)
    assert found.rows["state"].tolist() == [GOOD, DAMAGED, GOOD]
    assert measured(found) == [0, 2]
    assert "cannot be decoded" in found.causes[1]


def test_a_file_that_is_gone_meanwhile_is_damaged(tmp_path: Path) -> None:
    found = measure_files([gl.ImageFolder(folder(tmp_path, {"a": 3}))], ["x"], workers=0)
    (tmp_path / "a" / "1.jpg").unlink()
    measure_pixels(found, max_images=None, workers=0)
    assert found.rows["state"].tolist() == [GOOD, DAMAGED, GOOD]
    assert measured(found) == [0, 2]


def test_a_limit_draws_from_each_data_set() -> None:
    sets = [[gl.Encoded(picture(0), source=str(at)) for at in range(count)] for count in (30, 4, 50)]
    found = measurements(*sets, limit=10, seed=3, most=6)
    assert np.bincount(found.rows["which"]).tolist() == [10, 4, 10]
    for which in range(3):
        own = found.rows["index"][found.rows["which"] == which].tolist()
        assert own == sorted(set(own))
        assert max(own) < len(sets[which])
    assert found.is_sampled
    assert len(measured(found)) == 6
    other = measurements(*sets, limit=10, seed=4, most=6)
    assert other.rows["index"].tolist() != found.rows["index"].tolist()
    assert measured(measurements(*sets, limit=10, seed=3, most=6)) == measured(found)
    assert found.name_of(0) == str(found.rows["index"][0])


def test_classes_are_the_same_by_name(tmp_path: Path) -> None:
    """Two folders number their classes differently, shards have numbers alone."""
    train = gl.ImageFolder(folder(tmp_path / "train", {"cat": 1, "dog": 1}))
    val = gl.ImageFolder(folder(tmp_path / "val", {"bird": 1, "cat": 1}))
    shards = gl.TarShards(shards_of_pictures(tmp_path, 1, 3), fields=("jpg", "cls"))
    found = measurements(train, val, shards)
    named = [found.classes[label] for label in found.rows["label"]]
    assert named == ["cat", "dog", "bird", "cat", *(str(label) for _, label in shards)]
    assert found.name_of(4) == shards.keys[0]


def test_captions_are_no_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpuload.inspection import measure as module

    monkeypatch.setattr(module, "MAX_CLASSES", 3)
    found = measurements([(gl.Encoded(picture(at)), f"a text {at}") for at in range(6)])
    assert found.classes == []
    assert (found.rows["label"] == -1).all()
