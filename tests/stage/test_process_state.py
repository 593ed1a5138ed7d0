"""State of the user's process, such as autocast, inference mode or a fork, does not change a stage's results."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.programs import run_python

from gpuload import transforms as T
from gpuload.stage import compile_stage
from gpuload.stage.masks import MaskStage

NORMALIZE = T.Normalize([0.5] * 3, [0.5] * 3)
CHAIN = [T.Resize(24), T.CenterCrop(20), T.RandomAdjustSharpness(8, 1.0), T.GaussianBlur(3), NORMALIZE]


BACKENDS = ["torch", "kornia", "dali"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_stage_within_autocast_gives_the_same_images(make_images, run_stage, backend):
    expected = run_stage(CHAIN, make_images(0, 3), backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(run_stage(CHAIN, make_images(0, 3), backend=backend), expected)


class Double(torch.nn.Module):
    def forward(self, batch):
        return batch * 2


TO_LIST = {"list": list, "pad": list, "error": lambda result: [result], "views": list}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("ragged", "modules"), [*((ragged, []) for ragged in TO_LIST), ("error", [Double()]), ("views", [Double()])]
)
def test_stage_within_inference_mode_returns_ordinary_tensors(make_images, make_batch, backend, ragged, modules):
    chain = T.Chain([*CHAIN, *modules])
    images, draws = make_batch(chain, make_images(0, 3))
    stage = compile_stage(chain, device="cpu", backend=backend, ragged=ragged)

    def run():
        batch = stage(images, draws)
        return TO_LIST[ragged](stage.call_modules(batch, [0]) if modules else batch)

    with torch.inference_mode():
        results_in_inference_mode = run()
    expected = run()
    assert {tensor.is_inference() for tensor in results_in_inference_mode} == {False}
    torch.testing.assert_close(results_in_inference_mode, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("dtype", "axes", "channels"), [("uint8", 2, 1), ("int32", 3, 8), ("uint8", 3, 0)])
@pytest.mark.parametrize("transforms", [[T.CenterCrop(20)], [T.Resize(20)], [T.CenterCrop(20), T.ToDtype("float32")]])
def test_mask_stage_within_inference_mode_returns_ordinary_tensors(
    make_images, make_batch, transforms, dtype, axes, channels
):
    chain = T.Chain(transforms)
    pictures = [np.repeat(image, channels, axis=2) for image in make_images(0, 3, 1)]
    masks, draws = make_batch(chain, pictures)
    with torch.inference_mode():
        single_masks, batch = MaskStage(torch.device("cpu"))(masks, draws, [(dtype, axes)] * 3)
    assert [mask.is_inference() for mask in single_masks] == [False] * 3
    assert batch is None or not batch.is_inference()


def test_module_runs_within_the_users_autocast(make_images, make_batch):
    autocast_flags = []

    class RecordAutocast(torch.nn.Module):
        def forward(self, batch):
            autocast_flags.append(torch.is_autocast_enabled("cpu"))
            return batch

    chain = T.Chain([T.CenterCrop(20), RecordAutocast()])
    stage = compile_stage(chain, device="cpu")
    images, draws = make_batch(chain, make_images(0, 3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stage.call_modules(stage(images, draws), [0])
    stage.call_modules(stage(images, draws), [0])
    assert autocast_flags == [True, False]


FORK_PROGRAM = """
import os, signal, sys
import numpy as np, torch
import gpuload as gl
from gpuload import transforms as T

torch.set_num_threads(2)
pictures = [np.random.default_rng(number).integers(0, 256, (300, 400, 3), np.uint8) for number in range(8)]
chain = [T.RandomResizedCrop(224), T.ColorJitter(0.4), T.Normalize([0.5] * 3, [0.5] * 3)]


def epoch():
    loader = gl.Loader(pictures, 8, transforms=chain, num_workers=0, device="cpu", backend=sys.argv[1])
    return sum(float(batch.numpy().sum()) for batch in loader)


first = epoch()
child = os.fork()
if not child:
    signal.alarm(60)
    os._exit(0 if epoch() == first else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["torch", "kornia"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_loader_in_a_forked_process_gives_the_same_images(backend):
    run_python(FORK_PROGRAM, backend, flags=("-W", "ignore"))
