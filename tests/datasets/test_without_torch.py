"""`without_torch`: copies of torchvision's ImageFolder(loader=gl.read) for workers that do not import torch."""

from __future__ import annotations

import functools
import pickle
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, random_split

import gpuload as gl
from gpuload import transforms as T
from gpuload.datasets.without_torch import FolderCopy, SubsetCopy, without_torch


def assert_equal_copy(dataset: Any) -> None:
    copy = pickle.loads(pickle.dumps(without_torch(dataset)))
    assert type(copy) in (FolderCopy, SubsetCopy)
    assert len(copy) == len(dataset)
    for index in (*range(len(dataset)), *range(-len(dataset), 0), *map(np.int64, range(len(dataset)))):
        image, label = copy[index]
        expected, expected_label = dataset[index]
        assert image == expected
        assert (image.source, label) == (expected.source, expected_label)
        assert type(label) is type(expected_label)
    with pytest.raises(IndexError):
        copy[len(dataset)]


def test_folder_copy_equals_image_folder(vision: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_equal_copy(vision.ImageFolder(folder, loader=gl.read))
    monkeypatch.chdir(folder.parent)
    for root in (folder.name, f"./{folder.name}/", f"{folder}//", Path(folder.name)):
        assert_equal_copy(vision.ImageFolder(root, loader=gl.read))
    monkeypatch.chdir(folder)
    assert_equal_copy(vision.ImageFolder(".", loader=gl.read))


def test_folder_copy_has_samples_that_the_user_changed(vision: ModuleType, folder: Path, tmp_path: Path) -> None:
    dataset = vision.ImageFolder(folder, loader=gl.read)
    first, second, third, *_ = [path for path, _ in dataset.samples]
    elsewhere = tmp_path / "pícture\udcff.jpg"
    elsewhere.write_bytes(b"x")
    for samples in (
        [(second, -300), (first, 70000), (str(elsewhere), 1)],
        [(first, 2**70), (second, None), (third, True)],
        [(first, 0.5), (second, "ant"), (third, np.int64(3))],
        [(Path(first), 0), (second, 1)],
        [[first, 0], (second, 1)],
        [(first, 1)],
        [],
    ):
        dataset.samples = samples
        assert_equal_copy(dataset)


def test_subset_copy_has_the_samples_of_subset(vision: ModuleType, folder: Path) -> None:
    dataset = vision.ImageFolder(folder, loader=gl.read)
    for subset in random_split(dataset, [6, 4], torch.Generator().manual_seed(3)):
        assert_equal_copy(subset)
    assert_equal_copy(Subset(Subset(dataset, range(8)), np.array([3, 1, 7])))
    assert Subset(dataset, [1]).dataset is dataset


def test_folder_copy_pickles_without_torch_in_under_20_bytes_a_sample(vision: ModuleType, folder: Path) -> None:
    dataset = vision.ImageFolder(folder, loader=gl.read)
    dataset.samples = dataset.samples * 1000
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(without_torch(dataset), 5, buffer_callback=buffers.append)
    assert len(stream) < 1000
    assert b"torch" not in stream.replace(b"without_torch", b"")
    assert sum(len(buffer.raw()) for buffer in buffers) < 20 * len(dataset.samples)


def test_unsupported_datasets_stay_unchanged(vision: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class SubclassedFolder(vision.ImageFolder):
        pass

    options = {"loader": gl.read}
    image_folder = vision.ImageFolder(folder, **options)
    datasets = [
        SubclassedFolder(folder, **options),
        vision.ImageFolder(folder),
        vision.ImageFolder(folder, loader=functools.partial(gl.read)),
        vision.ImageFolder(folder, transform=str, **options),
        vision.ImageFolder(folder, target_transform=str, **options),
        vision.DatasetFolder(folder, gl.read, (".jpg",)),
        ConcatDataset([image_folder]),
        gl.ImageFolder(folder),
        [1, 2],
    ]
    for dataset in datasets:
        assert without_torch(dataset) is dataset
        subset = Subset(dataset, [0])
        assert without_torch(subset) is subset
    image_folder.transforms = str
    assert without_torch(image_folder) is image_folder
    image_folder.transforms = None
    assert without_torch(image_folder) is not image_folder
    monkeypatch.setattr(vision.ImageFolder, "__getitem__", lambda self, index: index)
    assert without_torch(image_folder) is image_folder


def has_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.fresh
@pytest.mark.processes
@pytest.mark.parametrize("kind", ["folder", "subset"])
def test_workers_read_image_folder_without_torch_and_see_changes(vision: ModuleType, folder: Path, kind: str) -> None:
    dataset = images = vision.ImageFolder(folder, loader=gl.read)
    if kind == "subset":
        dataset = Subset(images, [7, 2, 5, 9, 0, 3])
    options: dict[str, Any] = {"batch_size": 3, "device": "cpu", "transforms": [T.RandomCrop(16)]}
    with gl.Loader(dataset, num_workers=2, **options) as loader, gl.Loader(dataset, num_workers=0, **options) as inline:
        assert loader.dataset is dataset

        def assert_equal_epochs() -> list[int]:
            labels = []
            for (pixels, targets), (expected, expected_targets) in zip(loader, inline, strict=True):
                assert pixels.equal(expected)
                assert targets.equal(expected_targets)
                labels += targets.tolist()
            return labels

        labels_before = assert_equal_epochs()
        pids = loader._session.engine.pids
        assert {has_torch(pid) for pid in pids} == {False}
        images.samples.reverse()
        assert assert_equal_epochs() != labels_before
        images.samples = [(path, 5) for path, _ in images.samples]
        assert set(assert_equal_epochs()) == {5}
        assert loader._session.engine.pids == pids
        if kind == "subset":
            dataset.indices[:] = [0, 0, 0, 1, 1, 1]
            assert_equal_epochs()


def test_loader_with_worker_init_fn_sends_the_dataset_itself(folder: Path, vision: ModuleType) -> None:
    dataset = vision.ImageFolder(folder, loader=gl.read)
    options: dict[str, Any] = {"device": "cpu", "transforms": [T.CenterCrop(16)]}
    for worker_options, is_same in (
        ({"num_workers": 2}, False),
        ({"num_workers": 2, "worker_init_fn": print}, True),
        ({"num_workers": 0}, True),
    ):
        with gl.Loader(dataset, **options, **worker_options) as loader:
            assert (loader._options.dataset_to_send is dataset) is is_same
