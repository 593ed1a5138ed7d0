"""Takes a chain through backends, and holds their results together: whole, and step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from chains.bounds import ANY, STEPS, bound
from chains.strategies import Tried

from gpuload import transforms as T
from gpuload.stage import RaggedImages, compile_stage
from gpuload.stage.finish import Finish
from gpuload.transforms.base import Transform

__all__ = ["check", "check_alone"]

ULPS = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
FLOAT = 1e-5  # of the numbers of finished images: sums of float32 in another order


def run(backend: str, chain: T.Chain, draws: T.Program, images: RaggedImages, dtype: str | None = None) -> list[Any]:
    """The results of a backend, C×H×W each; "batches" is the reference's runner of batches."""
    backend, runner = ("torch", "batched") if backend == "batches" else (backend, None)
    ragged = "list" if chain.mixing is None else "error"
    stage = compile_stage(chain, device="cpu", backend=backend, dtype=dtype, ragged=ragged, runner=runner)
    return list(stage(images, draws))


def check(example: Tried, backend: str) -> None:
    """The backend's results are the reference's, as far as `bounds` says."""
    own, draws = STEPS[backend], example.draws
    given = _cut(example)
    levels, late = draws.split()
    allowed = [bound(own, levels, row) for row in range(len(draws))]
    expected = run("torch", example.chain, draws, given, example.dtype)
    found = run(backend, example.chain, draws, given, example.dtype)
    _compare(example, expected, found, allowed, late, "the whole chain")
    transforms = example.chain.lines[0].transforms[: levels.late_from]
    if len(transforms) > 1 and not any(transform.output_state for transform in transforms[:-1]):
        _check_steps(example, backend, levels, transforms)


def check_alone(example: Tried, backend: str) -> None:
    """Each image of the backend's results has the bits that it has alone, and the reference's size and dtype."""
    given = _cut(example)
    expected = run("torch", example.chain, example.draws, given, example.dtype)
    found = run(backend, example.chain, example.draws, given, example.dtype)
    for row, (image, other) in enumerate(zip(found, expected, strict=True)):
        assert (image.shape, image.dtype) == (other.shape, other.dtype), f"image {row}"
        if example.chain.mixing is None:
            draws, images = (batch.take(np.array([row])) for batch in (example.draws, given))
            [alone] = run(backend, example.chain, draws, images, example.dtype)
            assert torch.equal(alone, image), f"image {row} is {(alone.double() - image.double()).abs().max():g} off"


def _cut(example: Tried) -> RaggedImages:
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


def _check_steps(example: Tried, backend: str, levels: T.Program, transforms: Sequence[Transform]) -> None:
    """Each transform alone, from what the reference gives it; and all that stand behind one that was not exact."""
    own, images = STEPS[backend], example.images
    exact = True
    for number, transform in enumerate(transforms):
        if transform.output_state:
            break
        step, chain = _part(levels, transforms, number, number + 1)
        given = RaggedImages.from_arrays(images)
        expected = run("torch", chain, step, given)
        allowed = [bound(own, step, row) for row in range(len(step))]
        place = f"transform {number + 1}, {transform!r}"
        if not exact:  # else the whole chain has said it
            rest, others = _part(levels, transforms, number, len(transforms))
            rest_allowed = [bound(own, rest, row) for row in range(len(rest))]
            if min(rest_allowed) < ANY:
                whole = run("torch", others, rest, given)
                _compare(example, whole, run(backend, others, rest, given), rest_allowed, None, place)
        _compare(example, expected, run(backend, chain, step, given), allowed, None, place)
        exact = not any(allowed)
        images = [image.permute(1, 2, 0).contiguous().numpy() for image in expected]


def _part(program: T.Program, transforms: Sequence[Transform], start: int, end: int) -> tuple[T.Program, T.Chain]:
    """Some of the transforms, without those that make numbers of levels: what was drawn, and a chain of them."""
    kept = [number for number in range(start, end) if not transforms[number].output_state]
    part = program.part(program.place_of(start), program.place_of(end))
    records = [replace(record, step=kept.index(record.step)) for record in part.records if record.step in kept]
    return T.Program(tuple(records), part.sizes_hw, part.results_hw), T.Chain([transforms[number] for number in kept])


def _compare(
    example: Tried, expected: list[Any], found: list[Any], allowed: list[float], late: T.Program | None, place: str
) -> None:
    scale = _units(example, expected[0])
    mixed = late is not None and late.mix is not None
    if mixed:  # an image has its neighbour's differences too
        partners = [row ^ 1 if row ^ 1 < len(allowed) else row for row in range(len(allowed))]
        allowed = [max(allowed[row], allowed[partner]) for row, partner in enumerate(partners)]
    for row, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert one.shape == other.shape, f"{place}: image {row} is {tuple(other.shape)}, not {tuple(one.shape)}"
        assert one.dtype == other.dtype, f"{place}: image {row} is {other.dtype}, not {one.dtype}"
        apart = (one.double() - other.double()).abs()
        limit = torch.full_like(apart, allowed[row]) * scale
        if one.dtype != torch.uint8:
            limit += FLOAT + (one.double().abs() + limit) * ULPS[one.dtype]
        over = apart > limit
        assert not over.any(), (
            f"{place}: image {row} is {apart.max():g} off ({one.dtype}), {int(over.sum())} of {over.numel()} numbers "
            f"by more than {float(limit[over].min()):g}"
        )


def _units(example: Tried, result: torch.Tensor) -> torch.Tensor:
    """How much a level is in the numbers of a result, for each channel."""
    if result.dtype == torch.uint8:
        return torch.ones(1, 1, 1, dtype=torch.float64)
    finish = Finish.of(example.chain.lines[0].transforms, example.dtype)
    return torch.tensor(finish.scale, dtype=torch.float64)[:, None, None]
