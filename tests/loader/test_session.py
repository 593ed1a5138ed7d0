"""Sessions: batches launched ahead on a stand-in for a GPU, the start of workers, copies of loaders, and errors."""

from __future__ import annotations

import copy
import pickle
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.cpu_device import Device, Event
from helpers.map_datasets import MapDataset
from torch import nn

import gpuload as gl
from gpuload import transforms as T
from gpuload.errors import BackendError
from gpuload.loader import session
from gpuload.loader.session import SessionState, Steps
from gpuload.stage import Stage
from gpuload.stage import device as devices
from gpuload.stage.transfer import CudaTransfer
from gpuload.workers import fork_server
from gpuload.workers.pool import WorkerPool, count_pools_and_workers

COUNT = 12
LEVELS = MapDataset(lambda index: (torch.full((3, 4, 4), index, dtype=torch.uint8), index), COUNT)


class AddShift(nn.Module):
    """A module that adds a number, held as a parameter, as a buffer, or as neither."""

    def __init__(self, held: str = "parameter"):
        super().__init__()
        self.calls, self.streams = 0, []
        if held == "parameter":
            self.by = nn.Parameter(torch.zeros(()))
        elif held == "buffer":
            self.register_buffer("by", torch.zeros(()))
        else:
            self.by = 0.0

    def forward(self, images):
        self.calls += 1
        self.streams.append(None if self.device is None else self.device.current)
        return images + self.by

    device = None


@pytest.fixture
def device(monkeypatch):
    cpu_device = Device()
    monkeypatch.setattr(devices, "Accelerator", lambda requested: cpu_device)
    monkeypatch.setattr(session, "make_transfer", CudaTransfer)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(AddShift, "device", cpu_device)
    return cpu_device


def make_loader(*transforms, **options):
    options = {"batch_size": 2, "num_workers": 0, "device": "cpu", "chunk_size": 2, "prefetch_factor": 4} | options
    return gl.Loader(LEVELS, transforms=list(transforms), **options)


def count_launched(loader):
    return len(loader._session.launched_batches)


def test_loader_launches_two_batches_ahead(device):
    with make_loader(T.CenterCrop(4)) as loader:
        ahead = [count_launched(loader) for _ in loader]
    assert ahead == [2, 1, 2, 1, 1, 0]  # two are launched together once none is ahead; the sixth is the last


@pytest.mark.parametrize("held", ["parameter", "buffer"])
def test_module_with_state_sees_the_latest_training_step(device, held):
    module = AddShift(held)
    with make_loader(T.ToDtype("float32"), module) as loader:
        for step, (images, labels) in enumerate(loader):
            assert module.calls == step + 1
            assert images[:, 0, 0, 0].tolist() == [level + 100 * step for level in labels.tolist()]
            assert images.requires_grad == (held == "parameter")
            with torch.no_grad():
                module.by += 100  # a step of the optimizer
    assert set(module.streams) == {"consumer"}
    # The input of the module is kept for the stream on which the module ran.
    assert ((2, 3, 4, 4), "consumer") in [(tensor.shape, stream) for tensor, stream in device.recorded_tensors]


def test_deep_module_can_be_trained_through_the_loader(device):
    """Weights change in place while a later batch is launched, after which autograd could refuse a backward pass."""
    module = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    losses = []
    with make_loader(T.ToDtype("float32", scale=True), module) as loader:
        for _ in range(3):
            for images, _ in loader:
                loss = (images - 1).square().mean()
                gradients = torch.autograd.grad(loss, list(module.parameters()))
                with torch.no_grad():
                    for weights, gradient in zip(module.parameters(), gradients, strict=True):
                        weights -= 0.01 * gradient
                losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_module_without_state_runs_ahead(device):
    module = AddShift("neither")
    with make_loader(T.ToDtype("float32"), module) as loader:
        calls = [module.calls for _ in loader]
    assert calls == [3, 3, 5, 5, 6, 6]
    assert set(module.streams) == {"side"}


def test_function_at_the_end_of_a_chain_runs_when_its_batch_is_yielded(device):
    net = AddShift()
    with make_loader(T.ToDtype("float32"), T.Lambda(lambda images: net(images))) as loader:
        assert [net.calls for _ in loader] == [1, 2, 3, 4, 5, 6]


def test_module_with_state_before_the_end_of_a_chain_prevents_launching_ahead(device):
    module = AddShift("buffer")
    with make_loader(T.ToDtype("float32"), T.Lambda(module), T.Normalize([0.0] * 3, [1.0] * 3)) as loader:
        for step, (images, labels) in enumerate(loader):
            assert count_launched(loader) == 0
            assert images[:, 0, 0, 0].tolist() == [level + 100 * step for level in labels.tolist()]
            module.by += 100


def test_collate_fn_receives_the_output_of_the_module(device):
    module = AddShift()

    def collate_fn(samples):
        return sum(image.sum().item() for image, _ in samples)

    with make_loader(T.ToDtype("float32"), module, collate_fn=collate_fn) as loader:
        totals = []
        for total in loader:
            totals.append(total)
            with torch.no_grad():
                module.by += 1
    assert totals == [48 * (2 * i + (2 * i + 1)) + 96 * i for i in range(6)]  # two images of 48 values, shifted by i


def test_views_and_info_are_equal_with_and_without_launching_ahead(device):
    def run(module, **options):
        with make_loader(T.MultiView([T.CenterCrop(4), T.CenterCrop(4)]), module, info=True, **options) as loader:
            return [
                ([view.tolist() for view in views], labels.tolist(), info.positions.tolist())
                for (views, labels), info in loader
            ]

    assert run(AddShift()) == run(AddShift("neither"))


def assert_third_batch_raises(loader, error, match):
    batches = iter(loader)
    yielded = [next(batches)[1].tolist() for _ in range(2)]
    with pytest.raises(error, match=match):
        next(batches)
    yielded += [labels.tolist() for _, labels in batches]
    assert yielded == [[0, 1], [2, 3], [6, 7], [8, 9], [10, 11]]


def test_error_of_a_module_is_raised_for_its_batch(device):
    class RaisesAtFive(AddShift):
        def forward(self, images):
            if int(images.max()) == 5:
                raise StopIteration("five")
            return super().forward(images)

    with make_loader(RaisesAtFive("buffer")) as loader:
        assert_third_batch_raises(loader, RuntimeError, r"making a batch raised StopIteration\('five'\)")


def test_out_of_memory_is_raised_for_its_batch_and_frees_its_slots(device, monkeypatch):
    """The ring has room for few slots, so all other batches arrive only if the slots are freed."""
    load, loads = CudaTransfer.load, []

    def fail_on_third_load(transfer, batch, release):
        loads.append(batch)
        with monkeypatch.context() as patches:
            if len(loads) == 3:
                patches.setattr(torch, "empty", raise_out_of_memory)
            return load(transfer, batch, release)

    def raise_out_of_memory(*shape, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(CudaTransfer, "load", fail_on_third_load)
    with make_loader(T.CenterCrop(4), ring_bytes=4 << 16) as loader:
        assert_third_batch_raises(loader, torch.OutOfMemoryError, "CUDA out of memory")
        assert not loader._session.ring._busy


def test_device_error_ends_the_epoch_and_close_is_silent(device):
    class BrokenEvent(Event):
        def query(self):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        synchronize = query

    loader = make_loader(T.CenterCrop(4))
    batches = iter(loader)
    next(batches)
    device._event = lambda stream, number: BrokenEvent()
    device.synchronize = lambda stream: BrokenEvent().query()
    copies = loader._session.transfer._copies
    with pytest.raises(RuntimeError, match="illegal memory access"):
        for _ in batches:
            pass
    loader.close()
    assert not copies
    assert device.locked == set()


@pytest.mark.processes
def test_iter_in_two_threads_starts_one_session(monkeypatch):
    """Two sessions would start workers twice, and those of the first would be lost."""
    sessions, both_wait = [], threading.Barrier(2)

    class Slow(session.Session):
        def __init__(self, *args, **options):
            sessions.append(self)
            time.sleep(0.2)  # without a lock, the other thread gets here too
            super().__init__(*args, **options)

    monkeypatch.setattr("gpuload.loader.loader.Session", Slow)
    pools, workers = count_pools_and_workers()

    def start_iterator():
        both_wait.wait()
        iterators.append(iter(loader))

    iterators: list = []
    with gl.Loader(range(8), 2, num_workers=2, device="cpu") as loader:
        threads = [threading.Thread(target=start_iterator) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(sessions) == 1
        assert count_pools_and_workers() == (pools + 1, workers + 2)
        assert len(list(iterators[1])) == 4
        with pytest.raises(RuntimeError, match="newer iter"):
            next(iterators[0])
    assert count_pools_and_workers() == (pools, workers)


class MarksUnpickling(MapDataset):
    """A dataset that creates a file when a template or a worker unpickles it."""

    def __init__(self, path):
        super().__init__(samples=COUNT)
        self.path = path

    def __setstate__(self, state):
        vars(self).update(state)
        open(self.path, "w").close()


@pytest.mark.parametrize("owner", [Stage, devices], ids=["compiling kernels", "taking a device"])
@pytest.mark.processes
def test_workers_unpickle_the_dataset_while_the_main_process_prepares(monkeypatch, device, tmp_path, owner):
    name = "prepare" if owner is Stage else "Accelerator"
    original = getattr(owner, name)

    def wait_for_unpickling(*args):
        deadline = time.monotonic() + 60
        while not (tmp_path / "unpickled").exists():
            assert time.monotonic() < deadline, "no worker has unpickled the dataset"
            time.sleep(0.002)
        return original(*args)

    monkeypatch.setattr(owner, name, wait_for_unpickling)
    with gl.Loader(MarksUnpickling(tmp_path / "unpickled"), 4, num_workers=2, device="cpu") as loader:
        assert torch.cat(list(loader)).tolist() == list(range(COUNT))


@pytest.mark.processes
def test_error_while_workers_start_ends_them(monkeypatch, tmp_path):
    templates = []

    class RecordingPool(WorkerPool):
        def _start_template(self):
            super()._start_template()
            templates.append(self._template)

    def raise_backend_error(stage):
        raise BackendError("the kernels cannot be compiled")

    monkeypatch.setattr(session, "WorkerPool", RecordingPool)
    monkeypatch.setattr(Stage, "prepare", raise_backend_error)
    before = count_pools_and_workers()
    with pytest.raises(BackendError, match="cannot be compiled"):
        iter(gl.Loader(MarksUnpickling(tmp_path / "unpickled"), 4, num_workers=2, device="cpu"))
    [template] = templates
    assert count_pools_and_workers() == before
    assert template.replies.fileno() == -1
    fork_server.close()  # waits until the template, not yet forked, has ended
    assert template.pid is None or not Path(f"/proc/{template.pid}").exists()


def test_loader_before_the_first_iter_can_be_copied():
    loader = gl.Loader([1, 2], 2, device="cpu")
    assert [batch.tolist() for batch in copy.deepcopy(loader)] == [[1, 2]]
    assert [batch.tolist() for batch in pickle.loads(pickle.dumps(loader))] == [[1, 2]]
    loader.set_epoch(3)
    assert copy.deepcopy(loader).state_dict() == loader.state_dict()


@pytest.mark.parametrize("copy_loader", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
@pytest.mark.parametrize("workers", [0, pytest.param("auto", marks=pytest.mark.processes)])
def test_copy_of_a_loader_within_an_epoch_starts_at_the_beginning(copy_loader, workers):
    pictures = [(np.full((12, 12, 3), i, np.uint8), i) for i in range(8)]
    options = {"transforms": [T.CenterCrop(8), T.ColorJitter(0.4)], "seed": 3, "shuffle": True}
    with gl.Loader(pictures, 2, num_workers=workers, device="cpu", **options) as loader:
        batches = iter(loader)
        first_batch = next(batches)
        with copy_loader(loader) as loader_copy:
            assert loader_copy.state_dict()["position"] == loader_copy.epoch == 0
            assert loader_copy.stats().batches == 0
            images, labels = next(iter(loader_copy))
            assert torch.equal(images, first_batch[0])
            assert torch.equal(labels, first_batch[1])
        assert len(list(batches)) == 3
        with pytest.raises(TypeError, match=r"iterator of a gpuload Loader can be .* state_dict\(\)"):
            copy_loader(batches)


NO_EFFECT = "memory_format='channels_last' has no effect: "
NO_IMAGES = (
    "the samples contain no images, and plain arrays keep their layout. Write "
    "images.to(memory_format=torch.channels_last) in the loop, or have the dataset return "
    "gpuload.Image(array, layout=…)"
)


def stack_images(samples):
    return torch.stack([image for image, _ in samples]), len(samples)


@pytest.mark.parametrize(("options", "text"), [
    ({"num_workers": 0}, re.escape(NO_IMAGES)),
    ({"num_workers": 1, "memory_format": torch.channels_last}, re.escape(NO_IMAGES)),
    ({"num_workers": 0, "transforms": [T.CenterCrop(3)], "collate_fn": stack_images},
     "the collate_fn makes the tensors of a batch. Write .* in the collate_fn or in the loop"),
], ids=["plain tensors", "plain tensors of a worker", "collate_fn"])  # fmt: skip
def test_memory_format_without_effect_warns_once(options, text):
    loader = gl.Loader(LEVELS, 4, device="cpu", **{"memory_format": "channels_last", **options})
    with pytest.warns(RuntimeWarning, match=f"^{NO_EFFECT}{text}") as warned, loader:
        batches = [images for _ in range(2) for images, _ in loader]
    assert {images.is_contiguous() for images in batches} == {True}
    assert [warning.filename for warning in warned] == [__file__]


@pytest.mark.parametrize("sample", [
    lambda level: (gl.Image(level), torch.rand(2, 4, 4)),  # data with four axes in addition to images
    lambda level: gl.Image(level[..., :1]),  # one channel, with which both layouts are equal
    lambda level: torch.rand(4, 4),
])  # fmt: skip
def test_memory_format_that_has_an_effect_does_not_warn(sample):
    samples = [sample(np.full((4, 4, 3), i, np.uint8)) for i in range(4)]
    with gl.Loader(samples, 2, memory_format="channels_last", num_workers=0, device="cpu") as loader:
        assert len(list(loader)) == 2  # a warning would be an error


# -- the state of a session -------------------------------------------------------------------------------------------


def test_step_that_ends_or_raises_a_worker_error_leaves_the_session_open():
    steps = Steps()
    with steps.begin(engine_is_broken=False):
        assert steps.state is SessionState.BROKEN  # as an interruption would leave it
    assert steps.state is SessionState.OPEN
    with pytest.raises(gl.WorkerError, match="a reason"), steps.begin(engine_is_broken=False):
        raise gl.WorkerError("a reason")
    assert steps.state is SessionState.OPEN


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_step_after_an_interrupted_step_raises_with_the_reason(error):
    steps = Steps()
    with pytest.raises(error), steps.begin(engine_is_broken=False):
        raise error
    assert steps.state is SessionState.BROKEN
    expected = f"ended: it was interrupted by {error.__name__}, and a batch may be lost. Begin a new epoch"
    with pytest.raises(RuntimeError, match=expected), steps.begin(engine_is_broken=False):
        raise AssertionError("a step began in a broken session")
    with steps.begin(engine_is_broken=True):  # the engine raises its own error
        pass


def test_session_closed_during_a_step_stays_closed():
    steps = Steps()
    with pytest.raises(RuntimeError, match="its Loader was closed meanwhile"), steps.begin(engine_is_broken=False):
        steps.closed = True
    assert steps.state is SessionState.CLOSED
    with (
        pytest.raises(RuntimeError, match="this iterator has ended: its Loader was closed"),
        steps.begin(engine_is_broken=False),
    ):
        raise AssertionError("a step began in a closed session")
