"""What the bytes of a field become, by the end of its name, and which fields make up a sample.

Nothing is unpickled: an array of objects is refused, and a pickle stays bytes.
"""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np

from gpuload.datasets.recognise import is_image_array
from gpuload.datasets.sample import Encoded, Image, Mask, Mode, as_meta, check_mode
from gpuload.datasets.stores.opening import named
from gpuload.datasets.stores.store import read_npy_header

__all__ = ["KEY", "Fields"]

KEY: Final = "__key__"
IMAGES: Final = (
    "jpg", "jpeg", "png", "webp", "ppm", "pgm", "pbm", "pnm", "bmp", "gif", "tif", "tiff", "avif", "jp2", "qoi",
)  # fmt: skip
MASKS: Final = ("seg", "mask", "segmentation")
NUMBERS: Final = ("cls", "cls2", "class", "count", "index", "inx", "id")
TEXTS: Final = ("txt", "text", "transcript")
_SHOWN: Final = 12


class Fields:
    """The fields that make up a sample, and what they become.

    Args:
        fields: as `TarShards` takes them.
        mode: of the images.

    Raises:
        TypeError, ValueError: they are none.
    """

    def __init__(self, fields: str | Sequence[str] | None, mode: Mode) -> None:
        self.mode: Mode = check_mode(mode)
        self.alone = isinstance(fields, str)
        self.wanted: tuple[tuple[str, ...], ...] | None = None
        if fields is not None:
            self.wanted = tuple(map(_alternatives, (fields,) if isinstance(fields, str) else fields))
            if not self.wanted:
                raise ValueError("fields must name at least one field, such as ('jpg', 'cls'); None stands for all")

    @property
    def names(self) -> set[str] | None:
        """The names of all fields that may be needed; None means any."""
        return None if self.wanted is None else {name for names in self.wanted for name in names}

    def choose(self, there: Collection[str], shard: str, key: str) -> list[str]:
        """Return the fields of a sample that are needed, of those that are there.

        Raises:
            LookupError: one is absent.
        """
        if self.wanted is None:
            return list(there)
        chosen = []
        for alternatives in self.wanted:
            for name in alternatives:
                if name in there or name == KEY:
                    chosen.append(name)
                    break
            else:
                names = " or ".join(map(repr, alternatives))
                shown = ", ".join(map(repr, list(there)[:_SHOWN])) or "none"
                raise LookupError(f"sample {key!r} of {shard!r} has no field {names}; its fields are: {shown}")
        return chosen

    def sample(self, data: Mapping[str, bytes], chosen: Sequence[str], shard: str, key: str) -> Any:
        """Make a sample from the bytes of its chosen fields: one value, a tuple, or with all fields a dict.

        Raises:
            ValueError: a field does not hold what its name says.
        """
        values = [key if name == KEY else self._value(name, data[name], shard, key) for name in chosen]
        _make_image(values, chosen, self.wanted is None)
        if self.wanted is None:
            return {KEY: key, **dict(zip(chosen, values, strict=True))}
        return values[0] if self.alone else tuple(values)

    def _value(self, name: str, data: bytes, shard: str, key: str) -> Any:
        is_image, is_mask, expected, convert = _kind(name)
        if is_image:
            image = Encoded(data, self.mode, f"{_named(shard)}:{key}.{name}")
            return Mask(image) if is_mask else image
        try:
            return convert(data)
        except (ValueError, RecursionError) as error:
            shown = f", which begins with {data[:24]!r}," if data else ", which is empty,"
            raise ValueError(
                f"field {name!r} of sample {key!r} in {shard!r}{shown} is not {expected}: {error}"
            ) from None


def _make_image(values: list[Any], names: Sequence[str], by_name: bool) -> None:
    """Where no field of a sample is an image, make its first ``npy`` of uint8, H×W×C with one to four channels, an
    `Image`; `by_name`: the first in the order of the names."""
    if any(type(value) is Encoded for value in values):
        return
    for place in sorted(range(len(names)), key=names.__getitem__) if by_name else range(len(names)):
        array = values[place]
        if isinstance(array, np.ndarray) and is_image_array(array) and not _kind(names[place])[1]:
            values[place] = Image(array)
            return


_named: Final = functools.lru_cache(1024)(named)


@functools.lru_cache(256)
def _kind(name: str) -> tuple[bool, bool, str, Callable[[bytes], Any]]:
    """Return, for a field name, whether it is an image and whether a mask, what its bytes should be, and the function
    that converts them."""
    before, _, ending = name.rpartition(".")
    return ending in IMAGES, before.rpartition(".")[2] in MASKS, *CONVERSIONS.get(ending, ("bytes", bytes))


def _alternatives(field: Any) -> tuple[str, ...]:
    if not isinstance(field, str):
        raise TypeError(f"a field is named by its ending, such as 'jpg', or 'jpg;png'; got {field!r}")
    names = tuple(name.strip().removeprefix(".").lower() for name in field.split(";"))
    if not all(names) or any(character.isspace() for name in names for character in name):
        raise ValueError(
            f"a field is named by its ending, such as 'jpg', or 'jpg;png'; got {field!r}. Several are a tuple: "
            "fields=('jpg', 'cls')"
        )
    return names


def _array(data: bytes) -> np.ndarray:
    """An array in numpy's format, as a view of the bytes' copy; objects, which are pickled in it, are refused."""
    file = io.BytesIO(data)
    shape, by_columns, dtype = read_npy_header(file)
    if dtype.hasobject:
        raise ValueError("it holds objects, which is a pickle, and nothing is unpickled; store numbers")
    nbytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
    if nbytes != len(data) - file.tell():
        raise ValueError(f"shape {shape} of {dtype} takes {nbytes:,} bytes, but {len(data) - file.tell():,} are there")
    array = np.frombuffer(bytearray(data[file.tell() :]), dtype)
    return array.reshape(shape, order="F" if by_columns else "C")


CONVERSIONS: Final[dict[str, tuple[str, Callable[[bytes], Any]]]] = {
    **dict.fromkeys(NUMBERS, ("an integer", int)),
    **dict.fromkeys(("json", "jsn"), ("JSON", lambda data: as_meta(json.loads(data)))),
    **dict.fromkeys(TEXTS, ("UTF-8", lambda data: data.decode("utf-8"))),
    "npy": ("an array", _array),
}
