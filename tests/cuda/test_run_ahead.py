"""How far loader and host run ahead of a training loop that never waits, and how much memory that takes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from helpers import lacking
from helpers.labelled_images import Pictures

import gpuload as gl
from gpuload import transforms as T
from gpuload.stage.transfer import STEPS_BEHIND

pytestmark = pytest.mark.cuda

NORMALIZE = T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
RECIPE = (T.RandomResizedCrop(64), T.RandomHorizontalFlip(), T.ColorJitter(0.4, 0.4, 0.4, 0.1), NORMALIZE)
SIZE, BATCH_SIZE, STEPS = (32, 8, 150) if lacking.IS_FAKE else (128, 64, 1000)  # the fake runtime interprets kernels
LARGE = (T.RandomResizedCrop(SIZE), T.RandomHorizontalFlip(), NORMALIZE)
BATCH_BYTES = BATCH_SIZE * 3 * SIZE * SIZE * 4


def stacked(samples):
    import torch

    return torch.stack([torch.as_tensor(image) for image, _ in samples]), [label for _, label in samples]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize(
    ("transforms", "options"),
    [
        (RECIPE, {}),
        (RECIPE, {"info": True}),
        ([T.RandAugment(), T.Resize((64, 64)), NORMALIZE], {}),
        ([T.MultiView([T.RandomResizedCrop(32), T.RandomResizedCrop(16)])], {}),
        ([*RECIPE, T.MixUp(num_classes=7)], {}),
        ([*RECIPE, torch.nn.BatchNorm2d(3)], {}),
        ([T.Resize(40)], {"ragged": "list"}),
        ([T.Resize((16, 20))], {"collate_fn": stacked}),
    ],
    ids=["recipe", "info", "randaugment", "views", "mixup", "module", "list", "collate_fn"],
)
def test_next_does_not_wait_for_the_device(transforms, options):
    transforms = [transform.cuda() if isinstance(transform, torch.nn.Module) else transform for transform in transforms]
    with gl.Loader(Pictures(160), 8, transforms=transforms, num_workers=2, device="cuda", **options) as loader:
        for step, _ in enumerate(loader):
            torch.cuda.set_sync_debug_mode("error" if 4 <= step < 18 else "default")  # kernels are compiled by then
            torch.cuda._sleep(1_000_000)


@pytest.fixture(autouse=True)
def default_mode() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_two_batches_are_launched_ahead_of_the_current_one():
    with gl.Loader(Pictures(96), 4, transforms=RECIPE, num_workers=2, device="cuda") as loader:
        max_launched = 0
        for _ in loader:
            torch.cuda._sleep(20_000_000)  # a training step, during which the workers run ahead
            torch.cuda.current_stream().synchronize()
            max_launched = max(max_launched, len(loader._session.launched_batches))
        assert max_launched == 2


def test_host_waits_for_a_slow_consumer():
    ends: list[torch.cuda.Event] = []
    with gl.Loader(Pictures(160), 4, transforms=RECIPE, num_workers=1, device="cuda") as loader:
        max_behind = 0
        for _ in loader:
            max_behind = max(max_behind, sum(not end.query() for end in ends))
            torch.cuda._sleep(20_000_000)
            ends.append(torch.cuda.Event())
            ends[-1].record()
    assert 1 <= max_behind <= STEPS_BEHIND


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    "graphs", [False, pytest.param(True, marks=lacking.skip_on_fake_cuda("CUDA graphs"))], ids=["kernels", "graphs"]
)
def test_memory_stays_flat_for_a_loop_that_never_waits(graphs):
    """The limit is six batches: two that training still reads, the current one, two ahead, and one being freed. The
    source pixels of small batches take as much memory as a seventh."""
    options = {"transforms": LARGE, "num_workers": 2, "device": "cuda"}
    with gl.Loader(Pictures(BATCH_SIZE * STEPS), BATCH_SIZE, **options) as loader:
        static = torch.zeros(BATCH_SIZE, 3, SIZE, SIZE, device="cuda")
        total = torch.zeros((), device="cuda", dtype=torch.float64)

        def training_step() -> None:
            total.add_(static.double().square().mean())

        training_step()
        graph = torch.cuda.CUDAGraph()
        if graphs:
            with torch.cuda.graph(graph):
                training_step()
        for step, (images, _) in enumerate(loader):
            torch.cuda._sleep(4_000_000)
            static.copy_(images)
            if graphs:
                graph.replay()
            else:
                training_step()
            if step == 100:
                allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
                torch.cuda.reset_peak_memory_stats()
        assert step == STEPS - 1
        assert torch.cuda.max_memory_allocated() <= allocated + (7 if lacking.IS_FAKE else 6) * BATCH_BYTES
        assert torch.cuda.memory_reserved() <= reserved + 2 * BATCH_BYTES
        assert float(total) > 0


@lacking.skip_on_fake_cuda("CUDA graphs")
def test_training_step_in_a_cuda_graph_reads_each_batch():
    with gl.Loader(Pictures(96), 8, transforms=RECIPE, num_workers=2, device="cuda") as loader:
        expected = [float((images.double() * 2).sum()) for images, _ in loader]
        loader.set_epoch(0)
        static = torch.zeros(8, 3, 64, 64, device="cuda")
        (static.double() * 2).sum()
        graph, sums = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph):
            result = (static.double() * 2).sum()
        for images, _ in loader:
            static.copy_(images)
            del images
            torch.cuda._sleep(5_000_000)
            graph.replay()
            sums.append(result.clone())
    assert [float(value) for value in sums] == expected
