"""Examples that are ended in the middle of an epoch, and started again, train as if nothing had happened."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.nn.functional as F
from helpers import lacking, peers
from helpers.warm_interpreters import TOO
from project.examples.conftest import FOLDER, Steps

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(300),
    # Of the frameworks' own.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]
LIMIT_S = 150
EPOCHS, STEPS, KILLED_AFTER = 2, 4, 7


class Killed(Exception):
    pass


def check_killed_run_resumes(
    run: Callable[..., str],
    steps: Steps,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    folder_option: str,
    *options: object,
) -> None:
    """Runs an example to its end, and ended in the second epoch and started again: `where` is the option of its
    folder."""
    run(name, *options, folder_option, "whole")
    uninterrupted = list(steps.losses)
    assert len(uninterrupted) == EPOCHS * STEPS
    assert sum(uninterrupted[STEPS:]) < 0.95 * sum(uninterrupted[:STEPS])
    assert steps.sizes == [32] * len(uninterrupted)
    steps.losses.clear()
    original = F.cross_entropy

    def killing(*args, **keywords):
        if len(steps.losses) == KILLED_AFTER:
            raise Killed
        return original(*args, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(F, "cross_entropy", killing)
        with pytest.raises(Killed):
            run(name, *options, folder_option, "killed")
    interrupted = list(steps.losses)
    assert interrupted == pytest.approx(uninterrupted[:KILLED_AFTER], abs=1e-5)
    steps.losses.clear()
    run(name, *options, folder_option, "killed")
    saved = KILLED_AFTER // 2 * 2  # the last multiple of --save-every
    assert steps.losses == pytest.approx(uninterrupted[saved:], abs=1e-5)


def test_dataloader_example_resumes_after_being_killed(run, steps, monkeypatch):
    options = ["--epochs", EPOCHS, "--save-every", 2]
    check_killed_run_resumes(run, steps, monkeypatch, "keep_your_loader", "--checkpoint", *options)


def test_accelerate_example_resumes_after_being_killed(run, steps, monkeypatch):
    from accelerate.state import AcceleratorState

    options = ["--epochs", EPOCHS, "--save-every", 2]
    try:
        check_killed_run_resumes(run, steps, monkeypatch, "with_accelerate", "--checkpoint", *options)
    finally:
        AcceleratorState._reset_state(True)


def test_lightning_example_resumes_after_being_killed(run, steps, monkeypatch):
    peers.torchvision()  # Lightning's torchmetrics imports it
    lacking.require("pytorch_lightning")
    options = ["--epochs", EPOCHS, "--save-every", 2]
    check_killed_run_resumes(run, steps, monkeypatch, "with_lightning", "--folder", *options)


def test_trainer_example_resumes_after_being_killed(run, steps, monkeypatch):
    peers.torchvision()
    lacking.require("transformers")
    from accelerate.state import AcceleratorState

    options = ["--epochs", EPOCHS, "--save-every", 2]
    try:
        check_killed_run_resumes(run, steps, monkeypatch, "with_trainer", "--folder", *options)
    finally:
        AcceleratorState._reset_state(True)


# The example, whose labels are the numbers of the images; it writes down what each step sees. The second process ends
# itself in the second epoch, in its first life.
RECORDING_DDP = f"""
import json, os, runpy, signal, sys
import numpy as np
import torch.nn.functional as F
import gpuload as gl

rank, life, calls = os.environ["RANK"], os.environ.get("TORCHELASTIC_RESTART_COUNT"), 0
original = F.cross_entropy


class Numbered(gl.ImageFolder):
    def __init__(self, root):
        super().__init__(root)
        self.labels = self.classes = np.arange(len(self))


def cross_entropy(scores, labels):
    global calls
    calls += 1
    if calls > {KILLED_AFTER} and rank == "1" and life == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    with open(f"seen.{{life}}.{{rank}}", "a") as file:
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


def sample_numbers(folder: Path, life: int | None, ranks: int = 1) -> list[list[int]]:
    """The numbers of the images of each step, of all processes together."""
    lines = [(folder / f"seen.{life}.{rank}").read_text().splitlines() for rank in range(ranks)]
    return [[number for line in step for number in json.loads(line)] for step in zip(*lines, strict=False)]


def printed_losses(text: str) -> dict[int, float]:
    """The loss of each step that was printed."""
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", text)}


@pytest.mark.usefixtures("warm")
def test_ddp_example_resumes_after_one_of_two_processes_is_killed(run, tmp_path, monkeypatch, capsys):
    """What two processes lose and take up again is what one process does that nothing happens to."""
    monkeypatch.syspath_prepend(FOLDER)
    options = ["--epochs", str(EPOCHS), "--save-every", "2", "--workers", "1", "--device", "cpu", "--checkpoint"]
    with socket.socket() as free_socket:
        free_socket.bind(("127.0.0.1", 0))
        port = free_socket.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(sys, "argv", ["ddp.py", *options, "one.pt", "--batch-size", "32"])
    exec(RECORDING_DDP, {"__name__": "watched"})
    expected_losses, uninterrupted = printed_losses(capsys.readouterr().out), sample_numbers(tmp_path, None)
    assert [len(expected_losses), len(uninterrupted)] == [EPOCHS * STEPS // 2, EPOCHS * STEPS]
    for epoch in range(EPOCHS):
        steps = uninterrupted[epoch * STEPS : (epoch + 1) * STEPS]
        assert sorted(number for step in steps for number in step) == list(range(32 * STEPS))

    (tmp_path / "watched.py").write_text(RECORDING_DDP)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1", "--nproc-per-node=2"]
    command += ["watched.py", *options, "two.pt", "--batch-size", "16"]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    # With torchrun's own store gloo finds the addresses of processes that were killed.
    environment |= {
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(tmp_path),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        TOO: "1",
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, start_new_session=True, **pipes)
    try:
        output, errors = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, errors
    saved = KILLED_AFTER // 2 * 2
    assert f"resuming from two.pt, after step {saved}" in output
    assert printed_losses(output) == pytest.approx(expected_losses, abs=1e-4)
    before_kill, after_resume = sample_numbers(tmp_path, 0, ranks=2), sample_numbers(tmp_path, 1, ranks=2)
    assert before_kill == uninterrupted[: len(before_kill)]
    assert len(before_kill) == KILLED_AFTER
    assert after_resume == uninterrupted[saved:]
