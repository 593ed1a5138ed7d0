"""Tensors of the simulated device, and what torch's operations on them do.

A `DeviceTensor` is a view of a block of the simulated device's memory. Python sees it on ``cuda:…``; to torch's C++ it
is on the device ``meta``, which a build without CUDA has. An operation makes its results' memory at once, by their
shapes (a trial with zeros tells them), and is queued on the current stream with bare views of all memory that it uses:
it keeps no block from being freed, as a kernel does not. Views are made at once, as they move nothing. What needs
numbers of the device on the host makes the host wait, and that is noted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from simulated.machine import Machine, Stream
from simulated.memory import DeviceMemory, Held, HostMemory, at_address
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["DeviceTensor", "Operations"]

aten: Final = torch.ops.aten
META: Final = torch.device("meta")
CPU: Final = torch.device("cpu")

# Operations that take an index; one of booleans is made numbers first, for which the host waits.
INDEXING: Final = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)
DYNAMIC: Final = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


class DeviceTensor(torch.Tensor):
    """A tensor of the simulated device.

    Attributes:
        inner: a view of the block's bytes, on the CPU, which keeps no block.
        held: keeps the block.
        number: of its device.
    """

    inner: torch.Tensor
    held: Held
    number: int
    operations: Operations

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def __new__(cls, inner: torch.Tensor, held: Held, number: int, operations: Operations) -> DeviceTensor:
        tensor = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=META,
        )
        tensor.inner, tensor.held, tensor.number, tensor.operations = inner, held, number, operations
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

    # In C++, what these make of Python's numbers would be on meta, and empty.

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(_with_tensors(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        # On CUDA a Python number is a tensor of the host first: copied to a single element, or by a list of indices, it
        # makes the host wait.
        number = isinstance(value, bool | int | float)
        super().__setitem__(_with_tensors(index), torch.tensor(value, dtype=self.dtype) if number else value)

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
        if s is not self.held.block.stream:
            self.held.block.users.add(s)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype}, {self.device})"


class Operations(TorchDispatchMode):
    """What torch's operations do while it is active; in each thread that uses the device."""

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
            torch._C._set_only_lift_cpu_tensors(self._entered > 0)  # the flag is of the process, not of the thread

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.call(func, args, kwargs or {})

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do or queue an operation."""
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
                return self._between(args[0], kwargs, number, stream)
            if func is aten.copy_.default and len(device_tensors) == 1:
                return self._copied(
                    args[0], args[1], (len(args) > 2 and args[2]) or kwargs.get("non_blocking", False), stream
                )
            if func.is_view:
                return self._viewed(func, args, kwargs, device_tensors[0])
            if func in INDEXING:  # the host's indices and number are brought to the device first
                indices = [self._indices(index, number, stream) for index in args[1]]
                later_args = args[2:]
                if later_args and not self._fills(args):
                    later_args = (self._indices(later_args[0], number, stream), *later_args[1:])
                args = (args[0], indices, *later_args)
            if self._needs_numbers(func, args, kwargs):
                return self._waited(func, args, kwargs, number, stream)
            return self._queued(func, args, kwargs, number, stream)

    # -- memory -------------------------------------------------------------------------------------------------------

    def empty(self, like: torch.Tensor, number: int, stream: Stream) -> DeviceTensor:
        """New memory on the device, of a shape, strides and dtype."""
        extent = (
            0 if like.numel() == 0 else 1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True))
        )
        held = self.memory.allocate(extent * like.element_size(), stream)
        raw = held.block.raw[: extent * like.element_size()]
        return DeviceTensor(torch.as_strided(raw.view(like.dtype), like.shape, like.stride()), held, number, self)

    def wait(self, what: str, stream: Stream) -> None:
        """The host waits for a stream."""
        self.machine.wait(what, self.machine.record(stream))

    # -- kinds of operations ------------------------------------------------------------------------------------------

    def _on_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The host's own; its page-locked memory is the model's."""
        if func is aten.is_pinned.default:
            return self.host.is_locked(args[0].data_ptr(), args[0].nbytes)
        if func is aten._pin_memory.default or kwargs.get("pin_memory"):
            source = args[0] if func is aten._pin_memory.default else func(*args, **{**kwargs, "pin_memory": False})
            pinned = self.host.allocate(source.nbytes).view(source.dtype).view(source.shape)
            return pinned if func is aten.empty.memory_format else pinned.copy_(source)
        return func(*args, **kwargs)

    def _between(self, source: torch.Tensor, kwargs: dict[str, Any], number: int, stream: Stream) -> torch.Tensor:
        """A copy in new memory, on the other side."""
        dtype, non_blocking = kwargs.get("dtype") or source.dtype, bool(kwargs.get("non_blocking"))
        if not isinstance(source, DeviceTensor):
            like = torch.empty_like(
                source, dtype=dtype, memory_format=kwargs.get("memory_format") or torch.preserve_format
            )
            copy = self.empty(like, number, stream)
            return self._copied(copy, source, non_blocking, stream)
        copy = torch.empty_like(source.inner, dtype=dtype)
        self.wait("copy to the host", stream)
        return copy.copy_(source.inner)

    def _indices(self, index: torch.Tensor | None, number: int, stream: Stream) -> torch.Tensor | None:
        host = index is not None and not isinstance(index, DeviceTensor)
        return self._between(index, {}, number, stream) if host else index  # pyright: ignore[reportArgumentType]

    def _copied(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool, stream: Stream) -> torch.Tensor:
        """A copy between host and device. The host's memory is read when the copy runs, if that is page-locked and the
        copy is asynchronous; else the host waits."""
        host, device = (target, source) if isinstance(source, DeviceTensor) else (source, target)
        assert isinstance(device, DeviceTensor)
        inner = device.inner
        if host is target:
            self.wait("copy to the host", stream)
            target.copy_(inner)
            return target
        extent = (
            0 if host.numel() == 0 else 1 + sum((n - 1) * s for n, s in zip(host.shape, host.stride(), strict=True))
        )
        nbytes, address = extent * host.element_size(), host.data_ptr()
        shape, strides, dtype = host.shape, host.stride(), host.dtype
        if not (non_blocking and (nbytes == 0 or self.host.is_locked(address, nbytes))):
            copied = host.detach().clone()
            self.machine.issue(stream, lambda: inner.copy_(copied))
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

    def _viewed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], of: DeviceTensor) -> Any:
        views = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
        return tree_map(
            lambda leaf: DeviceTensor(leaf, of.held, of.number, self) if isinstance(leaf, torch.Tensor) else leaf, views
        )

    def _waited(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], number: int, stream: Stream) -> Any:
        """An operation whose result or its shape the host has to know."""
        self.wait(str(func), stream)
        results = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
        written = _written(func, args, kwargs)
        if written:
            return written[0]

        def placed(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            on_device = self.empty(leaf, number, stream)
            inner = on_device.inner
            self.machine.issue(stream, lambda: inner.copy_(leaf))
            return on_device

        return tree_map(placed, results)

    def _queued(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], number: int, stream: Stream) -> Any:
        for tensor in (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)):
            alone = not isinstance(tensor, DeviceTensor)
            assert not alone or tensor.dim() == 0, f"{func} got a tensor of the CPU beside one of the device"
        inner_args, inner_kwargs = tree_map(_frozen, args), tree_map(_frozen, kwargs)
        written = _written(func, args, kwargs)
        if written and torch.Tag.nondeterministic_seeded in func.tags:
            raise NotImplementedError(f"{func} draws random numbers in place; write it with a new tensor")
        if written:
            results = [tensor.inner for tensor in written]
            shapes = [tensor.shape for tensor in written]

            def change() -> None:
                func(*inner_args, **inner_kwargs)
                assert [inner.shape for inner in results] == shapes, f"{func} changed a shape in place"

            self.machine.issue(stream, change)
            return written[0] if len(written) == 1 else tuple(written)
        shaped = _tried(func, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:  # drawn now, as the host's generator stands
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
        """Queue a kernel of another library's."""
        device_tensors = [leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, DeviceTensor)]
        stream = self.machine.current_stream(device_tensors[0].number)
        bare = [arg.inner if isinstance(arg, DeviceTensor) else arg for arg in args]
        named = {name: arg.inner if isinstance(arg, DeviceTensor) else arg for name, arg in kwargs.items()}
        self.machine.issue(stream, lambda: kernel(*bare, **named))

    @staticmethod
    def _fills(args: tuple[Any, ...]) -> bool:
        """Whether an assignment by one mask is `masked_fill_`, which takes the host's number as it is."""
        return len(args[1]) == 1 and len(_masks(args)) == 1 and args[2].numel() == 1

    @staticmethod
    def _needs_numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the host has to wait for an operation."""
        if func in INDEXING:
            return bool(_masks(args)) and not (func is not aten.index.Tensor and Operations._fills(args))
        if func is aten.repeat_interleave.Tensor:
            return kwargs.get("output_size") is None
        return any(tag in func.tags for tag in DYNAMIC)


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """As torch's, for the arguments and results of operations."""
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
    """The masks among the indices of an operation's arguments."""
    return [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]


def _with_tensors(index: Any) -> Any:
    """An index whose lists and arrays are tensors."""
    parts = index if isinstance(index, tuple) else (index,)
    tensors = tuple(torch.as_tensor(part) if isinstance(part, list | np.ndarray) else part for part in parts)
    return tensors if isinstance(index, tuple) else tensors[0]


def _inner(leaf: Any) -> Any:
    if isinstance(leaf, DeviceTensor):
        return leaf.inner
    return CPU if isinstance(leaf, torch.device) else leaf


def _frozen(leaf: Any) -> Any:
    """As `_inner`; the host's own numbers are passed by value."""
    is_on_host = isinstance(leaf, torch.Tensor) and not isinstance(leaf, DeviceTensor)
    return leaf.detach().clone() if is_on_host else _inner(leaf)


def _tried(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Results of an operation's shapes, strides and dtypes. It is tried with zeros, which are valid indices; if it does
    not take these, with ones. (torch's own computation on meta needs more time than the small images of tests.)"""
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
    """The bytes from its first number to its last."""
    if tensor.numel() == 0:
        return 0
    steps = (step * (length - 1) for step, length in zip(tensor.stride(), tensor.shape, strict=True))
    return (1 + sum(steps)) * tensor.element_size()


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[DeviceTensor]:
    """The arguments that an operation writes to."""
    if not func._schema.is_mutable:
        return []
    written = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            written += [leaf for leaf in tree_leaves(value) if isinstance(leaf, DeviceTensor)]
    return written
