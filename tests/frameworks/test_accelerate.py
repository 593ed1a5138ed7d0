"""accelerate: its checkpoints contain the state of a `Loader`, and `prepare` returns the loader unchanged."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from frameworks.jobs import LIMIT_S, logged_steps, run_successfully
from frameworks.numbered import Numbered
from helpers.warm_interpreters import warm_interpreters
from torch.utils.data import IterableDataset

import gpuload as gl

pytestmark = pytest.mark.timeout(3 * LIMIT_S)

TRAINING = """
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
assert accelerator.num_processes == int(os.environ["WORLD_SIZE"])
model = torch.nn.Linear(3 * 8 * 8, 1)
loader = gl.Loader(Numbered(33), 4, shuffle=True, seed=3, transforms=CHAIN, num_workers=1, device="cpu")
model, optimizer, prepared = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1e-3), loader)
assert prepared is loader
accelerator.register_for_checkpointing(loader)
if options["resume"]:
    accelerator.load_state(str(folder / "checkpoint"))
log, steps = StepLog(options["name"]), 0
with loader:
    while (epoch := loader.state_dict()["epoch"]) < 2:
        for images, numbers in loader:
            accelerator.backward(model(images.flatten(1)).mean())
            optimizer.step()
            optimizer.zero_grad()
            log.log(epoch, images, numbers)
            steps += 1
            if steps == options["save_after"]:
                accelerator.save_state(str(folder / "checkpoint"))
accelerator.end_training()
"""


@pytest.fixture
def popen():
    with warm_interpreters("import accelerate") as popen:
        yield popen


def test_load_state_in_a_new_job_gives_the_remaining_batches(tmp_path, popen):
    for options in (
        {"name": "undisturbed", "save_after": 7, "resume": False},
        {"name": "resumed", "save_after": None, "resume": True},
    ):
        run_successfully(tmp_path, TRAINING, options, ranks=2, popen=popen)
    numbers_by_rank = []
    for rank in (0, 1):
        undisturbed = logged_steps(tmp_path, "undisturbed", rank)
        assert [epoch for epoch, _, _ in undisturbed] == [0] * 5 + [1] * 5
        assert logged_steps(tmp_path, "resumed", rank) == undisturbed[7:]
        numbers_by_rank.append({number for epoch, numbers, _ in undisturbed if epoch == 1 for number in numbers})
    assert numbers_by_rank[0] | numbers_by_rank[1] == set(range(33))


def test_accumulate_does_not_step_on_the_last_batch_of_a_loader():
    """accelerate steps on an epoch's last batch only for loaders that it has wrapped."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    loader, sync_flags = accelerator.prepare(gl.Loader(Numbered(33), 5, num_workers=0, device="cpu")), []
    for _ in range(2):
        for _ in loader:
            with accelerator.accumulate(model):
                sync_flags.append(accelerator.sync_gradients)
    assert sync_flags == [False, True] * 7  # 7 batches in each of two epochs


class Endless(IterableDataset):
    def __iter__(self):
        return itertools.count()


LOADERS = {
    "map": lambda: gl.Loader(Numbered(33), 5, num_workers=0, device="cpu"),
    "iterable": lambda: gl.Loader(Endless(), 5, device="cpu"),
    "a batch sampler": lambda: gl.Loader(Numbered(33), batch_sampler=[[0], [1, 2]], num_workers=0, device="cpu"),
}


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize(
    "options", [{}, {"num_processes": 2, "process_index": 0}, {"dispatch_batches": True, "put_on_device": True}]
)
def test_prepare_data_loader_raises_because_it_would_drop_the_transforms(kind, options):
    from accelerate.data_loader import prepare_data_loader

    text = (
        "prepare_data_loader would replace this gpuload.Loader with a torch DataLoader, which drops the transforms; "
        "remove the call, or call accelerator.prepare(loader)"
    )
    with pytest.raises(TypeError, match=re.escape(text)):
        prepare_data_loader(LOADERS[kind](), **options)


@pytest.mark.parametrize("kind", LOADERS)
def test_skip_first_batches_raises_and_names_load_state_dict(kind):
    from accelerate import Accelerator, skip_first_batches

    text = r"^skip_first_batches would replace this gpuload.Loader .* loader\.load_state_dict\(state\), or accelerator"
    for skip in (skip_first_batches, Accelerator(cpu=True).skip_first_batches):
        with pytest.raises(TypeError, match=text):
            skip(LOADERS[kind](), 2)
