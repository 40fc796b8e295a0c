"""What a layer's weight gradient is made of, taken from a model as a float32 computation has it."""

from collections.abc import Callable, Collection
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from sbjax.layers import SwitchBackDense
from sbjax.models.clip import CLIP
from sbjax.models.convert import unstack_blocks
from sbjax.recipes import FULL
from train.images import normalize


class Operands(NamedTuple):
  """The kernel's gradient is `x.T @ dy`."""

  x: jax.Array  # [tokens, K] float32
  dy: jax.Array  # [tokens, N] float32


def make_capture(model: CLIP, loss: Callable, layers: Collection[str]):
  """`capture(params, batch, key) -> {layer: Operands}`, pure and ready for `jax.jit`.

  The model's own products play no part: whatever its recipe and dtype are, this is its step in
  float32 on the same parameters and batch.

  Args:
    loss: one of train.loss.LOSSES.
    layers: "image/block_0/qkv", ...
    params, batch, key: as in train.step.
  """
  model = model.clone(
    recipe=FULL, backend="xla", dtype=jnp.float32, fused=False, scan=False, remat="full"
  )

  def watch(call, args, kwargs, context):
    """Keeps a watched layer's x, and adds to y a zero whose gradient is dy."""
    y, layer = call(*args, **kwargs), context.module
    if not isinstance(layer, SwitchBackDense) or context.method_name != "__call__":
      return y
    if "/".join(layer.path) not in layers:
      return y
    layer.sow("operands", "x", args[0])
    return layer.perturb("dy", y)

  def capture(params, batch, key):
    params = unstack_blocks(params)
    inputs = normalize(batch["image"]), batch["text"]
    options = {"train": True, "rngs": {"dropout": key}}

    def run(variables, *mutable):
      # A product of float32 is TF32 by default on a GPU.
      with nn.intercept_methods(watch), jax.default_matmul_precision("highest"):
        return model.apply({"params": params, **variables}, *inputs, **options, mutable=mutable)

    def loss_of(zeros):
      out, kept = run({"perturbations": zeros}, "operands")
      return loss(out)[0], kept["operands"]

    _, shapes = jax.eval_shape(lambda: run({}, "perturbations"))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes["perturbations"])
    with jax.default_matmul_precision("highest"):
      dys, xs = jax.grad(loss_of, has_aux=True)(zeros)
    xs, dys = flatten_dict(xs, sep="/"), flatten_dict(dys, sep="/")
    rows = lambda a: a.reshape(-1, a.shape[-1])  # noqa: E731
    return {
      layer: Operands(rows(xs[f"{layer}/x"][0]), rows(dys[f"{layer}/dy"])) for layer in layers
    }

  return capture
