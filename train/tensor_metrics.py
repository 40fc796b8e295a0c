"""Statistics of chosen tensors, as metrics of a step: the config's `watch`.

The paper's figures of loss spikes plot a layer's gradients and RMS beside the loss (Wortsman et al.
2023, https://arxiv.org/abs/2304.13013, section 3.4). A scanned model stacks the tensors of its
layers, and each layer of a stack has metrics of its own, under the name that its tensor has in the
unrolled model: "image/block_3/fc2/kernel".
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sbjax.optim.stable_adamw import tensor_rms
from train.finetune import compiled, matches_nothing
from train.optimizer import STACK, stacked
from train.parallel.sharding import path_name


def tensor_metrics(
  watch: Sequence[str], gradients, opt_state, scale: jax.Array | None
) -> dict[str, jax.Array]:
  """Metrics of the parameters that a pattern matches; {} without patterns.

  "gradient_mean_abs/PATH", "gradient_max_abs/PATH", and "rms/PATH", StableAdamW's RMS of the last
  update, which frozen parameters and other optimizers do not have.

  Args:
    gradients: of the global batch, a tree like the parameters.
    scale: the loss scale, by which the gradients are divided; None: there is none.
  """
  if not watch:
    return {}
  patterns, rms, metrics = _patterns(watch), tensor_rms(opt_state, stacked), {}
  for name, g, layers in _parameters(gradients):
    watched = [i for i, layer in enumerate(layers) if _matches(patterns, name, layer)]
    if not watched:
      continue
    mean, largest = _mean_and_largest(g, tuple(range(layers != [name], g.ndim)))
    factor = 1 if scale is None else scale
    values = {"gradient_mean_abs": mean / factor, "gradient_max_abs": largest / factor}
    if name in rms:
      values["rms"] = rms[name]
    for statistic, of_layers in values.items():
      flat = of_layers.reshape(-1)
      metrics |= {f"{statistic}/{layers[i]}": flat[i] for i in watched}
  return metrics


def _mean_and_largest(g: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
  """The mean |g| and the largest over these axes, in float32; NaN if there is one."""
  sizes = jnp.abs(g.astype(jnp.float32))
  mean = jnp.mean(sizes, axes)
  # Between GPUs NCCL's maximum drops a NaN, and its sum does not.
  return mean, jnp.where(jnp.isnan(mean), mean, jnp.max(sizes, axes))


def check_watch(watch: Sequence[str], params) -> None:
  """Raises a ValueError for a pattern that matches none of the parameters, arrays or shapes."""
  names = [(name, layer) for name, _, layers in _parameters(params) for layer in layers]
  for pattern in _patterns(watch):
    if not any(_matches([pattern], *each) for each in names):
      raise matches_nothing("watch", pattern, [layer for _, layer in names])


def _parameters(tree) -> Iterator[tuple[str, Any, list[str]]]:
  """The name and the leaf of each parameter, and the names of the tensors it has.

  A stack has one for each layer, named as in the unrolled model.
  """
  for (path, x), is_stack in zip(
    jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(stacked(tree)), strict=True
  ):
    name = path_name(path)
    numbers = range(x.shape[0]) if is_stack else ()
    layers = [name.replace(f"/{STACK}/", f"/block_{i}/") for i in numbers]
    yield name, x, layers or [name]


def _matches(patterns: Sequence[re.Pattern], name: str, layer: str) -> bool:
  """Whether a pattern matches a parameter's own name, or the name of a tensor of it."""
  return any(pattern.fullmatch(name) or pattern.fullmatch(layer) for pattern in patterns)


def _patterns(watch: Sequence[str]) -> list[re.Pattern]:
  return [compiled("watch", pattern) for pattern in watch]
