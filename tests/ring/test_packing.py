"""A chunk's columns written to its slot and read again: values, layout, limits, and damaged descriptions."""

from __future__ import annotations

import pickle
import threading
from collections import namedtuple
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from helpers.peers import torchvision
from PIL import Image

from gpuload.datasets.tables import SelectedRows
from gpuload.datasets.tree import LEAF, flatten
from gpuload.errors import ErrorRecord
from gpuload.order.place import IterablePlace
from gpuload.ring.columns import SEPARATOR, Block, Collated, Columns, ImageColumn, ValueColumn
from gpuload.ring.packing import MIN_PAYLOAD_BYTES, PackedChunk, read_content, spans_of, write_arrays, write_content
from gpuload.transforms.program.draws import IMAGE

UNTOUCHED = 255  # the value of a slot's bytes before a chunk is written


def pack(
    content: Columns, *, slot_bytes: int = 1 << 16, used_bytes: int = 0, inline_bytes: int = 1 << 16, **options: Any
) -> tuple[PackedChunk, np.ndarray]:
    slot = np.full(slot_bytes, UNTOUCHED, np.uint8)
    return write_content(content, slot, used_bytes, inline_bytes=inline_bytes, **options), slot


def send_and_receive(content: Columns, **options: Any) -> tuple[Columns, np.ndarray]:
    packed, slot = pack(content, **options)
    assert packed.is_written
    return read_content(slot, packed.meta, packed.meta_at), slot


def columns_of(values: Any, **options: Any) -> Columns:
    """Return columns in which each sample is one of the values."""
    column = ValueColumn(values)
    return Columns(range(len(column)), [LEAF], values={0: column}, sources=[None] * len(column), **options)


def received_values(values: Any, **options: Any) -> list[Any]:
    """Return the values after sending them, with stacked values separated again."""
    columns, slot = send_and_receive(columns_of(values), **options)
    columns.unstack(list(columns.blocks), slot)
    return list(columns.values[0].values)


def image_table(count: int) -> np.ndarray:
    return np.arange(10 * count, dtype=np.int64).view(IMAGE)


def without_arrays(value: Any) -> Any:
    """Return a field of columns with its arrays as lists, so that `==` returns one bool."""
    if isinstance(value, ImageColumn):
        return value.table.tobytes(), value.leaves, without_arrays(value.rows), value.kinds
    if isinstance(value, ValueColumn):
        return [without_arrays(entry) for entry in value.values], without_arrays(value.rows)
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: without_arrays(entry) for key, entry in value.items()}
    return [without_arrays(entry) for entry in value] if isinstance(value, (list, range)) else value


def columns_with_every_field() -> Columns:
    """Return columns with a value in each field, except those of a batch and `blocks`, which packing fills itself."""
    return Columns(
        rows=[0, 1, 3],
        structures=[flatten(sample, []) for sample in ((0, 1), [0, 1], {"a": 0})],
        images=[
            ImageColumn(image_table(3), [0]),
            ImageColumn(image_table(2), [1, 2], np.array([0, 2]), [None, ("<u2", 3)]),
        ],
        values={1: ValueColumn([7, "a", None]), 2: ValueColumn([np.arange(3000)], np.array([1]))},
        sources=["a.jpg", None, "c.jpg"],
        errors=[(2, ErrorRecord(epoch=1, position=2, index=3, source="b.jpg", cause="broken", traceback=""))],
        masks=[ImageColumn(image_table(1), [3], np.array([2]))],
        points={5: ValueColumn(["boxes"], np.array([0]))},
        fields=[(1, ~2)],
        collated=Collated([1, 2]),
        iterable=IterablePlace(3, ended=True),
        warning="a leaf looks like boxes",
        encoded=[(0, 1, 2, 3, 4, 5, None)],
        encoded_bytes=64,
        plan=("launches", {"ints": (0, 4, "int32")}),
    )


@pytest.mark.parametrize("inline_bytes", [1 << 16, 0], ids=["message", "slot"])
def test_read_content_returns_every_field_of_the_columns(inline_bytes):
    expected = columns_with_every_field()
    received, _ = send_and_receive(columns_with_every_field(), inline_bytes=inline_bytes)
    for name in {field.name for field in fields(Columns)} - {"positions", "indices", "blocks"}:
        value = getattr(expected, name)
        assert value != getattr(Columns(), name), f"add a value of Columns.{name} to columns_with_every_field()"
        assert without_arrays(getattr(received, name)) == without_arrays(value), name


@pytest.mark.parametrize(
    ("sources", "packed_sources"),
    [(["a", "b"], f"a{SEPARATOR}b"), (["a", None], ["a", None]), ([f"a{SEPARATOR}", "b"], [f"a{SEPARATOR}", "b"])],
)
def test_sources_are_one_string_if_it_can_be_split_again(sources, packed_sources):
    received, _ = send_and_receive(Columns([0, 1], [LEAF], sources=sources))
    assert received.sources == packed_sources
    assert received.source_list == sources


# -- blocks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_types", [False, True])
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int64", "float16", "float64", "complex64"])
@pytest.mark.parametrize("kind", ["arrays", "selected rows", "tensors"])
def test_values_of_one_shape_and_dtype_become_a_block(kind, dtype, keep_types):
    array = np.arange(12).reshape(3, 2, 2).astype(dtype)
    values = {
        "arrays": list(array),
        "selected rows": SelectedRows(array[::-1], np.array([2, 1, 0])),
        "tensors": list(torch.from_numpy(array)),
    }[kind]
    received, slot = send_and_receive(columns_of(values), keep_types=keep_types)
    block = received.blocks[0]
    assert not received.values
    assert block == Block((2, 2), dtype, [(0, 3)], tensor=keep_types and kind == "tensors")
    np.testing.assert_array_equal(block.array(slot), array)


@pytest.mark.parametrize("values", [[np.float32(1.5), np.float32(2)], list(torch.tensor([1.5, 2]))])
def test_scalars_become_a_block_unless_their_types_are_kept(values):
    received, slot = send_and_receive(columns_of(values))
    assert received.blocks[0].array(slot).tolist() == [1.5, 2]
    received, _ = send_and_receive(columns_of(values), keep_types=True)
    assert not received.blocks


@pytest.mark.parametrize(
    "values",
    [
        [np.zeros(2), np.zeros(3)],
        [np.zeros(2), np.zeros(2, np.float32)],
        [np.zeros(2), [0.0, 0.0]],
        [np.array(1), np.array(2)],
        [np.zeros((0, 4)), np.zeros((0, 4))],
        [np.arange(2, dtype=">i4")] * 2,
        [np.array(["a", "b"])] * 2,
        [np.array([{"a": 1}, None])] * 2,
        [1, 2.5, "text", None, b"bytes", {"a": [np.float32(2)]}],
    ],
)
def test_values_that_cannot_be_stacked_are_received_unchanged(values):
    received, _ = send_and_receive(columns_of(values))
    assert not received.blocks
    for value, expected in zip(received.values[0].values, values, strict=True):
        assert type(value) is type(expected)
        assert getattr(value, "dtype", None) == getattr(expected, "dtype", None)
        np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize(
    "changes",
    [{"structures": [LEAF, flatten([0], [])]}, {"values": {0: ValueColumn([np.zeros(2)] * 2, np.array([0, 1]))}}],
    ids=["two structures", "some rows"],
)
def test_values_that_not_all_rows_have_are_not_stacked(changes):
    content = columns_of([np.zeros(2)] * 2)
    for name, value in changes.items():
        setattr(content, name, value)
    assert not send_and_receive(content)[0].blocks


@pytest.mark.parametrize("nbytes", [MIN_PAYLOAD_BYTES - 1, MIN_PAYLOAD_BYTES])
def test_short_arrays_next_to_images_are_sent_in_the_message(nbytes):
    is_long = nbytes >= MIN_PAYLOAD_BYTES
    stacked = columns_of([np.zeros(nbytes, np.uint8)] * 2, images=[ImageColumn(image_table(2), [1])])
    assert bool(send_and_receive(stacked)[0].blocks) == is_long
    packed, _ = pack(columns_of([np.zeros(nbytes, np.uint8), "not an array"]))
    assert packed.nbytes == (MIN_PAYLOAD_BYTES if is_long else 0)


# -- tensors, images and classes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "complex64", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("shapes", [[(2, 3), (2, 3)], [(2, 3), (4,)]], ids=["one shape", "two shapes"])
def test_tensors_are_received_as_tensors_with_keep_types(shapes, dtype):
    tensors = [torch.arange(1.0, 1 + np.prod(shape)).reshape(shape).to(getattr(torch, dtype)) for shape in shapes]
    for bits, tensor in zip(received_values(tensors, keep_types=True), tensors, strict=True):
        received = bits.tensor()
        assert received.dtype == tensor.dtype
        assert received.float().equal(tensor.float()) if dtype != "complex64" else received.equal(tensor)


@pytest.mark.parametrize("shape", [(3,), (2, 2)])
def test_dtypes_that_numpy_lacks_are_received_as_tensors_without_keep_types(shape):
    tensors = [torch.ones(3, dtype=torch.bfloat16), torch.ones(shape, dtype=torch.bfloat16)]
    for bits, tensor in zip(received_values(tensors), tensors, strict=True):
        assert bits.tensor().equal(tensor)


@pytest.mark.parametrize("keep_types", [False, True])
@pytest.mark.parametrize(
    "tensor",
    [
        torch.complex(torch.ones(3), torch.arange(3.0)).conj(),
        torch.complex(torch.ones(3), torch.arange(3.0)).conj().imag,
        torch.ones(3, requires_grad=True),
        torch.arange(6).reshape(2, 3).T,
    ],
    ids=["conjugate", "negative", "with gradient", "transposed"],
)
def test_values_of_lazy_and_strided_tensors_are_received(tensor, keep_types):
    expected = tensor.detach().resolve_conj().resolve_neg().numpy()
    for value in received_values([tensor, tensor.clone()], keep_types=keep_types):
        np.testing.assert_array_equal(value.array if keep_types else value, expected)


def test_tensors_of_torchvision_are_received_with_their_attributes_with_keep_types():
    boxes = torchvision().tv_tensors.BoundingBoxes([[1.0, 2, 3, 4]], format="XYXY", canvas_size=(5, 6))
    for values in ([boxes, boxes], [boxes, torch.zeros(3)]):
        received = received_values(values, keep_types=True)[0].tensor()
        assert type(received) is type(boxes)
        assert (received.canvas_size, received.format, received.tolist()) == ((5, 6), boxes.format, boxes.tolist())
        assert isinstance(received_values(values)[0], np.ndarray)


def test_tensors_in_a_collated_batch_are_received_as_tensors():
    batch = {"images": torch.arange(3000).float(), "names": ("a", torch.ones(2, dtype=torch.bfloat16))}
    received, _ = send_and_receive(Columns(collated=Collated(batch)))
    assert received.collated.value["images"].equal(batch["images"])
    assert received.collated.value["names"][1].equal(batch["names"][1])


@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_an_image_with_a_palette_is_received_with_its_palette(mode):
    image = Image.new("P", (2, 1))
    image.putpalette(list(range(2 * len(mode))), mode)
    image.putpixel((1, 0), 1)
    [received] = received_values([image])
    assert received.convert("RGBA").tobytes() == image.convert("RGBA").tobytes()


class Outer:
    Pair = namedtuple("Pair", "a b")  # records this module, and not that it is in a class


def test_a_named_tuple_in_a_class_is_received_as_the_same_class():
    [received] = received_values([Outer.Pair(1, 2)])
    assert type(received) is Outer.Pair
    assert received == (1, 2)


def test_a_value_that_cannot_be_pickled_raises_its_error():
    with pytest.raises(TypeError, match=r"cannot pickle .*lock"):
        pack(columns_of([threading.Lock()]))


# -- layout -----------------------------------------------------------------------------------------------------------


def columns_with_blocks_and_arrays() -> Columns:
    """Return columns with two blocks and two long arrays."""
    return Columns(
        range(2),
        [flatten([0, 1, 2], [])],
        values={
            0: ValueColumn([np.full(5, 1, np.int16)] * 2),
            1: ValueColumn([np.full(3, 2, np.uint8)] * 2),
            2: ValueColumn([np.full(3001, 3, np.uint8), np.full(3002, 4, np.uint8)]),
        },
        sources=[None] * 2,
    )


def test_blocks_and_arrays_follow_the_pixels_aligned_to_64_bytes():
    content = columns_with_blocks_and_arrays()
    packed, slot = pack(content, used_bytes=100)
    assert [block.pieces for block in content.blocks.values()] == [[(128, 2)], [(192, 2)]]
    # The description begins with the number of arrays, and with the offset and size of each.
    assert np.frombuffer(packed.meta, np.int64, 5).tolist() == [2, 256, 3001, 3264, 3002]
    assert packed.nbytes == 3264 + 3008  # the last array, padded
    assert slot[128:148].view(np.int16).tolist() == [1] * 10
    assert slot[192:198].tolist() == [2] * 6
    assert slot[256 : 256 + 3001].tolist() == [3] * 3001
    assert slot[3264 : 3264 + 3002].tolist() == [4] * 3002
    assert (slot[:128] == UNTOUCHED).all()
    assert (slot[packed.nbytes :] == UNTOUCHED).all()


def test_a_description_longer_than_inline_bytes_is_written_after_the_arrays():
    in_message, _ = pack(columns_with_blocks_and_arrays())
    length = len(in_message.meta)
    assert pack(columns_with_blocks_and_arrays(), inline_bytes=length)[0] == in_message
    packed, slot = pack(columns_with_blocks_and_arrays(), inline_bytes=length - 1)
    assert packed == PackedChunk(in_message.nbytes + length, True, b"", (in_message.nbytes, length))
    assert slot[in_message.nbytes : packed.nbytes].tobytes() == in_message.meta


@pytest.mark.parametrize("inline_bytes", [1 << 16, 0], ids=["message", "slot"])
def test_a_slot_that_is_one_byte_too_small_is_not_written(inline_bytes):
    nbytes = pack(columns_with_blocks_and_arrays(), inline_bytes=inline_bytes)[0].nbytes
    packed, slot = pack(columns_with_blocks_and_arrays(), inline_bytes=inline_bytes, slot_bytes=nbytes - 1)
    assert packed == PackedChunk(nbytes, False)
    assert (slot == UNTOUCHED).all()
    assert pack(columns_with_blocks_and_arrays(), inline_bytes=inline_bytes, slot_bytes=nbytes)[0].is_written


def test_reserve_gets_the_size_and_its_memory_is_written_instead_of_the_slot():
    memory, sizes = np.zeros(1 << 16, np.uint8), []
    packed, slot = pack(columns_with_blocks_and_arrays(), reserve=lambda nbytes: sizes.append(nbytes) or memory)
    assert sizes == [packed.nbytes]
    assert (slot == UNTOUCHED).all()
    received = read_content(memory, packed.meta, packed.meta_at)
    assert received.blocks[0].array(memory).tolist() == [[1] * 5] * 2
    assert pack(columns_with_blocks_and_arrays(), reserve=lambda nbytes: None)[0] == PackedChunk(packed.nbytes, False)


def test_received_arrays_are_copies_and_blocks_stay_in_the_slot():
    received, slot = send_and_receive(columns_with_blocks_and_arrays())
    slot[:] = 0
    assert [set(array.tolist()) for array in received.values[2].values] == [{3}, {4}]
    assert not received.blocks[0].array(slot).any()
    received.values[2].values[0][0] = 9  # a copy can be written to


@pytest.mark.parametrize(
    ("damage", "error", "text"),
    [
        (lambda meta: b"", EOFError, "Ran out of input"),
        (lambda meta: meta[:100], pickle.UnpicklingError, "truncated"),
        (lambda meta: b"\0" * len(meta), pickle.UnpicklingError, "invalid load key"),
        (lambda meta: (1 << 40).to_bytes(8, "little") + meta[8:], ValueError, "buffer is smaller than requested size"),
        (lambda meta: bytes(8) + meta[40:], pickle.UnpicklingError, r"out-of-band|buffers"),  # no arrays
        (lambda meta: bytes(8) + pickle.dumps([[]] * 30), TypeError, "positional arguments"),
    ],
    ids=["empty", "truncated", "zeros", "too many arrays", "too few arrays", "too many fields"],
)
def test_a_damaged_description_raises_an_error(damage, error, text):
    packed, slot = pack(columns_with_blocks_and_arrays())
    with pytest.raises(error, match=text):
        read_content(slot, damage(packed.meta), None)


def test_a_description_past_the_end_of_the_slot_raises_an_error():
    packed, slot = pack(columns_with_blocks_and_arrays(), inline_bytes=0)
    with pytest.raises(pickle.UnpicklingError, match="truncated"):
        read_content(slot[: packed.nbytes - 100], b"", packed.meta_at)


def test_write_arrays_stores_groups_of_arrays_at_spans_aligned_to_16_bytes():
    entries = {
        "ints": [np.arange(3, dtype=np.int32), np.arange(8, dtype=np.int32).reshape(2, 4)[:, ::2]],
        "empty": [np.empty(0, np.float32)],
        "floats": [np.array([0.5])],
    }
    spans, end = spans_of(entries)
    assert spans == {"ints": (0, 28, "int32"), "empty": (32, 0, "float32"), "floats": (32, 8, "float64")}
    assert end == 48
    memory = np.full(end, UNTOUCHED, np.uint8)
    write_arrays(entries, spans, memory)
    assert memory[:28].view(np.int32).tolist() == [0, 1, 2, 0, 2, 4, 6]
    assert memory[32:40].view(np.float64).tolist() == [0.5]
    assert (memory[28:32] == UNTOUCHED).all()
    assert spans_of({}) == ({}, 0)
