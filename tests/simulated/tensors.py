"""Tensors of the simulated device, and torch's operations on them.

A `DeviceTensor` is a view of a block of the simulated device's memory. In Python it is on ``cuda:…``; for torch's C++
code it is on the device ``meta``, which builds without CUDA have. An operation allocates its results immediately (a
trial with zeros gives their shapes) and is queued on the current stream, with bare views of the memory that it uses.
Like a kernel, it does not keep any block from being freed. Views are created immediately. An operation that needs
values on the host makes the host wait, and the wait is recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from simulated.machine import Machine, Stream
from simulated.memory import BlockReference, DeviceMemory, HostMemory, at_address
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["DeviceTensor", "Operations"]

aten: Final = torch.ops.aten
META: Final = torch.device("meta")
CPU: Final = torch.device("cpu")

# Operations that take an index. A boolean index is converted to numbers first, for which the host waits.
INDEXING: Final = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)
DYNAMIC: Final = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


class DeviceTensor(torch.Tensor):
    """A tensor of the simulated device.

    Attributes:
        inner: a view of the block's bytes on the CPU, which does not keep the block.
        reference: keeps the block.
        number: the number of its device.
    """

    inner: torch.Tensor
    reference: BlockReference
    number: int
    operations: Operations

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def __new__(
        cls, inner: torch.Tensor, reference: BlockReference, number: int, operations: Operations
    ) -> DeviceTensor:
        tensor = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=META,
        )
        tensor.inner, tensor.reference, tensor.number, tensor.operations = inner, reference, number, operations
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensor = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DeviceTensor))
        return tensor.operations.call(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        return torch.device("cuda", self.number)

    @property
    def is_cuda(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return True

    @property
    def is_cpu(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return False

    @property
    def is_meta(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return False

    def get_device(self) -> int:
        return self.number

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    # C++ would convert Python's numbers to empty tensors on meta.

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(_with_tensors(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        # On CUDA a Python number becomes a tensor of the host first. Copying it to one element, or by a list of
        # indices, makes the host wait.
        is_number = isinstance(value, bool | int | float)
        super().__setitem__(_with_tensors(index), torch.tensor(value, dtype=self.dtype) if is_number else value)

    def new_tensor(self, data: Any, *, dtype: Any = None, **options: Any) -> torch.Tensor:
        return torch.tensor(data, dtype=dtype or self.dtype).to(self.device)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError(
                "can't convert a tensor of a device to numpy; use Tensor.cpu() to copy it to the host first"
            )
        return self.cpu().numpy()

    def record_stream(self, s: Any) -> None:
        if s is not self.reference.block.stream:
            self.reference.block.users.add(s)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype}, {self.device})"


class Operations(TorchDispatchMode):
    """The mode that replaces torch's operations in each thread that uses the device."""

    def __init__(self, machine: Machine, memory: DeviceMemory, host: HostMemory) -> None:
        super().__init__()
        self.machine = machine
        self.memory = memory
        self.host = host
        self._entered = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler, for seconds

    def __enter__(self) -> Operations:
        with self.machine.lock:
            self._entered += 1
            torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(…, device=…) makes its copy where this sees it
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        with self.machine.lock:
            self._entered -= 1
            torch._C._set_only_lift_cpu_tensors(self._entered > 0)  # a flag of the process, not of the thread

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.call(func, args, kwargs or {})

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run or queue an operation."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        device_tensors = [tensor for tensor in tensors if isinstance(tensor, DeviceTensor)]
        assert len(device_tensors) == sum(tensor.is_meta or type(tensor) is DeviceTensor for tensor in tensors), func
        device = kwargs.get("device")
        on_device = device is not None and device.type in ("cuda", "meta")
        if not device_tensors and not on_device:
            return self._on_host(func, args, kwargs)
        numbers = {tensor.number for tensor in device_tensors}
        assert len(numbers) <= 1, f"{func} was called with tensors of several devices"
        if numbers:
            number = numbers.pop()
        else:
            number = self.machine.current_device if device is None or device.index is None else device.index
        stream = self.machine.current_stream(number)
        with torch.inference_mode(False):
            if func is aten._to_copy.default and not (device_tensors and (device is None or on_device)):
                return self._copy_between(args[0], kwargs, number, stream)
            if func is aten.copy_.default and len(device_tensors) == 1:
                return self._copy(
                    args[0], args[1], (len(args) > 2 and args[2]) or kwargs.get("non_blocking", False), stream
                )
            if func.is_view:
                return self._view(func, args, kwargs, device_tensors[0])
            if func in INDEXING:  # the host's indices and number are copied to the device first
                indices = [self._indices(index, number, stream) for index in args[1]]
                later_args = args[2:]
                if later_args and not self._fills(args):
                    later_args = (self._indices(later_args[0], number, stream), *later_args[1:])
                args = (args[0], indices, *later_args)
            if self._needs_numbers(func, args, kwargs):
                return self._run_waiting(func, args, kwargs, number, stream)
            return self._queue(func, args, kwargs, number, stream)

    # -- memory -------------------------------------------------------------------------------------------------------

    def empty(self, like: torch.Tensor, number: int, stream: Stream) -> DeviceTensor:
        """Allocate a tensor on the device with the shape, strides and dtype of another."""
        nbytes = _extent(like)
        reference = self.memory.allocate(nbytes, stream)
        raw = reference.block.raw[:nbytes]
        return DeviceTensor(torch.as_strided(raw.view(like.dtype), like.shape, like.stride()), reference, number, self)

    def wait(self, what: str, stream: Stream) -> None:
        """Let the host wait for a stream."""
        self.machine.wait(what, self.machine.record(stream))

    # -- kinds of operations ------------------------------------------------------------------------------------------

    def _on_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation of the host, whose page-locked memory is the model's."""
        if func is aten.is_pinned.default:
            return self.host.is_locked(args[0].data_ptr(), args[0].nbytes)
        if func is aten._pin_memory.default or kwargs.get("pin_memory"):
            source = args[0] if func is aten._pin_memory.default else func(*args, **{**kwargs, "pin_memory": False})
            pinned = self.host.allocate(source.nbytes).view(source.dtype).view(source.shape)
            return pinned if func is aten.empty.memory_format else pinned.copy_(source)
        return func(*args, **kwargs)

    def _copy_between(self, source: torch.Tensor, kwargs: dict[str, Any], number: int, stream: Stream) -> torch.Tensor:
        """Copy a tensor to new memory of the host or the device."""
        dtype, non_blocking = kwargs.get("dtype") or source.dtype, bool(kwargs.get("non_blocking"))
        if not isinstance(source, DeviceTensor):
            like = torch.empty_like(
                source, dtype=dtype, memory_format=kwargs.get("memory_format") or torch.preserve_format
            )
            copy = self.empty(like, number, stream)
            return self._copy(copy, source, non_blocking, stream)
        copy = torch.empty_like(source.inner, dtype=dtype)
        self.wait("copy to the host", stream)
        return copy.copy_(source.inner)

    def _indices(self, index: torch.Tensor | None, number: int, stream: Stream) -> torch.Tensor | None:
        is_on_host = index is not None and not isinstance(index, DeviceTensor)
        return self._copy_between(index, {}, number, stream) if is_on_host else index  # pyright: ignore[reportArgumentType]

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool, stream: Stream) -> torch.Tensor:
        """Copy between host and device. Page-locked memory of an asynchronous copy is read when the copy runs; for
        other copies the host waits."""
        host, device = (target, source) if isinstance(source, DeviceTensor) else (source, target)
        assert isinstance(device, DeviceTensor)
        inner = device.inner
        if host is target:
            self.wait("copy to the host", stream)
            target.copy_(inner)
            return target
        nbytes, address = _extent(host), host.data_ptr()
        shape, strides, dtype = host.shape, host.stride(), host.dtype
        if not (non_blocking and (nbytes == 0 or self.host.is_locked(address, nbytes))):
            snapshot = host.detach().clone()
            self.machine.issue(stream, lambda: inner.copy_(snapshot))
            self.wait("copy of pageable memory" if non_blocking else "blocking copy", stream)
            return target

        def copy() -> None:
            if nbytes == 0:
                return
            if not self.host.is_locked(address, nbytes):
                raise AssertionError("a copy read memory of the host that is no longer page-locked")
            inner.copy_(at_address(address, nbytes).view(dtype).as_strided(shape, strides))

        self.machine.issue(stream, copy)
        return target

    def _view(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], base: DeviceTensor) -> Any:
        views = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))

        def on_device(view: Any) -> Any:
            return DeviceTensor(view, base.reference, base.number, self) if isinstance(view, torch.Tensor) else view

        return tree_map(on_device, views)

    def _run_waiting(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], number: int, stream: Stream
    ) -> Any:
        """Run an operation whose result, or its shape, the host needs."""
        self.wait(str(func), stream)
        results = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
        written_tensors = written_arguments(func, args, kwargs)
        if written_tensors:
            return written_tensors[0]

        def to_device(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            on_device = self.empty(leaf, number, stream)
            inner = on_device.inner
            self.machine.issue(stream, lambda: inner.copy_(leaf))
            return on_device

        return tree_map(to_device, results)

    def _queue(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], number: int, stream: Stream) -> Any:
        for tensor in (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)):
            is_on_host = not isinstance(tensor, DeviceTensor)
            assert not is_on_host or tensor.dim() == 0, f"{func} got tensors of the CPU and of the device"
        inner_args, inner_kwargs = tree_map(_frozen, args), tree_map(_frozen, kwargs)
        written_tensors = written_arguments(func, args, kwargs)
        if written_tensors and torch.Tag.nondeterministic_seeded in func.tags:
            raise NotImplementedError(f"{func} draws random numbers in place; write it with a new tensor")
        if written_tensors:
            results = [tensor.inner for tensor in written_tensors]
            shapes = [tensor.shape for tensor in written_tensors]

            def change() -> None:
                func(*inner_args, **inner_kwargs)
                assert [inner.shape for inner in results] == shapes, f"{func} changed a shape in place"

            self.machine.issue(stream, change)
            return written_tensors[0] if len(written_tensors) == 1 else tuple(written_tensors)
        shaped = try_with_zeros(func, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:  # drawn now, from the current state of the host's generator
            func, inner_args, inner_kwargs = torch.clone, (shaped,), {}
        outputs = tree_map(
            lambda leaf: self.empty(leaf, number, stream) if isinstance(leaf, torch.Tensor) else leaf, shaped
        )
        targets = [leaf.inner for leaf in tree_leaves(outputs) if isinstance(leaf, DeviceTensor)]

        def compute() -> None:
            computed = [
                leaf for leaf in tree_leaves(func(*inner_args, **inner_kwargs)) if isinstance(leaf, torch.Tensor)
            ]
            for target, result in zip(targets, computed, strict=True):
                target.copy_(result)

        self.machine.issue(stream, compute)
        return outputs

    def launch(self, kernel: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Queue a kernel of another library."""
        device_tensors = [leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, DeviceTensor)]
        stream = self.machine.current_stream(device_tensors[0].number)
        inner_args = [arg.inner if isinstance(arg, DeviceTensor) else arg for arg in args]
        inner_kwargs = {name: arg.inner if isinstance(arg, DeviceTensor) else arg for name, arg in kwargs.items()}
        self.machine.issue(stream, lambda: kernel(*inner_args, **inner_kwargs))

    @staticmethod
    def _fills(args: tuple[Any, ...]) -> bool:
        """Return whether an assignment by one mask is `masked_fill_`, which takes the host's number unchanged."""
        return len(args[1]) == 1 and len(_masks(args)) == 1 and args[2].numel() == 1

    @staticmethod
    def _needs_numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether the host has to wait for an operation."""
        if func in INDEXING:
            return bool(_masks(args)) and not (func is not aten.index.Tensor and Operations._fills(args))
        if func is aten.repeat_interleave.Tensor:
            return kwargs.get("output_size") is None
        return any(tag in func.tags for tag in DYNAMIC)


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to the leaves of an operation's arguments or results, like torch's `tree_map` but faster."""
    if isinstance(tree, dict):
        return {name: tree_map(function, value) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [tree_map(function, value) for value in tree] if isinstance(tree, list) else _as_tuple(function, tree)
    return function(tree)


def _as_tuple(function: Callable[[Any], Any], tree: tuple[Any, ...]) -> tuple[Any, ...]:
    """Map a tuple, which may be one of torch's named tuples."""
    values = [tree_map(function, value) for value in tree]
    return tuple(values) if type(tree) is tuple else type(tree)(values)  # pyright: ignore[reportCallIssue]


def tree_leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    if isinstance(tree, list | tuple):
        return [leaf for value in tree for leaf in tree_leaves(value)]
    return [tree]


def _masks(args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return the masks among the indices of an operation's arguments."""
    return [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]


def _with_tensors(index: Any) -> Any:
    """Convert the lists and arrays of an index to tensors."""
    parts = index if isinstance(index, tuple) else (index,)
    tensors = tuple(torch.as_tensor(part) if isinstance(part, list | np.ndarray) else part for part in parts)
    return tensors if isinstance(index, tuple) else tensors[0]


def _inner(leaf: Any) -> Any:
    if isinstance(leaf, DeviceTensor):
        return leaf.inner
    return CPU if isinstance(leaf, torch.device) else leaf


def _frozen(leaf: Any) -> Any:
    """Do the same as `_inner`, and copy tensors of the host, whose numbers are passed by value."""
    is_on_host = isinstance(leaf, torch.Tensor) and not isinstance(leaf, DeviceTensor)
    return leaf.detach().clone() if is_on_host else _inner(leaf)


def try_with_zeros(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return results with the shapes, strides and dtypes of an operation. It is tried with zeros, which are valid
    indices, and, if it refuses zeros, with ones. torch's computation on meta takes longer than the small images of
    tests."""
    for number in (0, 1):

        def stand_in(leaf: Any, number: int = number) -> Any:
            if isinstance(leaf, DeviceTensor):
                like = leaf.inner
                return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).fill_(number)
            return CPU if isinstance(leaf, torch.device) else leaf

        try:
            return func(*tree_map(stand_in, args), **tree_map(stand_in, kwargs))
        except RuntimeError:
            if number:
                raise
    return None


def _extent(tensor: torch.Tensor) -> int:
    """Return the number of bytes from the first element to the last."""
    if tensor.numel() == 0:
        return 0
    steps = (step * (length - 1) for step, length in zip(tensor.stride(), tensor.shape, strict=True))
    return (1 + sum(steps)) * tensor.element_size()


def written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[DeviceTensor]:
    """Return the arguments that an operation writes to."""
    if not func._schema.is_mutable:
        return []
    written = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            written += [leaf for leaf in tree_leaves(value) if isinstance(leaf, DeviceTensor)]
    return written
