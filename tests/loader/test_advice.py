"""The advice names the true bottleneck, its remedy, and what there is to gain."""

from __future__ import annotations

import re
from dataclasses import replace
from string import Formatter
from typing import Any

import pytest

from gpuload.loader import advice as advice_module
from gpuload.loader.advice import advice
from gpuload.loader.stats import Part, Stats, WorkerStats, replace_figures


def busy_workers(*busy: float, **parts: float) -> dict[str, Any]:
    """Return the figures of busy workers whose parts take CPU time, for 1,000 samples."""
    return {
        "workers": tuple(WorkerStats(number, share, samples=100, restarts=0) for number, share in enumerate(busy)),
        "num_workers": len(busy),
        "parts": tuple(Part(name.replace("_", " "), "workers", seconds, 1000) for name, seconds in parts.items()),
        "cpu__workers_s": sum(parts.values()),
    }


def make_stats(
    *, main: dict[str, float] | None = None, on_device: dict[str, float] | None = None, **figures: Any
) -> Stats:
    """Return the stats of ten seconds and 100 batches."""
    parts = figures.pop("parts", ())
    parts += tuple(Part(name, "main", seconds, 100) for name, seconds in (main or {}).items())
    parts += tuple(Part(name, "device", seconds, 100) for name, seconds in (on_device or {}).items())
    defaults = {"seconds": 10.0, "batches": 100, "images": 1000, "decode__bytes": 600_000_000}
    return replace_stats(Stats(), **defaults | figures, parts=parts)


def replace_stats(stats: Stats, **figures: Any) -> Stats:
    """Replace figures. `ring__bytes` means the figure `bytes` of the group `ring`."""
    return replace_figures(stats, {name.replace("__", "."): value for name, value in figures.items()})


def advise(stats: Stats, *, cpus: int = 16, lockable_bytes: int | None = None) -> str:
    """Return the advice on a machine with this number of CPUs and limit on page-locked memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(advice_module, "lockable_bytes", lambda: lockable_bytes)
        sentence = advice(replace_stats(stats, cpu__count=cpus))
    assert "\n" not in sentence
    return sentence


def without_gain(sentence: str) -> str:
    """Return the sentence without its end, which says how much there is to gain."""
    explanation, gain = sentence.split("; faster loading could raise throughput by at most ")
    assert "%; next comes " in gain
    return explanation


DECODING = busy_workers(*[0.975] * 8, read=1.0, header=4.0, decode=70.0)
DECODING |= {"decode__counts": {"nvImageCodec": 1000}, "prefetch_factor": 3}


def test_advice_with_busy_decoding_workers_recommends_more_workers():
    sentence = advise(make_stats(waiting=0.31, **DECODING))
    assert sentence == (
        "decode is the bottleneck: 7.8 of 8 workers are busy, and the loop waits 31% of the time; 12 workers would "
        "give about 1.4 times the throughput; faster loading could raise throughput by at most 45%; next comes the "
        "training step, which takes 69% of the loop's time"
    )


def test_advice_on_a_short_wait_states_the_small_gain_and_the_stage_as_next():
    stats = make_stats(
        waiting=0.11, main={"stage": 8.1, "step": 0.7}, cpu__seconds=15.0, **busy_workers(0.99, read=0.1, decode=9.7)
    )
    sentence = advise(replace_stats(stats, decode__counts={"simplejpeg": 1000}), cpus=2)
    assert sentence.startswith("decode is the bottleneck: 1.0 of 1 worker is busy, and the loop waits 11% of the time")
    assert sentence.endswith(
        "; faster loading could raise throughput by at most 12%; next comes the stage, which takes 81% of the loop's "
        "time"
    )


@pytest.mark.parametrize(("main", "name"), [
    ({"copy": 5.0}, "copying batches to the device"),
    ({"device decode": 5.0}, "waiting for the device's decoder"),
    ({"collate": 2.0, "rest": 3.0}, "putting batches together"),
    ({"hold": 5.0, "step": 1.0}, "the training step"),
])  # fmt: skip
def test_advice_names_the_second_largest_part_as_next(main: dict[str, float], name: str):
    sentence = advise(make_stats(waiting=0.4, main=main, stage__device="cuda:0", **DECODING))
    assert "; 13 workers would give at most 1.6 times the throughput; " in sentence
    share = 60 if name == "the training step" else 50
    assert sentence.endswith(f"; next comes {name}, which takes {share}% of the loop's time")


def test_advice_recommends_at_most_one_worker_per_cpu():
    sentence = advise(make_stats(waiting=0.31, **DECODING), cpus=10)
    assert sentence.startswith("decode is the bottleneck")
    assert without_gain(sentence).endswith("; 10 workers would give about 1.2 times the throughput")
    for cpus in (8, 4):
        sentence = advise(make_stats(waiting=0.31, **DECODING), cpus=cpus)
        text = f"more workers would not help, as this process may use only {cpus} CPUs, but smaller or cuttable JPEGs"
        assert without_gain(sentence).endswith(f"{text} would help (`gpuload pack`)")


def test_advice_counts_cpu_time_from_the_end_of_the_workers_start():
    """The counters of workers begin with their first chunk."""
    figures = DECODING | {"parts": (Part("start", "workers", 8 * 8.0, 8), *DECODING["parts"])}
    stats = make_stats(waiting=0.7, seconds=18.0, first_s=8.0, cpu__seconds=95.0, **figures)
    assert "as this process uses all of its 10 CPUs" in advise(stats, cpus=10)


TINY = {"decode__bytes": 3_072_000}  # 3,072 bytes for each of 1,000 images


BOTTLENECKS: dict[str, tuple[Stats, str]] = {
    "first batch waits": (make_stats(waiting=0.55, first_s=5.0, **DECODING),
     "decode is the bottleneck.* the loop waits 10% of the time"),
    "only the first batch waits": (make_stats(waiting=0.5, first_s=5.0, **DECODING),
     "the training step is the bottleneck"),
    "JPEGs decoded in full": (make_stats(waiting=0.31, decode__whole=950, **DECODING),
     "decode is .* 950 JPEGs were fully decoded where a part would do; `gpuload doctor` says why"),
    "tiny images": (make_stats(waiting=0.3, **DECODING | TINY),
     "tiny images are the bottleneck: 3,072 bytes of pixels each"),
    "tiny images, main process": (
     make_stats(main={"collate": 3.0, "rest": 3.0}, **busy_workers(0.4, 0.4, decode=4.0) | TINY),
     "tiny images are the bottleneck: 3,072 bytes of pixels each"),
    "small crops of large files": (make_stats(waiting=0.3, decode__read_bytes=200_000_000, **DECODING | TINY),
     "decode is the bottleneck"),
    "tiny images on a slow disk": (make_stats(waiting=0.6, **TINY, **busy_workers(1.0, read=9.0, decode=0.1)),
     "reading is the bottleneck"),
    "many deaths": (make_stats(waiting=0.4, faults__restarts=30, **busy_workers(0.5, 0.5, decode=9.0)),
     "dying workers are the bottleneck: 30 died within 100 batches"),
    "one death": (make_stats(waiting=0.4, faults__restarts=1, **busy_workers(0.9, 0.9, decode=9.0)),
     "copying the dataset's arrays is the bottleneck"),
    "one busy worker": (make_stats(waiting=0.4, **busy_workers(0.95, 0.1, 0.1, decode=9.0)),
     "worker 0 is the bottleneck: it is busy 95% of the time, the average of all 3 workers is 38%"),
    "stage in the loop": (make_stats(waiting=0.1, main={"stage": 6.0, "step": 3.0}, **busy_workers(0.5, decode=5.0)),
     "the stage is the bottleneck: it takes 60% of the loop's time, 60 ms per batch; transforms run"),
    "stage on the device": (
     make_stats(on_device={"stage": 7.0, "copy": 1.0}, main={"hold": 8.0}, **busy_workers(0.3, decode=3.0)),
     "the stage is the bottleneck: it takes 70% of the device's time"),
    "slow collation": (make_stats(main={"collate": 4.0, "rest": 1.0}, **busy_workers(0.5, decode=3.0)),
     "the main process is the bottleneck: it takes 50% of the loop's time to put batches together.* a collate_fn"),
    "large images": (make_stats(waiting=0.31, **DECODING | {"decode__bytes": 36_000_000_000}),
     "decode is the bottleneck.*12.0 megapixels decoded per image.*--short-side 512"),
    "remote workers": (make_stats(waiting=0.5, cpu__seconds=170.0, elsewhere=True, **DECODING),
     "decode is .*; 16 workers would give about 2.0 times the throughput"),
    "idle workers": (make_stats(waiting=0.2, **busy_workers(0.5, 0.5, decode=9.0)),
     r"the bottleneck is too few.*raise prefetch_factor \(for example to 4\) or lower chunk_size; faster loading"),
    "no workers": (
     make_stats(waiting=0.75, parts=(Part("decode", "main", 7.0, 1000),), decode__counts={"simplejpeg": 1000}),
     r"decode is the bottleneck: the main process does this itself \(num_workers=0\) for 75% of the time; 3 workers "
     "would give about 4.0 times the throughput; faster loading"),
    "device decoder": (make_stats(main={"device decode": 6.0, "step": 3.0}, stage__device="cuda:0"),
     "waiting for the device's decoder is the bottleneck: it takes 60% of the loop's time; "
     r"Decode\(where='both', device_share=…\) leaves some images to workers$"),
    "step and a ring that is not page-locked": (
     make_stats(main={"step": 9.0, "copy": 0.2}, stage__pinning_refused=True, **busy_workers(0.4, decode=4.0)),
     r"the training step is .* by at most 2%; the ring is not page-locked \(the driver refused it\)"),
    "step and idle workers": (make_stats(waiting=0.004, main={"step": 9.0}, **busy_workers(*[0.2] * 8, decode=9.0)),
     "the training step is the bottleneck: the loop waits 0.4% of the time, and a faster loader could raise "
     "throughput by at most 1%; 1.6 of 8 workers are busy, and 3 would be enough$"),
}  # fmt: skip


@pytest.mark.parametrize(("stats", "pattern"), BOTTLENECKS.values(), ids=BOTTLENECKS)
def test_advice_starts_with_the_bottleneck_and_contains_its_remedy(stats: Stats, pattern: str):
    sentence = advise(stats)
    assert re.match(pattern, sentence), sentence


def test_advice_on_slow_reading_depends_on_its_cpu_time():
    slow = make_stats(waiting=0.6, **busy_workers(1.0, 1.0, read=19.0, decode=1.0))
    slow = replace_stats(slow, cpu__workers_s=1.0, decode__counts={"simplejpeg": 1000})
    assert without_gain(advise(slow, cpus=2)) == (
        "reading is the bottleneck (a sample takes 19 ms): 2.0 of 2 workers are busy, and the loop waits 60% of the "
        "time; 5 workers would give about 2.5 times the throughput"
    )
    sentence = advise(replace_stats(slow, cpu__workers_s=18.0), cpus=2)
    assert sentence.startswith("reading is the bottleneck")
    assert "takes CPU time (a sample takes 19 ms in the dataset's own code)" in sentence
    assert without_gain(sentence).endswith("more workers would not help, as this process may use only 2 CPUs")
    sentence = advise(replace_stats(slow, cpu__workers_s=18.0, decode__counts={}), cpus=2)
    assert "if the dataset decodes images itself, have it return gl.read(path) or gl.Encoded(bytes) instead" in sentence


def test_advice_on_a_small_ring_recommends_a_larger_one():
    stats = make_stats(
        waiting=0.4, main={"slot wait": 6.0}, ring__limit_bytes=4 << 20, **busy_workers(0.5, 0.5, read=1.0, decode=9.0)
    )
    sentence = advise(stats)
    assert sentence.startswith("the ring is the bottleneck")
    assert "ring_bytes=4,194,304 is too small for the batches in flight. It is full 60% of the time" in sentence
    assert without_gain(sentence).endswith("try ring_bytes=8,388,608")
    stats = replace_stats(stats, workers=tuple(replace(worker, busy=1.0) for worker in stats.workers))
    assert advise(stats).startswith("copying the dataset's arrays is the bottleneck")


def test_advice_on_a_prefetch_factor_that_starves_workers_names_one_that_is_enough():
    starved = make_stats(batches=100, images=3200, waiting=0.5, **busy_workers(*[0.45] * 15, decode=9.0))
    assert without_gain(advise(replace_stats(starved, chunk_size=8, prefetch_factor=2))) == (
        "prefetch_factor=2 is the bottleneck: it gives 15 workers too few chunks to work on (6.8 of 15 workers are "
        "busy, and the loop waits 50% of the time); leave it out, or set it to 12"
    )
    assert "prefetch_factor=12 is" not in advise(replace_stats(starved, chunk_size=8, prefetch_factor=12))


def test_advice_on_copying_explains_refused_page_locking():
    copying = make_stats(main={"copy": 6.0}, stage__device="cuda:0")
    sentence = advise(copying)
    assert sentence.startswith("copying batches to the device is the bottleneck: it takes 60% of the loop's time; ")
    refused = replace_stats(copying, stage__pinning_refused=True)
    sentence = advise(refused, lockable_bytes=64 << 10)
    assert "this process may lock only 64 KiB of memory" in sentence
    assert "ulimit -l unlimited" in sentence
    assert "the driver refused it" in advise(refused)
    decoding = DECODING | {"parts": refused.parts + DECODING["parts"]}
    assert advise(replace_stats(refused, waiting=0.65, **decoding)).startswith("decode is the bottleneck")


def test_advice_names_the_start_of_workers_while_it_dominates():
    start = Part("start", "workers", 20.0, 2)
    stats = make_stats(waiting=0.97, seconds=10.4, first_s=10.0, **busy_workers(0.9, 0.9, decode=0.7))
    stats = replace_stats(stats, parts=(start, *stats.parts))
    assert advise(stats) == (
        "starting the workers is the bottleneck so far: it took 10.0 of 10.4 s, during which they import the dataset's "
        "modules and unpickle the dataset; workers start only once, not in each epoch: ask again later, or exclude "
        "the start with stats(since=…)"
    )
    # In 60 s the start matters only if it comes with each epoch and is most of what the loop waits for.
    later = replace_stats(stats, seconds=60.0, waiting=0.2)
    assert not advise(later).startswith("starting the workers")
    sentence = advise(replace_stats(later, untried=("persistent",)))
    assert sentence.startswith("starting the workers")
    assert sentence.endswith("persistent_workers=True starts them once, not in each epoch")
    assert not advise(replace_stats(later, waiting=0.9, untried=("persistent",))).startswith("starting the workers")


def test_advice_with_busy_workers_names_a_slow_stage_only_where_all_cpus_are_used():
    """A batch takes a worker 0.1 s and the loop 0.09 s, so a faster stage would only make the loop wait longer."""
    main = {"stage": 8.0, "step": 1.0}
    stats = make_stats(waiting=0.1, main=main, decode__counts={"simplejpeg": 1000}, **busy_workers(1.0, decode=10.0))
    assert advise(stats).startswith("decode is the bottleneck: 1.0 of 1 worker is busy, and the loop waits 10% of")
    assert advise(replace_stats(stats, cpu__seconds=39.0), cpus=4).startswith("the stage is the bottleneck")


# -- figures that real loaders had ------------------------------------------------------------------------------------


def test_advice_on_a_stage_of_16_percent_and_a_step_of_81_names_the_step():
    """A step of 83 ms, a transform that takes 11 ms, two workers, two busy CPUs."""
    main = {"wait": 0.001, "copy": 0.004, "stage": 1.583, "collate": 0.037, "rest": 0.28, "step": 8.157}
    stats = make_stats(
        seconds=10.06, batches=96, waiting=0.0001, main=main, **busy_workers(0.01, 0.01, header=0.125, pack=0.016)
    )
    sentence = advise(stats, cpus=2)
    assert sentence.startswith(
        "the training step is the bottleneck: the loop waits 0.0% of the time, and a faster loader could raise "
        "throughput by at most 23%; the stage takes 16% of the loop's time, 16.5 ms per batch; transforms run on "
    )


def test_advice_on_a_busy_machine_says_that_workers_wait_for_a_cpu():
    """8 ms of CPU for each sample, two workers on two CPUs that other programs keep busy."""
    figures = busy_workers(1.0, 1.0, read=20.534, header=0.085) | {"cpu__workers_s": 1.586, "decode__bytes": 0}
    stats = make_stats(
        seconds=10.393, batches=6, images=192, waiting=0.999, cpu__queued_s=19.142, cpu__seconds=1.593, **figures
    )
    sentence = advise(stats, cpus=2)
    assert sentence.startswith("reading is the bottleneck")
    assert "and takes CPU time (a sample takes 20.5 ms in the dataset's own code)" in sentence
    assert (
        "; more workers would not help, as this process may use only 2 CPUs, and other programs use them too: workers "
        "wait 93% of their time for a CPU; " in sentence
    )
    sentence = advise(replace_stats(stats, num_workers=1, workers=stats.workers[:1]), cpus=2)
    assert "the loop would wait less, but workers wait 93% of their time for a CPU that other programs use" in sentence


@pytest.mark.parametrize(("workers", "images", "cpu_s", "recommended"), [
    (8, 3808, 0.619, "32 workers"),
    (16, 7712, 1.452, "64 workers and prefetch_factor=48"),
    (32, 15168, 3.25, "128 workers and prefetch_factor=96"),
])  # fmt: skip
def test_advice_on_a_sleeping_dataset_recommends_more_workers_than_cpus(
    workers: int, images: int, cpu_s: float, recommended: str
):
    """20 ms of sleep for each sample, batches of 32, two CPUs."""
    figures = busy_workers(*[0.99] * workers, read=9.9 * workers) | {"cpu__workers_s": cpu_s, "decode__bytes": 0}
    stats = make_stats(batches=images // 32, images=images, waiting=0.98, cpu__seconds=cpu_s + 0.2, **figures)
    sentence = advise(replace_stats(stats, chunk_size=8, prefetch_factor=8), cpus=2)
    assert sentence.startswith("reading is the bottleneck")
    assert f"; {recommended} would give about 4.0 times the throughput" in sentence


def test_advice_on_a_mapped_array_names_reading_only_on_a_slow_disk():
    """The pages of an `ArrayFile` on a network disk are read while pixels are copied."""
    stats = make_stats(waiting=0.9, untried=("block", "cache"), **busy_workers(1.0, 1.0, header=0.1, decode=19.0))
    sentence = advise(replace_stats(stats, cpu__workers_s=0.9), cpus=2)
    assert sentence.startswith("reading is the bottleneck (a sample takes 19.1 ms): 2.0 of 2 workers are busy")
    assert without_gain(sentence).endswith('shuffle="block" reads neighbouring samples together')
    sentence = advise(stats, cpus=2)  # in the page cache
    assert "JPEG" not in sentence
    assert sentence.startswith("copying the dataset's arrays is the bottleneck")


def test_advice_without_jpegs_does_not_mention_jpegs():
    for parts in ({"collate": 9.0}, {"pack": 9.0}, {"plan": 9.0}, {"header": 9.0, "read": 8.0}):
        sentence = advise(make_stats(waiting=0.9, **busy_workers(1.0, **parts) | {"decode__bytes": 0}), cpus=1)
        assert "JPEG" not in sentence
        assert sentence.startswith("collate_fn is the bottleneck: ") == ("collate" in parts)
        assert without_gain(sentence).endswith("more workers would not help, as this process may use only 1 CPU")
    stats = make_stats(waiting=0.9, decode__counts={"Pillow": 1000}, **busy_workers(1.0, decode=9.0))
    assert "JPEG" not in advise(stats, cpus=1)
    assert "JPEG" in advise(replace_stats(stats, decode__counts={"simplejpeg": 1000}), cpus=1)


def test_sentences_have_known_conditions_and_existing_figures():
    figures = advice_module._Figures(make_stats(waiting=0.31, **DECODING))
    for condition, sentence in advice_module.SENTENCES.items():
        assert condition in {*figures.conditions, *advice_module.PART_NAMES, "wait"}
        for owner, _, name in (path.partition(".") for _, path, _, _ in Formatter().parse(sentence) if path):
            assert name.partition(".")[0] in dir(figures.stats if owner == "stats" else figures), sentence


@pytest.mark.parametrize(("batches", "sentence"), [
    (0, "nothing has been loaded yet: ask again after a few batches"),
    (1, "1 batch, too few to name the bottleneck: ask again later"),
    (2, "2 batches, too few to name the bottleneck: ask again later"),
])  # fmt: skip
def test_advice_on_too_few_batches_says_to_ask_again_later(batches: int, sentence: str):
    assert advise(make_stats(batches=batches, waiting=0.5)) == sentence
