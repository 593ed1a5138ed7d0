"""Selecting the fields of a sample, and converting their bytes according to their extensions.

Nothing is unpickled: an array of objects is refused, and a pickle is returned as bytes.
"""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np

from gpuload.checks import flag, one_of, optional
from gpuload.datasets.recognise import is_image_array
from gpuload.datasets.sample import MODES, Encoded, Image, Mask, Mode, as_meta
from gpuload.datasets.stores.opening import display_path
from gpuload.datasets.stores.store import read_npy_header

__all__ = ["KEY", "Fields", "is_image_field"]

KEY: Final = "__key__"
IMAGES: Final = (
    "jpg", "jpeg", "png", "webp", "ppm", "pgm", "pbm", "pnm", "bmp", "gif", "tif", "tiff", "avif", "jp2", "qoi",
)  # fmt: skip
MASKS: Final = ("seg", "mask", "segmentation")
NUMBERS: Final = ("cls", "cls2", "class", "count", "index", "inx", "id")
TEXTS: Final = ("txt", "text", "transcript")
_MAX_LISTED: Final = 12


class Fields:
    """A selection of fields, and the conversion of their bytes to a sample.

    Args:
        fields: as for `TarShards`.
        mode, exif: see `Encoded`.
    """

    def __init__(self, fields: str | Sequence[str] | None, mode: Mode, exif: bool | None = None) -> None:
        self.mode: Mode = one_of("mode", mode, MODES)
        self.exif = optional(flag, "exif", exif)
        self.is_single = isinstance(fields, str)
        self.selection: tuple[tuple[str, ...], ...] | None = None
        if fields is not None:
            self.selection = tuple(map(_split_alternatives, (fields,) if isinstance(fields, str) else fields))
            if not self.selection:
                raise ValueError("fields must name at least one field, such as ('jpg', 'cls'); None selects all fields")

    @property
    def names(self) -> set[str] | None:
        """The names of all fields that can be selected; None means all fields."""
        return None if self.selection is None else {name for names in self.selection for name in names}

    def choose(self, available: Collection[str], shard: str, key: str) -> list[str]:
        """Return the names of the selected fields, given all fields of a sample.

        Raises:
            LookupError: a field is absent.
        """
        if self.selection is None:
            return list(available)
        field_names = []
        for alternatives in self.selection:
            for name in alternatives:
                if name in available or name == KEY:
                    field_names.append(name)
                    break
            else:
                names = " or ".join(map(repr, alternatives))
                listed_fields = ", ".join(map(repr, list(available)[:_MAX_LISTED])) or "none"
                raise LookupError(f"sample {key!r} of {shard!r} has no field {names}; its fields are: {listed_fields}")
        return field_names

    def build_sample(self, data: Mapping[str, bytes], field_names: Sequence[str], shard: str, key: str) -> Any:
        """Build a sample from the bytes of its selected fields: one value, a tuple, or a dict of all fields.

        Raises:
            ValueError: the bytes of a field do not have the format that its extension states.
        """
        values = [key if name == KEY else self._convert_field(name, data[name], shard, key) for name in field_names]
        _make_image(values, field_names, self.selection is None)
        if self.selection is None:
            return {KEY: key, **dict(zip(field_names, values, strict=True))}
        return values[0] if self.is_single else tuple(values)

    def _convert_field(self, name: str, data: bytes, shard: str, key: str) -> Any:
        is_image, is_mask, expected, convert = _field_type(name)
        if is_image:
            image = Encoded(data, self.mode, f"{_display_path(shard)}:{key}.{name}", self.exif)
            return Mask(image) if is_mask else image
        try:
            return convert(data)
        except (ValueError, RecursionError) as error:
            content_hint = f", which begins with {data[:24]!r}," if data else ", which is empty,"
            raise ValueError(
                f"field {name!r} of sample {key!r} in {shard!r}{content_hint} is not {expected}: {error}"
            ) from None


def _make_image(values: list[Any], names: Sequence[str], sort_by_name: bool) -> None:
    """If no field is an image, convert the first H×W×C uint8 array with one to four channels to an `Image`. With
    `sort_by_name`, fields are searched in the order of their names."""
    if any(type(value) is Encoded for value in values):
        return
    for index in sorted(range(len(names)), key=names.__getitem__) if sort_by_name else range(len(names)):
        array = values[index]
        if isinstance(array, np.ndarray) and is_image_array(array) and not _field_type(names[index])[1]:
            values[index] = Image(array)
            return


_display_path: Final = functools.lru_cache(1024)(display_path)


def is_image_field(name: str) -> bool:
    """Return whether the bytes of a field are an image file."""
    return _field_type(name)[0]


@functools.lru_cache(256)
def _field_type(name: str) -> tuple[bool, bool, str, Callable[[bytes], Any]]:
    """Return whether the field with this name is an image, whether it is a mask, a description of the expected bytes,
    and the function that converts these bytes."""
    stem, _, extension = name.rpartition(".")
    return extension in IMAGES, stem.rpartition(".")[2] in MASKS, *CONVERSIONS.get(extension, ("bytes", bytes))


def _split_alternatives(field: object) -> tuple[str, ...]:
    if not isinstance(field, str):
        raise TypeError(f"a field must be an extension, such as 'jpg', or 'jpg;png', got {field!r}")
    names = tuple(name.strip().removeprefix(".").lower() for name in field.split(";"))
    if not all(names) or any(character.isspace() for name in names for character in name):
        raise ValueError(
            f"a field must be an extension, such as 'jpg', or 'jpg;png', got {field!r}; to select several fields, pass "
            "a tuple, fields=('jpg', 'cls')"
        )
    return names


def _parse_npy(data: bytes) -> np.ndarray:
    """Convert bytes in numpy's format to a writable array. Refuse arrays of objects, which contain pickles."""
    file = io.BytesIO(data)
    shape, is_fortran, dtype = read_npy_header(file)
    if dtype.hasobject:
        raise ValueError("it holds objects, which gpuload never unpickles; store numbers")
    nbytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
    if nbytes != len(data) - file.tell():
        raise ValueError(f"shape {shape} of {dtype} takes {nbytes:,} bytes, but it has {len(data) - file.tell():,}")
    array = np.frombuffer(bytearray(data[file.tell() :]), dtype)
    return array.reshape(shape, order="F" if is_fortran else "C")


CONVERSIONS: Final[dict[str, tuple[str, Callable[[bytes], Any]]]] = {
    **dict.fromkeys(NUMBERS, ("an integer", int)),
    **dict.fromkeys(("json", "jsn"), ("JSON", lambda data: as_meta(json.loads(data)))),
    **dict.fromkeys(TEXTS, ("UTF-8", lambda data: data.decode("utf-8"))),
    "npy": ("an array", _parse_npy),
}
