"""Settings of the site: `make docs`, or `python -m sphinx -W --keep-going docs docs/_build/html`.

Everything that the site needs is in it: no web fonts, no scripts from elsewhere, no inventories of other projects. It
opens from a disk.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

import unlatch

project = "Unlatch"
author = "the authors of Unlatch"
copyright = "the authors of Unlatch, Apache-2.0"
version = release = unlatch.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "markdown_docstrings"]
exclude_patterns = ["_build", "_ext"]
# The interactive page, whole as `docs/make_explorer.py` writes it.
html_extra_path = ["explorer"]
source_suffix = {".md": "markdown"}

myst_heading_anchors = 4

autodoc_member_order = "groupwise"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"

# Pages and headings must exist. Types of torch and of the standard library have no page here.
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r".*")]

# Text stays as it was typed, so that quoted settings can be copied.
smartquotes = False

html_theme = "furo"
html_title = f"Unlatch {release}"
html_show_sphinx = False
html_copy_source = False
# A page that was opened from a disk may not read its neighbours, from which summaries would be taken.
html_show_search_summary = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {"light_css_variables": {"code-font-size": "78%"}}
pygments_style = "friendly"
