"""The site builds without a warning; its links lead somewhere; a browser shows it, on a phone's width too."""

from __future__ import annotations

import fcntl
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import lacking
from project.documentation import site

import gpuload
from gpuload import transforms

lacking.require("sphinx", "skimage")
ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site_folder(tmp_path_factory):
    """The folder of the built site; of several processes of xdist one builds it, and the others wait for it."""
    folder = tmp_path_factory.getbasetemp()
    if folder.name.startswith("popen-"):  # of one of several processes
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
        name for kind in ("py:class", "py:function", "py:exception", "py:module") for name in entries.get(kind, {})
    }
    public = {f"gpuload.{name}" for name in gpuload.__all__ if name not in ("__version__", "transforms")}
    public |= {f"gpuload.transforms.{name}" for name in transforms.__all__}
    assert public - names == set()


def test_reference_links_to_the_source(site_folder):
    text = (site_folder / "reference" / "loader.html").read_text("utf-8")
    assert re.search(
        r'id="gpuload\.Loader">.*?href="(\.\./_modules/gpuload/loader/loader\.html)#Loader"', text, re.DOTALL
    )
    assert "class" in (site_folder / "_modules" / "gpuload" / "loader" / "loader.html").read_text("utf-8")


def test_reference_signatures_show_types_and_default_values(site_folder):
    signatures = site.signatures(site_folder / "reference")
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
    assert site.dead_links(site_folder) == []


def test_external_links_are_complete_and_nothing_external_is_loaded(site_folder):
    for page, links in site.outward_links(site_folder).items():
        broken = [link for link in links if not re.fullmatch(r"https://[\w.-]+\.\w+(/[\w./#?=&%~+:@-]*)?", link)]
        text = (site_folder / page).read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|img|iframe)[^>]* src="\w+:|<link[^>]*"stylesheet"[^>]* href="\w+:', text)
        assert (broken, loaded) == ([], []), page


def test_browser_shows_every_page_at_the_width_of_a_phone(site_folder):
    if site.find_browser() is None:
        lacking.skip("chromium")
    pages, console = site.browse_pages(site_folder)
    assert console == []
    assert set(pages) == set(site.read_pages(site_folder))
    assert {name: page["wide"] for name, page in pages.items() if page["wide"] > site.PHONE_PX} == {}
    assert {name: page["broken"] for name, page in pages.items() if page["broken"]} == {}
    assert [name for name, page in pages.items() if not page["title"] or "serif" not in page["styled"]] == []


def test_dead_links_wide_pages_and_console_errors_are_found(tmp_path):
    (tmp_path / "a.html").write_text('<a href="b.html#there">1</a><a href="b.html#gone">2</a><a href="c.html">3</a>')
    (tmp_path / "b.html").write_text('<p id="there"></p><a href="a.html">1</a><a href="#gone">2</a>')
    assert site.dead_links(tmp_path) == ["a.html: b.html#gone", "a.html: c.html", "b.html: #gone"]
    if site.find_browser() is not None:
        (tmp_path / "b.html").write_text('<body style="width: 900px"><img src="no.png"><script>nothing()</script>')
        pages, console = site.browse_pages(tmp_path)
        assert pages["b.html"]["wide"] == 900 + 8
        assert len(pages["b.html"]["broken"]) == 1
        assert "nothing is not defined" in "".join(console)
