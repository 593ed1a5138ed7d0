"""`Joined` and `Mapped`: the datasets that ``+`` and ``map()`` return."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.generated_images import encode
from helpers.map_datasets import BatchedMapDataset
from helpers.matrix import matrix
from helpers.patterns import exactly
from PIL import Image

import gpuload as gl
from gpuload.datasets.joined import Joined, Mapped
from gpuload.datasets.kinds import is_deterministic, uses_getitems


@pytest.fixture
def array_file(tmp_path: Path) -> gl.ArrayFile:
    images = np.random.default_rng(0).integers(0, 256, (40, 6, 6, 3), np.uint8)
    np.save(tmp_path / "images.npy", images)
    return gl.ArrayFile(tmp_path / "images.npy", labels=np.arange(40))


def multiply_label(sample):
    image, label = sample
    return image, 10 * label


def add_random_numbers(sample):
    image, label = sample
    return image, (label, np.random.random(), random.random())


def make_folder(root: Path, *names: str) -> gl.ImageFolder:
    for number, name in enumerate(names or ("a/0.png", "b/1.png", "a/2.png", "b/3.png", "a/4.png")):
        (root / name).parent.mkdir(exist_ok=True, parents=True)
        Image.fromarray(np.full((4, 4, 3), number, np.uint8)).save(root / name)
    return gl.ImageFolder(root)


def test_map_changes_samples_and_forwards_attributes(tmp_path):
    folder = make_folder(tmp_path)
    mapped = folder.map(multiply_label)
    assert len(mapped) == 5
    assert [sample[1] for sample in mapped] == [10 * sample[1] for sample in folder] == [0, 0, 0, 10, 10]
    assert mapped[-1][0] == folder[-1][0]
    assert (mapped.classes, mapped.root) == (["a", "b"], folder.root)
    assert [sample[1] for sample in mapped.__getitems__([4, 0])] == [10, 0]
    assert repr(mapped) == f"{folder!r}.map(multiply_label)"
    with pytest.raises(IndexError, match="index 5 is out of range"):
        mapped[5]
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = mapped.nothing


def test_map_twice_calls_both_functions_in_order(array_file):
    mapped = array_file.map(multiply_label).map(lambda sample: sample[1] + 1)
    assert isinstance(mapped.dataset, gl.ArrayFile)
    assert mapped[3] == 31


def test_map_refuses_a_function_that_is_not_callable(array_file):
    with pytest.raises(TypeError, match=r"^map\(fn=…\) must be callable, got \{'a': 1\} \(dict\)$"):
        array_file.map({"a": 1})


@pytest.mark.parametrize(
    "wrap", [lambda dataset: dataset, lambda dataset: gl.Cached(dataset, 1 << 20), lambda dataset: dataset + dataset]
)
def test_map_works_on_folders_cached_and_joined_datasets(wrap, tmp_path):
    dataset = wrap(make_folder(tmp_path))
    assert [sample[1] for sample in dataset.map(multiply_label)] == [10 * sample[1] for sample in dataset]


def test_map_of_a_mix_maps_each_of_its_datasets(array_file):
    mix = gl.Mix([array_file, array_file], [1, 3], length=99).map(multiply_label)
    assert isinstance(mix, gl.Mix)
    assert (mix.parts, mix.length) == ((1, 3), 99)
    assert [mix[index][1] for index in (1, 40 + 1)] == [10, 10]  # sample 1 of each dataset: ten times its label 1


def test_map_keeps_uses_getitems_and_is_not_deterministic(array_file, tmp_path):
    mapped_folder = make_folder(tmp_path / "files").map(add_random_numbers)
    assert not is_deterministic(mapped_folder)
    assert not uses_getitems(mapped_folder), "files should be read one by one"
    mapped_array_file = array_file.map(add_random_numbers)
    assert uses_getitems(mapped_array_file)
    assert uses_getitems(mapped_array_file + array_file)
    assert not uses_getitems(mapped_array_file + [1]), "samples of a user's own dataset are seeded one by one"  # noqa: RUF005
    assert not uses_getitems(gl.Cached(mapped_array_file, 1 << 20))
    assert not uses_getitems(torch.utils.data.Subset(mapped_array_file, [1, 2]))
    assert uses_getitems(torch.utils.data.Subset(array_file, [1, 2]))


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
def test_random_numbers_of_a_mapped_function_depend_only_on_the_position(wrap, array_file):
    def encode_sample(sample):  # Cached stores encoded images
        image, values = add_random_numbers(sample)
        return gl.Encoded(encode(np.asarray(image.hwc), "PNG")), values

    expected = label_batches(wrap(array_file.map(encode_sample)), num_workers=0, chunk_size=3)
    for num_workers, chunk_size in ((0, 8), (2, 5)):
        batches = label_batches(wrap(array_file.map(encode_sample)), num_workers, chunk_size)
        assert batches == expected, (num_workers, chunk_size)
    random_numbers = [value for _, from_numpy, from_python in expected for value in (*from_numpy, *from_python)]
    assert len(set(random_numbers)) == len(random_numbers)


def test_map_whose_function_raises_names_the_failed_sample(array_file):
    def divide(sample):
        return sample[0], 100 // (sample[1] - 11)

    with gl.Loader(array_file.map(divide), 8, num_workers=0, device="cpu") as loader:
        batches = iter(loader)
        next(batches)
        with pytest.raises(gl.SampleError, match="sample 11, at position 11 of the epoch, could not be loaded"):
            next(batches)


@pytest.mark.parametrize("name", ["transform", "transforms"])
def test_setting_transforms_on_a_dataset_is_refused(array_file, name):
    for dataset in (array_file, array_file.map(str), array_file + array_file, gl.Mix([array_file], [1.0])):
        with pytest.raises(ValueError, match=rf"{name} would have no effect on a gpuload dataset; pass transforms=\["):
            setattr(dataset, name, [])


def test_joined_datasets_follow_each_other_and_need_no_torch(tmp_path: Path) -> None:
    first = make_folder(tmp_path / "one", "ant/1.jpg", "bee/2.jpg")
    second = make_folder(tmp_path / "two", "ant/3.jpg", "bee/4.jpg", "bee/5.jpg")
    joined = first + second
    all_three = joined + [("x", 7)]  # noqa: RUF005
    assert (len(joined), len(all_three), all_three.cumulative_sizes) == (5, 6, [2, 5, 6])
    assert [all_three[i] for i in range(6)] == [*first, *second, ("x", 7)]
    assert (all_three[-1], all_three[-6]) == (("x", 7), first[0])
    with pytest.raises(IndexError, match=exactly("index 6 is out of range: the joined datasets have 6 samples")):
        all_three[6]
    with pytest.raises(TypeError, match="unsupported operand"):
        _ = first + 3
    assert repr(joined) == f"{first!r} + {second!r}"
    assert (is_deterministic(joined), is_deterministic(all_three)) == (True, False), "samples of a list may be random"
    program = "import sys; sys.modules['torch'] = None; import pickle; print(len(pickle.load(sys.stdin.buffer)))"
    command = [sys.executable, "-c", program]
    process = subprocess.run(command, input=pickle.dumps(joined), capture_output=True, check=True)
    assert process.stdout.split() == [b"5"]


class NamedSamples(BatchedMapDataset):
    def __init__(self, name: str, count: int, block_bounds: list[int] | None = None) -> None:
        super().__init__(lambda index: f"{name}{index}", count)
        self.block_bounds = block_bounds

    def blocks(self) -> list[int] | None:
        return self.block_bounds


def test_joined_getitems_requests_the_samples_of_each_dataset_at_once(tmp_path: Path) -> None:
    first, second = NamedSamples("a", 4), NamedSamples("b", 5)
    folder = make_folder(tmp_path, "ant/1.jpg", "bee/2.jpg")
    joined = Joined([first, folder, second])
    assert joined.__getitems__([8, 0, 5, 10, -1, 3]) == ["b2", "a0", folder[1], "b4", "b4", "a3"]
    assert (first.calls, second.calls) == ([[0, 3]], [[2, 4, 4]])
    assert uses_getitems(joined)
    assert not uses_getitems(Joined([folder, folder])), "folders have no __getitems__ to read several files at once"
    assert not uses_getitems(Joined([first, [1, 2]])), "samples of a user's own dataset are seeded one by one"
    with pytest.raises(IndexError, match=exactly("index 11 is out of range: the joined datasets have 11 samples")):
        joined.__getitems__([0, 11])


def test_joined_blocks_are_the_blocks_of_its_datasets_shifted_by_their_starts() -> None:
    without_blocks = NamedSamples("c", 3)
    assert Joined([without_blocks, without_blocks]).blocks() is None
    joined = Joined([NamedSamples("a", 7, [0, 4, 7]), without_blocks, NamedSamples("b", 5, [0, 5])])
    # A dataset without blocks has one block for each of its three samples.
    assert np.unique(joined.blocks()).tolist() == [0, 4, 7, 8, 9, 10, 15]


def test_joining_folders_with_different_class_numbers_warns(tmp_path: Path) -> None:
    first = make_folder(tmp_path / "one", "ant/1.jpg", "bee/2.jpg", "cat/3.jpg")
    second = make_folder(tmp_path / "two", "ant/3.jpg", "cat/4.jpg")
    text = (
        f"{first!r} and {second!r} are joined, but number their classes differently: label 1 is 'bee' in the first and "
        "'cat' in the second. Pass the same classes=, a list of all names, to both; in COCO files, "
        "use the same category ids"
    )
    with pytest.warns(UserWarning, match=exactly(text)) as caught:
        _ = first + second
    assert caught[0].filename == __file__
    joined = first + gl.ImageFolder(tmp_path / "two", classes=first)
    assert [label for _, label in joined] == [0, 1, 2, 0, 2]
    assert len(first + make_folder(tmp_path / "three", "ant/3.jpg", "bee/4.jpg")) == 5, "equal labels must not warn"
