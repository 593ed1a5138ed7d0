"""torch's operations on fake devices: queued on their stream, and run on the CPU, on the device's memory.

torch's own allocator allocates the outputs immediately. Queued work refers to memory by address, so memory that is
freed too early is overwritten. Copies between host and device, streams, events and page-locking are torch's own, down
to the runtime. An operation whose outputs depend on values on the device makes the host wait, as on a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Final

import torch
from fakecuda.runtime import ASSERT, ILLEGAL_ADDRESS, WORK, runtime
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["Memory", "Operations", "enqueue", "is_on_device"]

# Operations that torch runs itself, because they neither read nor write device memory.
NATIVE: Final = {
    *("aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided"),
    *("aten::set_", "aten::detach", "aten::record_stream", "aten::is_pinned", "aten::_pin_memory", "aten::lift_fresh"),
    *("aten::resize_", "aten::_sparse_coo_tensor_unsafe", "aten::_sparse_coo_tensor_with_dims_and_tensors"),
    *("aten::_indices", "aten::_values", "aten::crow_indices", "aten::col_indices", "aten::values"),
    *("aten::_coalesced_", "aten::is_coalesced"),
    *("aten::_sparse_compressed_tensor_unsafe", "aten::_sparse_csr_tensor_unsafe"),
}
FRESH: Final = {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided"}
# Operations that make the host wait on a GPU too, because their result or its shape depends on values.
WAITING: Final = {
    *("aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select", "aten::unique_dim"),
    *("aten::_unique2", "aten::unique_consecutive", "aten::index", "aten::index_put", "aten::index_put_"),
    *("aten::_index_put_impl_", "aten::repeat_interleave", "aten::bincount", "aten::histc"),
}
# Other operations accept tensors of the CPU only if these have one element.
TAKES_OF_CPU: Final = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
CPU: Final = torch.device("cpu")

_waiting_to_run: dict[int, Any] = {}  # keeps queued work alive
_keys = itertools.count()
failures: list[str] = []  # tracebacks of work that failed


class Memory:
    """The address and layout of a strided tensor on a device, whose memory this does not keep."""

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.address, self.nbytes = storage.data_ptr(), storage.nbytes()
        self._layout = tensor.dtype, tensor.storage_offset(), tuple(tensor.size()), tuple(tensor.stride())

    def tensor(self) -> torch.Tensor:
        """Return a CPU tensor on the same memory, for queued work only."""
        dtype, offset, size, stride = self._layout
        if not self.nbytes:
            return torch.empty_strided(size, stride, dtype=dtype)
        reachable = runtime().reachable(self.address, self.nbytes)
        if reachable is None:
            raise MemoryError(f"{self.nbytes} bytes at {self.address:#x} are not allocated")
        flat = torch.frombuffer((ctypes.c_uint8 * self.nbytes).from_address(reachable), dtype=torch.uint8)
        return torch.empty(0, dtype=dtype).set_(flat.untyped_storage(), offset, size, stride)


def is_on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cuda"


def enqueue(work: Callable[[], object], device: torch.device | int) -> None:
    """Queue work on the current stream of a device. An `IndexError` breaks the device as a failed assertion of a kernel
    does, another exception as an illegal access does."""
    if error := runtime().last_error():  # as torch checks after its launches
        raise torch.AcceleratorError(f"CUDA error: {error}")
    index = device if isinstance(device, int) else device.index
    key = next(_keys)

    def run(_: Any) -> None:
        collects = gc.isenabled()
        gc.disable()  # it would free memory of the device while the runtime is busy
        try:
            with _disable_current_modes(), torch.inference_mode(False), torch.no_grad(), _seeded_by_itself():
                work()
        except Exception as exception:
            failures.append(traceback.format_exc())
            runtime().break_device(index, ASSERT if isinstance(exception, IndexError) else ILLEGAL_ADDRESS)
        finally:
            _waiting_to_run.pop(key, None)
            if collects:
                gc.enable()

    _waiting_to_run[key] = queued = WORK(run)
    with torch.cuda.device(index):  # the runtime's default stream is that of the current device
        if error := runtime().enqueue(torch.cuda.current_stream(index).cuda_stream, queued):
            _waiting_to_run.pop(key, None)
            runtime().last_error()
            raise torch.AcceleratorError(f"CUDA error: {error}")


@contextlib.contextmanager
def _seeded_by_itself() -> Iterator[None]:
    """Restore the state of the CPU's generator on exit."""
    state = torch.default_generator.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(state)


class Operations(TorchDispatchMode):
    """A mode that queues operations, in the thread that enters it.

    Attributes:
        note_wait: called with the name of each operation that makes the host wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self.note_wait: Callable[[str], object] = lambda name: None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_traceable_wrapper_subclass, tree_leaves((args, kwargs)))):
            return NotImplemented  # a jagged tensor's inner tensors come here
        kwargs = dict(kwargs or {})
        name, leaves = func._schema.name, tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        target = kwargs.get("device")
        target = None if target is None else torch.device(target)
        devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
        to_device = target is not None and target.type == "cuda"
        if not devices and not to_device:
            return func(*args, **kwargs)
        if func.namespace == "aten" and _is_composite(func.name()):
            with self:  # without gradients, composite operations come here too
                return func.decompose(*args, **kwargs)
        if func.namespace == "prim" or func.is_view or name in NATIVE:
            return self._native(name, func(*args, **kwargs))
        if any(tensor.layout != torch.strided for tensor in tensors):
            return func(*args, **kwargs) if name == "aten::_to_copy" else self._of_sparse(func, args, kwargs)
        if name == "aten::_to_copy":
            return self._converted(args[0], kwargs)
        if name == "aten::copy_":
            return self._copy(*args, **kwargs)
        if len(devices) > 1 or (name not in TAKES_OF_CPU and any(not is_on_device(t) and t.dim() for t in tensors)):
            names = sorted({str(tensor.device) for tensor in tensors})
            raise RuntimeError(f"Expected all tensors to be on the same device, but found {', '.join(names)} in {name}")
        device = next(iter(devices)) if devices else target
        assert device is not None
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        return self._computed(func, name, args, kwargs, device)

    def _native(self, name: str, result: Any) -> Any:
        is_new = name in FRESH and is_on_device(result) and result.layout == torch.strided
        if is_new and (nbytes := result.untyped_storage().nbytes()):
            # The previous contents may be right by chance, as the same batch of an earlier epoch.
            with torch.cuda.device(result.device):
                stream = torch.cuda.current_stream().cuda_stream
                runtime().fill(result.untyped_storage().data_ptr(), nbytes, stream)
        return result

    # -- copies --------------------------------------------------------------------------------------------------------

    def _converted(self, source: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        """Compute ``aten::_to_copy``."""
        pinned, non_blocking = options.pop("pin_memory", None), options.pop("non_blocking", False)
        where = options.pop("device", None) or source.device
        with _disable_current_modes():
            like = torch.ops.aten._to_copy(
                torch.empty_strided(source.size(), source.stride(), dtype=source.dtype, device="meta"), **options
            )
        with self:
            target = torch.empty_strided(
                like.size(),
                like.stride(),
                dtype=like.dtype,
                device=where,
                pin_memory=bool(pinned or (where.type == "cpu" and non_blocking)),
            )
            return target.copy_(source, non_blocking=non_blocking)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        """Compute ``target.copy_(source)`` in torch's own steps; different dtypes and layouts are converted on the same
        side as by torch."""
        if target.device == source.device:
            return self._computed(torch.ops.aten.copy_.default, "aten::copy_", (target, source), {}, target.device)
        is_alike = target.dtype == source.dtype and target.shape == source.shape and target.stride() == source.stride()
        if is_alike and _is_dense(target):
            return torch.ops.aten.copy_.default(target, source, non_blocking)
        with self:
            if target.device.type == "cuda" or non_blocking:
                is_dense, dtype = target.is_contiguous(), target.dtype
                dense = target if is_dense else torch.empty(target.shape, dtype=dtype, device=target.device)
                converted = source.to(target.dtype).expand_as(target).contiguous()
            else:
                is_dense = target.is_contiguous() and target.dtype == source.dtype
                dense = target if is_dense else torch.empty(target.shape, dtype=source.dtype, device=target.device)
                converted = source.expand_as(target).contiguous()
            dense.copy_(converted, non_blocking=non_blocking)
            if dense is not target:
                target.copy_(dense, non_blocking=non_blocking)
        return target

    def _of_sparse(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Compute an operation on tensors of other layouts on the CPU, which waits; no test needs more."""

        def moved(leaf: Any, to: str) -> Any:
            return leaf.to(to) if isinstance(leaf, torch.Tensor) else leaf

        with self:
            positional, named = tree_map(
                lambda leaf: moved(leaf, "cpu") if is_on_device(leaf) else leaf, (args, kwargs)
            )
            return tree_map(lambda leaf: moved(leaf, "cuda"), func(*positional, **named))

    # -- work ----------------------------------------------------------------------------------------------------------

    def _computed(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], device: torch.device) -> Any:
        """Queue an operation, or wait for the device and compute it."""
        kwargs = {key: CPU if key == "device" and value is not None else value for key, value in kwargs.items()}
        generator = kwargs.pop("generator", None)
        seed = _drawn_seed(generator, device) if torch.Tag.nondeterministic_seeded in func.tags else None
        originals: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        shapes = self._shapes(func, name, args, kwargs, originals)
        if shapes is NotImplemented:
            return self._waited(func, name, args, kwargs, device, seed)

        places: dict[int, Memory] = {}

        def place(leaf: Any) -> Any:
            return places.setdefault(id(leaf), Memory(leaf)) if is_on_device(leaf) else leaf

        placed = tree_map(place, (args, kwargs))
        outputs: list[Memory | None] = []  # None for an input

        def allocated(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if id(leaf) in originals:
                outputs.append(None)
                return originals[id(leaf)][1]
            output = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=device)
            outputs.append(Memory(output))
            return output

        with _disable_current_modes():
            result = tree_map(allocated, shapes)

        def work() -> None:
            if seed is not None:
                torch.manual_seed(seed)
            positional, named = tree_map(lambda leaf: leaf.tensor() if isinstance(leaf, Memory) else leaf, placed)
            output = [leaf for leaf in tree_leaves(func(*positional, **named)) if isinstance(leaf, torch.Tensor)]
            for place, value in zip(outputs, output, strict=True):
                if place is not None:
                    place.tensor().copy_(value)

        enqueue(work, device)
        return result

    def _shapes(self, func: Any, name: str, args: Any, kwargs: Any, originals: Any) -> Any:
        """Return the outputs on torch's meta device; `NotImplemented` if they depend on values. `originals` receives
        the stand-in of each input and the input, by the id of the stand-in."""
        if name in ("aten::_local_scalar_dense", "aten::equal"):
            return NotImplemented
        if name in TAKES_OF_CPU:
            of_cpu = [t for t in tree_leaves(args[1]) if isinstance(t, torch.Tensor) and not is_on_device(t)]
            if of_cpu:
                return NotImplemented
        stand_ins: dict[int, torch.Tensor] = {}

        def meta(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return torch.device("meta") if isinstance(leaf, torch.device) else leaf
            if id(leaf) not in stand_ins:
                stand_in = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")
                stand_ins[id(leaf)] = stand_in
                originals[id(stand_in)] = stand_in, leaf
            return stand_ins[id(leaf)]

        with _disable_current_modes():
            positional, named = tree_map(meta, (args, kwargs))
            if "device" in named:
                named["device"] = torch.device("meta")
            try:
                shapes = func(*positional, **named)
            except (RuntimeError, NotImplementedError):
                if name not in WAITING:
                    raise
                return NotImplemented
        return shapes

    def _waited(self, func: Any, name: str, args: Any, kwargs: Any, device: torch.device, seed: int | None) -> Any:
        _report_wait(name)
        self.note_wait(name)
        with _disable_current_modes():
            torch.cuda.synchronize(device)
            lowered: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

            def lower(leaf: Any) -> Any:
                return lowered.setdefault(id(leaf), (leaf, Memory(leaf).tensor()))[1] if is_on_device(leaf) else leaf

            positional, named = tree_map(lower, (args, kwargs))
            with _seeded_by_itself():
                if seed is not None:
                    torch.manual_seed(seed)
                results = func(*positional, **named)
            originals = {id(host): original for original, host in lowered.values()}

            def raised(leaf: Any) -> Any:
                if not isinstance(leaf, torch.Tensor) or id(leaf) in originals:
                    return originals.get(id(leaf), leaf)
                output = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=device)
                Memory(output).tensor().copy_(leaf)
                return output

            return tree_map(raised, results)


@cache
def _is_composite(name: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements are contiguous in memory, in any order."""
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True))
    return tensor.numel() in (0, extent)


def _report_wait(name: str) -> None:
    """Warn or raise as torch does before it waits."""
    mode = torch.cuda.get_sync_debug_mode()
    text = f"called a synchronizing CUDA operation: {name}"
    if mode == 2:
        raise RuntimeError(text)
    if mode == 1:
        warnings.warn(text, stacklevel=2)


def _drawn_seed(generator: torch.Generator | None, device: torch.device) -> int:
    """Return the seed of one operation, from the state of a device's generator, which advances."""
    device_generator = torch.cuda.default_generators[device.index] if generator is None else generator
    offset = device_generator.get_offset()
    device_generator.set_offset(offset + 4)
    return (device_generator.initial_seed() * 0x9E3779B97F4A7C15 + offset) % 2**63
