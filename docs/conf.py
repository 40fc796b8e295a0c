"""Sphinx: `sphinx-build -W -b html docs docs/_build/html`, with the extra `docs` installed."""

import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # A checkout need not be installed.

import sbjax

project = "sbjax"
author = copyright = "the sbjax authors"
version = release = sbjax.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.napoleon"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
# docs/studies may be empty. This warning has no type that suppress_warnings could name.
logging.getLogger("sphinx.sphinx.directives.other").addFilter(
  lambda record: getattr(record, "subtype", None) != "empty_glob"
)

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 80
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"sbjax {version}"


def _is_noise(app, what, name, obj, skip, options):
  """Whether a member says nothing: NamedTuple's own docstrings of its fields."""
  return skip or (getattr(obj, "__doc__", None) or "").startswith("Alias for field number")


def setup(app):
  app.connect("autodoc-skip-member", _is_noise)
