from __future__ import annotations

import os
import threading

import numpy as np
import pytest
import torch

from gpuload.workers.shipment import receive, ship


def trip(obj):
    fd = ship(obj, {"path": []})
    try:
        return receive(fd), os.fstat(fd).st_size
    finally:
        os.close(fd)


def test_arrays_arrive_writable_and_without_changing_the_original():
    original = np.arange(100_000)
    (arrived,), _ = trip([original])
    assert np.array_equal(arrived, original)
    arrived[0] = 99
    assert original[0] == 0


def test_an_array_is_stored_once_however_many_workers_map_it():
    fd = ship({"a": np.zeros(10_000_000, np.uint8)}, {})
    try:
        assert os.fstat(fd).st_size < 10_010_000
        first, second = receive(fd), receive(fd)
        assert first["a"].nbytes == second["a"].nbytes == 10_000_000
    finally:
        os.close(fd)


def test_classes_functions_and_lambdas_of_the_moment_are_sent_by_value():
    class Local:
        def __init__(self):
            self.f = lambda x: x + 1

    arrived, _ = trip(Local())
    assert arrived.f(1) == 2


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_a_memmap_is_sent_as_its_place_in_the_file(tmp_path, mode):
    path = tmp_path / "data.bin"
    data = np.arange(3_000_000, dtype=np.int32)
    path.write_bytes(b"\0" * 5000 + data.tobytes())
    array = np.memmap(path, np.int32, mode, offset=5000, shape=(3000, 1000))
    arrived, size = trip(
        {"whole": array, "rows": array[17:2000:3], "column": array[:, 5], "empty": array[:0], "view": np.asarray(array)}
    )
    assert size < 20_000
    expected = data.reshape(3000, 1000)
    assert np.array_equal(arrived["whole"], expected)
    assert np.array_equal(arrived["rows"], expected[17:2000:3])
    assert np.array_equal(arrived["column"], expected[:, 5])
    assert np.array_equal(arrived["view"], expected)
    assert arrived["empty"].shape == (0, 1000)
    arrived["whole"][0, 0] = 99  # private: the file keeps its values
    assert np.fromfile(path, np.int32, 1, offset=5000)[0] == 0


def test_a_memmap_with_negative_strides_arrives_too(tmp_path):
    path = tmp_path / "data.bin"
    np.arange(100, dtype=np.int32).tofile(path)
    arrived, _ = trip(np.memmap(path, np.int32, "r")[::-1])
    assert np.array_equal(arrived, np.arange(100)[::-1])


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.int64, torch.uint8, torch.bool, torch.bfloat16, torch.complex64]
)
def test_a_large_tensor_is_sent_out_of_band(dtype):
    tensor = torch.arange(300_000).reshape(300, 1000).to(dtype)
    (whole, part), size = trip((tensor, tensor[::2, :10]))
    assert torch.equal(whole, tensor)
    assert torch.equal(part, tensor[::2, :10])
    assert size < tensor.nbytes + 50_000


def test_what_cannot_be_sent_is_refused_with_the_remedy():
    with pytest.raises(TypeError, match=r"cannot be sent to the worker processes: .*lock.*num_workers=0"):
        ship({"lock": threading.Lock()}, {})
