"""Examples that are ended in the middle of an epoch, and started again, train as if nothing had happened."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

import originals
import pytest
import torch.distributed as dist
import torch.nn.functional as F
from examples.conftest import FOLDER, Steps

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


def ended_and_started_again(
    run: Callable[..., str], steps: Steps, monkeypatch: pytest.MonkeyPatch, name: str, where: str, *options: object
) -> None:
    """Runs an example to its end, and ended in the second epoch and started again: `where` is the option of its
    folder."""
    run(name, *options, where, "whole")
    whole = list(steps.losses)
    assert len(whole) == EPOCHS * STEPS
    assert sum(whole[STEPS:]) < 0.95 * sum(whole[:STEPS])
    assert steps.sizes == [32] * len(whole)
    steps.losses.clear()
    original = F.cross_entropy

    def killing(*args, **more):
        if len(steps.losses) == KILLED_AFTER:
            raise Killed
        return original(*args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(F, "cross_entropy", killing)
        with pytest.raises(Killed):
            run(name, *options, where, "killed")
    before = list(steps.losses)
    assert before == pytest.approx(whole[:KILLED_AFTER], abs=1e-5)
    steps.losses.clear()
    run(name, *options, where, "killed")
    saved = KILLED_AFTER // 2 * 2  # the last multiple of --save-every
    assert steps.losses == pytest.approx(whole[saved:], abs=1e-5)


def test_accelerate(run, steps, monkeypatch):
    state = pytest.importorskip("accelerate.state", reason="accelerate is not installed")
    options = ["--epochs", EPOCHS, "--save-every", 2]
    try:
        ended_and_started_again(run, steps, monkeypatch, "with_accelerate", "--checkpoint", *options)
    finally:
        state.AcceleratorState._reset_state(True)


def test_lightning(run, steps, monkeypatch):
    originals.torchvision()  # Lightning's torchmetrics imports it
    pytest.importorskip("pytorch_lightning", reason="pytorch_lightning is not installed")
    options = ["--epochs", EPOCHS, "--save-every", 2]
    ended_and_started_again(run, steps, monkeypatch, "with_lightning", "--folder", *options)


def test_the_trainer_of_transformers(run, steps, monkeypatch):
    originals.torchvision()
    pytest.importorskip("transformers", reason="transformers is not installed")
    from accelerate.state import AcceleratorState

    options = ["--epochs", EPOCHS, "--save-every", 2]
    try:
        ended_and_started_again(run, steps, monkeypatch, "with_trainer", "--folder", *options)
    finally:
        AcceleratorState._reset_state(True)


# Ends its own process in the middle of training, in its first life, and is otherwise the example.
KILLING = f"""
import os, runpy, signal, sys
import torch.nn.functional as F

calls, original = 0, F.cross_entropy

def cross_entropy(*args):
    global calls
    calls += 1
    if calls > {KILLED_AFTER} and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), {int(signal.SIGKILL)})
    return original(*args)

F.cross_entropy = cross_entropy
sys.path.insert(0, {str(FOLDER)!r})
sys.argv[0] = {str(FOLDER / "ddp.py")!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_ddp_on_two_processes_of_which_one_is_killed(run, tmp_path, monkeypatch):
    """What two processes lose and take up again is what one process does that nothing happens to."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--epochs", EPOCHS, "--save-every", "2", "--checkpoint"]
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    undisturbed = losses(run("ddp", *options, "one.pt", "--batch-size", 32))
    assert len(undisturbed) == EPOCHS * STEPS // 2
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name)

    script = tmp_path / "killing.py"
    script.write_text(KILLING)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1"]
    command += ["--nproc-per-node=2", str(script), *map(str, options), "two.pt"]
    command += ["--batch-size", "16", "--workers", "0", "--device", "cpu"]
    # With torchrun's own store gloo finds the addresses of processes that were killed.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment["TMPDIR"] = str(tmp_path)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, start_new_session=True, **pipes)
    try:
        said, errors = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, errors
    assert "goes on from two.pt, after step 6" in said
    assert losses(said) == pytest.approx(undisturbed, abs=1e-4)
    assert not dist.is_initialized()


def losses(text: str) -> dict[int, float]:
    """The loss of each step that was printed."""
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", text)}
