"""Data, weights and checkpoints are read as data: no code comes from them, no path either."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FILES = sorted(path for folder in ("sbjax", "train") for path in (ROOT / folder).rglob("*.py"))

# Modules that run what they read.
MODULES = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve", "yaml"}
# Functions that run what they read, or write where an archive says. Methods by their name.
CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen"}
METHODS = {"extract", "extractall", "unpack_archive"}


def faults(tree):
  """What of a program trusts what it reads."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Import | ast.ImportFrom):
      names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
      yield from (name for name in names if name.partition(".")[0] in MODULES)
    elif isinstance(node, ast.Call):
      name = ast.unparse(node.func)
      options = {option.arg: ast.unparse(option.value) for option in node.keywords}
      method = name.rpartition(".")[2] in METHODS and not name.startswith("traceback.")
      if name in CALLS or method:
        yield name
      if options.get("allow_pickle", "False") != "False":
        yield f"{name}(allow_pickle)"
      # torch.jit.load has no such option; docs/trust.md says what it takes.
      loads = "torch" in name and name.endswith(".load") and "torch.jit" not in name
      if loads and options.get("weights_only") != "True":
        yield "torch.load without weights_only"
      if options.get("shell", "False") != "False":
        yield f"{name}(shell)"


@pytest.mark.parametrize(
  "program",
  [
    "import pickle",
    "from dill import loads",
    "import yaml.loader",
    "np.load(path, allow_pickle=True)",
    "torch.load(path)",
    "torch.load(path, weights_only=False)",
    "_import('torch').load(path)",
    "tarfile.open(path).extractall(folder)",
    "eval(text)",
    "subprocess.run(text, shell=True)",
  ],
)
def test_programs_that_trust_what_they_read_are_recognized(program):
  assert list(faults(ast.parse(program)))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_nothing_runs_or_extracts_what_it_reads(path):
  assert not list(faults(ast.parse(path.read_text())))
