"""A real job on several processes: found by torchrun's environment, killed, restarted by its agent, gone on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

LIMIT_S = 100

TRAINING = '''
"""Two epochs of DistributedDataParallel; the state is saved after each step, with what was seen until then."""
import json, os, signal, sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import gpuload as gl
from gpuload import transforms as T

saved, kill_at = Path(sys.argv[1]), int(sys.argv[2])


class Numbered:
    def __len__(self):
        return 53

    def __getitem__(self, index):
        return np.full((9, 9, 3), index, np.uint8), index


# A store of its own for each life: in the agent's, gloo finds the addresses of processes that were killed.
life = os.environ["TORCHELASTIC_RESTART_COUNT"]
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=f"file://{saved}.store{life}", rank=rank, world_size=ranks)
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3 * 8 * 8, 1))
loader = gl.Loader(
    Numbered(), 8 // ranks, shuffle=True, seed=3, num_workers=1, device="cpu", info=True, uneven="exact",
    transforms=[T.RandomCrop(8), T.ToDtype("float32", scale=True)],
)
seen = []
if saved.exists():
    state, seen = json.loads(saved.read_text())
    loader.load_state_dict(state)
with loader:
    while (epoch := loader.state_dict()["epoch"]) < 2:
        for (images, numbers), info in loader:
            if len(seen) == kill_at and rank == ranks - 1 and life == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            model(images.flatten(1)).mean().backward()
            mine = [int(number) for number, valid in zip(numbers, info.valid) if valid]
            parts = [None] * ranks
            dist.all_gather_object(parts, mine)
            seen.append([epoch, sum(parts, [])])
            if rank == 0:
                saved.with_suffix(".new").write_text(json.dumps([loader.state_dict(), seen]))
                saved.with_suffix(".new").rename(saved)
            dist.barrier()
dist.destroy_process_group()
'''


def train(folder: Path, ranks: int, kill_at: int = -1) -> list:
    """What was seen: [epoch, samples of a step in the order of the ranks]."""
    folder.mkdir()
    script = folder / "training.py"
    script.write_text(TRAINING)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1"]
    command += [f"--nproc-per-node={ranks}", str(script), str(folder / "saved.json"), str(kill_at)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        said, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, said
    return json.loads((folder / "saved.json").read_text())[1]


@pytest.mark.timeout(3 * LIMIT_S)
def test_a_killed_rank_costs_no_sample_and_any_number_of_ranks_sees_the_same(tmp_path):
    undisturbed = train(tmp_path / "one", ranks=1)
    per_epoch = [sorted(n for e, numbers in undisturbed if e == epoch for n in numbers) for epoch in (0, 1)]
    assert per_epoch == [list(range(53))] * 2
    disturbed = train(tmp_path / "two", ranks=2, kill_at=9)
    assert disturbed == undisturbed
