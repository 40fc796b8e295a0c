"""The package's metadata agrees with the checkout."""

import pathlib
import re
import tomllib

import sbjax

ROOT = pathlib.Path(__file__).parents[2]


def test_citation_and_changelog_have_the_package_version():
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())
  assert "version" not in project["project"]
  assert project["tool"]["setuptools"]["dynamic"]["version"]["attr"] == "sbjax.__version__"
  cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1]
  assert cited == sbjax.__version__
  assert sbjax.__version__ in (ROOT / "CHANGELOG.md").read_text()


def test_the_package_has_a_py_typed_marker():
  assert (pathlib.Path(sbjax.__file__).parent / "py.typed").exists()
