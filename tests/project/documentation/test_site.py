"""The site builds without warnings, its links lead to files and anchors, and a browser shows it at a phone's width."""

from __future__ import annotations

import fcntl
import json
import re
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from helpers import lacking
from helpers.chromium import dump_dom, find_chromium

import gpuload
from gpuload import transforms

lacking.require("sphinx", "skimage")
ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.slow

PHONE_PX = 400
# Opens each page in a frame of a phone's width, and reports its width, broken images and font.
HARNESS = """<!doctype html><body><pre id="report"></pre><script>
const pages = %s;
const report = {};
function look(name, frame) {
  const page = frame.contentDocument, root = page.documentElement;
  report[name] = {
    title: page.title,
    width: root.scrollWidth,
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
    """The anchors of a page, and the targets that it links to or loads."""

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


def signatures_in(folder: Path) -> dict[str, str]:
    """Return the signatures that readers see in the pages of a folder, by name, with a line for each argument."""
    by_name = {}
    for page in folder.glob("*.html"):
        text = page.read_text("utf-8")
        for name, entry in re.findall(r'<dt class="sig sig-object py" id="([\w.]+)">(.*?)</dt>', text, re.DOTALL):
            signature = unescape(re.sub(r"<[^>]+>", "", entry)).strip().removesuffix("¶").removesuffix("[source]")
            by_name[name] = re.sub(r"[^\S\n]+", " ", signature)
    return by_name


def dead_links(site: Path) -> list[str]:
    """Return the links that lead to no file or no anchor, as "page: link"."""
    pages, dead_links_found = read_pages(site), []
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
                dead_links_found.append(f"{name}: {link}")
    return dead_links_found


def external_links(site: Path) -> dict[str, set[str]]:
    """Return the external links of each page."""
    return {
        name: {link for link in page.links if re.match(r"\w[\w+.-]*:", link)} for name, page in read_pages(site).items()
    }


def browse_pages(site: Path) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Open all pages in Chromium. Return the report on each page, and the messages of the console."""
    names = [path.relative_to(site).as_posix() for path in sorted(site.rglob("*.html"))]
    harness = site / "harness.htm"
    harness.write_text(HARNESS % (json.dumps(names), PHONE_PX))
    try:
        dom, console = dump_dom(harness.as_uri(), "--allow-file-access-from-files", "--virtual-time-budget=60000")
    finally:
        harness.unlink()
    report = re.search(r'<pre id="report">(.*?)</pre>', dom, re.DOTALL)
    assert report is not None, console
    return json.loads(report[1].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">")), console


@pytest.fixture(scope="module")
def site_folder(tmp_path_factory):
    """The folder of the built site. One of several processes of xdist builds it, and the others wait."""
    folder = tmp_path_factory.getbasetemp()
    if folder.name.startswith("popen-"):  # the folder of one process
        folder = folder.parent
    out = folder / "site"
    with open(folder / "site.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (out / "build.log").exists():
            command = [sys.executable, "-m", "sphinx", "-q", "-n", "-W", "--keep-going", "-b", "html", "docs", str(out)]
            result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            out.mkdir(exist_ok=True)
            (out / "build.log").write_text(f"{result.returncode}\n{result.stdout}{result.stderr}")
    return out


def test_site_builds_without_warnings(site_folder):
    assert (site_folder / "build.log").read_text().strip() == "0"


def test_reference_has_every_public_name(site_folder):
    from sphinx.util.inventory import InventoryFile

    entries = InventoryFile.loads((site_folder / "objects.inv").read_bytes(), uri="").data
    names = {
        name
        for kind in ("py:class", "py:function", "py:exception", "py:module", "py:data")
        for name in entries.get(kind, {})
    }
    public = {f"gpuload.{name}" for name in gpuload.__all__ if name not in ("__version__", "transforms")}
    public |= {f"gpuload.transforms.{name}" for name in transforms.__all__}
    assert public - names == set(), "docs/pages.py puts these names on no page of the reference"


def test_reference_links_to_the_source(site_folder):
    text = (site_folder / "reference" / "loader.html").read_text("utf-8")
    assert re.search(
        r'id="gpuload\.Loader">.*?href="(\.\./_modules/gpuload/loader/loader\.html)#Loader"', text, re.DOTALL
    )
    assert "class" in (site_folder / "_modules" / "gpuload" / "loader" / "loader.html").read_text("utf-8")


def test_reference_signatures_show_types_and_default_values(site_folder):
    signatures = signatures_in(site_folder / "reference")
    assert "ring_bytes: int = 2147483648," in signatures["gpuload.Loader"]
    assert "storage_options: Mapping[str, Any] | Remote | None = None" in signatures["gpuload.ImageFolder"]
    assert signatures["gpuload.read"].endswith("→ Encoded")
    unresolved = (
        r"<|~| at 0x|\bos\.PathLike|= [A-Z_]{5,}\b"  # repr() of objects, annotations that were not evaluated, names
    )
    assert {name: text for name, text in signatures.items() if re.search(unresolved, text)} == {}
    untyped = {name: re.findall(r"(?<=\n)[a-z]\w*(?=,|=)", text) for name, text in signatures.items()}
    assert {name: arguments for name, arguments in untyped.items() if arguments} == {}


def test_code_blocks_are_highlighted_in_their_language(site_folder):
    kinds = {}
    for page in sorted(site_folder.rglob("*.html")):
        for kind in re.findall(r'<div class="(?:doctest )?highlight-(\w+) notranslate">', page.read_text("utf-8")):
            kinds.setdefault(kind, page.relative_to(site_folder).as_posix())
    assert kinds.keys() - {"python", "pycon", "sh", "text", "yaml", "none"} == set(), kinds  # "default" is Python
    assert kinds["pycon"].startswith("reference/")


def test_internal_links_lead_to_files_and_anchors(site_folder):
    assert dead_links(site_folder) == []


def test_external_links_are_complete_and_nothing_external_is_loaded(site_folder):
    for page, links in external_links(site_folder).items():
        broken = [link for link in links if not re.fullmatch(r"https://[\w.-]+\.\w+(/[\w./#?=&%~+:@-]*)?", link)]
        text = (site_folder / page).read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|img|iframe)[^>]* src="\w+:|<link[^>]*"stylesheet"[^>]* href="\w+:', text)
        assert (broken, loaded) == ([], []), page


def test_browser_shows_every_page_at_the_width_of_a_phone(site_folder):
    if find_chromium() is None:
        lacking.skip("chromium")
    pages, console = browse_pages(site_folder)
    assert console == []
    assert set(pages) == set(read_pages(site_folder))
    assert {name: page["width"] for name, page in pages.items() if page["width"] > PHONE_PX} == {}
    assert {name: page["broken"] for name, page in pages.items() if page["broken"]} == {}
    assert [name for name, page in pages.items() if not page["title"] or "serif" not in page["styled"]] == []


def test_dead_links_wide_pages_and_console_errors_are_found(tmp_path):
    (tmp_path / "a.html").write_text('<a href="b.html#there">1</a><a href="b.html#gone">2</a><a href="c.html">3</a>')
    (tmp_path / "b.html").write_text('<p id="there"></p><a href="a.html">1</a><a href="#gone">2</a>')
    assert dead_links(tmp_path) == ["a.html: b.html#gone", "a.html: c.html", "b.html: #gone"]
    if find_chromium() is not None:
        (tmp_path / "b.html").write_text('<body style="width: 900px"><img src="no.png"><script>nothing()</script>')
        pages, console = browse_pages(tmp_path)
        assert pages["b.html"]["width"] == 900 + 8  # the margin of the body
        assert len(pages["b.html"]["broken"]) == 1
        assert "nothing is not defined" in "".join(console)
