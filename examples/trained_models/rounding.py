"""What 8 bits change in a trained encoder: its outputs, its neighbours and its gradient.

  python -m examples.trained_models.rounding MODEL INPUTS --out=trained_models.jsonl

Run it from the root of this repository. MODEL is a folder as transformers saves it, of a BERT such
as all-MiniLM-L6-v2 or of a DINOv2. INPUTS is a file of texts, two sentences of one meaning in a
line, separated by a tab; or a folder of images. All linear layers of the blocks are rounded at
once; the recipe "suggest_rules" stands for the rules that it finds for the last batch. Needs
safetensors, tokenizers and pillow. --out gets a line of JSON for each recipe.
"""

import argparse
import json
import shlex
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from benchmarks.commit import COMMIT
from examples.trained_models import encoders, inputs
from sbjax import quantize_model, suggest_rules
from sbjax.convert.matmuls import recipe_name
from sbjax.convert.rounding import ALL, in_groups, roundings, sum_group
from sbjax.convert.switches import forward_rounding

RECIPES = ["switchback", "switchback_q", "switchback_c", "fp8_switchback", "full"]
SUGGESTED = "suggest_rules"
GROUP = 2  # Batches of a group; three groups or more make an interval.


def main():
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("model", type=Path)
  parser.add_argument("inputs", type=Path)
  parser.add_argument("--out", type=Path, required=True)
  parser.add_argument("--recipes", nargs="+", default=RECIPES, help="full: layers in bfloat16")
  parser.add_argument("--count", type=int, default=384, help="pairs of texts, or images")
  parser.add_argument("--batch", type=int, default=32, help="pairs of a gradient")
  parser.add_argument("--image_size", type=int, default=224)
  parser.add_argument("--critical_batch", action=argparse.BooleanOptionalAction, default=True)
  options = parser.parse_args()
  kind, encode, params = encoders.load(options.model)
  if kind == encoders.TEXT:
    whole, *pairs = inputs.texts(options.model, options.inputs, options.count)
  else:
    whole, *pairs = inputs.images(options.inputs, options.count, options.image_size)
  batches, few = inputs.split(pairs, options.batch), inputs.split(whole, options.batch)
  few = few[: 256 // options.batch]
  z, exact = features(encode, params, few), gradient_of(encode, params)
  rules = {recipe: rules_of(recipe) for recipe in options.recipes}
  if SUGGESTED in rules:
    rules[SUGGESTED] = suggested(encode, params, batches[-1])
  by_recipe = {recipe: rounded(encode, own) for recipe, own in rules.items()}
  ours = {recipe: gradient_of(encode, params) for recipe, encode in by_recipe.items()}
  groups = []
  if options.critical_batch:
    groups = [sum_group(exact, ours, some) for some in in_groups(batches, GROUP)]
    groups = [each for each in groups if each.batches == GROUP]
  for recipe in options.recipes:
    row = {
      "benchmark": "trained_models",
      "model": options.model.name,
      "recipe": recipe,
      **similar(features(by_recipe[recipe], params, few), z),
      "gradient_cosine": with_error(gradient_cosines(exact, ours[recipe], batches[:4])),
    }
    if groups:
      sizes = roundings(groups, recipe, options.batch)[ALL].critical_batch
      row["critical_batch"] = [float(f"{n:.3g}") if np.isfinite(n) else None for n in sizes]
    if recipe == SUGGESTED:
      row["rules"] = {pattern: recipe_name(own) for pattern, own in rules[recipe].rules}
    if recipe == options.recipes[0] not in ("full", SUGGESTED):
      alone = forward_rounding(encode, params, few[:1], rules[recipe]).alone
      errors = sorted(((e["output"], layer) for layer, e in alone.items()), reverse=True)
      row["alone"] = {layer: round(error, 4) for error, layer in errors[:3]}
    print(json.dumps(row), flush=True)
    command = shlex.join([options.model.name, options.inputs.name, *sys.argv[3:]])
    row |= {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "commit": COMMIT}
    row["command"] = f"python -m examples.trained_models.rounding {command}"
    with options.out.open("a") as file:
      file.write(json.dumps(row) + "\n")


def rules_of(recipe: str):
  return [("encoder.layer.*", recipe)]


def suggested(encode, params, pair):
  """The rules for the features of a batch of pairs and the gradient of their loss."""

  def loss(params, pair):
    z = [encode(params, view) for view in pair]
    return contrastive(*z), z

  return suggest_rules(params, pair, loss, verbose=True)


def rounded(encode, rules):
  if rules == rules_of("full"):
    return lambda params, batch: encode(encoders.in_bfloat16(params), batch)
  return quantize_model(encode, rules)


def contrastive_loss(encode, params, pair):
  return contrastive(*(encode(params, view) for view in pair))


def contrastive(first, second, temperature=0.05):
  logits = first @ second.T / temperature
  return -sum(jnp.mean(jnp.diag(jax.nn.log_softmax(logits, axis))) for axis in (0, 1)) / 2


def gradient_of(encode, params):
  return partial(jax.jit(jax.grad(partial(contrastive_loss, encode))), params)


def features(encode, params, batches) -> np.ndarray:
  encode = jax.jit(encode)
  return np.concatenate([encode(params, batch) for batch in batches])


def similar(ours, exact) -> dict:
  same = nearest(ours) == nearest(exact)
  found = {"output_cosine": cosines(ours, exact), "same_neighbour": same}
  return {"outputs": len(ours)} | {name: with_error(x) for name, x in found.items()}


def gradient_cosines(exact, ours, batches) -> np.ndarray:
  pairs = (np.stack([ravel_pytree(f(batch))[0] for batch in batches]) for f in (ours, exact))
  return cosines(*pairs)


def with_error(x: np.ndarray) -> list[float]:
  """The mean and its standard error."""
  return [float(x.mean()), float(x.std(ddof=1) / len(x) ** 0.5)]


def cosines(a, b) -> np.ndarray:
  return np.sum(a * b, 1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


def nearest(z) -> np.ndarray:
  return np.argmax(z @ z.T - 2 * np.eye(len(z)), axis=1)


if __name__ == "__main__":
  main()
