"""Reading samples in order, and converting them to what a store holds: files in a tar, values in an LMDB, a row of a
table, or an entry of an array.

Samples are read as in the Loader's workers: several at a time if the dataset supports that. While data come from disk,
the kernel prefetches the next samples (`gpuload.workers.source`). Reading from the store must return the sample that
was written. So a sample that the store cannot represent is refused, and the error names a store that can.
"""

from __future__ import annotations

import functools
import io
import json
import os
from collections.abc import Iterator, Mapping
from time import perf_counter_ns
from typing import Any, Final

import numpy as np

from gpuload.datasets.files import sniff
from gpuload.datasets.recognise import is_image_array
from gpuload.datasets.sample import Encoded, Image, Mask, plain_meta
from gpuload.datasets.stores.tar.fields import CONVERSIONS, IMAGES, KEY, MASKS
from gpuload.errors import DecodeError
from gpuload.packing.images import Images
from gpuload.workers.protocol import Request
from gpuload.workers.source import Source

__all__ = ["FAILURES", "UnfitSample", "array_of", "each_sample", "fields_of", "row_of", "values_of"]

FAILURES: Final = (DecodeError, OSError, ValueError, LookupError)  # errors that concern a single sample
CHUNK: Final = 32  # samples per request

EXTENSIONS: Final = {
    "JPEG": "jpg", "PNG": "png", "GIF": "gif", "BMP": "bmp", "TIFF": "tif", "WEBP": "webp", "AVIF": "avif",
    "JPEG2000": "jp2", "PPM": "ppm", "QOI": "qoi",
}  # fmt: skip


class UnfitSample(TypeError):
    """The error for a sample of a type that the store cannot hold, which usually affects all samples."""


def each_sample(dataset: Any, span: range) -> Iterator[tuple[int, Any]]:
    """Yield each sample with its number, in order. If reading a sample fails, yield the exception in its place."""
    source = Source(dataset, 0)
    source.seeding = None  # the dataset uses its own random generators
    chunks = [np.array(span[at : at + CHUNK]) for at in range(0, len(span), CHUNK)]
    requests = [Request(0, 0, 0, 0, chunk, chunk) for chunk in chunks]
    for chunk, request, next_request in zip(chunks, requests, [*requests[1:], None], strict=True):
        if source.reads_ahead:
            source.store_next_keys(next_request)
        sample_of = source.open(request)
        for row, index in enumerate(chunk.tolist()):
            began_ns = perf_counter_ns()
            try:
                sample = sample_of(row)
            except FAILURES as error:
                sample = error
            source.add_read_time(began_ns)
            yield index, sample


def fields_of(sample: Any, images: Images) -> list[tuple[str, bytes]]:
    """Convert a sample to files of a tar in WebDataset's format. Return the extension and bytes of each file."""
    if isinstance(sample, Mapping):
        pixels = [value for value in sample.values() if isinstance(value, Image | Encoded)]
        if len(pixels) == 1 and isinstance(pixels[0], Image) and is_image_array(array := pixels[0].array):
            sample = {
                name: array if value is pixels[0] else value for name, value in sample.items()
            }  # `TarShards` reads this array as an Image
        fields = [_field(name, value, images) for name, value in sample.items() if name != KEY]
        if len({name for name, _ in fields}) < len(fields):
            raise UnfitSample(
                f"two of its fields would become files with the same name: "
                f"{', '.join(name for name, _ in fields)}; rename one of them"
            )
        return fields
    return [(extension, data) for extension, data, _ in (_file(value, images) for value in _pair(sample, "a tar"))]


def values_of(sample: Any, images: Images) -> list[tuple[str, bytes]]:
    """Convert an image and its label to values of an LMDB, named ``"image"`` and ``"int"`` or ``"text"``."""
    if isinstance(sample, Mapping):
        raise UnfitSample(f"an LMDB holds images, or images and labels, got a dict of {_types(sample)}; pack to a tar")
    image, *target = _pair(sample, "an LMDB")
    labels: list[tuple[str, bytes]] = []
    for value in map(_plain, target):
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise UnfitSample(
                f"the labels of an LMDB must be int or str, got {type(value).__name__}; pack to a tar or parquet"
            )
        labels.append(("int" if isinstance(value, int) else "text", _utf8(str(value))))
    return [("image", images.bytes_of(image)), *labels]


def row_of(sample: Any, images: Images, root: str | None) -> dict[str, Any]:
    """Convert a sample to a row of a table, with the image as a struct of bytes and path (Hugging Face's layout)."""
    if isinstance(sample, Mapping):
        columns = {str(name): value for name, value in sample.items() if name != KEY}
        count = sum(isinstance(value, Encoded) for value in columns.values())
        if count != 1:
            raise UnfitSample(
                f"a Parquet file must have one column of images, got {count} in a dict of {_types(sample)}"
            )
    else:
        columns = dict(zip(("image", "label"), _pair(sample, "Parquet"), strict=False))
    row: dict[str, Any] = {}
    for name, value in columns.items():
        if isinstance(value, Encoded):
            row[name] = {"bytes": images.bytes_of(value), "path": _relative_path(value.source, root)}
        else:
            row[name] = _plain(value)
            _utf8(row[name] if isinstance(row[name], str) else "")
            if not isinstance(row[name], bool | int | float | str | bytes | list | np.ndarray):
                raise UnfitSample(f"column {name!r} cannot hold {type(value).__name__}; pack to a tar, or leave it out")
    return row


def array_of(sample: Any, images: Images) -> tuple[np.ndarray, int | float | None, bool]:
    """Return the pixels of a sample's image, its label, and whether the image is a plain array."""
    if isinstance(sample, Mapping):
        raise UnfitSample(f"an array holds images, or images and labels, got a dict of {_types(sample)}; pack to a tar")
    image, *target = sample if isinstance(sample, tuple) else (sample,)
    if not isinstance(image, Encoded | Image | np.ndarray) or len(target) > 1:
        raise UnfitSample(f"an array holds images, or images and labels, got {_describe(sample)}; pack to a tar")
    label = _plain(target[0]) if target else None
    if target and not isinstance(label, bool | int | float):
        raise UnfitSample(
            f"the labels of an array must be numbers, got {type(label).__name__}; pack to a tar or parquet"
        )
    return images.pixels_of(image), label, isinstance(image, np.ndarray)


def _pair(sample: Any, store: str) -> tuple[Any, ...]:
    parts = sample if isinstance(sample, tuple) else (sample,)
    if len(parts) > 2 or not parts or not isinstance(parts[0], Encoded):
        is_decoded = parts and isinstance(parts[0], Image | np.ndarray)
        hint = "; decoded images go to an array (to='array')" if is_decoded else ""
        raise UnfitSample(
            f"{store} takes samples of Encoded, (Encoded, target), or dicts with Encoded, got {_describe(sample)}{hint}"
        )
    return parts


def _field(name: Any, value: Any, images: Images) -> tuple[str, bytes]:
    """Return the name and the bytes of a field. Keep the name if its extension is read as the same type of value;
    otherwise append an extension."""
    if not isinstance(name, str) or name != name.lower() or not name or "/" in name or name.split() != [name]:
        raise UnfitSample(f"a tar's field names must be lower case, without spaces or slashes, got {name!r}; rename it")
    _utf8(name)
    extension, data, equivalent = _file(value, images)
    stem, _, suffix = name.rpartition(".")
    is_mask_name = stem.rpartition(".")[2] in MASKS
    keeps_name = suffix in equivalent and is_mask_name == isinstance(value, Mask)
    return (name if keeps_name else f"{name}.{extension}"), data


def _file(value: Any, images: Images) -> tuple[str, bytes, tuple[str, ...]]:
    """Convert a value to a file. Return its extension, its bytes, and all extensions that are read as the same type."""
    if isinstance(value, Encoded):
        data = images.bytes_of(value)
        return EXTENSIONS[sniff(data) or "JPEG"], data, IMAGES
    if isinstance(value, Mask):
        if not isinstance(value.array, Encoded):
            raise UnfitSample("a tar cannot hold a Mask of an array: encode it as a PNG, Mask(Encoded(png))")
        data = value.array.data
        return f"mask.{EXTENSIONS[sniff(data) or 'PNG']}", data, IMAGES
    value = _plain(value)
    if isinstance(value, bytes):
        return "bin", value, ()
    if isinstance(value, int) and not isinstance(value, bool):
        return "cls", b"%d" % value, _equivalent_extensions("cls")
    if isinstance(value, str):
        return "txt", _utf8(value), _equivalent_extensions("txt")
    if isinstance(value, np.ndarray):
        file = io.BytesIO()
        np.lib.format.write_array(file, value, (1, 0), allow_pickle=False)
        return "npy", file.getvalue(), _equivalent_extensions("npy")
    try:
        return "json", json.dumps(value, allow_nan=False).encode(), _equivalent_extensions("json")
    except (TypeError, ValueError) as error:
        raise UnfitSample(
            f"a tar cannot hold a {type(value).__name__} ({error}); leave it out, or convert it to an array"
        ) from None


@functools.cache
def _equivalent_extensions(extension: str) -> tuple[str, ...]:
    return tuple(other for other, convert in CONVERSIONS.items() if convert is CONVERSIONS[extension])


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text {text!r} cannot be encoded in UTF-8: it has an unpaired surrogate ({error}); repair it in "
            "the dataset, for example with text.encode('utf-8', 'replace').decode()"
        ) from error


def _plain(value: Any) -> Any:
    """Convert NumPy numbers to Python numbers, arrays to contiguous arrays, and metadata to plain Python objects."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value)
    return plain_meta(value)


def _relative_path(source: str | None, root: str | None) -> str | None:
    """Return the path of an image relative to the root of the dataset."""
    if source is None or root is None or not source.startswith(prefix := os.path.join(root, "")):
        return None
    return os.fsencode(source[len(prefix) :]).decode("utf-8", "replace")


def _describe(sample: Any) -> str:
    if isinstance(sample, tuple):
        return f"a tuple of ({', '.join(type(part).__name__ for part in sample)})"
    return f"a {type(sample).__name__}"


def _types(sample: Mapping[Any, Any]) -> str:
    return ", ".join(f"{name!r}: {type(value).__name__}" for name, value in list(sample.items())[:8])
