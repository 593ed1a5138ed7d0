"""Jobs on several processes, as torchrun starts them, whose scripts log their batches."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from helpers.warm_interpreters import WARM_CHILDREN_VARIABLE

LIMIT_S = 150

# The beginning of all scripts. The log survives a SIGKILL, since each line is passed to the kernel immediately.
COMMON = """
import hashlib, json, os, signal, sys
from pathlib import Path

import numpy as np
import torch

import gpuload as gl
from gpuload import transforms as T

folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])


class Numbered:
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        return np.random.default_rng(index).integers(0, 256, (10, 11, 3), np.uint8), index


CHAIN = [T.RandomResizedCrop(8), T.RandomHorizontalFlip(), T.ToDtype("float32", scale=True)]


def digest(images):
    return hashlib.sha256(images.numpy().tobytes()).hexdigest()


class StepLog:
    def __init__(self, name):
        self.file = open(folder / f"{name}.{os.environ.get('RANK', 0)}.jsonl", "w", buffering=1)

    def log(self, epoch, images, numbers):
        self.file.write(json.dumps([epoch, numbers.tolist(), digest(images)]) + "\\n")
"""


def run(
    folder: Path, script: str, options: dict, *, ranks: int = 1, popen: type[subprocess.Popen] = subprocess.Popen
) -> tuple[int, str]:
    """Run a script until it ends or dies, and return its exit status and output. Processes of a `popen` from
    `warm_interpreters` start with imported modules."""
    path = folder / "script.py"
    path.write_text(COMMON + script)
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    process = popen(
        [*command, str(path), str(folder), json.dumps(options)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", WARM_CHILDREN_VARIABLE: "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, output


def run_successfully(folder: Path, script: str, options: dict, **settings) -> str:
    """Run a script to its end, and return its output."""
    status, output = run(folder, script, options, **settings)
    if status:
        raise RuntimeError(f"the script ended with status {status}:\n{output}")
    return output


def logged_steps(folder: Path, name: str, rank: int = 0) -> list:
    """Return the steps in a `StepLog`: [epoch, numbers, digest of the images]."""
    return [json.loads(line) for line in (folder / f"{name}.{rank}.jsonl").read_text().splitlines()]
