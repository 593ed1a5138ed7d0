"""Samples taken apart into columns, and how the columns of a chunk lie in its slot.

A worker takes each sample apart into its *structure* (nested containers, hashable) and its leaves. Leaves that are
images become pixels in the slot; all other leaves travel as values, with the bytes of their arrays in the slot too.

Memory layout of a slot: the decoded regions, H×W×C uint8, each aligned to 64 bytes, in the order of the rows; then the
payload of arrays; then the packed description itself, where it is too long for a message.

Runs in workers (taking apart, packing) and in the parent (unpacking), so it imports no torch. Nothing here holds state.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpuload.errors import ErrorRecord
from gpuload.ring import align
from gpuload.sample import Encoded, Image

__all__ = [
    "ALIGN",
    "ChunkContent",
    "ImageColumn",
    "Packed",
    "Structure",
    "describe",
    "find_images",
    "flatten",
    "read_content",
    "write_content",
]

ALIGN = 64
LEAF = "*"
NEVER_IMAGES = frozenset({int, float, bool, str, bytes, type(None)})
MIN_PAYLOAD_BYTES = 2048
Structure = Any  # LEAF, or (kind, type or None, keys or None, children): nested tuples, hashable


def flatten(sample: Any, leaves: list[Any]) -> Structure:
    """Append the leaves of a sample to `leaves`, depth first, and return its structure."""
    if isinstance(sample, tuple):
        cls = type(sample) if hasattr(sample, "_fields") else None
        return ("tuple", cls, None, tuple([flatten(child, leaves) for child in sample]))
    if isinstance(sample, list):
        return ("list", None, None, tuple([flatten(child, leaves) for child in sample]))
    if isinstance(sample, Mapping):
        keys = tuple(sample)
        cls = None if type(sample) is dict else type(sample)
        return ("dict", cls, keys, tuple([flatten(sample[key], leaves) for key in keys]))
    leaves.append(sample)
    return LEAF


def describe(structure: Structure) -> str:
    """A structure as text, for error messages: ``(·, {'label': ·})``."""
    if structure == LEAF:
        return "·"
    kind, cls, keys, children = structure
    parts = [describe(child) for child in children]
    name = "" if cls is None else cls.__name__
    if kind == "dict":
        return name + "{" + ", ".join(f"{key!r}: {part}" for key, part in zip(keys, parts, strict=True)) + "}"
    if kind == "list":
        return "[" + ", ".join(parts) + "]"
    return name + "(" + ", ".join(parts) + ("," if len(parts) == 1 else "") + ")"


def find_images(leaves: Sequence[Any]) -> dict[int, Encoded | Image]:
    """Which leaves are images: every `Encoded`, `Image`, PIL image and TVTensor image, by their place among the leaves.

    In a sample with none of these, the first uint8 C×H×W tensor or H×W×C array (1 to 4 channels).
    """
    found: dict[int, Encoded | Image] = {}
    for place, leaf in enumerate(leaves):
        kind = type(leaf)
        if kind is Encoded or kind is Image:
            found[place] = leaf
        elif kind not in NEVER_IMAGES:
            module = kind.__module__
            if module.startswith("PIL.") and hasattr(leaf, "getbands"):
                found[place] = Image(np.asarray(leaf if leaf.mode in ("L", "RGB", "RGBA") else leaf.convert("RGB")))
            elif module.startswith("torchvision.tv_tensors") and kind.__name__ == "Image":
                found[place] = Image(leaf.numpy(), layout="CHW")
    if found:
        return found
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, np.ndarray):
            if leaf.dtype == np.uint8 and leaf.ndim == 3 and leaf.size and 1 <= leaf.shape[2] <= 4:
                return {place: Image(leaf)}
        elif _is_tensor(leaf) and leaf.dim() == 3 and 1 <= leaf.shape[0] <= 4 and str(leaf.dtype) == "torch.uint8":
            return {place: Image(leaf.numpy(), layout="CHW")}
    return found


def _is_tensor(leaf: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(leaf, torch.Tensor)


@dataclass(slots=True)
class ImageColumn:
    """One image leaf of the samples of a chunk: int64 (samples that loaded, 10).

    A row is: the offset of its first byte in the slot; height, width and channels of what was decoded; height and width
    of the whole image; top, left, height and width of the decoded region in it.
    """

    table: np.ndarray

    @property
    def offsets(self) -> np.ndarray:
        return self.table[:, 0]

    @property
    def shapes(self) -> np.ndarray:
        return self.table[:, 1:4]

    @property
    def sizes_hw(self) -> np.ndarray:
        return self.table[:, 4:6]

    @property
    def regions_tlhw(self) -> np.ndarray:
        return self.table[:, 6:10]


@dataclass(slots=True)
class ChunkContent:
    """What a chunk came to.

    `rows` are the rows (places in the request) that loaded; all the other lists have one entry for each of them.
    """

    rows: list[int] = field(default_factory=list)
    structures: list[Structure] = field(default_factory=list)  # one, where all rows have the same
    image_places: list[tuple[int, ...]] = field(default_factory=list)  # likewise
    images: list[ImageColumn] = field(default_factory=list)
    values: list[list[Any]] = field(default_factory=list)  # the leaves that are no images
    sources: list[str | None] = field(default_factory=list)
    errors: list[tuple[int, ErrorRecord]] = field(default_factory=list)  # (row, what went wrong)


@dataclass(slots=True)
class Packed:
    """A chunk's description, packed: `nbytes` the chunk takes in its slot, and the description itself (`meta`), or
    where it lies in the slot (`meta_at`: offset, bytes) if it is too long for a message. `fits` is False where the slot
    is too small; nothing was written then."""

    nbytes: int
    fits: bool
    meta: bytes = b""
    meta_at: tuple[int, int] | None = None


def write_content(content: ChunkContent, slot: np.ndarray, used_bytes: int, *, inline_bytes: int) -> Packed:
    """Lay the payload of a chunk into its slot behind the `used_bytes` of its pixels, and pack its description.

    Raises:
        Exception: whatever pickling a leaf raises.
    """
    pickled, buffers = _pickle(content)
    spans: list[int] = []
    end = used_bytes
    for buffer in buffers:
        spans += [end, buffer.nbytes]
        end = align(end + buffer.nbytes, ALIGN)
    meta = np.asarray([len(buffers), *spans], np.int64).tobytes() + pickled
    inline = len(meta) <= inline_bytes
    total = end if inline else end + len(meta)
    if total > len(slot):
        return Packed(total, False)
    for start, buffer in zip(spans[::2], buffers, strict=True):
        slot[start : start + buffer.nbytes] = np.frombuffer(buffer, np.uint8)
    if inline:
        return Packed(total, True, meta)
    slot[end:total] = np.frombuffer(meta, np.uint8)
    return Packed(total, True, b"", (end, len(meta)))


def read_content(slot: np.ndarray, meta: bytes, meta_at: tuple[int, int] | None) -> ChunkContent:
    """The other way round. Arrays are copied out of the slot, so that it may be released while they are in use."""
    if meta_at is not None:
        offset, length = meta_at
        meta = slot[offset : offset + length].tobytes()
    count = int.from_bytes(meta[:8], "little")
    spans = np.frombuffer(meta, np.int64, 2 * count, 8).tolist()
    buffers = [bytearray(slot[at : at + n]) for at, n in zip(spans[::2], spans[1::2], strict=True)]
    rows, structures, places, images, values, sources, errors = pickle.loads(
        memoryview(meta)[8 * (1 + 2 * count) :], buffers=buffers
    )
    columns = [ImageColumn(np.frombuffer(table, np.int64).reshape(-1, 10)) for table in images]
    return ChunkContent(rows, structures, places, columns, values, sources, errors)


def _pickle(content: ChunkContent, *, by_value: bool = False) -> tuple[bytes, list[memoryview]]:
    """The description as bytes, and the array payloads that shall lie beside it.

    Both ends run the user's own program and what is packed are its own objects: the same trust as between a DataLoader
    and its workers. No byte of a data file is ever unpickled.
    """
    buffers: list[memoryview] = []

    def lay_aside(buffer: pickle.PickleBuffer) -> bool:
        """False: the buffer goes to the slot. True: it is so short that it stays in the message."""
        raw = buffer.raw()
        if raw.nbytes < MIN_PAYLOAD_BYTES:
            return True
        buffers.append(raw)
        return False

    fields = (
        content.rows,
        content.structures,
        content.image_places,
        [column.table.tobytes() for column in content.images],  # arrays cost pickle ten times as much
        [[_portable(value) for value in row] for row in content.values],
        content.sources,
        content.errors,
    )
    if by_value:  # classes of the user's __main__ exist in a worker only under cloudpickle's care
        import cloudpickle

        return cloudpickle.dumps(fields, protocol=5, buffer_callback=lay_aside), buffers
    try:
        return pickle.dumps(fields, 5, buffer_callback=lay_aside), buffers
    except (pickle.PicklingError, AttributeError):
        return _pickle(content, by_value=True)


def _portable(value: Any) -> Any:
    """A tensor as an array, so that its bytes go to the slot and not through torch's own shared memory."""
    if not _is_tensor(value):
        return value
    value = value.detach()
    if str(value.dtype) == "torch.bfloat16":
        return _Bits(value.view(sys.modules["torch"].int16).numpy(), "bfloat16")
    return value.numpy()


@dataclass(slots=True)
class _Bits:
    """A tensor of a type that numpy lacks, as the bits of another."""

    array: np.ndarray
    dtype: str
