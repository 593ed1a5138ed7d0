"""Takes a chain through backends, and holds their results together: whole, and step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from chains.bounds import ANY, STEPS, bound
from chains.strategies import Example

from gpuload import transforms as T
from gpuload.stage import RaggedImages, compile_stage
from gpuload.stage.finish import Finish
from gpuload.transforms.base import Transform

__all__ = ["check_against_reference", "check_alone"]

ULPS = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
FLOAT = 1e-5  # of the numbers of finished images: sums of float32 in another order


def run(backend: str, chain: T.Chain, draws: T.Program, images: RaggedImages, dtype: str | None = None) -> list[Any]:
    """The results of a backend, C×H×W each; "batches" is the reference's runner of batches."""
    backend, runner = ("torch", "batched") if backend == "batches" else (backend, None)
    ragged = "list" if chain.mixing is None else "error"
    stage = compile_stage(chain, device="cpu", backend=backend, dtype=dtype, ragged=ragged, runner=runner)
    return list(stage(images, draws))


def check_against_reference(example: Example, backend: str) -> None:
    """The backend's results are the reference's, as far as `bounds` says."""
    steps, draws = STEPS[backend], example.draws
    images = _cut(example)
    levels, finishing = draws.split()
    allowed = [bound(steps, levels, row) for row in range(len(draws))]
    expected = run("torch", example.chain, draws, images, example.dtype)
    results = run(backend, example.chain, draws, images, example.dtype)
    _compare(example, expected, results, allowed, finishing, "the whole chain")
    transforms = example.chain.lines[0].transforms[: levels.late_from]
    if len(transforms) > 1 and not any(transform.output_state for transform in transforms[:-1]):
        _check_steps(example, backend, levels, transforms)


def check_alone(example: Example, backend: str) -> None:
    """Each image of the backend's results has the bits that it has alone, and the reference's size and dtype."""
    images = _cut(example)
    expected = run("torch", example.chain, example.draws, images, example.dtype)
    results = run(backend, example.chain, example.draws, images, example.dtype)
    for row, (result, expected_result) in enumerate(zip(results, expected, strict=True)):
        assert (result.shape, result.dtype) == (expected_result.shape, expected_result.dtype), f"image {row}"
        if example.chain.mixing is None:
            draws, image = (batch.take(np.array([row])) for batch in (example.draws, images))
            [alone] = run(backend, example.chain, draws, image, example.dtype)
            assert torch.equal(alone, result), f"image {row} is {(alone.double() - result.double()).abs().max():g} off"


def _cut(example: Example) -> RaggedImages:
    """The regions that a worker would decode."""
    images = RaggedImages.from_arrays(
        [
            np.ascontiguousarray(image[top : top + height, left : left + width])
            for image, (top, left, height, width) in zip(example.images, example.regions_tlhw.tolist(), strict=True)
        ]
    )
    images.table["size_hw"] = np.array([image.shape[:2] for image in example.images], np.int64)
    images.table["region_tlhw"] = example.regions_tlhw
    return images


def _check_steps(example: Example, backend: str, levels: T.Program, transforms: Sequence[Transform]) -> None:
    """Each transform alone, from what the reference gives it; and all that stand behind one that was not exact."""
    steps, images = STEPS[backend], example.images
    exact = True
    for number, transform in enumerate(transforms):
        if transform.output_state:
            break
        step, chain = _part(levels, transforms, number, number + 1)
        inputs = RaggedImages.from_arrays(images)
        expected = run("torch", chain, step, inputs)
        allowed = [bound(steps, step, row) for row in range(len(step))]
        place = f"transform {number + 1}, {transform!r}"
        if not exact:  # else the whole chain has said it
            remaining, remaining_chain = _part(levels, transforms, number, len(transforms))
            remaining_allowed = [bound(steps, remaining, row) for row in range(len(remaining))]
            if min(remaining_allowed) < ANY:
                remaining_expected = run("torch", remaining_chain, remaining, inputs)
                _compare(
                    example,
                    remaining_expected,
                    run(backend, remaining_chain, remaining, inputs),
                    remaining_allowed,
                    None,
                    place,
                )
        _compare(example, expected, run(backend, chain, step, inputs), allowed, None, place)
        exact = not any(allowed)
        images = [image.permute(1, 2, 0).contiguous().numpy() for image in expected]


def _part(program: T.Program, transforms: Sequence[Transform], start: int, end: int) -> tuple[T.Program, T.Chain]:
    """Some of the transforms, without those that make numbers of levels: what was drawn, and a chain of them."""
    numbers = [number for number in range(start, end) if not transforms[number].output_state]
    part = program.part(program.place_of(start), program.place_of(end))
    records = [replace(record, step=numbers.index(record.step)) for record in part.records if record.step in numbers]
    return T.Program(tuple(records), part.sizes_hw, part.results_hw), T.Chain(
        [transforms[number] for number in numbers]
    )


def _compare(
    example: Example,
    expected: list[Any],
    results: list[Any],
    allowed: list[float],
    finishing: T.Program | None,
    place: str,
) -> None:
    scale = _units(example, expected[0])
    mixed = finishing is not None and finishing.mix is not None
    if mixed:  # an image has its neighbour's differences too
        partners = [row ^ 1 if row ^ 1 < len(allowed) else row for row in range(len(allowed))]
        allowed = [max(allowed[row], allowed[partner]) for row, partner in enumerate(partners)]
    for row, (image, result) in enumerate(zip(expected, results, strict=True)):
        assert image.shape == result.shape, f"{place}: image {row} is {tuple(result.shape)}, not {tuple(image.shape)}"
        assert image.dtype == result.dtype, f"{place}: image {row} is {result.dtype}, not {image.dtype}"
        difference = (image.double() - result.double()).abs()
        limit = torch.full_like(difference, allowed[row]) * scale
        if image.dtype != torch.uint8:
            limit += FLOAT + (image.double().abs() + limit) * ULPS[image.dtype]
        over = difference > limit
        assert not over.any(), (
            f"{place}: image {row} is {difference.max():g} off ({image.dtype}), "
            f"{int(over.sum())} of {over.numel()} numbers by more than {float(limit[over].min()):g}"
        )


def _units(example: Example, result: torch.Tensor) -> torch.Tensor:
    """How much a level is in the numbers of a result, for each channel."""
    if result.dtype == torch.uint8:
        return torch.ones(1, 1, 1, dtype=torch.float64)
    final = Finish.of(example.chain.lines[0].transforms, example.dtype)
    return torch.tensor(final.scale, dtype=torch.float64)[:, None, None]
