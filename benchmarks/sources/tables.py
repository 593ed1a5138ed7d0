"""What the rounds of reading stores say: medians, and goals by ratios within rounds. Pure functions of the results."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich import box
from rich.table import Table

from benchmarks.running import Verdict
from benchmarks.sources.reading import LEVELS, MEMCPY, ORDERS, STATES

__all__ = ["judge", "rates_table"]

MEMCPY_SHARE: Final = 0.8  # of memcpy's rate, for ArrayFile

Round = Mapping[str, Mapping[str, Any]]
"""By reader, then by level and order: the figures of each state, or None where the reader has none."""


def _values(rounds: Sequence[Round], reader: str, kind: str, state: str, figure: str) -> list[float]:
    """One figure, of each round that has it."""
    found = [(one.get(reader, {}).get(kind) or {}).get(state) for one in rounds]
    return [own[figure] for own in found if own is not None]


def rates_table(level: str, readers: Sequence[str], rounds: Sequence[Round], failed: Mapping[str, str]) -> Table:
    """A row for each reader, with its rates and CPU times at this level."""
    table = Table(title=f"{level}: images/s (CPU µs of an image)", title_justify="left", box=box.SIMPLE)
    table.add_column("reader", no_wrap=True)
    kinds = [(order, state) for order in ORDERS for state in STATES]
    for order, state in kinds:
        table.add_column(f"{order}, {state}", justify="right", no_wrap=True)
    table.add_column("from disk, cold", justify="right", no_wrap=True)
    for reader in readers:
        if reader in failed:
            absent = "not installed" if "ModuleNotFoundError" in failed[reader] else "failed"
            table.add_row(reader, *[absent] * len(kinds), "")
            continue
        cells = []
        for order, state in kinds:
            rates = _values(rounds, reader, f"{level}, {order}", state, "images_per_s")
            cpu = _values(rounds, reader, f"{level}, {order}", state, "cpu_us")
            cells.append(f"{statistics.median(rates):,.0f} ({statistics.median(cpu):,.0f})" if rates else "–")
        disk = [mb for order in ORDERS for mb in _values(rounds, reader, f"{level}, {order}", "cold", "disk_mb")]
        table.add_row(reader, *cells, f"{statistics.median(disk):,.0f} MB" if disk else "")
    return table


def judge(rounds: Sequence[Round], natives: Sequence[str]) -> list[Verdict]:
    """The goals for which figures were measured: `TarShards` at or above the fastest of others' readers, `ArrayFile`
    at 80% of memcpy."""
    verdicts = []
    for level in LEVELS:
        for order in ORDERS:
            for state in STATES:
                ratios, fastest = _ratios(rounds, "TarShards", natives, f"{level}, {order}", state)
                if ratios:
                    ratio = statistics.median(ratios)
                    text = f"TarShards, {level}, {order}, {state}: {ratio:.2f} times the fastest other ({fastest})"
                    verdicts.append(Verdict(text, ratio >= 1))
    for order in ORDERS:
        for state in STATES:
            ratios, _ = _ratios(rounds, "ArrayFile", [MEMCPY], f"raw, {order}", state)
            if ratios:
                share = statistics.median(ratios)
                text = f"ArrayFile, {order}, {state}: at least {MEMCPY_SHARE:.0%} of memcpy: {share:.0%}"
                verdicts.append(Verdict(text, share >= MEMCPY_SHARE))
    return verdicts


def _ratios(rounds: Sequence[Round], own: str, others: Sequence[str], kind: str, state: str) -> tuple[list[float], str]:
    """The rate over that of the fastest of others, within each round that has both; and who was the fastest last."""
    ratios, fastest = [], ""
    for one in rounds:
        mine = _values([one], own, kind, state, "images_per_s")
        theirs = {other: rate[0] for other in others if (rate := _values([one], other, kind, state, "images_per_s"))}
        if mine and theirs:
            fastest = max(theirs, key=theirs.__getitem__)
            ratios.append(mine[0] / theirs[fastest])
    return ratios, fastest
