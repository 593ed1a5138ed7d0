"""PIL images that a dataset returns reach a `collate_fn` unchanged if there are no transforms."""

from __future__ import annotations

import io
import re
import threading

import numpy as np
import pytest
import torch
from helpers.both_loaders import cpu_loader, gpuload_batches
from helpers.generated_images import jpeg_bytes, smooth_image
from helpers.map_datasets import MapDataset
from PIL import Image as PILImage

import gpuload as gl
from gpuload import transforms as T

COUNT = 8


def paletted(number):
    """Return an image of mode P whose palette has alpha."""
    image = PILImage.fromarray(np.arange(48, dtype=np.uint8).reshape(6, 8) % 4)
    image.putpalette(bytes(range(number, number + 16)), "RGBA")
    return image


def picture(number):
    """Return an image whose mode, size and palette depend on the number. Images of files are not decoded yet."""
    if number % 4 == 0:
        return PILImage.open(io.BytesIO(jpeg_bytes(smooth_image(20, 30 + number, number))))
    if number % 4 == 1:
        return paletted(number)
    if number % 4 == 2:
        return PILImage.fromarray(np.linspace(-1, number, 48, dtype=np.float32).reshape(6, 8))
    file = io.BytesIO()
    PILImage.fromarray(np.eye(7, 9 + number, dtype=bool)).save(file, "PNG")
    return PILImage.open(file)


def sample_at(index):
    return {"image": picture(index), "number": index}


def sample_with_file(index):
    return sample_at(index) | {"file": gl.Encoded(jpeg_bytes(smooth_image(20, 30, index)))}


def pictures():
    return MapDataset(sample_at, COUNT)


def pictures_and_files():
    return MapDataset(sample_with_file, COUNT)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return map(sample_at, range(COUNT))


def as_list(samples):
    return samples if isinstance(samples, list) else [samples]


def assert_original(sample):
    image, original = sample["image"], picture(sample["number"])
    assert isinstance(image, PILImage.Image)
    assert (image.mode, image.size, image.tobytes()) == (original.mode, original.size, original.tobytes())
    if image.mode == "P":
        assert image.im.getpalettemode() == "RGBA"
        assert image.im.getpalette("RGBA", "RGBA") == original.im.getpalette("RGBA", "RGBA")


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}, {"batch_size": None}], ids=str)
@pytest.mark.parametrize("kind", [pictures, pictures_and_files, Stream])
def test_pillow_images_reach_a_collate_fn_unchanged(workers, options, kind):
    if kind is Stream and "chunk_size" in options:
        options = {"batch_size": 3}
    options = {"batch_size": 4, "num_workers": workers, **options}
    samples = [sample for batch in gpuload_batches(kind(), collate_fn=as_list, **options) for sample in batch]
    assert [sample["number"] for sample in samples] == list(range(COUNT))
    for sample in samples:
        assert_original(sample)
        assert kind is not pictures_and_files or isinstance(sample["file"], torch.Tensor)


class Unsendable(list):
    """A batch that cannot be pickled."""

    def __init__(self, samples):
        super().__init__(samples)
        self.lock = threading.Lock()


@pytest.mark.processes
def test_stream_images_are_collated_in_the_main_process_if_the_batch_cannot_be_sent():
    for batch in gpuload_batches(Stream(), 4, collate_fn=Unsendable, num_workers=1):
        assert isinstance(batch, Unsendable)
        for sample in batch:
            assert_original(sample)


@pytest.fixture
def files(tmp_path):
    """Paths of JPEGs, of which number 2 is truncated."""
    paths = []
    for number in range(6):
        data = jpeg_bytes(smooth_image(200, 300, number))
        path = tmp_path / f"{number}.jpg"
        path.write_bytes(data[: len(data) // 2] if number == 2 else data)
        paths.append(str(path))
    return paths


def opened(paths):
    return MapDataset(lambda index: (PILImage.open(paths[index]), index), len(paths))


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1])
def test_truncated_pillow_image_fails_its_sample(workers, files):
    options = {"collate_fn": list, "num_workers": workers}
    message = rf"^sample 2 \({re.escape(files[2])}\),.*OSError: .*truncated.*sample\[0\]"
    with pytest.raises(gl.SampleError, match=message):
        gpuload_batches(opened(files), 3, **options)
    for on_error in ("skip", "replace"):
        with cpu_loader(opened(files), 3, on_error=on_error, **options) as loader:
            with pytest.warns(RuntimeWarning, match=rf"^sample 2 \({re.escape(files[2])}\), .*truncated"):
                samples = [sample for batch in loader for sample in batch]
            [error] = loader.errors
        assert error.index == 2
        numbers = [number for _, number in samples]
        if on_error == "skip":
            assert numbers == [0, 1, 3, 4, 5]
        else:
            assert len(numbers) == 6
            assert 2 not in numbers
        for image, number in samples:
            np.testing.assert_array_equal(np.asarray(image), np.asarray(PILImage.open(files[number])))


def test_pillow_image_over_a_limit_of_decode_is_refused():
    with pytest.raises(gl.SampleError, match="30×20 = 600 pixels, more than max_pixels=599"):
        gpuload_batches(pictures(), 1, collate_fn=list, decode=gl.Decode(max_pixels=20 * 30 - 1))


def raise_for_tensors(samples):
    raise TypeError(f"got a {type(samples[0][0]).__name__}")


@pytest.mark.parametrize("case", ["transforms", "files"])
def test_error_of_a_collate_fn_that_got_tensors_says_how_to_get_pillow_images(case, tmp_path, files):
    del files[2]
    (tmp_path / "2.jpg").unlink()
    dataset = opened(files) if case == "transforms" else gl.ImageFiles(tmp_path).map(lambda image: (image, 0))
    options = {"transforms": [T.CenterCrop(8)]} if case == "transforms" else {}
    hint = "C×H×W tensors. To get Pillow's images, return these from the dataset, without transforms"
    with pytest.raises(gl.CollateError, match=f"got a Tensor.*it got the images as {re.escape(hint)}"):
        gpuload_batches(dataset, 2, collate_fn=raise_for_tensors, **options)


def test_images_arrive_as_tensors_if_they_are_declared_or_belong_to_targets():
    image = PILImage.fromarray(smooth_image(8, 9, 0))
    for sample in ((gl.Image(image), 0), (image, gl.Boxes([[1, 2, 3, 4]])), (image, gl.Mask(np.zeros((8, 9))))):
        [[(tensor, target)]] = gpuload_batches([sample], collate_fn=list)
        assert torch.equal(tensor, torch.from_numpy(np.array(image)).permute(2, 0, 1))
        assert isinstance(target, int | torch.Tensor)


class PaletteDataset:
    """A dataset of palette images in memory, whose samples are the palettes."""

    def __init__(self):
        self.images = [paletted(number) for number in range(COUNT)]

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return list(self.images[index].im.getpalette("RGBA", "RGBA"))


@pytest.mark.processes
def test_palettes_of_a_datasets_images_reach_the_workers_with_their_alpha():
    palettes = [palette for [palette] in gpuload_batches(PaletteDataset(), collate_fn=list, num_workers=1)]
    assert palettes == [PaletteDataset()[index] for index in range(COUNT)]
