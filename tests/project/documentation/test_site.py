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
def built(tmp_path_factory):
    """The folder of the built site; of several processes of xdist one builds it, and the others wait for it."""
    folder = tmp_path_factory.getbasetemp()
    if folder.name.startswith("popen-"):  # of one of several processes
        folder = folder.parent
    out = folder / "site"
    with open(folder / "site.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (out / "told.txt").exists():
            command = [sys.executable, "-m", "sphinx", "-q", "-n", "-W", "--keep-going", "-b", "html", "docs", str(out)]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            out.mkdir(exist_ok=True)
            (out / "told.txt").write_text(f"{done.returncode}\n{done.stdout}{done.stderr}")
    return out


def test_it_builds_without_a_warning(built):
    assert (built / "told.txt").read_text().strip() == "0"


def test_the_reference_has_every_public_name(built):
    from sphinx.util.inventory import InventoryFile

    entries = InventoryFile.loads((built / "objects.inv").read_bytes(), uri="").data
    names = {
        name for kind in ("py:class", "py:function", "py:exception", "py:module") for name in entries.get(kind, {})
    }
    public = {f"gpuload.{name}" for name in gpuload.__all__ if name not in ("__version__", "transforms")}
    public |= {f"gpuload.transforms.{name}" for name in transforms.__all__}
    assert public - names == set(), "docs/pages.py puts these names on no page of the reference"


def test_names_of_the_reference_link_to_their_source(built):
    text = (built / "reference" / "loader.html").read_text("utf-8")
    assert re.search(
        r'id="gpuload\.Loader">.*?href="(\.\./_modules/gpuload/loader/loader\.html)#Loader"', text, re.DOTALL
    )
    assert "class" in (built / "_modules" / "gpuload" / "loader" / "loader.html").read_text("utf-8")


def test_the_reference_shows_types_and_the_values_of_defaults(built):
    signatures = site.signatures(built / "reference")
    assert "ring_bytes: int = 2147483648," in signatures["gpuload.Loader"]
    assert "storage_options: Mapping[str, Any] | Remote | None = None" in signatures["gpuload.ImageFolder"]
    assert signatures["gpuload.read"].endswith("→ Encoded")
    wrong = r"<|~| at 0x|\bos\.PathLike|= [A-Z_]{5,}\b"  # repr() of objects, annotations that were not evaluated, names
    assert {name: text for name, text in signatures.items() if re.search(wrong, text)} == {}
    untyped = {name: re.findall(r"(?<=\n)[a-z]\w*(?=,|=)", text) for name, text in signatures.items()}
    assert {name: arguments for name, arguments in untyped.items() if arguments} == {}


def test_what_terminals_print_is_not_coloured_as_python(built):
    kinds = {}
    for page in sorted(built.rglob("*.html")):
        for kind in re.findall(r'<div class="(?:doctest )?highlight-(\w+) notranslate">', page.read_text("utf-8")):
            kinds.setdefault(kind, page.relative_to(built).as_posix())
    assert kinds.keys() - {"python", "pycon", "sh", "text", "yaml", "none"} == set(), kinds  # "default" is Python
    assert kinds["pycon"].startswith("reference/")


def test_links_within_it_lead_to_files_and_anchors(built):
    assert site.dead_links(built) == []


def test_links_that_leave_it_are_whole_and_nothing_is_loaded_from_elsewhere(built):
    for page, links in site.outward(built).items():
        broken = [link for link in links if not re.fullmatch(r"https://[\w.-]+\.\w+(/[\w./#?=&%~+:@-]*)?", link)]
        text = (built / page).read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|img|iframe)[^>]* src="\w+:|<link[^>]*"stylesheet"[^>]* href="\w+:', text)
        assert (broken, loaded) == ([], []), page


def test_a_browser_shows_every_page_on_a_phone(built):
    if site.browser() is None:
        lacking.skip("chromium")
    found, console = site.browse(built)
    assert console == []
    assert set(found) == set(site.read(built))
    assert {name: page["wide"] for name, page in found.items() if page["wide"] > site.PHONE_PX} == {}
    assert {name: page["broken"] for name, page in found.items() if page["broken"]} == {}
    assert [name for name, page in found.items() if not page["title"] or "serif" not in page["styled"]] == []


def test_what_is_wrong_is_found(tmp_path):
    (tmp_path / "a.html").write_text('<a href="b.html#there">1</a><a href="b.html#gone">2</a><a href="c.html">3</a>')
    (tmp_path / "b.html").write_text('<p id="there"></p><a href="a.html">1</a><a href="#gone">2</a>')
    assert site.dead_links(tmp_path) == ["a.html: b.html#gone", "a.html: c.html", "b.html: #gone"]
    if site.browser() is not None:
        (tmp_path / "b.html").write_text('<body style="width: 900px"><img src="no.png"><script>nothing()</script>')
        found, console = site.browse(tmp_path)
        assert found["b.html"]["wide"] == 900 + 8
        assert len(found["b.html"]["broken"]) == 1
        assert "nothing is not defined" in "".join(console)
