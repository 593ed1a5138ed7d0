"""What all findings come to: one sentence, one exit status."""

from __future__ import annotations

from gpuload.cli.doctor.finding import Finding, as_dict, exit_status, summary

FINE = Finding("CPUs", "works", "8 CPUs for this process")
NO_GPU = Finding("GPUs", "not needed", "none: batches are made on the CPU")
SLOW = Finding("nvImageCodec", "improve", "not installed", "pip install 'gpuload[cu13]'")
SLOWER = Finding("Triton", "improve", "not installed", "pip install 'gpuload[fused]'")
BROKEN = Finding("workers", "broken", "no process can be started", "num_workers=0")


def test_the_worst_is_named_first() -> None:
    assert summary([FINE, NO_GPU]) == "All that is needed works, and nothing holds it back."
    assert summary([FINE, SLOW, SLOWER]) == (
        "All that is needed works. What holds it back most is nvImageCodec: not installed"
    )
    assert summary([SLOW, BROKEN]) == (
        "1 thing is broken, which will hurt; first of all workers: no process can be started"
    )
    assert summary([BROKEN, SLOW, BROKEN]).startswith("2 things are broken")


def test_scripts_fail_only_if_something_is_broken() -> None:
    assert [exit_status(found) for found in ([], [FINE, NO_GPU], [SLOW], [SLOW, BROKEN])] == [0, 0, 0, 1]


def test_json_has_it_all() -> None:
    assert as_dict([FINE, BROKEN]) == {
        "summary": summary([FINE, BROKEN]),
        "exit_status": 1,
        "findings": [
            {"name": "CPUs", "state": "works", "found": "8 CPUs for this process", "mend": ""},
            {"name": "workers", "state": "broken", "found": "no process can be started", "mend": "num_workers=0"},
        ],
    }
