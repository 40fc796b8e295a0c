"""The structure of the code: import order, public names, dependencies."""

import graphlib
import pathlib
import re
import socket
import subprocess
import sys

import grimp
import pytest

import sbjax

ROOT = pathlib.Path(__file__).parents[2]
ROOTS = ("sbjax", "train", "benchmarks")
FLOORS = 6  # Of sbjax: the root, and five under it.
MOST_PUBLIC_NAMES = 28  # The last is suggest_rules, which makes what the other names take.


@pytest.fixture(scope="module")
def imports():
  """The modules that each module of ROOTS imports anywhere in its text."""
  graph = grimp.build_graph(*ROOTS, cache_dir=None)
  return {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}


def collapsed(imports, name_of):
  """The graph of the names that `name_of` gives to modules; None leaves a module out."""
  graph = {}
  for module, others in imports.items():
    if (name := name_of(module)) is not None:
      graph.setdefault(name, set()).update(map(name_of, others))
  return {name: others - {name, None} for name, others in graph.items()}


def entry(module):
  """What stands in the listing of sbjax/ for a module: its file or its folder."""
  root, *rest = module.split(".")
  return ".".join([root, *rest[:1]]) if root == "sbjax" else None


@pytest.mark.parametrize("root", ROOTS)
def test_no_module_imports_itself_through_others(root, imports):
  graph = collapsed(imports, lambda module: module if module.split(".")[0] == root else None)
  assert any(graph.values())
  graphlib.TopologicalSorter(graph).prepare()  # Raises CycleError.


def test_entries_of_sbjax_stand_on_few_floors_and_import_only_downwards(imports):
  graph = collapsed(imports, entry)
  floors = {}
  for name in graphlib.TopologicalSorter(graph).static_order():  # Raises CycleError.
    floors[name] = 1 + max((floors[other] for other in graph[name]), default=0)
  assert floors["sbjax"] == max(floors.values()) <= FLOORS, floors


def test_train_s_listing_is_short():
  names = [p.name for p in (ROOT / "train").iterdir() if p.suffix == ".py" or p.is_dir()]
  assert len({*names} - {"__pycache__"}) <= 30


@pytest.mark.parametrize(
  ("folder", "below"),
  [("parallel", "config errors fields paths"), ("data", "config errors paths parallel workdir")],
)
def test_folders_of_train_import_only_what_is_below_them(folder, below, imports):
  graph = collapsed(imports, lambda module: ".".join(module.split(".")[:2]))
  ours = {name for name in graph[f"train.{folder}"] if name.startswith("train.")}
  assert ours <= {f"train.{name}" for name in below.split()}


def test_the_core_does_not_import_studies(imports):
  knowing = {
    entry(module) for module, others in imports.items() if "sbjax.studies" in map(entry, others)
  }
  assert knowing - {None} <= {"sbjax", "sbjax.studies"}


def test_the_library_knows_no_program_and_no_program_the_tests(imports):
  for module, others in imports.items():
    below = {"sbjax": ("sbjax",), "train": ("sbjax", "train"), "benchmarks": ROOTS}
    assert {other.split(".")[0] for other in others} <= set(below[module.split(".")[0]]), module
  for root in ROOTS:
    beyond = "tests" if root == "benchmarks" else "tests|configs|benchmarks"
    for path in (ROOT / root).rglob("*.py"):
      for line in path.read_text().splitlines():
        assert not re.match(rf"\s*(from|import) ({beyond})\b", line), f"{path}: {line}"


def test_only_task_and_zero_shot_import_the_model(imports):
  models = {"sbjax.models", "sbjax.models.clip"}
  knowing = {m for m, others in imports.items() if m.startswith("train.") and models & others}
  assert knowing == {"train.task", "train.zero_shot"}


def test_public_names_are_few_and_each_is_there():
  assert len(set(sbjax.__all__)) == len(sbjax.__all__) <= MOST_PUBLIC_NAMES
  assert all(hasattr(sbjax, name) for name in sbjax.__all__)


DESCRIBED = """
import flax.linen as nn, jax, optax
from flax import nnx
from sbjax import *
from sbjax.linear.layers import LayerScale
from sbjax.models.clip import CLIP, BlockOptions
from sbjax.models.sizes import SIZES
from sbjax.optim.state_formats import Format
from sbjax.recipes import fp8_cscale

dot_general = quantized_dot_general("switchback", backend="triton")
nn.MultiHeadDotProductAttention(8, qkv_dot_general=dot_general, out_dot_general=dot_general)
for layer in (SwitchBackDense, LayerNormDense, LayerNormMLP):
  layer(8, recipe="switchback", backend="mosaic")
LayerScale()
RecipeRules.of({"*/fc1": "full", "*": RECIPES["switchback"]}), fp8_cscale(3), Spec(INT8, "rowwise")
for model in (nn.Dense(8), nn.Dense, lambda params: params):
  quantize_model(model, {"*": "switchback"}, activations="switchback_q", backend="mosaic")
CLIP(SIZES["B/32"], BlockOptions(recipe="switchback", parametrization="unit"))
optimizer = stable_adamw(1e-3, weight_decay=0.1)
for wrap in (compress_state, compensated, dynamic_loss_scale, fixed_loss_scale):
  wrap(optimizer), wrap(optax.adamw(1e-3)), scale_by_stable_adam()
nnx.eval_shape(lambda: SwitchBackLinear(4, 4, rngs=nnx.Rngs(0)))

from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
jax.distributed.initialize("localhost:%d", num_processes=1, process_id=0)
"""


def test_describing_layers_models_and_optimizers_starts_no_backend():
  """So `jax.distributed.initialize` may come after it."""
  with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
  run = subprocess.run(
    [sys.executable, "-c", DESCRIBED % port], capture_output=True, text=True, cwd=ROOT
  )
  assert run.returncode == 0, run.stderr


HEAVY = [
  "torch",
  "tensorflow",
  "triton",
  "jax_triton",
  "orbax",
  "grain",
  "tensorflow_datasets",
  "PIL",
  "open_clip",
]


def test_importing_sbjax_needs_only_jax_flax_optax_and_numpy():
  # Flax imports orbax where that is installed, so Flax is imported first.
  program = (
    "import sys, jax, flax.linen, flax.nnx, optax, numpy; before = set(sys.modules);"
    "import sbjax; print(*(set(sys.modules) - before))"
  )
  run = subprocess.run(
    [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
  )
  new = {name.partition(".")[0] for name in run.stdout.split()}
  assert "sbjax" in new
  assert not new & set(HEAVY)
  assert not any(name.startswith("jax.experimental.pallas") for name in run.stdout.split())
