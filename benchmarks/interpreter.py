"""Triton's interpreter, which takes the place of compiled kernels where there is no GPU, in less than half of its time.

- At each call of a device function it looks through the whole language for what to patch, though the kernel that calls
  has patched it already: 40% of the time of gpuload's kernels. Here a language is patched once for each launch.
- At each addition and product it looks for integers that overflow, and tells nobody, unless `debug` is set: 37% of what
  is left. Compiled kernels do not.

Private names of Triton 3.6: with a version that has others, it stays as slow as it is.
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
