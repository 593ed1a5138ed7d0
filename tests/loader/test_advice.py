"""Each rule says its sentence where it should, and nothing where another is right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuload.loader.advice import RULES, Machine, View, advice
from gpuload.loader.stats import Part, Stats, WorkerStats

EIGHT = Machine(cpus=16)


def workers(*busy: float, **parts: float) -> dict[str, Any]:
    """Workers, and what their parts took; 1,000 samples."""
    found = tuple(Part(name.replace("_", " "), "workers", seconds, 1000) for name, seconds in parts.items())
    return {"workers": tuple(WorkerStats(n, b, 100, 0) for n, b in enumerate(busy)), "num_workers": len(busy)} | {
        "parts": found
    }


def stats(*, main: dict[str, float] | None = None, on_device: dict[str, float] | None = None, **given: Any) -> Stats:
    """Ten seconds, 100 batches."""
    parts = given.pop("parts", ())
    parts += tuple(Part(name, "main", seconds, 100) for name, seconds in (main or {}).items())
    parts += tuple(Part(name, "device", seconds, 100) for name, seconds in (on_device or {}).items())
    return Stats(**{"seconds": 10.0, "batches": 100, "images": 1000, "bytes_decoded": 600_000_000} | given, parts=parts)


def said(found: Stats, machine: Machine = EIGHT) -> tuple[str, str]:
    """The rule that speaks, and what it says."""
    view = View(found, machine)
    rule = next(rule for rule in RULES if rule(view) is not None)
    sentence = advice(found, machine)
    assert sentence == rule(view)
    assert "\n" not in sentence
    return rule.__name__, sentence


DECODING = workers(*[0.975] * 8, read=1.0, header=4.0, decode=70.0)


def test_decode_bounds():
    rule, sentence = said(stats(waiting=0.31, **DECODING))
    assert rule == "working"
    assert sentence == (
        "decode bounds: 7.8 of 8 workers busy, the loop waits 31% of the time; with 12 workers it would hardly wait"
    )


def test_more_workers_than_cpus_are_not_recommended():
    rule, sentence = said(stats(waiting=0.31, **DECODING), Machine(cpus=10))
    assert rule == "working"
    assert sentence.endswith("with 10 workers it would wait about 14%")
    for cpus in (8, 4):
        _, sentence = said(stats(waiting=0.31, **DECODING), Machine(cpus=cpus))
        assert f"more workers would not help, as this process may use {cpus} CPUs: smaller or cuttable" in sentence


def test_full_cpus_take_no_more_workers():
    _, sentence = said(stats(waiting=0.31, cpu_s=95.0, **DECODING), Machine(cpus=10))
    assert "more workers would not help, as this process uses all of its 10 CPUs" in sentence


def test_workers_elsewhere_are_not_bound_by_cpus_here():
    _, sentence = said(stats(waiting=0.5, cpu_s=10.0, elsewhere=True, **DECODING), Machine(cpus=1))
    assert "with 16 workers it would hardly wait" in sentence


def test_the_start_does_not_count():
    """Five of ten seconds were the first batch: the loop waits for a tenth of the rest."""
    assert said(stats(waiting=0.55, first_s=5.0, **DECODING))[1].count("the loop waits 10% of the time") == 1
    assert said(stats(waiting=0.5, first_s=5.0, **DECODING))[0] == "step"


def test_reading_bounds():
    slow = stats(waiting=0.6, workers_cpu_s=1.0, **workers(1.0, 1.0, read=19.0, decode=1.0))
    rule, sentence = said(slow, Machine(cpus=2))
    assert rule == "reading"
    assert sentence == (
        "reading bounds (a sample takes 19 ms): 2.0 of 2 workers busy, the loop waits 60% of the time; with 5 workers "
        "it would hardly wait"
    )
    rule, sentence = said(replace(slow, workers_cpu_s=18.0), Machine(cpus=2))
    assert rule == "reading"
    assert "takes CPU time (a sample takes 19 ms in the dataset's own code)" in sentence
    assert sentence.endswith("2 CPUs; if the dataset decodes, let it return gl.Encoded(bytes)")


def test_no_workers():
    found = stats(waiting=0.75, parts=tuple(Part(name, "main", s, 1000) for name, s in {"decode": 7.0}.items()))
    rule, sentence = said(found)
    assert rule == "working"
    assert sentence == (
        "decode bounds: the main process does it itself (num_workers=0), for 75% of the time; with 3 workers it would "
        "hardly wait"
    )


def test_without_nvimagecodec():
    rule, sentence = said(stats(waiting=0.31, decoded_whole=950, **DECODING))
    assert rule == "without_nvimagecodec"
    assert "950 JPEGs were decoded whole for a part of them: `gpuload doctor` says why" in sentence


def test_large_images():
    rule, sentence = said(stats(waiting=0.31, **DECODING | {"bytes_decoded": 36_000_000_000}))
    assert rule == "large_images"
    assert "12.0 megapixels decoded of each" in sentence
    assert "--short-side 512" in sentence


@pytest.mark.parametrize("found", [
    stats(waiting=0.3, **DECODING | {"bytes_decoded": 3_072_000}),
    stats(main={"collate": 3.0, "rest": 3.0}, **workers(0.4, 0.4, decode=4.0) | {"bytes_decoded": 3_072_000}),
])  # fmt: skip
def test_small_images(found: Stats):
    rule, sentence = said(found)
    assert rule == "small_images"
    assert sentence.startswith("tiny images bound: 3,072 bytes of pixels each")


def test_small_crops_of_large_files_are_no_small_images():
    found = stats(waiting=0.3, bytes_read=200_000_000, **DECODING | {"bytes_decoded": 3_072_000})
    assert said(found)[0] == "working"


def test_small_images_on_a_slow_disk_are_a_slow_disk():
    found = stats(waiting=0.6, bytes_decoded=3_072_000, **workers(1.0, read=9.0, decode=0.1))
    assert said(found)[0] == "reading"


def test_a_small_ring():
    found = stats(
        waiting=0.4, main={"slot wait": 6.0}, ring_limit_bytes=4 << 20, **workers(0.5, 0.5, read=1.0, decode=9.0)
    )
    rule, sentence = said(found)
    assert rule == "small_ring"
    assert (
        "ring_bytes=4,194,304 is too small for the batches in work, which had no room for 60% of the time" in sentence
    )
    assert sentence.endswith("try ring_bytes=8,388,608")
    assert said(replace(found, workers=tuple(replace(worker, busy=1.0) for worker in found.workers)))[0] == "working"


def test_dying_workers():
    rule, sentence = said(stats(waiting=0.4, restarts=30, **workers(0.5, 0.5, decode=9.0)))
    assert rule == "dying"
    assert sentence.startswith("dying workers bound: 30 died within 100 batches")
    assert said(stats(waiting=0.4, restarts=1, **workers(0.9, 0.9, decode=9.0)))[0] == "working"


def test_one_worker_has_the_work():
    rule, sentence = said(stats(waiting=0.4, **workers(0.95, 0.1, 0.1, decode=9.0)))
    assert rule == "uneven"
    assert "worker 0 bounds: it is busy 95% of the time, all 3 together 38%" in sentence


def test_nobody_has_enough_to_do():
    rule, sentence = said(stats(waiting=0.2, **workers(0.5, 0.5, decode=9.0)))
    assert rule == "waiting"
    assert sentence.endswith("raise prefetch_factor, or lower chunk_size")


def test_the_stage():
    rule, sentence = said(stats(waiting=0.1, main={"stage": 6.0, "step": 3.0}, **workers(0.9, decode=9.0)))
    assert rule == "stage"
    assert sentence.startswith(
        "the stage bounds: it takes 60% of the loop's time, 60 ms for each batch; transforms run"
    )
    rule, sentence = said(stats(on_device={"stage": 7.0, "copy": 1.0}, main={"hold": 8.0}, **workers(0.3, decode=3.0)))
    assert rule == "stage"
    assert sentence.startswith("the stage bounds: it takes 70% of the device's time")


def test_copies():
    copying = stats(main={"copy": 3.0}, device="cuda:0")
    assert said(copying)[0] == "copying"
    refused = replace(copying, pinning_refused=True)
    rule, sentence = said(refused, Machine(16, memlock_bytes=64 << 10))
    assert rule == "refused_locks"
    assert "this process may lock 64 KiB of memory" in sentence
    assert "ulimit -l unlimited" in sentence
    assert "the driver refused it" in said(refused)[1]
    assert (
        said(replace(refused, waiting=0.5, **DECODING | {"parts": refused.parts + DECODING["parts"]}))[0] == "working"
    )


def test_a_step_that_bounds_has_a_word_for_the_ring():
    found = stats(main={"step": 9.0, "copy": 0.2}, pinning_refused=True, **workers(0.4, decode=4.0))
    rule, sentence = said(found, Machine(16, memlock_bytes=64 << 10))
    assert rule == "step"
    assert "so loading keeps up; the ring is not page-locked (this process may lock 64 KiB of memory)" in sentence


def test_the_main_process():
    rule, sentence = said(stats(main={"collate": 4.0, "rest": 1.0}, **workers(0.5, decode=3.0)))
    assert rule == "collating"
    assert "50% of the loop's time goes to putting batches together; a collate_fn" in sentence


def test_kept_samples():
    found = {"parts": (Part("pack", "main", 6.0, 1000),), "resident_bytes": 600_000_000, "bytes_decoded": 0}
    rule, sentence = said(stats(waiting=0.6, main={"stage": 2.0}, **found))
    assert rule == "kept_samples"
    assert sentence.startswith(
        "cutting batches out of kept samples bounds: the loop waits 60% of the time for that, in this process; workers"
    )
    assert said(stats(waiting=0.01, main={"step": 9.0}, **found))[0] == "step"


def test_the_step():
    rule, sentence = said(stats(waiting=0.004, main={"step": 9.0}, **workers(*[0.2] * 8, decode=9.0)))
    assert rule == "step"
    assert sentence == (
        "the training step bounds: the loop waits 0.4% of the time, so loading keeps up; 1.6 of 8 workers are busy, 3 "
        "would do"
    )


@pytest.mark.parametrize(("batches", "sentence"), [
    (0, "nothing was loaded yet: ask again after some batches"),
    (1, "1 batch, too few to say what bounds: ask again later"),
    (2, "2 batches, too few to say what bounds: ask again later"),
])  # fmt: skip
def test_too_little(batches: int, sentence: str):
    assert said(stats(batches=batches, waiting=0.5)) == ("nothing", sentence)


def test_each_rule_is_tested():
    names = {rule.__name__ for rule in RULES}
    text = Path(__file__).read_text()
    assert {name for name in names if f'"{name}"' not in text} == set()


def test_this_machine():
    here = Machine.here()
    assert here.cpus >= 1
    assert here.memlock_bytes is None or here.memlock_bytes >= 0
