"""`Fields`: conversion of fields by extension, and the fields that make up a sample."""

from __future__ import annotations

import io
import pickle

import numpy as np
import pytest

from gpuload.datasets.sample import Encoded, Image, Mask, as_meta
from gpuload.datasets.stores.tar.fields import Fields


def build_field(name: str, data: bytes, mode: str = "RGB") -> object:
    return Fields(name, mode).build_sample({name: data}, [name], "s.tar", "k")


def npy_bytes(array: object, **options: object) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asarray(array), **options)
    return file.getvalue()


HUGE_NPY = npy_bytes(np.arange(9)).replace(b"(9,), }" + b" " * 10, b"(99999999999,), }")


@pytest.mark.parametrize("name", ["jpg", "png", "webp", "ppm", "left.jpeg", "tif", "avif"])
def test_image_fields_are_encoded_with_their_source(name: str) -> None:
    assert build_field(name, b"abc", "L") == Encoded(b"abc", "L", f"s.tar:k.{name}")


@pytest.mark.parametrize("name", ["seg.png", "mask.png", "left.mask.png", "segmentation.tif"])
def test_mask_fields_are_masks(name: str) -> None:
    mask = build_field(name, b"abc")
    assert isinstance(mask, Mask)
    assert mask.array == Encoded(b"abc", "RGB", f"s.tar:k.{name}")


@pytest.mark.parametrize(
    ("name", "data", "result"),
    [
        ("cls", b" 17\n", 17),
        ("id", b"-3", -3),
        ("json", b'{"a": [1, null]}', as_meta({"a": [1, None]})),
        ("json", b"null", as_meta(None)),
        ("json", b"true", as_meta(True)),
        ("json", b"2.5", as_meta(2.5)),
        ("txt", "ä cat".encode(), "ä cat"),
        ("bin", b"\0\1", b"\0\1"),
        ("pyd", pickle.dumps({}), pickle.dumps({})),
        ("pth", b"\x80", b"\x80"),
    ],
)
def test_fields_that_are_not_images_are_converted_by_extension(name: str, data: bytes, result: object) -> None:
    assert build_field(name, data) == result
    assert type(build_field(name, data)) is type(result)


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
@pytest.mark.parametrize("array", [np.arange(6, dtype=">i2").reshape(2, 3), np.float32(3), np.zeros((0, 4)),
                                   np.asfortranarray(np.arange(6.0).reshape(2, 3))])  # fmt: skip
def test_npy_fields_are_writable_arrays(array: np.ndarray, version: tuple[int, int]) -> None:
    field = build_field("npy", npy_bytes(array, version=version))
    assert isinstance(field, np.ndarray)
    np.testing.assert_array_equal(field, array)
    assert field.dtype == array.dtype
    assert field.flags.writeable


@pytest.mark.parametrize(
    ("name", "data", "text"),
    [
        ("npy", HUGE_NPY, r"takes 799,999,999,992 bytes"),
        ("cls", b"cat", r"'cls' of sample 'k' in 's.tar', which begins with b'cat', is not an integer: invalid lit"),
        ("cls", b"", r"which is empty, is not an integer"),
        ("json", b"{", r"is not JSON: Expecting"),
        ("json", b"[" * 200_000, r"is not JSON: maximum recursion"),
        ("txt", b"\xff", r"is not UTF-8: 'utf-8' codec"),
        ("npy", npy_bytes(np.array([{}], object)), r"it holds objects, which gpuload never unpickles; store"),
        ("npy", npy_bytes(np.arange(9))[:-1], r"shape \(9,\) of int64 takes 72 bytes, but it has 71$"),
        (
            "npy",
            npy_bytes(np.arange(10)).replace(b"(10,)", b"(-1,)"),
            r"its shape must consist of integers of 0 or more, got \(-1,\)",
        ),
        ("npy", b"\x93NUMPY\x09\x00", r"expected version 1.0 or 2.0 of numpy's format, got 9.0"),
        ("npy", pickle.dumps([1]), r"is not an array: the magic string is not correct"),
    ],
)
def test_fields_refuse_content_that_does_not_match_the_extension(name: str, data: bytes, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        build_field(name, data)


SAMPLE = {"jpg": b"1", "cls": b"2", "seg.png": b"3"}


@pytest.mark.parametrize(
    ("fields", "chosen", "result"),
    [
        (("cls", "jpg"), ["cls", "jpg"], (2, Encoded(b"1", "RGB", "s:k.jpg"))),
        (["png;JPG", ".cls"], ["jpg", "cls"], (Encoded(b"1", "RGB", "s:k.jpg"), 2)),
        ("cls", ["cls"], 2),
        (("cls",), ["cls"], (2,)),
        (("__key__", "cls"), ["__key__", "cls"], ("k", 2)),
    ],
)
def test_fields_select_and_order_the_sample(fields: object, chosen: list[str], result: object) -> None:
    selection = Fields(fields, "RGB")
    assert selection.choose(SAMPLE, "s", "k") == chosen
    assert selection.build_sample(SAMPLE, chosen, "s", "k") == result


def test_fields_none_builds_a_dict_of_all_fields() -> None:
    selection = Fields(None, "RGB")
    sample = selection.build_sample(SAMPLE, selection.choose(SAMPLE, "s", "k"), "s", "k")
    assert list(sample) == ["__key__", "jpg", "cls", "seg.png"]
    assert (sample["__key__"], sample["cls"]) == ("k", 2)


def test_choose_names_an_absent_field() -> None:
    with pytest.raises(LookupError) as caught:
        Fields(("jpg", "webp;png"), "RGB").choose(SAMPLE, "s.tar", "d/k")
    assert str(caught.value) == (
        "sample 'd/k' of 's.tar' has no field 'webp' or 'png'; its fields are: 'jpg', 'cls', 'seg.png'"
    )


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ((), ValueError, "fields must name at least one field"),
        ("jpg cls", ValueError, r"got 'jpg cls'; to select several fields, pass a tuple, fields=\('jpg', 'cls'\)"),
        ("jpg;", ValueError, "got 'jpg;'"),
        ((3,), TypeError, "a field must be an extension, such as 'jpg', or 'jpg;png', got 3"),
    ],
)
def test_fields_refuses_invalid_arguments(fields: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Fields(fields, "RGB")
    with pytest.raises(ValueError, match="mode must be one of 'RGB', 'L', 'RGBA', 'unchanged', got 'CMYK'"):
        Fields(None, "CMYK")


LEVELS = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)


@pytest.mark.parametrize(
    ("files", "images"),
    [
        ({"npy": LEVELS}, ["npy"]),
        ({"b.npy": LEVELS, "a.npy": LEVELS[..., :1], "cls": b"1"}, ["a.npy"]),
        ({"jpg": b"1", "npy": LEVELS}, ["jpg"]),
        ({"mask.npy": LEVELS[..., :1]}, []),
        ({"mask.npy": LEVELS[..., :1], "npy": LEVELS}, ["npy"]),
        ({"npy": LEVELS[..., 0]}, []),
        ({"npy": LEVELS.astype(np.float32)}, []),
        ({"npy": LEVELS[None]}, []),
        ({"seg.png": b"1", "npy": LEVELS}, ["npy"]),
    ],
)
def test_first_uint8_array_is_the_image_without_an_image_file(files: dict[str, object], images: list[str]) -> None:
    data = {name: field if isinstance(field, bytes) else npy_bytes(field) for name, field in files.items()}
    sample = Fields(None, "RGB").build_sample(data, list(data), "s", "k")
    assert [name for name, field in sample.items() if isinstance(field, Encoded | Image)] == images
    for name in images:
        assert type(Fields(name, "RGB").build_sample(data, [name], "s", "k")) is type(sample[name]), name


def test_first_of_the_selected_arrays_is_the_image() -> None:
    data = {"a.npy": npy_bytes(LEVELS), "b.npy": npy_bytes(LEVELS)}
    image, array = Fields(("b.npy", "a.npy"), "RGB").build_sample(data, ["b.npy", "a.npy"], "s", "k")
    np.testing.assert_array_equal(image.hwc, LEVELS)
    np.testing.assert_array_equal(array, LEVELS)
