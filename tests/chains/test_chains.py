"""Random chains of transforms: backends that promise the reference's levels give its results; on Kornia and DALI, the
result of an image does not depend on its batch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from chains.bounds import STEPS, UNBOUNDED, bound
from chains.strategies import Example, chain_examples
from hypothesis import HealthCheck, given, settings
from parity.usable import needs

from gpuload import transforms as T
from gpuload.stage import RaggedImages, compile_stage
from gpuload.stage.finish import Finish
from gpuload.transforms.base import Transform

# For a longer search, with different examples in each run: GPULOAD_EXAMPLES=2000 pytest tests/chains
EXAMPLES = int(os.environ.get("GPULOAD_EXAMPLES", "0"))


def settings_for(count: int) -> settings:
    """Return settings with the same examples in each run, unless GPULOAD_EXAMPLES is set."""
    return settings(
        max_examples=EXAMPLES or count,
        derandomize=not EXAMPLES,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )


EPSILONS = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
SUM_TOLERANCE = 1e-5  # the difference of finished images by sums of float32 in another order


def run_chain(
    backend: str, chain: T.Chain, draws: T.Program, images: RaggedImages, dtype: str | None = None
) -> list[Any]:
    """Run a chain on a backend, and return its results, C×H×W each; "batches" is the reference's batched runner."""
    backend, runner = ("torch", "batched") if backend == "batches" else (backend, None)
    ragged = "list" if chain.mixing is None else "error"
    stage = compile_stage(chain, device="cpu", backend=backend, dtype=dtype, ragged=ragged, runner=runner)
    return list(stage(images, draws))


def check_against_reference(example: Example, backend: str) -> None:
    """Check that the backend's results differ from the reference's by at most the levels that `bound` permits."""
    steps, draws = STEPS[backend], example.draws
    images = decoded(example)
    levels, finishing = draws.split()
    allowed = [bound(steps, levels, row) for row in range(len(draws))]
    expected = run_chain("torch", example.chain, draws, images, example.dtype)
    results = run_chain(backend, example.chain, draws, images, example.dtype)
    compare(example, expected, results, allowed, finishing, "the complete chain")
    transforms = example.chain.lines[0].transforms[: levels.late_from]
    if len(transforms) > 1 and not any(transform.output_state for transform in transforms[:-1]):
        check_steps(example, backend, levels, transforms)


def check_alone(example: Example, backend: str) -> None:
    """Check that each image has the bits that it has alone in a batch, and the reference's size and dtype."""
    images = decoded(example)
    expected = run_chain("torch", example.chain, example.draws, images, example.dtype)
    results = run_chain(backend, example.chain, example.draws, images, example.dtype)
    for row, (result, expected_result) in enumerate(zip(results, expected, strict=True)):
        assert (result.shape, result.dtype) == (expected_result.shape, expected_result.dtype), f"image {row}"
        if example.chain.mixing is None:
            draws, image = (batch.take(np.array([row])) for batch in (example.draws, images))
            [alone] = run_chain(backend, example.chain, draws, image, example.dtype)
            assert torch.equal(alone, result), f"image {row} is {(alone.double() - result.double()).abs().max():g} off"


def decoded(example: Example) -> RaggedImages:
    """Cut out the regions that a worker would decode."""
    images = RaggedImages.from_arrays(
        [
            np.ascontiguousarray(image[top : top + height, left : left + width])
            for image, (top, left, height, width) in zip(example.images, example.regions_tlhw.tolist(), strict=True)
        ]
    )
    images.table["size_hw"] = np.array([image.shape[:2] for image in example.images], np.int64)
    images.table["region_tlhw"] = example.regions_tlhw
    return images


def check_steps(example: Example, backend: str, levels: T.Program, transforms: Sequence[Transform]) -> None:
    """Compare each transform, given the reference's input, and after an inexact step also the remaining transforms."""
    steps, images = STEPS[backend], example.images
    is_exact = True
    for number, transform in enumerate(transforms):
        if transform.output_state:
            break
        step, chain = sub_chain(levels, transforms, number, number + 1)
        inputs = RaggedImages.from_arrays(images)
        expected = run_chain("torch", chain, step, inputs)
        allowed = [bound(steps, step, row) for row in range(len(step))]
        label = f"transform {number + 1}, {transform!r}"
        if not is_exact:  # otherwise, the comparison of the complete chain covers these transforms
            remaining, remaining_chain = sub_chain(levels, transforms, number, len(transforms))
            remaining_allowed = [bound(steps, remaining, row) for row in range(len(remaining))]
            if min(remaining_allowed) < UNBOUNDED:
                remaining_expected = run_chain("torch", remaining_chain, remaining, inputs)
                compare(
                    example,
                    remaining_expected,
                    run_chain(backend, remaining_chain, remaining, inputs),
                    remaining_allowed,
                    None,
                    label,
                )
        compare(example, expected, run_chain(backend, chain, step, inputs), allowed, None, label)
        is_exact = not any(allowed)
        images = [image.permute(1, 2, 0).contiguous().numpy() for image in expected]


def sub_chain(program: T.Program, transforms: Sequence[Transform], start: int, end: int) -> tuple[T.Program, T.Chain]:
    """Return the program and the chain of transforms `start` to `end`, without those that convert levels to floats."""
    numbers = [number for number in range(start, end) if not transforms[number].output_state]
    part = program.part(program.place_of(start), program.place_of(end))
    records = [replace(record, step=numbers.index(record.step)) for record in part.records if record.step in numbers]
    chain = T.Chain([transforms[number] for number in numbers])
    return T.Program(tuple(records), part.sizes_hw, part.results_hw), chain


def compare(
    example: Example,
    expected: list[Any],
    results: list[Any],
    allowed: list[float],
    finishing: T.Program | None,
    label: str,
) -> None:
    scale = level_sizes(example, expected[0])
    is_mixed = finishing is not None and finishing.mix is not None
    if is_mixed:  # a mixed image also has its partner's difference
        partners = [row ^ 1 if row ^ 1 < len(allowed) else row for row in range(len(allowed))]
        allowed = [max(allowed[row], allowed[partner]) for row, partner in enumerate(partners)]
    for row, (image, result) in enumerate(zip(expected, results, strict=True)):
        assert image.shape == result.shape, f"{label}: image {row} is {tuple(result.shape)}, not {tuple(image.shape)}"
        assert image.dtype == result.dtype, f"{label}: image {row} is {result.dtype}, not {image.dtype}"
        difference = (image.double() - result.double()).abs()
        limit = torch.full_like(difference, allowed[row]) * scale
        if image.dtype != torch.uint8:
            limit += SUM_TOLERANCE + (image.double().abs() + limit) * EPSILONS[image.dtype]
        exceeds_limit = difference > limit
        assert not exceeds_limit.any(), (
            f"{label}: image {row} is {difference.max():g} off ({image.dtype}), "
            f"{int(exceeds_limit.sum())} of {difference.numel()} numbers by more than {limit[exceeds_limit].min():g}"
        )


def level_sizes(example: Example, result: torch.Tensor) -> torch.Tensor:
    """Return the size of a level in the floats of a result, per channel."""
    if result.dtype == torch.uint8:
        return torch.ones(1, 1, 1, dtype=torch.float64)
    finish = Finish.of(example.chain.lines[0].transforms, example.dtype)
    return torch.tensor(finish.scale, dtype=torch.float64)[:, None, None]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    # For images of this size, synchronizing torch's threads takes longer than the work.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@settings_for(300)
@given(chain_examples())
def test_the_batched_runner_gives_the_results_of_the_reference(example):
    check_against_reference(example, "batches")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["kornia", "dali"])
@settings_for(60)
@given(chain_examples())
def test_an_images_bits_do_not_depend_on_its_batch(backend, example):
    # The images of an example have several sizes, and Kornia and DALI process images of one size together.
    needs(backend)
    check_alone(example, backend)


@pytest.mark.timeout(600)
@settings_for(25)
@given(chain_examples(max_length=3, max_images=2, max_side=28))
def test_the_fused_backend_gives_the_results_of_the_reference(example):
    needs("fused")
    check_against_reference(example, "fused")
