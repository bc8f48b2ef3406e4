# SPDX-License-Identifier: Apache-2.0
"""How Sphinx builds the documentation; the API reference is read from the installed package."""

import cudecomp

project = "cudecomp"
author = "the cudecomp developers"
copyright = author  # noqa: A001
release = version = cudecomp.__version__

extensions = ["myst_parser", "numpydoc", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
root_doc = "index"

myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"
# The members are documented one by one; a table of them above would say everything twice.
numpydoc_show_class_members = False

html_theme = "alabaster"
html_theme_options = {
    "description": "Pencil decompositions and global transposes of distributed arrays",
    "page_width": "60em",
    "fixed_sidebar": True,
}
highlight_language = "none"
