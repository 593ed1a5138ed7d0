"""A faster Triton interpreter, the stand-in for compiled kernels where there is no GPU.

- At each call of a device function, Triton scans the entire language for names to patch, although the calling kernel
  has patched them already: 40% of the time of gpuload's kernels. Here a language is patched once per launch.
- At each addition and multiplication, Triton checks integers for overflow, but reports it only if `debug` is set: 37%
  of the remaining time. Compiled kernels do not check.
- The arrays are small, so most of the remaining time went into computing types, shapes and result types again and
  again. Here each of them is computed once.

This relies on private names of Triton 3.6 and 3.8. In versions that lack these names, the interpreter is not changed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

__all__ = ["speed_up_interpreter"]


@cache
def speed_up_interpreter() -> None:
    """Make the interpreter of this process faster; kernels compute the same results."""
    from triton.runtime import interpreter

    names = ("_patch_lang", "_LangPatchScope", "GridExecutor", "interpreter_builder", "tl")
    if not all(hasattr(interpreter, name) for name in names):
        return
    patch, run = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[int] = set()  # ids of the modules patched by the current launch: `tl`, `tl.core`, or both

    @cache
    def languages(function: Any) -> frozenset[int]:
        return frozenset({*map(id, function.__globals__.values())} & {id(interpreter.tl), id(interpreter.tl.core)})

    def patch_once(function: Any) -> Any:
        if languages(function) <= patched:
            return interpreter._LangPatchScope()  # an empty scope: nothing to patch or restore
        patched.update(languages(function))
        return patch(function)

    def launch(self: Any, *arguments: Any, **options: Any) -> None:
        patched.clear()
        try:
            run(self, *arguments, **options)
        finally:
            patched.clear()  # run() has restored the language

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    _cache_types(interpreter)


def _cache_types(interpreter: Any) -> None:
    """Cache block types, the shapes of tensors, and result types."""
    import triton

    if not triton.__version__.startswith(("3.6.", "3.8.")):  # the caches rely on how these versions build types
        return
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    original_block, original_tensor = core.block_type.__init__, core.tensor.__init__
    original_broadcast, original_dtype = TritonSemantic.broadcast_impl_value, interpreter._get_np_dtype
    original_result, results = TritonSemantic.computation_type_impl, {}
    block_attributes: dict[Any, dict[str, Any]] = {}  # attributes of block types, which nothing modifies

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        space = getattr(element_ty, "address_space", None)  # only of pointers; `name` covers everything else
        key = (element_ty.name, space, *(getattr(length, "value", length) for length in shape))
        if key not in block_attributes:
            original_block(self, element_ty, shape)
            block_attributes[key] = self.__dict__
        self.__dict__ = block_attributes[key]

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        try:
            self.shape, self.numel = type.cached_shape_numel
        except AttributeError:
            original_tensor(self, handle, type)
            type.cached_shape_numel = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block() and left.shape.values == right.shape.values:
            return lhs, rhs
        return original_broadcast(self, lhs, rhs)

    def compute_result_type(self: Any, *types: Any) -> Any:
        if types not in results:
            results[types] = original_result(self, *types)
        return results[types]

    cached_dtype = cache(original_dtype)

    def find_np_dtype(type_: Any) -> Any:
        if isinstance(type_, core.block_type):
            type_ = type_.element_ty
        return original_dtype(type_) if isinstance(type_, core.pointer_type) else cached_dtype(type_)

    core.block_type.__init__, core.tensor.__init__ = init_block, init_tensor
    TritonSemantic.broadcast_impl_value = broadcast
    TritonSemantic.computation_type_impl = compute_result_type  # pyright: ignore[reportAttributeAccessIssue]
    interpreter._get_np_dtype = find_np_dtype
