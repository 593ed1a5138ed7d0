"""Examples that are killed in the middle of an epoch, and restarted, train as if they had not been killed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.nn.functional as F
from helpers import lacking, peers
from helpers.warm_interpreters import WARM_CHILDREN_VARIABLE
from project.examples.conftest import FOLDER

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(300),
    # Warnings of the frameworks.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]
LIMIT_S = 150
EPOCHS, STEPS, KILLED_AFTER = 2, 4, 7
LAST_SAVED = 6  # the last multiple of --save-every


class Killed(Exception):
    pass


@pytest.fixture
def accelerator_state() -> Iterator[None]:
    """Reset the global state of Accelerate, which its Trainer uses too, after the test."""
    yield
    if "accelerate.state" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(True)


@pytest.mark.usefixtures("accelerator_state")
@pytest.mark.parametrize(
    ("name", "folder_option", "package"),
    [
        ("keep_your_loader", "--checkpoint", None),
        ("with_accelerate", "--checkpoint", None),
        ("with_lightning", "--folder", "pytorch_lightning"),
        ("with_trainer", "--folder", "transformers"),
    ],
)
def test_example_resumes_after_being_killed(run, steps, monkeypatch, name, folder_option, package):
    if package in ("pytorch_lightning", "transformers"):
        peers.torchvision()  # which these packages import
        lacking.require(package)
    options = ["--epochs", EPOCHS, "--save-every", 2, folder_option]
    run(name, *options, "uninterrupted")
    uninterrupted = list(steps.losses)
    assert len(uninterrupted) == EPOCHS * STEPS
    assert sum(uninterrupted[STEPS:]) < 0.95 * sum(uninterrupted[:STEPS])
    assert steps.sizes == [32] * len(uninterrupted)
    steps.losses.clear()
    cross_entropy = F.cross_entropy

    def cross_entropy_until_killed(*arguments, **keywords):
        if len(steps.losses) == KILLED_AFTER:
            raise Killed
        return cross_entropy(*arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(F, "cross_entropy", cross_entropy_until_killed)
        with pytest.raises(Killed):
            run(name, *options, "killed")
    assert steps.losses == pytest.approx(uninterrupted[:KILLED_AFTER], abs=1e-5)
    steps.losses.clear()
    run(name, *options, "killed")
    assert steps.losses == pytest.approx(uninterrupted[LAST_SAVED:], abs=1e-5)


# The example with the images' numbers as labels, which each step writes to a file. Unless it was restarted, the second
# process kills itself in the second epoch.
RECORDING_DDP = f"""
import json, os, runpy, signal, sys
import numpy as np
import torch.nn.functional as F
import gpuload as gl

rank, restart_count, calls = os.environ["RANK"], os.environ.get("TORCHELASTIC_RESTART_COUNT"), 0
original = F.cross_entropy


class Numbered(gl.ImageFolder):
    def __init__(self, root):
        super().__init__(root)
        self.labels = self.classes = np.arange(len(self))


def cross_entropy(scores, labels):
    global calls
    calls += 1
    if calls > {KILLED_AFTER} and rank == "1" and restart_count == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    with open(f"seen.{{restart_count}}.{{rank}}", "a") as file:
        file.write(json.dumps(labels.tolist()) + "\\n")
    return original(scores, labels)


gl.ImageFolder, F.cross_entropy = Numbered, cross_entropy
sys.argv[0] = {str(FOLDER / "ddp.py")!r}
sys.path.insert(0, {str(FOLDER)!r})
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    F.cross_entropy = original
    del gl.ImageFolder
"""


def sample_numbers(folder: Path, restart_count: int | None, ranks: int = 1) -> list[list[int]]:
    """Return the numbers of the images of each step, merged over all processes."""
    lines = [(folder / f"seen.{restart_count}.{rank}").read_text().splitlines() for rank in range(ranks)]
    return [[number for line in step for number in json.loads(line)] for step in zip(*lines, strict=False)]


def printed_losses(text: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", text)}


@pytest.mark.usefixtures("warm", "run")
def test_ddp_example_resumes_after_one_of_two_processes_is_killed(tmp_path, monkeypatch, capsys):
    """Two processes, of which one is killed, train like a single process that is not interrupted."""
    monkeypatch.syspath_prepend(FOLDER)
    options = ["--epochs", str(EPOCHS), "--save-every", "2", "--workers", "1", "--device", "cpu", "--checkpoint"]
    with socket.socket() as free_socket:
        free_socket.bind(("127.0.0.1", 0))
        port = free_socket.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(sys, "argv", ["ddp.py", *options, "one.pt", "--batch-size", "32"])
    exec(RECORDING_DDP, {"__name__": "recording_ddp"})
    expected_losses, uninterrupted = printed_losses(capsys.readouterr().out), sample_numbers(tmp_path, None)
    assert len(expected_losses) == EPOCHS * STEPS // 2  # every second loss is printed
    assert len(uninterrupted) == EPOCHS * STEPS
    for epoch in range(EPOCHS):
        steps = uninterrupted[epoch * STEPS : (epoch + 1) * STEPS]
        assert sorted(number for step in steps for number in step) == list(range(32 * STEPS))

    (tmp_path / "recording_ddp.py").write_text(RECORDING_DDP)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1", "--nproc-per-node=2"]
    command += ["recording_ddp.py", *options, "two.pt", "--batch-size", "16"]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    # In a store that torchrun shares, gloo would find the addresses of killed processes.
    environment |= {
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(tmp_path),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        WARM_CHILDREN_VARIABLE: "1",
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, start_new_session=True, **pipes)
    try:
        output, errors = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, errors
    assert f"resuming from two.pt, after step {LAST_SAVED}" in output
    assert printed_losses(output) == pytest.approx(expected_losses, abs=1e-4)
    before_kill, after_resume = sample_numbers(tmp_path, 0, ranks=2), sample_numbers(tmp_path, 1, ranks=2)
    assert before_kill == uninterrupted[: len(before_kill)]
    assert len(before_kill) == KILLED_AFTER
    assert after_resume == uninterrupted[LAST_SAVED:]
