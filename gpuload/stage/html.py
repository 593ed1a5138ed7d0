"""Small tables for notebooks.

They have no colours and no fonts of their own, so that they are readable in dark and light themes, load nothing, and
everything in them is escaped. Runs in the main process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["LONGEST", "paragraph", "shortened", "table"]

LONGEST = 100  # characters of a cell


def table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table. Without `heads` the first cell of each row is one; with them, what begins with a digit stands on the
    right."""
    lines = ["<table>"]
    if caption:
        lines.append(f'<caption style="text-align: left">{escape(caption)}</caption>')
    if heads:
        lines.append(f"<thead><tr>{''.join(map(_head, heads))}</tr></thead>")
    lines.append("<tbody>")
    for row in rows:
        cells = [_cell(text, right=bool(heads) and text[:1].isdigit()) for text in row]
        lines.append(f"<tr>{''.join(cells if heads else [_head(row[0]), *cells[1:]])}</tr>")
    return "\n".join([*lines, "</tbody></table>"])


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def shortened(text: str) -> str:
    """A text that fits a cell."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _head(text: str) -> str:
    return f'<th style="text-align: left">{escape(text)}</th>'


def _cell(text: str, *, right: bool) -> str:
    return f'<td style="text-align: {"right" if right else "left"}">{escape(text)}</td>'
