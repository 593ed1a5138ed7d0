"""Triton's interpreter, which takes the place of compiled kernels where there is no GPU, in a fraction of its time.

- At each call of a device function it looks through the whole language for what to patch, though the kernel that calls
  has patched it already: 40% of the time of gpuload's kernels. Here a language is patched once for each launch.
- At each addition and product it looks for integers that overflow, and tells nobody, unless `debug` is set: 37% of what
  is left. Compiled kernels do not.
- The arrays are small: most of what is left went into describing each again, its type, its shape and what comes of two
  of them. Each is described once.

Private names of Triton 3.6 and 3.8: with a version that has others, it stays as slow as it is.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

__all__ = ["hasten"]


@cache
def hasten() -> None:
    """Make the interpreter of this process faster; kernels compute the same."""
    from triton.runtime import interpreter

    names = ("_patch_lang", "_LangPatchScope", "GridExecutor", "interpreter_builder", "tl")
    if not all(hasattr(interpreter, name) for name in names):
        return
    patch, run = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[int] = set()  # what the launch that runs has patched: `tl`, `tl.core`, or both

    @cache
    def languages(function: Any) -> frozenset[int]:
        return frozenset({*map(id, function.__globals__.values())} & {id(interpreter.tl), id(interpreter.tl.core)})

    def patch_once(function: Any) -> Any:
        if languages(function) <= patched:
            return interpreter._LangPatchScope()  # of no patches
        patched.update(languages(function))
        return patch(function)

    def launch(self: Any, *arguments: Any, **named: Any) -> None:
        patched.clear()
        try:
            run(self, *arguments, **named)
        finally:
            patched.clear()  # it has put the language back

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    _describe_once(interpreter)


def _describe_once(interpreter: Any) -> None:
    """Keep the types of blocks, what tensors say of their shapes, and the types of results."""
    import triton

    if not triton.__version__.startswith(("3.6.", "3.8.")):  # what is kept depends on how it is made
        return
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    whole_block, whole_tensor = core.block_type.__init__, core.tensor.__init__
    whole_broadcast, whole_dtype = TritonSemantic.broadcast_impl_value, interpreter._get_np_dtype
    whole_result, results = TritonSemantic.computation_type_impl, {}
    known: dict[Any, dict[str, Any]] = {}  # the attributes of a type of blocks, which no one changes

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        space = getattr(element_ty, "address_space", None)  # of a pointer, whose name says the rest
        key = (element_ty.name, space, *(getattr(length, "value", length) for length in shape))
        if key not in known:
            whole_block(self, element_ty, shape)
            known[key] = self.__dict__
        self.__dict__ = known[key]

    def tensor(self: Any, handle: Any, type: Any) -> None:
        try:
            self.shape, self.numel = type.said_by_tensors
        except AttributeError:
            whole_tensor(self, handle, type)
            type.said_by_tensors = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block() and left.shape.values == right.shape.values:
            return lhs, rhs
        return whole_broadcast(self, lhs, rhs)

    def result(self: Any, *types: Any) -> Any:
        if types not in results:
            results[types] = whole_result(self, *types)
        return results[types]

    kept_dtype = cache(whole_dtype)

    def np_dtype(type_: Any) -> Any:
        if isinstance(type_, core.block_type):
            type_ = type_.element_ty
        return whole_dtype(type_) if isinstance(type_, core.pointer_type) else kept_dtype(type_)

    core.block_type.__init__, core.tensor.__init__ = block, tensor
    TritonSemantic.broadcast_impl_value = broadcast
    TritonSemantic.computation_type_impl = result  # pyright: ignore[reportAttributeAccessIssue]
    interpreter._get_np_dtype = np_dtype
