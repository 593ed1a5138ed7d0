"""Contenders measured in rounds, in an order that changes; what comes of it, as plain values for tables and JSON."""

from __future__ import annotations

import random
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.augmentation.clocks import Clock, Reading
from benchmarks.augmentation.contenders import Contender, Missing

__all__ = ["CaseResult", "Row", "measure"]


@dataclass
class Row:
    """What was measured of a contender: a reading for each round; or why there is none.

    `failed`: it should have run, and raised this.
    """

    readings: list[Reading] = field(default_factory=list)
    falls_back: tuple[str, ...] = ()
    missing: str | None = None
    failed: str | None = None


@dataclass
class CaseResult:
    """A case: the bytes that must move for a batch, how long a plain copy takes for as many, and a row for each
    contender."""

    name: str
    section: str
    least_bytes: int
    roofline_ms: float
    rows: dict[str, Row]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    contenders: Mapping[str, Contender | Missing], clock: Clock, rounds: int, *, deadline: float | None = None
) -> dict[str, Row]:
    """Measure all that can run, `rounds` times; the round before the first is not counted.

    A contender that raises is left out from there on, and its row says why. After `deadline`, by `time.monotonic`, no
    round is begun.
    """
    rows = {}
    for name, contender in contenders.items():
        if isinstance(contender, Missing):
            rows[name] = Row(missing=contender.reason)
        else:
            rows[name] = Row(falls_back=contender.falls_back)
    order = [name for name, contender in contenders.items() if isinstance(contender, Contender)]
    for turn in range(rounds + 1):
        random.Random(turn).shuffle(order)
        for name in list(order):
            if deadline is not None and time.monotonic() > deadline:
                for late in (rows[other] for other in order if not rows[other].readings):
                    late.missing = "the time was up"
                return rows
            contender = contenders[name]
            assert isinstance(contender, Contender)
            try:
                reading = clock(contender.run, turn)
            except Exception as error:  # a peer, or a backend, that cannot do it: all others are still measured
                traceback.print_exc(file=sys.stderr)
                rows[name] = Row(failed=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
                order.remove(name)
                continue
            if turn:
                rows[name].readings.append(reading)
    return rows
