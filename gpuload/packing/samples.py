"""Reading samples in order, and converting each to the data that a store holds: files in a tar, values in an LMDB, a
row of a table, or an entry of an array.

Samples are read as in the Loader's workers: several at a time if the dataset supports that. While data come from disk,
the kernel prefetches the next samples (`gpuload.workers.source`). Reading from the store must return the sample that
was written. So a sample that the store cannot represent is refused, and the error names a store that can.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator, Mapping
from time import perf_counter_ns
from typing import Any, Final

import numpy as np

from gpuload.datasets.files import FORMAT_BY_ENDING, sniff
from gpuload.datasets.recognise import is_image_array
from gpuload.datasets.sample import Encoded, Image, Mask, plain_meta
from gpuload.datasets.stores.tar.fields import CONVERSIONS, IMAGES, KEY, MASKS
from gpuload.errors import DecodeError
from gpuload.packing.durable import encode_npy
from gpuload.packing.images import ImageConverter, UnfitSample
from gpuload.workers.protocol import Request
from gpuload.workers.source import Source

__all__ = ["FAILURES", "UnfitSample", "array_entry_of", "fields_of", "read_samples", "row_of", "values_of"]

FAILURES: Final = (DecodeError, OSError, ValueError, LookupError)  # errors that concern a single sample
CHUNK: Final = 32  # samples per request

EXTENSIONS: Final = {name: ending[1:] for ending, name in reversed(FORMAT_BY_ENDING.items())}  # the first of each


def read_samples(dataset: object, span: range) -> Iterator[tuple[int, Any]]:
    """Yield the index of each sample and the sample, in order. If reading a sample fails, yield the exception in its
    place."""
    source = Source(dataset, 0)
    source.seeding = None  # the dataset uses its own random generators
    chunks = [np.array(span[at : at + CHUNK]) for at in range(0, len(span), CHUNK)]
    requests = [Request(0, 0, 0, 0, chunk, chunk) for chunk in chunks]
    for chunk, request, next_request in zip(chunks, requests, [*requests[1:], None], strict=True):
        if source.reads_ahead:
            source.store_next_keys(next_request)
        read_sample = source.open(request)
        for position, index in enumerate(chunk.tolist()):
            began_ns = perf_counter_ns()
            try:
                sample = read_sample(position)
            except FAILURES as error:
                sample = error
            source.add_read_time(began_ns)
            yield index, sample


def fields_of(sample: object, converter: ImageConverter) -> list[tuple[str, bytes]]:
    """Convert a sample to files of a tar in WebDataset's format. Return the extension and the bytes of each file."""
    if isinstance(sample, Mapping):
        pixels = [value for value in sample.values() if isinstance(value, Image | Encoded)]
        if len(pixels) == 1 and isinstance(pixels[0], Image) and is_image_array(array := pixels[0].array):
            # `TarShards` reads this array as an Image.
            sample = {name: array if value is pixels[0] else value for name, value in sample.items()}
        fields = [_encode_field(name, value, converter) for name, value in sample.items() if name != KEY]
        if len({name for name, _ in fields}) < len(fields):
            raise UnfitSample(
                f"two of its fields would become files with the same name: "
                f"{', '.join(name for name, _ in fields)}; rename one of them"
            )
        return fields
    return [
        (extension, data)
        for extension, data, _ in (_encode_file(value, converter) for value in _split_sample(sample, "a tar"))
    ]


def values_of(sample: object, converter: ImageConverter) -> list[tuple[str, bytes]]:
    """Convert an image and its label to values of an LMDB. Return pairs of a type (``"image"``, ``"int"`` or
    ``"text"``) and bytes."""
    if isinstance(sample, Mapping):
        raise UnfitSample(
            f"an LMDB holds images, or images and labels, got a dict of {_describe_fields(sample)}; pack to a tar"
        )
    image, *target = _split_sample(sample, "an LMDB")
    labels: list[tuple[str, bytes]] = []
    for value in map(_convert_to_plain, target):
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise UnfitSample(
                f"the labels of an LMDB must be int or str, got {type(value).__name__}; pack to a tar or parquet"
            )
        labels.append(("int" if isinstance(value, int) else "text", _encode_utf8(str(value))))
    return [("image", converter.convert_to_bytes(image)), *labels]


def row_of(sample: object, converter: ImageConverter, root: str | None) -> dict[str, Any]:
    """Convert a sample to a row of a table, with the image as a struct of bytes and path (Hugging Face's layout)."""
    if isinstance(sample, Mapping):
        columns = {str(name): value for name, value in sample.items() if name != KEY}
        count = sum(isinstance(value, Encoded) for value in columns.values())
        if count != 1:
            raise UnfitSample(
                f"a Parquet file must have one column of images, got {count} in a dict of {_describe_fields(sample)}"
            )
    else:
        columns = dict(zip(("image", "label"), _split_sample(sample, "Parquet"), strict=False))
    row: dict[str, Any] = {}
    for name, value in columns.items():
        if isinstance(value, Encoded):
            row[name] = {"bytes": converter.convert_to_bytes(value), "path": _relative_path(value.source, root)}
        else:
            row[name] = _convert_to_plain(value)
            _encode_utf8(row[name] if isinstance(row[name], str) else "")
            if not isinstance(row[name], bool | int | float | str | bytes | list | np.ndarray):
                raise UnfitSample(f"column {name!r} cannot hold {type(value).__name__}; pack to a tar, or leave it out")
    return row


def array_entry_of(sample: object, converter: ImageConverter) -> tuple[np.ndarray, int | float | None, bool]:
    """Return the pixels of a sample's image, its label (None if it has none), and whether the image is a plain array
    rather than an `Image` or `Encoded`."""
    if isinstance(sample, Mapping):
        raise UnfitSample(
            f"an array holds images, or images and labels, got a dict of {_describe_fields(sample)}; pack to a tar"
        )
    image, *target = sample if isinstance(sample, tuple) else (sample,)
    if not isinstance(image, Encoded | Image | np.ndarray) or len(target) > 1:
        raise UnfitSample(f"an array holds images, or images and labels, got {_describe_sample(sample)}; pack to a tar")
    label = _convert_to_plain(target[0]) if target else None
    if target and not isinstance(label, bool | int | float):
        raise UnfitSample(
            f"the labels of an array must be numbers, got {type(label).__name__}; pack to a tar or parquet"
        )
    return converter.convert_to_pixels(image), label, isinstance(image, np.ndarray)


def _split_sample(sample: object, store: str) -> tuple[Any, ...]:
    parts = sample if isinstance(sample, tuple) else (sample,)
    if len(parts) > 2 or not parts or not isinstance(parts[0], Encoded):
        is_decoded = parts and isinstance(parts[0], Image | np.ndarray)
        hint = "; decoded images go to an array (to='array')" if is_decoded else ""
        raise UnfitSample(
            f"{store} takes samples of Encoded, (Encoded, target), or dicts with Encoded, got "
            f"{_describe_sample(sample)}{hint}"
        )
    return parts


def _encode_field(name: object, value: object, converter: ImageConverter) -> tuple[str, bytes]:
    """Return the name and the bytes of a field. If a reader would convert the name's extension to another type of
    value, append an extension to the name."""
    if not isinstance(name, str) or name != name.lower() or not name or "/" in name or name.split() != [name]:
        raise UnfitSample(
            f"a tar's field names must be lower case, without spaces or slashes, got {name!r}; rename the field"
        )
    _encode_utf8(name)
    extension, data, equivalent_extensions = _encode_file(value, converter)
    stem, _, suffix = name.rpartition(".")
    is_mask_name = stem.rpartition(".")[2] in MASKS
    keeps_name = suffix in equivalent_extensions and is_mask_name == isinstance(value, Mask)
    return (name if keeps_name else f"{name}.{extension}"), data


def _encode_file(value: object, converter: ImageConverter) -> tuple[str, bytes, tuple[str, ...]]:
    """Convert a value to a file. Return its extension, its bytes, and all extensions that readers convert to the same
    type of value."""
    if isinstance(value, Encoded):
        data = converter.convert_to_bytes(value)
        return EXTENSIONS[sniff(data) or "JPEG"], data, IMAGES
    if isinstance(value, Mask):
        if not isinstance(value.array, Encoded):
            raise UnfitSample("a tar cannot hold a Mask of an array: encode it as a PNG, Mask(Encoded(png))")
        data = value.array.data
        return f"mask.{EXTENSIONS[sniff(data) or 'PNG']}", data, IMAGES
    value = _convert_to_plain(value)
    if isinstance(value, bytes):
        return "bin", value, ()
    if isinstance(value, int) and not isinstance(value, bool):
        return "cls", b"%d" % value, _equivalent_extensions("cls")
    if isinstance(value, str):
        return "txt", _encode_utf8(value), _equivalent_extensions("txt")
    if isinstance(value, np.ndarray):
        return "npy", encode_npy(value), _equivalent_extensions("npy")
    try:
        return "json", json.dumps(value, allow_nan=False).encode(), _equivalent_extensions("json")
    except (TypeError, ValueError) as error:
        raise UnfitSample(
            f"a tar cannot hold a {type(value).__name__} ({error}); leave it out, or convert it to an array"
        ) from None


@functools.cache
def _equivalent_extensions(extension: str) -> tuple[str, ...]:
    return tuple(name for name, convert in CONVERSIONS.items() if convert is CONVERSIONS[extension])


def _encode_utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text {text!r} cannot be encoded in UTF-8: it has an unpaired surrogate ({error}); repair it in "
            "the dataset, for example with text.encode('utf-8', 'replace').decode()"
        ) from error


def _convert_to_plain(value: object) -> Any:
    """Convert NumPy numbers to Python numbers, arrays to contiguous arrays, and metadata to plain Python objects."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value)
    return plain_meta(value)


def _relative_path(source: str | None, root: str | None) -> str | None:
    """Return the path of an image relative to the root of the dataset; None if it is unknown or outside the root."""
    if source is None or root is None or not source.startswith(prefix := os.path.join(root, "")):
        return None
    return os.fsencode(source[len(prefix) :]).decode("utf-8", "replace")


def _describe_sample(sample: object) -> str:
    if isinstance(sample, tuple):
        return f"a tuple of ({', '.join(type(part).__name__ for part in sample)})"
    return f"a {type(sample).__name__}"


def _describe_fields(sample: Mapping[Any, object]) -> str:
    return ", ".join(f"{name!r}: {type(value).__name__}" for name, value in list(sample.items())[:8])
