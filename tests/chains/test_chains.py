"""Random chains of transforms give the reference's results on the backends that promise its levels; on the others, an
image's result does not depend on the other images of its batch."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from chains.check import check_against_reference, check_alone
from chains.strategies import chain_examples
from hypothesis import HealthCheck, given, settings
from parity.usable import needs

# More examples, and others in each run, for a search by hand: GPULOAD_EXAMPLES=2000 pytest tests/chains
EXAMPLES = int(os.environ.get("GPULOAD_EXAMPLES", "0"))


def settings_for(count: int) -> settings:
    """Always the same examples, so that no run of the tests is unlike another."""
    return settings(
        max_examples=EXAMPLES or count,
        derandomize=not EXAMPLES,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads of torch that wait for each other take longer than images of this size."""
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
    """The images of a chain have several sizes, and kornia and dali process those of one size together."""
    needs(backend)
    check_alone(example, backend)


@pytest.mark.timeout(600)
@settings_for(25)
@given(chain_examples(max_length=3, count=2, max_side=28))
def test_the_fused_backend_gives_the_results_of_the_reference(example):
    needs("fused")
    check_against_reference(example, "fused")
