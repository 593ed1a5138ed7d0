"""The benchmarks for a GPU run through on the CPU: every row that can run there does, and none is lost with another."""

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
# What most rows import first, where it is there.
IMPORTED = """
import contextlib, torch
with contextlib.suppress(ImportError): import triton.language
with contextlib.suppress(ImportError, SystemExit): import benchmarks.peers.torchvision_import
"""
# The rows that each package is needed for; `absent` says that it is not there.
NEEDING = {
    "nvidia.dali": {"dali_cpu", "dali"},
    "kornia": {"kornia", "kornia_own"},
    "nvidia.nvimgcodec": {"device_decode", "both_decode", "device_decoder", "light_device"},
    "triton": {*SESSIONS, *(name for name, feed in FEEDS.items() if feed.variant.startswith("fused"))},
    "timm": {"timm"},
    "torchvision": {*FEEDS, "device"},
}


# -- what a row measures ----------------------------------------------------------------------------------------------


class Ticking:
    """A device whose clock goes on by a second with each mark."""

    def __init__(self) -> None:
        self.clock = count()
        self.waits = 0

    def mark(self) -> int:
        return next(self.clock) * 10 // 4  # 0, 2, 5, 7, 10, …: a step takes 2, and 3 pass until the next

    def ms(self, start: int, end: int) -> float:
        return end - start

    def synchronize(self) -> None:
        self.waits += 1


def test_the_time_between_steps_is_what_the_network_waits():
    device, seen = Ticking(), []
    batches = iter([(torch.zeros(5), torch.tensor(number)) for number in range(100)])
    pace = Pace(warm_s=0, round_s=0, rounds=2, steps=3)
    found = measured(batches, lambda images, labels: seen.append(int(labels)), device, pace, 2)  # pyright: ignore
    assert seen == [0, 0, 0, 3, 4, 5, 6, 7, 8]  # cuDNN searches on the first one; what lay ready is not measured
    assert found["idle_ms"] == [3, 3]
    assert found["waiting"] == [6 / 12, 6 / 12]
    assert all(rate > 0 for rate in found["images_per_s"])
    assert device.waits == 5  # behind the first batch, and around each round


def test_epochs_follow_each_other():
    batches = endless(Peer(lambda: iter("ab"), {}))
    assert [next(batches) for _ in range(5)] == list("ababa")
    with pytest.raises(RuntimeError, match="an epoch without batches"):
        next(endless(Peer(list, {})))


# -- the report -------------------------------------------------------------------------------------------------------


def results(**rows: Any) -> dict[str, Any]:
    return {
        "simulated": False,
        "machine": {"cpu": "a CPU", "cpus": 16, "device": "a GPU"},
        "versions": {"torch": "2.11"},
        "absent": {},
        "photos": {"source": "photos", "files": 100, "mean_kb": {"plain": 90.0}},
        "recipe": {"size": 224, "batch_size": 256, "dtype": "float16", "channels_last": True},
        "rows": rows,
    }


def fed(rate: float, waiting: float = 0.0) -> dict[str, Any]:
    found = {"images_per_s": [rate], "next_ms": [0.2], "next_cpu_ms": [0.1]}
    return {"alone": found} | {name: found | {"idle_ms": [0.01], "waiting": [waiting]} for name in NETWORKS}


def rows(ours: float, waiting: float, packed: float, arrays: float = 173_000, light: float = 30_000) -> dict[str, Any]:
    return {
        "device": fed(ours),
        "device_decoder": {"images_per_s": [1900, 2000, 2100]},
        "device_decode": fed(ours + 840),
        "both_decode": fed(ours + 1540),
        "packed_cuttable": fed(packed),
        "light_workers": {"alone": {"images_per_s": [12_000]}},
        "light_device": {"alone": {"images_per_s": [light]}},
        "decoder": {"images_per_s": [900, 1000, 1100], "decoder": "nvImageCodec"},
        "fused": fed(ours, waiting),
        "dali_mixed": fed(430),
        "dali_cpu": fed(100),
        "torch_pillow": fed(100),
        "torch_device": fed(215),
        "array_file": {"images_per_s": [arrays]},
        "resident": {"images_per_s": [5e5], "stage": [5e5], "share": 0.9 if ours > 860 else 0.89},
    }


def test_aims():
    assert [aim.met for aim in judge(results(**rows(870, 0.0099, 13_000)))] == [True] * 10
    assert [aim.met for aim in judge(results(**rows(849, 0.01, 12_999, 172_999, 29_999)))] == [False] * 10
    assert [aim.met for aim in judge(results(**{name: {} for name in rows(0, 0, 0)}))] == [None] * 10
    assert [aim.met for aim in judge(results(**rows(870, 0, 13_000)) | {"simulated": True})] == [None] * 10


def test_an_aim_whose_rows_belong_to_another_command_is_not_listed():
    figures = rows(870, 0, 13_000)
    texts = [
        aim.text for aim in judge(results(**{name: figures[name] for name in ("fused", "dali_mixed", "dali_cpu")}))
    ]
    assert texts == ["at least 2.00 times DALI's own pipeline, the faster one: 2.02"]


def test_the_fastest_of_each_kind_of_peer_counts():
    texts = [aim.text for aim in judge(results(**rows(860, 0, 13_000)))]
    assert texts[1].endswith(": 2.00")
    assert texts[2].endswith(": 4.00")


def test_light_photographs_count_where_they_go_faster():
    found = rows(870, 0, 13_000, light=11_000)
    found["light_workers"] = {"alone": {"images_per_s": [31_000]}}
    [aim] = [aim for aim in judge(results(**found)) if "light photographs" in aim.text]
    assert (aim.text[-8:], aim.met) == (": 31,000", True)


def test_both_decoders_are_held_against_their_sum():
    found = rows(870, 0, 13_000)
    assert judge(results(**found))[-2].text.endswith("of the sum of both decoders alone, decoding with both: 80%")
    assert judge(results(**found | {"decoder": {}}))[-2].met is None


def test_the_share_that_the_gpu_decodes_follows_from_both_rates():
    assert device_share(results(**rows(870, 0, 13_000))) == 0.67
    assert device_share(results()) == 0.5
    assert device_share(results(decoder={"images_per_s": [1]}, device_decoder={"images_per_s": [1e9]})) == 0.99


def test_what_a_step_waits_for_within_itself_counts():
    found = rows(870, 0.001, 13_000) | {"device": fed(900)}
    text, met = judge(results(**found))[-1]
    assert (text.endswith(": 3.33%"), met) == (True, False)


def test_the_report_says_what_was_not_measured_and_what_failed():
    found = rows(870, 0, 13_000) | {
        "timm": {"missing": "No module named 'timm'"},
        "torch": fed(500) | {"failed": "out of memory"},
        "kornia": fed(400) | {"falls_back": ["RandomResizedCrop"]},
    }
    text = report(results(**found) | {"absent": {"timm": "timm's rows"}})
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


def test_options(capsys):
    assert command.parse(["why", "--only", "fused,decoder"]).rows == ["fused", "decoder"]
    assert {name for part in COMMANDS for name in command.parse([part]).rows} == set(ROWS)
    for wrong, told in (
        (["peers", "--only", "ffcv"], "got 'ffcv'"),
        (["why", "--files", "9"], "--files must be at least 256, got 9"),
        ([], "command"),
    ):
        with pytest.raises(SystemExit):
            command.parse(wrong)
        assert told in capsys.readouterr().err


@pytest.mark.processes
def test_a_row_that_ends_badly_loses_no_other(tmp_path, monkeypatch, capsys):
    alone, begun = json.dumps({"alone": fed(5)["alone"]}), tmp_path / "begun"
    programs = {
        "decoder": "import os; os.write(1, b'{\\xff\\n7\\n'); print('{\"images_per_s\": [7]}')",
        "fused": f"print({alone!r}); raise MemoryError('no memory')",
        "timm": "import sys; sys.stderr.write('a.Error: x\\n'); import no_such_package",
        "torch_device": "import gpuload.no_such_module",
        "dali": "raise ImportError(\"DALI is not installed: pip install 'gpuload[dali-cu12]'\")",
        "kornia": "import sys; sys.exit('[c] ValueError: not installed\\nValueError: no\\nleft by a thread')",
        "torch": f"import time; print({alone!r}, flush=True); open({str(begun)!r}, 'w').close(); time.sleep(99)",
        "dali_cpu": "import os; os.abort()",
    }
    row, communicate = command._row, subprocess.Popen.communicate

    def hasty(name, *given):  # only what does not end by itself has little time, which begins when it has printed
        monkeypatch.setattr(command, "ROW_LIMIT_S", 1.0 if name == "torch" else 60.0)
        return row(name, *given)

    def once_begun(process, *given, timeout=None):
        deadline = time.monotonic() + 60
        while timeout == 1.0 and not begun.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return communicate(process, *given, timeout=timeout)

    monkeypatch.setattr(command, "_row", hasty)
    monkeypatch.setattr(subprocess.Popen, "communicate", once_begun)
    monkeypatch.setattr(command, "LEAST_S", 0.0)
    monkeypatch.setattr(command, "_device", lambda device: "none")
    monkeypatch.setattr(command.Work, "command", lambda self, name: [sys.executable, "-c", programs[name]])
    monkeypatch.setattr(
        command,
        "find_photos",
        lambda cache, photos: (command.make_synthetic_photos(cache / "p", count=2, height=24, width=32), "two"),
    )
    path = tmp_path / "gpu.json"
    arguments = ["peers", "--only", ",".join(programs), "--files", "2", "--batch-size", "2", "--cache", str(tmp_path)]
    assert command.main([*arguments, "--json", str(path)]) == 1
    found = json.loads(path.read_text())["rows"]
    assert found["decoder"]["images_per_s"] == [7]
    assert found["fused"]["failed"] == "MemoryError: no memory"
    assert found["timm"]["missing"] == "ModuleNotFoundError: No module named 'no_such_package'"
    assert found["dali"]["missing"] == "ImportError: DALI is not installed: pip install 'gpuload[dali-cu12]'"
    assert found["torch_device"]["failed"] == "ModuleNotFoundError: No module named 'gpuload.no_such_module'"
    assert found["kornia"]["failed"] == "ValueError: no"
    assert found["torch"]["failed"] == "not finished after 1 s"
    assert found["dali_cpu"]["failed"] == "exit status -6"
    assert found["fused"]["alone"]["images_per_s"] == found["torch"]["alone"]["images_per_s"] == [5]
    assert "gpuload, torch: not finished after 1 s" in capsys.readouterr().out


@pytest.mark.processes
def test_what_ends_it_leaves_a_report(tmp_path):
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
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, timeout=60
    )
    assert done.returncode == 1
    rows = json.loads(path.read_text())["rows"]
    assert (rows["fused"]["a"], rows["fused"]["failed"]) == (1, "exit status -9")
    assert rows["torch"] == {"missing": "the time was up"}
    assert "– FAILED: gpuload, fused: exit status -9" in done.stdout


def test_what_is_begun_too_late_is_not_begun(tmp_path, monkeypatch):
    monkeypatch.setattr(
        command,
        "find_photos",
        lambda cache, photos: (command.make_synthetic_photos(cache / "p", count=2, height=24, width=32), "two"),
    )
    monkeypatch.setattr(command, "_device", lambda device: "none")
    path = tmp_path / "gpu.json"
    arguments = ["peers", "--files", "2", "--batch-size", "2", "--cache", str(tmp_path), "--json", str(path)]
    assert command.main([*arguments, "--budget-s", "1"]) == 0
    assert {row["missing"] for row in json.loads(path.read_text())["rows"].values()} == {"the time was up"}


# -- the script -------------------------------------------------------------------------------------------------------


def run_script(part: str, folder: Path, **environment: str) -> tuple[int, str]:
    environment = {"PYTHON": sys.executable, "BUDGET_S": "800", "WHEELS": str(folder), **environment}
    done = subprocess.run(
        [str(SCRIPT), part, str(folder), "--simulate"],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=850,
    )
    assert [path.name for path in folder.iterdir()] == [f"gpu-{part}.tar.gz"], done.stdout
    with tarfile.open(folder / f"gpu-{part}.tar.gz") as archive:
        archive.extractall(folder / "found", filter="data")
    return done.returncode, done.stdout


# Rows that run the same code as another row.
LIKE_OTHERS = {"decoding": {"packed_cuttable", "packed_cuttable_64", "light_device"}, "peers": {"fused"}}


@pytest.fixture(scope="module")
def forking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter whose rows are forked from a process that has torch and torchvision, which is half of what they
    would take."""
    python = tmp_path_factory.mktemp("bin") / "python"
    forked = f'{sys.executable} -P {REPOSITORY / "tests" / "helpers" / "warm_interpreters.py"} -m "{IMPORTED}"'
    python.write_text(
        f"""#!/bin/sh
case "$*" in "-m benchmarks.gpu "*) shift; exec env TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES= {forked} "$@" ;; esac
exec {sys.executable} "$@"
"""
    )
    python.chmod(0o755)
    return python


def lacking_rows() -> set[str]:
    """The rows that lack a package here, or a GPU."""
    needing_gpu = {name for name, feed in FEEDS.items() if feed.needs_gpu}
    return needing_gpu.union(*(NEEDING.get(package, set()) for package in missing_packages()))


def test_usage_counts_the_page_faults_and_cpu_time_of_a_process():
    before, pages = why.Usage.of(os.getpid()), 1000
    memory, started = mmap.mmap(-1, pages * mmap.PAGESIZE), time.process_time()
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    for page in range(pages):
        memory[page * mmap.PAGESIZE] = 1
    while time.process_time() - started < 10 * why.TICK_S:
        pass
    used = why.Usage.of(os.getpid()).since(before)
    assert used.minor_faults >= pages
    assert used.user_s + used.system_s >= 8 * why.TICK_S
    assert used.per_image(100)["minor_faults"] == used.minor_faults / 100
    assert why.Usage.of(2**22 + 1) == why.Usage()  # no such process


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(900)
def test_why_explains_each_window_of_a_session(tmp_path, forking):
    if "triton" in missing_packages():
        lacking.skip("triton")
    name = "packed_cuttable_64_2"
    status, printed = run_script("why", tmp_path, PYTHON=str(forking), ROWS=name)
    assert status == 0, printed
    [row] = json.loads((tmp_path / "found" / "gpu-why.json").read_text())["rows"].values()
    assert row["first_batch_s"] > 0
    assert [window["way"] for window in row["windows"]] == list(why.WAYS)
    for window in (row["first_epoch"], *row["windows"]):
        assert window["images"] > 0
        assert 0.5 < window["workers_busy"] + window["workers_idle"] < 1.05  # the rest is reading the counters
        assert ("next_p95_ms" in window) == (window.get("way") != "workers")
        assert window["look_ahead"] == 2
    assert row["first_epoch"]["planned_by_workers"] <= row["first_epoch"]["batches"] + 2
    assert (tmp_path / "found" / "traces" / row["trace"]["file"]).stat().st_size > 0
    assert "gpuload::stage" in {function["name"] for function in row["trace"]["functions"]}
    assert SESSIONS[name].label in printed


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", ["decoding", "peers"])
def test_every_row_of_a_loader_runs_through_on_the_cpu(tmp_path, forking, part):
    names = [name for name in COMMANDS[part] if name not in LIKE_OTHERS[part]]
    status, printed = run_script(part, tmp_path, PYTHON=str(forking), ROWS=",".join(names), TESTS="none")
    assert status == 0, printed
    found = json.loads((tmp_path / "found" / f"gpu-{part}.json").read_text())["rows"]
    assert found.keys() == {*names}
    assert {name for name, row in found.items() if row.get("missing")} == lacking_rows() & found.keys()
    for name in found.keys() - lacking_rows():
        row = found[name]
        phases = [row]
        if name == "device":
            assert min(row["copy_gb_s"], row["upload_gb_s"]) > 0
            phases = [row[network] for network in NETWORKS]
        elif name in FEEDS:
            phases = [row["alone"], *(row[network] for network in NETWORKS if FEEDS[name].feeds)]
        assert all(min(phase["images_per_s"]) > 0 for phase in phases), (name, row)
        assert all(0 <= share <= 1 for phase in phases for share in phase.get("waiting", []))
        assert ROWS[name] in printed


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(900)
def test_tests_for_a_gpu_are_collected(tmp_path):
    status, printed = run_script("peers", tmp_path, ROWS="dali_mixed")
    assert status == 0, printed
    suite = ElementTree.parse(tmp_path / "found" / "tests.xml").getroot()[0]
    counts = {key: int(suite.attrib[key]) for key in ("tests", "skipped", "failures", "errors")}
    assert counts["tests"] > 80
    if not torch.cuda.is_available():
        assert counts == {"tests": counts["tests"], "skipped": counts["tests"], "failures": 0, "errors": 0}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"PYTHON": "/bin/false"}, "needed, and not all there for /bin/false: torch"),
        ({"BUDGET_S": "0"}, "loaders: left out: the time was up"),
    ],
)
def test_there_is_an_archive_whatever_happens(tmp_path, environment, told):
    status, printed = run_script("why", tmp_path, **environment)
    assert status == 1
    assert told in printed
    assert told in (tmp_path / "found" / "steps.txt").read_text()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(("category", "expected"), [("DeprecationWarning", 0), ("RuntimeWarning", 1)])
def test_a_newer_librarys_warning_is_no_error(tmp_path, category, expected):
    """gpuload's own warnings are RuntimeWarnings."""
    (tmp_path / "tests").mkdir()
    path = tmp_path / "tests" / "test_it.py"
    program = (
        "import pytest\nimport warnings\nwarnings.warn('old', {})\n\n@pytest.mark.cuda\ndef test_it():\n    pass\n"
    )
    path.write_text(program.format(category))
    folder = tmp_path / "found"
    folder.mkdir()
    status, printed = run_script("peers", folder, TESTS=str(path), ROWS="dali_mixed")
    assert status == expected, printed
    assert ("1 passed, " in printed and "old" in printed) == (expected == 0), printed


@pytest.mark.processes
def test_usage(tmp_path):
    for wrong in ([], ["all"], ["why", "--quick"]):
        done = subprocess.run([str(SCRIPT), *wrong], cwd=tmp_path, capture_output=True, text=True, timeout=30)
        assert (done.returncode, "why|decoding|peers [FOLDER] [--simulate]" in done.stderr) == (2, True)
    assert list(tmp_path.iterdir()) == []


# -- a file in pieces -------------------------------------------------------------------------------------------------


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "dali-1-py3.whl"
    path.write_bytes(bytes(range(256)) * 10)
    return path


def test_pieces_that_come_one_by_one_are_put_together(tmp_path, wheel):
    target = tmp_path / "target"
    cut = pieces.cut(wheel, tmp_path / "cut", piece_bytes=1000)
    assert [path.stat().st_size for path in cut] == [1000, 1000, 560]
    for order, (number, missing) in enumerate([(1, "1, 3"), (0, "3")]):
        (folder := tmp_path / f"call{order}").mkdir()
        cut[number].rename(folder / cut[number].name)
        (folder / "other.whl").write_bytes(b"small")
        assert pieces.join(folder, target) == [f"dali-1-py3.whl: pieces {missing} of 3 are still missing"]
    assert pieces.join(tmp_path / "cut", target) == ["dali-1-py3.whl: put together from 3 pieces"]
    assert {path.name: path.read_bytes() for path in target.iterdir()} == {
        wheel.name: wheel.read_bytes(),
        "other.whl": b"small",
    }


def test_damaged_pieces_are_refused_and_removed(tmp_path, wheel):
    damaged = pieces.cut(wheel, tmp_path / "cut", piece_bytes=1000)[1]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    with pytest.raises(
        ValueError, match=r"the pieces of dali-1-py3\.whl do not make the file that was cut; bring all 3"
    ):
        pieces.join(tmp_path / "cut", tmp_path / "target")
    assert list((tmp_path / "target").iterdir()) == []
