"""The report: tables of measurements, the reasons for missing ones, and the goals. Pure functions of the results."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from benchmarks.augmentation.measuring import CaseResult, Row
from benchmarks.running import Verdict, format_table, median

KERNELS = "gpuload fused, kernels alone"
KERNELS_REPLAYED = f"{KERNELS}, as a graph"
# Maximum CPU milliseconds per image.
CPU_GOALS_MS = {"classic": 0.25, "classic + ColorJitter": 0.5}
# Dense batches: gpuload's row, the peer's row, and the minimum ratio of the peer's time to gpuload's. The policies of
# different libraries draw different operations, so their times are not compared.
DENSE_GOALS = (
    ("gl.Augment torch", "Kornia AugmentationSequential", 3.0),
    ("gl.Augment torch", "torchvision v2 per batch", 1.0),
    ("gl.Augment kornia", "Kornia AugmentationSequential", 1.2),
    ("gl.Augment dali", "DALI's dynamic mode", 0.9),
)
POLICIES = ("RandAugment", "TrivialAugment")
# Images per second of the fused kernels: minimum and aim; and the minimum ratio to Kornia's rate.
CUDA_RATE, CUDA_AIM, CUDA_TIMES_KORNIA = 1e6, 3e6, 10.0


def median_ms(row: Row | None) -> float | None:
    """Return the median time for a batch; None if the row was not measured."""
    return median([reading.ms for reading in row.readings]) if row is not None else None


def ratio(row: Row | None, other: Row | None) -> tuple[float, float, float] | None:
    """Divide a row's times by another row's, within rounds. Returns the median, the minimum and the maximum."""
    if row is None or other is None:
        return None
    ratios = [mine.ms / theirs.ms for mine, theirs in zip(row.readings, other.readings, strict=False) if theirs.ms]
    return (statistics.median(ratios), min(ratios), max(ratios)) if ratios else None


def base_of(rows: dict[str, Row]) -> str:
    """Return the name of the baseline row: the backend that gpuload chooses by default."""
    ours = (f"{entry} {backend}" for backend in ("fused", "torch") for entry in ("gpuload", "gl.Augment"))
    return next((name for name in ours if median_ms(rows.get(name))), "gpuload torch")


def tables(results: Sequence[CaseResult], batch: int, where: str) -> list[str]:
    """Format tables with a row for each case and a column for each contender: milliseconds for a batch, images per
    second, and the ratio of the time to that of gpuload's default, within rounds."""
    names = list(dict.fromkeys(name for result in results for name in result.rows))

    def ms_of(result: CaseResult, name: str) -> str:
        return _figure(median_ms(result.rows.get(name)), "{:.3g}")

    def rate_of(result: CaseResult, name: str) -> str:
        ms = median_ms(result.rows.get(name))
        return _figure(ms and 1000 * batch / ms, "{:,.0f}")

    def times_of(result: CaseResult, name: str) -> str:
        times = ratio(result.rows.get(name), result.rows.get(base_of(result.rows)))
        return "{:.2f} ({:.2f} … {:.2f})".format(*times) if times else "–"

    texts = []
    for title, cell in ((f"ms for a batch of {batch}", ms_of), ("images/s", rate_of), ("times the default", times_of)):
        rows = []
        for result in results:
            cells = []
            for name in names:
                row = result.rows.get(name, Row())
                cells.append("failed" if row.failed else cell(result, name) + ("*" if row.falls_back else ""))
            rows.append([result.name, *cells, f"{result.roofline_ms:.3g}"])
        texts.append(format_table(["", *names, "a plain copy, ms"], rows, f"{where}: {title}"))
    return texts


def notes(results: Sequence[CaseResult]) -> list[str]:
    """List the transforms that torch runs instead of a backend, the rows that were not measured, and the failures."""
    fallbacks: dict[str, dict[str, None]] = {}
    missing: dict[tuple[str, str], list[str]] = {}
    failed = []
    for result in results:
        for name, row in result.rows.items():
            fallbacks.setdefault(name, {}).update(dict.fromkeys(row.falls_back))
            if row.missing:
                missing.setdefault((name, row.missing), []).append(result.name)
            if row.failed:
                failed.append(f"failed: {name}: {result.name}: {row.failed}")
    lines = [f"* {name}: torch in its place: {', '.join(names)}" for name, names in fallbacks.items() if names]
    for (name, reason), cases in missing.items():
        which = "all" if len(cases) == len(results) else ", ".join(cases)
        lines.append(f"– not measured: {name}: {which}: {reason}")
    return lines + failed


def judge(device: str, results: Iterable[CaseResult], batch: int) -> list[Verdict]:
    """Check the goals for a device."""
    return (_judge_cpu if device == "cpu" else _judge_cuda)(list(results), batch)


def _verdict(text: str, figure: float | None, form: str, met: bool | None) -> Verdict:
    if figure is None:
        return Verdict(f"{text}: not measured", None)
    return Verdict(f"{text}: {form.format(figure)}", met)


def _at_least(text: str, row: Row | None, other: Row | None, minimum: float) -> Verdict:
    times = ratio(row, other)
    return _verdict(text, times and times[0], "{:.2f}", times is not None and times[0] >= minimum)


def _judge_cpu(results: Sequence[CaseResult], batch: int) -> list[Verdict]:
    verdicts = []
    rows = {result.name: result.rows.get("gpuload torch") for result in results}
    for name, most in CPU_GOALS_MS.items():
        ms = median_ms(rows.get(name))
        image_ms = None if ms is None else ms / batch
        text = f"CPU: {name}: at most {most} ms for an image"
        verdicts.append(_verdict(text, image_ms, "{:.3f} ms", image_ms is not None and image_ms <= most))
    for result in results:
        if result.section == "dense" and not result.name.endswith(POLICIES):
            for ours, peer, minimum in DENSE_GOALS:
                text = f"CPU: {result.name}: {peer} takes at least {minimum:g} times as long as {ours}"
                verdicts.append(_at_least(text, result.rows.get(peer), result.rows.get(ours), minimum))
    return verdicts


def _judge_cuda(results: Sequence[CaseResult], batch: int) -> list[Verdict]:
    rate_text = f"CUDA: fused kernels alone: at least {CUDA_RATE:,.0f} images/s (stretch goal {CUDA_AIM:,.0f})"
    times_text = f"CUDA: fused kernels alone: at least {CUDA_TIMES_KORNIA:.0f} times Kornia"
    measured = [
        (ms, name, result)
        for result in results
        for name in (KERNELS, KERNELS_REPLAYED)
        if (ms := median_ms(result.rows.get(name)))
    ]
    if not measured:
        return [Verdict(f"{text}: not measured", None) for text in (rate_text, times_text)]
    ms, name, best = min(measured, key=lambda measurement: measurement[0])
    rate, kornia = 1000 * batch / ms, best.rows.get("Kornia AugmentationSequential")
    verdict = Verdict(f"{rate_text}: {rate:,.0f}, {best.name}", rate >= CUDA_RATE)
    return [verdict, _at_least(times_text, kornia, best.rows[name], CUDA_TIMES_KORNIA)]


def _figure(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)
