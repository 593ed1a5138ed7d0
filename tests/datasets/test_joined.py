"""What can be done with any dataset of gpuload's: ``map()``. (Of ``+`` see test_folder.)"""

from __future__ import annotations

import io
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.matrix import matrix
from PIL import Image

import gpuload as gl
from gpuload.datasets.joined import Joined, Mapped
from gpuload.datasets.kinds import is_deterministic, uses_getitems


@pytest.fixture
def array(tmp_path: Path) -> gl.ArrayFile:
    images = np.random.default_rng(0).integers(0, 256, (40, 6, 6, 3), np.uint8)
    np.save(tmp_path / "images.npy", images)
    return gl.ArrayFile(tmp_path / "images.npy", labels=np.arange(40))


def multiply_label(sample):
    image, label = sample
    return image, 10 * label


def add_random_numbers(sample):
    """The label, a number of numpy's generator and one of Python's."""
    image, label = sample
    return image, (label, np.random.random(), random.random())


def make_folder(root: Path, count: int = 5) -> gl.ImageFolder:
    for number in range(count):
        path = root / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(exist_ok=True, parents=True)
        Image.fromarray(np.full((4, 4, 3), number, np.uint8)).save(path)
    return gl.ImageFolder(root)


def test_map_changes_samples_and_forwards_other_attributes(tmp_path):
    files = make_folder(tmp_path)
    mapped = files.map(multiply_label)
    assert len(mapped) == 5
    assert [sample[1] for sample in mapped] == [10 * sample[1] for sample in files] == [0, 0, 0, 10, 10]
    assert mapped[-1][0] == files[-1][0]
    assert (mapped.classes, mapped.root) == (["a", "b"], files.root)
    assert [sample[1] for sample in mapped.__getitems__([4, 0])] == [10, 0]
    assert repr(mapped) == f"{files!r}.map(multiply_label)"
    with pytest.raises(IndexError, match="index 5 is out of range"):
        mapped[5]
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = mapped.nothing


def test_map_twice_calls_both_functions_in_order(array):
    mapped = array.map(multiply_label).map(lambda sample: sample[1] + 1)
    assert isinstance(mapped.dataset, gl.ArrayFile)
    assert mapped[3] == 31


def test_map_refuses_a_function_that_is_not_callable(array):
    with pytest.raises(TypeError, match=r"^map\(fn=…\) must be callable, got \{'a': 1\} \(dict\)$"):
        array.map({"a": 1})


@pytest.mark.parametrize(
    "wrap", [lambda dataset: dataset, lambda dataset: gl.Cached(dataset, 1 << 20), lambda dataset: dataset + dataset]
)
def test_map_works_on_folders_cached_and_joined_datasets(wrap, tmp_path):
    dataset = wrap(make_folder(tmp_path))
    assert [sample[1] for sample in dataset.map(multiply_label)] == [10 * sample[1] for sample in dataset]


def test_map_of_a_mix_maps_each_of_its_datasets(array, tmp_path):
    mix = gl.Mix([array, array], [1, 3], length=99).map(multiply_label)
    assert isinstance(mix, gl.Mix)
    assert (mix.parts, mix.length, mix[41][1]) == ((1, 3), 99, 10)


def test_map_keeps_uses_getitems_and_is_not_deterministic(array, tmp_path):
    files = make_folder(tmp_path / "files").map(add_random_numbers)
    assert not is_deterministic(files)
    assert not uses_getitems(files), "files are better read one by one"
    mapped = array.map(add_random_numbers)
    assert uses_getitems(mapped)
    assert uses_getitems(mapped + array)
    assert not uses_getitems(mapped + [1]), "samples of a user's own dataset are seeded one by one"  # noqa: RUF005
    assert not uses_getitems(gl.Cached(mapped, 1 << 20))
    assert not uses_getitems(torch.utils.data.Subset(mapped, [1, 2]))
    assert uses_getitems(torch.utils.data.Subset(array, [1, 2]))


def label_batches(dataset, num_workers, chunk_size) -> list[list[list[float]]]:
    options = {"shuffle": True, "num_workers": num_workers, "chunk_size": chunk_size, "device": "cpu"}
    with gl.Loader(dataset, 8, **options) as loader:
        return [[column.tolist() for column in labels] for _, labels in loader]


@matrix(
    strength=1,
    wrap=[
        lambda mapped: mapped,
        lambda mapped: mapped + mapped,
        lambda mapped: gl.Mix([mapped, mapped], [1, 3]),
        lambda mapped: gl.Cached(mapped, 1 << 20),
        lambda mapped: torch.utils.data.Subset(mapped, range(3, 30)),
        lambda mapped: Joined([mapped, Mapped(mapped.dataset, add_random_numbers)]),
    ],
)
def test_random_numbers_of_a_mapped_function_depend_on_the_position_alone(wrap, array):
    def encode(sample):  # Cached stores encoded images
        image, values = add_random_numbers(sample)
        file = io.BytesIO()
        Image.fromarray(np.asarray(image.hwc)).save(file, "PNG")
        return gl.Encoded(file.getvalue()), values

    expected = label_batches(wrap(array.map(encode)), 0, 3)
    assert expected == label_batches(wrap(array.map(encode)), 0, 8) == label_batches(wrap(array.map(encode)), 2, 5)
    random_numbers = [value for _, from_numpy, from_python in expected for value in (*from_numpy, *from_python)]
    assert len(set(random_numbers)) == len(random_numbers)


def test_map_whose_function_raises_fails_for_its_sample_alone(array):
    def divide(sample):
        return sample[0], 100 // (sample[1] - 11)

    with gl.Loader(array.map(divide), 8, num_workers=0, device="cpu") as loader:
        batches = iter(loader)
        next(batches)
        with pytest.raises(gl.SampleError, match="sample 11, at position 11 of the epoch, could not be loaded"):
            next(batches)


@pytest.mark.parametrize("name", ["transform", "transforms"])
def test_setting_transforms_on_a_dataset_is_refused(array, name):
    for dataset in (array, array.map(str), array + array, gl.Mix([array], [1.0])):
        with pytest.raises(
            ValueError, match=rf"{name} would have no effect on a gpuload dataset; pass transforms=\[…\]"
        ):
            setattr(dataset, name, [])
