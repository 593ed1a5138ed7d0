"""Every guard against a race, a hidden wait or growing memory is needed: without it, the simulated device shows it.

Each mutant is gpuload with one guard taken out or put wrong. It has to fail under a directed policy, in the loop that
the guard is for; the same loops pass as gpuload is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from bits.running import in_batches
from helpers import lacking
from helpers.cut_batches import cut_batch
from simulated.decoder import decoding_with
from simulated.machine import DIRECTED
from simulated.running import OPTIONS, assert_equal, epochs, on_cpu, take
from simulated.runtime import SimulatedCuda, simulated
from simulated.test_augment import LARGE
from simulated.test_augment import photographs as dense
from simulated.test_decoding import samples as photographs
from simulated.test_modules import (
    at_the_end,
    collated,
    collated_numbers,
    in_a_list,
    iterated_by_a_thread,
    shifted,
    with_a_constant,
)
from simulated.test_orders import CHAIN, options, samples

import gpuload as gl
from gpuload.batches import augment
from gpuload.batches.assemble import Assembly
from gpuload.stage import compile_stage
from gpuload.stage.decode.threads import DecodedMemory
from gpuload.stage.device import Accelerator
from gpuload.stage.fused import runner
from gpuload.stage.fused.runner import FusedRunner
from gpuload.stage.ragged import RaggedImages
from gpuload.stage.transfer import CudaTransfer
from gpuload.transforms import Chain, state

Patch = pytest.MonkeyPatch
Mutant = Callable[[Patch, SimulatedCuda], None]
Loop = Callable[[SimulatedCuda], None]

# -- loops ------------------------------------------------------------------------------------------------------------


def plain(cuda: SimulatedCuda) -> None:
    """Small chunks, so that slots come round; the host waits nowhere but where it may."""
    given = options(chunk_size=2, info=True)
    found = take(epochs(given | {"device": "cuda"}), cuda)
    assert_equal(found.values, on_cpu(given))
    assert found.hidden == []
    assert cuda.locked_ranges() == 0


def other_device(cuda: SimulatedCuda) -> None:
    """On a device that is not the current one."""
    found = take(epochs(options(device="cuda:1")), cuda)
    assert_equal(found.values, on_cpu(options()))


def endless(cuda: SimulatedCuda) -> None:
    """A consumer that lags, for many batches."""
    reserved = []
    with gl.Loader(**OPTIONS | options(dataset=samples() * 5, transforms=CHAIN[:1], device="cuda")) as loader:
        for images, _ in loader:
            images.sum()
            del images, _
            reserved.append(cuda.reserved_bytes())
    assert reserved[-1] == reserved[9]


def broken_off(cuda: SimulatedCuda) -> None:
    """Closed while copies are under way."""
    loader = gl.Loader(**OPTIONS | options(device="cuda", chunk_size=1))
    next(iter(loader))
    loader.close()
    cuda.synchronize()


def in_small_ring(cuda: SimulatedCuda) -> None:
    """In a ring that is full, slots are waited for."""
    given = options(ring_bytes=4096 * 2, chunk_size=1, batch_size=12)
    assert_equal(take(epochs(given | {"device": "cuda"}), cuda).values, on_cpu(given))


def same(made: Callable[[str], list[torch.Tensor]]) -> Loop:
    def loop(cuda: SimulatedCuda) -> None:
        found = [cuda.on_host(tensor) for tensor in made("cuda:0")]
        assert all(map(torch.equal, found, made("cpu")))

    return loop


def changing(transforms: Any) -> Loop:
    return same(lambda device: shifted(device, transforms))


def decoding(**decoder: Any) -> Loop:
    """The device decodes; its decoder writes when it is called."""

    def loop(cuda: SimulatedCuda) -> None:
        given = {
            "dataset": photographs(),
            "transforms": CHAIN[:2],
            "decode": gl.Decode(where="device", device_memory=9000),
        }
        with decoding_with(**decoder):
            found = take(epochs(given | {"device": "cuda"}), cuda)
        assert_equal(found.values, on_cpu(given))

    return loop


def fuses(cuda: SimulatedCuda) -> None:
    """By kernels, few images, as these are interpreted."""
    given = options(dataset=samples(4), batch_size=2, transforms=CHAIN[:2], backend="fused")
    assert_equal(take(epochs(given | {"device": "cuda"}), cuda).values, on_cpu(given))


def fuses_elsewhere(cuda: SimulatedCuda) -> None:
    """By a stage alone, on a device that is not the current one."""
    chain = Chain(CHAIN[:2])
    ragged, draws = cut_batch(chain, [image for image, _ in samples(2)])
    expected = compile_stage(chain, device="cpu", backend="fused")(ragged, draws)
    stage = compile_stage(chain, device="cuda:1", backend="fused")
    found = stage(replace(ragged, pixels=ragged.pixels.to("cuda:1")), draws)
    assert torch.equal(cuda.on_host(found), expected)


def augments(cuda: SimulatedCuda) -> None:
    """Floats on the device, and in page-locked memory, on a stream of the consumer's, without a loader."""
    floats, expected = dense() / 255, gl.Augment(CHAIN, device="cpu", backend="torch")
    module, stream = gl.Augment(CHAIN, device="cuda", backend="torch"), cuda.stream()
    with cuda.on(stream):
        module(floats)  # what is needed is made
        given = floats.to("cuda:0"), floats.pin_memory()
        cuda.waits.clear()
        read = [module(images).clone() for images in given]
        waits = list(cuda.waits)
    stream.synchronize()
    found = [cuda.on_host(images) for images in read]
    with in_batches():
        assert_equal(found, [expected(floats) for _ in range(3)][1:])
    assert waits == []


def augments_by_kernels(cuda: SimulatedCuda) -> None:
    """Small crops of large images take little memory beside these."""
    module, images = gl.Augment(CHAIN, backend="fused"), dense(*LARGE).to("cuda:0")
    module(images[:, :, :20, :20])  # what is needed is made
    before = cuda.reserved_bytes()
    module(images)
    assert cuda.reserved_bytes() - before < images.nbytes / 2


decodes = decoding()
ends_in_module, holds_module = changing(at_the_end), changing(in_a_list)
collates, with_constant = same(collated), same(lambda device: with_a_constant(device, levels=True))
LOOPS = (plain, other_device, endless, broken_off, in_small_ring, ends_in_module, holds_module, collates, with_constant)
collates_numbers = same(collated_numbers)


def goes_on_in_a_thread(cuda: SimulatedCuda) -> None:
    found = [cuda.on_host(tensor) for tensor in iterated_by_a_thread("cuda:0", cuda)]
    assert all(map(torch.equal, found, iterated_by_a_thread("cpu")))


LOOPS += (collates_numbers, goes_on_in_a_thread)
LOOPS += (decodes, fuses, fuses_elsewhere, augments, augments_by_kernels)


# -- mutants ----------------------------------------------------------------------------------------------------------

MUTANTS: dict[str, tuple[Loop, Mutant]] = {}


def mutant(loop: Loop) -> Callable[[Mutant], Mutant]:
    """Note a mutant, and the loop in which it shows."""

    def add(change: Mutant) -> Mutant:
        MUTANTS[change.__name__] = loop, change
        return change

    return add


def after_load(patch: Patch, change: Callable[[CudaTransfer], None]) -> None:
    """Do something else once the copies of a batch are issued."""
    load = CudaTransfer.load

    def changed(self: CudaTransfer, *args: Any) -> Any:
        made = load(self, *args)
        change(self)
        return made

    patch.setattr(CudaTransfer, "load", changed)


@mutant(plain)
def batches_are_not_recorded_on_the_consumers_stream(patch: Patch, cuda: SimulatedCuda) -> None:
    patch.setattr(Accelerator, "keep", lambda self, tensor, stream: None)


@mutant(plain)
def the_first_tensor_is_not_recorded(patch: Patch, cuda: SimulatedCuda) -> None:
    hand_over = CudaTransfer.hand_over
    patch.setattr(CudaTransfer, "hand_over", lambda self, ticket, tensors: hand_over(self, ticket, tensors[1:]))


@mutant(plain)
def labels_are_not_recorded(patch: Patch, cuda: SimulatedCuda) -> None:
    hand_over = CudaTransfer.hand_over

    def images_alone(self: CudaTransfer, ticket: Any, tensors: list[torch.Tensor]) -> None:
        hand_over(self, ticket, [tensor for tensor in tensors if tensor.dim() == 4])

    patch.setattr(CudaTransfer, "hand_over", images_alone)


@mutant(plain)
def the_consumers_stream_does_not_wait(patch: Patch, cuda: SimulatedCuda) -> None:
    patch.setattr(Accelerator, "wait", lambda self, stream, event: None)


@mutant(plain)
def the_host_waits_in_place_of_the_stream(patch: Patch, cuda: SimulatedCuda) -> None:
    patch.setattr(Accelerator, "wait", lambda self, stream, event: event.synchronize())


@mutant(plain)
def the_host_spins_while_it_waits(patch: Patch, cuda: SimulatedCuda) -> None:
    patch.setattr(Accelerator, "record_for_host", Accelerator.record)


@mutant(plain)
def the_event_is_recorded_before_the_stage(patch: Patch, cuda: SimulatedCuda) -> None:
    early: list[Any] = []
    after_load(patch, lambda self: early.append(self._device.record(self._stream)))
    patch.setattr(CudaTransfer, "finish", lambda self: early[-1])


@mutant(plain)
def the_event_is_recorded_on_the_consumers_stream(patch: Patch, cuda: SimulatedCuda) -> None:
    patch.setattr(CudaTransfer, "finish", lambda self: self._device.record(cuda.default_stream()))


@mutant(plain)
def slots_are_free_at_once(patch: Patch, cuda: SimulatedCuda) -> None:
    after_load(patch, lambda self: self._copies.pop()[1]())


@mutant(plain)
def slots_are_free_when_they_are_asked_for(patch: Patch, cuda: SimulatedCuda) -> None:
    def reclaim(self: CudaTransfer, wait: bool) -> bool:
        freed = bool(self._copies)
        while self._copies:
            self._copies.popleft()[1]()
        return freed

    patch.setattr(CudaTransfer, "reclaim", reclaim)


@mutant(in_small_ring)
def the_event_of_slots_is_recorded_before_the_copies(patch: Patch, cuda: SimulatedCuda) -> None:
    load = CudaTransfer.load

    def changed(self: CudaTransfer, *args: Any) -> Any:
        early = self._device.record(self._stream)
        made = load(self, *args)
        self._copies.append((early, self._copies.pop()[1]))
        return made

    patch.setattr(CudaTransfer, "load", changed)


@mutant(plain)
def batches_are_made_on_the_callers_stream(patch: Patch, cuda: SimulatedCuda) -> None:
    """While their events are recorded on the side stream."""
    patch.setattr(CudaTransfer, "stream", lambda self, *, after_consumer: contextlib.nullcontext())


@mutant(plain)
def copies_are_issued_on_the_callers_stream(patch: Patch, cuda: SimulatedCuda) -> None:
    load = CudaTransfer.load

    def changed(self: CudaTransfer, *args: Any) -> Any:
        with self._device.make_current(cuda.default_stream()):
            return load(self, *args)

    patch.setattr(CudaTransfer, "load", changed)


@mutant(other_device)
def the_stream_is_that_of_the_current_device(patch: Patch, cuda: SimulatedCuda) -> None:
    patch.setattr(Accelerator, "current_stream", lambda self: torch.accelerator.current_stream())


@mutant(plain)
def labels_come_from_pageable_memory(patch: Patch, cuda: SimulatedCuda) -> None:
    patch.setattr(CudaTransfer, "copy_to_device", lambda self, tensor: tensor.to(self.device, non_blocking=True))


@mutant(plain)
def labels_come_from_one_buffer_that_is_used_again(patch: Patch, cuda: SimulatedCuda) -> None:
    buffer = torch.empty(1 << 12, dtype=torch.uint8).pin_memory()

    def place(self: CudaTransfer, tensor: torch.Tensor) -> torch.Tensor:
        staged = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        return staged.to(self.device, non_blocking=True)

    patch.setattr(CudaTransfer, "copy_to_device", place)


@mutant(plain)
def numbers_of_the_stage_come_from_pageable_memory(patch: Patch, cuda: SimulatedCuda) -> None:
    patch.setattr(torch.Tensor, "pin_memory", lambda self: self)


@mutant(endless)
def nothing_holds_the_host_back(patch: Patch, cuda: SimulatedCuda) -> None:
    patch.setattr(CudaTransfer, "hold_back", lambda self: None)


@mutant(broken_off)
def closing_does_not_wait_for_the_copies(patch: Patch, cuda: SimulatedCuda) -> None:
    patch.setattr(Accelerator, "synchronize", lambda self, stream: None)


@mutant(plain)
def closing_does_not_unlock(patch: Patch, cuda: SimulatedCuda) -> None:
    patch.setattr(Accelerator, "unlock", lambda self, address: None)


@mutant(ends_in_module)
def the_module_at_the_end_is_called_ahead(patch: Patch, cuda: SimulatedCuda) -> None:
    patch.setattr(Chain, "ends_in_state", False)


@mutant(ends_in_module)
def the_module_at_the_end_is_called_on_the_side_stream(patch: Patch, cuda: SimulatedCuda) -> None:
    patch.setattr(CudaTransfer, "consumer_stream", lambda self: self.stream(after_consumer=False))


@mutant(holds_module)
def a_batch_with_a_module_is_made_ahead(patch: Patch, cuda: SimulatedCuda) -> None:
    patch.setattr(Chain, "holds_state", False)


@mutant(holds_module)
def a_module_in_between_does_not_wait_for_the_consumer(patch: Patch, cuda: SimulatedCuda) -> None:
    stream = CudaTransfer.stream
    patch.setattr(CudaTransfer, "stream", lambda self, *, after_consumer: stream(self, after_consumer=False))


@mutant(holds_module)
def modules_are_looked_for_in_attributes_alone(patch: Patch, cuda: SimulatedCuda) -> None:
    patch.setattr(state, "_referents", lambda entry: list(getattr(entry, "__dict__", {}).values()))


@mutant(collates)
def a_collate_fn_is_called_ahead(patch: Patch, cuda: SimulatedCuda) -> None:
    patch.setattr(Assembly, "_reads_state", lambda self, columns: False)


@mutant(collates_numbers)
def a_collate_fn_is_called_ahead_where_there_are_no_images(patch: Patch, cuda: SimulatedCuda) -> None:
    patch.setattr(Assembly, "_reads_state", lambda self, columns: bool(columns.images))


@mutant(goes_on_in_a_thread)
def an_epoch_waits_for_the_stream_of_iter_alone(patch: Patch, cuda: SimulatedCuda) -> None:
    follow, followed = CudaTransfer.follow_consumer, []

    def once(self: CudaTransfer) -> None:
        if not followed:
            follow(self)
        followed.append(self)

    patch.setattr(CudaTransfer, "follow_consumer", once)


@mutant(other_device)
def the_device_is_not_restored(patch: Patch, cuda: SimulatedCuda) -> None:
    @contextlib.contextmanager
    def make_current(self: Accelerator, stream: Any) -> Iterator[None]:
        before = torch.accelerator.current_stream(self.device)
        torch.accelerator.set_stream(stream)
        yield
        torch.accelerator.set_stream(before)

    patch.setattr(Accelerator, "make_current", make_current)


@mutant(with_constant)
def an_epoch_does_not_wait_for_the_consumer(patch: Patch, cuda: SimulatedCuda) -> None:
    patch.setattr(CudaTransfer, "follow_consumer", lambda self: None)


@mutant(decodes)
def the_decoder_is_called_while_its_images_are_read(patch: Patch, cuda: SimulatedCuda) -> None:
    keep = DecodedMemory.keep
    patch.setattr(DecodedMemory, "keep", lambda self, nbytes, event, owners: keep(self, nbytes, None, owners))


@mutant(decodes)
def images_are_freed_unseen_where_they_would_not_fit(patch: Patch, cuda: SimulatedCuda) -> None:
    def freed(self: DecodedMemory, limit_bytes: int) -> int:
        while self._copies and self._call_bytes + sum(nbytes for _, nbytes, _ in self._copies) > limit_bytes:
            self._copies.popleft()
        return self._call_bytes + sum(nbytes for _, nbytes, _ in self._copies)

    patch.setattr(DecodedMemory, "_free", freed)


@mutant(fuses)
def a_kernel_reads_from_a_wrong_offset(patch: Patch, cuda: SimulatedCuda) -> None:
    launch = FusedRunner.launch

    def changed(self: FusedRunner, prepared: Any, pixels: torch.Tensor, outputs: Any) -> None:
        launch(self, prepared, pixels[3:] if pixels.is_cuda else pixels, outputs)

    patch.setattr(FusedRunner, "launch", changed)


@mutant(fuses_elsewhere)
def a_kernel_is_launched_on_the_current_device(patch: Patch, cuda: SimulatedCuda) -> None:
    patch.setattr(runner, "use_device_of", lambda tensor: contextlib.nullcontext())


@mutant(augments)
def a_batch_is_copied_while_the_host_waits(patch: Patch, cuda: SimulatedCuda) -> None:
    patch.setattr(augment, "_to_device", lambda value, device, **named: value.to(device))


@mutant(augments)
def the_range_of_floats_on_the_device_is_checked(patch: Patch, cuda: SimulatedCuda) -> None:
    check = augment._check_images

    def changed(leaf: Any) -> None:
        assert float(leaf.value.min()) >= 0
        check(leaf)

    patch.setattr(augment, "_check_images", changed)


@mutant(augments)
def a_batch_is_augmented_on_another_stream(patch: Patch, cuda: SimulatedCuda) -> None:
    make = gl.Augment._augment_tree

    def changed(self: gl.Augment, *given: Any) -> Any:
        with cuda.on(cuda.default_stream()):
            return make(self, *given)

    patch.setattr(gl.Augment, "_augment_tree", changed)


@mutant(augments_by_kernels)
def planes_are_copied_for_kernels(patch: Patch, cuda: SimulatedCuda) -> None:
    lay = RaggedImages.from_planes

    def interleave(*given: Any) -> RaggedImages:
        images = lay(*given)
        return images.interleave(images.regions_tlhw)

    patch.setattr(RaggedImages, "from_planes", interleave)


@mutant(plain)
def the_consumers_stream_is_not_restored(patch: Patch, cuda: SimulatedCuda) -> None:
    @contextlib.contextmanager
    def make_current(self: Accelerator, stream: Any) -> Iterator[None]:
        torch.accelerator.set_stream(stream)
        yield

    patch.setattr(Accelerator, "make_current", make_current)


# Seen only where devices have contexts.
OF_THE_MODEL = {
    "a_kernel_is_launched_on_the_current_device": lacking.mark("the fake CUDA runtime", not lacking.IS_FAKE),
}

# -- tests ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
def test_the_loops_pass_as_gpuload_is(loop):
    for policy in DIRECTED:
        with simulated(policy) as cuda:
            loop(cuda)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=OF_THE_MODEL.get(name, ())) for name in MUTANTS])
def test_a_mutant_fails(name):
    loop, change = MUTANTS[name]
    assert any(fails(loop, change, policy) for policy in DIRECTED)


def fails(loop: Loop, change: Mutant, policy: str) -> bool:
    try:
        with simulated(policy) as cuda, Patch.context() as patch:
            change(patch, cuda)
            loop(cuda)
    except (AssertionError, RuntimeError, RuntimeWarning) as error:
        print(f"{policy}: {type(error).__name__}: {str(error)[:120]}")
        return True
    return False
