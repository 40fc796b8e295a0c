"""The benchmarks' bookkeeping: times, FLOPs, kernel groups and result files."""

import dataclasses
import functools
import importlib
import json
import math
import multiprocessing
import pathlib
import time

import each_kernel
import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
import saved_bytes
import triton_case
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from benchmarks import (
  kernels,
  linear,
  matmul,
  remat_memory,
  step,
  tune,
)
from benchmarks import quantize as quantize_benchmark
from benchmarks.host_rate import rate
from benchmarks.kernels import Kernel, grouped, idle, origins_of
from benchmarks.operands import Operands
from benchmarks.tables import read
from benchmarks.timing import Contender, contender
from sbjax import quantized_dot
from sbjax.models.clip import CLIP
from sbjax.models.flax_block import FlaxBlock
from sbjax.models.sizes import SIZES
from sbjax.models.transformer import BlockOptions
from sbjax.ops.matmul import scaled_matmul
from sbjax.ops.registry import OPERATIONS, Backend, get_backend
from sbjax.quantize import E4M3, INT8, Spec, quantize
from sbjax.recipes import SWITCHBACK
from train import memory
from train.task import BF16_PEAK, model_flops

ROOT = pathlib.Path(__file__).parents[2]


def test_an_operation_s_origin_is_read_from_compiled_text():
  @jax.jit
  def run(x):
    with jax.named_scope("optimizer"):
      return jnp.sin(x) @ x

  hlo = run.lower(jnp.ones((8, 8))).compile().as_text()
  origins = origins_of(hlo)
  assert any(path.endswith("optimizer/dot_general") for path in origins.values())
  assert all(f"{name} = " in hlo for name in origins)


@pytest.mark.parametrize(
  ("name", "origin", "group"),
  [
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob", "", "attention"),
    ("_attention_packed_keys_kernel", "block_0._attention/x", "attention"),
    ("sbjax_attention_backward", "block_0._attention/x", "attention"),
    ("sbjax_scaled_matmul_mosaic_gpu_kernel", "block_0._attention/out", "8-bit matmuls"),
    ("nvjet_sm90_tss_128x256_64x4_2x1_v_bz_coopA_NTN", "", "16-bit matmuls"),
    ("_gelu_backward_kernel", "block_0._mlp", "layer norm, GELU, sums"),
    ("_quantize_sum_kernel", "", "layer norm, GELU, sums"),
    ("_rowwise_kernel", "block_0._attention/out", "quantizing alone"),
    ("loop_add_fusion_3", "jit(train_step)/optimizer/add", "XLA: the optimizer"),
    ("input_concatenate_fusion", "image/blocks/blocks._attention/x", "XLA: around attention"),
    ("MemcpyD2D", "", "XLA: else"),
  ],
)
def test_a_kernel_belongs_to_one_group(name, origin, group):
  seconds = grouped(
    [Kernel(name, "operation.1", 0.25), Kernel(name, "", 0)], {"operation.1": origin}
  )
  assert seconds == {group: 0.25}


def test_idle_time_is_the_time_without_a_running_kernel():
  runs = [(0, 2), (3, 5), (4, 1), (9, 1), (10, 1)]  # start, milliseconds
  assert idle([Kernel("a", "", time, start) for start, time in runs]) == 1 + 1


def dot_flops(jaxpr):
  """The FLOPs of all matmuls in a jaxpr, two for each multiply-add."""
  total = 0
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == "dot_general":
      ((contracted, _), _), lhs = eqn.params["dimension_numbers"], eqn.invars[0].aval
      depth = math.prod(lhs.shape[axis] for axis in contracted)
      total += 2 * math.prod(eqn.outvars[0].aval.shape) * depth
    total += sum(map(dot_flops, jax.extend.core.jaxprs_in_params(eqn.params)))
  return total


def test_kernel_seconds_are_per_operand_set(monkeypatch):
  def watch(function):
    function()
    return [Kernel("loop_copy", "", 1.0), Kernel("sbjax_quantize", "", 3.0)]

  monkeypatch.setattr(kernels, "kernels", watch)
  one = contender(jnp.sin, [(jnp.ones(3),)] * 2)  # Two operand sets a call.
  assert kernels.kernel_seconds(one, calls=5) == pytest.approx(4e-3 / 10)
  assert kernels.kernel_seconds(one, calls=5, ignored="copy") == pytest.approx(3e-3 / 10)


def test_kernel_race_alternates_contenders_and_returns_medians(monkeypatch):
  raced = []

  def seconds(one, calls):
    raced.append(one)
    return [5, 1, 2, 4, 3][len(raced[::2]) - 1] * {"fast": 1, "slow": 10}[one]

  monkeypatch.setattr(kernels, "kernel_seconds", seconds)
  assert kernels.kernel_race(["fast", "slow"]) == [3, 30]
  assert raced == ["fast", "slow"] * 5


@pytest.mark.parametrize("size", ["B/16", "tiny-siglip"])
@pytest.mark.parametrize("patch_dropout", [0.0, 0.5])
def test_model_flops_are_three_times_the_forward_matmul_flops(patch_dropout, size):
  config, batch = SIZES[size], 4
  options = BlockOptions(scan=False)
  model = CLIP(config, options, block=FlaxBlock, patch_dropout=patch_dropout)
  image = jnp.zeros((batch, config.vision.image_size, config.vision.image_size, 3))
  text = jnp.zeros((batch, config.text.context_length), jnp.int32)
  params = jax.eval_shape(model.init, jax.random.key(0), image, text)
  run = functools.partial(model.apply, train=True, rngs={"dropout": jax.random.key(0)})
  forward = dot_flops(jax.make_jaxpr(run)(params, image, text).jaxpr)
  # Pixels have no gradient: a third of the patch embedding's FLOPs is missing.
  vision = config.vision
  missing = 2 * batch * vision.patches * vision.patch_size**2 * vision.width
  flops = model_flops(config, batch, patch_dropout) / 3
  assert flops == pytest.approx(forward - missing, rel=2e-3)


@pytest.mark.parametrize("dtype", [INT8, E4M3])
@pytest.mark.slow
def test_each_kernel_benchmark_calls_every_operation(dtype):
  ops, called = get_backend("xla"), set()

  def watched(name, operation):
    return lambda *args, **kwargs: called.add(name) or operation(*args, **kwargs)

  ops = Backend(name="xla", **{name: watched(name, getattr(ops, name)) for name in OPERATIONS})
  each_kernel.matmuls(ops, dtype)
  each_kernel.row_operations(ops, dtype)
  each_kernel.attentions(ops)
  each_kernel.adam_step(ops)
  assert called == set(OPERATIONS)


def test_a_profile_covers_the_last_calls_after_warm_up(monkeypatch):
  # Two kernels a call, slower in every call, as on a GPU that heats up.
  calls = []

  def traced(work):
    work()
    return [Kernel(name, "", float(n)) for n in range(len(calls)) for name in ("a", "b")]

  monkeypatch.setattr(linear, "kernels", traced)
  one = Contender(lambda sets: calls.append(sets), sets=[()], times=[0.02])
  means = linear.profile(one, calls=3, seconds=0.2)
  assert len(calls) == 13
  assert means == [("a", 11.0), ("b", 11.0)]  # Of calls 10, 11 and 12.


def test_separately_timed_operations_are_those_of_the_layer():
  x, w, dy = (
    jax.random.normal(jax.random.key(i), shape, dtype)
    for i, (shape, dtype) in enumerate(
      [((64, 32), jnp.bfloat16), ((32, 48), jnp.float32), ((64, 48), jnp.bfloat16)]
    )
  )
  ops = get_backend("xla")
  layer = linear.layer(ops, x, w, dy)
  made = {
    name: jax.jit(run, static_argnums=0)(ops, layer) for name, run in linear.OPERATIONS.items()
  }
  for recipe, products in {
    "full": ("x w", "dy w.T", "x.T dy"),
    "switchback": ("x w, int8", "dy w.T, int8", "x.T dy"),
  }.items():
    y, backward = jax.vjp(lambda x, w, r=recipe: quantized_dot(x, w, r), x, w)
    for product, expected in zip(products, (y, *backward(dy)), strict=True):
      assert jnp.array_equal(made.pop(product) if product != "x.T dy" else made[product], expected)
  operands = {"x": layer.x8, "dy": layer.dy8, "w.T": layer.turned8, "w": layer.w8}
  for name, operand in operands.items():
    assert jax.tree.all(jax.tree.map(jnp.array_equal, made.pop(f"quantize {name}"), operand))
  assert jnp.array_equal(made.pop("cast w"), layer.w16)
  assert list(made) == ["x.T dy"]  # Nothing else is timed.


def test_elements_that_differ_from_the_definition_are_counted():
  x, spec = jax.random.normal(jax.random.key(0), (8, 16), jnp.bfloat16), Spec(INT8, "rowwise")
  actual = quantize(x, spec)
  expected = quantize_benchmark.on_cpu(quantize, x, spec)
  assert quantize_benchmark.differing(actual, expected) == 0
  wrong = dataclasses.replace(
    actual, values=actual.values.at[2, 3:5].add(1), scale=actual.scale.at[7].mul(2)
  )
  assert quantize_benchmark.differing(wrong, expected) == 3


@pytest.mark.parametrize("dtype", [INT8, E4M3])
def test_matmul_error_is_relative_to_the_float32_product(dtype):
  lhs, rhs = (
    quantize(jax.random.normal(jax.random.key(i), (rows, 256)), Spec(dtype, "rowwise"))
    for i, rows in enumerate((300, 32))
  )
  y = scaled_matmul(lhs, rhs, jnp.float32)
  assert matmul.error(y, lhs, rhs) < 1e-5
  if dtype == INT8:
    assert matmul.error(matmul.fusible_int8_matmul(lhs, rhs), lhs, rhs) <= 2**-8
  wrong = y.at[255].add(0.25 * jnp.abs(y[:256]).max())
  assert matmul.error(wrong, lhs, rhs) == pytest.approx(0.25, abs=1e-3)


def test_a_tuned_row_replaces_only_the_row_of_its_device_and_sizes(tmp_path):
  path = tmp_path / "table.jsonl"
  row = {"kernel": "scaled_matmul_sm90", "device": "NVIDIA H200"}
  row |= {"m": 256, "n": 768, "k": 768, "config": {}}
  others = [{"m": 1024}, {"n": 3072}, {"k": 3072}, {"device": "NVIDIA H100"}]
  rows = [row, *(row | other for other in others), row | {"config": {"raster_width": 8}}]
  for one in rows:
    tune.write(path, one | {"tops": 1})
  assert [json.loads(line) for line in path.read_text().splitlines()] == rows[1:]


def table_row(result):
  """The table's row for a line of results/tuning.jsonl; maps the names that older lines have."""
  names = {"split": "schedule", "minor": "raster_order", "width": "raster_width"}
  schedules = {"m": "cooperative_m", "n": "cooperative_n", None: "pingpong"}
  config = {
    names.get(name, name): schedules[value] if name == "split" else value
    for name, value in result["config"].items()
  }
  return {"device": result["chip"]} | {name: result[name] for name in "mnk"} | {"config": config}


def test_the_shipped_table_has_the_config_of_each_shape_s_last_tuning():
  kernel = "scaled_matmul_sm90"

  def rows(path):
    return map(json.loads, (ROOT / path).read_text().splitlines())

  def configs(rows):
    return {tuple(row[name] for name in tune.KEY): row["config"] for row in rows}

  results = rows("benchmarks/results/tuning.jsonl")
  tuned = [table_row(row) for row in results if row.get("kernel", kernel) == kernel]
  assert configs(rows(tune.SHIPPED[kernel])) == configs(tuned)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("pool", ["class", "map"])
def test_a_step_s_row_names_the_attention_of_its_image_tower(monkeypatch, pool, dropout):
  asked, tiny = [], SIZES["tiny"]
  for module in (importlib.import_module("sbjax.attention"), step):
    monkeypatch.setattr(module, "fastest_backend", lambda *args: asked.append(args) or "xla")
  vision = dataclasses.replace(tiny.vision, pool=pool, pre_norm=pool == "class")
  config = dataclasses.replace(tiny, vision=vision, embed_dim=vision.width)
  model = step.task_of("full", config, "none", patch_dropout=dropout).model
  image = jnp.zeros((2, vision.image_size, vision.image_size, 3))
  init = functools.partial(model.init, method="encode_image", train=True)
  jax.eval_shape(init, dict.fromkeys(("params", "dropout"), jax.random.key(0)), image)
  by_the_model = set(asked)
  asked.clear()
  assert step.attention_backend(model) == "xla"
  assert set(asked) == by_the_model and len(asked) == 1
  with triton_case.chip(90):
    assert step.attention_backend(step.task_of("switchback_cudnn", tiny, "none").model) == "cudnn"


def test_on_a_tpu_layers_are_in_a_loop_and_no_contender_asks_for_cudnn():
  device = AbstractDevice("TPU v5 lite", 1, "tpu")
  kinds = (AxisType.Auto,)
  for name in ("flax", "switchback", "switchback_cudnn"):
    with use_abstract_mesh(AbstractMesh((1,), ("x",), kinds, abstract_device=device)):
      options = step.task_of(name, SIZES["tiny"], "none").model.options
    assert (options.unroll, options.attention_backend) == (1, None)


@pytest.mark.parametrize("kind", ["TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite"])
def test_a_tpu_s_peak_is_that_of_jax(kind):
  version = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e"}.get(kind, "v4")
  cores = 2 if version in ("v4", "v5p") else 1
  info = pltpu.get_tpu_info_for_chip(pltpu.ChipVersion(version), cores)
  assert BF16_PEAK[kind] == pytest.approx(cores * info.bf16_ops_per_second, rel=0.005)


def test_a_contender_that_does_not_fit_is_listed_apart(monkeypatch):
  def compiled(name, *_):
    if name == "compiler":
      raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate")
    return name, {"peak_gigabytes": {"small": 10, "large": 90}[name], "compile_seconds": 1}

  monkeypatch.setattr(step, "compiled", compiled)
  monkeypatch.setattr(step, "bytes_limit", lambda: 80e9)
  tasks = {name: name for name in ("small", "large", "compiler")}
  steps, found, too_large = step.fitting("B/16", tasks, None, None, None)
  assert list(steps) == list(found) == ["small"]
  assert "90 GB, and JAX has 80.0 GB" in too_large["large"]
  assert "compiled" in too_large["compiler"]
  with pytest.raises(SystemExit, match="No contender fits"):
    step.fitting("B/16", {"large": "large"}, None, None, None)


def test_lhs_rows_are_distinct_and_no_rhs_row_equals_one():
  (lhs, rhs), *_ = Operands(INT8, elements=2**24).sets(2**15, 256, 128, megabytes=1)
  rows = {row.tobytes() for row in np.asarray(lhs.values)}
  assert len(rows) == 2**15 and not any(row.tobytes() in rows for row in np.asarray(rhs.values))


def test_the_loader_rate_counts_cpu_time_of_child_processes():
  burn = "import time\nwhile time.process_time() < 1: pass\ntime.sleep(60)"
  child = multiprocessing.get_context("spawn").Process(target=exec, args=(burn,), daemon=True)
  child.start()
  try:
    # Three batches while the child computes for about a second: nearly all CPU time is its own.
    result = rate(lambda: time.sleep(0.6), images=100, warm_up=0, batches=3)
  finally:
    child.kill()
    child.join()
  assert result["images_per_second"] <= 1 + 100 / 0.6  # The result is rounded.
  assert 300 / 2.5 <= result["images_per_cpu_second"] <= 300 / 0.3


@pytest.mark.aot
@pytest.mark.parametrize(
  ("recipe", "policy"), [("switchback", "none"), ("switchback_m", "residuals")]
)
def test_a_block_saves_the_bytes_on_record(recipe, policy):
  pytest.importorskip("jax_triton", reason="the extra `aot` is not installed")
  found = saved_bytes.measure(recipe, policy)
  (row,) = (r for r in read("kept_bytes") if (r["recipe"], r["remat"]) == (recipe, policy))
  assert {name: row[name] for name in found} == found


@pytest.mark.aot
def test_a_step_s_memory_is_that_of_its_policy_and_batch_on_an_absent_gpu(monkeypatch):
  pytest.importorskip("jax_triton", reason="the extra `aot` is not installed")

  def compiled(task, optimizer, state, batch):
    options, (images, *_) = task.model.options, batch["image"].shape
    assert (options.recipe, options.remat, images) == (SWITCHBACK, "dots", 24)
    (gpu,) = batch["image"].sharding.device_set
    assert gpu.device_kind == "NVIDIA H200"
    return None, {"peak_gigabytes": 7.5, "temporary_gigabytes": 5.25}

  monkeypatch.setattr(step, "compiled", compiled)
  assert remat_memory.gigabytes("tiny", 24, "dots") == [2.25, 5.25]


@pytest.mark.parametrize(
  ("recipe", "saved"),
  [
    ("switchback", memory.SAVED),
    ("switchback_m", memory._SAVED_IN_8_BITS),
    ("switchback+grouped", memory._SAVED_GROUPED),
    ("switchback_m+grouped", memory._SAVED_GROUPED_IN_8_BITS),
  ],
)
def test_the_policies_that_auto_tries_save_the_bytes_on_record(recipe, saved):
  rows = {row["remat"]: row["bytes"] for row in read("kept_bytes") if row["recipe"] == recipe}
  found = {policy: memory.saved_bytes(entry, 4, False) for policy, entry in saved.items()}
  assert found == {policy: pytest.approx(rows[policy], abs=0.1) for policy in saved}
