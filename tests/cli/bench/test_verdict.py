"""Which part is the bottleneck, and which setting is recommended, by rates as machines have them."""

from __future__ import annotations

from typing import cast

import pytest

from gpuload.cli.bench.parts import Bench, measure_all
from gpuload.cli.bench.verdict import Part, Setting, bound_by, candidates, recommended
from gpuload.errors import LimitError


def parts(read: float, decode: float, augment: float, copy: float = 90_000) -> dict[str, Part]:
    """Their rates, for two processors; each takes all of one, but reading, which waits."""
    return {
        "read": Part("read", "2 workers", read, 0.05, 130_000),
        "decode": Part("decode", "2 workers", decode, 2000 / decode, 500_000),
        "augment": Part("augment", "CPU", augment, 1000 / augment, None),
        "copy": Part("copy", "to cuda:0", copy, 0.01, 500_000),
    }


@pytest.mark.parametrize(
    ("rates", "name", "why"),
    [
        (
            (20_000, 2_000, 9_000),
            "decoding",
            "decoding is the bottleneck, at 2,000 images/s; augmenting alone 9,000, ",
        ),
        ((20_000, 8_000, 3_000), "augmenting", "augmenting is the bottleneck, at 3,000 images/s; decoding alone 8,000"),
        ((300, 290, 9_000), "reading", "reading is the bottleneck, at 290 images/s; augmenting alone 9,000"),
        ((20_000, 8_000, 9_000, 1_000), "copying", "copying is the bottleneck, at 1,000 images/s"),
    ],
)
def test_on_a_gpu_the_slowest_part_is_the_bottleneck(rates: tuple[float, ...], name: str, why: str) -> None:
    found = bound_by(**parts(*rates), cpus=2, on_cpu=False)
    assert found[0] == name
    assert found[1].startswith(why)


@pytest.mark.parametrize(
    ("rates", "name", "why"),
    [
        ((20_000, 2_000, 9_000), "decoding",
         "decoding is the bottleneck: of the 2 CPUs, an image takes workers 1.00 ms and the transforms 0.11 ms"),
        # The stage alone is the faster of the two, but of one processor, which it takes away from the workers.
        ((20_000, 2_000, 900), "augmenting",
         "augmenting is the bottleneck: of the 2 CPUs, an image takes workers 1.00 ms and the transforms 1.11 ms"),
        ((300, 290, 900), "reading", "reading is the bottleneck, at 290 images/s; augmenting alone 900"),
    ],
)  # fmt: skip
def test_on_a_cpu_parts_share_the_processors(rates: tuple[float, ...], name: str, why: str) -> None:
    assert bound_by(**parts(*rates), cpus=2, on_cpu=True) == (name, why)


def test_the_fewest_workers_that_are_nearly_as_fast_are_recommended() -> None:
    settings = [Setting(1, 2, 500, 2), Setting(4, 2, 985, 2), Setting(8, 2, 1000, 2), Setting(4, 4, 990, 2)]
    assert recommended(settings) is settings[1]
    assert recommended([Setting(4, 2, 900, 2), Setting(4, 4, 1000, 2)]).prefetch_factor == 4


@pytest.mark.parametrize(("cpus", "tried"), [(1, [1, 2]), (2, [1, 2, 3]), (8, [1, 4, 7, 8, 12])])
def test_numbers_of_workers_around_the_cpus_are_tried(cpus: int, tried: list[int]) -> None:
    assert candidates(cpus, max(1, cpus - 1)) == tried


def test_megabytes_a_second() -> None:
    assert Part("read", "1 worker", 1000, 0.1, 130_000).mb_per_s == 130
    assert Part("augment", "CPU", 1000, 0.1, None).mb_per_s is None


class Waits:
    """A machine with two CPUs, where each worker waits for a disk nearly all the time, up to 40 of them at once."""

    def __init__(self) -> None:
        self.tried: list[tuple[int, int]] = []

    def reading(self, workers: int) -> Part:
        return Part("read", "workers", 45.0 * workers, 0.1, 1000)

    decoding = staging = reading

    def copying(self, image_bytes: float) -> Part:
        return Part("copy", "within memory", 90_000, 0.01, image_bytes)

    def loading(self, workers: int, prefetch: int) -> tuple[Setting, int]:
        self.tried.append((workers, prefetch))
        if workers > 40:
            raise LimitError("too few open files")
        return Setting(workers, prefetch, 45.0 * workers, 0.1, "reading is …", (4 * workers, max(2, workers // 2))), 0


def test_the_setting_that_stats_names_is_tried() -> None:
    bench, done, remarks = Waits(), [], []
    found = measure_all(cast(Bench, bench), 2, lambda number, total, made: done.append((number, total)), remarks.append)
    assert bench.tried == [(1, 2), (2, 2), (3, 2), (12, 2), (48, 6), (12, 4)]
    assert (remarks, found.settings[-1].num_workers) == (["too few open files"], 12)
    assert done[-1][1] >= done[-1][0] == 5 + 5
