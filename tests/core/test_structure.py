"""The structure of the code: import order, public names, dependencies."""

import ast
import graphlib
import pathlib
import socket
import subprocess
import sys

import pytest

import sbjax

ROOT = pathlib.Path(__file__).parents[2]

# A file imports only from lines before its own.
ORDER = [
  ["sbjax.formats", "sbjax.device", "sbjax.dither"],
  ["sbjax.quantize", "sbjax.partition"],
  ["sbjax.by_rows"],
  [
    "sbjax.recipes",
    "sbjax.exchange",
    "sbjax.matmul",
    "sbjax.fused_ops",
    "sbjax.attention_ops",
    "sbjax.expansion",
  ],
  ["sbjax.operations", "sbjax.pallas", "sbjax.split_k_matmul", "sbjax.fp4_ops"],
  ["sbjax.backends"],
  ["sbjax.linear", "sbjax.attention"],
  ["sbjax.quantized_dot", "sbjax.fsdp"],
  ["sbjax.grouped"],
  ["sbjax.fused", "sbjax.dot_general", "sbjax.rewrite", "sbjax.unit_scaling", "sbjax.fp4"],
  ["sbjax.products"],
  ["sbjax.layers", "sbjax.quantize_model", "sbjax.quantized_einsum"],
  ["sbjax.stable_adamw"],
  ["sbjax.state_formats", "sbjax.collage"],
  ["sbjax.loss_scale"],
  ["sbjax.serialization"],
  ["sbjax.models"],
  ["sbjax"],
  ["train"],
]
# Files of one of these packages may import one another, but not in a circle.
PACKAGES = ("sbjax.pallas", "sbjax.models", "train")

PUBLIC = [
  "Spec",
  "Recipe",
  "RECIPES",
  "Quantized",
  "quantize",
  "dequantize",
  "scaled_matmul",
  "quantized_dot",
  "quantized_dot_general",
  "attention",
  "quantized_einsum",
  "quantize_model",
  "SwitchBackDense",
  "SwitchBackLinear",
  "scale_by_stable_adam",
  "stable_adamw",
  "fixed_loss_scale",
  "dynamic_loss_scale",
  "compress_state",
  "compensated",
  "quantized_pmean",
  "quantized_psum_scatter",
]


def files(*folders):
  return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def module(path):
  return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def rank(name):
  """The line of ORDER that lists the module's longest prefix."""
  ranks = {
    listed: i
    for i, line in enumerate(ORDER)
    for listed in line
    if f"{name}.".startswith(f"{listed}.")
  }
  if name.startswith("sbjax.") and set(ranks) == {"sbjax"}:
    pytest.fail(f"{name} has no place in ORDER.")
  return ranks[max(ranks, key=len)] if ranks else None


def imported(path):
  """The modules that a file imports anywhere; `from a import b` is a.b where b is a module."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f"{path}: imports are written from the root."
      for alias in node.names:
        inner = ROOT.joinpath(*node.module.split("."), alias.name)
        is_module = inner.is_dir() or inner.with_suffix(".py").exists()
        yield f"{node.module}.{alias.name}" if is_module else node.module


def package(name):
  """The package whose files may import one another, if the module is in one."""
  return next((p for p in PACKAGES if f"{name}.".startswith(f"{p}.")), None)


@pytest.mark.parametrize("path", files("sbjax", "train"), ids=module)
def test_imports_point_one_way(path):
  name = module(path)
  for other in imported(path):
    if rank(other) is not None and (package(other) is None or package(other) != package(name)):
      assert rank(other) < rank(name), f"{name} imports {other}, which stands beside or above it."


@pytest.mark.parametrize("name", PACKAGES)
def test_files_of_a_package_do_not_import_one_another_in_a_circle(name):
  graph = {
    module(path): {other for other in imported(path) if package(other) == name} - {module(path)}
    for path in files(name.replace(".", "/"))
  }
  graphlib.TopologicalSorter(graph).prepare()  # Raises CycleError.


def test_nothing_imports_the_configs_the_tests_or_the_benchmarks():
  for path in files("sbjax", "train"):
    for other in imported(path):
      assert other.partition(".")[0] not in ("configs", "tests", "benchmarks"), path


def test_only_task_and_zero_shot_import_the_model():
  knowing = {
    module(path)
    for path in files("train")
    if {"sbjax.models", "sbjax.models.clip"} & set(imported(path))
  }
  assert knowing == {"train.task", "train.zero_shot"}


def test_public_names_exist_and_are_in_all():
  missing = [name for name in PUBLIC if not hasattr(sbjax, name)]
  assert not missing
  assert set(PUBLIC) <= set(sbjax.__all__)
  assert len(sbjax.__all__) == len(set(sbjax.__all__))
  assert all(hasattr(sbjax, name) for name in sbjax.__all__)


DESCRIBED = """
import flax.linen as nn, jax, optax
from flax import nnx
from sbjax import *
from sbjax.models.clip import CLIP, BlockOptions
from sbjax.models.sizes import SIZES
from sbjax.state_formats import Format

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
