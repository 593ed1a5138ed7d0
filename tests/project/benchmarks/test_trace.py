"""Workers' spans in a trace of torch's profiler: a row for each worker, nested, at the main process's times."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pictures import jpeg_bytes, smooth_image
from torch.profiler import ProfilerActivity, profile

import gpuload as gl
from benchmarks import trace
from gpuload import transforms as T
from gpuload.workers.feed import Feed

WORKERS, FILES, BATCH = 2, 24, 8


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    for number in range(FILES):
        (folder / f"{number:02d}.jpg").write_bytes(jpeg_bytes(smooth_image(60, 80, number)))
    return folder


class Patient(gl.ImageFiles):
    """Its samples come once all workers have begun to write spans, and the loop waits for a batch."""

    waits: Path

    def __getitem__(self, index: int) -> Any:
        deadline = time.monotonic() + 60
        while not (self.waits.exists() and len(os.listdir(os.environ["GPULOAD_SPANS"])) == WORKERS):
            assert time.monotonic() < deadline
            time.sleep(0.002)
        return super().__getitem__(index)


@pytest.fixture(scope="module")
def found(photos: Path) -> dict[str, Any]:
    """The trace of one epoch, as the command writes it."""
    out, Patient.waits, take = photos.parent / "trace.json", photos.parent / "waits", Feed.take

    def noted(feed: Feed) -> Any:
        Patient.waits.touch()
        return take(feed)

    arguments = [
        "--photos",
        photos,
        "--out",
        out,
        "--batch-size",
        BATCH,
        "--batches",
        FILES // BATCH,
        "--workers",
        WORKERS,
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gl, "ImageFiles", Patient)
        patch.setattr(Feed, "take", noted)
        assert trace.main([str(argument) for argument in arguments]) == 0
    return json.loads(out.read_text())


def spans(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in found["traceEvents"] if event.get("cat") == "gpuload"]


GRAIN_NS = 2  # of times in microseconds since some year, as floating point


def is_within(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    a, b = (round(1000 * event["ts"]) for event in (outer, inner))
    return a <= b + GRAIN_NS and b + round(1000 * inner["dur"]) <= a + round(1000 * outer["dur"]) + GRAIN_NS


@pytest.mark.slow
@pytest.mark.processes
def test_each_worker_has_its_row(found):
    names = {
        event["pid"]: event["args"]["name"]
        for event in found["traceEvents"]
        if event["name"] == "process_name" and str(event["args"]["name"]).startswith("gpuload worker")
    }
    assert sorted(names.values()) == ["gpuload worker 0", "gpuload worker 1"]
    assert {event["pid"] for event in spans(found)} <= names.keys()
    assert os.getpid() not in names


@pytest.mark.slow
@pytest.mark.processes
def test_spans_nest_in_their_chunk(found):
    own = spans(found)
    chunks = {event["args"]["chunk"]: event for event in own if event["name"] == "chunk"}
    assert sum(event["args"]["rows"] for event in chunks.values()) == FILES
    assert {event["args"]["status"] for event in chunks.values()} == {"DONE"}
    count = dict.fromkeys(("read", "header", "decode"), 0)
    for event in own:
        chunk = chunks[event["args"]["chunk"]]
        assert event["pid"] == chunk["pid"]
        if event["name"] == "idle":
            assert not is_within(event, chunk)
            assert event["ts"] <= chunk["ts"]
        else:
            assert is_within(event, chunk), event
        if event["name"] in count:
            count[event["name"]] += 1
    assert count == dict.fromkeys(count, FILES)


@pytest.mark.slow
@pytest.mark.processes
def test_no_two_spans_of_a_row_cross(found):
    """Else viewers would leave out one of them."""
    rows: dict[int, list[dict[str, Any]]] = {}
    for event in sorted(spans(found), key=lambda event: (event["ts"], -event["dur"])):
        around = rows.setdefault(event["pid"], [])
        while around and 1000 * event["ts"] + GRAIN_NS >= 1000 * (around[-1]["ts"] + around[-1]["dur"]):
            around.pop()
        assert not around or is_within(event, around[-1]), (event, around[-1])
        around.append(event)


@pytest.mark.slow
@pytest.mark.processes
def test_workers_are_at_work_while_the_main_process_is(found):
    ranges = [event for event in found["traceEvents"] if event["name"].startswith("gpuload::")]
    assert {event["name"] for event in ranges} == {"gpuload::wait", "gpuload::copy", "gpuload::stage"}
    assert {event["pid"] for event in ranges} == {os.getpid()}
    first = min(event["ts"] for event in ranges)
    last = max(event["ts"] + event["dur"] for event in ranges)
    chunks = [event for event in spans(found) if event["name"] == "chunk"]
    assert min(event["ts"] + event["dur"] for event in chunks) > first  # the loop waited for them
    assert max(event["ts"] + event["dur"] for event in chunks) < last


@pytest.mark.slow
def test_the_profilers_times_are_those_of_the_system_clock(tmp_path):
    """Which is what spans are brought to, by the distance of two clocks."""
    from gpuload.workers.spans import _clocks_apart_ns

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        apart = _clocks_apart_ns()
        begin = time.monotonic_ns()
        with torch.profiler.record_function("marked"):
            inner_begin = time.monotonic_ns()
            inner_end = time.monotonic_ns()
        end = time.monotonic_ns()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    found = json.loads((tmp_path / "trace.json").read_text())
    [marked] = [event for event in found["traceEvents"] if event["name"] == "marked" and event.get("ph") == "X"]
    ts = marked["ts"] * 1000 + found["baseTimeNanoseconds"] - apart
    slack = 1_000_000  # far less than a chunk; the profiler fits its clock to the system's
    assert begin - slack <= ts <= inner_begin + slack
    assert inner_end - slack <= ts + marked["dur"] * 1000 <= end + slack


def a_file(folder: Path, parent: int, spans: list[Any]) -> None:
    head = {"parent": parent, "worker": 0, "pid": parent + 1, "unix_minus_monotonic_ns": 5_000_000}
    line = {"name": "chunk", "chunk": 3, "spans": spans}
    (folder / f"{parent}-0-{parent + 1}.jsonl").write_text(f"{json.dumps(head)}\n{json.dumps(line)}\n")


A_TRACE = {
    "baseTimeNanoseconds": 4_000_000,
    "traceEvents": [{"ph": "X", "name": "step", "pid": 7, "tid": 7, "ts": 1000.0, "dur": 10.0}],
}


def test_times_are_converted(tmp_path):
    a_file(tmp_path, 7, [["idle", 500, 2000], ["chunk", 2000, 6500], ["read", 2000, 3500]])
    found = trace.joined(A_TRACE, tmp_path)
    times = {event["name"]: (event["ts"], event["dur"]) for event in spans(found)}
    assert times == {"idle": (1000.5, 1.5), "chunk": (1002.0, 4.5), "read": (1002.0, 1.5)}
    assert found["traceEvents"][0] == A_TRACE["traceEvents"][0]


def test_a_trace_of_ones_own_is_joined(tmp_path, capsys):
    a_file(tmp_path, 7, [["chunk", 2000, 6500], ["read", 2000, 3500]])
    before, after = tmp_path / "trace.json", tmp_path / "joined.json"
    before.write_text(json.dumps(A_TRACE))
    assert trace.main(["--join", str(before), "--spans", str(tmp_path), "--out", str(after)]) == 0
    assert json.loads(after.read_text()) == trace.joined(A_TRACE, tmp_path)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split() for line in printed[:2]] == [
        ["process", "8:", "chunk", "0.0", "ms", "1", "times"],
        ["process", "8:", "read", "0.0", "ms", "1", "times"],
    ]
    assert printed[2] == f"{after}: open it at https://ui.perfetto.dev"


def test_chunks_outside_the_trace_are_left_out(tmp_path):
    a_file(tmp_path, 7, [["chunk", 20_000, 30_000]])
    assert spans(trace.joined(A_TRACE, tmp_path)) == []


def test_spans_of_other_processes_are_refused(tmp_path, capsys):
    a_file(tmp_path, 8, [["chunk", 2000, 6500]])
    (tmp_path / "trace.json").write_text(json.dumps(A_TRACE))
    arguments = ["--join", str(tmp_path / "trace.json"), "--spans", str(tmp_path), "--out", str(tmp_path / "out.json")]
    assert trace.main(arguments) == 1
    assert capsys.readouterr().err == (
        f"{tmp_path} has no spans of workers of the traced process (7): start the program with "
        f"GPULOAD_SPANS={tmp_path}, and num_workers of at least 1\n"
    )


@pytest.mark.parametrize("arguments", [["--join", "a.json"], ["--spans", "folder"], ["--workers", "0"]])
def test_wrong_arguments(arguments, capsys):
    with pytest.raises(SystemExit):
        trace.parse(arguments)
    assert "--" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.processes
def test_a_folder_that_cannot_be_written_to(photos, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("GPULOAD_SPANS", str(tmp_path / "file"))
    loader = gl.Loader(gl.ImageFiles(photos), transforms=[T.CenterCrop(8)], num_workers=1, device="cpu")
    with loader, pytest.raises(gl.WorkerError, match="worker 0 cannot note what it does") as caught:
        next(iter(loader))
    assert f"GPULOAD_SPANS='{tmp_path}/file' must be a folder where workers can write their spans" in str(caught.value)
