"""`image_sizes`: heights and widths from headers, of every kind of dataset, kept until the dataset changes."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.generated_images import encode, jpeg_bytes, smooth_image
from helpers.http_server import served
from helpers.map_datasets import MapDataset
from helpers.tar_files import archive
from PIL import Image
from torch.utils.data import ConcatDataset, IterableDataset, Subset

import gpuload as gl
from gpuload.datasets import files as file_module
from gpuload.decode import Decode, Decoder
from gpuload.inspection import sizes as sizes_module
from gpuload.inspection.files import START_BYTES

FORMATS = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP", "tif": "TIFF", "bmp": "BMP", "gif": "GIF"}
NOISE = np.random.default_rng(0).integers(0, 256, (90, 170, 3), np.uint8)  # its files are longer than START_BYTES


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("GPULOAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def picture_folder(root: Path) -> Path:
    """Write images of all formats and different sizes, small ones and ones longer than `START_BYTES`."""
    for name in ("a", "b"):
        (root / name).mkdir(parents=True)
    for i, (ending, kind) in enumerate(FORMATS.items()):
        options = {"quality": 100} if kind in ("JPEG", "WEBP") else {}
        (root / "a" / f"{i}.{ending}").write_bytes(encode(NOISE[: 80 + i], kind, **options))
        (root / "b" / f"{i}.{ending}").write_bytes(encode(smooth_image(20 + i, 30, i), kind))
    settle(root)
    return root


def settle(root: Path) -> None:
    """Date the folders back, as if they had not been changed for a while."""
    for folder in (root, *(path for path in root.rglob("*") if path.is_dir())):
        os.utime(folder, (time.time() - 100,) * 2)


def sizes_by_pillow(paths: Any) -> list[list[int]]:
    images = [Image.open(io.BytesIO(Path(path).read_bytes())) for path in paths]
    return [[image.height, image.width] for image in images]


ENDINGS = tuple(f".{ending}" for ending in FORMATS)


@pytest.mark.processes
@pytest.mark.parametrize("num_workers", [0, 2])
def test_sizes_of_all_formats_are_those_of_pillow(tmp_path, num_workers):
    dataset = gl.ImageFolder(picture_folder(tmp_path / "images"), extensions=ENDINGS)
    sizes = gl.image_sizes(dataset, num_workers=num_workers)
    assert sizes.dtype == np.int32
    assert sizes.tolist() == sizes_by_pillow(dataset.paths)
    assert min(map(os.path.getsize, dataset.paths)) < START_BYTES < max(map(os.path.getsize, dataset.paths))


def test_sizes_of_several_batches_are_in_the_order_of_the_dataset(tmp_path):
    (tmp_path / "images").mkdir()
    for i in range(293):  # more than BATCH_SIZE
        Image.new("L", (1 + i, 7)).save(tmp_path / "images" / f"{i:04d}.png")
    sizes = gl.image_sizes(gl.ImageFiles(tmp_path / "images"), num_workers=0)
    assert sizes.tolist() == [[7, 1 + i] for i in range(293)]


class Listed:
    """A dataset of a user, which reads files or returns other kinds of images."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"caption": "words", "image": gl.read(self.paths[index])}


def test_sizes_of_wrapped_joined_mapped_mixed_and_user_datasets_are_those_of_pillow(tmp_path):
    first, second = (
        gl.ImageFolder(picture_folder(tmp_path / name), extensions=ENDINGS) for name in ("first", "second")
    )
    sizes = sizes_by_pillow(first.paths)
    for dataset in (first + second, gl.Mix([first, second], [1, 2]), ConcatDataset([first, second])):
        assert gl.image_sizes(dataset, num_workers=0).tolist() == sizes * 2
    assert gl.image_sizes(Subset(first, [3, 1]), num_workers=0).tolist() == [sizes[3], sizes[1]]
    mapped = first.map(lambda sample: {"image": sample[0], "label": sample[1]})
    assert gl.image_sizes(mapped, num_workers=0).tolist() == sizes
    assert gl.image_sizes(Listed(list(first.paths)), num_workers=0).tolist() == sizes
    assert gl.image_sizes([(image, 1) for image, _ in first], num_workers=0).tolist() == sizes
    assert gl.image_sizes([np.zeros((5, 9, 3), np.uint8)], num_workers=0).tolist() == [[5, 9]]
    nested = [{"id": 1, "views": [{"image": image}]} for image, _ in first]
    assert gl.image_sizes(nested, num_workers=0).tolist() == sizes
    assert gl.image_sizes([], num_workers=0).shape == (0, 2)


def test_sizes_of_tar_shards_and_of_a_cache_are_those_of_pillow(tmp_path):
    dataset = gl.ImageFolder(picture_folder(tmp_path / "images"), extensions=ENDINGS)
    expected = sizes_by_pillow(dataset.paths)
    members = {f"{i:03d}.{path.rpartition('.')[2]}": Path(path).read_bytes() for i, path in enumerate(dataset.paths)}
    tar = gl.TarShards(archive(tmp_path / "a.tar", members), fields=";".join(FORMATS))
    assert gl.image_sizes(tar, num_workers=0).tolist() == expected
    cached = gl.Cached(dataset, 1 << 26)
    assert gl.image_sizes(cached, num_workers=0).tolist() == expected
    # A cache that image_sizes fills must have complete files.
    assert [image.data for image, _ in cached] == [Path(path).read_bytes() for path in dataset.paths]


@pytest.mark.integration
def test_sizes_of_parquet_are_those_of_pillow(tmp_path):
    dataset = gl.ImageFolder(picture_folder(tmp_path / "images"), extensions=ENDINGS)
    gl.pack(dataset, tmp_path / "packed", to="parquet", workers=0)
    packed = gl.Parquet(tmp_path / "packed" / "*.parquet")
    assert sorted(gl.image_sizes(packed, num_workers=0).tolist()) == sorted(sizes_by_pillow(dataset.paths))


def move_exif_to_the_end(png: bytes) -> bytes:
    """Move the chunk with the orientation behind the pixels, where a PNG may also have it."""
    start = png.index(b"eXIf") - 4
    end = start + 12 + int.from_bytes(png[start : start + 4], "big")
    return png[:start] + png[end:-12] + png[start:end] + png[-12:]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("upright", [True, False, None])
def test_sizes_are_upright_as_the_loader_decodes_them(tmp_path, kind, upright):
    exif = Image.Exif()
    exif[0x0112] = 6
    pictures = tmp_path / "images"
    pictures.mkdir()
    for name, array in (("short", smooth_image(30, 50, 0)), ("long", NOISE)):
        data = encode(array, kind, exif=exif)
        (pictures / f"{name}.{kind.lower()}").write_bytes(move_exif_to_the_end(data) if kind == "PNG" else data)
    dataset, decode = gl.ImageFiles(pictures, extensions=f".{kind.lower()}"), Decode(exif=upright)
    with gl.Loader(dataset, None, num_workers=0, device="cpu", decode=decode) as loader:
        expected = [list(image.shape[1:]) for image in loader]
    assert gl.image_sizes(dataset, num_workers=0, decode=decode).tolist() == expected
    if kind != "TIFF":
        assert (expected[0] == [170, 90]) == bool(upright)


@pytest.fixture
def header_lengths(monkeypatch) -> list[int]:
    """The numbers of bytes from which headers are read."""
    lengths: list[int] = []
    header_of = Decoder.header

    def read_header(self: Decoder, image: gl.Encoded) -> Any:
        lengths.append(len(image.data))
        return header_of(self, image)

    monkeypatch.setattr(Decoder, "header", read_header)
    return lengths


def test_only_the_start_of_local_files_and_of_tar_members_is_read(tmp_path, header_lengths):
    big = jpeg_bytes(NOISE, quality=100)
    assert len(big) > 2 * START_BYTES
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "0.jpg").write_bytes(big)
    gl.image_sizes(gl.ImageFiles(tmp_path / "images"), num_workers=0)
    gl.image_sizes(gl.TarShards(archive(tmp_path / "a.tar", {"0.jpg": big, "0.txt": b"long " * 9999})), num_workers=0)
    assert header_lengths == [START_BYTES] * 2
    # A user's function could keep what it gets, so it gets complete files.
    gl.image_sizes(gl.ImageFiles(tmp_path / "images").map(lambda image: image), num_workers=0)
    gl.image_sizes(Listed([str(tmp_path / "images" / "0.jpg")]), num_workers=0)
    assert header_lengths[2:] == [len(big)] * 2


@pytest.mark.integration
def test_only_the_start_of_urls_is_read(header_lengths):
    with served({"images/0.jpg": jpeg_bytes(NOISE, quality=100)}) as server:
        gl.image_sizes(gl.ImageFiles(f"{server.url}/images"), num_workers=0)
        assert server.ranges(".jpg") == [f"bytes=0-{START_BYTES - 1}"]
    assert header_lengths == [START_BYTES]


def test_files_are_read_with_the_limits_of_decode():
    limits: list[float] = []

    def read(index: int) -> Any:
        limits.append(file_module.byte_limit())
        return gl.Encoded(jpeg_bytes(NOISE))

    gl.image_sizes(MapDataset(read, 1), num_workers=0, decode=Decode(max_bytes=123_456))
    assert limits == [123_456]


def test_a_header_longer_than_the_start_is_read_completely(tmp_path):
    (tmp_path / "images").mkdir()
    for i, profile in enumerate((b"p" * 10, b"p" * 3 * START_BYTES)):
        (tmp_path / "images" / f"{i}.jpg").write_bytes(encode(NOISE, "JPEG", icc_profile=profile))
    assert gl.image_sizes(gl.ImageFiles(tmp_path / "images"), num_workers=0).tolist() == [[90, 170]] * 2


def test_errors_name_the_first_sample_that_cannot_be_read(tmp_path):
    dataset = gl.ImageFolder(picture_folder(tmp_path / "images"), extensions=ENDINGS)
    Path(dataset.paths[4]).write_bytes(b"<html>")
    with pytest.raises(gl.SampleError, match=r"sample 4 \(.*a/4\.bmp\).*an HTML page") as info:
        gl.image_sizes(dataset, num_workers=0)
    assert (info.value.index, info.value.source) == (4, dataset.paths[4])
    os.unlink(dataset.paths[7])
    Path(dataset.paths[8]).write_bytes(b"")
    with pytest.raises(gl.SampleError, match=r"sample 4 .*an HTML page"):
        gl.image_sizes(dataset, num_workers=0)
    with pytest.raises(FileNotFoundError, match=r"sample 1 .*No such file"):
        gl.image_sizes(Subset(dataset, [0, 7]), num_workers=0)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Stream(), r"image_sizes\(\) takes a map-style dataset, which has __len__ and __getitem__, got Stream"),
        (3, r"image_sizes\(\) takes a map-style dataset.*got int"),
        (["words"], r"sample 0, .*TypeError: the sample has no image, only str"),
    ],
)
def test_image_sizes_of_an_object_without_images_raises_type_error(dataset, message):
    with pytest.raises(TypeError, match=message):
        gl.image_sizes(dataset, num_workers=0)


# -- the kept result ---------------------------------------------------------------------------------------------------


@pytest.fixture
def read_lengths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the length of each dataset that is read."""
    lengths: list[int] = []
    read_sizes = sizes_module._read_sizes

    def read_and_record(dataset: Any, *args: Any) -> np.ndarray:
        lengths.append(len(dataset))
        return read_sizes(dataset, *args)

    monkeypatch.setattr(sizes_module, "_read_sizes", read_and_record)
    return lengths


def open_folder(root: Path) -> gl.ImageFolder:
    return gl.ImageFolder(root, extensions=ENDINGS)


def test_image_sizes_are_kept_until_a_folder_changes(tmp_path, read_lengths, cache):
    root = picture_folder(tmp_path / "images")
    expected = gl.image_sizes(open_folder(root), num_workers=0)
    assert np.array_equal(gl.image_sizes(open_folder(root), num_workers=0), expected)
    assert read_lengths == [12]
    assert len(list(cache.glob("*.index"))) == 1
    gl.image_sizes(open_folder(root), num_workers=0, decode=Decode(exif=True))
    assert read_lengths == [12, 12], "the sizes of another orientation were read from the cache"
    gl.image_sizes(open_folder(root), num_workers=0)
    assert read_lengths == [12, 12], "the sizes of the first orientation were read again"
    (root / "a" / "new.jpg").write_bytes(jpeg_bytes(NOISE))
    settle(root)
    assert gl.image_sizes(open_folder(root), num_workers=0).tolist() == sizes_by_pillow(open_folder(root).paths)
    assert read_lengths[2:] == [13]
    # A file that replaces another one under its name is a change of its folder, too.
    (root / "x").write_bytes(jpeg_bytes(NOISE[:11]))
    os.replace(root / "x", root / "a" / "new.jpg")
    os.utime(root / "a", (time.time() - 50,) * 2)
    assert gl.image_sizes(open_folder(root), num_workers=0).tolist() == sizes_by_pillow(open_folder(root).paths)
    assert read_lengths[3:] == [13]


def test_image_sizes_of_a_folder_that_has_just_changed_are_not_kept(tmp_path, read_lengths):
    root = picture_folder(tmp_path / "images")
    os.utime(root / "b")
    for _ in range(2):
        gl.image_sizes(open_folder(root), num_workers=0)
    assert read_lengths == [12, 12]


def test_image_sizes_of_a_store_are_kept_until_its_file_changes(tmp_path, read_lengths):
    for height in (20, 30):
        file = archive(tmp_path / "a.tar", {"0.jpg": jpeg_bytes(smooth_image(height, 9, 0))})
        os.utime(file, (1000 + height,) * 2)
        for _ in range(2):
            assert gl.image_sizes(gl.TarShards(file, fields="jpg"), num_workers=0).tolist() == [[height, 9]]
    assert read_lengths == [1, 1]


def test_image_sizes_of_several_subsets_of_one_folder_are_kept(tmp_path, read_lengths):
    dataset = open_folder(picture_folder(tmp_path / "images"))
    expected = sizes_by_pillow(dataset.paths)
    for _ in range(2):
        for indices in ([0, 2, 4], [1, 3, 5]):
            sizes = gl.image_sizes(Subset(dataset, indices), num_workers=0)
            assert sizes.tolist() == [expected[index] for index in indices]
    assert read_lengths == [3, 3]


def test_image_sizes_of_user_functions_or_with_an_error_are_not_kept(tmp_path, read_lengths, cache):
    dataset = open_folder(picture_folder(tmp_path / "images"))
    for data in (dataset.map(lambda sample: sample), Listed(list(dataset.paths))):
        for _ in range(2):
            gl.image_sizes(data, num_workers=0)
    assert read_lengths == [12] * 4
    Path(dataset.paths[0]).write_bytes(b"")
    for _ in range(2):
        with pytest.raises(gl.SampleError, match="sample 0"):
            gl.image_sizes(dataset, num_workers=0)
    assert not list(cache.glob("*.index"))


def test_progress_is_shown_in_a_terminal_if_reading_takes_a_while(tmp_path, monkeypatch):
    dataset = open_folder(picture_folder(tmp_path / "images"))

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for is_slow in (False, True):
        monkeypatch.setattr("sys.stderr", terminal := Terminal())
        monkeypatch.setattr(sizes_module, "QUIET_S", -1.0 if is_slow else 1e9)
        gl.image_sizes(dataset.map(lambda sample: sample), num_workers=0)
        assert terminal.getvalue() == "\rgpuload: reading image sizes, 12 of 12\n" * is_slow


def test_read_starts_shortens_read_file_only_in_its_context(tmp_path):
    path = tmp_path / "a.jpg"
    path.write_bytes(b"\xff\xd8\xff" + bytes(100))
    with file_module.read_starts(10):
        assert len(file_module.read_file(path)) == 10
        with file_module.read_starts(None):
            assert len(file_module.read_file(path)) == 103
        with file_module.read_starts(1000):
            assert len(file_module.read_file(path)) == 103
    assert len(file_module.read_file(path)) == 103
