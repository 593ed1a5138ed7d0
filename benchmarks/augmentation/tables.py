"""The report: tables of what was measured, what was not and why, and the goals. Pure functions of the results."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from benchmarks.augmentation.measuring import CaseResult, Row

__all__ = [
    "KERNELS",
    "KERNELS_REPLAYED",
    "Verdict",
    "judge",
    "median_ms",
    "notes",
    "ratio",
    "recipe_table",
    "transform_table",
]

KERNELS = "gpuload fused, kernels alone"
KERNELS_REPLAYED = f"{KERNELS}, as a graph"
HEADINGS = {
    "gpuload torch": "torch",
    "gpuload kornia": "kornia",
    "gpuload dali": "dali",
    "gpuload fused": "fused",
    "torchvision v2 per sample, Pillow": "v2\nPillow",
    "torchvision v2 per sample": "v2\nsample",
    "torchvision v2 per batch": "v2\nbatch",
    "Kornia AugmentationSequential": "Kornia\nAS",
}
# CPU milliseconds for an image, at most.
CPU_GOALS_MS = {"classic": 0.25, "classic + ColorJitter": 0.5}
# From dense batches: how many times as long Kornia's sequence takes, at least, and torchvision's on the batch.
DENSE_TIMES = {"Kornia AugmentationSequential": 3.0, "torchvision v2 per batch": 1.0}
# Images a second of the fused kernels, and how many times Kornia's.
CUDA_RATE, CUDA_AIM, CUDA_TIMES_KORNIA = 1e6, 3e6, 10.0


@dataclass(frozen=True)
class Verdict:
    """A goal, what was measured, and whether that meets it; None where it was not measured."""

    text: str
    met: bool | None


def median_ms(row: Row | None) -> float | None:
    """For a batch; None where it was not measured."""
    return statistics.median(reading.ms for reading in row.readings) if row is not None and row.readings else None


def ratio(row: Row, other: Row) -> tuple[float, float, float] | None:
    """How many times as long a row takes as another one, each round by itself: the median, the least, the greatest."""
    ratios = [mine.ms / theirs.ms for mine, theirs in zip(row.readings, other.readings, strict=False) if theirs.ms]
    return (statistics.median(ratios), min(ratios), max(ratios)) if ratios else None


def base_of(rows: dict[str, Row]) -> str:
    """The row that others are compared with: the backend that gpuload takes by itself."""
    ours = (f"{entry} {backend}" for backend in ("fused", "torch") for entry in ("gpuload", "gl.Augment"))
    return next((name for name in ours if median_ms(rows.get(name))), "gpuload torch")


def transform_table(results: Sequence[CaseResult], batch: int, where: str, *, rates: bool = False) -> Table:
    """A row for each transform and a column for each contender: milliseconds for a batch, or images a second."""
    what = "images/s" if rates else f"ms for a batch of {batch}"
    table = Table(title=f"{where}: transforms, {what}", title_justify="left", box=box.SIMPLE)
    table.add_column("transform", no_wrap=True)
    names = [name for name in HEADINGS if any(name in result.rows for result in results)]
    for name in names:
        table.add_column(HEADINGS[name], justify="right")
    table.add_column("a plain\ncopy", justify="right")
    for result in results:
        cells = [_cell(result.rows.get(name), batch, rates=rates) for name in names]
        table.add_row(result.name, *cells, _figure(result.roofline_ms, batch, rates=rates))
    return table


def recipe_table(results: Sequence[CaseResult], batch: int, where: str) -> Table:
    """A row for each contender, below the name of each recipe."""
    title = f"{where}: recipes, a batch of {batch}; ratio: to gpuload's default, within rounds"
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    table.add_column("recipe, made by", no_wrap=True)
    memory = any(reading.peak_mb for result in results for row in result.rows.values() for reading in row.readings)
    for heading in ("ms for\na batch", "images/s", "ratio (least … greatest)", "of the\nroofline"):
        table.add_column(heading, justify="right", no_wrap=True)
    if memory:
        table.add_column("peak\nMB", justify="right", no_wrap=True)
    for result in results:
        base = result.rows.get(base_of(result.rows))
        table.add_row(f"[bold]{result.name}[/]")
        for name, row in result.rows.items():
            ms, shown = median_ms(row), f"  {name}{'*' if row.falls_back else ''}"
            if ms is None:
                table.add_row(shown, "", "failed" if row.failed else "not measured")
                continue
            times = ratio(row, base) if base is not None and row is not base else None
            cells = [_figure(ms, batch), _figure(ms, batch, rates=True), _ratio(*times) if times else ""]
            cells.append(f"{result.roofline_ms / ms:.1%}")
            if memory:
                cells.append(f"{max(reading.peak_mb or 0 for reading in row.readings):,.0f}")
            table.add_row(shown, *cells)
    return table


def notes(results: Sequence[CaseResult]) -> list[str]:
    """Which transforms the reference runs in a backend's place, what was not measured, and what failed."""
    away: dict[str, dict[str, None]] = {}
    missing: dict[tuple[str, str], list[str]] = {}
    failed = []
    for result in results:
        for name, row in result.rows.items():
            away.setdefault(name, {}).update(dict.fromkeys(row.falls_back))
            if row.missing:
                missing.setdefault((name, row.missing), []).append(result.name)
            if row.failed:
                failed.append(f"failed: {name}: {result.name}: {row.failed}")
    lines = [f"* {name}: torch in its place: {', '.join(names)}" for name, names in away.items() if names]
    for (name, reason), cases in missing.items():
        lines.append(f"– not measured: {name}: {_some(cases, len(results))}: {reason}")
    return lines + failed


def judge(device: str, results: Iterable[CaseResult], batch: int) -> list[Verdict]:
    """The goals for a device."""
    return (_judge_cpu if device == "cpu" else _judge_cuda)(list(results), batch)


def _judge_cpu(results: Sequence[CaseResult], batch: int) -> list[Verdict]:
    rows = {result.name: result.rows.get("gpuload torch") for result in results}
    verdicts = []
    for name, most in CPU_GOALS_MS.items():
        text, ms = f"CPU: {name}: at most {most} ms for an image", median_ms(rows.get(name))
        if ms is None:
            verdicts.append(Verdict(f"{text}: not measured", None))
        else:
            verdicts.append(Verdict(f"{text}: {ms / batch:.3f} ms", ms / batch <= most))
    dense = [result for result in results if result.section == "dense"]
    return verdicts + [_judge_dense(one, name, least) for one in dense for name, least in DENSE_TIMES.items()]


def _judge_dense(result: CaseResult, name: str, least: float) -> Verdict:
    text = f"CPU: {result.name}: {name} takes at least {least:g} times as long as gl.Augment"
    row, own = result.rows.get(name), result.rows.get("gl.Augment torch")
    times = None if row is None or own is None else ratio(row, own)
    if times is None:
        return Verdict(f"{text}: not measured", None)
    return Verdict(f"{text}: {times[0]:.1f}", times[0] >= least)


def _judge_cuda(results: Sequence[CaseResult], batch: int) -> list[Verdict]:
    rate_text = f"CUDA: fused kernels alone: at least {CUDA_RATE:,.0f} images/s (aim {CUDA_AIM:,.0f})"
    times_text = f"CUDA: fused kernels alone: at least {CUDA_TIMES_KORNIA:.0f} times Kornia"
    measured = [
        (ms, name, result)
        for result in results
        for name in (KERNELS, KERNELS_REPLAYED)
        if (ms := median_ms(result.rows.get(name)))
    ]
    if not measured:
        return [Verdict(f"{text}: not measured", None) for text in (rate_text, times_text)]
    ms, name, best = min(measured, key=lambda found: found[0])
    rate = 1000 * batch / ms
    verdicts = [Verdict(f"{rate_text}: {rate:,.0f}, {best.name}", rate >= CUDA_RATE)]
    kornia = best.rows.get("Kornia AugmentationSequential")
    times = None if kornia is None else ratio(kornia, best.rows[name])
    if times is None:
        return [*verdicts, Verdict(f"{times_text}: not measured", None)]
    return [*verdicts, Verdict(f"{times_text}: {times[0]:.1f}", times[0] >= CUDA_TIMES_KORNIA)]


def _cell(row: Row | None, batch: int, *, rates: bool) -> str:
    if row is not None and row.failed:
        return "failed"
    ms = median_ms(row)
    if row is None or ms is None:
        return "–"
    return _figure(ms, batch, rates=rates) + ("*" if row.falls_back else "")


def _figure(ms: float, batch: int, *, rates: bool = False) -> str:
    if rates:
        rate = 1000 * batch / ms
        return f"{rate:,.0f}" if rate < 1e6 else f"{rate / 1e6:.2f} M"
    return f"{ms:.3g}" if ms < 100 else f"{ms:.0f}"


def _ratio(median: float, least: float, greatest: float) -> str:
    return f"{median:.2f}" if least == greatest else f"{median:.2f} ({least:.2f} … {greatest:.2f})"


def _some(cases: Sequence[str], of: int) -> str:
    return "all" if len(cases) == of else ", ".join(cases)
