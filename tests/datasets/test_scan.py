"""`Paths`: a sequence of str in one buffer, and its memory."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuload.datasets import scan as scan_module
from gpuload.datasets.scan import Paths

# What Linux allows in a name: any byte but "/" and NUL.
NAMES = st.binary(min_size=1, max_size=30).map(lambda name: name.replace(b"/", b"_").replace(b"\0", b"_"))


def pack_paths(names: list[bytes], root: str = "/root") -> Paths:
    return Paths.pack_relative(root, names)


@pytest.mark.slow
@settings(deadline=None)
@given(pieces=st.lists(st.lists(NAMES, max_size=5), max_size=5))
def test_paths_concatenate_and_index_like_a_list_of_str(pieces: list[list[bytes]]) -> None:
    paths = Paths.concatenate("/root", [Paths.pack_relative("", names) for names in pieces])
    expected = [os.path.join("/root", os.fsdecode(name)) for names in pieces for name in names]
    assert list(paths) == expected
    assert len(paths) == len(expected)
    assert [paths[-i - 1] for i in range(len(expected))] == expected[::-1]
    assert paths[1:4] == expected[1:4]
    assert paths[::-2] == expected[::-2]
    assert [paths[np.uint8(i)] for i in range(len(expected))] == expected


@pytest.mark.parametrize(("root", "path"), [("/", "/a"), ("/data", "/data/a")])
def test_paths_join_root_and_name_with_one_slash(root: str, path: str) -> None:
    assert pack_paths([b"a"], root)[0] == path


def test_paths_are_equal_if_their_roots_and_names_are() -> None:
    assert pack_paths([b"a", b"bc"]) == pack_paths([b"a", b"bc"])
    assert pack_paths([b"a", b"bc"]) != pack_paths([b"ab", b"c"])
    assert pack_paths([b"a", b"bc"]) != pack_paths([b"a", b"bd"])
    assert pack_paths([b"a"], "/one") != pack_paths([b"a"], "/two")
    assert pack_paths([b"a"]) != ["/root/a"]


@pytest.mark.parametrize("index", [2, -3])
def test_paths_refuse_an_index_out_of_range(index: int) -> None:
    with pytest.raises(IndexError, match=f"^index {index} is out of range: there are 2 paths$"):
        pack_paths([b"a", b"b"])[index]


def test_paths_repr_shows_count_and_root() -> None:
    assert repr(pack_paths([b"a", b"b"])) == "<2 paths in '/root'>"


def imagenet_names(classes: int, images_per_class: int) -> Iterator[bytes]:
    for label in range(classes):
        wnid = b"n%08d" % (1440764 + 7919 * label)  # spread like WordNet IDs
        for number in range(images_per_class):
            yield b"%s/%s_%d.JPEG" % (wnid, wnid, 7 * number)


@pytest.mark.parametrize(("classes", "images_per_class"), [(10, 100), (1000, 300)])
def test_imagenets_paths_take_under_40_bytes_each_and_pickle_out_of_band(classes: int, images_per_class: int) -> None:
    paths = pack_paths(list(imagenet_names(classes, images_per_class)), "/data/imagenet/train")
    assert len(paths) == classes * images_per_class
    assert paths.nbytes < 40 * len(paths)
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(paths, protocol=5, buffer_callback=buffers.append)
    assert len(stream) < 1000
    assert sum(buffer.raw().nbytes for buffer in buffers) == paths.nbytes
    unpickled = pickle.loads(stream, buffers=buffers)
    assert unpickled == paths
    assert np.shares_memory(unpickled.data, paths.data)


def test_paths_beyond_4_gib_have_64_bit_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pack_paths([b"abc", b"de"]).offsets.dtype == np.uint32
    assert scan_module.WIDE_BYTES == 2**32
    monkeypatch.setattr(scan_module, "WIDE_BYTES", 5)
    paths = pack_paths([b"abc", b"de"])
    assert paths.offsets.dtype == np.int64
    assert list(paths) == ["/root/abc", "/root/de"]
