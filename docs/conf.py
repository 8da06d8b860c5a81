"""Sphinx's settings: `make docs` builds the site from the pages beside this file and from the package's docstrings."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # this checkout's zero3, whichever is installed

import zero3  # noqa: E402

project = "zero3"
author = "The zero3 authors"
version = release = zero3.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "pictures", "style"]
html_theme = "furo"
html_title = "zero3"
html_copy_source = False
html_static_path = ["style"]
html_css_files = ["wide.css"]

myst_heading_anchors = 4

add_module_names = False
python_use_unqualified_type_names = True
default_role = "name"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = False

# Only our own public names can be looked up: a build fetches nothing from other projects' sites. (M is a model's class.)
nitpick_ignore_regex = [("py:.*", r"(?!zero3\b).*"), ("py:class", r"zero3\.((shard|sequences\.tiles)\.M|offload\.optimizer\.Opt|comm\..*)")]

RESULTS = (
    "CheckReport", "Comparison", "Difference", "GuardedStep", "JoinableModel", "LayerProfile", "Moment", "Plan", "Profile", "Report",
    "Saving", "Span", "Towers", "Transfer",
)  # fmt: skip


def name_role(_: str, rawtext: str, text: str, *__: Any, **___: Any) -> tuple[list[nodes.Node], list[nodes.system_message]]:
    """`text` in a docstring: a link, if it is one of our names (`shard`, `zero3.shard`, `Saving.wait`); code in any case."""
    code = nodes.literal(rawtext, text, classes=["py"])
    name = text.removeprefix("zero3.")
    ours, result = name.split(".")[0] in zero3.__all__, name.split(".")[0] in RESULTS
    if not ours and not result:
        return [code], []
    target = f"zero3.{name}" if ours else name  # a result is looked up wherever it is defined
    return [addnodes.pending_xref(rawtext, code, refdomain="py", reftype="obj", reftarget=target, refspecific=result, refwarn=True)], []


def link_to_files(_: Sphinx, __: str, source: list[str]) -> None:
    """Pages link to other Markdown files of the repository, which are no pages of the site: readers get the file."""
    source[0] = re.sub(r"\[([^\]]+)\]\((\.\./[^)#]+\.md)\)", r"{download}`\1 <\2>`", source[0])


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_role("name", name_role)
    app.connect("source-read", link_to_files)
    return {"parallel_read_safe": True}
