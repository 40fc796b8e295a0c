"""Which products of models of other projects does `quantize_model` reach, without an edit?

  python -m benchmarks.models --sources=clones      # benchmarks/model_cases.py says of what

Counts the products (matmuls and convolutions) in the jaxpr of a gradient, and those of int8
operands; a scan's body counts once. Compares the gradient with the unquantized one's. Beside them
are the same of qwix: one rule, int8 for weights, activations and gradients. Needs qwix and
transformers<5. Adds lines to results/models.jsonl, for `python -m benchmarks.report`.
"""

import argparse
import dataclasses
import importlib.metadata
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import jaxprs_in_params

from benchmarks.model_cases import CASES, Case, commit
from benchmarks.tables import last, read
from benchmarks.timing import append, provenance
from sbjax import quantize_model

CONTENDERS = {
  "switchback": {"rules": "switchback"},
  "all": {"rules": "llm_int8", "activations": "llm_int8"},
}
REPOSITORIES = ("vision_transformer", "big_vision", "flax", "bonsai", "jimm")


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--sources", type=Path, required=True, help="a folder with the clones")
  parser.add_argument("--out", default="benchmarks/results/models.jsonl")
  parser.add_argument("--models", nargs="+", default=list(CASES), choices=CASES)
  args = parser.parse_args()
  jax.config.update("jax_disable_most_optimizations", True)  # Compilation takes most of the time.
  for name in args.models:
    append(args.out, [measure(name, args.sources)])


def measure(name: str, sources: Path) -> dict:
  case = CASES[name](sources)
  line = {"benchmark": "models", "model": name, "products": counts(case)[1]}
  expected = gradient(case)
  for contender, options in CONTENDERS.items():
    ours = dataclasses.replace(case, model=quantize_model(case.model, **options))
    line[contender] = compared(ours, expected)
  line["qwix"] = with_qwix(case, expected)
  print(line, flush=True)
  of = {folder: commit(sources / folder) for folder in REPOSITORIES}
  packages = {name: importlib.metadata.version(name) for name in ("flax", "transformers", "qwix")}
  return line | provenance() | {"commits": of, "packages": packages, "data": "random"}


def compared(case: Case, expected) -> dict:
  int8, products = counts(case)
  return {"int8": int8, "products": products, "cosine": cosine(gradient(case), expected)}


def with_qwix(case: Case, expected) -> dict:
  import qwix

  rule = qwix.QtRule(weight_qtype=jnp.int8, act_qtype=jnp.int8, bwd_qtype=jnp.int8)
  try:
    provider, inputs, options = qwix.QtProvider([rule]), (), {}
    if isinstance(case.model, nnx.Module):
      # It takes a call's inputs, and would call with them: without `rngs`, and changing a cache.
      inputs, options = case.args, {"skip_nnx_init": True}
    model = qwix.quantize_model(case.model, provider, *inputs, **options)
    return compared(dataclasses.replace(case, model=model), expected)
  except Exception as error:
    return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}


def loss(case: Case):
  """A function of the parameters, and parameters."""
  if isinstance(case.model, nnx.Module):
    graph, params, rest = nnx.split((case.model, case.options), nnx.Param, ...)

    def of_params(params):
      own = jax.tree.map(lambda x: x, rest)  # Variables of this trace, which a call may change.
      model, options = nnx.merge(graph, params, own)
      return scalar(case.output(model(*case.args, **options)))

    return of_params, filled(params)
  params = jax.jit(lambda key: case.model.init(key, *case.args, **case.options))(jax.random.key(0))
  return (
    lambda p: scalar(case.output(case.model.apply(p, *case.args, **case.options))),
    filled(params),
  )


def scalar(y):
  return jnp.sum(jnp.sin(y.astype(jnp.float32) + jnp.arange(y.shape[-1], dtype=jnp.float32)))


def filled(params):
  """The parameters, with normal numbers in those that begin at zero (gradients reach the rest)."""
  leaves, tree = jax.tree.flatten(params)
  keys = jax.random.split(jax.random.key(3), len(leaves))
  return tree.unflatten(
    [
      a if jnp.any(a != 0) else (jax.random.normal(k, a.shape) * 0.02).astype(a.dtype)
      for a, k in zip(leaves, keys, strict=True)
    ]
  )


def gradient(case: Case):
  function, params = loss(case)
  return jax.jit(jax.grad(function))(params)


def cosine(actual, expected) -> float:
  pairs = list(zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True))
  dot, squares, others = (
    sum(float(jnp.vdot(a.astype(jnp.float32), b.astype(jnp.float32))) for a, b in of)
    for of in (pairs, [(a, a) for a, _ in pairs], [(b, b) for _, b in pairs])
  )
  return dot / (squares * others) ** 0.5


def counts(case: Case) -> tuple[int, int]:
  """The int8 products, and all, of the gradient's jaxpr."""
  function, params = loss(case)
  found = [0, 0]

  def count(jaxpr):
    for eqn in jaxpr.eqns:
      if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
        found[0] += all(v.aval.dtype == jnp.int8 for v in eqn.invars)
        found[1] += 1
      for inner in jaxprs_in_params(eqn.params):
        count(inner)

  count(jax.make_jaxpr(jax.grad(function))(params).jaxpr)
  return found[0], found[1]


def table() -> list[str]:
  lines = [
    "| model, unedited | products | `switchback` | `llm_int8`, attention too | qwix |",
    "|---|---|---|---|---|",
  ]
  rows = last(read("models"), "model")
  for row in rows:
    cells = [_cell(row[name]) for name in (*CONTENDERS, "qwix")]
    lines.append(f"| {row['model']} | {row['products']} | {' | '.join(cells)} |")
  missing = CASES.keys() - {row["model"] for row in rows}
  return [*lines, "", f"Not run yet: {', '.join(sorted(missing))}."] if missing else lines


def _cell(found: dict) -> str:
  if "error" in found:
    return found["error"].partition(":")[0]
  return f"{found['int8']}, {found['cosine']:.4f}"


if __name__ == "__main__":
  main()
