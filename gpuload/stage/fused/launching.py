"""The kernels that are launched for every batch.

Triton's own launch takes 240 µs of the host's time, of which starting the kernel takes 15: Triton makes a text of all
arguments to find the compiled variant, and compares each of the kernel's global constants (88 for `one_pass`) with its
value when the kernel was compiled. So a `BatchKernel` keeps the variants that Triton's launches return, and launches
them itself, as Triton's tutorial on persistent kernels does. This module runs in the stage's process.
"""

# Type checkers do not understand how kernels are launched.
# pyright: reportCallIssue=false

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
import triton

from gpuload.stage.fused.pixels import INTERPRETED

__all__ = ["batch_kernel"]

ALIGNED_BYTES: Final = 16  # Triton compiles separate variants for pointers to multiples of this number


class BatchKernel(triton.JITFunction):
    """A kernel whose arguments are pointers, followed by constants; launched like any other kernel of Triton."""

    def __init__(self, function: Callable[..., None], **options: Any) -> None:
        super().__init__(function, **options)
        self._variants: dict[tuple[Any, ...], Any] = {}

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, int], *tensors: torch.Tensor, **constants: object) -> None:
        """Launch the kernel on the current stream of the tensors' device, which is the current device. `constants` are
        the other arguments, and the options of the compiler."""
        pointers = [(tensor.dtype, tensor.data_ptr() % ALIGNED_BYTES) for tensor in tensors]
        key = (tensors[0].device, *pointers, *constants.items())
        if (variant := self._variants.get(key)) is None:
            self._variants[key] = self.run(*tensors, grid=grid, warmup=False, **constants)
        else:
            variant[*grid, 1](*tensors, *[constants[name] for name in self.arg_names[len(tensors) :]])


def batch_kernel(**options: object) -> Callable[[Callable[..., None]], Any]:
    """Return a decorator that makes a function a kernel, as `triton.jit` with these options does."""
    if INTERPRETED.value or torch.version.hip is not None:  # AMD's variants also depend on the sizes of buffers
        return triton.jit(**options)
    return partial(BatchKernel, **options)
