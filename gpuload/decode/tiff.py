"""What a TIFF holds that Pillow does not give: further pages, channels, slices, and numbers of other types.

Pillow reads the first page, and of its channels those that make a picture. That is what ``mode="RGB"`` is for; whoever
asks for numbers as they are stored, or for a mask, has to get all of them or an error. Only the directories of pages
are read here, since Pillow sets up a decoder for each page that it is asked about.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

__all__ = ["REMEDY", "Page", "not_given", "pages", "remedy"]

REMEDY: Final = (
    "read it in the dataset, as with tifffile.imread(path), and yield gpuload.Image(array, layout='CHW' or 'HWC') of "
    "uint8, uint16 or float32"
)
MOST_PAGES: Final = 1000  # that are counted
MOST_ENTRIES: Final = 4096  # of a page that are looked at
# Tags, and what each is if it is absent.
SUBFILE, OLD_SUBFILE, BITS, SAMPLES, FORMAT, DEPTH = 254, 255, 258, 277, 339, 32997
USUAL: Final = {SUBFILE: 0, OLD_SUBFILE: 0, BITS: 1, SAMPLES: 1, FORMAT: 1, DEPTH: 1}
TYPES: Final = {1: "B", 3: "H", 4: "I", 16: "Q"}  # BYTE, SHORT, LONG, LONG8
REDUCED, TRANSPARENCY = 1, 4  # bits of SUBFILE: a smaller copy of another page, and which pixels of one are seen
OLD_REDUCED: Final = 2
SIGNED: Final = 2


class Page(NamedTuple):
    """A picture in a TIFF: channels, bits of each, how its numbers are stored (1: whole, 2: signed, 3: with a point),
    and slices."""

    samples: int
    bits: int
    format: int
    depth: int


def pages(data: bytes) -> list[Page]:
    """Return the pages of a TIFF, without smaller copies and masks of others; as far as its directories can be read,
    and a thousand at most."""
    listed: list[Page] = []
    for tags in _directories(data):
        if tags[SUBFILE] & (REDUCED | TRANSPARENCY) or tags[OLD_SUBFILE] == OLD_REDUCED:
            continue
        listed.append(Page(tags[SAMPLES], tags[BITS], tags[FORMAT], tags[DEPTH]))
        if len(listed) > MOST_PAGES:
            break
    return listed


def not_given(data: bytes, channels: int, bits: int) -> str | None:
    """Return what would be lost if a TIFF were taken for its first page with this many channels of at most this many
    bits; None if nothing."""
    listed = pages(data)
    if not listed:
        return None
    first = listed[0]
    if len(listed) > 1:
        count = f"more than {MOST_PAGES:,}" if len(listed) > MOST_PAGES else str(len(listed))
        return f"{count} pages, of which Pillow gives the first"
    if first.depth > 1:
        return f"{first.depth} slices, of which Pillow gives the first"
    if first.samples > channels:
        return f"{first.samples} channels, of which Pillow gives {channels}"
    if first.bits > bits:
        return f"{first.bits} bits a channel, of which Pillow gives {bits}"
    if first.bits == 8 and first.format == SIGNED:
        return "signed numbers of 8 bits, which Pillow gives as unsigned ones"
    return None


def remedy(name: str, data: bytes) -> str:
    """Return what the message says, at its end, of a file of this format that cannot be read."""
    if name != "TIFF":
        return ""
    kind = ""
    for page in pages(data)[:1]:
        kind = f" (it has {page.samples} channel{'s' * (page.samples > 1)} of {page.bits} bits)"
    return f". If it is not damaged, but of a kind that Pillow does not read{kind}, {REMEDY}"


def _directories(data: bytes) -> Iterator[dict[int, int]]:
    """Return the tags of each page that `USUAL` names, with the first number of each, or the usual one."""
    order = "<" if data[:2] == b"II" else ">"
    big = data[2:4] in (b"+\0", b"\0+")
    head, entry, of_value, number = ("Q", "HHQ", 8, "Q") if big else ("H", "HHI", 4, "I")
    entries, link = struct.Struct(order + head), struct.Struct(order + number)
    form = struct.Struct(order + entry)
    each = form.size + of_value
    seen: set[int] = set()
    at = 8 if big else 4
    try:
        while (at := link.unpack_from(data, at)[0]) and at not in seen and len(seen) < 2 * MOST_PAGES:
            seen.add(at)
            (count,) = entries.unpack_from(data, at)
            start, tags = at + entries.size, dict(USUAL)
            for place in range(start, start + min(count, MOST_ENTRIES) * each, each):
                tag, kind, values = form.unpack_from(data, place)
                if tag in USUAL and kind in TYPES and values:
                    one = struct.Struct(order + TYPES[kind])
                    inline = values * one.size <= of_value
                    where = place + form.size
                    tags[tag] = one.unpack_from(data, where if inline else link.unpack_from(data, where)[0])[0]
            yield tags
            at = start + count * each
    except struct.error:  # it is cut off, or damaged
        return
