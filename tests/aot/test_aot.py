"""sbjax compiled for an A100 and an H200, both absent: kernels, collectives, registers.

One process of `operations.py` compiles for each GPU; both run at once. Exhaustive cases
have processes of their own.
"""

import concurrent.futures
import functools
import inspect
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import jax
import pytest
from pairwise import mainly

import sbjax
from sbjax.pallas.sm90 import scaled_matmul as scaled_matmul_sm90
from tests.aot import operations, step

pytestmark = pytest.mark.aot

ROOT = pathlib.Path(__file__).parents[2]
CHIPS = tuple(int(chip) for chip in os.environ.get("SBJAX_AOT", "80,90").split(","))
HAS_MOSAIC = jax.__version_info__ >= (0, 11)
MOSAIC, TRITON = "mosaic_gpu_v2", "triton_kernel_call"
KERNELS = {80: {TRITON}, 90: {MOSAIC, TRITON} if HAS_MOSAIC else {TRITON}}  # With backend=None.


@functools.cache
def proofs(slow=False):
  """{chip: the results of operations.py, or its error}; skips the test where wheels are missing."""
  for package in ("jax_cuda13_plugin", "jax_plugins.xla_cuda13", "triton", "jax_triton"):
    pytest.importorskip(package, reason="the extra `aot` is not installed")
  with concurrent.futures.ThreadPoolExecutor() as pool:
    found = pool.map(functools.partial(_proof, slow), CHIPS)
    return dict(zip(CHIPS, found, strict=True))


def _proof(slow, capability):
  with tempfile.TemporaryDirectory() as folder:
    environment = {
      **os.environ,
      "JAX_PLATFORMS": "cpu",
      "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",
      # This flag covers XLA's own kernels; ptxas reports the spills of Mosaic's. With jax 0.10
      # XLA's all-reduce spills, and so do its Triton tiles, which no autotuner chooses here.
      "XLA_FLAGS": f"--xla_gpu_fail_ptx_compilation_on_register_spilling={str(HAS_MOSAIC).lower()}"
      " --xla_gpu_enable_triton_gemm=false",
      "JAX_TRITON_DUMP_DIR": folder,
      "MOSAIC_GPU_DUMP_TO": folder,
      "MOSAIC_GPU_DUMP_PTX": "1",
      "MOSAIC_GPU_DUMP_PTXAS": "1",
    }
    cases = "slow" if slow else "mainly"
    command = [sys.executable, "-m", "tests.aot.operations", str(capability), folder, cases]
    run = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True)
  return json.loads(run.stdout.splitlines()[-1]) if run.returncode == 0 else run.stderr[-5000:]


@pytest.fixture(params=CHIPS, ids=lambda capability: f"sm_{capability}")
def chip(request):
  return request.param


@pytest.fixture
def proof(request, chip):
  result = proofs("slow" in request.keywords)[chip]
  return pytest.fail(result) if isinstance(result, str) else result


def own(targets):
  """The targets of our kernels; jax-triton 0.4 renamed its target."""
  return {target.removesuffix("_ffi") for target in targets} & {MOSAIC, TRITON}


@pytest.mark.parametrize("operation", operations.OPERATIONS)
@pytest.mark.slow
def test_each_public_operation_lowers_to_the_kernels_of_its_backend(chip, proof, operation):
  targets = {
    name.partition(", ")[2]: own(called)
    for name, called in proof["lowered"].items()
    if name.partition(", ")[0] == operation
  }
  expected = {"None": KERNELS[chip], "triton": {TRITON}, "xla": set()}
  if chip == 90 and HAS_MOSAIC:
    expected["mosaic"] = KERNELS[90]
  assert targets == expected


def test_every_public_operation_with_a_backend_argument_is_compiled():
  public = {name: getattr(sbjax, name) for name in sbjax.__all__}
  taking = {
    name
    for name, one in public.items()
    if callable(one) and "backend" in inspect.signature(vars(one).get("__init__", one)).parameters
  }
  assert {"SwitchBackLinear", "quantized_dot"} <= taking
  # test_attention_triton.py compiles attention; quantize_weights calls the quantizers that
  # quantize_weight has, the others quantized_dot_general.
  elsewhere = {"attention", "quantize_model", "quantize_weights", "quantized_einsum"}
  assert taking - elsewhere <= set(operations.OPERATIONS)


@pytest.mark.parametrize(("piece", "name"), mainly(operations.MAIN, operations.CASES))
def test_forward_and_backward_of_each_recipe_compile(chip, proof, piece, name):
  # XLA computes fp8 recipes on an A100, which has no fp8, and "full", which has no 8-bit product.
  # Layer norm's gradient is a kernel in every recipe.
  is_xla = name == "full" or (chip < 89 and name.startswith("fp8"))
  expected = set() if is_xla else KERNELS[chip]
  if piece != "linear":
    expected = expected | {TRITON}
  assert own(proof["layers"][f"{piece}, {name}"]["targets"]) == expected


def test_gelu_and_layer_norm_gradients_are_written_in_place(chip, proof):
  num_aliases = {name: layer["in_place"] for name, layer in proof["layers"].items()}
  assert num_aliases["mlp, switchback"] == num_aliases["mlp, switchback_c"] == 4
  assert num_aliases["qkv, switchback"] == 2
  assert num_aliases["mlp, switchback_m"] == 3  # GELU's input is in 8 bits.
  assert num_aliases["gated, switchback"] == num_aliases["gated, switchback_c"] == 5
  assert num_aliases["gated, switchback_m"] == 3  # Both inputs of the unit are in 8 bits.
  assert num_aliases["linear, switchback"] == 0
  assert proof["meshes"]["mlp, switchback, batch, w over fsdp"]["in_place"] == 4


@pytest.mark.slow
def test_on_two_devices_only_the_first_layer_lowers_kernels(chip, proof):
  cases = proof["stacks"]
  assert {name: stack["lowered"] > 0 for name, stack in cases.items()} == {
    "jit, 1": True, "jit, 3": False, "shard_map, 1": False, "shard_map, 3": False
  }  # fmt: skip
  for kind in ("jit", "shard_map"):
    one, three = cases[f"{kind}, 1"], cases[f"{kind}, 3"]
    assert one["calls"] < three["calls"] and own(three["targets"]) == KERNELS[chip]


@pytest.mark.parametrize(
  ("piece", "layout", "name"), mainly(operations.MAIN_MESHES, operations.MESHES)
)
def test_on_four_devices_no_activation_is_gathered(chip, proof, piece, layout, name):
  summary = proof["meshes"][f"{piece}, {name}, {layout}"]
  assert own(summary["targets"]) == KERNELS[chip]
  # Only a weight that is split over the devices of the batch is gathered, in int8.
  gathered = summary["gathered"]
  assert bool(gathered) == layout.endswith("w over fsdp")
  assert {dtype for dtype, _ in gathered} <= {"s8"}
  assert max((size for _, size in gathered), default=0) <= operations.K * operations.N


@pytest.fixture
def steps():
  if 90 not in CHIPS:
    pytest.skip("SBJAX_AOT leaves this chip out")
  result = proofs(slow=True)[90]
  return pytest.fail(result) if isinstance(result, str) else result["steps"]


def kernels_of_a_step():
  """The number of elements of each kernel of all blocks."""
  size, layers = step.SIZE, step.LAYERS
  widths = [size.vision.width, size.text.width] * layers
  return sorted(rows * width * width for width in widths for rows in (3, 1, 4, 4))


@pytest.mark.parametrize("mesh", step.MESHES)
@pytest.mark.slow
def test_a_step_on_several_gpus_gathers_each_kernel_once_in_8_bits(steps, mesh):
  in_8_bits = [n for kind, dtype, n in steps[mesh] if (kind, dtype) == ("all-gather", "s8")]
  assert sorted(in_8_bits) == (kernels_of_a_step() if "fsdp" in mesh else [])


@pytest.mark.parametrize("mesh", step.MESHES)
@pytest.mark.slow
def test_a_step_on_several_gpus_moves_no_activation(steps, mesh):
  size, batch = step.SIZE, step.BATCH
  largest = max(kernels_of_a_step()[-1], size.text.vocab_size * size.text.width)
  assert batch * size.text.context_length * size.text.width > 2 * largest
  assert {kind for kind, _, _ in steps[mesh]} <= {"all-gather", "all-reduce", "reduce-scatter"}
  assert max(n for kind, _, n in steps[mesh] if kind != "all-reduce") <= largest
  # XLA sums many gradients as one array. Their total size is that of the parameters. Where both
  # axes are split, shards are first scattered and then summed.
  summed = sum(n for kind, _, n in steps[mesh] if kind == "all-reduce")
  scattered = sum(n for kind, _, n in steps[mesh] if kind == "reduce-scatter")
  share = 1.52 if mesh == "data=2 fsdp=2" else 1.02
  assert summed + scattered < share * steps["parameters"] + batch * 4 * size.embed_dim


@pytest.mark.parametrize("mesh", step.MESHES)
@pytest.mark.slow
def test_a_step_writes_kernels_in_place(steps, mesh):
  assert steps[f"{mesh}: copied"] == []


@pytest.mark.slow
def test_a_step_lowers_as_many_kernels_for_two_layers_as_for_one(steps):
  layers = step.LAYERS
  assert steps[f"{layers} layers"] == steps[f"{layers + 1} layers"] > 0


def test_split_k_matmul_splits_on_sm_90_only_and_moves_nothing(chip, proof):
  shape = "f32[2,1280,5120]" if chip == 90 else "f32[1280,5120]"
  assert proof["token_sums"] == {"products": [shape], "moved": []}


@pytest.mark.slow
def test_an_update_of_states_in_few_bits_is_in_place(chip, proof):
  found = proof["update_bytes"]
  in_place = {name: round(one["in_place"], 3) for name, one in found.items()}
  of_moments = {"float32": 12, "averaged": 16, "bfloat16": 8, "coat": 6.125, "fp8_lm": 7}
  assert in_place == of_moments | {"collage_light": 8, "collage_plus": 10}  # Parameters, too.
  for name, one in found.items():
    of_gradients = 2 if name.startswith("collage") else 4
    # Without fp8 "coat" has no kernel, and XLA writes both new moments of a leaf.
    expected = 8 if name == "coat" and chip < 89 else of_gradients
    assert one["temporary"] <= expected + 0.1, name


@pytest.mark.slow
def test_an_update_of_sharded_coded_moments_moves_no_moment(chip, proof):
  found = proof["sharded_update"]["1024"]
  assert {kind for kind, *_ in found["moved"]} == {"all-reduce"}
  assert max(n for *_, n in found["moved"]) <= 3  # The sums of RMS.
  kernels = [] if chip < 89 else ["2,192,8,128", "4096,2,128"]
  assert found["directions"] == kernels
  # Four devices have half a group of 256 numbers each, and XLA gathers only details.
  found = proof["sharded_update"]["256"]
  assert found["directions"] == kernels[:1]
  assert max(n for *_, n in found["moved"]) <= 4096 * 2


@pytest.mark.slow
def test_every_tuned_tile_config_compiles(chip, proof):
  has_mosaic = MOSAIC in KERNELS[chip]
  configs = {str(config) for config in scaled_matmul_sm90.tile_configs()} if has_mosaic else set()
  assert all(own(targets) == {MOSAIC} for targets in proof["tile_configs"].values())
  assert {name.rpartition(", ")[0] for name in proof["tile_configs"]} == configs


def test_8_bit_products_run_on_tensor_cores(chip, proof):
  products = proof["kernels"]["products"]
  int8 = "mma.sync" if chip == 80 else "wgmma"
  assert any(p.startswith(int8) and ".s32.s8.s8" in p for p in products)
  fp8 = {p[p.index(".f32.") :] for p in products if ".f32.e" in p and p.startswith("wgmma")}
  expected = {".f32.e4m3.e4m3", ".f32.e5m2.e4m3", ".f32.e4m3.e5m2"}
  assert fp8 == (set() if chip == 80 else expected)


@pytest.mark.parametrize("cases", mainly(["main"], ["main", "slow"]))
def test_mosaic_kernels_spill_no_registers(chip, proof, cases):
  dumps = proof["kernels"]
  assert (dumps["reports"] > 0) == (MOSAIC in KERNELS[chip])
  # Each report has spill stores and spill loads; it may cover several kernels.
  assert len(dumps["spilled"]) >= 2 * dumps["reports"] and not any(dumps["spilled"])
