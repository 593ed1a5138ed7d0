"""Helpers for tests of draws: operations as plain values, and a statistical test for equal distributions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scipy import stats

from gpuload import transforms as T
from gpuload.transforms.program.ops import NOTHING, OPS, ChainMixture, Ops

__all__ = ["described", "p_value", "program"]


def program(transform: Any, drawn: Ops | ChainMixture, sizes_hw: np.ndarray) -> T.Program:
    """Return the program of a chain of one transform, given the operations that it drew."""
    filters = drawn.filters if isinstance(drawn.filters, np.ndarray) else transform.interpolation
    record = replace(drawn, filters=filters, fill=transform.outside.image, sizes_hw=sizes_hw)
    return T.Program((record,), sizes_hw, sizes_hw)


def described(params: Ops) -> list[tuple]:
    """Return the drawn operations of each sample, as plain values."""
    return [
        tuple(
            (OPS[code], *(round(value, 4) for value in values))
            for code, values in zip(codes, numbers, strict=True)
            if code != NOTHING
        )
        for codes, numbers in zip(params.codes.tolist(), params.values.tolist(), strict=True)
    ]


def p_value(ours: Sequence, theirs: Sequence) -> float:
    """Return the p-value of a χ² test that both samples come from one discrete distribution; rare values are pooled."""
    counts = [Counter(ours), Counter(theirs)]
    total = counts[0] + counts[1]
    common = [key for key, count in total.items() if count >= 20]
    table = [[count[key] for key in common] for count in counts]
    rare_counts = [sum(count.values()) - sum(row) for count, row in zip(counts, table, strict=True)]
    if sum(rare_counts) >= 20:
        table = [[*row, rare_count] for row, rare_count in zip(table, rare_counts, strict=True)]
    return float(stats.chi2_contingency(table).pvalue)
