"""Images that the GPU decodes, beside those of the CPU."""

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
def test_batches_are_those_of_the_cpu_within_a_level_in_the_mean():
    # Of what libjpeg refuses a GPU makes something, without a word; so does Pillow, something else.
    kinds = [kind for kind, (_, who) in KINDS.items() if who != "refused" for _ in range(4)]
    files = Photos([KINDS[kind][0](number) for number, kind in enumerate(kinds)])
    given: dict[str, Any] = {"device": "cuda", "transforms": [T.RandomCrop(24)], "backend": "torch"}
    given["faults"] = gl.Faults(on_error="skip", max_error_rate=1.0)
    expected, failed, _ = read_batches(files, **given)
    found, failed_, made = read_batches(files, decode=DEVICE, **given)
    assert [entry[:2] for entry in failed_] == [entry[:2] for entry in failed]
    for (images, labels, positions), (images_, labels_, positions_) in zip(found, expected, strict=True):
        assert (labels, positions) == (labels_, positions_)
        assert (images.float() - images_.float()).abs().mean() <= 1.0
    assert sum(count for name, count in made.stats().decode.counts.items() if name.startswith("nvImageCodec (")) > 0


def test_bits_do_not_depend_on_batches_chunks_and_workers():
    files = Photos([photo(number) for number in range(24)])

    def run(**given: Any) -> torch.Tensor:
        decode = gl.Decode(where="both", device_share=0.6)
        found, _, made = read_batches(files, device="cuda", decode=decode, **given)
        assert str(made.plan().decoder).startswith("nvImageCodec")
        return torch.cat([images for images, _, _ in found])

    expected = run(batch_size=24)
    for given in ({"batch_size": 5}, {"batch_size": 7, "chunk_size": 2}, {"batch_size": 24, "num_workers": 2}):
        assert torch.equal(run(**given), expected)


def test_many_batches_take_no_more_memory_than_few():
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


def test_pictures_have_the_same_bits_in_any_batch(record_property):
    here = torch.device("cuda", 0)
    decoder = find_decoder(here, 1)
    record_property("regions", f"{decoder.decodes_regions}; {decoder.note}")
    try:
        assert find_fault(decoder, here) == ""  # of regions too, where the version is known to have them right
    finally:
        decoder.close()


def test_the_plan_names_the_gpus_decoders():
    plan = gl.Loader(Photos([photo(0)]), num_workers=0, device="cuda", decode=DEVICE).plan()
    assert plan.decoder is not None
    assert GPU in plan.decoder
    assert "on cuda:0" in plan.decoder
