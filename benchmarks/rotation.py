"""Which rotation of K should kernels have? Trained encoders with x and w rotated, then rounded.

  python -m benchmarks.rotation MODEL INPUTS --out=benchmarks/results/rotation.jsonl

MODEL and INPUTS are those of examples/trained_models. All linear layers of the blocks are rounded
at once, in float32 products of rounded numbers. One program serves all variants: a rotation is a
permutation, signs and a matrix for each 128 elements, and these are its arguments. Lines of --out
that are there are not measured again.
"""

import argparse
import json
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from benchmarks.commit import COMMIT, ROOT

sys.path.insert(0, str(ROOT / "examples" / "trained_models"))

import encoders
import inputs

TEMPERATURE = 0.05
BLOCKS = ("8", "16", "32", "64", "128", "8x4")
# Of w [N, K] for rows of w.T [N, K]: "column" is a scale for each output, "rows" for each input.
W = ("tensor", "", "column")
DX = ("tensor", "rows", "folded", "rotated back")


class Variant(NamedTuple):
  """A rotation, and roundings by their index in W and DX."""

  order: dict[int, np.ndarray]  # [K], of each K
  back: dict[int, np.ndarray]
  signs: dict[int, np.ndarray]
  matrix: np.ndarray  # [128, 128], symmetric
  w: int
  dx: int


def variant(block: str, signs: int | None, w: str, dx: str, widths) -> Variant:
  """block: the points of the transform, "none", or "8x4": 8 neighbours at 4 strides of K / 4."""
  points = 1 if block == "none" else 32 if block == "8x4" else int(block)
  matrix = np.ones((1, 1))
  while len(matrix) < points:
    matrix = np.block([[matrix, matrix], [matrix, -matrix]])
  order, flips = {}, {}
  for k in widths:
    order[k] = np.arange(k)
    if block == "8x4":
      order[k] = order[k].reshape(4, k // 32, 8).transpose(1, 0, 2).reshape(k)
    random = np.random.default_rng(signs)
    flips[k] = np.ones(k) if signs is None else random.choice([-1.0, 1.0], k)
  return Variant(
    order,
    {k: np.argsort(o) for k, o in order.items()},
    {k: f.astype(np.float32) for k, f in flips.items()},
    np.kron(np.eye(128 // points), matrix / points**0.5).astype(np.float32),
    W.index(w),
    DX.index(dx),
  )


def rotated(x, v: Variant):
  k = x.shape[-1]
  x = (x * v.signs[k])[..., v.order[k]]
  return (x.reshape(-1, k // 128, 128) @ v.matrix).reshape(x.shape)


def rotated_back(x, v: Variant):
  k = x.shape[-1]
  x = (x.reshape(-1, k // 128, 128) @ v.matrix).reshape(x.shape)
  return x[..., v.back[k]] * v.signs[k]


def scales(x, scaling, most):
  """Of x [rows, K], in its shape: one for all (0), for each column (1) or for each row (2)."""
  x = jnp.abs(x)
  absmax = jnp.stack(
    [jnp.broadcast_to(a, x.shape) for a in (jnp.max(x), jnp.max(x, 0), jnp.max(x, 1)[:, None])]
  )
  return jnp.maximum(absmax[scaling], 1e-30) / most


def codes(x, scale, dtype):
  x = x / scale
  return jnp.round(x) if dtype == jnp.int8 else x.astype(dtype).astype(jnp.float32)


def rowwise(x, dtype):
  scale = jnp.maximum(jnp.max(jnp.abs(x), 1, keepdims=True), 1e-30) / most(dtype)
  return codes(x, scale, dtype) * scale


def most(dtype) -> float:
  return 127.0 if dtype == jnp.int8 else float(jnp.finfo(dtype).max)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def dot(x, w, v: Variant, fp8: bool):
  """x [M, K] @ w.T for w [N, K]."""
  dtype = jnp.float8_e4m3fn if fp8 else jnp.int8
  w = rotated(w, v)
  scale = scales(w, v.w, most(dtype))
  return rowwise(rotated(x, v), dtype) @ (codes(w, scale, dtype) * scale).T


def _forward(x, w, v, fp8):
  return dot(x, w, v, fp8), (x, w, v)


def _backward(fp8, saved, dy):
  """With factors on dy, which are w's scales if they are folded, and else 1."""
  x, w, v = saved
  dtype, dy_dtype = (jnp.float8_e4m3fn, jnp.float8_e5m2) if fp8 else (jnp.int8, jnp.int8)
  rotates = v.dx == DX.index("rotated back")
  matrix = jnp.where(rotates, v.matrix, jnp.eye(128))
  w = jnp.where(rotates, rotated(w, v), w)
  scale = scales(w, jnp.minimum(v.dx, 2), most(dtype))
  factors = jnp.where(v.dx >= 2, scale[:, 0], 1.0)
  dx = rowwise(dy * factors, dy_dtype) @ (codes(w, scale, dtype) * (scale / factors[:, None]))
  dx = jnp.where(rotates, rotated_back(dx, v._replace(matrix=matrix)), dx)
  return dx, dy.T @ x, None


dot.defvjp(_forward, _backward)


def dense_by(v: Variant | None, fp8: bool):
  """`encoders.dense` of a variant; None rounds nothing."""

  def dense(p, name, x):
    w = p[f"{name}.weight"]
    rows = x.reshape(-1, x.shape[-1])
    y = rows @ w.T if v is None else dot(rows, w, v, fp8)
    return y.reshape(*x.shape[:-1], -1) + p[f"{name}.bias"]

  return dense


def functions(encode):
  """Jitted (features, gradient) of (fp8, params, v, ...)."""

  def features(fp8, params, v, batch):
    with mock.patch.object(encoders, "dense", dense_by(v, fp8)):
      return encode(params, batch)

  def loss(params, fp8, v, pair):
    first, second = (features(fp8, params, v, view) for view in pair)
    logits = first @ second.T / TEMPERATURE
    return -sum(jnp.mean(jnp.diag(jax.nn.log_softmax(logits, axis))) for axis in (0, 1)) / 2

  def gradient(fp8, params, v, pair):
    return ravel_pytree(jax.grad(loss)(params, fp8, v, pair))[0]

  return jax.jit(features, static_argnums=0), jax.jit(gradient, static_argnums=0)


def cosines(a, b):
  return np.sum(a * b, -1) / np.sqrt(np.sum(a * a, -1) * np.sum(b * b, -1))


def nearest(z):
  similar = z @ z.T
  np.fill_diagonal(similar, -2)
  return similar.argmax(1)


def with_error(x) -> list[float]:
  """The mean and its standard error."""
  return [float(np.mean(x)), float(np.std(x, ddof=1) / len(x) ** 0.5)]


def cases():
  """(block, signs, w, dx, fp8), the most important first."""
  yield from (("none", None, "tensor", "tensor", False), ("none", None, "column", "rows", False))
  yield ("none", None, "column", "folded", False)
  yield from ((block, None, "column", "folded", False) for block in BLOCKS)
  for block in ("16", "8x4"):
    yield from ((block, None, "column", dx, False) for dx in ("rows", "rotated back"))
  yield from ((block, 0, "column", "folded", False) for block in ("16", "8x4"))
  yield ("8", None, "column", "rows", False)
  yield ("none", None, "tensor", "tensor", True)
  yield from ((block, None, "column", "folded", True) for block in ("none", "16", "8x4"))
  yield from ((block, 0, "column", "folded", False) for block in ("8", "32", "64", "128"))
  yield from ((block, None, "column", "rotated back", False) for block in ("8", "128"))
  yield from (
    (block, seed, "column", "folded", False) for seed in (1, 2) for block in ("8x4", "16")
  )


def main():
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("model", type=Path)
  parser.add_argument("inputs", type=Path)
  parser.add_argument("--out", type=Path, required=True)
  parser.add_argument("--count", type=int, default=128, help="pairs of texts, or images")
  parser.add_argument("--batches", type=int, default=4, help="of the gradient")
  parser.add_argument("--batch", type=int, default=32, help="pairs of a gradient")
  parser.add_argument("--image_size", type=int, default=224)
  options = parser.parse_args()
  kind, encode, params = encoders.load(options.model)
  if kind == encoders.TEXT:
    views = inputs.texts(options.model, options.inputs, options.count)
  else:
    views = inputs.images(options.inputs, options.count, options.image_size)
  everything, *pair = jax.device_get(views)
  n = options.batch
  batches = [
    jax.tree.map(lambda x, i=i: x[i * n : (i + 1) * n], pair) for i in range(options.batches)
  ]
  features, gradient = functions(encode)

  def outputs(fp8, v):
    size = len(jax.tree.leaves(everything)[0])
    parts = [jax.tree.map(lambda x, i=i: x[i : i + 64], everything) for i in range(0, size, 64)]
    return np.concatenate([features(fp8, params, v, part) for part in parts])

  exact, exact_gradients = (
    outputs(False, None),
    [np.asarray(gradient(False, params, None, b)) for b in batches],
  )
  widths = {x.shape[1] for name, x in params.items() if name.startswith("encoder") and x.ndim == 2}
  lines = options.out.read_text().splitlines() if options.out.exists() else []
  done = [json.loads(line) for line in lines]
  for case in cases():
    named = dict(zip(("block", "signs", "w", "dx", "fp8"), case, strict=True))
    row = {"benchmark": "rotation", "model": kind, **named}
    if any(row.items() <= line.items() for line in done):
      continue
    *how, fp8 = case
    v = variant(*how, widths)
    z = outputs(fp8, v)
    found = [
      cosines(np.asarray(gradient(fp8, params, v, b)), g)
      for b, g in zip(batches, exact_gradients, strict=True)
    ]
    row |= {
      "outputs": len(z),
      "batches": len(batches),
      "batch": n,
      "output_cosine": with_error(cosines(z, exact)),
      "same_neighbour": with_error(nearest(z) == nearest(exact)),
      "gradient_cosine": with_error(found),
      "gradient_cosines": [float(x) for x in found],
      "jax": jax.__version__,
      "commit": COMMIT,
      "command": "python -m benchmarks.rotation "
      + shlex.join([options.model.name, options.inputs.name, *sys.argv[3:]]),
    }
    with options.out.open("a") as file:
      file.write(json.dumps(row) + "\n")
    print(case, row["output_cosine"], row["same_neighbour"][0], row["gradient_cosine"], flush=True)


if __name__ == "__main__":
  main()
