"""Compiles sbjax for one kind of absent NVIDIA GPU: python -m tests.aot.operations 90 DIR mainly

A process compiles for one GPU: Mosaic mixes up several. The results are printed as JSON. DIR gets
the kernels' PTX and the reports of ptxas. With `mainly` it compiles the main cases,
with `slow` the others.
"""

import functools
import itertools
import json
import os
import pathlib
import re
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from benchmarks import absent_gpu
from benchmarks.collectives import moved
from sbjax import (
  E4M3,
  RECIPES,
  LayerNormDense,
  LayerNormMLP,
  Quantized,
  Spec,
  SwitchBackDense,
  SwitchBackLinear,
  quantized_dot,
  quantized_dot_general,
)
from sbjax.distributed.fsdp import gather_weight
from sbjax.linear import fused_nnx
from sbjax.linear.fused import gated_mlp, layer_norm_dense, layer_norm_mlp
from sbjax.linear.layers import GatedMLP
from sbjax.linear.weight import quantize_weight
from sbjax.ops import partition
from sbjax.ops.rows import LayerNormParams, RMSNormParams
from sbjax.ops.split_k import split_k_matmul
from sbjax.pallas.sm90 import scaled_matmul as sm90
from sbjax.recipes import SWITCHBACK

M, K, N = 8192, 256, 512  # An eighth of an activation is as large as the weight or larger.

LAYOUTS = {  # (x, w) on a mesh of (data 2, fsdp 2)
  "batch, w over fsdp": (P(("data", "fsdp")), P("fsdp")),
  "K": (P("data", "fsdp"), P("fsdp")),
  "N": (P("data"), P(None, "fsdp")),
}


def _arguments(mesh, x_spec, w_spec):
  x, w = ((M, K), jnp.bfloat16, x_spec), ((K, N), jnp.float32, w_spec)
  return [absent_gpu.argument(mesh, *x), absent_gpu.argument(mesh, *w)]


def _linear(recipe, backend, x, w):
  return quantized_dot(x, w, recipe, backend=backend)


def _mlp(recipe, backend, x, w):
  norm, b1, b2 = LayerNormParams(jnp.ones(K), jnp.zeros(K)), jnp.zeros(N), jnp.zeros(K)
  return layer_norm_mlp(x, norm, w, b1, w.T, b2, recipe, backend=backend, add_residual=True)


def _gated(recipe, backend, x, w):
  norm, bias = RMSNormParams(jnp.ones(K)), jnp.zeros(N)
  return gated_mlp(x, norm, w, w, w.T, recipe, b_up=bias, backend=backend, add_residual=True)


def _qkv(recipe, backend, x, w):
  norm, bias = LayerNormParams(jnp.ones(K), jnp.zeros(K)), jnp.zeros(384)
  ys = layer_norm_dense(x, norm, w[:, :384], recipe, bias=bias, backend=backend, num_outputs=3)[1]
  return jnp.concatenate(ys, axis=1)


def _with_gradients(forward, recipe, x, w):
  y, backward = jax.vjp(functools.partial(forward, recipe, None), x, w)
  return y, *backward(y)


PIECES = {"linear": _linear, "mlp": _mlp, "gated": _gated, "qkv": _qkv}
CASES = list(itertools.product(PIECES, RECIPES))
MAIN = [  # Recipes whose kernels differ most; llm_int8's are also compiled by other tests.
  *(("linear", name) for name in ("full", "switchback", "switchback_m", "fp8_tensorwise")),
  *(("mlp", name) for name in ("full", "switchback", "switchback_m", "fp8_tensorwise")),
  ("mlp", "switchback_c"),
  *(("gated", name) for name in ("full", "switchback", "switchback_m", "switchback_c")),
  ("qkv", "switchback"),
]
SPLIT = [  # Layer norm takes whole rows, and layer_norm_dense returns whole outputs.
  (piece, layout)
  for piece in PIECES
  for layout in LAYOUTS
  if (piece, layout) not in {("mlp", "K"), ("gated", "K"), ("qkv", "K"), ("qkv", "N")}
]
MESHES = [
  (piece, layout, name) for piece, layout in SPLIT for name in ("switchback", "switchback_m")
]
MAIN_MESHES = [
  (p, layout, name) for p, layout, name in MESHES if name == "switchback" and p in ("mlp", "qkv")
]


def gathered(hlo):
  """The results of all-gathers, as {(dtype, elements)}."""
  return {(dtype, size) for kind, dtype, size in moved(hlo) if kind == "all-gather"}


def _summary(hlo):
  targets = set(re.findall(r'custom_call_target="([^"]*)"', hlo))
  calls = [line for line in hlo.splitlines() if 'custom_call_target="triton' in line]
  return {
    "targets": sorted(targets),
    "gathered": sorted(gathered(hlo)),
    "in_place": sum(len(re.findall(r"\{\d*\}: \(\d+, \{\}", call)) for call in calls),
  }


def _chosen(cases, main, slow):
  return [case for case in cases if (case in main) != slow]


def compiled(capability, slow):
  """Forward and backward of layers, and of some on four devices."""
  layers, meshes = {}, {}
  for piece, name in _chosen(CASES, MAIN, slow):
    with absent_gpu.mesh(capability, (1,), ("data",)) as mesh:
      run = jax.jit(functools.partial(_with_gradients, PIECES[piece], name))
      hlo = run.lower(*_arguments(mesh, P(), P())).compile().as_text()
      layers[f"{piece}, {name}"] = _summary(hlo)
  for piece, layout, name in _chosen(MESHES, MAIN_MESHES, slow):
    with absent_gpu.mesh(capability, (2, 2), ("data", "fsdp")) as mesh:
      run = jax.jit(functools.partial(_with_gradients, PIECES[piece], name))
      hlo = run.lower(*_arguments(mesh, *LAYOUTS[layout])).compile().as_text()
      meshes[f"{piece}, {name}, {layout}"] = _summary(hlo)
  return {"layers": layers, "meshes": meshes}


def stacks(capability):
  """The gradient of a few layers on two devices: kernels newly lowered, and calls of kernels.

  Under jit with shardings, and in a shard_map with check_vma.
  """

  def loss(layers, x, w):
    for _ in range(layers):
      x = _mlp("switchback", None, _linear("switchback", None, x, w)[:, :K], w)
    return jnp.mean(jnp.square(x.astype(jnp.float32)))

  results = {}
  for kind, layers in itertools.product(("jit", "shard_map"), (1, 3)):
    before = partition._lowered.cache_info().misses
    with absent_gpu.mesh(capability, (2,), ("data",)) as mesh:
      run, specs = jax.grad(functools.partial(loss, layers), (0, 1)), (P("data"), P())
      if kind == "shard_map":
        run = jax.shard_map(run, in_specs=specs, out_specs=specs)
      hlo = jax.jit(run).lower(*_arguments(mesh, P("data"), P())).compile().as_text()
    calls = re.findall(r'custom_call_target="(?:mosaic|triton)', hlo)
    count = partition._lowered.cache_info().misses - before
    results[f"{kind}, {layers}"] = {"lowered": count, "calls": len(calls), **_summary(hlo)}
  return results


def tile_configs(capability):
  """The Mosaic product in every tile config of its table, with a bias and a residual.

  These use the most registers. Ping-pong leaves the fewest, so only its configs also have fp8 and
  no scales.
  """

  def product(config, lhs, rhs, scale, bias, residual):
    # No recipe has fp8 with a scale a row on both sides, a bias and a residual.
    rhs_spec = Spec(rhs.dtype, "rowwise" if lhs.dtype == jnp.int8 else "tensorwise")
    lhs = Quantized(lhs, scale, Spec(lhs.dtype, "rowwise"))
    rhs = Quantized(rhs, scale[: n if rhs_spec.is_rowwise else 1], rhs_spec)
    return sm90.scaled_matmul(lhs, rhs, residual.dtype, bias=bias, residual=residual, config=config)

  def sums(config, lhs, rhs, *_):
    return sm90.accumulate(lhs, rhs, config=config)

  m, n, k = 4096, 1280, 1280
  cases = [
    (config, function, dtype)
    for config in sm90.tile_configs()
    for function, dtype in ((product, jnp.int8), (product, E4M3), (sums, jnp.int8))
    if (function, dtype) == (product, jnp.int8) or config.schedule == "pingpong"
  ]
  results = {}
  with absent_gpu.mesh(capability, (1,), ("data",)) as mesh:
    for config, function, dtype in cases:
      sizes = [((m, k), dtype), ((n, k), dtype), ((m, 1), jnp.float32), ((n,), jnp.float32),
               ((m, n), jnp.bfloat16)]  # fmt: skip
      run = jax.jit(functools.partial(function, config))
      arguments = [absent_gpu.argument(mesh, *size, P()) for size in sizes]
      hlo = run.lower(*arguments).compile().as_text()
      results[f"{config}, {function.__name__} of {jnp.dtype(dtype)}"] = _summary(hlo)["targets"]
  return results


def token_sums(capability):
  """The cuBLAS products, and all gathers, transposes and copies, for tokens on 4 devices."""
  with absent_gpu.mesh(capability, (4,), ("data",)) as mesh:
    shapes = [(4 * 66048, n) for n in (1280, 5120)]
    arguments = [absent_gpu.argument(mesh, shape, jnp.bfloat16, P("data")) for shape in shapes]
    run = jax.jit(functools.partial(split_k_matmul, dtype=jnp.float32))
    hlo = run.lower(*arguments).compile().as_text()
  return {
    "products": re.findall(r"= \((\w+\[[\d,]*\]).*custom_call_target=\"__cublas", hlo),
    "moved": re.findall(r" (all-gather|all-to-all|collective-permute|transpose|copy)\(", hlo),
  }


def _nnx(backend, x, w):
  del w
  return SwitchBackLinear(K, N, backend=backend, rngs=nnx.Rngs(0))(x)


def _linen(make, backend, x, w):
  return make(backend).apply({"params": {"kernel": w, "bias": jnp.zeros(N)}}, x)


def _norm_dense(backend, x, w):
  norm, dense = {"scale": jnp.ones(K), "bias": jnp.zeros(K)}, {"kernel": w, "bias": jnp.zeros(N)}
  return LayerNormDense(N, backend=backend).apply({"params": {"norm": norm, "dense": dense}}, x)[1]


def _layer_norm_mlp(backend, x, w):
  norm, fc1 = {"scale": jnp.ones(K), "bias": jnp.zeros(K)}, {"kernel": w, "bias": jnp.zeros(N)}
  params = {"norm": norm, "fc1": fc1, "fc2": {"kernel": w.T, "bias": jnp.zeros(K)}}
  return LayerNormMLP(N, backend=backend, add_residual=True).apply({"params": params}, x)


def _gated_layer(make, backend, x, w):
  params = {n: {"kernel": w.T if n == "down" else w} for n in ("gate", "up", "down")}
  return make(backend).apply({"params": {"norm": {"scale": jnp.ones(K)}, **params}}, x)


def _gated_nnx(backend, x, w):
  del w
  return fused_nnx.GatedMLP(K, N, backend=backend, add_residual=True, rngs=nnx.Rngs(0))(x)


def _with_quantized_kernel(backend, x, w):
  kernel = quantize_weight(w, SWITCHBACK, backend=backend)
  return quantized_dot(x, kernel, SWITCHBACK, backend=backend)


def _with_gathered_kernel(backend, x, w):
  kernel = gather_weight(w, SWITCHBACK, None, backend=backend)
  return quantized_dot(x, kernel, SWITCHBACK, backend=backend)


OPERATIONS = {
  "quantized_dot": functools.partial(_linear, "switchback"),
  "quantize_weight": _with_quantized_kernel,
  "gather_weight": _with_gathered_kernel,
  "layer_norm_mlp": functools.partial(_mlp, "switchback"),
  "layer_norm_dense": functools.partial(_qkv, "switchback"),
  "gated_mlp": functools.partial(_gated, "switchback"),
  "GatedMLP": functools.partial(_gated_layer, lambda b: GatedMLP(N, backend=b, add_residual=True)),
  "nnx GatedMLP": _gated_nnx,
  "LayerNormDense": _norm_dense,
  "LayerNormMLP": _layer_norm_mlp,
  "SwitchBackDense": functools.partial(_linen, lambda b: SwitchBackDense(N, backend=b)),
  "SwitchBackLinear": _nnx,
  "quantized_dot_general": functools.partial(
    _linen, lambda b: nn.Dense(N, dot_general=quantized_dot_general("switchback", backend=b))
  ),
}


def lowered(capability, backends):
  """The kernels that each public operation and its gradient call, for each backend."""
  results = {}
  with absent_gpu.mesh(capability, (1,), ("data",)) as mesh:
    arguments = _arguments(mesh, P(), P())
    for name, operation in OPERATIONS.items():
      for backend in backends:

        def loss(x, w, operation=operation, backend=backend):
          return jnp.sum(operation(backend, x, w).astype(jnp.float32))

        run = jax.jit(jax.value_and_grad(loss, (0, 1)))
        text = run.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
        targets = set(re.findall(r"stablehlo\.custom_call @([\w.$]+)", text))
        results[f"{name}, {backend}"] = sorted(targets)
  return results


def kernels(folder: pathlib.Path):
  """The number of dumped kernels, their 8-bit products and their spilled bytes."""
  ptx = {path: path.read_text() for path in folder.rglob("*.ptx")}
  reports = [path.read_text() for path in folder.rglob("*.ptxas")]
  products = r"(?:wgmma\.mma_async|mma\.sync)\S*?(?:m\d+n\d+k\d+)\S*"
  return {
    "ptx": len(ptx),
    "products": sorted({p for text in ptx.values() for p in re.findall(products, text)}),
    "reports": len(reports),
    "spilled": [int(n) for text in reports for n in re.findall(r"(\d+) bytes spill", text)],
  }


def main(capability, folder, slow):
  backends = [None, "triton", "xla"]
  if capability == 90 and jax.__version_info__ >= (0, 11):
    backends.append("mosaic")
  from tests.aot import step, update  # They take tests.aot.operations, and this is __main__.

  mesh_for = functools.partial(absent_gpu.mesh, capability)
  results = compiled(capability, slow)
  if not slow:
    results["token_sums"] = token_sums(capability)
  else:
    results["tile_configs"] = tile_configs(capability) if "mosaic" in backends else {}
    results["lowered"] = lowered(capability, backends)
    results["stacks"] = stacks(capability)
    results["update_bytes"] = update.update_bytes(mesh_for)
    results["sharded_update"] = {n: update.sharded_update(mesh_for, n) for n in (1024, 256)}
  if slow and capability == 90:
    results["steps"] = step.steps(mesh_for)
  return {**results, "kernels": kernels(folder)}


if __name__ == "__main__":
  folder = pathlib.Path(sys.argv[2])
  assert os.environ["MOSAIC_GPU_DUMP_TO"] == os.environ["JAX_TRITON_DUMP_DIR"] == str(folder)
  print(json.dumps(main(int(sys.argv[1]), folder, sys.argv[3] == "slow")))
