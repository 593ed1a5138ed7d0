"""`gpuload.stage.device`: calls to a device's runtime, its times, uploads of small arrays, and profiler ranges.

`tests/cuda` tests the same functions on a GPU.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from helpers import lacking
from helpers.cpu_device import Device
from torch.autograd import profiler
from torch.profiler import ProfilerActivity, profile

import gpuload as gl
from gpuload import transforms as T
from gpuload.stage import device as devices
from gpuload.stage.device import TIMED_EVERY, Accelerator, DeviceTimes, upload_arrays

EYE = torch.eye(4)


@pytest.fixture
def recorded_parts(monkeypatch):
    """A function that passes a tensor to `Accelerator.keep` on the CPU and returns the tensors recorded on a stream."""
    recorded = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: recorded.append(tensor))
    device = Accelerator(torch.device("cpu"))

    def keep(tensor):
        recorded.clear()
        device.keep(tensor, object())
        return recorded

    return keep


@pytest.mark.filterwarnings("ignore:.*(Sparse|nested tensor).*:UserWarning")
@pytest.mark.parametrize(
    ("make", "expected_count"),
    [
        (lambda: EYE, 1),
        (lambda: EYE.clone().requires_grad_(), 1),
        (lambda: EYE.to_sparse(), 2),
        (lambda: EYE.to_sparse().requires_grad_(), 2),
        (lambda: EYE.to_sparse_csr(), 3),
        (lambda: EYE.to_sparse_csc(), 3),
        (lambda: EYE.to_sparse_bsr((2, 2)), 3),
        (lambda: EYE.to_sparse_bsc((2, 2)), 3),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), 1),
    ],
)
def test_keep_records_all_memory_of_a_tensor_of_any_layout(recorded_parts, make, expected_count):
    tensor = make()
    parts = recorded_parts(tensor)
    assert len(parts) == expected_count
    assert {(part.layout, part.is_nested) for part in parts} == {(torch.strided, False)}
    is_dense = tensor.layout == torch.strided and not tensor.is_nested
    values = tensor if is_dense else tensor._values() if tensor.is_sparse else tensor.values()
    assert values.data_ptr() in {part.data_ptr() for part in parts}


@pytest.mark.filterwarnings("ignore:.*nested tensor.*:UserWarning")
def test_keep_records_all_memory_of_a_jagged_tensor(recorded_parts):
    tensor = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    recorded = {part.data_ptr() for part in recorded_parts(tensor)}
    assert recorded >= {tensor.values().data_ptr(), tensor.offsets().data_ptr()}


@pytest.mark.filterwarnings("ignore:.*nested tensor.*:UserWarning")
def test_keep_records_only_the_parts_of_a_jagged_tensor_that_are_on_its_device(monkeypatch):
    tensor = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    tensor.unbind()  # caches its longest and shortest row on the CPU
    recorded = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda part, stream: recorded.append(part.device.type))
    device = Accelerator(torch.device("cpu"))
    device.device = torch.device("meta")
    device.keep(tensor.to("meta"), object())
    assert set(recorded) == {"meta"}


def test_keep_records_no_tensor_of_another_device(recorded_parts):
    assert recorded_parts(EYE.to("meta")) == []


def test_lock_without_cuda_is_refused():
    assert Accelerator(torch.device("cpu")).lock(0, 4096) == devices.CANNOT_LOCK


def test_refused_lock_returns_the_error_and_clears_the_last_error(monkeypatch):
    """If the error were not cleared, the check of a later launch would raise it."""
    device = Accelerator(torch.device("cpu"))
    device.device = torch.device("cuda", 1)
    calls = []

    class Runtime:
        @staticmethod
        def cudaHostRegister(address, nbytes, flags):
            calls.append((address, nbytes))
            return 2  # cudaErrorMemoryAllocation

    class Launch:
        def fill_(self, value):
            calls.append("launch")
            raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(devices, "_runtime", Runtime)
    monkeypatch.setattr(torch.accelerator, "device_index", contextlib.nullcontext)
    monkeypatch.setattr(torch, "empty", lambda *shape, device: Launch())
    assert device.lock(4096, 8192) == 2
    assert calls == [(4096, 8192), "launch"]


@lacking.mark_missing("no GPU", torch.accelerator.is_available())
def test_devices_without_an_accelerator_are_the_cpu():
    assert (devices.is_available(), devices.default_device_type()) == (False, "cpu")
    assert devices.generator_of(torch.device("cpu")) is torch.default_generator
    with devices.use_device_of(EYE):
        pass


@pytest.mark.parametrize(
    ("accelerator", "supported", "default"), [("mps", None, "cpu"), ("mtia", None, "cpu"), ("xpu", "xpu", "xpu")]
)
def test_default_device_type_is_a_supported_accelerator_or_the_cpu(monkeypatch, accelerator, supported, default):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(accelerator))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 2)
    assert (devices.supported_type(), devices.default_device_type()) == (supported, default)
    assert supported is None or devices.current_device() == torch.device("xpu", 2)


def time_batch(times: DeviceTimes, *, loads: bool = True) -> None:
    times.begin("side")
    if loads:
        times.mark("side")
    times.end("side")


def test_device_times_measure_one_batch_in_eight():
    device = Device()
    times = DeviceTimes(device)
    for _ in range(2 * TIMED_EVERY):
        time_batch(times)
    assert (times.batches, device.timed) == (2, 6)
    assert (times.copy_s, times.stage_s) == (0.02, 0.02)  # the stand-in's events are 10 ms apart


def test_device_times_do_not_wait_for_events_that_have_not_passed():
    device, events = Device(), []

    def record_time(stream):
        events.append(Device.record_time(device, stream))
        events[-1].passed = False
        return events[-1]

    device.record_time = record_time
    times = DeviceTimes(device)
    time_batch(times)
    assert times.batches == 0
    for event in events:
        event.passed = True
    for _ in range(TIMED_EVERY):
        time_batch(times)
    assert times.batches == 1


def test_device_times_skip_batches_without_copies_and_devices_without_clocks():
    device = Device()
    times = DeviceTimes(device)
    time_batch(times, loads=False)
    device.record_time = lambda stream: None
    for _ in range(TIMED_EVERY):
        time_batch(times)
    assert times.batches == 0


def test_upload_arrays_puts_several_arrays_into_one_storage():
    arrays = [
        np.arange(6).reshape(2, 3),
        np.array([1.5, -2.0, 4.0]),  # 24 bytes
        np.arange(7, dtype=np.int32)[::2],
        np.zeros((0, 4)),
        np.array([9], np.uint8),
    ]
    tensors = upload_arrays(arrays, torch.device("cpu"))
    for tensor, array in zip(tensors, arrays, strict=True):
        assert tensor.dtype == torch.from_numpy(np.ascontiguousarray(array)).dtype
        np.testing.assert_array_equal(tensor.numpy(), array)
        assert tensor.storage_offset() * tensor.itemsize % 16 == 0
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1


def test_upload_arrays_concatenates_a_list_of_arrays():
    parts = [np.arange(6).reshape(2, 3).T, np.array([[7]])]
    concatenated, second = upload_arrays([parts, np.array([1.5])], torch.device("cpu"))
    assert concatenated.tolist() == [0, 3, 1, 4, 2, 5, 7]
    assert second.tolist() == [1.5]


RANGE_NAMES = ("gpuload::wait", "gpuload::decode", "gpuload::stage", "gpuload::copy")


def run_epoch(**options: Any) -> int:
    pictures = [np.full((20, 24, 3), number, np.uint8) for number in range(6)]
    transforms = [T.CenterCrop(16), T.ToDtype("float32", scale=True)]
    options = {"num_workers": 0, "device": "cpu", "chunk_size": 2, **options}
    with gl.Loader(pictures, 2, transforms=transforms, **options) as loader:
        return sum(1 for _ in loader)


def is_within(inner: Any, outer: Any) -> bool:
    inner_range, outer_range = inner.time_range, outer.time_range
    return outer_range.start <= inner_range.start and inner_range.end <= outer_range.end


@pytest.mark.slow
def test_profiler_shows_the_ranges_of_each_batch():
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        assert run_epoch() == 3
    events = {name: [event for event in trace.events() or () if event.name == name] for name in RANGE_NAMES}
    # The epoch ends with a wait that returns no batch.
    assert {name: len(ranges) for name, ranges in events.items()} == dict(zip(RANGE_NAMES, (4, 3, 3, 3), strict=True))
    for decode in events["gpuload::decode"]:
        assert [wait for wait in events["gpuload::wait"] if is_within(decode, wait)], "decoded outside waits"
    for copy in events["gpuload::copy"]:
        assert [stage for stage in events["gpuload::stage"] if is_within(copy, stage)], "copied outside stages"
    operations = [event for event in trace.events() or () if event.name.startswith("aten::")]
    for stage in events["gpuload::stage"]:
        assert not [wait for wait in events["gpuload::wait"] if is_within(stage, wait) or is_within(wait, stage)]
        assert [event for event in operations if is_within(event, stage)], "a stage without operations"


def test_profiler_range_without_a_profiler_records_only_if_torch_has_no_flag(monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(profiler, "record_function", lambda name: pytest.fail(f"{name} is recorded without a profiler"))
        assert run_epoch() == 3
    assert devices.profiler_range("gpuload::wait") is devices.profiler_range("gpuload::stage")
    monkeypatch.delattr(profiler, "_is_profiler_enabled")
    assert isinstance(devices.profiler_range("gpuload::wait"), torch.profiler.record_function)


def test_profiler_range_within_emit_nvtx_records(monkeypatch: pytest.MonkeyPatch):
    """torch needs CUDA to make NVTX ranges; here the calls to CUDA are replaced."""
    recorded: Counter[str] = Counter()

    def record(name: str) -> contextlib.AbstractContextManager[None]:
        recorded[name] += 1
        return contextlib.nullcontext()

    for name in ("_enable_profiler", "_disable_profiler"):
        monkeypatch.setattr(profiler, name, lambda *arguments: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(profiler, "record_function", record)
    with profiler.emit_nvtx():
        run_epoch()
    assert recorded == dict(zip(RANGE_NAMES, (4, 3, 3, 3), strict=True))
