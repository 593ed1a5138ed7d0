"""The fused kernels alone: the device's work for a batch, without draws and without preparation on the host.

The parameters of a few batches, used in turn, are prepared before the clock starts; all batches share one output
tensor. The kernels are launched as a stage launches them, and replayed as a CUDA graph, which excludes the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.augmentation.cases import Case
from benchmarks.augmentation.contenders import NO_KERNELS, Contender, Contenders, Ours
from benchmarks.augmentation.photographs import Photographs
from benchmarks.augmentation.tables import KERNELS, KERNELS_REPLAYED
from gpuload.stage.finish import Finish
from gpuload.transforms.program.ops import Erase

BATCHES = 4  # batches with prepared parameters


def kernels_alone(case: Case, photographs: Photographs) -> Contenders:
    """Build the contenders of a case's kernels: launched and replayed."""
    if photographs.device.type != "cuda":
        return {KERNELS: NO_KERNELS, KERNELS_REPLAYED: NO_KERNELS}
    launch = launcher(case, photographs)
    graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def replay(turn: int) -> None:
        number = turn % BATCHES
        if number not in graphs:
            launch(number)  # compile before recording
            torch.cuda.synchronize()
            graphs[number] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[number]):
                launch(number)
        graphs[number].replay()

    return {KERNELS: Contender(launch), KERNELS_REPLAYED: Contender(replay)}


def launcher(case: Case, photographs: Photographs) -> Callable[[int], torch.Tensor]:
    """Make a function that launches the kernels for the batch of turn n and returns the batch."""
    from gpuload.stage.fused.runner import FusedRunner

    ours = Ours(case, photographs)
    images = ours.images
    runner = FusedRunner(Finish.of(ours.chain.lines[0].transforms, case.dtype), photographs.device)
    outputs: torch.Tensor | None = None
    prepared: list[Any] = []
    for turn in range(BATCHES):
        program, final_program = ours.program(turn).split()
        if outputs is None:
            outputs = torch.empty(
                (len(images), 3, *program.results_hw[0].tolist()),
                dtype=getattr(torch, case.dtype),
                device=photographs.device,
                memory_format=torch.channels_last if case.channels_last else torch.contiguous_format,
            )
        final_records = () if final_program is None else final_program.records
        erasing = [record for record in final_records if isinstance(record, Erase)]
        assert len(erasing) == len(final_records), "the kernels do nothing else to finished images"
        prepared.append(runner.prepare(images, program, program.windows_tlhw, outputs, erasing))
    assert outputs is not None
    batch = outputs

    def launch(turn: int) -> torch.Tensor:
        plan, arrays = prepared[turn % BATCHES]
        runner.launch(plan, arrays, images.pixels, batch)
        return batch

    return launch
