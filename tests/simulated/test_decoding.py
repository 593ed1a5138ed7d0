"""Images that the simulated device decodes equal those of the CPU, in every order that events allow."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import lacking
from simulated.decoder import decoding_with
from simulated.machine import DIRECTED
from simulated.running import assert_equal, on_cpu, on_device
from simulated.samples import encoded_samples

import gpuload as gl
from gpuload import transforms as T
from gpuload.stage.decode import crops

CHAIN = [T.RandomCrop(16), T.RandomHorizontalFlip(), T.Normalize((0.5,) * 3, (0.5,) * 3)]


@pytest.mark.parametrize("policy", [*DIRECTED, "random"])
def test_decoded_batches_equal_those_of_the_cpu_in_any_order_of_streams(policy):
    options = {"dataset": encoded_samples(), "transforms": CHAIN}
    expected = on_cpu(options)
    for decode in (gl.Decode(where="device"), gl.Decode(where="both", device_share=0.5)):
        with decoding_with(refuses=lambda data: "no" if len(data) % 5 == 0 else "", room_bytes=7000) as decoders:
            run = on_device({**options, "decode": decode}, policy)
        assert_equal(run.values, expected)
        assert sum(sum(decoder.calls) for decoder in decoders) > 0, f"none of {len(decoders)} decoders was called"


def test_host_sleeps_while_it_waits_for_memory_of_decoded_images():
    with decoding_with():
        decode = gl.Decode(where="device", device_memory=4000)
        waits = on_device({"dataset": encoded_samples(), "transforms": CHAIN, "decode": decode}, "lazy").waits
    assert {wait.what for wait in waits if wait.function == "_free"} == {"blocking event"}


@lacking.needs("nvidia.nvimgcodec")
def test_crops_of_a_batch_are_copied_by_one_kernel_without_a_wait(monkeypatch):
    """The default memory limit suffices for the decoded images, which are kept until their crops are copied."""
    grids: list[tuple[int, int]] = []

    class Counted:
        def __getitem__(self, grid: tuple[int, int]) -> Any:
            grids.append(grid)
            return kernel[grid]

    kernel = crops._copy
    monkeypatch.setattr(crops, "_copy", Counted())
    options = {"dataset": encoded_samples(), "transforms": CHAIN, "decode": gl.Decode(where="device")}
    with decoding_with():
        run = on_device(options, "lazy")
    assert_equal(run.values, on_cpu(options))
    assert grids == [(1, 3)] * 3  # three batches, each with three encoded images
    assert run.unexpected_waits == []


def test_files_decoded_by_the_device_are_not_copied_to_it():
    options = {"dataset": encoded_samples(), "transforms": CHAIN, "decode": gl.Decode(where="device")}
    sizes = []

    def drive(loader_options: dict[str, Any]) -> Any:
        with gl.Loader(**loader_options) as loader:
            yield from loader
            sizes.append(loader.stats().decode.bytes)

    with decoding_with():
        on_device(options, "lazy", drive)
    assert sizes == [3 * (16 * 16 * 3)]  # only the crops of the three samples that are arrays
