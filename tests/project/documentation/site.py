"""The built site: its pages, what they link to, and what a browser finds in them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

PHONE_PX = 400
# The pages, each in a frame of a phone's width: what is wider than the frame, and whether it has been styled and drawn.
HARNESS = """<!doctype html><body><pre id="report"></pre><script>
const pages = %s;
const report = {};
function look(name, frame) {
  const page = frame.contentDocument, root = page.documentElement;
  report[name] = {
    title: page.title,
    wide: root.scrollWidth,
    broken: [...page.images].filter(i => i.loading != "lazy" && i.offsetParent && !i.naturalWidth).map(i => i.src),
    styled: getComputedStyle(page.body).fontFamily,
  };
  document.getElementById("report").textContent = JSON.stringify(report);
}
for (const name of pages) {
  const frame = document.createElement("iframe");
  frame.width = %d; frame.height = 800; frame.src = name;
  frame.onload = () => look(name, frame);
  document.body.append(frame);
}
</script>"""


class _Page(HTMLParser):
    """The anchors of a page, and what it links to or loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value:
                self.links.append(value)


def read_pages(site: Path) -> dict[str, _Page]:
    return {path.relative_to(site).as_posix(): _Page(path.read_text("utf-8")) for path in sorted(site.rglob("*.html"))}


def signatures(folder: Path) -> dict[str, str]:
    """The signature of each name in the pages of a folder, as readers see it, with a line for each argument."""
    by_name = {}
    for page in folder.glob("*.html"):
        text = page.read_text("utf-8")
        for name, entry in re.findall(r'<dt class="sig sig-object py" id="([\w.]+)">(.*?)</dt>', text, re.DOTALL):
            signature = unescape(re.sub(r"<[^>]+>", "", entry)).strip().removesuffix("¶").removesuffix("[source]")
            by_name[name] = re.sub(r"[^\S\n]+", " ", signature)
    return by_name


def dead_links(site: Path) -> list[str]:
    """The links that lead to no file or no anchor, as "page: link"."""
    pages, dead = read_pages(site), []
    for name, page in pages.items():
        for link in page.links:
            path, _, anchor = unquote(link).partition("#")
            if re.match(r"(https?|mailto):", link):
                continue
            target = (site / name).parent.joinpath(path.partition("?")[0]).resolve() if path else site / name
            if target.is_dir():
                target = target / "index.html"
            if not target.is_file() or (
                anchor and anchor not in pages[target.relative_to(site.resolve()).as_posix()].anchors
            ):
                dead.append(f"{name}: {link}")
    return dead


def outward_links(site: Path) -> dict[str, set[str]]:
    """The links that leave the site, by page."""
    return {
        name: {link for link in page.links if re.match(r"\w[\w+.-]*:", link)} for name, page in read_pages(site).items()
    }


def find_browser() -> str | None:
    """Debian's chromium, or what others call it."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def browse_pages(site: Path) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """What Debian's chromium says of every page, and what its console says."""
    program = find_browser()
    assert program is not None
    names = [path.relative_to(site).as_posix() for path in sorted(site.rglob("*.html"))]
    harness = site / "harness.htm"
    harness.write_text(HARNESS % (json.dumps(names), PHONE_PX))
    command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    command += ["--enable-logging=stderr", "--virtual-time-budget=60000", "--dump-dom", harness.as_uri()]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=240)
    finally:
        harness.unlink()
    reported = re.search(r'<pre id="report">(.*?)</pre>', result.stdout, re.DOTALL)
    assert reported is not None, result.stderr
    pages = json.loads(reported[1].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">"))
    return pages, [line for line in result.stderr.splitlines() if "CONSOLE" in line]
