"""Triton's kernels on fake devices: run by its interpreter when their stream reaches them, or compiled to Triton's
first representation and launched, but not run."""

from __future__ import annotations

import re
from typing import Any

import torch
from fakecuda.operations import Memory, enqueue, is_on_device
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["compile_without_ptxas", "queue_kernels"]


def queue_kernels() -> None:
    """Queue the interpreter's launches on the current stream of the current device."""
    from triton.runtime import interpreter

    run_now = interpreter.GridExecutor.__call__

    def launch(executor: Any, *args: Any, **named: Any) -> None:
        devices = {leaf.device for leaf in tree_leaves((args, named)) if is_on_device(leaf)}
        if not devices:
            run_now(executor, *args, **named)
            return
        current = torch.cuda.current_device()
        if devices != {torch.device("cuda", current)}:
            raise RuntimeError(f"a kernel is launched on cuda:{current} with memory of {', '.join(map(str, devices))}")
        placed = tree_map(lambda leaf: Memory(leaf) if is_on_device(leaf) else leaf, (args, named))

        def work() -> None:
            positional, named_arguments = tree_map(
                lambda leaf: leaf.tensor() if isinstance(leaf, Memory) else leaf, placed
            )
            run_now(executor, *positional, **named_arguments)

        enqueue(work, current)

    interpreter.GridExecutor.__call__ = launch


def compile_without_ptxas() -> None:
    """Stop Triton's compiler after its first representation. The result can be launched, and does nothing."""
    from triton.backends.nvidia.compiler import CUDABackend

    def add_stages(self: Any, stages: dict[str, Any], options: Any, language: Any) -> None:
        def cubin(source: Any, metadata: dict[str, Any]) -> bytes:
            function = re.search(r"tt\.func public @([\w]+)", str(source))
            assert function
            scratch = dict.fromkeys(("shared", "tmem_size", "global_scratch_size", "profile_scratch_size"), 0)
            aligned = dict.fromkeys(("global_scratch_align", "profile_scratch_align"), 1)
            metadata.update(scratch | aligned, num_warps=options.num_warps, name=function[1], tensordesc_meta=[])
            return b"none"

        stages["ttir"] = lambda source, metadata: source
        stages["cubin"] = cubin

    CUDABackend.add_stages = add_stages
