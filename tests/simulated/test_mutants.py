"""Mutants of gpuload, in which a safeguard against races, unnecessary waits or growing memory is missing or broken.

A mutant must fail under a directed policy, in the training loop for which it is registered. The loops pass without it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import lacking
from simulated.loops import (
    LOOPS,
    Loop,
    augments,
    augments_by_kernels,
    closed_early,
    collates,
    collates_numbers,
    decodes,
    fuses,
    fuses_on_other_device,
    in_small_ring,
    many_batches,
    on_other_device,
    small_chunks,
    with_constant,
    with_module_at_the_end,
    with_module_in_a_list,
    with_tensor_of_thread,
)
from simulated.machine import DIRECTED
from simulated.runtime import SimulatedCuda, simulated

import gpuload as gl
from gpuload.batches import augment
from gpuload.batches.assemble import Assembly
from gpuload.stage.decode.threads import DecodedMemory
from gpuload.stage.device import Accelerator
from gpuload.stage.fused import runner
from gpuload.stage.fused.runner import FusedRunner
from gpuload.stage.ragged import RaggedImages
from gpuload.stage.transfer import CudaTransfer
from gpuload.transforms import Chain, state

Patch = pytest.MonkeyPatch
Mutant = Callable[[Patch, SimulatedCuda], None]

# -- mutants ----------------------------------------------------------------------------------------------------------

# Each mutant's loop, and the attribute that the mutant replaces.
REPLACED: dict[str, tuple[Loop, Any, str, Any]] = {
    "batches_are_not_recorded_on_the_consumers_stream": (
        small_chunks,
        Accelerator,
        "keep",
        lambda self, tensor, stream: None,
    ),
    "the_consumers_stream_does_not_wait": (small_chunks, Accelerator, "wait", lambda self, stream, event: None),
    "the_host_waits_in_place_of_the_stream": (
        small_chunks,
        Accelerator,
        "wait",
        lambda self, stream, event: event.synchronize(),
    ),
    "the_host_spins_while_it_waits": (small_chunks, Accelerator, "record_for_host", Accelerator.record),
    # The batches' events are still recorded on the side stream.
    "batches_are_made_on_the_callers_stream": (
        small_chunks,
        CudaTransfer,
        "stream",
        lambda self, *, after_consumer: contextlib.nullcontext(),
    ),
    "the_stream_is_that_of_the_current_device": (
        on_other_device,
        Accelerator,
        "current_stream",
        lambda self: torch.accelerator.current_stream(),
    ),
    "labels_come_from_pageable_memory": (
        small_chunks,
        CudaTransfer,
        "copy_to_device",
        lambda self, tensor: tensor.to(self.device, non_blocking=True),
    ),
    "numbers_of_the_stage_come_from_pageable_memory": (small_chunks, torch.Tensor, "pin_memory", lambda self: self),
    "nothing_holds_the_host_back": (many_batches, CudaTransfer, "hold_back", lambda self: None),
    "closing_does_not_wait_for_the_copies": (closed_early, Accelerator, "synchronize", lambda self, stream: None),
    "closing_does_not_unlock": (small_chunks, Accelerator, "unlock", lambda self, address: None),
    "the_module_at_the_end_is_called_too_early": (with_module_at_the_end, Chain, "ends_in_state", False),
    "the_module_at_the_end_is_called_on_the_side_stream": (
        with_module_at_the_end,
        CudaTransfer,
        "consumer_stream",
        lambda self: self.stream(after_consumer=False),
    ),
    "a_batch_with_a_module_is_made_too_early": (with_module_in_a_list, Chain, "holds_state", False),
    "modules_are_searched_only_in_attributes": (
        with_module_in_a_list,
        state,
        "_referents",
        lambda entry: list(getattr(entry, "__dict__", {}).values()),
    ),
    "a_collate_fn_is_called_too_early": (collates, Assembly, "_reads_state", lambda self, columns: False),
    "a_collate_fn_without_images_is_called_too_early": (
        collates_numbers,
        Assembly,
        "_reads_state",
        lambda self, columns: bool(columns.images),
    ),
    "an_epoch_does_not_wait_for_the_consumer": (with_constant, CudaTransfer, "follow_consumer", lambda self: None),
    "a_kernel_is_launched_on_the_current_device": (
        fuses_on_other_device,
        runner,
        "use_device_of",
        lambda tensor: contextlib.nullcontext(),
    ),
    "a_batch_is_copied_while_the_host_waits": (
        augments,
        augment,
        "_to_device",
        lambda value, device, **named: value.to(device),
    ),
}
MUTANTS: dict[str, tuple[Loop, Mutant]] = {
    name: (loop, lambda patch, cuda, replaced=replaced: patch.setattr(*replaced))
    for name, (loop, *replaced) in REPLACED.items()
}


def mutant(loop: Loop) -> Callable[[Mutant], Mutant]:
    """Register a mutant, and the loop in which it must fail."""

    def add(change: Mutant) -> Mutant:
        MUTANTS[change.__name__] = loop, change
        return change

    return add


def after_load(patch: Patch, change: Callable[[CudaTransfer], None]) -> None:
    """Call a function after the copies of a batch have been issued."""
    load = CudaTransfer.load

    def patched_load(self: CudaTransfer, *args: Any) -> Any:
        loaded = load(self, *args)
        change(self)
        return loaded

    patch.setattr(CudaTransfer, "load", patched_load)


@mutant(small_chunks)
def the_first_tensor_is_not_recorded(patch: Patch, cuda: SimulatedCuda) -> None:
    hand_over = CudaTransfer.hand_over
    patch.setattr(CudaTransfer, "hand_over", lambda self, ticket, tensors: hand_over(self, ticket, tensors[1:]))


@mutant(small_chunks)
def labels_are_not_recorded(patch: Patch, cuda: SimulatedCuda) -> None:
    hand_over = CudaTransfer.hand_over

    def images_only(self: CudaTransfer, ticket: Any, tensors: list[torch.Tensor]) -> None:
        hand_over(self, ticket, [tensor for tensor in tensors if tensor.dim() == 4])

    patch.setattr(CudaTransfer, "hand_over", images_only)


@mutant(small_chunks)
def the_event_is_recorded_before_the_stage(patch: Patch, cuda: SimulatedCuda) -> None:
    early: list[Any] = []
    after_load(patch, lambda self: early.append(self._device.record(self._stream)))
    patch.setattr(CudaTransfer, "finish", lambda self: early[-1])


@mutant(small_chunks)
def the_event_is_recorded_on_the_consumers_stream(patch: Patch, cuda: SimulatedCuda) -> None:
    patch.setattr(CudaTransfer, "finish", lambda self: self._device.record(cuda.default_stream()))


@mutant(small_chunks)
def slots_are_freed_immediately(patch: Patch, cuda: SimulatedCuda) -> None:
    def release_last(self: CudaTransfer) -> None:
        _, release = self._copies.pop()
        release()

    after_load(patch, release_last)


@mutant(small_chunks)
def slots_are_freed_when_they_are_reclaimed(patch: Patch, cuda: SimulatedCuda) -> None:
    def reclaim(self: CudaTransfer, wait: bool) -> bool:
        freed = bool(self._copies)
        while self._copies:
            _, release = self._copies.popleft()
            release()
        return freed

    patch.setattr(CudaTransfer, "reclaim", reclaim)


@mutant(in_small_ring)
def the_event_of_slots_is_recorded_before_the_copies(patch: Patch, cuda: SimulatedCuda) -> None:
    load = CudaTransfer.load

    def patched_load(self: CudaTransfer, *args: Any) -> Any:
        early = self._device.record(self._stream)
        loaded = load(self, *args)
        _, release = self._copies.pop()
        self._copies.append((early, release))
        return loaded

    patch.setattr(CudaTransfer, "load", patched_load)


@mutant(small_chunks)
def copies_are_issued_on_the_callers_stream(patch: Patch, cuda: SimulatedCuda) -> None:
    load = CudaTransfer.load

    def patched_load(self: CudaTransfer, *args: Any) -> Any:
        with self._device.make_current(cuda.default_stream()):
            return load(self, *args)

    patch.setattr(CudaTransfer, "load", patched_load)


@mutant(small_chunks)
def labels_come_from_one_buffer_that_is_used_again(patch: Patch, cuda: SimulatedCuda) -> None:
    buffer = torch.empty(1 << 12, dtype=torch.uint8).pin_memory()

    def place(self: CudaTransfer, tensor: torch.Tensor) -> torch.Tensor:
        staged = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        return staged.to(self.device, non_blocking=True)

    patch.setattr(CudaTransfer, "copy_to_device", place)


@mutant(with_module_in_a_list)
def a_module_in_mid_chain_does_not_wait_for_the_consumer(patch: Patch, cuda: SimulatedCuda) -> None:
    stream = CudaTransfer.stream
    patch.setattr(CudaTransfer, "stream", lambda self, *, after_consumer: stream(self, after_consumer=False))


@mutant(with_tensor_of_thread)
def an_epoch_waits_only_for_the_stream_that_called_iter(patch: Patch, cuda: SimulatedCuda) -> None:
    follow, followed = CudaTransfer.follow_consumer, []

    def follow_once(self: CudaTransfer) -> None:
        if not followed:
            follow(self)
        followed.append(self)

    patch.setattr(CudaTransfer, "follow_consumer", follow_once)


@mutant(on_other_device)
def the_device_is_not_restored(patch: Patch, cuda: SimulatedCuda) -> None:
    @contextlib.contextmanager
    def make_current(self: Accelerator, stream: Any) -> Iterator[None]:
        before = torch.accelerator.current_stream(self.device)
        torch.accelerator.set_stream(stream)
        yield
        torch.accelerator.set_stream(before)

    patch.setattr(Accelerator, "make_current", make_current)


@mutant(decodes)
def the_decoder_is_called_while_its_images_are_read(patch: Patch, cuda: SimulatedCuda) -> None:
    keep = DecodedMemory.keep
    patch.setattr(DecodedMemory, "keep", lambda self, nbytes, event, owners: keep(self, nbytes, None, owners))


@mutant(decodes)
def images_beyond_the_limit_are_freed_without_waiting_for_their_event(patch: Patch, cuda: SimulatedCuda) -> None:
    def free(self: DecodedMemory, limit_bytes: int) -> int:
        while self._copies and self._call_bytes + sum(nbytes for _, nbytes, _ in self._copies) > limit_bytes:
            self._copies.popleft()
        return self._call_bytes + sum(nbytes for _, nbytes, _ in self._copies)

    patch.setattr(DecodedMemory, "_free", free)


@mutant(fuses)
def a_kernel_reads_from_a_wrong_offset(patch: Patch, cuda: SimulatedCuda) -> None:
    launch = FusedRunner.launch

    def patched_launch(self: FusedRunner, prepared: Any, pixels: torch.Tensor, outputs: Any) -> None:
        launch(self, prepared, pixels[3:] if pixels.is_cuda else pixels, outputs)

    patch.setattr(FusedRunner, "launch", patched_launch)


@mutant(augments)
def the_range_of_floats_on_the_device_is_checked(patch: Patch, cuda: SimulatedCuda) -> None:
    check = augment._check_images

    def patched_check(leaf: Any, window: Any) -> None:
        assert float(leaf.value.min()) >= 0
        check(leaf, window)

    patch.setattr(augment, "_check_images", patched_check)


@mutant(augments)
def a_batch_is_augmented_on_another_stream(patch: Patch, cuda: SimulatedCuda) -> None:
    augment_tree = gl.Augment._augment_tree

    def patched_augment_tree(self: gl.Augment, *arguments: Any) -> Any:
        with cuda.on(cuda.default_stream()):
            return augment_tree(self, *arguments)

    patch.setattr(gl.Augment, "_augment_tree", patched_augment_tree)


@mutant(augments_by_kernels)
def planes_are_copied_for_kernels(patch: Patch, cuda: SimulatedCuda) -> None:
    from_planes = RaggedImages.from_planes

    def interleave(*arguments: Any) -> RaggedImages:
        images = from_planes(*arguments)
        return images.interleave(images.regions_tlhw)

    patch.setattr(RaggedImages, "from_planes", interleave)


@mutant(small_chunks)
def the_consumers_stream_is_not_restored(patch: Patch, cuda: SimulatedCuda) -> None:
    @contextlib.contextmanager
    def make_current(self: Accelerator, stream: Any) -> Iterator[None]:
        torch.accelerator.set_stream(stream)
        yield

    patch.setattr(Accelerator, "make_current", make_current)


# These fail only on devices with contexts.
NEED_CONTEXTS = {
    "a_kernel_is_launched_on_the_current_device": [lacking.mark_missing("the fake CUDA runtime", not lacking.IS_FAKE)]
}


def marks_of(loop: Loop) -> list[pytest.MarkDecorator]:
    return [lacking.needs("nvidia.nvimgcodec")] if loop is decodes else []


# -- tests ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("loop", [pytest.param(loop, marks=marks_of(loop)) for loop in LOOPS])
def test_loop_passes_without_a_mutant(loop):
    for policy in DIRECTED:
        with simulated(policy) as cuda:
            loop(cuda)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[*marks_of(MUTANTS[name][0]), *NEED_CONTEXTS.get(name, ())]) for name in MUTANTS]
)
def test_mutant_fails_in_its_loop(name):
    loop, change = MUTANTS[name]
    assert any(fails(loop, change, policy) for policy in DIRECTED), f"{name} passes under every directed policy"


def fails(loop: Loop, change: Mutant, policy: str) -> bool:
    try:
        with simulated(policy) as cuda, Patch.context() as patch:
            change(patch, cuda)
            loop(cuda)
    except (AssertionError, RuntimeError, RuntimeWarning) as error:
        print(f"{policy}: {type(error).__name__}: {str(error)[:120]}")
        return True
    return False
