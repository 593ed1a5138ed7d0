"""Images that the GPU decodes, compared with those that the CPU decodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import lacking
from helpers.jpeg_kinds import KINDS, Photos, photo, read_batches

import gpuload as gl
from gpuload import transforms as T
from gpuload.cli.trial import find_fault
from gpuload.stage.decode.choose import choose, find_decoder
from gpuload.stage.decode.nvimagecodec import GPU

pytestmark = pytest.mark.cuda

DEVICE = gl.Decode(where="device")


@pytest.fixture(autouse=True)
def _with_a_decoder() -> None:
    choice = choose(DEVICE, torch.device("cuda", 0), 1)
    if choice.decoder is None:
        lacking.skip("a decoder on the GPU", choice.text)


@pytest.mark.filterwarnings("ignore:.*it was (skipped|replaced by):RuntimeWarning")
def test_batches_decoded_on_a_gpu_equal_those_of_the_cpu_within_a_mean_level():
    # A GPU and Pillow silently decode files that libjpeg refuses, each in a different way.
    kinds = [kind for kind, (_, decoder) in KINDS.items() if decoder != "refused" for _ in range(4)]
    files = Photos([KINDS[kind][0](number) for number, kind in enumerate(kinds)])
    options: dict[str, Any] = {"device": "cuda", "transforms": [T.RandomCrop(24)], "backend": "torch"}
    options["faults"] = gl.Faults(on_error="skip", max_error_rate=1.0)
    expected, failures, _ = read_batches(files, **options)
    decoded, failures_on_gpu, loader = read_batches(files, decode=DEVICE, **options)
    positions_and_indices = [(position, index) for position, index, *_ in failures]
    assert [(position, index) for position, index, *_ in failures_on_gpu] == positions_and_indices
    for (images, labels, positions), (expected_images, expected_labels, expected_positions) in zip(
        decoded, expected, strict=True
    ):
        assert (labels, positions) == (expected_labels, expected_positions)
        assert (images.float() - expected_images.float()).abs().mean() <= 1.0
    assert sum(count for name, count in loader.stats().decode.counts.items() if name.startswith("nvImageCodec (")) > 0


def test_decoded_bits_do_not_depend_on_batch_size_chunk_size_and_workers():
    files = Photos([photo(number) for number in range(24)])

    def run(**options: Any) -> torch.Tensor:
        decode = gl.Decode(where="both", device_share=0.6)
        decoded, _, loader = read_batches(files, device="cuda", decode=decode, **options)
        assert str(loader.plan().decoder).startswith("nvImageCodec")
        return torch.cat([images for images, _, _ in decoded])

    expected = run(batch_size=24)
    for options in ({"batch_size": 5}, {"batch_size": 7, "chunk_size": 2}, {"batch_size": 24, "num_workers": 2}):
        assert torch.equal(run(**options), expected)


def test_peak_memory_of_decoding_does_not_grow_with_the_epochs():
    files = Photos([photo(number % 20) for number in range(256)])

    def peak(epochs: int) -> int:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        with gl.Loader(
            files, 32, transforms=[T.RandomResizedCrop(24)], num_workers=0, device="cuda", decode=DEVICE
        ) as loader:
            for _ in range(epochs):
                for _ in loader:
                    pass
            assert 0 < loader.stats().decode.peak_bytes <= DEVICE.device_memory
        return torch.cuda.max_memory_allocated()

    assert peak(6) <= 1.25 * peak(2)


def test_find_fault_finds_no_fault_in_the_gpus_decoder(record_property):
    device = torch.device("cuda", 0)
    decoder = find_decoder(device, 1)
    record_property("regions", f"{decoder.decodes_regions}; {decoder.note}")
    try:
        assert find_fault(decoder, device) == ""  # also checks regions, if this version decodes them correctly
    finally:
        decoder.close()


def test_plan_names_the_gpus_decoder():
    plan = gl.Loader(Photos([photo(0)]), num_workers=0, device="cuda", decode=DEVICE).plan()
    assert plan.decoder is not None
    assert GPU in plan.decoder
    assert "on cuda:0" in plan.decoder
