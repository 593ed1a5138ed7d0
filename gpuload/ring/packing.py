"""The layout of a chunk's results in its slot.

Images are stored in the slot as pixels. All other leaves are sent as values, whose arrays are also stored in the slot.
A leaf that is an array or tensor of one shape and type in all samples of a chunk is stacked into an N×… *block*, ready
for the batch; other arrays are stored one by one.

Memory layout of a slot, in order, with each entry aligned to 64 bytes: the files of images that the device decodes; the
H×W×C decoded regions of the other images, in row order; the blocks; the bytes of other arrays; and, unaligned, the
packed description if it is too long for a message.

This module runs in workers (packing) and in the main process (unpacking), so it does not import torch. It holds no
state.
"""

from __future__ import annotations

import importlib
import io
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np

from gpuload.datasets.tables import NUMBERS, SelectedRows
from gpuload.datasets.tree import dtype_of, is_plain_tensor, is_tensor, is_tensor_type
from gpuload.ring.columns import SEPARATOR, Block, Columns, ImageColumn, Rows, TensorBits, TVTensorSpec, ValueColumn
from gpuload.ring.ring import align
from gpuload.transforms.program.draws import IMAGE

__all__ = [
    "ALIGN",
    "ALIGNMENT",
    "PackedChunk",
    "Span",
    "has_palette",
    "read_content",
    "reduce_with_palette",
    "spans_of",
    "write_arrays",
    "write_content",
]

ALIGN = 64  # the alignment of entries in a slot, in bytes
ALIGNMENT: Final = 16  # the alignment of small arrays in one buffer, in bytes; a GPU's vector loads need it
MIN_PAYLOAD_BYTES = 2048  # shorter arrays are sent in the message
Name = TypeVar("Name")
Filler = Callable[[np.ndarray], Any]  # writes the rows of a block
Span = tuple[int, int, str]  # the location of an array: offset and length in bytes, and the name of its numpy dtype
# Dtypes that numpy lacks, each with the numpy dtype that holds its bits.
TORCH_ONLY_DTYPES = {"torch.bfloat16": "int16", "torch.float8_e4m3fn": "uint8", "torch.float8_e5m2": "uint8"}


@dataclass(slots=True)
class PackedChunk:
    """A packed chunk.

    Attributes:
        nbytes: the number of bytes that the chunk needs in its slot.
        is_written: False if the slot is too small; then nothing was written.
        meta: the packed description, if it is short enough for a message.
        meta_at: otherwise, the offset and length in bytes of the description in the slot.
    """

    nbytes: int
    is_written: bool
    meta: bytes = b""
    meta_at: tuple[int, int] | None = None


def write_content(
    content: Columns,
    slot: np.ndarray,
    used_bytes: int,
    *,
    inline_bytes: int,
    keep_types: bool = False,
    reserve: Callable[[int], np.ndarray | None] | None = None,
) -> PackedChunk:
    """Write a chunk's arrays to its slot after the `used_bytes` of its pixels, and pack its description.

    Args:
        content: the columns to pack; values that can be stacked become blocks.
        slot: the chunk's slot, uint8.
        used_bytes: the number of bytes that pixels already use.
        inline_bytes: the maximum length of a description in a message; a longer description goes to the slot.
        keep_types: whether the receiver unpacks tensors as tensors instead of arrays.
        reserve: called with the required size before anything is written. Returns memory of that size that already
            holds the pixels: the slot, or other memory if the slot is too small; None if there is no such memory. By
            default, there is only the slot.

    Raises:
        Exception: any error from pickling a leaf.
    """
    fillers, end = _make_blocks(content, align(used_bytes, ALIGN), keep_types)
    pickled, buffers = _pickle(content)
    tables = b"".join([column.table.tobytes() for column in (*content.images, *content.masks)])
    spans: list[int] = []
    for buffer in buffers:
        spans += [end, buffer.nbytes]
        end = align(end + buffer.nbytes, ALIGN)
    meta = np.asarray([len(buffers), *spans], np.int64).tobytes() + pickled + tables
    fits_message = len(meta) <= inline_bytes
    total_bytes = end if fits_message else end + len(meta)
    memory = reserve(total_bytes) if reserve is not None else slot if total_bytes <= len(slot) else None
    if memory is None:
        return PackedChunk(total_bytes, False)
    slot = memory
    for block, fill in zip(content.blocks.values(), fillers, strict=True):
        fill(block.array(slot))
    for start, buffer in zip(spans[::2], buffers, strict=True):
        slot[start : start + buffer.nbytes] = np.frombuffer(buffer, np.uint8)
    if fits_message:
        return PackedChunk(total_bytes, True, meta)
    slot[end:total_bytes] = np.frombuffer(meta, np.uint8)
    return PackedChunk(total_bytes, True, b"", (end, len(meta)))


def read_content(slot: np.ndarray, meta: bytes, meta_at: tuple[int, int] | None) -> Columns:
    """Read the columns that `write_content` wrote. Tables are views of the message and blocks stay in the slot; other
    arrays are copied out of the slot."""
    if meta_at is not None:
        offset, length = meta_at
        meta = slot[offset : offset + length].tobytes()
    count = int.from_bytes(meta[:8], "little")
    buffers: Sequence[bytearray] = ()
    if count:
        spans = np.frombuffer(meta, np.int64, 2 * count, 8).tolist()
        buffers = [bytearray(slot[start : start + n]) for start, n in zip(spans[::2], spans[1::2], strict=True)]
    content = Columns(*pickle.loads(memoryview(meta)[8 * (1 + 2 * count) :], buffers=buffers))
    # The columns are still plain tuples. Most chunks have just one column of images and one of values.
    image_tuples: list[Any] = [*content.images, *content.masks]
    position = len(meta) - IMAGE.itemsize * sum([length for length, *_ in image_tuples])
    for columns in (content.images, content.masks):
        for i, (length, leaves, rows, *options) in enumerate(columns):  # pyright: ignore[reportGeneralTypeIssues]
            table = np.frombuffer(meta, IMAGE, length, position)
            columns[i] = ImageColumn(table, leaves, _rows_to_array(rows), *options)
            position += IMAGE.itemsize * length
    content.values, content.points = (
        {leaf: ValueColumn(values, _rows_to_array(rows)) for leaf, values, rows in columns}  # pyright: ignore
        for columns in (content.values, content.points)
    )
    content.blocks = {leaf: Block(*block) for leaf, *block in content.blocks}  # pyright: ignore
    return content


def _rows_to_array(rows: list[int] | None) -> Rows:
    return None if rows is None else np.array(rows, np.int64)


def _rows_to_list(rows: Rows) -> list[int] | None:
    return None if rows is None else rows.tolist()


def spans_of(entries: Mapping[Name, Sequence[np.ndarray]]) -> tuple[dict[Name, Span], int]:
    """Lay out entries consecutively; each entry is a group of arrays of one dtype. Return the entries' spans and the
    end offset of the last span."""
    spans, position = {}, 0
    for name, arrays in entries.items():
        nbytes = sum([array.nbytes for array in arrays])
        spans[name] = position, nbytes, arrays[0].dtype.name
        position = align(position + nbytes, ALIGNMENT)
    return spans, position


def write_arrays(entries: Mapping[Name, Sequence[np.ndarray]], spans: Mapping[Name, Span], memory: np.ndarray) -> None:
    """Write the arrays of entries to their spans in `memory`, uint8."""
    for name, arrays in entries.items():
        position = spans[name][0]
        for array in arrays:
            np.ndarray(array.shape, array.dtype, memory, position)[...] = array
            position += array.nbytes


def _make_blocks(content: Columns, end: int, keep_types: bool) -> tuple[list[Filler], int]:
    """Convert tensors among the values to arrays, and move values that can be stacked from `content.values` to
    `content.blocks`. Return a filler for each block, and the end of the last block."""
    fillers: list[Filler] = []
    min_bytes = MIN_PAYLOAD_BYTES if content.images else 1  # next to images, short arrays cost less in the message
    for leaf, column in list(content.values.items()):
        has_all_rows = column.rows is None and len(content.structures) == 1
        block = _make_block(end, column.values, min_bytes, keep_types) if has_all_rows else None
        if block is None and any(is_tensor_type(value_type) for value_type in set(map(type, column.values))):
            column.values = [_convert_tensor(value, keep_types) for value in column.values]
            block = _make_block(end, column.values, min_bytes, keep_types) if has_all_rows else None
        if block is None and any(
            value_type.__module__.startswith("PIL.") for value_type in set(map(type, column.values))
        ):
            column.values = [_WithPalette(value) if has_palette(value) else value for value in column.values]
        if block is not None:
            content.blocks[leaf], filler = block
            del content.values[leaf]
            fillers.append(filler)
            end = align(end + content.blocks[leaf].nbytes, ALIGN)
    return fillers, end


def _make_block(offset: int, values: Sequence[Any], min_bytes: int, keep_types: bool) -> tuple[Block, Filler] | None:
    """Return the block for a leaf's values and its filler. Return None unless the values have one type and shape and
    at least `min_bytes` bytes each."""
    first_value, value_type, pieces = values[0], type(values[0]), [(offset, len(values))]
    if isinstance(values, SelectedRows):
        array, rows = values.array, values.rows
        block = Block(array.shape[1:], array.dtype.name, pieces)
        # All rows exist, so "clip" changes no row; "raise" would copy twice.
        return block, lambda out: array.take(rows, 0, out, "clip")
    if set(map(type, values)) != {value_type}:
        return None
    if is_plain_tensor(value_type):
        return _make_tensor_block(values, pieces, min_bytes, keep_types)
    if issubclass(value_type, np.generic) and first_value.dtype.name in NUMBERS and min_bytes == 1 and not keep_types:
        return Block((), first_value.dtype.name, pieces), lambda out: out.__setitem__(..., values)
    arrays, tensor_fields = values, {}
    if value_type is TensorBits:
        if any((value.dtype, value.tv) != (first_value.dtype, first_value.tv) for value in values):
            return None
        arrays = [value.array for value in values]
        tensor_fields = {"tensor": True, "torch_dtype": first_value.dtype, "tv": first_value.tv}
    elif value_type is not np.ndarray:
        return None
    shape, dtype = arrays[0].shape, arrays[0].dtype
    if not shape or arrays[0].nbytes < min_bytes or dtype.name not in NUMBERS or not dtype.isnative:
        return None
    if {array.shape for array in arrays} != {shape} or {array.dtype for array in arrays} != {dtype}:
        return None
    block = Block(shape, dtype.name, pieces, **tensor_fields)
    return block, lambda out: np.concatenate(arrays, out=out.reshape(-1, *shape[1:]))


def _make_tensor_block(
    tensors: Sequence[Any], pieces: list[tuple[int, int]], min_bytes: int, keep_types: bool
) -> tuple[Block, Filler] | None:
    """Return the block of plain tensors of one shape and dtype, and its filler. torch stacks them without creating an
    array for each tensor."""
    first, torch = tensors[0], sys.modules["torch"]
    if not all(map(_is_plain, tensors)):
        return None
    shape, dtype, name = first.shape, first.dtype, dtype_of(first)
    if (keep_types and not shape) or first.nbytes < min_bytes or name not in NUMBERS or first.is_complex():
        return None
    if not all(tensor.shape == shape and tensor.dtype == dtype for tensor in tensors):
        return None

    def fill(out: np.ndarray) -> None:
        with torch.no_grad():
            torch.stack([*tensors], out=torch.from_numpy(out))

    return Block(tuple(shape), name, pieces, tensor=keep_types), fill


def _is_tv_type(tensor_type: type) -> bool:
    """Return whether `tensor_type` is one of torchvision's tensor types; a user's subclass is in another module."""
    return tensor_type.__module__.startswith("torchvision.tv_tensors")


def _strip_tv(value: Any) -> Any:
    """Return a torchvision tensor as a plain tensor that shares its memory; return other tensors unchanged."""
    return value.as_subclass(sys.modules["torch"].Tensor) if _is_tv_type(type(value)) else value


def _is_plain(tensor: Any) -> bool:
    return tensor.layout is sys.modules["torch"].strided and tensor.is_cpu and not tensor.is_nested


def _pickle(content: Columns) -> tuple[bytes, list[memoryview]]:
    """Return the description as bytes, and the buffers that go to the slot.

    Both processes run the user's program and pack that program's objects, so they trust each other as a DataLoader and
    its workers do. No byte of a data file is ever unpickled.
    """
    # Columns are pickled as plain tuples, and tables follow the pickle as raw bytes. Pickling the arrays would take ten
    # times as long, and pickling the column objects three times.
    images, masks = (
        [(len(column), column.leaves, _rows_to_list(column.rows), column.kinds, column.draws) for column in columns]
        for columns in (content.images, content.masks)
    )
    values, points = (
        [(leaf, column.values, _rows_to_list(column.rows)) for leaf, column in columns.items()]
        for columns in (content.values, content.points)
    )
    blocks = [
        (leaf, block.shape, block.dtype, block.pieces, block.tensor, block.torch_dtype, block.tv)
        for leaf, block in content.blocks.items()
    ]
    description: list[Any] = [
        *(content.rows, content.structures, images, values, _join_sources(content.sources), content.errors, blocks),
        *(masks, points, content.fields, content.collated, content.iterable, content.warning),
        *(content.encoded, content.encoded_bytes, content.plan),
    ]
    pickler = pickle.Pickler if content.collated is None else _tensor_pickler(pickle.Pickler)
    try:
        return _dump(pickler, description)
    except (pickle.PicklingError, AttributeError):
        import cloudpickle  # in a worker, only cloudpickle can find classes of the user's __main__

        return _dump(_tensor_pickler(cloudpickle.Pickler), description)


def _dump(pickler: Any, description: list[Any]) -> tuple[bytes, list[memoryview]]:
    buffers: list[memoryview] = []

    def is_inline(buffer: pickle.PickleBuffer) -> bool:
        """Return whether a buffer is short enough to stay in the message; a longer buffer goes to the slot."""
        raw = buffer.raw()
        if raw.nbytes >= MIN_PAYLOAD_BYTES:
            buffers.append(raw)
        return raw.nbytes < MIN_PAYLOAD_BYTES

    file = io.BytesIO()
    pickler(file, 5, buffer_callback=is_inline).dump(description)
    return file.getvalue(), buffers


def _join_sources(sources: Any) -> Any:
    """Return the sources as one string if it can be split again. Hardly any source is ever read, and unpickling a
    string for each sample would take the main process longer than unpickling the rest of the description."""
    if set(map(type, sources)) != {str}:
        return sources
    joined = SEPARATOR.join(sources)
    return joined if joined.count(SEPARATOR) == len(sources) - 1 else sources


def _tensor_pickler(base: Any) -> Any:
    """Return a pickler class that sends tensors at any depth as arrays, and that can send named tuples defined in the
    body of a class."""

    class Pickler(base):
        def reducer_override(self, obj: object) -> Any:
            if has_palette(obj):
                return reduce_with_palette(obj)
            if isinstance(obj, type) and (path := _path_in_class(obj)):
                return _load_class, (obj.__module__, *path)
            if is_tensor(obj) and type(plain := _strip_tv(obj)) is sys.modules["torch"].Tensor and _is_plain(plain):
                bits = _convert_tensor(obj, True)
                return _make_tensor, (bits.array, bits.dtype, bits.tv)
            override: Callable[[Any], Any] | None = getattr(super(), "reducer_override", None)
            return override(obj) if override is not None else NotImplemented

    return Pickler


class _WithPalette:
    """A PIL image with a palette, which is unpickled as this image: Pillow's own pickle drops the palette's alpha."""

    def __init__(self, image: Any) -> None:
        self._image = image

    def __reduce__(self) -> tuple[Any, ...]:
        return reduce_with_palette(self._image)


def has_palette(value: object) -> bool:
    """Return whether a value is a PIL image with a palette."""
    return type(value).__module__.startswith("PIL.") and getattr(value, "mode", "") in ("P", "PA")


def reduce_with_palette(image: Any) -> tuple[Any, ...]:
    """Return what pickle needs to restore a PIL image with its palette."""
    state = image.__getstate__()  # loads the image
    mode = image.im.getpalettemode()
    return _restore_with_palette, (type(image), state, mode, image.im.getpalette(mode, mode))


def _restore_with_palette(cls: Any, state: Any, mode: str, palette: bytes) -> Any:
    image = cls.__new__(cls)
    image.__setstate__(state)
    image.putpalette(palette, mode)
    image.load()  # applies the palette
    return image


def _path_in_class(cls: type) -> tuple[str, str] | None:
    """Return the outer and inner class names of a named tuple that was created in the body of another class and records
    only its module. If the class were sent by value, each worker's named tuple would be a different class in the main
    process."""
    if cls.__module__ == "__main__" or "." in cls.__qualname__ or not hasattr(cls, "_fields"):
        return None
    for name, outer in list(vars(sys.modules.get(cls.__module__, object)).items()):
        if isinstance(outer, type) and vars(outer).get(cls.__name__) is cls:
            return name, cls.__name__
    return None


def _load_class(module: str, outer: str, name: str) -> Any:
    return getattr(getattr(importlib.import_module(module), outer), name)


def _make_tensor(array: np.ndarray, dtype: str, tv: TVTensorSpec | None) -> Any:
    return TensorBits(array, dtype, tv).tensor()


def _convert_tensor(value: Any, keep_types: bool) -> Any:
    """Return a tensor as an array, so that its bytes go to the slot and not through torch's shared memory. With
    `keep_types`, the receiver restores the tensor and its torchvision type."""
    if not is_tensor(value):
        return value
    tv = (type(value), vars(value)) if keep_types and _is_tv_type(type(value)) else None
    value = _strip_tv(value)
    if value.is_nested:
        return value
    name = str(value.dtype)
    if name in TORCH_ONLY_DTYPES:
        return TensorBits(_bits_of(value), name.removeprefix("torch."), tv)
    return TensorBits(_bits_of(value), "", tv) if keep_types else _bits_of(value)


def _bits_of(tensor: Any) -> np.ndarray:
    """Return a tensor's bits as an array, which shares its memory where possible."""
    tensor = tensor.detach()
    bits_dtype = TORCH_ONLY_DTYPES.get(str(tensor.dtype))
    if bits_dtype is not None:
        return tensor.contiguous().view(getattr(sys.modules["torch"], bits_dtype)).numpy()
    return tensor.resolve_conj().resolve_neg().numpy()
