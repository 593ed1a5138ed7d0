"""The soak test kills workers, damages files, and reports both."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from benchmarks import soak


@pytest.mark.slow
@pytest.mark.processes
def test_soak_kills_workers_and_accounts_for_damaged_files(jpeg_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "soak.json"
    arguments = ["--photos", jpeg_folder, "--cache", tmp_path, "--files", 48, "--damaged", 0.15, "--batch-size", 16]
    options = ["--minutes", 0.05, "--kill-every", 0.3, "--workers", 1, "--json", path]
    with pytest.warns(RuntimeWarning, match="it was skipped"):
        soak.main([*map(str, (*arguments, *options))])  # too short a run to judge memory and restarts
    report = json.loads(path.read_text())
    for kind, samples in (("files", 48), ("table", 48 * soak.ROWS_PER_FILE), ("stream", 48 * soak.ROWS_PER_FILE)):
        figures, promises = report[kind]["figures"], report[kind]["promises"]
        assert figures["epochs"] >= 4
        assert figures["samples"] + figures["refused"] == figures["epochs"] * samples
        assert (figures["refused"] > 0) == (kind == "files")  # only files are damaged
        assert report[kind]["kills"] > 0
        for promise in ("every good sample", "every damaged file", "workers killed", "every slot"):
            assert [met for text, met in promises.items() if text.startswith(promise)] == [True], promise


def test_killer_that_failed_did_not_run_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    killer = soak.Killer(object(), 0.0, 0)  # pyright: ignore[reportArgumentType]  it has no session to kill
    killer.start()
    killer.join()
    killer.stop()
    assert not killer.ran_to_end
