"""Detecting TIFF content that Pillow does not return: additional pages, channels, slices, and other value types.

Pillow reads only the first page, and only the channels that form a picture. That suits ``mode="RGB"``, but a request
for the stored values or for a mask must return all values or raise an error. This module parses the page
directories itself, because Pillow would set up a decoder for each page that is queried.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

__all__ = ["REMEDY", "Page", "describe_lost_content", "read_pages", "remedy"]

REMEDY: Final = (
    "read it in the dataset, for example with tifffile.imread(path), and yield gpuload.Image(array, layout='CHW' or "
    "'HWC') of uint8, uint16 or float32"
)
MAX_PAGES: Final = 1000  # the maximum number of pages to count
MAX_ENTRIES: Final = 4096  # the maximum number of directory entries to read per page
# TIFF tags, and their default values.
SUBFILE, OLD_SUBFILE, BITS, SAMPLES, FORMAT, DEPTH = 254, 255, 258, 277, 339, 32997
DEFAULTS: Final = {SUBFILE: 0, OLD_SUBFILE: 0, BITS: 1, SAMPLES: 1, FORMAT: 1, DEPTH: 1}
TYPES: Final = {1: "B", 3: "H", 4: "I", 16: "Q"}  # BYTE, SHORT, LONG, LONG8
REDUCED, TRANSPARENCY = 1, 4  # bits of SUBFILE: the page is a smaller copy, or a transparency mask, of another page
OLD_REDUCED: Final = 2
SIGNED: Final = 2


class Page(NamedTuple):
    """A picture in a TIFF: the number of channels, bits per channel, value format (1: unsigned integer, 2: signed
    integer, 3: floating point) and number of slices."""

    samples: int
    bits: int
    format: int
    depth: int


def read_pages(data: bytes) -> list[Page]:
    """Return the pages of a TIFF, without smaller copies and transparency masks of other pages. Stop at the first
    unreadable directory, and after `MAX_PAGES` + 1 pages."""
    page_list: list[Page] = []
    for tags in _read_directories(data):
        if tags[SUBFILE] & (REDUCED | TRANSPARENCY) or tags[OLD_SUBFILE] == OLD_REDUCED:
            continue
        page_list.append(Page(tags[SAMPLES], tags[BITS], tags[FORMAT], tags[DEPTH]))
        if len(page_list) > MAX_PAGES:
            break
    return page_list


def describe_lost_content(data: bytes, channels: int, bits: int) -> str | None:
    """Describe what would be lost if a TIFF were read as its first page with this many channels of at most this many
    bits; None if nothing would be lost."""
    page_list = read_pages(data)
    if not page_list:
        return None
    first_page = page_list[0]
    if len(page_list) > 1:
        page_count = f"more than {MAX_PAGES:,}" if len(page_list) > MAX_PAGES else str(len(page_list))
        return f"{page_count} pages, of which Pillow returns the first"
    if first_page.depth > 1:
        return f"{first_page.depth} slices, of which Pillow returns the first"
    if first_page.samples > channels:
        return f"{first_page.samples} channels, of which Pillow returns {channels}"
    if first_page.bits > bits:
        return f"{first_page.bits} bits per channel, of which Pillow returns {bits}"
    if first_page.bits == 8 and first_page.format == SIGNED:
        return "signed 8-bit values, which Pillow returns as unsigned values"
    return None


def remedy(format_name: str, data: bytes) -> str:
    """Return the remedy to append to the error message for a file of this format that cannot be read."""
    if format_name != "TIFF":
        return ""
    description = ""
    for page in read_pages(data)[:1]:
        description = f" (it has {page.samples} channel{'s' * (page.samples > 1)} of {page.bits} bits)"
    return f". If the file is not damaged but of a kind that Pillow does not read{description}, {REMEDY}"


def _read_directories(data: bytes) -> Iterator[dict[int, int]]:
    """Iterate over the pages; yield a dict with the first value of each tag in `DEFAULTS`, or its default."""
    byte_order = "<" if data[:2] == b"II" else ">"
    is_bigtiff = data[2:4] in (b"+\0", b"\0+")
    count_format, entry_format, value_bytes, offset_format = (
        ("Q", "HHQ", 8, "Q") if is_bigtiff else ("H", "HHI", 4, "I")
    )
    count_struct, offset_struct = struct.Struct(byte_order + count_format), struct.Struct(byte_order + offset_format)
    entry_struct = struct.Struct(byte_order + entry_format)
    entry_bytes = entry_struct.size + value_bytes
    seen: set[int] = set()
    pos = 8 if is_bigtiff else 4
    try:
        while (pos := offset_struct.unpack_from(data, pos)[0]) and pos not in seen and len(seen) < 2 * MAX_PAGES:
            seen.add(pos)
            (count,) = count_struct.unpack_from(data, pos)
            start, tags = pos + count_struct.size, dict(DEFAULTS)
            for entry_at in range(start, start + min(count, MAX_ENTRIES) * entry_bytes, entry_bytes):
                tag, value_type, value_count = entry_struct.unpack_from(data, entry_at)
                if tag in DEFAULTS and value_type in TYPES and value_count:
                    scalar = struct.Struct(byte_order + TYPES[value_type])
                    is_inline = value_count * scalar.size <= value_bytes
                    value_at = entry_at + entry_struct.size
                    tags[tag] = scalar.unpack_from(
                        data, value_at if is_inline else offset_struct.unpack_from(data, value_at)[0]
                    )[0]
            yield tags
            pos = start + count * entry_bytes
    except struct.error:  # the file is truncated or damaged
        return
