"""How Sphinx builds these pages: `make docs`. It needs no network."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent / "_site"), str(Path(__file__).parents[1] / "src")]

project = "Unisono"
author = "The Unisono authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "generated", "docstrings"]
exclude_patterns = ["_build", "_site", "README.md"]

# The inventories of Python and torch are on the network: links into their pages are made on request only.
extensions += ["sphinx.ext.intersphinx"] if os.environ.get("UNISONO_DOCS_INTERSPHINX") else []
intersphinx_mapping = {
    "python": ("https://docs.python.org/3", None),
    "torch": ("https://docs.pytorch.org/docs/stable", None),
}

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

highlight_language = "text"  # of equations and drawings in docstrings
default_role = "py:obj"  # `name` in a docstring is a name of ours, and a link where it has a page
autodoc_member_order = "bysource"
autodoc_mock_imports = ["keras"]  # it would ask for the framework of another backend
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = "Unisono"
html_static_path = ["_site/static"]
html_css_files = ["unisono.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
