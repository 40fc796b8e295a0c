"""The documentation: its Python runs, its links resolve, and README stays short."""

import doctest
import functools
import pathlib
import pkgutil
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.figure
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import sbjax
from benchmarks import report

ROOT = pathlib.Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])


def blocks(page, language):
  """The fenced blocks of a page in one language."""
  return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def with_blocks(language):
  pages = [page for page in PAGES if blocks(page, language)]
  return pytest.mark.parametrize("page", pages, ids=lambda page: page.name)


@pytest.fixture(autouse=True)
def as_a_user_has_it(strict_jax):
  """JAX's own defaults, as users have them: pages run without the tests' strict settings."""
  with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
    yield


@with_blocks("python")
def test_the_python_blocks_of_a_page_run_in_order(page):
  names = {"__name__": page.stem}
  for block in blocks(page, "python"):
    exec(compile(block, page.name, "exec"), names)


@with_blocks("pycon")
def test_the_sessions_of_a_page_print_the_shown_output(page):
  session = "\n".join(blocks(page, "pycon"))
  test = doctest.DocTestParser().get_doctest(session, {}, page.name, str(page), 0)
  out = []
  assert doctest.DocTestRunner().run(test, out=out.append).failed == 0, "".join(out)


@pytest.mark.parametrize(("page", "least"), [("docs/faults.md", 30), ("tests/README.md", 10)])
def test_each_test_that_a_page_of_tests_names_exists(page, least):
  named = re.findall(r"`(test_\w+)\.py`:((?: `test_\w+`,?)+)", (ROOT / page).read_text())
  assert len(named) > least
  for file, names in named:
    (path,) = (ROOT / "tests").rglob(f"{file}.py")
    text = path.read_text()
    assert [n for n in re.findall(r"`(\w+)`", names) if f"def {n}(" not in text] == []


@pytest.mark.parametrize("name", sbjax.__all__)
def test_the_example_of_a_public_name_prints_the_shown_output(name):
  public, out = getattr(sbjax, name), []
  if not callable(public):
    return  # Formats and RECIPES have no docstring of ours.
  known = {**vars(sbjax), "jax": jax, "jnp": jnp, "nn": nn, "nnx": nnx, "optax": optax, "P": P}
  test = doctest.DocTestParser().get_doctest(public.__doc__, known, name, None, 0)
  assert test.examples
  assert doctest.DocTestRunner().run(test, out=out.append).failed == 0, "".join(out)


def anchors(page):
  """The anchors that GitHub and MyST give to the headings of a page."""
  headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
  return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_existing_files_and_headings(page):
  for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
    if target.startswith(("http://", "https://")):
      continue
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    assert file.exists(), f"{page.name} links to {target}, which is not there."
    if anchor:
      assert anchor in anchors(file), f"{page.name} links to {target}: there is no such heading."


def test_readme_has_at_most_100_lines_and_700_words():
  text = (ROOT / "README.md").read_text()
  assert len(text.splitlines()) <= 100
  assert len(text.split()) <= 700


def test_the_page_of_the_design_has_at_most_150_lines():
  assert len((ROOT / "docs/design.md").read_text().splitlines()) <= 150


GUIDES = (
  "getting_started in_your_model convert_a_model serving recipes training_clip data scenes spikes"
  " rounding coming_from_open_clip scaling clusters weights evaluating embedding faults"
  " stable_adamw optimizer_states unit_scaling"
)


@pytest.mark.parametrize("name", GUIDES.split())
def test_a_guide_opens_with_a_command_or_code(name):
  opening = (ROOT / f"docs/{name}.md").read_text().splitlines()[:12]
  assert any(line.startswith("```") for line in opening)


def test_the_files_that_the_page_of_the_design_names_exist():
  files = [str(path) for folder in ("sbjax", "train") for path in (ROOT / folder).rglob("*.py")]
  named = re.findall(r"`([\w/]+\.py)`", (ROOT / "docs/design.md").read_text())
  assert len(named) > 10
  assert [name for name in named if not any(f.endswith(f"/{name}") for f in files)] == []


API = re.findall(r"^\.\. auto\w+:: ([\w.]+)", (ROOT / "docs/api.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", API)
def test_a_path_of_the_api_page_can_be_imported(path):
  named = pkgutil.resolve_name(path)  # A function must not hide the module of its name.
  assert functools.reduce(getattr, path.split(".")[1:], sbjax) is named


def written_tables(monkeypatch):
  """What benchmarks/report.py writes: (lines, page or nothing) for each table."""
  tables = {}
  monkeypatch.setattr(report, "write", lambda name, *args: tables.update({(name, *args[1:]): args}))
  monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda *args, **kwargs: None)
  report.main()
  report.plt.close("all")
  return tables


def test_tables_in_docs_equal_those_made_from_the_result_files(monkeypatch):
  tables = written_tables(monkeypatch)
  for lines, *page in tables.values():
    text = page[0].read_text() if page else report.PERFORMANCE.read_text()
    assert "\n".join(lines) in text, lines[0]
  marked = [name for page in PAGES for name in re.findall(r"<!-- (.*): made by", page.read_text())]
  assert sorted(marked) == sorted(name for name, *_ in tables)


def test_a_table_of_all_sizes_has_neither_the_size_nor_an_empty_column():
  head = ["| size | recipe | top-1 | apart |", "|---|---|---|---|"]
  lines = [*head, "| small | `a` | 5 | 1 |", "| all sizes | `a` |  | 2 |"]
  expected = ["| recipe | apart |", "|---|---|", "| `a` | 2 |"]
  assert report.of_all_sizes(lines) == expected
  assert report.of_all_sizes(lines[:3]) == lines[:3]


def test_attention_s_tables_are_of_one_chip(monkeypatch):
  expected, read = written_tables(monkeypatch), report.read

  def with_another_chip(name):
    rows, times = read(name), {"cudnn": [1, 1], "triton": [1, 1]}
    changed = {"chip": "another", "milliseconds": times}
    return [*rows, rows[0] | changed] if name.startswith("attention") else rows

  monkeypatch.setattr(report, "read", with_another_chip)
  assert written_tables(monkeypatch) == expected
