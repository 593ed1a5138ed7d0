"""The benchmarks for a GPU, run on the CPU: each row that can run on it, the report, and failures of single rows."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import tarfile
import time
import xml.etree.ElementTree as ElementTree
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import lacking

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import pieces, why
from benchmarks.gpu.plan import COMMANDS, FEEDS, NETWORKS, ROWS, SESSIONS, Pace
from benchmarks.gpu.rows import endless, measured
from benchmarks.gpu.tables import device_share, judge, report
from benchmarks.machine import missing_packages
from benchmarks.peers.protocol import Peer

REPOSITORY = Path(__file__).parents[3]
SCRIPT = REPOSITORY / "benchmarks" / "gpu.sh"
# The first imports of most rows.
PREIMPORTS = """
import contextlib, torch
with contextlib.suppress(ImportError): import triton.language
with contextlib.suppress(ImportError, SystemExit): import benchmarks.peers.torchvision_import
"""
# The rows that need each package.
ROWS_BY_PACKAGE = {
    "nvidia.dali": {"dali_cpu", "dali"},
    "kornia": {"kornia", "kornia_own"},
    "nvidia.nvimgcodec": {"device_decode", "both_decode", "device_decoder", "light_device"},
    "triton": {*SESSIONS, *(name for name, feed in FEEDS.items() if feed.variant.startswith("fused"))},
    "timm": {"timm"},
    "torchvision": {*FEEDS, "device"},
}


# -- the measurements of a row ----------------------------------------------------------------------------------------


class TickingDevice:
    """A device whose clock advances with each mark."""

    def __init__(self) -> None:
        self.clock = count()
        self.synchronize_count = 0

    def mark(self) -> int:
        return next(self.clock) * 10 // 4  # 0, 2, 5, 7, 10, …: a step takes 2, and 3 pass until the next

    def ms(self, start: int, end: int) -> float:
        return end - start

    def synchronize(self) -> None:
        self.synchronize_count += 1


def test_measured_counts_the_time_between_steps_as_waiting():
    device, labels_seen = TickingDevice(), []
    batches = iter([(torch.zeros(5), torch.tensor(number)) for number in range(100)])
    pace = Pace(warm_s=0, round_s=0, rounds=2, steps=3)
    figures = measured(batches, lambda images, labels: labels_seen.append(int(labels)), device, pace, 2)  # pyright: ignore
    assert labels_seen == [0, 0, 0, 3, 4, 5, 6, 7, 8]  # 0 repeats for cuDNN; 1 and 2 were prefetched
    assert figures["idle_ms"] == [3, 3]
    assert figures["waiting"] == [6 / 12, 6 / 12]  # two pauses of 3 between three steps of 2
    assert min(figures["images_per_s"]) > 0
    assert device.synchronize_count == 5  # after the first batch, and around each round


def test_endless_repeats_epochs_and_refuses_empty_ones():
    batches = endless(Peer(lambda: iter("ab"), {}))
    assert [next(batches) for _ in range(5)] == list("ababa")
    with pytest.raises(RuntimeError, match="an epoch without batches"):
        next(endless(Peer(list, {})))


# -- the report -------------------------------------------------------------------------------------------------------


def make_results(**rows: Any) -> dict[str, Any]:
    return {
        "simulated": False,
        "machine": {"cpu": "a CPU", "cpus": 16, "device": "a GPU"},
        "versions": {"torch": "2.11"},
        "absent": {},
        "photos": {"source": "photos", "files": 100, "mean_kb": {"plain": 90.0}},
        "recipe": {"size": 224, "batch_size": 256, "dtype": "float16", "channels_last": True},
        "rows": rows,
    }


def feed_figures(rate: float, waiting: float = 0.0) -> dict[str, Any]:
    figures = {"images_per_s": [rate], "next_ms": [0.2], "next_cpu_ms": [0.1]}
    return {"alone": figures} | {name: figures | {"idle_ms": [0.01], "waiting": [waiting]} for name in NETWORKS}


def row_figures(
    fused_rate: float, waiting: float, packed: float, arrays: float = 173_000, light: float = 30_000
) -> dict[str, Any]:
    """Return figures that just meet all aims if `fused_rate` is 870, and just miss those that depend on it if 849."""
    return {
        "device": feed_figures(fused_rate),
        "device_decoder": {"images_per_s": [1900, 2000, 2100]},
        "device_decode": feed_figures(fused_rate + 840),
        "both_decode": feed_figures(fused_rate + 1540),
        "packed_cuttable": feed_figures(packed),
        "light_workers": {"alone": {"images_per_s": [12_000]}},
        "light_device": {"alone": {"images_per_s": [light]}},
        "decoder": {"images_per_s": [900, 1000, 1100], "decoder": "nvImageCodec"},
        "fused": feed_figures(fused_rate, waiting),
        "dali_mixed": feed_figures(430),
        "dali_cpu": feed_figures(100),
        "torch_pillow": feed_figures(100),
        "torch_device": feed_figures(215),
        "array_file": {"images_per_s": [arrays]},
        "resident": {"images_per_s": [5e5], "stage": [5e5], "share": 0.9 if fused_rate > 860 else 0.89},
    }


def test_judge_meets_aims_at_their_limits_and_misses_aims_beyond_them():
    within_limits = row_figures(870, 0.0099, 13_000)
    beyond_limits = row_figures(849, 0.01, 12_999, 172_999, 29_999)
    assert [aim.met for aim in judge(make_results(**within_limits))] == [True] * 10
    assert [aim.met for aim in judge(make_results(**beyond_limits))] == [False] * 10
    assert [aim.met for aim in judge(make_results(**{name: {} for name in within_limits}))] == [None] * 10
    assert [aim.met for aim in judge(make_results(**within_limits) | {"simulated": True})] == [None] * 10
    dali_rows = {name: within_limits[name] for name in ("fused", "dali_mixed", "dali_cpu")}
    assert len(judge(make_results(**dali_rows))) == 1  # aims of another command's rows are dropped


@pytest.mark.parametrize(
    ("changes", "aim", "figure", "met"),
    [
        ({}, "times DALI's own pipeline, the faster one", "2.02", True),
        ({}, "times DataLoader + torchvision, the faster one", "4.05", True),
        ({"light_workers": {"alone": {"images_per_s": [31e3]}}}, "light photographs", "31,000", True),
        ({}, "of the sum of both decoders alone", "80%", True),
        ({"decoder": {}}, "of the sum of both decoders alone", "not measured", None),
        ({"device": feed_figures(900)}, "ResNet-50 waits", "3.33%", False),  # it also waits within a step
    ],
)
def test_judge_gives_the_figure_of_an_aim_and_whether_it_is_met(changes, aim, figure, met):
    figures = row_figures(870, 0.001, 13_000, light=11_000) | changes
    [verdict] = [verdict for verdict in judge(make_results(**figures)) if aim in verdict.text]
    assert (verdict.text.rpartition(": ")[2], verdict.met) == (figure, met)


def test_device_share_follows_from_both_rates():
    assert device_share(make_results(**row_figures(870, 0, 13_000))) == 0.67
    assert device_share(make_results()) == 0.5
    assert device_share(make_results(decoder={"images_per_s": [1]}, device_decoder={"images_per_s": [1e9]})) == 0.99


def test_report_names_missing_failed_and_fallback_rows():
    figures = row_figures(870, 0, 13_000) | {
        "timm": {"missing": "No module named 'timm'"},
        "torch": feed_figures(500) | {"failed": "out of memory"},
        "kornia": feed_figures(400) | {"falls_back": ["RandomResizedCrop"]},
    }
    text = report(make_results(**figures) | {"absent": {"timm": "timm's rows"}})
    for line in (
        "– not measured: timm's PrefetchLoader: No module named 'timm'",
        "– FAILED: gpuload, torch: out of memory",
        "* gpuload, kornia: torch in its place: RandomResizedCrop",
        "– not installed: timm; skipped: timm's rows",
        "met    at least 85% of the CPU's decoder alone: 87%",
    ):
        assert line in text.splitlines()
    assert max(map(len, text.splitlines())) < 160


# -- the command ------------------------------------------------------------------------------------------------------


def test_parse_selects_rows_and_refuses_wrong_options(capsys):
    assert command.parse(["why", "--only", "fused,decoder"]).rows == ["fused", "decoder"]
    assert {name for part in COMMANDS for name in command.parse([part]).rows} == set(ROWS)
    for arguments, message in (
        (["peers", "--only", "ffcv"], "got 'ffcv'"),
        (["why", "--files", "9"], "--files must be at least 256, got 9"),
        ([], "command"),
    ):
        with pytest.raises(SystemExit):
            command.parse(arguments)
        assert message in capsys.readouterr().err


@pytest.fixture
def two_photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure on two small photographs, without looking for a device."""
    folder = command.make_synthetic_photos(tmp_path / "p", count=2, height=24, width=32)
    monkeypatch.setattr(command, "find_photos", lambda cache, photos: (folder, "two"))
    monkeypatch.setattr(command, "_device", lambda device: "none")


@pytest.mark.processes
@pytest.mark.usefixtures("two_photos")
def test_failing_row_does_not_lose_other_rows(tmp_path, monkeypatch, capsys):
    figures, begun, short_limit_s = json.dumps({"alone": feed_figures(5)["alone"]}), tmp_path / "begun", 1.0
    programs = {  # the error of a row is the last line of stderr that begins with the name of an exception
        "decoder": "import os; os.write(1, b'{\\xff\\n7\\n'); print('{\"images_per_s\": [7]}')",
        "fused": f"print({figures!r}); raise MemoryError('no memory')",
        "timm": "import sys; sys.stderr.write('a.Error: x\\n'); import no_such_package",
        "torch_device": "import gpuload.no_such_module",
        "dali": "raise ImportError(\"DALI is not installed: pip install 'gpuload[dali-cu12]'\")",
        "kornia": "import sys; sys.exit('[c] ValueError: not installed\\nValueError: no\\nleft by a thread')",
        "torch": f"import time; print({figures!r}, flush=True); open({str(begun)!r}, 'w').close(); time.sleep(99)",
        "dali_cpu": "import os; os.abort()",
    }
    row, communicate = command._row, subprocess.Popen.communicate

    def limited_row(name, *args):  # only the row that does not end has a short limit, which begins once the row prints
        monkeypatch.setattr(command, "ROW_LIMIT_S", short_limit_s if name == "torch" else 60.0)
        return row(name, *args)

    def communicate_once_begun(process, *args, timeout=None):
        deadline = time.monotonic() + 60
        while timeout == short_limit_s and not begun.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return communicate(process, *args, timeout=timeout)

    monkeypatch.setattr(command, "_row", limited_row)
    monkeypatch.setattr(subprocess.Popen, "communicate", communicate_once_begun)
    monkeypatch.setattr(command.Work, "command", lambda self, name: [sys.executable, "-c", programs[name]])
    path = tmp_path / "gpu.json"
    arguments = ["peers", "--only", ",".join(programs), "--files", "2", "--batch-size", "2", "--cache", str(tmp_path)]
    assert command.main([*arguments, "--json", str(path)]) == 1
    rows = json.loads(path.read_text())["rows"]
    assert rows["decoder"]["images_per_s"] == [7]
    assert {name: row["failed"] for name, row in rows.items() if "failed" in row} == {
        "fused": "MemoryError: no memory",
        "torch_device": "ModuleNotFoundError: No module named 'gpuload.no_such_module'",
        "kornia": "ValueError: no",
        "torch": "not finished after 1 s",
        "dali_cpu": "exit status -6",
    }
    assert rows["timm"]["missing"] == "ModuleNotFoundError: No module named 'no_such_package'"
    assert rows["dali"]["missing"] == "ImportError: DALI is not installed: pip install 'gpuload[dali-cu12]'"
    assert rows["fused"]["alone"]["images_per_s"] == rows["torch"]["alone"]["images_per_s"] == [5]
    assert "gpuload, torch: not finished after 1 s" in capsys.readouterr().out


@pytest.mark.processes
def test_sigterm_ends_the_row_and_writes_the_report(tmp_path):
    folder = command.make_synthetic_photos(tmp_path / "p", count=2, height=24, width=32)
    path = tmp_path / "gpu.json"
    program = (
        "import signal, sys\nfrom benchmarks.gpu import __main__ as command\n"
        "signal.signal(signal.SIGTERM, command._ended)\ncommand._device = lambda device: 'none'\n"
        "row = 'import os, time; print(\\'{\"a\": 1}\\', flush=True); os.kill(%d, 15); time.sleep(99)'\n"
        "command.Work.command = lambda self, name: [sys.executable, '-c', row % command.os.getpid()]\n"
        "sys.exit(command.main(sys.argv[1:]))"
    )
    arguments = ["peers", "--only", "fused,torch", "--files", "2", "--batch-size", "2", "--cache", str(tmp_path)]
    arguments += ["--photos", str(folder), "--json", str(path)]
    result = subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, timeout=60
    )
    assert result.returncode == 1
    rows = json.loads(path.read_text())["rows"]
    assert (rows["fused"]["a"], rows["fused"]["failed"]) == (1, "exit status -9")
    assert rows["torch"] == {"missing": "the time was up"}
    assert "– FAILED: gpuload, fused: exit status -9" in result.stdout


@pytest.mark.usefixtures("two_photos")
def test_rows_that_do_not_fit_into_the_budget_are_not_started(tmp_path):
    path = tmp_path / "gpu.json"
    arguments = ["peers", "--files", "2", "--batch-size", "2", "--cache", str(tmp_path), "--json", str(path)]
    assert command.main([*arguments, "--budget-s", "1"]) == 0  # 1 s is less than LEAST_S
    assert {row["missing"] for row in json.loads(path.read_text())["rows"].values()} == {"the time was up"}


# -- the script -------------------------------------------------------------------------------------------------------


def run_script(part: str, folder: Path, **environment: str) -> tuple[int, str]:
    environment = {"PYTHON": sys.executable, "BUDGET_S": "800", "WHEELS": str(folder), **environment}
    result = subprocess.run(
        [str(SCRIPT), part, str(folder), "--simulate"],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=850,
    )
    assert [path.name for path in folder.iterdir()] == [f"gpu-{part}.tar.gz"], result.stdout
    with tarfile.open(folder / f"gpu-{part}.tar.gz") as archive:
        archive.extractall(folder / "extracted", filter="data")
    return result.returncode, result.stdout


# Rows that run the code of another row.
REDUNDANT_ROWS = {"decoding": {"packed_cuttable", "packed_cuttable_64", "light_device"}, "peers": {"fused"}}


@pytest.fixture(scope="module")
def forking_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter whose rows are forked from a process that has imported torch and torchvision: these imports take
    half of a row's time."""
    python = tmp_path_factory.mktemp("bin") / "python"
    forked = f'{sys.executable} -P {REPOSITORY / "tests" / "helpers" / "warm_interpreters.py"} -m "{PREIMPORTS}"'
    python.write_text(
        f"""#!/bin/sh
case "$*" in "-m benchmarks.gpu "*) shift; exec env TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES= {forked} "$@" ;; esac
exec {sys.executable} "$@"
"""
    )
    python.chmod(0o755)
    return python


def missing_rows() -> set[str]:
    """Return the rows that lack a package or a GPU."""
    needing_gpu = {name for name, feed in FEEDS.items() if feed.needs_gpu}
    return needing_gpu.union(*(ROWS_BY_PACKAGE.get(package, set()) for package in missing_packages()))


def test_usage_counts_page_faults_and_cpu_time():
    before, pages = why.Usage.of(os.getpid()), 1000
    memory, started = mmap.mmap(-1, pages * mmap.PAGESIZE), time.process_time()
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    for page in range(pages):
        memory[page * mmap.PAGESIZE] = 1
    while time.process_time() - started < 10 * why.TICK_S:
        pass
    used = why.Usage.of(os.getpid()).since(before)
    assert used.minor_faults >= pages
    assert used.user_s + used.system_s >= 8 * why.TICK_S  # of 10, since both are rounded down to ticks
    assert used.per_image(100)["minor_faults"] == used.minor_faults / 100
    assert why.Usage.of(2**22 + 1) == why.Usage()  # no such process


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(900)
def test_gpu_why_explains_each_window_of_a_session(tmp_path, forking_python):
    if "triton" in missing_packages():
        lacking.skip("triton")
    name = "packed_cuttable_64_2"
    status, printed = run_script("why", tmp_path, PYTHON=str(forking_python), ROWS=name)
    assert status == 0, printed
    [row] = json.loads((tmp_path / "extracted" / "gpu-why.json").read_text())["rows"].values()
    assert row["first_batch_s"] > 0
    assert [window["way"] for window in row["windows"]] == list(why.WAYS)
    for window in (row["first_epoch"], *row["windows"]):
        assert window["images"] > 0
        assert 0.5 < window["workers_busy"] + window["workers_idle"] < 1.05  # the rest is reading the counters
        assert ("next_p95_ms" in window) == (window.get("way") != "workers")
        assert window["look_ahead"] == 2
    assert row["first_epoch"]["planned_by_workers"] <= row["first_epoch"]["batches"] + row["first_epoch"]["look_ahead"]
    assert (tmp_path / "extracted" / "traces" / row["trace"]["file"]).stat().st_size > 0
    assert "gpuload::stage" in {function["name"] for function in row["trace"]["functions"]}
    assert SESSIONS[name].label in printed


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", ["decoding", "peers"])
def test_gpu_script_runs_each_row_on_the_cpu(tmp_path, forking_python, part):
    names = [name for name in COMMANDS[part] if name not in REDUNDANT_ROWS[part]]
    status, printed = run_script(part, tmp_path, PYTHON=str(forking_python), ROWS=",".join(names), TESTS="none")
    assert status == 0, printed
    rows = json.loads((tmp_path / "extracted" / f"gpu-{part}.json").read_text())["rows"]
    assert rows.keys() == {*names}
    assert {name for name, row in rows.items() if row.get("missing")} == missing_rows() & rows.keys()
    for name in rows.keys() - missing_rows():
        row = rows[name]
        phases = [row]
        if name == "device":
            assert min(row["copy_gb_s"], row["upload_gb_s"]) > 0
            phases = [row[network] for network in NETWORKS]
        elif name in FEEDS:
            phases = [row["alone"], *(row[network] for network in NETWORKS if FEEDS[name].feeds)]
        for phase in phases:
            assert min(phase["images_per_s"]) > 0, (name, row)
            assert 0 <= min(phase.get("waiting", [0])) <= max(phase.get("waiting", [0])) <= 1, (name, row)
        assert ROWS[name] in printed


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(900)
def test_gpu_script_collects_the_cuda_tests(tmp_path):
    status, printed = run_script("peers", tmp_path, ROWS="dali_mixed")  # no simulation runs this row
    assert status == 0, printed
    suite = ElementTree.parse(tmp_path / "extracted" / "tests.xml").getroot()[0]
    counts = {key: int(suite.attrib[key]) for key in ("tests", "skipped", "failures", "errors")}
    assert counts["tests"] > 80, "most of the tests marked cuda were not collected"
    if not torch.cuda.is_available():
        assert counts == {"tests": counts["tests"], "skipped": counts["tests"], "failures": 0, "errors": 0}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"PYTHON": "/bin/false"}, "needed, and not all there for /bin/false: torch"),
        ({"BUDGET_S": "0"}, "loaders: left out: the time was up"),
    ],
)
def test_gpu_script_leaves_an_archive_if_it_fails(tmp_path, environment, message):
    status, printed = run_script("why", tmp_path, **environment)
    assert status == 1
    assert message in printed
    assert message in (tmp_path / "extracted" / "steps.txt").read_text()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(("category", "expected"), [("DeprecationWarning", 0), ("RuntimeWarning", 1)])
def test_gpu_script_fails_only_on_runtime_warnings(tmp_path, category, expected):
    """The warnings of gpuload are RuntimeWarnings."""
    (tmp_path / "tests").mkdir()
    path = tmp_path / "tests" / "test_it.py"
    program = (
        "import pytest\nimport warnings\nwarnings.warn('old', {})\n\n@pytest.mark.cuda\ndef test_it():\n    pass\n"
    )
    path.write_text(program.format(category))
    folder = tmp_path / "results"
    folder.mkdir()
    status, printed = run_script("peers", folder, TESTS=str(path), ROWS="dali_mixed")  # no simulation runs this row
    assert status == expected, printed
    assert ("1 passed, " in printed and "old" in printed) == (expected == 0), printed


@pytest.mark.processes
def test_gpu_script_with_wrong_arguments_prints_usage(tmp_path):
    for arguments in ([], ["all"], ["why", "--quick"]):
        result = subprocess.run([str(SCRIPT), *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=30)
        assert result.returncode == 2
        assert "why|decoding|peers [FOLDER] [--simulate]" in result.stderr
    assert list(tmp_path.iterdir()) == []


# -- a file in pieces -------------------------------------------------------------------------------------------------


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "dali-1-py3.whl"
    path.write_bytes(bytes(range(256)) * 10)
    return path


def test_join_puts_together_pieces_that_arrive_one_by_one(tmp_path, wheel):
    target = tmp_path / "target"
    paths = pieces.cut(wheel, tmp_path / "cut", piece_bytes=1000)
    assert [path.stat().st_size for path in paths] == [1000, 1000, 560]
    for call, (number, missing) in enumerate([(1, "1, 3"), (0, "3")]):
        (folder := tmp_path / f"call{call}").mkdir()
        paths[number].rename(folder / paths[number].name)
        (folder / "other.whl").write_bytes(b"small")
        assert pieces.join(folder, target) == [f"dali-1-py3.whl: pieces {missing} of 3 are still missing"]
    assert pieces.join(tmp_path / "cut", target) == ["dali-1-py3.whl: put together from 3 pieces"]
    assert {path.name: path.read_bytes() for path in target.iterdir()} == {
        wheel.name: wheel.read_bytes(),
        "other.whl": b"small",
    }


def test_join_refuses_and_removes_damaged_pieces(tmp_path, wheel):
    damaged = pieces.cut(wheel, tmp_path / "cut", piece_bytes=1000)[1]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    text = r"the pieces of dali-1-py3\.whl do not make the file that was cut; bring all 3"
    with pytest.raises(ValueError, match=text):
        pieces.join(tmp_path / "cut", tmp_path / "target")
    assert list((tmp_path / "target").iterdir()) == []
