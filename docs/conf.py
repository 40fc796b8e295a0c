"""Sphinx: `sphinx-build -W -b html docs docs/_build/html`, with the extra `docs` installed."""

import dataclasses
import inspect
import re
import sys
from pathlib import Path

import flax.linen as nn

sys.path.insert(0, str(Path(__file__).parent.parent))  # A checkout need not be installed.

import sbjax

project = "sbjax"
author = copyright = "the sbjax authors"
version = release = sbjax.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # Flax's own texts are in Flax's documentation.
autodoc_typehints = "none"  # The docstrings say types and shapes.
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 80
napoleon_numpy_docstring = False
napoleon_use_rtype = False
default_role = "code"  # Docstrings have code in single backquotes.

html_theme = "furo"
html_title = f"sbjax {version}"


def _is_noise(app, what, name, obj, skip, options):
  """Whether a member says nothing: NamedTuple's own docstrings of its fields."""
  return skip or (getattr(obj, "__doc__", None) or "").startswith("Alias for field number")


def _signature(app, what, name, obj, options, signature, returns):
  """A linen module's fields, without those that Flax adds and without long defaults."""
  if not (inspect.isclass(obj) and issubclass(obj, nn.Module)):
    return None
  fields = [field for field in dataclasses.fields(obj) if field.name not in ("parent", "name")]
  return f"({', '.join(map(_argument, fields))})", None


def _argument(field) -> str:
  if field.default is dataclasses.MISSING:
    return field.name
  is_short = field.default is None or isinstance(field.default, bool | int | float | str)
  return f"{field.name}={field.default!r}" if is_short else f"{field.name}=..."


def _plain_stars(app, what, name, obj, options, lines):
  """A star outside of code is a star, not emphasis."""
  for i, line in enumerate(lines):
    pieces = line.split("`")
    pieces[::2] = [re.sub(r"(?<![\\*])\*(?!\*)", r"\\*", piece) for piece in pieces[::2]]
    lines[i] = "`".join(pieces)


def _download(app, docname, source):
  """A link to Markdown that is not a page of the site is a download."""
  source[0] = re.sub(r"\]\(((?:\.\./)+benchmarks/[^)]+\.md)\)", r"](path:\1)", source[0])


def setup(app):
  app.connect("source-read", _download)
  app.connect("autodoc-process-docstring", _plain_stars)
  app.connect("autodoc-process-signature", _signature)
  app.connect("autodoc-skip-member", _is_noise)
