"""Sphinx: `sphinx-build -W -b html docs docs/_build/html`, with the extra `docs` installed."""

import dataclasses
import inspect
import re
import sys
from pathlib import Path

import flax.linen as nn
from flax import nnx

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
html_static_path, html_css_files = ["_static"], ["site.css"]
highlight_language = "none"  # A block without a language is a command.


def _is_noise(app, what, name, obj, skip, options):
  """Whether a member says nothing: NamedTuple's own docstrings of its fields."""
  return skip or (getattr(obj, "__doc__", None) or "").startswith("Alias for field number")


def _signature(app, what, name, obj, options, signature, returns):
  """A module's arguments without long defaults, and of linen without the fields that Flax adds."""
  if not inspect.isclass(obj):
    return None
  if issubclass(obj, nn.Module):
    fields = [field for field in dataclasses.fields(obj) if field.name not in ("parent", "name")]
    return f"({', '.join(_argument(f.name, f.default, dataclasses.MISSING) for f in fields)})", None
  if issubclass(obj, nnx.Module):
    _, *arguments = inspect.signature(obj.__init__).parameters.values()
    texts = [_argument(str(a).split(":")[0], a.default, a.empty) for a in arguments]
    keywords = [a.kind is a.KEYWORD_ONLY for a in arguments]
    if True in keywords:
      texts.insert(keywords.index(True), "*")
    return f"({', '.join(texts)})", None
  return None


def _argument(name: str, default, missing) -> str:
  if default is missing:
    return name
  is_short = default is None or isinstance(default, bool | int | float | str)
  return f"{name}={default!r}" if is_short else f"{name}=..."


def _plain_stars(app, what, name, obj, options, lines):
  """A star or a bar outside of code is itself: no emphasis, no substitution."""
  for i, line in enumerate(lines):
    pieces = line.split("`")
    pieces[::2] = [re.sub(r"(?<![\\*])(\*(?!\*)|\|)", r"\\\1", piece) for piece in pieces[::2]]
    lines[i] = "`".join(pieces)


def _download(app, docname, source):
  """A link to Markdown that is not a page of the site is a download."""
  source[0] = re.sub(r"\]\(((?:\.\./)+benchmarks/[^)]+\.md)\)", r"](path:\1)", source[0])


def setup(app):
  app.connect("source-read", _download)
  app.connect("autodoc-process-docstring", _plain_stars, priority=400)  # Napoleon adds stars.
  app.connect("autodoc-process-signature", _signature)
  app.connect("autodoc-skip-member", _is_noise)
