"""How `make docs` builds the site: README.md, the pages of docs/, and the reference.

The sources begin at the repository's root, so that a link means the same here, in an
editor and where the repository is hosted.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT), str(HERE)]
# Nothing here computes: no device, and no message that a library prints at its import.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["KERAS_BACKEND"] = "torch"

import reference  # noqa: E402
from docutils import nodes  # noqa: E402
from sphinx.application import Sphinx  # noqa: E402
from sphinx.domains.python import PyXRefRole  # noqa: E402
from sphinx.util.docutils import SphinxDirective, SphinxRole  # noqa: E402

import nbdist  # noqa: E402

project = "nbdist"
version = release = nbdist.__version__
copyright = "the nbdist authors"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
include_patterns = ["*.md", "docs/**", "examples/README.md"]
exclude_patterns = ["docs/site"]

html_theme = "furo"
html_title = f"nbdist {version}"
templates_path = ["."]
html_additional_pages = {"index": "redirect.html"}
html_copy_source = False
html_show_sphinx = False

# A link to a heading is written as GitHub forms it: running.md#when-a-rank-dies.
myst_heading_anchors = 4

default_role = "name"
# Written as in the code: a default such as Average has a representation of its own.
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
maximum_signature_line_length = 70


class _Written(SphinxDirective):
    """A directive that stands for reStructuredText of `reference`."""

    option_spec = None

    def run(self) -> list[nodes.Node]:
        text = {"magics": reference.magics, "error-tree": reference.error_tree}
        return self.parse_text_to_nodes(text[self.name](), allow_section_headings=True)


class _Name(SphinxRole):
    """`name` in a docstring: a reference where the site knows the name, else code."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        if all(part.isidentifier() for part in self.text.split(".")):
            return PyXRefRole()(
                "py:obj", self.rawtext, self.text, self.lineno, self.inliner
            )
        return [nodes.literal(self.rawtext, self.text)], []


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_role("name", _Name())
    app.add_directive("magics", _Written)
    app.add_directive("error-tree", _Written)
    return {"parallel_read_safe": True}
