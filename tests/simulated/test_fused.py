"""The fused backend on the simulated device: Triton's launches are operations on a stream like any other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from simulated.running import assert_equal, on_cpu, on_device
from simulated.samples import options, samples

from gpuload import transforms as T
from gpuload.batches.assemble import Assembly
from gpuload.batches.transform import BatchTransform
from gpuload.stage.fused.runner import FusedRunner
from gpuload.workers.batch import PlannedBatch
from gpuload.workers.feed import Feed
from gpuload.workers.planned import Planner

POLICIES = ("lazy", "side first")
NORMALIZE = T.Normalize((0.5,) * 3, (0.5,) * 3)
CHAINS: dict[str, list[Any]] = {
    "flipped crops": [T.RandomCrop(12), T.RandomHorizontalFlip(), NORMALIZE],
    "mixing": [T.RandomCrop(12), NORMALIZE, T.MixUp(num_classes=30)],
    "left to the reference": [T.RandomCrop(12), T.GaussianNoise(), T.ElasticTransform(), NORMALIZE],
}


def chain_options(chain: str, backend: str, **changes: Any) -> dict[str, Any]:
    return options(dataset=samples(6), batch_size=2, transforms=CHAINS[chain], backend=backend, **changes)


@pytest.mark.parametrize("chain", CHAINS)
def test_fused_batches_on_the_device_equal_those_of_the_cpu(chain):
    expected = on_cpu(chain_options(chain, "fused"))
    for policy in POLICIES:
        run = on_device(chain_options(chain, "fused"), policy)
        assert_equal(run.values, expected)
        assert run.unexpected_waits == []


def test_kernels_that_write_tables_for_later_kernels_need_no_wait():
    """The tables are statistics, weights and boxes. The images are few, since passes take long in the interpreter."""
    chain = [T.RandomResizedCrop(8), T.RandomEqualize(1.0), NORMALIZE, T.RandomErasing(1.0)]
    loader_options = options(dataset=samples(4), transforms=chain, backend="fused", batch_size=2)
    run = on_device(loader_options, "lazy")
    assert_equal(run.values, on_cpu(loader_options))
    assert run.unexpected_waits == []


def test_fused_lists_on_the_device_equal_those_of_the_cpu():
    """The images of a list are written through the address of the first image."""
    lists = chain_options("flipped crops", "fused", ragged="list")
    assert_equal(on_device(lists, "lazy").values, on_cpu(lists))


@pytest.fixture
def workers_plans(monkeypatch) -> list[PlannedBatch]:
    """Plans made by workers, which are asked for the plan of each batch, even if it may come too late."""
    plans: list[PlannedBatch] = []
    store = PlannedBatch.store
    monkeypatch.setattr(PlannedBatch, "store", lambda plan, *args: plans.append(plan) or store(plan, *args))
    monkeypatch.setattr(Feed, "_can_be_planned_in_time", lambda *args: True)
    return plans


@pytest.mark.processes
def test_batches_planned_by_workers_equal_those_of_the_cpu(workers_plans):
    transforms = [T.RandomCrop(8), T.ColorJitter(0.4), NORMALIZE]
    loader_options = options(dataset=samples(12), transforms=transforms, backend="fused", batch_size=1)
    run = on_device({**loader_options, "num_workers": 2}, "lazy")
    assert_equal(run.values, on_cpu(loader_options))
    assert run.unexpected_waits == []
    assert workers_plans, "the workers planned no batch"


@pytest.mark.processes
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("has_slot", [True, False])
def test_batches_without_a_workers_plan_are_planned_into_slots_or_by_the_stage(has_slot, policy, monkeypatch):
    """No plan is requested, as in a loop that waits for each batch, and the ring may have no slot for a plan."""
    planned_launches, draws_by_stage = [], []
    launch, draw = FusedRunner.launch_planned, BatchTransform._draw_programs
    monkeypatch.setattr(FusedRunner, "launch_planned", lambda *args: planned_launches.append(launch(*args)))
    monkeypatch.setattr(BatchTransform, "_draw_programs", lambda *args: draws_by_stage.append(0) or draw(*args))
    monkeypatch.setattr(Planner, "submit", lambda *args: None)
    if not has_slot:
        monkeypatch.setattr(Planner, "allocate", lambda *args: None)
    transforms = [T.RandomCrop(8), T.ColorJitter(0.4), NORMALIZE]
    loader_options = options(dataset=samples(8), transforms=transforms, backend="fused", batch_size=2)
    expected = on_cpu(loader_options)
    planned_launches.clear()
    draws_by_stage.clear()
    run = on_device({**loader_options, "num_workers": 2}, policy)
    assert_equal(run.values, expected)
    assert run.unexpected_waits == []
    assert (len(planned_launches), len(draws_by_stage)) == ((4, 0) if has_slot else (0, 4))  # of four batches


@pytest.mark.processes
def test_images_of_different_channels_without_a_workers_plan_raise(monkeypatch):
    monkeypatch.setattr(Planner, "submit", lambda *args: None)
    mixed = [*samples(3), (np.zeros((14, 16, 1), np.uint8), 3)]
    transforms = [T.RandomCrop(8), T.ColorJitter(0.4)]
    loader_options = options(dataset=mixed, transforms=transforms, backend="fused", shuffle=False)
    with pytest.raises(ValueError, match=r"but sample\[0\] of sample 0 has 3 and sample\[0\] of sample 3 has 1"):
        on_device({**loader_options, "num_workers": 1}, "lazy")


@pytest.mark.processes
@pytest.mark.parametrize("policy", POLICIES)
def test_labels_that_arrive_with_a_plan_outlive_its_memory(policy, workers_plans, monkeypatch):
    """This holds even if a module of the user finishes the batch on the stream of the training step."""
    has_own_memory: list[bool] = []
    finish = Assembly.finish

    def watched(assembly: Assembly, *args: Any, **named: Any) -> Any:
        finished = finish(assembly, *args, **named)
        labels = finished.full_columns.values()
        has_own_memory.extend(label.untyped_storage().nbytes() == label.nbytes for label in labels)
        return finished

    monkeypatch.setattr(Assembly, "finish", watched)
    transforms = [T.RandomCrop(8), NORMALIZE, T.Lambda(torch.abs)]
    loader_options = options(dataset=samples(12), transforms=transforms, backend="fused", batch_size=1)
    expected = on_cpu(loader_options)
    has_own_memory.clear()
    assert_equal(on_device({**loader_options, "num_workers": 2}, policy).values, expected)
    assert set(has_own_memory) == {True}, "labels that the user keeps would also keep the pixels"
    assert workers_plans, "the workers planned no batch"
