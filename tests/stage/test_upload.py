"""Small arrays to the device."""

from __future__ import annotations

import numpy as np
import torch

from gpuload.stage.upload import upload_together


def test_several_arrays_by_one_copy():
    arrays = [
        np.arange(6).reshape(2, 3),
        np.array([1.5, -2.0, 4.0]),  # 24 bytes
        np.arange(7, dtype=np.int32)[::2],
        np.zeros((0, 4)),
        np.array([9], np.uint8),
    ]
    found = upload_together(arrays, torch.device("cpu"))
    for tensor, array in zip(found, arrays, strict=True):
        assert tensor.dtype == torch.from_numpy(np.ascontiguousarray(array)).dtype
        np.testing.assert_array_equal(tensor.numpy(), array)
        assert tensor.storage_offset() * tensor.itemsize % 16 == 0
    assert len({tensor.untyped_storage().data_ptr() for tensor in found}) == 1


def test_arrays_that_become_one_tensor():
    parts = [np.arange(6).reshape(2, 3).T, np.array([[7]])]
    one, other = upload_together([parts, np.array([1.5])], torch.device("cpu"))
    assert one.tolist() == [0, 3, 1, 4, 2, 5, 7]
    assert other.tolist() == [1.5]
