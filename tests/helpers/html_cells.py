"""The cells of HTML tables, for tests of what notebooks show."""

from __future__ import annotations

from html.parser import HTMLParser


class Cells(HTMLParser):
    """The text of each table cell of an HTML document, by rows, and all its tags, each of which must be closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, "tags are not closed"

    def handle_starttag(self, tag, attrs):
        self._open.append(tag)
        self.tags.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] in ("td", "th"):
            self.rows[-1][-1] += data
