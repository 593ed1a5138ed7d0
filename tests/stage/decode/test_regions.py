"""Whether a GPU's decoder has regions: a trial in another process, with whatever end, and what is kept of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stage.decode.test_nvimagecodec import gpu, nothing, pictures

from gpuload.stage.decode import regions
from gpuload.stage.decode.choose import choose
from gpuload.stage.decode.nvimagecodec import CPU, ENGINE, GPU, NvImageCodec, load_library
from gpuload.stage.decode.regions import LIMIT_S, fault_of_regions, find_fault, try_regions

DEVICE = torch.device("cuda", 0)
ENDED = "a trial of regions was ended by "
HERE = ("0.9.0", "a GPU", "550.54 (12, 4)")
CHOOSE = sys.modules[choose.__module__]


def python(program: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", program]


# -- what a trial may come to ----------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("print('hello'); print('{\"fault\": \"\"}')", ("", True)),
        ('print(\'{"fault": "other pixels"}\')', ("other pixels", True)),
        (
            'import os; print(\'{"fault": ""}\', flush=True); os.abort()',
            (ENDED + "SIGABRT", True),
        ),
        ("import os; os.kill(os.getpid(), 11)", (ENDED + "SIGSEGV", True)),
        ("import os; os.kill(os.getpid(), 9)", (ENDED + "SIGKILL", False)),
        ("raise MemoryError('out of memory')", ("a trial of regions failed: MemoryError: out of memory", False)),
        ('print(\'{"fault": ""}\'); raise SystemExit(3)', ("a trial of regions failed: no message", False)),
        ("import sys; sys.stderr.write('lost')", ("a trial of regions gave no answer: lost", False)),
        ("print('[]')", ("a trial of regions gave no answer: no message", False)),
    ],
)
def test_how_a_trial_ends(program, expected):
    assert try_regions(python(program)) == expected


@pytest.mark.processes
def test_a_trial_that_hangs_is_ended(monkeypatch):
    started, popen = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **given: started.append(popen(*args, **given)) or started[0])
    found = try_regions(python("import signal; signal.pause()"), limit_s=1.0)
    assert found == ("a trial of regions had not ended after 1 s", True)
    [process] = started
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_a_trial_that_cannot_be_started():
    fault, kept = try_regions(["/no/such/program"])
    assert fault.startswith("a trial of regions could not be started: [Errno 2]")
    assert not kept


# -- what is kept ----------------------------------------------------------------------------------------------------


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """What trials come to, set by tests in `comes_to`; and the commands of those that there were."""

    class Trials:
        def __init__(self) -> None:
            self.comes_to = ("ended by SIGSEGV", True)
            self.commands: list[Sequence[str]] = []
            self.folder = tmp_path / "gpuload"

        def __call__(self, command: Sequence[str]) -> tuple[str, bool]:
            self.commands.append(command)
            return self.comes_to

        def ask(self, decoder: str = GPU, here: tuple[str, ...] = HERE) -> str:
            fault_of_regions.cache_clear()  # as in another process
            return fault_of_regions(decoder, DEVICE, here)

        @property
        def files(self) -> list[Path]:
            return sorted(self.folder.iterdir()) if self.folder.exists() else []

    found = Trials()
    monkeypatch.delenv("GPULOAD_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(regions, "try_regions", found)
    yield found
    fault_of_regions.cache_clear()


def test_there_is_one_trial_for_each_decoder_version_gpu_and_driver(trials):
    assert [trials.ask(), trials.ask(), fault_of_regions(GPU, DEVICE, HERE)] == ["ended by SIGSEGV"] * 3
    assert len(trials.commands) == 1
    trials.comes_to = ("", True)
    assert trials.ask(ENGINE) == trials.ask(ENGINE) == ""
    others = [("0.9.1", *HERE[1:]), (HERE[0], "another GPU", HERE[2]), (*HERE[:2], "560.28 (12, 6)")]
    assert [trials.ask(here=here) for here in others] == [""] * 3
    assert trials.ask() == "ended by SIGSEGV"
    assert len(trials.commands) == len(trials.files) == 5


@pytest.mark.parametrize("content", ["", "no JSON", "[]", '{"asked": 7}', '{"asked": ["x"], "fault": ""}', "fault: 7"])
def test_a_file_that_is_damaged_or_foreign_is_written_anew(trials, content):
    trials.ask()
    [file] = trials.files
    if content == "fault: 7":
        content = json.dumps({"asked": [GPU, *HERE], "fault": 7})
    file.write_text(content)
    trials.comes_to = ("", True)
    assert trials.ask() == trials.ask() == ""
    assert len(trials.commands) == 2
    assert trials.files == [file]  # nothing lies beside it


def test_what_says_nothing_of_regions_is_not_kept(trials):
    trials.comes_to = ("out of memory", False)
    assert trials.ask() == fault_of_regions(GPU, DEVICE, HERE) == "out of memory"
    assert len(trials.commands) == 1  # for this process it is
    trials.comes_to = ("", True)
    assert trials.ask() == ""
    assert len(trials.files) == 1


def test_where_nothing_can_be_kept_each_process_tries(trials):
    trials.folder.write_text("a file, where the folder would be")
    assert [trials.ask(), trials.ask()] == ["ended by SIGSEGV"] * 2
    assert len(trials.commands) == 2
    trials.folder.unlink()


# -- the trial itself ------------------------------------------------------------------------------------------------


def test_the_cpus_decoder_has_no_fault():
    assert find_fault(NvImageCodec(torch.device("cpu"), 1, load_library())) == ""


def shifted(codes: list[Any]) -> list[Any]:
    """Regions from a column beside, as of a decoder that rounds them."""
    found = pictures(codes)
    return [np.roll(one, code.region is not None, 1) for one, code in zip(found, codes, strict=True)]


def no_regions(codes: list[Any]) -> list[Any]:
    return [one if code.region is None else None for one, code in zip(pictures(codes), codes, strict=True)]


@pytest.mark.parametrize(
    ("works", "text"),
    [
        (pictures, ""),
        (shifted, "the region (37, 51, 90, 101) is up to "),
        (no_regions, "it refuses a region: it gave no image and no reason"),
    ],
)
def test_regions_are_held_against_the_whole_picture(monkeypatch, works, text):
    found = find_fault(gpu(monkeypatch, {"only": GPU}, engine=nothing, gpu=works))
    assert found.startswith(text)
    assert bool(found) == bool(text)


@pytest.mark.processes
def test_the_program_of_a_trial_runs(trials):
    """With the CPU's decoder, which needs no GPU."""
    fault_of_regions(CPU, torch.device("cpu"), HERE)
    [command] = trials.commands
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.stdout, done.returncode) == ('{"fault": ""}\n', 0), done.stderr


# -- who asks --------------------------------------------------------------------------------------------------------


def test_a_gpus_decoders_are_tried_and_the_plan_says_what_came_of_it(monkeypatch, trials):
    from gpuload.decode import Decode

    made = gpu(monkeypatch, engine=pictures, gpu=pictures)
    library = made._library
    library.__version__ = "0.9.0"
    monkeypatch.setattr(CHOOSE, "load_library", lambda: library)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(CHOOSE, "driver_version", lambda: (12, 4))
    fault_of_regions.cache_clear()
    choice = choose(Decode(where="device"), DEVICE, 1)
    assert choice.text == (
        f"{ENGINE}, {GPU} on cuda:0 ({ENGINE} decodes whole images: ended by SIGSEGV; "
        f"{GPU} decodes whole images: ended by SIGSEGV)"
    )
    given = [json.loads(command[-1]) for command in trials.commands]
    assert [(one["decoder"], one["device"]) for one in given] == [(ENGINE, "cuda:0"), (GPU, "cuda:0")]
    assert {one["path"][0] for one in given} == {sys.path[0]}
    asked = [json.loads(file.read_text())["asked"] for file in trials.files]
    assert sorted(one[:3] for one in asked) == [[GPU, "0.9.0", "a GPU"], [ENGINE, "0.9.0", "a GPU"]]
    assert all(one[3].endswith("(12, 4)") for one in asked)


def test_the_cpu_needs_no_trial(trials):
    from gpuload.decode import Decode

    choice = choose(Decode(where="device"), torch.device("cpu"), 1)
    assert choice.decoder is not None
    assert choice.decoder.regions
    assert (choice.text, trials.commands) == (f"{CPU} on cpu", [])
