"""Run a file of torchdata's tests with `gpuload.Loader` in place of its `StatefulDataLoader`.

    python tests/dataloader/torchdata_suites.py FOLDER/test_state_dict.py [-k NAME]

The files are not part of this repository: FOLDER is ``test/stateful_dataloader`` of a checkout of pytorch/data v0.11.
`test_torchdata_suites.py` lists the tests that fail, and why.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

__all__ = ["outcomes"]

FOLDER = "GPULOAD_TORCHDATA_TESTS"
LIMIT_S = 3600
TEST_LIMIT_S = 300


def outcomes(path: Path, *arguments: str) -> dict[str, str]:
    """Run a file and return for each test, ``Class.test``, "passed", "skipped", or the message of its failure."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, __file__, str(path), f"--junit-xml={report}", *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
        if not report.exists():
            raise RuntimeError(f"{path.name} could not be run:\n{done.stdout}\n{done.stderr}")
        return {_name(case): _outcome(case) for case in ElementTree.parse(report).iter("testcase")}


def _name(case: ElementTree.Element) -> str:
    return f"{case.attrib['classname'].rpartition('.')[2]}.{case.attrib['name']}"


def _outcome(case: ElementTree.Element) -> str:
    for kind in ("failure", "error"):
        if (failure := case.find(kind)) is not None:
            return failure.attrib.get("message", kind)
    return "passed" if case.find("skipped") is None else "skipped"


def _worker_snapshot(worker: dict[str, Any]) -> dict[str, Any]:
    from gpuload.loader.state import from_json

    states = {owner: from_json(state, owner) for owner, state in (worker["state"] or {}).items()}
    fetcher = {"dataset_iter_state": states.get("iterator"), "fetcher_ended": worker.get("ended")}
    return {"dataset_state": states.get("dataset"), "fetcher_state": fetcher}


def _run(arguments: list[str]) -> int:
    """Put `Loader` in place and run pytest. Runs in a separate process."""
    import cloudpickle
    import pytest
    import torchdata.stateful_dataloader as theirs

    import gpuload as gl

    class StatefulDataLoader(gl.Loader):
        """A loader that accepts `snapshot_every_n_steps`. Its states repeat their content under torchdata's private
        names, which some tests inspect; nothing is read from these copies."""

        def __init__(self, *arguments, snapshot_every_n_steps=1, **options):
            super().__init__(*arguments, **{"device": "cpu", "num_workers": 0, **options})
            self._auto_collation = self.batch_size is not None or self.batch_sampler is not None

        def state_dict(self):
            state = super().state_dict()
            workers = state.get("stream", {}).get("workers") or [{"state": None}] * max(1, self.num_workers)
            snapshots = [_worker_snapshot(worker) for worker in workers]
            if not self.num_workers:
                return {**state, **snapshots[0]}
            snapshot = {
                "_worker_snapshots": {
                    f"worker_{number}": worker_snapshot for number, worker_snapshot in enumerate(snapshots)
                }
            }
            return {**state, "_snapshot": snapshot}

    theirs.StatefulDataLoader = StatefulDataLoader  # pyright: ignore[reportAttributeAccessIssue]

    class ByValue:
        """A plugin that pickles the file by value, so that workers do not import it and torch's test tools."""

        def pytest_collection_finish(self) -> None:
            cloudpickle.register_pickle_by_value(sys.modules[Path(arguments[0]).stem])

    options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(Path(arguments[0]).parent)]
    return pytest.main([*arguments, *options, f"--timeout={TEST_LIMIT_S}"], plugins=[ByValue()])


if __name__ == "__main__":
    sys.exit(_run(sys.argv[1:]))
