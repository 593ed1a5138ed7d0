"""The configuration for Sphinx: ``make docs`` builds the site into build/docs.

Pages are Markdown, and can also be read without the site. `pages` writes the generated pages at each build.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
sys.path.append(str(HERE.parent / "tests"))  # the gallery shows what transforms/specs.py says

import pages  # noqa: E402
import torch  # noqa: E402

import gpuload  # noqa: E402
from gpuload.datasets.stores.remote import StorageOptions  # noqa: E402

project = "gpuload"
author = "The gpuload authors"
version = release = gpuload.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_design"]
exclude_patterns = ["_static"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

# Docstrings have names in single backticks, which become links if they are gpuload names, or else plain code.
default_role = "py:obj"
smartquotes_action = "D"  # only dashes: quotes are not changed
nitpicky = True
# Types in signatures, many from other libraries, and names in single backticks.
nitpick_ignore_regex = [("py:obj", ".*"), ("py:class", ".*"), ("py:exc", ".*")]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100  # longer signatures have a line for each argument
highlight_language = "none"  # for blocks without a language
napoleon_use_ivar = True
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = "gpuload"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = html_show_sourcelink = False
html_show_copyright = False


def lead_home(app: Any, docname: str, source: list[str]) -> None:
    """Rewrite links that leave docs/, which are for readers of the repository. They lead to the pages generated from
    the files, or become plain text if there is no such page."""
    depth = docname.count("/")
    for name, page in pages.OUTSIDE.items():
        target = "../" * depth + page
        source[0] = re.sub(rf"\]\((?:\.\./)+{re.escape(name)}(#[^)]*)?\)", rf"]({target}\1)", source[0])
    for link in re.findall(r"\]\(((?:\.\./)+[^)#]+)\)", source[0]):
        if (path := (HERE / docname).parent / link).is_dir() or not path.exists():
            source[0] = re.sub(rf"\[([^\]]+)\]\({re.escape(link)}\)", r"\1", source[0])


def one_by_one(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Split ``a, b: text`` under Attributes into an entry for each name, since Napoleon accepts only one name."""
    inside, entries = False, []
    for line in lines:
        inside = line == "Attributes:" or (inside and (not line or line.startswith(" ")))
        if inside and (match := re.fullmatch(r"    (\w+(?:, \w+)+): (.*)", line)):
            *others, last = match[1].split(", ")
            entries += [f"    {other}: see `{last}`." for other in others]
            line = f"    {last}: {match[2]}"
        entries.append(line)
    lines[:] = entries


def show_factories(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Replace ``<factory>`` with the value that a dataclass's default_factory makes."""
    if signature is not None and dataclasses.is_dataclass(obj):
        for field in dataclasses.fields(obj):
            if field.default_factory is not dataclasses.MISSING:
                signature = signature.replace("<factory>", repr(field.default_factory()), 1)
    return signature, returns


def colour_docstrings(app: Any, doctree: nodes.document) -> None:
    """Highlight code in docstrings as Python: lines after ``>>>``, and blocks after ``::``."""
    for block in doctree.findall(nodes.doctest_block):
        block["language"] = "pycon"
    if app.env.docname.startswith("reference/"):
        for block in doctree.findall(nodes.literal_block):
            block.attributes.setdefault("language", "python")
            block["force"] = True  # "…" stands for omitted code


def drop_back_links(app: Any, pagename: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Drop viewcode's links from source to reference: some are broken for modules with names of two packages."""
    if pagename.startswith("_modules/"):
        context["body"] = re.sub(r'<a class="viewcode-back"[^>]*>.*?</a>', "", context["body"])


def annotate() -> None:
    """Define names that some modules import only for type checkers, since autodoc evaluates annotations there."""
    for name, module in list(sys.modules.items()):
        if name.startswith("gpuload."):
            for missing, value in (("StorageOptions", StorageOptions), ("torch", torch)):
                module.__dict__.setdefault(missing, value)


def setup(app: Any) -> None:
    pages.write(HERE)
    annotate()
    app.connect("source-read", lead_home)
    app.connect("doctree-read", colour_docstrings)
    app.connect("html-page-context", drop_back_links)
    app.connect("autodoc-process-signature", show_factories)
    app.connect("autodoc-process-docstring", one_by_one, priority=100)  # before Napoleon, at 500
