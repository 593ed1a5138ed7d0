"""Samples, read in their order, and as stores hold them: files of a tar, values of an LMDB, a row of a table, an entry
of an array.

They are read as the Loader's workers read them: neighbours together where the dataset can, and the next ones named to
the kernel while they come from a disk (`gpuload.workers.source`). What comes back from the store has to be the sample
that went in. So what a store has no form for is refused, with the name of a store that has.
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

__all__ = ["FAILURES", "Unfit", "array_of", "each_sample", "fields_of", "row_of", "values_of"]

FAILURES: Final = (DecodeError, OSError, ValueError, LookupError)  # of one sample
AT_ONCE: Final = 32  # samples that are asked for together

ENDINGS: Final = {
    "JPEG": "jpg", "PNG": "png", "GIF": "gif", "BMP": "bmp", "TIFF": "tif", "WEBP": "webp", "AVIF": "avif",
    "JPEG2000": "jp2", "PPM": "ppm", "QOI": "qoi",
}  # fmt: skip


class Unfit(TypeError):
    """A sample that a store has no form for, whatever its bytes: the fault is the dataset's, not one sample's."""


def each_sample(dataset: Any, span: range) -> Iterator[tuple[int, Any]]:
    """Yield the numbers of samples and the samples, in order; an exception in the place of one that fails."""
    source = Source(dataset, 0)
    source.seeding = None  # what a dataset draws is its own affair
    chunks = [np.array(span[at : at + AT_ONCE]) for at in range(0, len(span), AT_ONCE)]
    requests = [Request(0, 0, 0, 0, chunk, chunk) for chunk in chunks]
    for chunk, request, following in zip(chunks, requests, [*requests[1:], None], strict=True):
        if source.reads_ahead:
            source.will_need(following)
        sample_of = source.open(request)
        for row, index in enumerate(chunk.tolist()):
            began_ns = perf_counter_ns()
            try:
                sample = sample_of(row)
            except FAILURES as error:
                sample = error
            source.count(began_ns)
            yield index, sample


def fields_of(sample: Any, images: Images) -> list[tuple[str, bytes]]:
    """Return the files of a sample in a tar, by WebDataset's convention: the ends of their names, and their bytes."""
    if isinstance(sample, Mapping):
        pixels = [value for value in sample.values() if isinstance(value, Image | Encoded)]
        if len(pixels) == 1 and isinstance(pixels[0], Image) and is_image_array(array := pixels[0].array):
            sample = {name: array if value is pixels[0] else value for name, value in sample.items()}  # read as it was
        fields = [_field(name, value, images) for name, value in sample.items() if name != KEY]
        if len({name for name, _ in fields}) < len(fields):
            raise Unfit(
                f"two of its fields would be files of one name: {', '.join(name for name, _ in fields)}; rename one"
            )
        return fields
    return [(ending, data) for ending, data, _ in (_file(value, images) for value in _pair(sample, "a tar"))]


def values_of(sample: Any, images: Images) -> list[tuple[str, bytes]]:
    """Return the image and its label as values of an LMDB, named ``"image"`` and ``"int"`` or ``"text"``."""
    if isinstance(sample, Mapping):
        raise Unfit(f"an LMDB holds images, or images and a label, got a dict of {_shown(sample)}; pack it to a tar")
    image, *target = _pair(sample, "an LMDB")
    labels: list[tuple[str, bytes]] = []
    for value in map(_plain, target):
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise Unfit(
                f"the label of an LMDB is an int or a str, got {type(value).__name__}; pack it to a tar or parquet"
            )
        labels.append(("int" if isinstance(value, int) else "text", _utf8(str(value))))
    return [("image", images.bytes_of(image)), *labels]


def row_of(sample: Any, images: Images, root: str | None) -> dict[str, Any]:
    """Return a sample as a row of a table: the image as a struct of bytes and path, Hugging Face's layout."""
    if isinstance(sample, Mapping):
        columns = {str(name): value for name, value in sample.items() if name != KEY}
        count = sum(isinstance(value, Encoded) for value in columns.values())
        if count != 1:
            raise Unfit(f"a Parquet file has one column of images, got {count} in a dict of {_shown(sample)}")
    else:
        columns = dict(zip(("image", "label"), _pair(sample, "Parquet"), strict=False))
    row: dict[str, Any] = {}
    for name, value in columns.items():
        if isinstance(value, Encoded):
            row[name] = {"bytes": images.bytes_of(value), "path": _path(value.source, root)}
        else:
            row[name] = _plain(value)
            _utf8(row[name] if isinstance(row[name], str) else "")
            if not isinstance(row[name], bool | int | float | str | bytes | list | np.ndarray):
                raise Unfit(f"column {name!r} would hold {type(value).__name__}; pack it to a tar, or leave it out")
    return row


def array_of(sample: Any, images: Images) -> tuple[np.ndarray, int | float | None, bool]:
    """Return the numbers of a sample's image, its label, and whether the image is an array and no more."""
    if isinstance(sample, Mapping):
        raise Unfit(f"an array holds images, or images and labels, got a dict of {_shown(sample)}; pack it to a tar")
    image, *target = sample if isinstance(sample, tuple) else (sample,)
    if not isinstance(image, Encoded | Image | np.ndarray) or len(target) > 1:
        raise Unfit(f"an array holds images, or images and labels, got {_name(sample)}; pack it to a tar")
    label = _plain(target[0]) if target else None
    if target and not isinstance(label, bool | int | float):
        raise Unfit(f"labels beside an array are numbers, got {type(label).__name__}; pack it to a tar or parquet")
    return images.pixels_of(image), label, isinstance(image, np.ndarray)


def _pair(sample: Any, store: str) -> tuple[Any, ...]:
    parts = sample if isinstance(sample, tuple) else (sample,)
    if len(parts) > 2 or not parts or not isinstance(parts[0], Encoded):
        is_decoded = parts and isinstance(parts[0], Image | np.ndarray)
        hint = "; decoded images go to an array (to='array')" if is_decoded else ""
        raise Unfit(
            f"{store} takes samples of Encoded, (Encoded, target), or dicts with Encoded, got {_name(sample)}{hint}"
        )
    return parts


def _field(name: Any, value: Any, images: Images) -> tuple[str, bytes]:
    """Return a field of a dict: under its own name, if that gives the same kind of value back, else with an ending
    more."""
    if not isinstance(name, str) or name != name.lower() or not name or "/" in name or name.split() != [name]:
        raise Unfit(f"a tar's fields have names in small letters, without blanks or slashes, got {name!r}; rename it")
    _utf8(name)
    ending, data, group = _file(value, images)
    before, _, last = name.rpartition(".")
    masked = before.rpartition(".")[2] in MASKS
    fits = last in group and masked == isinstance(value, Mask)
    return (name if fits else f"{name}.{ending}"), data


def _file(value: Any, images: Images) -> tuple[str, bytes, tuple[str, ...]]:
    """Return a value as a file: the ending of its name, its bytes, and which endings give such a value back."""
    if isinstance(value, Encoded):
        data = images.bytes_of(value)
        return ENDINGS[sniff(data) or "JPEG"], data, IMAGES
    if isinstance(value, Mask):
        if not isinstance(value.array, Encoded):
            raise Unfit("a Mask of an array has no form in a tar: encode it as a PNG, Mask(Encoded(png))")
        data = value.array.data
        return f"mask.{ENDINGS[sniff(data) or 'PNG']}", data, IMAGES
    value = _plain(value)
    if isinstance(value, bytes):
        return "bin", value, ()
    if isinstance(value, int) and not isinstance(value, bool):
        return "cls", b"%d" % value, _alike("cls")
    if isinstance(value, str):
        return "txt", _utf8(value), _alike("txt")
    if isinstance(value, np.ndarray):
        file = io.BytesIO()
        np.lib.format.write_array(file, value, (1, 0), allow_pickle=False)
        return "npy", file.getvalue(), _alike("npy")
    try:
        return "json", json.dumps(value, allow_nan=False).encode(), _alike("json")
    except (TypeError, ValueError) as error:
        raise Unfit(
            f"a {type(value).__name__} has no form in a tar ({error}); leave it out, or make it an array"
        ) from None


@functools.cache
def _alike(ending: str) -> tuple[str, ...]:
    return tuple(other for other, convert in CONVERSIONS.items() if convert is CONVERSIONS[ending])


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text {text!r} has no form in UTF-8: it holds half of a surrogate pair ({error}); repair it in the "
            "dataset, as by text.encode('utf-8', 'replace').decode()"
        ) from error


def _plain(value: Any) -> Any:
    """Return a number of NumPy's as Python's, an array as a contiguous one."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value)
    return plain_meta(value)


def _path(source: str | None, root: str | None) -> str | None:
    """Return where an image was, from the data set's root on."""
    if source is None or root is None or not source.startswith(inside := os.path.join(root, "")):
        return None
    return os.fsencode(source[len(inside) :]).decode("utf-8", "replace")


def _name(sample: Any) -> str:
    if isinstance(sample, tuple):
        return f"a tuple of ({', '.join(type(part).__name__ for part in sample)})"
    return f"a {type(sample).__name__}"


def _shown(sample: Mapping[Any, Any]) -> str:
    return ", ".join(f"{name!r}: {type(value).__name__}" for name, value in list(sample.items())[:8])
