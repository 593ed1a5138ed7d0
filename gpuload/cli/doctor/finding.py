"""What a check says, and what all of them come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

__all__ = ["BROKEN", "FINE", "Finding", "State", "as_dict", "exit_status", "summary"]

State = Literal["works", "improve", "broken", "not needed"]
FINE: Final = 0
BROKEN: Final = 1


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Args:
        name: what was looked at.
        state: ``"works"``; ``"improve"``: it works, but holds training back; ``"broken"``: it is needed, or was
            installed, and does not work; ``"not needed"``.
        found: what was found, with figures.
        mend: what to do about it: a command where there is one; "" where there is nothing to do.
    """

    name: str
    state: State
    found: str
    mend: str = ""


def summary(findings: Sequence[Finding]) -> str:
    """One sentence that names the worst of it. Findings come in the order of their weight."""
    for state, text in (
        ("broken", "{number} broken, which will hurt; first of all {worst.name}: {worst.found}"),
        ("improve", "All that is needed works. What holds it back most is {worst.name}: {worst.found}"),
    ):
        found = [finding for finding in findings if finding.state == state]
        if found:
            number = "1 thing is" if len(found) == 1 else f"{len(found)} things are"
            return text.format(number=number, worst=found[0])
    return "All that is needed works, and nothing holds it back."


def exit_status(findings: Sequence[Finding]) -> int:
    """1 if something is broken, else 0."""
    return BROKEN if any(finding.state == "broken" for finding in findings) else FINE


def as_dict(findings: Sequence[Finding]) -> dict[str, Any]:
    """All of it, for JSON."""
    return {
        "summary": summary(findings),
        "exit_status": exit_status(findings),
        "findings": [asdict(finding) for finding in findings],
    }
