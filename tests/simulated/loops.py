"""Training loops that a mutant of gpuload can break: each compares the simulated device with the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from bits.running import in_batches
from helpers.cut_batches import cut_batch
from simulated.decoder import decoding_with
from simulated.running import OPTIONS, assert_equal, assert_equal_on_device, epochs, on_cpu, run_loop
from simulated.runtime import SimulatedCuda
from simulated.samples import CHAIN, LARGE, encoded_samples, noise_images, options, samples
from simulated.user_modules import MODULES, collated, collated_numbers, iterated_by_a_thread, shifted, with_a_constant

import gpuload as gl
from gpuload.stage import compile_stage
from gpuload.transforms import Chain


def small_chunks(cuda: SimulatedCuda) -> None:
    """Load chunks of two samples, so that slots are reused, and allow no unexpected wait."""
    loader_options = options(chunk_size=2, info=True)
    run = run_loop(epochs(loader_options | {"device": "cuda"}), cuda)
    assert_equal(run.values, on_cpu(loader_options))
    assert run.unexpected_waits == []
    assert cuda.locked_ranges() == 0


def on_other_device(cuda: SimulatedCuda) -> None:
    run = run_loop(epochs(options(device="cuda:1")), cuda)
    assert_equal(run.values, on_cpu(options()))


def many_batches(cuda: SimulatedCuda) -> None:
    """Let the consumer lag for many batches, whose memory must stay flat."""
    reserved = []
    with gl.Loader(**OPTIONS | options(dataset=samples() * 5, transforms=CHAIN[:1], device="cuda")) as loader:
        for images, _ in loader:
            images.sum()
            del images, _
            reserved.append(cuda.reserved_bytes())
    assert reserved[-1] == reserved[9], "memory still grows after ten batches"


def closed_early(cuda: SimulatedCuda) -> None:
    """Close the loader while copies are pending."""
    loader = gl.Loader(**OPTIONS | options(device="cuda", chunk_size=1))
    next(iter(loader))
    loader.close()
    cuda.synchronize()


def in_small_ring(cuda: SimulatedCuda) -> None:
    """Use a ring smaller than a batch, so that the host waits for slots."""
    loader_options = options(ring_bytes=4096 * 2, chunk_size=1, batch_size=12)
    assert_equal(run_loop(epochs(loader_options | {"device": "cuda"}), cuda).values, on_cpu(loader_options))


def decodes(cuda: SimulatedCuda) -> None:
    """Decode on the device, whose decoder writes as soon as it is called."""
    decode = gl.Decode(where="device", device_memory=9000)
    loader_options = {"dataset": encoded_samples(), "transforms": CHAIN[:2], "decode": decode}
    with decoding_with():
        run = run_loop(epochs(loader_options | {"device": "cuda"}), cuda)
    assert_equal(run.values, on_cpu(loader_options))


def fuses(cuda: SimulatedCuda) -> None:
    """Run the fused backend on few images, since its kernels are interpreted."""
    loader_options = options(dataset=samples(4), batch_size=2, transforms=CHAIN[:2], backend="fused")
    assert_equal(run_loop(epochs(loader_options | {"device": "cuda"}), cuda).values, on_cpu(loader_options))


def fuses_on_other_device(cuda: SimulatedCuda) -> None:
    """Run a fused stage on a device that is not the current one."""
    chain = Chain(CHAIN[:2])
    ragged, draws = cut_batch(chain, [image for image, _ in samples(2)])
    expected = compile_stage(chain, device="cpu", backend="fused")(ragged, draws)
    stage = compile_stage(chain, device="cuda:1", backend="fused")
    batch_on_device = stage(replace(ragged, pixels=ragged.pixels.to("cuda:1")), draws)
    assert torch.equal(cuda.on_host(batch_on_device), expected)


def augments(cuda: SimulatedCuda) -> None:
    """Augment floats on the device and in page-locked memory, on a stream of the consumer."""
    floats, expected = noise_images() / 255, gl.Augment(CHAIN, device="cpu", backend="torch")
    module, stream = gl.Augment(CHAIN, device="cuda", backend="torch"), cuda.stream()
    with cuda.on(stream):
        module(floats)  # creates the stage
        batches = floats.to("cuda:0"), floats.pin_memory()
        cuda.waits.clear()
        clones = [module(images).clone() for images in batches]
        waits = list(cuda.waits)
    stream.synchronize()
    on_host = [cuda.on_host(images) for images in clones]
    with in_batches():
        assert_equal(on_host, [expected(floats) for _ in range(3)][1:])  # the first batch created the stage
    assert waits == []


def augments_by_kernels(cuda: SimulatedCuda) -> None:
    """Cut small crops of large images, which takes little memory."""
    module, images = gl.Augment(CHAIN, backend="fused"), noise_images(*LARGE).to("cuda:0")
    module(images[:, :, :20, :20])  # creates the stage
    before = cuda.reserved_bytes()
    module(images)
    assert cuda.reserved_bytes() - before < images.nbytes / 2


def with_tensor_of_thread(cuda: SimulatedCuda) -> None:
    assert_equal([cuda.on_host(tensor) for tensor in iterated_by_a_thread("cuda:0", cuda)], iterated_by_a_thread("cpu"))


Loop = Callable[[SimulatedCuda], None]
# The loops that no other test runs without a mutant.
LOOPS = (small_chunks, many_batches, in_small_ring, decodes, fuses_on_other_device, augments, augments_by_kernels)
MODULE_LOOPS: dict[str, Callable[[str], list[torch.Tensor]]] = {
    **{transforms.__name__: partial(shifted, transforms=transforms) for transforms in MODULES},
    "collated": collated,
    "collated_numbers": collated_numbers,
    "constant_levels": partial(with_a_constant, levels=True),
    "constant_floats": partial(with_a_constant, levels=False),
}
with_module_at_the_end = partial(assert_equal_on_device, MODULE_LOOPS["at_the_end"])
with_module_in_a_list = partial(assert_equal_on_device, MODULE_LOOPS["in_a_list"])
with_constant = partial(assert_equal_on_device, MODULE_LOOPS["constant_levels"])
collates = partial(assert_equal_on_device, collated)
collates_numbers = partial(assert_equal_on_device, collated_numbers)
