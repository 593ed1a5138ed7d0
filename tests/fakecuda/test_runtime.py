"""The fake CUDA runtime: how it behaves like CUDA, and the faults that it reports. tests/simulated/test_model.py tests
the order of streams, events and freed memory, on this runtime too."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from helpers import lacking
from torch.utils._python_dispatch import _disable_current_modes

from gpuload.stage.device import Accelerator

pytestmark = lacking.mark_missing("the fake CUDA runtime", not lacking.IS_FAKE)

if lacking.IS_FAKE:
    from fakecuda.operations import enqueue, failures
    from fakecuda.running import faults, forget, on_fake_devices
    from fakecuda.runtime import runtime
TESTS = Path(__file__).parent.parent


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program on fake devices in a new process."""
    begin = (
        "from fakecuda.running import on_fake_devices\ndevices = on_fake_devices()\ndevices.__enter__()\nimport torch\n"
    )
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent), *sys.path])
    return subprocess.run(
        [sys.executable, "-c", begin + textwrap.dedent(program)],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_events_for_the_host_are_blocking_and_those_for_streams_are_not():
    """This holds on the default stream and on a new stream, of the current device and of another device."""
    with on_fake_devices("lazy"):
        waits: list[str] = []
        runtime().watch_waits(waits.append)
        for index in range(2):
            device = Accelerator(torch.device("cuda", index))
            for stream in (device.current_stream(), device.new_stream()):
                for record, name, expected_wait in (
                    (device.record, "cudaEventCreate", "event"),
                    (device.record_for_host, "cudaEventCreate, blocking", "blocking event"),
                ):
                    ran: list[int] = []
                    with device.make_current(stream):
                        enqueue(lambda ran=ran: ran.append(1), index)
                    runtime().forget_counts()
                    event = record(stream)
                    counts = runtime().counts()
                    assert (counts[name], counts["cudaEventRecord"]) == (1, 1)
                    assert not event.query()
                    waits.clear()
                    event.synchronize()
                    assert (waits, ran, event.query()) == ([expected_wait], [1], True)
            assert torch.cuda.current_device() == 0
        runtime().watch_waits(None)


def test_new_memory_is_garbage():
    with on_fake_devices("eager"):
        assert torch.empty(100, dtype=torch.uint8, device="cuda").unique().tolist() == [0xA5]


def test_host_access_to_device_memory_crashes():
    result = run(
        """
        import ctypes
        tensor = torch.ones(4, device="cuda")
        torch.cuda.synchronize()
        print("here", flush=True)
        ctypes.string_at(tensor.data_ptr(), 4)
        print("still here")
        """
    )
    assert (result.stdout, result.returncode) == ("here\n", -11), result.stderr


def test_memory_returned_to_the_driver_is_not_reachable():
    with on_fake_devices("lazy"):
        tensor = torch.ones(1 << 22, device="cuda")
        address, nbytes = tensor.data_ptr(), tensor.nbytes
        assert runtime().reachable(address, nbytes)
        del tensor
        torch.cuda.empty_cache()
        assert runtime().reachable(address, nbytes) is None


def test_changing_the_source_of_a_pending_copy_is_a_fault():
    with on_fake_devices("lazy"):
        pinned = torch.zeros(100).pin_memory()
        pinned.to("cuda", non_blocking=True)
        pinned.fill_(7)
        torch.cuda.synchronize()
        [text] = faults()
        assert text == f"the source of a copy was changed before the copy ran: 400 bytes at {pinned.data_ptr():#x}"
        forget()


def test_double_locks_and_early_unlocks_are_faults():
    cuda = torch.cuda.cudart()
    with on_fake_devices("lazy"):
        memory = torch.zeros(1 << 16)
        assert int(cuda.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0
        assert runtime().locked_ranges() == 1
        already_registered, not_registered, out_of_memory = 712, 713, 2  # values of cudaError_t
        assert int(cuda.cudaHostRegister(memory.data_ptr(), 4096, 0)) == runtime().last_error() == already_registered
        memory.to("cuda", non_blocking=True)
        assert int(cuda.cudaHostUnregister(memory.data_ptr())) == 0
        assert int(cuda.cudaHostUnregister(memory.data_ptr())) == runtime().last_error() == not_registered
        torch.cuda.synchronize()
        assert [text.partition(":")[0] for text in faults()] == [
            "memory was page-locked twice",
            "memory was unlocked during a copy",
            "memory was unlocked that is not page-locked",
        ]
        forget()
        with runtime().most_locks(0):
            code = int(cuda.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
            assert code == runtime().last_error() == out_of_memory


def test_allocation_beyond_memory_bytes_raises_out_of_memory():
    with on_fake_devices("lazy"), runtime().memory_bytes(64 << 20):
        tensor = torch.empty(40 << 20, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(40 << 20, dtype=torch.uint8, device="cuda")
        del tensor
        torch.empty(40 << 20, dtype=torch.uint8, device="cuda")


def test_failed_kernel_leaves_the_device_unusable():
    with on_fake_devices("lazy"):
        torch.arange(3, device="cuda")[torch.tensor([5], device="cuda")]
        for _ in range(2):
            with pytest.raises(RuntimeError, match="cudaErrorAssert"):
                torch.cuda.synchronize()
        assert len(failures) == 1
        assert "IndexError" in failures[0]
        torch.ones(1, device="cuda:1").cpu()  # another device still works
        forget()
        torch.cuda.synchronize()


def test_each_device_has_its_own_context():
    result = run(
        """
        from fakecuda.runtime import runtime
        print([runtime().has_context(index) for index in range(2)])
        torch.ones(1, device="cuda:1")
        print([runtime().has_context(index) for index in range(2)])
        stream = torch.cuda.Stream(1)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(0))
        try:
            event.record(stream)
        except (RuntimeError, ValueError) as error:
            print("refused")
        """
    )
    assert result.stdout.splitlines() == ["[False, False]", "[False, True]", "refused"], result.stderr


def test_kernel_of_torch_that_is_not_run_is_a_fault():
    with on_fake_devices("lazy"):
        with _disable_current_modes():
            torch.ones(5, device="cuda").add_(1)
        assert any("elementwise_kernel" in text for text in faults())
        forget()


def test_host_functions_run_in_the_order_of_their_stream():
    library, ran = ctypes.CDLL("libcudart.so.13"), []
    note = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: ran.append("host"))
    with on_fake_devices("lazy"):
        enqueue(lambda: ran.append("work"), 0)
        library.cudaLaunchHostFunc(None, note, None)
        assert ran == []
        torch.cuda.synchronize()
    assert ran == ["work", "host"]


def test_memory_pool_of_the_driver_reuses_memory_in_the_order_of_a_stream():
    result = run(
        """
        assert torch.cuda.get_allocator_backend() == "cudaMallocAsync"
        first = torch.full((1000,), 3, device="cuda")
        address, double = first.data_ptr(), first * 2
        del first
        second = torch.full((1000,), 4, device="cuda")
        print(second.data_ptr() == address, double.unique().tolist(), second.unique().tolist())
        devices.__exit__(None, None, None)
        """,
        PYTORCH_ALLOC_CONF="backend:cudaMallocAsync",
        FAKECUDA_POLICY="lazy",
    )
    assert result.stdout == "True [6] [4]\n", result.stdout + result.stderr
