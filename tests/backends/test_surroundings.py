"""What a stage makes does not hang on what the user's process is about."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from gpuload import transforms as T
from gpuload.backends import compile_stage

CHAIN = [T.Resize(24), T.CenterCrop(20), T.RandomAdjustSharpness(8, 1.0), T.GaussianBlur(3), T.Normalize([0.5], [0.5])]


@pytest.fixture(params=["torch", "kornia", "dali"])
def backend(request) -> str:
    if request.param == "dali":
        pytest.importorskip("nvidia.dali")
    return request.param


def made(make_images, make_batch, backend):
    chain = T.Chain([*CHAIN[:-1], T.Normalize([0.5] * 3, [0.5] * 3)])
    return compile_stage(chain, device="cpu", backend=backend)(*make_batch(chain, make_images(0, 3)))


def test_autocast(make_images, make_batch, backend):
    expected = made(make_images, make_batch, backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(made(make_images, make_batch, backend), expected)


def test_a_module_has_the_users_autocast(make_images, make_batch):
    seen = []

    class Watching(torch.nn.Module):
        def forward(self, batch):
            seen.append(torch.is_autocast_enabled("cpu"))
            return batch

    chain = T.Chain([T.CenterCrop(20), Watching()])
    stage = compile_stage(chain, device="cpu")
    images, draws = make_batch(chain, make_images(0, 3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stage(images, draws)
    stage(images, draws)
    assert seen == [True, False]


FORKED = """
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


@pytest.mark.parametrize("name", ["torch", "kornia"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_loader_in_a_forked_process(name):
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED, name], check=True, timeout=100)
