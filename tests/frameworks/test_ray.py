"""Ray: workers on a cluster of two nodes, one of which dies; a program that dies; Ray Train and Ray Data."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from frameworks.jobs import LIMIT_S, logged_steps, run_successfully

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * LIMIT_S)]

DOCS = Path(__file__).parent.parent.parent / "docs" / "scaling.md"

# The main process reads the first epoch, and workers on two nodes read three more. One node dies in the third epoch,
# with an actor; before the fourth, a new node replaces it.
NODES = """
import logging, subprocess, time
import ray
from ray.cluster_utils import Cluster
from gpuload.cli.processes import tree

# A node is declared dead after five seconds without an answer, which a busy machine does not exceed.
impatient = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500, "health_check_failure_threshold": 10}
small = {"num_cpus": 1, "object_store_memory": 100 << 20}
head_node = {**small, "include_dashboard": False, "_system_config": impatient}
cluster = Cluster(initialize_head=True, head_node_args=head_node)
second_node = cluster.add_node(**small)
ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)


def log_epoch(name, loader, on_step_9=lambda: None):
    loader.set_epoch(3)
    log = StepLog(name)
    for step, (images, numbers) in enumerate(loader):
        log.log(3, images, numbers)
        if step == 9:
            on_step_9()


def options(**more):
    return {"batch_size": 32, "shuffle": True, "transforms": CHAIN, "seed": 5, **more}


def kill_node():  # all of its processes, as when a machine loses power
    for pid in tree(second_node.all_processes["raylet"][0].process.pid):
        os.kill(pid, signal.SIGKILL)
    cluster.remove_node(second_node, allow_graceful=False)
    while not loader._session.engine.deaths.causes:
        loader._session.feed.pump(0.1)


def add_node():
    cluster.add_node(**{**small, "num_cpus": 3})
    loader._session.feed.await_engine()


log_epoch("here", gl.Loader(Numbered(2000), num_workers=0, **options()))
loader = gl.Loader(Numbered(2000), workers=gl.RayWorkers(count=2, workers_per_actor=1), **options())
with loader:
    batches = iter(loader)  # starts the workers
    loader._session.feed.await_engine()
    log_epoch("there", loader)
    nodes = {actor.last_report.node for actor in loader._session.engine._actors}
    log_epoch("killed", loader, kill_node)
    deaths = loader._session.engine.deaths.causes
    log_epoch("replaced", loader, add_node)

# A program that is killed in mid-epoch.
victim = '''
import logging, os, sys, time
import ray
import gpuload as gl

class Pids:
    def __len__(self):
        return 10**6

    def __getitem__(self, index):
        time.sleep(0.01)
        return os.getpid()

ray.init(address=sys.argv[1], log_to_driver=False, logging_level=logging.ERROR)
pids = set()
for batch in gl.Loader(Pids(), 8, workers=gl.RayWorkers(count=2, workers_per_actor=2)):
    pids |= set(batch.tolist())
    if len(pids) == 2:
        print("pids", *pids, flush=True)
        time.sleep(600)
'''
program = subprocess.Popen([sys.executable, "-c", victim, cluster.address], stdout=subprocess.PIPE, text=True)
line = next(line for line in program.stdout if line.startswith("pids "))  # Ray prints lines too
pids = [int(word) for word in line.split()[1:]]
alive = [os.path.exists(f"/proc/{pid}") for pid in pids]
program.kill()
program.wait()
deadline = time.monotonic() + 60
while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
    time.sleep(0.05)
remaining = [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
report = {"nodes": len(nodes), "deaths": deaths, "alive": alive, "remaining": remaining}
(folder / "report.json").write_text(json.dumps(report))
ray.shutdown()
cluster.shutdown()
"""


def test_ray_workers_give_the_same_bits_after_a_node_died_and_end_with_the_program(tmp_path):
    run_successfully(tmp_path, NODES, {})
    expected = logged_steps(tmp_path, "here")
    assert sorted(number for _, numbers, _ in expected for number in numbers) == list(range(2000))
    for name in ("there", "killed", "replaced"):
        assert logged_steps(tmp_path, name) == expected, name
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["nodes"] == 2
    assert len(report["deaths"]) == 1
    assert "died" in report["deaths"][0]
    assert report["alive"] == [True, True]
    assert report["remaining"] == []


def example(title: str) -> str:
    """Return the program in a section of docs/scaling.md."""
    return re.search(rf"## {title}\n.*?```python\n(.*?)```", DOCS.read_text(), re.DOTALL)[1]


IMAGES = """
import logging
import ray
from PIL import Image

ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
root, results_dir = str(folder / "images"), str(folder / "results")
for index in range(48):
    path = Path(root) / ("ant", "bee")[index % 2] / f"{index:02d}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(Numbered(48)[index][0]).save(path)


def training_step(images, labels):
    rank = os.environ.get("RANK")
    with open(folder / f"steps.{rank}.jsonl", "a") as file:
        file.write(json.dumps([list(images.shape), labels.tolist()]) + "\\n")


"""


def test_documented_ray_train_and_ray_data_programs_run(tmp_path):
    script = IMAGES + example("Ray Train") + "\n\n" + example("Ray Data") + "\nray.shutdown()\n"
    run_successfully(tmp_path, script, {})
    # Each of two ranks trained on half of the samples; Ray Data was read twice: directly, and from Parquet files.
    for rank, samples in (("0", 24), ("1", 24), ("None", 96)):
        steps = [json.loads(line) for line in (tmp_path / f"steps.{rank}.jsonl").read_text().splitlines()]
        labels = [label for _, labels in steps for label in labels]
        assert len(labels) == samples
        assert {tuple(shape[1:]) for shape, _ in steps} == {(3, 224, 224)}
        if rank == "None":
            assert sum(labels) == samples // 2
