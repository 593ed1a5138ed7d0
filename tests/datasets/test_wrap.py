"""`wrap`: folders of torchvision with undecoded images, containers of datasets, and errors about other datasets."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from helpers import picture_folders
from helpers.both_loaders import alike, gpuload_batches
from helpers.patterns import exactly, starting
from torch.utils.data import ConcatDataset, Subset, random_split

import gpuload as gl
from gpuload import transforms as T

WRAPPABLE = (
    "gpuload.wrap() takes torchvision's ImageFolder, DatasetFolder, CocoDetection and CocoCaptions, Hugging Face's "
    "datasets.Dataset and IterableDataset, and torch's Subset and ConcatDataset of these"
)
REMEDY = "For any other dataset, make its __getitem__ return gpuload.read(path) instead of the image"


def test_wrap_folder_yields_bytes_in_torchvisions_order_with_its_labels(vision: ModuleType, folder: Path) -> None:
    original = vision.ImageFolder(folder)
    wrapped = gl.wrap(original)
    assert len(wrapped) == len(original) == 10
    assert list(wrapped.paths) == [path for path, _ in original.samples]
    assert wrapped.targets.tolist() == original.targets
    assert (wrapped.classes, wrapped.class_to_idx) == (original.classes, original.class_to_idx)
    for index in (*range(10), -1):
        image, label = wrapped[index]
        assert image == gl.read(original.samples[index][0])
        assert (label, type(label)) == (original.samples[index][1], int)
    assert repr(wrapped) == f"wrap(ImageFolder({str(folder)!r}): 10 images in 3 classes)"


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_wrap_folder_batches_equal_image_folders(vision: ModuleType, folder: Path, workers: int) -> None:
    steps = [T.RandomResizedCrop(16), T.Normalize(mean=(0.5,) * 3, std=(0.2,) * 3)]
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "transforms": steps}
    batches = gpuload_batches(gl.wrap(vision.ImageFolder(folder)), num_workers=workers, **options)
    assert alike(batches, gpuload_batches(gl.ImageFolder(folder), **options))


def test_wrap_folder_pixels_equal_torchvisions(vision: ModuleType, folder: Path) -> None:
    original = vision.ImageFolder(folder)
    for (images, labels), (image, label) in zip(gpuload_batches(gl.wrap(original)), original, strict=True):
        np.testing.assert_array_equal(images[0].permute(1, 2, 0).numpy(), np.asarray(image))
        assert labels.tolist() == [label]


@pytest.mark.fresh
@pytest.mark.processes
def test_wrap_folder_workers_import_no_torch(vision: ModuleType, folder: Path) -> None:
    original = vision.ImageFolder(
        folder, target_transform=lambda label: (label, {"torch", "torchvision"} & {*sys.modules})
    )
    batches = gpuload_batches(gl.wrap(original), 5, num_workers=2, transforms=[T.CenterCrop(16)], collate_fn=list)
    targets = [target for batch in batches for _, target in batch]
    assert targets == [(label, set()) for _, label in original.samples]


def test_wrap_folder_pickle_takes_under_20_bytes_per_sample(vision: ModuleType, folder: Path) -> None:
    original = vision.ImageFolder(folder)
    original.samples = original.samples * 1000
    buffers: list[pickle.PickleBuffer] = []
    stream = cloudpickle.dumps(gl.wrap(original), protocol=5, buffer_callback=buffers.append)
    assert len(stream) < 1500
    assert sum(len(buffer.raw()) for buffer in buffers) < 20 * len(original.samples)
    assert pickle.loads(stream, buffers=buffers)[9999][0].source == original.samples[9999][0]


def test_wrap_folder_makes_its_root_absolute(vision: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    for root in (folder.name, f"./{folder.name}/", Path(folder.name)):
        assert list(gl.wrap(vision.ImageFolder(root)).paths) == list(gl.ImageFolder(folder).paths)
    monkeypatch.chdir(folder)
    assert list(gl.wrap(vision.ImageFolder(".")).paths) == list(gl.ImageFolder(folder).paths)


def test_wrap_folder_keeps_samples_that_the_user_changed(vision: ModuleType, folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "x.jpg"
    elsewhere.write_bytes(b"x")
    original = vision.ImageFolder(folder)
    original.samples = [original.samples[3], (str(elsewhere), -300)]
    wrapped = gl.wrap(original)
    assert wrapped.targets.tolist() == [label for _, label in original.samples]
    assert list(wrapped.paths) == [path for path, _ in original.samples]
    assert wrapped.targets.dtype == np.int16
    original.samples = [(str(elsewhere), "other"), (elsewhere, None)]
    wrapped = gl.wrap(original)
    assert [wrapped[i] for i in range(2)] == [(gl.read(elsewhere), "other"), (gl.read(elsewhere), None)]
    original.samples = []
    assert len(gl.wrap(original)) == 0


def test_wrap_folder_takes_find_classes_loaders_and_modes(vision: ModuleType, folder: Path) -> None:
    class TwoClasses(vision.ImageFolder):
        def find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:
            return ["cat", "ant"], {"cat": 0, "ant": 1}

    assert gl.wrap(TwoClasses(folder)).targets.tolist() == [1, 1, 1, 1, 0, 0, 0]
    loader = vision.folder.pil_loader
    assert gl.wrap(vision.DatasetFolder(folder, loader, (".jpg",)), mode="L")[0][0].mode == "L"
    with_read = vision.ImageFolder(folder, loader=gl.read)
    assert [gl.wrap(with_read)[i] for i in range(10)] == [with_read[i] for i in range(10)]
    with pytest.raises(ValueError, match=exactly("mode must be one of 'RGB', 'L', 'RGBA', 'unchanged', got 'P'")):
        gl.wrap(with_read, mode="P")


@pytest.mark.processes
def test_wrap_folder_read_errors_name_the_path(vision: ModuleType, folder: Path, tmp_path: Path) -> None:
    original = vision.ImageFolder(folder)
    path = str(tmp_path / "gone.jpg")
    original.samples[2] = (path, 0)
    wrapped = gl.wrap(original)
    with pytest.raises(FileNotFoundError, match=re.escape(path)):
        wrapped[2]
    with pytest.raises(IndexError, match=r"index 10 is out of range: WrappedFolder\('/'\) has 10 images"):
        wrapped[10]
    with pytest.raises(gl.SampleError) as caught:
        gpuload_batches(wrapped, 5, num_workers=1, ragged="list")
    assert (caught.value.index, caught.value.source) == (2, path)


def test_wrap_folder_refuses_transforms_of_images(vision: ModuleType, folder: Path) -> None:
    def identity(image: Any) -> Any:
        return image

    message = (
        f"got a torchvision.datasets.folder.ImageFolder with transform={identity!r}, which takes decoded images: "
        "replace it with gpuload.transforms in Loader(transforms=…), and pass the dataset without it"
    )
    with pytest.raises(TypeError, match=exactly(message)):
        gl.wrap(vision.ImageFolder(folder, transform=identity))
    original = vision.ImageFolder(folder)
    original.transforms = identity
    with pytest.raises(TypeError, match=starting("got a torchvision.datasets.folder.ImageFolder with transforms=")):
        gl.wrap(original)


def test_wrap_folder_refuses_overridden_getitem_and_unknown_loaders(vision: ModuleType, folder: Path) -> None:
    class Cropped(vision.ImageFolder):
        def __getitem__(self, index: int) -> Any:
            image, label = super().__getitem__(index)
            return image.crop((0, 0, 1, 1)), label

    name = f"{__name__}.test_wrap_folder_refuses_overridden_getitem_and_unknown_loaders.<locals>.Cropped"
    message = (
        f"got a {name}, but its class overrides __getitem__, which would be bypassed. Make __getitem__ return "
        "gpuload.read(path) instead of the image, and omit wrap()"
    )
    with pytest.raises(TypeError, match=exactly(message)):
        gl.wrap(Cropped(folder))
    message = (
        f"got a torchvision.datasets.folder.DatasetFolder with loader={np.load!r}, which would be bypassed. If "
        "it only reads an image, set dataset.loader = gpuload.read; otherwise, make the dataset return "
        "gpuload.Image(array), and omit wrap()"
    )
    with pytest.raises(TypeError, match=exactly(message)):
        gl.wrap(vision.DatasetFolder(folder, np.load, (".jpg",)))


def test_wrap_refuses_options_of_coco_for_image_folders(vision: ModuleType, folder: Path) -> None:
    message = (
        "got a torchvision.datasets.folder.ImageFolder in a Subset; annotations= and crowds= apply to torchvision's "
        "CocoDetection only; remove them"
    )
    for options in ({"annotations": "raw"}, {"crowds": False}):
        with pytest.raises(TypeError, match=exactly(message)):
            gl.wrap(Subset(vision.ImageFolder(folder), [0]), **options)


def test_wrap_keeps_subset_and_concat_dataset_around_wrapped_datasets(vision: ModuleType, folder: Path) -> None:
    original = vision.ImageFolder(folder)
    subset = Subset(original, [7, 2, 2])
    wrapped = gl.wrap(ConcatDataset([subset, original, gl.ImageFiles(folder)]), mode="L")
    assert type(wrapped) is ConcatDataset
    assert type(wrapped.datasets[0]) is Subset
    assert len(wrapped) == 3 + 10 + 10
    order = [7, 2, 2, *range(10)]
    assert [wrapped[i][0].source for i in range(13)] == [original.samples[n][0] for n in order]
    assert [wrapped[i][1] for i in range(13)] == [original.samples[n][1] for n in order]
    assert wrapped[0][0].mode == "L"
    assert wrapped[13] == gl.ImageFiles(folder)[0]
    assert subset.dataset is original, "wrap() must not change its argument"


@pytest.mark.usefixtures("warm")
@pytest.mark.processes
def test_wrap_random_split_batches_equal_batches_of_the_same_subset(vision: ModuleType, folder: Path) -> None:
    train, _ = random_split(vision.ImageFolder(folder), [6, 4], torch.Generator().manual_seed(3))
    expected = Subset(gl.ImageFolder(folder), train.indices)
    options: dict[str, Any] = {"batch_size": 4, "transforms": [T.RandomCrop(16)]}
    assert alike(gpuload_batches(gl.wrap(train), num_workers=2, **options), gpuload_batches(expected, **options))


def test_wrap_concat_of_folders_with_different_classes_warns(vision: ModuleType, folder: Path, tmp_path: Path) -> None:
    bees = picture_folders.folder(tmp_path, {"bee": 1})
    folders = ConcatDataset([vision.ImageFolder(folder), vision.ImageFolder(bees)])
    with pytest.warns(UserWarning, match="label 0 is 'ant' in the first and 'bee' in the second") as caught:
        gl.wrap(folders)
    assert caught[0].filename == __file__


def test_wrap_refuses_a_subset_that_overrides_getitem(folder: Path) -> None:
    class Mapped(Subset):
        def __getitem__(self, index: Any) -> Any:
            return None

        def __getitems__(self, indices: Any) -> Any:
            return [None] * len(indices)

    message = (
        "Mapped, but its class overrides __getitem__, which may not support Encoded. Wrap the inner dataset with "
        "gpuload.wrap() instead"
    )
    with pytest.raises(TypeError, match=re.escape(message)):
        gl.wrap(Mapped(gl.ImageFiles(folder), [0]))


def test_wrap_refuses_unsupported_datasets_and_names_their_class(vision: ModuleType, folder: Path) -> None:
    nested = Subset(ConcatDataset([gl.ImageFiles(folder), [1, 2]]), [0])
    for dataset, name in (
        ([1], "builtins.list"),
        (nested, "builtins.list at 1 in a ConcatDataset in a Subset"),
        (vision.FakeData(3), "torchvision.datasets.fakedata.FakeData"),
    ):
        with pytest.raises(TypeError, match=exactly(f"got a {name}; {WRAPPABLE}. {REMEDY}")):
            gl.wrap(dataset)


def test_wrap_refuses_a_folder_that_torchvision_wrapped(vision: ModuleType, folder: Path) -> None:
    original = vision.wrap_dataset_for_transforms_v2(vision.ImageFolder(folder))
    with pytest.raises(TypeError, match=r"; wrap the ImageFolder itself, as in gpuload\.wrap\(ImageFolder\(…\)\)$"):
        gl.wrap(original)


@pytest.mark.processes
def test_gpuload_wrap_imports_neither_torch_nor_torchvision_nor_datasets() -> None:
    code = "import sys, gpuload; gpuload.wrap; print({'torch', 'torchvision', 'datasets'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout == b"set()\n"
