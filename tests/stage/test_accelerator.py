"""What gpuload asks of a device's runtime. What a GPU answers is tested through the transfer, in tests/cuda."""

from __future__ import annotations

import lacking
import pytest
import torch

from gpuload.stage import accelerator
from gpuload.stage.accelerator import Accelerator

EYE = torch.eye(4)


@pytest.fixture
def kept(monkeypatch):
    """The tensors that were recorded on a stream, by an accelerator that is the CPU."""
    found = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: found.append(tensor))
    device = Accelerator(torch.device("cpu"))

    def keep(tensor):
        found.clear()
        device.keep(tensor, object())
        return found

    return keep


@pytest.mark.filterwarnings("ignore:.*(Sparse|nested tensor).*:UserWarning")
@pytest.mark.parametrize(
    ("make", "expected"),
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
def test_all_memory_of_a_tensor_is_kept_whatever_its_layout(kept, make, expected):
    tensor = make()
    parts = kept(tensor)
    assert len(parts) == expected
    assert all(part.layout is torch.strided and not part.is_nested for part in parts)
    held = tensor.values() if tensor.is_nested or "sparse_cs" in str(tensor.layout) else parts[-1]
    assert any(part.data_ptr() == held.data_ptr() for part in parts)


@pytest.mark.filterwarnings("ignore:.*nested tensor.*:UserWarning")
def test_the_memory_of_a_jagged_tensor_is_kept(kept):
    tensor = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert {part.data_ptr() for part in kept(tensor)} >= {tensor.values().data_ptr(), tensor.offsets().data_ptr()}


@pytest.mark.filterwarnings("ignore:.*nested tensor.*:UserWarning")
def test_what_a_jagged_tensor_has_elsewhere_is_left_alone(monkeypatch):
    tensor = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    tensor.unbind()  # it notes its longest and shortest row, which stay where they are
    found = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda part, stream: found.append(part.device.type))
    device = Accelerator(torch.device("cpu"))
    device.device = torch.device("meta")
    device.keep(tensor.to("meta"), object())
    assert set(found) == {"meta"}


def test_a_tensor_elsewhere_is_left_alone(kept):
    assert kept(EYE.to("meta")) == []


def test_memory_is_locked_by_cuda_alone():
    assert Accelerator(torch.device("cpu")).lock(0, 4096) == accelerator.NO_LOCKS


def test_a_refusal_is_told_and_the_last_error_is_found_at_once(monkeypatch):
    """The launch whose check takes the error with it must not show it."""
    device = Accelerator(torch.device("cpu"))
    device.device = torch.device("cuda", 1)
    calls = []

    class Runtime:
        @staticmethod
        def cudaHostRegister(address, nbytes, flags):
            calls.append((address, nbytes))
            return 2

    class Launch:
        def fill_(self, value):
            calls.append("launch")
            raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(accelerator, "_runtime", Runtime)
    monkeypatch.setattr(torch.accelerator, "device_index", accelerator.contextlib.nullcontext)
    monkeypatch.setattr(torch, "empty", lambda *shape, device: Launch())
    assert device.lock(4096, 8192) == 2
    assert calls == [(4096, 8192), "launch"]


@lacking.mark("no GPU", torch.accelerator.is_available())
def test_without_an_accelerator():
    assert (accelerator.is_available(), accelerator.device_count(), accelerator.usual_type()) == (False, 0, "cpu")
    assert accelerator.generator_of(torch.device("cpu")) is torch.default_generator
    with accelerator.device_of(EYE):
        pass


@pytest.mark.parametrize("found", ["mps", "mtia"])
def test_an_accelerator_that_gpuload_is_not_written_for_is_none(monkeypatch, found):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(found))
    assert accelerator.kind() is None
    assert accelerator.usual_type() == "cpu"


def test_xpu_is_the_usual_device_where_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 2)
    assert accelerator.usual_type() == "xpu"
    assert accelerator.current_device() == torch.device("xpu", 2)
